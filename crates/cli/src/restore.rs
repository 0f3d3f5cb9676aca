//! `homenode release` and the guard: undoing what an agent left behind.

use std::io::Write as _;
use std::path::PathBuf;

use homenode_agent::managed::Managed;
use homenode_kvm::Vms;
use homenode_screens::printable;
use homenode_units::Ns;

use crate::options::AgentArgs;
use crate::print::print_json;

/// Options of `release`.
#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseArgs {
    /// Manager of the VMs: `libvirt[:URI]`, `qemu` or `xen`; default: as for `run`
    #[arg(long, value_name = "HOST")]
    pub host: Option<Managed>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `guard`.
#[derive(Debug, clap::Args)]
pub(crate) struct GuardArgs {
    /// Manager of the VMs: `libvirt[:URI]`, `qemu` or `xen`
    #[arg(long)]
    pub host: Managed,
    /// Directory of the journal
    #[arg(long)]
    pub state: PathBuf,
    /// Time that a new agent has to take over
    #[arg(long)]
    pub grace: Ns,
}

/// Undoes what an agent left in force and prints the result. If the manager of the VMs is not named, tries libvirt, if it
/// answers, and then QEMU itself.
pub(crate) fn release(args: &ReleaseArgs) -> anyhow::Result<()> {
    let release = |vms: &Managed| homenode_agent::live::release(vms, args.agent.dir());
    let released = match &args.host {
        Some(vms) => release(vms),
        None => {
            let first = Managed::here()?;
            release(&first).or_else(|why| match first {
                Managed::Kvm(Vms::Libvirt(_)) => release(&Managed::Kvm(Vms::Qemu)).map_err(|_| why),
                Managed::Kvm(Vms::Qemu) | Managed::Xen => Err(why),
            })
        }
    }?;
    if args.agent.json() {
        print_json("released", &released)?;
        return released
            .lost_journal
            .map_or(Ok(()), |lost| Err(anyhow::anyhow!(lost)));
    }
    for notice in &released.notices {
        // The reader may be gone.
        let _ = writeln!(std::io::stderr(), "homenode: {}", printable::Sentence(notice));
    }
    match released.count {
        0 => say!("Nothing to undo"),
        1 => say!("undid homenode's changes to 1 VM"),
        count => say!("undid homenode's changes to {count} VMs"),
    }
    match released.lost_journal {
        Some(lost) => Err(anyhow::anyhow!(lost)),
        None => Ok(()),
    }
}

/// Runs the guard. A thread writes its messages, because a slow reader must not delay the undoing.
pub(crate) fn guard(args: &GuardArgs) -> anyhow::Result<()> {
    let (said, sentences) = std::sync::mpsc::sync_channel::<String>(64);
    std::thread::spawn(move || {
        for sentence in sentences {
            // The reader may be gone.
            let _ = writeln!(
                std::io::stderr(),
                "homenode guard: {}",
                printable::Sentence(&sentence)
            );
        }
    });
    let say = |text: &str| drop(said.try_send(text.to_owned()));
    homenode_agent::live::guard(&args.host, &args.state, args.grace, say)
}
