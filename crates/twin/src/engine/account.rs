//! Accounts for what a task did in a stretch of time on a CPU: instructions, misses, traffic, pages touched.

use homenode_units::PAGE_BYTES;

use super::{Engine, Owner};
use crate::guest::{Doing, Stage};
use crate::hypervisor::Segment;
use crate::hypervisor::memory::Toucher;
use crate::index::{CpuIx, ThreadIx, VmIx};

impl Engine {
    /// Returns a copy of the host that is accounted up to now. The host itself stays untouched: rounding would otherwise let each
    /// look at it change what happens later.
    pub(crate) fn settled(&self) -> Engine {
        let mut settled = self.clone();
        settled.settle_all();
        settled.transfer((self.now.0 - self.epochs.began.0) as f64);
        settled
    }

    /// Accounts for all CPUs up to now.
    pub(crate) fn settle_all(&mut self) {
        if self.epochs.settled == self.now {
            return;
        }
        self.epochs.settled = self.now;
        for cpu in self.topology.cpus.places() {
            self.scheduler.settle(cpu, self.now);
        }
        self.apply_segments();
    }

    pub(super) fn apply_segments(&mut self) {
        let mut segments = std::mem::take(&mut self.scheduler.queues.segments);
        for segment in segments.drain(..) {
            match self.owners[segment.task] {
                Owner::Daemon(daemon) => self.daemons.left[daemon] -= segment.ns as f64,
                Owner::Vcpu { vm, thread } => self.apply(vm, thread, segment),
            }
        }
        self.scheduler.queues.segments = segments;
    }

    /// Accounts for what a vCPU did in a stretch of time on a CPU.
    pub(super) fn apply(&mut self, vm: VmIx, thread: ThreadIx, segment: Segment) {
        let Segment { task, cpu, ns } = segment;
        let ns = ns as f64;
        let speed = self.pace.speeds[cpu];
        let state = &mut self.vms[vm].threads[thread];
        state.cycles += ns * self.figures.clock_ghz;
        let owed = ns.min(state.owed_ns);
        state.owed_ns -= owed;
        let units = if speed.ns_per_unit > 0.0 {
            (ns - owed) / speed.ns_per_unit
        } else {
            0.0
        };
        let units = units.min(state.left);
        state.left -= units;
        match state.doing {
            Doing::Computing => {
                let (accesses, misses) = (units * speed.cost.accesses, units * speed.cost.misses);
                state.instructions += units;
                state.llc_references += accesses;
                state.llc_misses += misses;
                let llc = self.topology.cpus[cpu].llc;
                self.llcs[llc].access(task.0, accesses, misses);
                self.count_misses(vm, thread, cpu, misses);
                if self.vms[vm].memory.swapped() > 0 {
                    self.fault(vm, thread, cpu, accesses);
                }
                if let Some(sampling) = &mut self.vms[vm].host.sampling {
                    let node = self.topology.cpus[cpu].node;
                    sampling.ran(
                        thread,
                        node,
                        (ns - owed) * self.figures.clock_ghz,
                        speed.cost.misses,
                    );
                }
            }
            Doing::Touching { touch, .. } => {
                let pages = state.pages_completed(units);
                self.touch(vm, thread, touch.region, cpu, pages);
            }
            Doing::Housekeeping
            | Doing::Idle
            | Doing::AtBarrier
            | Doing::Spinning
            | Doing::WaitingForIo
            | Doing::Resting => {}
        }
    }

    /// Touches the pages that a finished touch still lacks because of rounding.
    pub(super) fn finish_touch(&mut self, cpu: CpuIx, vm: VmIx, thread: ThreadIx) {
        if let Doing::Touching { touch, .. } = self.vms[vm].threads[thread].doing {
            self.touch(vm, thread, touch.region, cpu, touch.pages);
        }
    }

    pub(super) fn touch(&mut self, vm: VmIx, vcpu: ThreadIx, region: usize, cpu: CpuIx, pages: u64) {
        if pages == 0 {
            return;
        }
        let node = self.topology.cpus[cpu].node;
        let by = Toucher { vcpu, node };
        self.placed.fill(0);
        let owner = &mut self.vms[vm];
        let pages = if owner.memory.owns_frames && !owner.memory.finds_frames() {
            let memory = &mut owner.memory;
            memory.touch_own(region, pages, &mut self.placed, &mut self.chance)
        } else {
            pages
        };
        self.place(vm, region, by, pages);
        let owner = &mut self.vms[vm];
        if owner.stage == Stage::Program {
            owner.count_touched(&self.placed);
        }
        self.hold_to_memory(vm);
    }

    /// Places `pages` pages of a region and adds them to `placed`. Counts one write per placed page, for zeroing it.
    pub(super) fn place(&mut self, vm: VmIx, region: usize, by: Toucher, pages: u64) {
        let memory = &mut self.vms[vm].memory;
        self.memory
            .touch(&self.topology, memory, region, by, pages, &mut self.placed);
        for (at, pages) in self.placed.iter().enumerate().filter(|(_, pages)| **pages > 0) {
            let bytes = (pages * PAGE_BYTES) as f64;
            self.totals.write(by.node, at, bytes);
        }
    }

    pub(super) fn count_misses(&mut self, vm: VmIx, thread: ThreadIx, cpu: CpuIx, misses: f64) {
        let place = &self.topology.cpus[cpu];
        let owner = &mut self.vms[vm];
        let write_share = owner
            .course
            .program
            .as_ref()
            .map_or(0.0, |program| program.write_share);
        let (node, bytes) = (place.node, misses * self.figures.line_bytes);
        let nodes = owner.counts.accesses.len();
        let row = node * nodes..(node + 1) * nodes;
        let (read, written) = (&mut self.totals.read[row.clone()], &mut self.totals.written[row]);
        let mut local = 0.0;
        for target in owner.memory.targets(thread) {
            let (to, share) = (target.node, target.share);
            owner.counts.accesses[to] += misses * share;
            read[to] += bytes * share;
            written[to] += bytes * write_share * share;
            if to == node {
                local = misses * share;
            }
        }
        owner.counts.local += local;
        owner.counts.remote += misses - local;
    }

    /// Returns the bytes moved over each link.
    pub(crate) fn link_bytes(&self) -> Vec<f64> {
        let mut links = vec![0.0; self.topology.links.len()];
        let nodes = self.topology.nodes();
        for (from, to) in (0..nodes).flat_map(|from| (0..nodes).map(move |to| (from, to))) {
            let bytes = self.totals.between(from, to);
            for link in self.fabric.route(from, to) {
                links[link] += bytes;
            }
        }
        links
    }
}
