//! The predictor's view of a host: its nodes and their caches.

use homenode_machine::Machine;
use homenode_units::{BytesPerSec, CpuSet, NodeId, NodeSet};

use super::{Config, NODES_MAX};
use crate::near::{self, Near, positions};

/// The predictor's view of a node.
#[derive(Clone, Debug)]
pub struct NodeShape {
    /// The node.
    pub id: NodeId,
    /// Number of its cores that VMs may use.
    pub cores: f64,
    /// Number of its CPUs that VMs may use.
    pub cpus: f64,
    /// Bytes per second that its controllers sustain, as measured, or as assumed for its cores.
    pub bandwidth: f64,
    /// The node's caches, by position.
    pub caches: u64,
}

/// The predictor's view of a cache: CPUs of one node that share a last-level cache.
#[derive(Clone, Debug)]
pub struct CacheShape {
    /// Position of the cache's node.
    pub node: usize,
    /// The cache's CPUs that VMs may use.
    pub cpu_set: CpuSet,
    /// Number of the cache's CPUs that VMs may use.
    pub cpus: f64,
    /// Number of the cache's cores that VMs may use.
    pub cores: f64,
    /// Size in bytes, or size of the node's part if several nodes share the cache; 0 if unknown.
    pub bytes: f64,
}

impl CacheShape {
    /// Returns the caches of a node, limited to CPUs that VMs may use.
    fn of_node(machine: &Machine, id: NodeId, node: usize, usable: &CpuSet) -> Vec<CacheShape> {
        let all = &machine.nodes[id].cpus;
        let part = |at: u32| {
            let llc = &machine.llcs[at as usize];
            // If several nodes share a cache, each node counts its part.
            let here = llc.cpus.intersection(all).len() as f64 / llc.cpus.len().max(1) as f64;
            (llc.cpus.intersection(usable), llc.size_bytes.as_f64() * here)
        };
        let parts: Vec<(CpuSet, f64)> = machine.llcs_of(id).into_iter().map(part).collect();
        let cache = |(cpu_set, bytes): (CpuSet, f64)| CacheShape {
            node,
            cpus: cpu_set.len() as f64,
            cores: near::cores(machine, &cpu_set) as f64,
            cpu_set,
            bytes,
        };
        let known: usize = parts.iter().map(|(cpus, _)| cpus.len()).sum();
        if known < usable.len() {
            let bytes = parts.iter().map(|(_, bytes)| bytes).sum();
            return vec![cache((usable.clone(), bytes))];
        }
        parts
            .into_iter()
            .filter(|(cpus, _)| !cpus.is_empty())
            .map(cache)
            .collect()
    }

    /// Merges all of a node's caches into one.
    fn merge(of_node: Vec<CacheShape>) -> Option<CacheShape> {
        of_node.into_iter().reduce(|a, b| CacheShape {
            node: a.node,
            cpu_set: a.cpu_set.union(&b.cpu_set),
            cpus: a.cpus + b.cpus,
            cores: a.cores + b.cores,
            bytes: a.bytes + b.bytes,
        })
    }
}

/// The predictor's view of a host.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Nodes with memory and CPUs, in ascending order.
    pub nodes: Vec<NodeShape>,
    /// The nodes' caches, in the order of nodes.
    pub caches: Vec<CacheShape>,
    /// Unloaded latency of an access from each node to each other, row by row; local is 1.
    pub latency: Vec<f64>,
    /// How many times as long a core's own work takes if its other hyperthread is busy.
    pub smt_stretch: f64,
    /// Distances between the nodes.
    pub(crate) near: Near,
}

