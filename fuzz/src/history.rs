//! A history that has the rows of an input, and one undamaged minute.
//!
//! ```text
//!   === run RUN                               machine and settings as JSON; run 1 already has valid ones
//!   === tail RUN KIND AT WALL                 a period as JSON
//!   === block RUN KIND COUNT AT WALL          a minute as JSON in columns
//!   === raw RUN KIND COUNT AT WALL            the same, stored as text and not compressed
//!   === event RUN AT WALL KIND POLICY OUTCOME VM  a line of text, then its detail as JSON
//! ```
//!
//! A number that is missing or cannot be parsed is 0. `KIND` is 0 for status and 1 for samples. Times can have any value.

use std::path::PathBuf;

use homenode_control::{Config, Mode};
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_recorder::{Archive, Begin, Limits, Recorder, WhenFull};
use homenode_units::{Bytes, Ns};
use rusqlite::{Connection, params};
use serde_json::{Value, json};

use crate::Tree;

/// The run of the undamaged minute. The runs of inputs have lower numbers.
pub const WHOLE_RUN: i64 = 9;
/// Number of periods in the undamaged minute.
pub const WHOLE_COUNT: i64 = 3;
/// Maximum number of rows in an input.
const ROWS_MAX: usize = 64;
/// Maximum of the sum over an input's blocks of bytes times stated periods. More would only repeat the same work.
const WEIGHT_MAX: usize = 1 << 19;

/// A history file that is reused for each input.
pub struct History {
    tree: Tree,
    rows: Connection,
    detail: String,
}

impl Default for History {
    fn default() -> History {
        History::new()
    }
}

/// Returns the contents of a period in the undamaged minute.
pub fn whole(at: i64) -> Value {
    json!({"at_ns": at, "vms": [], "whole": at})
}

/// Returns the machine in the record of run 1.
///
/// # Panics
/// If the preset does not exist.
pub fn machine() -> Machine {
    preset("r420").expect("a preset")
}

impl History {
    /// Creates an empty history, as the recorder does.
    ///
    /// # Panics
    /// If the file cannot be created.
    pub fn new() -> History {
        let tree = Tree::new();
        let path = tree.root().join("history.sqlite");
        let begin = Begin {
            wall_ns: 0,
            version: "fuzz".to_owned(),
            host: "fuzz".to_owned(),
            detail: Value::Null,
        };
        let limits = Limits {
            status: Ns(u64::MAX),
            samples: Ns(u64::MAX),
            samples_bytes: Bytes(u64::MAX),
            bytes: Bytes(u64::MAX),
        };
        drop(Recorder::begin(&path, &begin, limits, WhenFull::Wait).expect("a history"));
        let rows = Connection::open(&path).expect("it was made");
        rows.pragma_update(None, "synchronous", "OFF").expect("a setting");
        let detail = json!({"machine": machine(), "config": Config::default(), "mode": Mode::Act});
        History {
            tree,
            rows,
            detail: detail.to_string(),
        }
    }

    /// Returns the path of the file.
    pub fn path(&self) -> PathBuf {
        self.tree.root().join("history.sqlite")
    }

    /// Replaces all rows by those of an input and the undamaged minute.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn fill(&mut self, text: &str) -> Archive {
        let detail = self.detail.clone();
        let change = self.rows.transaction().expect("it is not in use");
        change
            .execute_batch("DELETE FROM run; DELETE FROM tail; DELETE FROM block; DELETE FROM event;")
            .expect("the tables are there");
        let mut weight_left = WEIGHT_MAX;
        let runs = [(1, detail.as_str()), (WHOLE_RUN, "null")];
        for (id, detail) in runs {
            put_run(&change, id, detail).expect("a row");
        }
        for section in text.split("=== ").skip(1).take(ROWS_MAX) {
            let (head, body) = section.split_once('\n').unwrap_or((section, ""));
            put(&change, head, body, &mut weight_left).expect("a row");
        }
        let minute: Vec<Value> = (0..WHOLE_COUNT)
            .map(|at| json!({"at_ns": at, "wall_ns": at, "frame": whole(at)}))
            .collect();
        for kind in [0, 1] {
            let minute = compressed(&column(&minute).to_string());
            put_block(&change, [WHOLE_RUN, kind, WHOLE_COUNT, 0, 0], &minute).expect("a row");
        }
        change.commit().expect("the disk is not full");
        Archive::open(&self.path()).expect("it was made by us")
    }
}

