//! The history of a host on disk: the status of each period for days, each sample for a day, and each decision and finding with
//! its outcome. It is an SQLite database, which any SQLite can open:
//!
//! | table | rows |
//! |---|---|
//! | `run` | one for each run of the agent: version, host, every setting |
//! | `event` | decisions, findings, refusals, changes by others; consecutive repetitions are one row with a count |
//! | `block` | a minute of periods, `kind` 0 status and 1 samples: zstd of JSON in [`columns`] |
//! | `tail` | the periods of the current minute: zstd of JSON, so that nothing is lost when the agent is killed |
//!
//! Times are in nanoseconds. `wall_ns` counts from 1970, by the host's wall clock as it was set then. `at_ns` is on the host's
//! monotonic clock, which alone defines the order of a run's periods. If the wall clock was set back, the wall-clock times of two
//! blocks of a run may overlap, and readers get both.
//!
//! [`Recorder`] writes in a thread of its own, so the agent's loop never waits for a disk. [`Archive`] can read at the same time.

mod archive;
pub mod columns;
mod document;
mod minute;
mod pack;
mod recorder;
mod schema;
mod store;
pub mod table;

pub use archive::{Archive, EventRow, Frame, Frames, Run, Wanted, prune};
pub use columns::Pick;
pub use document::{Documents, Figures};
pub use minute::{Minute, Which};
pub use recorder::{Recorder, WhenFull};
pub use schema::{Kind, RecordError};
pub use store::{Begin, Limits, Period, Written};
