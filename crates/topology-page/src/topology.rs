//! The checked content of a page, and the virtual node that it implies for each vCPU.

use homenode_units::NodeId;

use crate::layout::{LOCAL_DISTANCE, NODES_MAX, VCPUS_MAX, VNODES_MAX};

/// A NUMA node as the guest sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtualNode(pub u16);

/// Facts about a guest's topology, which are not checked yet.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The host node on which each vCPU runs; `None` if unknown.
    pub vcpu_pnode: Vec<Option<NodeId>>,
    /// The host node that holds each virtual node's memory; `None` if the virtual node has no memory, or its host node is
    /// unknown.
    pub vnode_pnode: Vec<Option<NodeId>>,
    /// Distances between host nodes, indexed by from, to, as in ACPI's SLIT. A square matrix.
    pub distances: Vec<Vec<u8>>,
}

/// Why facts are not a valid topology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// The guest has no vCPUs, or more than fit into the page.
    #[error("{count} vCPUs: a topology page holds 1 to {VCPUS_MAX}")]
    Vcpus {
        /// Number of vCPUs.
        count: usize,
    },
    /// The guest has no virtual nodes, or more than fit into the page.
    #[error("{count} virtual nodes: a topology page holds 1 to {VNODES_MAX}")]
    VirtualNodes {
        /// Number of virtual nodes.
        count: usize,
    },
    /// The host has no nodes, or more than fit into the page.
    #[error("{count} host nodes: a topology page holds 1 to {NODES_MAX}")]
    HostNodes {
        /// Number of host nodes.
        count: usize,
    },
    /// A vCPU is on a node that does not exist.
    #[error("vCPU {vcpu} is on host node {node}, but the number of host nodes is {count}")]
    VcpuNode {
        /// The vCPU.
        vcpu: usize,
        /// The stated node.
        node: u16,
        /// Number of host nodes.
        count: usize,
    },
    /// A vCPU belongs to a virtual node that does not exist.
    #[error("vCPU {vcpu} belongs to virtual node {node}, but the number of virtual nodes is {count}")]
    VcpuVirtualNode {
        /// The vCPU.
        vcpu: usize,
        /// The virtual node.
        node: u16,
        /// Number of virtual nodes.
        count: usize,
    },
    /// A virtual node's memory is on a host node that does not exist.
    #[error(
        "the memory of virtual node {vnode} is on host node {node}, but the number of host nodes is {count}"
    )]
    MemoryNode {
        /// The virtual node.
        vnode: usize,
        /// The stated node.
        node: u16,
        /// Number of host nodes.
        count: usize,
    },
    /// The distances are not a square matrix, or one is invalid in a SLIT.
    #[error(
        "the distance from host node {from} to {to} is {found:?}; it must be {LOCAL_DISTANCE} to itself and no less to others"
    )]
    Distance {
        /// Row.
        from: usize,
        /// Column.
        to: usize,
        /// The distance, if there is one.
        found: Option<u8>,
    },
    /// No virtual node has memory.
    #[error("no virtual node has memory")]
    NoMemory,
}

/// Facts that were checked to be within the bounds of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    facts: Facts,
    /// For each vCPU, the node that the guest's kernel decided on, if the kernel wrote the page.
    vcpu_vnode: Vec<Option<VirtualNode>>,
}

impl Topology {
    /// Checks facts.
    ///
    /// # Errors
    /// A [`TopologyError`] that names what is out of bounds.
    pub fn new(facts: Facts) -> Result<Topology, TopologyError> {
        let undecided = vec![None; facts.vcpu_pnode.len()];
        Topology::with_nodes(facts, undecided)
    }

