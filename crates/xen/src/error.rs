//! Why Xen cannot be called, or managed.

use homenode_host::Failure;
use homenode_undo::journal::{JournalError, Unreadable};
use homenode_units::{CpuSet, NodeSet};

use crate::library::{self, LoadError};
use crate::xl::XlError;

/// Why Xen cannot be managed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XenError {
    /// Xen did not start this system, or it is not dom0.
    #[error("this system is not dom0 of a Xen host: {cause}. `homenode doctor` says what runs here")]
    NotDom0 {
        /// The missing evidence that this is dom0.
        cause: String,
    },
    /// The files do not show whether this is dom0.
    #[error("it is unknown whether this system is dom0 of a Xen host: {cause}")]
    Unknown {
        /// The system's error.
        cause: String,
    },
    /// This system is dom0, but Xen's own file system does not show it.
    #[error(
        "this system is dom0 of a Xen host, but xenfs does not show it ({cause}). Mount it: `mount -t xenfs xenfs /proc/xen`; as a service \
         Homenode also needs its drop-in for dom0, `xen.conf` (docs/XEN.md)"
    )]
    NoXenfs {
        /// The system's error.
        cause: String,
    },
    /// libxenctrl or libxenstore is missing.
    #[error(
        "Xen's library cannot be used ({0}). Install Xen's tools (Debian: `apt install xen-utils`); Homenode supports those of Xen {versions}",
        versions = library::versions()
    )]
    NoLibrary(LoadError),
    /// The hypervisor does not permit calls.
    #[error("cannot call Xen's hypervisor: {cause}. Run as root in dom0, with xenstored running")]
    NotPermitted {
        /// The system's error.
        cause: String,
    },
    /// Xen's description of the host does not make a valid machine.
    #[error("what Xen reports about this host is not a valid machine: {cause}")]
    NoMachine {
        /// The fault in Xen's description.
        cause: String,
    },
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// A call that has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {cause}")]
pub struct CallError {
    /// The function of libxenctrl.
    pub call: &'static str,
    /// The system's error.
    pub cause: String,
}

impl CallError {
    pub fn last(call: &'static str) -> CallError {
        CallError {
            call,
            cause: std::io::Error::last_os_error().to_string(),
        }
    }
}

/// Why a domain cannot be resumed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ResumeError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why xenstore was not read or written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    #[error("xenstored does not answer")]
    Silent,
    #[error("the thread that asks xenstored has ended")]
    NotAsked,
    #[error(transparent)]
    Call(#[from] CallError),
}

/// Why the target of a balloon is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("xenstored does not report the domain's memory target: {0}")]
pub struct NoTarget(pub StoreError);

/// Why something on a domain could not be set or restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LeverError {
    #[error("{0:?}")]
    Refused(Failure),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error(transparent)]
    Journal(#[from] JournalError),
    #[error(transparent)]
    Unreadable(#[from] Unreadable),
    #[error(transparent)]
    NoTarget(#[from] NoTarget),
    #[error(transparent)]
    Xl(#[from] XlError),
    #[error("the domain is still being created, and may yet get the cap that its earlier run had")]
    BeingBuilt,
    #[error("the domain has ended")]
    Ended,
    #[error("the domain has no balloon")]
    NoBalloon,
    #[error("vCPU {index} may run on CPUs {seen}, not on {wanted}")]
    Vcpu {
        index: u16,
        seen: CpuSet,
        wanted: CpuSet,
    },
    #[error("the domain's memory comes from nodes {seen}, not from {wanted}")]
    Nodes { seen: NodeSet, wanted: NodeSet },
    #[error("the domain's cap is {seen} percent, not {wanted}")]
    Cap { seen: u16, wanted: u16 },
    #[error("the domain's memory target is {seen} KiB, not {wanted} KiB")]
    Memory { seen: u64, wanted: u64 },
    #[error("{}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Several(Vec<LeverError>),
}

impl LeverError {
    /// Returns all of these as one error, or `Ok` if there are none.
    pub fn joined(failures: Vec<LeverError>) -> Result<(), LeverError> {
        match failures.is_empty() {
            true => Ok(()),
            false => Err(LeverError::Several(failures)),
        }
    }
}
