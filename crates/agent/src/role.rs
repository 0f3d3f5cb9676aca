//! Decides what the peer of a Unix socket may do, according to the user that the kernel reports.
//!
//! | user of the peer | may |
//! |---|---|
//! | root, or the agent's own user | read and change |
//! | a member of `[http] group` in the settings | read |
//! | any other user | nothing: the socket's permissions keep it out, and this check does so if the permissions were changed |

use std::os::fd::AsFd;

use homenode_control::http;
use homenode_undo::peer::GroupId;
use rustix::process::geteuid;
use serde::Deserialize;

/// What a client may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Reads everything.
    Viewer,
    /// Reads everything and changes settings.
    Operator,
}

/// Says that viewers may only read. The message continues with [`OPERATORS`] or another remedy.
pub(crate) const VIEWERS_READ: &str = "only an operator may change anything";

/// Says how to become an operator on a socket.
pub(crate) const OPERATORS: &str = "connect as root or as the agent's user";

/// The group whose members may read on sockets without being operators, if there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readers(Option<GroupId>);

impl Readers {
    /// Looks up the group named in the settings, if any.
    ///
    /// # Errors
    /// If the group does not exist.
    pub fn of(config: &http::Config) -> anyhow::Result<Readers> {
        let group = Some(config.group.as_str()).filter(|name| !name.is_empty());
        let group = group.map(GroupId::of).transpose();
        let group = group.map_err(|error| anyhow::anyhow!("setting `http.group`: {error}"))?;
        Ok(Readers(group))
    }

    /// Returns the group and mode of sockets. The mode must allow writing, since a client writes its requests.
    pub(crate) fn of_socket(self) -> (Option<GroupId>, u32) {
        (self.0, if self.0.is_some() { 0o660 } else { 0o600 })
    }

    /// Returns what the peer of a socket may do, or `None` if it may do nothing.
    pub(crate) fn role(self, socket: impl AsFd) -> Option<Role> {
        let user = rustix::net::sockopt::socket_peercred(&socket).ok()?.uid;
        if user.is_root() || user == geteuid() {
            return Some(Role::Operator);
        }
        let is_member = self.0?.has(socket).unwrap_or(false);
        is_member.then_some(Role::Viewer)
    }
}
