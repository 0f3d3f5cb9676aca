//! Predicts how fast every VM would run under another arrangement.
//!
//! # Problem
//! Whether a VM gains from a home depends on its use of caches and memory, on its neighbours, and on what the home leaves idle
//! elsewhere: one node has one cache and one set of controllers, while a VM that the kernel spreads has all of them. Trying every
//! arrangement would cost VMs more than the best one gains, so most arrangements must be predicted from counters.
//!
//! # Terms
//! - *Cache*: the CPUs of one node that share a last-level cache. If several nodes share a cache, each node's part counts as
//!   one. A node has one or more.
//! - *Place* of a VM: [`Place::Unplaced`] is wherever the kernel puts it; [`Place::Home`] is one or more caches of one or
//!   more nodes.
//! - *Arrangement*: a place for each VM.
//! - *Speed* of a VM: instructions per second of all its vCPUs together.
//! - *Character* of a VM ([`Character`]): what it needs from a host, whatever the arrangement. [`Profiles`] learns it.
//! - *Threads* of a VM: CPU time that it wants, running or waiting, in CPUs.
//! - *Capacity*: bytes of a last-level cache that one thread holds.
//!
//! # Model
//! 1. *Threads.* Caches and nodes form a hierarchy: threads run on the CPUs of a cache, and their memory is on a node. Homes
//!    hold their VMs' threads. Threads of unplaced VMs stay where the kernel has kept them, unless homes leave no core for
//!    them there; then they go to the least loaded CPUs, as the kernel's balancing moves them. If there are more threads than
//!    CPUs, threads share CPU time. If there are more threads than cores, threads share cores, and the core's own work takes
//!    [`Config::smt_stretch`] times as long. Waiting for memory overlaps, which is the point of hyperthreads (Tullsen).
//! 2. *Caches.* The miss ratio `m` follows a power of the capacity, `m = m0 (c / c0)^-s` (Hartstein). The power is learnt,
//!    from about 1/3 at first. Under LRU, unused lines of all sharers live equally long. So each sharer holds what it touches
//!    in that time, and its misses are the rate at which that amount grows (Xiang). With the power law, the amount is `1 + s`
//!    times its misses in that time. So sharers hold parts of the cache in proportion to `(1 + s)` times their misses: a
//!    program that streams holds much although it hits nothing. A VM's threads divide its part. If a VM averages less than
//!    one thread on a cache's CPUs, because the kernel moves its threads about, a thread that is there counts as a whole one.
//! 3. *Controllers.* A node's latency grows with the share `u` of its bandwidth in use as `1 + q u / (1 - u)`, like an open queue
//!    with many servers (Lazowska). If a node's bandwidth is unknown, each core is assumed to add [`Config::bandwidth_per_core`].
//! 4. *Distance.* An access to another node takes longer according to the firmware's distance, of which only a share is
//!    believed ([`Config::distance_real`]).
//! 5. `cycles per instruction = core + misses x stall x latency`. `core` and `stall` are learnt from how cycles have followed
//!    misses and latency (Eyerman).
//!
//! Speeds depend on shares of caches and controllers, and these shares on speeds. This is a fixed point, approached in
//! `STEPS` damped steps. While no VM is unplaced and no CPU is lent, nodes affect each other only if homes join them. So for
//! an arrangement that differs in a few places, only the affected VMs are predicted ([`Room::speeds_beside`]).
//!
//! # Missing inputs
//! Without LLC counters there is no character and no prediction: the VM counts as threads that do not use memory. If accesses
//! are not counted by node, the share [`Config::local_unknown`] of an unplaced VM's accesses is assumed to be local. If the
//! traffic of nodes is not counted, a miss is assumed to move [`Config::bytes_per_miss`].
//!
//! # Properties
//! - `more_company_never_makes_a_vm_faster`
//! - `the_order_of_vms_does_not_matter`
//! - `unknown_bandwidth_is_not_zero`
//! - `a_vm_whose_misses_are_not_counted_is_not_known`
//! - `a_lone_vm_is_never_crowded_by_itself`
//! - `a_vm_that_computes_gains_nothing_from_a_home`
//! - `a_change_is_felt_where_homes_join`
//! - `a_thread_that_is_seldom_on_a_cache_is_a_whole_one_while_it_is`
//! - `threads_of_unplaced_vms_stay_where_they_were_seen_as_long_as_there_is_a_core`
//!
//! # Sources
//! (Tullsen) ISCA 1995. (Xiang) ASPLOS 2013, "HOTL: a higher order theory of locality". (Hartstein) CF 2006, "Cache miss
//! behavior: is it sqrt(2)?". (Lazowska) "Quantitative System Performance", 1984. (Eyerman) TOCS 2009, "A mechanistic
//! performance model". Nothing here is taken from the twin, which follows other laws: an error of one must not hide in the
//! other.

