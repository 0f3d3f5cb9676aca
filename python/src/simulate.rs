//! Runs of a scenario.

use std::path::Path;

use homenode_control::{Config, Control, Cycle, Mode, PolicySet};
use homenode_reproduce::engine::{self, Run};
use homenode_search::contender::Contender;
use homenode_search::settings;
use homenode_search::trial::{Trial, contenders};
use homenode_twin::{EPOCH_DEFAULT, Setup, named};
use homenode_units::Ns;
use pyo3::prelude::*;
use pyo3::types::PyString;

use crate::errors::{bad_input, raised_by_policy};
use crate::machine::Machine;
use crate::one::{One, OverTime};
use crate::policy::{PyPolicy, Raised};
use crate::report::Simulated;
use crate::scenario::Scenario;
use crate::table::duration;
use crate::wait::Signals;

/// The policies that decide in a run.
enum Who {
    /// Built-in policies, or a program.
    Contender(Contender),
    /// A Python object.
    Python(Py<PyAny>),
}

/// Options of a simulation, besides the scenario.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Options<'py> {
    machine: Option<Machine>,
    seed: Option<u64>,
    epoch: Option<String>,
    disturb: Option<String>,
    numa_balancing: Option<bool>,
    /// Path and text of a settings file.
    config: Option<(String, String)>,
    every: Option<String>,
    /// A function that is called with the policies' name, the simulated seconds so far, and the maximum duration.
    pub progress: Option<Bound<'py, PyAny>>,
}

/// Combines the scenario with the machine, seed and resolution from the options.
pub(crate) fn setup(scenario: &Scenario, options: &Options<'_>) -> PyResult<Setup> {
    let mut inner = scenario.inner.clone();
    if let Some(names) = &options.disturb {
        inner = inner.disturbed(names.parse().map_err(bad_input)?);
    }
    if let Some(is_on) = options.numa_balancing {
        inner = inner.with_numa_balancing(is_on);
    }
    let machine = match &options.machine {
        Some(machine) => machine.inner.clone(),
        None => named::machine_for(&inner, &scenario.path, None).map_err(bad_input)?,
    };
    let epoch = options
        .epoch
        .as_deref()
        .map(|text| duration("epoch", text))
        .transpose()?;
    Ok(Setup {
        machine,
        seed: options.seed.unwrap_or(inner.seed),
        epoch: epoch.unwrap_or(EPOCH_DEFAULT),
        scenario: inner,
    })
}

fn who(policies: Option<Vec<Bound<'_, PyAny>>>, setup: &Setup) -> PyResult<Vec<Who>> {
    let Some(policies) = policies else {
        let named = contenders(&setup.scenario).map_err(bad_input)?;
        return Ok(named.into_iter().map(Who::Contender).collect());
    };
    let of = |policy: Bound<'_, PyAny>| match policy.cast::<PyString>() {
        Ok(name) => name.to_str()?.parse().map(Who::Contender).map_err(bad_input),
        Err(_) => Ok(Who::Python(policy.unbind())),
    };
    policies.into_iter().map(of).collect()
}

/// Runs a scenario under each of the policies. See `homenode.simulate`.
#[pyfunction]
#[pyo3(signature = (scenario, policies, options))]
pub(crate) fn simulate(
    py: Python<'_>,
    scenario: &Scenario,
    policies: Option<Vec<Bound<'_, PyAny>>>,
    options: Options<'_>,
) -> PyResult<Simulated> {
    let setup = setup(scenario, &options)?;
    let config = match &options.config {
        Some((path, text)) => {
            settings::from_toml(Path::new(path), text, &setup.machine).map_err(bad_input)?
        }
        None => Config::default(),
    };
    let who = who(policies, &setup)?;
    let every = options
        .every
        .as_deref()
        .map(|text| duration("every", text))
        .transpose()?;
    let progress = options.progress.map(Bound::unbind);
    let mut runs: Vec<One> = Vec::new();
    for who in &who {
        let first = runs.first().map(|first| &first.trial.report);
        let watched = Watched::new(&setup, progress.as_ref(), every);
        let (run, watched) = watched.run(py, who, &config)?;
        runs.push(One {
            trial: Trial::of(run, first),
            said: watched.said,
            over_time: watched.over_time.map(|over| over.moments),
        });
    }
    Ok(Simulated { setup, config, runs })
}

/// A run in progress.
struct Watched<'a> {
    setup: &'a Setup,
    progress: Option<&'a Py<PyAny>>,
    said: Vec<(f64, homenode_control::Event)>,
    over_time: Option<OverTime>,
}

impl<'a> Watched<'a> {
    fn new(setup: &'a Setup, progress: Option<&'a Py<PyAny>>, every: Option<Ns>) -> Watched<'a> {
        Watched {
            setup,
            progress,
            said: Vec::new(),
            over_time: every.map(OverTime::new),
        }
    }

    fn watch(&mut self, cycle: &Cycle, control: &Control) {
        let at_s = cycle.status.at_ns.as_secs_f64();
        self.said
            .extend(cycle.events.iter().map(|event| (at_s, event.clone())));
        if let Some(over_time) = &mut self.over_time {
            over_time.take(&self.setup.machine, cycle, control);
        }
    }

    /// Simulates the scenario under these policies, without holding the interpreter's lock.
    fn run(mut self, py: Python<'_>, who: &Who, config: &Config) -> PyResult<(Run, Watched<'a>)> {
        let (setup, progress) = (self.setup, self.progress);
        let raised = Raised::default();
        let planner = match who {
            Who::Contender(_) => None,
            Who::Python(policy) => Some(PyPolicy::new(policy.bind(py), raised.clone())?),
        };
        let name = match (who, &planner) {
            (Who::Contender(contender), _) => contender.name().to_owned(),
            (Who::Python(policy), _) => PyPolicy::name_of(policy.bind(py))?,
        };
        let mut signals = Signals::new();
        let mut look = |at_s: f64| -> anyhow::Result<()> {
            let most_s = setup.scenario.duration.as_secs_f64();
            let told = |py: Python<'_>| match progress {
                Some(progress) => progress.call1(py, (&name, at_s, most_s)).map(drop),
                None => Ok(()),
            };
            Ok(signals.look(told)?)
        };
        let ran = py.detach(|| {
            let watch = |cycle: &Cycle, control: &Control| {
                self.watch(cycle, control);
                look(cycle.status.at_ns.as_secs_f64())
            };
            match (who, planner) {
                (Who::Contender(contender), _) => contender.run(setup, config, watch),
                (Who::Python(_), Some(planner)) => {
                    let config = Config {
                        policies: PolicySet::Default,
                        ..config.clone()
                    };
                    let control = Control::new(config, Mode::Act).with_planner(Box::new(planner));
                    engine::run(setup, &name, control, watch)
                }
                (Who::Python(_), None) => unreachable!("a planner was made of it"),
            }
        });
        let cause = raised
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .take();
        let run = ran.map_err(|error| raised_by_policy(error, cause, py))?;
        Ok((run, self))
    }
}
