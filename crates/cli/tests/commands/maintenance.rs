//! Drains and pauses, as a user sees them.

use serde_json::{Value, json};

use crate::common::http::Site;
use crate::common::{Agent, TWO_VMS, is_as_its_schema_says, json, refused, text};

#[test]
fn a_node_is_emptied_shown_and_given_back() {
    let agent = Agent::on_two_vms(&["--policies", "tavo"]);
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    assert_eq!(text(&agent.ask(&["drain"])), "no node is being drained\n");
    let home = agent.eventually("web has a home", || {
        let home = ask(&["vm", "web"])["vms"][0]["home"][0].clone();
        home.as_u64().map(|home| home.to_string())
    });
    let said = text(&agent.ask(&["drain", &home]));
    assert!(
        said.starts_with(&format!("node {home} is empty; VMs are kept off it")),
        "{said}"
    );
    let now = ask(&["drain"]);
    is_as_its_schema_says(&now);
    assert_eq!(
        now["drains"],
        json!([{"node": home.parse::<u16>().unwrap(), "vms": []}])
    );
    let elsewhere = ask(&["vm", "web"])["vms"][0].clone();
    let node = json!([home.parse::<u16>().unwrap()]);
    assert_ne!(elsewhere["home"], node, "{elsewhere}");
    let placed = ask(&["place", "--vcpus", "2", "--memory", "1GiB"]);
    assert_ne!(placed["nodes"], node, "{placed}");
    let shown = text(&agent.ask(&["drain"]));
    assert_eq!(shown, format!("node {home} is empty\n"));
    assert_eq!(ask(&["status"])["drained"], node);
    for (args, status, word) in [
        (&["drain", "99"][..], 2, "no node 99"),
        (&["drain", "0-3"], 1, "no node would be left"),
        (&["drain", "one"], 2, "one"),
        (&["drain", "", "--end"], 2, "name at least one node"),
        (&["drain", "--end"], 2, "<NODES>"),
    ] {
        let (code, said) = refused(&agent.ask(args));
        assert!(code == status && said.contains(word), "{args:?}: {code} {said}");
    }
    let said = text(&agent.ask(&["drain", &home, "--end"]));
    assert_eq!(said, format!("VMs may live on node {home} again\n"));
    let (code, said) = refused(&agent.ask(&["drain", &home, "--end"]));
    assert!(code == 2 && said.contains("no drained node"), "{code} {said}");
    assert_eq!(ask(&["drain"])["drains"], json!([]));
}

#[test]
fn what_stays_on_a_node_is_said_with_the_reason_and_status_1() {
    let agent = Agent::on_two_vms(&["--policies", "tavo"]);
    let home = agent.eventually("web has a home", || {
        let vms = json(&agent.ask(&["vm", "web", "--json"]));
        vms["vms"][0]["home"][0].as_u64().map(|home| home.to_string())
    });
    assert!(agent.ask(&["mode", "web", "observe"]).status.success());
    let output = agent.ask(&["drain", &home]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("mode observe is in force") && said.contains("web"),
        "{said}"
    );
    // Policies that assign no homes cannot drain at all.
    let agent = Agent::on_two_vms(&["--policies", "default"]);
    let (code, said) = refused(&agent.ask(&["drain", "1"]));
    assert!(code == 1 && said.contains("--policies homenode"), "{code} {said}");
}

#[test]
fn a_drain_that_waits_for_approval_says_so_with_status_1_and_its_recommendations_end_with_it() {
    let agent = Agent::on_two_vms(&["--mode", "recommend"]);
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    let has_memory = |vm: &Value| vm["name"] == "web" && vm["memory_bytes"].as_u64() > Some(0);
    let node = agent.eventually("web has memory on a node", || {
        ["0", "1", "2", "3"].into_iter().find(|node| {
            let now = ask(&["drain", node, "--no-wait"]);
            let is_there = now["drains"][0]["vms"].as_array().unwrap().iter().any(has_memory);
            if !is_there {
                ask(&["drain", node, "--end"]);
            }
            is_there
        })
    });
    let output = agent.ask(&["drain", node]);
    let said = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("for your approval: `homenode recommend`")
            && said.contains("mode recommend is in force"),
        "{said}"
    );
    let of_placement = || {
        let all = ask(&["recommend"])["recommendations"].as_array().unwrap().clone();
        all.into_iter()
            .filter(|one| one["policy"] == "placement")
            .collect::<Vec<_>>()
    };
    let all = of_placement();
    let why = format!("because node {node} is drained");
    assert!(!all.is_empty(), "{said}");
    assert!(
        all.iter()
            .all(|one| one["reason"].as_str().unwrap().contains(&why)),
        "{all:?}"
    );
    ask(&["drain", node, "--end"]);
    assert_eq!(of_placement(), [] as [Value; 0]);
}

