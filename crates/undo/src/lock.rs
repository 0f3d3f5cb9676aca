//! Locks: one agent per state directory, and one agent per host, wherever its state directory is.
//!
//! ```text
//!   agent.lock    in the state directory: held by its agent, or by the process that undoes for it
//!   acting.lock   in a fixed place on the host: exclusive while an agent begins, then shared with its guard, so that no other
//!                 agent begins before everything that this one changed is undone
//! ```
//!
//! Both files are where other users cannot lock them. They say which agent may act, but not whether it is alive: its heartbeat to
//! the guard says that.

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use homenode_kernel::task::{self, Process};
use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::heartbeat::SILENCE_MAX;
use crate::holder::{self, Holder, JournalWas, Record, Watch};
use crate::state_dir::{STATE_DIR, StateDir, StateError};

const AGENT: &str = "agent.lock";
const ACTING: &str = "acting.lock";
/// How often to retry a lock that another process holds.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long to wait for a lock that another process holds.
#[derive(Clone, Copy, Debug)]
pub struct Waits {
    /// Patience while the holder is active: a guard may be about to finish.
    pub patience: Duration,
    /// How long the guard of a dead agent may be silent before it is killed.
    pub silence: Duration,
}

impl From<Duration> for Waits {
    fn from(patience: Duration) -> Waits {
        Waits {
            patience,
            silence: SILENCE_MAX,
        }
    }
}

/// The lock on a journal, held by the agent that owns it or by the guard that undoes for that agent.
#[derive(Debug)]
pub struct Lock {
    file: File,
    path: PathBuf,
    holder: Holder,
    /// What the previous holder recorded about its journal.
    former: JournalWas,
    /// Guards that were killed to take the lock.
    ended: Vec<String>,
}

/// The living process that is recorded as a lock's holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// The process.
    pub process: Process,
    /// Whether it has a guard of its own.
    pub is_guarded: bool,
}

impl Lock {
    /// Takes the lock; `None` while another process holds it.
    ///
    /// # Errors
    /// When the lock file cannot be opened.
    pub fn try_take(state: &Path) -> Result<Option<Lock>, StateError> {
        let dir = StateDir::open(state)?;
        let path = dir.path_of(AGENT);
        let file = dir.open_to_write(AGENT)?;
        if !flock(&file, ALONE, &path)? {
            return Ok(None);
        }
        Ok(Some(Lock::of(file, path, Holder::own(state))))
    }

    /// Like [`Lock::try_take`], for an agent's guard, in the directory that the guard holds open.
    pub(crate) fn try_take_in(dir: &StateDir, guard: &Holder) -> Result<Option<Lock>, StateError> {
        let path = dir.path_of(AGENT);
        let file = dir.open_to_write(AGENT)?;
        let is_ours = flock(&file, ALONE, &path)?;
        Ok(is_ours.then(|| Lock::of(file, path, guard.clone())))
    }

    fn of(mut file: File, path: PathBuf, mut holder: Holder) -> Lock {
        let former = Holder::read(&mut file).map_or(JournalWas::Over, |former| former.journal);
        holder.journal = former;
        holder.write(&mut file);
        Lock {
            file,
            path,
            holder,
            former,
            ended: Vec::new(),
        }
    }

    /// Records whether the holder has a guard. A dead agent's guard stays until its successor is guarded.
    pub fn set_guarded(&mut self, is_guarded: bool) {
        self.holder.is_guarded = is_guarded;
        self.holder.write(&mut self.file);
    }

    /// The process that holds the lock: this one.
    pub(crate) fn process(&self) -> Process {
        self.holder.process()
    }

    /// Records what the next agent should expect of the holder's journal.
    pub(crate) fn set_journal(&mut self, journal: JournalWas) {
        self.holder.journal = journal;
        self.holder.write(&mut self.file);
    }

    /// What the previous holder recorded about its journal.
    pub(crate) fn former_journal(&self) -> JournalWas {
        self.former
    }

    /// Takes the list of guards that were killed to take the lock: a sentence for the operator about each, returned once.
    pub fn take_ended(&mut self) -> Vec<String> {
        std::mem::take(&mut self.ended)
    }

    /// Whether the lock file is still where another agent would look for it: neither removed nor moved with its directory.
    pub fn is_there(&self) -> bool {
        is_there(&self.file, &self.path)
    }

