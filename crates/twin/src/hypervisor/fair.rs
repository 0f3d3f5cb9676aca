//! A fair scheduler in the manner of Linux's CFS (version 3.8, seed 002 section VI): run queues and wake-ups.
//! Balancing between CPUs is in [`super::balance`].
//!
//! # Model (constants from `kernel/sched/fair.c`, see `facts/simulators.md` 4.2)
//!
//! - A queue per CPU; the runnable task with the least virtual runtime runs, for `max(latency / runnable, minimum
//!   granularity)`, with latency 6 ms, granularity 0.75 ms and wake-up granularity 1 ms, each times
//!   `1 + log2(min(CPUs, 8))`.
//! - A task that wakes is placed at most half a latency before the queue's minimum, and preempts a task that is more than
//!   the wake-up granularity ahead.
//! - It wakes on the CPU it ran on last, or on the waker's if its own is the more loaded (`wake_affine`); from there
//!   `select_idle_sibling` looks for an idle core, then an idle hyperthread, below the same LLC. None idle: it waits.
//! - A new task goes to the least loaded node, core and CPU (`find_idlest_group`); of equal ones chance decides.
//! - Hard affinity is obeyed everywhere.
//!
//! Nothing here knows where memory lies: that is the point of the `default` policy.
//!
//! # Left out
//!
//! Group scheduling (all vCPUs weigh the same), bandwidth control, real-time classes, AutoNUMA (3.8 has none).

use homenode_units::Ns;

use super::balance::Domains;
use crate::chance::Chance;
use crate::hardware::Topology;

/// State of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Run {
    Running,
    Waiting,
    Sleeping,
}

/// One task: a vCPU thread or a daemon of the host.
#[derive(Clone, Debug)]
pub(crate) struct Task {
    pub run: Run,
    /// CPU that it runs on, waits for or ran on last.
    pub cpu: usize,
    /// CPUs that it may run on.
    pub allowed: Vec<bool>,
    pub running_ns: u64,
    pub waiting_ns: u64,
    /// How often it began to run on another node than before.
    pub node_changes: u64,
    pub(super) vruntime: i64,
    /// When it began to wait.
    since: Ns,
    pub(super) last_ran: Ns,
    last_node: Option<usize>,
}

/// A stretch of time that a task ran on a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub task: usize,
    pub cpu: usize,
    pub ns: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Queue {
    pub current: Option<usize>,
    pub waiting: Vec<usize>,
    pub min_vruntime: i64,
    /// When the present slice began, and up to when running time was accounted.
    slice_start: Ns,
    settled: Ns,
    pub idle_since: Ns,
    /// Average length of idle periods: short ones are not worth pulling work for.
    pub idle_ns: u64,
    pub busy_ns: u64,
}

/// The scheduler of the host.
#[derive(Clone, Debug)]
pub(crate) struct Scheduler {
    pub tasks: Vec<Task>,
    pub(super) queues: Vec<Queue>,
    pub(super) domains: Domains,
    pub(super) node_of: Vec<usize>,
    core_cpus: Vec<Vec<usize>>,
    node_cpus: Vec<Vec<usize>>,
    llc_cores: Vec<Vec<usize>>,
    llc_of: Vec<usize>,
    core_of: Vec<usize>,
    /// Tasks that wait, on all CPUs.
    waiting: usize,
    latency: u64,
    granularity: u64,
    wakeup_granularity: i64,
    /// Time that ran since the engine last asked.
    pub segments: Vec<Segment>,
    /// CPUs whose current task changed since the engine last asked.
    pub switched: Vec<usize>,
}

/// A task that stopped running less than this ago has a warm cache and is not moved (`sysctl_sched_migration_cost`).
pub(super) const MIGRATION_COST: u64 = 500_000;

