//! Records which process holds one of the agent's locks, and checks the record with the kernel before a silent guard is killed.
//!
//! A guard holds the right to act on the host until everything is undone. A guard that is stopped (SIGSTOP, a debugger, a frozen
//! cgroup) or hangs holds that right forever; if its agent is dead too, no process undoes anything. The process that wants the
//! lock then kills that guard, and undoes what the journal lists.
//!
//! ```text
//!   record in a file of our own: a guard, of an agent, for this state directory
//!     ─▶ its agent is dead ─▶ pidfd ─▶ same start time, same program, its argument is `guard`, it holds this very lock
//!     ─▶ stopped for STOPPED_MAX, or not run for as long as a guard may be silent ─▶ SIGKILL ─▶ wait for its end
//! ```
//!
//! A guard that is undoing runs every few seconds, since its longest wait is one libvirt call. The kernel counts how many times
//! and how long its first thread ran, even if the disk is full or read-only. A guard whose counts grow is left to its work.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use homenode_kernel::task::{self, Process};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::state_dir::StateDir;

/// Enough for paths and a few numbers.
const HOLDER_BYTES_MAX: u64 = 16 << 10;
/// File name prefix of a guard's record; its process number follows.
const RECORD: &str = "guard.";
/// The argument that makes the program a guard.
const GUARD: &str = "guard";
/// How long a guard of a dead agent may be stopped.
const STOPPED_MAX: Duration = Duration::from_secs(1);
/// A new agent keeps waiting for a guard that has not run for this long: the guard resumes, or is killed for its silence.
const QUIET: Duration = Duration::from_secs(2);
/// How long a process may take to end after SIGKILL.
const DYING_MAX: Duration = Duration::from_secs(5);

/// Identity of a file, as the kernel knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Returns the identity of the file at a path; follows links.
    pub(crate) fn at(path: &Path) -> Option<FileId> {
        fs::metadata(path).ok().map(|file| FileId::from(&file))
    }

    /// Returns the identity of an open file.
    pub(crate) fn of(file: &File) -> Option<FileId> {
        file.metadata().ok().map(|file| FileId::from(&file))
    }
}

impl From<&fs::Metadata> for FileId {
    fn from(file: &fs::Metadata) -> FileId {
        FileId {
            device: file.dev(),
            inode: file.ino(),
        }
    }
}

/// In which role a process holds a lock.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Role {
    /// An agent, or `homenode release`.
    #[default]
    Agent,
    /// The guard of an agent.
    Guard {
        /// The agent, if it is known.
        agent: Option<Process>,
        /// The program that the guard runs.
        program: Option<FileId>,
    },
}

/// What the next agent should expect of the lock holder's journal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum JournalWas {
    /// Nothing: there is no journal yet, or everything it lists is undone.
    #[default]
    Over,
    /// The journal is there, and lists what is in force.
    Kept,
    /// The journal was gone when a guard needed it to undo.
    Lost,
}

/// The process that last took a lock.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub pid: i32,
    pub start_ticks: u64,
    /// The process's state directory.
    pub state: PathBuf,
    /// Whether the process has a guard, which undoes its changes if it ends.
    #[serde(default)]
    pub is_guarded: bool,
    #[serde(default)]
    pub role: Role,
    #[serde(default)]
    pub journal: JournalWas,
}

impl Holder {
    /// This process, as an agent.
    pub(crate) fn own(state: &Path) -> Holder {
        let pid = std::process::id().cast_signed();
        let own = task::process(Path::new("/"), pid).ok().flatten();
        Holder {
            pid,
            start_ticks: own.map_or(0, |own| own.start_ticks),
            state: std::path::absolute(state).unwrap_or_else(|_| state.to_owned()),
            is_guarded: false,
            role: Role::Agent,
            journal: JournalWas::Over,
        }
    }

    /// This process, as the guard of an agent.
    pub(crate) fn own_guard(state: &Path, agent: Option<Process>) -> Holder {
        let program = FileId::at(Path::new("/proc/self/exe"));
        Holder {
            role: Role::Guard { agent, program },
            ..Holder::own(state)
        }
    }

    /// Reads the holder from a lock's file.
    pub(crate) fn read(file: &mut File) -> Option<Holder> {
        let mut text = String::new();
        file.rewind().ok()?;
        file.take(HOLDER_BYTES_MAX).read_to_string(&mut text).ok()?;
        serde_json::from_str(&text).ok()
    }

