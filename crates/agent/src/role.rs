//! What the peer of a Unix socket may do; the kernel says which user it is.
//!
//! | comes in as | may |
//! |---|---|
//! | root, or the agent's own user | read and change |
//! | a member of `[http] group` in the settings | read |
//! | another user | nothing: the socket's rights keep other users out, and this check does where those rights were changed |

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
    /// Also changes.
    Operator,
}

/// Why viewers may not change anything, to be followed by who may.
pub(crate) const VIEWERS_READ: &str = "only an operator may change anything";

/// Who may, on a socket.
pub(crate) const OPERATORS: &str = "ask as root or as the agent's user";

/// Who may read on sockets without being an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Readers(Option<GroupId>);

impl Readers {
    /// The members of the group that the settings name, if they do.
    ///
    /// # Errors
    /// A group that is not there.
    pub fn of(config: &http::Config) -> anyhow::Result<Readers> {
        let group = Some(config.group.as_str()).filter(|name| !name.is_empty());
        let group = group.map(GroupId::of).transpose();
        let group = group.map_err(|error| anyhow::anyhow!("setting `http.group`: {error}"))?;
        Ok(Readers(group))
    }

    /// The group that sockets belong to, and their rights: a user who may write to one may ask.
    pub(crate) fn of_socket(self) -> (Option<GroupId>, u32) {
        (self.0, if self.0.is_some() { 0o660 } else { 0o600 })
    }

    /// What the peer of a socket may do; `None` where it has nothing to look for here.
    pub(crate) fn role(self, socket: impl AsFd) -> Option<Role> {
        let user = rustix::net::sockopt::socket_peercred(&socket).ok()?.uid;
        if user.is_root() || user == geteuid() {
            return Some(Role::Operator);
        }
        let is_member = self.0?.has(socket).unwrap_or(false);
        is_member.then_some(Role::Viewer)
    }
}
