//! Memory controllers and links under load: the latency of an access from one node to another, and limits on throughput.
//!
//! # Model
//!
//! - An access by a CPU of node `s` to memory of node `n` takes `L(s, n) = T(n) + sum of T(l)` over the links `l` that the data
//!   takes from `n` to `s`. `T = T0 * g(u)`, `g(u) = 1 + alpha u + beta u^1.5 / (1 - u)`,
//!   `u = min(load / (1.02 capacity), 0.985)`, with `T0` the controller's unloaded latency or a link's hop
//!   (`facts/simulators.md`, 3.3 item 4: within 4 percent of measured curves).
//! - The curve alone does not keep the load below capacity, so `T` is at least the value at which it does. Threads have a bounded
//!   number of misses in flight, so according to Little's law their traffic falls as `1 / T` (item 5). The fixed point therefore
//!   yields `T_sat = 64 * sum of in-flight misses / capacity` by itself, and a full controller does not hold back programs that
//!   rarely miss.
//! - Traffic: a missed line moves from the page's node to the CPU's; a share `write_share` of the lines returns later. Every byte
//!   counts at the controller and on each link of its route. A *scattered* line is one that does not follow on another in memory.
//!   It opens a DRAM page of its own and occupies a controller as long as `1 / s` lines of a stream do, `s` being the machine's
//!   `scattered_throughput`. So it loads the controller with as many bytes, but links only with its own.
//!
//! # Algorithm
//!
//! Fixed point over the latencies, started at the last solution. Each step determines for each resource which `T` would be
//! consistent if its traffic responded as `1 / T`. That is the strongest response possible, so a step never overshoots and needs
//! no damping. With `T` expressed by load, the equation is `u g(u) = K`: increasing and convex, so Newton's method from the right
//! solves it in three or four steps. If a bounded number of steps leaves a load above capacity, max-min sharing along routes cuts
//! it ([`super::share`]). Only that last case allocates.
//!
//! # Left out
//!
//! Requests and coherence traffic (data only); the load of zeroing new pages (it is counted as traffic); different costs of reads
//! and writes at the controller; DRAM banks; streams that close each other's DRAM pages; directory lookups.

use std::ops::Range;

use homenode_machine::{Hardware, Link};

use super::core::CoreCost;
use super::resource::{Resource, answer};
use super::share::{Demand, max_min};
use super::topology::Topology;

/// Most steps of the fixed-point iteration.
const STEPS_MAX: usize = 16;
/// Largest relative change of latencies at which the iteration has converged.
const CHANGE_MAX: f64 = 1e-3;
/// Load over capacity beyond which max-min sharing applies.
const OVERLOAD: f64 = 1.002;

/// A node that a share of a thread's accesses goes to. Nodes that a thread never accesses have no target: most threads access
/// one or two nodes of eight, and each step of a solution visits every target of every thread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Target {
    pub node: usize,
    /// Share of the thread's accesses, above 0.
    pub share: f64,
}

impl Target {
    /// Returns the targets of accesses that are spread over the nodes according to `weights`.
    pub(crate) fn all(weights: &[f64]) -> impl Iterator<Item = Target> {
        let nodes = weights.iter().enumerate();
        let targets = nodes.map(|(node, share)| Target { node, share: *share });
        targets.filter(|target| target.share != 0.0)
    }
}

/// A target of a thread of the present solution.
#[derive(Clone, Copy, Debug)]
struct Aim {
    /// The thread's CPU and the memory, as a position in [`Fabric::pairs`].
    pair: usize,
    /// Node of the memory.
    node: usize,
    /// Share of the thread's accesses.
    share: f64,
}

/// A running thread, as the fabric sees it.
#[derive(Clone, Debug)]
struct Flow {
    /// The thread's targets, as positions in [`Fabric::aims`].
    aims: Range<usize>,
    /// Time per instruction, without waits for memory.
    busy_ns: f64,
    /// Number of memory latencies that an instruction waits for.
    waits: f64,
    /// Bytes missed per instruction.
    bytes: f64,
    /// Share of missed lines that are written back.
    write_share: f64,
    /// How much longer an average line of this flow occupies a controller than a line of a stream does, as a ratio minus 1.
    excess: f64,
}

impl Flow {
    /// Returns the bytes missed per nanosecond at this latency.
    fn rate(&self, latency_ns: f64) -> f64 {
        self.bytes / (self.busy_ns + self.waits * latency_ns)
    }
}

/// Traffic that does not depend on latency, in bytes per nanosecond from one node to another node's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copying {
    pub from: usize,
    pub to: usize,
    pub rate: f64,
    /// Whether a device sends the data, rather than the memory of `from`.
    pub by_device: bool,
}

