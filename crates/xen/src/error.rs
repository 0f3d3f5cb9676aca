//! Why Xen cannot be called, or managed.

use crate::library;

/// Why Xen cannot be managed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum XenError {
    /// Not started by Xen, or not dom0.
    #[error("this system is not dom0 of a Xen host: {cause}. `homenode doctor` says what runs here")]
    NotDom0 {
        /// What is missing.
        cause: String,
    },
    /// It is unknown whether this is dom0.
    #[error("whether this system is dom0 of a Xen host is not known: {cause}")]
    Unknown {
        /// The system's error.
        cause: String,
    },
    /// It is dom0, and Xen's own file system does not show it.
    #[error(
        "this system is dom0 of a Xen host, and xenfs does not say so ({cause}). Mount it: `mount -t xenfs xenfs /proc/xen`; as a service \
         Homenode needs its drop-in for dom0 besides, `xen.conf` (docs/XEN.md)"
    )]
    NoXenfs {
        /// The system's error.
        cause: String,
    },
    /// libxenctrl or libxenstore is not there.
    #[error(
        "Xen's library cannot be used ({cause}). Install Xen's tools (Debian: `apt install xen-utils`); Homenode knows those of Xen {}",
        library::versions()
    )]
    NoLibrary {
        /// The loader's message.
        cause: String,
    },
    /// The hypervisor does not permit it.
    #[error("Xen's hypervisor cannot be asked: {cause}. Run as root in dom0, with xenstored running")]
    NotPermitted {
        /// The system's error.
        cause: String,
    },
    /// Its description of the host makes no machine.
    #[error("Xen's figures of this host make no machine: {cause}")]
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
    /// The call to libxenctrl.
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