impl Scheduler {
    pub fn new(topology: &Topology) -> Scheduler {
        let cpus = topology.cpus.len();
        // 1 + floor(log2(min(cpus, 8))): 4 from 8 CPUs up.
        let factor = u64::from(1 + cpus.min(8).ilog2());
        let llcs = topology.cpus.iter().map(|cpu| cpu.llc + 1).max().unwrap_or(0);
        let mut llc_cores = vec![Vec::new(); llcs];
        for (core, members) in topology.core_cpus.iter().enumerate() {
            llc_cores[topology.cpus[members[0]].llc].push(core);
        }
        let queue = Queue {
            current: None,
            waiting: Vec::new(),
            min_vruntime: 0,
            slice_start: Ns::ZERO,
            settled: Ns::ZERO,
            idle_since: Ns::ZERO,
            idle_ns: 2 * MIGRATION_COST,
            busy_ns: 0,
        };
        Scheduler {
            tasks: Vec::new(),
            queues: vec![queue; cpus],
            domains: Domains::new(topology),
            node_of: topology.cpus.iter().map(|cpu| cpu.node).collect(),
            core_cpus: topology.core_cpus.clone(),
            node_cpus: topology.node_cpus.clone(),
            llc_cores,
            llc_of: topology.cpus.iter().map(|cpu| cpu.llc).collect(),
            core_of: topology.cpus.iter().map(|cpu| cpu.core).collect(),
            waiting: 0,
            latency: 6_000_000 * factor,
            granularity: 750_000 * factor,
            wakeup_granularity: 1_000_000 * factor.cast_signed(),
            segments: Vec::new(),
            switched: Vec::new(),
        }
    }

    /// Adds a sleeping task that may run on these CPUs.
    pub fn add(&mut self, allowed: Vec<bool>) -> usize {
        let cpu = allowed
            .iter()
            .position(|may| *may)
            .expect("a task may run somewhere");
        self.tasks.push(Task {
            run: Run::Sleeping,
            cpu,
            allowed,
            running_ns: 0,
            waiting_ns: 0,
            node_changes: 0,
            vruntime: 0,
            since: Ns::ZERO,
            last_ran: Ns::ZERO,
            last_node: None,
        });
        self.tasks.len() - 1
    }

    /// Task that runs on a CPU.
    pub fn current(&self, cpu: usize) -> Option<usize> {
        self.queues[cpu].current
    }

    /// Time that a CPU was not idle, up to `now`.
    pub fn busy_ns(&self, cpu: usize, now: Ns) -> u64 {
        let queue = &self.queues[cpu];
        queue.busy_ns + queue.current.map_or(0, |_| now.0 - queue.settled.0)
    }

    /// Time that a task waited, up to `now`.
    pub fn waiting_ns(&self, task: usize, now: Ns) -> u64 {
        let task = &self.tasks[task];
        task.waiting_ns
            + if task.run == Run::Waiting {
                now.0 - task.since.0
            } else {
                0
            }
    }

    /// Whether any task waits for a CPU.
    pub fn somebody_waits(&self) -> bool {
        self.waiting > 0
    }

    /// When a CPU's slice ends; never, where nobody waits.
    pub fn slice_end(&self, cpu: usize) -> Ns {
        let queue = &self.queues[cpu];
        if queue.current.is_none() || queue.waiting.is_empty() {
            return Ns(u64::MAX);
        }
        Ns(queue.slice_start.0 + self.slice(queue.waiting.len() + 1))
    }

    fn slice(&self, runnable: usize) -> u64 {
        (self.latency / runnable as u64).max(self.granularity)
    }

    /// Tasks that run on a CPU or wait for it.
    pub(super) fn runnable(&self, cpu: usize) -> usize {
        self.queues[cpu].waiting.len() + usize::from(self.queues[cpu].current.is_some())
    }

    pub(super) fn idle(&self, cpu: usize) -> bool {
        self.runnable(cpu) == 0
    }

