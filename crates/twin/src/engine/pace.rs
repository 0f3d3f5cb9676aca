//! Speeds of the CPUs' tasks, and the state from which they were solved.

use homenode_units::Ns;

use crate::hardware::Sharer;
use crate::hardware::core::{CoreCost, InLlc, Paging};
use crate::hypervisor::earliest;
use crate::index::{CpuIx, IxVec, TaskIx, ThreadIx, VmIx};

/// How fast the current task of a CPU goes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Speed {
    pub cost: CoreCost,
    /// Nanoseconds per unit of the task's work.
    pub ns_per_unit: f64,
}

/// State of a CPU from which the present latencies were solved.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Solved {
    /// The vCPU that was running, if any.
    pub task: Option<TaskIx>,
    pub cost: CoreCost,
    /// Share of the task's speed that bandwidth limits left it.
    pub granted: f64,
}

/// A running vCPU in a solution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loading {
    pub cpu: CpuIx,
    pub vm: VmIx,
    pub thread: ThreadIx,
    /// The vCPU's number in the model of controllers and links, if it has any misses.
    pub flow: Option<usize>,
}

/// The speeds of all CPUs.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    pub speeds: IxVec<CpuIx, Speed>,
    /// When each CPU's current task completes its work. A separate vector, because every event looks for the earliest of them.
    pub ends: IxVec<CpuIx, Ns>,
    /// Demand of each CPU's task in the last solution.
    pub solved: IxVec<CpuIx, Solved>,
    /// vCPU that ran last on each CPU.
    pub last: IxVec<CpuIx, Option<TaskIx>>,
    /// Part of the cache that each CPU's task could use when it was last determined.
    pub seen: IxVec<CpuIx, InLlc>,
    /// What caches know of each vCPU.
    pub sharers: IxVec<TaskIx, Sharer>,
    /// Cost of translating each VM's addresses.
    pub paging: IxVec<VmIx, Paging>,
    /// The running vCPUs of a solution. Kept between solutions to reuse its allocation.
    pub loading: Vec<Loading>,
}

impl Pace {
    /// Returns the pace of `cpus` CPUs that do not run anything yet.
    pub(super) fn new(cpus: usize, sharers: IxVec<TaskIx, Sharer>, paging: IxVec<VmIx, Paging>) -> Pace {
        Pace {
            speeds: IxVec::filled(Speed::default(), cpus),
            ends: IxVec::filled(Ns(u64::MAX), cpus),
            solved: IxVec::filled(Solved::default(), cpus),
            last: IxVec::filled(None, cpus),
            seen: IxVec::filled(InLlc::default(), cpus),
            sharers,
            paging,
            loading: Vec::new(),
        }
    }

    /// Returns when the first of the CPUs' tasks completes its work.
    pub(super) fn first_end(&self) -> Ns {
        earliest(&self.ends)
    }

    /// Returns the lowest-numbered CPU whose task completes its work at this time.
    pub(super) fn ends_at(&self, end: Ns) -> Option<CpuIx> {
        let mut ends = self.ends.placed();
        ends.find(|(_, other)| **other == end).map(|(cpu, _)| cpu)
    }

    /// Whether a CPU's demand on caches was zero when latencies were solved and is still zero.
    pub(super) fn asks_nothing(&self, cpu: CpuIx, runs: bool) -> bool {
        let now = if runs { self.speeds[cpu].cost.accesses } else { 0.0 };
        now == 0.0 && self.solved[cpu].cost.accesses == 0.0
    }
}