impl Shape {
    /// Returns the shape of a machine on which VMs may use these CPUs.
    pub fn of(machine: &Machine, usable: &CpuSet, config: &Config) -> Shape {
        let homes = machine.home_nodes();
        let usable_of = |id: NodeId| machine.nodes[id].cpus.intersection(usable);
        let ids: Vec<NodeId> = homes
            .iter()
            .filter(|id| !usable_of(*id).is_empty())
            .take(NODES_MAX)
            .collect();
        let of_node = |(at, id): (usize, &NodeId)| CacheShape::of_node(machine, *id, at, &usable_of(*id));
        let mut by_node: Vec<Vec<CacheShape>> = ids.iter().enumerate().map(of_node).collect();
        if by_node.iter().map(Vec::len).sum::<usize>() > NODES_MAX {
            let as_one = |caches| CacheShape::merge(caches).into_iter().collect();
            by_node = by_node.into_iter().map(as_one).collect();
        }
        let caches: Vec<CacheShape> = by_node.into_iter().flatten().collect();
        let nodes: Vec<NodeShape> = ids
            .iter()
            .enumerate()
            .map(|(at, id)| {
                let of_node = || caches.iter().filter(|cache| cache.node == at);
                let cores = of_node().map(|cache| cache.cores).sum();
                NodeShape {
                    id: *id,
                    cores,
                    cpus: of_node().map(|cache| cache.cpus).sum(),
                    bandwidth: machine.nodes[*id]
                        .memory_bandwidth
                        .filter(|known| known.0 > 0)
                        .map_or(config.bandwidth_per_core.as_f64() * cores, BytesPerSec::as_f64),
                    caches: mask_of(caches.iter(), |cache| cache.node == at),
                }
            })
            .collect();
        let ratio = |a: &NodeShape, b: &NodeShape| {
            let distance = machine.distance(a.id, b.id).unwrap_or(10).max(10);
            1.0 + config.distance_real * (f64::from(distance) / 10.0 - 1.0)
        };
        let latency = nodes
            .iter()
            .flat_map(|a| nodes.iter().map(move |b| ratio(a, b)))
            .collect();
        Shape {
            near: Near::of(machine, &ids),
            nodes,
            caches,
            latency,
            smt_stretch: config.smt_stretch,
        }
    }

    /// Returns the position of a node.
    pub fn position(&self, id: NodeId) -> Option<usize> {
        self.nodes.iter().position(|node| node.id == id)
    }

    /// Returns all caches of a set of nodes; `None` if a node is unknown.
    pub fn mask(&self, nodes: &NodeSet) -> Option<u64> {
        let caches_of = |id| Some(self.nodes[self.position(id)?].caches);
        nodes.iter().map(caches_of).sum()
    }

    /// Returns the caches of the mask that have some of these CPUs.
    pub fn caches_of(&self, mask: u64, cpus: &CpuSet) -> u64 {
        mask & mask_of(self.caches.iter(), |cache| {
            !cache.cpu_set.intersection(cpus).is_empty()
        })
    }

    /// Returns the nodes of these caches, as a mask of positions.
    pub fn node_mask(&self, mask: u64) -> u64 {
        positions(mask).fold(0, |nodes, at| nodes | 1 << self.caches[at].node)
    }

    /// Returns all caches of the nodes at these positions.
    pub fn caches_on(&self, node_mask: u64) -> u64 {
        positions(node_mask).fold(0, |caches, at| caches | self.nodes[at].caches)
    }

    /// Returns the nodes of these caches.
    pub fn nodes_of(&self, mask: u64) -> NodeSet {
        positions(self.node_mask(mask))
            .map(|at| self.nodes[at].id)
            .collect()
    }

    /// Returns the CPUs of these caches.
    pub fn cpus_of(&self, mask: u64) -> CpuSet {
        positions(mask)
            .flat_map(|at| self.caches[at].cpu_set.iter())
            .collect()
    }

    /// Returns all caches.
    pub fn all(&self) -> u64 {
        mask_of(self.caches.iter(), |_| true)
    }

    /// Returns the number of cores of all nodes.
    pub fn cores(&self) -> f64 {
        self.nodes.iter().map(|node| node.cores).sum()
    }

    /// Returns the number of CPUs of all nodes, hyperthreads included.
    pub fn cpus(&self) -> f64 {
        self.nodes.iter().map(|node| node.cpus).sum()
    }

    pub(super) fn latency_between(&self, from: usize, to: usize) -> f64 {
        self.latency[from * self.nodes.len() + to]
    }
}

/// Returns the positions of the elements for which `is_it` holds, as a mask.
fn mask_of<T>(all: impl Iterator<Item = T>, is_it: impl Fn(T) -> bool) -> u64 {
    all.enumerate()
        .fold(0, |mask, (at, of)| mask | u64::from(is_it(of)) << at)
}
