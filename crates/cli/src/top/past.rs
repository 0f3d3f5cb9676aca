//! Pictures of the past: a history, one period at a time.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use homenode_agent::past::Place;
use homenode_agent::wall_clock::now_ns;
use homenode_recorder::{Archive, Kind, Which};
use homenode_screens::pictures::Picture;
use homenode_screens::top::History;
use homenode_screens::wall::{Time, Wall};

use crate::bad_input;
use crate::record;

const MINUTE_NS: i64 = 60_000_000_000;

/// A history, and a place in it.
pub(super) struct Past {
    path: PathBuf,
    archive: Archive,
    place: Place,
}

impl Past {
    /// Opens a history at its first period, or at its last.
    ///
    /// # Errors
    /// No history, one that cannot be read, or one with no period.
    pub(super) fn open(path: &Path, which: Which<'_>) -> anyhow::Result<Past> {
        let archive = record::open(path)?;
        let place = Place::open(&archive, which)?.ok_or_else(|| {
            bad_input(format!(
                "the history {} has no period yet; an agent adds periods while it runs",
                path.display()
            ))
        })?;
        Ok(Past {
            path: path.to_owned(),
            archive,
            place,
        })
    }

    /// Goes to the first period, or to the last.
    fn go_to_end(&mut self, which: Which<'_>) -> anyhow::Result<()> {
        if let Some(place) = Place::open(&self.archive, which)? {
            self.place = place;
        }
        Ok(())
    }

    /// Goes to the last period at or before a time; returns a message if nothing was recorded then.
    fn go_to(&mut self, wall_ns: i64) -> anyhow::Result<Option<String>> {
        let (from, to) = self.span()?;
        if !(from..=to).contains(&wall_ns) {
            return Err(bad_input(format!(
                "nothing was recorded at {}: the history {} covers {} to {}",
                Wall(wall_ns),
                self.path.display(),
                Wall(from),
                Wall(to)
            )));
        }
        let Some(place) = Place::at(&self.archive, wall_ns)? else {
            return Ok(None);
        };
        self.place = place;
        let shown_ns = self.place.wall_ns();
        Ok((wall_ns.abs_diff(shown_ns) > MINUTE_NS.unsigned_abs()).then(|| {
            format!(
                "nothing was recorded at {}: showing {}, the nearest period before it",
                Wall(wall_ns),
                Wall(shown_ns)
            )
        }))
    }
}

impl History for Past {
    fn span(&self) -> anyhow::Result<(i64, i64)> {
        let span = self.archive.span(Kind::Status)?;
        span.with_context(|| format!("the history {} no longer has any period", self.path.display()))
    }

    fn picture(&self) -> anyhow::Result<Picture> {
        let wall_ns = self.place.wall_ns();
        let overview = self.place.overview().with_context(|| {
            format!(
                "the period of {} in {} cannot be shown",
                Wall(wall_ns),
                self.path.display()
            )
        })?;
        Ok(Picture { wall_ns, overview })
    }

    fn step(&mut self, by: isize) -> anyhow::Result<bool> {
        Ok(self.place.step(&self.archive, by)?)
    }

    fn first(&mut self) -> anyhow::Result<()> {
        self.go_to_end(Which::First)
    }

    fn last(&mut self) -> anyhow::Result<()> {
        self.go_to_end(Which::Last)
    }

    fn minutes(&mut self, by: i64) -> anyhow::Result<()> {
        let (from, to) = self.span()?;
        let wall_ns = self.place.wall_ns().saturating_add(by.saturating_mul(MINUTE_NS));
        self.go_to(wall_ns.clamp(from, to)).map(drop)
    }

    // A time of day that the span does not contain today means the last one before the end of the span.
    fn go_to_time(&mut self, time: &Time) -> anyhow::Result<Option<String>> {
        let (from, to) = self.span()?;
        let now = now_ns();
        let mut wall_ns = time.ns(now)?;
        if matches!(time, Time::OfDay(_)) && !(from..=to).contains(&wall_ns) {
            wall_ns = time.ns(to)?;
        }
        // Times are shown to the millisecond, so accept them to the millisecond.
        let end = wall_ns.saturating_add(999_999);
        self.go_to(if wall_ns <= to { end.min(to) } else { wall_ns })
    }
}
