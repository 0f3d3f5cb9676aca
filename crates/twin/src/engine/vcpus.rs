//! vCPUs: they boot, compute, wake each other, sleep and leave.

use homenode_units::Ns;

use super::agenda::Timer;
use super::build::{vm_paging, vm_sharers};
use super::{Engine, Owner};
use crate::guest::view::By;
use crate::guest::vm::Next;
use crate::guest::{Doing, HOUSEKEEPING_PERIOD, Lease, Stage, Vm};
use crate::hardware::Llc;
use crate::hypervisor::Run;
use crate::index::{CpuIx, ThreadIx, VmIx};
use crate::scenario::AfterProgram;

impl Engine {
    pub(super) fn boot(&mut self, vm: VmIx) {
        self.version += 1;
        self.create_memory(vm);
        self.set_sampling(vm);
        self.set_host_autonuma(vm);
        self.vms[vm].boot(self.now);
        for thread in self.vms[vm].threads.places() {
            if self.vms[vm].threads[thread].runnable() {
                let task = self.vms[vm].task(thread);
                self.scheduler.fork(task, self.now, &mut self.chance);
                self.after_scheduling();
            }
        }
        self.show_nodes(vm);
        self.set_thread_move(vm);
    }

    /// Handles the end of what a CPU's task was doing.
    pub(super) fn cpu_event(&mut self, cpu: CpuIx) {
        self.scheduler.settle(cpu, self.now);
        self.apply_segments();
        let task = self
            .scheduler
            .queues
            .current(cpu)
            .expect("a CPU with an end runs a task");
        match self.owners[task] {
            Owner::Daemon(_) => {
                self.scheduler.sleep(cpu, self.now);
                self.after_scheduling();
            }
            Owner::Vcpu { vm, thread } => self.vcpu_done(cpu, vm, thread),
        }
    }

    fn vcpu_done(&mut self, cpu: CpuIx, vm: VmIx, thread: ThreadIx) {
        self.vms[vm].threads[thread].left = 0.0;
        self.vms[vm].threads[thread].owed_ns = 0.0;
        self.finish_touch(cpu, vm, thread);
        if self.vms[vm].is_last() {
            self.settle_vm(vm);
        }
        let next = match self.request(vm, thread) {
            Some(next) => next,
            None => self.vms[vm].next(thread, self.now),
        };
        let next = match next {
            Next::End => self.next_program(vm).unwrap_or(Next::End),
            next => next,
        };
        if next == Next::End && self.vms[vm].after == AfterProgram::Leave {
            self.leave(vm);
            return;
        }
        if let Next::Rest(lasts) = next {
            self.rest(vm, thread, lasts);
        }
        if next == Next::Start {
            self.start_scanning(vm, By::Guest);
            self.start_scanning(vm, By::Host);
            self.start_releases(vm);
            self.start_runtime(vm);
        }
        // Wake-ups are sent from the CPU of the thread that released the others, so they must go out while it still runs there.
        if matches!(next, Next::Start | Next::Release | Next::End) {
            let ipi_ns = if next == Next::Release {
                self.figures.ipi_ns
            } else {
                0.0
            };
            self.rouse(cpu, vm, thread, ipi_ns);
        }
        if self.vms[vm].threads[thread].runnable() {
            if self.vms[vm].threads[thread].doing == Doing::Spinning {
                self.disturb(cpu);
            }
            self.set_speed(cpu);
        } else {
            self.set_housekeeping(vm, thread);
            // A thread that this one woke may have taken its CPU.
            self.scheduler.stop(self.vms[vm].task(thread), self.now);
        }
        self.after_scheduling();
    }

    /// Begins the guest's next program after one has ended, if there is one.
    fn next_program(&mut self, vm: VmIx) -> Option<Next> {
        let next = self.vms[vm].begin_next(self.now)?;
        self.fit_program(vm);
        Some(next)
    }

