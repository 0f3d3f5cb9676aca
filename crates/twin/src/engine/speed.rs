//! Speed of each CPU's task; and the end of an epoch, when caches and latencies are brought up to date.

use homenode_units::Ns;

use super::epochs::CALM;
use super::pace::{Loading, Solved};
use super::{Engine, Owner};
use crate::guest::{Doing, Vm};
use crate::hardware::core::{CoreCost, InLlc, Sibling};
use crate::hardware::fabric::Copying;
use crate::hypervisor::sampling::Sampling;
use crate::index::{CpuIx, TaskIx, ThreadIx, VmIx};
use crate::io::Device;
use crate::workload::Waiting;

/// Relative change of a task's demand on memory that requires a new solution.
const CHANGE_MAX: f64 = 2e-3;
/// How much of a cache an epoch may add to or take from a thread while caches fill, as a share of the whole. It is limited
/// because even a steady miss ratio may drop at once when the last line of a loop arrives.
const OCCUPANCY_CHANGE_MAX: f64 = 0.02;
/// Epochs grow up to this many times the base length while nothing changes.
const STRIDE_MAX: f64 = 64.0;

impl Engine {
    pub(super) fn sibling_state(&self, cpu: CpuIx) -> Sibling {
        let busy = |cpu: &CpuIx| self.scheduler.queues.current(*cpu).is_some();
        if self.topology.cpus[cpu].siblings.iter().any(busy) {
            Sibling::Busy
        } else {
            Sibling::Idle
        }
    }

    /// Returns the part of a CPU's LLC that a vCPU can use.
    fn in_llc(&self, cpu: CpuIx, number: TaskIx) -> InLlc {
        let sharer = &self.pace.sharers[number];
        let lines = self.llcs[self.topology.cpus[cpu].llc].usable(number.0, sharer);
        InLlc {
            bytes: lines * self.figures.line_bytes,
            miss_ratio: sharer.miss_ratio(lines),
        }
    }

    /// Sets the speed of a CPU's current task, using the latencies of the last solution.
    pub(super) fn set_speed(&mut self, cpu: CpuIx) {
        let Some(task) = self.scheduler.queues.current(cpu) else {
            self.pace.ends[cpu] = Ns(u64::MAX);
            return;
        };
        let (owed, left, ns_per_unit) = match self.owners[task] {
            Owner::Daemon(daemon) => {
                self.pace.speeds[cpu].cost = CoreCost::default();
                (0.0, self.daemons.left[daemon], 1.0)
            }
            Owner::Vcpu { vm, thread } => {
                let llc = self.in_llc(cpu, task);
                self.set_cost(cpu, vm, thread, llc);
                self.pace.seen[cpu] = llc;
                let solved = &self.pace.solved[cpu];
                let granted = if solved.task == Some(task) {
                    solved.granted
                } else {
                    1.0
                };
                let ns_per_unit = self.ns_per_unit(cpu, vm, thread) / granted;
                let state = &self.vms[vm].threads[thread];
                (state.owed_ns, state.left, ns_per_unit)
            }
        };
        self.pace.ends[cpu] = self.end_of(owed, left, ns_per_unit);
        self.pace.speeds[cpu].ns_per_unit = ns_per_unit;
    }

    /// Sets the speed of every CPU that runs a given VM, whose program has changed. Everything must be settled.
    pub(super) fn set_speeds_of(&mut self, vm: VmIx) {
        for cpu in self.topology.cpus.places() {
            if self.vcpu_on(cpu).is_some_and(|(runs, _)| runs == vm) {
                self.set_speed(cpu);
                self.unsettle(cpu);
            }
        }
    }

    /// Returns when a task completes that owes some time and has `left` units of work. It never does if its work has no end.
    pub(super) fn end_of(&self, owed_ns: f64, left: f64, ns_per_unit: f64) -> Ns {
        let ns = (owed_ns + left.max(0.0) * ns_per_unit) as u64;
        Ns(self.now.0.saturating_add(ns).saturating_add(1))
    }

