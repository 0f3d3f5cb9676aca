//! QEMU's monitor (QMP), as far as needed: a few commands at a time, over a socket that is closed right after.
//!
//! A monitor has room for one client. Its owner (Proxmox' and Incus' own daemons) connects for each command, so the agent stays
//! only as long as its questions take. Nothing here waits for a monitor: a [`Conversation`] continues when its socket is ready.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use serde_json::{Value, json};

use super::seen::Eyes;

/// More than a monitor's answers to a few short questions, with the events of a busy VM.
const ANSWER_BYTES_MAX: usize = 4 << 20;
/// How much to read from one monitor before it is another's turn.
const TURN_BYTES: usize = 64 << 10;

/// Why a monitor could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum MonitorError {
    /// The monitor sends no greeting.
    #[error("the VM's monitor {path} sends no greeting: another program is connected to it, or QEMU hangs")]
    Busy {
        /// Path of the monitor's socket.
        path: String,
    },
    /// The monitor belongs to another process.
    #[error("the VM's monitor {path} belongs to another process: process {pid} listens on it")]
    Foreign {
        /// Path of the monitor's socket.
        path: String,
        /// The process that listens on the socket.
        pid: i32,
    },
    /// The monitor cannot be reached, or the connection broke.
    #[error("the VM's monitor {path}: {cause}")]
    Broken {
        /// Path of the monitor's socket.
        path: String,
        /// The reason.
        cause: String,
    },
    /// QEMU understood the command, and refused.
    #[error("QEMU refuses `{command}`: {cause}")]
    Refused {
        /// The command.
        command: String,
        /// QEMU's message.
        cause: String,
    },
    /// There is no time left to wait for the monitor.
    #[error("{0}")]
    NoTime(&'static str),
}

/// A command with its arguments.
pub(super) type Command = (&'static str, Value);

/// QEMU's answer to a command.
pub(super) type Answer = Result<Value, MonitorError>;

/// Connects to a monitor of this process, unless another process listens on it. `path` is the path that the process sees,
/// possibly in its own mount namespace. Does not wait for the monitor, but may wait for file systems on the path.
///
/// # Errors
/// Why it cannot connect. A monitor whose queue of clients is full is busy.
pub(super) fn connect(root: &Path, pid: i32, path: &str) -> Result<UnixStream, MonitorError> {
    let stream = match connect_at(root, pid, path) {
        Ok(stream) => stream,
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            return Err(MonitorError::Busy {
                path: path.to_owned(),
            });
        }
        Err(error) => return Err(broken(path, &error)),
    };
    let listener = rustix::net::sockopt::socket_peercred(&stream).map_err(|e| broken(path, &e))?;
    let listener = listener.pid.as_raw_nonzero().get();
    if listener != pid {
        return Err(MonitorError::Foreign {
            path: path.to_owned(),
            pid: listener,
        });
    }
    Ok(stream)
}

fn connect_at(root: &Path, pid: i32, path: &str) -> io::Result<UnixStream> {
    // Connecting through an open descriptor works however long the socket's path is.
    let socket = Eyes::of(root, pid).open(path)?;
    let address = SocketAddrUnix::new(format!("/proc/self/fd/{}", socket.as_raw_fd()))?;
    let stream = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        None,
    )?;
    rustix::net::connect(&stream, &address)?;
    Ok(UnixStream::from(stream))
}

/// The error for a monitor that cannot be reached, or whose connection broke.
pub(super) fn broken(path: &str, cause: &dyn std::fmt::Display) -> MonitorError {
    MonitorError::Broken {
        path: path.to_owned(),
        cause: cause.to_string(),
    }
}

/// Progress of a conversation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    /// The monitor has sent nothing yet: the connection may wait in QEMU's queue of clients.
    Queued,
    /// The monitor has begun its greeting.
    Greeting,
    /// A command is being answered.
    Asked,
    /// All commands are answered.
    Ready,
}

/// A connection to a monitor.
#[derive(Debug)]
pub(super) struct Conversation {
    path: String,
    stream: UnixStream,
    stage: Stage,
    /// All commands, and the number of those sent.
    commands: Vec<Command>,
    sent_count: usize,
    /// Number of the command that is answered next; numbers are never reused.
    id: u64,
    answers: Vec<Answer>,
    unsent: Vec<u8>,
    read: Vec<u8>,
    /// How much of `read` was searched for the end of a line.
    searched: usize,
    total: usize,
}

impl Conversation {
    /// Begins a conversation over this connection, which must not block.
    pub(super) fn new(path: &str, stream: UnixStream) -> Conversation {
        Conversation {
            path: path.to_owned(),
            stream,
            stage: Stage::Queued,
            commands: Vec::new(),
            sent_count: 0,
            id: 0,
            answers: Vec::new(),
            unsent: Vec::new(),
            read: Vec::new(),
            searched: 0,
            total: 0,
        }
    }