    /// Writes the holder to the lock's file. Overwrites before truncating, so that no reader finds an empty file even if the disk
    /// is full.
    pub(crate) fn write(&self, file: &mut File) {
        let text = self.text();
        let before = file.metadata().map_or(0, |file| file.len()).min(HOLDER_BYTES_MAX);
        // Blanks are allowed after a JSON document.
        let padded = format!("{text:<width$}", width = before as usize);
        let _ = file
            .rewind()
            .and_then(|()| file.write_all(padded.as_bytes()))
            .and_then(|()| file.set_len(text.len() as u64));
    }

    fn text(&self) -> String {
        serde_json::to_string(self).expect("a holder is JSON")
    }

    pub(crate) fn process(&self) -> Process {
        Process {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }

    /// Describes the holder to the operator, with advice on what to do.
    pub(crate) fn described(&self) -> String {
        let (pid, state) = (self.pid, self.state.display());
        let is_stopped = Signs::of(pid).is_some_and(|signs| signs.is_stopped);
        match &self.role {
            Role::Agent if is_stopped => format!(
                "the agent with state in {state} (process {pid}) holds it, and is stopped: resume it with `kill -CONT {pid}`, or \
                 end it with `kill -KILL {pid}` and try again"
            ),
            Role::Agent => format!(
                "the agent with state in {state} (process {pid}) holds it; stop that agent, or wait for its guard"
            ),
            Role::Guard { .. } if is_stopped => format!(
                "the guard of an agent with state in {state} (process {pid}) holds it, and is stopped: resume it with \
                 `kill -CONT {pid}`, or run `homenode release --state {state}` once its agent has ended"
            ),
            Role::Guard { .. } => format!(
                "the guard (process {pid}) is undoing what an agent with state in {state} changed; wait for it, or run \
                 `homenode release --state {state}`"
            ),
        }
    }
}

/// The record of a living guard, next to the lock that it shares with its agent.
#[derive(Debug)]
pub(crate) struct Record {
    dir: StateDir,
    name: String,
}

impl Record {
    /// Writes the record of a guard. If the disk is full, the guard works without a record.
    pub(crate) fn begin(dir: StateDir, guard: &Holder) -> Record {
        let name = format!("{RECORD}{}", guard.pid);
        let _ = dir.replace(&name, guard.text().as_bytes());
        Record { dir, name }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let _ = self.dir.remove(&self.name);
    }
}

/// Guards with a record in this directory; skips records that cannot be read or are not ours.
pub(crate) fn guards(dir: &StateDir) -> Vec<Holder> {
    let read = |name: &String| dir.read(name, HOLDER_BYTES_MAX).ok()?;
    let records = dir.names(RECORD).into_iter().filter_map(|name| read(&name));
    records
        .filter_map(|bytes| serde_json::from_slice(&bytes).ok())
        .collect()
}

/// Removes all records. Only the process that holds the lock exclusively may call this, since no guard shares the lock then.
pub(crate) fn forget_guards(dir: &StateDir) {
    for name in dir.names(RECORD) {
        let _ = dir.remove(&name);
    }
}

/// What the kernel shows of a process's first thread.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Signs {
    /// Whether SIGSTOP or a debugger stopped the process.
    is_stopped: bool,
    /// Voluntary and involuntary context switches and running time: they grow whenever the thread runs.
    counts: Vec<String>,
}

impl Signs {
    fn of(pid: i32) -> Option<Signs> {
        let proc = PathBuf::from(format!("/proc/{pid}"));
        let status = fs::read_to_string(proc.join("status")).ok()?;
        let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
        let counts = ["voluntary_ctxt_switches:", "nonvoluntary_ctxt_switches:"].map(value);
        let ran = fs::read_to_string(proc.join("schedstat")).unwrap_or_default();
        let ran = ran.split_ascii_whitespace().next();
        Some(Signs {
            is_stopped: value("State:")?.trim_start().starts_with(['T', 't']),
            counts: counts
                .into_iter()
                .chain([ran])
                .flatten()
                .map(str::to_owned)
                .collect(),
        })
    }
}