mod character;
mod config;
mod profile;
mod shape;
#[cfg(test)]
mod tests;

pub use character::Character;
pub use config::Config;
pub use profile::Profiles;
pub use shape::{CacheShape, NodeShape, Shape};

use crate::near::positions;

// The following are constants of the laws, and limits of a fixed point with few steps. They are not settings.
/// Weight of the queue in the latency of a controller.
pub(crate) const QUEUE: f64 = 0.12;
/// Controllers are never assumed to be busier than this.
pub(crate) const BUSY_MAX: f64 = 0.95;
/// Number of steps towards the fixed point.
const STEPS: usize = 12;
/// More cache is never assumed to lower a VM's miss ratio below this share of the measured one.
const MISS_FLOOR: f64 = 0.3;
/// If a capacity differs from a known one by less than this share, its power is not computed again but approximated.
const POWER_NEAR: f64 = 0.03;
/// Most nodes, and most caches, that are distinguished, because sets of them are masks. On a host with more caches, each node
/// counts as one cache.
pub const NODES_MAX: usize = 64;

/// Where a VM lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Wherever the kernel puts the VM.
    Unplaced,
    /// On these caches, by position; its memory is on their nodes.
    Home(u64),
    /// Nowhere yet: the VM uses nothing on the host.
    Absent,
}

impl Place {
    /// Returns the caches of the VM's home, by position; 0 without a home.
    pub fn mask(self) -> u64 {
        match self {
            Place::Unplaced | Place::Absent => 0,
            Place::Home(mask) => mask,
        }
    }
}

/// Scratch space for predictions, reused from one to the next.
#[derive(Clone, Debug, Default)]
pub struct Room {
    /// The VMs to predict.
    who: Vec<usize>,
    /// Number of each VM's threads on each cache's CPUs, row by row.
    threads: Vec<f64>,
    /// The cells in which these VMs have threads.
    cells: Vec<Cell>,
    /// Latency factor of each node's controllers.
    load: Vec<f64>,
    /// Factor by which the latency of a full controller grows further, so that it moves no more than its bandwidth.
    full: Vec<f64>,
    /// Number of threads on each cache's CPUs.
    held: Vec<f64>,
    /// Number of threads on each cache's CPUs, each weighted by its VM's share of a contended CPU.
    claims: Vec<f64>,
    /// Share of unplaced VMs' threads that are on the nodes on which they would be if no VM had a home.
    stayed: f64,
    free: Vec<f64>,
    /// Number of unplaced VMs' threads on each cache's CPUs before homes push any off, and the share of them that stays.
    wanted: Vec<f64>,
    stay: Vec<f64>,
    /// Share of all unplaced VMs' threads that are on each cache's CPUs.
    spread: Vec<f64>,
    /// Share of all unplaced VMs' threads that are on each node's CPUs; also the share of their memory on each node, since
    /// threads touch memory first where they are.
    scattered: Vec<f64>,
    /// Latency that an unplaced VM's thread on each node meets if its memory is not next to it.
    remote: Vec<f64>,
    /// Lines fetched into each cache per second; those of each sharer are weighted by `1 + s`.
    lines: Vec<f64>,
    traffic: Vec<f64>,
    /// Whether threads are only where homes are; then nodes affect each other only if homes join them.
    is_apart: bool,
    base: Base,
}