    /// Takes the lock, waiting for as long as `waits` allows: a guard may be about to finish. Kills a silent guard of a dead
    /// agent.
    ///
    /// # Errors
    /// When the lock file cannot be opened, or another process holds the lock all that time.
    pub fn take(state: &Path, waits: impl Into<Waits>) -> Result<Lock, StateError> {
        let waits = waits.into();
        let file = StateDir::open(state)?.open_to_write(AGENT)?;
        let mut reader = file.try_clone().map_err(|e| StateError::new("lock", state, e))?;
        let mut watch = Watch::new(&file, state, waits.silence);
        let taken = wait_for(
            waits.patience,
            || Lock::try_take(state),
            || watch.look(Holder::read(&mut reader)),
        )?;
        if let Some(lock) = taken {
            return Ok(Lock {
                ended: watch.ended,
                ..lock
            });
        }
        let holder =
            Holder::read(&mut reader).filter(|holder| task::is_alive(Path::new("/"), holder.process()));
        let who = || holder.map_or_else(|| holder::kernel_says(&file), |holder| holder.described());
        let cause = watch.stuck.take().unwrap_or_else(who);
        Err(StateError::new("lock", &state.join("private").join(AGENT), cause))
    }

    /// The living process that holds the lock; `None` if the lock is free, or its holder left no record.
    ///
    /// # Errors
    /// When the lock file cannot be opened.
    pub fn owner(state: &Path) -> Result<Option<Owner>, StateError> {
        match StateDir::open_existing(state)? {
            Some(dir) => Lock::owner_in(&dir),
            None => Ok(None),
        }
    }

    /// As [`Lock::owner`], in an open directory.
    pub(crate) fn owner_in(dir: &StateDir) -> Result<Option<Owner>, StateError> {
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
    path: PathBuf,
    /// What the previous agent recorded about its journal, if it used the same state directory.
    former: JournalWas,
    /// Guards that were killed to take the lock.
    ended: Vec<String>,
    /// The record of the guard that shares the lock; `None` for an agent.
    _record: Option<Record>,
}

impl ActingLock {
    /// Takes the lock for an agent: first exclusively, so that no other agent acts, then shared with its guard. The lock's fixed
    /// place is below `root`. Kills a silent guard of a dead agent that used the same state directory.
    ///
    /// # Errors
    /// - The lock file cannot be opened.
    /// - Another agent acts, or a guard undoes for one.
    /// - An agent that has ended left something in force, which is known only from that agent's state directory.
    pub fn take(root: &Path, state: &Path, waits: impl Into<Waits>) -> Result<ActingLock, StateError> {
        let waits = waits.into();
        let dir = StateDir::open(&place(root))?;
        let path = dir.path_of(ACTING);
        let mut file = dir.open_to_write(ACTING)?;
        let failed = |cause: String| StateError::new("lock", &path, cause);
        let mut watch = Watch::new(&file, state, waits.silence);
        let alone = || flock(&file, ALONE, &path).map(|is_ours| is_ours.then_some(()));
        let taken = wait_for(waits.patience, alone, || watch.look(holder::guards(&dir)))?;
        let (ended, stuck) = (watch.ended, watch.stuck);
        let former = Holder::read(&mut file);
        if taken.is_none() {
            let who = || who_acts(former.as_ref(), &holder::guards(&dir), &file);
            return Err(failed(stuck.unwrap_or_else(who)));
        }
        holder::forget_guards(&dir);
        let mut own = Holder::own(state);
        let (of_us, of_another) = match former {
            Some(former) if former.state == own.state => (former.journal, None),
            former => (JournalWas::Over, former),
        };
        if let Some(why) = of_another.and_then(|left| left_behind(&left)) {
            return Err(failed(why));
        }
        own.journal = of_us;
        own.write(&mut file);
        if !flock(&file, FlockOperation::NonBlockingLockShared, &path)? {
            return Err(failed(
                "another agent has just begun to act; stop that one first".into(),
            ));
        }
        let former = of_us;
        Ok(ActingLock {
            file,
            path,
            former,
            ended,
            _record: None,
        })
    }

    /// Whether the lock file is still where another agent would look for it.
    pub fn is_there(&self) -> bool {
        is_there(&self.file, &self.path)
    }

    /// What the previous agent recorded about its journal, if it used the same state directory.
    pub(crate) fn former_journal(&self) -> JournalWas {
        self.former
    }

    /// Takes the list of guards that were killed to take the lock: a sentence for the operator about each, returned once.
    pub fn take_ended(&mut self) -> Vec<String> {
        std::mem::take(&mut self.ended)
    }

