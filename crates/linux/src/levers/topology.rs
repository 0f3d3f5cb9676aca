//! What guests are told of where they are, through their topology pages. A guest stays told: where it is not so any more it is as
//! badly off as one that never learns anything, and no worse.

use std::path::{Path, PathBuf};

use homenode_host::{Act, ActionError, Failure, Lever, Outcome, Told, VmSample};
use homenode_machine::Machine;
use homenode_topology_page::{Facts, LOCAL_DISTANCE, Topology};
use homenode_units::NodeId;

use super::{Grip, failed};
use crate::connect::Acting;
use crate::domain::TOPOLOGY_DEVICE;
use crate::hands::Hands;
use crate::journal::Entry;
use crate::now;
use crate::topology_server::TopologyServer;
use crate::vm::Vm;

const TELL: &str = "telling its guest where it is";
/// The distance of nodes between which the machine knows none: as far as can be said.
const FARTHEST: u8 = 255;

/// Who serves topology pages, or why nobody does.
pub(crate) struct Pages {
    socket: PathBuf,
    server: Result<TopologyServer, String>,
}

impl Pages {
    pub fn open(socket: PathBuf, acting: Acting) -> Pages {
        let server = match acting {
            Acting::DryRun => Err("the agent runs with --dry-run and tells guests nothing".to_owned()),
            Acting::Live => serve(&socket),
        };
        Pages { socket, server }
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

    /// Why the guest of a VM cannot be told where it is, if so.
    fn why_not(&self, vm: &Vm) -> Option<String> {
        let domain = &vm.domain;
        if domain.cells.len() < 2 {
            return Some(
                "its guest sees one node; give it virtual nodes (<cpu><numa>, docs/TOPOLOGY.md)".to_owned(),
            );
        }
        let ours = self.socket.as_path();
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
        match &self.server {
            Err(why) => Some(why.clone()),
            Ok(server) if server.serves(vm.run.pid) => None,
            Ok(_) => Some("its QEMU has no topology page of this agent's; start it anew".to_owned()),
        }
    }
}

fn serve(socket: &Path) -> Result<TopologyServer, String> {
    let dir = socket.parent().unwrap_or(Path::new("/"));
    std::fs::create_dir_all(dir).map_err(|e| format!("cannot make {}: {e}", dir.display()))?;
    TopologyServer::listen(socket).map_err(|e| e.to_string())
}

#[derive(Default)]
struct OfVm {
    /// What its guest was told last.
    told: Option<Told>,
}

pub(super) fn grip(_entry: Option<&Entry>) -> Box<dyn Grip> {
    Box::new(OfVm::default())
}

impl Grip for OfVm {
    fn lever(&self) -> Lever {
        Lever::Topology
    }

    fn what(&self, _act: &Act) -> &'static str {
        TELL
    }

    /// Publishes a version of a guest's page.
    fn set(&mut self, hands: &mut Hands, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::TellTopology { topology } = act else {
            return Ok(Outcome::Done);
        };
        let no_feed = |why: String| Failure::NoFeed { why }.on(&vm.run.name);
        let server = hands.topology.server.as_ref();
        let server = server.map_err(|why| no_feed(why.clone()))?;
        let facts = Facts {
            vcpu_pnode: topology.vcpus.clone(),
            vnode_pnode: topology.memory.clone(),
            distances: distances(&hands.machine),
        };
        let page = Topology::new(facts).map_err(|e| failed(vm, TELL, &e.to_string()))?;
        let published = server.publish(vm.run.pid, &page);
        self.told = Some(Told {
            topology: topology.clone(),
            at: now(),
            sequence: published.map_err(|e| no_feed(e.to_string()))?,
        });
        Ok(Outcome::Done)
    }

    fn tell(&mut self, hands: &mut Hands, vm: &mut Vm, sample: &mut VmSample) {
        sample.no_feed = hands.topology.why_not(vm);
        sample.told.clone_from(&self.told);
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
        let machine = homenode_machine_files::preset("r910").expect("a preset");
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
