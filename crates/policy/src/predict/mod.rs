//! How fast every VM would be under another arrangement.
//!
//! # Problem
//! Whether a VM gains from a home depends on what it does to caches and memory, on who else is there, and on what the home
//! leaves idle elsewhere: one node has one cache and one set of controllers, a VM that the kernel spreads has them all.
//! Trying every arrangement would cost VMs more than the best one gains, so most must be told from counters.
//!
//! # Terms
//! - *Place* of a VM: [`Place::Free`], wherever the kernel puts it; [`Place::Home`], one node or several.
//! - *Arrangement*: a place for each VM.
//! - *Speed*: instructions per second, of all vCPUs together.
//! - *Character* of a VM ([`Character`]): what it asks of a host, whatever the arrangement. Learnt by [`Profiles`].
//! - *Threads* of a VM: CPUs' worth of time that it wants, running or waiting.
//! - *Capacity*: bytes of an LLC that a thread can call its own.
//!
//! # Model
//! 1. *Threads.* Homes hold their VMs' threads; threads of free VMs fill up what is least loaded, as the kernel's balancing
//!    does. More threads than CPUs share their time; more threads than cores share cores, and then the core's own work takes
//!    [`SMT_STRETCH`] times as long. Waiting for memory overlaps, which is what hyperthreads are for (Tullsen).
//! 2. *Caches.* Sharers of an LLC hold parts in proportion to how often they access it (Chandra, FOA). Threads of a VM divide
//!    its part. The miss ratio follows a power of the capacity (Hartstein); the power is
//!    learnt, from about 1/3 on.
//! 3. *Controllers.* A node's latency grows with the share `u` of its bandwidth in use as `1 + q u / (1 - u)`, an open queue
//!    with many servers (Lazowska). Where no bandwidth is known a core is taken to come with [`BANDWIDTH_PER_CORE`].
//! 4. *Distance.* An access to another node takes longer by the firmware's distance, less what that overstates
//!    ([`DISTANCE_REAL`]).
//! 5. `cycles per instruction = core + misses x stall x latency`, `core` and `stall` learnt from how cycles followed misses
//!    and latency so far (Eyerman).
//!
//! Speeds depend on shares of caches and controllers, and these on speeds: a fixed point, `STEPS` damped steps.
//!
//! # What may be missing
//! Without LLC counters there is no character and no prediction: the VM counts as threads that ask nothing of memory. Without
//! accesses by node a free VM is taken to find [`LOCAL_UNKNOWN`] of them local. Without traffic of nodes a miss is
//! taken to move [`BYTES_PER_MISS`].
//!
//! # Properties
//! - `more_company_never_makes_a_vm_faster`
//! - `the_order_of_vms_does_not_matter`
//! - `unknown_bandwidth_is_not_zero`
//! - `a_lone_vm_is_never_crowded_by_itself`
//! - `a_vm_that_computes_gains_nothing_from_a_home`
//!
//! # Sources
//! (Tullsen) ISCA 1995. (Chandra) HPCA 2005, "Predicting inter-thread cache contention". (Hartstein) CF 2006, "Cache miss
//! behavior: is it sqrt(2)?". (Lazowska) "Quantitative System Performance", 1984. (Eyerman) TOCS 2009, "A mechanistic
//! performance model". Nothing here is taken from the twin, which has other laws: an error of one must not hide
//! in the other.

mod profile;
#[cfg(test)]
mod tests;

use homenode_machine::Machine;
use homenode_units::{BytesPerSec, CpuSet, NodeId, NodeSet};

pub use profile::Profiles;

