//! What guests are told of where they are, through their topology pages. A guest stays told: where it is not so any more it is as
//! badly off as one that never learns anything, and no worse.

use homenode_host::{Act, ActionError, Failure, Lever, Outcome, Published, VmSample};
use homenode_kernel::now;
use homenode_machine::Machine;
use homenode_topology_page::{Facts, LOCAL_DISTANCE, Topology};
use homenode_undo::journal::Entry;
use homenode_units::NodeId;

use super::{Grip, failed};
use crate::hands::Hands;
use crate::vm::Vm;

const TELL: &str = "telling its guest where it is";
/// The distance of nodes between which the machine knows none: as far as can be said.
const FARTHEST: u8 = 255;

#[derive(Default)]
struct OfVm {
    /// What its guest was told last.
    published: Option<Published>,
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
        let Act::PublishTopology { topology } = act else {
            return Ok(Outcome::Done);
        };
        let no_device = |why: String| Failure::NoTopologyDevice { why }.on(&vm.run.name);
        let server = hands.topology.server().map_err(|why| no_device(why.to_owned()))?;
        let facts = Facts {
            vcpu_pnode: topology.vcpus.clone(),
            vnode_pnode: topology.memory.clone(),
            distances: distances(&hands.machine),
        };
        let page = Topology::new(facts).map_err(|e| failed(vm, TELL, &e.to_string()))?;
        let published = server.publish(vm.run.pid, &page);
        self.published = Some(Published {
            topology: topology.clone(),
            at: now(),
            sequence: published.map_err(|e| no_device(e.to_string()))?,
        });
        Ok(Outcome::Done)
    }

    fn tell(&mut self, hands: &mut Hands, vm: &mut Vm, sample: &mut VmSample) {
        sample.no_topology_device = hands.topology.why_not(&vm.domain, vm.run.pid);
        sample.published.clone_from(&self.published);
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
