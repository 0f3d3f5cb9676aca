//! What experiments in files take from code: models of single accesses, code whose time is measured, and series of a run.
//!
//! A model gives arrays by name; what they mean for a claim, and how they are shown, stands in the file.

mod agent_time;
mod drift;
mod list_walk;
mod page_logs;
mod permits_time;
mod side_by_side;
mod ticks;
mod written_pages;

use crate::design::array::{Array, Named};
use crate::run::Outcome;

/// What else is counted of a run.
pub type OfRun = fn(&Outcome) -> Result<Named, String>;

/// Gives the value of an expression of the experiment.
pub type Values<'a> = &'a dyn Fn(&str) -> Result<Array, String>;

/// Code behind an experiment.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Its name in files.
    pub name: &'static str,
    /// What it gives.
    gives: &'static [&'static str],
    run: fn(Values<'_>) -> Result<Named, String>,
}

impl Model {
    /// Names of what it gives.
    pub fn names(&self) -> Vec<String> {
        self.gives.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Runs it; a function gives the values of the experiment's expressions.
    ///
    /// # Errors
    /// What it lacks, in a sentence.
    pub fn run(&self, value: Values<'_>) -> Result<Named, String> {
        (self.run)(value)
    }
}

/// All models.
pub const MODELS: &[Model] = &[
    Model {
        name: "agent-time",
        gives: &["deciding_s", "reading_s"],
        run: agent_time::agent,
    },
    Model {
        name: "list-walk",
        gives: &["by_access"],
        run: list_walk::by_access,
    },
    Model {
        name: "permits-time",
        gives: &["period_ns", "state_bytes"],
        run: permits_time::permits,
    },
    Model {
        name: "harm",
        gives: &["harm"],
        run: side_by_side::harm,
    },
    Model {
        name: "beside-three",
        gives: &["beside_three"],
        run: side_by_side::beside_three,
    },
    Model {
        name: "written-pages",
        gives: &["written_pages"],
        run: written_pages::written_pages,
    },
    Model {
        name: "prl-accuracy",
        gives: &[
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
        run: page_logs::array::accuracy,
    },
    Model {
        name: "hpl",
        gives: &["hot_mb", "prl_mb", "ended", "pml_mb", "used_mb"],
        run: page_logs::hpl::working_set,
    },
    Model {
        name: "pml-limits",
        gives: &["pml_mb", "written_mb", "cold_mb", "hot_mb", "all_mb"],
        run: page_logs::limits::limits,
    },
    Model {
        name: "prl-missed",
        gives: &["full", "logged", "lost"],
        run: page_logs::losses::missed,
    },
    Model {
        name: "prl-costs",
        gives: &["slowdown", "estimator"],
        run: page_logs::losses::costs,
    },
    Model {
        name: "restore",
        gives: &["loaded_mb", "start", "useful", "worked", "fetched"],
        run: page_logs::restore::restore,
    },
    Model {
        name: "shared-cache",
        gives: &["ways", "lost"],
        run: page_logs::shared_cache::shared,
    },
];

/// All measures of runs: their names, what they give, and the code.
pub const OF_RUNS: &[(&str, &[&str], OfRun)] = &[
    (
        "drift",
        &["minute", "remote_pages", "half_pages", "start_pages"],
        drift::drift,
    ),
    ("moments", &["balance", "processor"], ticks::by_moment),
    ("ticks", &["ticks"], ticks::by_tick),
];
