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

/// A running thread, as the fabric sees it.
#[derive(Clone, Copy, Debug)]
struct Flow {
    /// Node of the thread's CPU.
    node: usize,
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
    /// Positions of each route's links among the resources, at `from * nodes + to`.
    routes: Vec<Vec<usize>>,
    /// Present latency at `cpu_node * nodes + memory_node`.
    latency: Vec<f64>,
    /// Threads of the present solution, and the share of each thread's accesses that goes to each node.
    flows: Vec<Flow>,
    weights: Vec<f64>,
    /// Share of its speed that throughput limits leave each thread; empty if they take nothing.
    granted: Vec<f64>,
    loads: Vec<f64>,
    reads: Vec<f64>,
    writes: Vec<f64>,
}

fn dot(latencies: &[f64], weights: &[f64]) -> f64 {
    latencies
        .iter()
        .zip(weights)
        .map(|(latency, weight)| latency * weight)
        .sum()
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
        let as_resources = |route: &Vec<usize>| route.iter().map(|link| nodes + link).collect();
        let mut fabric = Fabric {
            nodes,
            clock_ghz: hw.clock_hz as f64 / 1e9,
            line_bytes,
            scattered_excess: 1.0 / hw.scattered_throughput.unwrap_or(1.0) - 1.0,
            loads: vec![0.0; resources.len()],
            resources,
            routes: topology.routes.iter().flatten().map(as_resources).collect(),
            latency: vec![0.0; nodes * nodes],
            flows: Vec::new(),
            weights: Vec::new(),
            granted: Vec::new(),
            reads: vec![0.0; nodes * nodes],
            writes: vec![0.0; nodes * nodes],
        };
        fabric.sum_latencies();
        fabric
    }

    /// Returns the mean latency of accesses by a CPU of `node` that are spread over the nodes' memory according to `weights`.
    pub(crate) fn latency_ns(&self, node: usize, weights: &[f64]) -> f64 {
        let row = &self.latency[node * self.nodes..(node + 1) * self.nodes];
        dot(row, weights)
    }

    /// Returns the latency of an access from a CPU's node to a memory node.
    pub(crate) fn latency_between(&self, cpu_node: usize, memory_node: usize) -> f64 {
        self.latency[cpu_node * self.nodes + memory_node]
    }

    /// Returns the links from one node to another, as positions in [`Topology::links`].
    pub(crate) fn route(&self, from: usize, to: usize) -> impl Iterator<Item = usize> + '_ {
        self.routes[from * self.nodes + to]
            .iter()
            .map(|resource| resource - self.nodes)
    }

    fn sum_latencies(&mut self) {
        for cpu_node in 0..self.nodes {
            for memory_node in 0..self.nodes {
                let links = &self.routes[memory_node * self.nodes + cpu_node];
                let hops: f64 = links.iter().map(|at| self.resources[*at].now_ns).sum();
                self.latency[cpu_node * self.nodes + memory_node] = self.resources[memory_node].now_ns + hops;
            }
        }
    }

    /// Begins a new solution without threads.
    pub(crate) fn clear(&mut self) {
        self.flows.clear();
        self.weights.clear();
    }

    /// Adds a thread that runs on a CPU of `node`; returns its number in this solution.
    pub(crate) fn add(&mut self, node: usize, cost: &CoreCost, write_share: f64, weights: &[f64]) -> usize {
        let excess = if self.scattered_excess > 0.0 && cost.misses > 0.0 {
            self.scattered_excess * cost.scattered / cost.misses
        } else {
            0.0
        };
        self.flows.push(Flow {
            node,
            busy_ns: cost.busy_cycles / self.clock_ghz,
            waits: cost.waits,
            bytes: cost.misses * self.line_bytes,
            write_share,
            excess,
        });
        self.weights.extend_from_slice(weights);
        self.flows.len() - 1
    }

    /// Solves for the latencies at which the added threads run.
    pub(crate) fn solve(&mut self, copying: &[Copying]) {
        for _ in 0..STEPS_MAX {
            self.sum_loads(copying);
            let change = answer(&mut self.resources, &self.loads);
            if change > 0.0 {
                self.sum_latencies();
            }
            if change < CHANGE_MAX {
                break;
            }
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

    fn sum_loads(&mut self, copying: &[Copying]) {
        self.reads.fill(0.0);
        self.writes.fill(0.0);
        self.loads.fill(0.0);
        let nodes = self.nodes;
        for (flow, weights) in self.flows.iter().zip(self.weights.chunks_exact(nodes)) {
            let row = flow.node * nodes..(flow.node + 1) * nodes;
            let bytes = flow.rate(dot(&self.latency[row.clone()], weights));
            let (reads, writes) = (&mut self.reads[row.clone()], &mut self.writes[row]);
            for ((read, write), weight) in reads.iter_mut().zip(writes).zip(weights) {
                *read += bytes * weight;
                *write += bytes * flow.write_share * weight;
            }
            if flow.excess > 0.0 {
                let more = bytes * (1.0 + flow.write_share) * flow.excess;
                for (load, weight) in self.loads.iter_mut().zip(weights) {
                    *load += more * weight;
                }
            }
        }
        for cpu_node in 0..self.nodes {
            for memory_node in 0..self.nodes {
                let (there, back) = (
                    cpu_node * self.nodes + memory_node,
                    memory_node * self.nodes + cpu_node,
                );
                let (read, write) = (self.reads[there], self.writes[there]);
                if read == 0.0 {
                    continue;
                }
                self.loads[memory_node] += read + write;
                for link in &self.routes[back] {
                    self.loads[*link] += read;
                }
                for link in &self.routes[there] {
                    self.loads[*link] += write;
                }
            }
        }
        for copy in copying {
            for node in copy.controllers() {
                self.loads[node] += copy.rate;
            }
            for link in &self.routes[copy.from * self.nodes + copy.to] {
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
            for link in &self.routes[copy.from * self.nodes + copy.to] {
                capacities[*link] = (capacities[*link] - copy.rate).max(1e-6);
            }
        }
        let (mut demands, mut owners) = (Vec::new(), Vec::new());
        for (owner, (flow, weights)) in self
            .flows
            .iter()
            .zip(self.weights.chunks_exact(self.nodes))
            .enumerate()
        {
            let bytes = flow.rate(self.latency_ns(flow.node, weights));
            for (memory_node, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
                let mut uses = vec![(memory_node, (1.0 + flow.write_share) * (1.0 + flow.excess))];
                uses.extend(
                    self.routes[memory_node * self.nodes + flow.node]
                        .iter()
                        .map(|link| (*link, 1.0)),
                );
                let out = &self.routes[flow.node * self.nodes + memory_node];
                uses.extend(out.iter().map(|link| (*link, flow.write_share)));
                demands.push(Demand {
                    rate: bytes * weight,
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
