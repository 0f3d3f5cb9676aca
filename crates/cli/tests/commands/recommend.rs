//! Modes, recommendations and reservations, as a user sees them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Output, Stdio};

use serde_json::{Value, json};

use crate::common::http::Site;
use crate::common::{Agent, homenode, is_as_its_schema_says, json, refused, run, stderr, text};

/// Two VMs that work for hours.
const SCENARIO: &str = "\
name = \"two\"
machine = \"r420\"
duration = \"36000s\"
[[vm]]
name = \"web\"
vcpus = 2
memory = \"2GiB\"
workload = \"povray\"
work_share = 1000.0
[[vm]]
name = \"db\"
vcpus = 2
memory = \"2GiB\"
workload = \"povray\"
work_share = 1000.0
";

/// Policies that assign homes to VMs as they arrive.
const RECOMMENDING: [&str; 6] = ["--mode", "recommend", "--policies", "tavo", "--period", "100ms"];

fn open(document: &Value) -> Option<Vec<Value>> {
    let all = document["recommendations"].as_array().expect("a list").clone();
    let open: Vec<Value> = all.into_iter().filter(|one| one["state"] == "open").collect();
    (open.len() == 2).then_some(open)
}

fn of<'a>(all: &'a [Value], vm: &str) -> &'a Value {
    all.iter().find(|one| one["vm"] == vm).expect("one of this VM")
}

/// Sends a request to the agent's socket and returns the answer.
fn asked(state: &Path, request: &Value) -> Value {
    let mut socket = UnixStream::connect(state.join("agent.sock")).unwrap();
    writeln!(socket, "{request}").unwrap();
    let mut line = String::new();
    BufReader::new(socket).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

#[test]
fn what_is_recommended_waits_is_applied_and_rejected() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), SCENARIO, &RECOMMENDING);
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    let both = agent.eventually("both VMs are recommended a home", || open(&ask(&["recommend"])));
    is_as_its_schema_says(&ask(&["recommend"]));
    let status = ask(&["status"]);
    is_as_its_schema_says(&status);
    assert_eq!(status["modes"][0]["what"], "recommends for");
    assert_eq!(status["waiting"].as_array().unwrap().len(), 2, "{status}");
    assert_eq!(status["in_force"], json!([]));
    assert!(text(&agent.ask(&["status"])).lines().count() <= 10);
    let (web, db) = (of(&both, "web"), of(&both, "db"));
    assert_eq!(
        (&web["policy"], &web["action"]["action"]),
        (&json!("placement"), &json!("set-home"))
    );
    assert!(
        web["text"]
            .as_str()
            .unwrap()
            .starts_with("give VM web a home on node"),
        "{web}"
    );
    assert!(
        web["gain"].is_null() && web["expires"].as_str() > web["time"].as_str(),
        "{web}"
    );
    assert!(ask(&["vm", "web"])["vms"][0]["home"].is_null());
    let table = text(&agent.ask(&["recommend"]));
    assert!(
        table.contains("give VM web a home") && table.contains("placement"),
        "{table}"
    );
    let (id, other) = (web["id"].to_string(), db["id"].to_string());
    for verb in ["apply", "reject"] {
        let (status, said) = refused(&agent.ask(&["recommend", verb, "99"]));
        assert!(
            status == 2 && said.contains("no open recommendation 99; there are: "),
            "{status} {said}"
        );
        for bad in ["-1", "seven", "1.5", "18446744073709551616"] {
            assert_eq!(refused(&agent.ask(&["recommend", verb, "--", bad])).0, 2, "{bad}");
        }
    }
    let applied = ask(&["recommend", "apply", &id]);
    is_as_its_schema_says(&applied);
    assert_eq!(applied["recommendations"][0]["state"], "approved");
    let home = agent.eventually("the home is given", || {
        let vm = ask(&["vm", "web"])["vms"][0].clone();
        (!vm["home"].is_null()).then_some(vm["home"].clone())
    });
    assert_eq!(home, web["action"]["nodes"]);
    let home_changes = |vm: &str| ask(&["vm", vm])["vms"][0]["migrations"]["home_changes_count"].clone();
    assert_eq!((home_changes("web"), home_changes("db")), (json!(1), json!(0)));
    let status = ask(&["status"]);
    assert_eq!(status["in_force"], json!([{"what": "a home", "vms": ["web"]}]));
    assert_eq!(status["last"]["vm"], "web", "{status}");
    let (status, said) = refused(&agent.ask(&["recommend", "apply", &id]));
    assert!(status == 1 && said.contains("already applied"), "{status} {said}");
    assert!(text(&agent.ask(&["recommend", "reject", &other])).contains("is rejected: give VM db"));
    assert!(
        ask(&["recommend"])["recommendations"]
            .as_array()
            .unwrap()
            .is_empty()
    );
    assert_eq!(text(&agent.ask(&["recommend"])), "no recommendations\n");
    let all = ask(&["recommend", "--all"])["recommendations"].clone();
    let states: Vec<&Value> = all.as_array().unwrap().iter().map(|one| &one["state"]).collect();
    assert!(
        states.contains(&&json!("applied")) && states.contains(&&json!("rejected")),
        "{states:?}"
    );
    assert!(ask(&["vm", "db"])["vms"][0]["home"].is_null());
}

