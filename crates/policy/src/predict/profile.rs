//! Learns from counters what each VM needs, while it runs.

use std::collections::BTreeMap;

use homenode_host::{Rates, View, VmRates, VmView};
use homenode_units::{BytesPerSec, Ewma, VmId};

use super::{BUSY_MAX, Character, Config, QUEUE, Shape, part_of};
use crate::near::positions;

// The following are priors for values that are not counted yet, their uncertainty, and limits of fits. They are not settings.
/// Prior of the cycles for which a miss stalls a thread: 100 ns at 2 GHz, with four misses in flight.
pub(super) const STALL: f64 = 50.0;
/// Standard deviation of the prior [`STALL`].
const STALL_SD: f64 = 50.0;
/// Prior of the cycles per instruction without memory, and (next) its standard deviation.
pub(super) const CORE: f64 = 0.4;
/// Prior of a thread's cycles per second.
pub(super) const CLOCK: f64 = 2e9;
const CORE_SD: f64 = 0.25;
/// Cycles of the core that an LLC hit takes, most of which are hidden.
const HIT: f64 = 6.0;
const CORE_MIN: f64 = 0.2;
/// Deviation of counted cycles per instruction from the model, as a share of them.
const NOISE: f64 = 0.15;
/// Prior of the power of the miss ratio over capacity (0.3 to 0.7 in (Hartstein)), and (next) its standard deviation.
pub(super) const SLOPE: f64 = 0.35;
const SLOPE_SD: f64 = 0.3;
const SLOPE_MAX: f64 = 1.5;
/// Deviation of counted miss ratios from the power law, in logarithms.
const MISS_NOISE: f64 = 0.1;

/// A VM rests if it wants less than this share of its CPUs' time.
const BUSY_SHARE: f64 = 0.75;

/// What was learnt about one VM.
#[derive(Clone, Debug, Default)]
struct Profile {
    cycles: u32,
    /// Whether the VM ever had a home, so that an agent chose where its memory is.
    was_moved: bool,
    /// CPU time that the VM wanted in the last cycle, in CPUs.
    wanted: f64,
    threads: Ewma,
    /// The part of the time that it wanted in which it ran, while it had no home.
    share: Ewma,
    clock: Ewma,
    cycles_per_instruction: Ewma,
    references: Ewma,
    /// Share of its accesses that were local, while it had never had a home. On a host whose kernel balances, this only rises
    /// while other VMs have homes: their pins push the VM's threads off its memory, which would not happen without an agent.
    local_free: Ewma,
    /// Share of its threads on each cache's CPUs while it had no home; empty until it has run.
    found: Vec<f64>,
    /// Sums over cycles of the outer products of (stretch, misses x latency) with itself and, in `target`, with cycles per
    /// instruction.
    evidence: [f64; 3],
    target: [f64; 2],
    /// Weighted sums for the line through (log capacity, log miss ratio).
    line: Line,
    at_home: Ewma,
    when_unplaced: Ewma,
    speed: Ewma,
    /// Instructions per second, per CPU that the VM wanted.
    pace: Ewma,
}

#[derive(Clone, Copy, Debug, Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    fn note(&mut self, x: f64, y: f64, kept: f64) {
        for sum in [
            &mut self.weight,
            &mut self.x,
            &mut self.y,
            &mut self.xx,
            &mut self.xy,
        ] {
            *sum *= kept;
        }
        self.weight += 1.0;
        self.x += x;
        self.y += y;
        self.xx += x * x;
        self.xy += x * y;
    }

    /// Returns the means of both logarithms, and the power according to least squares, drawn towards [`SLOPE`].
    fn fit(&self) -> Option<(f64, f64, f64)> {
        if self.weight <= 0.0 {
            return None;
        }
        let (x, y) = (self.x / self.weight, self.y / self.weight);
        let (sxx, sxy) = (self.xx - self.weight * x * x, self.xy - self.weight * x * y);
        let prior = (MISS_NOISE / SLOPE_SD) * (MISS_NOISE / SLOPE_SD);
        let slope = (SLOPE * prior - sxy) / (sxx.max(0.0) + prior);
        Some((x, y, slope.clamp(0.0, SLOPE_MAX)))
    }
}

