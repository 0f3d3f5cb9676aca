//! Writes a history: adds periods, turns each minute of them into a block, and drops what exceeds the limits.

use std::fs;
use std::io::{self, BufWriter};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use homenode_host::EventRecord;
use homenode_units::{Bytes, Ns};
use rusqlite::{Connection, Transaction, TransactionBehavior, params};
use rustix::fs::FlockOperation;
use serde_json::Value;
use zstd::bulk::Compressor;

use crate::document::{Document, Documents};
use crate::pack::Columns;
use crate::schema::{self, BLOCK_BYTES_MAX, Kind, RecordError};

/// Time that a block spans.
const BLOCK: Ns = Ns::from_secs(60);
/// Most periods of a block. An agent may sample every 10 ms.
pub(crate) const BLOCK_COUNT_MAX: usize = 6000;
/// Repetitions of an event within this time share one row.
const AGAIN: Ns = Ns::from_secs(60);
/// zstd's compression level. A higher level would take twice as long without shrinking samples, which are most of the data.
const LEVEL: i32 = 1;
/// Bytes of a block's text that are compressed at once.
const TEXT_BYTES: usize = 64 << 10;
/// How long the wall clock must be stable, after it was changed, before data is dropped for its age. Otherwise a clock that jumps
/// ahead for a while would make all data look old.
const BELIEVED: Ns = Ns::from_secs(600);
/// A larger difference is more than any step of a synchronized clock, in nanoseconds.
const STEP_NS: i64 = 60_000_000_000;
/// Number of pages that are returned to the file system at once.
const VACUUM_PAGES: u32 = 2000;

/// Limits on what is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Age limit of status and events.
    pub status: Ns,
    /// Age limit of samples.
    pub samples: Ns,
    /// Size limit of samples.
    pub samples_bytes: Bytes,
    /// Size limit of the whole history.
    pub bytes: Bytes,
}

/// Describes a run.
#[derive(Clone, Debug)]
pub struct Begin {
    /// When the run began, on the wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// The program's version and commit.
    pub version: String,
    /// The host that the run is on.
    pub host: String,
    /// Machine and settings of the run.
    pub detail: Value,
}

/// A decision that was recorded, and where to find it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// Id of the event's row in `event`.
    pub id: i64,
    /// Wall-clock time, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// The policy that decided.
    pub policy: String,
    /// The action that was decided on.
    pub action: String,
    /// The outcome.
    pub outcome: String,
}

impl Written {
    /// Describes an event that was written to row `id`; returns `None` if it is not a decision.
    fn of(record: &EventRecord, id: i64, wall_ns: i64) -> Option<Written> {
        if record.kind != EventRecord::DECIDED {
            return None;
        }
        Some(Written {
            id,
            wall_ns,
            policy: record.policy.clone()?,
            action: record.action.clone()?,
            outcome: record.outcome.clone()?,
        })
    }
}

/// The parts of a period that are recorded in addition to its [`Documents`].
#[derive(Clone, Debug)]
pub struct Period {
    /// Time of the period, on the host's monotonic clock.
    pub at: Ns,
    /// Time of the period on the wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// The period's events, each also in full, for programs.
    pub events: Vec<(EventRecord, Value)>,
}

/// A history, opened for writing.
pub(crate) struct Store {
    path: PathBuf,
    connection: Connection,
    /// The lock, which is held while the history is open, and released after the connection is closed.
    _alone: Alone,
    limits: Limits,
    run: i64,
    /// The minute that is being recorded.
    minute: Option<Minute>,
    /// Since when the wall clock has been in step with the host's monotonic clock, and its offset from that.
    steady: Option<(Ns, i64)>,
    /// Whether a minute has ended since the last prune.
    is_prune_due: bool,
    /// Compresses the rows of the tail.
    compressor: Compressor<'static>,
    /// The compressed documents of a period, by kind.
    packed: [Vec<u8>; Kind::ALL.len()],
}

struct Minute {
    begun: Ns,
    last_wall_ns: i64,
    /// The minute's periods by kind. The tail has them too, but need not be read again.
    frames: [Columns; Kind::ALL.len()],
}

