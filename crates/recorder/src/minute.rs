//! Moves through a history in both directions, a minute at a time.
//!
//! Minutes are ordered by their last wall-clock time, then by their ids. If the clock was set back, minutes from before and after
//! that alternate; each is returned exactly once.

use homenode_units::Ns;
use rusqlite::ToSql;

use crate::archive::{Archive, Frame, packed, unpacked};
use crate::columns::Pick;
use crate::schema::{Kind, RecordError};
use crate::store::decompress;

/// A block's key, and its minute if it can be read.
type Block = ((i64, i64), Option<Minute>);

/// The key of the current minute, which is not a block yet. It is higher than all others.
const OPEN: (i64, i64) = (i64::MAX, i64::MAX);

/// The periods of about a minute, all of one run, in order; never empty.
#[derive(Clone, Debug, PartialEq)]
pub struct Minute {
    key: (i64, i64),
    /// For the current minute: the id of the last block when the minute was read.
    last_block: i64,
    /// The periods.
    pub frames: Vec<Frame>,
}

/// Selects the minute to read.
#[derive(Clone, Copy, Debug)]
pub enum Which<'a> {
    /// The first minute that ends at this time or later, in nanoseconds since 1970.
    At(i64),
    /// The first minute.
    First,
    /// The last minute.
    Last,
    /// The minute after this one.
    After(&'a Minute),
    /// The minute before this one.
    Before(&'a Minute),
}

impl Archive {
    /// Reads a minute of periods, skipping damaged ones. Returns `None` if there is none.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn minute(&self, kind: Kind, which: Which<'_>) -> Result<Option<Minute>, RecordError> {
        let (mut from, is_forward) = match which {
            Which::At(wall_ns) => ((wall_ns, i64::MIN), true),
            Which::First => ((i64::MIN, i64::MIN), true),
            Which::After(minute) if minute.key == OPEN => return self.newer(kind, minute),
            Which::After(minute) => (minute.key, true),
            Which::Before(minute) => (minute.key, false),
            Which::Last => match self.open_minute(kind)? {
                Some(minute) => return Ok(Some(minute)),
                None => (OPEN, false),
            },
        };
        loop {
            let Some((key, found)) = self.next(kind, from, is_forward)? else {
                let open = if is_forward { self.open_minute(kind)? } else { None };
                return Ok(open.filter(|open| match which {
                    Which::At(wall_ns) => open.frames.last().is_some_and(|last| last.wall_ns >= wall_ns),
                    _ => true,
                }));
            };
            match found {
                Some(minute) => return Ok(Some(minute)),
                None => from = key,
            }
        }
    }

    /// Returns the block next to a key, in one direction.
    fn next(
        &self,
        kind: Kind,
        (wall_ns, id): (i64, i64),
        is_forward: bool,
    ) -> Result<Option<Block>, RecordError> {
        // The first condition, on `last_wall_ns` alone, can use the index.
        let which = if is_forward {
            "last_wall_ns >= ?2 AND (last_wall_ns > ?2 OR id > ?3) ORDER BY last_wall_ns, id"
        } else {
            "last_wall_ns <= ?2 AND (last_wall_ns < ?2 OR id < ?3) ORDER BY last_wall_ns DESC, id DESC"
        };
        self.block(which, &[&kind.number(), &wall_ns, &id])
    }

    /// Returns the first block that matches a condition, in which `?1` is the kind.
    fn block(&self, which: &str, values: &[&dyn ToSql]) -> Result<Option<Block>, RecordError> {
        let sql = format!(
            "SELECT last_wall_ns, id, run, count, frames FROM block WHERE kind = ?1 AND {which} LIMIT 1"
        );
        let found = self.rows(&sql, values, |row| {
            let key = (row.get(0)?, row.get(1)?);
            Ok((key, row.get::<_, i64>(2)?, row.get::<_, i64>(3)?, packed(row, 4)?))
        })?;
        Ok(found.into_iter().next().map(|(key, run, count, bytes)| {
            let frames = unpacked(&bytes, count, Pick::All, |_, _| true).unwrap_or_default();
            let frame = |(at, wall_ns, value)| Frame {
                run,
                at,
                wall_ns,
                value,
            };
            let frames: Vec<Frame> = frames.into_iter().map(frame).collect();
            let minute = Minute {
                key,
                last_block: key.1,
                frames,
            };
            (key, (!minute.frames.is_empty()).then_some(minute))
        }))
    }

    /// Reads the current minute; returns `None` if there is none.
    fn open_minute(&self, kind: Kind) -> Result<Option<Minute>, RecordError> {
        // The id is read before the tail. If the tail becomes a block in between, that block's id is higher.
        let sql = "SELECT ifnull(max(id), 0) FROM block WHERE kind = ?1";
        let last = self.rows(sql, &[&kind.number()], |row| row.get(0))?;
        let frames = self.rows(
            "SELECT run, at_ns, wall_ns, frame FROM tail WHERE kind = ?1 ORDER BY id",
            &[&kind.number()],
            |row| {
                let bytes: Vec<u8> = row.get(3)?;
                let (run, at, wall_ns) = (row.get(0)?, row.get::<_, i64>(1)?, row.get(2)?);
                Ok(decompress(&bytes).map(|value| Frame {
                    run,
                    at: Ns(at.unsigned_abs()),
                    wall_ns,
                    value,
                }))
            },
        )?;
        let frames: Vec<Frame> = frames.into_iter().flatten().collect();
        let minute = Minute {
            key: OPEN,
            last_block: last.first().copied().unwrap_or_default(),
            frames,
        };
        Ok((!minute.frames.is_empty()).then_some(minute))
    }

    /// Returns the minute after one that was current when it was read, or that minute itself if it has become a block. Goes by
    /// ids, since times cannot tell: if the clock was set back, the new block ends before earlier ones.
    fn newer(&self, kind: Kind, minute: &Minute) -> Result<Option<Minute>, RecordError> {
        let mut last = minute.last_block;
        while let Some(((_, id), found)) = self.block("id > ?2 ORDER BY id", &[&kind.number(), &last])? {
            if found.is_some() {
                return Ok(found);
            }
            last = id;
        }
        let open = self.open_minute(kind)?;
        Ok(open.filter(|open| open.frames != minute.frames))
    }
}
