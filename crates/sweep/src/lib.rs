//! Sweeps a scenario over values of its keys, over seeds and over policies, to show how a figure depends on a setting. Means
//! have confidence intervals.
//!
//! ```text
//!   PLAN.toml, options ─▶ plan (whole, checked) ─▶ tasks ─▶ run (threads) ─▶ rows ─▶ table (mean, interval) ─▶ Parquet, CSV
//!                                                    └▶ store: a file for each task ─▶ merge ─▶ rows
//! ```
//!
//! # Terms
//! - *Point*: one value for each key that is set. *Run*: a point, a policy and a seed; runs are ordered by point, then by
//!   policy, then by seed. Points are in the order of their values, and the last key varies fastest.
//! - *Task*: some consecutive runs. A store keeps each task as a file, and an engine (Slurm, Dask) distributes tasks.
//! - *Digest*: SHA-256 of everything that determines the results of the runs, except the program.
//!
//! # Properties (tests of the same names)
//! - The table's bytes do not depend on jobs, shards, stores or the size of tasks.
//! - A store of a sweep that was killed is taken up.
//! - A damaged file of a store is made again, with a notice.
//! - Every key and value is checked before anything runs.
//! - A plan says the same as its file.

mod metrics;
mod path;
mod plan;
mod run;
mod slurm;
mod store;
mod table;
mod values;

pub use metrics::{Metric, Of, metrics};
pub use plan::{Asked, Plan, RUNS_MAX, RUNS_PER_TASK_MAX};
pub use run::{Rows, Shard, run};
pub use slurm::{Slurm, quoted};
pub use store::{Missing, Program, Store, merge};
pub use table::Table;
pub use values::seeds;

/// The commit from which the program was built. It ends with `-dirty` if files had changed since that commit, and is
/// `unknown` if there was no git repository.
pub const COMMIT: &str = env!("HOMENODE_COMMIT");

/// Why a sweep is invalid, or did not end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SweepError {
    /// The request is invalid; the message says why, and suggests a correction.
    #[error("{0}")]
    Input(String),
    /// A run failed, or a store could not be read or written.
    #[error("{0}")]
    Failed(String),
    /// Tasks missing from all stores.
    #[error(transparent)]
    Missing(#[from] Missing),
}