#[test]
fn a_mode_of_a_vm_is_set_shown_and_taken_back() {
    let agent = Agent::on(
        tempfile::tempdir().unwrap(),
        SCENARIO,
        &["--policies", "tavo", "--period", "100ms"],
    );
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    let has_home = || !ask(&["vm", "web"])["vms"][0]["home"].is_null();
    // The first sample may be before the VM's arrival.
    agent.eventually("web runs", || {
        agent.ask(&["vm", "web"]).status.success().then_some(())
    });
    agent.eventually("web has a home", || has_home().then_some(()));
    let set = ask(&["mode", "web", "observe"]);
    is_as_its_schema_says(&set);
    assert_eq!(
        (&set["vm"], &set["mode"], &set["note"]),
        (&json!("web"), &json!("observe"), &Value::Null)
    );
    agent.eventually("web is released", || (!has_home()).then_some(()));
    let shown = ask(&["mode", "web"])["vms"][0].clone();
    assert_eq!(
        (&shown["mode"], &shown["mode_chosen"]),
        (&json!("observe"), &json!("observe"))
    );
    let table = text(&agent.ask(&["mode"]));
    assert!(table.contains("observe") && table.contains("act"), "{table}");
    assert!(text(&agent.ask(&["mode", "web", "recommend"])).contains("web has mode recommend"));
    agent.eventually("a home is recommended", || {
        let all = ask(&["recommend"])["recommendations"].as_array().unwrap().clone();
        all.iter().any(|one| one["vm"] == "web").then_some(())
    });
    assert!(text(&agent.ask(&["mode", "web", "none"])).contains("of the run"));
    agent.eventually("web has a home again", || has_home().then_some(()));
    for (args, said) in [
        (
            &["web", "careful"][..],
            "`careful` is not a mode; use observe, recommend or act",
        ),
        (&["absent", "observe"], "there are: db, web"),
        (&["absent"], "there are: "),
    ] {
        let (status, text) = refused(&agent.ask(&[&["mode"], args].concat()));
        assert!(status == 2 && text.contains(said), "{args:?}: {status} {text}");
    }
}

#[test]
fn reservations_are_shown_and_dropped_and_what_they_held_is_free_at_once() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), SCENARIO, &["--period", "100ms"]);
    let state = agent.dir.path().join("state");
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    agent.eventually("the host was looked at", || {
        (ask(&["vm"])["vms"].as_array()?.len() == 2).then_some(())
    });
    assert_eq!(text(&agent.ask(&["reservations"])), "nothing is reserved\n");
    let shape = json!({"vcpus": 4, "memory_mib": 1024});
    let announced = json!({
        "request": "announce", "vm": "00000000-0000-0000-0000-000000000007", "name": "to come", "shape": shape,
        "bandwidth": null, "home": null,
    });
    assert!(
        asked(&state, &announced)["answer"].is_object(),
        "{}",
        asked(&state, &announced)
    );
    let place = || {
        agent
            .ask(&["place", "--vcpus", "4", "--memory", "1GiB"])
            .status
            .success()
    };
    assert!(place());
    for _ in 0..21 {
        asked(
            &state,
            &json!({"request": "reserve", "vcpus": 4, "memory_mib": 1024}),
        );
    }
    assert!(!place(), "an almost empty host is short of CPU");
    let shown = ask(&["reservations"]);
    is_as_its_schema_says(&shown);
    let reservations = shown["reservations"].as_array().unwrap();
    assert!(reservations.len() > 2, "{shown}");
    assert_eq!(
        (&reservations[0]["vm"], &reservations[1]["vm"]),
        (&json!("to come"), &Value::Null)
    );
    assert_eq!(
        (&reservations[0]["vcpus"], &reservations[0]["memory_bytes"]),
        (&json!(4), &json!(1_u64 << 30))
    );
    assert!(text(&agent.ask(&["reservations"])).contains("to come"));
    // The name of `reservations` up to version 0.2.0.
    assert!(text(&agent.ask(&["promises"])).contains("to come"));
    let ids: Vec<String> = reservations
        .iter()
        .map(|reservation| reservation["id"].to_string())
        .collect();
    let (status, said) = refused(&agent.ask(&["reservations", "drop", "99"]));
    assert!(
        status == 2 && said.contains("no open reservation 99; there are: 1, 2"),
        "{status} {said}"
    );
    let mut args = vec!["reservations", "drop"];
    args.extend(ids.iter().map(String::as_str));
    let dropped = ask(&args);
    is_as_its_schema_says(&dropped);
    assert_eq!(dropped["ids"].as_array().unwrap().len(), ids.len());
    assert!(place());
}

