//! Reads a history: what a host did between two times.

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use homenode_host::EventRecord;
use homenode_units::{Bytes, Ns, VmId};
use rusqlite::{Connection, Row, ToSql};
use serde::Serialize;
use serde_json::Value;

use crate::columns::{self, Pick};
use crate::schema::{self, Kind, RecordError};
use crate::store::{self, BLOCK_COUNT_MAX, decompress, decompressed, whole};

/// A history, opened for reading.
#[derive(Debug)]
pub struct Archive {
    path: PathBuf,
    connection: Connection,
}

/// A run of the agent.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// The run's id in this history.
    pub id: i64,
    /// When the run began, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Version and commit.
    pub version: String,
    /// The host that the run was on.
    pub host: String,
    /// Machine and settings of the run.
    pub detail: Value,
}

/// One recorded period.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame {
    /// Id of the run that the period belongs to.
    pub run: i64,
    /// Time of the period, on the host's monotonic clock.
    pub at: Ns,
    /// Time of the period on the wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// The status or the sample.
    pub value: Value,
}

/// An event of a history, and the number of times it occurred in a row.
#[derive(Clone, Debug, PartialEq)]
pub struct EventRow {
    /// Id of the event, by which other records refer to it.
    pub id: i64,
    /// Id of the run that the event belongs to.
    pub run: i64,
    /// Time of the event on the wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Time of the event's last occurrence on the wall clock.
    pub last_wall_ns: i64,
    /// Number of occurrences.
    pub count: i64,
    /// The event.
    pub record: EventRecord,
    /// Everything about the event, for programs.
    pub detail: Value,
}

/// Selects events. Without any field, all events.
#[derive(Clone, Debug, Default)]
pub struct Wanted {
    /// Only events at or after this time, in nanoseconds since 1970.
    pub from_ns: Option<i64>,
    /// Only events at or before this time.
    pub to_ns: Option<i64>,
    /// Only events about the VM with this name or id.
    pub vm: Option<String>,
    /// Only events of this policy.
    pub policy: Option<String>,
    /// Only events of this kind.
    pub kind: Option<String>,
    /// Only the event with this id.
    pub id: Option<i64>,
    /// Only events before the event with this id.
    pub before_id: Option<i64>,
    /// At most this many; the last ones if there are more.
    pub limit: Option<u32>,
}

impl Archive {
    /// Opens a history.
    ///
    /// # Errors
    /// If there is no history, or another program or a newer version wrote it.
    pub fn open(path: &Path) -> Result<Archive, RecordError> {
        Ok(Archive {
            path: path.to_owned(),
            connection: schema::open_to_read(path)?,
        })
    }

    fn failed(&self, error: rusqlite::Error) -> RecordError {
        RecordError::new(&self.path, error)
    }

    /// Returns all runs, oldest first.
    ///
    /// # Errors
    /// If the database cannot be read.
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

    /// Returns events, oldest first.
    ///
    /// # Errors
    /// If the database cannot be read.
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

    /// Calls `each` for every period between two times (nanoseconds since 1970), run by run and in the order of the host's
    /// clock, until it returns false.
    ///
    /// # Errors
    /// As for [`Archive::runs`]. Also if blocks are damaged, but only after all others were read.
    pub fn frames(
        &self,
        kind: Kind,
        span: (i64, i64),
        each: impl FnMut(Frame) -> bool,
    ) -> Result<(), RecordError> {
        self.frames_of(None, kind, span, each)
    }

    /// Like [`Archive::frames`], for the periods of one run, or of all runs.
    ///
    /// # Errors
    /// If the database cannot be read, or blocks are damaged; all others are read before that is reported.
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

