//! Who may act: one agent for a state directory, and one on a host, wherever its state lies.
//!
//! ```text
//!   agent.lock    in the state directory: its agent, or the process that undoes for it
//!   acting.lock   in the host's own place: taken alone by an agent that begins, then shared with its guard, so that no other
//!                 agent begins before everything of this one is undone
//! ```
//!
//! Both lie where other users cannot lock them. They say who acts, and not whether it does: that is for the guard's beat.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::state_dir::{STATE_DIR, StateDir, StateError};
use crate::task::{self, Process};

const AGENT: &str = "agent.lock";
const ACTING: &str = "acting.lock";
/// A path and two numbers.
const HOLDER_BYTES_MAX: u64 = 16 << 10;
/// How often a lock that another holds is tried again.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Who took a lock last.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Holder {
    pid: i32,
    start_ticks: u64,
    /// Its state directory.
    state: PathBuf,
    /// Whether it has a guard, which undoes if it ends.
    #[serde(default)]
    is_guarded: bool,
}

impl Holder {
    fn own(state: &Path) -> Holder {
        let pid = std::process::id().cast_signed();
        let own = task::process(Path::new("/"), pid).ok().flatten();
        Holder {
            pid,
            start_ticks: own.map_or(0, |own| own.start_ticks),
            state: std::path::absolute(state).unwrap_or_else(|_| state.to_owned()),
            is_guarded: false,
        }
    }

    fn read(file: &mut File) -> Option<Holder> {
        let mut text = String::new();
        file.rewind().ok()?;
        file.take(HOLDER_BYTES_MAX).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Says who holds the file's lock. A full disk leaves it empty, and then its holder is unknown.
    fn write(&self, file: &mut File) {
        let text = serde_json::to_string(self).expect("a holder is JSON");
        let _ = file
            .set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| file.write_all(text.as_bytes()));
    }

    fn process(&self) -> Process {
        Process {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }
}

/// The lock that one agent (or the guard that undoes for it) holds while it owns a journal.
#[derive(Debug)]
pub struct Lock {
    file: File,
    holder: Holder,
    /// That of version 0.1, which lay in the open.
    _former: Option<File>,
}

/// A living process that holds a lock and says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Which.
    pub process: Process,
    /// Whether it has a guard of its own.
    pub is_guarded: bool,
}

impl Lock {
    /// Takes the lock; `None` while another process holds it.
    ///
    /// # Errors
    /// When the lock file cannot be had.
    pub fn try_take(state: &Path) -> Result<Option<Lock>, StateError> {
        let dir = StateDir::open(state)?;
        let mut file = dir.open_to_write(AGENT)?;
        let take = |file: &File| {
            flock(
                file,
                FlockOperation::NonBlockingLockExclusive,
                &dir.path_of(AGENT),
            )
        };
        if !take(&file)? {
            return Ok(None);
        }
        // An agent of version 0.1 may still run, and its journal is its own.
        let former = dir.open_former(state, AGENT);
        if former.as_ref().map(take).transpose()? == Some(false) {
            return Ok(None);
        }
        dir.take_in(state);
        let holder = Holder::own(state);
        holder.write(&mut file);
        Ok(Some(Lock {
            file,
            holder,
            _former: former,
        }))
    }

    /// Says whether its holder has a guard: the guard of an agent that ended stays until then.
    pub fn set_guarded(&mut self, is_guarded: bool) {
        self.holder.is_guarded = is_guarded;
        self.holder.write(&mut self.file);
    }

    /// Whether its file is still there: not removed with its directory.
    pub fn is_there(&self) -> bool {
        is_there(&self.file)
    }

    /// Takes the lock, waiting for at most so long: a guard may be about to finish.
    ///
    /// # Errors
    /// When the lock file cannot be had, or another agent holds it all that time.
    pub fn take(state: &Path, patience: Duration) -> Result<Lock, StateError> {
        let taken = wait_for(patience, || Lock::try_take(state))?;
        taken.ok_or_else(|| {
            let cause = match Lock::owner(state) {
                Ok(Some(owner)) => format!(
                    "process {} holds it, an agent or a guard that undoes for one; stop that agent, or wait for its guard",
                    owner.process.pid
                ),
                _ => "another process holds it; end that one first (`fuser` says which)".into(),
            };
            StateError::new("lock", &state.join("private").join(AGENT), cause)
        })
    }

