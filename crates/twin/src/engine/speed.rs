//! Speeds: how fast each CPU's task goes, and the end of an epoch, when caches and latencies are brought up to date.

use homenode_units::Ns;

use super::{Engine, Loading, Owner, Speed};
use crate::guest::Doing;
use crate::hardware::core::{CoreCost, Sibling};
use crate::hardware::fabric::Copying;
use crate::io::Device;
use crate::workload::Waiting;

/// Relative change of a miss ratio that makes a new solution necessary.
const MISS_CHANGE_MAX: f64 = 2e-3;

/// Relative change of the part of a cache that a thread can use that is worth a new miss ratio.
const LLC_CHANGE_MIN: f64 = 2e-4;
/// Change of the part of a cache that a thread can use, as a share of the whole, that an epoch may bring where caches fill: a
/// miss ratio that stays may fall all at once where the last line of a loop has come.
const OCCUPANCY_CHANGE_MAX: f64 = 0.02;
/// Epochs grow up to this many times their stated length while nothing changes.
const STRIDE_MAX: f64 = 64.0;

impl Engine {
    pub(super) fn sibling_state(&self, cpu: usize) -> Sibling {
        let busy = |cpu: &usize| self.scheduler.queues.current(*cpu).is_some();
        if self.topology.cpus[cpu].siblings.iter().any(busy) {
            Sibling::Busy
        } else {
            Sibling::Idle
        }
    }

    /// Bytes of a CPU's LLC that hold lines a thread can use: its own, and what siblings of its VM brought in of
    /// the memory they share.
    pub(super) fn llc_bytes(&self, cpu: usize, vm: usize, thread: usize) -> f64 {
        let llc = &self.llcs[self.topology.cpus[cpu].llc];
        let owner = &self.vms[vm];
        let own = llc.held(owner.first_vcpu + thread);
        let shared = owner.threads[thread].shared_share;
        if shared == 0.0 {
            return own * self.line_bytes;
        }
        let all: f64 = (0..owner.threads.len())
            .map(|other| llc.held(owner.first_vcpu + other))
            .sum();
        (own + shared * (all - own)) * self.line_bytes
    }

    /// Sets how fast the current task of a CPU goes, from the latencies of the last solution.
    pub(super) fn set_speed(&mut self, cpu: usize) {
        let Some(task) = self.scheduler.queues.current(cpu) else {
            self.ends[cpu] = Ns(u64::MAX);
            return;
        };
        let mut speed = Speed { ..Speed::default() };
        let (owed, left) = match self.owners[task] {
            Owner::Daemon(daemon) => {
                speed.ns_per_unit = 1.0;
                (0.0, self.daemon_left[daemon])
            }
            Owner::Vcpu { vm, thread } => {
                speed.llc_bytes = self.llc_bytes(cpu, vm, thread);
                speed.cost = self.cost(cpu, vm, thread, speed.llc_bytes);
                self.seen[cpu] = miss_ratio(&speed.cost);
                speed.ns_per_unit = self.ns_per_unit(cpu, vm, thread, &speed.cost);
                let state = &self.vms[vm].threads[thread];
                (state.owed_ns, state.left)
            }
        };
        self.ends[cpu] = self.end_of(owed, left, speed.ns_per_unit);
        self.speeds[cpu] = speed;
    }

    /// The same for all CPUs that run a VM, whose program has changed; everything must be settled.
    pub(super) fn set_speeds_of(&mut self, vm: usize) {
        self.unsettle();
        for cpu in 0..self.topology.cpus.len() {
            let task = self.scheduler.queues.current(cpu).map(|task| self.owners[task]);
            if matches!(task, Some(Owner::Vcpu { vm: runs, .. }) if runs == vm) {
                self.set_speed(cpu);
            }
        }
    }

    /// When a task will be done that owes some time and has some units of work left; never, if it has no end of them.
    pub(super) fn end_of(&self, owed_ns: f64, left: f64, ns_per_unit: f64) -> Ns {
        let ns = (owed_ns + left.max(0.0) * ns_per_unit).ceil() as u64;
        Ns(self.now.0.saturating_add(ns.max(1)))
    }

    pub(super) fn cost(&self, cpu: usize, vm: usize, thread: usize, llc_bytes: f64) -> CoreCost {
        let owner = &self.vms[vm];
        match (&owner.program, owner.threads[thread].doing) {
            (Some(program), Doing::Computing) => {
                let mut cost = CoreCost::of(
                    program,
                    owner.phase(thread),
                    &self.hardware,
                    &self.paging[vm],
                    llc_bytes,
                    self.sibling_state(cpu),
                );
                if program.waiting == Waiting::Sleep {
                    let wakeups = program.wakeups_per_m_instructions / 1e6;
                    cost.busy_cycles += wakeups * self.ipi_ns * self.clock_ghz;
                }
                cost
            }
            _ => CoreCost::default(),
        }
    }

    pub(super) fn ns_per_unit(&self, cpu: usize, vm: usize, thread: usize, cost: &CoreCost) -> f64 {
        let owner = &self.vms[vm];
        let stall = self
            .moving
            .as_ref()
            .filter(|moving| moving.vm == vm)
            .map_or(0.0, |moving| moving.stall);
        let ns = match owner.threads[thread].doing {
            Doing::Computing => {
                let latency = self
                    .fabric
                    .latency_ns(self.topology.cpus[cpu].node, owner.memory.weights(thread));
                cost.ns_per_instruction(self.clock_ghz, latency)
            }
            Doing::Touching { ns_per_page, .. } => ns_per_page,
            Doing::Housekeeping | Doing::Idle | Doing::AtBarrier | Doing::Spinning | Doing::WaitingForIo => {
                1.0
            }
        };
        ns / (1.0 - stall)
    }

