//! The history of a run, as an operator queries it.

use std::process::Command;

use serde_json::Value;

use crate::common::{json, refused, run, stdout};

/// A VM, and a second one that arrives later.
const SCENARIO: &str = "\
name = \"two\"
machine = \"r420\"
duration = \"200s\"
[[vm]]
name = \"web\"
vcpus = 1
memory = \"1GiB\"
workload = \"povray\"
work_share = 1000.0
[[vm]]
name = \"db, the second\"
vcpus = 1
memory = \"1GiB\"
workload = \"idle\"
arrival = \"100s\"
work_share = 1000.0
";

#[test]
fn what_a_run_saw_and_decided_is_shown_exported_and_pruned() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (scenario, history) = (path("two.toml"), path("history.sqlite"));
    std::fs::write(&scenario, SCENARIO).unwrap();
    let host = format!("twin:{scenario}");
    let ran = run(&[
        "run",
        "--host",
        &host,
        "--fast",
        "--duration",
        "150s",
        "--history",
        &history,
        "--json",
    ]);
    assert!(ran.status.success(), "{ran:?}");
    let cycles: Vec<Value> = stdout(&ran)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let cycles: Vec<&Value> = cycles.iter().filter(|line| line["type"] == "cycle").collect();
    let record = |args: &[&str]| run(&[&["record"], args, &["--history", &history]].concat());

    let shown = json(&record(&["show", "--json"]));
    assert_eq!(shown["runs"].as_array().unwrap().len(), 1);
    assert_eq!(json(&record(&["--json"])), shown, "the same without a subcommand");
    let appeared: Vec<&str> = shown["events"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|e| e["kind"] == "appeared")
        .map(|e| e["vm"].as_str().unwrap())
        .collect();
    assert_eq!(appeared, ["web", "db, the second"]);
    let of_web = json(&record(&["show", "web", "--kind", "appeared", "--json"]));
    assert_eq!(of_web["events"].as_array().unwrap().len(), 1);
    let text = record(&["show", "web", "--last", "1"]);
    assert!(stdout(&text).contains("VM web"), "{}", stdout(&text));

    // The export has every period of the run's output, unchanged.
    let lines = record(&["export", "--json"]);
    let lines: Vec<Value> = stdout(&lines)
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(lines.len(), cycles.len());
    for (line, cycle) in lines.iter().zip(&cycles) {
        let (kept, told) = (&line["status"], *cycle);
        assert_eq!(kept["at_ns"], told["at_ns"]);
        assert_eq!(kept["vms"][0]["pages_by_node"], told["vms"][0]["pages_by_node"]);
        let used = |status: &Value| status["vms"][0]["cpus_used"].as_f64().unwrap_or_default();
        assert!((used(kept) - used(told)).abs() <= 0.005 * used(told).abs());
    }
    let samples = record(&["export", "--samples"]);
    assert_eq!(stdout(&samples).lines().count(), cycles.len());
    let csv = stdout(&record(&["export", "--csv"])).to_owned();
    let rows = cycles
        .iter()
        .map(|cycle| cycle["vms"].as_array().unwrap().len())
        .sum::<usize>();
    assert_eq!(csv.lines().count(), 1 + rows);
    assert!(csv.contains("\"db, the second\""));
    let parquet = path("vms.parquet");
    let exported = record(&["export", "--parquet", &parquet]);
    assert!(exported.status.success(), "{exported:?}");
    let magic = std::fs::read(&parquet).unwrap();
    assert!(magic.starts_with(b"PAR1") && magic.ends_with(b"PAR1"));
    let of_web = stdout(&record(&["export", "web", "--csv"])).lines().count();
    let with_web = cycles
        .iter()
        .filter(|cycle| !cycle["vms"].as_array().unwrap().is_empty())
        .count();
    assert_eq!(of_web, 1 + with_web);

    // A replay makes the same decisions. Under other policies it makes others, and reports them.
    let same = json(&run(&["replay", &history, "--json"]));
    assert_eq!(
        (&same["same"], &same["inexact"]),
        (&true.into(), &serde_json::json!([])),
        "{same}"
    );
    let text = run(&["replay", &history]);
    assert!(
        stdout(&text).contains("every plan is exactly the same"),
        "{}",
        stdout(&text)
    );
    let other = run(&["replay", "--history", &history, "--policies", "ff-pin"]);
    assert!(
        stdout(&other).contains("only replayed  placement: VM web"),
        "{}",
        stdout(&other)
    );
    let (status, said) = refused(&run(&["replay", &history, "--run", "7"]));
    assert!(
        status == 2 && said.contains("no run 7; it has 1"),
        "{status}: {said}"
    );

    let pruned = record(&["prune", "--most", "1KiB"]);
    assert!(pruned.status.success(), "{pruned:?}");
    assert!(
        json(&record(&["show", "--json"]))["events"]
            .as_array()
            .unwrap()
            .is_empty()
    );
}

