//! What a page says, checked, and what follows from it for a vCPU.

use homenode_units::NodeId;

use crate::layout::{LOCAL_DISTANCE, NODES_MAX, VCPUS_MAX, VNODES_MAX};

/// A NUMA node as the guest sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct VirtualNode(pub u16);

/// What is so, before it is checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts {
    /// The host's node on which each vCPU runs; `None` where that is not known.
    pub vcpu_pnode: Vec<Option<NodeId>>,
    /// The host's node that has the memory of each virtual node; `None` where it has no memory, or that is not known.
    pub vnode_pnode: Vec<Option<NodeId>>,
    /// Distances between the host's nodes, as in ACPI's SLIT: from, to. As many rows and columns as it has nodes.
    pub distances: Vec<Vec<u8>>,
}

/// Why facts make no topology.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TopologyError {
    /// None, or more than there is room for.
    #[error("{count} vCPUs: a topology page holds 1 to {VCPUS_MAX}")]
    Vcpus {
        /// How many.
        count: usize,
    },
    /// None, or more than there is room for.
    #[error("{count} virtual nodes: a topology page holds 1 to {VNODES_MAX}")]
    VirtualNodes {
        /// How many.
        count: usize,
    },
    /// None, or more than there is room for.
    #[error("{count} host nodes: a topology page holds 1 to {NODES_MAX}")]
    HostNodes {
        /// How many.
        count: usize,
    },
    /// A vCPU is where nothing is.
    #[error("vCPU {vcpu} is on host node {node}, of which there are {count}")]
    VcpuNode {
        /// Which vCPU.
        vcpu: usize,
        /// Where it is said to be.
        node: u16,
        /// The host's nodes.
        count: usize,
    },
    /// A vCPU belongs to a virtual node that there is not.
    #[error("vCPU {vcpu} belongs to virtual node {node}, of which there are {count}")]
    VcpuVirtualNode {
        /// Which vCPU.
        vcpu: usize,
        /// The virtual node.
        node: u16,
        /// Virtual nodes.
        count: usize,
    },
    /// Memory is where nothing is.
    #[error("the memory of virtual node {vnode} is on host node {node}, of which there are {count}")]
    MemoryNode {
        /// Which virtual node.
        vnode: usize,
        /// Where it is said to be.
        node: u16,
        /// The host's nodes.
        count: usize,
    },
    /// Not a matrix, or a figure that no SLIT may have.
    #[error(
        "the distance from host node {from} to {to} is {found:?}; it must be {LOCAL_DISTANCE} to itself and no less to others"
    )]
    Distance {
        /// From.
        from: usize,
        /// To.
        to: usize,
        /// The distance, if there is one.
        found: Option<u8>,
    },
    /// Nothing to be near to.
    #[error("no virtual node has memory")]
    NoMemory,
}

/// Facts within the bounds of a page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    facts: Facts,
    /// What the guest's kernel has decided, for each vCPU, on a page that it wrote.
    vcpu_vnode: Vec<Option<VirtualNode>>,
}

impl Topology {
    /// Checks facts.
    ///
    /// # Errors
    /// [`TopologyError`], naming what is out of bounds.
    pub fn new(facts: Facts) -> Result<Topology, TopologyError> {
        let undecided = vec![None; facts.vcpu_pnode.len()];
        Topology::with_nodes(facts, undecided)
    }

    /// As [`Topology::new`], with what a guest's kernel has decided.
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

    /// What it was made from.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The virtual node that the guest's kernel has put a vCPU in, on a page that it wrote.
    pub fn decided(&self, vcpu: usize) -> Option<VirtualNode> {
        self.vcpu_vnode.get(vcpu).copied().flatten()
    }

    /// The same for all vCPUs.
    pub(crate) fn all_decided(&self) -> &[Option<VirtualNode>] {
        &self.vcpu_vnode
    }

    /// The virtual node that a vCPU belongs to: what the guest's kernel says; otherwise that whose memory is nearest to where the
    /// vCPU runs, of several the present one, or the first. What is not known stays as it is.
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
