//! The commands as a user runs them, and what the README promises about them.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::common;
use crate::common::{homenode, is_as_its_schema_says, run, stderr, stdout};

/// Returns the exit status and the message of a command that must fail.
fn refused(args: &[&str]) -> (i32, String) {
    common::refused(&run(args))
}

fn json(args: &[&str]) -> Value {
    common::json(&run(args))
}

/// Returns the last line of a run's output.
fn summary(output: &Output) -> Value {
    assert!(output.status.success(), "{}", stderr(output));
    serde_json::from_str(stdout(output).lines().last().expect("some output")).expect("a JSON line")
}

#[test]
fn a_run_on_the_twin_ends_with_four_policies_and_is_the_same_every_time() {
    let args = ["run", "--host", "twin", "--fast", "--duration", "5s", "--json"];
    let first = run(&args);
    let summary = summary(&first);
    let policies: Vec<&str> = summary["policies"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["policy"].as_str().unwrap())
        .collect();
    assert_eq!(policies, ["default", "ff-pin", "numad", "homenode"]);
    for policy in summary["policies"].as_array().unwrap() {
        let vms = policy["vms"].as_array().unwrap();
        assert!(vms.len() >= 4, "{policy}");
        assert!(
            vms.iter()
                .all(|vm| vm["runtime_s"].as_f64().is_some_and(|s| s > 1.0)),
            "{policy}"
        );
    }
    let said = |line: &str| {
        let object: Value = serde_json::from_str(line).unwrap();
        common::is_as_its_schema_says(&object);
        object["type"].to_string()
    };
    let kinds: Vec<String> = stdout(&first).lines().map(said).collect();
    assert_eq!((kinds[0].as_str(), kinds[1].as_str()), ("\"start\"", "\"cycle\""));
    assert_eq!(stdout(&first), stdout(&run(&args)), "same seed, same bytes");
}

#[test]
fn with_json_a_complaint_is_a_document_too() {
    let complaint = |args: &[&str]| {
        let output = run(args);
        let object: Value = serde_json::from_str(&stderr(&output)).unwrap();
        common::is_as_its_schema_says(&object);
        assert_eq!(object["exit_status"], output.status.code().unwrap());
        assert_eq!(stdout(&output), "");
        (
            object["kind"].as_str().unwrap().to_owned(),
            object["message"].to_string(),
        )
    };
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().display().to_string();
    for (args, kind, said) in [
        (&["sim", "--json"][..], "usage", "SCENARIO"),
        (&["sim", "nope.toml", "--json"], "bad-input", "nope.toml"),
        (
            &["vm", "--json", "--state", &state],
            "failed",
            "no agent runs here",
        ),
    ] {
        let (found, message) = complaint(args);
        assert_eq!(found, kind, "{args:?}");
        assert!(message.contains(said), "{args:?}: {message}");
    }
}

