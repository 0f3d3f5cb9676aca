//! Xen's trace of runstates, which the agent reads through `xentrace` while it runs.
//!
//! # Ownership
//! A host has one set of trace buffers, which only one program can read. The agent takes the trace only if this deprives no other
//! program of it:
//!
//! 1. No program is bound to the event that Xen sends to the reader (`VIRQ_TBUF`). Xen binds the event to a single program. An
//!    operator's `xentrace` has it while it runs; while ours runs, the operator's fails to start and says why.
//! 2. Xen has no buffers yet, or has buffers that an agent had made ([`MARK`]). Xen does not report whether it traces, so another
//!    program's buffers count as in use.
//!
//! # End
//! `xentrace` gets SIGTERM when the agent stops, and also when the agent dies in any way. It then stops tracing and ends. If it
//! was killed too and could not, the process that undoes the agent's changes stops tracing ([`stop_leftover`]). The buffers stay
//! until the host reboots, because Xen has no call that frees them.

#![allow(unsafe_code)] // signals to a child, a device that the standard library does not know

use std::fs::OpenOptions;
use std::io::{Error, Read as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use homenode_undo::state_dir::{STATE_DIR, StateDir, StateError};

use crate::error::CallError;
use crate::hypervisor::Hypervisor;
use crate::runstates::{CLASS, Records, Runstates};

/// File that marks the trace buffers of a boot as an agent's. It is in the place that the host has for it, next to the acting
/// lock.
pub(crate) const MARK: &str = "xentrace";
/// Most bytes of the mark to read.
const MARK_BYTES_MAX: u64 = 64;
/// Device on which events are bound.
const EVENTS: &str = "dev/xen/evtchn";
/// `IOCTL_EVTCHN_BIND_VIRQ`, and the event to bind.
const BIND_VIRQ: libc::c_ulong = 0x44500;
const VIRQ_TBUF: u32 = 4;
/// How long `xentrace` may take to end.
const ENDING_MAX: Duration = Duration::from_secs(5);
const READ_BYTES: usize = 64 << 10;
/// Most bytes of `xentrace`'s error output to read.
const SAID_MAX: u64 = 4096;

/// Results of the trace so far.
#[derive(Debug)]
pub(crate) struct Told {
    /// Sums of each vCPU's times.
    pub runstates: Runstates,
    /// Why no more results come, if the trace has ended.
    pub ended: Option<String>,
}

/// Why Xen cannot be traced, or why a trace cannot be stopped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TraceError {
    #[error("another program is reading Xen's trace; end it, and restart the agent")]
    Taken,
    #[error(
        "another program has set up Xen's trace buffers and may still be using them. If no program is using them, \
         confirm this with `echo {boot} > {}`",
        mark.display()
    )]
    Buffers { boot: u64, mark: PathBuf },
    #[error(transparent)]
    State(#[from] StateError),
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("xentrace cannot be started: {cause}")]
    NotStarted { cause: String },
    #[error("{}: {cause}", path.display())]
    Events { path: PathBuf, cause: String },
    #[error("{0}")]
    System(String),
}

impl TraceError {
    #[expect(clippy::needless_pass_by_value, reason = "it stands in map_err")]
    fn system(error: impl ToString) -> TraceError {
        TraceError::System(error.to_string())
    }
}

/// A running trace, which ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Trace {
    told: Arc<Mutex<Told>>,
    child: Child,
    reader: Option<JoinHandle<()>>,
    root: PathBuf,
}

impl Trace {
    /// Starts to trace.
    ///
    /// # Errors
    /// Returns why it cannot, as a sentence.
    pub(crate) fn begin(hypervisor: &Hypervisor, root: &Path) -> Result<Trace, TraceError> {
        let dir = StateDir::open(&place(root))?;
        if is_read(root)? {
            return Err(TraceError::Taken);
        }
        let ours = is_marked(&dir, hypervisor);
        if hypervisor.has_trace_buffers() && !ours {
            return Err(TraceError::Buffers {
                boot: hypervisor.boot(),
                mark: dir.path_of(MARK),
            });
        }
        let cycles_per_s = hypervisor.cycles_per_s()?;
        // Write the mark before there are any buffers.
        let boot = hypervisor.boot().to_string();
        dir.replace(MARK, boot.as_bytes())?;
        let told = Arc::new(Mutex::new(Told {
            runstates: Runstates::new(cycles_per_s),
            ended: None,
        }));
        let (child, reader) = start(Arc::clone(&told))?;
        Ok(Trace {
            told,
            child,
            reader: Some(reader),
            root: root.to_owned(),
        })
    }