    /// Like [`Topology::new`], with the nodes that the guest's kernel decided on.
    pub(crate) fn with_nodes(
        facts: Facts,
        vcpu_vnode: Vec<Option<VirtualNode>>,
    ) -> Result<Topology, TopologyError> {
        let nodes = facts.distances.len();
        if !(1..=VCPUS_MAX).contains(&facts.vcpu_pnode.len()) {
            let count = facts.vcpu_pnode.len();
            return Err(TopologyError::Vcpus { count });
        }
        if !(1..=VNODES_MAX).contains(&facts.vnode_pnode.len()) {
            let count = facts.vnode_pnode.len();
            return Err(TopologyError::VirtualNodes { count });
        }
        if !(1..=NODES_MAX).contains(&nodes) {
            return Err(TopologyError::HostNodes { count: nodes });
        }
        let beyond = |node: Option<NodeId>| node.filter(|node| usize::from(node.0) >= nodes);
        for (vcpu, node) in facts.vcpu_pnode.iter().enumerate() {
            if let Some(NodeId(node)) = beyond(*node) {
                return Err(TopologyError::VcpuNode {
                    vcpu,
                    node,
                    count: nodes,
                });
            }
        }
        for (vcpu, node) in vcpu_vnode.iter().enumerate() {
            let count = facts.vnode_pnode.len();
            if let Some(VirtualNode(node)) = node.filter(|node| usize::from(node.0) >= count) {
                return Err(TopologyError::VcpuVirtualNode { vcpu, node, count });
            }
        }
        for (vnode, node) in facts.vnode_pnode.iter().enumerate() {
            if let Some(NodeId(node)) = beyond(*node) {
                return Err(TopologyError::MemoryNode {
                    vnode,
                    node,
                    count: nodes,
                });
            }
        }
        check_distances(&facts.distances)?;
        if facts.vnode_pnode.iter().all(Option::is_none) {
            return Err(TopologyError::NoMemory);
        }
        Ok(Topology { facts, vcpu_vnode })
    }

    /// Returns the facts that the topology was made from.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Returns the virtual node that the guest's kernel chose for a vCPU, if the kernel wrote the page.
    pub fn decided(&self, vcpu: usize) -> Option<VirtualNode> {
        self.vcpu_vnode.get(vcpu).copied().flatten()
    }

    /// Returns the guest kernel's choices for all vCPUs.
    pub(crate) fn all_decided(&self) -> &[Option<VirtualNode>] {
        &self.vcpu_vnode
    }

    /// Returns the virtual node that a vCPU belongs to. This is the guest kernel's decision, if there is one. Otherwise it is the
    /// node whose memory is nearest to where the vCPU runs; among equally near nodes `present`, or else the first. If the vCPU's
    /// place is unknown, it is `present`.
    pub fn node(&self, vcpu: usize, present: VirtualNode) -> VirtualNode {
        if let Some(decided) = self.decided(vcpu) {
            return decided;
        }
        let Some(NodeId(at)) = self.facts.vcpu_pnode.get(vcpu).copied().flatten() else {
            return present;
        };
        let with_memory = self
            .facts
            .vnode_pnode
            .iter()
            .zip(0u16..)
            .filter_map(|(memory, vnode)| Some(((*memory)?, VirtualNode(vnode))));
        with_memory
            .min_by_key(|(memory, vnode)| {
                let distance = self.facts.distances[usize::from(at)][usize::from(memory.0)];
                (distance, *vnode != present, *vnode)
            })
            .map_or(present, |(_, vnode)| vnode)
    }
}

fn check_distances(distances: &[Vec<u8>]) -> Result<(), TopologyError> {
    for (from, row) in distances.iter().enumerate() {
        for to in 0..distances.len().max(row.len()) {
            let found = row.get(to).copied().filter(|_| to < distances.len());
            let possible = match found {
                None => false,
                Some(distance) if from == to => distance == LOCAL_DISTANCE,
                Some(distance) => distance >= LOCAL_DISTANCE,
            };
            if !possible {
                return Err(TopologyError::Distance { from, to, found });
            }
        }
    }
    Ok(())
}