    /// Computes in place the cost of a CPU's current vCPU with this much of the cache. In place, because a processor stalls when
    /// a value is written in parts and then copied whole, and this runs for every CPU in every epoch.
    fn set_cost(&mut self, cpu: CpuIx, vm: VmIx, thread: ThreadIx, llc: InLlc) {
        let owner = &self.vms[vm];
        let cost = match (&owner.course.program, owner.threads[thread].doing) {
            (Some(program), Doing::Computing) => {
                let mut cost = CoreCost::of(
                    program,
                    owner.phase(thread),
                    &self.hardware,
                    &self.pace.paging[vm],
                    llc,
                    self.sibling_state(cpu),
                );
                cost.waits *= self.figures.memory_waits;
                if program.waiting == Waiting::Sleep {
                    let wakeups = program.wakeups_per_m_instructions / 1e6;
                    // All threads behave alike, so each wakes others as many times as it is woken.
                    let each_ns = self.figures.ipi_ns + self.figures.wake_ns;
                    cost.busy_cycles += wakeups * each_ns * self.figures.clock_ghz;
                }
                cost
            }
            _ => CoreCost::default(),
        };
        self.pace.speeds[cpu].cost = cost;
    }

    /// Returns the time per unit of work of a CPU's current vCPU, at its cost and the present latencies.
    fn ns_per_unit(&self, cpu: CpuIx, vm: VmIx, thread: ThreadIx) -> f64 {
        let (owner, cost) = (&self.vms[vm], &self.pace.speeds[cpu].cost);
        let stall = self
            .moving
            .as_ref()
            .filter(|moving| moving.vm == vm)
            .map_or(0.0, |moving| moving.stall);
        let sampled = owner.host.sampling.as_ref().map_or(0.0, Sampling::share_of_time);
        let ns = match owner.threads[thread].doing {
            Doing::Computing => {
                let latency = self
                    .fabric
                    .latency_ns(self.topology.cpus[cpu].node, owner.memory.targets(thread));
                let ns = cost.ns_per_instruction(self.figures.clock_ghz, latency);
                ns + self.release_ns(vm, ns) + self.swap_ns(vm, thread, cost.accesses)
            }
            Doing::Touching { ns_per_page, .. } => ns_per_page,
            Doing::Housekeeping
            | Doing::Idle
            | Doing::AtBarrier
            | Doing::Spinning
            | Doing::WaitingForIo
            | Doing::Resting => 1.0,
        };
        ns / ((1.0 - stall) * (1.0 - sampled))
    }

    /// Ends an epoch of the caches that are due, which take in the misses. Solves latencies again if the running tasks, the
    /// placement of memory or the miss rates have changed.
    pub(super) fn end_epoch(&mut self) {
        let lasted = (self.now.0 - self.epochs.began.0) as f64;
        if self.epochs.always_solve {
            self.settle_all();
        }
        for llc in 0..self.llcs.len() {
            if self.epochs.cadences[llc].due <= self.now {
                self.settle_llc(llc);
            }
        }
        if self.totals.busiest.due(self.now) {
            self.settle_all();
            let links = self.link_bytes();
            self.totals
                .busiest
                .look(self.now, links, &self.topology.link_caps);
        }
        self.migrate_slice();
        self.epochs.dirty |= self.transfer(lasted);
        let mut stale = false;
        for vm in &mut self.vms {
            vm.advance();
            stale |= vm.memory.stale();
        }
        let unsteady = stale || self.epochs.always_solve || self.moving.is_some();
        if unsteady {
            self.settle_all();
            self.vms.iter_mut().for_each(|vm| vm.memory.refresh());
            self.epochs.dirty = true;
        }
        for llc in 0..self.llcs.len() {
            if unsteady || self.epochs.cadences[llc].due <= self.now {
                self.step_llc(llc, unsteady);
            }
        }
        if std::mem::take(&mut self.epochs.dirty) {
            self.settle_all();
            self.solve();
        }
        self.epochs.began = self.now;
        let dues = self.epochs.cadences.iter().map(|cadence| cadence.due);
        self.epochs.end = dues.min().expect("CPUs have caches");
        if cfg!(debug_assertions) {
            self.check();
        }
    }

    /// Accounts the CPUs of a cache up to now.
    fn settle_llc(&mut self, llc: usize) {
        if self.epochs.settled == self.now {
            return;
        }
        for cpu in &self.topology.llc_cpus[llc] {
            self.scheduler.settle(*cpu, self.now);
        }
        self.apply_segments();
    }

