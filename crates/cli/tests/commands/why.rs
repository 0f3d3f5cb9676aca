//! `homenode why`, as an operator uses it.

use tempfile::TempDir;

use crate::common::{json, refused, run, stdout};

/// A VM, a neighbour that begins to stream after a while, and a VM elsewhere that streams all the time.
const SCENARIO: &str = "\
name = \"polluted\"
machine = \"r910\"
duration = \"900s\"
[[vm]]
name = \"web\"
vcpus = 2
memory = \"4GiB\"
workload = \"omnetpp\"
cpus = \"0-1\"
memory_nodes = \"0\"
work_share = 1000.0
[[vm]]
name = \"loud\"
vcpus = 1
memory = \"2GiB\"
workload = \"lbm\"
cpus = \"4\"
memory_nodes = \"1\"
work_share = 1000.0
[[vm]]
name = \"batch\"
vcpus = 2
memory = \"4GiB\"
workload = \"lbm\"
cpus = \"2-3\"
memory_nodes = \"1\"
work_share = 1000.0
[[event]]
at = \"400s\"
vm = \"batch\"
action = \"start\"
";

/// Records this much of the scenario, and returns the history's path.
fn recorded(dir: &TempDir, duration: &str) -> String {
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (scenario, history) = (path("polluted.toml"), path(&format!("{duration}.sqlite")));
    std::fs::write(&scenario, SCENARIO).unwrap();
    let host = format!("twin:{scenario}");
    let ran = run(&[
        "run",
        "--host",
        &host,
        "--fast",
        "--dry-run",
        "--duration",
        duration,
        "--history",
        &history,
        "--json",
    ]);
    assert!(ran.status.success(), "{ran:?}");
    history
}

#[test]
fn the_vm_that_fills_the_cache_is_named_and_the_loud_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let history = recorded(&dir, "480s");
    let why = |args: &[&str]| run(&[&["why"], args, &["--history", &history]].concat());

    let told = json(&why(&["web", "--window", "80s", "--json"]));
    let first = &told["causes"][0];
    assert_eq!(first["code"], "llc-pollution", "{told}");
    assert_eq!(first["culprit"]["name"], "batch", "{told}");
    assert!(told["lost"].as_f64().unwrap() > 0.05, "{told}");
    assert_eq!(told["speed"]["measure"], "instructions-per-cpu-s", "{told}");
    let ratio = told["speed"]["ratio"].as_f64().unwrap();
    assert!(
        (ratio + told["lost"].as_f64().unwrap() - 1.0).abs() < 1e-9,
        "{told}"
    );
    let text = stdout(&why(&["web", "--window", "80s"]));
    assert!(text.contains("by VM batch"), "{text}");
    let first = text.lines().next().unwrap();
    let drop = format!("VM web ran at {:.0}% of its usual speed from ", 100.0 * ratio);
    assert!(
        first.starts_with(&drop) && first.ends_with("billion instructions per CPU-second)"),
        "{first}"
    );
    // The VM that streams all the time was slowed down, too, since both VMs have their memory on node 1.
    let told = json(&why(&["loud", "--window", "80s", "--json"]));
    let first = &told["causes"][0];
    assert_eq!(
        (&first["code"], &first["culprit"]["name"]),
        (&"controller".into(), &"batch".into())
    );

    for (args, says) in [
        (&["nosuch"][..], "no VM nosuch"),
        (&["web", "--at", "1999-01-01 03:12"], "recorded from"),
        (&["web", "--at", "2600-01-01 03:12"], "2600-01-01 03:12:00"),
        (&["web", "--window", "1s"], "10s"),
    ] {
        let (status, said) = refused(&why(args));
        assert!(status == 2 && said.contains(says), "{status}: {said}");
    }
}

#[test]
fn an_agent_that_has_just_started_answers_from_the_history_that_it_has() {
    let dir = tempfile::tempdir().unwrap();
    for (duration, begins, says) in [
        (
            "60s",
            "VM web had no drop of speed; it ran at ",
            "the history of the VM is ",
        ),
        ("4s", "VM web ran at ", "too few to tell"),
    ] {
        let history = recorded(&dir, duration);
        let text = stdout(&run(&["why", "web", "--history", &history]));
        assert!(text.starts_with(begins) && text.contains(says), "{text}");
        let told = json(&run(&["why", "web", "--history", &history, "--json"]));
        let covered = told["history_ns"].as_f64().unwrap() / 1e9;
        let seconds = duration.trim_end_matches('s').parse::<f64>().unwrap();
        assert!(
            (seconds - 2.0..=seconds).contains(&covered),
            "{covered} of {duration}"
        );
        assert_eq!(
            (&told["lost"], &told["causes"]),
            (&0.0.into(), &serde_json::json!([]))
        );
    }
}
