//! Ends everything that the testbed starts, however the testbed itself ends.
//!
//! A child process (this program as `guard`) holds the read end of a pipe, and the testbed alone holds the write end. When the
//! testbed exits, crashes or is killed, the pipe closes, and the guard kills the process groups whose numbers it was sent. A
//! parent-death signal would not be enough: it reaches only the direct child, and the emulated host is a great-grandchild.

use std::io::{BufRead as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process_group};

/// The write end of the pipe. Dropping it kills the process groups that are still registered.
#[derive(Debug)]
pub struct Guard {
    pipe: Option<ChildStdin>,
    process: Child,
}

impl Guard {
    /// Starts the guard.
    ///
    /// # Errors
    /// When this program cannot be started a second time.
    pub fn start() -> anyhow::Result<Self> {
        let program = std::env::current_exe().context("cannot find this program's own file")?;
        let mut process = Command::new(program)
            .arg("guard")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            // The guard has a group of its own, so that the terminal's Ctrl-C does not reach it before its work is done.
            .process_group(0)
            .spawn()
            .context("cannot start the guard process")?;
        let pipe = process.stdin.take();
        Ok(Self { pipe, process })
    }

    /// Adds a process group to those that end with the testbed.
    ///
    /// # Errors
    /// When the guard has gone.
    pub fn add(&mut self, group: u32) -> anyhow::Result<()> {
        let pipe = self.pipe.as_mut().context("the guard process has ended")?;
        writeln!(pipe, "+{group}").context("the guard process has ended")
    }

    /// Removes a process group that has ended, because its number may be reused.
    ///
    /// # Errors
    /// When the guard has gone.
    pub fn remove(&mut self, group: u32) -> anyhow::Result<()> {
        let pipe = self.pipe.as_mut().context("the guard process has ended")?;
        writeln!(pipe, "-{group}").context("the guard process has ended")
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = self.process.wait();
    }
}

/// Ends a process group: sends SIGTERM, waits a moment, then sends SIGKILL.
pub fn end_group(group: u32) {
    let Some(pid) = i32::try_from(group).ok().and_then(Pid::from_raw) else {
        return;
    };
    if kill_process_group(pid, Signal::TERM).is_err() {
        return;
    }
    for _ in 0..20 {
        thread::sleep(Duration::from_millis(100));
        if rustix::process::test_kill_process_group(pid).is_err() {
            return;
        }
    }
    let _ = kill_process_group(pid, Signal::KILL);
}

/// The guard's main function: collects groups until the pipe closes, then ends them.
pub fn guard_main() {
    let mut groups: Vec<u32> = Vec::new();
    for line in std::io::stdin().lock().lines() {
        let Ok(line) = line else { break };
        let Ok(group) = line.get(1..).unwrap_or("").parse() else {
            continue;
        };
        match line.as_bytes().first() {
            Some(b'+') => groups.push(group),
            Some(b'-') => groups.retain(|known| *known != group),
            _ => {}
        }
    }
    for group in groups {
        end_group(group);
    }
}
