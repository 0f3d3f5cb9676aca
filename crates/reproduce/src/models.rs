//! Code for the experiments in files: models of single accesses, code whose time is measured, and series within a run.
//!
//! A model provides arrays with names. The file defines what they mean for a claim, and how they are presented.

mod agent_time;
mod drift;
mod list_walk;
mod page_logs;
mod permits_time;
mod side_by_side;
mod ticks;
mod written_pages;

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};

use crate::design::array::{Array, Axis, Named};
use crate::run::Outcome;

/// An additional measure of a run.
pub(crate) type OfRun = fn(&Outcome) -> Result<Named>;

/// Evaluates an expression of the experiment.
pub(crate) type Values<'a> = &'a dyn Fn(&str) -> Result<Array>;

/// A model: its name in files, the names of its arrays, and its code, which may evaluate expressions of the experiment.
pub(crate) type Model = (
    &'static str,
    &'static [&'static str],
    fn(Values<'_>) -> Result<Named>,
);

/// All models.
pub(crate) const MODELS: &[Model] = &[
    ("agent-time", &["deciding_s", "reading_s"], agent_time::agent),
    ("list-walk", &["by_access"], list_walk::by_access),
    (
        "permits-time",
        &["period_ns", "state_bytes"],
        permits_time::permits,
    ),
    ("harm", &["harm"], side_by_side::harm),
    ("beside-three", &["beside_three"], side_by_side::beside_three),
    ("written-pages", &["written_pages"], written_pages::written_pages),
    (
        "parsec",
        &["used_mb", "written_mb", "percent", "accurate", "rest"],
        page_logs::parsec::parsec,
    ),
    (
        "prl-accuracy",
        &[
            "prl_mb",
            "hot_mb",
            "pml_mb",
            "tables_mb",
            "poll_mb",
            "past_mb",
            "error_mb",
            "ended",
            "all_mb",
        ],
        page_logs::array::accuracy,
    ),
    (
        "hpl",
        &["hot_mb", "prl_mb", "ended", "pml_mb", "used_mb"],
        page_logs::hpl::working_set,
    ),
    (
        "pml-limits",
        &["pml_mb", "written_mb", "cold_mb", "hot_mb", "all_mb"],
        page_logs::limits::limits,
    ),
    (
        "prl-missed",
        &["full", "logged", "lost"],
        page_logs::losses::missed,
    ),
    ("prl-costs", &["slowdown", "estimator"], page_logs::losses::costs),
    (
        "restore",
        &["loaded_mb", "start", "useful", "worked", "fetched"],
        page_logs::restore::restore,
    ),
    ("shared-cache", &["ways", "lost"], page_logs::shared_cache::shared),
];

/// All additional measures of runs: their names, the names of their arrays, and their code.
pub(crate) const OF_RUNS: &[(&str, &[&str], OfRun)] = &[
    (
        "drift",
        &["minute", "remote_pages", "half_pages", "start_pages"],
        drift::drift,
    ),
    ("moments", &["balance", "processor"], ticks::by_moment),
    ("ticks", &["ticks"], ticks::by_tick),
];

/// Returns the CPU time of this thread in seconds.
fn cpu_s() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 + now.tv_nsec as f64 / 1e9
}

/// Returns arrays with their names.
fn named<const N: usize>(arrays: [(&str, Array); N]) -> Named {
    arrays.map(|(name, array)| (name.to_owned(), array)).into()
}

/// Returns an axis of consecutive numbers.
fn numbered(name: &str, numbers: std::ops::RangeInclusive<usize>) -> Axis {
    Axis::new(name, numbers.map(|number| number.to_string()))
}
