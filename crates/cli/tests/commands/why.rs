//! `homenode why`, as an operator uses it.

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

#[test]
fn the_vm_that_fills_the_cache_is_named_and_the_loud_one_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (scenario, history) = (path("polluted.toml"), path("history.sqlite"));
    std::fs::write(&scenario, SCENARIO).unwrap();
    let host = format!("twin:{scenario}");
    let ran = run(&[
        "run",
        "--host",
        &host,
        "--fast",
        "--dry-run",
        "--duration",
        "480s",
        "--history",
        &history,
        "--json",
    ]);
    assert!(ran.status.success(), "{ran:?}");
    let why = |args: &[&str]| run(&[&["why"], args, &["--history", &history]].concat());

    let told = json(&why(&["web", "--window", "80s", "--json"]));
    let first = &told["causes"][0];
    assert_eq!(first["code"], "llc-pollution", "{told}");
    assert_eq!(first["culprit"]["name"], "batch", "{told}");
    assert!(told["lost"].as_f64().unwrap() > 0.05, "{told}");
    let text = why(&["web", "--window", "80s"]);
    assert!(stdout(&text).contains("by VM batch"), "{}", stdout(&text));
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
