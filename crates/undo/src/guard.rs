//! The guard: a small process that outlives the agent and restores what the agent changed if the agent dies or hangs.
//!
//! ```text
//!   agent ── starts ──▶ guard (own session, SIGINT/SIGTERM/SIGHUP ignored; shares the right to act on this host)
//!     │                   │ waits for beats on the pipe from the agent
//!     ├─ goodbye ────────▶│ exits at once
//!     │◀────────── answer ─┤
//!     ├─ no beat ────────▶│ kills the agent: if it woke up later it would act on stale knowledge
//!     └─ pipe closes ────▶│ waits `grace`: ── a new agent takes the lock ──▶ exits, that agent continues
//!                         └─ none came ────▶ undoes the journal, retrying until nothing is in force, exits
//! ```
//!
//! The guard is the agent's own binary under a hidden subcommand, so there is nothing more to install. Its standard input is
//! the read end of the pipe. The guard restarts no agent; the agent checks that its guard is alive ([`Guard::is_there`]).

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
/// How long a guard may take to start or to end on a busy host: less than the agent may be silent.
const START_MAX: Duration = Duration::from_secs(15);
/// How long a guard that was stopped waits for a beat from an agent that was stopped with it.
const THAW: Duration = Duration::from_secs(7);
/// How often the guard checks whether a new agent has taken over.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a dying agent may take to release everything.
const DYING_MAX: Duration = Duration::from_secs(5);
/// First and longest time between two attempts to undo: libvirt may be restarting too, or be away for long.
const RETRY_FIRST: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(10);
const LEFT_TO_ANOTHER: &str = "the state directory was moved or removed, and another agent acts: what is to be undone is left to that \
                               agent, which knows it by the VMs' marks";

/// Why there is no guard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GuardError {
    /// It could not be started.
    #[error(
        "cannot start the guard process {exe}: {cause}; without it nothing would restore VMs if the agent died"
    )]
    Start {
        /// The binary.
        exe: String,
        /// What the system said.
        cause: String,
    },
    /// It started and did not report that it is ready.
    #[error("the guard process {exe} ended, or took over {} s, before it was ready", START_MAX.as_secs())]
    NotReady {
        /// The binary.
        exe: String,
    },
}

/// The agent's end of the guard. Dropped without [`Guard::goodbye`] it looks as if the agent had died: the guard restores.
#[derive(Debug)]
pub struct Guard {
    heartbeat: Heartbeat,
    child: Child,
}

/// Starts a guard: `exe` with `args`, which must lead to [`run`] with standard input as its pipe. Returns once the guard has
/// left the agent's session, so that no signal to the agent's group reaches it.
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
        // The guard is no service and must not notify the service manager.
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
    // The agent must not block on a hung guard.
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

/// Starts a guard in its own systemd unit, or as an ordinary child if it can have none. The second value says why it has no
/// unit of its own. `root` is where the host's own files are.
///
/// # Errors
/// As [`spawn`].
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
    /// Whether the guard is alive and listens. If not, changes made from now on would stay if the agent died: start another
    /// guard.
    pub fn is_there(&mut self) -> bool {
        let line = self.heartbeat.line();
        // Counted from the agent's last heartbeat: if the agent was busy for long, that is not its guard's fault.
        let is_heard =
            |line: &Line| !line.is_broken && line.said.saturating_duration_since(line.heard) < SILENCE_MAX;
        line.as_ref().is_some_and(is_heard) && matches!(self.child.try_wait(), Ok(None))
    }

    /// Ends the guard: the agent stops in an orderly way, and has restored or deliberately left what it changed.
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

/// Waits for a guard to end, for a limited time: a stopped guard is killed.
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

/// Waits for the agent's end. A dying process closes its files one by one: its end of the pipe may be closed while it still
/// holds the lock, and it must not be mistaken for a successor. Its children get another parent only after all of its files
/// are closed.
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

/// Runs the guard until it ends; see the module. `pipe` is the read end, `state` the agent's state directory, `root` where
/// the host's own files are. One byte goes to `ready` (standard output, where the agent waits for it) once the guard is on
/// its own. `undo` restores what is in force and strikes it out in the journal. `say` reports once to the operator what
/// could not be undone.
///
/// # Errors
/// When the guard cannot share the right to act on this host; then it does not become ready.
pub fn run(
    pipe: impl AsFd,
    ready: &mut dyn Write,
    (root, state): (&Path, &Path),
    patience: Patience,
    mut undo: impl FnMut(&mut Journal) -> Undone,
    mut say: impl FnMut(&str),
) -> Result<Ending, StateError> {
    leave_session();
    // Held open: if the directory is moved away, its journal is still at hand.
    let dir = StateDir::open(state)?;
    let agent = rustix::process::getppid();
    // The agent's lock may outlast it for a while: it is not its own successor.
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
            say("the agent had said nothing for long: its guard ended it, and undoes what it changed");
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
    // Fails only for the leader of a process group, which is not in the agent's group.
    let _ = rustix::process::setsid();
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // Only signals that cannot be caught are refused; these can be caught.
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
    /// Its agent.
    own: Option<Process>,
    acting: Option<ActingLock>,
    done: BTreeSet<VmId>,
    said: BTreeSet<String>,
    /// What to expect of the journal after this guard.
    journal: JournalWas,
}

impl Undoing<'_> {
    /// Waits for a new agent, and undoes once `grace` is over, until nothing is in force.
    fn until_done(
        mut self,
        grace: Duration,
        undo: &mut impl FnMut(&mut Journal) -> Undone,
        say: &mut impl FnMut(&str),
    ) -> Ending {
        // No agent can take over from a directory that is not where an agent would look for it.
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
                // It will soon have a guard, or it undoes; if it ends before that, this guard goes on.
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
            // Short: a guard that has not run for long is taken to hang.
            let pause = LOOK_EVERY.min(next.saturating_sub(waited));
            let pause = pause.max(Duration::from_millis(1));
            std::thread::sleep(pause);
            waited += pause;
        }
    }

    /// Whether an agent acts from another directory of the same name, despite this guard's right to act.
    fn is_replaced(&self) -> bool {
        let is_another = |owner: Owner| owner.is_guarded && Some(owner.process) != self.own;
        !self.dir.is_in_place()
            && self.acting.as_ref().is_none_or(|acting| !acting.is_there())
            && Lock::owner(self.state).ok().flatten().is_some_and(is_another)
    }

    /// Undoes what is in force. Returns whether nothing is left.
    fn undo(&mut self, undo: &mut impl FnMut(&mut Journal) -> Undone, say: &mut impl FnMut(&str)) -> bool {
        // Held while undoing: an agent that starts now waits. If another process holds it, the guard undoes all the same.
        let mut lock = Lock::try_take_in(&self.dir, &self.who).ok().flatten();
        // If the journal's files cannot be written, that is only a warning and undoing goes on.
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
                say(&format!("{failure}; tried again"));
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

/// Last sign of an agent.
enum LastWord {
    Goodbye,
    /// The agent's end of the pipe is closed.
    Closed,
    /// The agent's end is open, but no beat comes.
    Silence,
}

/// Waits until the agent says goodbye, closes the pipe or is silent for too long.
fn last_word(pipe: &impl AsFd, answers: &mut dyn Write, silence_max: Duration) -> LastWord {
    let mut bytes = [0u8; 64];
    loop {
        // Both may have been stopped, and the guard may be the first to wake up.
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

/// Waits up to `most` until there is something to read, or the end of file. Returns whether there is.
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
