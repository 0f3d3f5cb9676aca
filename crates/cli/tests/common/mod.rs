//! Shared by tests of the commands: the program as a user runs it, and an agent on the simulated host.

#![allow(dead_code)] // each test file uses its part

pub(crate) mod http;

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

/// Returns a command that starts a program without the signals that this process was started to ignore: a shell ignores SIGINT in
/// what it runs in the background, and `homenode` leaves ignored signals ignored.
pub(crate) fn heeding_signals(program: impl AsRef<std::ffi::OsStr>) -> Command {
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP,INT,QUIT,TERM").arg(program);
    command
}

pub(crate) fn homenode() -> Command {
    let mut program = heeding_signals(env!("CARGO_BIN_EXE_homenode"));
    // Help is wrapped to the width of the reader's terminal.
    program.env_remove("COLUMNS");
    program
}

pub(crate) fn run(args: &[&str]) -> Output {
    homenode()
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the program can be started")
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("output is text")
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("complaints are text")
}

/// Returns the path of a program that `scripts/http-setup.sh` fetched.
pub(crate) fn fetched(path: &str) -> PathBuf {
    let target = Path::new(env!("CARGO_BIN_EXE_homenode"))
        .ancestors()
        .nth(2)
        .expect("the target directory");
    let program = target.join(path);
    assert!(
        program.exists(),
        "{} is missing: run scripts/http-setup.sh",
        program.display()
    );
    program
}

/// Returns the output of a command that must succeed.
pub(crate) fn text(output: &Output) -> String {
    assert!(output.status.success(), "{}", stderr(output));
    stdout(output)
}

/// Returns the only JSON value in the output of a command that must succeed.
pub(crate) fn json(output: &Output) -> Value {
    serde_json::from_str(&text(output)).expect("one JSON value")
}

/// Panics if a document does not match the committed schema of its kind.
pub(crate) fn is_as_its_schema_says(document: &Value) {
    let kind = document["schema"].as_str().expect("documents name their schema");
    let (kind, _) = kind.split_once('/').expect("kind and version");
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/schema/json");
    let text = std::fs::read_to_string(folder.join(format!("{kind}.schema.json"))).expect("it is committed");
    let schema = serde_json::from_str(&text).expect("it is JSON");
    let validator = jsonschema::validator_for(&schema).expect("it is a schema");
    let errors: Vec<String> = validator
        .iter_errors(document)
        .map(|error| format!("{}: {error}", error.instance_path()))
        .collect();
    assert!(errors.is_empty(), "{kind}: {errors:#?}");
}

/// Returns the exit status and the message of a command that must fail.
pub(crate) fn refused(output: &Output) -> (i32, String) {
    (output.status.code().expect("it was not killed"), stderr(output))
}

/// Two VMs that work for hours.
pub(crate) const TWO_VMS: &str = "\
name = \"two\"
machine = \"r910\"
duration = \"36000s\"
[[vm]]
name = \"web\"
vcpus = 2
memory = \"2GiB\"
workload = \"mg.B\"
work_share = 1000.0
[[vm]]
name = \"db\"
vcpus = 2
memory = \"2GiB\"
workload = \"povray\"
work_share = 1000.0
";

/// A running agent on the simulated host; it is stopped when the value is dropped.
pub(crate) struct Agent {
    pub child: Child,
    pub dir: tempfile::TempDir,
}

impl Agent {
    /// Starts an agent on a scenario, with its state in `dir`, and waits until it answers.
    pub(crate) fn on(dir: tempfile::TempDir, scenario: &str, args: &[&str]) -> Agent {
        let path = dir.path().join("scenario.toml");
        std::fs::write(&path, scenario).unwrap();
        let host = format!("twin:{}", path.display());
        let state = dir.path().join("state").display().to_string();
        let child = homenode()
            .args(["run", "--host", &host, "--state", &state])
            .args(args)
            .stdout(Stdio::null())
            .spawn()
            .expect("the program can be started");
        let agent = Agent { child, dir };
        agent.eventually("the agent answers", || {
            agent.ask(&["vm"]).status.success().then_some(())
        });
        agent
    }

    /// Starts an agent on two VMs, `web` and `db`, that work for hours, and waits until both run.
    pub(crate) fn on_two_vms(args: &[&str]) -> Agent {
        let args = [&["--period", "100ms"], args].concat();
        let agent = Agent::on(tempfile::tempdir().unwrap(), TWO_VMS, &args);
        agent.eventually("both VMs run", || {
            agent.ask(&["vm", "db"]).status.success().then_some(())
        });
        agent
    }

    /// Starts a command that takes long.
    pub(crate) fn begin(&self, args: &[&str]) -> Child {
        let state = self.dir.path().join("state");
        let mut command = homenode();
        command.args(args).arg("--state").arg(state);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("the program can be started")
    }

    pub(crate) fn ask(&self, args: &[&str]) -> Output {
        let state = self.dir.path().join("state").display().to_string();
        run(&[args, &["--state", &state]].concat())
    }

    pub(crate) fn eventually<T>(&self, what: &str, mut look: impl FnMut() -> Option<T>) -> T {
        for _ in 0..600 {
            if let Some(found) = look() {
                return found;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        panic!("{what}: not within a minute");
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
