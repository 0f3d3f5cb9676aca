//! A policy as a program at the ends of two pipes: `exec:./mine`.
//!
//! It is started once for a run. In each epoch it gets a view as one line of JSON on its standard input, and answers with a plan
//! as one line on its standard output; what it writes to its standard error goes to ours. It has a time for each answer. At the
//! end of the run its input ends, and what has not ended soon after is killed, and waited for.
//!
//! A program and what it starts are a process group of their own, which ends with the run, and with the process that
//! makes the run, also where that is killed. A process that leaves the group (`setsid`) is not ended.
//!
//! Views and plans are [`homenode_control::external`]'s, which also says what is refused.

use std::fmt;
use std::io::{ErrorKind, Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::str::FromStr;
use std::time::{Duration, Instant};

use homenode_control::external::{PLAN_BYTES_MAX, PlanDocument, Planner, ViewDocument, too_large};
use homenode_units::Ns;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, Signal, kill_process_group};

#[cfg(test)]
mod tests;

/// What a program's name begins with among names of policies.
pub const EXEC: &str = "exec:";
/// How long an answer may take where nobody says otherwise: loading a language's libraries is part of the first.
pub const ANSWER_MAX: Ns = Ns::from_secs(10);
/// How long a program may take to end once its input has ended. It is at our own end, and no threshold of a policy.
const END_MAX: Duration = Duration::from_millis(500);
/// How often it is looked whether it has.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// How much is read at once.
const CHUNK: usize = 1 << 16;

/// A program that decides.
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

impl FromStr for Program {
    type Err = String;

    /// `exec:` and words, with spaces between them; the first is the program. What would need quotes goes into a script.
    fn from_str(text: &str) -> Result<Program, String> {
        let words = text.strip_prefix(EXEC).unwrap_or(text).split_whitespace();
        let words: Vec<String> = words.map(str::to_owned).collect();
        if words.is_empty() {
            return Err(format!(
                "`{text}` names no program: write `exec:./mine` or `exec:python3 mine.py`"
            ));
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
    /// As it was named.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same with another time for each answer.
    #[must_use]
    pub fn within(self, answer_max: Ns) -> Program {
        Program { answer_max, ..self }
    }

    /// Starts it.
    ///
    /// # Errors
    /// What the system says: there is no such program, or it may not be run.
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

/// What the leader of a program's group does: it waits until its input ends, which is when the process that started it ends or
/// closes it, and then kills the group, itself with it. Signals that a program sends to its own group do not end it.
const LEADER: &str = "trap '' HUP INT QUIT TERM; read _; kill -KILL 0";

/// The process group of a program and of what that starts. It ends with this value.
///
/// A leader of our own does what the kernel's signal at a parent's death (`PR_SET_PDEATHSIG`) cannot: that reaches no grandchild,
/// and comes when the thread ends that started the program. The group's id cannot become another's while the leader is not
/// waited for.
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
            // All of its processes may have ended meanwhile.
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

/// A program that was started.
#[derive(Debug)]
pub struct Running {
    name: String,
    answer_max: Ns,
    child: Child,
    group: Group,
    stdin: Option<ChildStdin>,
    stdout: Option<ChildStdout>,
    /// What it said since its last answer.
    said: Vec<u8>,
    has_failed: bool,
}

impl Planner for Running {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, String> {
        let mut line =
            serde_json::to_vec(view).map_err(|error| format!("its view cannot be written: {error}"))?;
        line.push(b'\n');
        let plan = self
            .ask(&line)
            .and_then(|answer| PlanDocument::from_json(&answer));
        self.has_failed |= plan.is_err();
        plan
    }
}

impl Running {
    /// Writes a line, and waits for a line.
    #[allow(
        clippy::disallowed_methods,
        reason = "a program that hangs must not hang the run; how long an answer takes changes no result"
    )]
    fn ask(&mut self, line: &[u8]) -> Result<Vec<u8>, String> {
        if !self.said.is_empty() {
            return Err("it said more than one line for a view".to_owned());
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
                return Err(format!("it did not answer within {}", self.answer_max));
            }
            self.wait(time_left, !left.is_empty())?;
            left = &left[self.write(left)?..];
            let before = self.said.len();
            self.read()?;
            let newline = self.said[before..].iter().position(|byte| *byte == b'\n');
            end = end.or(newline.map(|at| before + at));
            if end.unwrap_or(self.said.len()) > PLAN_BYTES_MAX {
                return Err(too_large());
            }
        }
    }

    /// Waits until something can be read, or written where there is something to be.
    fn wait(&self, at_most: Duration, has_more: bool) -> Result<(), String> {
        let (Some(stdin), Some(stdout)) = (&self.stdin, &self.stdout) else {
            return Err("it has no pipes".to_owned());
        };
        let mut fds = vec![PollFd::new(stdout, PollFlags::IN)];
        fds.extend(has_more.then(|| PollFd::new(stdin, PollFlags::OUT)));
        let at_most = Timespec::try_from(at_most).ok();
        match poll(&mut fds, at_most.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(format!("it cannot be waited for: {error}")),
        }
    }

    /// Writes as much as fits.
    fn write(&mut self, left: &[u8]) -> Result<usize, String> {
        let Some(stdin) = self.stdin.as_mut().filter(|_| !left.is_empty()) else {
            return Ok(0);
        };
        match stdin.write(left) {
            Ok(count) => Ok(count),
            Err(error) if is_later(error.kind()) => Ok(0),
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(self.ended()),
            Err(error) => Err(format!("it cannot be written to: {error}")),
        }
    }

    /// Reads what is there.
    fn read(&mut self) -> Result<(), String> {
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
            Err(error) => Err(format!("it cannot be read from: {error}")),
        }
    }

    /// What is said of one that closed its pipes.
    fn ended(&mut self) -> String {
        match self.ends_within(END_MAX) {
            Some(status) => format!("it ended before it answered ({status})"),
            None => "it closed its input or output before it answered".to_owned(),
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
            // A program may have left its group. One that has ended meanwhile cannot be killed any more, and is waited for
            // as well.
            self.group.kill();
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
