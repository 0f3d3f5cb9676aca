//! Finds machines and scenarios by the names that users give them.

use homenode_machine::Machine;
use homenode_twin::named;
use homenode_twin::{Scenario, Setup};

use crate::bad_input;

/// The simulator's machine if none is named.
pub(crate) const TWIN_MACHINE: &str = named::MACHINE;

/// Reads `twin`, `twin:NAME` or `twin:FILE.toml`: a scenario or a machine.
///
/// # Errors
/// An unknown machine (with the nearest name), a bad file.
pub(crate) fn spec(what: Option<&str>, seed: Option<u64>) -> anyhow::Result<Setup> {
    named::setup(what, seed).map_err(bad_input)
}

/// Reads a scenario from a file or by its name. A workload file becomes a scenario with one VM that runs the workload.
///
/// # Errors
/// A bad file, with the place of the error; an unknown name, with the nearest name.
pub(crate) fn scenario(what: &str) -> anyhow::Result<Scenario> {
    named::scenario(what).map_err(bad_input)
}

/// Returns the requested machine, else the scenario's own: a preset, or a file in the scenario's directory.
///
/// # Errors
/// An unknown or bad machine.
pub(crate) fn machine_for(scenario: &Scenario, path: &str, asked: Option<&str>) -> anyhow::Result<Machine> {
    named::machine_for(scenario, path, asked).map_err(bad_input)
}

/// Returns the preset with this name, or the machine in this file.
///
/// # Errors
/// An unknown machine, with the nearest name; a bad file.
pub(crate) fn machine(what: &str) -> anyhow::Result<Machine> {
    named::machine(what).map_err(bad_input)
}
