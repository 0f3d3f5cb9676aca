//! The host in the past: a recorded period, and the events before it.

use homenode_api::answer::{Happened, Overview};
use homenode_control::Status;
use homenode_recorder::{Archive, EventRow, Frame, Kind, Minute, RecordError, Wanted, Which};
use homenode_units::Ns;

/// Only events of this span before a minute are shown.
const EVENTS_SPAN_NS: i64 = 15 * 60 * 1_000_000_000;
/// Most events shown.
const EVENTS_MAX: u32 = 1000;

/// A position in a history.
#[derive(Debug)]
pub struct Place {
    minute: Minute,
    /// Index of the period in the minute.
    at: usize,
    /// Events up to the end of the minute.
    events: Vec<EventRow>,
}

impl Place {
    /// Opens the first period of the first minute, or the last period of any other minute. Returns `None` if there is no such
    /// minute.
    ///
    /// # Errors
    /// If the history cannot be read.
    pub fn open(archive: &Archive, which: Which<'_>) -> Result<Option<Place>, RecordError> {
        let Some(minute) = archive.minute(Kind::Status, which)? else {
            return Ok(None);
        };
        let at = match which {
            Which::First => 0,
            _ => minute.frames.len() - 1,
        };
        Place::of(archive, minute, at).map(Some)
    }

    /// Opens the last period at or before a time, in nanoseconds since 1970. Returns `None` after the end of the history.
    pub fn at(archive: &Archive, wall_ns: i64) -> Result<Option<Place>, RecordError> {
        let Some(minute) = archive.minute(Kind::Status, Which::At(wall_ns))? else {
            return Ok(None);
        };
        if let Some(at) = minute.frames.iter().rposition(|frame| frame.wall_ns <= wall_ns) {
            return Place::of(archive, minute, at).map(Some);
        }
        // The time is between the recorded spans of two minutes.
        let before = archive.minute(Kind::Status, Which::Before(&minute))?;
        let at = before.as_ref().map_or(0, |before| before.frames.len() - 1);
        Place::of(archive, before.unwrap_or(minute), at).map(Some)
    }

    fn of(archive: &Archive, minute: Minute, at: usize) -> Result<Place, RecordError> {
        let mut place = Place {
            minute,
            at,
            events: Vec::new(),
        };
        place.read_events(archive)?;
        Ok(place)
    }

    fn frame(&self) -> &Frame {
        &self.minute.frames[self.at]
    }

    /// Returns the period's wall-clock time, in nanoseconds since 1970.
    pub fn wall_ns(&self) -> i64 {
        self.frame().wall_ns
    }

    /// Returns the host in that period, and the events up to it.
    ///
    /// # Errors
    /// If another version wrote the period in a form that this version cannot read.
    pub fn overview(&self) -> serde_json::Result<Overview> {
        let Frame {
            run, wall_ns, value, ..
        } = self.frame();
        let status: Status = serde_json::from_value(value.clone())?;
        let had_happened = self
            .events
            .iter()
            .filter(|event| event.run <= *run && event.wall_ns <= *wall_ns);
        let events = had_happened.map(|event| happened(event, *wall_ns)).collect();
        Ok(Overview { status, events })
    }

    /// Moves `by` periods forward or back. Returns false if the history ends before that.
    pub fn step(&mut self, archive: &Archive, by: isize) -> Result<bool, RecordError> {
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
                    let Some(minute) = archive.minute(Kind::Status, which)? else {
                        return Ok(false);
                    };
                    let here = (self.frame().run, self.frame().wall_ns);
                    // If the minute was read while it was being written, this is the same minute with later periods: go to the
                    // first of those.
                    let newer = minute
                        .frames
                        .iter()
                        .position(|frame| (frame.run, frame.wall_ns) > here);
                    self.at = match is_forward {
                        true => newer.unwrap_or(0),
                        false => minute.frames.len() - 1,
                    };
                    self.minute = minute;
                    self.read_events(archive)?;
                }
            }
        }
        Ok(true)
    }

    fn read_events(&mut self, archive: &Archive) -> Result<(), RecordError> {
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
        self.events = archive.events(&wanted)?;
        Ok(())
    }
}

fn happened(event: &EventRow, now_ns: i64) -> Happened {
    let age_ns = now_ns.saturating_sub(event.wall_ns).max(0);
    Happened::of(
        event.record.clone(),
        Ns(age_ns.unsigned_abs()),
        event.count.unsigned_abs(),
    )
}
