//! Xen's credit scheduler (credit1): credits, priorities, caps and stealing.
//!
//! # Algorithm (`xen/common/sched/credit.c`)
//!
//! - Each CPU has a queue ordered by priority ([`Priority`]), first come, first served within a priority. The head of the queue
//!   runs for a slice of 30 ms, unless it is preempted. It is never preempted less than 1 ms after it began (the rate limit),
//!   except when it yields. A vCPU that yields goes behind a vCPU of lower priority.
//! - A running vCPU burns 10 credits per millisecond. Every 10 ms (a tick, on CPUs that are not idle) a running vCPU loses its
//!   boost. If it was inactive it becomes active; otherwise it moves to an idle CPU with more idle neighbours, if there is one.
//!   The first tick after an accounting sorts the queue.
//! - Every 30 ms an accounting hands out 300 credits per CPU to the domains with active vCPUs, in proportion to weight times
//!   active vCPUs. A domain gets at most what its vCPUs can burn and what its cap allows; the rest goes to the domains after it.
//!   Credits below 0 make a vCPU `Over`; credits above 300 make it inactive (with half of them).
//! - A vCPU of a capped domain whose credits fall below minus its share of the cap is parked: it does not run until an
//!   accounting finds its credits at 0 or above.
//! - A vCPU that wakes while `Under` is boosted. It waits on the CPU where it ran last and tickles one CPU: that CPU if it is
//!   idle, else an idle CPU that the vCPU may use (which then steals it), else that CPU if the vCPU's priority is higher.
//! - A CPU whose queue is empty or has an `Over` head steals a vCPU of higher priority. It looks for one first within their soft
//!   affinity, then for any; each time first on its own node, then on the other nodes in order of their numbers, starting behind
//!   the CPU that was last stolen from.
//!
//! - KS4Xen [Kyoto, section 3.2.2]: a vCPU whose VM is OVER its permit ([`super::permits`]) does not run until the VM is UNDER.
//!   Meanwhile it burns no credits, and earns them as long as it is active.
//!
//! The scheduler does not know where memory is, except as far as soft affinity expresses it.
//!
//! # Properties (tests of the same names)
//!
//! - Credits burnt equal time run.
//! - Run time follows weight times active vCPUs, as far as the whole host is contended; caps hold; no vCPU starves. Debts beyond
//!   300 credits are forgiven, as in the source (`csched_acct`, "Lower bound on credits"), so that vCPUs of little weight
//!   gain: 2 to 14 percent where one CPU is shared 1 to 2 to 5, by where slices begin between accountings.
//! - No CPU is idle while a vCPU that may run there waits.
//! - A waking vCPU within its credits runs at once.
//!
//! # Departures
//!
//! - Ticks are events while any vCPU runs, even if none waits: a tick may move a vCPU to a better CPU, and credits decide which
//!   is boosted later. They are not computed in closed form.
//! - Ticks of all CPUs fall on one grid and are handled in order of CPUs; softirqs take no time.
//! - A new vCPU starts from the allowed CPU with the fewest vCPUs that were ever started there, and picks as a migrating one
//!   does; toolstacks have rules of their own.
//! - The paper gives a VM that is OVER its permit the priority `Over` and says that it then cannot use the processor. In the
//!   source a vCPU of that priority runs when no other wants to: here it is parked.
//! - A vCPU that must yield is moved if *it* may use an idle CPU, as before Xen 4.13; later code checks the other vCPU instead.
//!
//! # Left out
//!
//! Pools, `smt_power_savings`, the migration delay (off by default), tasklets. Dom0 is the host's daemons, of usual
//! weight.

mod accounting;

use homenode_policy::permits::Standing;
use homenode_units::{Chance, Ns};

use super::discipline::{Discipline, NEVER};
use super::queues::{Queues, Run};
use crate::index::{CpuIx, CpuIxSet, IxVec, TaskIx, VmIx, first};

