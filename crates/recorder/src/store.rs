//! The writing end: periods as they come, minutes of them as blocks, and no more than there is room for.

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use homenode_units::{Bytes, Ns};
use rusqlite::{Connection, Transaction, TransactionBehavior, params};
use serde_json::{Value, json};

use crate::columns;
use crate::schema::{self, BLOCK_BYTES_MAX, Kind, RecordError};

/// How long a block is.
const BLOCK: Ns = Ns::from_secs(60);
/// Most periods of a block: an agent may look every 10 ms.
pub(crate) const BLOCK_COUNT_MAX: usize = 6000;
/// What happens again within this time is one row.
const AGAIN: Ns = Ns::from_secs(60);
/// How hard zstd tries: with what is written each period, and with what stays.
const TAIL_LEVEL: i32 = 1;
const BLOCK_LEVEL: i32 = 5;
/// Pages that are given back to the disk at once.
const VACUUM_PAGES: u32 = 2000;

/// How much is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long status and events are.
    pub status: Ns,
    /// How long samples are.
    pub samples: Ns,
    /// How much room samples may take.
    pub samples_bytes: Bytes,
    /// How much room everything may take together.
    pub bytes: Bytes,
}

/// What a run is.
#[derive(Clone, Debug)]
pub struct Begin {
    /// When, by the wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// The program's version and commit.
    pub version: String,
    /// What it runs on.
    pub host: String,
    /// Everything else: machine, settings.
    pub detail: Value,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// What it is: `decided`, `found`, `refused` and so on.
    pub kind: String,
    /// The VM's id, where it is about one.
    pub vm: Option<String>,
    /// Its name.
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

/// What there is to keep of one period.
#[derive(Clone, Debug)]
pub struct Period {
    /// The host's monotonic clock.
    pub at: Ns,
    /// The wall clock, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// What the agent makes of the host.
    pub status: Value,
    /// What the host said.
    pub sample: Option<Value>,
    /// What happened.
    pub events: Vec<Event>,
}

/// A history that is written to.
#[derive(Debug)]
pub(crate) struct Store {
    path: PathBuf,
    connection: Connection,
    limits: Limits,
    run: i64,
    /// The minute that is not over.
    minute: Option<Minute>,
}

#[derive(Debug)]
struct Minute {
    begun: Ns,
    last_wall_ns: i64,
    /// Its periods by kind, as the tail holds them: so they need not be read again.
    frames: [Vec<Value>; Kind::ALL.len()],
}

impl Store {
    /// Opens it, or makes it, for a run that begins; what an agent that was killed left in its last minute becomes a block. One
    /// that is damaged is set aside, and said.
    pub fn open(path: &Path, begin: &Begin, limits: Limits) -> Result<(Store, Vec<String>), RecordError> {
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
                    let moved = fs::rename(format!("{name}{end}"), format!("{aside}{end}"));
                    // The first two need not be there.
                    moved.or_else(|e| if end.is_empty() { Err(failed(e)) } else { Ok(()) })?;
                }
                notices.push(format!(
                    "the history {name} is damaged ({what}); it is set aside as {aside}, and a new one begins"
                ));
                Store::begin(path, begin, limits)?
            }
            store => store?,
        };
        Ok((store, notices))
    }

    fn begin(path: &Path, begin: &Begin, limits: Limits) -> Result<Store, RecordError> {
        // The owner's alone: names of VMs, and what they do.
        let made = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .custom_flags(rustix::fs::OFlags::NOFOLLOW.bits().cast_signed())
            .open(path);
        made.map_err(|e| RecordError::new(path, e))?;
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
            limits,
            run: 0,
            minute: None,
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

    /// Does all of this, or nothing.
    fn within<T>(
        &mut self,
        work: impl FnOnce(&Transaction<'_>) -> rusqlite::Result<T>,
    ) -> Result<T, RecordError> {
        let path = self.path.clone();
        let failed = |e: rusqlite::Error| RecordError::new(&path, e);
        let change = self
            .connection
            .transaction_with_behavior(TransactionBehavior::Immediate)
            .map_err(failed)?;
        let done = work(&change).map_err(failed)?;
        change.commit().map_err(failed)?;
        Ok(done)
    }

    /// Writes a period down.
    pub fn append(&mut self, period: Period) -> Result<(), RecordError> {
        let run = self.run;
        let minute = self.minute.take();
        // A clock that was set back begins a new block: times within one only grow.
        let is_over = minute.as_ref().is_some_and(|minute| {
            period.at.saturating_sub(minute.begun) >= BLOCK
                || period.wall_ns < minute.last_wall_ns
                || minute.frames[0].len() >= BLOCK_COUNT_MAX
        });
        let written = self.within(|change| {
            if let Some(minute) = minute.as_ref().filter(|_| is_over) {
                close_minute(change, run, &minute.frames)?;
            }
            write_tail(change, run, &period)?;
            for event in &period.events {
                write_event(change, run, &period, event)?;
            }
            Ok(())
        });
        if let Err(error) = written {
            self.minute = minute;
            return Err(error);
        }
        let mut minute = minute.filter(|_| !is_over).unwrap_or(Minute {
            begun: period.at,
            last_wall_ns: period.wall_ns,
            frames: Default::default(),
        });
        minute.last_wall_ns = period.wall_ns;
        let Period {
            at,
            wall_ns,
            status,
            sample,
            ..
        } = period;
        for (frames, value) in minute.frames.iter_mut().zip([Some(status), sample]) {
            frames.extend(value.map(|value| frame(whole(at.0), wall_ns, value)));
        }
        self.minute = Some(minute);
        if is_over {
            self.prune(wall_ns)?;
        }
        Ok(())
    }

    /// Ends the run: what is not a block yet becomes one.
    pub fn close(&mut self) -> Result<(), RecordError> {
        let (run, minute) = (self.run, self.minute.take());
        let Some(minute) = minute else { return Ok(()) };
        self.within(|change| close_minute(change, run, &minute.frames))
    }

    /// Drops what is older, or more, than is to be kept.
    fn prune(&mut self, now_wall_ns: i64) -> Result<(), RecordError> {
        let Limits {
            status,
            samples,
            samples_bytes,
            bytes,
        } = self.limits;
        prune(
            &mut self.connection,
            &self.path,
            now_wall_ns,
            &[
                (Kind::Status, status, bytes),
                (Kind::Sample, samples, samples_bytes),
            ],
            bytes,
        )
    }
}

/// Drops blocks that are too old, then the oldest of what is too much; events go with the status.
pub(crate) fn prune(
    connection: &mut Connection,
    path: &Path,
    now_wall_ns: i64,
    kept: &[(Kind, Ns, Bytes)],
    all: Bytes,
) -> Result<(), RecordError> {
    let failed = |e: rusqlite::Error| RecordError::new(path, e);
    let change = connection.transaction().map_err(failed)?;
    let drop_old = || -> rusqlite::Result<()> {
        for (kind, age, bytes) in kept {
            let oldest = now_wall_ns.saturating_sub(whole(age.0));
            // A clock that was far ahead for a while leaves blocks of the future: those of before it are older by their number.
            change.execute(
                "DELETE FROM block WHERE kind = ? AND last_wall_ns < ?",
                params![kind.number(), oldest],
            )?;
            if *kind == Kind::Status {
                change.execute("DELETE FROM event WHERE last_wall_ns < ?", params![oldest])?;
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
            let used: i64 = change.query_row(
                "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, pragma_freelist_count, pragma_page_size",
                [],
                |row| row.get(0),
            )?;
            let drop_first = |table, count| {
                let sql = format!(
                    "DELETE FROM {table} WHERE id IN (SELECT id FROM {table} ORDER BY id LIMIT {count})"
                );
                change.execute(&sql, [])
            };
            if used <= whole(all.0) || (drop_first("block", 16)? == 0 && drop_first("event", 256)? == 0) {
                break;
            }
            change.execute(
                "DELETE FROM event WHERE last_wall_ns < (SELECT min(first_wall_ns) FROM block WHERE kind = 0)",
                [],
            )?;
        }
        change.execute(
            "DELETE FROM run WHERE id < (SELECT max(id) FROM run) AND id NOT IN (SELECT run FROM block)
             AND id NOT IN (SELECT run FROM event) AND id NOT IN (SELECT run FROM tail)",
            [],
        )?;
        Ok(())
    };
    drop_old().map_err(failed)?;
    change.commit().map_err(failed)?;
    let mut vacuum = connection
        .prepare(&format!("PRAGMA incremental_vacuum({VACUUM_PAGES})"))
        .map_err(failed)?;
    let mut rows = vacuum.query([]).map_err(failed)?;
    while rows.next().map_err(failed)?.is_some() {}
    Ok(())
}

/// A period as it stands in a block.
fn frame(at: i64, wall_ns: i64, value: Value) -> Value {
    let mut frame = json!({"at_ns": at, "wall_ns": wall_ns});
    frame["frame"] = value;
    frame
}

/// The periods that an agent which was killed left one by one.
fn left_in_tail(change: &Transaction<'_>, run: i64) -> rusqlite::Result<[Vec<Value>; Kind::ALL.len()]> {
    let mut left: [Vec<Value>; Kind::ALL.len()] = Default::default();
    for (frames, kind) in left.iter_mut().zip(Kind::ALL) {
        let mut rows = change.prepare_cached(
            "SELECT at_ns, wall_ns, frame FROM tail WHERE run = ? AND kind = ? ORDER BY id",
        )?;
        let rows = rows.query_map(params![run, kind.number()], |row| {
            Ok((row.get(0)?, row.get(1)?, row.get::<_, Vec<u8>>(2)?))
        })?;
        for row in rows {
            let (at, wall_ns, bytes) = row?;
            // One that cannot be read any more takes no other with it.
            frames.extend(decompress(&bytes).map(|value| frame(at, wall_ns, value)));
        }
    }
    Ok(left)
}

fn write_tail(change: &Transaction<'_>, run: i64, period: &Period) -> rusqlite::Result<()> {
    let values = [Some(&period.status), period.sample.as_ref()];
    for (kind, value) in Kind::ALL.into_iter().zip(values) {
        let Some(value) = value else { continue };
        let bytes = compress(value, TAIL_LEVEL)?;
        change
            .prepare_cached("INSERT INTO tail (run, kind, at_ns, wall_ns, frame) VALUES (?, ?, ?, ?, ?)")?
            .execute(params![
                run,
                kind.number(),
                whole(period.at.0),
                period.wall_ns,
                bytes
            ])?;
    }
    Ok(())
}

/// Makes blocks of a run's periods that stood one by one.
fn close_minute(
    change: &Transaction<'_>,
    run: i64,
    frames: &[Vec<Value>; Kind::ALL.len()],
) -> rusqlite::Result<()> {
    for (kind, frames) in Kind::ALL.into_iter().zip(frames) {
        let (Some(first), Some(last)) = (frames.first(), frames.last()) else {
            continue;
        };
        let time = |frame: &Value, key: &str| frame[key].as_i64();
        let bytes = compress(&columns::pack(frames), BLOCK_LEVEL)?;
        change.execute(
            "INSERT INTO block (run, kind, first_at_ns, last_at_ns, first_wall_ns, last_wall_ns, count, frames)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            params![
                run,
                kind.number(),
                time(first, "at_ns"),
                time(last, "at_ns"),
                time(first, "wall_ns"),
                time(last, "wall_ns"),
                whole(frames.len() as u64),
                bytes
            ],
        )?;
    }
    change.execute("DELETE FROM tail WHERE run = ?", params![run])?;
    Ok(())
}

fn write_event(change: &Transaction<'_>, run: i64, period: &Period, event: &Event) -> rusqlite::Result<()> {
    let Event {
        kind,
        vm,
        name,
        policy,
        action,
        outcome,
        text,
        detail,
    } = event;
    let since = period.wall_ns.saturating_sub(whole(AGAIN.0));
    let again = change
        .prepare_cached(
            "UPDATE event SET count = count + 1, last_wall_ns = ?1 WHERE id = (
                SELECT id FROM event WHERE last_wall_ns >= ?2 AND run = ?3 AND kind = ?4 AND vm IS ?5 AND policy IS ?6 AND text = ?7
                ORDER BY last_wall_ns DESC LIMIT 1
            ) AND kind <> 'decided'",
        )?
        .execute(params![period.wall_ns, since, run, kind, vm, policy, text])?;
    if again > 0 {
        return Ok(());
    }
    change
        .prepare_cached(
            "INSERT INTO event (run, at_ns, wall_ns, last_wall_ns, count, kind, vm, name, policy, action, outcome, text, detail)
             VALUES (?, ?, ?, ?, 1, ?, ?, ?, ?, ?, ?, ?, ?)",
        )?
        .execute(params![
            run,
            whole(period.at.0),
            period.wall_ns,
            period.wall_ns,
            kind,
            vm,
            name,
            policy,
            action,
            outcome,
            text,
            detail.to_string()
        ])?;
    Ok(())
}

pub(crate) fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn compress(value: &Value, level: i32) -> rusqlite::Result<Vec<u8>> {
    let failed = |e: Box<dyn std::error::Error + Send + Sync>| rusqlite::Error::ToSqlConversionFailure(e);
    let json = serde_json::to_vec(value).map_err(|e| failed(e.into()))?;
    zstd::bulk::compress(&json, level).map_err(|e| failed(e.into()))
}

/// What was compressed; `None` where it is damaged or larger than any block.
pub(crate) fn decompress(bytes: &[u8]) -> Option<Value> {
    serde_json::from_slice(&decompressed(bytes)?).ok()
}

/// The same as text.
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
