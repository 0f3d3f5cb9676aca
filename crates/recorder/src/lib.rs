//! What a host did, kept on disk: each period's status for days, each sample for a day, each decision and finding with what came
//! of it. An SQLite database that any SQLite opens:
//!
//! | table | rows |
//! |---|---|
//! | `run` | one for each time an agent ran: version, host, every setting |
//! | `event` | decisions, findings, refusals, changes by others; those that repeat are one row with a count |
//! | `block` | a minute of periods, `kind` 0 status and 1 samples: zstd of JSON in [`columns`] |
//! | `tail` | the periods of the minute that is not over: zstd of JSON, so that nothing is lost when the agent is killed |
//!
//! Times are nanoseconds: `wall_ns` since 1970, as the host's clock was set then, and `at_ns` of the host's monotonic clock,
//! which alone orders the periods of a run. Where the clock was set back, times of two blocks of a run overlap, and both are
//! told.
//!
//! [`Recorder`] writes from a thread of its own: the agent's loop never waits for a disk. [`Archive`] reads, also beside it.

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
pub use store::{Begin, Event, Limits, Period, Written};
