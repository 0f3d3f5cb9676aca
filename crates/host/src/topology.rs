//! Live topology: the nodes that a VM's guest knows from its boot, and the updates that it gets.

use homenode_machine::Machine;
use homenode_units::{Bytes, NodeId, NodeMap, Ns, Pages};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A NUMA node as the guest sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtualNode {
    /// The virtual node's vCPUs at the guest's boot, by index.
    pub vcpus: Vec<u16>,
    /// The virtual node's memory.
    pub memory_bytes: Bytes,
    /// The virtual node's touched memory by host node, if known.
    pub pages: Option<NodeMap<Pages>>,
}

/// The host nodes of a VM's vCPUs and of its virtual nodes' memory.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestTopology {
    /// Node of each vCPU, by index; `None` if unknown, or if the vCPU is offline.
    pub vcpus: Vec<Option<NodeId>>,
    /// Node of each virtual node's memory; `None` if the virtual node has no memory.
    pub memory: Vec<Option<NodeId>>,
}

/// The topology that a guest was last told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Published {
    /// The topology.
    pub topology: GuestTopology,
    /// When the guest was told, by the host's clock.
    pub at: Ns,
    /// Version of the guest's topology page.
    pub sequence: u64,
}

impl GuestTopology {
    /// Returns the virtual node that a guest assumes for a vCPU: the one with the nearest memory, since an access is local if it
    /// goes to the nearest memory [XPV, section 4.2]. Among equally near ones it takes `present`, else the first. It keeps
    /// `present` if the vCPU's node, or every memory's node, is unknown.
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