    /// Returns the results so far.
    pub(crate) fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        // SAFETY: a signal to a child that was not waited for, so its number is still its own.
        let _ = unsafe { libc::kill(self.child.id().cast_signed(), libc::SIGTERM) };
        let begin = Instant::now();
        let ended = loop {
            match self.child.try_wait() {
                Ok(None) if begin.elapsed() < ENDING_MAX => thread::sleep(Duration::from_millis(20)),
                Ok(status) => break status,
                Err(_) => break None,
            }
        };
        if ended.is_none() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        if !ended.is_some_and(|status| status.success())
            && let Ok(hypervisor) = Hypervisor::open(&self.root)
        {
            let _ = hypervisor.stop_tracing();
        }
    }
}

/// Starts `xentrace` on the thread that reads its output, because Linux ends such a child together with the thread that made it.
fn start(told: Arc<Mutex<Told>>) -> Result<(Child, JoinHandle<()>), TraceError> {
    let (send, receive) = mpsc::channel();
    let read = move || {
        let mut child = match xentrace().spawn() {
            Ok(child) => child,
            Err(error) => {
                return drop(send.send(Err(TraceError::NotStarted {
                    cause: error.to_string(),
                })));
            }
        };
        let (output, complaints) = (child.stdout.take(), child.stderr.take());
        let _ = send.send(Ok(child));
        let why = output.map_or_else(|| "xentrace has no output".into(), |output| follow(output, &told));
        let mut said = Vec::new();
        // `xentrace` writes little to standard error.
        let _ = complaints.map(|complaints| complaints.take(SAID_MAX).read_to_end(&mut said));
        let said = String::from_utf8_lossy(&said);
        let last = said.lines().rev().find(|line| !line.trim().is_empty());
        let why = last.map_or(why.clone(), |last| format!("{why}: {}", last.trim()));
        told.lock().unwrap_or_else(PoisonError::into_inner).ended = Some(why);
    };
    let reader = thread::Builder::new().name("xentrace".into()).spawn(read);
    let reader = reader.map_err(TraceError::system)?;
    let child = receive.recv().map_err(TraceError::system)??;
    Ok((child, reader))
}

fn xentrace() -> Command {
    let mut command = Command::new("xentrace");
    // `xentrace` needs the name of an output file.
    command.args(["-D", "-e", CLASS, "/proc/self/fd/1"]);
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let parent = std::process::id();
    let with_parent = move || {
        // SAFETY: calls that may be made between fork and exec.
        unsafe {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) != 0 {
                return Err(Error::last_os_error());
            }
            // The parent died before the signal was set.
            if libc::getppid() as u32 != parent {
                return Err(Error::from_raw_os_error(libc::ESRCH));
            }
        }
        Ok(())
    };
    // SAFETY: the closure allocates nothing.
    unsafe { command.pre_exec(with_parent) };
    command
}

/// Reads the output to its end. Returns why it ended.
fn follow(mut output: ChildStdout, told: &Mutex<Told>) -> String {
    let mut records = Records::default();
    let mut room = vec![0; READ_BYTES];
    loop {
        match output.read(&mut room) {
            Ok(0) => return "xentrace has ended".into(),
            Ok(count) => {
                let changes = records.read(&room[..count]);
                let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                told.runstates.add(&changes);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return error.to_string(),
        }
    }
}

/// Returns true if a program is bound to the event by which Xen tells the reader of its trace about new records.
fn is_read(root: &Path) -> Result<bool, TraceError> {
    let path = root.join(EVENTS);
    let failed = |error: Error| TraceError::Events {
        path: path.clone(),
        cause: error.to_string(),
    };
    let events = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .map_err(failed)?;
    let virq = VIRQ_TBUF;
    // SAFETY: it reads one number. The binding ends when the device is closed.
    match unsafe { libc::ioctl(events.as_raw_fd(), BIND_VIRQ, &raw const virq) } {
        0.. => Ok(false),
        _ => match Error::last_os_error() {
            error if error.raw_os_error() == Some(libc::EEXIST) => Ok(true),
            error => Err(failed(error)),
        },
    }
}

fn place(root: &Path) -> PathBuf {
    root.join(STATE_DIR.trim_start_matches('/'))
}

/// Returns true if an agent made the trace buffers of this boot.
fn is_marked(dir: &StateDir, hypervisor: &Hypervisor) -> bool {
    let mark = dir.read(MARK, MARK_BYTES_MAX).ok().flatten();
    mark.is_some_and(|of| String::from_utf8_lossy(&of).trim() == hypervisor.boot().to_string())
}

/// Stops tracing if a dead agent could not: its mark exists, and no program reads the trace.
///
/// # Errors
/// Returns why stopping failed.
pub(crate) fn stop_leftover(hypervisor: &Hypervisor, root: &Path) -> Result<(), TraceError> {
    let dir = StateDir::open_existing(&place(root))?;
    if dir.is_some_and(|dir| is_marked(&dir, hypervisor)) && !is_read(root)? {
        hypervisor.stop_tracing()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_events_is_not_traced() {
        let why = is_read(Path::new("/nowhere")).unwrap_err();
        assert!(why.to_string().contains("/nowhere/dev/xen/evtchn"), "{why}");
    }
}