/// How much longer a core's own work takes beside a busy hyperthread: throughput of two is 1.25 of one on processors with
/// two threads a core, as published for most workloads.
pub const SMT_STRETCH: f64 = 1.6;
/// Share of what firmware says of a distance that measured latencies confirm: 21 is printed where remote accesses take 1.5 to
/// 1.7 times as long.
pub const DISTANCE_REAL: f64 = 0.6;
/// Bandwidth that comes with a core where a node's is not known, bytes per second: the balance of servers of many years
/// (STREAM tables).
pub const BANDWIDTH_PER_CORE: f64 = 3.5e9;
/// Bytes that a miss moves where nobody counts traffic: a line, and a third of a line written back.
pub const BYTES_PER_MISS: f64 = 64.0 * 4.0 / 3.0;
/// Share of its accesses that a free VM finds local, where not counted.
pub const LOCAL_UNKNOWN: f64 = 0.85;
/// Weight of the queue in the latency of a controller.
const QUEUE: f64 = 0.12;
/// A controller is never taken to be busier than this.
const BUSY_MAX: f64 = 0.95;
/// Steps of the fixed point.
const STEPS: usize = 12;
/// A cache is never taken to lower a VM's miss ratio below this share of what was seen.
const MISS_FLOOR: f64 = 0.3;
/// Most nodes that are told apart: sets of them are masks.
pub const NODES_MAX: usize = 64;

/// Where a VM lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Wherever the kernel puts it.
    Free,
    /// On these nodes, by position.
    Home(u64),
}

/// A node, as the predictor sees it.
#[derive(Clone, Debug)]
pub struct NodeShape {
    /// Which.
    pub id: NodeId,
    /// Cores that VMs may use.
    pub cores: f64,
    /// CPUs that VMs may use.
    pub cpus: f64,
    /// Bytes of its last-level caches; 0 where not known.
    pub llc_bytes: f64,
    /// Bytes per second that its controllers sustain, known or by cores.
    pub bandwidth: f64,
}

/// A host, as the predictor sees it.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Nodes with memory and CPUs, ascending.
    pub nodes: Vec<NodeShape>,
    /// Latency of an access from a node to a node without load, local = 1, row by row.
    pub latency: Vec<f64>,
}

impl Shape {
    /// The shape of a machine of which VMs may not use some CPUs.
    pub fn of(machine: &Machine, reserved: &CpuSet) -> Shape {
        let usable = machine.cpu_set().difference(reserved);
        let homes = machine.memory_nodes();
        let nodes: Vec<NodeShape> = machine
            .nodes
            .iter()
            .filter(|(id, node)| homes.contains(*id) && !node.cpus.intersection(&usable).is_empty())
            .take(NODES_MAX)
            .map(|(id, node)| {
                let cpus = node.cpus.intersection(&usable).len() as f64;
                let threads = machine.threads_per_core() as f64;
                let cores = (machine.core_count(id) as f64).min(cpus).max(cpus / threads);
                let llcs = machine.llcs_of(id);
                let part = |at: &u32| {
                    let llc = &machine.llcs[*at as usize];
                    // A cache that several nodes share counts in each with its part.
                    let here = llc.cpus.intersection(&node.cpus).len() as f64 / llc.cpus.len().max(1) as f64;
                    llc.size_bytes.as_f64() * here
                };
                NodeShape {
                    id,
                    cores,
                    cpus,
                    llc_bytes: llcs.iter().map(part).sum(),
                    bandwidth: node
                        .memory_bandwidth
                        .filter(|known| known.0 > 0)
                        .map_or(BANDWIDTH_PER_CORE * cores, BytesPerSec::as_f64),
                }
            })
            .collect();
        let ratio = |a: &NodeShape, b: &NodeShape| {
            let distance = machine.distance(a.id, b.id).unwrap_or(10).max(10);
            1.0 + DISTANCE_REAL * (f64::from(distance) / 10.0 - 1.0)
        };
        let latency = nodes
            .iter()
            .flat_map(|a| nodes.iter().map(move |b| ratio(a, b)))
            .collect();
        Shape { nodes, latency }
    }

    /// Position of a node.
    pub fn position(&self, id: NodeId) -> Option<usize> {
        self.nodes.iter().position(|node| node.id == id)
    }