const SLICE: Ns = Ns::from_millis(30);
const TICK: Ns = Ns::from_millis(10);
const TICKS_PER_ACCOUNTING: u64 = 3;
const RATE_LIMIT: Ns = Ns::from_millis(1);
const CREDITS_PER_MS: u64 = 10;
/// Credits that one CPU is worth per accounting; also the most that a vCPU can have or owe.
const CREDITS_PER_SLICE: i64 = 300;
const DOM0_WEIGHT: u32 = 256;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Priority {
    /// The CPU is idle.
    Idle,
    /// The vCPU is out of credits.
    Over,
    /// The vCPU is within its credits.
    Under,
    /// The vCPU is within its credits and has just been woken.
    Boost,
}

#[derive(Clone, Debug)]
struct Vcpu {
    domain: usize,
    credit: i64,
    /// Running time that does not yet amount to a credit, in nanoseconds times credits per millisecond.
    residual: u64,
    priority: Priority,
    /// Whether the vCPU takes part in accounting.
    active: bool,
    parked: bool,
    /// Whether the vCPU's VM exceeds its permit.
    over: bool,
    /// Soft affinity; `None` if the vCPU has no preference.
    preferred: Option<CpuIxSet>,
}

impl Vcpu {
    /// Whether the vCPU's cap or permit keeps it from running.
    fn kept_off(&self) -> bool {
        self.parked || self.over
    }
}

#[derive(Clone, Debug)]
struct Domain {
    weight: u32,
    cap_percent: Option<u32>,
    /// A temporary cap in addition to that; the lower one counts.
    cap_now_percent: Option<u32>,
    vcpus: Vec<TaskIx>,
    active: u32,
}

#[derive(Clone, Debug)]
struct Cpu {
    slice_end: Ns,
    /// When the current vCPU began to run here.
    since: Ns,
    /// Number of accountings at the time when the CPU's queue was last sorted.
    sorted: u64,
    /// Idle CPU that was last tickled from this CPU.
    tickled: CpuIx,
    /// Idle CPU that a migrating vCPU last picked through this CPU.
    idle_bias: CpuIx,
    /// Number of vCPUs that were started on this CPU.
    started: u32,
}

/// Which affinity a search obeys.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Affinity {
    Soft,
    Hard,
}

/// The credit discipline.
#[derive(Clone, Debug)]
pub(crate) struct Credit {
    vcpus: IxVec<TaskIx, Vcpu>,
    /// Domains by number: Dom0, then the VMs in order.
    domains: Vec<Domain>,
    /// Domains with active vCPUs, in the order in which they are accounted.
    active: Vec<usize>,
    /// Sum of the weights of all active vCPUs.
    weight: i64,
    /// Sum of credits at the last accounting.
    balance: i64,
    cpus: IxVec<CpuIx, Cpu>,
    /// CPU of each node that was last stolen from.
    stolen_from: Vec<CpuIx>,
    /// Number of ticks handled so far.
    ticks: u64,
    /// Whether no vCPU runs or is active, in which case ticks do nothing.
    at_rest: bool,
    accountings: u64,
    /// Kept between calls to save allocations.
    candidates: CpuIxSet,
    idlers: CpuIxSet,
    fitting: CpuIxSet,
    order: Vec<usize>,
    to_park: Vec<TaskIx>,
    to_unpark: Vec<TaskIx>,
}

impl Credit {
    pub(super) fn new(cpus: usize, nodes: usize) -> Credit {
        let cpu = Cpu {
            slice_end: NEVER,
            since: Ns::ZERO,
            sorted: 0,
            tickled: CpuIx(0),
            idle_bias: CpuIx(cpus - 1),
            started: 0,
        };
        let mut credit = Credit {
            vcpus: IxVec::new(),
            domains: Vec::new(),
            active: Vec::new(),
            weight: 0,
            balance: 0,
            cpus: IxVec::filled(cpu, cpus),
            stolen_from: vec![CpuIx(0); nodes],
            ticks: 0,
            at_rest: true,
            accountings: 0,
            candidates: CpuIxSet::new(),
            idlers: CpuIxSet::new(),
            fitting: CpuIxSet::new(),
            order: Vec::new(),
            to_park: Vec::new(),
            to_unpark: Vec::new(),
        };
        credit.add_vm(DOM0_WEIGHT, None);
        credit
    }

