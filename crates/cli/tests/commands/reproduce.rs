//! `homenode reproduce` as a user runs it. The experiments themselves take minutes: `cargo xtask reproduction` runs them.

use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn reproduce(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_homenode"));
    command.arg("reproduce").args(args).stdin(Stdio::null());
    command.output().expect("the program can be started")
}

fn claims(output: &Output) -> Vec<Value> {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let mut value: Value = serde_json::from_slice(&output.stdout).expect("one JSON value");
    match value["claims"].take() {
        Value::Array(claims) => claims,
        other => panic!("{other}"),
    }
}

#[test]
fn a_claim_that_the_twin_cannot_decide_is_listed_with_the_reason() {
    let directory = tempfile::tempdir().unwrap();
    let cache = directory.path().to_str().unwrap();
    let output = reproduce(&["policies.iommu", "--json", "--cache", cache]);
    assert_eq!(output.stderr, b"", "silent in a pipe");
    let claims = claims(&output);
    assert_eq!(claims.len(), 1);
    let claim = &claims[0];
    assert_eq!(claim["verdict"], "not-modelled", "{claim}");
    assert!(claim["id"].is_string() && claim["kind"].is_string() && claim["ours"].is_null());
    assert!(claim["published"].is_object() && claim["reason"].is_string());
}

#[test]
fn a_decided_claim_is_the_same_at_any_number_of_jobs_and_from_the_cache() {
    let directory = tempfile::tempdir().unwrap();
    let cache = directory.path().join("cache");
    let figures = directory.path().join("figures");
    let (cache, figures) = (cache.to_str().unwrap(), figures.to_str().unwrap());
    let fresh = reproduce(&["policies.latencies", "--json", "--fresh", "--jobs", "3"]);
    let kept = reproduce(&["policies.latencies", "--json", "--cache", cache, "--jobs", "1"]);
    let from_cache = reproduce(&[
        "policies.latencies",
        "--json",
        "--cache",
        cache,
        "--figures",
        figures,
    ]);
    assert_eq!(fresh.stdout, kept.stdout);
    assert_eq!(fresh.stdout, from_cache.stdout);
    let claim = &claims(&fresh)[0];
    assert_eq!(claim["kind"], "calibrated", "some of its values are inputs");
    let local = claim["ours"]["local"].as_f64().unwrap();
    assert!(
        (local - 156.0).abs() < 0.05 * 156.0,
        "an input comes back: {local}"
    );
    let svg = std::fs::read_to_string(std::path::Path::new(figures).join("policies-latencies.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("published"));
    // A corrupt cache is skipped, with a notice.
    for file in std::fs::read_dir(cache).unwrap() {
        std::fs::write(file.unwrap().path(), "nonsense").unwrap();
    }
    let after = reproduce(&["policies.latencies", "--json", "--cache", cache]);
    assert_eq!(fresh.stdout, after.stdout);
    assert!(String::from_utf8_lossy(&after.stderr).contains("is not a finished run"));
}

#[test]
fn a_selection_of_nothing_leaves_no_directory_for_figures() {
    let directory = tempfile::tempdir().unwrap();
    let figures = directory.path().join("figures");
    let output = reproduce(&["tavo.ncb", "--figures", figures.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(!figures.exists());
    let output = reproduce(&["tavo.ncb", "--figures", "/dev/null/figures"]);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(complaint.contains("/dev/null is not a directory"), "{complaint}");
}

#[test]
fn bad_input_exits_with_2() {
    for (args, word) in [
        (&["tavo.ncb"][..], "did you mean `tavo.npb`?"),
        (&["tavo", "--document", "x.md"], "select `all`"),
        (&["tavo", "--jobs", "0"], "1..=1024"),
    ] {
        let output = reproduce(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let complaint = String::from_utf8_lossy(&output.stderr);
        assert!(complaint.contains(word), "{complaint}");
    }
}
