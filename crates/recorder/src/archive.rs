//! The reading end: what a host did between two times.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use homenode_units::{Bytes, Ns};
use rusqlite::{Connection, Row, ToSql};
use serde::Serialize;
use serde_json::Value;

use crate::columns::{self, Pick};
use crate::schema::{self, Kind, RecordError};
use crate::store::{self, BLOCK_COUNT_MAX, decompress, decompressed, whole};

/// A history that is read.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    connection: Connection,
}

/// A run of the agent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// Its number in this history.
    pub id: i64,
    /// When it began, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Version and commit.
    pub version: String,
    /// What it ran on.
    pub host: String,
    /// Machine and settings.
    pub detail: Value,
}

/// One period.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// Of which run.
    pub run: i64,
    /// The host's monotonic clock.
    pub at: Ns,
    /// The wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Status or sample.
    pub value: Value,
}

/// Something that happened, and how often in a row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EventRow {
    /// Its number, by which it is named.
    pub id: i64,
    /// Of which run.
    pub run: i64,
    /// The host's monotonic clock.
    pub at_ns: i64,
    /// The wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// The same when it happened last.
    pub last_wall_ns: i64,
    /// How often it happened.
    pub count: i64,
    /// What it is.
    pub kind: String,
    /// The VM's id, where it is about one.
    pub vm: Option<String>,
    /// Its name then.
    pub name: Option<String>,
    /// Who decided or found it.
    pub policy: Option<String>,
    /// What was to be done.
    pub action: Option<String>,
    /// What came of it.
    pub outcome: Option<String>,
    /// For people.
    pub text: String,
    /// For programs.
    pub detail: Value,
}

/// Which events.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Not before this, in nanoseconds since 1970.
    pub from_ns: Option<i64>,
    /// Not after this.
    pub to_ns: Option<i64>,
    /// About the VM of this name or id.
    pub vm: Option<String>,
    /// Of this policy.
    pub policy: Option<String>,
    /// Of this kind.
    pub kind: Option<String>,
    /// The one of this number.
    pub id: Option<i64>,
    /// Before the one of this number.
    pub before_id: Option<i64>,
    /// At most this number, the last ones.
    pub limit: Option<u32>,
}

impl Archive {
    /// Opens a history.
    ///
    /// # Errors
    /// Where there is none, it is another program's or a newer version's.
    pub fn open(path: &Path) -> Result<Archive, RecordError> {
        Ok(Archive {
            path: path.to_owned(),
            connection: schema::open_to_read(path)?,
        })
    }

    fn failed(&self, error: rusqlite::Error) -> RecordError {
        RecordError::new(&self.path, error)
    }

