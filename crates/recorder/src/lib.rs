//! The history of a host on disk: each period's status for days, each sample for a day, each decision and finding with its
//! outcome. An SQLite database that any SQLite can open:
//!
//! | table | rows |
//! |---|---|
//! | `run` | one for each run of the agent: version, host, every setting |
//! | `event` | decisions, findings, refusals, changes by others; consecutive repetitions are one row with a count |
//! | `block` | a minute of periods, `kind` 0 status and 1 samples: zstd of JSON in [`columns`] |
//! | `tail` | the periods of the current minute: zstd of JSON, so that nothing is lost when the agent is killed |
//!
//! Times are nanoseconds: `wall_ns` since 1970, as the host's clock was set at that time, and `at_ns` of the host's
//! monotonic clock, which alone defines the order of a run's periods. If the clock was set back, the wall-clock times of two
//! blocks of a run overlap, and readers get both.
//!
//! [`Recorder`] writes from a thread of its own: the agent's loop never waits for a disk. [`Archive`] can read at the same
//! time.

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