/// Watches the holders of a lock, and kills a silent guard of a dead agent.
pub(crate) struct Watch<'a> {
    lock: &'a File,
    /// The state directory of the process that wants the lock.
    state: &'a Path,
    silence: Duration,
    seen: BTreeMap<i32, (Signs, Instant)>,
    /// Guards that were killed, as sentences for the operator.
    pub ended: Vec<String>,
    /// Why a guard could not be killed.
    pub stuck: Option<String>,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(lock: &'a File, state: &'a Path, silence: Duration) -> Watch<'a> {
        Watch {
            lock,
            state,
            silence,
            seen: BTreeMap::new(),
            ended: Vec::new(),
            stuck: None,
        }
    }

    /// Checks these holders. Returns whether it is worth waiting beyond the usual patience.
    pub(crate) fn look(&mut self, holders: impl IntoIterator<Item = Holder>) -> bool {
        let mut is_quiet = false;
        for holder in holders {
            // The pidfd is opened first: a signal sent through it cannot reach another process that gets the same number.
            let Some(guard) = silent_suspect(&holder, self.lock, self.state) else {
                continue;
            };
            let Some(signs) = Signs::of(holder.pid) else {
                continue;
            };
            let now = Instant::now();
            let seen = self.seen.entry(holder.pid).or_insert((signs.clone(), now));
            if seen.0 != signs {
                *seen = (signs, now);
            }
            let quiet_for = now.saturating_duration_since(seen.1);
            let is_stopped = seen.0.is_stopped;
            let most = match is_stopped {
                true => STOPPED_MAX.min(self.silence),
                false => self.silence,
            };
            if quiet_for < most {
                is_quiet |= is_stopped || quiet_for >= QUIET;
            } else {
                self.end(&holder, &guard, is_stopped);
            }
        }
        is_quiet
    }

    fn end(&mut self, guard: &Holder, pidfd: &OwnedFd, is_stopped: bool) {
        let pid = guard.pid;
        let limit = Timespec::try_from(DYING_MAX).ok();
        let told = pidfd_send_signal(pidfd, Signal::KILL);
        let has_ended = poll(&mut [PollFd::new(pidfd, PollFlags::IN)], limit.as_ref());
        let how = if is_stopped { "stopped" } else { "silent" };
        match (told, has_ended) {
            (_, Ok(1..)) => self.ended.push(format!(
                "the guard (process {pid}) of a dead agent was {how} and undid nothing: it was ended, and this process takes \
                 over its undoing"
            )),
            (Err(error), _) => {
                self.stuck = Some(format!("the guard (process {pid}) is {how} and cannot be ended: {error}"));
            }
            _ => {
                self.stuck = Some(format!(
                    "the guard (process {pid}) is {how} and does not end after SIGKILL: the kernel holds it (/proc/{pid}/stack \
                     says where; a frozen cgroup of version 1 can hold it too); try again once it is gone"
                ));
            }
        }
    }
}

/// Opens a pidfd of the holder, if it certainly is the guard of a dead agent and holds the lock for this state directory.
fn silent_suspect(holder: &Holder, lock: &File, state: &Path) -> Option<OwnedFd> {
    let Role::Guard {
        agent: Some(agent),
        program: Some(program),
    } = &holder.role
    else {
        return None;
    };
    let root = Path::new("/");
    let is_own = holder.pid == std::process::id().cast_signed();
    if is_own || holder.state != std::path::absolute(state).ok()? || task::is_alive(root, *agent) {
        return None;
    }
    // Opened before the checks: if they still find the recorded process, the pidfd refers to it.
    let pidfd = pidfd_open(Pid::from_raw(holder.pid)?, PidfdFlags::empty()).ok()?;
    let proc = PathBuf::from(format!("/proc/{}", holder.pid));
    let words = fs::read(proc.join("cmdline")).ok()?;
    let is_it = task::process(root, holder.pid).ok()? == Some(holder.process())
        && FileId::at(&proc.join("exe")) == Some(*program)
        && words.split(|byte| *byte == 0).nth(1) == Some(GUARD.as_bytes())
        && holds(&proc, lock);
    is_it.then_some(pidfd)
}

/// Whether a process has this file open and locked, according to the kernel.
fn holds(proc: &Path, lock: &File) -> bool {
    let Some(lock) = FileId::of(lock) else {
        return false;
    };
    let Ok(open) = fs::read_dir(proc.join("fd")) else {
        return false;
    };
    let is_locked = |entry: fs::DirEntry| {
        let info = || fs::read_to_string(proc.join("fdinfo").join(entry.file_name())).unwrap_or_default();
        let is_lock = |line: &str| line.starts_with("lock:") && line.contains("FLOCK");
        FileId::at(&entry.path()) == Some(lock) && info().lines().any(is_lock)
    };
    open.flatten().any(is_locked)
}

/// Returns which processes hold a lock on this file according to the kernel, as text for the operator if no record names the
/// holder.
pub(crate) fn kernel_says(lock: &File) -> String {
    let inode = FileId::of(lock).map_or(0, |id| id.inode);
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    let of_it = |line: &str| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let (kind, pid, file) = (words.next()?, words.nth(2)?, words.next()?);
        (kind == "FLOCK" && file.rsplit(':').next()? == inode.to_string()).then(|| pid.to_owned())
    };
    let pids: Vec<String> = locks.lines().filter_map(of_it).collect();
    match pids.is_empty() {
        true => "another process holds it; end that one first (`fuser` says which)".to_owned(),
        false => format!(
            "process {} holds it; end it first if it is a guard or agent that hangs, else wait for it",
            pids.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests;