    /// Runs, the first first.
    ///
    /// # Errors
    /// When the database cannot be read, here and below.
    pub fn runs(&self) -> Result<Vec<Run>, RecordError> {
        let run = |row: &Row<'_>| {
            Ok(Run {
                id: row.get(0)?,
                wall_ns: row.get(1)?,
                version: row.get(2)?,
                host: row.get(3)?,
                detail: json(row, 4)?,
            })
        };
        self.rows(
            "SELECT id, wall_ns, version, host, detail FROM run ORDER BY id",
            &[],
            run,
        )
    }

    /// What happened, the first first.
    ///
    /// # Errors
    /// As [`Archive::runs`].
    pub fn events(&self, wanted: &Wanted) -> Result<Vec<EventRow>, RecordError> {
        let limit = wanted.limit.map_or(-1, i64::from);
        let mut events = self.rows(
            &format!(
                "SELECT {EVENT} FROM event
             WHERE (?1 IS NULL OR last_wall_ns >= ?1) AND (?2 IS NULL OR wall_ns <= ?2)
               AND (?3 IS NULL OR name = ?3 OR vm = ?3 COLLATE NOCASE) AND (?4 IS NULL OR policy = ?4) AND (?5 IS NULL OR kind = ?5)
               AND (?6 IS NULL OR id < ?6) AND id = ifnull(?8, id)
             ORDER BY id DESC LIMIT ?7"
            ),
            &[
                &wanted.from_ns,
                &wanted.to_ns,
                &wanted.vm,
                &wanted.policy,
                &wanted.kind,
                &wanted.before_id,
                &limit,
                &wanted.id,
            ],
            event,
        )?;
        events.reverse();
        Ok(events)
    }

    /// Gives every period between two times (nanoseconds since 1970), run by run and in the order of the host's clock; ends early
    /// where `each` says so.
    ///
    /// # Errors
    /// As [`Archive::runs`]; when blocks are damaged: all others were given then.
    pub fn frames(
        &self,
        kind: Kind,
        span: (i64, i64),
        each: impl FnMut(Frame) -> bool,
    ) -> Result<(), RecordError> {
        self.frames_of(None, kind, span, each)
    }

    /// Gives every period of one run, or of all, as [`Archive::frames`] does.
    ///
    /// # Errors
    /// As [`Archive::frames`].
    pub fn frames_of(
        &self,
        run: Option<i64>,
        kind: Kind,
        span: (i64, i64),
        mut each: impl FnMut(Frame) -> bool,
    ) -> Result<(), RecordError> {
        let mut frames = self.iter(run, kind, span)?;
        for frame in frames.by_ref() {
            if !each(frame?) {
                return Ok(());
            }
        }
        frames.whole()
    }

    /// Every period of one run, or of all, between two times, as they are asked for: a block at a time is in memory.
    ///
    /// # Errors
    /// As [`Archive::runs`].
    pub fn iter(&self, run: Option<i64>, kind: Kind, span: (i64, i64)) -> Result<Frames<'_>, RecordError> {
        let number = kind.number();
        let (from_ns, to_ns) = span;
        // The tail first: a minute that becomes a block meanwhile is in both then, and given once.
        let tail: Vec<(i64, i64, i64, Vec<u8>)> = self.rows(
            "SELECT run, at_ns, wall_ns, frame FROM tail
             WHERE kind = ?1 AND wall_ns BETWEEN ?2 AND ?3 AND (?4 IS NULL OR run = ?4) ORDER BY id",
            &[&number, &from_ns, &to_ns, &run],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, packed(row, 3)?)),
        )?;
        let blocks: Vec<(i64, i64, i64)> = self.rows(
            "SELECT id, run, count FROM block
             WHERE kind = ?1 AND last_wall_ns >= ?2 AND first_wall_ns <= ?3 AND (?4 IS NULL OR run = ?4)
             ORDER BY run, first_at_ns",
            &[&number, &from_ns, &to_ns, &run],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )?;
        Ok(Frames {
            archive: self,
            span,
            blocks: blocks.into_iter(),
            ready: Vec::new().into_iter(),
            tail: tail.into_iter(),
            last: None,
            damaged: Vec::new(),
            pick: Pick::All,
        })
    }

    /// What happened in a run after the event with this number, in order, at most `count` events.
    ///
    /// # Errors
    /// As [`Archive::runs`].
    pub fn events_after(&self, run: i64, id: i64, count: u32) -> Result<Vec<EventRow>, RecordError> {
        let sql = format!("SELECT {EVENT} FROM event WHERE run = ?1 AND id > ?2 ORDER BY id LIMIT ?3");
        self.rows(&sql, &[&run, &id, &count], event)
    }

    /// The first and the last time that are told, in nanoseconds since 1970; `None` where nothing is.
    ///
    /// # Errors
    /// As [`Archive::runs`].
    pub fn span(&self, kind: Kind) -> Result<Option<(i64, i64)>, RecordError> {
        let spans = self.rows(
            "SELECT min(first), max(last) FROM (
                SELECT min(first_wall_ns) AS first, max(last_wall_ns) AS last FROM block WHERE kind = ?1
                UNION ALL SELECT min(wall_ns), max(wall_ns) FROM tail WHERE kind = ?1
             )",
            &[&kind.number()],
            |row| Ok((row.get::<_, Option<i64>>(0)?, row.get::<_, Option<i64>>(1)?)),
        )?;
        Ok(spans
            .first()
            .and_then(|(first, last)| Some(((*first)?, (*last)?))))
    }

    /// How many bytes blocks of this kind have, and how many periods are in them.
    ///
    /// # Errors
    /// As [`Archive::runs`].
    pub fn size(&self, kind: Kind) -> Result<(Bytes, u64), RecordError> {
        let sizes = self.rows(
            "SELECT coalesce(sum(length(frames)), 0), coalesce(sum(count), 0) FROM block WHERE kind = ?",
            &[&kind.number()],
            |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?)),
        )?;
        let (bytes, count) = sizes.first().copied().unwrap_or_default();
        Ok((Bytes(bytes.unsigned_abs()), count.unsigned_abs()))
    }

    pub(crate) fn rows<T>(
        &self,
        sql: &str,
        values: &[&dyn ToSql],
        read: impl FnMut(&Row<'_>) -> rusqlite::Result<T>,
    ) -> Result<Vec<T>, RecordError> {
        let query = || {
            let mut statement = self.connection.prepare_cached(sql)?;
            let rows = statement.query_map(values, read)?;
            rows.collect::<rusqlite::Result<Vec<T>>>()
        };
        query().map_err(|e| self.failed(e))
    }
}

