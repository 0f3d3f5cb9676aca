//! Traces for Perfetto that cannot be written.

use crate::common::{run, stderr, stdout, text};
use crate::signals::SHORT;

#[test]
fn a_trace_that_has_no_place_is_refused() {
    let refused = run(&["sim", "churn", "--trace", "/nonexistent/trace"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        stderr(&refused).contains("/nonexistent/trace"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn a_trace_that_cannot_be_written_is_said_at_once_and_the_run_goes_on() {
    let ran = run(&[
        "run",
        "--host",
        "twin",
        "--fast",
        "--duration",
        "60s",
        "--trace",
        "/dev/full",
        "--json",
    ]);
    assert!(ran.status.success(), "{ran:?}");
    let lines = stdout(&ran);
    let lines: Vec<&str> = lines.lines().collect();
    let said: Vec<usize> = (0..lines.len())
        .filter(|at| lines[*at].contains("/dev/full"))
        .collect();
    let last = lines.iter().rposition(|line| line.contains("\"cycle/1\""));
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(lines[said[0]].contains("not traced"), "{}", lines[said[0]]);
    assert!(said[0] + 10 < last.unwrap(), "{said:?} {last:?}");
}

#[test]
fn a_former_trace_is_replaced_by_a_run_and_kept_by_one_that_does_not_begin() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace.pftrace");
    let trace = path.display().to_string();
    let former = b"former ".repeat(2_000_000);
    std::fs::write(&path, &former).unwrap();
    let is_kept = || std::fs::read(&path).unwrap() == former;
    let state = "/proc/no-such-place";
    for args in [
        &["sim", "churn", "--policy", "exec:/nonexistent"][..],
        &[
            "run",
            "--host",
            "qemu",
            "--mode",
            "act",
            "--state",
            state,
            "--duration",
            "1s",
        ],
    ] {
        let ran = run(&[args, &["--trace", &trace]].concat());
        assert!(!ran.status.success(), "{args:?}: {ran:?}");
        assert!(is_kept(), "{args:?}");
    }
    let scenario = dir.path().join("short.toml").display().to_string();
    std::fs::write(&scenario, SHORT).unwrap();
    for args in [
        &["sim", &scenario][..],
        &["run", "--host", "twin", "--fast", "--duration", "1s"],
    ] {
        std::fs::write(&path, &former).unwrap();
        text(&run(&[args, &["--trace", &trace]].concat()));
        let written = std::fs::read(&path).unwrap();
        let is_left = |part: &[u8]| part == b"former former ";
        assert!(
            !written.is_empty() && !written.windows(14).any(is_left),
            "{args:?}"
        );
    }
}