impl Copying {
    /// Returns the nodes whose controllers the traffic loads.
    fn controllers(&self) -> impl Iterator<Item = usize> {
        let read = (!self.by_device).then_some(self.from);
        read.into_iter().chain([self.to])
    }
}

/// A CPU's node and a memory node, and the links between them as positions in [`Fabric::links`].
#[derive(Clone, Debug)]
struct Pair {
    memory_node: usize,
    /// From the CPU to the memory: what written lines take.
    there: Range<usize>,
    /// From the memory to the CPU: what read lines take.
    back: Range<usize>,
}

/// Present latencies of controllers and links.
#[derive(Clone, Debug)]
pub(crate) struct Fabric {
    nodes: usize,
    clock_ghz: f64,
    line_bytes: f64,
    /// How much longer a scattered line occupies a controller than a line of a stream does, as a ratio minus 1.
    scattered_excess: f64,
    /// Unloaded latencies, curves, capacities and present latencies of controllers first, then of links.
    resources: Vec<Resource>,
    /// Pairs of nodes at `cpu_node * nodes + memory_node`, and their links' positions among the resources.
    pairs: Vec<Pair>,
    links: Vec<usize>,
    /// Present latency of each pair.
    latency: Vec<f64>,
    /// Threads of the present solution, and what each thread's accesses go to.
    flows: Vec<Flow>,
    aims: Vec<Aim>,
    /// Whether a thread of the present solution uses a pair, and the pairs that are used, in order.
    is_used: Vec<bool>,
    used: Vec<usize>,
    /// Share of its speed that throughput limits leave each thread; empty if they take nothing.
    granted: Vec<f64>,
    loads: Vec<f64>,
    /// Bytes that threads read and write, by pair.
    traffic: Vec<Traffic>,
    /// Scratch of [`answer`].
    moved: Vec<usize>,
}

/// Bytes per nanosecond between a CPU's node and a memory node.
#[derive(Clone, Copy, Debug, Default)]
struct Traffic {
    read: f64,
    written: f64,
}

/// Returns the mean latency of a thread's accesses.
#[inline(always)]
fn mean_latency(latency: &[f64], aims: &[Aim]) -> f64 {
    aims.iter().map(|aim| latency[aim.pair] * aim.share).sum()
}

impl Fabric {
    pub(crate) fn new(topology: &Topology, hw: &Hardware, line_bytes: f64) -> Fabric {
        let nodes = topology.nodes();
        let controller = |(cap, ns): (&f64, &f64)| Resource::new(*ns, hw.memory_curve, *cap);
        // A hop without latency could not hold the load below the link's capacity.
        let hop_ns = |link: &Link| link.hop_ns.unwrap_or(hw.link.hop_ns).max(1.0);
        let link = |(link, cap): (&Link, &f64)| Resource::new(hop_ns(link), hw.link.curve, *cap);
        let resources: Vec<Resource> = topology
            .controller_caps
            .iter()
            .zip(&topology.memory_ns)
            .map(controller)
            .chain(topology.links.iter().zip(&topology.link_caps).map(link))
            .collect();
        let mut links = Vec::new();
        let routes = topology.routes.iter().flatten().map(|route| {
            let begin = links.len();
            links.extend(route.iter().map(|link| nodes + link));
            begin..links.len()
        });
        let routes: Vec<Range<usize>> = routes.collect();
        let pair = |at: usize| Pair {
            memory_node: at % nodes,
            there: routes[at].clone(),
            back: routes[at % nodes * nodes + at / nodes].clone(),
        };
        let mut fabric = Fabric {
            nodes,
            clock_ghz: hw.clock_hz as f64 / 1e9,
            line_bytes,
            scattered_excess: 1.0 / hw.scattered_throughput.unwrap_or(1.0) - 1.0,
            loads: vec![0.0; resources.len()],
            moved: vec![0; resources.len()],
            resources,
            pairs: (0..nodes * nodes).map(pair).collect(),
            links,
            latency: vec![0.0; nodes * nodes],
            flows: Vec::new(),
            aims: Vec::new(),
            is_used: vec![false; nodes * nodes],
            used: Vec::new(),
            granted: Vec::new(),
            traffic: vec![Traffic::default(); nodes * nodes],
        };
        fabric.sum_latencies(0..nodes * nodes);
        fabric
    }

    /// Returns the mean latency of accesses by a CPU of `node` to these targets.
    pub(crate) fn latency_ns(&self, node: usize, targets: &[Target]) -> f64 {
        let latencies = &self.latency[node * self.nodes..(node + 1) * self.nodes];
        let weighted = targets.iter().map(|target| latencies[target.node] * target.share);
        weighted.sum()
    }

    /// Returns the latency of an access from a CPU's node to a memory node.
    pub(crate) fn latency_between(&self, cpu_node: usize, memory_node: usize) -> f64 {
        self.latency[cpu_node * self.nodes + memory_node]
    }

