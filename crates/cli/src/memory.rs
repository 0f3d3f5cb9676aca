//! `homenode memory`: VMs' memory floors, and how much memory each has.

use clap::Subcommand;
use homenode_api::Request;
use homenode_api::answer::FloorSet;
use homenode_screens::printable::OneLine;
use homenode_units::Bytes;

use crate::ask::{ask_agent, vms};
use crate::options::{AgentArgs, OrNone, ShowArgs, Size};
use crate::print::{or_dash, print_json, say_vms};

/// Options of `memory`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct MemoryArgs {
    #[command(subcommand)]
    pub command: Option<MemoryCommand>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Commands about VMs' memory.
#[derive(Debug, Subcommand)]
pub(crate) enum MemoryCommand {
    /// Set the least memory that a VM keeps, or let it keep all
    #[command(after_help = "Examples:\n  homenode memory set web 2GiB\n  homenode memory set web none")]
    Set(FloorArgs),
    /// Show how much memory each VM has, and why
    Show(ShowArgs),
}

/// Options of `memory set`.
#[derive(Debug, clap::Args)]
pub(crate) struct FloorArgs {
    /// The VM's name
    pub vm: String,
    /// Memory that the VM always keeps (`2GiB`, `2G`; a bare number is MiB), or `none`: the VM keeps all of its memory
    pub floor: OrNone<Size>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// `homenode memory`.
///
/// # Errors
/// No agent, no such VM, or a floor that could not be set.
pub(crate) fn run(args: &MemoryArgs) -> anyhow::Result<()> {
    match &args.command {
        None => show(None, &args.agent),
        Some(MemoryCommand::Show(args)) => show(args.vm.as_deref(), &args.agent),
        Some(MemoryCommand::Set(args)) => set(args),
    }
}

fn set(args: &FloorArgs) -> anyhow::Result<()> {
    let floor = args.floor.into_option().map(|Size(floor)| floor);
    let vm = args.vm.clone();
    let answer: FloorSet = ask_agent(
        args.agent.dir(),
        &Request::FloorSet {
            vm,
            floor_bytes: floor,
        },
    )?;
    if args.agent.json() {
        return print_json("floor-set", &answer);
    }
    match floor {
        Some(floor) => say!("memory may be taken from {} down to {floor}", OneLine(&args.vm)),
        None => say!("{} keeps all of its memory", OneLine(&args.vm)),
    }
    if let Some(note) = &answer.note {
        say!("note: {}", OneLine(note));
    }
    Ok(())
}

fn show(vm: Option<&str>, agent: &AgentArgs) -> anyhow::Result<()> {
    let answer = vms(agent.dir(), vm)?;
    if agent.json() {
        return print_json("vms", &answer);
    }
    let bytes = |bytes: Option<Bytes>| or_dash(bytes, |bytes| bytes.to_string());
    let rows = answer.vms.iter().map(|vm| {
        let status = &vm.memory;
        vec![
            vm.name.clone(),
            vm.memory_bytes.to_string(),
            bytes(status.limit_bytes),
            bytes(status.maximum_bytes),
            bytes(status.floor_bytes),
            bytes(status.need_bytes),
            bytes(status.usable_bytes),
            status.why.clone().unwrap_or_default(),
        ]
    });
    say_vms(
        &["VM", "has", "limit", "of", "floor", "needs", "usable", ""],
        rows,
    );
    Ok(())
}