impl Store {
    /// Opens the history for a new run, and creates it if it is missing. If an agent was killed, turns its last minute into a
    /// block. Moves a damaged history aside, with a notice.
    pub(crate) fn open(
        path: &Path,
        begin: &Begin,
        limits: Limits,
    ) -> Result<(Store, Vec<String>), RecordError> {
        let failed = |e: std::io::Error| RecordError::new(path, e);
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(dir)
                .map_err(failed)?;
        }
        let mut notices = Vec::new();
        let store = match Store::begin(path, begin, limits) {
            Err(RecordError::Damaged { path: name, what }) => {
                let aside = format!("{name}.damaged-{}", begin.wall_ns / 1_000_000_000);
                for end in ["-wal", "-shm", ""] {
                    let moved = fs::rename(beside(path, end), format!("{aside}{end}"));
                    // The files with the first two endings may be missing.
                    moved.or_else(|e| if end.is_empty() { Err(failed(e)) } else { Ok(()) })?;
                }
                notices.push(format!(
                    "the history {name} is damaged ({what}): moved it to {aside}; starting a new one"
                ));
                Store::begin(path, begin, limits)?
            }
            store => store?,
        };
        Ok((store, notices))
    }

    fn begin(path: &Path, begin: &Begin, limits: Limits) -> Result<Store, RecordError> {
        // Locks another file than the database. On NFS and 9p all locks of a file conflict, so SQLite would wait for ours.
        let alone = Alone::with(path)?;
        // SQLite would create the file with the permissions that the umask allows.
        own_file(path)?;
        let connection = schema::open_to_write(path)?;
        let check: rusqlite::Result<String> =
            connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0));
        let said = check.map_err(|e| RecordError::of_sqlite(path, e))?;
        if said != "ok" {
            return Err(RecordError::Damaged {
                path: path.display().to_string(),
                what: said,
            });
        }
        let mut store = Store {
            path: path.to_owned(),
            connection,
            _alone: alone,
            limits,
            run: 0,
            minute: None,
            steady: None,
            is_prune_due: false,
            compressor: Compressor::new(LEVEL).map_err(|e| RecordError::new(path, e))?,
            packed: Default::default(),
        };
        store.within(|change| {
            let runs: Vec<i64> = change
                .prepare("SELECT DISTINCT run FROM tail")?
                .query_map([], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            for run in runs {
                close_minute(change, run, &left_in_tail(change, run)?)?;
            }
            change.execute(
                "INSERT INTO run (wall_ns, version, host, detail) VALUES (?, ?, ?, ?)",
                params![begin.wall_ns, begin.version, begin.host, begin.detail.to_string()],
            )?;
            Ok(())
        })?;
        store.run = store.connection.last_insert_rowid();
        Ok(store)
    }

    /// Runs `work` in a transaction.
    fn within<T>(
        &mut self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, RecordError> {
        let path = &self.path;
        let failed = |e: rusqlite::Error| RecordError::new(path, e);
        let change = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(failed)?;
        let done = work(&change).map_err(failed)?;
        change.commit().map_err(failed)?;
        Ok(done)
    }

    /// Writes a period. Returns its decisions, with the ids of their rows.
    pub(crate) fn append(
        &mut self,
        period: &Period,
        documents: &Documents,
    ) -> Result<Vec<Written>, RecordError> {
        for (kind, document) in documents.iter() {
            let packed = compress(
                &mut self.compressor,
                document.text(),
                &mut self.packed[kind.index()],
            );
            packed.map_err(|e| RecordError::new(&self.path, e))?;
        }
        let run = self.run;
        let minute = self.minute.take();
        let packed = std::mem::take(&mut self.packed);
        // If the wall clock was set back, a new block begins, because times within a block must only grow.
        let is_over = minute.as_ref().is_some_and(|minute| {
            period.at.saturating_sub(minute.begun) >= BLOCK
                || period.wall_ns < minute.last_wall_ns
                || minute.frames[0].len() >= BLOCK_COUNT_MAX
        });
        let written = self.within(|change| {
            if let Some(minute) = minute.as_ref().filter(|_| is_over) {
                close_minute(change, run, &minute.frames)?;
            }
            for (kind, _) in documents.iter() {
                write_tail(change, run, period, (kind, &packed[kind.index()]))?;
            }
            let mut decisions = Vec::new();
            for (record, detail) in &period.events {
                let id = write_event(change, (run, period.wall_ns), record, detail)?;
                decisions.extend(id.and_then(|id| Written::of(record, id, period.wall_ns)));
            }
            Ok(decisions)
        });
        self.packed = packed;
        let decisions = match written {
            Ok(decisions) => decisions,
            Err(error) => {
                self.minute = minute;
                return Err(error);
            }
        };
        self.take_in(minute.filter(|_| !is_over), period, documents);
        self.is_prune_due |= is_over;
        // Reported at the end: an invalid document must not affect the others.
        let failed = documents.failed().map(|e| RecordError::new(&self.path, e));
        failed.map_or(Ok(decisions), Err)
    }

    /// Adds a period, which is in the tail already, to the minute; without a minute, begins one.
    fn take_in(&mut self, minute: Option<Minute>, period: &Period, documents: &Documents) {
        let (at, wall_ns) = (period.at, period.wall_ns);
        let mut minute = minute.unwrap_or(Minute {
            begun: at,
            last_wall_ns: wall_ns,
            frames: Default::default(),
        });
        minute.last_wall_ns = wall_ns;
        for (kind, document) in documents.iter() {
            minute.frames[kind.index()].push(whole(at.0), wall_ns, document);
        }
        self.minute = Some(minute);
        let ahead_ns = wall_ns.saturating_sub(whole(at.0));
        let is_steady = |(_, was): &(Ns, i64)| ahead_ns.saturating_sub(*was).saturating_abs() < STEP_NS;
        self.steady = Some(self.steady.filter(is_steady).unwrap_or((at, ahead_ns)));
    }

    /// Ends the run, by turning the tail into blocks.
    pub(crate) fn close(&mut self) -> Result<(), RecordError> {
        let (run, minute) = (self.run, self.minute.take());
        let Some(minute) = minute else { return Ok(()) };
        self.within(|change| close_minute(change, run, &minute.frames))
    }

    /// Drops what exceeds the limits, if a minute has ended since the last call.
    pub(crate) fn prune(&mut self) -> Result<(), RecordError> {
        let (Some(minute), Some((since, _))) = (&self.minute, self.steady) else {
            return Ok(());
        };
        if !std::mem::take(&mut self.is_prune_due) {
            return Ok(());
        }
        let Limits {
            status,
            samples,
            samples_bytes,
            bytes,
        } = self.limits;
        let is_believed = minute.begun.saturating_sub(since) >= BELIEVED;
        let age = |age: Ns| if is_believed { age } else { Ns(u64::MAX) };
        prune(
            &mut self.connection,
            &self.path,
            minute.last_wall_ns,
            &[
                (Kind::Status, age(status), bytes),
                (Kind::Sample, age(samples), samples_bytes),
            ],
            bytes,
        )
    }
}