/// What was learnt about all VMs.
#[derive(Clone, Debug, Default)]
pub struct Profiles {
    vms: BTreeMap<VmId, Profile>,
    bytes_per_miss: Ewma,
}

/// The conditions that a VM met in a cycle, averaged over its vCPUs.
struct Met {
    stretch: f64,
    latency: f64,
    /// LLC bytes per thread.
    capacity: f64,
}

impl Met {
    /// Returns the conditions that threads meet on these caches, with this share of local accesses, and with this many lines
    /// fetched into caches per second.
    fn of(on: &[f64], local: f64, lines: f64, shape: &Shape, loads: &Loads) -> Met {
        let n = shape.nodes.len();
        let all: f64 = on.iter().sum::<f64>().max(1e-9);
        let (mut beside, mut log_capacity, mut here, mut far) = (0.0, 0.0, 0.0, 0.0);
        for (cache, threads) in on.iter().enumerate() {
            let share = threads / all;
            if share <= 0.0 {
                continue;
            }
            let node = shape.caches[cache].node;
            beside += share * loads.beside[node];
            let whole = (1.0 / threads).max(1.0);
            let own = part_of(lines * share, loads.lines[cache], whole);
            let each = shape.caches[cache].bytes * own.min(1.0) / (threads * whole);
            log_capacity += share * each.max(1.0).ln();
            here += share * loads.load[node];
            let others = (0..n).filter(|to| *to != node);
            let sum: f64 = others
                .map(|to| loads.load[to] * shape.latency_between(node, to))
                .sum();
            far += share * sum / (n.max(2) - 1) as f64;
        }
        Met {
            stretch: 1.0 + beside * (shape.smt_stretch - 1.0),
            latency: local * here + (1.0 - local) * far,
            capacity: match shape.caches.iter().any(|cache| cache.bytes > 0.0) {
                true => log_capacity.exp(),
                false => 0.0,
            },
        }
    }
}

impl Profiles {
    /// Records what all VMs did in a cycle.
    pub fn observe(&mut self, view: &View<'_>, shape: &Shape, config: &Config) {
        self.vms.retain(|id, _| view.sample.vm(*id).is_some());
        let Some(rates) = view.rates else { return };
        self.observe_traffic(rates, config);
        let loads = Loads::of(view, rates, shape, |vm| self.slope(vm));
        for vm in &view.vms {
            let Some(measured) = vm.rates else { continue };
            let profile = self.vms.entry(vm.sample.id).or_default();
            profile.observe(view, vm, measured, shape, &loads, config);
        }
    }

    fn observe_traffic(&mut self, rates: &Rates, config: &Config) {
        let moved: Option<f64> = rates
            .nodes
            .values()
            .map(|node| node.bandwidth.map(BytesPerSec::as_f64))
            .sum();
        // Unknown misses are not zero misses, unless the VM did not run.
        let of = |vm: &VmRates| {
            let rests = vm.cpus_used < config.ran_min;
            vm.llc_misses_per_s.or(rests.then_some(0.0))
        };
        let misses: Option<f64> = rates.vms.iter().map(of).sum();
        if let (Some(moved), Some(misses)) = (moved, misses)
            && misses > 1e6
        {
            self.bytes_per_miss
                .update((moved / misses).clamp(64.0, 192.0), config.weight());
        }
    }

    /// Returns the power by which a VM's miss ratio falls with growing capacity.
    fn slope(&self, vm: VmId) -> f64 {
        let line = self.vms.get(&vm).and_then(|profile| profile.line.fit());
        line.map_or(SLOPE, |(.., slope)| slope)
    }

    /// Returns the number of cycles in which a VM was seen at work.
    pub fn cycles(&self, vm: VmId) -> u32 {
        self.vms.get(&vm).map_or(0, |profile| profile.cycles)
    }

    /// Whether a VM was seen at work long enough to know its needs.
    pub fn is_known(&self, vm: VmId, config: &Config) -> bool {
        self.cycles(vm) >= config.known_cycles
    }

    /// Returns the recent average of a VM's instructions per second; `None` if it was never seen at work.
    pub fn speed(&self, vm: VmId) -> Option<f64> {
        self.vms.get(&vm)?.speed.value()
    }

