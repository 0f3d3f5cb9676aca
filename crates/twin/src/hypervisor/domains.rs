//! Domains of CPUs between which load is balanced, and what one group should pull from another. [`super::balance`] describes the
//! rules.

use std::cmp::Reverse;

use homenode_units::{Ns, finalize};

use super::discipline::NEVER;
use crate::hardware::Topology;
use crate::index::{CpuIx, IxVec};

/// Scheduler tick: the grid on which balancing turns fall.
pub(super) const TICK: Ns = Ns::from_millis(1);
/// A busy CPU balances this many times less frequently (`busy_factor`).
const BUSY_FACTOR: u64 = 32;
/// Most tasks that are pulled at once (`sysctl_sched_nr_migrate`).
const TASKS_MAX: u64 = 32;
/// A task that ran less than this time ago has a warm cache and is not moved (`sysctl_sched_migration_cost`), in nanoseconds.
pub(super) const MIGRATION_COST: u64 = 500_000;
/// `cpu.shares` of a VM of usual weight.
pub(super) const SHARES_USUAL: u64 = 1024;
/// Weight units per share.
pub(super) const WEIGHT_UNIT: u64 = 1024;
/// Weight of one of the host's own tasks.
pub(super) const NICE_0_LOAD: u64 = SHARES_USUAL * WEIGHT_UNIT;

#[derive(Clone, Debug)]
pub(super) struct Domain {
    /// The groups of CPUs whose loads are compared.
    pub groups: Vec<Vec<CpuIx>>,
    /// Ticks between two turns of an idle CPU.
    pub interval: u64,
    /// Least load of the busiest group at which tasks are pulled, in percent of the local group's load.
    pub imbalance_pct: u64,
    /// Failed turns before cache-hot tasks are pulled too.
    pub patience: u32,
    /// Number of tasks below which a group with an idle CPU accepts a small imbalance (`imb_numa_nr`); 0 if it never does.
    pub tolerated: u64,
}

/// Largest difference in tasks that counts as a small imbalance (`NUMA_IMBALANCE_MIN`).
pub(super) const IMBALANCE_MIN: u64 = 2;

/// Load of a group's CPUs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    pub cpus: u64,
    /// Number of tasks that run or wait.
    pub tasks: u64,
    pub idle_cpus: u64,
    /// Total weight of the tasks.
    pub weight: u64,
    /// Whether the loads of two of the group's CPUs differ by at least a task's weight while a task waits there (`group_imb`).
    pub uneven: bool,
    /// Weight per CPU, and 1024 times the tasks per CPU. Kept, because each group compares itself with all others.
    pub weight_per_cpu: u64,
    pub tasks_per_cpu: u64,
}

/// Load of one CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct CpuLoad {
    /// Number of tasks that run or wait.
    pub tasks: u64,
    /// Total weight of the vCPUs that run or wait.
    pub weight: u64,
}

impl Load {
    /// Returns the load of a group of CPUs.
    pub(super) fn of(cpus: impl ExactSizeIterator<Item = CpuLoad>) -> Load {
        let count = cpus.len() as u64;
        let (mut tasks, mut weight, mut idle_cpus) = (0, 0, 0);
        let (mut least, mut most) = (u64::MAX, (0, 0));
        for cpu in cpus {
            tasks += cpu.tasks;
            weight += cpu.weight;
            idle_cpus += u64::from(cpu.tasks == 0);
            least = least.min(cpu.weight);
            most = most.max((cpu.weight, cpu.tasks));
        }
        let per_cpu = |of_all: u64| if count == 1 { of_all } else { of_all / count };
        Load {
            cpus: count,
            tasks,
            idle_cpus,
            weight,
            // The difference is at least the weight of a task: `weight / tasks`, without a division.
            uneven: weight > 0 && most.1 > 1 && (most.0 - least + 1) * tasks > weight,
            weight_per_cpu: per_cpu(weight),
            tasks_per_cpu: per_cpu(tasks * 1024),
        }
    }

    pub(super) fn per_task(&self) -> u64 {
        self.weight / self.tasks.max(1)
    }
}

/// What a CPU should pull from a group: at most this many tasks, of this weight in total.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pull {
    pub group: usize,
    pub tasks: u64,
    pub weight: u64,
}

impl Domain {
    /// Returns what a group's balancing CPU should pull, given the loads of all groups.
    pub(super) fn pull_to(&self, local: usize, loads: &[Load]) -> Option<Pull> {
        if loads[local].idle_cpus > 0 {
            self.pull_to_idle(local, loads)
        } else {
            self.pull_to_busy(local, loads)
        }
    }