/// What is kept of an arrangement to predict others that differ from it in a few places.
#[derive(Clone, Debug, Default)]
struct Base {
    held: Vec<f64>,
    is_apart: bool,
}

/// The threads of one VM on one cache's CPUs.
#[derive(Clone, Copy, Debug)]
struct Cell {
    vm: usize,
    cache: usize,
    node: usize,
    memory: Memory,
    threads: f64,
    /// How many threads the VM has there while it has any, over their average number; at least 1.
    whole: f64,
    /// LLC references of all these threads, per instruction of each thread.
    references: f64,
    /// Capacity if all accesses to the cache were these threads', as a multiple of [`Character::capacity`]; 0 if unknown.
    roomy: f64,
    /// Cycles per second of a thread, lower if it has to wait for a CPU.
    clock: f64,
    /// Cycles per instruction that the core's own work takes.
    core: f64,
    /// Speed of one thread.
    speed: f64,
    /// Share of LLC references that miss.
    missed: f64,
    /// Share of the cache that the threads hold.
    part: f64,
    /// The inverse of a capacity (as a multiple, like `roomy`), and the miss ratio at that capacity. Ratios nearby are
    /// approximated from them without computing a power.
    known: (f64, f64),
}

/// Where a VM's memory is.
#[derive(Clone, Copy, Debug)]
enum Memory {
    /// On these nodes, with this share on each.
    Even(u64, f64),
    /// On the nodes on which it was found ([`Character::memory`]).
    Found,
    /// Where the VM's threads touched the memory first.
    Scattered,
}

impl Room {
    /// Predicts the speed of each VM under an arrangement. With [`AsFound::Yes`] the memory of unplaced VMs is where it is
    /// now; with [`AsFound::No`] it is where it would be without an agent, which moved none of it.
    pub fn speeds(
        &mut self,
        shape: &Shape,
        vms: &[Character],
        places: &[Place],
        as_found: AsFound,
        out: &mut Vec<f64>,
    ) {
        self.who.clear();
        self.who.extend(0..vms.len());
        self.held.clear();
        self.held.resize(shape.caches.len(), 0.0);
        self.place_homes(shape, vms, places);
        let lends = self.lend(shape);
        let unplaced = self.place_unplaced(shape, vms, places);
        self.is_apart = !lends && unplaced == 0.0;
        if as_found == AsFound::No {
            self.stayed = 1.0;
        }
        out.clear();
        out.resize(vms.len(), 0.0);
        self.solve(shape, vms, places, as_found, out);
    }

    /// Predicts the speed of each VM with memory as found, and keeps what [`Room::speeds_beside`] needs.
    pub fn speeds_base(&mut self, shape: &Shape, vms: &[Character], places: &[Place], out: &mut Vec<f64>) {
        self.speeds(shape, vms, places, AsFound::Yes, out);
        self.base.held.clone_from(&self.held);
        self.base.is_apart = self.is_apart;
    }

    /// Predicts an arrangement that differs from the base only in VMs whose homes are or were on the caches of `changed`.
    /// `out` must hold the speeds in the base; those of unaffected VMs stay.
    pub fn speeds_beside(
        &mut self,
        shape: &Shape,
        vms: &[Character],
        places: &[Place],
        changed: u64,
        out: &mut Vec<f64>,
    ) {
        let Some(reached) = reached(shape, places, changed).filter(|_| self.base.is_apart) else {
            return self.speeds(shape, vms, places, AsFound::Yes, out);
        };
        self.who.clear();
        self.who
            .extend((0..vms.len()).filter(|at| places[*at].mask() & reached != 0));
        self.held.clone_from(&self.base.held);
        positions(reached).for_each(|cache| self.held[cache] = 0.0);
        self.place_homes(shape, vms, places);
        if self.lent(shape).is_some() {
            return self.speeds(shape, vms, places, AsFound::Yes, out);
        }
        self.solve(shape, vms, places, AsFound::Yes, out);
    }

