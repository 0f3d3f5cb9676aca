//! `homenode config`, and settings that a machine cannot have.

use std::path::PathBuf;

use crate::common;
use crate::common::{json, refused, run, text};

fn file(dir: &tempfile::TempDir, text: &str) -> PathBuf {
    let path = dir.path().join("homenode.toml");
    std::fs::write(&path, text).unwrap();
    path
}

#[test]
fn everything_that_is_wrong_with_a_file_is_said_with_its_place_and_the_status_is_2() {
    let dir = tempfile::tempdir().unwrap();
    let bad = "perod = \"2s\"\n[pace]\nslowdown_max = 7.0\n[placement]\nreserved_memory = 3\n[modes]\nbalnce = \"act\"\n";
    let bad = file(&dir, bad);
    let bad = bad.to_str().unwrap();
    let (status, said) = refused(&run(&["config", "check", bad]));
    let lines: Vec<&str> = said.lines().collect();
    let expected = [
        ("1:1", "did you mean `period`"),
        ("3:1", "must be from 0 to 1"),
        ("5:19", "reserved_memory"),
        ("6:1", "balance"),
    ];
    assert_eq!((status, lines.len()), (2, expected.len()), "{said}");
    for (line, (place, what)) in lines.iter().zip(expected) {
        let begin = format!("homenode: {bad}:{place}: ");
        assert!(line.starts_with(&begin) && line.contains(what), "{place}: {line}");
    }
}

#[test]
fn a_check_answers_in_json_and_config_alone_shows_the_settings() {
    let dir = tempfile::tempdir().unwrap();
    let bad = file(&dir, "perod = \"2s\"\n");
    let checked = run(&["config", "check", bad.to_str().unwrap(), "--json"]);
    assert_eq!(checked.status.code(), Some(2));
    let checked: serde_json::Value = serde_json::from_slice(&checked.stdout).unwrap();
    common::is_as_its_schema_says(&checked);
    let error = checked["errors"][0].as_str().unwrap();
    assert!(error.contains(":1:1: ") && error.contains("`period`"), "{error}");
    let good = file(&dir, "period = \"2s\"\n");
    let checked = json(&run(&["config", "check", good.to_str().unwrap(), "--json"]));
    assert_eq!(checked["errors"], serde_json::json!([]));
    assert_eq!(run(&["config"]).stdout, run(&["config", "show"]).stdout);
    common::is_as_its_schema_says(&json(&run(&["config", "--json"])));
}

#[test]
fn a_file_in_order_is_said_to_be_and_one_that_is_not_there_is_bad_input() {
    let dir = tempfile::tempdir().unwrap();
    let good = file(&dir, "period = \"2s\"\n");
    let said = text(&run(&["config", "check", good.to_str().unwrap()]));
    assert!(said.contains("nothing is wrong"), "{said}");
    let (status, said) = refused(&run(&["config", "check", "/does/not/exist.toml"]));
    assert!(status == 2 && said.contains("there is no such file"), "{said}");
}

#[test]
fn what_is_shown_is_a_file_with_the_same_settings() {
    let dir = tempfile::tempdir().unwrap();
    let own = file(&dir, "period = \"2s\"\n[placement]\nreserved_cpus = [0]\n");
    let show = |args: &[&str]| run(&[&["config", "show"], args].concat());
    let shown = text(&show(&[own.to_str().unwrap()]));
    let again = file(&dir, &shown);
    assert_eq!(text(&show(&[again.to_str().unwrap()])), shown);
    let all = json(&show(&[again.to_str().unwrap(), "--json"]));
    common::is_as_its_schema_says(&all);
    assert_eq!(
        (&all["config"]["period"], &all["config"]["mode"]),
        (&"2s".into(), &"recommend".into()),
        "a real host recommends unless its settings name another mode"
    );
    let acting = file(&dir, "mode = \"act\"\n");
    assert!(text(&show(&[acting.to_str().unwrap()])).contains("mode = \"act\""));
    let defaults = json(&show(&["--defaults", "--json"]));
    assert_eq!(
        (&defaults["config"]["period"], &defaults["file"]),
        (&"1s".into(), &().into())
    );
}

#[test]
fn reserved_cpus_that_a_machine_does_not_have_are_refused_and_those_that_it_has_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let own = file(&dir, "[placement]\nreserved_cpus = [1, 99]\n");
    let own = own.to_str().unwrap();
    let on_the_twin = [
        "run",
        "--host",
        "twin:r910",
        "--fast",
        "--duration",
        "1s",
        "--config",
        own,
    ];
    let simulated = ["sim", "churn", "--machine", "r910", "--config", own];
    for command in [&on_the_twin[..], &simulated] {
        let (status, said) = refused(&run(command));
        let place = format!("{own}:2:1: setting `placement.reserved_cpus` is 1,99, but r910 has no CPU 99");
        assert!(
            status == 2 && said.contains(&place) && said.contains("online are 0-"),
            "{said}"
        );
    }
    // The file names a CPU that this machine does not have either.
    let own = file(&dir, "[placement]\nreserved_cpus = [999]\n");
    let (status, said) = refused(&run(&["config", "check", own.to_str().unwrap()]));
    assert!(status == 2 && said.contains("has no CPU 999"), "{said}");
}

#[test]
fn a_simulation_goes_by_the_settings_that_it_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let own = file(&dir, "period = \"2s\"\n");
    let simulated = json(&run(&[
        "sim",
        "churn",
        "--json",
        "--config",
        own.to_str().unwrap(),
    ]));
    assert_eq!(simulated["period_ns"], 2_000_000_000_u64);
}
