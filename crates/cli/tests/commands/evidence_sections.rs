//! The sections of `homenode evidence`, as a user begins, kills and continues them on this machine.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::{homenode, is_as_its_schema_says, json, refused, run, text};

/// Parts that take a second on any machine: one moves memory, or says that there is one node.
const QUICK: [&str; 6] = [
    "evidence",
    "--only",
    "balancing,moving",
    "--minutes",
    "1",
    "--beside-others",
];

fn section<'a>(report: &'a Value, topic: &str) -> &'a Value {
    let sections = report["sections"].as_array().unwrap();
    let found = sections.iter().find(|section| section["topic"] == topic);
    found.unwrap_or_else(|| panic!("no section {topic}: {report}"))
}

#[test]
fn a_section_is_measured_once_and_what_was_not_possible_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("host");
    let begin = || run(&[&QUICK[..], &["-o", to.to_str().unwrap(), "--json"]].concat());
    let first = json(&begin());
    is_as_its_schema_says(&first);
    let balancing = section(&first, "balancing").clone();
    let faults = &balancing["figures"][0];
    assert!(
        faults["low"].as_f64().unwrap() > 10.0 && faults["values"].as_array().unwrap().len() >= 6,
        "{faults}"
    );
    let moving = section(&first, "moving");
    let is_possible = moving["outcome"] == "measured";
    assert!(
        is_possible || moving["why"].as_str().unwrap().contains("one NUMA node"),
        "{moving}"
    );
    let again = json(&begin());
    assert_eq!(*section(&again, "balancing"), balancing, "it was measured again");
    for name in ["evidence.html", "evidence.json", "to-share.tar.gz"] {
        assert!(to.join(name).is_file(), "{name}");
    }
}

#[test]
fn a_part_that_does_not_exist_is_refused_and_all_are_listed() {
    let (status, said) = refused(&run(&["evidence", "--only", "contentoin", "-o", "x"]));
    assert!(
        status == 2 && said.contains("did you mean `contention`?"),
        "{status} {said}"
    );
    let list = text(&run(&["evidence", "--list"]));
    for part in ["machine", "kyoto", "working-set", "requests", "crossover"] {
        assert!(list.contains(part), "{list}");
    }
}

/// The processes that a process started, and those that they started.
fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let mut all: Vec<u32> = lists
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|word| word.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect();
    all.extend(all.clone().into_iter().flat_map(children));
    all
}

#[test]
fn whatever_kills_the_command_its_programs_end() {
    let folder = tempfile::tempdir().unwrap();
    let mut command = homenode();
    command.args([
        "evidence",
        "--only",
        "requests",
        "--minutes",
        "1",
        "--beside-others",
        "-o",
    ]);
    let mut child = command.arg(folder.path()).spawn().unwrap();
    let patient = Instant::now() + Duration::from_secs(60);
    let workers = loop {
        let workers = children(child.id());
        if !workers.is_empty() || child.try_wait().unwrap().is_some() {
            break workers;
        }
        assert!(Instant::now() < patient, "no worker started within a minute");
        std::thread::sleep(Duration::from_millis(20));
    };
    child.kill().unwrap();
    child.wait().unwrap();
    // On a host with one CPU there is no neighbour, and no worker.
    for pid in workers {
        let process = format!("/proc/{pid}");
        while Path::new(&process).exists() {
            assert!(Instant::now() < patient, "worker {pid} outlives the command");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}
