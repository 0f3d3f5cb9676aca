//! The guard: a small process that outlives the agent, and restores what the agent changed if the agent dies or hangs.
//!
//! ```text
//!   agent ── starts ──▶ guard (own session, SIGINT/SIGTERM/SIGHUP ignored; shares the right to act on this host)
//!     │                   │ waits for heartbeats from the agent on a pipe
//!     ├─ goodbye ────────▶│ exits at once
//!     │◀────────── answer ─┤
//!     ├─ no beat ────────▶│ kills the agent, which would act on stale knowledge if it woke up later
//!     └─ pipe closes ────▶│ waits `grace`: ── a new agent takes the lock ──▶ exits, that agent continues
//!                         └─ no new agent ─▶ undoes the journal, retrying until nothing is in force, exits
//! ```
//!
//! The guard is the agent's own binary under a hidden subcommand, so no second binary has to be installed. Its standard input is
//! the read end of the pipe. The guard never restarts the agent. The agent checks that its guard is alive ([`Guard::is_there`]).

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use homenode_kernel::task::{self, Process};
use homenode_units::VmId;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal};

use crate::acting::Undone;
pub use crate::heartbeat::SILENCE_MAX;
use crate::heartbeat::{BEAT, Heartbeat, Line};
use crate::holder::{Holder, JournalWas};
use crate::journal::{self, Journal};
use crate::lock::{ActingLock, Lock, Owner};
use crate::scope;
use crate::state_dir::{StateDir, StateError};

const GOODBYE: u8 = b'q';
const READY: u8 = b'r';
/// How long a guard may take to start or to end on a busy host; shorter than the silence that the guard allows the agent.
const START_MAX: Duration = Duration::from_secs(15);
/// How long a guard that was stopped together with its agent waits for the agent's next heartbeat.
const THAW: Duration = Duration::from_secs(7);
/// How often the guard checks whether a new agent has taken over.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a dying agent may take to close its files and release its locks.
const DYING_MAX: Duration = Duration::from_secs(5);
/// First and longest time between two attempts to undo: libvirt may be restarting too, or be away for long.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(10);
const LEFT_TO_ANOTHER: &str = "the state directory was moved or removed, and another agent acts: the undoing is left to that \
                               agent, which finds the changes in the VMs' marks";

/// Why an agent has no guard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuardError {
    /// The process could not be started.
    #[error(
        "cannot start the guard process {exe}: {cause}; without it, VMs would not be restored if the agent died"
    )]
    Start {
        /// The binary.
        exe: String,
        /// The system's error message.
        cause: String,
    },
    /// The process started but did not report that it is ready.
    #[error("the guard process {exe} ended, or took over {} s, before it was ready", START_MAX.as_secs())]
    NotReady {
        /// The binary.
        exe: String,
    },
}

/// The agent's handle on its guard. Dropping it without [`Guard::goodbye`] looks like the agent's death, so the guard restores.
#[derive(Debug)]
pub struct Guard {
    heartbeat: Heartbeat,
    child: Child,
}

/// Starts a guard process: `exe` with `args`, which must lead to [`run`] with standard input as its pipe. Returns once the guard
/// has left the agent's session, so that no signal to the agent's process group reaches it.
///
/// # Errors
/// When the guard cannot be started, or ends before it is ready.
pub fn spawn(exe: &Path, args: &[OsString], heartbeat: &Heartbeat) -> Result<Guard, GuardError> {
    let name = || exe.display().to_string();
    let start = |cause: std::io::Error| GuardError::Start {
        exe: name(),
        cause: cause.to_string(),
    };
    // Close-on-exec: a child that the agent starts later must not keep the pipe open after the agent's death.
    let (theirs, ours) =
        rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC).map_err(|e| start(e.into()))?;
    let mut child = Command::new(exe)
        .args(args)
        .stdin(Stdio::from(theirs))
        .stdout(Stdio::piped())
        // The guard is not a service and must not notify the service manager.
        .env_remove("NOTIFY_SOCKET")
        .env_remove("WATCHDOG_USEC")
        .spawn()
        .map_err(start)?;
    let mut ready = [0u8; 1];
    let answers = child.stdout.take().and_then(|mut out| {
        let is_ready =
            is_readable(&out, START_MAX) && out.read_exact(&mut ready).is_ok() && ready[0] == READY;
        is_ready.then_some(out)
    });
    let Some(answers) = answers else {
        drop(ours);
        wait_for_guard(&mut child);
        return Err(GuardError::NotReady { exe: name() });
    };
    // Non-blocking, so that a hung guard cannot block the agent.
    let answers = OwnedFd::from(answers);
    for end in [&ours, &answers] {
        rustix::io::ioctl_fionbio(end, true).map_err(|e| start(e.into()))?;
    }
    let now = Instant::now();
    *heartbeat.line() = Some(Line {
        beats: ours,
        answers,
        said: now,
        heard: now,
        is_broken: false,
    });
    Ok(Guard {
        heartbeat: heartbeat.clone(),
        child,
    })
}

