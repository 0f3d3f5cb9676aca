//! The agent on the twin.

use std::sync::{Arc, Mutex};

use anyhow::Context;
use homenode_control::{Config, Control, Mode};
use homenode_machine::Machine;
use homenode_twin::{Scenario, Twin};

use crate::agent::{Agent, Pace, Stop};
use crate::args::RunArgs;
use crate::bad_input;
use crate::desk::Desk;
use crate::output::Output;

/// The twin's machine where none is named.
const TWIN_MACHINE: &str = "r910";
/// What a twin simulates.
pub struct TwinSpec {
    /// The machine.
    pub machine: Machine,
    /// Its VMs.
    pub scenario: Scenario,
    /// The seed.
    pub seed: u64,
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

/// Reads `twin`, `twin:MACHINE` or `twin:FILE.toml`, a scenario or a machine.
///
/// # Errors
/// An unknown machine (with the nearest name), a bad file.
pub fn spec(what: Option<&str>, seed: Option<u64>) -> anyhow::Result<TwinSpec> {
    let preset = |name: &str| homenode_machine::preset(name).map_err(bad_input);
    let is_file = |name: &&str| name.ends_with(".toml") || name.contains('/');
    let (machine, scenario) = match what {
        None => (preset(TWIN_MACHINE)?, Scenario::tavo_mixed()),
        Some(path) if is_file(&path) => {
            let text = homenode_machine::file::read_text_file(path).map_err(bad_input)?;
            if is_machine(&text) {
                let machine = Machine::from_toml(path, &text).map_err(bad_input)?;
                let scenario = Scenario::mixed_for(&machine, seed.unwrap_or(1));
                return Ok(TwinSpec {
                    machine,
                    seed: seed.unwrap_or(scenario.seed),
                    scenario,
                });
            }
            let scenario = Scenario::from_toml(path, &text).map_err(bad_input)?;
            (
                preset(scenario.machine.as_deref().unwrap_or(TWIN_MACHINE))?,
                scenario,
            )
        }
        Some(TWIN_MACHINE) => (preset(TWIN_MACHINE)?, Scenario::tavo_mixed()),
        Some(name) => {
            let machine = preset(name)?;
            let scenario = Scenario::mixed_for(&machine, seed.unwrap_or(1));
            (machine, scenario)
        }
    };
    let seed = seed.unwrap_or(scenario.seed);
    Ok(TwinSpec {
        machine,
        scenario,
        seed,
    })
}

impl TwinSpec {
    /// The simulated host at its beginning.
    ///
    /// # Errors
    /// A scenario that the machine cannot run.
    pub fn start(&self) -> anyhow::Result<Twin> {
        Twin::new(self.machine.clone(), &self.scenario, self.seed).map_err(bad_input)
    }
}

/// Runs the agent on the twin: until it is stopped, its time is up, or every program has ended.
///
/// # Errors
/// A scenario that the machine cannot run; a state directory that cannot hold the agent's socket.
pub fn run(
    args: &RunArgs,
    config: &Config,
    spec: &TwinSpec,
    output: &mut Output,
    stop: &Stop,
) -> anyhow::Result<()> {
    let mut twin = spec.start().context("the twin cannot start")?;
    let mode = if args.dry_run { Mode::DryRun } else { Mode::Act };
    let control = Arc::new(Mutex::new(Control::new(config.clone(), mode)));
    // Only where asked for: a VM that really starts must not be answered from a simulation by accident.
    let machine = Arc::new(spec.machine.clone());
    let desk = args
        .state
        .as_deref()
        .map(|state| Desk::open(state, machine, Arc::clone(&control)))
        .transpose()?;
    let mut agent = Agent {
        control,
        output,
        stop,
        duration: args.duration,
        period: config.period,
        pace: if args.fast { Pace::Own } else { Pace::Watched },
    };
    let name = format!(
        "the twin of {} with scenario {}",
        spec.machine.name, spec.scenario.name
    );
    agent.announce(name, Some(spec.seed), mode);
    agent.run(&mut twin, |_| Vec::new(), Twin::finished);
    drop(desk);
    Ok(())
}
