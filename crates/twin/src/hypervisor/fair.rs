//! A fair scheduler like Linux's CFS (version 3.8, [TAVO, section VI]): run queues and wake-ups. Balancing between CPUs is in
//! [`super::balance`].
//!
//! # Model (constants from `kernel/sched/fair.c`, see `facts/simulators.md` 4.2)
//!
//! - Each CPU has a queue. The runnable task with the least virtual runtime runs, for
//!   `max(latency / runnable, minimum granularity)`. Latency is 6 ms, granularity 0.75 ms and wake-up granularity 1 ms, each
//!   times `1 + log2(min(CPUs, 8))`. A task that is alone may run beyond its slice; when another task then comes, the slice ends
//!   with the next tick (`check_preempt_tick`).
//! - A task that wakes is placed at most half a latency before the queue's minimum, and preempts a task that is more than
//!   the wake-up granularity ahead.
//! - It wakes on the CPU that it ran on last, or on the waker's CPU if its own is the more loaded (`wake_affine`). From there
//!   `select_idle_sibling` looks for an idle core, then an idle hyperthread, below the same LLC. If none is idle, the task waits.
//! - A new task goes to the least loaded node, LLC, core and CPU (`find_idlest_group`); equal ones are chosen at random.
//! - Hard affinity is obeyed everywhere.
//! - A VM is a task group, as libvirt makes it. Its `cpu.shares` are 4 times its weight (256 is 1024), divided among its runnable
//!   vCPUs, and virtual time passes faster for lighter tasks. A cap is a quota of the whole VM, and each vCPU may have a quota of
//!   its own ([`super::bandwidth`]); both hold. The host's daemons weigh 1024 each.
//!
//! Shares hold exactly among the tasks of one CPU. Between CPUs they hold as far as balancing evens out loads, see
//! [`super::balance`].
//!
//! The scheduler does not know where memory is: that is the point of the `default` policy.
//!
//! # Left out
//!
//! The hierarchy of groups (each task competes with its resulting weight), loads in wake-up placement (tasks are counted
//! instead), real-time classes, AutoNUMA (3.8 has none).

use homenode_units::{Chance, Ns};

use super::bandwidth::{self, Bandwidth};
use super::discipline::{Discipline, NEVER, earliest};
use super::domains::{
    CpuLoad, Domains, IMBALANCE_MIN, MIGRATION_COST, NICE_0_LOAD, SHARES_USUAL, TICK, WEIGHT_UNIT,
};
use super::queues::{Queues, Run};
use crate::hardware::Topology;
use crate::index::{CpuIx, IxVec, TaskIx, VmIx};

const SHARES_MIN: u64 = 2;

/// A VM: a task group with shares and possibly a limit.
#[derive(Clone, Debug)]
struct Group {
    /// Weight of each vCPU by how many of them run or wait: the VM's shares divided by that number (or by 1 if none does). A
    /// table, because balancing weighs every task in every tick, and a division takes tens of cycles.
    weights: Vec<u64>,
    bandwidth: Option<Bandwidth>,
    /// vCPUs that a limit holds back: the VM's limit or their own.
    throttled: Vec<TaskIx>,
}

/// Owner of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limited {
    Vm(VmIx),
    Vcpu(TaskIx),
}

/// The run queue of a CPU, a tree in the kernel.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    min_vruntime: i64,
    /// When the present slice began.
    slice_start: Ns,
    idle_since: Ns,
    /// Task that ran last.
    last: Option<TaskIx>,
    /// Average length of idle periods. If they are short, pulling work is not worthwhile.
    pub idle_ns: u64,
    /// Load of the CPU when it was last touched.
    pub load: CpuLoad,
}

