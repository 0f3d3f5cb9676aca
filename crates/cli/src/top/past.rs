//! Where what was comes from: a history, a period at a time.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use homenode_api::answer::{Happened, Overview};
use homenode_control::Status;
use homenode_recorder::{Archive, EventRow, Frame, Kind, Minute, Wanted, Which};
use homenode_units::Ns;

use crate::bad_input;
use crate::record;
use crate::top::view::Picture;
use crate::wall::{Time, Wall};

/// How far back events are shown.
const EVENTS_SPAN_NS: i64 = 15 * 60 * 1_000_000_000;
/// And how many.
const EVENTS_MAX: u32 = 1000;
const MINUTE_NS: i64 = 60_000_000_000;

/// A place in a history.
pub struct Past {
    path: PathBuf,
    archive: Archive,
    minute: Minute,
    /// Which period of the minute.
    at: usize,
    /// What had happened by the end of the minute.
    events: Vec<EventRow>,
}

impl Past {
    /// Opens a history at its first period, or at its last.
    ///
    /// # Errors
    /// No history, one that cannot be read, or one with no period.
    pub fn open(path: &Path, which: Which<'_>) -> anyhow::Result<Past> {
        let archive = record::open(path)?;
        let minute = archive.minute(Kind::Status, which)?;
        let minute = minute.ok_or_else(|| {
            bad_input(format!(
                "the history {} has no period yet; an agent writes one while it runs",
                path.display()
            ))
        })?;
        let mut past = Past {
            path: path.to_owned(),
            archive,
            at: minute.frames.len() - 1,
            minute,
            events: Vec::new(),
        };
        if matches!(which, Which::First) {
            past.at = 0;
        }
        past.read_events()?;
        Ok(past)
    }

    /// The first and the last period, in nanoseconds since 1970.
    ///
    /// # Errors
    /// When the history cannot be read, here and below.
    pub fn span(&self) -> anyhow::Result<(i64, i64)> {
        let span = self.archive.span(Kind::Status)?;
        span.with_context(|| format!("the history {} has no period any more", self.path.display()))
    }

    fn frame(&self) -> &Frame {
        &self.minute.frames[self.at]
    }

    /// What is shown of this period.
    ///
    /// # Errors
    /// A period that another version wrote, of which something is not known here.
    pub fn picture(&self) -> anyhow::Result<Picture> {
        let Frame {
            run, wall_ns, value, ..
        } = self.frame();
        let status: Status = serde_json::from_value(value.clone()).with_context(|| {
            format!(
                "the period of {} in {} cannot be shown",
                Wall(*wall_ns),
                self.path.display()
            )
        })?;
        let had_happened = self
            .events
            .iter()
            .filter(|event| event.run <= *run && event.wall_ns <= *wall_ns);
        let events = had_happened.map(|event| happened(event, *wall_ns)).collect();
        Ok(Picture {
            wall_ns: *wall_ns,
            overview: Overview { status, events },
        })
    }

    /// Goes this number of periods on or back; `false` where the history ends before that.
    ///
    /// # Errors
    /// As [`Past::span`].
    pub fn step(&mut self, by: isize) -> anyhow::Result<bool> {
        for _ in 0..by.unsigned_abs() {
            let last = self.minute.frames.len() - 1;
            match by > 0 {
                true if self.at < last => self.at += 1,
                false if self.at > 0 => self.at -= 1,
                is_forward => {
                    let which = match is_forward {
                        true => Which::After(&self.minute),
                        false => Which::Before(&self.minute),
                    };
                    let Some(minute) = self.archive.minute(Kind::Status, which)? else {
                        return Ok(false);
                    };
                    let here = (self.frame().run, self.frame().wall_ns);
                    // A minute that was read while it was written is read again with what came since.
                    let newer = minute
                        .frames
                        .iter()
                        .position(|frame| (frame.run, frame.wall_ns) > here);
                    self.at = match is_forward {
                        true => newer.unwrap_or(0),
                        false => minute.frames.len() - 1,
                    };
                    self.minute = minute;
                    self.read_events()?;
                }
            }
        }
        Ok(true)
    }

