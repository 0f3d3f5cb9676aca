//! Signals to a run on the twin.

use crate::common;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A short run; the comparison after it takes a day of simulated time for each of four sets of policies.
const LONG: &str = "\
name = \"long\"
machine = \"r910\"
duration = \"86400s\"
[[vm]]
name = \"web\"
vcpus = 8
memory = \"8GiB\"
workload = \"milc\"
work_share = 100000.0
[[vm]]
name = \"db\"
vcpus = 8
memory = \"8GiB\"
workload = \"cg.B\"
work_share = 100000.0
";

fn start(dir: &tempfile::TempDir, args: &[&str]) -> Child {
    let path = dir.path().join("long.toml");
    std::fs::write(&path, LONG).expect("written");
    common::homenode()
        .args(["run", "--host", &format!("twin:{}", path.display()), "--fast"])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program can be started")
}

/// Sends a signal. Returns the exit status, and the time that the process took to end.
fn signal(child: &mut Child, signal: Signal) -> (Option<i32>, Duration) {
    let sent = Instant::now();
    kill_process(Pid::from_child(child), signal).expect("it runs");
    let status = child.wait().expect("its status");
    (status.code(), sent.elapsed())
}

#[test]
fn a_signal_ends_the_closing_comparison_within_a_second_and_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    for (sent, status) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        // This is the longest period. A step of the twin that is this long takes time, too.
        let mut child = start(&dir, &["--duration", "1s", "--period", "30s"]);
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.starts_with("The same VMs and seed") {
            line.clear();
            assert!(
                out.read_line(&mut line).expect("text") > 0,
                "it ended before its comparison"
            );
        }
        std::thread::sleep(Duration::from_millis(300));
        let (code, took) = signal(&mut child, sent);
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("text");
        assert_eq!(code, Some(status), "{rest}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert!(
            rest.contains("stopped by a signal") && rest.contains("homenode"),
            "{rest}"
        );
    }
}

#[test]
fn a_summary_that_was_cut_short_says_so_to_programs() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = start(&dir, &["--duration", "1s", "--json"]);
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    out.read_line(&mut line).expect("text");
    while out.read_line(&mut line).expect("text") > 0 && !line.contains("cycle/") {}
    // One cycle is over after a simulated second, so the comparison begins soon.
    std::thread::sleep(Duration::from_secs(3));
    let (code, took) = signal(&mut child, Signal::TERM);
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    assert!(took < Duration::from_secs(1), "{took:?}");
    let last = rest.lines().last().expect("a summary");
    let summary: serde_json::Value = serde_json::from_str(last).expect("JSON");
    common::is_as_its_schema_says(&summary);
    assert_eq!((code, &summary["cut_short"]), (Some(143), &true.into()), "{rest}");
}

#[test]
fn sigterm_ends_a_run_in_good_order_and_no_comparison_begins_and_sigint_leads_on_to_it() {
    let dir = tempfile::tempdir().expect("a directory");
    for sent in [Signal::TERM, Signal::INT] {
        let mut child = start(&dir, &[]);
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).expect("text");
        std::thread::sleep(Duration::from_millis(300));
        if sent == Signal::INT {
            kill_process(Pid::from_child(&child), sent).expect("it runs");
            while !line.starts_with("The same VMs and seed") {
                line.clear();
                assert!(out.read_line(&mut line).expect("text") > 0, "no comparison");
            }
            assert_eq!(signal(&mut child, sent).0, Some(130));
            continue;
        }
        let (code, took) = signal(&mut child, sent);
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("text");
        assert!(
            code == Some(0) && took < Duration::from_secs(1),
            "{code:?} {took:?} {rest}"
        );
        assert!(
            rest.contains("skipping the comparison with other policies"),
            "{rest}"
        );
    }
}
