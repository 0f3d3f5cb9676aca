//! Makes independent runs, each of them once.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Result, anyhow, bail};

use crate::cache::{Cache, Found};
use crate::jobs::{CutShort, Progress, each};
use crate::run::{Outcome, Run};
use crate::vary::{Change, End};

/// Outcomes of runs.
#[derive(Clone, Debug, Default)]
pub struct Outcomes {
    made: Arc<BTreeMap<String, Result<Outcome, String>>>,
    /// Changes that are applied to every run whose outcome is requested.
    changes: Vec<Change>,
    /// Factors for values of an experiment's file, by name.
    factors: BTreeMap<String, f64>,
}

impl Outcomes {
    /// Returns these outcomes under one change: experiments that use them see the changed outcomes as if they were the usual
    /// ones. If the change is of an input of runs, the changed runs must have been made, too.
    pub fn at(&self, end: &End) -> Outcomes {
        let mut outcomes = self.clone();
        match end {
            End::Run(change) => outcomes.changes = vec![*change],
            End::Value(name, factor) => outcomes.factors = [(name.clone(), *factor)].into(),
        }
        outcomes
    }

    /// Returns the factor by which the value with this name changes, if any.
    pub fn factor(&self, name: &str) -> Option<f64> {
        self.factors.get(name).copied()
    }

    /// Returns the outcome of a run.
    ///
    /// # Errors
    /// Why it could not be made.
    pub fn of(&self, run: &Run) -> Result<&Outcome> {
        match self.made.get(&changed(run, &self.changes).description()) {
            Some(outcome) => outcome.as_ref().map_err(|said| anyhow!("{said}")),
            None => bail!("scenario {} was not run", run.scenario.name),
        }
    }
}

/// Returns these runs, and each of them again at each of these ends. An end that changes a value of an experiment's file changes
/// no run.
pub(crate) fn with_ends(runs: Vec<Run>, ends: impl Iterator<Item = End>) -> Vec<Run> {
    let at = |end| match end {
        End::Run(change) => runs.iter().map(|run| changed(run, &[change])).collect(),
        End::Value(..) => Vec::new(),
    };
    let others: Vec<Run> = ends.flat_map(at).collect();
    [runs, others].concat()
}

/// Returns the run with further inputs changed.
fn changed(run: &Run, changes: &[Change]) -> Run {
    let mut run = run.clone();
    run.changes.extend(changes);
    run
}

/// Makes every run once, on `jobs` threads. Outcomes depend neither on the number of threads nor on which runs were cached.
pub(crate) fn execute(runs: Vec<Run>, jobs: usize, cache: Option<&Cache>, progress: &Progress) -> Outcomes {
    let runs: BTreeMap<String, Run> = runs.into_iter().map(|run| (run.description(), run)).collect();
    let list: Vec<&Run> = runs.values().collect();
    // A run that fails does not end the others.
    let made = each(jobs, &list, progress, |run| {
        Ok::<_, CutShort>(make(run, cache, progress).map_err(|error| error.to_string()))
    });
    let made = made.unwrap_or_else(|cut| vec![Err(cut.to_string()); list.len()]);
    Outcomes {
        made: Arc::new(runs.keys().cloned().zip(made).collect()),
        changes: Vec::new(),
        factors: BTreeMap::new(),
    }
}

fn make(run: &Run, cache: Option<&Cache>, progress: &Progress) -> Result<Outcome> {
    let Some(cache) = cache else { return run.execute() };
    let description = run.description();
    match cache.find(&description) {
        Found::Run(outcome) => return Ok(*outcome),
        Found::Nothing => {}
        Found::Unusable(note) => progress.note(&note),
    }
    let outcome = run.execute()?;
    if let Err(error) = cache.keep(&description, &outcome) {
        progress.note(&format!("cannot keep a finished run: {error}"));
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use homenode_control::PolicySet;
    use homenode_twin::{Scenario, VmSpec};
    use homenode_units::Bytes;

    use super::*;

    fn runs() -> Vec<Run> {
        let run = |seed: u64, policies| {
            let vm = |name: &str| VmSpec::new(name, 4, Bytes::from_gib(2), "cg.B").doing(0.02);
            Run::to_end(
                "r910",
                Scenario::of("two", vec![vm("a"), vm("b")]),
                policies,
                seed,
            )
        };
        let seeds = 1..4;
        seeds
            .flat_map(|seed| [run(seed, PolicySet::Default), run(seed, PolicySet::Tavo)])
            .collect()
    }

    #[test]
    fn outcomes_do_not_depend_on_threads_or_cache() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path(), b"program").unwrap();
        let notes = Progress::silent();
        let one = execute(runs(), 1, None, &notes);
        // Half of the runs are cached first.
        execute(runs().into_iter().step_by(2).collect(), 2, Some(&cache), &notes);
        let many = execute(runs(), 5, Some(&cache), &notes);
        let again = execute(runs(), 2, Some(&cache), &notes);
        for run in runs() {
            let outcome = one.of(&run).unwrap();
            assert!(outcome.vms.iter().all(|vm| vm.runtime_s.is_some()));
            assert_eq!(outcome, many.of(&run).unwrap());
            assert_eq!(outcome, again.of(&run).unwrap());
        }
        assert_eq!(notes.done(), (6 + 3 + 6 + 6, 6 + 3 + 6 + 6));
        assert_eq!(notes.notes(), [""; 0]);
    }

    #[test]
    fn outcomes_under_a_change_are_those_of_the_changed_runs() {
        use crate::vary::Input;
        let (input, factor) = (Input::LlcAccesses, 4.0);
        let slower = End::Run(Change { input, factor });
        let base = runs().remove(0);
        let both = with_ends(vec![base.clone()], [slower.clone()].into_iter());
        let outcomes = execute(both, 1, None, &Progress::silent());
        let runtime = |outcomes: &Outcomes| outcomes.of(&base).unwrap().vms[0].runtime_s.unwrap();
        assert!(runtime(&outcomes.at(&slower)) > 1.1 * runtime(&outcomes));
    }

    #[test]
    fn a_run_that_cannot_be_made_says_why() {
        let vm = VmSpec::new("a", 1, Bytes::from_gib(1), "povrey");
        let run = Run::to_end("r910", Scenario::of("one", vec![vm]), PolicySet::Default, 1);
        let outcomes = execute(vec![run.clone()], 1, None, &Progress::silent());
        assert!(
            outcomes
                .of(&run)
                .unwrap_err()
                .to_string()
                .contains("did you mean `povray`?")
        );
        assert!(
            Outcomes::default()
                .of(&run)
                .unwrap_err()
                .to_string()
                .contains("was not run")
        );
    }
}