    /// Goes to the first period, or to the last.
    ///
    /// # Errors
    /// As [`Past::span`].
    pub fn go_to_end(&mut self, which: Which<'_>) -> anyhow::Result<()> {
        if let Some(minute) = self.archive.minute(Kind::Status, which)? {
            self.at = match which {
                Which::First => 0,
                _ => minute.frames.len() - 1,
            };
            self.minute = minute;
            self.read_events()?;
        }
        Ok(())
    }

    /// Goes this number of minutes on or back, at most to the first or the last period.
    ///
    /// # Errors
    /// As [`Past::span`].
    pub fn minutes(&mut self, by: i64) -> anyhow::Result<()> {
        let (from, to) = self.span()?;
        let wall_ns = self.frame().wall_ns.saturating_add(by.saturating_mul(MINUTE_NS));
        self.go_to(wall_ns.clamp(from, to)).map(drop)
    }

    /// Goes to the period that was in force at a time, the last one before it; what is to be said where nothing was recorded.
    ///
    /// # Errors
    /// A time out of the span; as [`Past::span`].
    pub fn go_to(&mut self, wall_ns: i64) -> anyhow::Result<Option<String>> {
        let (from, to) = self.span()?;
        if !(from..=to).contains(&wall_ns) {
            return Err(bad_input(format!(
                "nothing is recorded at {}: the history {} is from {} to {}",
                Wall(wall_ns),
                self.path.display(),
                Wall(from),
                Wall(to)
            )));
        }
        let Some(minute) = self.archive.minute(Kind::Status, Which::At(wall_ns))? else {
            return Ok(None);
        };
        match minute.frames.iter().rposition(|frame| frame.wall_ns <= wall_ns) {
            Some(at) => (self.minute, self.at) = (minute, at),
            None => {
                let before = self.archive.minute(Kind::Status, Which::Before(&minute))?;
                self.at = before.as_ref().map_or(0, |before| before.frames.len() - 1);
                self.minute = before.unwrap_or(minute);
            }
        }
        self.read_events()?;
        let gap_ns = wall_ns - self.frame().wall_ns;
        Ok((gap_ns.abs() > MINUTE_NS).then(|| {
            let shown = Wall(self.frame().wall_ns);
            format!(
                "nothing was recorded at {}: this is {shown}, the nearest before it",
                Wall(wall_ns)
            )
        }))
    }

    /// Goes to a time as operators write it. A time of day that is none of the span today is the last one in it.
    ///
    /// # Errors
    /// As [`Past::go_to`].
    pub fn go_to_time(&mut self, time: &Time) -> anyhow::Result<Option<String>> {
        let (from, to) = self.span()?;
        let now = record::now_ns();
        let none = || bad_input(format!("there is no such time here: {time:?}"));
        let mut wall_ns = time.ns(now).ok_or_else(none)?;
        if matches!(time, Time::OfDay(_)) && !(from..=to).contains(&wall_ns) {
            wall_ns = time.ns(to).ok_or_else(none)?;
        }
        // Times are shown to the millisecond: what is shown can be asked for.
        let end = wall_ns.saturating_add(999_999);
        self.go_to(if wall_ns <= to { end.min(to) } else { wall_ns })
    }

    fn read_events(&mut self) -> anyhow::Result<()> {
        let ends = [self.minute.frames.first(), self.minute.frames.last()];
        let [Some(first), Some(last)] = ends else {
            return Ok(());
        };
        let wanted = Wanted {
            from_ns: Some(first.wall_ns.saturating_sub(EVENTS_SPAN_NS)),
            to_ns: Some(last.wall_ns),
            limit: Some(EVENTS_MAX),
            ..Wanted::default()
        };
        self.events = self.archive.events(&wanted)?;
        Ok(())
    }
}

fn happened(event: &EventRow, now_ns: i64) -> Happened {
    let age_ns = now_ns.saturating_sub(event.wall_ns).max(0);
    Happened {
        at_ns: Ns(event.at_ns.unsigned_abs()),
        age_ns: Ns(age_ns.unsigned_abs()),
        kind: event.kind.clone(),
        vm: event.name.clone(),
        policy: event.policy.clone(),
        outcome: event.outcome.clone(),
        count: event.count.unsigned_abs(),
        text: event.text.clone(),
    }
}
