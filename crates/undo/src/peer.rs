//! Asks the kernel which user and groups are at the other end of a Unix socket.

use std::io;
use std::os::fd::AsFd;

use nix::unistd::Group;

/// Why a group cannot be given a right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoGroup {
    /// There is no group of this name.
    #[error("there is no group `{0}` on this host: make it with `groupadd --system {0}`, or name another")]
    Unknown(String),
    /// The system's groups cannot be read.
    #[error("the groups of this host cannot be read: {0}")]
    Unreadable(nix::errno::Errno),
}

/// A group whose members have a right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupId(u32);

impl GroupId {
    /// The group of this name.
    ///
    /// # Errors
    /// When there is no such group; the message says what to do.
    pub fn of(name: &str) -> Result<GroupId, NoGroup> {
        match Group::from_name(name) {
            Ok(Some(group)) => Ok(GroupId(group.gid.as_raw())),
            Ok(None) => Err(NoGroup::Unknown(name.to_owned())),
            Err(error) => Err(NoGroup::Unreadable(error)),
        }
    }

    /// The group's number.
    pub fn number(self) -> u32 {
        self.0
    }

    /// Returns true if the peer was in the group, by its primary or a supplementary group, when it connected the socket.
    ///
    /// # Errors
    /// When `socket` is not a connected Unix socket.
    pub fn has(self, socket: impl AsFd) -> io::Result<bool> {
        let own = rustix::net::sockopt::socket_peercred(&socket)?.gid.as_raw();
        Ok(own == self.0 || more_groups(socket)?.contains(&self.0))
    }
}

/// Returns the supplementary groups that the peer had when it connected. No crate that we use wraps this call.
#[allow(unsafe_code)] // a socket option without a wrapper
fn more_groups(socket: impl AsFd) -> io::Result<Vec<libc::gid_t>> {
    use std::os::fd::AsRawFd as _;
    let socket = socket.as_fd().as_raw_fd();
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let size = size_of_val(groups.as_slice());
        let mut length = libc::socklen_t::try_from(size).map_err(io::Error::other)?;
        // SAFETY: the kernel writes at most `length` bytes to the vector, which has room for as many, and sets `length` to the
        // length that it wrote or would have written; both live until it returns.
        let result = unsafe {
            libc::getsockopt(
                socket,
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let count = length as usize / size_of::<libc::gid_t>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // The kernel returned how many there are; no process is in more than 65,536.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() || count > 1 << 16 {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_peer_is_in_the_groups_of_its_process_and_in_no_other() {
        let (one, _other) = UnixStream::pair().unwrap();
        let mut own: Vec<u32> = rustix::process::getgroups()
            .unwrap()
            .iter()
            .map(|group| group.as_raw())
            .collect();
        own.push(rustix::process::getegid().as_raw());
        for group in &own {
            assert!(GroupId(*group).has(&one).unwrap(), "{group} of {own:?}");
        }
        let strange = (70_000..).find(|group| !own.contains(group)).unwrap();
        assert!(!GroupId(strange).has(&one).unwrap());
    }

    #[test]
    fn a_group_that_is_not_there_is_refused_with_the_remedy() {
        assert_eq!(GroupId::of("root").unwrap().number(), 0);
        let error = GroupId::of("no-such-group-here").unwrap_err().to_string();
        assert!(error.contains("groupadd --system no-such-group-here"), "{error}");
    }
}