    /// Mask of a set of nodes; `None` where one of them is not among these.
    pub fn mask(&self, nodes: &NodeSet) -> Option<u64> {
        nodes.iter().map(|id| Some(1 << self.position(id)?)).sum()
    }

    /// Nodes of a mask.
    pub fn nodes_of(&self, mask: u64) -> NodeSet {
        positions(mask).map(|at| self.nodes[at].id).collect()
    }

    /// All nodes.
    pub fn all(&self) -> u64 {
        self.nodes
            .iter()
            .enumerate()
            .fold(0, |mask, (at, _)| mask | 1 << at)
    }

    fn latency_between(&self, from: usize, to: usize) -> f64 {
        self.latency[from * self.nodes.len() + to]
    }
}

/// Set bits, ascending.
pub fn positions(mask: u64) -> impl Iterator<Item = usize> {
    std::iter::successors((mask != 0).then_some(mask), |rest| {
        let rest = rest & (rest - 1);
        (rest != 0).then_some(rest)
    })
    .map(|rest| rest.trailing_zeros() as usize)
}

/// What a VM asks of a host.
#[derive(Clone, Debug, PartialEq)]
pub struct Character {
    /// CPUs' worth of time that it wants.
    pub threads: f64,
    /// What it gets of a CPU that several want, by weight: share of the time it wants that it ran.
    pub share: f64,
    /// Cycles per second of a running thread.
    pub clock: f64,
    /// Cycles per instruction but for waiting for memory, on a core of its own.
    pub core: f64,
    /// Cycles that a miss stalls a thread per unloaded local latency.
    pub stall: f64,
    /// LLC references per instruction.
    pub references: f64,
    /// Miss ratio where each thread has [`Character::capacity`].
    pub miss_ratio: f64,
    /// Bytes; 0 where not known.
    pub capacity: f64,
    /// Power by which the miss ratio falls with capacity.
    pub slope: f64,
    /// Bytes that a miss moves.
    pub bytes_per_miss: f64,
    /// Share of its accesses that are local where the kernel puts it and nobody ever moved its memory.
    pub local_free: f64,
    /// Share of its memory on each node, by position, if it lies where an agent put it; else it lies where threads are.
    pub memory: Option<Vec<f64>>,
    /// Measured over modelled speed at home: what trials taught.
    pub at_home: f64,
    /// Measured over modelled speed while nobody had a home: where the kernel keeps it is not what a mean kernel does.
    pub at_free: f64,
}

/// Room for predictions, kept for its memory.
#[derive(Clone, Debug, Default)]
pub struct Room {
    /// Threads of each VM on each node, row by row.
    threads: Vec<f64>,
    /// Speed of one thread of each VM on each node.
    speeds: Vec<f64>,
    /// Latency factor of each node's controllers.
    load: Vec<f64>,
    /// What more a full controller takes, so that it carries what it can and no more.
    full: Vec<f64>,
    held: Vec<f64>,
    /// Threads on each node, each counted by what it gets of a CPU that several want.
    claims: Vec<f64>,
    /// Share of a free VM's threads that are where they would be if nobody had a home.
    stayed: f64,
    free: Vec<f64>,
    accesses: Vec<f64>,
    traffic: Vec<f64>,
    memory: Vec<f64>,
}

