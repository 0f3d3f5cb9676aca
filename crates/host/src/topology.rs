//! Live topology: the nodes that a VM's guest knows from boot, and the updates it gets.

use homenode_machine::Machine;
use homenode_units::{Bytes, NodeId, NodeMap, Ns, Pages};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A NUMA node as the guest sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtualNode {
    /// Its vCPUs since the guest's boot, by index.
    pub vcpus: Vec<u16>,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// Its touched memory by node, if known.
    pub pages: Option<NodeMap<Pages>>,
}

/// Nodes of a VM's vCPUs and its virtual nodes' memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestTopology {
    /// Node of each vCPU, by index; `None` if unknown, or if the vCPU is offline.
    pub vcpus: Vec<Option<NodeId>>,
    /// Node of each virtual node's memory; `None` if it has none.
    pub memory: Vec<Option<NodeId>>,
}

/// The topology that a guest was last told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Published {
    /// The topology.
    pub topology: GuestTopology,
    /// Its time, by the host's clock.
    pub at: Ns,
    /// Version of its topology page.
    pub sequence: u64,
}

impl GuestTopology {
    /// Returns the virtual node that a guest assumes for a vCPU: the one with the nearest memory; among equals the `present`
    /// one, or the first ([XPV, section 4.2]: an access is local when it goes to the nearest memory). If nothing is known of
    /// the vCPU, or of any memory, it is the present one.
    pub fn virtual_node(&self, machine: &Machine, vcpu: usize, present: usize) -> usize {
        let Some(at) = self.vcpus.get(vcpu).copied().flatten() else {
            return present;
        };
        let with_memory = self.memory.iter().enumerate();
        with_memory
            .filter_map(|(vnode, memory)| Some((machine.distance(at, (*memory)?)?, vnode)))
            .min_by_key(|&(distance, vnode)| (distance, vnode != present, vnode))
            .map_or(present, |(_, vnode)| vnode)
    }
}
