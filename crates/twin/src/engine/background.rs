//! Background activity: the host's own daemons, and the exchanges of vCPUs and of guests' threads that a scenario asks for.

use homenode_units::Chance;

use super::threads::ThreadMoves;
use crate::index::{IxVec, TaskIx, VmIx, first};
use crate::scenario::Scenario;

/// The daemons, by number.
#[derive(Clone, Debug)]
pub(super) struct Daemons {
    pub tasks: Vec<TaskIx>,
    /// Remaining running time of each daemon, in nanoseconds.
    pub left: Vec<f64>,
    pub chance: Chance,
}

impl Daemons {
    /// Creates an empty set of daemons.
    pub(super) fn new(seed: u64) -> Daemons {
        Daemons {
            tasks: Vec::new(),
            left: Vec::new(),
            chance: Chance::labelled(seed, "daemons", 0),
        }
    }
}

/// Exchanges of vCPUs and of guests' threads that the scenario asks for.
#[derive(Clone, Debug)]
pub(super) struct Exchanges {
    /// Mean time between two exchanges of vCPUs; 0 if there are none.
    pub every_ns: f64,
    pub chance: Chance,
    /// Exchanges of threads, by VM.
    pub threads: IxVec<VmIx, ThreadMoves>,
}

impl Exchanges {
    /// Creates exchanges at the scenario's rates.
    pub(super) fn new(scenario: &Scenario, seed: u64) -> Exchanges {
        let per_minute = scenario.vcpu_exchanges_per_minute;
        let vms = first(scenario.vms.len()).zip(&scenario.vms);
        Exchanges {
            every_ns: if per_minute > 0.0 { 60e9 / per_minute } else { 0.0 },
            chance: Chance::labelled(seed, "exchanges", 0),
            threads: vms.map(|(vm, spec)| ThreadMoves::new(spec, seed, vm)).collect(),
        }
    }
}