    /// Informs caches and TLBs that a VM begins a program, of which they hold nothing yet.
    pub(super) fn fit_program(&mut self, vm: VmIx) {
        let lines_max = self.llcs.iter().map(Llc::lines).fold(1.0, f64::max);
        let owner = &self.vms[vm];
        let sharers = vm_sharers(owner, vm, self.figures.line_bytes, lines_max, &self.pace.sharers);
        self.pace.paging[vm] = vm_paging(&self.vms[vm], &self.hardware, self.hypervisor);
        for (number, sharer) in self.vms[vm].tasks().zip(sharers) {
            self.pace.sharers[number] = sharer;
            self.llcs.iter_mut().for_each(|llc| llc.forget(number.0));
        }
    }

    /// Accounts for a VM's vCPUs up to now, before they change what they do.
    pub(super) fn settle_vm(&mut self, vm: VmIx) {
        for thread in self.vms[vm].threads.places() {
            let task = &self.scheduler.queues.tasks[self.vms[vm].task(thread)];
            if task.run == Run::Running {
                self.scheduler.settle(task.cpu, self.now);
            }
        }
        self.apply_segments();
    }

    /// Lets the other vCPUs of a VM take up the work that they now have. Interrupts wake the sleeping ones, one after the other,
    /// at a cost to the waker. vCPUs without work go to sleep.
    fn rouse(&mut self, cpu: CpuIx, vm: VmIx, rouser: ThreadIx, ipi_ns: f64) {
        let mut sent_ns = 0.0;
        for other in self.vms[vm].threads.places().filter(|other| *other != rouser) {
            let task = self.vms[vm].task(other);
            match (
                self.scheduler.queues.tasks[task].run,
                self.vms[vm].threads[other].runnable(),
            ) {
                (Run::Sleeping, true) if ipi_ns > 0.0 => {
                    sent_ns += ipi_ns;
                    let wake = Timer::Wake {
                        vm,
                        thread: other,
                        waker: cpu,
                    };
                    self.agenda.set(Ns(self.now.0 + sent_ns as u64), wake);
                }
                (Run::Sleeping, true) => self.wake(vm, other, Some(cpu)),
                (Run::Sleeping, false) => self.set_housekeeping(vm, other),
                (Run::Running, true) => {
                    let cpu = self.scheduler.queues.tasks[task].cpu;
                    self.disturb(cpu);
                    self.set_speed(cpu);
                }
                (Run::Waiting | Run::Throttled, true) => {}
                (Run::Running | Run::Waiting | Run::Throttled, false) => {
                    self.set_housekeeping(vm, other);
                    self.scheduler.stop(task, self.now);
                    self.after_scheduling();
                }
            }
        }
        self.vms[vm].threads[rouser].owed_ns += sent_ns;
    }

    /// Runs some housekeeping of a halted vCPU's kernel.
    pub(super) fn housekeep(&mut self, vm: VmIx, thread: ThreadIx) {
        let owner = &mut self.vms[vm];
        owner.threads[thread].timer_set = false;
        if owner.present() && owner.threads[thread].doing == Doing::Idle {
            owner.housekeep(thread);
            self.wake(vm, thread, None);
        }
    }

    /// Wakes a halted vCPU, which then owes the time to re-enter the guest.
    pub(super) fn wake(&mut self, vm: VmIx, thread: ThreadIx, waker: Option<CpuIx>) {
        self.vms[vm].threads[thread].owed_ns += self.figures.wake_ns;
        let task = self.vms[vm].task(thread);
        self.scheduler.wake(task, waker, self.now);
        self.after_scheduling();
    }

    /// Delivers an interrupt from a CPU to a vCPU, which may be awake or gone by the time it arrives.
    pub(super) fn interrupt(&mut self, vm: VmIx, thread: ThreadIx, waker: CpuIx) {
        let owner = &self.vms[vm];
        let task = owner.task(thread);
        let sleeps = self.scheduler.queues.tasks[task].run == Run::Sleeping;
        if sleeps && owner.present() && owner.threads[thread].runnable() {
            self.wake(vm, thread, Some(waker));
        }
    }

    /// Sets a timer that wakes a halted vCPU now and then, as its kernel's timers would, if it waits for nothing else.
    fn set_housekeeping(&mut self, vm: VmIx, thread: ThreadIx) {
        let state = &mut self.vms[vm].threads[thread];
        if state.doing == Doing::Idle && !state.timer_set {
            state.timer_set = true;
            let after = self.chance.exponential(HOUSEKEEPING_PERIOD.as_f64()).max(1e6) as u64;
            self.agenda
                .set(Ns(self.now.0 + after), Timer::Housekeeping { vm, thread });
        }
    }

