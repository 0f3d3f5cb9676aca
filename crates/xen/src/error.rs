//! Why Xen cannot be asked, or managed.

use crate::library;

/// Why Xen cannot be managed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XenError {
    /// Not started by Xen, or no dom0.
    #[error("this system is not dom0 of a Xen host: {cause}. `homenode doctor` says what runs here")]
    NotDom0 {
        /// What is missing.
        cause: String,
    },
    /// Whether it is one cannot be told.
    #[error("whether this system is dom0 of a Xen host is not known: {cause}")]
    Unknown {
        /// What the system said.
        cause: String,
    },
    /// It is one, and Xen's own file system does not say so.
    #[error(
        "this system is dom0 of a Xen host, and xenfs does not say so ({cause}). Mount it: `mount -t xenfs xenfs /proc/xen`; as a service \
         Homenode needs its drop-in for dom0 besides, `xen.conf` (docs/XEN.md)"
    )]
    NoXenfs {
        /// What the system said.
        cause: String,
    },
    /// libxenctrl or libxenstore is not there.
    #[error(
        "Xen's library cannot be used ({cause}). Install Xen's tools (Debian: `apt install xen-utils`); Homenode knows those of Xen {}",
        library::versions()
    )]
    NoLibrary {
        /// What the loader said.
        cause: String,
    },
    /// The hypervisor does not let us.
    #[error("Xen's hypervisor cannot be asked: {cause}. Run as root in dom0, with xenstored running")]
    NotPermitted {
        /// What the system said.
        cause: String,
    },
    /// What it says of the host makes no machine.
    #[error("what Xen says of this host makes no machine: {cause}")]
    NoMachine {
        /// What is wrong.
        cause: String,
    },
    /// A call failed.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {cause}")]
pub struct CallError {
    /// Of libxenctrl.
    pub call: &'static str,
    /// What the system said.
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