/// The fair discipline.
#[derive(Clone, Debug)]
pub(crate) struct Fair {
    /// Virtual runtime of each task.
    vruntimes: IxVec<TaskIx, i64>,
    vms: IxVec<VmIx, Group>,
    /// Each task's own limit.
    quotas: IxVec<TaskIx, Option<Bandwidth>>,
    /// Owners of limits: VMs first, then vCPUs, each in order. This list exists because every event asks when the next limit is
    /// due, and most hosts limit no task.
    limited: Vec<Limited>,
    pub(super) trees: IxVec<CpuIx, Tree>,
    /// Time at which each CPU's slice ends; never if no task waits.
    slice_ends: IxVec<CpuIx, Ns>,
    /// Time at which each CPU's task must request more time from its limits; never if it has none.
    grant_ends: IxVec<CpuIx, Ns>,
    /// Time at which each CPU's slice or grant ends, whichever is first. Every event looks for the earliest of them.
    ends: IxVec<CpuIx, Ns>,
    pub(super) domains: Domains,
    latency: u64,
    granularity: u64,
    wakeup_granularity: u64,
}

impl Fair {
    /// Creates the scheduler. `balances` says whether the kernel is a present one that balances memory; such a kernel balances
    /// tasks less between nodes.
    pub(super) fn new(topology: &Topology, balances: bool) -> Fair {
        let cpus = topology.cpus.len();
        // 1 + floor(log2(min(cpus, 8))): 4 if there are 8 or more CPUs.
        let factor = u64::from(1 + cpus.min(8).ilog2());
        let tree = Tree {
            min_vruntime: 0,
            slice_start: Ns::ZERO,
            idle_since: Ns::ZERO,
            last: None,
            idle_ns: 2 * MIGRATION_COST,
            load: CpuLoad::default(),
        };
        Fair {
            vruntimes: IxVec::new(),
            vms: IxVec::new(),
            quotas: IxVec::new(),
            limited: Vec::new(),
            trees: IxVec::filled(tree, cpus),
            slice_ends: IxVec::filled(NEVER, cpus),
            grant_ends: IxVec::filled(NEVER, cpus),
            ends: IxVec::filled(NEVER, cpus),
            domains: Domains::new(topology, balances),
            latency: 6_000_000 * factor,
            granularity: 750_000 * factor,
            wakeup_granularity: 1_000_000 * factor,
        }
    }

    /// Computes when a CPU's slice ends, after its queue has changed.
    fn set_slice_end(&mut self, queues: &Queues, cpu: CpuIx, now: Ns) {
        self.domains.changed(now);
        self.slice_ends[cpu] = if queues.current(cpu).is_none() || queues.waiting(cpu).is_empty() {
            NEVER
        } else {
            let current = queues.current(cpu).map_or(0, |task| self.weight(queues, task));
            let slice = (self.latency * current / self.load(queues, cpu)).max(self.granularity);
            let next_tick = (now.0 / TICK.0 + 1) * TICK.0;
            Ns((self.trees[cpu].slice_start.0 + slice).max(next_tick))
        };
        self.ends[cpu] = self.slice_ends[cpu].min(self.grant_ends[cpu]);
    }

    /// Returns the weight of a task. A VM's shares are divided among its runnable vCPUs.
    #[inline]
    pub(super) fn weight(&self, queues: &Queues, task: TaskIx) -> u64 {
        queues.tasks[task]
            .vm
            .map_or(NICE_0_LOAD, |vm| self.vms[vm].weights[queues.runnable_of_vm(vm)])
    }

    /// Returns the weight of all tasks that run on a CPU or wait for it.
    pub(super) fn load(&self, queues: &Queues, cpu: CpuIx) -> u64 {
        let tasks = queues.waiting(cpu).iter().copied().chain(queues.current(cpu));
        tasks.map(|task| self.weight(queues, task)).sum()
    }

    /// Returns the virtual time that passes in `ns` for a task of this weight.
    fn virtual_ns(ns: u64, weight: u64) -> i64 {
        (ns * NICE_0_LOAD / weight).cast_signed()
    }

    /// Returns the owners of limits that apply to a task: the task itself, and its VM.
    fn limited_by(queues: &Queues, task: TaskIx) -> impl Iterator<Item = Limited> + use<> {
        let vm = queues.tasks[task].vm.map(Limited::Vm);
        std::iter::once(Limited::Vcpu(task)).chain(vm)
    }

