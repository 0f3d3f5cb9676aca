//! A run of the simulator before it begins.

use homenode_machine::Machine;
use homenode_units::Ns;

use crate::scenario::Disturbance;
use crate::scenario::{Scenario, TwinError};
use crate::twin::{EPOCH_DEFAULT, Twin};

/// Inputs of a simulation.
#[derive(Clone, Debug)]
pub struct Setup {
    /// The machine.
    pub machine: Machine,
    /// The scenario that runs on the machine.
    pub scenario: Scenario,
    /// Seed of all random draws.
    pub seed: u64,
    /// The simulation's resolution.
    pub epoch: Ns,
}

impl Setup {
    /// Creates a set-up of a scenario on a machine, at the usual resolution.
    pub fn new(machine: Machine, scenario: Scenario, seed: u64) -> Setup {
        Setup {
            machine,
            scenario,
            seed,
            epoch: EPOCH_DEFAULT,
        }
    }

    /// Starts the simulated host at time 0.
    ///
    /// # Errors
    /// If the machine cannot run the scenario.
    pub fn start(&self) -> Result<Twin, TwinError> {
        Twin::with_epoch(self.machine.clone(), &self.scenario, self.seed, self.epoch)
    }

    /// Returns the same set-up with a disturbance.
    #[must_use]
    pub fn disturbed(&self, disturbance: Disturbance) -> Setup {
        Setup {
            scenario: self.scenario.clone().disturbed(disturbance),
            ..self.clone()
        }
    }
}