    /// Iterates over the periods of one run, or of all runs, between two times. Only one block at a time is in memory.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn iter(&self, run: Option<i64>, kind: Kind, span: (i64, i64)) -> Result<Frames<'_>, RecordError> {
        let number = kind.number();
        let (from_ns, to_ns) = span;
        // Reads the tail before the blocks: if a minute becomes a block in between, it is read twice, but returned once.
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
            apart: Ns(0),
        })
    }

    /// Returns up to `count` events of a run that follow the event with this id, in order.
    ///
    /// # Errors
    /// If the database cannot be read.
    pub fn events_after(&self, run: i64, id: i64, count: u32) -> Result<Vec<EventRow>, RecordError> {
        let sql = format!("SELECT {EVENT} FROM event WHERE run = ?1 AND id > ?2 ORDER BY id LIMIT ?3");
        self.rows(&sql, &[&run, &id, &count], event)
    }

    /// Returns the first and the last recorded time, in nanoseconds since 1970; `None` if nothing is recorded.
    ///
    /// # Errors
    /// If the database cannot be read.
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

    /// Returns the bytes of all blocks of this kind, and the number of periods in them.
    ///
    /// # Errors
    /// If the database cannot be read.
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

/// Drops data that is older than `older`, and the oldest data that exceeds `most`, for `homenode record prune`.
///
/// # Errors
/// As for [`Archive::open`], and if the history cannot be written.
pub fn prune(path: &Path, older: Option<Ns>, most: Option<Bytes>) -> Result<(), RecordError> {
    // Fails if there is no history; the next line would create one.
    drop(schema::open_to_read(path)?);
    let mut connection = schema::open_to_write(path)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = whole(u64::try_from(now.as_nanos()).unwrap_or(u64::MAX));
    let (age, bytes) = (older.unwrap_or(Ns(u64::MAX)), most.unwrap_or(Bytes(u64::MAX)));
    let kept = Kind::ALL.map(|kind| (kind, age, Bytes(u64::MAX)));
    store::prune(&mut connection, path, now, &kept, bytes)?;
    // Works in parts, so that an agent can write in between.
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
    // The main file still has the dropped data until the write-ahead log is checkpointed.
    let worked_in = connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
    worked_in.map_err(|e| RecordError::new(path, e))
}

/// The columns of an event, for queries.
const EVENT: &str =
    "id, run, at_ns, wall_ns, last_wall_ns, count, kind, vm, name, policy, action, outcome, text, detail";

fn event(row: &Row<'_>) -> rusqlite::Result<EventRow> {
    let vm: Option<String> = row.get(7)?;
    let record = EventRecord {
        at: Ns(row.get::<_, i64>(2)?.unsigned_abs()),
        kind: row.get(6)?,
        vm: vm.and_then(|vm| VmId::parse(&vm)),
        name: row.get(8)?,
        policy: row.get(9)?,
        action: row.get(10)?,
        outcome: row.get(11)?,
        text: row.get(12)?,
    };
    Ok(EventRow {
        id: row.get(0)?,
        run: row.get(1)?,
        wall_ns: row.get(3)?,
        last_wall_ns: row.get(4)?,
        count: row.get(5)?,
        record,
        detail: json(row, 13)?,
    })
}

/// Iterates over the periods of a history, run by run and in the order of the host's clock.
#[derive(Debug)]
pub struct Frames<'a> {
    archive: &'a Archive,
    span: (i64, i64),
    /// Ids, runs and period counts of the blocks that are still to be read.
    blocks: std::vec::IntoIter<(i64, i64, i64)>,
    /// Periods of the current block that are still to be returned.
    ready: std::vec::IntoIter<Frame>,
    tail: std::vec::IntoIter<(i64, i64, i64, Vec<u8>)>,
    /// Run and time of the last period returned. A minute that became a block after the tail was read is in both, but must not be
    /// returned twice.
    last: Option<(i64, Ns)>,
    damaged: Vec<String>,
    pick: Pick<'a>,
    apart: Ns,
}