    fn limit(&self, of: Limited) -> Option<&Bandwidth> {
        match of {
            Limited::Vm(vm) => self.vms[vm].bandwidth.as_ref(),
            Limited::Vcpu(task) => self.quotas[task].as_ref(),
        }
    }

    fn limit_mut(&mut self, of: Limited) -> Option<&mut Bandwidth> {
        match of {
            Limited::Vm(vm) => self.vms[vm].bandwidth.as_mut(),
            Limited::Vcpu(task) => self.quotas[task].as_mut(),
        }
    }

    /// Whether any limit of a task is used up on a CPU.
    pub(super) fn throttled(&self, queues: &Queues, task: TaskIx, cpu: CpuIx) -> bool {
        let used_up = |of| self.limit(of).is_some_and(|limit| limit.throttled(cpu));
        Fair::limited_by(queues, task).any(used_up)
    }

    /// Takes time from the limits of a task and returns until when it may then run on a CPU. `None` throttles it there.
    fn grant(&mut self, queues: &Queues, task: TaskIx, cpu: CpuIx, now: Ns) -> Option<Ns> {
        let mut until = NEVER;
        for of in Fair::limited_by(queues, task) {
            if let Some(limit) = self.limit_mut(of) {
                until = until.min(Ns(now.0 + limit.grant(cpu, now)));
            }
        }
        (until > now).then_some(until)
    }

    /// Limits a vCPU to a quota per period from now on, or lifts the limit.
    pub(super) fn set_quota(&mut self, queues: &mut Queues, task: TaskIx, quota: Option<(Ns, Ns)>, now: Ns) {
        let cpu = queues.tasks[task].cpu;
        self.settle(queues, cpu, now);
        self.quotas[task] = quota.map(|(run, period)| Bandwidth::new(run, period, self.trees.len()));
        self.find_limited();
        if queues.current(cpu) == Some(task) {
            self.grant_over(queues, cpu, now);
        }
        if let Some(vm) = queues.tasks[task].vm {
            self.release(queues, vm, now);
        }
    }

    /// Finds the owners of limits again, after a limit was set or lifted.
    fn find_limited(&mut self) {
        let of_vms = self.vms.places().map(Limited::Vm);
        let all = of_vms.chain(self.quotas.places().map(Limited::Vcpu));
        let mut limited = std::mem::take(&mut self.limited);
        limited.clear();
        limited.extend(all.filter(|of| self.limit(*of).is_some()));
        self.limited = limited;
    }

    /// Makes a sleeping task runnable on its CPU, where it runs at once if it may.
    fn enter(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        let cpu = queues.tasks[task].cpu;
        if self.throttled(queues, task, cpu) {
            self.throttle(queues, task, now);
        } else {
            self.enqueue(queues, task, cpu, now);
            self.preempt_by(queues, task, now);
        }
    }

    /// Throttles a task that is on no queue, until its limits allow it to run.
    fn throttle(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        if let Some(vm) = queues.tasks[task].vm {
            queues.throttle(task, now);
            self.vms[vm].throttled.push(task);
        }
    }

    /// Throttles those tasks of a VM that wait for a CPU on which their limits are used up.
    fn throttle_waiting(&mut self, queues: &mut Queues, vm: Option<VmIx>, cpu: CpuIx, now: Ns) {
        let used_up = |fair: &Fair, queues: &Queues| {
            let mut waiting = queues.waiting(cpu).iter().copied();
            waiting.find(|task| queues.tasks[*task].vm == vm && fair.throttled(queues, *task, cpu))
        };
        while let Some(task) = used_up(self, queues) {
            queues.dequeue(task, now);
            self.throttle(queues, task, now);
        }
    }

