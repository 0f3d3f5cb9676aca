//! Real hosts: which software manages a host's VMs, and what the agent needs from that software besides the host contract.

use std::path::Path;

use homenode_kvm::{ConnectError, KvmHost, Leftovers, Vms};
use homenode_machine::Machine;
use homenode_undo::journal::Journal;
use homenode_undo::{Options, RealHost, Undone};
use homenode_xen::{XenError, XenHost};

/// The software that runs the VMs of a real host. Its text form is that of `--host`: `libvirt:URI`, `qemu` or `xen`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Managed {
    /// KVM.
    Kvm(Vms),
    /// Xen, of which this system is dom0.
    Xen,
}

/// Why no manager of VMs was found on this host.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// A Xen host that lacks something; it must not be treated as a KVM host.
    #[error(transparent)]
    Xen(#[from] XenError),
    /// No manager of KVM's VMs was found; carries libvirt's error.
    #[error(transparent)]
    Kvm(#[from] ConnectError),
}

impl Managed {
    /// Detects the manager on this host: Xen in dom0, else libvirt if it answers, else plain QEMU.
    ///
    /// # Errors
    /// If there is no manager.
    pub fn here() -> Result<Managed, FindError> {
        match homenode_xen::is_dom0(Path::new("/"))? {
            true => Ok(Managed::Xen),
            false => Ok(Managed::Kvm(Vms::here()?)),
        }
    }

    /// Reads the machine that the VMs run on.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn machine(&self) -> anyhow::Result<Machine> {
        let root = Path::new("/");
        Ok(match self {
            Managed::Kvm(_) => homenode_machine_files::sysfs::read(root)?,
            Managed::Xen => XenHost::machine_here(root)?,
        })
    }

    /// Connects to the host: finds the VMs and takes over the journal.
    ///
    /// # Errors
    /// A sentence for the operator, with the remedy.
    pub fn connect(&self, options: Options) -> anyhow::Result<Box<dyn RealHost>> {
        Ok(match self {
            Managed::Kvm(vms) => Box::new(KvmHost::connect(vms, options)?),
            Managed::Xen => Box::new(XenHost::connect(options).map_err(anyhow::Error::from_boxed)?),
        })
    }

    /// Returns the function that undoes what a dead agent left behind.
    pub fn undoing(&self, root: &Path) -> Box<dyn FnMut(&mut Journal) -> Undone> {
        match self {
            Managed::Kvm(vms) => {
                let mut leftovers = Leftovers::new(vms, root);
                Box::new(move |journal| leftovers.undo(journal))
            }
            Managed::Xen => {
                let mut leftovers = homenode_xen::Leftovers::new(root);
                Box::new(move |journal| leftovers.undo(journal))
            }
        }
    }
}

/// Reads the machine that this system runs on: in dom0, as the hypervisor sees it.
///
/// # Errors
/// If it cannot be read.
pub fn machine_here() -> anyhow::Result<Machine> {
    let root = Path::new("/");
    Ok(match homenode_xen::is_dom0(root)? {
        true => XenHost::machine_here(root)?,
        false => homenode_machine_files::sysfs::read(root)?,
    })
}

/// Runs the helper process that moves a Xen domain's memory. The agent starts this process.
///
/// # Errors
/// If the move could not begin.
pub fn move_domain() -> anyhow::Result<()> {
    homenode_xen::carry_out().map_err(anyhow::Error::msg)
}

/// Runs the helper process that relays the stream in which `xl` sends the domain.
///
/// # Errors
/// If relaying failed: the domain then stays where it is.
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
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Managed> {
        match text {
            "xen" => Ok(Managed::Xen),
            _ => text
                .parse()
                .map(Managed::Kvm)
                .map_err(|error| anyhow::anyhow!("{error}, nor `xen`")),
        }
    }
}
