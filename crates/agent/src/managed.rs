//! Real hosts: who runs a host's VMs, and what the agent needs of it beside the contract.

use std::path::Path;

use homenode_host::Host;
use homenode_linux::journal::Journal;
use homenode_linux::{CarriedOver, ConnectError, Legacy, LinuxHost, Options, Undone, Vms};
use homenode_machine::Machine;
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

/// What the agent needs of a real host beside the contract: an end in good order, whatever happens.
pub trait RealHost: Host {
    /// What the operator should know and no sample carries. Each is given once.
    fn take_notices(&mut self) -> Vec<String>;
    /// Says whether there is a guard that undoes if this process ends. While there is none nothing is changed but given back.
    fn set_guarded(&mut self, is_guarded: bool);
    /// What an earlier agent left of VMs that still run.
    fn carried_over(&self) -> Vec<CarriedOver>;
    /// Restores every VM that was touched, as the guard would; what cannot be restored is said and stays journalled.
    fn restore(&mut self) -> Undone;
    /// Lifts every limit of the agent's; what cannot be lifted is said and stays journalled.
    fn lift_limits(&mut self) -> Vec<String>;
    /// Whether its locks are where another agent would look for them.
    fn owns_its_state(&self) -> bool;
    /// Why the journal does not say all that an earlier agent changed, if so.
    fn lost_journal(&self) -> Option<&str>;
}

macro_rules! real_host {
    ($host:ty) => {
        impl RealHost for $host {
            fn take_notices(&mut self) -> Vec<String> {
                self.take_notices()
            }
            fn set_guarded(&mut self, is_guarded: bool) {
                self.set_guarded(is_guarded);
            }
            fn carried_over(&self) -> Vec<CarriedOver> {
                self.carried_over()
            }
            fn restore(&mut self) -> Undone {
                self.restore()
            }
            fn lift_limits(&mut self) -> Vec<String> {
                self.lift_limits()
            }
            fn owns_its_state(&self) -> bool {
                self.owns_its_state()
            }
            fn lost_journal(&self) -> Option<&str> {
                self.lost_journal()
            }
        }
    };
}

real_host!(LinuxHost);
real_host!(XenHost);

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
            Managed::Kvm(vms) => Box::new(LinuxHost::connect(vms, options)?),
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