    /// Ends the grant of a CPU's current task: the task gets more time, or is throttled here.
    fn grant_over(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
        self.settle(queues, cpu, now);
        let Some(task) = queues.current(cpu) else { return };
        if let Some(until) = self.grant(queues, task, cpu, now) {
            self.grant_ends[cpu] = until;
            self.ends[cpu] = self.slice_ends[cpu].min(until);
            return;
        }
        queues.take_off(cpu);
        self.throttle(queues, task, now);
        self.throttle_waiting(queues, queues.tasks[task].vm, cpu, now);
        self.pick(queues, cpu, now);
    }

    /// Begins a period of a limit, or deals out its returned time.
    fn replenish(&mut self, queues: &mut Queues, of: Limited, now: Ns) {
        let Some(limit) = self.limit_mut(of) else {
            return;
        };
        limit.handle_event(now);
        let vm = match of {
            Limited::Vm(vm) => Some(vm),
            Limited::Vcpu(task) => queues.tasks[task].vm,
        };
        if let Some(vm) = vm {
            self.release(queues, vm, now);
        }
    }

    /// Lets a VM's throttled tasks wait again on CPUs where they may run.
    fn release(&mut self, queues: &mut Queues, vm: VmIx, now: Ns) {
        let mut at = 0;
        while at < self.vms[vm].throttled.len() {
            let task = self.vms[vm].throttled[at];
            let cpu = queues.tasks[task].cpu;
            if queues.tasks[task].run != Run::Throttled {
                self.vms[vm].throttled.swap_remove(at);
            } else if self.throttled(queues, task, cpu) {
                at += 1;
            } else {
                self.vms[vm].throttled.swap_remove(at);
                queues.dequeue(task, now);
                self.limit_lag(task, cpu);
                self.enter(queues, task, now);
            }
        }
    }

    /// Limits the lead in virtual time that a task gains by sleeping.
    fn limit_lag(&mut self, task: TaskIx, cpu: CpuIx) {
        let floor = self.trees[cpu].min_vruntime - (self.latency / 2).cast_signed();
        self.vruntimes[task] = self.vruntimes[task].max(floor);
    }

    /// Returns the waiting task that should run next on a CPU, and until when its limits let it run. Throttles tasks whose limits
    /// are used up.
    fn next_task(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) -> Option<(TaskIx, Ns)> {
        loop {
            let waiting = queues.waiting(cpu).iter().copied();
            let task = waiting.min_by_key(|task| (self.vruntimes[*task], *task))?;
            if let Some(until) = self.grant(queues, task, cpu, now) {
                return Some((task, until));
            }
            self.throttle_waiting(queues, queues.tasks[task].vm, cpu, now);
        }
    }

    /// Returns a CPU's unused time to limits that have no runnable task left there.
    fn give_back(&mut self, queues: &Queues, cpu: CpuIx, now: Ns) {
        let Some(last) = self.trees[cpu].last.take() else {
            return;
        };
        let vm = queues.tasks[last].vm;
        let here = |found: &dyn Fn(TaskIx) -> bool| {
            let mut tasks = queues.waiting(cpu).iter().copied().chain(queues.current(cpu));
            tasks.any(found)
        };
        if here(&|task| task == last) {
            self.trees[cpu].last = Some(last);
            return;
        }
        if let Some(quota) = &mut self.quotas[last] {
            quota.leave(cpu, now);
        }
        if here(&|task| queues.tasks[task].vm == vm) {
            self.trees[cpu].last = Some(last);
        } else if let Some(limit) = vm.and_then(|vm| self.vms[vm].bandwidth.as_mut()) {
            limit.leave(cpu, now);
        }
    }

