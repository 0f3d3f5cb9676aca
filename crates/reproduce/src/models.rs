//! Code for experiments in files: models of single accesses, code whose time is measured, and series of a run.
//!
//! A model provides arrays by name; the file defines their meaning for a claim and their presentation.

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

/// An additional measure of a run.
pub type OfRun = fn(&Outcome) -> Result<Named, String>;

/// Evaluates an expression of the experiment.
pub type Values<'a> = &'a dyn Fn(&str) -> Result<Array, String>;

/// Code behind an experiment.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    /// Its name in files.
    pub name: &'static str,
    /// Names of the arrays that it provides.
    gives: &'static [&'static str],
    run: fn(Values<'_>) -> Result<Named, String>,
}

impl Model {
    /// Returns the names of its arrays.
    pub fn names(&self) -> Vec<String> {
        self.gives.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Runs the model; a function evaluates the experiment's expressions.
    ///
    /// # Errors
    /// A message about what it lacks.
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

/// All measures of runs: their names, their arrays, and the code.
pub const OF_RUNS: &[(&str, &[&str], OfRun)] = &[
    (
        "drift",
        &["minute", "remote_pages", "half_pages", "start_pages"],
        drift::drift,
    ),
    ("moments", &["balance", "processor"], ticks::by_moment),
    ("ticks", &["ticks"], ticks::by_tick),
];