/// Starts a guard in its own systemd unit, or as an ordinary child process if no unit can be made. The second value says why
/// there is no unit. The host's own files are below `root`.
///
/// # Errors
/// When the guard cannot be started, or ends before it is ready.
pub fn spawn_apart(
    root: &Path,
    exe: &Path,
    args: &[OsString],
    heartbeat: &Heartbeat,
) -> Result<(Guard, Option<String>), GuardError> {
    let why = match scope::around(root, exe, args) {
        Ok((runner, all)) => match spawn(&runner, &all, heartbeat) {
            Ok(guard) => return Ok((guard, None)),
            Err(error) => error.to_string(),
        },
        Err(why) => why.to_owned(),
    };
    Ok((spawn(exe, args, heartbeat)?, Some(why)))
}

impl Guard {
    /// Whether the guard is alive and answers heartbeats. If not, the agent must start another guard: if the agent died, its
    /// changes would stay.
    pub fn is_there(&mut self) -> bool {
        let line = self.heartbeat.line();
        // Measured from the agent's last heartbeat: a guard is not to blame if the agent was too busy to send one.
        let is_heard =
            |line: &Line| !line.is_broken && line.said.saturating_duration_since(line.heard) < SILENCE_MAX;
        line.as_ref().is_some_and(is_heard) && matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the guard when the agent stops in an orderly way, after it restored or deliberately left its changes.
    pub fn goodbye(mut self) {
        let line = self.heartbeat.line().take();
        let said = line.map(|line| rustix::io::write(&line.beats, &[GOODBYE]));
        if !matches!(said, Some(Ok(1))) {
            let _ = self.child.kill();
        }
        wait_for_guard(&mut self.child);
    }

    /// Kills a guard that no longer answers: a stopped guard would wake up and undo what a living agent does.
    pub fn end(mut self) {
        let _ = self.child.kill();
        wait_for_guard(&mut self.child);
    }
}

/// Waits for a guard to end, and kills it after [`START_MAX`]: a stopped guard never ends by itself.
fn wait_for_guard(child: &mut Child) {
    let mut waited = Duration::ZERO;
    while waited < START_MAX && matches!(child.try_wait(), Ok(None)) {
        std::thread::sleep(LOOK_EVERY / 10);
        waited += LOOK_EVERY / 10;
    }
    let _ = child.kill();
    let _ = child.wait();
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.heartbeat.line().take();
    }
}

/// Waits until the agent has ended. A dying process closes its files one by one: it may have closed its end of the pipe and still
/// hold the lock, and must not be mistaken for a successor. The kernel gives its children another parent only after closing all
/// of its files.
fn wait_for_end_of(agent: Option<Pid>) {
    let mut waited = Duration::ZERO;
    while rustix::process::getppid() == agent && waited < DYING_MAX {
        std::thread::sleep(Duration::from_millis(5));
        waited += Duration::from_millis(5);
    }
}

/// How a guard ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The agent said goodbye.
    Goodbye,
    /// A new agent took over.
    TakenOver,
    /// The guard restored what the journal listed, on this number of VMs.
    Undone(usize),
}