    /// Returns an idle CPU below the target's LLC. It tries the target, the previous CPU, an idle core, an idle hyperthread. If
    /// none is idle, it returns the target.
    fn idle_sibling(queues: &Queues, task: TaskIx, target: CpuIx, previous: CpuIx) -> CpuIx {
        let allowed = &queues.tasks[task].allowed;
        let places = &queues.places;
        let free = |cpu: CpuIx| allowed[cpu] && queues.idle(cpu);
        if free(target) {
            return target;
        }
        let llc = places.llc_of[target];
        if places.llc_of[previous] == llc && free(previous) {
            return previous;
        }
        let cores = &places.llc_cores[llc];
        let idle_core = cores
            .iter()
            .map(|core| &places.core_cpus[*core])
            .find(|cpus| cpus.iter().all(|cpu| queues.idle(*cpu)) && cpus.iter().any(|cpu| allowed[*cpu]));
        if let Some(cpu) = idle_core.and_then(|cpus| cpus.iter().find(|cpu| allowed[**cpu])) {
            return *cpu;
        }
        // Looks only at the target's own siblings, because `select_idle_sibling` of that kernel otherwise looks at whole cores.
        let siblings = &places.core_cpus[places.core_of[target]];
        if let Some(cpu) = siblings.iter().find(|cpu| free(**cpu)) {
            return *cpu;
        }
        if allowed[target] {
            target
        } else {
            allowed.iter().next().expect("a task may run somewhere")
        }
    }

    /// Returns the node of a new vCPU's VM if that node has few tasks and no other has many more idle CPUs.
    fn near_first(&self, queues: &Queues, task: TaskIx) -> Option<usize> {
        let first = queues.first_vcpu(queues.tasks[task].vm?)?;
        let places = &queues.places;
        let node = places.node_of[queues.tasks[first].cpu];
        let idle = |cpus: &[CpuIx]| cpus.iter().filter(|cpu| queues.idle(**cpu)).count() as u64;
        let most = places.node_cpus.iter().map(|cpus| idle(cpus)).max()?;
        let here = &places.node_cpus[node];
        let tasks: usize = here.iter().map(|cpu| queues.runnable(*cpu)).sum();
        let is_near = first != task
            && (tasks as u64) < self.domains.tolerated()
            && most - idle(here) <= IMBALANCE_MIN
            && here.iter().any(|cpu| queues.tasks[task].allowed[*cpu]);
        is_near.then_some(node)
    }

    fn enqueue(&mut self, queues: &mut Queues, task: TaskIx, cpu: CpuIx, now: Ns) {
        queues.enqueue(task, cpu, now);
        self.set_slice_end(queues, cpu, now);
    }

    /// Lets a newly runnable task run at once if its CPU is idle or the current task is far ahead in virtual time.
    fn preempt_by(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        let cpu = queues.tasks[task].cpu;
        self.settle(queues, cpu, now);
        match queues.current(cpu) {
            None => self.pick(queues, cpu, now),
            Some(current) => {
                let ahead = self.vruntimes[current] - self.vruntimes[task];
                let weight = self.weight(queues, task);
                if ahead > Fair::virtual_ns(self.wakeup_granularity, weight) {
                    self.put_back(queues, cpu, now);
                    self.pick(queues, cpu, now);
                }
            }
        }
    }

    /// Ends the current task's slice. The task with the least virtual runtime runs next.
    fn slice_over(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
        self.settle(queues, cpu, now);
        self.put_back(queues, cpu, now);
        self.pick(queues, cpu, now);
    }

    /// Moves a waiting task to another CPU's queue.
    pub(super) fn migrate(&mut self, queues: &mut Queues, task: TaskIx, to: CpuIx, now: Ns) {
        let from = queues.tasks[task].cpu;
        queues.dequeue(task, now);
        self.left(queues, from, now);
        self.rebase(queues, task, from, to, now);
        self.enqueue(queues, task, to, now);
    }

    /// Keeps a task's distance from the queue's least virtual runtime when the task changes queues.
    fn rebase(&mut self, queues: &mut Queues, task: TaskIx, from: CpuIx, to: CpuIx, now: Ns) {
        self.settle(queues, from, now);
        self.settle(queues, to, now);
        self.vruntimes[task] += self.trees[to].min_vruntime - self.trees[from].min_vruntime;
    }

    pub(super) fn put_back(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
        if let Some(task) = queues.take_off(cpu) {
            queues.enqueue(task, cpu, now);
        }
    }
}

