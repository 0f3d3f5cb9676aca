//! Load balancing between CPUs, as CFS does it: by counts of runnable tasks, inside a node and across nodes.
//!
//! # Algorithm (`load_balance`, `idle_balance` and `active_load_balance` of Linux 3.8)
//!
//! Three levels of domains: the hyperthreads of a core, the cores of a node, and the nodes of the machine. On its turn
//! a CPU (an idle one of its group, else the group's first) compares the runnable tasks per CPU of its group with the
//! busiest group's. If that one has more by the domain's threshold (110 percent inside a core, 117 inside a node, 125
//! across nodes; an idle CPU has none, and pulls as soon as a task must wait there), half of the difference is pulled from
//! its most loaded CPU: waiting tasks only, allowed here, not cache-hot. After more failures than the domain's patience,
//! cache-hot tasks too, and at last the running one (active balance). Turns come every millisecond per CPU of the domain
//! (8 ms inside a node of 8, 32 ms across 32), 32 times rarer on a busy CPU. A CPU that becomes idle pulls one waiting
//! task at once, unless its idle periods are shorter than the migration cost on average; that such a pull fails counts
//! for nothing (commit 58b26c4c, 2.6.37). While no group has what another should pull, there are no turns.
//!
//! Memory plays no part: a vCPU is pulled across nodes for a free CPU whatever its accesses then cost.
//!
//! # Left out
//!
//! Weights (tasks are counted, though the kernel weighs them), CPU power (a hyperthread counts as a CPU), load averages over time, and the hot-cache estimate of sleeping tasks.

use homenode_units::Ns;

use super::fair::{Fair, MIGRATION_COST};
use super::queues::Queues;
use super::scheduler::{Discipline, NEVER};
use crate::hardware::Topology;

/// Scheduler tick: the grid on which balancing turns fall.
const TICK: Ns = Ns::from_millis(1);
/// A busy CPU balances so many times more rarely (`busy_factor`).
const BUSY_FACTOR: u64 = 32;

#[derive(Clone, Debug)]
struct Domain {
    /// Groups of CPUs that are compared.
    groups: Vec<Vec<usize>>,
    /// Ticks between two turns of an idle CPU.
    interval: u64,
    /// The busiest group must have this many percent of the local one's load.
    imbalance_pct: usize,
    /// Failed turns before cache-hot tasks are taken.
    patience: u32,
}

impl Domain {
    /// By how many tasks of the smaller group the busiest group exceeds another, as far as that is worth a move.
    fn excess(&self, queues: &Queues, group: &[usize], busiest: &[usize]) -> usize {
        let (load, here) = (
            Fair::load_per_cpu(queues, busiest),
            Fair::load_per_cpu(queues, group),
        );
        if load <= here {
            return 0;
        }
        let excess = (load - here) * group.len().min(busiest.len()) / 1024;
        if !group.iter().any(|cpu| queues.idle(*cpu)) {
            // The threshold is for busy CPUs only.
            let beyond = load * 100 > here * self.imbalance_pct;
            return if beyond { excess } else { 0 };
        }
        // A task that must wait there could run here.
        let waits = load > 1024;
        if waits { excess.max(2) } else { excess }
    }
}

/// Whether a task of a group of CPUs is allowed on one of another.
fn may_go(queues: &Queues, from: &[usize], to: &[usize]) -> bool {
    from.iter().any(|cpu| {
        let mut tasks = queues.waiting(*cpu).iter().copied().chain(queues.current(*cpu));
        tasks.any(|task| to.iter().any(|cpu| queues.tasks[task].allowed[*cpu]))
    })
}

/// Domains of each CPU, smallest first, and how often its turns have failed there.
#[derive(Clone, Debug)]
pub(crate) struct Domains {
    domains: Vec<Domain>,
    of_cpu: Vec<Vec<usize>>,
    failed: Vec<Vec<u32>>,
    /// Ticks up to the last that was handled.
    tick: u64,
    /// Whether loads are even, so that no tick can change anything until a queue changes.
    even: bool,
}