    /// Sets a vCPU's soft affinity: the CPUs that it prefers among those that it may run on.
    #[cfg(test)]
    pub(super) fn set_preferred(&mut self, task: TaskIx, preferred: CpuIxSet) {
        self.vcpus[task].preferred = Some(preferred);
    }

    /// Caps a VM, in percent of one CPU, in addition to the cap that it has, or lifts that additional cap.
    pub(super) fn set_cap(&mut self, vm: VmIx, cap_percent: Option<u32>) {
        self.domains[vm.0 + 1].cap_now_percent = cap_percent;
    }

    /// Sets a vCPU's standing according to its VM's permit: OVER keeps it from running.
    pub(super) fn set_standing(&mut self, queues: &mut Queues, task: TaskIx, standing: Standing, now: Ns) {
        self.vcpus[task].over = standing == Standing::Over;
        match standing {
            Standing::Over => self.park(queues, task, now),
            Standing::Under => self.resume(queues, task, now),
        }
    }

    /// Whether a vCPU prefers some of the CPUs that it may run on to others.
    fn prefers(&self, queues: &Queues, task: TaskIx) -> bool {
        self.vcpus[task].preferred.as_ref().is_some_and(|preferred| {
            let allowed = &queues.tasks[task].allowed;
            let liked = allowed.count_common(preferred);
            0 < liked && liked < allowed.len()
        })
    }

    fn may(&self, queues: &Queues, affinity: Affinity, task: TaskIx, cpu: CpuIx) -> bool {
        let preferred = self.vcpus[task].preferred.as_ref();
        queues.tasks[task].allowed[cpu]
            && (affinity == Affinity::Hard || preferred.is_none_or(|preferred| preferred[cpu]))
    }

    /// Sets the candidates to the CPUs that a vCPU may run on under this kind of affinity.
    fn set_candidates(&mut self, queues: &Queues, affinity: Affinity, task: TaskIx) {
        self.candidates.copy_from(&queues.tasks[task].allowed);
        if let (Affinity::Soft, Some(preferred)) = (affinity, &self.vcpus[task].preferred) {
            self.candidates.keep(preferred);
        }
    }

    /// Inserts a vCPU that is on no queue into its CPU's queue.
    fn insert(&mut self, queues: &mut Queues, task: TaskIx, behind_one: bool, now: Ns) {
        if std::mem::take(&mut self.at_rest) {
            self.ticks = now.0 / TICK.0;
        }
        let cpu = queues.tasks[task].cpu;
        let priority = self.vcpus[task].priority;
        let waiting = queues.waiting(cpu);
        let lower = waiting
            .iter()
            .position(|other| self.vcpus[*other].priority < priority);
        let mut at = lower.unwrap_or(waiting.len());
        if behind_one && at < waiting.len() {
            at += 1;
        }
        queues.enqueue_at(task, cpu, at, now);
    }

    /// Makes a CPU choose again which vCPU it runs.
    pub(super) fn schedule(&mut self, queues: &mut Queues, cpu: CpuIx, yields: bool, now: Ns) {
        self.settle(queues, cpu, now);
        let before = queues.current(cpu);
        if let Some(task) = before {
            let limit = Ns(self.cpus[cpu].since.0 + RATE_LIMIT.0);
            if now < limit && !yields {
                self.cpus[cpu].slice_end = limit;
                return;
            }
            queues.take_off(cpu);
            self.insert(queues, task, yields, now);
        }
        if self.choose(queues, cpu, before, now) != before {
            queues.switched.push(cpu);
        }
    }