    pub(super) fn stage(&self) -> Stage {
        self.stage
    }

    /// The error for a monitor that did not do its next step in time.
    pub(super) fn overdue(&self) -> MonitorError {
        match self.stage {
            Stage::Queued => MonitorError::Busy {
                path: self.path.clone(),
            },
            _ => broken(&self.path, &"it did not answer in time"),
        }
    }

    /// Whether the conversation waits to write.
    pub(super) fn wants_to_write(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Sends these commands one after the other. All earlier ones must have been answered.
    pub(super) fn ask(&mut self, commands: Vec<Command>) {
        self.answers.clear();
        self.commands = commands;
        self.sent_count = 0;
        self.send_next();
    }

    /// Takes the answers, in the order of the commands.
    pub(super) fn take_answers(&mut self) -> Vec<Answer> {
        std::mem::take(&mut self.answers)
    }

    /// Advances the conversation as far as possible without waiting.
    ///
    /// # Errors
    /// When the conversation is over. There are no more answers, and the last command may have been carried out.
    pub(super) fn go_on(&mut self) -> Result<Stage, MonitorError> {
        self.write().map_err(|e| broken(&self.path, &e))?;
        let mut turn = 0;
        loop {
            while let Some(line) = self.line().map_err(|e| broken(&self.path, &e))? {
                self.hear(&line)?;
                self.write().map_err(|e| broken(&self.path, &e))?;
            }
            if turn >= TURN_BYTES {
                return Ok(self.stage);
            }
            match self.read_some() {
                Ok(count) => turn += count,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(self.stage),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(broken(&self.path, &e)),
            }
        }
    }

    fn read_some(&mut self) -> io::Result<usize> {
        let mut part = [0; 4096];
        let count = self.stream.read(&mut part)?;
        if count == 0 {
            return Err(io::Error::other("it closed the connection"));
        }
        self.total += count;
        if self.total > ANSWER_BYTES_MAX {
            return Err(io::Error::other("it sends more than any monitor does"));
        }
        if self.stage == Stage::Queued {
            self.stage = Stage::Greeting;
        }
        self.read.extend_from_slice(&part[..count]);
        Ok(count)
    }

    fn write(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(count) => drop(self.unsent.drain(..count)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// The next complete line.
    fn line(&mut self) -> io::Result<Option<Value>> {
        let end = self.read[self.searched..].iter().position(|byte| *byte == b'\n');
        let Some(end) = end.map(|end| end + self.searched) else {
            self.searched = self.read.len();
            return Ok(None);
        };
        self.searched = 0;
        let line: Vec<u8> = self.read.drain(..=end).collect();
        serde_json::from_slice(&line).map(Some).map_err(io::Error::other)
    }

    /// Handles a line; skips events.
    fn hear(&mut self, line: &Value) -> Result<(), MonitorError> {
        match self.stage {
            Stage::Queued | Stage::Greeting => {
                if line.get("QMP").is_none() {
                    return Err(broken(&self.path, &"it does not speak QMP"));
                }
                self.send(&("qmp_capabilities", json!({})));
                self.stage = Stage::Asked;
            }
            Stage::Ready => {}
            Stage::Asked if line.get("id").and_then(Value::as_u64) != Some(self.id) => {}
            // The first answer is to `qmp_capabilities`, which is not among the commands.
            Stage::Asked if self.id == 1 => match refusal("qmp_capabilities", line) {
                Some(error) => return Err(error),
                None => self.send_next(),
            },
            Stage::Asked => {
                let command = self.commands[self.sent_count - 1].0;
                let value = || line.get("return").cloned().unwrap_or(Value::Null);
                self.answers
                    .push(refusal(command, line).map_or_else(|| Ok(value()), Err));
                self.send_next();
            }
        }
        Ok(())
    }

    fn send_next(&mut self) {
        match self.commands.get(self.sent_count).cloned() {
            Some(command) => {
                self.sent_count += 1;
                self.send(&command);
                self.stage = Stage::Asked;
            }
            None => self.stage = Stage::Ready,
        }
    }

    fn send(&mut self, (command, arguments): &Command) {
        self.id += 1;
        let request = json!({"execute": command, "arguments": arguments, "id": self.id});
        self.unsent.extend_from_slice(format!("{request}\n").as_bytes());
    }
}

impl AsFd for Conversation {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

/// Returns QEMU's refusal of a command, if the line is one.
fn refusal(command: &str, line: &Value) -> Option<MonitorError> {
    let cause = line.get("error")?.get("desc").and_then(Value::as_str);
    Some(MonitorError::Refused {
        command: command.to_owned(),
        cause: cause.unwrap_or("it does not say why").chars().take(200).collect(),
    })
}