impl<'a> Frames<'a> {
    /// Reads only this part of each period. Periods of the last minute may have more.
    #[must_use]
    pub fn only(self, pick: Pick<'a>) -> Frames<'a> {
        Frames { pick, ..self }
    }

    /// Skips each period of a run that comes sooner than this after the last one returned.
    #[must_use]
    pub fn apart(self, apart: Ns) -> Frames<'a> {
        Frames { apart, ..self }
    }

    /// Checks that all periods could be read.
    ///
    /// # Errors
    /// If blocks are damaged; the periods of all others were returned.
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

    /// Makes the periods of the next block ready. There are none if the block is damaged, or was deleted meanwhile.
    fn read_block(&mut self, (id, run, count): (i64, i64, i64)) -> Result<(), RecordError> {
        let sql = "SELECT frames FROM block WHERE id = ?";
        let bytes = self.archive.rows(sql, &[&id], |row| packed(row, 0))?;
        let Some(bytes) = bytes.first() else { return Ok(()) };
        let (from_ns, to_ns) = self.span;
        let (apart, mut last) = (self.apart, self.last);
        let is_wanted = |at: Ns, wall_ns: i64| {
            let is_wanted = (from_ns..=to_ns).contains(&wall_ns) && is_apart(last, (run, at), apart);
            if is_wanted {
                last = Some((run, at));
            }
            is_wanted
        };
        let Some(frames) = unpacked(bytes, count, self.pick, is_wanted) else {
            self.damaged.push(id.to_string());
            return Ok(());
        };
        let frames = frames.into_iter().map(|(at, wall_ns, value)| Frame {
            run,
            at,
            wall_ns,
            value,
        });
        self.ready = frames.collect::<Vec<_>>().into_iter();
        Ok(())
    }
}

/// Returns true if a period comes at least `apart` after the last one returned, or belongs to another run.
fn is_apart(last: Option<(i64, Ns)>, (run, at): (i64, Ns), apart: Ns) -> bool {
    last.is_none_or(|(of, last)| of != run || at.saturating_sub(last) >= apart)
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
            let is_new = self.last.is_none_or(|last| (run, at) > last);
            if is_new && is_apart(self.last, (run, at), self.apart) {
                self.last = Some((run, at));
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

/// Returns a column's packed bytes. They are empty if the column has another type; decoding them then fails as damaged.
pub(crate) fn packed(row: &Row<'_>, at: usize) -> rusqlite::Result<Vec<u8>> {
    Ok(row.get_ref(at)?.as_bytes().unwrap_or_default().to_vec())
}

/// Unpacks those periods of a block whose times are wanted, and of each period the wanted part.
pub(crate) fn unpacked(
    bytes: &[u8],
    count: i64,
    pick: Pick<'_>,
    mut is_wanted: impl FnMut(Ns, i64) -> bool,
) -> Option<Vec<(Ns, i64, Value)>> {
    let count = usize::try_from(count)
        .ok()
        .filter(|count| *count <= BLOCK_COUNT_MAX)?;
    let text = decompressed(bytes)?;
    let keys = [("at_ns", Pick::All), ("wall_ns", Pick::All)];
    let times = columns::read(&text, Pick::Keys(&keys)).ok()?;
    let time = |time: &Value| {
        Some((
            Ns(time["at_ns"].as_i64()?.unsigned_abs()),
            time["wall_ns"].as_i64()?,
        ))
    };
    let times = columns::unpack(&times, count)?;
    let times: Vec<(Ns, i64)> = times.iter().map(time).collect::<Option<_>>()?;
    let wanted = |place: &usize| is_wanted(times[*place].0, times[*place].1);
    let places: Vec<usize> = (0..count).filter(wanted).collect();
    if places.is_empty() {
        return Some(Vec::new());
    }
    let frames = columns::read(&text, Pick::Keys(&[("frame", pick)])).ok()?;
    let frames = columns::unpack_at(&frames, count, &places)?;
    let frame = |(mut frame, place): (Value, usize)| (times[place].0, times[place].1, frame["frame"].take());
    Some(frames.into_iter().zip(places).map(frame).collect())
}