    /// Accounts a CPU's time up to `now`.
    pub fn settle(&mut self, cpu: usize, now: Ns) {
        let queue = &mut self.queues[cpu];
        let ns = now.0 - std::mem::replace(&mut queue.settled, now).0;
        let Some(task) = queue.current else { return };
        if ns == 0 {
            return;
        }
        queue.busy_ns += ns;
        self.tasks[task].running_ns += ns;
        self.tasks[task].vruntime += ns.cast_signed();
        self.tasks[task].last_ran = now;
        let least = queue.waiting.iter().map(|task| self.tasks[*task].vruntime).min();
        let least = least.unwrap_or(i64::MAX).min(self.tasks[task].vruntime);
        queue.min_vruntime = queue.min_vruntime.max(least);
        self.segments.push(Segment { task, cpu, ns });
    }

    /// Starts a task for the first time.
    pub fn fork(&mut self, task: usize, now: Ns, chance: &mut Chance) {
        let load = |cpus: &[usize]| {
            let runnable: usize = cpus.iter().map(|cpu| self.runnable(*cpu)).sum();
            // Exact order of runnable / CPUs without fractions; groups without an allowed CPU are not there.
            let may = cpus.iter().any(|cpu| self.tasks[task].allowed[*cpu]);
            may.then_some(runnable * 1000 / cpus.len().max(1))
        };
        let node = least(self.node_cpus.iter().map(|cpus| load(cpus)), chance);
        let cores: Vec<usize> = (0..self.core_cpus.len())
            .filter(|core| self.node_of[self.core_cpus[*core][0]] == node)
            .collect();
        let core = cores[least(cores.iter().map(|core| load(&self.core_cpus[*core])), chance)];
        let cpus = &self.core_cpus[core];
        let cpu = cpus[least(cpus.iter().map(|cpu| load(&[*cpu])), chance)];
        self.tasks[task].vruntime = self.queues[cpu].min_vruntime;
        self.enqueue(task, cpu, now);
        self.preempt_by(task, cpu, now);
    }

    /// Wakes a sleeping task. `waker` is the CPU of the task that wakes it, if a task does.
    pub fn wake(&mut self, task: usize, waker: Option<usize>, now: Ns) {
        debug_assert_eq!(self.tasks[task].run, Run::Sleeping);
        let previous = self.tasks[task].cpu;
        let mut target = previous;
        if let Some(waker) = waker
            && self.tasks[task].allowed[waker]
            && 100 * (self.runnable(waker) + 1) <= 112 * self.runnable(previous)
        {
            target = waker; // wake_affine: its own CPU is the more loaded
        }
        let cpu = self.idle_sibling(task, target, previous);
        // Sleepers get credit, but not without end.
        let floor = self.queues[cpu].min_vruntime - (self.latency / 2).cast_signed();
        let own =
            self.tasks[task].vruntime + self.queues[cpu].min_vruntime - self.queues[previous].min_vruntime;
        self.tasks[task].vruntime = own.max(floor);
        self.enqueue(task, cpu, now);
        self.preempt_by(task, cpu, now);
    }

    /// An idle CPU below the target's LLC: the target, the previous one, an idle core, an idle hyperthread; the
    /// target if there is none.
    fn idle_sibling(&self, task: usize, target: usize, previous: usize) -> usize {
        let allowed = &self.tasks[task].allowed;
        let free = |cpu: usize| allowed[cpu] && self.idle(cpu);
        if free(target) {
            return target;
        }
        let llc = self.llc_of[target];
        if self.llc_of[previous] == llc && free(previous) {
            return previous;
        }
        let cores = &self.llc_cores[llc];
        let idle_core = cores
            .iter()
            .map(|core| &self.core_cpus[*core])
            .find(|cpus| cpus.iter().all(|cpu| self.idle(*cpu)) && cpus.iter().any(|cpu| allowed[*cpu]));
        if let Some(cpu) = idle_core.and_then(|cpus| cpus.iter().find(|cpu| allowed[**cpu])) {
            return *cpu;
        }
        // Only the target's own siblings: select_idle_sibling of that age looks at whole cores otherwise.
        let siblings = &self.core_cpus[self.core_of[target]];
        if let Some(cpu) = siblings.iter().find(|cpu| free(**cpu)) {
            return *cpu;
        }
        if allowed[target] {
            target
        } else {
            allowed
                .iter()
                .position(|may| *may)
                .expect("a task may run somewhere")
        }
    }

