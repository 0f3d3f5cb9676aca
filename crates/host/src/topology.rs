//! Live topology: what a VM's guest believes of nodes, and what it is told of them.

use homenode_machine::Machine;
use homenode_units::{Bytes, NodeId, NodeMap, Ns, Pages};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A NUMA node as the guest sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VirtualNode {
    /// vCPUs that belong to it as the guest booted, by index.
    pub vcpus: Vec<u16>,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// Where what was touched of it lies, where known.
    pub pages: Option<NodeMap<Pages>>,
}

/// Where a VM's vCPUs and its virtual nodes' memory are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct GuestTopology {
    /// Node of each vCPU, by index; `None` where it is not known, or the vCPU is offline.
    pub vcpus: Vec<Option<NodeId>>,
    /// Node of each virtual node's memory; `None` where it has none.
    pub memory: Vec<Option<NodeId>>,
}

/// What a guest was told last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Published {
    /// What.
    pub topology: GuestTopology,
    /// When, by the host's clock.
    pub at: Ns,
    /// Version of its topology page.
    pub sequence: u64,
}

impl GuestTopology {
    /// Virtual node that a guest takes a vCPU to be on: the one with the nearest memory, of several as near the `present` one, or
    /// the first ([XPV, section 4.2]: an access is local when it goes to the nearest memory). Where nothing is known of the
    /// vCPU, or of any memory, it is the present one.
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
