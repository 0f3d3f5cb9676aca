//! The experiment about the agent, as a user begins it, is interrupted, and looks at what there is.

use std::fs;
use std::path::Path;
use std::time::Duration;

use homenode_evidence::report::HostFacts;
use serde_json::{Value, json};

use crate::common::{Agent, is_as_its_schema_says, json, refused, run, text};

#[test]
fn a_run_that_is_interrupted_is_kept_continued_and_leaves_vms_their_modes() {
    let agent = Agent::on_two_vms(&["--policies", "tavo"]);
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("trial");
    let to = to.to_str().unwrap();
    let args = ["evidence", "--vms", "w*", "--minutes", "51", "-o", to];
    let mode = |vm: &str| json(&agent.ask(&["mode", vm, "--json"]))["vms"][0].clone();
    for _ in 0..2 {
        let mut child = agent.begin(&args);
        // The first block only observes.
        agent.eventually("web is only observed", || mode("web")["observed_for_ns"].as_u64());
        assert_eq!(mode("db")["mode"], json!("act"));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(text(&agent.ask(&["mode"])).contains("for another"));
        assert!(text(&agent.ask(&["mode", "web", "observe", "--for", "0s"])).contains("its own mode again"));
        agent.eventually("web has its own mode", || {
            (mode("web")["mode"] == json!("act")).then_some(())
        });
    }
}

#[test]
fn a_lease_of_a_vm_ends_by_itself() {
    let agent = Agent::on_two_vms(&["--policies", "tavo"]);
    let mode = || json(&agent.ask(&["mode", "web", "--json"]))["vms"][0].clone();
    let set = json(&agent.ask(&["mode", "web", "observe", "--for", "2s", "--json"]));
    is_as_its_schema_says(&set);
    assert_eq!(set["span_ns"], json!(2_000_000_000_u64));
    agent.eventually("web is only observed", || {
        (mode()["mode"] == json!("observe")).then_some(())
    });
    std::thread::sleep(Duration::from_secs(2));
    agent.eventually("web has its own mode", || {
        (mode()["mode"] == json!("act")).then_some(())
    });
    assert_eq!(mode()["mode_chosen"], Value::Null);
}

#[test]
fn what_cannot_be_an_experiment_is_said_before_it_begins() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().to_str().unwrap();
    let state = folder.path().join("none");
    let (status, text) = refused(&run(&[
        "evidence",
        "--only",
        "crossover",
        "-o",
        to,
        "--state",
        state.to_str().unwrap(),
    ]));
    assert!(
        status == 1 && text.contains("no agent runs here"),
        "{status} {text}"
    );
    let acting = Agent::on_two_vms(&["--policies", "tavo"]);
    let (status, text) =
        refused(&acting.ask(&["evidence", "--only", "crossover", "-o", to, "--minutes", "50"]));
    assert!(
        status == 2 && text.contains("with 2 VMs a run takes at least 51 minutes"),
        "{status} {text}"
    );
    refuses_a_leased_vm(&acting, to);
    let agent = Agent::on_two_vms(&["--policies", "tavo", "--mode", "recommend"]);
    for (args, said) in [
        (&["--vms", "x*"][..], "no VM matches x*; there are: db, web"),
        (&["--vms", "["], "unclosed character class"),
        (
            &["--vms", "d*"],
            "VM `db` would be the same in all blocks: the agent's mode for it is recommend",
        ),
        (&["--only", "crossover"], "acts on none of the VMs here (db, web)"),
    ] {
        let (status, text) = refused(&agent.ask(&[&["evidence", "-o", to], args].concat()));
        assert!(status == 2 && text.contains(said), "{args:?}: {status} {text}");
    }
    let (status, text) = refused(&agent.ask(&["mode", "web", "act", "--for", "1h"]));
    assert!(
        status == 2 && text.contains("can only have the mode `observe`"),
        "{text}"
    );
    let file = folder.path().join("evidence.json");
    for (held, said) in [
        ("{}", "is not evidence.json"),
        ("not json", "is not evidence.json"),
        (&forged(), "not those of its plan"),
    ] {
        fs::write(&file, held).unwrap();
        let (status, text) = refused(&run(&["evidence", "show", file.to_str().unwrap()]));
        assert!(status == 2 && text.contains(said), "{status} {text}");
    }
}

/// Refuses a VM that has a lease of its operator, which a run must not end.
fn refuses_a_leased_vm(agent: &Agent, to: &str) {
    agent.ask(&["mode", "db", "observe", "--for", "1h"]);
    agent.eventually("db is only observed", || {
        let vm = json(&agent.ask(&["mode", "db", "--json"]))["vms"][0].clone();
        vm["observed_for_ns"].as_u64()
    });
    let (status, text) = refused(&agent.ask(&["evidence", "-o", to, "--vms", "db"]));
    assert!(
        status == 2 && text.contains("it is to be only observed for another"),
        "{status} {text}"
    );
}

#[test]
fn a_report_is_shown_from_its_json_and_from_the_archive_to_share() {
    let reports = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../data/evidence");
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("to-share.tar.gz");
    let show =
        |path: &Path, more: &[&str]| run(&[&["evidence", "show", path.to_str().unwrap()], more].concat());
    let made = folder.path().join("evidence.json");
    let none = homenode_evidence::Report::begun("1", "c", HostFacts::default());
    fs::write(&made, homenode_evidence::read::written(&none.to_share())).unwrap();
    let folders = fs::read_dir(reports).unwrap().map(|entry| entry.unwrap().path());
    let files = folders
        .filter(|path| path.is_dir())
        .map(|path| path.join("evidence.json"));
    for file in files.chain([made]) {
        let shown = json(&show(&file, &["--json"]));
        is_as_its_schema_says(&shown);
        let report = homenode_evidence::read::read(&fs::read_to_string(&file).unwrap()).unwrap();
        fs::write(&archive, homenode_evidence::share::archive(&report).unwrap()).unwrap();
        assert_eq!(json(&show(&archive, &["--json"])), shown);
        let words = text(&show(&archive, &[]));
        let answer = homenode_evidence::answer::Answer::of(&report).line;
        assert!(words.contains(&answer), "{words}");
    }
    let packed = fs::read(&archive).unwrap();
    let damaged = [&packed[..packed.len() / 2], &[0xff]].concat();
    for (held, said) in [
        (&damaged[..], "the archive cannot be read"),
        (&[0xff, 0xfe], "neither evidence.json nor to-share.tar.gz"),
    ] {
        fs::write(&archive, held).unwrap();
        let (status, text) = refused(&show(&archive, &[]));
        assert!(status == 2 && text.contains(said), "{status} {text}");
    }
    let (status, text) = refused(&show(folder.path(), &[]));
    assert!(status == 2 && text.contains("not a file"), "{status} {text}");
}

/// A report with more blocks than its plan.
fn forged() -> String {
    let block = json!({"acting": "acts", "counted_ns": 1, "in_force": 0, "speeds": {"\u{1b}[31m": 1.0}});
    json!({
        "version": "1", "commit": "", "about": [], "blocks": [block],
        "host": {"nodes": 1, "cpus": 1, "memory_bytes": 1, "kernel": "", "vms": 1},
        "plan": {"seed": 1, "block_ns": 1, "washout_ns": 0, "blocks": []},
        "all": null, "vms": {}, "not_judged": [], "verdict": "harms", "slower": []
    })
    .to_string()
}
