//! A stretch of a recorded run: its samples, and the machine and settings with which they were taken.

use std::collections::BTreeSet;

use homenode_control::Config;
use homenode_host::Sample;
use homenode_machine::Machine;
use homenode_recorder::{Archive, Frame, Kind, RecordError};
use serde::Deserialize as _;

use crate::history::read_recorded;
use crate::replay::Detail;

/// A stretch of one run.
#[derive(Debug)]
pub struct Stretch {
    /// The run in the history.
    pub run: i64,
    /// The host of the run.
    pub host: String,
    /// The machine of the host that was recorded.
    pub machine: Machine,
    /// The run's settings.
    pub config: Config,
    /// Times of the first and the last sample, in nanoseconds since 1970.
    pub span: (i64, i64),
    /// Sentences about what is missing from the stretch.
    pub notes: Vec<String>,
}

/// Why a stretch cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum StretchError {
    /// The history has no samples of the requested time.
    #[error("the history has no samples of that time")]
    Empty,
    /// The history has samples of the run with this number, but no row that describes the run.
    #[error("the history has samples of run {0}, but not its machine and settings")]
    NoRun(i64),
    /// Another version wrote the run.
    #[error("machine and settings of run {run} cannot be read: {error}")]
    Unreadable {
        /// The run in the history.
        run: i64,
        /// The first unreadable value.
        error: serde_json::Error,
    },
    /// The history cannot be read.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Stretch {
    /// Reads the samples of a span of time, in nanoseconds since 1970. If the span covers several runs, reads only the last of
    /// them. Calls `take` with the machine and each sample.
    pub fn read(
        archive: &Archive,
        span: (i64, i64),
        mut take: impl FnMut(&Machine, Sample),
    ) -> Result<Stretch, StretchError> {
        let (mut runs, mut damaged) = (BTreeSet::new(), None);
        let whole = archive.frames(Kind::Sample, span, |frame| {
            runs.insert(frame.run);
            true
        });
        match whole {
            Err(RecordError::Damaged { what, .. }) => damaged = Some(what),
            whole => whole?,
        }
        let last = runs.last().copied().ok_or(StretchError::Empty)?;
        let run = archive.runs()?.into_iter().find(|run| run.id == last);
        let run = run.ok_or(StretchError::NoRun(last))?;
        let Detail { machine, config, .. } = Detail::deserialize(&run.detail)
            .map_err(|error| StretchError::Unreadable { run: last, error })?;
        let mut stretch = Stretch {
            run: last,
            host: run.host,
            machine,
            config,
            span: (i64::MAX, i64::MIN),
            notes: Vec::new(),
        };
        let mut unreadable_count = 0_u64;
        let whole = archive.frames_of(
            Some(last),
            Kind::Sample,
            span,
            |Frame { wall_ns, value, .. }| {
                match read_recorded(value) {
                    Ok((sample, _)) => {
                        stretch.span = (stretch.span.0.min(wall_ns), stretch.span.1.max(wall_ns));
                        take(&stretch.machine, sample);
                    }
                    Err(_) => unreadable_count += 1,
                }
                true
            },
        );
        match whole {
            Err(RecordError::Damaged { .. }) => {}
            whole => whole?,
        }
        if runs.len() > 1 {
            let others = runs.len() - 1;
            stretch.notes.push(format!(
                "{others} earlier runs of that time are left out: this is run {last}"
            ));
        }
        if unreadable_count > 0 {
            stretch.notes.push(format!(
                "{unreadable_count} samples cannot be read: the state before each is assumed to continue"
            ));
        }
        let damaged = damaged.map(|what| format!("{what}: the state before it is assumed to continue"));
        stretch.notes.extend(damaged);
        Ok(stretch)
    }
}
