//! External policies: a program connected by two pipes, as in `exec:./mine`.
//!
//! The program is started once per run. In each cycle it gets a view as one line of JSON on its standard input, and answers
//! with a plan as one line on its standard output; its standard error goes to ours. Each answer has a time limit. At the end
//! of the run its input is closed, and a program that does not end soon after is killed and reaped.
//!
//! A program and its children form a process group. The group is killed when the run ends or our process ends, even by a
//! signal. A process that leaves the group (`setsid`) survives.
//!
//! Views and plans are defined in [`homenode_control::external`], which also lists the plans that are refused.

use std::fmt;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use homenode_control::external::{NoPlan, PLAN_BYTES_MAX, PlanDocument, Planner, PlannerError, ViewDocument};
use homenode_units::Ns;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process_group};

#[cfg(test)]
mod tests;

/// Prefix that tells a program from the names of policies.
pub const EXEC: &str = "exec:";
/// Default time limit for an answer: the first includes loading a language's libraries.
pub const ANSWER_MAX: Ns = Ns::from_secs(10);
/// Time that a program has to end after its input is closed. This concerns only shutdown, not a policy.
const END_MAX: Duration = Duration::from_millis(500);
/// Interval at which a program is polled for its end.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// Read size in bytes.
const CHUNK: usize = 1 << 16;

/// An external policy program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Program {
    name: String,
    words: Vec<String>,
    answer_max: Ns,
}

/// Why a program cannot be started.
#[derive(Debug, thiserror::Error)]
#[error("policy {name} cannot be started: {cause}")]
pub struct NotStarted {
    name: String,
    cause: std::io::Error,
}

/// A text that is not a program.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` does not name a program: write `exec:./mine` or `exec:python3 mine.py`")]
pub struct NoProgram(String);

/// Why a program gave no plan; each message continues a sentence that begins with the program's name.
#[derive(Debug, thiserror::Error)]
enum NoAnswer {
    #[error("the program answered a view with more than one line")]
    MoreThanALine,
    #[error("the program did not answer within {0}")]
    TooLate(Ns),
    #[error("the program has no pipes")]
    NoPipes,
    #[error("the program cannot be waited for: {0}")]
    Wait(rustix::io::Errno),
    #[error("the program cannot be written to: {0}")]
    Write(std::io::Error),
    #[error("the program cannot be read from: {0}")]
    Read(std::io::Error),
    #[error("the program ended before it answered ({0})")]
    Ended(std::process::ExitStatus),
    #[error("the program closed its input or output before it answered")]
    Closed,
    #[error("the view for the program cannot be written: {0}")]
    View(serde_json::Error),
    #[error(transparent)]
    NoPlan(#[from] NoPlan),
}

impl FromStr for Program {
    type Err = NoProgram;