    /// Returns the recent average of a VM's instructions per second of CPU time that it wants, which is its speed while it
    /// has work. Returns `None` if it was never seen at work.
    pub fn pace(&self, vm: VmId) -> Option<f64> {
        self.vms.get(&vm)?.pace.value()
    }

    /// Whether a VM wants its CPUs for less than `BUSY_SHARE` of the time. How much work it does then says little about its
    /// speed.
    pub fn rests(&self, vm: &VmView<'_>) -> bool {
        let threads = self
            .vms
            .get(&vm.sample.id)
            .and_then(|profile| profile.threads.value());
        threads.is_some_and(|threads| threads < BUSY_SHARE * vm.sample.vcpus.len() as f64)
    }

    /// Returns the figure to compare before and after a change: pace for a VM that rests, else speed.
    pub fn progress(&self, vm: VmId, rests: bool) -> Option<f64> {
        if rests { self.pace(vm) } else { self.speed(vm) }
    }

    /// Whether a VM ever had a home.
    pub fn was_moved(&self, vm: VmId) -> bool {
        self.vms.get(&vm).is_some_and(|profile| profile.was_moved)
    }

    /// Whether a VM is at work.
    pub fn is_active(&self, vm: VmId, config: &Config) -> bool {
        let profile = self.vms.get(&vm);
        profile.is_some_and(|profile| profile.wanted >= config.active_min)
    }

    /// Records the ratio of measured to modelled speed of a VM at home, once its memory is there. Returns the average.
    pub fn learn_at_home(&mut self, vm: VmId, ratio: f64, config: &Config) -> f64 {
        let average = self.vms.get_mut(&vm).map(|profile| &mut profile.at_home);
        learn(average, ratio, config)
    }

    /// Records the ratio of measured to modelled speed of a VM that never had a home, while no VM has one, which equals a
    /// host without an agent. Returns the average.
    pub fn learn_when_unplaced(&mut self, vm: VmId, ratio: f64, config: &Config) -> f64 {
        let average = self.vms.get_mut(&vm).map(|profile| &mut profile.when_unplaced);
        learn(average, ratio, config)
    }

    /// Returns what is known about a VM. A new VM gets a character of its size with few needs.
    pub fn character(&self, vm: &VmView<'_>, shape: &Shape, config: &Config) -> Character {
        let new = Profile::default();
        let profile = self.vms.get(&vm.sample.id).unwrap_or(&new);
        let local_free = profile.local_free.value().unwrap_or(config.local_unknown);
        let (core, stall) = profile.fit();
        let line = profile.line.fit();
        Character {
            threads: profile
                .threads
                .value()
                .unwrap_or(vm.sample.vcpus.len() as f64)
                .max(0.01),
            share: profile.share.value().unwrap_or(1.0).clamp(0.05, 1.0),
            clock: profile.clock.value().unwrap_or(CLOCK),
            core,
            stall,
            references: profile.references.value().unwrap_or(0.0),
            miss_ratio: line.map_or(0.5, |(_, y, _)| y.exp().min(1.0)),
            capacity: line.map_or(0.0, |(x, ..)| x.exp()),
            slope: line.map_or(SLOPE, |(.., slope)| slope),
            bytes_per_miss: self.bytes_per_miss.value().unwrap_or(config.bytes_per_miss),
            local_free,
            found: (profile.found.len() == shape.caches.len()).then(|| profile.found.clone()),
            memory: profile.was_moved.then(|| memory(vm, shape)).flatten(),
            at_home: profile.at_home.value().unwrap_or(1.0),
            when_unplaced: profile.when_unplaced.value().unwrap_or(1.0),
        }
    }
}

fn learn(average: Option<&mut Ewma>, ratio: f64, config: &Config) -> f64 {
    average.map_or(1.0, |average| {
        average.update(ratio.clamp(0.5, 1.5), config.weight())
    })
}

/// Returns the share of a VM's memory on each node.
fn memory(vm: &VmView<'_>, shape: &Shape) -> Option<Vec<f64>> {
    let pages = vm.sample.pages.as_ref()?;
    let on: Vec<f64> = shape
        .nodes
        .iter()
        .map(|node| pages.get(node.id).map_or(0.0, |pages| pages.as_f64()))
        .collect();
    let all: f64 = on.iter().sum();
    (all > 0.0).then(|| on.iter().map(|pages| pages / all).collect())
}