/// Drops what is older than this, or the oldest of what is more than that; for `homenode record prune`.
///
/// # Errors
/// As [`Archive::open`], and when it cannot be written.
pub fn prune(path: &Path, older: Option<Ns>, most: Option<Bytes>) -> Result<(), RecordError> {
    // Only what is there.
    drop(schema::open_to_read(path)?);
    let mut connection = schema::open_to_write(path)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = whole(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
    let (age, bytes) = (older.unwrap_or(Ns(u64::MAX)), most.unwrap_or(Bytes(u64::MAX)));
    let kept = Kind::ALL.map(|kind| (kind, age, Bytes(u64::MAX)));
    store::prune(&mut connection, path, now, &kept, bytes)?;
    // In parts, so that an agent can write in between.
    let unused = || connection.pragma_query_value(None, "freelist_count", |row| row.get::<_, i64>(0));
    let mut left = unused().map_err(|e| RecordError::new(path, e))?;
    while left > 0 {
        store::give_back(&connection, path)?;
        let now = unused().map_err(|e| RecordError::new(path, e))?;
        if now >= left {
            break;
        }
        left = now;
    }
    // What is dropped is still in the file until its log is worked in.
    let worked_in = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
    worked_in.map_err(|e| RecordError::new(path, e))
}

/// Columns of an event.
const EVENT: &str =
    "id, run, at_ns, wall_ns, last_wall_ns, count, kind, vm, name, policy, action, outcome, text, detail";

fn event(row: &Row<'_>) -> rusqlite::Result<EventRow> {
    Ok(EventRow {
        id: row.get(0)?,
        run: row.get(1)?,
        at_ns: row.get(2)?,
        wall_ns: row.get(3)?,
        last_wall_ns: row.get(4)?,
        count: row.get(5)?,
        kind: row.get(6)?,
        vm: row.get(7)?,
        name: row.get(8)?,
        policy: row.get(9)?,
        action: row.get(10)?,
        outcome: row.get(11)?,
        text: row.get(12)?,
        detail: json(row, 13)?,
    })
}

/// Periods of a history, run by run and in the order of the host's clock.
#[derive(Debug)]
pub struct Frames<'a> {
    archive: &'a Archive,
    span: (i64, i64),
    /// Number, run and count of those to come.
    blocks: std::vec::IntoIter<(i64, i64, i64)>,
    /// Of the block that is read.
    ready: std::vec::IntoIter<Frame>,
    tail: std::vec::IntoIter<(i64, i64, i64, Vec<u8>)>,
    /// A minute that became a block since the tail was read is in both: what was given is not given again.
    last: Option<(i64, Ns)>,
    damaged: Vec<String>,
    pick: Pick<'a>,
}

