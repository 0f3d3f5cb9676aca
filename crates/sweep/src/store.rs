//! Stores finished tasks on disk: a directory with plans and one file per task, which several processes share.

use std::path::{Path, PathBuf};

use homenode_machine_files::file::read_text_file;
use homenode_reproduce::{Cache, Found};
use homenode_search::contender::Contender;

use crate::{COMMIT, Plan, Rows, SweepError};

/// Suffix of a plan's file.
const PLAN: &str = ".plan.toml";
/// Maximum number of missing tasks in a message.
const NAMED: usize = 3;

/// Identifies the program that makes the runs, because another program may simulate differently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program(String);

impl Program {
    /// Identifies this version and commit. `text` returns the program file, which is hashed in debug builds, and if the
    /// commit is unknown or files have changed since.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn of(text: impl FnOnce() -> std::io::Result<Vec<u8>>) -> std::io::Result<Program> {
        let version = concat!("homenode ", env!("CARGO_PKG_VERSION"));
        if !cfg!(debug_assertions) && COMMIT != "unknown" && !COMMIT.ends_with("-dirty") {
            return Ok(Program(format!("{version} {COMMIT}")));
        }
        let hash = ring::digest::digest(&ring::digest::SHA256, &text()?);
        Ok(Program(format!("{version} {COMMIT} {hash:?}")))
    }

    /// Identifies the running program.
    ///
    /// # Errors
    /// The program cannot be read.
    pub fn running() -> std::io::Result<Program> {
        Program::of(|| std::fs::read(std::env::current_exe()?))
    }
}

/// Tasks that are missing from all stores.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{count} of {all} tasks are missing: {}; run them, then merge again", .first.join("; "))]
pub struct Missing {
    /// Number of missing tasks.
    pub count: usize,
    /// Total number of tasks.
    pub all: usize,
    /// The first missing tasks, each described in words.
    pub first: Vec<String>,
}

/// A store's entry for a task.
pub(crate) enum Kept {
    Rows(Rows),
    Nothing,
    /// The entry is unusable; the message says why.
    Unusable(String),
}

/// A directory of finished tasks.
#[derive(Debug)]
pub struct Store {
    directory: PathBuf,
    cache: Cache,
    program: Program,
}

impl Store {
    /// Opens a store, and creates it if it does not exist.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn open(directory: &Path, program: Program) -> Result<Store, SweepError> {
        let cache = Cache::open(directory, program.0.as_bytes())
            .map_err(|error| failed(directory, "cannot be made", &error))?;
        Ok(Store {
            directory: directory.to_owned(),
            cache,
            program,
        })
    }

    fn description(&self, plan: &Plan, task: usize) -> Result<String, SweepError> {
        let (digest, runs) = (known(plan)?, plan.runs_of(task));
        Ok(format!(
            "sweep {digest} runs {}..{} by {}",
            runs.start, runs.end, self.program.0
        ))
    }

    /// Stores the plan, so that a later merge needs only the store.
    ///
    /// # Errors
    /// The plan cannot be written.
    pub fn keep_plan(&self, plan: &Plan) -> Result<PathBuf, SweepError> {
        let path = self.directory.join(format!("{}{PLAN}", &known(plan)?[..16]));
        let written = self.cache.write(&path, &plan.to_toml()?);
        written.map_err(|error| failed(&path, "cannot be written", &error))?;
        Ok(path)
    }

    /// Returns the plans in the store.
    ///
    /// # Errors
    /// An unreadable directory, or a file that is not a plan.
    pub fn plans(&self) -> Result<Vec<Plan>, SweepError> {
        let unreadable = |error| failed(&self.directory, "cannot be read", &error);
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(&self.directory).map_err(unreadable)? {
            let name = entry
                .map_err(unreadable)?
                .file_name()
                .to_string_lossy()
                .into_owned();
            if name.ends_with(PLAN) {
                paths.push(self.directory.join(name).display().to_string());
            }
        }
        paths.sort_unstable();
        let read = |path: &String| {
            let text = read_text_file(path).map_err(|error| SweepError::Failed(error.to_string()))?;
            Plan::parse(path, &text)
        };
        paths.iter().map(read).collect()
    }

    pub(crate) fn find(&self, plan: &Plan, task: usize) -> Result<Kept, SweepError> {
        let description = self.description(plan, task)?;
        let runs = plan.runs_of(task);
        Ok(match self.cache.find::<Rows>(&description) {
            Found::Run(rows) if rows.first == runs.start && rows.runs.len() == runs.len() => {
                Kept::Rows(*rows)
            }
            Found::Run(_) => {
                let path = self.cache.path(&description);
                Kept::Unusable(format!("{}: has other runs; simulating it again", path.display()))
            }
            Found::Nothing => Kept::Nothing,
            Found::Unusable(note) => Kept::Unusable(note),
        })
    }

    pub(crate) fn keep(&self, plan: &Plan, task: usize, rows: &Rows) -> Result<(), SweepError> {
        let description = self.description(plan, task)?;
        let kept = self.cache.keep(&description, rows);
        kept.map_err(|error| failed(&self.cache.path(&description), "cannot be written", &error))
    }
}

/// Returns the plan's digest, or an error if the plan runs an external program, which the digest cannot identify.
fn known(plan: &Plan) -> Result<String, SweepError> {
    let is_program = |policy: &&Contender| matches!(policy, Contender::Program(_));
    match plan.policies.iter().find(is_program) {
        Some(program) => Err(SweepError::Input(format!(
            "a store cannot tell whether {program} has changed: sweep it without a store"
        ))),
        None => plan.digest(),
    }
}

fn failed(path: &Path, what: &str, error: &std::io::Error) -> SweepError {
    SweepError::Failed(format!("{}: {what}: {error}", path.display()))
}

/// Merges all rows of a plan from several stores, in the order of the tasks.
///
/// # Errors
/// [`SweepError::Missing`] if a task is in none of the stores.
pub fn merge(plan: &Plan, stores: &[Store]) -> Result<Vec<Rows>, SweepError> {
    let (mut all, mut missing) = (Vec::new(), Vec::new());
    for task in 0..plan.tasks() {
        let mut found = None;
        let mut why = String::new();
        for store in stores {
            match store.find(plan, task)? {
                Kept::Rows(rows) => found = Some(rows),
                Kept::Unusable(note) => why = format!(" ({note})"),
                Kept::Nothing => {}
            }
        }
        match found {
            Some(rows) => all.push(rows),
            None => missing.push((task, why)),
        }
    }
    if missing.is_empty() {
        return Ok(all);
    }
    let named = missing.iter().take(NAMED).map(|(task, why)| {
        let runs = plan.runs_of(*task);
        format!("task {task} from {}{why}", plan.name_of(runs.start))
    });
    Err(Missing {
        count: missing.len(),
        all: plan.tasks(),
        first: named.collect(),
    }
    .into())
}