    /// Parses `exec:` followed by words separated by spaces, of which the first is the program. Anything that needs quotes
    /// belongs in a script.
    fn from_str(text: &str) -> Result<Program, NoProgram> {
        let words = text.strip_prefix(EXEC).unwrap_or(text).split_whitespace();
        let words: Vec<String> = words.map(str::to_owned).collect();
        if words.is_empty() {
            return Err(NoProgram(text.to_owned()));
        }
        Ok(Program {
            name: format!("{EXEC}{}", words.join(" ")),
            words,
            answer_max: ANSWER_MAX,
        })
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl Program {
    /// Returns the program as the user wrote it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns this program with another time limit for each answer.
    #[must_use]
    pub fn within(self, answer_max: Ns) -> Program {
        Program { answer_max, ..self }
    }

    /// Starts the program.
    ///
    /// # Errors
    /// The operating system's error, if the program does not exist or may not be executed.
    pub fn start(&self) -> Result<Running, NotStarted> {
        let failed = |cause: std::io::Error| NotStarted {
            name: self.name.clone(),
            cause,
        };
        let group = Group::start().map_err(failed)?;
        let mut child = Command::new(&self.words[0])
            .args(&self.words[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .process_group(group.id())
            .spawn()
            .map_err(failed)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let running = Running {
            name: self.name.clone(),
            answer_max: self.answer_max,
            child,
            group,
            stdin,
            stdout,
            said: Vec::new(),
            has_failed: false,
        };
        let never_wait = |fd: &dyn AsFd| -> rustix::io::Result<()> {
            let flags = fcntl_getfl(fd.as_fd())?;
            fcntl_setfl(fd.as_fd(), flags | OFlags::NONBLOCK)
        };
        if let (Some(stdin), Some(stdout)) = (&running.stdin, &running.stdout) {
            never_wait(stdin)
                .and_then(|()| never_wait(stdout))
                .map_err(|cause| failed(cause.into()))?;
        }
        Ok(running)
    }
}

/// The script that leads the group. It waits for the end of its input, which comes when our process ends or closes it, and
/// then kills the group including itself. It ignores the signals that a program may send to its own group.
const LEADER: &str = "trap '' HUP INT QUIT TERM; read _; kill -KILL 0";

/// The process group of a program and its children, killed when dropped.
///
/// The kernel's signal at a parent's death (`PR_SET_PDEATHSIG`) would not do: it does not reach grandchildren, and it
/// arrives when the thread that started the program ends. So our own script leads the group. While it is not reaped, the
/// kernel does not reuse the group's id.
#[derive(Debug)]
struct Group {
    leader: Child,
}

impl Group {
    fn start() -> std::io::Result<Group> {
        let leader = Command::new("/bin/sh")
            .args(["-c", LEADER])
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Group { leader })
    }

    fn id(&self) -> i32 {
        self.leader.id().cast_signed()
    }

    fn kill(&self) {
        if let Some(id) = Pid::from_raw(self.id()) {
            // All processes of the group may have ended by now.
            let _ = kill_process_group(id, Signal::KILL);
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.kill();
        let _ = self.leader.wait();
    }
}

/// A running program.
#[derive(Debug)]
pub struct Running {
    name: String,
    answer_max: Ns,
    child: Child,
    group: Group,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    /// Output since the program's last answer.
    said: Vec<u8>,
    has_failed: bool,
}

impl Planner for Running {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, PlannerError> {
        let mut line = serde_json::to_vec(view).map_err(NoAnswer::View)?;
        line.push(b'\n');
        let answer = self.ask(&line);
        let plan = answer.and_then(|answer| Ok(PlanDocument::from_json(&answer)?));
        self.has_failed |= plan.is_err();
        Ok(plan?)
    }
}

impl Running {
    /// Writes a line, and returns the line that the program answers.
    #[allow(
        clippy::disallowed_methods,
        reason = "a program that hangs must not hang the run; how long an answer takes changes no result"
    )]
    fn ask(&mut self, line: &[u8]) -> Result<Vec<u8>, NoAnswer> {
        if !self.said.is_empty() {
            return Err(NoAnswer::MoreThanALine);
        }
        let until = Instant::now() + Duration::from_nanos(self.answer_max.0);
        let (mut left, mut end) = (line, None);
        loop {
            if let (true, Some(end)) = (left.is_empty(), end) {
                let rest = self.said.split_off(end + 1);
                let mut answer = std::mem::replace(&mut self.said, rest);
                answer.pop();
                return Ok(answer);
            }
            let time_left = until.saturating_duration_since(Instant::now());
            if time_left.is_zero() {
                return Err(NoAnswer::TooLate(self.answer_max));
            }
            self.wait(time_left, !left.is_empty())?;
            left = &left[self.write(left)?..];
            let before = self.said.len();
            self.read()?;
            let newline = self.said[before..].iter().position(|byte| *byte == b'\n');
            end = end.or(newline.map(|at| before + at));
            if end.unwrap_or(self.said.len()) > PLAN_BYTES_MAX {
                return Err(NoPlan::TooLarge.into());
            }
        }
    }

    /// Waits until the output pipe is readable or, if there is more to write, the input pipe is writable.
    fn wait(&self, at_most: Duration, has_more: bool) -> Result<(), NoAnswer> {
        let (Some(stdin), Some(stdout)) = (&self.stdin, &self.stdout) else {
            return Err(NoAnswer::NoPipes);
        };
        let mut fds = vec![PollFd::new(stdout, PollFlags::IN)];
        fds.extend(has_more.then(|| PollFd::new(stdin, PollFlags::OUT)));
        let at_most = Timespec::try_from(at_most).ok();
        match poll(&mut fds, at_most.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(NoAnswer::Wait(error)),
        }
    }

    /// Writes as much as the pipe accepts, and returns the number of bytes.
    fn write(&mut self, left: &[u8]) -> Result<usize, NoAnswer> {
        let Some(stdin) = self.stdin.as_mut().filter(|_| !left.is_empty()) else {
            return Ok(0);
        };
        match stdin.write(left) {
            Ok(count) => Ok(count),
            Err(error) if is_later(error.kind()) => Ok(0),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(self.ended()),
            Err(error) => Err(NoAnswer::Write(error)),
        }
    }

    /// Reads the output that is available now.
    fn read(&mut self) -> Result<(), NoAnswer> {
        let Some(stdout) = &mut self.stdout else {
            return Ok(());
        };
        let mut chunk = [0; CHUNK];
        match stdout.read(&mut chunk) {
            Ok(0) => Err(self.ended()),
            Ok(count) => {
                self.said.extend_from_slice(&chunk[..count]);
                Ok(())
            }
            Err(error) if is_later(error.kind()) => Ok(()),
            Err(error) => Err(NoAnswer::Read(error)),
        }
    }

    /// Returns the error for a program that closed its pipes.
    fn ended(&mut self) -> NoAnswer {
        match self.ends_within(END_MAX) {
            Some(status) => NoAnswer::Ended(status),
            None => NoAnswer::Closed,
        }
    }

    #[allow(clippy::disallowed_methods, reason = "as in `ask`")]
    fn ends_within(&mut self, at_most: Duration) -> Option<std::process::ExitStatus> {
        let until = Instant::now() + at_most;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status),
                Ok(None) if Instant::now() < until => std::thread::sleep(LOOK_EVERY),
                Ok(None) | Err(_) => return None,
            }
        }
    }
}

fn is_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

impl Drop for Running {
    fn drop(&mut self) {
        drop((self.stdin.take(), self.stdout.take()));
        let end_max = if self.has_failed { Duration::ZERO } else { END_MAX };
        if self.ends_within(end_max).is_none() {
            // The program may have left its group, so it is killed separately too. If it has ended, that has no effect, but it
            // still must be reaped.
            self.group.kill();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