    /// Returns the links from one node to another, as positions in [`Topology::links`].
    pub(crate) fn route(&self, from: usize, to: usize) -> impl Iterator<Item = usize> + '_ {
        let route = &self.pairs[from * self.nodes + to].there;
        self.links[route.clone()]
            .iter()
            .map(|resource| resource - self.nodes)
    }

    /// Computes the latency of some pairs from those of their controllers and links.
    fn sum_latencies(&mut self, pairs: impl Iterator<Item = usize>) {
        for at in pairs {
            let pair = &self.pairs[at];
            let links = &self.links[pair.back.clone()];
            let hops: f64 = links.iter().map(|at| self.resources[*at].now_ns).sum();
            self.latency[at] = self.resources[pair.memory_node].now_ns + hops;
        }
    }

    /// Begins a new solution without threads.
    pub(crate) fn clear(&mut self) {
        self.flows.clear();
        self.aims.clear();
    }

    /// Adds a thread that runs on a CPU of `node`; returns its number in this solution.
    pub(crate) fn add(
        &mut self,
        node: usize,
        cost: &CoreCost,
        write_share: f64,
        targets: &[Target],
    ) -> usize {
        let excess = if self.scattered_excess > 0.0 && cost.misses > 0.0 {
            self.scattered_excess * cost.scattered / cost.misses
        } else {
            0.0
        };
        let begin = self.aims.len();
        self.aims.extend(targets.iter().map(|target| Aim {
            pair: node * self.nodes + target.node,
            node: target.node,
            share: target.share,
        }));
        self.flows.push(Flow {
            aims: begin..self.aims.len(),
            busy_ns: cost.busy_cycles / self.clock_ghz,
            waits: cost.waits,
            bytes: cost.misses * self.line_bytes,
            write_share,
            excess,
        });
        self.flows.len() - 1
    }

    /// Solves for the latencies at which the added threads run.
    pub(crate) fn solve(&mut self, copying: &[Copying]) {
        self.find_used();
        let used = std::mem::take(&mut self.used);
        let mut has_changed = false;
        for _ in 0..STEPS_MAX {
            self.sum_loads(&used, copying);
            let change = answer(&mut self.resources, &self.loads, &mut self.moved);
            has_changed |= change > 0.0;
            if change < CHANGE_MAX {
                break;
            }
            self.sum_latencies(used.iter().copied());
        }
        self.used = used;
        if has_changed {
            self.sum_latencies(0..self.nodes * self.nodes);
        }
        #[cfg(debug_assertions)]
        self.check();
        let over = |(resource, load): (&Resource, &f64)| *load > resource.capacity * OVERLOAD;
        self.granted.clear();
        if self.resources.iter().zip(&self.loads).any(over) {
            self.granted = self.shared(copying);
        }
    }

    /// Returns the share of its speed that throughput limits leave a thread of the solution (nearly always 1).
    pub(crate) fn granted(&self, flow: usize) -> f64 {
        self.granted.get(flow).copied().unwrap_or(1.0)
    }

    /// Finds the pairs that the added threads use.
    fn find_used(&mut self) {
        for aim in &self.aims {
            self.is_used[aim.pair] = true;
        }
        self.used.clear();
        for (at, is_used) in self.is_used.iter_mut().enumerate() {
            if std::mem::take(is_used) {
                self.used.push(at);
            }
        }
    }

    /// Computes the load of each resource at the present latencies. `used` are the pairs that threads use.
    fn sum_loads(&mut self, used: &[usize], copying: &[Copying]) {
        for at in used {
            self.traffic[*at] = Traffic::default();
        }
        self.loads.fill(0.0);
        for flow in &self.flows {
            let aims = &self.aims[flow.aims.clone()];
            let bytes = flow.rate(mean_latency(&self.latency, aims));
            let written = bytes * flow.write_share;
            for aim in aims {
                let traffic = &mut self.traffic[aim.pair];
                traffic.read += bytes * aim.share;
                traffic.written += written * aim.share;
            }
            if flow.excess > 0.0 {
                let more = bytes * (1.0 + flow.write_share) * flow.excess;
                for aim in aims {
                    self.loads[aim.node] += more * aim.share;
                }
            }
        }
        for at in used {
            let (pair, Traffic { read, written }) = (&self.pairs[*at], self.traffic[*at]);
            self.loads[pair.memory_node] += read + written;
            for link in &self.links[pair.back.clone()] {
                self.loads[*link] += read;
            }
            for link in &self.links[pair.there.clone()] {
                self.loads[*link] += written;
            }
        }
        for copy in copying {
            for node in copy.controllers() {
                self.loads[node] += copy.rate;
            }
            for link in &self.links[self.pairs[copy.from * self.nodes + copy.to].there.clone()] {
                self.loads[*link] += copy.rate;
            }
        }
    }

    #[cfg(debug_assertions)]
    fn check(&self) {
        for (load, resource) in self.loads.iter().zip(&self.resources) {
            assert!(load.is_finite() && *load >= 0.0, "a load is {load}");
            assert!(
                resource.now_ns.is_finite() && resource.now_ns >= 0.999 * resource.idle_ns,
                "{resource:?}"
            );
        }
    }

    fn shared(&self, copying: &[Copying]) -> Vec<f64> {
        let mut capacities: Vec<f64> = self.resources.iter().map(|r| r.capacity.min(1e6)).collect();
        for copy in copying {
            for node in copy.controllers() {
                capacities[node] = (capacities[node] - copy.rate).max(1e-6);
            }
            for link in &self.links[self.pairs[copy.from * self.nodes + copy.to].there.clone()] {
                capacities[*link] = (capacities[*link] - copy.rate).max(1e-6);
            }
        }
        let (mut demands, mut owners) = (Vec::new(), Vec::new());
        for (owner, flow) in self.flows.iter().enumerate() {
            let aims = &self.aims[flow.aims.clone()];
            let bytes = flow.rate(mean_latency(&self.latency, aims));
            for Aim { pair, node, share } in aims {
                let mut uses = vec![(*node, (1.0 + flow.write_share) * (1.0 + flow.excess))];
                let pair = &self.pairs[*pair];
                let back = self.links[pair.back.clone()].iter();
                uses.extend(back.map(|link| (*link, 1.0)));
                let there = self.links[pair.there.clone()].iter();
                uses.extend(there.map(|link| (*link, flow.write_share)));
                demands.push(Demand {
                    rate: bytes * share,
                    uses,
                });
                owners.push(owner);
            }
        }
        let mut speeds = vec![1.0_f64; self.flows.len()];
        for (owner, share) in owners.into_iter().zip(max_min(&demands, &capacities)) {
            speeds[owner] = speeds[owner].min(share);
        }
        speeds
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_machine_files::preset;

    /// Returns the cost of a program that misses once in 50 cycles.
    fn missing() -> CoreCost {
        CoreCost {
            busy_cycles: 50.0,
            accesses: 1.0,
            misses: 1.0,
            scattered: 0.2,
            waits: 0.25,
        }
    }

    #[test]
    fn every_pair_has_the_latency_of_its_controller_and_links() {
        // Threads of nodes 0 and 1 use three pairs. A solution must bring the latency of all others up to date as well, because
        // a task that a CPU switches to may use any of them.
        let (topology, hw) = Topology::new(&preset("amd48").unwrap()).unwrap();
        let mut fabric = Fabric::new(&topology, &hw, 64.0);
        let idle = fabric.latency.clone();
        fabric.clear();
        let weights = [0.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        let both: Vec<Target> = Target::all(&weights).collect();
        for _ in 0..6 {
            fabric.add(0, &missing(), 0.3, &both);
            fabric.add(1, &missing(), 0.3, &both[..1]);
        }
        fabric.solve(&[]);
        assert_eq!(fabric.used, [0, 1, 8]);
        assert!(fabric.latency[0] > 1.01 * idle[0]);
        for (at, latency) in fabric.latency.iter().enumerate() {
            let hops = fabric
                .route(at % 8, at / 8)
                .map(|link| fabric.resources[8 + link].now_ns);
            let parts = fabric.resources[at % 8].now_ns + hops.sum::<f64>();
            assert!((latency - parts).abs() < 1e-9, "pair {at}");
        }
    }

    #[test]
    fn data_loads_the_links_of_its_stated_route() {
        // On amd6344x8 data goes from node 0 to node 3 over node 2, and back over node 1.
        let (topology, hw) = Topology::new(&preset("amd6344x8").unwrap()).unwrap();
        let mut fabric = Fabric::new(&topology, &hw, 64.0);
        let loaded = |fabric: &mut Fabric, node: usize, memory: usize| {
            let mut weights = [0.0; 8];
            weights[memory] = 1.0;
            fabric.clear();
            fabric.add(node, &missing(), 0.0, &Target::all(&weights).collect::<Vec<_>>());
            fabric.solve(&[]);
            let links = topology.links.iter().zip(&fabric.loads[8..]);
            let loaded = links.filter(|(_, load)| **load > 0.0);
            loaded
                .map(|(link, _)| (link.from.0, link.to.0))
                .collect::<Vec<_>>()
        };
        assert_eq!(loaded(&mut fabric, 3, 0), [(2, 3), (0, 2)]);
        assert_eq!(loaded(&mut fabric, 0, 3), [(1, 0), (3, 1)]);
    }
}
