//! Background activity: the host's own daemons, and the exchanges of vCPUs that a scenario asks for.

use homenode_units::Chance;

use crate::index::TaskIx;

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

/// Exchanges of vCPUs that the scenario asks for.
#[derive(Clone, Debug)]
pub(super) struct Exchanges {
    /// Mean time between two exchanges; 0 if there are none.
    pub every_ns: f64,
    pub chance: Chance,
}

impl Exchanges {
    /// Creates exchanges at this rate.
    pub(super) fn new(per_minute: f64, seed: u64) -> Exchanges {
        Exchanges {
            every_ns: if per_minute > 0.0 { 60e9 / per_minute } else { 0.0 },
            chance: Chance::labelled(seed, "exchanges", 0),
        }
    }
}
