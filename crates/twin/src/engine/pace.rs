//! Speeds of the CPUs' tasks, and the state they were solved from.

use homenode_units::Ns;

use crate::hardware::Sharer;
use crate::hardware::core::{CoreCost, InLlc, Paging};
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
    /// The vCPU that ran, if one did.
    pub task: Option<TaskIx>,
    pub cost: CoreCost,
    /// Share of its speed that throughput caps left it.
    pub granted: f64,
}

/// A running vCPU in a solution.
#[derive(Clone, Copy, Debug)]
pub(super) struct Loading {
    pub cpu: CpuIx,
    pub vm: VmIx,
    pub thread: ThreadIx,
    /// Its number in the fabric, if it misses at all.
    pub flow: Option<usize>,
}

/// The speeds of all CPUs.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    pub speeds: IxVec<CpuIx, Speed>,
    /// When the current task's work is done, by CPU; kept apart, since every event looks for the earliest.
    pub ends: IxVec<CpuIx, Ns>,
    /// Demand of each CPU's task at the last solution.
    pub solved: IxVec<CpuIx, Solved>,
    /// Cache that each CPU's task could use when last looked at.
    pub seen: IxVec<CpuIx, InLlc>,
    /// What caches know of each vCPU.
    pub sharers: IxVec<TaskIx, Sharer>,
    /// Cost of translating each VM's addresses.
    pub paging: IxVec<VmIx, Paging>,
    /// The running vCPUs of a solution, kept for its memory.
    pub loading: Vec<Loading>,
}

impl Pace {
    /// Returns the pace of `cpus` CPUs that run nothing yet.
    pub fn new(cpus: usize, sharers: IxVec<TaskIx, Sharer>, paging: IxVec<VmIx, Paging>) -> Pace {
        Pace {
            speeds: IxVec::filled(Speed::default(), cpus),
            ends: IxVec::filled(Ns(u64::MAX), cpus),
            solved: IxVec::filled(Solved::default(), cpus),
            seen: IxVec::filled(InLlc::default(), cpus),
            sharers,
            paging,
            loading: Vec::new(),
        }
    }

    /// Returns the CPU whose task is done first, and when; on a tie the first CPU.
    pub fn first_end(&self) -> (CpuIx, Ns) {
        let mut soonest = (CpuIx(0), Ns(u64::MAX));
        for (cpu, end) in self.ends.placed() {
            if *end < soonest.1 {
                soonest = (cpu, *end);
            }
        }
        soonest
    }

    /// Whether a CPU's demand on caches was zero when latencies were solved, and still is.
    pub fn asks_nothing(&self, cpu: CpuIx, runs: bool) -> bool {
        let now = if runs { self.speeds[cpu].cost.accesses } else { 0.0 };
        now == 0.0 && self.solved[cpu].cost.accesses == 0.0
    }
}