    /// The living process that holds the lock and says so; `None` where the lock is free, or its holder does not say who it is.
    ///
    /// # Errors
    /// When the lock file cannot be had.
    pub fn owner(state: &Path) -> Result<Option<Owner>, StateError> {
        let Some(dir) = StateDir::open_existing(state)? else {
            return Ok(None);
        };
        let Some(mut file) = dir.open_to_read(AGENT)? else {
            return Ok(None);
        };
        if flock(&file, FlockOperation::NonBlockingLockShared, &dir.path_of(AGENT))? {
            return Ok(None);
        }
        let owner = Holder::read(&mut file).map(|holder| Owner {
            process: holder.process(),
            is_guarded: holder.is_guarded,
        });
        Ok(owner.filter(|owner| task::is_alive(Path::new("/"), owner.process)))
    }
}

/// The right to act on a host, as an agent or as its guard.
#[derive(Debug)]
pub struct ActingLock {
    file: File,
}

impl ActingLock {
    /// Takes it for an agent: alone at first, so that no other agent acts, then so that its guard can share it. The host's own
    /// place lies below `root`.
    ///
    /// # Errors
    /// When the lock file cannot be had; while another agent acts, or a guard undoes for one; and when one that is gone left
    /// something in force, which only its own state directory tells.
    pub fn take(root: &Path, state: &Path, patience: Duration) -> Result<ActingLock, StateError> {
        let dir = StateDir::open(&place(root))?;
        let path = dir.path_of(ACTING);
        let mut file = dir.open_to_write(ACTING)?;
        let alone = || {
            flock(&file, FlockOperation::NonBlockingLockExclusive, &path).map(|is_ours| is_ours.then_some(()))
        };
        let taken = wait_for(patience, alone)?;
        let holder = Holder::read(&mut file);
        let failed = |cause: String| StateError::new("lock", &path, cause);
        let own = Holder::own(state);
        if taken.is_none() {
            let who = holder.map_or_else(
                || "another agent".to_owned(),
                |holder| {
                    format!(
                        "the agent with state in {} (process {})",
                        holder.state.display(),
                        holder.pid
                    )
                },
            );
            return Err(failed(format!(
                "{who} acts on this host, or its guard undoes for it; stop that one first, or watch with --dry-run"
            )));
        }
        if let Some(left) =
            holder.filter(|holder| holder.state != own.state && leaves_something(&holder.state))
        {
            let state = left.state.display();
            return Err(failed(format!(
                "an agent with state in {state} ended and left VMs changed, or its journal cannot be read; run `homenode release --state {state}` first"
            )));
        }
        own.write(&mut file);
        if !flock(&file, FlockOperation::NonBlockingLockShared, &path)? {
            return Err(failed(
                "another agent has just begun to act; stop that one first".into(),
            ));
        }
        Ok(ActingLock { file })
    }

    /// Whether its file is still there.
    pub fn is_there(&self) -> bool {
        is_there(&self.file)
    }

    /// Shares it with the agent that has it, for the agent's guard.
    ///
    /// # Errors
    /// When the lock file cannot be had, or an agent is just beginning.
    pub fn share(root: &Path) -> Result<ActingLock, StateError> {
        let dir = StateDir::open(&place(root))?;
        let path = dir.path_of(ACTING);
        let file = dir.open_to_write(ACTING)?;
        match flock(&file, FlockOperation::NonBlockingLockShared, &path)? {
            true => Ok(ActingLock { file }),
            false => Err(StateError::new(
                "lock",
                &path,
                "another agent has just begun to act",
            )),
        }
    }
}

fn is_there(file: &File) -> bool {
    file.metadata().is_ok_and(|file| file.nlink() > 0)
}

fn place(root: &Path) -> PathBuf {
    root.join(STATE_DIR.trim_start_matches('/'))
}

/// Whether an agent's journal says that something is in force, or cannot be read.
fn leaves_something(state: &Path) -> bool {
    let entries = crate::journal::try_peek(state);
    entries.is_none_or(|entries| entries.values().any(crate::levers::is_in_force))
}

/// Whether the lock is ours now.
fn flock(file: &File, how: FlockOperation, path: &Path) -> Result<bool, StateError> {
    match rustix::fs::flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(StateError::new("lock", path, e)),
    }
}