fn compressed(text: &str) -> Vec<u8> {
    zstd::bulk::compress(text.as_bytes(), 1).expect("memory suffices")
}

/// Parses the next words as numbers, with 0 for one that is missing or cannot be parsed.
fn numbers<const N: usize>(words: &mut dyn Iterator<Item = &str>) -> [i64; N] {
    std::array::from_fn(|_| words.next().and_then(|word| word.parse().ok()).unwrap_or(0))
}

fn put(rows: &Connection, head: &str, body: &str, weight_left: &mut usize) -> rusqlite::Result<()> {
    let mut words = head.split(' ');
    let what = words.next().unwrap_or("");
    let run = numbers::<1>(&mut words)[0].rem_euclid(WHOLE_RUN);
    match what {
        "run" => put_run(rows, run, body),
        "tail" => {
            let [kind, at, wall] = numbers(&mut words);
            let sql = "INSERT INTO tail (run, kind, at_ns, wall_ns, frame) VALUES (?, ?, ?, ?, ?)";
            rows.execute(sql, params![run, kind, at, wall, compressed(body)])?;
            Ok(())
        }
        "block" | "raw" => {
            let [kind, count, at, wall] = numbers(&mut words);
            let weight = usize::try_from(count).unwrap_or(0).saturating_mul(body.len());
            let Some(left) = weight_left.checked_sub(weight) else {
                return Ok(());
            };
            *weight_left = left;
            let numbers = [run, kind, count, at, wall];
            match what {
                "block" => put_block(rows, numbers, &compressed(body)),
                _ => put_block(rows, numbers, &body),
            }
        }
        "event" => {
            let [at, wall] = numbers(&mut words);
            let mut word = || words.next().filter(|word| !word.is_empty());
            let (kind, policy, outcome, vm) = (word().unwrap_or(""), word(), word(), word());
            let (text, detail) = body.split_once('\n').unwrap_or((body, ""));
            let sql = "INSERT INTO event (run, at_ns, wall_ns, last_wall_ns, count, kind, vm, name, policy, action, outcome, text, detail)
                       VALUES (?1, ?2, ?3, ?3, 1, ?4, ?5, ?5, ?6, ?6, ?7, ?8, ?9)";
            rows.prepare_cached(sql)?
                .execute(params![run, at, wall, kind, vm, policy, outcome, text, detail])?;
            Ok(())
        }
        _ => Ok(()),
    }
}

fn put_run(rows: &Connection, id: i64, detail: &str) -> rusqlite::Result<()> {
    let sql =
        "INSERT OR REPLACE INTO run (id, wall_ns, version, host, detail) VALUES (?, 0, 'fuzz', 'fuzz', ?)";
    rows.prepare_cached(sql)?.execute(params![id, detail])?;
    Ok(())
}

fn put_block(
    rows: &Connection,
    [run, kind, count, at, wall]: [i64; 5],
    frames: &dyn rusqlite::ToSql,
) -> rusqlite::Result<()> {
    // One second for each period, as for an agent that samples every second.
    let last = |first: i64| first.saturating_add(count.saturating_mul(1_000_000_000));
    let sql =
        "INSERT INTO block (run, kind, first_at_ns, last_at_ns, first_wall_ns, last_wall_ns, count, frames)
               VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
    rows.prepare_cached(sql)?
        .execute(params![run, kind, at, last(at), wall, last(wall), count, frames])?;
    Ok(())
}

/// Returns a column of these values in its simplest form.
fn column(values: &[Value]) -> Value {
    std::iter::once(Value::from("*"))
        .chain(values.iter().cloned())
        .collect()
}