#[test]
fn ctrl_c_ends_with_the_summary() {
    let mut child = homenode()
        .args(["run", "--host", "twin", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program can be started");
    std::thread::sleep(std::time::Duration::from_millis(1500));
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let mut text = String::new();
    std::io::Read::read_to_string(child.stdout.as_mut().unwrap(), &mut text).unwrap();
    assert!(child.wait().unwrap().success());
    let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(last["type"], "summary");
}

#[test]
fn a_dry_run_decides_and_touches_nothing() {
    let output = run(&[
        "run",
        "--host",
        "twin",
        "--fast",
        "--duration",
        "2min",
        "--policies",
        "tavo",
        "--json",
        "--dry-run",
    ]);
    let mut decided = 0;
    for line in stdout(&output).lines() {
        let object: Value = serde_json::from_str(line).unwrap();
        for event in object["events"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|e| e["event"] == "decided")
        {
            assert_eq!(event["result"]["outcome"], "dry-run", "{event}");
            decided += 1;
        }
    }
    assert!(decided > 0);
}

/// A scenario of two short programs on two nodes, with an event.
const SHORT: &str = "\
name = \"short\"
machine = \"r420\"
duration = \"40s\"
warm_up = \"2s\"
policies = [\"default\", \"homenode\"]
[[vm]]
name = \"a\"
vcpus = 2
memory = \"4GiB\"
workload = \"soplex\"
work_share = 0.01
[[vm]]
name = \"b\"
vcpus = 2
memory = \"4GiB\"
workload = \"lu.B\"
work_share = 0.05
[[event]]
at = \"5s\"
vm = \"b\"
action.migrate = { nodes = \"0\" }
";

#[test]
fn a_run_is_compared_under_its_policies_and_one_that_carries_out_nothing_is_not() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("short.toml");
    std::fs::write(&path, SHORT).unwrap();
    let host = format!("twin:{}", path.display());
    let said = |args: &[&str]| {
        let base = ["run", "--host", &host, "--fast", "--duration", "10s"];
        stdout(&run(&[&base[..], args].concat()))
    };
    let last = said(&["--policies", "tavo", "--json"]);
    let summary: Value = serde_json::from_str(last.lines().last().unwrap()).unwrap();
    let policies: Vec<&str> = summary["policies"]
        .as_array()
        .unwrap()
        .iter()
        .map(|trial| trial["policy"].as_str().unwrap())
        .collect();
    assert_eq!(policies, ["default", "ff-pin", "numad", "tavo"]);
    for (args, mode) in [
        (&["--dry-run"][..], "observe"),
        (&["--mode", "recommend"], "recommend"),
    ] {
        let text = said(args);
        let last = text.lines().last().unwrap();
        let start = format!("In mode {mode} the agent carried out nothing");
        assert!(
            last.starts_with(&start) && last.contains("`homenode sim`"),
            "{text}"
        );
        assert!(!text.contains("The same VMs and seed"), "{text}");
    }
}

#[test]
fn a_simulation_is_the_same_every_time_and_names_every_option() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("short.toml");
    std::fs::write(&path, SHORT).unwrap();
    let path = path.display().to_string();
    let args = ["sim", &path, "--seed", "7", "--json"];
    let first = run(&args);
    assert_eq!(stderr(&first), "", "silent in a pipe");
    assert_eq!(stdout(&first), stdout(&run(&args)));
    let result = json(&args);
    assert_eq!(
        (&result["scenario"], &result["machine"]),
        (&"short".into(), &"r420".into())
    );
    assert_eq!(
        (&result["seed"], &result["warm_up_ns"]),
        (&7.into(), &2_000_000_000_u64.into())
    );
    let policies: Vec<&str> = result["policies"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["policy"].as_str().unwrap())
        .collect();
    assert_eq!(policies, ["default", "homenode"]);
    for policy in result["policies"].as_array().unwrap() {
        assert_eq!(policy["events"][0]["event"], "migrate", "{policy}");
        assert_eq!(policy["measured_from_ns"], 2_000_000_000_u64);
        let vms = policy["vms"].as_array().unwrap();
        assert!(
            vms.iter()
                .all(|vm| vm["runtime_s"].as_f64().is_some_and(|s| s > 0.5)),
            "{policy}"
        );
    }
    // A run of the same scenario with another machine, epoch and policy.
    let other = json(&[
        "sim",
        &path,
        "--machine",
        "r910",
        "--epoch",
        "2ms",
        "--policy",
        "ff-pin",
        "--json",
    ]);
    assert_eq!(
        (&other["machine"], &other["epoch_ns"]),
        (&"r910".into(), &2_000_000.into())
    );
    assert_eq!(other["policies"].as_array().unwrap().len(), 1);
    let text = stdout(&run(&["sim", &path]));
    for word in [
        "Under homenode",
        "LLC miss",
        "bandwidth",
        "migrate b: done",
        "Side by side",
    ] {
        assert!(text.contains(word), "no `{word}` in {text}");
    }
}

#[test]
fn a_disturbed_simulation_says_so_and_hidden_counters_change_nothing_without_an_agent() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("short.toml");
    std::fs::write(&path, SHORT).unwrap();
    let path = path.display().to_string();
    let sim = |more: &[&str]| json(&[&["sim", &path, "--policy", "default", "--json"][..], more].concat());
    let plain = sim(&[]);
    assert_eq!(plain.get("disturbance"), None);
    let told = sim(&["--disturb", "noise,no-bandwidth,no-llc-counters"]);
    assert_eq!(told["disturbance"]["noise"], 0.1);
    assert_eq!(told["policies"], plain["policies"]);
    let slower = sim(&["--disturb", "memory-waits"]);
    assert_ne!(slower["policies"], plain["policies"]);
    let text = stdout(&run(&[
        "sim",
        &path,
        "--policy",
        "default",
        "--disturb",
        "memory-waits",
    ]));
    assert!(text.contains("disturbed: memory waits times 2"), "{text}");
}

#[test]
fn a_bad_simulation_is_refused_with_its_line_or_the_nearest_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("bad.toml");
    let path_text = path.display().to_string();
    for (from, to, complaint) in [
        (
            "memory = \"4GiB\"",
            "memory = \"400GiB\"",
            "bad.toml:9:1: VM a has 400GiB",
        ),
        (
            "\"homenode\"",
            "\"homnode\"",
            "bad.toml:5:24: no policies are named `homnode`; did you mean `homenode`?",
        ),
        (
            "r420",
            "r402",
            "bad.toml:2:1: no machine preset `r402`; did you mean `r420`?",
        ),
        (
            "vm = \"b\"",
            "vm = \"c\"",
            "bad.toml:20:1: event at 5s: no VM is named `c`",
        ),
    ] {
        std::fs::write(&path, SHORT.replacen(from, to, 1)).unwrap();
        let (status, said) = refused(&["sim", &path_text]);
        assert_eq!(status, 2, "{said}");
        assert!(said.contains(complaint), "{said}");
    }
    for (args, complaint) in [
        (&["sim", "chrun"][..], "did you mean `churn`?"),
        (&["sim", "churn", "--policy", "none"], "`default`"),
        (&["sim", "churn", "--machine", "r901"], "did you mean `r910`?"),
        (&["sim", "churn", "--disturb", "nois"], "did you mean `noise`?"),
        (&["sim"], "SCENARIO"),
        (&["sim", "/nonexistent/x.toml"], "cannot be read"),
        (&["sim", "churn", "--epoch", "0s"], "out of range: 10us to 10ms"),
        (&["sim", "churn", "--epoch", "1ns"], "out of range"),
        (&["sim", "churn", "--epoch", "1h"], "out of range"),
    ] {
        let (status, said) = refused(args);
        assert_eq!((status, said.contains(complaint)), (2, true), "{said}");
    }
    let list = stdout(&run(&["sim", "--list"]));
    assert!(list.contains("tavo-mixed") && list.contains("churn"), "{list}");
}

