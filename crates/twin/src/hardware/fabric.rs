//! Memory controllers and links under load: latency of an access from a node to a node, and throughput caps.
//!
//! # Model
//!
//! - An access by a CPU of node `s` to memory of node `n` takes `L(s, n) = T(n) + sum of T(l)` over the links `l` that
//!   the data takes from `n` to `s`; `T = T0 * g(u)`, `g(u) = 1 + alpha u + beta u^1.5 / (1 - u)`,
//!   `u = min(load / (1.02 capacity), 0.985)`, with `T0` the controller's unloaded latency or a link's hop
//!   (`facts/simulators.md`, 3.3 item 4: within 4 percent of measured curves).
//! - The curve alone does not keep load below capacity, so `T` is at least the value at which it does: threads have
//!   a bounded number of misses in flight, so by Little's law their traffic falls as `1 / T` (item 5:
//!   `T_sat = 64 * sum of in-flight misses / capacity` comes out of the fixed point by itself, and programs that rarely
//!   miss are not held back by a full controller).
//! - Traffic: a missed line moves from the page's node to the CPU's; `write_share` of them return later. Every byte
//!   counts at the controller and on each link of its route.
//!
//! # Algorithm
//!
//! Damped fixed point over the latencies, started at the last solution. Each step asks for each resource which `T`
//! would be consistent if its traffic answered as `1 / T`: the strongest answer possible, so a step never
//! overshoots. What a bounded number of steps leaves above capacity, max-min sharing along routes takes away
//! ([`super::share`]).
//!
//! # Left out
//!
//! Requests and coherence traffic (data only), the load of zeroing new pages (it is counted as traffic), reads and writes
//! with different costs at the controller, DRAM pages
//! and banks, directory lookups.

use homenode_machine::{Hardware, LoadCurve};

use super::core::CoreCost;
use super::share::{Demand, max_min};
use super::topology::Topology;

/// Steps of the fixed point at most.
const STEPS_MAX: usize = 16;
/// Largest relative change of a latency at which it counts as found.
const CHANGE_MAX: f64 = 1e-3;
/// Share of the way to the consistent latency that a step goes.
const DAMPING: f64 = 0.7;
/// Load over capacity beyond which max-min sharing steps in.
const OVERLOAD: f64 = 1.002;

/// A running thread, as the fabric sees it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Flow<'a> {
    /// Node of its CPU.
    pub node: usize,
    /// What its instructions cost.
    pub cost: CoreCost,
    /// Share of missed lines that are written back.
    pub write_share: f64,
    /// Share of its memory accesses by node.
    pub weights: &'a [f64],
}

/// Traffic that does not answer to latency: bytes per nanosecond from a node's memory to another node's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Copying {
    pub from: usize,
    pub to: usize,
    pub rate: f64,
}

/// Latencies of controllers and links now.
#[derive(Clone, Debug)]
pub(crate) struct Fabric {
    nodes: usize,
    clock_ghz: f64,
    line_bytes: f64,
    /// Unloaded latencies, curves, capacities and present latencies: controllers first, then links.
    resources: Vec<Resource>,
    /// Link resources of each route, by `from * nodes + to`.
    routes: Vec<Vec<usize>>,
    /// Present latency by `cpu_node * nodes + memory_node`.
    latency: Vec<f64>,
    loads: Vec<f64>,
    reads: Vec<f64>,
    writes: Vec<f64>,
}

#[derive(Clone, Debug)]
struct Resource {
    idle_ns: f64,
    now_ns: f64,
    curve: LoadCurve,
    capacity: f64,
}

impl Resource {
    /// Latency at which this load would be consistent if it answered as `1 / latency`.
    fn consistent_ns(&self, load: f64) -> f64 {
        if self.capacity.is_infinite() || load <= 0.0 {
            return self.idle_ns;
        }
        let curve_at = |load: f64| self.idle_ns * growth(self.curve, load / self.capacity);
        // The lowest latency at which the load stays within capacity.
        let capped = self.now_ns * load / self.capacity;
        if load < 0.5 * self.capacity {
            return curve_at(load); // flat enough to need no care
        }
        let (mut low, mut high) = (self.idle_ns, curve_at(f64::INFINITY).max(self.now_ns));
        for _ in 0..24 {
            let middle = 0.5 * (low + high);
            if curve_at(load * self.now_ns / middle) > middle {
                low = middle;
            } else {
                high = middle;
            }
            if high - low < 1e-4 * high {
                break;
            }
        }
        high.max(capped)
    }
}

/// `g(u)` for a load over capacity.
pub(crate) fn growth(curve: LoadCurve, load_ratio: f64) -> f64 {
    let u = (load_ratio / 1.02).min(0.985);
    1.0 + curve.alpha * u + curve.beta * u * u.sqrt() / (1.0 - u)
}