/// The host's load in a cycle, with nodes and caches by position.
struct Loads {
    /// Share of each node's threads that run next to a busy hyperthread.
    beside: Vec<f64>,
    /// Latency factor of each node's controllers.
    load: Vec<f64>,
    /// Lines fetched into each cache per second; those of each sharer are weighted by `1 + s`.
    lines: Vec<f64>,
    /// Whether some VMs have homes while the kernel balances all others.
    is_disturbed: bool,
}

impl Loads {
    fn of(view: &View<'_>, rates: &Rates, shape: &Shape, slope: impl Fn(VmId) -> f64) -> Loads {
        let n = shape.nodes.len();
        let (mut beside, mut busy) = (vec![0.0; n], vec![0.0; n]);
        let mut cores: Vec<(u32, usize, f64)> = rates
            .cpus_busy
            .iter()
            .filter_map(|(id, share)| {
                let cpu = view.machine.cpu(*id)?;
                Some((cpu.core, shape.position(cpu.node)?, *share))
            })
            .collect();
        cores.sort_by_key(|(core, ..)| *core);
        for core in cores.chunk_by(|a, b| a.0 == b.0) {
            let node = core[0].1;
            let sum: f64 = core.iter().map(|(.., share)| share).sum();
            busy[node] += sum;
            // If two threads are busy for shares a and b of the time, independently, both are busy for a b of it.
            let squares: f64 = core.iter().map(|(.., share)| share * share).sum();
            beside[node] += sum * sum - squares;
        }
        let beside = beside.iter().zip(&busy).map(|(beside, busy)| {
            if *busy > 0.0 {
                (beside / busy).min(1.0)
            } else {
                0.0
            }
        });
        let load = shape.nodes.iter().map(|node| {
            let used = rates.nodes.get(node.id).and_then(|rates| rates.bandwidth);
            let busy = used
                .map_or(0.0, |used| used.as_f64() / node.bandwidth)
                .min(BUSY_MAX);
            1.0 + QUEUE * busy / (1.0 - busy)
        });
        let mut lines = vec![0.0; shape.caches.len()];
        for vm in &rates.vms {
            let on = threads_on(view, vm, shape);
            let all: f64 = on.iter().sum();
            if let Some(misses) = vm.llc_misses_per_s
                && all > 0.0
            {
                let each = (1.0 + slope(vm.id)) * misses / all;
                lines.iter_mut().zip(&on).for_each(|(sum, on)| *sum += each * on);
            }
        }
        Loads {
            beside: beside.collect(),
            load: load.collect(),
            lines,
            is_disturbed: view.sample.kernel.balances() && view.vms.iter().any(|vm| vm.home.is_some()),
        }
    }
}

/// Returns the number of a VM's threads on the CPUs of each cache, from where its vCPUs were last seen.
fn threads_on(view: &View<'_>, vm: &VmRates, shape: &Shape) -> Vec<f64> {
    let mut on = vec![0.0; shape.caches.len()];
    let sample = view.sample.vm(vm.id);
    for vcpu in &vm.vcpus {
        let Some(node) = vcpu.node.and_then(|node| shape.position(node)) else {
            continue;
        };
        let cpu = sample.and_then(|sample| sample.vcpu(vcpu.index)?.cpu);
        let ran_on = |at: &usize| cpu.is_some_and(|cpu| shape.caches[*at].cpu_set.contains(cpu));
        let mut of_node = positions(shape.nodes[node].caches);
        // If the vCPU ran on a CPU that VMs may not use, any cache of the node will do.
        let any = shape.nodes[node].caches.trailing_zeros() as usize;
        on[of_node.find(ran_on).unwrap_or(any)] += vcpu.running;
    }
    on
}

