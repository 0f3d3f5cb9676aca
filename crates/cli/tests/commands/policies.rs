//! Policies that are programs, as users run them: good programs, and all kinds of bad ones.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use homenode_control::external::PlanDocument;
use homenode_search::contender::Contender;
use homenode_search::score::CaseScore;
use homenode_twin::{Scenario, Setup};
use serde_json::Value;
use tempfile::TempDir;

use crate::common;
use crate::common::{homenode, is_as_its_schema_says, json, refused, run, text};

/// Returns the repository's example of a policy.
fn example() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/policies/near.py");
    format!("exec:python3 {}", path.display())
}

/// A scenario of two small VMs that takes some seconds.
const SMALL: &str = r#"
name = "small"
machine = "r420"
duration = "6s"
[[vm]]
name = "a"
vcpus = 2
memory = "2GiB"
workload = "cg.B"
[[vm]]
name = "b"
vcpus = 2
memory = "2GiB"
workload = "povray"
"#;

struct Place(TempDir);

impl Place {
    fn new() -> Place {
        let place = Place(tempfile::tempdir().unwrap());
        std::fs::write(place.path("small.toml"), SMALL).unwrap();
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Writes a policy in Python whose `body` handles each line of input.
    fn policy(&self, body: &str) -> String {
        let text = format!(
            "import json, sys, time, os\nopen({:?}, 'w').write(str(os.getpid()))\nfor line in sys.stdin:\n    {}\n",
            self.path("pid"),
            body.replace('\n', "\n    ")
        );
        std::fs::write(self.path("mine.py"), text).unwrap();
        format!("exec:python3 {}", self.path("mine.py").display())
    }

    fn sim(&self, policy: &str, more: &[&str]) -> std::process::Output {
        let scenario = self.path("small.toml").display().to_string();
        let args = ["sim", &scenario, "--policy", policy].into_iter();
        homenode()
            .args(args.chain(more.iter().copied()))
            .output()
            .unwrap()
    }

    /// Returns true if the last program has ended.
    fn is_gone(&self) -> bool {
        let pid = std::fs::read_to_string(self.path("pid")).unwrap();
        !Path::new("/proc").join(pid).exists()
    }
}

const NOTHING: &str =
    "print(json.dumps({'version': json.loads(line)['version'], 'actions': []}), flush=True)";

#[test]
fn a_program_decides_and_the_same_seed_gives_the_same_bytes() {
    let place = Place::new();
    let policy = place.policy(
        "view = json.loads(line)\nhome = {'action': 'set-home', 'nodes': [1], 'why': 'it is first'}\n\
         homes = [{'vm': vm['id'], **home} for vm in view['vms'][:1]]\n\
         print(json.dumps({'schema': 'plan/1', 'version': view['version'], 'actions': homes}), flush=True)",
    );
    let both = || place.sim(&policy, &["--policy", "default", "--json"]);
    let (first, second) = (both(), both());
    let simulation = json(&first);
    is_as_its_schema_says(&simulation);
    assert_eq!(simulation["policies"][0]["policy"], policy.as_str());
    assert_eq!(simulation["policies"][0]["decisions"], 5, "{simulation}");
    assert_eq!(first.stdout, second.stdout);
    assert!(place.is_gone());
}

#[test]
fn views_and_plans_are_as_their_schemas_say() {
    let place = Place::new();
    let kept = place.path("views");
    let policy = place.policy(&format!("open({kept:?}, 'a').write(line)\n{NOTHING}"));
    text(&place.sim(&policy, &[]));
    let views = std::fs::read_to_string(kept).unwrap();
    assert_eq!(views.lines().count(), 6);
    for view in views.lines() {
        is_as_its_schema_says(&serde_json::from_str(view).unwrap());
    }
    let views: Vec<Value> = views
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert_eq!(
        [&views[0]["period_ns"], &views[1]["vms"][0]["cpus_used"]],
        [&Value::Null; 2],
        "there are no rates before two samples"
    );
    assert!(
        views[2]["vms"][0]["cpus_used"].as_f64().unwrap() > 0.5,
        "{}",
        views[2]
    );
    let document =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/POLICIES.md"))
            .unwrap();
    let plans: Vec<&str> = document
        .lines()
        .filter(|line| line.contains("\"schema\": \"plan/1\""))
        .collect();
    assert!(!plans.is_empty());
    for plan in plans {
        is_as_its_schema_says(&serde_json::from_str(plan).unwrap());
        PlanDocument::from_json(plan.as_bytes()).unwrap();
    }
}

#[test]
fn what_is_refused_is_told_in_the_next_view() {
    let place = Place::new();
    let kept = place.path("last");
    let policy = place.policy(&format!(
        "view = json.loads(line)\nopen({kept:?}, 'a').write(json.dumps(view['last']) + '\\n')\n\
         far = {{'action': 'set-home', 'nodes': [7], 'why': 'far away'}}\n\
         homes = [{{'vm': vm['id'], **far}} for vm in view['vms'][:1]]\n\
         print(json.dumps({{'version': view['version'], 'actions': homes}}), flush=True)"
    ));
    let told = text(&place.sim(&policy, &[]));
    assert!(told.contains(": 0 decisions"), "{told}");
    let last = std::fs::read_to_string(kept).unwrap();
    let second: Value = serde_json::from_str(last.lines().nth(2).unwrap()).unwrap();
    assert_eq!(
        (&second["result"], &second["refusal"]),
        (&"refused".into(), &"vm".into()),
        "{second}"
    );
    assert!(
        second["message"].as_str().unwrap().contains("nodes {7} must be"),
        "{second}"
    );
}

#[test]
fn bad_programs_end_the_run_with_an_error_that_names_them_and_are_gone() {
    let place = Place::new();
    let cases = [
        (
            "print('hello', flush=True)",
            "the planner's answer is not a plan: expected value at line 1 column 1",
        ),
        ("print('{\"version\": 1}', flush=True)", "missing field `actions`"),
        (
            "sys.stdout.buffer.write(bytes([255, 254, 10])); sys.stdout.flush()",
            "the planner's answer is not a plan: ",
        ),
        (
            "sys.stdout.write('x' * (3 << 20)); sys.stdout.flush()",
            "the planner's answer has more than 1048576 bytes",
        ),
        (
            "print('[' * 100000, flush=True)",
            "the planner's answer is not a plan: ",
        ),
        (
            "sys.exit(3)",
            "the program ended before it answered (exit status: 3)",
        ),
        (
            "os.kill(os.getpid(), 9)",
            "the program ended before it answered (signal: 9 (SIGKILL))",
        ),
        (
            "os.close(1)\ntime.sleep(100)",
            "the program closed its input or output before it answered",
        ),
        ("time.sleep(100)", "the program did not answer within 700ms"),
        (
            "sys.stdout.write('{'); sys.stdout.flush()\ntime.sleep(100)",
            "the program did not answer within 700ms",
        ),
        (
            "sys.stdout.write(json.dumps({'version': json.loads(line)['version'], 'actions': []}) + '\\nmore\\n')\nsys.stdout.flush()",
            "the program answered a view with more than one line",
        ),
    ];
    for (body, why) in cases {
        let policy = place.policy(body);
        let began = Instant::now();
        // Python starts slowly on a busy machine, so only a program that never answers gets the short time limit.
        let within = if why.contains("700ms") { "700ms" } else { "15s" };
        let (status, complaint) = refused(&place.sim(&policy, &["--answer-within", within]));
        assert_eq!(status, 1, "{body}: {complaint}");
        let expected = format!("homenode: policy {policy}: ");
        assert!(
            complaint.contains(&expected) && complaint.contains(why),
            "{body}: {complaint}"
        );
        assert!(began.elapsed() < Duration::from_secs(20), "{body}");
        assert!(place.is_gone(), "{body}");
    }
}

#[test]
fn what_a_program_says_on_standard_error_is_seen_and_one_that_goes_on_is_killed() {
    let place = Place::new();
    let policy = place.policy(&format!("print('I think', file=sys.stderr)\n{NOTHING}"));
    let output = place.sim(&policy, &[]);
    assert_eq!(common::stderr(&output).matches("I think").count(), 6);
    // The program continues after its input has ended.
    let policy = place.policy(&format!(
        "{NOTHING}\nif json.loads(line)['at_ns'] >= 5e9: time.sleep(1000)"
    ));
    text(&place.sim(&policy, &[]));
    assert!(place.is_gone());
}

#[test]
fn what_is_no_program_is_bad_input_and_no_host_is_left_to_one() {
    let place = Place::new();
    let (status, complaint) = refused(&place.sim("exec:./there-is-none", &[]));
    assert_eq!(status, 2);
    assert!(
        complaint.contains("policy exec:./there-is-none cannot be started: No such file"),
        "{complaint}"
    );
    let (status, complaint) = refused(&place.sim("exec:", &[]));
    assert!(
        status == 2 && complaint.contains("does not name a program"),
        "{complaint}"
    );
    let (status, complaint) = refused(&run(&["run", "--policies", "exec:./mine"]));
    assert!(
        status == 2 && complaint.contains("may run only on the twin"),
        "{complaint}"
    );
    // A scenario from elsewhere must not start programs.
    let scenario = format!("policies = [\"exec:./mine\"]\n{SMALL}");
    std::fs::write(place.path("small.toml"), scenario).unwrap();
    let output = run(&["sim", &place.path("small.toml").display().to_string()]);
    let (status, complaint) = refused(&output);
    assert!(
        status == 2 && complaint.contains("no policies are named `exec:./mine`"),
        "{complaint}"
    );
}

#[test]
fn settings_and_search_take_programs_too() {
    let place = Place::new();
    let policy = place.policy(NOTHING);
    std::fs::write(place.path("half.toml"), "period = \"500ms\"\n").unwrap();
    let config = place.path("half.toml").display().to_string();
    let kept = place.policy(&format!("print('asked', file=sys.stderr)\n{NOTHING}"));
    let output = place.sim(&kept, &["--config", &config]);
    assert_eq!(common::stderr(&output).matches("asked").count(), 12);
    let scenario = place.path("small.toml").display().to_string();
    let args = [
        "search",
        &scenario,
        "--evaluations",
        "20",
        "--policy",
        &policy,
        "--json",
    ];
    let search = json(&run(&args));
    is_as_its_schema_says(&search);
    let mine = search["policies"]
        .as_array()
        .unwrap()
        .iter()
        .find(|one| one["policy"] == policy.as_str());
    assert_eq!(mine.unwrap()["mean"], 1.0, "{search}");
}

/// Collects every setting that is a number, an amount or a duration, by its name in a file.
fn settings(path: &str, value: &Value, found: &mut Vec<String>) {
    match value {
        Value::Object(inner) => {
            for (name, value) in inner {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                settings(&path, value, found);
            }
        }
        Value::Number(_) => found.push(path.to_owned()),
        Value::String(text) if text.starts_with(|c: char| c.is_ascii_digit()) => found.push(path.to_owned()),
        _ => {}
    }
}

#[test]
fn a_simulation_takes_every_setting_of_the_agent() {
    let place = Place::new();
    let all = json(&run(&["config", "show", "--defaults", "--json"]));
    let mut keys = Vec::new();
    settings("", &all["config"], &mut keys);
    assert!(keys.len() > 80, "{}", keys.len());
    let (file, scenario) = (place.path("one.toml"), place.path("small.toml"));
    let of_file = |text: &str| {
        std::fs::write(&file, text).unwrap();
        let [scenario, file] = [&scenario, &file].map(|path| path.display().to_string());
        run(&["sim", &scenario, "--policy", "homenode", "--config", &file])
    };
    for key in &keys {
        let (status, complaint) = refused(&of_file(&format!("{key} = true\n")));
        let is_named = key.split('.').skip(1).any(|name| complaint.contains(name)) || complaint.contains(key);
        assert!(
            status == 2 && complaint.contains("one.toml") && is_named,
            "{key}: {complaint}"
        );
    }
    let shown = text(&run(&["config", "show", "--defaults"]));
    assert_eq!(text(&of_file(&shown)), text(&of_file("")));
}

/// The example performs as docs/POLICIES.md says, with the scoreboard's own figures and seeds.
#[test]
fn the_example_beats_default_on_tavo_mixed_and_slows_no_vm_on_two_other_cases() {
    let example: Contender = example().parse().unwrap();
    let score = |name: &str| {
        let scenario = Scenario::builtin(name).unwrap();
        let machine = homenode_machine_files::preset(scenario.machine.as_deref().unwrap()).unwrap();
        let setup = Setup::new(machine, scenario, 1);
        let contenders = std::slice::from_ref(&example);
        let runs = homenode_search::grid::runs(&[setup], &[1, 2, 3], contenders, 1).unwrap();
        CaseScore::of(name, &runs[0][0], &runs[0][1])
    };
    let mixed = score("tavo-mixed").mean().unwrap();
    assert!(mixed < 0.995, "{mixed}");
    for name in ["churn", "phase-change"] {
        let score = score(name);
        assert_eq!(score.slowed().count(), 0, "{name}: {:?}", score.vms);
    }
    let lines =
        std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/policies/near.py"));
    assert!(lines.unwrap().lines().count() <= 30);
}