impl Room {
    /// Speed of each VM under an arrangement. `as_found`: free VMs have their memory where it is now; otherwise as if
    /// nobody had ever moved it, which is what no agent means.
    pub fn speeds(
        &mut self,
        shape: &Shape,
        vms: &[Character],
        places: &[Place],
        as_found: AsFound,
        out: &mut Vec<f64>,
    ) {
        let (n, v) = (shape.nodes.len(), vms.len());
        self.place_threads(shape, vms, places);
        if as_found == AsFound::No {
            self.stayed = 1.0;
        }
        self.place_memory(shape, vms, places, as_found);
        self.load.clear();
        self.load.resize(n, 1.0);
        self.full.clear();
        self.full.resize(n, 1.0);
        self.speeds.clear();
        for vm in vms {
            let guess = vm.clock / (vm.core + vm.references * vm.miss_ratio * vm.stall);
            self.speeds.extend(std::iter::repeat_n(guess, n));
        }
        for _ in 0..STEPS {
            self.step(shape, vms, places, as_found);
        }
        out.clear();
        out.extend((0..v).map(|at| {
            let row = at * n..(at + 1) * n;
            let sum: f64 = self.threads[row.clone()]
                .iter()
                .zip(&self.speeds[row])
                .map(|(threads, speed)| threads * speed)
                .sum();
            match places[at] {
                Place::Home(_) => sum * vms[at].at_home,
                Place::Free => sum * vms[at].at_free,
            }
        }));
    }

    fn place_threads(&mut self, shape: &Shape, vms: &[Character], places: &[Place]) {
        let n = shape.nodes.len();
        self.threads.clear();
        self.threads.resize(vms.len() * n, 0.0);
        self.held.clear();
        self.held.resize(n, 0.0);
        for size in 1..=n as u32 {
            let of_size = |place: &Place| matches!(place, Place::Home(mask) if mask.count_ones() == size);
            for at in (0..vms.len()).filter(|at| of_size(&places[*at])) {
                let Place::Home(mask) = places[at] else { continue };
                fill(shape, mask, &self.held, vms[at].threads, &mut self.free);
                for node in 0..n {
                    self.threads[at * n + node] = self.free[node];
                    self.held[node] += self.free[node];
                }
            }
        }
        self.lend(shape, vms.len());
        self.stayed = 1.0;
        let all_free: f64 = (0..vms.len())
            .filter(|at| places[*at] == Place::Free)
            .map(|at| vms[at].threads)
            .sum();
        if all_free > 0.0 {
            fill(shape, shape.all(), &self.held, all_free, &mut self.free);
            for at in (0..vms.len()).filter(|at| places[*at] == Place::Free) {
                for node in 0..n {
                    self.threads[at * n + node] = self.free[node] * vms[at].threads / all_free;
                }
            }
            let cpus: f64 = shape.nodes.iter().map(|node| node.cpus).sum();
            self.stayed = 0.0;
            for node in 0..n {
                self.held[node] += self.free[node];
                self.stayed += (self.free[node] / all_free).min(shape.nodes[node].cpus / cpus);
            }
        }
        self.claims.clear();
        self.claims.resize(n, 0.0);
        for (at, vm) in vms.iter().enumerate() {
            for node in 0..n {
                self.claims[node] += self.threads[at * n + node] * vm.share;
            }
        }
    }

    /// Threads above a node's CPUs run on CPUs that others leave idle: vCPUs are lent ([`crate::balance`]).
    fn lend(&mut self, shape: &Shape, vms: usize) {
        let n = shape.nodes.len();
        let idle: f64 = (0..n)
            .map(|node| (shape.nodes[node].cpus - self.held[node]).max(0.0))
            .sum();
        let over: f64 = (0..n)
            .map(|node| (self.held[node] - shape.nodes[node].cpus).max(0.0))
            .sum();
        if over <= 0.0 || idle <= 0.0 {
            return;
        }
        let lent = (idle / over).min(1.0);
        self.free.clear();
        let (held, free) = (&self.held, &mut self.free);
        free.extend((0..n).map(|node| (shape.nodes[node].cpus - held[node]).max(0.0) / idle));
        for node in 0..n {
            let excess = (self.held[node] - shape.nodes[node].cpus).max(0.0) * lent;
            if excess <= 0.0 {
                continue;
            }
            for at in 0..vms {
                let part = excess * self.threads[at * n + node] / self.held[node];
                self.threads[at * n + node] -= part;
                for (to, share) in self.free.iter().enumerate() {
                    self.threads[at * n + to] += part * share;
                }
            }
        }
        for node in 0..n {
            self.held[node] = (0..vms).map(|at| self.threads[at * n + node]).sum();
        }
    }

