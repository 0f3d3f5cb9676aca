//! What is simulated: machines and scenarios as users name them.

use std::path::Path;

use homenode_machine::Machine;
use homenode_twin::Setup;
use homenode_twin::{Scenario, Workload};
use homenode_units::Candidates;

use crate::bad_input;

/// The twin's machine where none is named.
pub const TWIN_MACHINE: &str = "r910";

/// Reads `twin`, `twin:MACHINE` or `twin:FILE.toml`, a scenario or a machine.
///
/// # Errors
/// An unknown machine (with the nearest name), a bad file.
pub fn spec(what: Option<&str>, seed: Option<u64>) -> anyhow::Result<Setup> {
    let (machine, scenario) = match what {
        None | Some(TWIN_MACHINE) => (machine(TWIN_MACHINE)?, Scenario::tavo_mixed()),
        Some(path) if is_file(path) && !is_machine(&read(path)?) => {
            let scenario = scenario(path)?;
            (machine_for(&scenario, path, None)?, scenario)
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

fn read(path: &str) -> anyhow::Result<String> {
    homenode_machine_files::file::read_text_file(path).map_err(bad_input)
}

/// Whether a file describes a machine, by its tables; if not it is a scenario.
fn is_machine(text: &str) -> bool {
    let begins = |line: &str| {
        ["[shape]", "[[node]]", "[hardware]"]
            .iter()
            .any(|table| line.trim().starts_with(table))
    };
    text.lines().any(begins)
}

fn is_file(name: &str) -> bool {
    name.ends_with(".toml") || name.contains('/')
}

/// Whether a file describes a workload, by its first table.
fn is_workload(text: &str) -> bool {
    text.lines()
        .find_map(|line| line.trim().strip_prefix('['))
        .is_some_and(|table| table.starts_with("program]"))
}

fn workload(path: &str) -> anyhow::Result<Workload> {
    Workload::from_toml(path, &read(path)?).map_err(bad_input)
}

/// The scenario in a file, or of a name; of a workload's file one VM that runs it.
///
/// # Errors
/// A bad file, with the place in it; an unknown name, with the nearest.
pub fn scenario(what: &str) -> anyhow::Result<Scenario> {
    if is_file(what) {
        let text = read(what)?;
        if is_workload(&text) {
            return Ok(Scenario::alone(workload(what)?));
        }
        // A VM's workload may be a file, which lies beside the scenario's.
        let beside = |named: &str| {
            let path = Path::new(what).with_file_name(named).display().to_string();
            is_file(named).then(|| workload(&path).map_err(|error| error.to_string()))
        };
        return Scenario::from_toml_with(what, &text, &beside).map_err(bad_input);
    }
    Scenario::builtin(what).ok_or_else(|| {
        let valid = Candidates::of(what, Scenario::names());
        bad_input(format!(
            "no scenario is named `{what}`, nor is that a file's name, which ends with `.toml`{valid}"
        ))
    })
}

/// The machine asked for, else the scenario's own: a preset, or a file, which lies beside the scenario's.
///
/// # Errors
/// An unknown or bad machine.
pub fn machine_for(scenario: &Scenario, path: &str, asked: Option<&str>) -> anyhow::Result<Machine> {
    match (asked, scenario.machine.as_deref()) {
        (Some(asked), _) => machine(asked),
        (None, Some(own)) => {
            let beside = Path::new(path).with_file_name(own).display().to_string();
            let own = if is_file(own) { &beside } else { own };
            machine(own).map_err(|error| bad_input(scenario.complaint("machine", error.to_string())))
        }
        (None, None) => machine(TWIN_MACHINE),
    }
}

/// The preset of a name, or the machine in a file.
///
/// # Errors
/// An unknown machine, with the nearest name; a bad file.
pub fn machine(what: &str) -> anyhow::Result<Machine> {
    if is_file(what) {
        homenode_machine_files::from_toml_file(what).map_err(bad_input)
    } else {
        homenode_machine_files::preset(what).map_err(bad_input)
    }
}