    /// Returns the number of cells in the last prediction.
    pub fn cells_count(&self) -> usize {
        self.cells.len()
    }

    /// Computes the speeds of the VMs to predict, whose threads must have been placed.
    fn solve(
        &mut self,
        shape: &Shape,
        vms: &[Character],
        places: &[Place],
        as_found: AsFound,
        out: &mut [f64],
    ) {
        let n = shape.nodes.len();
        self.load.clear();
        self.load.resize(n, 1.0);
        self.full.clear();
        self.full.resize(n, 1.0);
        self.make_cells(shape, vms, places, as_found);
        for _ in 0..STEPS {
            self.step(shape, vms);
        }
        self.who.iter().for_each(|at| out[*at] = 0.0);
        for cell in &self.cells {
            out[cell.vm] += cell.threads * cell.speed;
        }
        for at in &self.who {
            out[*at] *= match places[*at] {
                Place::Home(_) => vms[*at].at_home,
                Place::Unplaced => vms[*at].when_unplaced,
                Place::Absent => 1.0,
            };
        }
    }

    fn place_homes(&mut self, shape: &Shape, vms: &[Character], places: &[Place]) {
        let n = shape.caches.len();
        self.threads.resize(vms.len() * n, 0.0);
        for at in &self.who {
            self.threads[at * n..(at + 1) * n].fill(0.0);
        }
        for size in 1..=n as u32 {
            for at in &self.who {
                let mask = places[*at].mask();
                if mask.count_ones() != size {
                    continue;
                }
                fill(shape, mask, &self.held, vms[*at].threads, &mut self.free);
                for cache in positions(mask) {
                    self.threads[at * n + cache] = self.free[cache];
                    self.held[cache] += self.free[cache];
                }
            }
        }
    }

    /// Places the threads of unplaced VMs. They stay where the kernel has them if homes leave cores there; others go to the
    /// least loaded CPUs. Returns the number of all these threads.
    fn place_unplaced(&mut self, shape: &Shape, vms: &[Character], places: &[Place]) -> f64 {
        let n = shape.caches.len();
        let unplaced = || (0..vms.len()).filter(|at| places[*at] == Place::Unplaced);
        self.stayed = 1.0;
        self.spread.clear();
        self.scattered.clear();
        let all: f64 = unplaced().map(|at| vms[at].threads).sum();
        if all <= 0.0 {
            return all;
        }
        let cpus: f64 = shape.caches.iter().map(|cache| cache.cpus).sum();
        self.wanted.clear();
        self.wanted.resize(n, 0.0);
        for at in unplaced() {
            let vm = &vms[at];
            for (cache, of) in shape.caches.iter().enumerate() {
                let share = vm.found.as_ref().map_or(of.cpus / cpus, |found| found[cache]);
                self.threads[at * n + cache] = share * vm.threads;
                self.wanted[cache] += share * vm.threads;
            }
        }
        self.push_off(shape, vms, places, all);
        self.spread.resize(n, 0.0);
        for at in unplaced() {
            let row = &self.threads[at * n..(at + 1) * n];
            self.spread
                .iter_mut()
                .zip(row)
                .for_each(|(spread, own)| *spread += own / all);
        }
        self.scattered.resize(shape.nodes.len(), 0.0);
        for (cache, share) in shape.caches.iter().zip(&self.spread) {
            self.scattered[cache.node] += share;
        }
        // A thread that is pushed to another cache of its own node is still next to its memory.
        let stays = |(node, now): (&NodeShape, &f64)| {
            let wanted: f64 = positions(node.caches).map(|cache| self.wanted[cache] / all).sum();
            now.min(wanted)
        };
        self.stayed = shape.nodes.iter().zip(&self.scattered).map(stays).sum();
        all
    }