/// The lock of a history's only writer.
struct Alone(fs::File);

impl Alone {
    fn with(path: &Path) -> Result<Alone, RecordError> {
        let file = own_file(&beside(path, "-lock"))?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Alone(file)),
            Err(_) => Err(RecordError::new(
                path,
                "another agent writes to it: name another file with --history",
            )),
        }
    }
}

impl Drop for Alone {
    /// Unlocks explicitly. Closing is not enough: a child between fork and exec still has the file open, and so holds the lock.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.0, FlockOperation::Unlock);
    }
}

/// Returns the path of a file next to a history.
fn beside(path: &Path, end: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

/// Opens a file, or creates one that only its owner can read, because it tells what VMs do. Root writes only to root's files, and
/// another user only to their own.
fn own_file(path: &Path) -> Result<fs::File, RecordError> {
    let failed = |e: std::io::Error| RecordError::new(path, e);
    schema::check_kind(path)?;
    let file = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)
        .map_err(failed)?;
    let owner = file.metadata().map_err(failed)?.uid();
    let own = rustix::process::geteuid().as_raw();
    if owner == own {
        return Ok(file);
    }
    let cause = format!(
        "it belongs to user {owner}, but this process runs as user {own}: remove it, or name another file with --history"
    );
    Err(RecordError::new(path, cause))
}

