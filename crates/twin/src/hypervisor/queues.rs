//! State common to all schedulers: tasks, a run queue per CPU, and the time that each task spent in each state.
//!
//! ```text
//!                 start                 take_off
//!   Waiting ─────────────▶ Running ──────────────▶ Sleeping (off all queues)
//!      ▲                                            │     ▲
//!      └─────────────────── enqueue ────────────────┤     │ dequeue (from Waiting or Throttled)
//!                           throttle ▶ Throttled ───┴─────┘
//! ```
//!
//! A discipline ([`super::fair`], [`super::credit`]) decides which task runs next, where and for how long; this module carries
//! the decisions out, so both disciplines account alike.

use homenode_units::Ns;

use crate::hardware::Topology;
use crate::index::{CpuIx, CpuIxSet, IxVec, TaskIx, VmIx, first};

/// State of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    Running,
    Waiting,
    /// The task could run, but a limit holds it back.
    Throttled,
    Sleeping,
}

/// One task: a vCPU or a daemon of the host.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub run: Run,
    /// CPU that the task runs on, waits for, or ran on last.
    pub cpu: CpuIx,
    /// VM whose vCPU the task is; `None` for the host's own tasks.
    pub(super) vm: Option<VmIx>,
    /// CPUs that the task may run on.
    pub allowed: CpuIxSet,
    pub running_ns: u64,
    /// Number of times that the task began to run on another node than before.
    pub node_changes: u64,
    /// Node of the task's memory, if a kernel that balances memory has found it (`numa_preferred_nid`).
    pub prefers: Option<usize>,
    pub(super) last_ran: Ns,
    waiting_ns: u64,
    throttled_ns: u64,
    /// Time at which the task began to wait or was throttled.
    since: Ns,
    last_node: Option<usize>,
}

impl Task {
    /// Returns the time that the task has waited for a CPU, up to `now`.
    pub(crate) fn waiting_ns(&self, now: Ns) -> u64 {
        self.waiting_ns + self.stretch(Run::Waiting, now)
    }

    /// Returns the time that a limit has kept the task from running, up to `now`.
    pub(crate) fn throttled_ns(&self, now: Ns) -> u64 {
        self.throttled_ns + self.stretch(Run::Throttled, now)
    }

    fn stretch(&self, run: Run, now: Ns) -> u64 {
        if self.run == run { now.0 - self.since.0 } else { 0 }
    }
}

/// A stretch of time that a task ran on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub task: TaskIx,
    pub cpu: CpuIx,
    pub ns: u64,
}

#[derive(Clone, Debug)]
struct Queue {
    current: Option<TaskIx>,
    waiting: Vec<TaskIx>,
    /// Time up to which running time is accounted.
    settled: Ns,
    busy_ns: u64,
}

/// The vCPUs of a VM.
#[derive(Clone, Debug, Default)]
struct Vcpus {
    tasks: Vec<TaskIx>,
    /// Number of the VM's vCPUs that run or wait.
    runnable: usize,
}

/// CPUs grouped by what they share.
#[derive(Clone, Debug)]
pub(super) struct Places {
    pub node_of: IxVec<CpuIx, usize>,
    pub core_of: IxVec<CpuIx, usize>,
    pub llc_of: IxVec<CpuIx, usize>,
    pub node_cpus: Vec<Vec<CpuIx>>,
    pub core_cpus: Vec<Vec<CpuIx>>,
    pub node_masks: Vec<CpuIxSet>,
    pub core_masks: Vec<CpuIxSet>,
    pub llc_cores: Vec<Vec<usize>>,
}

/// Tasks and run queues of the host.
#[derive(Clone, Debug)]
pub(crate) struct Queues {
    pub tasks: IxVec<TaskIx, Task>,
    pub(super) places: Places,
    queues: IxVec<CpuIx, Queue>,
    /// CPUs that no task runs on or waits for.
    pub(super) idle: CpuIxSet,
    vcpus: IxVec<VmIx, Vcpus>,
    /// CPUs whose running or waiting tasks, or these tasks' weight or affinity, have changed since a discipline last asked.
    pub(super) touched: CpuIxSet,
    /// Stretches of running time since the engine last asked.
    pub segments: Vec<Segment>,
    /// CPUs whose current task has changed since the engine last asked.
    pub switched: Vec<CpuIx>,
}

