//! Load balancing between CPUs, as CFS does it: by counts of runnable tasks, inside a node and across nodes.
//!
//! # Algorithm (`load_balance`, `idle_balance` and `active_load_balance` of Linux 3.8)
//!
//! Two levels of domains: the cores of a node, and the nodes of the machine. On its turn a CPU (an idle one of its
//! group, else the group's first) compares the runnable tasks per CPU of its group with the busiest group's. If that
//! one has more by the domain's threshold (117 percent inside a node, 125 across nodes), half of the difference is
//! pulled from its most loaded CPU: waiting tasks only, allowed here, not cache-hot. After more failures than the
//! domain's patience, cache-hot tasks too, and at last the running one (active balance). Turns come every 8 ms inside
//! a node and 32 ms across (a millisecond per CPU of the domain), 32 times rarer on a busy CPU. A CPU that becomes idle pulls
//! one waiting task at once, unless its idle periods are shorter than the migration cost on average.
//!
//! Memory plays no part: a vCPU is pulled across nodes for a free CPU whatever its accesses then cost.
//!
//! # Left out
//!
//! CPU power (a hyperthread counts as a CPU), load averages over time, and the hot-cache estimate of sleeping tasks.

use homenode_units::Ns;

use super::fair::{MIGRATION_COST, Scheduler};
use crate::hardware::Topology;

/// Scheduler tick: the grid on which balancing turns fall.
pub(crate) const TICK: Ns = Ns::from_millis(1);
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

/// Domains of each CPU, smallest first, and how often its turns have failed there.
#[derive(Clone, Debug)]
pub(crate) struct Domains {
    domains: Vec<Domain>,
    of_cpu: Vec<Vec<usize>>,
    failed: Vec<Vec<u32>>,
    tick: u64,
}

impl Domains {
    pub fn new(topology: &Topology) -> Domains {
        let mut domains = Vec::new();
        let mut of_cpu = vec![Vec::new(); topology.cpus.len()];
        for cpus in topology.node_cpus.iter().filter(|cpus| !cpus.is_empty()) {
            let mut cores: Vec<usize> = cpus.iter().map(|cpu| topology.cpus[*cpu].core).collect();
            cores.sort_unstable();
            cores.dedup();
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
        }
    }
}

impl Scheduler {
    /// One tick: the CPUs whose turn it is balance.
    pub fn tick(&mut self, now: Ns) {
        self.domains.tick += 1;
        for cpu in 0..self.queues.len() {
            for level in 0..self.domains.of_cpu[cpu].len() {
                let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
                let factor = if self.idle(cpu) { 1 } else { BUSY_FACTOR };
                let interval = domain.interval * factor;
                // Staggered by CPU, as the kernel's turns are.
                if (self.domains.tick + cpu as u64).is_multiple_of(interval) {
                    self.balance(cpu, level, now);
                }
            }
        }
    }

    fn group_load(&self, group: &[usize]) -> usize {
        group.iter().map(|cpu| self.runnable(*cpu)).sum()
    }

    fn balance(&mut self, cpu: usize, level: usize, now: Ns) {
        let Some((group, pulls)) = self.busiest_group(cpu, level) else {
            self.domains.failed[cpu][level] = 0;
            return;
        };
        let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
        let patience = domain.patience;
        let source = *domain.groups[group]
            .iter()
            .max_by_key(|from| (self.runnable(**from), **from))
            .expect("a group has CPUs");
        let failed = self.domains.failed[cpu][level];
        let mut pulled = 0;
        while pulled < pulls && self.pull(source, cpu, failed > patience, now) {
            pulled += 1;
        }
        if pulled > 0 {
            self.domains.failed[cpu][level] = 0;
            self.settle(cpu, now);
            if self.queues[cpu].current.is_none() {
                self.pick(cpu, now);
            }
            return;
        }
        self.domains.failed[cpu][level] = failed + 1;
        if failed > patience + 2 && self.idle(cpu) {
            self.push_running(source, cpu, now);
            self.domains.failed[cpu][level] = patience;
        }
    }

    /// The group that a CPU should pull from on a level, and how many tasks; `None` where loads are even, or another
    /// CPU of its group does the balancing.
    fn busiest_group(&self, cpu: usize, level: usize) -> Option<(usize, usize)> {
        let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
        let local = domain.groups.iter().position(|group| group.contains(&cpu))?;
        let group = &domain.groups[local];
        let balancer = group
            .iter()
            .copied()
            .find(|cpu| self.idle(*cpu))
            .unwrap_or(group[0]);
        if balancer != cpu {
            return None;
        }
        // Loads are compared per CPU; cross-multiplied, they stay integers.
        let per_cpu = |group: &[usize]| self.group_load(group) * 1024 / group.len();
        let (busiest, load) = (0..domain.groups.len())
            .filter(|other| *other != local)
            .map(|other| (other, per_cpu(&domain.groups[other])))
            .max_by_key(|(other, load)| (*load, std::cmp::Reverse(*other)))?;
        let here = per_cpu(group);
        if load * 100 <= here * domain.imbalance_pct {
            return None;
        }
        // Half of the difference, in tasks of the smaller group; moving one must not just turn the imbalance round.
        let size = group.len().min(domain.groups[busiest].len());
        let difference = (load - here) * size / 1024;
        (difference >= 2).then_some((busiest, difference / 2))
    }

    /// Pulls one waiting task from a CPU to another.
    fn pull(&mut self, from: usize, to: usize, hot_too: bool, now: Ns) -> bool {
        let movable = |task: &usize| {
            let candidate = &self.tasks[*task];
            let hot = now.0 - candidate.last_ran.0 < MIGRATION_COST;
            candidate.allowed[to] && (hot_too || !hot)
        };
        let Some(task) = self.queues[from]
            .waiting
            .iter()
            .copied()
            .filter(movable)
            .max_by_key(|task| *task)
        else {
            return false;
        };
        self.migrate(task, to, now);
        true
    }

    /// Moves the running task of a CPU to an idle one.
    fn push_running(&mut self, from: usize, to: usize, now: Ns) {
        let Some(task) = self.queues[from].current else {
            return;
        };
        if from == to || !self.tasks[task].allowed[to] {
            return;
        }
        self.settle(from, now);
        self.put_back(from, now);
        self.migrate(task, to, now);
        self.settle(to, now);
        self.pick(to, now);
        self.pick(from, now);
    }

    /// A CPU that has become idle looks for one waiting task, in its node first.
    pub(super) fn idle_balance(&mut self, cpu: usize, now: Ns) {
        if self.queues[cpu].idle_ns < MIGRATION_COST {
            return;
        }
        for level in 0..self.domains.of_cpu[cpu].len() {
            let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
            let source = domain
                .groups
                .iter()
                .flatten()
                .copied()
                .filter(|from| *from != cpu && !self.queues[*from].waiting.is_empty())
                .max_by_key(|from| (self.runnable(*from), *from));
            let failed = self.domains.failed[cpu][level];
            let hot_too = failed > domain.patience;
            let Some(source) = source else { continue };
            if self.pull(source, cpu, hot_too, now) {
                self.domains.failed[cpu][level] = 0;
                return;
            }
            self.domains.failed[cpu][level] = failed + 1;
        }
    }
}