/// Drops blocks that are too old, then the oldest blocks beyond the size limits. Events go with the status.
pub(crate) fn prune(
    connection: &mut Connection,
    path: &Path,
    now_wall_ns: i64,
    kept: &[(Kind, Ns, Bytes)],
    all: Bytes,
) -> Result<(), RecordError> {
    let failed = |e: rusqlite::Error| RecordError::new(path, e);
    let change = connection.transaction().map_err(failed)?;
    let used = || {
        let sql = "SELECT (page_count - freelist_count) * page_size
                   FROM pragma_page_count, pragma_freelist_count, pragma_page_size";
        change.query_row(sql, [], |row| row.get::<_, i64>(0))
    };
    let drop_old = || -> rusqlite::Result<()> {
        for (kind, age, bytes) in kept {
            let oldest = now_wall_ns.saturating_sub(whole(age.0));
            // A clock that was far ahead for a while leaves blocks dated in the future. Only the size limits drop them: these go
            // by id, in which such blocks are newer than the blocks before them.
            change.execute(
                "DELETE FROM block WHERE kind = ? AND last_wall_ns < ?",
                params![kind.number(), oldest],
            )?;
            if *kind == Kind::Status {
                change.execute("DELETE FROM event WHERE last_wall_ns < ?", params![oldest])?;
            }
            // Adding up all blocks takes a while, and is not needed if all data together is below the limit.
            if used()? <= whole(bytes.0) {
                continue;
            }
            change.execute(
                "DELETE FROM block WHERE kind = ?1 AND id <= (
                    SELECT max(id) FROM (
                        SELECT id, sum(length(frames)) OVER (ORDER BY id DESC) AS so_far FROM block WHERE kind = ?1
                    ) WHERE so_far > ?2
                )",
                params![kind.number(), whole(bytes.0)],
            )?;
        }
        loop {
            let drop_first = |table, count| {
                let sql = format!(
                    "DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id LIMIT {count})"
                );
                change.execute(&sql, [])
            };
            if used()? <= whole(all.0) || (drop_first("block", 16)? == 0 && drop_first("event", 256)? == 0) {
                break;
            }
            change.execute(
                "DELETE FROM event WHERE last_wall_ns < (SELECT min(first_wall_ns) FROM block WHERE kind = 0)",
                [],
            )?;
        }
        // Drops the rows of runs that are older than everything that is left: later rows belong to later runs.
        change.execute(
            "DELETE FROM run WHERE id < (SELECT max(id) FROM run) AND id < ifnull((SELECT min(run) FROM (
                SELECT * FROM (SELECT run FROM block ORDER BY id LIMIT 1)
                UNION ALL SELECT * FROM (SELECT run FROM event ORDER BY id LIMIT 1)
                UNION ALL SELECT run FROM tail
             )), id + 1)",
            [],
        )?;
        Ok(())
    };
    drop_old().map_err(failed)?;
    change.commit().map_err(failed)?;
    give_back(connection, path)
}

/// Returns some unused pages to the file system.
pub(crate) fn give_back(connection: &Connection, path: &Path) -> Result<(), RecordError> {
    let failed = |e: rusqlite::Error| RecordError::new(path, e);
    let mut vacuum = connection
        .prepare(&format!("PRAGMA incremental_vacuum({VACUUM_PAGES})"))
        .map_err(failed)?;
    let mut rows = vacuum.query([]).map_err(failed)?;
    while rows.next().map_err(failed)?.is_some() {}
    Ok(())
}

/// Reads the periods that were left in the tail by an agent that was killed.
fn left_in_tail(change: &Transaction<'_>, run: i64) -> rusqlite::Result<[Columns; Kind::ALL.len()]> {
    let mut left: [Columns; Kind::ALL.len()] = Default::default();
    let mut document = Document::default();
    for (frames, kind) in left.iter_mut().zip(Kind::ALL) {
        let mut rows = change.prepare_cached(
            "SELECT at_ns, wall_ns, frame FROM tail WHERE run = ? AND kind = ? ORDER BY id",
        )?;
        let rows = rows.query_map(params![run, kind.number()], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get::<_, Vec<u8>>(2)?))
        })?;
        for row in rows {
            let (at, wall_ns, bytes) = row?;
            // An unreadable period does not affect the others.
            let read = decompressed(&bytes).and_then(|text| document.read(&text).ok());
            if read.is_some() {
                frames.push(at, wall_ns, &document);
            }
        }
    }
    Ok(left)
}

/// Compresses a text into a reused buffer.
fn compress(compressor: &mut Compressor<'_>, text: &[u8], to: &mut Vec<u8>) -> io::Result<()> {
    to.clear();
    to.reserve(zstd::zstd_safe::compress_bound(text.len()));
    compressor.compress_to_buffer(text, to).map(drop)
}

