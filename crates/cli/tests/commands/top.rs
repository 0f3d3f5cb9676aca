//! `homenode top` as an operator and a script use it.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common;
use crate::common::{Agent, refused, run, text};
use serde_json::Value;

/// VMs on a small simulated host, one of them with control characters in its name.
const SCENARIO: &str = "\
name = \"three\"
machine = \"r420\"
duration = \"3600s\"
[[vm]]
name = \"web\"
vcpus = 1
memory = \"1GiB\"
workload = \"povray\"
work_share = 1000.0
[[vm]]
name = \"db\"
vcpus = 2
memory = \"1GiB\"
workload = \"idle\"
work_share = 1000.0
[[vm]]
name = \"evil\\u001B[2J\"
vcpus = 1
memory = \"1GiB\"
workload = \"idle\"
work_share = 1000.0
";

fn lines_of_json(output: &Output) -> Vec<Value> {
    let lines = text(output);
    lines
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

/// Records a history of two minutes on the simulated host, and returns its path.
fn history(dir: &tempfile::TempDir) -> String {
    let path = |name: &str| dir.path().join(name).display().to_string();
    std::fs::write(path("three.toml"), SCENARIO).unwrap();
    let host = format!("twin:{}", path("three.toml"));
    let history = path("history.sqlite");
    let args = [
        "run",
        "--host",
        &host,
        "--fast",
        "--duration",
        "150s",
        "--history",
        &history,
    ];
    assert!(run(&args).status.success());
    history
}

/// Runs a command on a terminal of 80x24; returns what the terminal received, with the terminal's settings before and after.
fn on_a_terminal(command: &str) -> String {
    let script = format!("stty rows 24 cols 80; stty -g; {command}; echo status=$?; stty -g");
    let mut program = Command::new("script");
    program
        .args(["-qec", &script, "/dev/null"])
        .env("TERM", "xterm")
        .env_remove("NO_COLOR");
    let output = program
        .stdin(Stdio::null())
        .output()
        .expect("script is part of every Debian");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the first and the last settings that `stty -g` printed.
fn settings(told: &str) -> (&str, &str) {
    let of = |line: &&str| line.split(':').count() > 10;
    let lines: Vec<&str> = told
        .lines()
        .map(|line| line.rsplit('\u{1b}').next().unwrap_or(line))
        .collect();
    let mut found = lines.iter().copied().filter(|line| of(line));
    let first = found.next().expect("settings");
    let last = found.next_back().expect("settings");
    (
        first.trim(),
        last.rsplit(['l', 'h', 'm']).next().unwrap_or(last).trim(),
    )
}

const ENTER: &str = "\u{1b}[?1049h";
const LEAVE: &str = "\u{1b}[?1049l";

#[test]
fn once_and_batch_print_what_an_agent_says_for_people_and_for_programs() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), SCENARIO, &["--period", "100ms"]);
    let top = |args: &[&str]| agent.ask(&[&["top"], args].concat());
    let once = agent.eventually("figures are there", || {
        let once = text(&top(&["--once", "--sort", "name"]));
        once.contains("100%").then_some(once)
    });
    assert!(once.is_ascii() && once.contains("evil\\u{1b}[2J"), "{once}");
    assert!(once.contains("VM web appeared"), "{once}");
    let names: Vec<&str> = once
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    let place = |name: &str| names.iter().position(|own| *own == name);
    assert!(place("db").is_some() && place("db") < place("web"), "{once}");
    let few = text(&top(&["--once", "--filter", "WEB"]));
    assert!(!few.lines().any(|line| line.starts_with("db ")), "{few}");
    let shown = lines_of_json(&top(&["--batch", "3", "--every", "200ms", "--json"]));
    assert_eq!(shown.len(), 3);
    common::is_as_its_schema_says(&shown[0]);
    assert!(shown[0]["at_ns"].as_u64() < shown[2]["at_ns"].as_u64());
    assert_eq!(shown[0]["vms"].as_array().unwrap().len(), 3);
}