impl Queues {
    pub(crate) fn new(topology: &Topology) -> Queues {
        let llcs = topology.cpus.iter().map(|cpu| cpu.llc + 1).max().unwrap_or(0);
        let mut llc_cores = vec![Vec::new(); llcs];
        for (core, members) in topology.core_cpus.iter().enumerate() {
            llc_cores[topology.cpus[members[0]].llc].push(core);
        }
        let cpus = topology.cpus.len();
        let masks = |groups: &[Vec<CpuIx>]| -> Vec<CpuIxSet> {
            let mask = |members: &Vec<CpuIx>| members.iter().copied().collect();
            groups.iter().map(mask).collect()
        };
        let queue = Queue {
            current: None,
            waiting: Vec::new(),
            settled: Ns::ZERO,
            busy_ns: 0,
        };
        Queues {
            tasks: IxVec::new(),
            places: Places {
                node_of: topology.cpus.iter().map(|cpu| cpu.node).collect(),
                core_of: topology.cpus.iter().map(|cpu| cpu.core).collect(),
                llc_of: topology.cpus.iter().map(|cpu| cpu.llc).collect(),
                node_cpus: topology.node_cpus.clone(),
                core_cpus: topology.core_cpus.clone(),
                node_masks: masks(&topology.node_cpus),
                core_masks: masks(&topology.core_cpus),
                llc_cores,
            },
            queues: IxVec::filled(queue, cpus),
            idle: first(cpus).collect(),
            vcpus: IxVec::new(),
            touched: CpuIxSet::new(),
            segments: Vec::new(),
            switched: Vec::new(),
        }
    }

    /// Adds a VM and returns its number.
    pub(crate) fn add_vm(&mut self) -> VmIx {
        self.vcpus.push(Vcpus::default())
    }

    /// Adds a sleeping task that may run on these CPUs.
    pub(crate) fn add(&mut self, allowed: CpuIxSet, vm: Option<VmIx>) -> TaskIx {
        let cpu = allowed.iter().next().expect("a task may run somewhere");
        let task = self.tasks.push(Task {
            run: Run::Sleeping,
            cpu,
            vm,
            allowed,
            running_ns: 0,
            node_changes: 0,
            prefers: None,
            last_ran: Ns::ZERO,
            waiting_ns: 0,
            throttled_ns: 0,
            since: Ns::ZERO,
            last_node: None,
        });
        if let Some(vm) = vm {
            self.vcpus[vm].tasks.push(task);
        }
        task
    }

    pub(crate) fn cpus(&self) -> usize {
        self.queues.len()
    }

    /// Returns the task that runs on a CPU.
    pub(crate) fn current(&self, cpu: CpuIx) -> Option<TaskIx> {
        self.queues[cpu].current
    }

    /// Returns the tasks that wait for a CPU, in queue order.
    pub(crate) fn waiting(&self, cpu: CpuIx) -> &[TaskIx] {
        &self.queues[cpu].waiting
    }

    /// Returns the number of tasks that run on a CPU or wait for it.
    pub(crate) fn runnable(&self, cpu: CpuIx) -> usize {
        self.queues[cpu].waiting.len() + usize::from(self.queues[cpu].current.is_some())
    }

    /// Returns the first of a VM's vCPUs.
    pub(super) fn first_vcpu(&self, vm: VmIx) -> Option<TaskIx> {
        self.vcpus[vm].tasks.first().copied()
    }

    /// Returns the number of a VM's vCPUs that run or wait, on all CPUs.
    pub(super) fn runnable_of_vm(&self, vm: VmIx) -> usize {
        self.vcpus[vm].runnable
    }

    /// Notes that a task has begun or ceased to run or wait, which changes the weight of its VM's other vCPUs.
    fn count_runnable(&mut self, task: TaskIx, change: isize) {
        let Some(vm) = self.tasks[task].vm else { return };
        let vcpus = &mut self.vcpus[vm];
        vcpus.runnable = vcpus.runnable.wrapping_add_signed(change);
        for vcpu in &vcpus.tasks {
            if matches!(self.tasks[*vcpu].run, Run::Running | Run::Waiting) {
                self.touched.insert(self.tasks[*vcpu].cpu);
            }
        }
    }

    pub(crate) fn idle(&self, cpu: CpuIx) -> bool {
        self.idle[cpu]
    }

    /// Returns the time that a CPU was not idle, up to `now`.
    pub(crate) fn busy_ns(&self, cpu: CpuIx, now: Ns) -> u64 {
        let queue = &self.queues[cpu];
        queue.busy_ns + queue.current.map_or(0, |_| now.0 - queue.settled.0)
    }

    /// Returns the time that a CPU was not idle, up to when it is accounted.
    pub(crate) fn settled_ns(&self, cpu: CpuIx) -> u64 {
        self.queues[cpu].busy_ns
    }

    /// Accounts for a CPU's time up to `now`. Returns the task that ran since the CPU was last accounted, and for how long.
    pub(super) fn settle(&mut self, cpu: CpuIx, now: Ns) -> Option<(TaskIx, u64)> {
        let queue = &mut self.queues[cpu];
        let ns = now.0 - std::mem::replace(&mut queue.settled, now).0;
        let task = queue.current?;
        if ns == 0 {
            return None;
        }
        queue.busy_ns += ns;
        self.tasks[task].running_ns += ns;
        self.tasks[task].last_ran = now;
        self.segments.push(Segment { task, cpu, ns });
        Some((task, ns))
    }

