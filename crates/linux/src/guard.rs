//! The guard: a small process that outlives the agent and restores what the agent changed if the agent dies.
//!
//! ```text
//!   agent ── starts ──▶ guard (own session, SIGINT/SIGTERM/SIGHUP ignored)
//!     │                   │ waits for the pipe from the agent
//!     ├─ goodbye ────────▶│ exits at once
//!     └─ pipe closes ────▶│ waits `grace`: ── a new agent takes the lock ──▶ exits, that agent continues
//!                         └─ nobody came ──▶ takes the lock, undoes the journal, exits
//! ```
//!
//! The guard is the agent's own binary under a hidden subcommand, so there is nothing more to install. Its end of the
//! pipe is its standard input.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use homenode_units::VmId;

use crate::journal::{Journal, JournalError, Lock};
use crate::levers::in_force;

const GOODBYE: u8 = b'q';
const READY: u8 = b'r';
/// How often the guard looks whether a new agent has taken over.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// How long a dying agent may take to let go of everything; one that lives on holds the lock and goes on.
const DYING_MAX: Duration = Duration::from_secs(5);
/// How often an undo that fails is tried again, a second apart: libvirt may be restarting as well.
const TRIES: u32 = 60;

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
    /// It started and did not report ready.
    #[error("the guard process {exe} ended before it was ready")]
    NotReady {
        /// The binary.
        exe: String,
    },
}

/// The agent's end. Dropped without [`Guard::goodbye`] it is as if the agent had died: the guard restores.
#[derive(Debug)]
pub struct Guard {
    pipe: Option<OwnedFd>,
    child: Child,
}

/// Starts a guard: `exe` with `args`, which must lead to [`run`] with standard input as its pipe. Returns once
/// the guard has left the agent's session, so that no signal to the agent's group can reach it any more.
///
/// # Errors
/// When it cannot be started, or ends before it is ready.
pub fn spawn(exe: &Path, args: &[String]) -> Result<Guard, GuardError> {
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
        .spawn()
        .map_err(start)?;
    let mut ready = [0u8; 1];
    let is_ready = child
        .stdout
        .take()
        .is_some_and(|mut out| out.read_exact(&mut ready).is_ok() && ready[0] == READY);
    if !is_ready {
        drop(ours);
        let _ = child.wait();
        return Err(GuardError::NotReady { exe: name() });
    }
    Ok(Guard {
        pipe: Some(ours),
        child,
    })
}

impl Guard {
    /// Ends the guard: the agent stops in good order, having restored or deliberately left what it changed.
    pub fn goodbye(mut self) {
        if let Some(pipe) = self.pipe.take() {
            let _ = rustix::io::write(&pipe, &[GOODBYE]);
        }
        let _ = self.child.wait();
    }
}

/// A dying process closes its files one by one: its end of the pipe may be gone while it still holds the lock, and must not
/// be mistaken for a successor. Its children get another parent only after all of its files are closed.
fn wait_for_end_of(agent: Option<rustix::process::Pid>) {
    let mut waited = Duration::ZERO;
    while rustix::process::getppid() == agent && waited < DYING_MAX {
        std::thread::sleep(Duration::from_millis(5));
        waited += Duration::from_millis(5);
    }
}

/// How a guard's life ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The agent said goodbye.
    Goodbye,
    /// A new agent took over.
    TakenOver,
    /// It restored what the journal listed; how many VMs.
    Undone(usize),
    /// It could not restore these many VMs; they stay in the journal for the next agent.
    Left(usize),
}

/// The guard's whole life; see the module. `pipe` is the read end, `dir` the journal's directory. `ready` gets
/// one byte once the guard is on its own (standard output, where the agent waits for it). `undo` restores one VM and clears it in
/// the journal; it answers `Ok` also when that run of the VM is over.
///
/// # Errors
/// When the journal cannot be locked or opened.
pub fn run(
    mut pipe: impl Read,
    ready: &mut dyn Write,
    dir: &Path,
    grace: Duration,
    mut undo: impl FnMut(&mut Journal, VmId) -> Result<(), String>,
) -> Result<Ending, JournalError> {
    // Fails only for a process group's leader, which has no group of the agent's to leave.
    let _ = rustix::process::setsid();
    let ignored = Arc::new(AtomicBool::new(false));
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGHUP] {
        // Refused for signals that cannot be caught only, which these are not.
        let _ = signal_hook::flag::register(signal, Arc::clone(&ignored));
    }
    let _ = ready.write_all(&[READY]).and_then(|()| ready.flush());
    let agent = rustix::process::getppid();
    if said_goodbye(&mut pipe) {
        return Ok(Ending::Goodbye);
    }
    wait_for_end_of(agent);
    let mut waited = Duration::ZERO;
    while waited < grace {
        match Lock::try_take(dir)? {
            None => return Ok(Ending::TakenOver),
            Some(lock) => drop(lock),
        }
        let step = LOOK_EVERY.min(grace - waited);
        std::thread::sleep(step);
        waited += step;
    }
    // Held while undoing: an agent that starts now waits.
    let Some(_lock) = Lock::try_take(dir)? else {
        return Ok(Ending::TakenOver);
    };
    let mut journal = Journal::open(dir)?;
    let mut done = 0;
    for attempt in 0..TRIES {
        for vm in in_force(&journal) {
            if undo(&mut journal, vm).is_ok() {
                done += 1;
            }
        }
        if in_force(&journal).is_empty() {
            return Ok(Ending::Undone(done));
        }
        if attempt + 1 < TRIES {
            std::thread::sleep(Duration::from_secs(1));
        }
    }
    Ok(Ending::Left(in_force(&journal).len()))
}

/// Waits for the agent's end of the pipe to close; whether it said goodbye before.
fn said_goodbye(pipe: &mut impl Read) -> bool {
    let mut byte = [0u8; 1];
    loop {
        match pipe.read(&mut byte) {
            Ok(0) => return false,
            Ok(_) if byte[0] == GOODBYE => return true,
            Ok(_) => {}
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => return false,
        }
    }
}