    /// Lets a cache take in the misses and computes what its CPUs' tasks cost now. Returns when to do so next: when the miss
    /// ratios will have drifted by half of what requires a new solution, or the occupancies by half of what an epoch may change,
    /// but at most after twice the last interval.
    fn step_llc(&mut self, llc: usize, unsteady: bool) {
        self.llcs[llc].step(&self.pace.sharers);
        // The drifts of occupancies and of miss ratios, relative to what an epoch may change.
        let (mut filling, mut missing) = (0.0_f64, 0.0_f64);
        let whole = self.llcs[llc].lines() * self.figures.line_bytes;
        for at in 0..self.topology.llc_cpus[llc].len() {
            let cpu = self.topology.llc_cpus[llc][at];
            let task = self.scheduler.queues.current(cpu);
            let asks = match task.map(|task| (task, self.owners[task])) {
                Some((task, Owner::Vcpu { vm, thread })) => {
                    let now = self.in_llc(cpu, task);
                    self.set_cost(cpu, vm, thread, now);
                    let before = std::mem::replace(&mut self.pace.seen[cpu], now);
                    let cost = &self.pace.speeds[cpu].cost;
                    if cost.accesses > 0.0 && now != before {
                        let filled = (now.bytes - before.bytes).abs() / (OCCUPANCY_CHANGE_MAX * whole);
                        let missed = (now.miss_ratio / before.miss_ratio - 1.0).abs() / CHANGE_MAX;
                        (filling, missing) = (filling.max(filled), missing.max(missed));
                    }
                    cost
                }
                _ => &CoreCost::default(),
            };
            self.epochs.dirty |= self.pace.solved[cpu].cost.differs(asks, CHANGE_MAX)
                || (asks.misses > 0.0 && self.pace.solved[cpu].task != task);
        }
        let cadence = &mut self.epochs.cadences[llc];
        let base = self.epochs.length.as_f64();
        let lasted = (self.now.0 - cadence.began.0) as f64;
        let most = (2.0 * cadence.stride.as_f64()).min(STRIDE_MAX * base);
        let stride = if unsteady {
            base
        } else {
            let as_missing = (lasted * 0.5 / missing).max(cadence.least.as_f64());
            (lasted * 0.5 / filling).min(as_missing).clamp(base, most)
        };
        cadence.least = if unsteady {
            self.epochs.length
        } else {
            Ns((2 * cadence.least.0).min(CALM * self.epochs.length.0))
        };
        cadence.stride = Ns(stride as u64 / self.epochs.length.0 * self.epochs.length.0);
        cadence.began = self.now;
        cadence.due = Ns(self.now.0 + cadence.stride.0);
    }

    /// Returns the vCPU that a CPU runs.
    fn vcpu_on(&self, cpu: CpuIx) -> Option<(VmIx, ThreadIx)> {
        match self.owners[self.scheduler.queues.current(cpu)?] {
            Owner::Vcpu { vm, thread } => Some((vm, thread)),
            Owner::Daemon(_) => None,
        }
    }

    /// Solves latencies for the tasks that run now, and sets the tasks' speeds.
    pub(super) fn solve(&mut self) {
        self.fabric.clear();
        let mut loading = std::mem::take(&mut self.pace.loading);
        loading.clear();
        for cpu in self.topology.cpus.places() {
            let Some((vm, thread)) = self.vcpu_on(cpu) else {
                self.pace.solved[cpu] = Solved::default();
                continue;
            };
            let (owner, cost) = (&self.vms[vm], self.pace.speeds[cpu].cost);
            self.pace.solved[cpu].task = self.scheduler.queues.current(cpu);
            self.pace.solved[cpu].cost = cost;
            // Threads without misses add no load.
            let flow = (cost.misses > 0.0).then(|| {
                let write_share = owner
                    .course
                    .program
                    .as_ref()
                    .map_or(0.0, |program| program.write_share);
                let node = self.topology.cpus[cpu].node;
                self.fabric
                    .add(node, &cost, write_share, owner.memory.targets(thread))
            });
            loading.push(Loading {
                cpu,
                vm,
                thread,
                flow,
            });
        }
        let movers = self.movers.iter().map(|vm| &self.vms[*vm]);
        let by_kernels = movers.flat_map(Vm::page_movers).flat_map(|mover| &mover.groups);
        let by_host = self.moving.iter().flat_map(|moving| &moving.copying);
        let copying: Vec<Copying> = by_kernels
            .flat_map(|group| &group.copying)
            .chain(by_host)
            .copied()
            .chain(self.devices.iter().flat_map(Device::copying))
            .collect();
        self.fabric.solve(&copying);
        for Loading {
            cpu,
            vm,
            thread,
            flow,
        } in loading.iter().copied()
        {
            let granted = flow.map_or(1.0, |flow| self.fabric.granted(flow).max(1e-3));
            self.pace.solved[cpu].granted = granted;
            let ns_per_unit = self.ns_per_unit(cpu, vm, thread) / granted;
            let state = &self.vms[vm].threads[thread];
            self.pace.ends[cpu] = self.end_of(state.owed_ns, state.left, ns_per_unit);
            self.pace.speeds[cpu].ns_per_unit = ns_per_unit;
        }
        self.pace.loading = loading;
    }
}