impl Domains {
    pub fn new(topology: &Topology) -> Domains {
        let mut domains = Vec::new();
        let mut of_cpu = vec![Vec::new(); topology.cpus.len()];
        for cpus in topology.node_cpus.iter().filter(|cpus| !cpus.is_empty()) {
            let mut cores: Vec<usize> = cpus.iter().map(|cpu| topology.cpus[*cpu].core).collect();
            cores.sort_unstable();
            cores.dedup();
            for core in cores
                .iter()
                .map(|core| &topology.core_cpus[*core])
                .filter(|core| core.len() > 1)
            {
                for cpu in core {
                    of_cpu[*cpu].push(domains.len());
                }
                domains.push(Domain {
                    groups: core.iter().map(|cpu| vec![*cpu]).collect(),
                    interval: core.len() as u64,
                    imbalance_pct: 110,
                    patience: 0,
                });
            }
            for cpu in cpus {
                of_cpu[*cpu].push(domains.len());
            }
            domains.push(Domain {
                groups: cores
                    .iter()
                    .map(|core| topology.core_cpus[*core].clone())
                    .collect(),
                interval: cpus.len() as u64,
                imbalance_pct: 117,
                patience: 1,
            });
        }
        if domains.len() > 1 {
            for list in &mut of_cpu {
                list.push(domains.len());
            }
            domains.push(Domain {
                groups: topology
                    .node_cpus
                    .iter()
                    .filter(|cpus| !cpus.is_empty())
                    .cloned()
                    .collect(),
                interval: topology.cpus.len() as u64,
                imbalance_pct: 125,
                patience: 2,
            });
        }
        let failed = of_cpu.iter().map(|list| vec![0; list.len()]).collect();
        Domains {
            domains,
            of_cpu,
            failed,
            tick: 0,
            even: true,
        }
    }

    /// A run queue has changed: loads may be uneven.
    pub fn changed(&mut self, now: Ns) {
        if std::mem::take(&mut self.even) {
            self.tick = now.0 / TICK.0;
        }
    }

    /// When the next tick is due; never, while loads are even.
    pub fn next_tick(&self) -> Ns {
        if self.even {
            NEVER
        } else {
            Ns((self.tick + 1) * TICK.0)
        }
    }
}

impl Fair {
    /// One tick: the CPUs whose turn it is balance.
    pub(super) fn tick(&mut self, queues: &mut Queues, now: Ns) {
        self.domains.tick += 1;
        for cpu in 0..queues.cpus() {
            for level in 0..self.domains.of_cpu[cpu].len() {
                let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
                let factor = if queues.idle(cpu) { 1 } else { BUSY_FACTOR };
                let interval = domain.interval * factor;
                // Staggered by CPU, as the kernel's turns are.
                if (self.domains.tick + cpu as u64).is_multiple_of(interval) {
                    self.balance(queues, cpu, level, now);
                }
            }
        }
        self.domains.even = self.loads_are_even(queues);
        if self.domains.even {
            self.domains
                .failed
                .iter_mut()
                .flatten()
                .for_each(|failed| *failed = 0);
        }
    }

    /// Whether no group of any domain has tasks that another should and may pull.
    fn loads_are_even(&self, queues: &Queues) -> bool {
        self.domains.domains.iter().all(|domain| {
            let busiest = domain
                .groups
                .iter()
                .max_by_key(|group| Fair::load_per_cpu(queues, group));
            let Some(busiest) = busiest else { return true };
            domain
                .groups
                .iter()
                .all(|group| domain.excess(queues, group, busiest) < 2 || !may_go(queues, busiest, group))
        })
    }

    /// Runnable tasks per CPU, times 1024: cross-multiplied, loads stay integers.
    fn load_per_cpu(queues: &Queues, group: &[usize]) -> usize {
        let load: usize = group.iter().map(|cpu| queues.runnable(*cpu)).sum();
        load * 1024 / group.len()
    }