    /// Moves those threads of unplaced VMs for which homes leave no core to the least loaded CPUs. `all` is the number of
    /// unplaced VMs' threads.
    fn push_off(&mut self, shape: &Shape, vms: &[Character], places: &[Place], all: f64) {
        let n = shape.caches.len();
        let unplaced = || (0..vms.len()).filter(|at| places[*at] == Place::Unplaced);
        self.stay.clear();
        for (cache, of) in shape.caches.iter().enumerate() {
            let (held, wanted) = (self.held[cache], self.wanted[cache]);
            let is_pushed = held > 0.0 && held + wanted > of.cores;
            let room = (of.cores - held).max(0.0);
            self.stay.push(if is_pushed {
                room.min(wanted) / wanted.max(1e-9)
            } else {
                1.0
            });
        }
        let kept = || {
            self.wanted
                .iter()
                .zip(&self.stay)
                .map(|(wanted, stay)| wanted * stay)
        };
        let pushed = all - kept().sum::<f64>();
        for (held, kept) in self.held.iter_mut().zip(kept()) {
            *held += kept;
        }
        if pushed > 1e-9 {
            fill(shape, shape.all(), &self.held, pushed, &mut self.free);
            for at in unplaced() {
                let row = &mut self.threads[at * n..(at + 1) * n];
                let off: f64 = row
                    .iter()
                    .zip(&self.stay)
                    .map(|(own, stay)| own * (1.0 - stay))
                    .sum();
                for ((own, stay), free) in row.iter_mut().zip(&self.stay).zip(&self.free) {
                    *own = *own * stay + off * free / pushed;
                }
            }
            self.held
                .iter_mut()
                .zip(&self.free)
                .for_each(|(held, free)| *held += free);
        }
    }

    /// Returns the number of idle CPUs, and of threads in excess of their caches' CPUs; `None` unless there are both.
    fn lent(&self, shape: &Shape) -> Option<(f64, f64)> {
        let caches = || shape.caches.iter().zip(&self.held);
        let idle: f64 = caches().map(|(cache, held)| (cache.cpus - held).max(0.0)).sum();
        let over: f64 = caches().map(|(cache, held)| (held - cache.cpus).max(0.0)).sum();
        (over > 0.0 && idle > 0.0).then_some((idle, over))
    }

    /// Runs the threads in excess of a cache's CPUs on idle CPUs elsewhere, as vCPUs are lent ([`crate::balance`]). Returns
    /// whether there were any.
    fn lend(&mut self, shape: &Shape) -> bool {
        let Some((idle, over)) = self.lent(shape) else {
            return false;
        };
        let n = shape.caches.len();
        let lent = (idle / over).min(1.0);
        self.free.clear();
        let (held, free) = (&self.held, &mut self.free);
        free.extend((0..n).map(|cache| (shape.caches[cache].cpus - held[cache]).max(0.0) / idle));
        for cache in 0..n {
            let excess = (self.held[cache] - shape.caches[cache].cpus).max(0.0) * lent;
            if excess <= 0.0 {
                continue;
            }
            for row in self.threads.chunks_exact_mut(n) {
                let part = excess * row[cache] / self.held[cache];
                row[cache] -= part;
                for (to, share) in self.free.iter().enumerate() {
                    row[to] += part * share;
                }
            }
        }
        for cache in 0..n {
            self.held[cache] = self.threads.iter().skip(cache).step_by(n).sum();
        }
        true
    }

