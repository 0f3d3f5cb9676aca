//! Who manages a host's VMs, and why they cannot be reached.

use std::path::Path;

use homenode_kernel::read::ReadError;
use homenode_undo::acting::TakeOverError;
use homenode_undo::beat::Beat;

use crate::libvirt::Libvirt;
use crate::manager::Manager;
use crate::qemu::{self, Qemu};

/// Address of the system's libvirt.
pub const DEFAULT_URI: &str = "qemu:///system";

/// Who manages a host's VMs: where they are found, and who changes them. Written as in `--host`: `libvirt:URI` or `qemu`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Vms {
    /// libvirt at this address.
    Libvirt(String),
    /// Nobody but QEMU: its processes and their monitors.
    Qemu,
}

impl Vms {
    /// Those of the system's libvirt.
    pub fn of_libvirt() -> Vms {
        Vms::Libvirt(DEFAULT_URI.to_owned())
    }

    /// Those of this host: libvirt's if it answers, else those that run without it.
    ///
    /// # Errors
    /// Why there are none: what libvirt said.
    pub fn here() -> Result<Vms, ConnectError> {
        match Vms::of_libvirt().probe() {
            Ok(()) => Ok(Vms::of_libvirt()),
            Err(_) if qemu::has_vms(Path::new("/")) => Ok(Vms::Qemu),
            Err(error) => Err(error),
        }
    }

    /// Whether they can be had.
    ///
    /// # Errors
    /// Each is a sentence with its remedy.
    pub fn probe(&self) -> Result<(), ConnectError> {
        self.open(Path::new("/"), Beat::default()).map(drop)
    }

    /// Connects to who manages them.
    pub(crate) fn open(&self, root: &Path, beat: Beat) -> Result<Box<dyn Manager>, ConnectError> {
        Ok(match self {
            Vms::Libvirt(uri) => Box::new(Libvirt::open(uri, root, beat)?),
            Vms::Qemu => Box::new(Qemu::new(root)),
        })
    }

    /// The same for what may have to be done while that cannot be reached.
    pub(crate) fn unconnected(&self, root: &Path, beat: Beat) -> Box<dyn Manager> {
        match self {
            Vms::Libvirt(uri) => Box::new(Libvirt::unconnected(uri, root, beat)),
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
    type Err = String;

    fn from_str(text: &str) -> Result<Vms, String> {
        match text.split_once(':') {
            None if text == "libvirt" => Ok(Vms::of_libvirt()),
            Some(("libvirt", uri)) if !uri.is_empty() => Ok(Vms::Libvirt(uri.to_owned())),
            None if text == "qemu" => Ok(Vms::Qemu),
            _ => Err(format!("`{text}` is neither `libvirt`, `libvirt:URI` nor `qemu`")),
        }
    }
}

/// Why a host cannot be managed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// Nobody answers.
    #[error(
        "no libvirt at {uri}: {cause}. Is libvirtd (or virtqemud) running? Start it with `systemctl start libvirtd`, or install it (Debian: libvirt-daemon-system)"
    )]
    NoLibvirt {
        /// The address.
        uri: String,
        /// What libvirt's library said.
        cause: String,
    },
    /// It answers, but not to us.
    #[error("libvirt at {uri} refuses this user: {cause}. Run as root, or join the group `libvirt`")]
    NotPermitted {
        /// The address.
        uri: String,
        /// What it said.
        cause: String,
    },
    /// No libvirt could have this address.
    #[error("`{uri}` is not an address that libvirt knows: {cause}. KVM on this host is `qemu:///system`")]
    BadUri {
        /// The address.
        uri: String,
        /// What libvirt's library said.
        cause: String,
    },
    /// It is another host's.
    #[error(
        "`{uri}` is libvirt on another host, `{host}`: an agent reads and sets the kernel of the host that it runs on. Run it there, with `qemu:///system`"
    )]
    Remote {
        /// The address.
        uri: String,
        /// That host.
        host: String,
    },
    /// The right to act on the host, or the journal, cannot be had.
    #[error(transparent)]
    TakeOver(#[from] TakeOverError),
    /// A kernel file that every host has is missing or malformed.
    #[error(transparent)]
    Read(#[from] ReadError),
}

/// The other host that an address of libvirt's names, if it names one.
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