#[test]
fn what_comes_with_the_program_is_listed() {
    let kinds = [
        ("machines", "epyc7763-nps4"),
        ("workloads", "povray"),
        ("scenarios", "tavo-mixed"),
        ("policies", "homenode"),
    ];
    for (kind, known) in kinds {
        assert!(stdout(&run(&["list", kind])).contains(known), "{kind}");
        let list = json(&["list", kind, "--json"]);
        is_as_its_schema_says(&list);
        let entries = list["entries"].as_array().unwrap();
        let has = |entry: &Value| entry["about"].as_str().is_some_and(|about| !about.is_empty());
        assert!(entries.len() > 4 && entries.iter().all(has), "{list}");
    }
    assert_eq!(
        run(&["list", "machine"]).stdout,
        run(&["list", "machines"]).stdout
    );
    assert_eq!(refused(&["list", "hosts"]).0, 2);
    let lists = json(&["list", "--json"]);
    is_as_its_schema_says(&lists);
    let names: Vec<&str> = lists["entries"]
        .as_array()
        .unwrap()
        .iter()
        .map(|list| list["name"].as_str().unwrap())
        .collect();
    assert_eq!(
        (names, &lists["what"]),
        (kinds.map(|(kind, _)| kind).to_vec(), &Value::Null)
    );
}

#[test]
fn a_machine_is_shown_by_its_name_and_a_wrong_name_is_told_the_nearest() {
    assert_eq!(
        run(&["machine", "r910"]).stdout,
        run(&["machine", "--preset", "r910"]).stdout
    );
    let (status, said) = refused(&["machine", "r911"]);
    assert!(status == 2 && said.contains("did you mean `r910`?"), "{said}");
    let (status, said) = refused(&["machine", "r911.toml"]);
    assert!(status == 2 && said.contains("there is no such file"), "{said}");
    let (status, said) = refused(&["man", "statsu"]);
    assert!(status == 2 && said.contains("did you mean `status`?"), "{said}");
}

#[test]
fn a_template_is_a_machine_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    for args in [
        &["machine", "--template"][..],
        &["machine", "--template", "--preset", "epyc7763-nps4"],
    ] {
        std::fs::write(&path, stdout(&run(args))).unwrap();
        let path = path.display().to_string();
        assert!(run(&["machine", &path]).status.success());
    }
    assert_eq!(refused(&["machine", "--template", "--preset", "r42"]).0, 2);
}