/// How long a guard waits.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// How long the agent may be silent.
    pub silence: Duration,
    /// How long a new agent has to take over.
    pub grace: Duration,
}

/// Runs the guard until it ends, as the module describes. `pipe` is the read end of the pipe, `state` the agent's state
/// directory; the host's own files are below `root`. The guard writes one byte to `ready` (standard output, where the agent waits
/// for it) once it has left the agent's session. `undo` restores what is in force and strikes it out in the journal. `say`
/// reports to the operator, once each, the changes that could not be undone.
///
/// # Errors
/// When the guard cannot share the right to act on this host; it then never reports that it is ready.
pub fn run(
    pipe: impl AsFd,
    ready: &mut dyn Write,
    (root, state): (&Path, &Path),
    patience: Patience,
    mut undo: impl FnMut(&mut Journal) -> Undone,
    mut say: impl FnMut(&str),
) -> Result<Ending, StateError> {
    leave_session();
    // Held open: the journal stays within reach even if the directory is moved away.
    let dir = StateDir::open(state)?;
    let agent = rustix::process::getppid();
    // A dying agent may hold its lock for a while after the pipe closed: the guard must not mistake it for a successor.
    let own = agent.and_then(|agent| task::process(Path::new("/"), agent.as_raw_nonzero().get()).ok()?);
    let who = Holder::own_guard(state, own);
    let acting = Some(ActingLock::share(root, &who)?);
    let _ = ready.write_all(&[READY]).and_then(|()| ready.flush());
    match last_word(&pipe, ready, patience.silence) {
        LastWord::Goodbye => return Ok(Ending::Goodbye),
        LastWord::Closed => {}
        LastWord::Silence => {
            if let Some(agent) = agent.filter(|agent| rustix::process::getppid() == Some(*agent)) {
                let _ = rustix::process::kill_process(agent, Signal::KILL);
            }
            say("the agent was silent for too long: its guard ended it and is undoing its changes");
        }
    }
    wait_for_end_of(agent);
    let undoing = Undoing {
        dir,
        root,
        state,
        who,
        own,
        acting,
        done: BTreeSet::new(),
        said: BTreeSet::new(),
        journal: JournalWas::Over,
    };
    Ok(undoing.until_done(patience.grace, &mut undo, &mut say))
}

/// Leaves the agent's session, so that no signal to the agent's group reaches this process.
fn leave_session() {
    // Fails only for the leader of a process group, and a group leader is not in the agent's group.
    let _ = rustix::process::setsid();
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // Registering fails only for signals that cannot be caught; these can.
        let _ = signal_hook::flag::register(signal, Arc::clone(&ignored));
    }
}

/// State of a guard that undoes after its agent is gone.
struct Undoing<'a> {
    /// The state directory, held open.
    dir: StateDir,
    root: &'a Path,
    state: &'a Path,
    /// The guard.
    who: Holder,
    /// The guard's agent.
    own: Option<Process>,
    acting: Option<ActingLock>,
    done: BTreeSet<VmId>,
    said: BTreeSet<String>,
    /// What the next agent should expect of the journal.
    journal: JournalWas,
}