#[test]
fn a_history_that_is_none_is_refused_with_the_remedy() {
    let dir = tempfile::tempdir().unwrap();
    let none = dir.path().join("none").display().to_string();
    let (status, said) = refused(&run(&["record", "show", "--history", &none]));
    assert!(status == 2 && said.contains("--history"), "{status}: {said}");
    let words = dir.path().join("words").display().to_string();
    std::fs::write(&words, "x".repeat(5000)).unwrap();
    let (status, said) = refused(&run(&["record", "export", "--csv", "--history", &words]));
    assert!(
        status == 2 && said.contains("is not a Homenode history"),
        "{status}: {said}"
    );
    let (status, said) = refused(&run(&["record", "show", "--from", "noon", "--history", &words]));
    assert!(status == 2 && said.contains("03:12"), "{status}: {said}");
    // A command does not wait for a pipe, either.
    let pipe = dir.path().join("pipe").display().to_string();
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    for args in [
        &["record", "show"][..],
        &["record", "export", "--csv"],
        &["why", "web"],
    ] {
        let (status, said) = refused(&run(&[args, &["--history", &pipe]].concat()));
        assert!(
            status == 2 && said.contains("is not a Homenode history"),
            "{args:?}: {status}: {said}"
        );
    }
    // A run reports that the history cannot be used, and goes on without one.
    for history in [&words, &pipe] {
        let ran = run(&[
            "run",
            "--host",
            "twin",
            "--fast",
            "--duration",
            "2s",
            "--history",
            history,
            "--json",
        ]);
        assert!(ran.status.success());
        assert!(stdout(&ran).contains("not recorded"), "{}", stdout(&ran));
    }
}

/// A downgrade leads to this situation.
#[test]
fn a_history_of_a_newer_version_is_left_as_it_is_and_the_agent_runs_without_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("history.sqlite");
    let history = path.display().to_string();
    let runs = || {
        let ran = run(&[
            "run",
            "--host",
            "twin",
            "--fast",
            "--duration",
            "2s",
            "--history",
            &history,
            "--json",
        ]);
        assert!(ran.status.success(), "{ran:?}");
        stdout(&ran)
    };
    assert!(!runs().contains("not recorded"));
    // SQLite stores `user_version` at byte 60, the most significant byte first.
    let mut newer = std::fs::read(&path).unwrap();
    assert_eq!(newer[60..64], [0, 0, 0, 1]);
    newer[63] = 9;
    std::fs::write(&path, &newer).unwrap();
    let said = runs();
    assert!(
        said.contains("has format 9") && said.contains("not recorded"),
        "{said}"
    );
    let (status, refusal) = refused(&run(&["record", "show", "--history", &history]));
    assert!(
        status == 1 && refusal.contains("use a newer one"),
        "{status}: {refusal}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), newer);
}

#[test]
fn commands_about_the_history_find_that_of_a_twin_that_runs_in_its_first_minute() {
    let dir = tempfile::tempdir().unwrap();
    let homenode = |args: &[&str]| {
        let mut command = crate::common::homenode();
        command
            .args(args)
            .env("TMPDIR", dir.path())
            .stdin(std::process::Stdio::null());
        command
    };
    let mut child = homenode(&["run", "--host", "twin:tavo-mixed"])
        .stdout(std::process::Stdio::null())
        .spawn()
        .expect("the program can be started");
    let is_of_host = std::path::Path::new("/var/lib/homenode/history.sqlite").exists();
    let mut found = None;
    for _ in 0..200 {
        std::thread::sleep(std::time::Duration::from_millis(100));
        let shown = homenode(&["record", "show", "--json"]).output().expect("it ends");
        let shown: serde_json::Value = serde_json::from_slice(&shown.stdout).unwrap_or_default();
        if is_of_host
            || shown["events"]
                .as_array()
                .is_some_and(|events| !events.is_empty())
        {
            found = Some(shown);
            break;
        }
    }
    let ended = rustix::process::kill_process(
        rustix::process::Pid::from_child(&child),
        rustix::process::Signal::TERM,
    );
    let status = child.wait().expect("its status");
    ended.expect("it ran");
    let found = found.expect("events within twenty seconds");
    let path = found["history"].as_str().unwrap_or_default().to_owned();
    assert!(
        is_of_host || path.starts_with(&dir.path().display().to_string()),
        "{path}"
    );
    assert!(
        status.success() && (is_of_host || !std::path::Path::new(&path).exists()),
        "{status} {path}"
    );
}
