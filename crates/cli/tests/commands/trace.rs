//! Traces for Perfetto that cannot be written.

use crate::common::{run, stderr, stdout};

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