    /// Starts the head of a CPU's queue, or a vCPU that the CPU can steal. Returns the vCPU.
    fn choose(&mut self, queues: &mut Queues, cpu: CpuIx, before: Option<TaskIx>, now: Ns) -> Option<TaskIx> {
        let head = queues.waiting(cpu).first().copied();
        let priority = head.map_or(Priority::Idle, |task| self.vcpus[task].priority);
        let next = if priority > Priority::Over {
            head
        } else {
            self.steal(queues, cpu, priority, now).or(head)
        };
        self.cpus[cpu].slice_end = NEVER;
        if let Some(task) = next {
            queues.start(task, now);
            self.cpus[cpu].slice_end = Ns(now.0 + SLICE.0);
            if next != before {
                self.cpus[cpu].since = now;
            }
        }
        next
    }

    /// Steals a waiting vCPU of higher priority than `than` from another CPU, for the head of this CPU's queue.
    fn steal(&mut self, queues: &mut Queues, cpu: CpuIx, than: Priority, now: Ns) -> Option<TaskIx> {
        let nodes = queues.places.node_cpus.len();
        let own = queues.places.node_of[cpu];
        for affinity in [Affinity::Soft, Affinity::Hard] {
            for node in (0..nodes).map(|at| (own + at) % nodes) {
                let cpus = &queues.places.node_cpus[node];
                let last = self.stolen_from[node];
                let first = cpus.iter().position(|cpu| *cpu > last).unwrap_or(0);
                let found = (0..cpus.len()).find_map(|at| {
                    let peer = cpus[(first + at) % cpus.len()];
                    if peer == cpu || queues.current(peer).is_none() {
                        return None;
                    }
                    let higher = |task: &TaskIx| self.vcpus[*task].priority > than;
                    let waiting = queues.waiting(peer).iter().copied().take_while(higher);
                    waiting
                        .filter(|task| affinity == Affinity::Hard || self.prefers(queues, *task))
                        .find(|task| self.may(queues, affinity, *task, cpu))
                });
                if let Some(task) = found {
                    self.stolen_from[node] = queues.tasks[task].cpu;
                    queues.dequeue(task, now);
                    queues.enqueue_at(task, cpu, 0, now);
                    return Some(task);
                }
            }
        }
        None
    }

    /// Makes the CPU choose again that should take a newly queued vCPU. `from` is the CPU on which that vCPU was queued.
    fn tickle(&mut self, queues: &mut Queues, task: TaskIx, from: CpuIx, now: Ns) {
        let cpu = queues.tasks[task].cpu;
        let Some(current) = queues.current(cpu) else {
            self.schedule(queues, cpu, false, now);
            return;
        };
        for affinity in [Affinity::Soft, Affinity::Hard] {
            if affinity == Affinity::Soft && !self.prefers(queues, task) {
                continue;
            }
            self.set_candidates(queues, affinity, task);
            self.candidates.keep(&queues.idle);
            if let Some(idler) = self.candidates.next_after(self.cpus[from].tickled) {
                self.cpus[from].tickled = idler;
                self.schedule(queues, idler, false, now);
                return;
            }
        }
        if self.vcpus[task].priority > self.vcpus[current].priority {
            if queues.tasks[current].allowed.count_common(&queues.idle) > 0 {
                self.migrate_running(queues, cpu, now);
            } else {
                self.schedule(queues, cpu, false, now);
            }
        }
    }

    /// Moves the current vCPU of a CPU to a better CPU.
    fn migrate_running(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
        self.settle(queues, cpu, now);
        let Some(task) = queues.take_off(cpu) else { return };
        self.pick(queues, cpu, now);
        queues.tasks[task].cpu = self.better_cpu(queues, task, Commit::Yes);
        self.insert(queues, task, false, now);
        self.tickle(queues, task, cpu, now);
    }

