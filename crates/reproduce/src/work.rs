//! Makes independent runs on plain threads.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use anyhow::{Result, anyhow, bail};

use crate::cache::{Cache, Found};
use crate::run::{Outcome, Run};
use crate::vary::{Change, End};

/// Outcomes by run.
#[derive(Clone, Debug, Default)]
pub struct Outcomes {
    made: Arc<BTreeMap<String, Result<Outcome, String>>>,
    /// Changes applied to every requested run.
    changes: Vec<Change>,
    /// Factors for values of an experiment's file, by name.
    factors: BTreeMap<String, f64>,
}

impl Outcomes {
    /// Returns the outcomes under one change of an input of runs, whose changed runs must have been made, too, or of a value of
    /// the file: experiments then decide by them unawares.
    pub fn at(&self, end: &End) -> Outcomes {
        let mut outcomes = self.clone();
        match end {
            End::Run(change) => outcomes.changes = vec![*change],
            End::Value(name, factor) => outcomes.factors = [(name.clone(), *factor)].into(),
        }
        outcomes
    }

    /// Returns the factor of the value of this name.
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

/// Adds to runs the same runs at each of these ends; values of an experiment's file change no run.
pub fn with_ends(runs: Vec<Run>, ends: impl Iterator<Item = End>) -> Vec<Run> {
    let at = |end| match end {
        End::Run(change) => runs.iter().map(|run| changed(run, &[change])).collect(),
        End::Value(..) => Vec::new(),
    };
    let others: Vec<Run> = ends.flat_map(at).collect();
    [runs, others].concat()
}

/// Returns the run with more of its inputs changed.
fn changed(run: &Run, changes: &[Change]) -> Run {
    let mut run = run.clone();
    run.changes.extend(changes);
    run
}

/// Receives progress while runs are made.
pub trait Watch: Sync {
    /// Reports that `done` of `all` runs are finished.
    fn progress(&self, done: usize, all: usize);
    /// Reports something odd, in a sentence.
    fn note(&self, text: &str);
    /// Whether the work is cancelled: runs that have not begun then fail.
    fn is_over(&self) -> bool {
        false
    }
}

/// Makes every run once, on `jobs` threads. Outcomes do not depend on the number of threads, nor on which runs were cached.
pub fn execute(runs: Vec<Run>, jobs: usize, cache: Option<&Cache>, watch: &dyn Watch) -> Outcomes {
    let runs: BTreeMap<String, Run> = runs.into_iter().map(|run| (run.description(), run)).collect();
    let list: Vec<&Run> = runs.values().collect();
    let done = AtomicUsize::new(0);
    let made = each(jobs, &list, |run| {
        if watch.is_over() {
            return Err("cut short".to_owned());
        }
        let outcome = make(run, cache, watch).map_err(|error| error.to_string());
        watch.progress(done.fetch_add(1, Ordering::Relaxed) + 1, list.len());
        outcome
    });
    Outcomes {
        made: Arc::new(runs.keys().cloned().zip(made).collect()),
        changes: Vec::new(),
        factors: BTreeMap::new(),
    }
}

/// Processes each item on up to `jobs` threads, and returns the results in the items' order.
pub fn each<T: Sync, R: Send>(jobs: usize, items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = AtomicUsize::new(0);
    let results: Vec<Mutex<Option<R>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let worker = || {
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some(item), Some(place)) = (items.get(at), results.get(at)) else {
                return;
            };
            let result = work(item);
            *place.lock().expect("nothing panics while it holds this") = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..jobs.clamp(1, items.len().max(1)) {
            scope.spawn(worker);
        }
        worker();
    });
    let done = results.into_iter().map(|place| place.into_inner().ok().flatten());
    done.map(|result| result.expect("every item was worked on"))
        .collect()
}

fn make(run: &Run, cache: Option<&Cache>, watch: &dyn Watch) -> Result<Outcome> {
    let Some(cache) = cache else { return run.execute() };
    let description = run.description();
    match cache.find(&description) {
        Found::Run(outcome) => return Ok(*outcome),
        Found::Nothing => {}
        Found::Unusable(note) => watch.note(&note),
    }
    let outcome = run.execute()?;
    if let Err(error) = cache.keep(&description, &outcome) {
        watch.note(&format!("a finished run cannot be kept: {error}"));
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use homenode_control::PolicySet;
    use homenode_twin::{Scenario, VmSpec};
    use homenode_units::Bytes;

    use super::*;

    #[derive(Default)]
    struct Notes(Mutex<Vec<String>>, AtomicUsize);

    impl Watch for Notes {
        fn progress(&self, done: usize, all: usize) {
            assert!(done <= all);
            self.1.fetch_max(done, Ordering::Relaxed);
        }
        fn note(&self, text: &str) {
            self.0.lock().unwrap().push(text.to_owned());
        }
    }

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
        let notes = Notes::default();
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
        assert_eq!(notes.1.into_inner(), 6);
        assert_eq!(notes.0.into_inner().unwrap(), [""; 0]);
    }

    #[test]
    fn outcomes_under_a_change_are_those_of_the_changed_runs() {
        use crate::vary::Input;
        let (input, factor) = (Input::LlcAccesses, 4.0);
        let slower = End::Run(Change { input, factor });
        let base = runs().remove(0);
        let both = with_ends(vec![base.clone()], [slower.clone()].into_iter());
        let outcomes = execute(both, 1, None, &Notes::default());
        let runtime = |outcomes: &Outcomes| outcomes.of(&base).unwrap().vms[0].runtime_s.unwrap();
        assert!(runtime(&outcomes.at(&slower)) > 1.1 * runtime(&outcomes));
    }

    #[test]
    fn a_run_that_cannot_be_made_says_why() {
        let vm = VmSpec::new("a", 1, Bytes::from_gib(1), "povrey");
        let run = Run::to_end("r910", Scenario::of("one", vec![vm]), PolicySet::Default, 1);
        let outcomes = execute(vec![run.clone()], 1, None, &Notes::default());
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
