//! Chooses nodes for a request as numad does: step 3 of [`super`].
//!
//! # Algorithm
//! 1. What the process itself uses counts as free where it is. If the process is not bound yet, 17/16 of its memory on each
//!    node are added, and its CPU use in proportion to that memory. If it is bound, 5/4 of its memory on each node are added,
//!    and each of its nodes offers the mean of its nodes' free CPU and its own CPU use together.
//! 2. The number of nodes is the requested memory over the first node's total, or the requested CPU over the first node's
//!    CPUs, whichever is more. A running process may lack a little CPU: 7.5 percent of the first node's.
//! 3. Starting from each node, the nodes are sorted by distance, then by magnitude. For as many of these nodes as are needed,
//!    magnitude over squared distance is summed. The start is the node with the largest sum.
//! 4. In the order from the start, nodes are taken until there are enough and the request is met; each supplies its free
//!    memory less 100 MiB. CPU does not count if all processes together use less than the host has. A request that is never
//!    met gets all nodes.

use homenode_units::{NodeId, NodeSet};

/// Memory of each node that is never assigned, in MiB.
const MARGIN_MIB: i64 = 100;
/// Share of the first node's CPUs that a running process may lack, in thousandths: half of the gap between the target
/// utilisation and 1.
const FLEX_THOUSANDTHS: i64 = 75;

/// Returns a count as numad's signed type, because differences may be negative. A count that is too large becomes the maximum.
pub(super) fn whole(count: impl TryInto<i64>) -> i64 {
    count.try_into().unwrap_or(i64::MAX)
}

/// A node's resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// The node.
    pub id: NodeId,
    /// Total memory, in MiB.
    pub memory_mib: i64,
    /// Assignable memory, in MiB.
    pub free_mib: i64,
    /// Total CPUs, in hundredths of a CPU.
    pub cpus: i64,
    /// CPUs that were idle, in hundredths of a CPU; at most [`Node::cpus`].
    pub cpus_free: i64,
    /// Distance to each node, in the nodes' order; 10 to itself.
    pub distances: Vec<i64>,
}

/// Resources for which nodes are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// CPU, in hundredths of a CPU.
    pub cpus: i64,
    /// Memory, in MiB.
    pub memory_mib: i64,
}

/// A process that already runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Running {
    /// Nodes that the process is bound to, or all nodes if it was never bound.
    pub nodes: NodeSet,
    /// The process's memory on each node, in MiB and in the nodes' order.
    pub memory_mib: Vec<i64>,
    /// The process's total memory, in MiB; above 0.
    pub used_mib: i64,
    /// CPU that the process uses, in hundredths of a CPU.
    pub cpus_used: i64,
    /// Whether all processes together use no more CPU than the host has.
    pub has_enough_cpus: bool,
}

/// Returns the answer of `numad -w`: nodes for a process that does not run yet. numad does not remember it, so the next
/// process gets the same nodes.
pub fn advise(nodes: &[Node], request: Request) -> NodeSet {
    let chosen = pick(nodes, request, None);
    match nodes.first().filter(|_| chosen.is_empty()) {
        Some(first) => NodeSet::one(first.id),
        None => chosen,
    }
}

/// Returns nodes for a request. A running process is biased towards its own nodes. The set is empty only for an empty request.
pub fn pick(nodes: &[Node], mut request: Request, running: Option<&Running>) -> NodeSet {
    let mut chosen = NodeSet::new();
    let Some(first) = nodes.first() else { return chosen };
    let (offers, cpus_offered) = offers(nodes, running);
    let has_enough_cpus = running.is_some_and(|p| p.has_enough_cpus || request.cpus > cpus_offered);
    let flex = running.map_or(0, |_| first.cpus * FLEX_THOUSANDTHS / 1000);
    let needed = of_first(request.memory_mib, first.memory_mib, nodes)
        .max(of_first(request.cpus - flex, first.cpus, nodes))
        .min(nodes.len());
    let magnitudes: Vec<i64> = offers.iter().map(|offer| offer.magnitude(request)).collect();
    let sum = |start: usize| -> i64 {
        let order = by_distance(nodes, &magnitudes, start);
        let worth = |at: &usize| magnitudes[*at] / nodes[*at].distances[start].pow(2).max(1);
        order.iter().take(needed).map(worth).sum()
    };
    let start = (0..nodes.len())
        .rev()
        .max_by_key(|start| sum(*start))
        .unwrap_or(0);
    for (taken, at) in by_distance(nodes, &magnitudes, start).into_iter().enumerate() {
        let is_met = request.memory_mib <= 0 && (has_enough_cpus || request.cpus <= flex);
        if taken >= needed && is_met {
            break;
        }
        chosen.insert(nodes[at].id);
        request = offers[at].take(request);
    }
    chosen
}