    /// The end of an epoch: caches take in what was missed; if who runs, where memory lies or how often they miss has
    /// changed, latencies are found anew.
    pub(super) fn end_epoch(&mut self) {
        self.settle_all();
        if self.totals.busiest.due(self.now) {
            let links = self.link_bytes();
            let caps = &self.topology.link_caps;
            self.totals.busiest.look(self.now, links, caps);
        }
        self.migrate_slice();
        for llc in &mut self.llcs {
            llc.step(&self.sharers);
        }
        let lasted = (self.now.0 - self.epoch_began.0) as f64;
        self.dirty |= self.transfer(lasted);
        let mut unsteady = self.every_epoch || self.moving.is_some();
        for vm in &mut self.vms {
            unsteady |= vm.memory.refresh();
        }
        self.dirty |= unsteady;
        let mut drift = 0.0_f64;
        for cpu in 0..self.topology.cpus.len() {
            if let Some(Owner::Vcpu { vm, thread }) =
                self.scheduler.queues.current(cpu).map(|task| self.owners[task])
            {
                let llc_bytes = self.llc_bytes(cpu, vm, thread);
                let before = self.speeds[cpu].llc_bytes;
                let whole = self.llcs[self.topology.cpus[cpu].llc].lines() * self.line_bytes;
                drift = drift.max((llc_bytes - before).abs() / (OCCUPANCY_CHANGE_MAX * whole));
                if (llc_bytes - before).abs() > LLC_CHANGE_MIN * before {
                    self.speeds[cpu].cost = self.cost(cpu, vm, thread, llc_bytes);
                    self.speeds[cpu].llc_bytes = llc_bytes;
                }
                let ratio = miss_ratio(&self.speeds[cpu].cost);
                let tolerance = MISS_CHANGE_MAX * self.solved[cpu];
                self.dirty |= (ratio - self.solved[cpu]).abs() > tolerance;
                let moved = (ratio - std::mem::replace(&mut self.seen[cpu], ratio)).abs();
                if moved > 0.0 {
                    drift = drift.max(moved / tolerance);
                }
            }
        }
        self.set_stride(drift, unsteady);
        if std::mem::take(&mut self.dirty) {
            self.solve();
        }
        if cfg!(debug_assertions) {
            self.check();
        }
    }

    /// How long the next epoch may be: until miss ratios will have drifted by half of what makes a new solution
    /// necessary, or occupancies by half of what an epoch may bring, at most twice the last. `drift` is in units of that.
    fn set_stride(&mut self, drift: f64, unsteady: bool) {
        let base = self.epoch.as_f64();
        let lasted = (self.now.0 - self.epoch_began.0) as f64;
        let most = (2.0 * self.stride.as_f64()).min(STRIDE_MAX * base);
        let stride = if unsteady {
            base
        } else {
            (lasted * 0.5 / drift).clamp(base, most)
        };
        self.stride = Ns(stride as u64);
        self.epoch_began = self.now;
        self.epoch_end = Ns(self.now.0 + self.stride.0);
    }

    /// Finds latencies for the tasks that run now, and sets their speeds.
    pub(super) fn solve(&mut self) {
        self.fabric.clear();
        let mut loading = std::mem::take(&mut self.loading);
        loading.clear();
        for cpu in 0..self.topology.cpus.len() {
            let Some(Owner::Vcpu { vm, thread }) =
                self.scheduler.queues.current(cpu).map(|task| self.owners[task])
            else {
                continue;
            };
            let (owner, cost) = (&self.vms[vm], self.speeds[cpu].cost);
            self.solved[cpu] = miss_ratio(&cost);
            // Threads without misses load nothing.
            let flow = (cost.misses > 0.0).then(|| {
                let write_share = owner.program.as_ref().map_or(0.0, |program| program.write_share);
                let node = self.topology.cpus[cpu].node;
                self.fabric
                    .add(node, &cost, write_share, owner.memory.weights(thread))
            });
            loading.push(Loading {
                cpu,
                vm,
                thread,
                flow,
            });
        }
        let by_guests = self
            .vms
            .iter()
            .flat_map(|vm| &vm.autonuma)
            .flat_map(|a| &a.groups);
        let by_host = self.moving.iter().flat_map(|moving| &moving.copying);
        let copying: Vec<Copying> = by_guests
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
            let Speed { cost, llc_bytes, .. } = self.speeds[cpu];
            let granted = flow.map_or(1.0, |flow| self.fabric.granted(flow).max(1e-3));
            let ns_per_unit = self.ns_per_unit(cpu, vm, thread, &cost) / granted;
            let state = &self.vms[vm].threads[thread];
            self.ends[cpu] = self.end_of(state.owed_ns, state.left, ns_per_unit);
            self.speeds[cpu] = Speed {
                cost,
                ns_per_unit,
                llc_bytes,
            };
        }
        self.loading = loading;
    }
}

fn miss_ratio(cost: &CoreCost) -> f64 {
    if cost.accesses > 0.0 {
        cost.misses / cost.accesses
    } else {
        0.0
    }
}
