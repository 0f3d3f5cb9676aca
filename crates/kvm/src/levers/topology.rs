//! Tells guests through their topology pages which nodes they run on. This is not undone: a guest with an outdated page is
//! no worse off than one without a page.

use homenode_host::{Act, ActionError, Failure, Lever, Outcome, Published, VmSample};
use homenode_kernel::now;
use homenode_machine::Machine;
use homenode_topology_page::{Facts, LOCAL_DISTANCE, Topology};
use homenode_undo::journal::Entry;
use homenode_units::NodeId;

use super::{Kvm, LeverState, failed};
use crate::context::HostContext;
use crate::vm::Vm;

const TELL: &str = "publishing the topology";
/// The distance between nodes if the machine has none: the largest possible.
const FARTHEST: u8 = 255;

#[derive(Default)]
struct OfVm {
    /// The last facts that the guest was given.
    published: Option<Published>,
}

pub(super) fn state(_entry: Option<&Entry>) -> Box<dyn LeverState<Kvm>> {
    Box::new(OfVm::default())
}

impl LeverState<Kvm> for OfVm {
    fn lever(&self) -> Lever {
        Lever::Topology
    }

    fn what(&self, _act: &Act) -> &'static str {
        TELL
    }

    /// Publishes new facts on a guest's page.
    fn set(&mut self, context: &mut HostContext, vm: &mut Vm, act: &Act) -> Result<Outcome, ActionError> {
        let Act::PublishTopology { topology } = act else {
            return Ok(Outcome::Done);
        };
        let no_device = |why: String| Failure::NoTopologyDevice { why }.on(&vm.run.name);
        let server = context
            .topology
            .server()
            .map_err(|why| no_device(why.to_string()))?;
        let facts = Facts {
            vcpu_pnode: topology.vcpus.clone(),
            vnode_pnode: topology.memory.clone(),
            distances: distances(&context.machine),
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

    fn tell(&mut self, context: &mut HostContext, vm: &mut Vm, sample: &mut VmSample) {
        sample.no_topology_device = context.topology.why_not(&vm.domain, vm.run.pid);
        sample.published.clone_from(&self.published);
    }
}

/// Returns the distances by node number. Node numbers may have gaps, but the rows of a page may not.
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
