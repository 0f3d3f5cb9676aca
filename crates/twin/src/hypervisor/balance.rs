//! Load balancing between CPUs as CFS does it: according to the weights of tasks, inside a node and across nodes.
//!
//! # Algorithm (`load_balance`, `idle_balance` and `active_load_balance` of Linux 3.8)
//!
//! Levels of domains: the hyperthreads of a core, the cores below an LLC, the LLCs of a node that has several, and the nodes of
//! the machine. On its turn a CPU (an idle CPU of its group, else the group's first) compares the load of its group with the load
//! of the busiest group.
//!
//! - The load of a CPU is the weight of its vCPUs (`task_h_load`); each vCPU weighs its part of its VM's shares.
//! - A group without an idle CPU pulls from the group with the most load per CPU among those that have a waiting task. It pulls
//!   if that load exceeds its own by the domain's threshold (110 percent inside a core, 117 inside a node, 125 across nodes) and
//!   its own is below the domain's mean. The imbalance is the load that brings one of the two groups to the mean. If that is less
//!   than a task, it is one task, provided that loads are no worse afterwards. Tasks are pulled from the most loaded CPU of the
//!   busiest group until they make up the imbalance; each may weigh at most twice what is left of it. There is no threshold if
//!   one CPU of the busiest group has more load than another by a task's weight (`group_imb`).
//! - A group with an idle CPU pulls as soon as a task must wait in another group: half of the difference in tasks.
//!
//! A turn pulls only waiting tasks that are allowed on this CPU and not cache-hot. After more failures than the domain's
//! patience, it also pulls cache-hot tasks, and at last the running task to an idle CPU (active balance). A CPU has a turn once
//! in as many milliseconds as its domain has CPUs (8 ms inside a node of 8, 32 ms across 32); a busy CPU has 32 times fewer. A
//! CPU that becomes idle pulls one waiting task at once, unless its idle periods are on average shorter than the migration cost.
//! A failure of such a pull does not count (commit 58b26c4c, 2.6.37). While no group has tasks that another should pull, there
//! are no turns.
//!
//! Memory plays no part unless the kernel balances memory (`kernel.numa_balancing`). If it does, the simulator follows a present
//! kernel:
//! - A task on the node of its memory counts as cache-hot for other nodes, unless all tasks of its CPU are on the node of theirs.
//!   A task that would come to its memory never counts as cache-hot (`migrate_degrades_locality`).
//! - An idle CPU accepts a difference of two tasks between nodes while its node has few tasks (`adjust_numa_imbalance`). A new
//!   vCPU starts on its VM's node according to the same rule (`find_idlest_group`).
//!
//! Otherwise a vCPU is pulled across nodes to a free CPU, whatever its accesses then cost.
//!
//! # Shares of VMs
//!
//! Equal loads on all CPUs mean shares by weight. Linux gets no nearer than its thresholds and the weight of a task: loads
//! of nodes may differ by a quarter for good, and shares of VMs by some percent with them (32 and 32 vCPUs of weights 1 and
//! 2 on 4 nodes of 8 CPUs: 2 percent). If the imbalance is less than half of the weight of the heavier vCPUs, only lighter
//! ones are moved back and forth, and their VM loses a tenth (24 and 32 vCPUs of equal VMs on those CPUs; 3 to 5 percent for
//! 32 and 48).
//!
//! # Cost
//!
//! Once no group of a domain should pull anything, the domain is skipped until one of its CPUs is touched: its run queue,
//! the weight of its vCPUs, or where they may go has changed (`Queues::touched`). On a mostly idle host a tick skips most
//! domains. The load of each CPU is kept, too, until the CPU is touched (property
//! `what_is_kept_of_even_domains_changes_nothing`).
//!
//! # Departures
//!
//! - Tasks are tried in the order in which they wait; the kernel keeps a list of its own.
//! - The turn of a busy CPU is drawn by chance, once in each interval; in the kernel it depends on all earlier turns.
//! - The host's own tasks have no load: the kernel compares means over ticks (`source_load`), and they run for less than that.
//!
//! # Left out
//!
//! CPU power (a hyperthread counts as a CPU), load averages over time, active balance to a busy CPU, intervals that double while
//! loads are even, and the hot-cache estimate of sleeping tasks.

