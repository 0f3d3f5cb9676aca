//! `homenode profile` as a user runs it: real programs under the real emulator, with the real plugin.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Copies the program next to its plugin, which cargo does not build for a test.
fn homenode(folder: &Path) -> Command {
    static BUILT: OnceLock<()> = OnceLock::new();
    let program = PathBuf::from(env!("CARGO_BIN_EXE_homenode"));
    BUILT.get_or_init(|| {
        let built = program.parent().expect("programs lie in a folder");
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args([
            "build",
            "--quiet",
            "--package",
            "homenode-qemu-plugin",
            "--target-dir",
        ]);
        cargo.arg(built.parent().expect("of the target directory"));
        if built.ends_with("release") {
            cargo.arg("--release");
        }
        cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
        assert!(
            cargo.status().expect("cargo").success(),
            "the plugin does not build"
        );
    });
    let mut command = crate::common::heeding_signals(program);
    command.current_dir(folder).stdin(Stdio::null());
    command
}

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn profile(folder: &Path, args: &[&str]) -> Output {
    homenode(folder)
        .arg("profile")
        .args(args)
        .output()
        .expect("the program can be started")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Returns the exit status and the message of a command that must fail.
fn refused(args: &[&str]) -> (i32, String) {
    let output = profile(folder().path(), args);
    assert!(output.stdout.is_empty(), "{args:?}");
    (output.status.code().expect("it was not killed"), stderr(&output))
}

/// Returns words in a pseudo-random order, which compress like text.
fn text(bytes: usize) -> String {
    let mut state = 1u64;
    let mut text = String::new();
    while text.len() < bytes {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        text.push_str(["node ", "page ", "cache ", "home ", "link\n", "frame "][(state >> 33) as usize % 6]);
    }
    text
}

fn program(folder: &Path, name: &str, text: &[u8]) -> String {
    let path = folder.join(name);
    fs::write(&path, text).expect("written");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("may be executed");
    path.display().to_string()
}

#[test]
fn the_profile_of_gzip_has_a_falling_curve_and_runs_on_the_twin() {
    let folder = folder();
    fs::write(folder.path().join("words"), text(300_000)).expect("written");
    let args = ["--json", "--", "gzip", "-9", "-c", "words"];
    let output = profile(folder.path(), &args);
    assert!(output.status.success(), "{}", stderr(&output));
    let found: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");

    let ratios: Vec<f64> = found["measured"]["curve"]
        .as_array()
        .expect("a curve")
        .iter()
        .map(|point| point["miss_ratio"].as_f64().expect("a number"))
        .collect();
    assert!(ratios.is_sorted_by(|before, after| before >= after), "{ratios:?}");
    assert!(ratios[0] > ratios[ratios.len() - 1] + 0.05, "{ratios:?}");
    let per_kilo = |key: &str| found["measured"][key].as_f64().expect("a count");
    let loads = per_kilo("reads") / per_kilo("instructions");
    assert!((0.05..0.6).contains(&loads), "{loads} loads per instruction");
    assert!(per_kilo("writes") < per_kilo("reads"));

    assert_eq!(found["file"], "gzip.toml");
    for args in [
        &["sim", "gzip.toml", "--json"][..],
        &["sim", "two.toml", "--json"],
    ] {
        let vms = "machine = \"r420\"\nname = \"two\"\n[[vm]]\nname = \"a\"\nvcpus = 1\nmemory = \"1GiB\"\n\
                   workload = \"gzip.toml\"\n[[vm]]\nname = \"b\"\nvcpus = 1\nmemory = \"1GiB\"\nworkload = \"gzip.toml\"\n";
        fs::write(folder.path().join("two.toml"), vms).expect("written");
        let output = homenode(folder.path()).args(args).output().expect("started");
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        let result: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
        let vm = &result["policies"][0]["vms"][0];
        assert_eq!(vm["workload"], "gzip", "{result}");
        assert!(
            vm["runtime_s"].as_f64().is_some_and(|seconds| seconds > 0.0),
            "{result}"
        );
    }
}

#[test]
fn a_curve_is_written_point_by_point_where_that_is_asked_for() {
    let folder = folder();
    fs::write(folder.path().join("words"), text(100_000)).expect("written");
    let args = [
        "--json",
        "--table",
        "--output",
        "points.toml",
        "--",
        "gzip",
        "-c",
        "words",
    ];
    let output = profile(folder.path(), &args);
    assert!(output.status.success(), "{}", stderr(&output));
    let found: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
    let points = found["workload"]["program"]["miss_ratio"]["table"]
        .as_array()
        .expect("a table");
    // r910's L2 has 256 KiB: the profile says nothing about a smaller LLC.
    assert_eq!(points[0][0], "256KiB", "{points:?}");
    assert_eq!(points.last().expect("points")[0], "256MiB", "{points:?}");
    let measured = found["measured"]["curve"].as_array().expect("a curve");
    for (bytes, at) in [(1 << 18, 0), (1 << 28, points.len() - 1)] {
        let point = measured
            .iter()
            .find(|point| point["bytes"] == bytes)
            .expect("measured");
        assert_eq!(points[at][1], point["miss_ratio"], "{bytes}");
    }
    let run = homenode(folder.path())
        .args(["sim", "points.toml", "--json"])
        .output()
        .expect("started");
    assert!(run.status.success(), "{}", stderr(&run));
}

#[test]
fn a_scenario_says_where_it_names_a_workload_file_that_does_not_read() {
    let folder = folder();
    let vm = "name = \"x\"\n[[vm]]\nname = \"a\"\nvcpus = 1\nmemory = \"1GiB\"\nworkload = \"none.toml\"\n";
    fs::write(folder.path().join("x.toml"), vm).expect("written");
    fs::write(
        folder.path().join("bad.toml"),
        "name = \"x\"\n[program]\nthreads = 3\n",
    )
    .expect("written");
    for (file, part) in [
        ("x.toml", "x.toml:6:1: none.toml: cannot be read"),
        ("bad.toml", "bad.toml:3:11: "),
    ] {
        let output = homenode(folder.path())
            .args(["sim", file])
            .output()
            .expect("started");
        assert_eq!(output.status.code(), Some(2));
        assert!(stderr(&output).contains(part), "{}", stderr(&output));
    }
}

#[test]
fn what_the_program_prints_and_ends_with_is_passed_on() {
    let folder = folder();
    fs::write(folder.path().join("words"), "node\n").expect("written");
    let output = profile(folder.path(), &["--", "grep", "-c", "node", "words"]);
    assert_eq!(
        (output.status.code(), &*output.stdout),
        (Some(0), &b"1\n"[..]),
        "{}",
        stderr(&output)
    );
    let output = profile(folder.path(), &["--", "grep", "-c", "page", "words"]);
    assert_eq!((output.status.code(), &*output.stdout), (Some(1), &b"0\n"[..]));
    assert!(
        stderr(&output).contains("note: it ended with status 1"),
        "{}",
        stderr(&output)
    );
    let output = profile(folder.path(), &["--", "sh", "-c", "kill -9 $$"]);
    assert_eq!(output.status.code(), Some(137));
    assert!(
        stderr(&output).contains("signal 9 ended sh"),
        "{}",
        stderr(&output)
    );
    // A shell's children are not followed, and the output says so.
    let output = profile(folder.path(), &["--", "sh", "-c", "ls; ls"]);
    assert!(
        stderr(&output).contains("none of which were followed"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_file_that_is_no_profile_is_not_written_over() {
    let folder = folder();
    fs::write(folder.path().join("true.toml"), "mine = 1\n").expect("written");
    let output = profile(folder.path(), &["--", "true"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("name another file with --output"),
        "{}",
        stderr(&output)
    );
    let output = profile(folder.path(), &["--output", "mine.toml", "--", "true"]);
    assert!(output.status.success(), "{}", stderr(&output));
    let kept = fs::read_to_string(folder.path().join("true.toml")).expect("still there");
    assert_eq!(kept, "mine = 1\n");
}

#[test]
fn what_cannot_be_profiled_is_refused_with_a_reason() {
    let folder = folder();
    let script = program(folder.path(), "script", b"#!/bin/sh\ntrue\n");
    let mut elf = vec![
        0x7f, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 21, 0,
    ];
    elf.resize(64, 0);
    let foreign = program(folder.path(), "foreign", &elf);
    for (args, part) in [
        (
            &["--", "no-such-program"][..],
            "no program named `no-such-program` is in PATH",
        ),
        (&["--", "./no/such"], "No such file"),
        (&["--", "/etc/passwd"], "is not an executable file"),
        (
            &["--", &script],
            "is a script: profile its interpreter, as in 'homenode profile -- /bin/sh ",
        ),
        (
            &["--", &foreign],
            "is a 64-bit program for PowerPC; this homenode profiles 64-bit programs for",
        ),
        (&["--machine", "r911", "--", "true"], "r910"),
        (
            &["--plugin", "/none.so", "--", "true"],
            "--plugin /none.so: there is no such file",
        ),
        (&["--qemu", "/none", "--", "true"], "/none: No such file"),
        (&["--rate", "0", "--", "true"], "a share must be from"),
        (&["--rate", "NaN%", "--", "true"], "a share must be from"),
        (&["--system", "--", "true"], "true is not QEMU"),
        (&["--"], "required"),
    ] {
        let (code, complaint) = refused(args);
        assert_eq!(code, 2, "{args:?}: {complaint}");
        assert!(complaint.contains(part), "{args:?}: {complaint}");
    }
}

#[test]
fn an_emulator_that_is_too_old_or_takes_no_plugins_is_refused() {
    let folder = folder();
    let old = b"#!/bin/sh\necho 'qemu-x86_64 version 5.2.0 (Debian)'\n";
    let static_build = b"#!/bin/sh\necho 'qemu-x86_64 version 10.0.2'\n";
    for (text, part) in [
        (&old[..], "is too old: needs QEMU 7.2 or newer, found 5.2"),
        (&static_build[..], "was built without plugins"),
        (
            &b"#!/bin/sh\necho hello\n"[..],
            "is not QEMU: asked for its version, it printed `hello`",
        ),
    ] {
        let qemu = program(folder.path(), "qemu", text);
        let (code, complaint) = refused(&["--qemu", &qemu, "--", "true"]);
        assert_eq!(code, 2, "{complaint}");
        assert!(complaint.contains(part), "{complaint}");
    }
    // This fake emulator accepts the plugin but is not QEMU, so no log is written.
    let text = b"#!/bin/sh\necho 'qemu-x86_64 version 8.0.0 -plugin'\n";
    let qemu = program(folder.path(), "qemu", text);
    let output = profile(folder.path(), &["--qemu", &qemu, "--", "true"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("plugin wrote nothing"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_plugin_that_is_none_is_the_emulators_complaint() {
    let folder = folder();
    fs::write(folder.path().join("plugin.so"), "no plugin").expect("written");
    let output = profile(folder.path(), &["--plugin", "plugin.so", "--", "true"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("plugin wrote nothing"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn on_a_terminal_sigint_reaches_the_program_whoever_sends_it() {
    use std::io::Write as _;

    use rustix::process::{Pid, Signal, kill_process};

    use crate::signals::OnTerminal;
    let folder = folder();
    // Builds the plugin.
    let _ = homenode(folder.path());
    let path = |name: &str| folder.path().join(name).display().to_string();
    let (profile, out) = (path("sh.toml"), path("out"));
    let script = "while :; do :; done";
    let args = [
        "profile", "--output", &profile, "--stdout", &out, "--", "sh", "-c", script,
    ];
    for is_typed in [false, true] {
        let mut run = OnTerminal::start(&args);
        std::thread::sleep(Duration::from_secs(2));
        match is_typed {
            true => {
                let terminal = run.terminal.as_mut().expect("it is open");
                terminal.write_all(b"\x03").expect("Ctrl-C");
            }
            false => kill_process(Pid::from_child(&run.child), Signal::INT).expect("it runs"),
        }
        assert!(run.ends_within(Duration::from_secs(3)), "typed: {is_typed}");
        let status = run.child.wait().expect("its status");
        assert_eq!(status.code(), Some(130), "typed: {is_typed}");
    }
}

#[test]
fn sigint_is_passed_to_the_program_and_a_second_one_kills_it() {
    use rustix::process::{Pid, Signal, kill_process};
    let folder = folder();
    for (script, interrupts, status) in [
        ("while :; do :; done", 1, 130),
        ("trap '' INT; while :; do :; done", 2, 137),
    ] {
        let mut child = homenode(folder.path())
            .args(["profile", "--", "sh", "-c", script])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        std::thread::sleep(Duration::from_secs(2));
        let begun = Instant::now();
        for _ in 0..interrupts {
            kill_process(Pid::from_child(&child), Signal::INT).expect("it runs");
            std::thread::sleep(Duration::from_millis(300));
        }
        let code = child.wait().expect("its status").code();
        let mut said = String::new();
        let mut complaints = child.stderr.take().expect("piped");
        std::io::Read::read_to_string(&mut complaints, &mut said).expect("text");
        assert_eq!(code, Some(status), "{script}: {said}");
        assert!(begun.elapsed() < Duration::from_secs(3), "{script}: {said}");
        assert!(
            said.contains("a second SIGINT (Ctrl-C) kills it"),
            "{script}: {said}"
        );
    }
}
