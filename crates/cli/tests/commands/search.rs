//! `homenode search` as a user runs it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

const SCENARIO: &str = r#"
name = "two"
machine = "r420"
duration = "30s"

[[vm]]
name = "a"
vcpus = 4
memory = "3GiB"
workload = "sp.B"
work_share = 0.05

[[vm]]
name = "b"
vcpus = 4
memory = "3GiB"
workload = "milc"
work_share = 0.01
"#;

fn search(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_homenode"))
        .arg("search")
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("the program can be started")
}

fn text(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(output.stderr.is_empty(), "progress is for terminals");
    String::from_utf8(output.stdout.clone()).expect("output is text")
}

fn scenario(folder: &Path) -> PathBuf {
    let path = folder.join("two.toml");
    fs::write(&path, SCENARIO).unwrap();
    path
}

#[test]
fn the_best_known_is_found_said_and_kept() {
    let folder = tempfile::tempdir().unwrap();
    let path = scenario(folder.path()).display().to_string();
    let known = folder.path().join("known.toml").display().to_string();
    let args = [
        path.as_str(),
        "--evaluations",
        "24",
        "--jobs",
        "2",
        "--seed",
        "3",
        "--known",
        &known,
    ];
    let said = text(&search(&args));
    for part in [
        "two on r420, seed 3",
        "homenode",
        "best known, by ",
        "over best known",
        "decisions",
    ] {
        assert!(said.contains(part), "{part} is not in {said}");
    }
    let first = fs::read_to_string(&known).unwrap();
    assert!(first.contains("seed = 3"), "{first}");

    // A search with one job finds the same as one with two. A search that starts from the saved decisions finds nothing worse.
    let alone = text(&search(&[
        &path,
        "--evaluations",
        "24",
        "--jobs",
        "1",
        "--seed",
        "3",
        "--json",
    ]));
    let alone: Value = serde_json::from_str(&alone).unwrap();
    let best = &alone["best"];
    assert!(
        first.contains(&format!("found_by = {}", best["found_by"])),
        "{first} {best}"
    );
    let mean = best["mean"].as_f64().unwrap();
    for policy in alone["policies"].as_array().unwrap() {
        assert!(policy["mean"].as_f64().unwrap() >= mean, "{policy} {best}");
    }
    let again = search(&[
        &path,
        "--evaluations",
        "8",
        "--seed",
        "3",
        "--known",
        &known,
        "--json",
    ]);
    let again: Value = serde_json::from_str(&text(&again)).unwrap();
    assert!(again["best"]["mean"].as_f64().unwrap() <= mean + 1e-9, "{again}");
}

#[test]
fn a_search_whose_result_could_not_replace_the_known_file_does_not_begin() {
    let folder = tempfile::tempdir().unwrap();
    let path = scenario(folder.path()).display().to_string();
    let known = folder.path().join("known.toml");
    fs::create_dir(folder.path().join("known.toml.new")).unwrap();
    let output = search(&[&path, "--known", known.to_str().unwrap()]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(
        said.contains("known.toml.new, too: this path is a directory"),
        "{said}"
    );
    assert!(output.stdout.is_empty() && !known.exists());
}

#[test]
fn bad_input_exits_with_2_and_says_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let path = scenario(folder.path()).display().to_string();
    let bad = folder.path().join("bad.toml").display().to_string();
    fs::write(&bad, "case = \"three\"").unwrap();
    for (args, remedy) in [
        (vec!["chrun"], "did you mean `churn`?"),
        (vec![path.as_str(), "--evaluations", "0"], "8 evaluations or more"),
        (vec![&path, "--jobs", "0"], "--jobs"),
        (vec![&path, "--known", &bad], "is about case three, not two"),
        (vec!["xen48", "--machine", "r420"], "give the VM at most 24"),
    ] {
        let output = search(&args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(remedy), "{args:?}: {said}");
    }
}