impl Profile {
    fn observe(
        &mut self,
        view: &View<'_>,
        vm: &VmView<'_>,
        rates: &VmRates,
        shape: &Shape,
        loads: &Loads,
        config: &Config,
    ) {
        let weight = config.weight();
        self.was_moved |= vm.home.is_some();
        let wanted: f64 = rates.vcpus.iter().map(|vcpu| vcpu.running + vcpu.waited()).sum();
        self.wanted = wanted;
        self.threads.update(wanted, weight);
        if vm.home.is_none() && wanted > config.ran_min {
            let ran: f64 = rates.vcpus.iter().map(|vcpu| vcpu.running).sum();
            self.share.update(ran / wanted, weight);
        }
        if rates.cpus_used < config.ran_min {
            return;
        }
        let (Some(instructions), Some(cycles)) = (rates.instructions_per_s, rates.cycles_per_s) else {
            return;
        };
        if instructions < 1.0 || cycles < 1.0 {
            return;
        }
        self.speed.update(instructions, weight);
        self.pace
            .update(instructions / wanted.max(config.ran_min), weight);
        self.clock.update(cycles / rates.cpus_used, weight);
        let cpi = cycles / instructions;
        self.cycles_per_instruction.update(cpi, weight);
        if !self.was_moved
            && let Some(local) = rates.local_access_ratio
            && (!loads.is_disturbed || self.local_free.value().is_none_or(|before| local > before))
        {
            self.local_free.update(local, weight);
        }
        // Unknown misses are not zero misses: a VM is not known until they are counted.
        let (Some(count), Some(missed)) = (rates.llc_references_per_s, rates.llc_misses_per_s) else {
            return;
        };
        self.cycles += 1;
        self.references.update(count / instructions, weight);
        let on = threads_on(view, rates, shape);
        if vm.home.is_none() {
            self.see(&on, config.average_weight);
        }
        let local = rates.local_access_ratio.unwrap_or(match vm.home {
            Some(_) => 1.0,
            None => config.local_unknown,
        });
        let slope = self.line.fit().map_or(SLOPE, |(.., slope)| slope);
        let lines = (1.0 + slope) * missed;
        let met = Met::of(&on, local, lines, shape, loads);
        let misses = missed / instructions;
        self.fit_cycles(cpi, met.stretch, misses * met.latency, config.evidence_kept);
        if let Some(ratio) = rates.llc_miss_rate
            && ratio > 0.0
            && met.capacity > 0.0
        {
            self.line
                .note(met.capacity.ln(), ratio.ln(), config.evidence_kept);
        }
    }

    /// Records where the VM's threads are.
    fn see(&mut self, on: &[f64], weight: f64) {
        let all: f64 = on.iter().sum();
        if all <= 0.0 {
            return;
        }
        if self.found.len() != on.len() {
            self.found = on.iter().map(|threads| threads / all).collect();
            return;
        }
        for (found, threads) in self.found.iter_mut().zip(on) {
            *found += weight * (threads / all - *found);
        }
    }

    fn fit_cycles(&mut self, cpi: f64, stretch: f64, misses: f64, kept: f64) {
        let noise = (NOISE * cpi).powi(2).max(1e-9);
        let [a, b, c] = &mut self.evidence;
        *a = *a * kept + stretch * stretch / noise;
        *b = *b * kept + stretch * misses / noise;
        *c = *c * kept + misses * misses / noise;
        let [p, q] = &mut self.target;
        *p = *p * kept + stretch * cpi / noise;
        *q = *q * kept + misses * cpi / noise;
    }

    /// Returns the cycles per instruction of the core's own work, and the cycles for which a miss stalls.
    fn fit(&self) -> (f64, f64) {
        let expected = CORE + HIT * self.references.value().unwrap_or(0.0);
        let (core, stall) = (1.0 / (CORE_SD * CORE_SD), 1.0 / (STALL_SD * STALL_SD));
        let [a, b, c] = self.evidence;
        let (a, c) = (a + core, c + stall);
        let (p, q) = (self.target[0] + core * expected, self.target[1] + stall * STALL);
        let det = a * c - b * b;
        let fitted = ((p * c - q * b) / det, (q * a - p * b) / det);
        if fitted.0 < CORE_MIN {
            return (CORE_MIN, ((q - b * CORE_MIN) / c).max(0.0));
        }
        if fitted.1 < 0.0 {
            return ((p / a).max(CORE_MIN), 0.0);
        }
        fitted
    }
}