#[test]
fn a_history_is_shown_from_any_of_its_times() {
    let dir = tempfile::tempdir().unwrap();
    let history = history(&dir);
    let top = |args: &[&str]| run(&[&["top", "--history", &history], args].concat());
    let all = lines_of_json(&top(&["--batch", "1000", "--json"]));
    let exported = text(&run(&["record", "export", "--json", "--history", &history]));
    assert_eq!(all.len(), exported.lines().count(), "every period once");
    let middle = &all[all.len() / 2];
    let at = middle["at"].as_str().unwrap();
    assert_eq!(
        lines_of_json(&top(&["--at", at, "--json"])),
        std::slice::from_ref(middle)
    );
    let plain = text(&top(&["--at", at, "--once"]));
    assert!(plain.contains("replay") && plain.contains("web"), "{plain}");
    for (time, said) in [("1990-01-01", "nothing was recorded at 1990"), ("noon", "03:12")] {
        let (status, complaint) = refused(&top(&["--at", time, "--once"]));
        assert!(status == 2 && complaint.contains(said), "{complaint}");
    }
    // The option's earlier name still works.
    let earlier = run(&["top", "--replay", &history, "--at", at, "--json"]);
    assert_eq!(lines_of_json(&earlier), std::slice::from_ref(middle));
    let (status, complaint) = refused(&run(&["top", "--history", "/nowhere/history", "--once"]));
    assert!(
        status == 2 && complaint.contains("no history at /nowhere/history"),
        "{complaint}"
    );
}

#[test]
fn without_a_terminal_or_an_agent_it_says_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().display().to_string();
    let (status, complaint) = refused(&run(&["top", "--state", &state]));
    assert!(status == 2 && complaint.contains("--once"), "{complaint}");
    let (status, complaint) = refused(&run(&["top", "--once", "--state", &state]));
    assert!(status == 1 && complaint.contains("homenode run"), "{complaint}");
    let told = on_a_terminal(&format!("{} top --state {state}", env!("CARGO_BIN_EXE_homenode")));
    assert!(
        told.contains("status=1") && told.contains("no agent runs here"),
        "{told}"
    );
}

#[test]
fn a_terminal_is_as_it_was_after_every_end() {
    let dir = tempfile::tempdir().unwrap();
    let history = history(&dir);
    let program = env!("CARGO_BIN_EXE_homenode");
    for (signal, status) in [("TERM", 143), ("INT", 130), ("HUP", 129)] {
        let top =
            format!("timeout --foreground --preserve-status -s {signal} 2 {program} top --history {history}");
        let told = on_a_terminal(&top);
        assert!(told.contains(ENTER) && told.contains(LEAVE), "{signal}: {told}");
        assert!(told.contains(&format!("status={status}")), "{signal}: {told}");
        let (before, after) = settings(&told);
        assert_eq!(before, after, "{signal}: {told}");
    }
}

/// `top` ends when its terminal is closed, instead of reading from the closed terminal forever.
#[test]
fn a_terminal_that_is_closed_ends_it() {
    let dir = tempfile::tempdir().unwrap();
    let history = history(&dir);
    let pid_file = dir.path().join("pid");
    let program = env!("CARGO_BIN_EXE_homenode");
    let top = format!(
        "echo $$ > {}; exec {program} top --history {history}",
        pid_file.display()
    );
    let mut terminal = Command::new("script")
        .args(["-qec", &top, "/dev/null"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("script is part of every Debian");
    std::thread::sleep(Duration::from_secs(2));
    let pid = std::fs::read_to_string(&pid_file).unwrap();
    let process = Path::new("/proc").join(pid.trim());
    let is_it = || std::fs::read(process.join("cmdline")).is_ok_and(|line| line.ends_with(b"sqlite\0"));
    assert!(is_it(), "it runs");
    terminal.kill().unwrap();
    terminal.wait().unwrap();
    let closed = Instant::now();
    while is_it() {
        assert!(
            closed.elapsed() < Duration::from_secs(10),
            "it runs on without a terminal"
        );
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn an_agent_that_goes_is_said_and_asked_again() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), SCENARIO, &["--period", "100ms"]);
    let state = agent.dir.path().join("state").display().to_string();
    let (program, pid) = (env!("CARGO_BIN_EXE_homenode"), agent.child.id());
    let told = on_a_terminal(&format!(
        "(sleep 2; kill -TERM {pid}) & timeout --foreground --preserve-status -s TERM 6 {program} top --state {state} --every 200ms"
    ));
    assert!(told.contains("web"), "{told}");
    assert!(told.contains("asking again"), "{told}");
    assert!(told.contains("status=143"), "{told}");
}
