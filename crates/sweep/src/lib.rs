//! A scenario over values of its keys, seeds and policies: how a figure depends on a setting, with its confidence interval.
//!
//! ```text
//!   PLAN.toml, options ─▶ plan (whole, checked) ─▶ tasks ─▶ run (threads) ─▶ rows ─▶ table (mean, interval) ─▶ Parquet, CSV
//!                                                    └▶ store: a file for each task ─▶ merge ─▶ rows
//! ```
//!
//! # Terms
//! - *Point*: one value for each key that is set. *Run*: a point, a policy and a seed; points come in the order of their values,
//!   the last key fastest, then policies, then seeds.
//! - *Task*: some runs, one after the other: what a store keeps as a file, and an engine (Slurm, Dask) hands out.
//! - *Digest*: SHA-256 of everything that decides what comes of the runs, the program aside.
//!
//! # Properties (tests of the same names)
//! - The table's bytes do not depend on jobs, shards, stores or the size of tasks.
//! - A store of a sweep that was killed is taken up.
//! - A damaged file of a store is made anew, and it is said.
//! - Every key and value is checked before anything runs.
//! - A plan says the same as its file.

mod metrics;
mod path;
mod plan;
mod run;
mod slurm;
mod store;
mod student;
mod table;
mod values;

pub use homenode_reproduce::Watch;
pub use metrics::{Metric, Of, metrics};
pub use plan::{Asked, Plan, RUNS_MAX, RUNS_PER_TASK_MAX};
pub use run::{Rows, Shard, run};
pub use slurm::{Slurm, quoted};
pub use store::{Missing, Program, Store, merge};
pub use table::Table;
pub use values::seeds;

/// The commit that the program was built from; ends with `-dirty` where files were changed since, `unknown` outside of git.
pub const COMMIT: &str = env!("HOMENODE_COMMIT");

/// Why a sweep cannot be, or did not end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SweepError {
    /// What was asked for cannot be; the sentence says what, and what to write instead.
    #[error("{0}")]
    Input(String),
    /// A run that could not be made, or a store that could not be read or written.
    #[error("{0}")]
    Failed(String),
    /// Tasks that no store has.
    #[error(transparent)]
    Missing(#[from] Missing),
}
