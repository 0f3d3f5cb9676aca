//! QEMU's monitor (QMP), as far as it is needed: a few commands at a time over a socket that is left at once.
//!
//! A monitor has room for one client. Its owner (Proxmox' and Incus' own daemons) connects for each command, so the agent stays
//! no longer than its questions take, waits briefly, and goes without an answer where somebody else is connected.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

use super::seen::Eyes;

/// How long all questions of one visit may take.
const VISIT_MAX: Duration = Duration::from_millis(500);
/// More than a monitor says to a few short questions, events of a busy VM included.
const ANSWER_BYTES_MAX: usize = 4 << 20;

/// Why a monitor was of no use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MonitorError {
    /// Somebody else is connected.
    #[error("its monitor {path} is in use by another program")]
    Busy {
        /// The socket.
        path: String,
    },
    /// It is another process's.
    #[error("its monitor {path} is not its own: process {pid} listens there")]
    Foreign {
        /// The socket.
        path: String,
        /// Who does.
        pid: i32,
    },
    /// It cannot be had, or broke off.
    #[error("its monitor {path}: {cause}")]
    Broken {
        /// The socket.
        path: String,
        /// Why.
        cause: String,
    },
    /// QEMU understood, and would not.
    #[error("QEMU refuses `{command}`: {cause}")]
    Refused {
        /// What it was asked.
        command: String,
        /// What it said.
        cause: String,
    },
}

/// A command with its arguments.
pub(super) type Command = (&'static str, Value);

/// Asks the monitor of this process these questions, one after the other. `path` is as the process sees it, which may be in a
/// mount namespace of its own.
///
/// # Errors
/// Nothing was answered to the end; what had been asked before that may have been done.
pub(super) fn ask(
    root: &Path,
    pid: i32,
    path: &str,
    commands: &[Command],
) -> Result<Vec<Value>, MonitorError> {
    let broken = |cause: &dyn std::fmt::Display| MonitorError::Broken {
        path: path.to_owned(),
        cause: cause.to_string(),
    };
    let busy = || MonitorError::Busy {
        path: path.to_owned(),
    };
    let deadline = Instant::now() + VISIT_MAX;
    let stream = match connect(root, pid, path) {
        Ok(stream) => stream,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(busy()),
        Err(error) => return Err(broken(&error)),
    };
    let listener = rustix::net::sockopt::socket_peercred(&stream).map_err(|e| broken(&e))?;
    let listener = listener.pid.as_raw_nonzero().get();
    if listener != pid {
        return Err(MonitorError::Foreign {
            path: path.to_owned(),
            pid: listener,
        });
    }
    let mut lines = Lines {
        stream,
        read: Vec::new(),
        total: 0,
        deadline,
    };
    match lines.next() {
        Ok(greeting) if greeting.get("QMP").is_some() => {}
        Ok(_) => return Err(broken(&"it does not speak QMP")),
        // One that is connected to somebody else greets nobody.
        Err(error) if error.kind() == io::ErrorKind::TimedOut => return Err(busy()),
        Err(error) => return Err(broken(&error)),
    }
    let mut answers = Vec::with_capacity(commands.len());
    let begin = ("qmp_capabilities", json!({}));
    for (at, (command, arguments)) in std::iter::once(&begin).chain(commands).enumerate() {
        let request = json!({"execute": command, "arguments": arguments, "id": at});
        let answer = lines.exchange(&request, at).map_err(|e| broken(&e))?;
        if let Some(error) = answer.get("error") {
            let cause = error
                .get("desc")
                .and_then(Value::as_str)
                .unwrap_or("it does not say why");
            return Err(MonitorError::Refused {
                command: (*command).to_owned(),
                cause: cause.chars().take(200).collect(),
            });
        }
        if at > 0 {
            answers.push(answer.get("return").cloned().unwrap_or(Value::Null));
        }
    }
    Ok(answers)
}

/// Connects without ever waiting: a monitor whose queue of clients is full says so.
fn connect(root: &Path, pid: i32, path: &str) -> io::Result<UnixStream> {
    // What an open descriptor names can be connected to however long its path is.
    let socket = Eyes::of(root, pid).open(path)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", socket.as_raw_fd()))?;
    let stream = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::connect(&stream, &address)?;
    let stream = UnixStream::from(stream);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

/// What a monitor says, a line of JSON at a time.
struct Lines {
    stream: UnixStream,
    read: Vec<u8>,
    total: usize,
    deadline: Instant,
}

impl Lines {
    fn left(&self) -> io::Result<Duration> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "it did not answer in time",
            )),
            false => Ok(left),
        }
    }

    /// Asks, and waits for the answer; events in between are passed over.
    fn exchange(&mut self, request: &Value, id: usize) -> io::Result<Value> {
        self.stream.set_write_timeout(Some(self.left()?))?;
        self.stream.write_all(format!("{request}\n").as_bytes())?;
        loop {
            let line = self.next()?;
            if line.get("id").and_then(Value::as_u64) == Some(id as u64) {
                return Ok(line);
            }
        }
    }

    fn next(&mut self) -> io::Result<Value> {
        loop {
            if let Some(end) = self.read.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return serde_json::from_slice(&line).map_err(io::Error::other);
            }
            self.stream.set_read_timeout(Some(self.left()?))?;
            let mut part = [0; 4096];
            let count = match self.stream.read(&mut part) {
                Ok(0) => return Err(io::Error::other("it closed the connection")),
                Ok(count) => count,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    continue;
                }
                Err(e) => return Err(e),
            };
            self.total += count;
            if self.total > ANSWER_BYTES_MAX {
                return Err(io::Error::other("it says more than any monitor does"));
            }
            self.read.extend_from_slice(&part[..count]);
        }
    }
}