#[test]
fn place_says_nodes_and_reasons() {
    let answer = json(&[
        "place",
        "--host",
        "twin:r910",
        "--vcpus",
        "4",
        "--memory",
        "8GiB",
        "--json",
    ]);
    assert_eq!(answer["nodes"], serde_json::json!([0]));
    assert!(!answer["reasons"].as_array().unwrap().is_empty());
    // A node has four cores of two hyperthreads: twelve vCPUs get a core each on three nodes.
    let wide = json(&[
        "place",
        "--host",
        "twin:r910",
        "--vcpus",
        "12",
        "--memory",
        "8GiB",
        "--json",
    ]);
    assert_eq!(wide["nodes"], serde_json::json!([0, 1, 2]));
    let (status, complaint) = refused(&[
        "place",
        "--host",
        "twin:r910",
        "--vcpus",
        "4",
        "--memory",
        "900GiB",
    ]);
    assert_eq!(status, 1);
    assert!(
        complaint.contains("short of memory (16GiB left, 900GiB needed)"),
        "{complaint}"
    );
}

#[test]
fn machine_shows_presets_and_this_host() {
    let amd48 = json(&["machine", "--preset", "amd48", "--json"]);
    assert_eq!(amd48["nodes"].as_array().unwrap().len(), 8);
    assert_eq!(amd48["cpus"].as_array().unwrap().len(), 48);
    assert!(
        json(&["machine", "--json"])["nodes"]
            .as_array()
            .is_some_and(|nodes| !nodes.is_empty())
    );
    assert!(stdout(&run(&["machine", "--preset", "r910"])).contains("16GiB"));
}

#[test]
fn bad_input_exits_with_2_and_names_the_nearest_valid_word() {
    let (status, complaint) = refused(&["machine", "--preset", "amd84"]);
    assert_eq!(status, 2, "{complaint}");
    assert!(complaint.contains("amd48"), "{complaint}");

    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let config = file("homenode.toml", "[placement]\nlink_busy_mx = 0.4\n");
    let (status, complaint) = refused(&["run", "--host", "twin", "--config", &config]);
    assert_eq!(status, 2, "{complaint}");
    assert!(
        complaint.contains("link_busy_max") && complaint.contains("homenode.toml"),
        "{complaint}"
    );

    let config = file("range.toml", "[placement]\nlink_busy_max = 1.5\n");
    let (status, complaint) = refused(&["run", "--host", "twin", "--config", &config]);
    assert_eq!((status, complaint.contains("1.5")), (2, true), "{complaint}");

    let giant = "name = \"giant\"\nmachine = \"r910\"\n[[vm]]\nname = \"huge\"\nvcpus = 4\nmemory = \"128GiB\"\nworkload = \"cg.B\"\n";
    let scenario = file("giant.toml", giant);
    let (status, complaint) = refused(&["run", "--host", &format!("twin:{scenario}"), "--fast"]);
    assert_eq!(status, 2, "{complaint}");
    assert!(
        complaint.contains("huge") && complaint.contains("128GiB"),
        "{complaint}"
    );

    for args in [
        &["run", "--host", "vmware"][..],
        &["run", "--duration", "5"],
        &["place", "--vcpus", "0", "--memory", "1GiB"],
    ] {
        assert_eq!(refused(args).0, 2, "{args:?}");
    }
}

#[test]
fn without_libvirt_or_nodes_a_sentence_says_what_to_do() {
    let state = tempfile::tempdir().unwrap();
    let state = state.path().display().to_string();
    let uri = "libvirt:qemu+unix:///system?socket=/nonexistent/libvirt-sock";
    let (status, complaint) = refused(&["run", "--host", uri, "--state", &state]);
    assert_eq!(status, 1, "{complaint}");
    assert!(
        complaint.contains("libvirt") || complaint.contains("one NUMA node"),
        "{complaint}"
    );
    let (status, complaint) = refused(&["vm", "--state", &state]);
    assert_eq!(status, 1);
    assert!(complaint.contains("no agent runs here"), "{complaint}");
}

/// Runs the program under the name `numad`, with this state directory.
fn numad(state: &std::path::Path, args: &[&str]) -> Output {
    called("numad", state, args)
}

fn called(name: &str, state: &std::path::Path, args: &[&str]) -> Output {
    let link = state.join(name);
    if !link.exists() {
        std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_homenode"), &link).unwrap();
    }
    Command::new(link)
        .args(args)
        .env("HOMENODE_STATE", state)
        .output()
        .unwrap()
}

