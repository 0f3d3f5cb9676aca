//! Questions about scenarios: how fast VMs would be with other homes, and which decisions are the best known.

use std::collections::BTreeMap;

use homenode_control::Config;
use homenode_reproduce::jobs::{self, Progress};
use homenode_search::best::{Best, best};
use homenode_search::outcome::{OfVm, Search};
use homenode_search::search::{EVALUATIONS_MIN, Effort};
use homenode_search::whatif::{WhatIfError, ask};
use homenode_twin::Setup;
use homenode_units::{NodeSet, Ns};
use pyo3::prelude::*;

use crate::errors::{bad_input, raised};
use crate::scenario::Scenario;
use crate::simulate::{Options, setup};
use crate::table::{Columns, Table, duration};
use crate::values;
use crate::wait::{Signals, apart};

/// Predicts how fast VMs would be. See `homenode.whatif`.
#[pyfunction]
#[pyo3(signature = (scenario, at, homes, options))]
pub(crate) fn whatif<'py>(
    py: Python<'py>,
    scenario: &Scenario,
    at: &str,
    homes: BTreeMap<String, Option<Vec<u16>>>,
    options: Options<'_>,
) -> PyResult<(Table, Bound<'py, PyAny>)> {
    let (setup, at) = (setup(scenario, &options)?, duration("at", at)?);
    let nodes = |nodes: Vec<u16>| nodes.into_iter().map(homenode_units::NodeId).collect::<NodeSet>();
    let mut wanted = homenode_api::Homes::new();
    for (vm, home) in homes {
        let home = home.map(nodes);
        if home.as_ref().is_some_and(NodeSet::is_empty) {
            return Err(bad_input(format!(
                "a home of VM {vm} has at least one node; None is no home"
            )));
        }
        wanted.insert(vm, home);
    }
    let mut signals = Signals::new();
    let progress = options.progress.map(Bound::unbind);
    let look = |now: Ns| -> anyhow::Result<()> {
        Ok(signals.look(|py| match &progress {
            Some(progress) => progress
                .call1(py, (&setup.scenario.name, now.as_secs_f64(), at.as_secs_f64()))
                .map(drop),
            None => Ok(()),
        })?)
    };
    let answer = py.detach(|| ask(&setup, at, &wanted, look));
    let answer = answer.map_err(|error| match error {
        WhatIfError::Input(_) | WhatIfError::Twin(_) => bad_input(error),
        WhatIfError::Refused(refused) if refused.is_about_input() => bad_input(refused),
        WhatIfError::Refused(refused) => raised(refused.into()),
        WhatIfError::Failed(error) => raised(error),
    })?;
    let vms = || answer.vms.iter();
    let home = |home: &Option<NodeSet>| home.as_ref().map(ToString::to_string);
    let table = Columns::default()
        .words("vm", "its name", vms().map(|vm| vm.name.clone()))
        .words(
            "home",
            "home nodes now, in list format; none if it is unplaced",
            vms().map(|vm| home(&vm.home)),
        )
        .words(
            "home_then",
            "home nodes that were asked about",
            vms().map(|vm| home(&vm.home_then)),
        )
        .numbers(
            "slow_down",
            "time that its work takes now, over that without an agent",
            vms().map(|vm| vm.slow_down),
        )
        .numbers(
            "slow_down_then",
            "the same with the homes that were asked about",
            vms().map(|vm| vm.slow_down_then),
        )
        .words(
            "why_unknown",
            "why nothing is predicted, where nothing is",
            vms().map(|vm| vm.why_unknown.clone()),
        )
        .words(
            "obstacle",
            "why it could not have that home",
            vms().map(|vm| vm.obstacle.clone()),
        )
        .table()?;
    Ok((table, values::document(py, "forecast", &answer)?))
}

/// Result of a search. See `homenode.search`.
#[pyclass(frozen, module = "homenode._native")]
pub struct Searched {
    setup: Setup,
    best: Best,
}

impl Searched {
    fn document(&self) -> Search<'_> {
        let built = (env!("CARGO_PKG_VERSION"), homenode_sweep::COMMIT);
        Search::of(&self.setup, &self.best, built)
    }
}

#[pymethods]
impl Searched {
    /// A row for each policy, and one for the best known.
    fn policies(&self) -> PyResult<Table> {
        let found = self.document();
        let rows = found
            .policies
            .iter()
            .map(|of| (of.policy, of.mean, of.worst, of.gap));
        let best = &found.best;
        let rows: Vec<_> = rows
            .chain([("best known", Some(best.mean), best.worst, Some(0.0))])
            .collect();
        Columns::default()
            .words(
                "policy",
                "policy that decided",
                rows.iter().map(|row| row.0.to_owned()),
            )
            .numbers(
                "mean",
                "mean over VMs of runtime over that under `default`",
                rows.iter().map(|row| row.1),
            )
            .numbers(
                "worst",
                "the same of the VM that fares worst",
                rows.iter().map(|row| row.2),
            )
            .numbers(
                "gap",
                "mean over the best known, less 1",
                rows.iter().map(|row| row.3),
            )
            .table()
    }

    /// A row for each VM under each policy, and under the best known.
    fn vms(&self) -> PyResult<Table> {
        let found = self.document();
        let of = |policy: &str, vms: &[OfVm]| -> Vec<(String, String, Option<f64>)> {
            let row = |vm: &OfVm| (policy.to_owned(), vm.name.clone(), vm.ratio);
            vms.iter().map(row).collect()
        };
        let policies = found.policies.iter().flat_map(|each| of(each.policy, &each.vms));
        let rows: Vec<_> = policies.chain(of("best known", &found.best.vms)).collect();
        Columns::default()
            .words(
                "policy",
                "policy that decided",
                rows.iter().map(|row| row.0.clone()),
            )
            .words("vm", "its name", rows.iter().map(|row| row.1.clone()))
            .numbers(
                "ratio",
                "its runtime over that under `default`",
                rows.iter().map(|row| row.2),
            )
            .table()
    }

    /// The result as a dictionary, as printed by `homenode search --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values::document(py, "search", &self.document())
    }
}

/// Searches for the best decisions. See `homenode.search`.
#[pyfunction]
#[pyo3(signature = (scenario, evaluations, jobs, options))]
pub(crate) fn search(
    py: Python<'_>,
    scenario: &Scenario,
    evaluations: usize,
    jobs: Option<usize>,
    options: Options<'_>,
) -> PyResult<Searched> {
    if evaluations < EVALUATIONS_MIN {
        return Err(bad_input(format!(
            "a search takes {EVALUATIONS_MIN} evaluations or more; 300 is usual"
        )));
    }
    let setup = setup(scenario, &options)?;
    let effort = Effort {
        evaluations,
        jobs: jobs.unwrap_or_else(jobs::available),
        seed: 1,
    };
    let of = Progress::silent().of(evaluations);
    let progress = options.progress.map(Bound::unbind);
    let found = apart(py, &setup.scenario.name, progress.as_ref(), &of, || {
        best(&setup, &Config::default(), (&[], &[]), &effort, &of)
    })?;
    let best = found.map_err(raised)?;
    Ok(Searched { setup, best })
}