    fn make_cells(&mut self, shape: &Shape, vms: &[Character], places: &[Place], as_found: AsFound) {
        let n = shape.caches.len();
        self.claims.clear();
        self.claims.resize(n, 0.0);
        for at in &self.who {
            for cache in 0..n {
                self.claims[cache] += self.threads[at * n + cache] * vms[*at].share;
            }
        }
        self.cells.clear();
        for at in &self.who {
            let vm = &vms[*at];
            let memory = match places[*at] {
                Place::Home(mask) => {
                    let nodes = shape.node_mask(mask);
                    Memory::Even(nodes, 1.0 / f64::from(nodes.count_ones().max(1)))
                }
                Place::Unplaced if as_found == AsFound::Yes && vm.memory.is_some() => Memory::Found,
                Place::Unplaced | Place::Absent => Memory::Scattered,
            };
            for (cache, here) in shape.caches.iter().enumerate() {
                let threads = self.threads[at * n + cache];
                if threads <= 0.0 {
                    continue;
                }
                let held = self.held[cache].max(threads);
                let whole = (1.0 / threads).max(1.0);
                let run = match held > here.cpus {
                    true => (here.cpus * vm.share / self.claims[cache].max(1e-9)).min(1.0),
                    false => 1.0,
                };
                let beside = match here.cpus > here.cores {
                    true => (2.0 * (held - here.cores) / held).clamp(0.0, 1.0),
                    false => 0.0,
                };
                let roomy = match vm.capacity > 0.0 {
                    true => here.bytes / (threads * whole) / vm.capacity,
                    false => 0.0,
                };
                self.cells.push(Cell {
                    vm: *at,
                    cache,
                    node: here.node,
                    memory,
                    threads,
                    whole,
                    references: threads * vm.references,
                    roomy,
                    clock: vm.clock * run,
                    core: vm.core * (1.0 + beside * (shape.smt_stretch - 1.0)),
                    speed: vm.clock / (vm.core + vm.references * vm.miss_ratio * vm.stall),
                    missed: vm.miss_ratio,
                    part: part_of(threads, held, whole),
                    known: (0.0, 0.0),
                });
            }
        }
    }