    /// Where each VM's memory lies.
    fn place_memory(&mut self, shape: &Shape, vms: &[Character], places: &[Place], as_found: AsFound) {
        let n = shape.nodes.len();
        self.memory.clear();
        self.memory.resize(vms.len() * n, 0.0);
        for (at, vm) in vms.iter().enumerate() {
            let row = &mut self.memory[at * n..(at + 1) * n];
            match (places[at], &vm.memory) {
                (Place::Home(mask), _) => {
                    let count = f64::from(mask.count_ones().max(1));
                    positions(mask).for_each(|node| row[node] = 1.0 / count);
                }
                (Place::Free, Some(memory)) if as_found == AsFound::Yes => row.copy_from_slice(memory),
                (Place::Free, _) => {
                    let threads = &self.threads[at * n..(at + 1) * n];
                    let all: f64 = threads.iter().sum();
                    for (share, threads) in row.iter_mut().zip(threads) {
                        *share = if all > 0.0 { threads / all } else { 1.0 / n as f64 };
                    }
                }
            }
        }
    }

    /// Latency that a VM's accesses from a node meet, on average.
    fn latency(
        &self,
        shape: &Shape,
        vm: &Character,
        at: usize,
        node: usize,
        place: Place,
        as_found: AsFound,
    ) -> f64 {
        let n = shape.nodes.len();
        let memory = &self.memory[at * n..(at + 1) * n];
        let spread = || -> f64 {
            (0..n)
                .map(|to| memory[to] * self.load[to] * shape.latency_between(node, to))
                .sum()
        };
        let scattered = place == Place::Free && (as_found == AsFound::No || vm.memory.is_none());
        if !scattered {
            return spread();
        }
        // First touch: a thread finds its own memory beside it, but for what is common or was left behind.
        let here = memory[node];
        if here >= 1.0 {
            return self.load[node];
        }
        let remote = (spread() - here * self.load[node]) / (1.0 - here);
        let local = vm.local_free * self.stayed;
        local * self.load[node] + (1.0 - local) * remote
    }

    fn step(&mut self, shape: &Shape, vms: &[Character], places: &[Place], as_found: AsFound) {
        let n = shape.nodes.len();
        self.accesses.clear();
        self.accesses.resize(n, 0.0);
        for (at, vm) in vms.iter().enumerate() {
            for node in 0..n {
                let cell = at * n + node;
                self.accesses[node] += self.threads[cell] * self.speeds[cell] * vm.references;
            }
        }
        self.traffic.clear();
        self.traffic.resize(n, 0.0);
        for (at, vm) in vms.iter().enumerate() {
            for node in 0..n {
                let cell = at * n + node;
                let threads = self.threads[cell];
                if threads <= 0.0 {
                    continue;
                }
                let held = self.held[node].max(threads);
                let shape_here = &shape.nodes[node];
                let run = match held > shape_here.cpus {
                    true => (shape_here.cpus * vm.share / self.claims[node].max(1e-9)).min(1.0),
                    false => 1.0,
                };
                let beside = (2.0 * (held - shape_here.cores) / held).clamp(0.0, 1.0);
                let stretch = 1.0 + beside * (SMT_STRETCH - 1.0);
                let stretch = if shape_here.cpus > shape_here.cores {
                    stretch
                } else {
                    1.0
                };
                let own = threads * self.speeds[cell] * vm.references;
                let part = shape_here.llc_bytes * own / self.accesses[node].max(1e-9);
                let miss_ratio = vm.miss_ratio_at(part / threads.max(1.0));
                let latency = self.latency(shape, vm, at, node, places[at], as_found);
                let misses = vm.references * miss_ratio;
                let cycles = vm.core * stretch + misses * vm.stall * latency;
                let speed = vm.clock * run / cycles;
                let speed = (speed * self.speeds[cell]).sqrt();
                self.speeds[cell] = speed;
                let bytes = threads * speed * misses * vm.bytes_per_miss;
                let local = if places[at] == Place::Free && (as_found == AsFound::No || vm.memory.is_none()) {
                    vm.local_free * self.stayed
                } else {
                    0.0
                };
                self.traffic[node] += bytes * local;
                for to in 0..n {
                    self.traffic[to] += bytes * (1.0 - local) * self.memory[at * n + to];
                }
            }
        }
        for node in 0..n {
            let asked = self.traffic[node] / shape.nodes[node].bandwidth;
            self.full[node] = (self.full[node] * asked / BUSY_MAX).max(1.0);
            let busy = asked.min(BUSY_MAX);
            let load = (1.0 + QUEUE * busy / (1.0 - busy)) * self.full[node];
            self.load[node] = (load * self.load[node]).sqrt();
        }
    }
}

