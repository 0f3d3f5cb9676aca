//! A program under test, which is started, stopped or killed, and whose JSON lines are read.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use serde_json::Value;

use super::proc::Process;
use super::wait::{Look, wait_until};

/// A child process whose output is kept. Dropping it kills its process group.
#[derive(Debug)]
pub struct Program {
    name: String,
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    stderr: PathBuf,
}

/// How a program ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The program exited with this status.
    Status(i32),
    /// This signal ended the program.
    Signal(i32),
}

impl Program {
    /// Starts a program in a process group of its own. Its output goes to `NAME.out` and `NAME.err` in `dir`.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start(name: &str, program: &Path, arguments: &[&str], dir: &Path) -> anyhow::Result<Self> {
        let stderr = dir.join(format!("{name}.err"));
        let stdout = dir.join(format!("{name}.out"));
        let create = |path: &Path| {
            let mut options = fs::OpenOptions::new();
            options
                .create(true)
                .append(true)
                .open(path)
                .with_context(|| format!("cannot create {}", path.display()))
        };
        let mut child = Command::new(program)
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(create(&stderr)?)
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {} {}", program.display(), arguments.join(" ")))?;
        let lines = Arc::new(Mutex::new(Vec::new()));
        if let Some(output) = child.stdout.take() {
            let (kept, mut file) = (Arc::clone(&lines), create(&stdout)?);
            thread::spawn(move || {
                for line in BufReader::new(output).lines().map_while(Result::ok) {
                    let _ = std::io::Write::write_all(&mut file, format!("{line}\n").as_bytes());
                    kept.lock().unwrap_or_else(PoisonError::into_inner).push(line);
                }
            });
        }
        Ok(Self {
            name: name.to_owned(),
            child,
            lines,
            stderr,
        })
    }

    /// Returns the process.
    #[must_use]
    pub fn process(&self) -> Process {
        Process(self.child.id())
    }

    /// Returns the lines that the program has printed to standard output so far.
    #[must_use]
    pub fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns those lines of standard output that are JSON.
    #[must_use]
    pub fn json(&self) -> Vec<Value> {
        self.lines()
            .iter()
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Waits for a JSON line that `accept` accepts.
    ///
    /// # Errors
    /// When no such line comes in time, or the program has ended.
    pub fn wait_json(
        &mut self,
        what: &str,
        limit: Duration,
        accept: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<Value> {
        let what = format!("{} to say {what}", self.name);
        wait_until(&what, limit, || {
            let ended = self
                .child
                .try_wait()
                .context("cannot read the state of a program")?;
            if let Some(value) = self.json().into_iter().find(|value| accept(value)) {
                return Ok(Look::Done(value));
            }
            if let Some(status) = ended {
                bail!(
                    "{} ended with {status}; standard error: {}",
                    self.name,
                    self.stderr_tail()
                );
            }
            Ok(Look::NotYet(
                self.lines()
                    .last()
                    .cloned()
                    .unwrap_or_else(|| "nothing".to_owned()),
            ))
        })
    }

    /// Returns the last lines of the program's standard error.
    #[must_use]
    pub fn stderr_tail(&self) -> String {
        let text = fs::read_to_string(&self.stderr).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(5)..].join(" / ")
    }

    /// Fails if the program has ended by itself.
    ///
    /// # Errors
    /// The error says how the program ended.
    pub fn expect_running(&mut self) -> anyhow::Result<()> {
        match self
            .child
            .try_wait()
            .context("cannot read the state of a program")?
        {
            None => Ok(()),
            Some(status) => {
                bail!(
                    "expected {} to be running, but it ended with {status}; standard error: {}",
                    self.name,
                    self.stderr_tail()
                )
            }
        }
    }

    /// Sends a signal to the program alone, not to its group, because a guard process that the program started must survive
    /// it.
    ///
    /// # Errors
    /// When the program has gone.
    pub fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        let pid = i32::try_from(self.child.id())
            .ok()
            .and_then(Pid::from_raw)
            .context("no valid process number")?;
        kill_process(pid, signal).with_context(|| format!("cannot send a signal to {}", self.name))
    }

    /// Returns how the program ended, if it has.
    ///
    /// # Errors
    /// When its state cannot be read.
    pub fn try_end(&mut self) -> anyhow::Result<Option<Ended>> {
        let status = self
            .child
            .try_wait()
            .context("cannot read the state of a program")?;
        Ok(status.map(|status| match (status.code(), status.signal()) {
            (Some(code), _) => Ended::Status(code),
            (None, signal) => Ended::Signal(signal.unwrap_or(0)),
        }))
    }

    /// Waits until the program ends.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn wait_end(&mut self, limit: Duration) -> anyhow::Result<Ended> {
        let what = format!("{} to end", self.name);
        wait_until(&what, limit, || {
            Ok(match self.try_end()? {
                Some(ended) => Look::Done(ended),
                None => Look::NotYet("it runs".to_owned()),
            })
        })
    }

    /// Asks the program to end (SIGTERM), and waits until it does.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn stop(&mut self, limit: Duration) -> anyhow::Result<Ended> {
        self.signal(Signal::TERM)?;
        self.wait_end(limit)
    }

    /// Sends SIGKILL, which gives the program no chance to tidy up.
    ///
    /// # Errors
    /// When it has gone already.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::KILL)?;
        self.wait_end(Duration::from_secs(20)).map(drop)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}
