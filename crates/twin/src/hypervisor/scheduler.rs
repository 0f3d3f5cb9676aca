//! The host's scheduler, which follows one of the two disciplines.
//!
//! # Boundary
//!
//! The engine reports what happens (a task is started, wakes, sleeps, is confined) and asks when the scheduler itself next has
//! something to do. What a scheduler does by itself (slices, ticks, accounting, balancing) are its *events*.
//! [`Scheduler::next_event`] is the time of the next event that can change anything; it may be far away or never.
//! [`Scheduler::handle_events`] handles those that are due. `segments` holds what ran, `switched` the CPUs that switched.

use homenode_policy::permits::Standing;
use homenode_units::{Chance, Ns, Permit};

use super::credit::Credit;
use super::discipline::Discipline;
use super::fair::Fair;
use super::queues::{Queues, Run};
use crate::hardware::Topology;
use crate::index::{CpuIx, CpuIxSet, TaskIx, VmIx};
use crate::scenario::Hypervisor;

#[derive(Clone, Debug)]
enum Kind {
    Fair(Fair),
    Credit(Credit),
}

/// The scheduler of the host.
#[derive(Clone, Debug)]
pub(crate) struct Scheduler {
    pub queues: Queues,
    kind: Kind,
}

impl Scheduler {
    /// Creates the scheduler. `balances` says whether its kernel balances memory (`kernel.numa_balancing`).
    pub(crate) fn new(topology: &Topology, hypervisor: Hypervisor, balances: bool) -> Scheduler {
        let kind = match hypervisor {
            Hypervisor::Native | Hypervisor::Kvm => Kind::Fair(Fair::new(topology, balances)),
            Hypervisor::Xen => Kind::Credit(Credit::new(topology.cpus.len(), topology.nodes())),
        };
        Scheduler {
            queues: Queues::new(topology),
            kind,
        }
    }

    fn parts(&mut self) -> (&mut dyn Discipline, &mut Queues) {
        match &mut self.kind {
            Kind::Fair(fair) => (fair, &mut self.queues),
            Kind::Credit(credit) => (credit, &mut self.queues),
        }
    }
}

impl Scheduler {
    /// Adds a VM and returns its number. `weight` is usually 256; `cap_percent` is the most CPU time that its vCPUs together get,
    /// in percent of one CPU.
    pub(crate) fn add_vm(&mut self, weight: u32, cap_percent: Option<u32>) -> VmIx {
        let (discipline, queues) = self.parts();
        discipline.add_vm(weight, cap_percent);
        queues.add_vm()
    }

    /// Makes the current task of a CPU yield.
    #[cfg(test)]
    pub(crate) fn give_way(&mut self, cpu: CpuIx, now: Ns) {
        match &mut self.kind {
            Kind::Fair(_) => unreachable!("only Xen's yield is modelled"),
            Kind::Credit(credit) => credit.schedule(&mut self.queues, cpu, true, now),
        }
    }

    /// Sets a vCPU's soft affinity.
    #[cfg(test)]
    pub(crate) fn set_preferred(&mut self, task: TaskIx, preferred: CpuIxSet) {
        match &mut self.kind {
            Kind::Fair(_) => unreachable!("Linux has no soft affinity"),
            Kind::Credit(credit) => credit.set_preferred(task, preferred),
        }
    }

    /// Adds a sleeping task that may run on these CPUs: a vCPU of a VM, or a task of the host's own.
    pub(crate) fn add(&mut self, allowed: CpuIxSet, vm: Option<VmIx>) -> TaskIx {
        let (discipline, queues) = self.parts();
        let task = queues.add(allowed, vm);
        discipline.added(vm);
        task
    }

    /// Accounts for a CPU's time up to `now`.
    pub(crate) fn settle(&mut self, cpu: CpuIx, now: Ns) {
        // Each event settles CPUs, so the discipline is called directly, and only if something ran.
        if let Some((task, ns)) = self.queues.settle(cpu, now) {
            match &mut self.kind {
                Kind::Fair(fair) => fair.charge(&self.queues, cpu, task, ns),
                Kind::Credit(credit) => credit.charge(&self.queues, cpu, task, ns),
            }
        }
    }

    /// Starts a sleeping task for the first time.
    pub(crate) fn fork(&mut self, task: TaskIx, now: Ns, chance: &mut Chance) {
        let (discipline, queues) = self.parts();
        discipline.fork(queues, task, now, chance);
    }

    /// Wakes a sleeping task. `waker` is the CPU of the task that wakes it, if a task does.
    pub(crate) fn wake(&mut self, task: TaskIx, waker: Option<CpuIx>, now: Ns) {
        let (discipline, queues) = self.parts();
        discipline.wake(queues, task, waker, now);
    }

    /// Puts the current task of a CPU to sleep.
    pub(crate) fn sleep(&mut self, cpu: CpuIx, now: Ns) {
        let (discipline, queues) = self.parts();
        discipline.settle(queues, cpu, now);
        queues.take_off(cpu).expect("a running task sleeps");
        discipline.pick(queues, cpu, now);
    }