#[test]
fn a_pause_is_begun_shown_and_ended() {
    let agent = Agent::on_two_vms(&[]);
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    assert!(text(&agent.ask(&["pause"])).starts_with("the agent is not paused"));
    assert_eq!(
        ask(&["drain"])["paused_for_ns"],
        Value::Null,
        "asking pauses nothing"
    );
    let paused = "the agent is paused for another 5.0h\n";
    assert_eq!(text(&agent.ask(&["pause", "--for", "5h"])), paused);
    assert_eq!(text(&agent.ask(&["pause"])), paused);
    assert_eq!(text(&agent.ask(&["pause", "5h"])), paused, "as people type it");
    let now = ask(&["drain"]);
    is_as_its_schema_says(&now);
    assert!(
        now["paused_for_ns"].as_u64().unwrap() > 3_600_000_000_000,
        "{now}"
    );
    assert!(text(&agent.ask(&["drain"])).contains("the agent is paused for another"));
    assert!(text(&agent.ask(&["status"])).contains("paused for another 5.0h"));
    assert_eq!(
        text(&agent.ask(&["pause", "--end"])),
        "the agent is no longer paused\n"
    );
    assert_eq!(ask(&["drain"])["paused_for_ns"], Value::Null);
    assert_eq!(refused(&agent.ask(&["pause", "--for", "soon"])).0, 2);
    assert_eq!(refused(&agent.ask(&["pause", "--for", "1h", "--end"])).0, 2);
}

#[test]
fn over_http_operators_drain_and_pause_and_others_only_look() {
    let site = Site::on(tempfile::tempdir().unwrap(), TWO_VMS, &["--policies", "tavo"]);
    site.eventually("it has looked", |site| {
        (site.get("/v1/maintenance").status == 200).then_some(())
    });
    let operator = site.as_operator();
    let as_json = format!("{operator}Content-Type: application/json\r\n");
    for (method, path, status) in [
        ("PUT", "/v1/maintenance/drains/1", 401),
        ("PUT", "/v1/maintenance/pause", 401),
    ] {
        let refused = site.ask(method, path, "", "");
        assert!(
            refused.status == status || refused.status == 403,
            "{path}: {refused:?}"
        );
    }
    let drained = site.ask("PUT", "/v1/maintenance/drains/1", &operator, "");
    assert_eq!(
        (drained.status, &drained.json()["drains"][0]["node"]),
        (200, &json!(1)),
        "{drained:?}"
    );
    assert_eq!(site.json("/v1/maintenance")["drains"][0]["node"], 1);
    for (method, path, status) in [
        ("PUT", "/v1/maintenance/drains/99", 404),
        ("PUT", "/v1/maintenance/drains/one", 400),
        ("DELETE", "/v1/maintenance/drains/2", 404),
        ("DELETE", "/v1/maintenance/drains/1", 200),
        ("POST", "/v1/maintenance/drains/1", 405),
    ] {
        let answer = site.ask(method, path, &operator, "");
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
    }
    for node in 0..3 {
        let path = format!("/v1/maintenance/drains/{node}");
        assert_eq!(site.ask("PUT", &path, &operator, "").status, 200);
    }
    let last = site.ask("PUT", "/v1/maintenance/drains/3", &operator, "");
    assert_eq!(last.status, 409, "{last:?}");
    let paused = site.ask(
        "PUT",
        "/v1/maintenance/pause",
        &as_json,
        "{\"span_ns\": 60000000000}",
    );
    assert!(paused.json()["paused_for_ns"].as_u64() > Some(0), "{paused:?}");
    let wrong = site.ask("PUT", "/v1/maintenance/pause", &as_json, "{\"span_ns\": -1}");
    assert_eq!(wrong.status, 422, "{wrong:?}");
    let on = site.ask("DELETE", "/v1/maintenance/pause", &operator, "");
    assert_eq!(on.json()["paused_for_ns"], Value::Null, "{on:?}");
}
