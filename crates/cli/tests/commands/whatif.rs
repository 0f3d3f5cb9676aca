//! `homenode whatif` and `homenode report`, on a running agent and on a scenario.

use serde_json::Value;

use crate::common::{Agent, json, refused, run, text};

/// Eight VMs that fill a host of four nodes for hours, so that homes pay off with any seed. One VM has an odd name.
fn crowded() -> String {
    // With the kernel's NUMA balancing, the agent would make no trial here.
    let mut text =
        "name = \"crowded\"\nmachine = \"r910\"\nnuma_balancing = false\nduration = \"36000s\"\n".to_owned();
    for (name, workload) in [
        ("sp0", "sp.B"),
        ("lu0", "lu.B"),
        ("sp1", "sp.B"),
        ("lu1", "lu.B"),
        ("sp2", "sp.B"),
        ("lu2", "lu.B"),
        ("sp3", "sp.B"),
        ("a=b:é", "lu.B"),
    ] {
        text += &format!(
            "[[vm]]\nname = \"{name}\"\nvcpus = 4\nmemory = \"4GiB\"\nworkload = \"{workload}\"\nwork_share = 1000.0\n"
        );
    }
    text
}

fn of<'a>(answer: &'a Value, vm: &str) -> &'a Value {
    let all = answer["vms"].as_array().expect("VMs");
    all.iter()
        .find(|found| found["name"] == vm)
        .expect("a VM of the scenario")
}

#[test]
fn a_running_agent_says_what_would_be_and_what_its_changes_gained() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), &crowded(), &["--fast"]);
    let report = agent.eventually("a trial is judged", || {
        let report = json(&agent.ask(&["report", "--json"]));
        (report["total"]["trials_count"] != 0).then_some(report)
    });
    let trial = &report["trials"][0];
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{report}"));
    assert!(
        number(&trial["predicted"]) > 0.5 && number(&trial["seen"]) > 0.1,
        "{trial}"
    );
    assert!(
        trial["undone"].is_boolean() && trial["age_ns"].is_u64(),
        "{trial}"
    );
    let vm = of(&report, trial["name"].as_str().expect("a name"));
    assert!(
        number(&vm["trials_count"]) >= 1.0 && number(&vm["gain"]) > 0.1,
        "{vm}"
    );
    assert_eq!(vm["is_gone"], false);
    let table = text(&agent.ask(&["report", "--since", "1h"]));
    for said in ["predicted", "seen", "ago", "gain", " VMs "] {
        assert!(table.contains(said), "{said} not in {table}");
    }
    assert!(text(&agent.ask(&["report", "--since", "0s"])).contains("no change was judged within 0s"));

    let now = json(&agent.ask(&["whatif", "--json"]));
    for vm in now["vms"].as_array().expect("VMs") {
        assert_eq!(
            (&vm["home"], &vm["slow_down"]),
            (&vm["home_then"], &vm["slow_down_then"])
        );
        assert!(number(&vm["slow_down"]) > 0.2, "{vm}");
    }
    assert!(
        number(&now["error_median"]) >= 0.0 && number(&now["trials_count"]) >= 1.0,
        "{now}"
    );
    // All streaming VMs on one node, which has a quarter of the host's bandwidth.
    let asked = json(&agent.ask(&["whatif", "sp0=3 sp1=3 sp2=3 sp3=3 a=b:é=0-2 lu0=none", "--json"]));
    for name in ["sp0", "sp1", "sp2", "sp3"] {
        let vm = of(&asked, name);
        assert_eq!(vm["home_then"], serde_json::json!([3]));
        assert!(number(&vm["slow_down_then"]) > 1.1, "{vm}");
    }
    assert_eq!(of(&asked, "a=b:é")["home_then"], serde_json::json!([0, 1, 2]));
    assert_eq!(of(&asked, "lu0")["home_then"], Value::Null);
    let unasked = of(&asked, "lu1");
    assert_eq!(unasked["home_then"], unasked["home"]);
    let table = text(&agent.ask(&["whatif", "a=b:é=0-2"]));
    for said in [
        "home then",
        "a=b:é",
        "0-2",
        "relative to running without an agent",
        "prediction error",
    ] {
        assert!(table.contains(said), "{said} not in {table}");
    }
    for (args, status, said) in [
        (&["whatif", "sp0"][..], 2, "`sp0` names no home; write `VM=0`"),
        (&["whatif", "sp0=x"], 2, "`x` in `sp0=x` is not a home"),
        (&["whatif", "sp0=0 sp0=1"], 2, "VM sp0 is named twice"),
        (
            &["whatif", "absent=0"],
            2,
            "no VM `absent` runs here; there are: a=b:é, lu0, lu1",
        ),
        (
            &["whatif", "sp0=0,4"],
            2,
            "node 4 cannot be a home on this host; these can: 0-3",
        ),
        (&["whatif", "sp0=0", "--at", "20s"], 2, "cannot be used with"),
        (&["report", "--since", "yesterday"], 2, "a duration such as"),
    ] {
        let (code, complaint) = refused(&agent.ask(args));
        assert!(
            code == status && complaint.contains(said),
            "{args:?}: {code} {complaint}"
        );
    }
}