fn wait_for<T>(
    patience: Duration,
    mut take: impl FnMut() -> Result<Option<T>, StateError>,
) -> Result<Option<T>, StateError> {
    let mut waited = Duration::ZERO;
    loop {
        let taken = take()?;
        if taken.is_some() || waited >= patience {
            return Ok(taken);
        }
        std::thread::sleep(LOOK_EVERY);
        waited += LOOK_EVERY;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_agent_at_a_time_owns_a_journal() {
        let dir = tempfile::tempdir().unwrap();
        assert!(Lock::owner(dir.path()).unwrap().is_none());
        let lock = Lock::try_take(dir.path()).unwrap().unwrap();
        assert!(Lock::try_take(dir.path()).unwrap().is_none());
        assert!(Lock::owner(dir.path()).unwrap().is_some());
        let error = Lock::take(dir.path(), Duration::ZERO).unwrap_err();
        let own = std::process::id().to_string();
        assert!(error.to_string().contains(&own), "{error}");
        drop(lock);
        assert!(
            Lock::owner(dir.path()).unwrap().is_none(),
            "who held it is not who holds it"
        );
        assert!(Lock::try_take(dir.path()).unwrap().is_some());
    }

    #[test]
    fn a_lock_says_whether_its_holder_is_guarded() {
        let dir = tempfile::tempdir().unwrap();
        let mut lock = Lock::try_take(dir.path()).unwrap().unwrap();
        let is_guarded = || Lock::owner(dir.path()).unwrap().unwrap().is_guarded;
        assert!(!is_guarded());
        lock.set_guarded(true);
        assert!(is_guarded());
    }

    #[test]
    fn an_agent_of_version_0_1_that_still_runs_keeps_its_journal() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("journal"), "its own").unwrap();
        let theirs = File::create(dir.path().join(AGENT)).unwrap();
        assert!(flock(&theirs, FlockOperation::NonBlockingLockExclusive, dir.path()).unwrap());
        assert!(Lock::try_take(dir.path()).unwrap().is_none());
        assert!(dir.path().join("journal").exists());
        drop(theirs);
        assert!(Lock::try_take(dir.path()).unwrap().is_some());
        assert!(dir.path().join("private/journal").exists());
    }

    #[test]
    fn who_merely_locks_the_file_is_no_agent() {
        let dir = tempfile::tempdir().unwrap();
        let private = StateDir::open(dir.path()).unwrap();
        let file = private.open_to_write(AGENT).unwrap();
        assert!(flock(&file, FlockOperation::NonBlockingLockExclusive, dir.path()).unwrap());
        assert!(Lock::try_take(dir.path()).unwrap().is_none());
        assert!(Lock::owner(dir.path()).unwrap().is_none());
    }

    #[test]
    fn one_agent_at_a_time_acts_on_a_host_wherever_its_state_lies() {
        let root = tempfile::tempdir().unwrap();
        let (one, other) = (root.path().join("one"), root.path().join("other"));
        let take = |state: &Path| ActingLock::take(root.path(), state, Duration::ZERO);
        let agent = take(&one).unwrap();
        let guard = ActingLock::share(root.path()).unwrap();
        let said = take(&other).unwrap_err().to_string();
        assert!(said.contains("/one") && said.contains("--dry-run"), "{said}");
        drop(agent);
        assert!(take(&other).is_err(), "its guard may have something to undo");
        drop(guard);
        drop(take(&other).unwrap());
    }

    #[test]
    fn nobody_acts_before_what_another_left_is_undone() {
        let root = tempfile::tempdir().unwrap();
        let (one, other) = (root.path().join("one"), root.path().join("other"));
        drop(ActingLock::take(root.path(), &one, Duration::ZERO).unwrap());
        let mut journal = crate::journal::Journal::open(&one).unwrap();
        let vm = homenode_units::VmId(1);
        let run = crate::journal::Run {
            vm,
            name: "one".into(),
            runtime_id: 1,
            pid: 1,
            start_ticks: 1,
        };
        journal.begin(run, crate::journal::Before::default()).unwrap();
        journal
            .set(
                vm,
                &crate::levers::Home(homenode_units::NodeSet::one(homenode_units::NodeId(0))),
            )
            .unwrap();
        let said = ActingLock::take(root.path(), &other, Duration::ZERO)
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("homenode release --state") && said.contains("/one"),
            "{said}"
        );
        drop(ActingLock::take(root.path(), &one, Duration::ZERO).unwrap());
        journal.clear_all(vm);
        assert!(ActingLock::take(root.path(), &other, Duration::ZERO).is_ok());
    }
}