    pub(super) fn enqueue(&mut self, task: usize, cpu: usize, now: Ns) {
        self.tasks[task].run = Run::Waiting;
        self.tasks[task].cpu = cpu;
        self.tasks[task].since = now;
        self.queues[cpu].waiting.push(task);
        self.waiting += 1;
        if self.queues[cpu].waiting.len() == 1 && self.queues[cpu].current.is_some() {
            // Alone until now, the current task's slice was not limited: it is now, from here or where it began.
            let queue = &mut self.queues[cpu];
            let began = now.0.saturating_sub(self.granularity);
            queue.slice_start = Ns(queue.slice_start.0.max(began));
        }
    }

    /// Lets a task that has become runnable on a CPU run at once if the CPU is idle or its task is far ahead.
    pub(super) fn preempt_by(&mut self, task: usize, cpu: usize, now: Ns) {
        self.settle(cpu, now);
        match self.queues[cpu].current {
            None => self.pick(cpu, now),
            Some(current) => {
                let ahead = self.tasks[current].vruntime - self.tasks[task].vruntime;
                if ahead > self.wakeup_granularity {
                    self.put_back(cpu, now);
                    self.pick(cpu, now);
                }
            }
        }
    }

    /// The current task's slice is over: the task with the least virtual runtime goes on.
    pub fn slice_over(&mut self, cpu: usize, now: Ns) {
        self.settle(cpu, now);
        self.put_back(cpu, now);
        self.pick(cpu, now);
    }

    /// The current task of a CPU goes to sleep.
    pub fn sleep(&mut self, cpu: usize, now: Ns) {
        self.settle(cpu, now);
        let task = self.queues[cpu].current.take().expect("a running task sleeps");
        self.tasks[task].run = Run::Sleeping;
        self.pick(cpu, now);
    }

    /// Takes a task off the host's queues, whatever it does.
    pub fn stop(&mut self, task: usize, now: Ns) {
        let cpu = self.tasks[task].cpu;
        match self.tasks[task].run {
            Run::Running => self.sleep(cpu, now),
            Run::Waiting => {
                self.dequeue(task, now);
                self.tasks[task].run = Run::Sleeping;
            }
            Run::Sleeping => {}
        }
    }

    /// Confines a task to CPUs; if it runs or waits elsewhere it goes to one of them.
    pub fn set_affinity(&mut self, task: usize, allowed: Vec<bool>, now: Ns) {
        self.tasks[task].allowed = allowed;
        let cpu = self.tasks[task].cpu;
        if self.tasks[task].allowed[cpu] {
            return;
        }
        let run = self.tasks[task].run;
        match run {
            Run::Running => {
                self.settle(cpu, now);
                self.queues[cpu].current = None;
            }
            Run::Waiting => self.dequeue(task, now),
            Run::Sleeping => {}
        }
        let target = self.least_loaded_allowed(task);
        let relative = self.tasks[task].vruntime - self.queues[cpu].min_vruntime;
        self.tasks[task].vruntime = relative + self.queues[target].min_vruntime;
        self.tasks[task].cpu = target;
        if run == Run::Sleeping {
            return;
        }
        self.enqueue(task, target, now);
        self.preempt_by(task, target, now);
        if run == Run::Running {
            self.pick(cpu, now);
        }
    }

    fn least_loaded_allowed(&self, task: usize) -> usize {
        let allowed = (0..self.queues.len()).filter(|cpu| self.tasks[task].allowed[*cpu]);
        let core_load = |cpu: usize| -> usize {
            self.core_cpus[self.core_of[cpu]]
                .iter()
                .map(|sibling| self.runnable(*sibling))
                .sum()
        };
        allowed
            .min_by_key(|cpu| (self.runnable(*cpu), core_load(*cpu), *cpu))
            .expect("a task may run somewhere")
    }

