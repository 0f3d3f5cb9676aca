//! The manager of a host's VMs, and why it cannot be reached.

use std::path::Path;

use homenode_kernel::read::ReadError;
use homenode_undo::acting::TakeOverError;
use homenode_undo::heartbeat::Heartbeat;

use crate::libvirt::Libvirt;
use crate::manager::Manager;
use crate::qemu::{self, Qemu};

/// Address of this host's system libvirt.
pub const DEFAULT_URI: &str = "qemu:///system";

/// Manager of a host's VMs, which finds and changes them. In `--host` it is written `libvirt:URI` or `qemu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vms {
    /// libvirt at this address.
    Libvirt(String),
    /// No libvirt: QEMU's processes and their monitors.
    Qemu,
}

impl Vms {
    /// Returns the system's libvirt as the manager.
    pub fn of_libvirt() -> Vms {
        Vms::Libvirt(DEFAULT_URI.to_owned())
    }

    /// Returns the manager of this host's VMs: libvirt if it answers, else QEMU if VMs run without libvirt.
    ///
    /// # Errors
    /// The error that libvirt reported, if there are no VMs at all.
    pub fn here() -> Result<Vms, ConnectError> {
        match Vms::of_libvirt().probe() {
            Ok(()) => Ok(Vms::of_libvirt()),
            Err(_) if qemu::has_vms(Path::new("/")) => Ok(Vms::Qemu),
            Err(error) => Err(error),
        }
    }

    /// Checks that the manager can be reached.
    ///
    /// # Errors
    /// Each error is a sentence that says what to do.
    pub fn probe(&self) -> Result<(), ConnectError> {
        self.open(Path::new("/"), Heartbeat::default()).map(drop)
    }

    /// Connects to the manager.
    pub(crate) fn open(&self, root: &Path, heartbeat: Heartbeat) -> Result<Box<dyn Manager>, ConnectError> {
        Ok(match self {
            Vms::Libvirt(uri) => Box::new(Libvirt::open(uri, root, heartbeat)?),
            Vms::Qemu => Box::new(Qemu::new(root)),
        })
    }

    /// Returns a manager that can undo even while libvirt cannot be reached.
    pub(crate) fn unconnected(&self, root: &Path, heartbeat: Heartbeat) -> Box<dyn Manager> {
        match self {
            Vms::Libvirt(uri) => Box::new(Libvirt::unconnected(uri, root, heartbeat)),
            Vms::Qemu => Box::new(Qemu::for_restoring(root)),
        }
    }
}

impl std::fmt::Display for Vms {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Vms::Libvirt(uri) => write!(f, "libvirt:{uri}"),
            Vms::Qemu => f.write_str("qemu"),
        }
    }
}

impl std::str::FromStr for Vms {
    type Err = UnknownManager;

    fn from_str(text: &str) -> Result<Vms, UnknownManager> {
        match text.split_once(':') {
            None if text == "libvirt" => Ok(Vms::of_libvirt()),
            Some(("libvirt", uri)) if !uri.is_empty() => Ok(Vms::Libvirt(uri.to_owned())),
            None if text == "qemu" => Ok(Vms::Qemu),
            _ => Err(UnknownManager(text.to_owned())),
        }
    }
}

/// The text does not name a manager of VMs.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is neither `libvirt`, `libvirt:URI` nor `qemu`")]
pub struct UnknownManager(String);

/// Why a host cannot be managed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// libvirt does not answer.
    #[error(
        "no libvirt at {uri}: {cause}. Is libvirtd (or virtqemud) running? Start it with `systemctl start libvirtd`, or install it (Debian: libvirt-daemon-system)"
    )]
    NoLibvirt {
        /// The address.
        uri: String,
        /// The message of libvirt's library.
        cause: String,
    },
    /// libvirt answers, but refuses this user.
    #[error("libvirt at {uri} refuses this user: {cause}. Run as root, or join the group `libvirt`")]
    NotPermitted {
        /// The address.
        uri: String,
        /// What libvirt reported.
        cause: String,
    },
    /// No libvirt can have this address.
    #[error("`{uri}` is not an address that libvirt knows: {cause}. KVM on this host is `qemu:///system`")]
    BadUri {
        /// The address.
        uri: String,
        /// The message of libvirt's library.
        cause: String,
    },
    /// The libvirt is on another host.
    #[error(
        "`{uri}` is libvirt on another host, `{host}`: an agent reads and sets the kernel of the host that it runs on. Run it there, with `qemu:///system`"
    )]
    Remote {
        /// The address.
        uri: String,
        /// The other host.
        host: String,
    },
    /// The agent cannot take over the right to act or the journal.
    #[error(transparent)]
    TakeOver(#[from] TakeOverError),
    /// A kernel file that every host has is missing or malformed.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// Returns the other host that a libvirt address names, if it names one.
pub(crate) fn host_of(uri: &str) -> Option<&str> {
    let (_, rest) = uri.split_once("://")?;
    let authority = rest.split(['/', '?', '#']).next()?;
    let host = authority.rsplit_once('@').map_or(authority, |(_, host)| host);
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    };
    let is_this_one = ["", "localhost", "127.0.0.1", "[::1]"].contains(&name);
    Some(host).filter(|_| !is_this_one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_names_another_host_or_this_one() {
        for (uri, host) in [
            ("qemu:///system", None),
            ("test:///default", None),
            ("qemu+unix:///system?socket=/run/x@y", None),
            ("qemu+ssh://root@far.example:22/system", Some("far.example:22")),
            ("qemu://far.example/system", Some("far.example")),
            ("qemu+tcp://[2001:db8::1]/system", Some("[2001:db8::1]")),
            ("qemu+tcp://[::1]/system", None),
            ("qemu+ssh://root@localhost:22/system", None),
            ("qemu+tls://localhost.example/system", Some("localhost.example")),
            ("nonsense", None),
        ] {
            assert_eq!(host_of(uri), host, "{uri}");
        }
    }
}