    /// Returns the best CPU for a vCPU: its own, or an idle CPU with more idle neighbours. Inside a node the neighbours are the
    /// hyperthreads of the core. Across nodes they are the CPUs of the node, and there must be more than twice as many.
    fn better_cpu(&mut self, queues: &Queues, task: TaskIx, commit: Commit) -> CpuIx {
        let (own, places) = (queues.tasks[task].cpu, &queues.places);
        let (mut best, mut through) = (own, None);
        for affinity in [Affinity::Soft, Affinity::Hard] {
            if affinity == Affinity::Soft && !self.prefers(queues, task) {
                continue;
            }
            self.set_candidates(queues, affinity, task);
            let may_own = self.candidates[own];
            best = if may_own {
                own
            } else {
                let next = self.candidates.next_after(own);
                next.expect("a vCPU may run somewhere")
            };
            // A vCPU that runs alone on its CPU leaves an idle CPU behind.
            let leaves_idle =
                queues.waiting(own).is_empty() && queues.current(own).is_none_or(|current| current == task);
            self.candidates.keep(&queues.idle);
            self.candidates.set(own, false);
            if self.candidates.is_empty() {
                // In most cases there is no other CPU to go to.
                if best == own && leaves_idle {
                    break;
                }
                continue;
            }
            self.idlers.copy_from(&queues.idle);
            if leaves_idle {
                self.idlers.set(own, true);
                self.candidates.set(own, may_own);
            }
            if !self.candidates[best] {
                best = self.candidates.next_after(best).unwrap_or(best);
            }
            self.candidates.set(best, false);
            while let Some(next) = self.candidates.next_after(best) {
                let near = places.node_of[next] == places.node_of[best];
                let neighbours = |cpu: CpuIx| {
                    if near {
                        &places.core_masks[places.core_of[cpu]]
                    } else {
                        &places.node_masks[places.node_of[cpu]]
                    }
                };
                let idle = |cpu: CpuIx| neighbours(cpu).count_common(&self.idlers);
                let factor = if near { 1 } else { 2 };
                if idle(best) * factor < idle(next) {
                    let bias = self.cpus[next].idle_bias;
                    self.fitting.copy_from(&self.candidates);
                    self.fitting.keep(neighbours(next));
                    best = self.fitting.next_after(bias).unwrap_or(next);
                    through = Some(next);
                    self.candidates
                        .remove_all(&places.core_masks[places.core_of[best]]);
                } else {
                    self.candidates.remove_all(neighbours(next));
                }
            }
            if self.idlers[best] {
                break;
            }
        }
        if commit == Commit::Yes
            && let Some(next) = through
        {
            self.cpus[next].idle_bias = best;
        }
        best
    }

    /// Handles the tick on all CPUs that are not idle.
    fn tick(&mut self, queues: &mut Queues, now: Ns) {
        for cpu in first(queues.cpus()) {
            self.settle(queues, cpu, now);
            let Some(task) = queues.current(cpu) else { continue };
            let vcpu = &mut self.vcpus[task];
            vcpu.priority = vcpu.priority.min(Priority::Under);
            if !vcpu.active {
                self.activate(task);
            } else if self.better_cpu(queues, task, Commit::No) != cpu {
                self.migrate_running(queues, cpu, now);
            }
            if self.cpus[cpu].sorted != self.accountings {
                self.cpus[cpu].sorted = self.accountings;
                queues.sort_waiting(cpu, |task| self.vcpus[task].priority < Priority::Under);
            }
        }
    }

    fn park(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        let cpu = queues.tasks[task].cpu;
        match queues.tasks[task].run {
            Run::Running => {
                self.settle(queues, cpu, now);
                queues.take_off(cpu);
                queues.throttle(task, now);
                self.pick(queues, cpu, now);
            }
            Run::Waiting => {
                queues.dequeue(task, now);
                queues.throttle(task, now);
            }
            Run::Throttled | Run::Sleeping => {}
        }
    }

    fn unpark(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        self.vcpus[task].parked = false;
        self.resume(queues, task, now);
    }

    /// Lets a vCPU run again if nothing else holds it back.
    fn resume(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        if queues.tasks[task].run == Run::Throttled && !self.vcpus[task].kept_off() {
            queues.dequeue(task, now);
            self.requeue(queues, task, now);
        }
    }
}