    pub(super) fn leave(&mut self, vm: VmIx) {
        self.vms[vm].stage = Stage::Gone;
        self.vms[vm].left = Some(self.now);
        self.version += 1;
        let Vm { autonuma, host, .. } = &mut self.vms[vm];
        for group in autonuma
            .iter_mut()
            .chain(&mut host.autonuma)
            .flat_map(|autonuma| &mut autonuma.groups)
        {
            group.copying.clear();
        }
        for thread in self.vms[vm].threads.places() {
            let task = self.vms[vm].task(thread);
            self.scheduler.stop(task, self.now);
            self.after_scheduling();
            for llc in &mut self.llcs {
                llc.forget(task.0);
            }
        }
        self.set_quota(vm, None);
        self.vms[vm].limits.memory = None;
        self.forget_permit(vm);
        let pages = self.vms[vm].memory.pages();
        self.memory.release(&pages);
    }

    /// Limits a VM's vCPUs to a quota from now on, or lifts the limit. Renewing a quota changes only its lease.
    pub(crate) fn set_quota(&mut self, vm: VmIx, lease: Option<Lease>) {
        let before = std::mem::replace(&mut self.vms[vm].limits.quota, lease);
        let quota = lease.map(|lease| lease.quota);
        if quota == before.map(|before| before.quota) {
            return;
        }
        let vcpus = self.vms[vm].tasks();
        let times = quota.map(|quota| (quota.run_ns, quota.period_ns));
        self.scheduler.set_quota(vcpus, times, self.now);
        self.after_scheduling();
        self.version += 1;
    }

    /// Accounts for what ran and sets the speed of what runs now, after the scheduler has acted.
    pub(crate) fn after_scheduling(&mut self) {
        self.apply_segments();
        let mut switched = std::mem::take(&mut self.scheduler.queues.switched);
        for cpu in switched.drain(..) {
            self.set_speed(cpu);
            // A task without demand on caches and memory may come and go without effect, unless an SMT sibling feels it.
            let alone = self.topology.cpus[cpu].siblings.is_empty();
            if !(alone
                && self
                    .pace
                    .asks_nothing(cpu, self.scheduler.queues.current(cpu).is_some()))
            {
                self.note_switch(cpu);
            }
            // The CPU's siblings now share the core with another task, or with none.
            for at in 0..self.topology.cpus[cpu].siblings.len() {
                let sibling = self.topology.cpus[cpu].siblings[at];
                self.scheduler.settle(sibling, self.now);
                self.apply_segments();
                self.set_speed(sibling);
            }
        }
        self.scheduler.queues.switched = switched;
    }

    /// Has a CPU's cache brought up to date after a switch: at the next boundary if another vCPU has come, or if a limit holds
    /// the last one back, whose lines others then push out.
    fn note_switch(&mut self, cpu: CpuIx) {
        let queues = &self.scheduler.queues;
        let current = queues.current(cpu);
        let vcpu = current.filter(|task| matches!(self.owners[*task], Owner::Vcpu { .. }));
        let last = self.pace.last[cpu];
        let is_held_back = last.is_some_and(|task| queues.tasks[task].run == Run::Throttled);
        if is_held_back || (vcpu.is_some() && vcpu != last) {
            self.pace.last[cpu] = vcpu;
            self.unsettle(cpu);
        } else {
            self.disturb(cpu);
        }
    }

    /// Has a CPU's cache brought up to date once its epoch has lasted long enough, because the CPU's vCPU pauses or continues.
    fn disturb(&mut self, cpu: CpuIx) {
        self.epochs.disturb(self.topology.cpus[cpu].llc, self.now);
    }

    /// Has a CPU's cache brought up to date soon, because the CPU now does something else.
    pub(super) fn unsettle(&mut self, cpu: CpuIx) {
        self.epochs.unsettle(self.topology.cpus[cpu].llc, self.now);
    }
}