#[test]
fn without_an_agent_reservations_are_those_of_the_ledger_where_numad_put_them() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().display().to_string();
    let link = dir.path().join("numad");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_homenode"), &link).unwrap();
    let numad = || {
        let mut command = std::process::Command::new(&link);
        text(
            &command
                .args(["-w", "0:16"])
                .env("HOMENODE_STATE", dir.path())
                .output()
                .unwrap(),
        )
    };
    numad();
    numad();
    let shown = json(&run(&["reservations", "--json", "--state", &state]));
    let ids: Vec<u64> = shown["reservations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["id"].as_u64().unwrap())
        .collect();
    assert_eq!(ids, [1, 2], "{shown}");
    let (status, said) = refused(&run(&["reservations", "drop", "3", "--state", &state]));
    assert!(
        status == 2 && said.contains("no open reservation 3; there are: 1, 2"),
        "{status} {said}"
    );
    text(&run(&["reservations", "drop", "1", "--state", &state]));
    let shown = json(&run(&["reservations", "--json", "--state", &state]));
    assert_eq!(shown["reservations"].as_array().unwrap().len(), 1, "{shown}");
    assert_eq!(shown["reservations"][0]["id"], 2);
}

#[test]
fn programs_decide_over_the_socket_and_with_the_key_over_tcp() {
    let site = Site::on(tempfile::tempdir().unwrap(), SCENARIO, &RECOMMENDING);
    let both = site.eventually("both VMs are recommended a home", |site| {
        open(&site.json("/v1/recommendations"))
    });
    let (web, db) = (of(&both, "web")["id"].clone(), of(&both, "db")["id"].clone());
    let of_web = |verb: &str| format!("/v1/recommendations/{web}/{verb}");
    // Over TCP, only a client with the key may approve or reject.
    assert_eq!(
        site.ask("POST", &of_web("apply"), "", "").problem(),
        "unauthorized"
    );
    assert_eq!(
        site.ask("DELETE", "/v1/reservations/1", "", "").problem(),
        "unauthorized"
    );
    let applied = site.does_over_socket("POST", &of_web("apply"));
    assert_eq!(
        (applied.status, &applied.json()["state"]),
        (200, &json!("approved")),
        "{applied:?}"
    );
    let again = site.does_over_socket("POST", &of_web("apply"));
    assert_eq!((again.status, again.problem().as_str()), (409, "conflict"));
    let with_key = format!("Authorization: Bearer {}\r\n", site.key);
    let rejected = site.ask("POST", &format!("/v1/recommendations/{db}/reject"), &with_key, "");
    assert_eq!(
        (rejected.status, &rejected.json()["state"]),
        (200, &json!("rejected"))
    );
    for (method, path, status) in [
        ("POST", "/v1/recommendations/99/apply", 404),
        ("POST", "/v1/recommendations/99/reject", 404),
        ("POST", "/v1/recommendations/x/apply", 400),
        ("POST", "/v1/recommendations/-1/apply", 400),
        ("POST", "/v1/recommendations/99999999999999999999/reject", 400),
        ("GET", "/v1/recommendations/1/apply", 405),
        ("DELETE", "/v1/reservations/99", 404),
        ("DELETE", "/v1/reservations/x", 400),
    ] {
        let answer = site.does_over_socket(method, path);
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        answer.problem();
    }
    // The names of the request and the path up to version 0.2.0.
    asked(
        &site.dir.path().join("state"),
        &json!({"request": "promise", "vcpus": 1, "memory_mib": 64}),
    );
    let reservations = site.json("/v1/reservations")["reservations"].clone();
    assert_eq!(site.json("/v1/promises")["reservations"], reservations);
    assert_eq!(reservations.as_array().map(Vec::len), Some(1), "{reservations}");
    let path = format!("/v1/reservations/{}", reservations[0]["id"]);
    assert_eq!(site.does_over_socket("DELETE", &path).status, 204);
    assert_eq!(site.does_over_socket("DELETE", &path).status, 404);
    // The history records these decisions like all others.
    site.eventually("decisions are recorded", |site| {
        let history = site.dir.path().join("history.sqlite").display().to_string();
        let kinds = ["recommended", "approved", "rejected"];
        let told = |kind: &&str| {
            let shown = run(&["record", "show", "--kind", kind, "--history", &history]);
            String::from_utf8_lossy(&shown.stdout).contains("recommendation")
        };
        kinds.iter().all(told).then_some(())
    });
}

