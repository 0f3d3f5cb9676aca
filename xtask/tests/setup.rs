//! Tests `scripts/setup.sh` on fake machines that lack something. Each program with which the script could change a machine is
//! a stub that records its calls.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tempfile::TempDir;

/// Programs that the script uses and that are really run, as they change nothing.
const HARMLESS: [&str; 15] = [
    "sh", "basename", "cat", "chmod", "cut", "dirname", "env", "getent", "grep", "head", "mkdir", "mktemp",
    "rm", "sed", "sort",
];

/// Stub of dpkg-query: reports that all packages except those in the file `missing` are installed.
const DPKG_QUERY: &str = r#"for name; do :; done; grep -qx "$name" "$DIR/missing" || printf installed"#;

/// Stub of rustup: has no toolchain until the script installs one.
const RUSTUP: &str = r#"case "$1" in
which) [ -x "$DIR/toolchain/bin/cargo" ] && printf '%s\n' "$DIR/toolchain/bin/cargo" ;;
toolchain) mkdir -p "$DIR/toolchain/bin"
    printf '#!/bin/sh\necho "cargo 99.0.0 (new)"\n' >"$DIR/toolchain/bin/cargo"; chmod 755 "$DIR/toolchain/bin/cargo" ;;
esac"#;

/// Runs one test at a time. A stub cannot be executed while it is open for writing, and a process that another test forks at
/// that moment would keep it open.
static ALONE: Mutex<()> = Mutex::new(());

struct Machine {
    dir: TempDir,
    _alone: MutexGuard<'static, ()>,
}

impl Machine {
    /// Creates a Debian machine on which everything is installed and the user is root.
    fn complete() -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let machine = Self {
            dir: tempfile::tempdir().expect("a directory"),
            _alone: alone,
        };
        fs::create_dir(machine.path("bin")).expect("bin");
        for program in HARMLESS {
            let real = ["/bin", "/usr/bin"].map(|dir| Path::new(dir).join(program));
            let real = real
                .iter()
                .find(|path| path.exists())
                .expect("a program that every Debian has");
            symlink(real, machine.path("bin").join(program)).expect("a link");
        }
        machine.is_missing(&[]);
        machine.has("id", "echo 0");
        machine.has("dpkg-query", DPKG_QUERY);
        machine.has("apt-get", "");
        machine.has("apt-cache", "echo '  Candidate: (none)'");
        machine.has("cargo", "echo 'cargo 99.0.0 (there)'");
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Puts a stub on PATH.
    fn has(&self, program: &str, script: &str) {
        let text = format!("#!/bin/sh\necho \"{program} $*\" >>\"$DIR/calls\"\n{script}\n");
        let path = self.path("bin").join(program);
        fs::write(&path, text).expect("a stub");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("executable");
    }

    fn is_missing(&self, packages: &[&str]) {
        fs::write(self.path("missing"), packages.join("\n")).expect("a list");
    }

    fn set_up(&self, command: &[&str]) -> Output {
        Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup.sh"))
            .args(command)
            .env_clear()
            .env("PATH", self.path("bin"))
            .env("HOME", self.dir.path())
            .env("DIR", self.dir.path())
            .output()
            .expect("the script starts")
    }