impl<'a> Frames<'a> {
    /// Reads only so much of each period; of those in the last minute there is more.
    #[must_use]
    pub fn only(self, pick: Pick<'a>) -> Frames<'a> {
        Frames { pick, ..self }
    }

    /// Whether all that was to be given could be read.
    ///
    /// # Errors
    /// When blocks are damaged: all others were given.
    pub fn whole(self) -> Result<(), RecordError> {
        let Frames { archive, damaged, .. } = self;
        match damaged.is_empty() {
            true => Ok(()),
            false => Err(RecordError::Damaged {
                path: archive.path.display().to_string(),
                what: format!("{} blocks cannot be read ({})", damaged.len(), damaged.join(", ")),
            }),
        }
    }

    /// The periods of the next block; none where it is damaged, or gone by now.
    fn read_block(&mut self, (id, run, count): (i64, i64, i64)) -> Result<(), RecordError> {
        let sql = "SELECT frames FROM block WHERE id = ?";
        let bytes = self.archive.rows(sql, &[&id], |row| packed(row, 0))?;
        let Some(bytes) = bytes.first() else { return Ok(()) };
        let Some(frames) = unpacked(bytes, count, self.pick) else {
            self.damaged.push(id.to_string());
            return Ok(());
        };
        let (from_ns, to_ns) = self.span;
        let frames = frames.into_iter().map(|(at, wall_ns, value)| Frame {
            run,
            at,
            wall_ns,
            value,
        });
        let within = frames.filter(|frame| (from_ns..=to_ns).contains(&frame.wall_ns));
        self.ready = within.collect::<Vec<_>>().into_iter();
        Ok(())
    }
}

impl Iterator for Frames<'_> {
    type Item = Result<Frame, RecordError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(frame) = self.ready.next() {
                self.last = Some((frame.run, frame.at));
                return Some(Ok(frame));
            }
            let Some(block) = self.blocks.next() else { break };
            if let Err(error) = self.read_block(block) {
                return Some(Err(error));
            }
        }
        loop {
            let (run, at, wall_ns, bytes) = self.tail.next()?;
            let at = Ns(at.unsigned_abs());
            let Some(value) = decompress(&bytes) else {
                self.damaged.push("of the last minute".to_owned());
                continue;
            };
            if self.last.is_none_or(|last| (run, at) > last) {
                return Some(Ok(Frame {
                    run,
                    at,
                    wall_ns,
                    value,
                }));
            }
        }
    }
}

fn json(row: &Row<'_>, at: usize) -> rusqlite::Result<Value> {
    let text: String = row.get(at)?;
    Ok(serde_json::from_str(&text).unwrap_or(Value::Null))
}

/// What was packed; nothing where there are no bytes, which is damage like any other.
pub(crate) fn packed(row: &Row<'_>, at: usize) -> rusqlite::Result<Vec<u8>> {
    Ok(row.get_ref(at)?.as_bytes().unwrap_or_default().to_vec())
}

/// The periods of a block, and of each what is wanted.
pub(crate) fn unpacked(bytes: &[u8], count: i64, pick: Pick<'_>) -> Option<Vec<(Ns, i64, Value)>> {
    let count = usize::try_from(count)
        .ok()
        .filter(|count| *count <= BLOCK_COUNT_MAX)?;
    let keys = [("at_ns", Pick::All), ("wall_ns", Pick::All), ("frame", pick)];
    let column = columns::read(&decompressed(bytes)?, Pick::Keys(&keys)).ok()?;
    let frames = columns::unpack(&column, count)?;
    let frame = |mut frame: Value| {
        let at = frame["at_ns"].as_i64()?;
        Some((
            Ns(at.unsigned_abs()),
            frame["wall_ns"].as_i64()?,
            frame["frame"].take(),
        ))
    };
    frames.into_iter().map(frame).collect()
}