#[test]
fn an_agent_that_predicts_or_tries_nothing_says_so() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), &crowded(), &["--policies", "tavo"]);
    for (args, said) in [
        (
            &["whatif", "sp0=0"][..],
            "make no predictions; run it with --policies homenode",
        ),
        (
            &["report"],
            "nothing to report: the policies of this agent run no trials",
        ),
    ] {
        let (code, complaint) = refused(&agent.ask(args));
        assert!(
            code == 1 && complaint.contains(said),
            "{args:?}: {code} {complaint}"
        );
    }
    let state = agent.dir.path().join("nowhere").display().to_string();
    for command in ["whatif", "report"] {
        let (code, complaint) = refused(&run(&[command, "--state", &state]));
        assert!(
            code == 1 && complaint.contains("no agent runs here"),
            "{complaint}"
        );
    }
}

#[test]
fn a_scenario_is_asked_at_a_time_and_answers_the_same_every_time() {
    let ask = |args: &[&str]| run(&[&["whatif", "--scenario", "tavo-mixed"], args].concat());
    let first = ask(&["cg=1 lu=none", "--json"]);
    let answer = json(&first);
    let simulated = &answer["simulated"];
    assert_eq!(
        (&simulated["scenario"], &simulated["machine"], &simulated["seed"]),
        (&"tavo-mixed".into(), &"r910".into(), &1.into())
    );
    assert!(
        answer["at_ns"].as_u64().is_some_and(|at| at >= 15_000_000_000),
        "{answer}"
    );
    assert!(of(&answer, "cg")["slow_down_then"].is_f64(), "{answer}");
    assert_eq!(
        text(&first),
        text(&ask(&["cg=1 lu=free", "--json"])),
        "same seed, same bytes"
    );
    let table = text(&ask(&["--seed", "2", "--at", "2s"]));
    for said in [
        "tavo-mixed on r910, seed 2, at 2s",
        "not known yet",
        "no trial yet",
    ] {
        assert!(table.contains(said), "{said} not in {table}");
    }
    for (args, status, said) in [
        (
            &["cg=0", "--at", "2s"][..],
            1,
            "VM cg is not known yet: it was at work in",
        ),
        (&["cg=0", "--at", "401s"], 2, "lasts only 400s"),
        (
            &["cg=0", "--at", "400s"],
            2,
            "all programs of scenario tavo-mixed ended by",
        ),
        (&["cg=7"], 2, "node 7 cannot be a home"),
        (&["cg=0", "--state", "here"], 2, "cannot be used with"),
    ] {
        let (code, complaint) = refused(&ask(args));
        assert!(
            code == status && complaint.contains(said),
            "{args:?}: {code} {complaint}"
        );
    }
    let (code, complaint) = refused(&run(&["whatif", "--scenario", "chrun"]));
    assert!(
        code == 2 && complaint.contains("did you mean `churn`?"),
        "{complaint}"
    );
}

#[test]
fn a_vm_that_fits_nowhere_gets_the_best_possible_place_with_its_price() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), &crowded(), &["--fast"]);
    let place = |args: &[&str]| agent.ask(&[&["place", "--vcpus", "64", "--memory", "8GiB"], args].concat());
    let answer = agent.eventually("neighbours are at work", || {
        let output = place(&["--json"]);
        let answer: Value = serde_json::from_slice(&output.stdout).ok()?;
        let slowed = answer["crowded"]["slowed"].as_array()?.len();
        (slowed > 0).then_some((output, answer))
    });
    let (output, answer) = answer;
    crate::common::is_as_its_schema_says(&answer);
    let (status, complaint) = refused(&output);
    assert!(status == 1 && complaint.contains("fits nowhere"), "{complaint}");
    assert_eq!(answer["nodes"], Value::Null);
    let home = &answer["crowded"];
    let speeds: Vec<f64> = home["slowed"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["speed"].as_f64().unwrap())
        .collect();
    assert!(
        speeds.is_sorted() && speeds.iter().all(|speed| *speed > 0.0 && *speed < 0.99),
        "{home}"
    );
    assert!(
        home["own_speed"]
            .as_f64()
            .is_some_and(|own| own > 0.0 && own < 1.0),
        "{home}"
    );
    assert_eq!(home["shortages"][0]["resource"], "CPU", "{home}");
    let said = String::from_utf8(place(&[]).stdout).unwrap();
    for part in [
        "the best possible place is node",
        "short of CPU",
        "of its speed alone",
        "other VMs slow down",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    // No place has room for the VM's memory.
    let output = agent.ask(&["place", "--vcpus", "1", "--memory", "4TiB"]);
    assert!(output.stdout.is_empty() && refused(&output).1.contains("short of memory"));
}