impl Fabric {
    pub fn new(topology: &Topology, hw: &Hardware, line_bytes: f64) -> Fabric {
        let nodes = topology.nodes();
        let controller = |cap: &f64| Resource {
            idle_ns: hw.latency.memory_ns,
            now_ns: hw.latency.memory_ns,
            curve: hw.memory_curve,
            capacity: *cap,
        };
        // A hop that costs nothing could not hold back what the link cannot carry.
        let hop_ns = hw.link.hop_ns.max(1.0);
        let link = |cap: &f64| Resource {
            idle_ns: hop_ns,
            now_ns: hop_ns,
            curve: hw.link.curve,
            capacity: *cap,
        };
        let resources: Vec<Resource> = topology
            .controller_caps
            .iter()
            .map(controller)
            .chain(topology.link_caps.iter().map(link))
            .collect();
        let as_resources = |route: &Vec<usize>| route.iter().map(|link| nodes + link).collect();
        let mut fabric = Fabric {
            nodes,
            clock_ghz: hw.clock_hz as f64 / 1e9,
            line_bytes,
            loads: vec![0.0; resources.len()],
            resources,
            routes: topology.routes.iter().flatten().map(as_resources).collect(),
            latency: vec![0.0; nodes * nodes],
            reads: vec![0.0; nodes * nodes],
            writes: vec![0.0; nodes * nodes],
        };
        fabric.sum_latencies();
        fabric
    }

    /// Latency of an access by a CPU of `node` whose accesses are spread over memory by `weights`.
    pub fn latency_ns(&self, node: usize, weights: &[f64]) -> f64 {
        let row = &self.latency[node * self.nodes..(node + 1) * self.nodes];
        row.iter()
            .zip(weights)
            .map(|(latency, weight)| latency * weight)
            .sum()
    }

    /// Latency from a node to a node.
    pub fn latency_between(&self, cpu_node: usize, memory_node: usize) -> f64 {
        self.latency[cpu_node * self.nodes + memory_node]
    }

    /// Links (as numbers of [`Topology::links`]) from a node to a node.
    pub fn route(&self, from: usize, to: usize) -> impl Iterator<Item = usize> + '_ {
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

    /// Finds the latencies at which these threads run, and gives for each the share of its speed that throughput
    /// caps leave it (1 nearly always).
    pub fn solve(&mut self, flows: &[Flow<'_>], copying: &[Copying]) -> Vec<f64> {
        for _ in 0..STEPS_MAX {
            self.sum_loads(flows, copying);
            let mut change = 0.0_f64;
            for (resource, load) in self.resources.iter_mut().zip(&self.loads) {
                let wanted = resource.consistent_ns(*load);
                let next = resource.now_ns + DAMPING * (wanted - resource.now_ns);
                change = change.max((next - resource.now_ns).abs() / resource.now_ns);
                resource.now_ns = next;
            }
            self.sum_latencies();
            if change < CHANGE_MAX {
                break;
            }
        }
        self.sum_loads(flows, copying);
        #[cfg(debug_assertions)]
        self.check();
        let over = |(resource, load): (&Resource, &f64)| *load > resource.capacity * OVERLOAD;
        if self.resources.iter().zip(&self.loads).any(over) {
            return self.shared(flows, copying);
        }
        vec![1.0; flows.len()]
    }

    fn miss_bytes(&self, flow: &Flow<'_>) -> f64 {
        let latency = self.latency_ns(flow.node, flow.weights);
        flow.cost.misses * self.line_bytes / flow.cost.ns_per_instruction(self.clock_ghz, latency)
    }

    fn sum_loads(&mut self, flows: &[Flow<'_>], copying: &[Copying]) {
        self.reads.fill(0.0);
        self.writes.fill(0.0);
        self.loads.fill(0.0);
        for flow in flows {
            let bytes = self.miss_bytes(flow);
            let row = flow.node * self.nodes;
            for (memory_node, weight) in flow.weights.iter().enumerate() {
                self.reads[row + memory_node] += bytes * weight;
                self.writes[row + memory_node] += bytes * weight * flow.write_share;
            }
        }
        for cpu_node in 0..self.nodes {
            for memory_node in 0..self.nodes {
                let (there, back) = (
                    cpu_node * self.nodes + memory_node,
                    memory_node * self.nodes + cpu_node,
                );
                let (read, write) = (self.reads[there], self.writes[there]);
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
            self.loads[copy.from] += copy.rate;
            self.loads[copy.to] += copy.rate;
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

    fn shared(&self, flows: &[Flow<'_>], copying: &[Copying]) -> Vec<f64> {
        let mut capacities: Vec<f64> = self.resources.iter().map(|r| r.capacity.min(1e6)).collect();
        for copy in copying {
            capacities[copy.from] = (capacities[copy.from] - copy.rate).max(1e-6);
            capacities[copy.to] = (capacities[copy.to] - copy.rate).max(1e-6);
            for link in &self.routes[copy.from * self.nodes + copy.to] {
                capacities[*link] = (capacities[*link] - copy.rate).max(1e-6);
            }
        }
        let (mut demands, mut owners) = (Vec::new(), Vec::new());
        for (owner, flow) in flows.iter().enumerate() {
            let bytes = self.miss_bytes(flow);
            for (memory_node, weight) in flow
                .weights
                .iter()
                .enumerate()
                .filter(|(_, weight)| **weight > 0.0)
            {
                let mut uses = vec![(memory_node, 1.0 + flow.write_share)];
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
        let mut speeds = vec![1.0_f64; flows.len()];
        for (owner, share) in owners.into_iter().zip(max_min(&demands, &capacities)) {
            speeds[owner] = speeds[owner].min(share);
        }
        speeds
    }
}