    /// Decides by number of tasks for a group with an idle CPU: half of the difference, or one task that must wait in the other
    /// group and could run here.
    fn pull_to_idle(&self, local: usize, loads: &[Load]) -> Option<Pull> {
        let others = (0..loads.len()).filter(|at| *at != local);
        let group = others.max_by_key(|at| (loads[*at].tasks_per_cpu, Reverse(*at)))?;
        let (load, here) = (loads[group].tasks_per_cpu, loads[local].tasks_per_cpu);
        let fewer = loads[local].cpus.min(loads[group].cpus);
        let excess = load.saturating_sub(here) * fewer / 1024;
        let is_tolerated = loads[local].tasks < self.tolerated && excess <= IMBALANCE_MIN;
        if is_tolerated && load <= 1024 {
            return None;
        }
        let excess = if load > here.max(1024) {
            excess.max(2)
        } else {
            excess
        };
        (excess >= 2).then_some(Pull {
            group,
            tasks: excess / 2,
            weight: u64::MAX,
        })
    }

    /// Decides by weight for a group without an idle CPU (`find_busiest_group`, `calculate_imbalance`, `fix_small_imbalance`).
    fn pull_to_busy(&self, local: usize, loads: &[Load]) -> Option<Pull> {
        let crowded = |load: &Load| load.tasks > load.cpus || load.uneven;
        let others = (0..loads.len()).filter(|at| *at != local && crowded(&loads[*at]));
        let group = others.max_by_key(|at| (loads[*at].weight_per_cpu, Reverse(*at)))?;
        let (busiest, here) = (loads[group], loads[local]);
        let sum = |part: fn(&Load) -> u64| loads.iter().map(part).sum::<u64>();
        let mean = sum(|load| load.weight) / sum(|load| load.cpus);
        let (high, low) = (busiest.weight_per_cpu, here.weight_per_cpu);
        let even = low >= mean || 100 * high <= self.imbalance_pct * low;
        if low >= high || (even && !busiest.uneven) {
            return None;
        }
        let (mut per_task, mut above) = (busiest.per_task(), high.saturating_sub(mean));
        if busiest.uneven {
            per_task = per_task.min(mean);
        } else {
            above = above.min((busiest.tasks - busiest.cpus) * NICE_0_LOAD / busiest.cpus);
        }
        let mut weight = (above * busiest.cpus).min(mean.saturating_sub(low) * here.cpus);
        if weight < per_task {
            // The imbalance is less than a task. One task is moved nevertheless if loads are no worse afterwards.
            let share = per_task / busiest.cpus;
            let factor = if per_task > here.per_task() { 1 } else { 2 };
            if high - low + share >= share * factor {
                weight = per_task;
            }
        }
        (weight > 0).then_some(Pull {
            group,
            tasks: TASKS_MAX,
            weight,
        })
    }
}

/// The interval of a domain's busy CPUs that a tick belongs to, and the tick's number in the interval. Kept, because every CPU
/// asks for them in every tick, and a division takes tens of cycles.
#[derive(Clone, Copy, Debug)]
struct Interval {
    tick: u64,
    number: u64,
    within: u64,
}

impl Interval {
    const NONE: Interval = Interval {
        tick: NEVER.0,
        number: 0,
        within: 0,
    };
}

/// The tick in an interval in which a busy CPU has its turn.
#[derive(Clone, Copy, Debug)]
struct Turn {
    interval: u64,
    within: u64,
}

impl Turn {
    const NONE: Turn = Turn {
        interval: NEVER.0,
        within: 0,
    };
}

/// Scheduling domains of each CPU, smallest first, and for each the number of consecutive attempts to balance that have failed.
#[derive(Clone, Debug)]
pub(super) struct Domains {
    pub domains: Vec<Domain>,
    pub of_cpu: IxVec<CpuIx, Vec<usize>>,
    pub failed: IxVec<CpuIx, Vec<u32>>,
    /// The present interval of each domain, and the last turn drawn for each CPU in each of its domains.
    intervals: Vec<Interval>,
    turns: IxVec<CpuIx, Vec<Turn>>,
    /// For each domain, whether its groups are known to have nothing to pull. This holds until one of the domain's CPUs is
    /// touched.
    pub is_even: Vec<bool>,
    /// Number of ticks handled so far.
    pub tick: u64,
    /// Whether the loads of all domains are even, so that no tick can change anything until a queue changes.
    pub even: bool,
    /// Kept between calls to save allocations.
    pub loads: Vec<Load>,
}