    /// Records what to expect of a journal from now on, if `of` is the process that last took the right to act.
    pub(crate) fn set_journal(&mut self, of: Process, journal: JournalWas) {
        let holder = Holder::read(&mut self.file).filter(|holder| holder.process() == of);
        if let Some(mut holder) = holder {
            holder.journal = journal;
            holder.write(&mut self.file);
        }
    }

    /// Shares the agent's lock with its guard, and writes the guard's record next to the lock.
    ///
    /// # Errors
    /// When the lock file cannot be opened, or an agent is just beginning.
    pub(crate) fn share(root: &Path, guard: &Holder) -> Result<ActingLock, StateError> {
        let dir = StateDir::open(&place(root))?;
        let path = dir.path_of(ACTING);
        let file = dir.open_to_write(ACTING)?;
        match flock(&file, FlockOperation::NonBlockingLockShared, &path)? {
            true => Ok(ActingLock {
                file,
                path,
                former: JournalWas::Over,
                ended: Vec::new(),
                _record: Some(Record::begin(dir, guard)),
            }),
            false => Err(StateError::new(
                "lock",
                &path,
                "another agent has just begun to act",
            )),
        }
    }
}

/// Names the process that keeps an agent from acting, and says what to do about it.
fn who_acts(agent: Option<&Holder>, guards: &[Holder], lock: &File) -> String {
    let is_alive = |holder: &&Holder| task::is_alive(Path::new("/"), holder.process());
    let agent = agent.filter(is_alive);
    match agent.or_else(|| guards.iter().find(is_alive)) {
        Some(holder) => format!(
            "another agent acts on this host, or its guard is undoing its changes: {}; or watch with --dry-run",
            holder.described()
        ),
        None => format!("another agent acts on this host: {}", holder::kernel_says(lock)),
    }
}

/// Why an agent must not begin after an agent with another state directory, if it must not.
fn left_behind(left: &Holder) -> Option<String> {
    let state = left.state.display();
    let is_lost = match left.journal {
        JournalWas::Over => false,
        JournalWas::Kept => !crate::journal::is_there(&left.state),
        JournalWas::Lost => true,
    };
    if is_lost {
        return Some(format!(
            "an agent with state in {state} ended, and its journal, which says how VMs were before, is gone: put the directory back if it was moved, and in either case run `homenode release --state {state}`"
        ));
    }
    leaves_something(&left.state).then(|| {
        format!(
            "an agent with state in {state} ended and left VMs changed, or its journal cannot be read; run `homenode release --state {state}` first"
        )
    })
}

const ALONE: FlockOperation = FlockOperation::NonBlockingLockExclusive;

fn is_there(file: &File, path: &Path) -> bool {
    let id = |file: &std::fs::Metadata| (file.dev(), file.ino());
    let is_linked = file.metadata().is_ok_and(|file| file.nlink() > 0);
    // If the path cannot be checked, the file does not count as gone.
    let is_at = |found: std::fs::Metadata| file.metadata().is_ok_and(|file| id(&file) == id(&found));
    is_linked
        && match std::fs::symlink_metadata(path) {
            Ok(found) => is_at(found),
            Err(error) => !homenode_kernel::read::is_absence(&error),
        }
}

fn place(root: &Path) -> PathBuf {
    root.join(STATE_DIR.trim_start_matches('/'))
}

/// Whether an agent's journal lists something in force, or cannot be read.
fn leaves_something(state: &Path) -> bool {
    let entries = crate::journal::try_peek(state);
    entries.is_none_or(|entries| entries.values().any(crate::journal::Entry::is_in_force))
}

/// Tries to lock the file. Returns whether this process now has the lock.
fn flock(file: &File, how: FlockOperation, path: &Path) -> Result<bool, StateError> {
    match rustix::fs::flock(file, how) {
        Ok(()) => Ok(true),
        Err(Errno::WOULDBLOCK) => Ok(false),
        Err(e) => Err(StateError::new("lock", path, e)),
    }
}

/// Retries until `take` succeeds, or until `patience` ends and `look` sees no reason to wait longer.
fn wait_for<T>(
    patience: Duration,
    mut take: impl FnMut() -> Result<Option<T>, StateError>,
    mut look: impl FnMut() -> bool,
) -> Result<Option<T>, StateError> {
    let mut waited = Duration::ZERO;
    loop {
        let taken = take()?;
        if taken.is_some() || (!look() && waited >= patience) {
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
        let guard = ActingLock::share(root.path(), &Holder::own_guard(&one, None)).unwrap();
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
            .set(vm, &crate::journal::tests::levers::Home("0".parse().unwrap()))
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
