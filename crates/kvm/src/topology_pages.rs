//! The topology pages of a host's guests: their server, and which guests have one.

use std::path::{Path, PathBuf};

use homenode_undo::Acting;

use crate::domain::{Domain, TOPOLOGY_DEVICE};
use crate::topology_server::{ListenError, TopologyServer};

/// The server of topology pages, or why there is none.
pub(crate) struct TopologyPages {
    socket: PathBuf,
    server: Result<TopologyServer, NotServed>,
}

/// Why no guest is given a topology page.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    #[error("the agent runs with --dry-run and tells guests nothing")]
    DryRun,
    #[error("cannot make {}: {cause}", .dir.display())]
    NoDirectory { dir: PathBuf, cause: std::io::Error },
    #[error(transparent)]
    NotListening(#[from] ListenError),
}

impl TopologyPages {
    pub(crate) fn open(socket: PathBuf, acting: Acting) -> TopologyPages {
        let server = match acting {
            Acting::DryRun => Err(NotServed::DryRun),
            Acting::Live => serve(&socket),
        };
        TopologyPages { socket, server }
    }

    /// Returns a notice for the operator if the agent acts and cannot serve pages.
    pub(crate) fn trouble(&self, acting: Acting) -> Option<String> {
        let why = self.server.as_ref().err().filter(|_| acting == Acting::Live)?;
        Some(format!("guests are not told which nodes they are on: {why}"))
    }

    /// The server, or why there is none.
    pub(crate) fn server(&self) -> Result<&TopologyServer, &NotServed> {
        self.server.as_ref()
    }

    /// Takes the reason why a QEMU was last refused its page; returns it once.
    pub(crate) fn take_refusal(&self) -> Option<String> {
        self.server.as_ref().ok()?.take_refusal()
    }

    /// Why the guest of a VM cannot be given a topology page; `None` if it can.
    pub(crate) fn why_not(&self, domain: &Domain, pid: i32) -> Option<String> {
        if domain.cells.len() < 2 {
            return Some(
                "its guest sees one node; give it virtual nodes (<cpu><numa>, docs/TOPOLOGY.md)".to_owned(),
            );
        }
        let ours = self.socket.as_path();
        let Some(theirs) = &domain.topology_socket else {
            return Some(format!(
                "it has no topology device; put <shmem name='{TOPOLOGY_DEVICE}'> with the server {} into its <devices> \
                 (docs/TOPOLOGY.md), and start it again",
                ours.display()
            ));
        };
        if Path::new(theirs) != ours {
            return Some(format!(
                "its topology device asks for its page at {theirs}, but this agent serves {}; correct one of them",
                ours.display()
            ));
        }
        match &self.server {
            Err(why) => Some(why.to_string()),
            Ok(server) if server.serves(pid) => None,
            Ok(_) => Some("its QEMU has no topology page from this agent; start it again".to_owned()),
        }
    }
}

fn serve(socket: &Path) -> Result<TopologyServer, NotServed> {
    let dir = socket.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(dir).map_err(|cause| NotServed::NoDirectory {
        dir: dir.to_owned(),
        cause,
    })?;
    Ok(TopologyServer::listen(socket)?)
}