/// Returns the number of tasks below which a node with an idle CPU does not pull from a node that has slightly more. It is an
/// eighth of a node's CPUs if the node has one L3, else the number of its L3s (`build_sched_domains`, since 5.18).
fn tolerated(topology: &Topology) -> u64 {
    let nodes = topology.node_cpus.iter().filter(|cpus| !cpus.is_empty());
    let of = |cpus: &Vec<CpuIx>| match topology.llcs_of(cpus).len() {
        1 => cpus.len() / 8,
        llcs => llcs,
    };
    nodes.map(of).max().unwrap_or(0).max(1) as u64
}

impl Domains {
    /// Creates the domains. `balances` says whether the kernel accepts small imbalances between nodes.
    pub(super) fn new(topology: &Topology, balances: bool) -> Domains {
        let mut domains = Vec::new();
        let mut of_cpu = IxVec::filled(Vec::new(), topology.cpus.len());
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
                    tolerated: 0,
                });
            }
            let mut in_node = |groups: Vec<Vec<CpuIx>>| {
                let all = groups.iter().flatten();
                all.clone().for_each(|cpu| of_cpu[*cpu].push(domains.len()));
                domains.push(Domain {
                    interval: all.count() as u64,
                    imbalance_pct: 117,
                    patience: 1,
                    tolerated: 0,
                    groups,
                });
            };
            let llcs = topology.llcs_of(cpus);
            for llc in &llcs {
                let cores = cores.iter().map(|core| &topology.core_cpus[*core]);
                let here = cores.filter(|core| topology.cpus[core[0]].llc == *llc);
                in_node(here.cloned().collect());
            }
            if llcs.len() > 1 {
                let of = |llc: &usize| {
                    let there = cpus.iter().filter(|cpu| topology.cpus[**cpu].llc == *llc);
                    there.copied().collect()
                };
                in_node(llcs.iter().map(of).collect());
            }
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
                tolerated: if balances { tolerated(topology) } else { 0 },
            });
        }
        let failed = of_cpu.iter().map(|list| vec![0; list.len()]).collect();
        Domains {
            intervals: vec![Interval::NONE; domains.len()],
            turns: of_cpu.iter().map(|list| vec![Turn::NONE; list.len()]).collect(),
            is_even: vec![false; domains.len()],
            domains,
            of_cpu,
            failed,
            tick: 0,
            even: true,
            loads: Vec::new(),
        }
    }

    /// Returns [`Domain::tolerated`] between nodes.
    pub(super) fn tolerated(&self) -> u64 {
        self.domains.last().map_or(0, |nodes| nodes.tolerated)
    }

    /// Whether a CPU balances in the present tick. Idle CPUs are staggered according to their numbers. In the kernel the turn of
    /// a busy CPU depends on all earlier turns. Here it is drawn at random once per interval, so that turns do not keep step with
    /// slices.
    pub(super) fn has_turn(&mut self, cpu: CpuIx, level: usize, idle: bool) -> bool {
        let at = self.of_cpu[cpu][level];
        let (tick, ticks) = (self.tick, self.domains[at].interval);
        if idle {
            return (tick + cpu.0 as u64).is_multiple_of(ticks);
        }
        let ticks = ticks * BUSY_FACTOR;
        let now = &mut self.intervals[at];
        if now.tick != tick {
            *now = Interval {
                tick,
                number: tick / ticks,
                within: tick % ticks,
            };
        }
        let turn = &mut self.turns[cpu][level];
        if turn.interval != now.number {
            let seed = (now.number << 32) + ((cpu.0 as u64) << 8) + level as u64;
            *turn = Turn {
                interval: now.number,
                within: finalize(seed) % ticks,
            };
        }
        now.within == turn.within
    }

    /// Discards what is known of the domains of a touched CPU, because its load may have changed.
    pub(super) fn forget(&mut self, cpu: CpuIx) {
        for domain in &self.of_cpu[cpu] {
            self.is_even[*domain] = false;
        }
    }

    /// Notes that a run queue has changed: loads may be uneven.
    pub(super) fn changed(&mut self, now: Ns) {
        if std::mem::take(&mut self.even) {
            self.tick = now.0 / TICK.0;
        }
    }

    /// Returns when the next tick is due, which is never while loads are even.
    pub(super) fn next_tick(&self) -> Ns {
        if self.even {
            NEVER
        } else {
            Ns((self.tick + 1) * TICK.0)
        }
    }
}