    pub(super) fn dequeue(&mut self, task: usize, now: Ns) {
        let cpu = self.tasks[task].cpu;
        let at = self.queues[cpu]
            .waiting
            .iter()
            .position(|other| *other == task)
            .expect("a waiting task is queued");
        self.queues[cpu].waiting.swap_remove(at);
        self.waiting -= 1;
        self.tasks[task].waiting_ns += now.0 - self.tasks[task].since.0;
    }

    /// Moves a waiting task to another CPU's queue.
    pub(super) fn migrate(&mut self, task: usize, to: usize, now: Ns) {
        let from = self.tasks[task].cpu;
        self.dequeue(task, now);
        let relative = self.tasks[task].vruntime - self.queues[from].min_vruntime;
        self.tasks[task].vruntime = relative + self.queues[to].min_vruntime;
        self.enqueue(task, to, now);
    }

    pub(super) fn put_back(&mut self, cpu: usize, now: Ns) {
        if let Some(task) = self.queues[cpu].current.take() {
            self.tasks[task].run = Run::Waiting;
            self.tasks[task].since = now;
            self.queues[cpu].waiting.push(task);
            self.waiting += 1;
        }
    }

    /// Chooses who runs on a CPU that has no current task; an idle CPU looks for work elsewhere first.
    pub(super) fn pick(&mut self, cpu: usize, now: Ns) {
        debug_assert!(self.queues[cpu].current.is_none());
        self.switched.push(cpu);
        if self.queues[cpu].waiting.is_empty() {
            self.queues[cpu].idle_since = now;
            self.queues[cpu].settled = now;
            self.idle_balance(cpu, now);
            if self.queues[cpu].waiting.is_empty() {
                return;
            }
        }
        let queue = &self.queues[cpu];
        let least = queue
            .waiting
            .iter()
            .copied()
            .min_by_key(|task| (self.tasks[*task].vruntime, *task));
        let task = least.expect("checked above");
        if queue.idle_since > Ns::ZERO {
            let idled = now.0 - queue.idle_since.0;
            let average = (7 * queue.idle_ns + idled) / 8;
            self.queues[cpu].idle_ns = average.min(2 * MIGRATION_COST);
            self.queues[cpu].idle_since = Ns::ZERO;
        }
        self.dequeue(task, now);
        let node = self.node_of[cpu];
        let chosen = &mut self.tasks[task];
        chosen.run = Run::Running;
        chosen.node_changes += u64::from(chosen.last_node.is_some_and(|last| last != node));
        chosen.last_node = Some(node);
        let queue = &mut self.queues[cpu];
        queue.current = Some(task);
        queue.slice_start = now;
        queue.settled = now;
    }

    /// Panics unless every task is in exactly the place that its state says.
    pub fn check(&self) {
        for (at, task) in self.tasks.iter().enumerate() {
            let queue = &self.queues[task.cpu];
            let (runs, waits) = (queue.current == Some(at), queue.waiting.contains(&at));
            assert_eq!(
                (runs, waits),
                (task.run == Run::Running, task.run == Run::Waiting),
                "task {at}: {task:?}"
            );
            assert!(
                !runs && !waits || task.allowed[task.cpu],
                "task {at} is on CPU {}, not allowed",
                task.cpu
            );
        }
        assert_eq!(
            self.waiting,
            self.queues.iter().map(|queue| queue.waiting.len()).sum::<usize>()
        );
        let placed: usize = (0..self.queues.len()).map(|cpu| self.runnable(cpu)).sum();
        assert_eq!(
            placed,
            self.tasks.iter().filter(|task| task.run != Run::Sleeping).count()
        );
    }
}

/// Position of the least value; of equal ones chance decides. Positions without a value do not count.
fn least(values: impl Iterator<Item = Option<usize>>, chance: &mut Chance) -> usize {
    let values: Vec<Option<usize>> = values.collect();
    let minimum = values.iter().flatten().min().copied();
    let best: Vec<usize> = (0..values.len())
        .filter(|at| values[*at].is_some() && values[*at] == minimum)
        .collect();
    best[chance.below(best.len() as u64) as usize]
}