    fn balance(&mut self, queues: &mut Queues, cpu: usize, level: usize, now: Ns) {
        let Some((group, pulls)) = self.busiest_group(queues, cpu, level) else {
            self.domains.failed[cpu][level] = 0;
            return;
        };
        let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
        let patience = domain.patience;
        let source = *domain.groups[group]
            .iter()
            .max_by_key(|from| (queues.runnable(**from), **from))
            .expect("a group has CPUs");
        let failed = self.domains.failed[cpu][level];
        let mut pulled = 0;
        while pulled < pulls && self.pull(queues, source, cpu, failed > patience, now) {
            pulled += 1;
        }
        if pulled > 0 {
            self.domains.failed[cpu][level] = 0;
            self.settle(queues, cpu, now);
            if queues.current(cpu).is_none() {
                self.pick(queues, cpu, now);
            }
            return;
        }
        self.domains.failed[cpu][level] = failed + 1;
        if failed > patience + 2 && queues.idle(cpu) {
            self.push_running(queues, source, cpu, now);
            self.domains.failed[cpu][level] = patience;
        }
    }

    /// The group that a CPU should pull from on a level, and how many tasks; `None` where loads are even, or another
    /// CPU of its group does the balancing.
    fn busiest_group(&self, queues: &Queues, cpu: usize, level: usize) -> Option<(usize, usize)> {
        let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
        let local = domain.groups.iter().position(|group| group.contains(&cpu))?;
        let group = &domain.groups[local];
        let balancer = group
            .iter()
            .copied()
            .find(|cpu| queues.idle(*cpu))
            .unwrap_or(group[0]);
        if balancer != cpu {
            return None;
        }
        let load = |other: &usize| Fair::load_per_cpu(queues, &domain.groups[*other]);
        let busiest = (0..domain.groups.len())
            .filter(|other| *other != local)
            .max_by_key(|other| (load(other), std::cmp::Reverse(*other)))?;
        // Half of the difference; moving one must not just turn the imbalance round.
        let excess = domain.excess(queues, group, &domain.groups[busiest]);
        (excess >= 2).then_some((busiest, excess / 2))
    }

    /// Pulls one waiting task from a CPU to another.
    fn pull(&mut self, queues: &mut Queues, from: usize, to: usize, hot_too: bool, now: Ns) -> bool {
        let movable = |task: &usize| {
            let candidate = &queues.tasks[*task];
            let hot = now.0 - candidate.last_ran.0 < MIGRATION_COST;
            candidate.allowed[to] && (hot_too || !hot) && !self.throttled(queues, *task, to)
        };
        let Some(task) = queues
            .waiting(from)
            .iter()
            .copied()
            .filter(movable)
            .max_by_key(|task| *task)
        else {
            return false;
        };
        self.migrate(queues, task, to, now);
        true
    }

    /// Moves the running task of a CPU to an idle one.
    fn push_running(&mut self, queues: &mut Queues, from: usize, to: usize, now: Ns) {
        let Some(task) = queues.current(from) else {
            return;
        };
        if from == to || !queues.tasks[task].allowed[to] || self.throttled(queues, task, to) {
            return;
        }
        self.settle(queues, from, now);
        self.put_back(queues, from, now);
        self.migrate(queues, task, to, now);
        self.settle(queues, to, now);
        self.pick(queues, to, now);
        self.pick(queues, from, now);
    }

    /// A CPU that has become idle looks for one waiting task, in its node first.
    pub(super) fn idle_balance(&mut self, queues: &mut Queues, cpu: usize, now: Ns) {
        if self.trees[cpu].idle_ns < MIGRATION_COST {
            return;
        }
        for level in 0..self.domains.of_cpu[cpu].len() {
            let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
            let source = domain
                .groups
                .iter()
                .flatten()
                .copied()
                .filter(|from| *from != cpu && !queues.waiting(*from).is_empty())
                .max_by_key(|from| (queues.runnable(*from), *from));
            // Only periodic turns count failures: idle ones are too frequent to say anything of the load.
            let hot_too = self.domains.failed[cpu][level] > domain.patience;
            if let Some(source) = source
                && self.pull(queues, source, cpu, hot_too, now)
            {
                self.domains.failed[cpu][level] = 0;
                return;
            }
        }
    }
}