/// Writes a period's compressed documents to the tail.
fn write_tail(
    change: &Transaction<'_>,
    run: i64,
    period: &Period,
    (kind, bytes): (Kind, &[u8]),
) -> rusqlite::Result<()> {
    change
        .prepare_cached("INSERT INTO tail (run, kind, at_ns, wall_ns, frame) VALUES (?, ?, ?, ?, ?)")?
        .execute(params![
            run,
            kind.number(),
            whole(period.at.0),
            period.wall_ns,
            bytes
        ])?;
    Ok(())
}

/// Turns the periods of a run that are in the tail into blocks.
fn close_minute(
    change: &Transaction<'_>,
    run: i64,
    frames: &[Columns; Kind::ALL.len()],
) -> rusqlite::Result<()> {
    let failed = |e: io::Error| rusqlite::Error::ToSqlConversionFailure(e.into());
    for (kind, frames) in Kind::ALL.into_iter().zip(frames) {
        let Some([(first_at, first_wall), (last_at, last_wall)]) = frames.span() else {
            continue;
        };
        let bytes = block_of(frames).map_err(failed)?;
        change.execute(
            "INSERT INTO block (run, kind, first_at_ns, last_at_ns, first_wall_ns, last_wall_ns, count, frames)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                run,
                kind.number(),
                first_at,
                last_at,
                first_wall,
                last_wall,
                whole(frames.len() as u64),
                bytes
            ],
        )?;
    }
    change.execute("DELETE FROM tail WHERE run = ?", params![run])?;
    Ok(())
}

/// Returns the content of a block with these periods. The text is never in memory as a whole, because a minute of a thousand VMs
/// has tens of megabytes.
fn block_of(frames: &Columns) -> io::Result<Vec<u8>> {
    let compressor = zstd::stream::write::Encoder::new(Vec::new(), LEVEL)?;
    let mut text = BufWriter::with_capacity(TEXT_BYTES, compressor);
    frames.write(&mut text)?;
    text.into_inner()?.finish()
}

/// Writes an event. Returns the id of its row if it is a decision or not a repetition; other events share an earlier row.
fn write_event(
    change: &Transaction<'_>,
    (run, wall_ns): (i64, i64),
    record: &EventRecord,
    detail: &Value,
) -> rusqlite::Result<Option<i64>> {
    let EventRecord {
        at,
        kind,
        vm,
        name,
        policy,
        action,
        outcome,
        text,
    } = record;
    let vm = vm.map(|vm| vm.to_string());
    let since = wall_ns.saturating_sub(whole(AGAIN.0));
    let again = change
        .prepare_cached(
            "UPDATE event SET count = count + 1, last_wall_ns = ?1 WHERE id = (
                SELECT id FROM event WHERE last_wall_ns >= ?2 AND run = ?3 AND kind = ?4 AND vm IS ?5 AND policy IS ?6 AND text = ?7
                ORDER BY last_wall_ns DESC LIMIT 1
            ) AND kind <> ?8",
        )?
        .execute(params![
            wall_ns,
            since,
            run,
            kind,
            vm,
            policy,
            text,
            EventRecord::DECIDED
        ])?;
    if again > 0 {
        return Ok(None);
    }
    change
        .prepare_cached(
            "INSERT INTO event (run, at_ns, wall_ns, last_wall_ns, count, kind, vm, name, policy, action, outcome, text, detail)
             VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![
            run,
            whole(at.0),
            wall_ns,
            wall_ns,
            kind,
            vm,
            name,
            policy,
            action,
            outcome,
            text,
            detail.to_string()
        ])?;
    Ok(Some(change.last_insert_rowid()))
}

pub(crate) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Decompresses and parses JSON; `None` if it is damaged or larger than any block.
pub(crate) fn decompress(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(&decompressed(bytes)?).ok()
}

/// Decompresses text.
pub(crate) fn decompressed(bytes: &[u8]) -> Option<Vec<u8>> {
    use std::io::Read as _;
    let mut json = Vec::new();
    let reader = zstd::stream::read::Decoder::new(bytes).ok()?;
    reader
        .take(BLOCK_BYTES_MAX as u64 + 1)
        .read_to_end(&mut json)
        .ok()?;
    (json.len() <= BLOCK_BYTES_MAX).then_some(json)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_history_is_free_once_its_writer_is_done_though_a_child_has_the_lock_file_open() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("history.sqlite");
        let alone = Alone::with(&path).unwrap();
        let of_a_child = alone.0.try_clone().unwrap();
        assert!(Alone::with(&path).is_err());
        drop(alone);
        assert!(Alone::with(&path).is_ok());
        drop(of_a_child);
    }
}