impl Character {
    /// The mean VM of several; `None` of none.
    pub fn mean(all: &[&Character]) -> Option<Character> {
        let count = all.len() as f64;
        let mean = |of: fn(&Character) -> f64| all.iter().map(|vm| of(vm)).sum::<f64>() / count;
        (count > 0.0).then(|| Character {
            threads: mean(|vm| vm.threads),
            share: mean(|vm| vm.share),
            clock: mean(|vm| vm.clock),
            core: mean(|vm| vm.core),
            stall: mean(|vm| vm.stall),
            references: mean(|vm| vm.references),
            miss_ratio: mean(|vm| vm.miss_ratio),
            capacity: mean(|vm| vm.capacity),
            slope: mean(|vm| vm.slope),
            bytes_per_miss: mean(|vm| vm.bytes_per_miss),
            local_free: mean(|vm| vm.local_free),
            memory: None,
            at_home: 1.0,
            at_free: 1.0,
        })
    }

    /// Share of its cycles that it waits for memory, on an idle host.
    pub fn waiting_share(&self) -> f64 {
        let waits = self.references * self.miss_ratio * self.stall;
        waits / (self.core + waits)
    }

    /// Miss ratio where each thread has so many bytes.
    pub fn miss_ratio_at(&self, capacity: f64) -> f64 {
        if self.capacity <= 0.0 || capacity <= 0.0 {
            return self.miss_ratio;
        }
        let scaled = self.miss_ratio * (capacity / self.capacity).powf(-self.slope);
        scaled.clamp(self.miss_ratio * MISS_FLOOR, 1.0)
    }
}

/// Whether memory of VMs without a home lies where it is now, or as if no agent had ever moved it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsFound {
    /// Where it is now.
    Yes,
    /// Where threads touched it.
    No,
}

/// Spreads threads over the nodes of a mask that are least loaded per CPU, given what each holds already.
fn fill(shape: &Shape, mask: u64, held: &[f64], threads: f64, out: &mut Vec<f64>) {
    out.clear();
    out.resize(shape.nodes.len(), 0.0);
    let level_of = |node: usize| held[node] / shape.nodes[node].cpus;
    // Raise the level over the least loaded nodes until all threads are in; nodes above it take none.
    let mut in_it = mask;
    loop {
        let cpus: f64 = positions(in_it).map(|node| shape.nodes[node].cpus).sum();
        if cpus <= 0.0 {
            return;
        }
        let all: f64 = positions(in_it).map(|node| held[node]).sum::<f64>() + threads;
        let level = all / cpus;
        let above = positions(in_it)
            .filter(|node| level_of(*node) > level)
            .fold(0, |mask, node| mask | 1 << node);
        if above == 0 {
            for node in positions(in_it) {
                out[node] = (level - level_of(node)) * shape.nodes[node].cpus;
            }
            return;
        }
        in_it &= !above;
    }
}
