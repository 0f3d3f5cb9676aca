//! Finds machines and scenarios by the names that users give them.

use homenode_machine::Machine;
use homenode_twin::named::{self, is_file};
use homenode_twin::{Scenario, Setup};

use crate::bad_input;

/// The twin's machine if none is named.
pub const TWIN_MACHINE: &str = named::MACHINE;

/// Reads `twin`, `twin:NAME` or `twin:FILE.toml`: a scenario or a machine.
///
/// # Errors
/// An unknown machine (with the nearest name), a bad file.
pub fn spec(what: Option<&str>, seed: Option<u64>) -> anyhow::Result<Setup> {
    let (machine, scenario) = match what {
        None | Some(TWIN_MACHINE) => (machine(TWIN_MACHINE)?, Scenario::tavo_mixed()),
        Some(what) if is_scenario(what)? => {
            let scenario = scenario(what)?;
            (machine_for(&scenario, what, None)?, scenario)
        }
        Some(name) => {
            let machine = machine(name)?;
            let scenario = Scenario::mixed_for(&machine, seed.unwrap_or(1));
            (machine, scenario)
        }
    };
    let seed = seed.unwrap_or(scenario.seed);
    Ok(Setup::new(machine, scenario, seed))
}

/// Whether it is a file that does not describe a machine, or the name of a built-in scenario.
fn is_scenario(what: &str) -> anyhow::Result<bool> {
    if is_file(what) {
        let text = homenode_machine_files::file::read_text_file(what).map_err(bad_input)?;
        return Ok(!is_machine(&text));
    }
    Ok(Scenario::names().any(|name| name == what))
}

/// Whether a file describes a machine, judging by its tables; if not, it is a scenario.
fn is_machine(text: &str) -> bool {
    let begins = |line: &str| {
        ["[shape]", "[[node]]", "[hardware]"]
            .iter()
            .any(|table| line.trim().starts_with(table))
    };
    text.lines().any(begins)
}

/// Reads a scenario by file or name; a workload file becomes a scenario with one VM that runs it.
///
/// # Errors
/// A bad file, with the place of the error; an unknown name, with the nearest.
pub fn scenario(what: &str) -> anyhow::Result<Scenario> {
    named::scenario(what).map_err(bad_input)
}

/// The requested machine, else the scenario's own: a preset, or a file in the scenario's directory.
///
/// # Errors
/// An unknown or bad machine.
pub fn machine_for(scenario: &Scenario, path: &str, asked: Option<&str>) -> anyhow::Result<Machine> {
    named::machine_for(scenario, path, asked).map_err(bad_input)
}

/// The preset of a name, or the machine in a file.
///
/// # Errors
/// An unknown machine, with the nearest name; a bad file.
pub fn machine(what: &str) -> anyhow::Result<Machine> {
    named::machine(what).map_err(bad_input)
}