    /// Makes a sleeping task wait for a CPU, last in the CPU's queue.
    pub(super) fn enqueue(&mut self, task: TaskIx, cpu: CpuIx, now: Ns) {
        self.enqueue_at(task, cpu, self.queues[cpu].waiting.len(), now);
    }

    /// Makes a sleeping task wait at a place in the queue, counted from 0.
    pub(super) fn enqueue_at(&mut self, task: TaskIx, cpu: CpuIx, at: usize, now: Ns) {
        debug_assert_eq!(self.tasks[task].run, Run::Sleeping);
        self.tasks[task].run = Run::Waiting;
        self.tasks[task].cpu = cpu;
        self.tasks[task].since = now;
        self.queues[cpu].waiting.insert(at, task);
        self.idle.set(cpu, false);
        self.touched.insert(cpu);
        self.count_runnable(task, 1);
    }

    /// Puts a waiting or throttled task to sleep.
    pub(super) fn dequeue(&mut self, task: TaskIx, now: Ns) {
        let Task { run, since, .. } = self.tasks[task];
        if run == Run::Throttled {
            self.tasks[task].throttled_ns += now.0 - since.0;
        } else {
            self.leave_queue(task, now);
            self.count_runnable(task, -1);
        }
        self.tasks[task].run = Run::Sleeping;
    }

    /// Ends the wait of a waiting task.
    fn leave_queue(&mut self, task: TaskIx, now: Ns) {
        let Task { cpu, since, .. } = self.tasks[task];
        let waiting = &mut self.queues[cpu].waiting;
        let at = waiting.iter().position(|other| *other == task);
        waiting.remove(at.expect("a waiting task is queued"));
        self.idle.set(cpu, self.runnable(cpu) == 0);
        self.touched.insert(cpu);
        self.tasks[task].waiting_ns += now.0 - since.0;
    }

    /// Throttles a sleeping task, which could run if no limit held it back.
    pub(super) fn throttle(&mut self, task: TaskIx, now: Ns) {
        debug_assert_eq!(self.tasks[task].run, Run::Sleeping);
        self.tasks[task].run = Run::Throttled;
        self.tasks[task].since = now;
    }

    /// Puts those tasks waiting for a CPU for which `last` is true behind the others. The order is otherwise unchanged.
    pub(super) fn sort_waiting(&mut self, cpu: CpuIx, last: impl Fn(TaskIx) -> bool) {
        self.queues[cpu].waiting.sort_by_key(|task| last(*task));
    }

    /// Starts a waiting task on its CPU, which runs no other task.
    pub(super) fn start(&mut self, task: TaskIx, now: Ns) {
        self.leave_queue(task, now);
        let chosen = &mut self.tasks[task];
        let node = self.places.node_of[chosen.cpu];
        chosen.run = Run::Running;
        chosen.node_changes += u64::from(chosen.last_node.is_some_and(|last| last != node));
        chosen.last_node = Some(node);
        let queue = &mut self.queues[chosen.cpu];
        debug_assert_eq!(queue.current, None);
        queue.current = Some(task);
        queue.settled = now;
        self.idle.set(self.tasks[task].cpu, false);
    }

    /// Takes a CPU's task off the CPU and puts it to sleep. The CPU's time must have been accounted.
    pub(super) fn take_off(&mut self, cpu: CpuIx) -> Option<TaskIx> {
        let task = self.queues[cpu].current.take()?;
        self.tasks[task].run = Run::Sleeping;
        self.idle.set(cpu, self.runnable(cpu) == 0);
        self.touched.insert(cpu);
        self.count_runnable(task, -1);
        Some(task)
    }

    /// Panics unless every task is in exactly the place that matches its state.
    pub(crate) fn check(&self) {
        for (at, task) in self.tasks.placed() {
            let queue = &self.queues[task.cpu];
            let (runs, waits) = (queue.current == Some(at), queue.waiting.contains(&at));
            assert_eq!(
                (runs, waits),
                (task.run == Run::Running, task.run == Run::Waiting),
                "task {at}: {task:?}"
            );
            assert!(
                task.run == Run::Sleeping || task.allowed[task.cpu],
                "task {at} is on CPU {}, not allowed",
                task.cpu
            );
        }
        assert!(
            self.queues
                .places()
                .all(|cpu| self.idle[cpu] == (self.runnable(cpu) == 0))
        );
        let placed: usize = self.queues.places().map(|cpu| self.runnable(cpu)).sum();
        let placeable = |task: &&Task| matches!(task.run, Run::Running | Run::Waiting);
        assert_eq!(placed, self.tasks.iter().filter(placeable).count());
        for (vm, vcpus) in self.vcpus.placed() {
            let own = self.tasks.iter().filter(|task| task.vm == Some(vm));
            assert_eq!(
                vcpus.runnable,
                own.filter(placeable).count(),
                "runnable vCPUs of VM {vm}"
            );
        }
    }
}