    /// Takes a task off the host's queues, whatever its state.
    pub(crate) fn stop(&mut self, task: TaskIx, now: Ns) {
        let cpu = self.queues.tasks[task].cpu;
        match self.queues.tasks[task].run {
            Run::Running => self.sleep(cpu, now),
            Run::Waiting | Run::Throttled => {
                let (discipline, queues) = self.parts();
                queues.dequeue(task, now);
                discipline.left(queues, cpu, now);
            }
            Run::Sleeping => {}
        }
    }

    /// Puts a runnable task on another CPU that it may use.
    pub(crate) fn migrate(&mut self, task: TaskIx, to: CpuIx, now: Ns) {
        let from = self.queues.tasks[task].cpu;
        let run = self.queues.tasks[task].run;
        debug_assert!(from != to && run != Run::Sleeping && self.queues.tasks[task].allowed[to]);
        self.stop(task, now);
        self.queues.tasks[task].cpu = to;
        let (discipline, queues) = self.parts();
        discipline.requeue(queues, task, now);
    }

    /// Exchanges the running tasks of two CPUs. Each task must be allowed on the other's CPU.
    pub(crate) fn exchange(&mut self, a: CpuIx, b: CpuIx, now: Ns) {
        let cpus = [a, b];
        let (discipline, queues) = self.parts();
        let tasks = cpus.map(|cpu| {
            discipline.settle(queues, cpu, now);
            queues.take_off(cpu).expect("a task runs on each")
        });
        for (task, to) in tasks.into_iter().zip([b, a]) {
            debug_assert!(queues.tasks[task].allowed[to]);
            queues.tasks[task].cpu = to;
            discipline.requeue(queues, task, now);
        }
    }

    /// Confines a task to some CPUs. A task that is on another CPU moves to one of them.
    pub(crate) fn set_affinity(&mut self, task: TaskIx, allowed: CpuIxSet, now: Ns) {
        let cpu = self.queues.tasks[task].cpu;
        let stays = allowed[cpu];
        self.queues.tasks[task].allowed = allowed;
        self.queues.touched.insert(cpu);
        if stays {
            return;
        }
        let run = self.queues.tasks[task].run;
        let (discipline, queues) = self.parts();
        match run {
            Run::Running => {
                discipline.settle(queues, cpu, now);
                queues.take_off(cpu);
                discipline.pick(queues, cpu, now);
            }
            Run::Waiting | Run::Throttled => {
                queues.dequeue(task, now);
                discipline.left(queues, cpu, now);
            }
            Run::Sleeping => {}
        }
        discipline.rehome(queues, task, now);
        if run != Run::Sleeping {
            discipline.requeue(queues, task, now);
        }
    }

    /// Limits each of a VM's vCPUs to this much time of every period from now on, or lifts the limit. Xen has no such limit:
    /// there a cap in whole percent of one CPU limits all of them together to the sum.
    pub(crate) fn set_quota(
        &mut self,
        vcpus: impl ExactSizeIterator<Item = TaskIx>,
        quota: Option<(Ns, Ns)>,
        now: Ns,
    ) {
        match &mut self.kind {
            Kind::Fair(fair) => {
                for task in vcpus {
                    fair.set_quota(&mut self.queues, task, quota, now);
                }
            }
            Kind::Credit(credit) => {
                let count = vcpus.len() as u64;
                let percent = |(run, period): (Ns, Ns)| (100 * count * run.0 / period.0).max(1);
                let cap = quota.map(|quota| u32::try_from(percent(quota)).unwrap_or(u32::MAX));
                let of = vcpus.filter_map(|task| self.queues.tasks[task].vm);
                if let Some(vm) = of.last() {
                    credit.set_cap(vm, cap);
                }
            }
        }
    }

    /// Sets a VM's standing according to its permit: the vCPUs of a VM that exceeds its permit do not run. The fair scheduler has
    /// no such state and uses a quota of zero.
    pub(crate) fn set_standing(
        &mut self,
        vcpus: impl ExactSizeIterator<Item = TaskIx>,
        standing: Standing,
        now: Ns,
    ) {
        match &mut self.kind {
            Kind::Fair(_) => {
                let quota = (standing == Standing::Over).then_some((Ns::ZERO, Permit::SLICE));
                self.set_quota(vcpus, quota, now);
            }
            Kind::Credit(credit) => {
                for task in vcpus {
                    credit.set_standing(&mut self.queues, task, standing, now);
                }
            }
        }
    }

    /// Returns the time of the next event that can change anything.
    pub(crate) fn next_event(&self) -> Ns {
        match &self.kind {
            Kind::Fair(fair) => fair.next_event(),
            Kind::Credit(credit) => credit.next_event(),
        }
    }

    /// Handles the events that are due.
    pub(crate) fn handle_events(&mut self, now: Ns) {
        let (discipline, queues) = self.parts();
        discipline.handle_events(queues, now);
    }
}
