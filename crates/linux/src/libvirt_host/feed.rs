//! Telling guests where they are, through their topology pages.

use std::path::{Path, PathBuf};

use homenode_host::{ActionError, Failure, GuestTopology, Outcome, Told};
use homenode_machine::Machine;
use homenode_topology_page::{Facts, LOCAL_DISTANCE, Topology};
use homenode_units::NodeId;

use super::act::host_error;
use super::vm::Vm;
use super::{Acting, LibvirtHost, now};
use crate::domain::TOPOLOGY_DEVICE;
use crate::topology_server::TopologyServer;

pub(super) const TELL: &str = "telling its guest where it is";
/// The distance of nodes between which the machine knows none: as far as can be said.
const FARTHEST: u8 = 255;

/// Who serves topology pages, or why nobody does.
pub(super) struct Feed {
    socket: PathBuf,
    server: Result<TopologyServer, String>,
}

impl Feed {
    pub fn open(socket: PathBuf, acting: Acting) -> Feed {
        let server = match acting {
            Acting::DryRun => Err("the agent runs with --dry-run and tells guests nothing".to_owned()),
            Acting::Live => serve(&socket),
        };
        Feed { socket, server }
    }

    /// What the operator should know of an agent that acts and cannot serve.
    pub fn trouble(&self, acting: Acting) -> Option<String> {
        let why = self.server.as_ref().err().filter(|_| acting == Acting::Live)?;
        Some(format!("no guest is told where it is: {why}"))
    }

    /// Why a QEMU was refused its page, once.
    pub fn take_refusal(&self) -> Option<String> {
        self.server.as_ref().ok()?.take_refusal()
    }
}

fn serve(socket: &Path) -> Result<TopologyServer, String> {
    let dir = socket.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(dir).map_err(|e| format!("cannot make {}: {e}", dir.display()))?;
    TopologyServer::listen(socket).map_err(|e| e.to_string())
}

impl LibvirtHost {
    /// Why the guest of a VM cannot be told where it is, if so.
    pub(super) fn no_feed(&self, vm: &Vm) -> Option<String> {
        let domain = &vm.domain;
        if domain.cells.len() < 2 {
            return Some(
                "its guest sees one node; give it virtual nodes (<cpu><numa>, docs/TOPOLOGY.md)".to_owned(),
            );
        }
        let ours = self.feed.socket.as_path();
        let Some(theirs) = &domain.topology_socket else {
            return Some(format!(
                "it has no topology device; put <shmem name='{TOPOLOGY_DEVICE}'> with the server {} into its <devices> \
                 (docs/TOPOLOGY.md), and start it anew",
                ours.display()
            ));
        };
        if Path::new(theirs) != ours {
            return Some(format!(
                "its topology device asks for its page at {theirs}, and this agent serves {}; correct the one or the other",
                ours.display()
            ));
        }
        match &self.feed.server {
            Err(why) => Some(why.clone()),
            Ok(server) if server.serves(vm.run.pid) => None,
            Ok(_) => Some("its QEMU has no topology page of this agent's; start it anew".to_owned()),
        }
    }

    /// Publishes a version of a guest's page.
    pub(super) fn tell(&mut self, vm: &mut Vm, topology: &GuestTopology) -> Result<Outcome, ActionError> {
        let failed = |why: String| Failure::NoFeed { why }.on(&vm.run.name);
        let server = self.feed.server.as_ref().map_err(|why| failed(why.clone()))?;
        let facts = Facts {
            vcpu_pnode: topology.vcpus.clone(),
            vnode_pnode: topology.memory.clone(),
            distances: distances(&self.machine),
        };
        let page = Topology::new(facts).map_err(|e| host_error(vm, TELL, &e.to_string()))?;
        let sequence = server
            .publish(vm.run.pid, &page)
            .map_err(|e| failed(e.to_string()))?;
        vm.told = Some(Told {
            topology: topology.clone(),
            at: now(),
            sequence,
        });
        Ok(Outcome::Done)
    }
}

/// Distances by the numbers of nodes, which may have gaps; a page has none.
fn distances(machine: &Machine) -> Vec<Vec<u8>> {
    let count = machine.nodes.keys().map(|node| node.0 + 1).max().unwrap_or(0);
    let between = |from: u16, to: u16| match machine.distance(NodeId(from), NodeId(to)) {
        _ if from == to => LOCAL_DISTANCE,
        Some(distance) => u8::try_from(distance).unwrap_or(FARTHEST).max(LOCAL_DISTANCE),
        None => FARTHEST,
    };
    let row = |from| (0..count).map(|to| between(from, to)).collect();
    (0..count).map(row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_those_of_the_machine_and_make_a_page() {
        let machine = homenode_machine::preset("r910").expect("a preset");
        let rows = distances(&machine);
        let facts = Facts {
            vcpu_pnode: vec![Some(NodeId(0))],
            vnode_pnode: vec![Some(NodeId(1))],
            distances: rows.clone(),
        };
        assert!(Topology::new(facts).is_ok());
        for (from, row) in rows.iter().enumerate() {
            for (to, distance) in row.iter().enumerate() {
                let known = machine.distance(NodeId(from as u16), NodeId(to as u16));
                assert_eq!(Some(u32::from(*distance)), known, "{from} to {to}");
            }
        }
    }
}