impl Discipline for Fair {
    fn add_vm(&mut self, weight: u32, cap_percent: Option<u32>) {
        let shares = (u64::from(weight) * SHARES_USUAL / 256).max(SHARES_MIN);
        self.vms.push(Group {
            weights: vec![shares * WEIGHT_UNIT],
            bandwidth: cap_percent.map(|percent| {
                let quota = Ns(bandwidth::PERIOD.0 / 100 * u64::from(percent));
                Bandwidth::new(quota, bandwidth::PERIOD, self.trees.len())
            }),
            throttled: Vec::new(),
        });
        self.find_limited();
    }

    fn added(&mut self, vm: Option<VmIx>) {
        if let Some(vm) = vm {
            let weights = &mut self.vms[vm].weights;
            weights.push(weights[0] / weights.len() as u64);
        }
        self.vruntimes.push(0);
        self.quotas.push(None);
    }

    fn charge(&mut self, queues: &Queues, cpu: CpuIx, task: TaskIx, ns: u64) {
        self.vruntimes[task] += Fair::virtual_ns(ns, self.weight(queues, task));
        for of in Fair::limited_by(queues, task) {
            if let Some(limit) = self.limit_mut(of) {
                limit.charge(cpu, ns);
            }
        }
        let waiting = queues.waiting(cpu).iter().map(|task| self.vruntimes[*task]);
        let least = waiting.min().unwrap_or(i64::MAX).min(self.vruntimes[task]);
        let tree = &mut self.trees[cpu];
        tree.min_vruntime = tree.min_vruntime.max(least);
    }

    fn fork(&mut self, queues: &mut Queues, task: TaskIx, now: Ns, chance: &mut Chance) {
        let load = |cpus: &[CpuIx]| {
            let runnable: usize = cpus.iter().map(|cpu| queues.runnable(*cpu)).sum();
            // Orders groups exactly by runnable tasks per CPU, without fractions. Groups without an allowed CPU are left out.
            let may = cpus.iter().any(|cpu| queues.tasks[task].allowed[*cpu]);
            may.then_some(runnable * 1000 / cpus.len().max(1))
        };
        let places = &queues.places;
        let nodes = places.node_cpus.iter().map(|cpus| load(cpus));
        let node = self
            .near_first(queues, task)
            .unwrap_or_else(|| least(nodes, chance));
        let on_node = |core: &&usize| places.node_of[places.core_cpus[**core][0]] == node;
        let here: Vec<Vec<usize>> = places
            .llc_cores
            .iter()
            .map(|cores| cores.iter().filter(on_node).copied().collect::<Vec<_>>())
            .filter(|cores| !cores.is_empty())
            .collect();
        let load_of = |cores: &Vec<usize>| {
            let cpus: Vec<CpuIx> = cores
                .iter()
                .flat_map(|core| places.core_cpus[*core].clone())
                .collect();
            load(&cpus)
        };
        let llc = match here.len() {
            1 => 0,
            _ => least(here.iter().map(load_of), chance),
        };
        let cores = &here[llc];
        let core = cores[least(cores.iter().map(|core| load(&places.core_cpus[*core])), chance)];
        let cpus = &places.core_cpus[core];
        let cpu = cpus[least(cpus.iter().map(|cpu| load(&[*cpu])), chance)];
        self.vruntimes[task] = self.trees[cpu].min_vruntime;
        queues.tasks[task].cpu = cpu;
        self.enter(queues, task, now);
    }

    fn wake(&mut self, queues: &mut Queues, task: TaskIx, waker: Option<CpuIx>, now: Ns) {
        let previous = queues.tasks[task].cpu;
        let mut target = previous;
        if let Some(waker) = waker
            && queues.tasks[task].allowed[waker]
            && 100 * (queues.runnable(waker) + 1) <= 112 * queues.runnable(previous)
        {
            target = waker; // wake_affine: its own CPU is the more loaded
        }
        let cpu = Fair::idle_sibling(queues, task, target, previous);
        self.rebase(queues, task, previous, cpu, now);
        self.limit_lag(task, cpu);
        queues.tasks[task].cpu = cpu;
        self.enter(queues, task, now);
    }

