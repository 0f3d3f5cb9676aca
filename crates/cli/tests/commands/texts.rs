//! Compares what users and programs read with what is committed (`tests/commands/snapshots`): the help of each command, and
//! the keys of one JSON answer of each. `INSTA_UPDATE=always cargo test -p homenode-cli --test commands texts` writes them
//! again; then review the diff.

use crate::common;
use crate::common::{Agent, json, run, text};
use serde_json::{Map, Value};

const SCENARIO: &str = "\
name = \"two\"
machine = \"r910\"
duration = \"10min\"
[[vm]]
name = \"a\"
vcpus = 4
memory = \"4GiB\"
workload = \"lbm\"
[[vm]]
name = \"b\"
vcpus = 2
memory = \"2GiB\"
workload = \"povray\"
";

/// Names of the commands in a help text: they are listed before the options, under one heading or several.
fn commands(help: &str) -> Vec<String> {
    let listed = help.lines().take_while(|line| *line != "Options:");
    // Continuation lines of a description are indented further.
    let names = listed.filter_map(|line| {
        line.strip_prefix("  ")
            .filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()))
    });
    let names = names.filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

fn help(path: &[&str]) -> String {
    text(&run(&[path, &["--help"]].concat()))
}

#[test]
fn help_of_each_command_is_as_committed() {
    let all = help(&[]);
    insta::assert_snapshot!("help", all);
    for command in commands(&all) {
        let own = help(&[&command]);
        let parts = commands(&own);
        let of_parts = parts.iter().map(|part| help(&[&command, part]));
        let whole: Vec<String> = std::iter::once(own).chain(of_parts).collect();
        insta::assert_snapshot!(format!("help-{command}"), whole.join("\n-----\n\n"));
    }
}

/// Returns the keys of a JSON value without the values, which change every second. Of a list of objects, only the first counts.
fn shape(value: &Value) -> Value {
    match value {
        Value::Array(items) if items.first().is_some_and(Value::is_object) => vec![shape(&items[0])].into(),
        Value::Object(fields) => {
            let fields = fields.iter().map(|(key, value)| (key.clone(), shape(value)));
            Value::Object(fields.collect::<Map<String, Value>>())
        }
        _ => "value".into(),
    }
}

/// Checks an answer against the committed keys and the committed schema.
fn hold(name: &str, answer: &Value) {
    common::is_as_its_schema_says(answer);
    let shape = serde_json::to_string_pretty(&shape(answer)).unwrap();
    insta::assert_snapshot!(format!("json-{name}"), shape);
}

#[test]
fn json_without_an_agent_has_the_committed_keys() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("two.toml");
    std::fs::write(&path, SCENARIO).unwrap();
    let path = path.display().to_string();
    let place = [
        "place", "--vcpus", "4", "--memory", "4096", "--host", "twin", "--json",
    ];
    hold("machine", &json(&run(&["machine", "--preset", "r910", "--json"])));
    hold("place", &json(&run(&place)));
    hold(
        "whatif",
        &json(&run(&[
            "whatif",
            "a=1",
            "--scenario",
            &path,
            "--at",
            "30s",
            "--json",
        ])),
    );
    hold("sim", &json(&run(&["sim", &path, "--json"])));
}

#[test]
fn json_of_an_agent_has_the_committed_keys() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), SCENARIO, &[]);
    let ask = |args: &[&str]| json(&agent.ask(&[args, &["--json"]].concat()));
    agent.eventually("two samples were taken", || {
        ask(&["vm"])["vms"][0]["cpus_used"].is_number().then_some(())
    });
    for args in [
        ["vm"].as_slice(),
        &["permit", "show"],
        &["permit", "suggest", "a"],
        &["permit", "set", "b", "1M"],
        &["memory-policy", "show"],
        &["memory-policy", "advise", "a"],
        &["memory-policy", "set", "b", "none"],
        &["memory", "show"],
        &["memory", "set", "b", "none"],
        &["topology"],
        &["report"],
        &["wss"],
    ] {
        hold(&args.join("-"), &ask(args));
    }
}

/// deploy/homenode.toml lists every setting with its default on a real host.
#[test]
fn the_documented_settings_are_all_there_are_with_their_defaults() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/homenode.toml");
    let settings = std::fs::read_to_string(path).unwrap();
    let documented: Value = toml::from_str(&settings).unwrap();
    let defaults = json(&run(&["config", "show", "--defaults", "--json"]));
    assert_eq!(documented, defaults["config"]);
    assert_eq!(documented["mode"], "recommend", "an operator chooses to act");
}

/// A page may grow by some words before its minutes are wrong.
#[test]
fn each_page_of_the_documentation_names_its_readers_and_the_minutes_that_it_takes() {
    let minutes = |page: &str| -> Option<usize> {
        let (_, said) = page.lines().nth(2)?.split_once(".* ")?;
        said.strip_suffix(" min.")?.parse().ok()
    };
    let docs = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
    for entry in std::fs::read_dir(docs).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|ending| ending != "md") {
            continue;
        }
        let page = std::fs::read_to_string(&path).unwrap();
        let said = minutes(&page);
        let line = page.lines().nth(2).unwrap_or_default();
        let readers = line
            .split_once(".* ")
            .map_or(line.to_owned(), |(readers, _)| format!("{readers}.*"));
        let right = homenode_units::with_reading_time(&page.replacen(line, &readers, 1));
        let right_minutes = minutes(&right);
        assert!(
            right_minutes.is_some() && said.is_some_and(|said| said.abs_diff(right_minutes.unwrap()) <= 1),
            "the third line of {} is `{line}`; write the line that names the readers, as in `{}`",
            path.display(),
            right.lines().nth(2).unwrap_or_default()
        );
    }
}