/// Whether a choice is remembered, so that the next choice falls on another CPU.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Commit {
    Yes,
    No,
}

impl Discipline for Credit {
    fn add_vm(&mut self, weight: u32, cap_percent: Option<u32>) {
        self.domains.push(Domain {
            weight,
            cap_percent,
            cap_now_percent: None,
            vcpus: Vec::new(),
            active: 0,
        });
    }

    fn added(&mut self, vm: Option<VmIx>) {
        let domain = vm.map_or(0, |vm| vm.0 + 1);
        let task = self.vcpus.push(Vcpu {
            domain,
            credit: 0,
            residual: 0,
            priority: Priority::Under,
            active: false,
            parked: false,
            over: false,
            preferred: None,
        });
        self.domains[domain].vcpus.push(task);
    }

    fn charge(&mut self, _queues: &Queues, _cpu: CpuIx, task: TaskIx, ns: u64) {
        self.burn(task, ns);
    }

    fn fork(&mut self, queues: &mut Queues, task: TaskIx, now: Ns, _chance: &mut Chance) {
        let allowed = queues.tasks[task].allowed.iter();
        let first = allowed.min_by_key(|cpu| (self.cpus[*cpu].started, *cpu));
        queues.tasks[task].cpu = first.expect("a vCPU may run somewhere");
        let cpu = self.better_cpu(queues, task, Commit::Yes);
        self.cpus[cpu].started += 1;
        queues.tasks[task].cpu = cpu;
        self.requeue(queues, task, now);
    }

    fn wake(&mut self, queues: &mut Queues, task: TaskIx, waker: Option<CpuIx>, now: Ns) {
        let vcpu = &mut self.vcpus[task];
        if vcpu.kept_off() {
            queues.throttle(task, now);
            return;
        }
        if vcpu.priority == Priority::Under {
            vcpu.priority = Priority::Boost;
        }
        self.insert(queues, task, false, now);
        self.tickle(queues, task, waker.unwrap_or(queues.tasks[task].cpu), now);
    }

    fn pick(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
        self.choose(queues, cpu, None, now);
        queues.switched.push(cpu);
    }

    fn left(&mut self, _queues: &Queues, _cpu: CpuIx, _now: Ns) {}

    fn rehome(&mut self, queues: &mut Queues, task: TaskIx, _now: Ns) {
        queues.tasks[task].cpu = self.better_cpu(queues, task, Commit::Yes);
    }

    fn requeue(&mut self, queues: &mut Queues, task: TaskIx, now: Ns) {
        if self.vcpus[task].kept_off() {
            queues.throttle(task, now);
        } else {
            self.insert(queues, task, false, now);
            self.tickle(queues, task, queues.tasks[task].cpu, now);
        }
    }

    fn next_event(&self) -> Ns {
        if self.at_rest {
            return NEVER;
        }
        let slices = self.cpus.iter().map(|cpu| cpu.slice_end);
        slices.min().unwrap_or(NEVER).min(Ns((self.ticks + 1) * TICK.0))
    }

    /// Handles the tick and the accounting, then the slices that have ended, in order of CPUs. In the source the end of a slice
    /// only requests the scheduler, which runs once all due timers are handled.
    fn handle_events(&mut self, queues: &mut Queues, now: Ns) {
        let is_tick = (self.ticks + 1) * TICK.0 <= now.0;
        if is_tick {
            self.ticks += 1;
            self.tick(queues, now);
            if self.ticks.is_multiple_of(TICKS_PER_ACCOUNTING) {
                self.account(queues, now);
            }
        }
        for cpu in first(queues.cpus()) {
            if self.cpus[cpu].slice_end <= now {
                self.schedule(queues, cpu, false, now);
            }
        }
        if !is_tick {
            return;
        }
        self.at_rest = self.active.is_empty() && first(queues.cpus()).all(|cpu| queues.idle(cpu));
        if self.at_rest {
            self.balance = 0;
        }
    }
}

#[cfg(test)]
mod tests;