impl Undoing<'_> {
    /// Waits for a new agent. Once `grace` is over, undoes until nothing is in force.
    fn until_done(
        mut self,
        grace: Duration,
        undo: &mut impl FnMut(&mut Journal) -> Undone,
        say: &mut impl FnMut(&str),
    ) -> Ending {
        // If the directory is not where an agent would look for it, no agent can take over from it.
        let grace = if self.dir.is_in_place() {
            grace
        } else {
            Duration::ZERO
        };
        let (mut waited, mut retry, mut next) = (Duration::ZERO, RETRY_FIRST, grace);
        loop {
            let owner = Lock::owner_in(&self.dir).ok().flatten();
            match owner.filter(|owner| Some(owner.process) != self.own) {
                Some(owner) if owner.is_guarded => return Ending::TakenOver,
                // The owner will soon have a guard, or it is undoing. If it ends before that, this guard continues.
                Some(_) => self.acting = None,
                None if self.is_replaced() => {
                    say(LEFT_TO_ANOTHER);
                    return Ending::TakenOver;
                }
                None => {
                    let acting = self.acting.take();
                    self.acting = acting.or_else(|| ActingLock::share(self.root, &self.who).ok());
                    if waited >= next {
                        if self.undo(undo, say) {
                            return Ending::Undone(self.done.len());
                        }
                        next = waited + retry;
                        retry = (retry * 2).min(RETRY_MAX);
                    }
                }
            }
            // Short pauses, because a guard that has not run for long is assumed to hang.
            let pause = LOOK_EVERY.min(next.saturating_sub(waited));
            let pause = pause.max(Duration::from_millis(1));
            std::thread::sleep(pause);
            waited += pause;
        }
    }

    /// Whether another agent acts from a new directory at the same path, although this guard shares the right to act.
    fn is_replaced(&self) -> bool {
        let is_another = |owner: Owner| owner.is_guarded && Some(owner.process) != self.own;
        !self.dir.is_in_place()
            && self.acting.as_ref().is_none_or(|acting| !acting.is_there())
            && Lock::owner(self.state).ok().flatten().is_some_and(is_another)
    }

    /// Undoes what is in force. Returns whether nothing is left.
    fn undo(&mut self, undo: &mut impl FnMut(&mut Journal) -> Undone, say: &mut impl FnMut(&str)) -> bool {
        // Held while undoing, so that a new agent waits. If another process holds it, the guard undoes nevertheless.
        let mut lock = Lock::try_take_in(&self.dir, &self.who).ok().flatten();
        // If the journal's files cannot be written, the journal only has a warning, and undoing continues.
        let opened = self.dir.again().map_err(Into::into).and_then(Journal::open_in);
        let failures = match opened {
            Ok(mut journal) => {
                if !journal.was_there() && self.journal != JournalWas::Lost {
                    self.journal = JournalWas::Lost;
                    say(&journal::lost_at(self.state));
                }
                let Undone { vms, failures } = undo(&mut journal);
                self.done.extend(vms);
                failures
            }
            Err(error) => vec![error.to_string()],
        };
        for failure in &failures {
            if self.said.insert(failure.clone()) {
                say(&format!("{failure}; retrying"));
            }
        }
        if !failures.is_empty() {
            return false;
        }
        if let Some(lock) = &mut lock {
            lock.set_journal(self.journal);
        }
        if let (Some(acting), Some(agent)) = (&mut self.acting, self.own) {
            acting.set_journal(agent, self.journal);
        }
        true
    }
}

/// The last sign of life from an agent.
enum LastWord {
    Goodbye,
    /// The agent's end of the pipe is closed.
    Closed,
    /// The agent's end is open, but no heartbeat arrives.
    Silence,
}

/// Waits until the agent says goodbye, closes the pipe or is silent for too long.
fn last_word(pipe: &impl AsFd, answers: &mut dyn Write, silence_max: Duration) -> LastWord {
    let mut bytes = [0u8; 64];
    loop {
        // The agent and the guard may both have been stopped, and the guard may be the first to wake up.
        if !is_readable(pipe, silence_max) && !is_readable(pipe, THAW.min(silence_max)) {
            return LastWord::Silence;
        }
        match rustix::io::read(pipe, &mut bytes) {
            Ok(0) => return LastWord::Closed,
            Ok(count) if bytes[..count].contains(&GOODBYE) => return LastWord::Goodbye,
            // If the agent does not read the answers, the next reads of the pipe show why.
            Ok(_) => drop(answers.write_all(&[BEAT]).and_then(|()| answers.flush())),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return LastWord::Closed,
        }
    }
}

/// Waits up to `most` until the pipe has data or is at its end. Returns whether it is.
fn is_readable(pipe: &impl AsFd, most: Duration) -> bool {
    let limit = Timespec::try_from(most).ok();
    loop {
        match poll(&mut [PollFd::new(pipe, PollFlags::IN)], limit.as_ref()) {
            Err(rustix::io::Errno::INTR) => {}
            Ok(0) => return false,
            Ok(_) | Err(_) => return true,
        }
    }
}
