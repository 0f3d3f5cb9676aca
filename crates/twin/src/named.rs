//! Machines and scenarios as users name them: built-in ones by name, others by a file that ends with `.toml`.

use std::path::Path;

use homenode_machine::Machine;
use homenode_machine_files::file::{FileError, read_text_file};
use homenode_machine_files::{LoadError, preset_names};
use homenode_units::Candidates;

use crate::scenario::{Scenario, TwinError};
use crate::setup::Setup;
use crate::workload::{Workload, WorkloadError};

/// The machine of scenarios that do not name one.
pub const MACHINE: &str = "r910";

/// The reason why a named machine or scenario is not available.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum NameError {
    #[error("no scenario is named `{name}`, and file names end with `.toml`{valid}")]
    NoScenario { name: String, valid: Candidates },
    #[error("no scenario or machine is named `{name}`, and file names end with `.toml`{valid}")]
    NoSetup { name: String, valid: Candidates },
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Workload(#[from] WorkloadError),
    #[error(transparent)]
    Machine(#[from] LoadError),
    #[error(transparent)]
    Scenario(#[from] TwinError),
}

/// Whether a name is the name of a file.
pub fn is_file(name: &str) -> bool {
    name.ends_with(".toml") || name.contains('/')
}

/// Whether a file describes a workload, judging by its first table.
pub fn is_workload(text: &str) -> bool {
    text.lines()
        .find_map(|line| line.trim().strip_prefix('['))
        .is_some_and(|table| table.starts_with("program]"))
}

/// Reads the workload in a file.
///
/// # Errors
/// If the file is bad, with the place in it.
pub fn workload(path: &str) -> Result<Workload, WorkloadError> {
    Workload::from_toml(path, &read_text_file(path)?)
}

/// Reads the workload file that a scenario at `path` names, relative to that scenario. Returns `None` if `named` is not a file
/// name.
pub fn workload_beside(path: &str, named: &str) -> Option<Result<Workload, WorkloadError>> {
    let path = Path::new(path).with_file_name(named).display().to_string();
    is_file(named).then(|| workload(&path))
}

/// Returns a scenario by name or from a file. For a workload file, returns a scenario with one VM that runs the workload.
///
/// # Errors
/// If a file is bad, with the place in it. If a name is unknown, with the nearest known name.
pub fn scenario(what: &str) -> Result<Scenario, NameError> {
    if is_file(what) {
        let text = read_text_file(what)?;
        if is_workload(&text) {
            return Ok(Scenario::alone(workload(what)?));
        }
        let beside = |named: &str| workload_beside(what, named);
        return Ok(Scenario::from_toml_with(what, &text, &beside)?);
    }
    Scenario::builtin(what).ok_or_else(|| unknown(what))
}

/// Returns the path and the text of a scenario, given its name or file.
///
/// # Errors
/// If a file cannot be read. If a name is unknown, with the nearest known name.
pub fn scenario_text(what: &str) -> Result<(String, String), NameError> {
    if is_file(what) {
        return Ok((what.to_owned(), read_text_file(what)?));
    }
    let text = Scenario::builtin_text(what).ok_or_else(|| unknown(what))?;
    Ok((format!("data/scenarios/{what}.toml"), text.to_owned()))
}

fn unknown(what: &str) -> NameError {
    NameError::NoScenario {
        name: what.to_owned(),
        valid: Candidates::of(what, Scenario::names()),
    }
}

/// Returns what a name or a file describes: a scenario, or a machine with VMs that suit it. Without a name, returns the usual
/// scenario on [`MACHINE`].
///
/// # Errors
/// If a machine is unknown, with the nearest known name. If a file is bad.
pub fn setup(what: Option<&str>, seed: Option<u64>) -> Result<Setup, NameError> {
    let (machine, scenario) = match what {
        None | Some(MACHINE) => (machine(MACHINE)?, Scenario::tavo_mixed()),
        Some(what) if is_scenario(what)? => {
            let scenario = scenario(what)?;
            (machine_for(&scenario, what, None)?, scenario)
        }
        Some(name) => {
            let machine = machine(name).map_err(|error| match error {
                NameError::Machine(LoadError::UnknownPreset { .. }) => NameError::NoSetup {
                    name: name.to_owned(),
                    valid: Candidates::of(name, Scenario::names().chain(preset_names())),
                },
                error => error,
            })?;
            let scenario = Scenario::mixed_for(&machine, seed.unwrap_or(1));
            (machine, scenario)
        }
    };
    let seed = seed.unwrap_or(scenario.seed);
    Ok(Setup::new(machine, scenario, seed))
}

/// Whether this is a file that does not describe a machine, or the name of a built-in scenario.
fn is_scenario(what: &str) -> Result<bool, NameError> {
    if is_file(what) {
        return Ok(!is_machine(&read_text_file(what)?));
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

/// Returns the requested machine, else the scenario's own: a preset, or a file next to the scenario's.
///
/// # Errors
/// If the machine is unknown or bad.
pub fn machine_for(scenario: &Scenario, path: &str, asked: Option<&str>) -> Result<Machine, NameError> {
    match (asked, scenario.machine.as_deref()) {
        (Some(asked), _) => machine(asked),
        (None, Some(own)) => {
            let beside = Path::new(path).with_file_name(own).display().to_string();
            let own = if is_file(own) { &beside } else { own };
            machine(own).map_err(|error| scenario.complaint("machine", error.to_string()).into())
        }
        (None, None) => machine(MACHINE),
    }
}

/// Returns the preset with this name, or the machine that a file describes.
///
/// # Errors
/// If the machine is unknown, with the nearest known name. If a file is bad.
pub fn machine(what: &str) -> Result<Machine, NameError> {
    Ok(if is_file(what) {
        homenode_machine_files::from_toml_file(what)?
    } else {
        homenode_machine_files::preset(what)?
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_by_a_scenario_or_a_machine_and_a_slip_by_the_nearest_of_both() {
        assert_eq!(
            setup(Some("overcommit"), None).unwrap().scenario.name,
            "overcommit"
        );
        assert_eq!(setup(Some("r420"), None).unwrap().machine.name, "r420");
        for (slip, nearest) in [
            ("overcomit", "overcommit"),
            ("r402", "r420"),
            ("tavo_mixd", "tavo-mixed"),
        ] {
            let said = setup(Some(slip), None).unwrap_err().to_string();
            assert!(said.contains(&format!("did you mean `{nearest}`?")), "{said}");
        }
        let said = setup(Some("zzzzzz"), None).unwrap_err().to_string();
        assert!(said.contains("`permits`") && said.contains("`r910`"), "{said}");
    }
}