    /// Looks for work on other CPUs first if the CPU is idle.
    fn pick(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
        debug_assert_eq!(queues.current(cpu), None);
        queues.switched.push(cpu);
        if queues.waiting(cpu).is_empty() {
            self.trees[cpu].idle_since = now;
            self.idle_balance(queues, cpu, now);
        }
        self.grant_ends[cpu] = NEVER;
        if let Some((task, granted_until)) = self.next_task(queues, cpu, now) {
            self.grant_ends[cpu] = granted_until;
            let tree = &mut self.trees[cpu];
            if tree.idle_since > Ns::ZERO {
                let idled = now.0 - tree.idle_since.0;
                tree.idle_ns = ((7 * tree.idle_ns + idled) / 8).min(2 * MIGRATION_COST);
                tree.idle_since = Ns::ZERO;
            }
            queues.start(task, now);
            tree.slice_start = now;
        }
        self.give_back(queues, cpu, now);
        self.trees[cpu].last = queues.current(cpu).or(self.trees[cpu].last);
        self.set_slice_end(queues, cpu, now);
    }

    fn left(&mut self, queues: &Queues, cpu: CpuIx, now: Ns) {
        self.set_slice_end(queues, cpu, now);
    }

    /// Chooses the least loaded CPU that the task may run on.
    fn rehome(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        let allowed = queues.tasks[task].allowed.iter();
        let places = &queues.places;
        let core_load = |cpu: CpuIx| -> usize {
            let siblings = &places.core_cpus[places.core_of[cpu]];
            siblings.iter().map(|sibling| queues.runnable(*sibling)).sum()
        };
        let to = allowed
            .min_by_key(|cpu| (queues.runnable(*cpu), core_load(*cpu), *cpu))
            .expect("a task may run somewhere");
        self.rebase(queues, task, queues.tasks[task].cpu, to, now);
        queues.tasks[task].cpu = to;
    }

    fn requeue(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        self.enter(queues, task, now);
    }

    fn next_event(&self) -> Ns {
        let limits = self.limited.iter().filter_map(|of| self.limit(*of));
        let first = self.domains.next_tick().min(earliest(&self.ends));
        limits.map(Bandwidth::next_event).fold(first, Ns::min)
    }

    /// Handles the periods of limits, VMs first, then vCPUs; then ended slices, in order of CPUs; then the balancing tick.
    fn handle_events(&mut self, queues: &mut Queues, now: Ns) {
        debug_assert_eq!(
            self.limited.len(),
            self.vms.iter().filter(|vm| vm.bandwidth.is_some()).count()
                + self.quotas.iter().flatten().count()
        );
        for at in 0..self.limited.len() {
            let of = self.limited[at];
            if self.limit(of).is_some_and(|limit| limit.next_event() <= now) {
                self.replenish(queues, of, now);
            }
        }
        // A slice or grant that this loop sets again ends later.
        for cpu in self.ends.places() {
            if self.ends[cpu] > now {
                continue;
            }
            if self.grant_ends[cpu] <= now {
                self.grant_over(queues, cpu, now);
            }
            if self.slice_ends[cpu] <= now {
                self.slice_over(queues, cpu, now);
            }
        }
        if self.domains.next_tick() <= now {
            self.tick(queues, now);
        }
    }
}

/// Returns the position of the least value; chance decides among equal values. Positions without a value do not count.
fn least(values: impl Iterator<Item = Option<usize>>, chance: &mut Chance) -> usize {
    let values: Vec<Option<usize>> = values.collect();
    let minimum = values.iter().flatten().min().copied();
    let best: Vec<usize> = (0..values.len())
        .filter(|at| values[*at].is_some() && values[*at] == minimum)
        .collect();
    best[chance.below(best.len() as u64) as usize]
}
