//! Commands that run once this process ends, however it ends.

use std::ffi::OsStr;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};

/// A shell that waits for the end of its input, which this process holds open, and then runs commands. It is not told to end
/// otherwise, so it also runs them if this process is killed.
#[derive(Debug)]
pub struct Afterwards(Child);

impl Afterwards {
    /// Starts the shell. `commands` are its program; `$1`, `$2`, … are the arguments.
    ///
    /// # Errors
    /// There is no shell, or no process can be started.
    pub fn run<A: AsRef<OsStr>>(
        commands: &str,
        arguments: impl IntoIterator<Item = A>,
    ) -> io::Result<Afterwards> {
        let child = Command::new("sh")
            .args(["-c", &format!("cat >/dev/null; {commands}"), "sh"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            // A terminal's signals must not reach it.
            .process_group(0)
            .spawn()?;
        Ok(Afterwards(child))
    }
}

/// Runs the commands, and waits for them.
impl Drop for Afterwards {
    fn drop(&mut self) {
        drop(self.0.stdin.take());
        // If another process killed it, there is nothing to wait for.
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_run_when_it_is_dropped_and_not_before() {
        let dir = tempfile::tempdir().unwrap();
        let [own, other] = ["own $(false)", "other"].map(|name| dir.path().join(name));
        for path in [&own, &other] {
            std::fs::write(path, "").unwrap();
        }
        let afterwards = Afterwards::run("rm -f -- \"$@\"", [&own]).unwrap();
        assert!(own.exists());
        drop(afterwards);
        assert!(!own.exists() && other.exists());
    }
}
