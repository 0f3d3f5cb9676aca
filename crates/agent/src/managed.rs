//! Real hosts: who runs a host's VMs, and what the agent needs of it beside the contract.

use std::path::Path;

use homenode_kvm::{ConnectError, KvmHost, Legacy, Vms};
use homenode_machine::Machine;
use homenode_undo::journal::Journal;
use homenode_undo::{Options, RealHost, Undone};
use homenode_xen::{XenError, XenHost};

/// Who runs the VMs of a real host. Written as in `--host`: `libvirt:URI`, `qemu` or `xen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Managed {
    /// KVM.
    Kvm(Vms),
    /// Xen, of which this system is dom0.
    Xen,
}

/// Why nobody is found who runs the VMs of this host.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// It is a Xen host that lacks something, and must not be taken for one of KVM.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// It has none of KVM's: what libvirt said.
    #[error(transparent)]
    Kvm(#[from] ConnectError),
}

impl Managed {
    /// Those of this host: Xen's in its dom0; else libvirt's if it answers, else those that run without it.
    ///
    /// # Errors
    /// Why there are none.
    pub fn here() -> Result<Managed, FindError> {
        match homenode_xen::is_dom0(Path::new("/"))? {
            true => Ok(Managed::Xen),
            false => Ok(Managed::Kvm(Vms::here()?)),
        }
    }

    /// The machine that they run on.
    ///
    /// # Errors
    /// What cannot be read.
    pub fn machine(&self) -> anyhow::Result<Machine> {
        let root = Path::new("/");
        Ok(match self {
            Managed::Kvm(_) => homenode_machine_files::sysfs::read(root)?,
            Managed::Xen => XenHost::machine_here(root)?,
        })
    }

    /// Finds the VMs, and takes over the journal.
    ///
    /// # Errors
    /// Each is a sentence with its remedy.
    pub fn connect(&self, options: Options) -> anyhow::Result<Box<dyn RealHost>> {
        Ok(match self {
            Managed::Kvm(vms) => Box::new(KvmHost::connect(vms, options)?),
            Managed::Xen => Box::new(XenHost::connect(options).map_err(anyhow::Error::from_boxed)?),
        })
    }

    /// What undoes what an agent that is no more left behind.
    pub fn undoing(&self, root: &Path) -> Box<dyn FnMut(&mut Journal) -> Undone> {
        match self {
            Managed::Kvm(vms) => {
                let mut legacy = Legacy::new(vms, root);
                Box::new(move |journal| legacy.undo(journal))
            }
            Managed::Xen => {
                let mut legacy = homenode_xen::Legacy::new(root);
                Box::new(move |journal| legacy.undo(journal))
            }
        }
    }
}

/// The machine that this system runs on: in dom0 as the hypervisor sees it.
///
/// # Errors
/// What cannot be read.
pub fn machine_here() -> anyhow::Result<Machine> {
    let root = Path::new("/");
    Ok(match homenode_xen::is_dom0(root)? {
        true => XenHost::machine_here(root)?,
        false => homenode_machine_files::sysfs::read(root)?,
    })
}

/// The life of a process that moves a Xen domain's memory, started by the agent.
///
/// # Errors
/// It could not begin.
pub fn move_domain() -> anyhow::Result<()> {
    homenode_xen::carry_out().map_err(anyhow::Error::msg)
}

/// The life of the process that passes on what `xl` sends of that domain.
///
/// # Errors
/// Why it could not: the domain then stays where it is.
pub fn move_stream() -> anyhow::Result<()> {
    homenode_xen::relay().map_err(anyhow::Error::msg)
}

impl std::fmt::Display for Managed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Managed::Kvm(vms) => vms.fmt(f),
            Managed::Xen => f.write_str("xen"),
        }
    }
}

impl std::str::FromStr for Managed {
    type Err = String;

    fn from_str(text: &str) -> Result<Managed, String> {
        match text {
            "xen" => Ok(Managed::Xen),
            _ => text
                .parse()
                .map(Managed::Kvm)
                .map_err(|error| format!("{error}, nor `xen`")),
        }
    }
}