/// Returns how many nodes like the first one the request takes; all nodes if the first has nothing.
fn of_first(asked: i64, has: i64, nodes: &[Node]) -> usize {
    match has {
        ..=0 => nodes.len(),
        _ => (asked.max(0) as u64).div_ceil(has as u64) as usize,
    }
}

/// What a node offers to a request.
#[derive(Clone, Copy, Debug)]
struct Offer {
    free_mib: i64,
    cpus_free: i64,
}

impl Offer {
    fn magnitude(self, request: Request) -> i64 {
        let of = |free: i64, asked: i64| (free.min(asked), (free - asked).max(0));
        let (memory, memory_left) = of(self.free_mib, request.memory_mib);
        let (cpus, cpus_left) = of(self.cpus_free, request.cpus);
        (10 * memory + 4 * memory_left) * (6 * cpus + cpus_left)
    }

    /// Returns what is left of the request after the node's share.
    fn take(self, request: Request) -> Request {
        let memory_mib = match self.free_mib >= request.memory_mib + MARGIN_MIB {
            true => 0,
            false => request.memory_mib - (self.free_mib - MARGIN_MIB),
        };
        Request {
            cpus: (request.cpus - self.cpus_free).max(0),
            memory_mib,
        }
    }
}

/// Step 1: returns the nodes' offers, and the sum of the CPUs offered.
fn offers(nodes: &[Node], running: Option<&Running>) -> (Vec<Offer>, i64) {
    let plain = |node: &Node| Offer {
        free_mib: node.free_mib,
        cpus_free: node.cpus_free.max(1),
    };
    let Some(process) = running else {
        return (nodes.iter().map(plain).collect(), 0);
    };
    let is_bound = process.nodes.len() < nodes.len();
    let own = nodes.iter().filter(|node| process.nodes.contains(node.id));
    let mean =
        (process.cpus_used + own.map(|node| node.cpus_free).sum::<i64>()) / whole(process.nodes.len()).max(1);
    let mut cpus_offered = 0;
    let offers = nodes.iter().zip(&process.memory_mib).map(|(node, here)| {
        let (memory, cpus) = match is_bound {
            false => (
                here * 17 / 16,
                node.cpus_free + process.cpus_used * here / process.used_mib.max(1),
            ),
            true if process.nodes.contains(node.id) => (here * 5 / 4, mean),
            true => (here * 5 / 4, node.cpus_free),
        };
        cpus_offered += cpus;
        Offer {
            free_mib: (node.free_mib + memory).min(node.memory_mib),
            cpus_free: cpus.min(node.cpus).max(1),
        }
    });
    (offers.collect(), cpus_offered)
}

/// Returns the nodes sorted by distance, then by magnitude. It is a selection sort, as in numad, because that decides the
/// order of equal nodes.
fn by_distance(nodes: &[Node], magnitudes: &[i64], from: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    let key = |at: usize| (nodes[at].distances[from], -magnitudes[at]);
    for at in 0..order.len() {
        let first = (at + 1..order.len()).fold(at, |first, other| {
            if key(order[other]) < key(order[first]) {
                other
            } else {
                first
            }
        });
        order.swap(at, first);
    }
    order
}