use std::cmp::Reverse;

use homenode_units::Ns;

use super::discipline::Discipline;
use super::domains::{CpuLoad, Domain, Load, MIGRATION_COST, Pull};
use super::fair::Fair;
use super::queues::Queues;
use crate::index::{CpuIx, TaskIx, first};

/// Whether a task on one group of CPUs is allowed on a CPU of another group.
fn may_go(queues: &Queues, from: &[CpuIx], to: &[CpuIx]) -> bool {
    from.iter().any(|cpu| {
        let mut tasks = queues.waiting(*cpu).iter().copied().chain(queues.current(*cpu));
        tasks.any(|task| to.iter().any(|cpu| queues.tasks[task].allowed[*cpu]))
    })
}

impl Fair {
    /// Handles one tick: every CPU whose turn it is balances.
    pub(super) fn tick(&mut self, queues: &mut Queues, now: Ns) {
        self.domains.tick += 1;
        self.weigh_touched(queues);
        for cpu in first(queues.cpus()) {
            for level in 0..self.domains.of_cpu[cpu].len() {
                let at = self.domains.of_cpu[cpu][level];
                // There is nothing to pull, and no failure to forget.
                if self.domains.is_even[at] && self.domains.failed[cpu][level] == 0 {
                    continue;
                }
                if self.domains.has_turn(cpu, level, queues.idle(cpu)) {
                    self.balance(queues, cpu, level, now);
                    self.weigh_touched(queues);
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

    /// Computes the loads of the CPUs that were touched.
    fn weigh_touched(&mut self, queues: &mut Queues) {
        while let Some(cpu) = queues.touched.first() {
            queues.touched.remove(cpu);
            self.trees[cpu].load = CpuLoad {
                tasks: queues.runnable(cpu) as u64,
                weight: self.vm_load(queues, cpu),
            };
            self.domains.forget(cpu);
        }
    }

    /// Whether every group of every domain is without tasks that another group should and may pull.
    fn loads_are_even(&mut self, queues: &Queues) -> bool {
        let mut loads = std::mem::take(&mut self.domains.loads);
        let mut all = true;
        for at in 0..self.domains.domains.len() {
            if !self.domains.is_even[at] {
                let domain = &self.domains.domains[at];
                self.weigh_groups(domain, &mut loads);
                let is_even = (0..domain.groups.len()).all(|local| {
                    let pull = domain.pull_to(local, &loads);
                    pull.is_none_or(|pull| !may_go(queues, &domain.groups[pull.group], &domain.groups[local]))
                });
                self.domains.is_even[at] = is_even;
                all &= is_even;
            }
        }
        self.domains.loads = loads;
        all
    }

    /// Computes the loads of a domain's groups.
    fn weigh_groups(&self, domain: &Domain, loads: &mut Vec<Load>) {
        let of_cpus = |group: &Vec<CpuIx>| Load::of(group.iter().map(|cpu| self.trees[*cpu].load));
        loads.clear();
        loads.extend(domain.groups.iter().map(of_cpus));
    }

    /// Returns the weight of a CPU's vCPUs.
    fn vm_load(&self, queues: &Queues, cpu: CpuIx) -> u64 {
        let tasks = queues.waiting(cpu).iter().copied().chain(queues.current(cpu));
        tasks.map(|task| self.balanced_weight(queues, task)).sum()
    }

    /// Returns the weight of a task in balancing: 0 for the host's own tasks, which run too briefly to count.
    fn balanced_weight(&self, queues: &Queues, task: TaskIx) -> u64 {
        queues.tasks[task].vm.map_or(0, |_| self.weight(queues, task))
    }

    fn balance(&mut self, queues: &mut Queues, cpu: CpuIx, level: usize, now: Ns) {
        let Some((source, wanted)) = self.busiest_cpu(queues, cpu, level) else {
            self.domains.failed[cpu][level] = 0;
            return;
        };
        let patience = self.domains.domains[self.domains.of_cpu[cpu][level]].patience;
        let failed = self.domains.failed[cpu][level];
        let (mut pulled, mut left) = (0, wanted.weight);
        while pulled < wanted.tasks && left > 0 {
            let Some(weight) = self.pull(queues, source, cpu, left, failed > patience, now) else {
                break;
            };
            pulled += 1;
            left = left.saturating_sub(weight);
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

    /// Returns the CPU that `cpu` should pull from on a level, and what to pull. Returns `None` if loads are even, or if another
    /// CPU of its group does the balancing.
    fn busiest_cpu(&mut self, queues: &Queues, cpu: CpuIx, level: usize) -> Option<(CpuIx, Pull)> {
        let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
        let local = domain.groups.iter().position(|group| group.contains(&cpu))?;
        let group = &domain.groups[local];
        let idle = group.iter().copied().find(|cpu| queues.idle(*cpu));
        if idle.unwrap_or(group[0]) != cpu {
            return None;
        }
        let mut loads = std::mem::take(&mut self.domains.loads);
        let domain = &self.domains.domains[self.domains.of_cpu[cpu][level]];
        self.weigh_groups(domain, &mut loads);
        let wanted = domain.pull_to(local, &loads);
        self.domains.loads = loads;
        let wanted = wanted?;
        let cpus = domain.groups[wanted.group].iter().copied();
        // A CPU with only tasks that may not leave it is passed over for the next (`LBF_ALL_PINNED`).
        let source = if idle.is_some() {
            cpus.filter(|from| may_go(queues, &[*from], &[cpu]))
                .max_by_key(|from| (queues.runnable(*from), *from))
        } else {
            let may = |from: &CpuIx| {
                let mut waiting = queues.waiting(*from).iter();
                waiting.any(|task| queues.tasks[*task].allowed[cpu])
            };
            cpus.filter(may)
                .max_by_key(|from| (self.trees[*from].load.weight, Reverse(*from)))
        };
        Some((source?, wanted))
    }

    /// Pulls one waiting task of at most twice this weight from one CPU to another. Returns the task's weight.
    fn pull(
        &mut self,
        queues: &mut Queues,
        from: CpuIx,
        to: CpuIx,
        weight: u64,
        hot_too: bool,
        now: Ns,
    ) -> Option<u64> {
        let movable = |task: &TaskIx| {
            let candidate = &queues.tasks[*task];
            let hot = match Fair::leaves_memory(queues, *task, from, to) {
                Some(leaves) => leaves,
                None => now.0 - candidate.last_ran.0 < MIGRATION_COST,
            };
            candidate.allowed[to]
                && (hot_too || !hot)
                && !self.throttled(queues, *task, to)
                && self.balanced_weight(queues, *task) / 2 <= weight
        };
        let mut waiting = queues.waiting(from).iter().copied();
        let task = waiting.find(movable)?;
        let weight = self.balanced_weight(queues, task);
        self.migrate(queues, task, to, now);
        Some(weight)
    }

    /// Returns true if a task that moves between these CPUs leaves the node of its memory, and false if it comes to that node.
    /// Returns `None` if memory does not matter, as when all tasks there have their memory there (`migrate_degrades_locality`).
    fn leaves_memory(queues: &Queues, task: TaskIx, from: CpuIx, to: CpuIx) -> Option<bool> {
        let node_of = &queues.places.node_of;
        let preferred = queues.tasks[task].prefers?;
        if node_of[from] == node_of[to] {
            return None;
        }
        if node_of[from] == preferred {
            let mut here = queues.waiting(from).iter().copied().chain(queues.current(from));
            let all_prefer = here.all(|task| queues.tasks[task].prefers == Some(preferred));
            return (!all_prefer).then_some(true);
        }
        (node_of[to] == preferred).then_some(false)
    }

    /// Moves the running task of a CPU to an idle CPU.
    fn push_running(&mut self, queues: &mut Queues, from: CpuIx, to: CpuIx, now: Ns) {
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

    /// Lets a CPU that has become idle look for one waiting task, first in its node.
    pub(super) fn idle_balance(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
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
            // Only periodic turns count failures. Turns of CPUs that become idle are too frequent to reflect the load.
            let hot_too = self.domains.failed[cpu][level] > domain.patience;
            if let Some(source) = source
                && self.pull(queues, source, cpu, u64::MAX, hot_too, now).is_some()
            {
                self.domains.failed[cpu][level] = 0;
                return;
            }
        }
    }
}
