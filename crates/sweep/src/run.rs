//! Runs tasks.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use homenode_reproduce::jobs::{CutShort, Progress, each};
use serde::{Deserialize, Serialize};

use crate::metrics::{Figures, kept};
use crate::store::{Kept, Store};
use crate::{Plan, SweepError};

/// Result of a task: for each of its runs, in order, every figure of every VM, node and the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rows {
    /// The first run's number.
    pub first: usize,
    pub(crate) runs: Vec<Vec<Figures>>,
}

/// A part of the tasks: from task number `at`, counted from 1, every `of`-th task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    at: usize,
    of: usize,
}

impl Shard {
    /// All tasks.
    pub const ALL: Shard = Shard { at: 1, of: 1 };

    /// Returns the tasks of this part.
    pub fn tasks(self, plan: &Plan) -> Vec<usize> {
        (self.at - 1..plan.tasks()).step_by(self.of).collect()
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.at, self.of)
    }
}

/// A text that is not a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a shard is written PART/PARTS, PART from 1 to PARTS, PARTS at least 2: `1/8` is the first of eight")]
pub struct NoShard;

impl FromStr for Shard {
    type Err = NoShard;
    fn from_str(text: &str) -> Result<Shard, NoShard> {
        let (at, of) = text.split_once('/').ok_or(NoShard)?;
        let number = |text: &str| text.trim().parse::<usize>().ok();
        match number(at).zip(number(of)) {
            Some((at, of)) if 1 <= at && at <= of => Ok(Shard { at, of }),
            _ => Err(NoShard),
        }
    }
}

impl From<CutShort> for SweepError {
    fn from(cut: CutShort) -> SweepError {
        SweepError::Failed(cut.to_string())
    }
}

/// The runs of one task that have finished so far.
struct Open {
    task: usize,
    runs: Mutex<Vec<Option<Vec<Figures>>>>,
    left: AtomicUsize,
}

/// Runs these tasks on several threads, and returns their rows in the order of the tasks. Finished tasks are read from the
/// store, and new ones are added to it. Results depend on neither the threads nor the store.
///
/// # Errors
/// The first run that failed, or a store that cannot be written. Tasks that finished before remain stored.
pub fn run(
    plan: &Plan,
    tasks: &[usize],
    jobs: usize,
    store: Option<&Store>,
    progress: &Progress,
) -> Result<Vec<Rows>, SweepError> {
    if let Some(unknown) = tasks.iter().find(|task| **task >= plan.tasks()) {
        let count = plan.tasks();
        return Err(SweepError::Input(format!(
            "there is no task {unknown}: tasks are numbered 0 to {}",
            count - 1
        )));
    }
    let mut kept: Vec<Option<Rows>> = Vec::new();
    for task in tasks {
        let found = store.map(|store| store.find(plan, *task)).transpose()?;
        kept.push(match found {
            Some(Kept::Rows(rows)) => Some(rows),
            Some(Kept::Unusable(note)) => {
                progress.note(&note);
                None
            }
            _ => None,
        });
    }
    let missing = tasks.iter().zip(&kept).filter(|(_, rows)| rows.is_none());
    let open: Vec<Open> = missing
        .map(|(task, _)| {
            let count = plan.runs_of(*task).len();
            Open {
                task: *task,
                runs: Mutex::new(vec![None; count]),
                left: AtomicUsize::new(count),
            }
        })
        .collect();
    let runs_of = |open: &Open| plan.runs_of(open.task).len();
    let runs = open
        .iter()
        .flat_map(|open| (0..runs_of(open)).map(move |at| (open, at)));
    let runs: Vec<(&Open, usize)> = runs.collect();
    each(jobs, &runs, progress, |(open, at)| one(plan, open, *at, store))?;
    let mut made = open.iter().map(|open| rows(plan, open));
    Ok(kept
        .into_iter()
        .filter_map(|rows| rows.or_else(|| made.next()))
        .collect())
}

fn rows(plan: &Plan, open: &Open) -> Rows {
    let runs = open.runs.lock().expect("nothing panics while it holds this");
    Rows {
        first: plan.runs_of(open.task).start,
        runs: runs.iter().flatten().cloned().collect(),
    }
}

fn one(plan: &Plan, open: &Open, at: usize, store: Option<&Store>) -> Result<(), SweepError> {
    let run = plan.runs_of(open.task).start + at;
    let place = plan.place(run);
    let failed = |error: String| SweepError::Failed(format!("{}: {error}", plan.name_of(run)));
    let setup = plan.setup(place.point, plan.seeds[place.seed]);
    let (setup, config) = setup.map_err(|error| failed(error.to_string()))?;
    let policy = &plan.policies[place.policy];
    let came = policy
        .run(&setup, &config, |_, _| Ok(()))
        .map_err(|error| failed(format!("{error:#}")))?;
    open.runs.lock().expect("nothing panics while it holds this")[at] = Some(kept(&came));
    if open.left.fetch_sub(1, Ordering::AcqRel) == 1
        && let Some(store) = store
    {
        store.keep(plan, open.task, &rows(plan, open))?;
    }
    Ok(())
}