    /// Returns the arguments of all calls of the stub of this name.
    fn calls(&self, program: &str) -> Vec<String> {
        let calls = fs::read_to_string(self.path("calls")).unwrap_or_default();
        let begin = format!("{program} ");
        calls
            .lines()
            .filter_map(|line| line.strip_prefix(&begin))
            .map(str::to_owned)
            .collect()
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_complete_machine_is_left_alone_and_the_command_runs() {
    let machine = Machine::complete();
    let output = machine.set_up(&["cargo", "--version"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "cargo 99.0.0 (there)\n");
    assert_eq!(said(&output), "");
    assert!(machine.calls("apt-get").is_empty());
}

#[test]
fn only_what_is_missing_is_installed_and_its_reason_said() {
    let machine = Machine::complete();
    machine.is_missing(&["libvirt-dev"]);
    let output = machine.set_up(&[]);
    assert!(output.status.success(), "{}", said(&output));
    assert!(
        said(&output).contains("needs libvirt-dev: libvirt's headers"),
        "{}",
        said(&output)
    );
    let install = "-q -y --no-remove --no-install-recommends install libvirt-dev";
    assert_eq!(machine.calls("apt-get"), ["-q -q update", install]);
}

#[test]
fn sudo_is_used_when_we_are_not_root() {
    let machine = Machine::complete();
    machine.is_missing(&["gcc"]);
    machine.has("id", "echo 1000");
    machine.has("sudo", r#"exec "$@""#);
    let output = machine.set_up(&[]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(machine.calls("sudo").len(), 2);
}

#[test]
fn without_root_and_sudo_it_says_what_to_do() {
    let machine = Machine::complete();
    machine.is_missing(&["gcc"]);
    machine.has("id", "echo 1000");
    let output = machine.set_up(&["cargo", "build"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        said(&output).contains("become root, or install and set up sudo"),
        "{}",
        said(&output)
    );
    assert!(machine.calls("cargo").is_empty(), "the command did not run");
}

#[test]
fn an_old_cargo_is_passed_over_for_the_one_of_an_installed_rustup() {
    let machine = Machine::complete();
    machine.has("cargo", "echo 'cargo 1.63.0 (old)'");
    machine.has("rustup", RUSTUP);
    let output = machine.set_up(&["cargo", "--version"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "cargo 99.0.0 (new)\n");
    assert!(
        said(&output).contains("or newer, found 1.63.0"),
        "{}",
        said(&output)
    );
    assert!(
        machine
            .calls("rustup")
            .contains(&"toolchain install stable --profile minimal -c rustfmt,clippy".to_owned())
    );

    // A second run installs nothing.
    fs::remove_file(machine.path("calls")).expect("calls");
    assert!(machine.set_up(&[]).status.success());
    assert!(
        !machine
            .calls("rustup")
            .iter()
            .any(|call| call.starts_with("toolchain"))
    );
}

#[test]
fn rustup_comes_from_debian_when_it_has_one() {
    let machine = Machine::complete();
    fs::remove_file(machine.path("bin/cargo")).expect("cargo");
    fs::write(machine.path("rustup"), format!("#!/bin/sh\n{RUSTUP}\n")).expect("rustup");
    machine.has("apt-cache", "echo '  Candidate: 1.26.0-5'");
    machine.has(
        "apt-get",
        r#"case "$*" in *rustup) cat "$DIR/rustup" >"$DIR/bin/rustup"; chmod 755 "$DIR/bin/rustup" ;; esac"#,
    );
    let output = machine.set_up(&["cargo", "--version"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "cargo 99.0.0 (new)\n");
}

#[test]
fn rustup_comes_from_its_own_installer_otherwise() {
    let machine = Machine::complete();
    fs::remove_file(machine.path("bin/cargo")).expect("cargo");
    fs::write(machine.path("rustup"), format!("#!/bin/sh\n{RUSTUP}\n")).expect("rustup");
    let installer = r#"mkdir -p "$HOME/.cargo/bin"; cat "$DIR/rustup" >"$HOME/.cargo/bin/rustup"; chmod 755 "$HOME/.cargo/bin/rustup""#;
    fs::write(machine.path("installer"), installer).expect("installer");
    machine.has(
        "curl",
        r#"for target; do :; done; cat "$DIR/installer" >"$target""#,
    );
    let output = machine.set_up(&["cargo", "--version"]);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "cargo 99.0.0 (new)\n");
}

#[test]
fn no_network_is_said() {
    let machine = Machine::complete();
    fs::remove_file(machine.path("bin/cargo")).expect("cargo");
    machine.has("curl", "exit 6");
    let output = machine.set_up(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(said(&output).contains("is there a network?"), "{}", said(&output));
}