    fn step(&mut self, shape: &Shape, vms: &[Character]) {
        let n = shape.nodes.len();
        self.lines.clear();
        self.lines.resize(shape.caches.len(), 0.0);
        for cell in &self.cells {
            self.lines[cell.cache] += cell.lines(&vms[cell.vm]);
        }
        self.remote.clear();
        self.remote.extend((0..self.scattered.len()).map(|from| {
            let here = self.scattered[from];
            if here >= 1.0 {
                return self.load[from];
            }
            let spread: f64 = (0..n)
                .map(|to| self.scattered[to] * self.load[to] * shape.latency_between(from, to))
                .sum();
            (spread - here * self.load[from]) / (1.0 - here)
        }));
        self.traffic.clear();
        self.traffic.resize(n, 0.0);
        // Bytes per second to scattered memory that is not next to the thread.
        let mut scattered = 0.0;
        for cell in &mut self.cells {
            let (vm, node) = (&vms[cell.vm], cell.node);
            // If a VM holds more of the cache it misses less, and so holds less. To damp this, go half of the way, in logarithms.
            let own = part_of(cell.lines(vm), self.lines[cell.cache], cell.whole);
            cell.part = (cell.part * own).sqrt();
            cell.missed = cell.miss_ratio(vm, cell.roomy * cell.part);
            let misses = vm.references * cell.missed;
            let met = |share: f64, to: usize| share * self.load[to] * shape.latency_between(node, to);
            let local = vm.local_free * self.stayed;
            let latency = match (cell.memory, &vm.memory) {
                (Memory::Even(mask, share), _) => positions(mask).map(|to| met(share, to)).sum(),
                (Memory::Found, Some(memory)) => (0..n).map(|to| met(memory[to], to)).sum(),
                // First touch: a thread finds its memory next to it, except for memory that is shared or was left behind.
                _ => local * self.load[node] + (1.0 - local) * self.remote[node],
            };
            let cycles = cell.core + misses * vm.stall * latency;
            cell.speed = (cell.clock / cycles * cell.speed).sqrt();
            let bytes = cell.threads * cell.speed * misses * vm.bytes_per_miss;
            match (cell.memory, &vm.memory) {
                (Memory::Even(mask, share), _) => {
                    positions(mask).for_each(|to| self.traffic[to] += bytes * share);
                }
                (Memory::Found, Some(memory)) => {
                    let to = self.traffic.iter_mut().zip(memory);
                    to.for_each(|(traffic, share)| *traffic += bytes * share);
                }
                _ => {
                    self.traffic[node] += bytes * local;
                    scattered += bytes * (1.0 - local);
                }
            }
        }
        for (traffic, share) in self.traffic.iter_mut().zip(&self.scattered) {
            *traffic += scattered * share;
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

/// Returns a VM's part of the total while its threads are there, which is the case for `1 / whole` of the time.
fn part_of(own: f64, all: f64, whole: f64) -> f64 {
    let there = own * whole;
    there / (all - own + there).max(1e-9)
}

impl Cell {
    /// Returns the lines that the threads fetch into the cache per second, times `1 + s`.
    fn lines(&self, vm: &Character) -> f64 {
        (1.0 + vm.slope) * self.references * self.speed * self.missed
    }

    /// Returns the VM's miss ratio at this multiple of [`Character::capacity`].
    fn miss_ratio(&mut self, vm: &Character, capacity: f64) -> f64 {
        if capacity <= 0.0 {
            return vm.miss_ratio;
        }
        let s = vm.slope;
        let (per_capacity, ratio) = self.known;
        let d = capacity * per_capacity - 1.0;
        let scaled = if d.abs() < POWER_NEAR {
            // A series for the power. The terms left out are below a millionth.
            ratio * (1.0 - s * d * (1.0 - (s + 1.0) / 2.0 * d * (1.0 - (s + 2.0) / 3.0 * d)))
        } else {
            let ratio = vm.miss_ratio * capacity.powf(-s);
            self.known = (1.0 / capacity, ratio);
            ratio
        };
        scaled.clamp(vm.miss_ratio * MISS_FLOOR, 1.0)
    }
}

/// Returns all caches that a change of these caches affects: caches of a node share its memory, and homes join caches.
/// Returns `None` if a VM is unplaced.
fn reached(shape: &Shape, places: &[Place], changed: u64) -> Option<u64> {
    let mut reached = shape.caches_on(shape.node_mask(changed));
    loop {
        let mut more = reached;
        for place in places {
            if *place == Place::Unplaced {
                return None;
            }
            let mask = place.mask();
            if mask & more != 0 {
                more |= mask;
            }
        }
        if more == reached {
            return Some(reached);
        }
        reached = shape.caches_on(shape.node_mask(more));
    }
}

/// Where the memory of unplaced VMs is assumed to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AsFound {
    /// Where the memory is now.
    Yes,
    /// Where their threads touched it, as if no agent had ever moved it.
    No,
}

/// Spreads threads over those caches of a mask whose CPUs are least loaded. `held` is the number of threads that each cache
/// holds already.
fn fill(shape: &Shape, mask: u64, held: &[f64], threads: f64, out: &mut Vec<f64>) {
    out.clear();
    out.resize(shape.caches.len(), 0.0);
    let cpus_of = |cache: usize| shape.caches[cache].cpus;
    let level_of = |cache: usize| held[cache] / cpus_of(cache);
    // Raise all the least loaded caches to one level at which they hold all threads; caches above this level take none.
    let mut in_it = mask;
    loop {
        let cpus: f64 = positions(in_it).map(cpus_of).sum();
        if cpus <= 0.0 {
            return;
        }
        let all: f64 = positions(in_it).map(|cache| held[cache]).sum::<f64>() + threads;
        let level = all / cpus;
        let above = positions(in_it)
            .filter(|cache| level_of(*cache) > level)
            .fold(0, |mask, cache| mask | 1 << cache);
        if above == 0 {
            for cache in positions(in_it) {
                out[cache] = (level - level_of(cache)) * cpus_of(cache);
            }
            return;
        }
        in_it &= !above;
    }
}