#[test]
fn an_agent_that_acts_says_that_nothing_waits_and_bad_modes_are_refused_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("agent.toml");
    let path = config.display().to_string();
    for (written, said) in [
        ("mode = \"careful\"\n", "careful"),
        ("[modes]\narange = \"act\"\n", "arrange"),
        ("[modes]\nmemory = \"perhaps\"\n", "perhaps"),
    ] {
        std::fs::write(&config, written).unwrap();
        let (status, text) = refused(&run(&["run", "--host", "twin", "--fast", "--config", &path]));
        assert!(
            status == 2 && text.contains(said) && text.contains("agent.toml"),
            "{status} {text}"
        );
    }
    for args in [&["--mode", "careful"][..], &["--mode", "act", "--dry-run"]] {
        let (status, text) = refused(&run(&[&["run", "--host", "twin"], args].concat()));
        assert_eq!(status, 2, "{text}");
    }
    let (status, text) = refused(&run(&["recommend", "--state", &dir.path().display().to_string()]));
    assert!(
        status == 1 && text.contains("no agent runs here"),
        "{status} {text}"
    );
}

/// Walks through the recommendations with these answers.
fn walk(agent: &Agent, args: &[&str], answers: &[u8]) -> Output {
    let state = agent.dir.path().join("state").display().to_string();
    let mut command = homenode();
    command.args(["recommend", "walk", "--state", &state]).args(args);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(answers).unwrap();
    child.wait_with_output().unwrap()
}

#[test]
fn what_was_decided_before_an_error_is_printed() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), SCENARIO, &RECOMMENDING);
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    let both = agent.eventually("both VMs are recommended a home", || open(&ask(&["recommend"])));
    let done = |output: &Output| {
        assert_eq!(output.status.code(), Some(1), "{}", stderr(output));
        let document: Value = serde_json::from_slice(&output.stdout).unwrap();
        is_as_its_schema_says(&document);
        document["recommendations"].as_array().unwrap().clone()
    };
    // The second answer is not text.
    let decided = done(&walk(&agent, &["--json"], b"r\n\xff\n"));
    assert_eq!(decided.len(), 1, "{decided:?}");
    assert_eq!(decided[0]["state"], "rejected");
    let (first, other) = match decided[0]["id"] == both[0]["id"] {
        true => (&both[0], &both[1]),
        false => (&both[1], &both[0]),
    };
    // The second number belongs to a recommendation that is closed.
    let (first, other) = (first["id"].to_string(), other["id"].to_string());
    let decided = done(&agent.ask(&["recommend", "reject", &other, &first, "--json"]));
    assert_eq!(decided.len(), 1, "{decided:?}");
    assert_eq!(decided[0]["id"].to_string(), other);
    let nothing = agent.ask(&["recommend", "reject", &first, "--json"]);
    assert!(
        !nothing.status.success() && nothing.stdout.is_empty(),
        "{nothing:?}"
    );
}

#[test]
fn a_walk_explains_then_asks_about_each_recommendation_and_does_what_is_answered() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), SCENARIO, &RECOMMENDING);
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    agent.eventually("both VMs are recommended a home", || open(&ask(&["recommend"])));
    let walk = |args: &[&str], answers: &str| walk(&agent, args, answers.as_bytes());
    // The end of the input quits, and nothing was decided.
    let said = text(&walk(&[], "\n"));
    assert!(said.starts_with("A recommendation is a change"), "{said}");
    assert!(
        said.contains("give VM web a home") && said.contains("give VM db a home"),
        "{said}"
    );
    assert!(
        said.ends_with("applied 0, rejected 0, left 2 as they were\n"),
        "{said}"
    );
    // After an answer that is not one of the known ones, the question is asked again.
    let said = text(&walk(&[], "yes\na\nr\n"));
    assert!(said.contains("`yes` is not an answer"), "{said}");
    assert!(
        said.ends_with("applied 1, rejected 1, left 0 as they were\n"),
        "{said}"
    );
    let all = ask(&["recommend", "--all"])["recommendations"]
        .as_array()
        .unwrap()
        .clone();
    let state = |id: u64| all.iter().find(|one| one["id"] == id).unwrap()["state"].clone();
    assert!(
        ["approved", "applied"].contains(&state(1).as_str().unwrap()),
        "{all:?}"
    );
    assert_eq!(state(2), "rejected");
    let none = walk(&["--json"], "");
    is_as_its_schema_says(&json(&none));
    assert!(
        stderr(&none).starts_with("no recommendation waits"),
        "{}",
        stderr(&none)
    );
}