#[test]
fn numad_answers_every_request_that_can_be_read() {
    let state = tempfile::tempdir().unwrap();
    for request in ["2:1024", "2", "0.5:100", "0:0", "1000:1024", "2:999999999"] {
        let output = numad(state.path(), &["-w", request]);
        let nodes = stdout(&output);
        assert!(output.status.success(), "{request}: {}", stderr(&output));
        assert!(
            nodes
                .trim()
                .parse::<homenode_units::NodeSet>()
                .is_ok_and(|nodes| !nodes.is_empty()),
            "{request}: {nodes:?}"
        );
        assert!(nodes.ends_with('\n'));
    }
    for bad in ["abc", "2:abc", "-1:5"] {
        let output = numad(state.path(), &["-w", bad]);
        assert_eq!(
            (output.status.code(), stdout(&output).as_str()),
            (Some(1), ""),
            "{bad}"
        );
        assert!(stderr(&output).contains("Can't parse"), "{bad}");
    }
}

/// SUSE's replacement for numad has another name, and gets the size of huge pages as an argument.
#[test]
fn numa_preplace_is_answered_as_numad_is() {
    let state = tempfile::tempdir().unwrap();
    for args in [
        &["-w", "1:64"][..],
        &["-w", "1:64", "-H", "2048"],
        &["-H", "1048576", "-w1:64"],
    ] {
        let output = called("numa-preplace", state.path(), args);
        let nodes = stdout(&output);
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        assert!(
            nodes.trim().parse::<homenode_units::NodeSet>().is_ok(),
            "{args:?}: {nodes}"
        );
    }
    assert_eq!(
        called("numa-preplace", state.path(), &["-w", "1:64", "-H"])
            .status
            .code(),
        Some(1)
    );
}

#[test]
fn a_hook_never_keeps_a_vm_from_starting() {
    let state = tempfile::tempdir().unwrap();
    let hook = |args: &[&str], xml: &[u8]| {
        let mut child = homenode()
            .args(["hook", "guest"])
            .args(args)
            .arg("--state")
            .arg(state.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let _ = child.stdin.take().unwrap().write_all(xml);
        child.wait_with_output().unwrap().status.code()
    };
    let domain = "<domain type='kvm'><name>guest</name><uuid>01234567-89ab-cdef-0011-223344556677</uuid>\
        <memory unit='KiB'>131073</memory><vcpu placement='auto'>2</vcpu></domain>";
    assert_eq!(hook(&["prepare", "begin", "-"], domain.as_bytes()), Some(0));
    let ledger = std::fs::read_to_string(state.path().join("private/ledger.json")).unwrap();
    assert!(
        ledger.contains("01234567-89ab-cdef-0011-223344556677") && ledger.contains("129"),
        "{ledger}"
    );
    for xml in [
        &b""[..],
        b"<domain",
        b"\xff\xfe\x00",
        b"<domain><name>x</name></domain>",
    ] {
        assert_eq!(hook(&["prepare", "begin", "-"], xml), Some(0));
    }
    assert_eq!(hook(&["started", "begin", "-"], b""), Some(0));
}

#[test]
fn help_completions_and_manual_page_come_out() {
    assert!(stdout(&run(&["--help"])).contains("Examples:"));
    assert!(stdout(&run(&["completions", "bash"])).contains("homenode"));
    assert!(stdout(&run(&["man"])).contains(".TH"));
}

#[test]
fn what_is_no_log_of_pages_is_refused_and_told_why() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("guest.pages");
    let log = path.display().to_string();
    for (bytes, said) in [
        (&b"something else"[..], "not a log of pages"),
        (b"HNPAGLOG", "cut off within its header"),
        (
            b"HNPAGLOG\x07\0\0\0\x0d\x0c\x0b\x0a",
            "the log has version 7, but this program reads 2",
        ),
    ] {
        std::fs::write(&path, bytes).unwrap();
        let (status, text) = refused(&["wss", "--log", &log]);
        assert!(
            status == 2 && text.contains(said) && text.contains(&log),
            "{status} {text}"
        );
    }
    std::fs::remove_file(&path).unwrap();
    let (status, text) = refused(&["wss", "--log", &log]);
    assert!(status == 1 && text.contains("No such file"), "{status} {text}");
}
