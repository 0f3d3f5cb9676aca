//! A separate systemd unit for the guard, and for other programs that must outlive the agent, on hosts with systemd. What ends
//! the agent's whole unit (a stop, `systemctl kill`, a watchdog) must not end the process that undoes the agent's changes.
//!
//! `systemd-run --scope` asks systemd for the unit, moves itself into it, and becomes the guard. Its parent, pipes and process
//! number stay the same, and so does the confinement of the agent's unit (which files it sees, which system calls it may make). A
//! program that must run unconfined is started as a service by systemd itself, and `systemd-run` waits for its end.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// How long systemd waits for a guard at shutdown. The agent stops first and has restored everything by then.
const STOP: &str = "TimeoutStopSec=15s";
/// At shutdown, the agent stops before the guard, and the guard before libvirt, which it needs for undoing.
const ORDER: [&str; 2] = [
    "Before=homenode.service",
    "After=libvirtd.service virtqemud.service",
];

/// Number of units that this process has requested.
static COUNT: AtomicU32 = AtomicU32::new(0);

/// Returns the program and arguments that run the guard in its own scope. The host's own files are below `root`.
///
/// # Errors
/// Why no scope can be made, as the end of a sentence.
pub(crate) fn around(
    root: &Path,
    program: &Path,
    args: &[OsString],
) -> Result<(PathBuf, Vec<OsString>), &'static str> {
    let unit = Unit {
        what: "guard",
        kind: "scope",
        description: "Guard of homenode: undoes the changes of an agent that has ended",
        options: vec!["--scope".into()],
        properties: &[STOP, ORDER[0], ORDER[1]],
    };
    unit.of(root, program, args)
}

/// Returns the program and arguments that run another of our programs in its own service. `what` is a word for the service's
/// name, `description` a sentence. The service has the agent's input and outputs and these variables, but none of the agent's
/// confinement. Processes that it leaves behind keep running.
///
/// # Errors
/// Why no service can be made, as the end of a sentence.
pub fn apart(
    root: &Path,
    (what, description): (&str, &str),
    variables: &[(&str, &str)],
    program: &Path,
    args: &[OsString],
) -> Result<(PathBuf, Vec<OsString>), &'static str> {
    let variables = variables
        .iter()
        .map(|(name, value)| format!("--setenv={name}={value}"));
    let options = ["--pipe", "--wait"]
        .map(String::from)
        .into_iter()
        .chain(variables)
        .collect();
    let unit = Unit {
        what,
        kind: "service",
        description,
        options,
        properties: &["KillMode=process"],
    };
    unit.of(root, program, args)
}

/// A unit that `systemd-run` makes.
struct Unit<'a> {
    what: &'a str,
    kind: &'a str,
    description: &'a str,
    options: Vec<String>,
    properties: &'a [&'a str],
}

impl Unit<'_> {
    /// Returns the program that makes the unit, and its arguments.
    fn of(
        &self,
        root: &Path,
        program: &Path,
        args: &[OsString],
    ) -> Result<(PathBuf, Vec<OsString>), &'static str> {
        if !root.join("run/systemd/system").is_dir() {
            return Err("systemd does not run this host");
        }
        if !rustix::process::geteuid().is_root() {
            return Err("only root can create one");
        }
        let runner = ["usr/bin/systemd-run", "bin/systemd-run"].map(|path| root.join(path));
        let Some(runner) = runner.into_iter().find(|path| path.exists()) else {
            return Err("there is no systemd-run (Debian: systemd)");
        };
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let (what, kind, pid) = (self.what, self.kind, std::process::id());
        let mut own: Vec<OsString> = ["--quiet", "--collect", "--slice=system.slice"]
            .map(OsString::from)
            .into();
        own.extend(self.options.iter().map(OsString::from));
        own.push(format!("--unit=homenode-{what}-{pid}-{number}.{kind}").into());
        own.push(format!("--description={}", self.description).into());
        own.extend(
            self.properties
                .iter()
                .flat_map(|property| ["--property".into(), (*property).into()]),
        );
        own.extend(["--".into(), program.into()]);
        own.extend(args.iter().cloned());
        Ok((runner, own))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_scope_where_systemd_runs_the_host_and_else_a_reason() {
        let root = tempfile::tempdir().unwrap();
        let around = || around(root.path(), Path::new("/x/homenode"), &["guard".into()]);
        assert!(around().unwrap_err().contains("does not run"));
        std::fs::create_dir_all(root.path().join("run/systemd/system")).unwrap();
        std::fs::create_dir_all(root.path().join("usr/bin")).unwrap();
        if !rustix::process::geteuid().is_root() {
            assert!(around().unwrap_err().contains("root"));
            return;
        }
        assert!(around().unwrap_err().contains("systemd-run"));
        std::fs::write(root.path().join("usr/bin/systemd-run"), "").unwrap();
        let (program, args) = around().unwrap();
        assert_eq!(program, root.path().join("usr/bin/systemd-run"));
        assert!(
            args.ends_with(&["--".into(), "/x/homenode".into(), "guard".into()]),
            "{args:?}"
        );
        assert!(args.contains(&"--scope".into()));
        let what = ("move", "Moves a domain");
        let (_, args) = apart(
            root.path(),
            what,
            &[("JOB", "{\"a\": 1}")],
            Path::new("/x/homenode"),
            &[],
        )
        .unwrap();
        for word in ["--wait", "--pipe", "--setenv=JOB={\"a\": 1}", "KillMode=process"] {
            assert!(args.contains(&word.into()), "{word}: {args:?}");
        }
        assert!(!args.contains(&"--scope".into()));
    }
}
