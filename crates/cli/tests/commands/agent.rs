//! Requests to a running agent, as users send them.

use std::process::Output;

use serde_json::Value;

use crate::common;
use crate::common::{Agent, run, stderr, stdout};

/// A VM that streams through memory, on a small simulated host.
const POLLUTER: &str = "\
name = \"polluter\"
machine = \"r420\"
duration = \"3600s\"
[[vm]]
name = \"web\"
vcpus = 1
memory = \"4GiB\"
workload = \"stream\"
work_share = 1000.0
";

impl Agent {
    fn start(dir: tempfile::TempDir) -> Agent {
        let agent = Agent::on(dir, POLLUTER, &["--period", "100ms", "--json"]);
        agent.eventually("the VM is there", || {
            agent.permit(&["show", "web"]).status.success().then_some(())
        });
        agent
    }

    fn permit(&self, args: &[&str]) -> Output {
        self.ask(&[&["permit"], args].concat())
    }

    fn permit_json(&self, args: &[&str]) -> Value {
        common::json(&self.permit(&[args, &["--json"]].concat()))
    }

    fn refused(&self, args: &[&str]) -> (i32, String) {
        common::refused(&self.permit(args))
    }

    /// Ends the agent with a signal, as `kill -9` does, and returns its directory.
    fn end(mut self, signal: rustix::process::Signal) -> tempfile::TempDir {
        let pid = rustix::process::Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
        self.child.wait().unwrap();
        std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap())
    }
}

#[test]
fn permits_are_booked_kept_suggested_and_counted_over_a_restart() {
    let agent = Agent::start(tempfile::tempdir().unwrap());
    let free = agent.eventually("the VM streams", || {
        let now = agent.permit_json(&["show", "web"])["vms"][0]["units_per_slice"].as_u64();
        now.filter(|misses| *misses > 2_000_000)
    });
    let permit = format!("{}k", free / 4000);
    let answer = agent.permit_json(&["set", "web", &permit]);
    assert_eq!(
        (answer["vm"].as_str(), answer["permit"].as_str()),
        (Some("web"), Some(permit.as_str()))
    );
    let held = agent.eventually("the VM is held to its permit", || {
        let vm = agent.permit_json(&["show"])["vms"][0].clone();
        let now = vm["units_per_slice"].as_u64()?;
        (now < free / 2 && !vm["quota"].is_null()).then_some(vm)
    });
    assert_eq!(held["permit"], permit.as_str());
    assert!(held["punished_count"].as_u64().unwrap() >= 1, "{held}");
    let text = stdout(&agent.permit(&["show", "web"]));
    assert!(text.contains("web") && text.contains(&permit), "{text}");
    let advice = agent.permit_json(&["suggest", "web"]);
    assert!(
        advice["from_memory"]
            .as_str()
            .is_some_and(|p| p.ends_with('k') || p.ends_with('M')),
        "{advice}"
    );
    let usage = agent.permit_json(&["usage", "web"]);
    assert_eq!(
        (
            usage["lines"][0]["name"].as_str(),
            usage["lines"][0]["resource"].as_str()
        ),
        (Some("web"), Some("pollution"))
    );
    let used = usage["lines"][0]["used_units"].as_u64().unwrap();
    assert!(
        used > 0 && usage["lines"][0]["booked_units"].as_u64().unwrap() > 0,
        "{usage}"
    );
    for (args, status, said) in [
        (&["set", "web", "0"][..], 2, "too small"),
        (&["set", "web", "-250k"], 2, "below zero"),
        (&["set", "web", "250K"], 2, "write `250k`"),
        (&["set", "absent", "250k"], 2, "there are: web"),
        (&["show", "absent"], 2, "there are: web"),
        (&["suggest", "absent"], 2, "there are: web"),
        (&["usage", "absent"], 2, "there are: web"),
    ] {
        let (code, text) = agent.refused(args);
        assert!(code == status && text.contains(said), "{args:?}: {code} {text}");
    }
    assert!(stdout(&agent.permit(&["set", "web", "none"])).contains("web has no permit"));
    agent.eventually("the VM is let go", || {
        let now = agent.permit_json(&["show", "web"])["vms"][0]["units_per_slice"].as_u64()?;
        (now > free / 2).then_some(())
    });
    let dir = agent.end(rustix::process::Signal::TERM);
    let agent = Agent::start(dir);
    let usage = agent.permit_json(&["usage", "web"]);
    assert!(
        usage["lines"][0]["used_units"].as_u64().unwrap() >= used,
        "{usage}"
    );
    // After SIGKILL at most the usage of the last minute is lost.
    let dir = agent.end(rustix::process::Signal::KILL);
    let agent = Agent::start(dir);
    assert!(
        // The name of `usage` up to version 0.2.0.
        agent.permit_json(&["bill", "web"])["lines"][0]["used_units"]
            .as_u64()
            .unwrap()
            >= used
    );
}

/// Starts an agent on the simulated host under these kernel limits, as a user to whom they apply.
fn limited(dir: &tempfile::TempDir, limits: &[&str]) -> std::process::Command {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::process::CommandExt as _;
    let program = dir.path().join("homenode");
    std::fs::copy(env!("CARGO_BIN_EXE_homenode"), &program).unwrap();
    let scenario = dir.path().join("scenario.toml");
    std::fs::write(&scenario, POLLUTER).unwrap();
    let mut command = std::process::Command::new("prlimit");
    command
        .args(limits)
        .arg(&program)
        .args(["run", "--period", "100ms"]);
    command.args(["--host", &format!("twin:{}", scenario.display())]);
    command.arg("--state").arg(dir.path().join("state"));
    if rustix::process::geteuid().is_root() {
        // Without the sticky bit, the agent refuses a state directory below this one.
        std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o1777)).unwrap();
        // A limit on the number of processes does not apply to root.
        command.uid(65534).gid(65534);
    }
    command
}

#[test]
fn clients_that_take_all_files_that_the_agent_may_open_delay_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let child = limited(&dir, &["--nofile=40:40"])
        .stdout(std::process::Stdio::null())
        .spawn();
    let agent = Agent {
        child: child.unwrap(),
        dir,
    };
    agent.eventually("the agent answers", || {
        agent.ask(&["vm"]).status.success().then_some(())
    });
    let socket = agent.dir.path().join("state/agent.sock");
    // The agent drops the oldest connections to make room for new ones.
    let connect = |_| std::os::unix::net::UnixStream::connect(&socket).unwrap();
    let began = std::time::Instant::now();
    for _ in 0..20 {
        let silent: Vec<_> = (0..100).map(connect).collect();
        stdout(&agent.permit(&["show", "web"]));
        drop(silent);
    }
    // The loop takes seconds if the agent answers every request, and minutes if it misses one.
    assert!(began.elapsed() < std::time::Duration::from_secs(40));
}

#[test]
fn where_there_can_be_no_threads_the_agent_says_so_and_does_not_begin() {
    let dir = tempfile::tempdir().unwrap();
    let (status, said) = common::refused(&limited(&dir, &["--nproc=1:1"]).output().unwrap());
    assert!(
        status == 1 && said.starts_with("homenode: cannot start the thread"),
        "{status} {said}"
    );
    assert!(!dir.path().join("state/agent.sock").exists());
}

#[test]
fn memory_policies_are_chosen_shown_and_taken_back() {
    let agent = Agent::start(tempfile::tempdir().unwrap());
    let shown = || -> Value {
        let output = agent.ask(&["policy", "show", "web", "--json"]);
        common::json(&output)["vms"][0].clone()
    };
    let before = shown();
    assert!(
        before["memory_policy_chosen"].is_null() && before["pages_by_node"].is_array(),
        "{before}"
    );
    let set = |policy| agent.ask(&["policy", "set", "web", policy]);
    assert!(stdout(&set("round-4k")).contains("web has memory policy round-4k"));
    let chosen = agent.eventually("the choice to be seen", || {
        let chosen = shown()["memory_policy_chosen"].clone();
        (!chosen.is_null()).then_some(chosen)
    });
    assert_eq!(chosen, "round-4k");
    let advice: Value =
        serde_json::from_str(&stdout(&agent.ask(&["policy", "advise", "web", "--json"]))).unwrap();
    assert!(advice["why"].is_string() && advice["vm"] == "web", "{advice}");
    let table = stdout(&agent.ask(&["policy", "show"]));
    assert!(
        table.contains("MiB on nodes") && table.contains("round-4k"),
        "{table}"
    );
    assert!(stdout(&set("none")).contains("the agent chooses the memory policy of"));
    for (args, status, said) in [
        (&["set", "web", "round-2k"][..], 2, "`first-touch`, `round-4k`"),
        (&["set", "web", "round-1g"], 1, "choose round-4k"),
        (&["set", "absent", "round-4k"], 2, "there are: web"),
        (&["show", "absent"], 2, "there are: web"),
        (&["advise", "absent"], 2, "there are: web"),
    ] {
        let output = agent.ask(&[&["policy"], args].concat());
        let (code, text) = (output.status.code(), stderr(&output));
        assert!(
            code == Some(status) && text.contains(said),
            "{args:?}: {code:?} {text}"
        );
    }
}

#[test]
fn a_working_set_is_waited_for_and_listed_afterwards() {
    let agent = Agent::start(tempfile::tempdir().unwrap());
    let json = |args: &[&str]| -> Value {
        let output = agent.ask(&[&["wss"], args, &["--json"]].concat());
        common::json(&output)
    };
    let before = json(&[]);
    assert_eq!(
        (&before["vms"][0]["vm"], &before["vms"][0]["working_set"]),
        (&"web".into(), &Value::Null)
    );
    // If the guest only boots during a window, the figure is zero.
    let mut figures = std::iter::repeat_with(|| json(&["web", "--window", "1s"])).take(20);
    let figure = figures
        .find(|figure| figure["least_bytes"] != 0)
        .expect("its program uses memory by then");
    let bytes = |key: &str| {
        figure[key]
            .as_u64()
            .unwrap_or_else(|| panic!("no {key} in {figure}"))
    };
    let (least, size, most) = (bytes("least_bytes"), bytes("size_bytes"), bytes("most_bytes"));
    assert!(
        0 < least && least <= size && size <= most && most <= bytes("memory_bytes"),
        "{figure}"
    );
    assert_eq!(bytes("error_bytes"), (most - size).max(size - least));
    assert_eq!(
        (bytes("window_ns"), &figure["tracker"]),
        (1_000_000_000, &"exact".into())
    );
    assert!(figure["not"].as_str().is_some_and(|not| not.contains("swaps")));
    let listed = json(&[]);
    assert_eq!(listed["vms"][0]["working_set"]["window_ns"], 1_000_000_000);
    let text = stdout(&agent.ask(&["wss", "web", "--window", "1s"]));
    for said in ["web uses", "interval", "blind to", "exact: it is the truth"] {
        assert!(text.contains(said), "{said} not in {text}");
    }
    for (args, status, said) in [
        (&["wss", "absent"][..], 2, "there are: web"),
        (&["wss", "web", "--window", "1ms"], 2, "windows last from 100ms"),
        (&["wss", "--window", "1s"], 2, "needs the name of a VM"),
    ] {
        let output = agent.ask(args);
        let (code, text) = (output.status.code(), stderr(&output));
        assert!(
            code == Some(status) && text.contains(said),
            "{args:?}: {code:?} {text}"
        );
    }
}

#[test]
fn a_memory_floor_is_kept_shown_and_taken_back() {
    let agent = Agent::start(tempfile::tempdir().unwrap());
    let json = |args: &[&str]| -> Value {
        let output = agent.ask(&[&["memory"], args, &["--json"]].concat());
        common::json(&output)
    };
    let before = json(&["show", "web"]);
    let bytes = 4_u64 << 30;
    assert_eq!(
        (
            &before["vms"][0]["name"],
            &before["vms"][0]["memory_bytes"],
            &before["vms"][0]["memory"]["floor_bytes"]
        ),
        (&"web".into(), &bytes.into(), &Value::Null)
    );
    assert_eq!(
        before["vms"][0]["memory"]["maximum_bytes"], bytes,
        "the twin's guests have balloons"
    );
    // With a floor this high no memory can be taken; the answer says so, and the floor is kept.
    for floor in ["5GiB", "4GiB"] {
        let answer = json(&["set", "web", floor]);
        assert!(
            answer["note"]
                .as_str()
                .is_some_and(|note| note.contains("the floor is all of its memory")),
            "{answer}"
        );
    }
    let answer = json(&["set", "web", "2GiB"]);
    assert_eq!(
        (&answer["vm"], &answer["floor_bytes"], &answer["note"]),
        (&"web".into(), &(2_u64 << 30).into(), &Value::Null)
    );
    let why = agent.eventually("the policy to have considered it", || {
        let memory = json(&["show"])["vms"][0]["memory"].clone();
        let why = memory["why"].as_str()?.to_owned();
        (memory["floor_bytes"] == 2_u64 << 30).then_some(why)
    });
    assert!(!why.is_empty());
    let text = stdout(&agent.ask(&["memory", "show"]));
    for said in ["floor", "web", "4GiB", "2GiB"] {
        assert!(text.contains(said), "{said} not in {text}");
    }
    for (args, status, said) in [
        (&["set", "absent", "1GiB"][..], 2, "there are: web"),
        (&["show", "absent"], 2, "there are: web"),
        (&["set", "web", "plenty"], 2, "plenty"),
        (&["set", "web", "-1GiB"], 2, "-1"),
    ] {
        let output = agent.ask(&[&["memory"], args].concat());
        let (code, text) = (output.status.code(), stderr(&output));
        assert!(
            code == Some(status) && text.contains(said),
            "{args:?}: {code:?} {text}"
        );
    }
    let text = stdout(&agent.ask(&["memory", "set", "web", "none"]));
    assert!(text.contains("web keeps all of its memory"), "{text}");
    agent.eventually("the floor to be gone", || {
        json(&["show"])["vms"][0]["memory"]["floor_bytes"]
            .is_null()
            .then_some(())
    });
}

#[test]
fn topology_says_of_each_guest_what_it_is_told_or_why_nothing() {
    let agent = Agent::start(tempfile::tempdir().unwrap());
    let answer = agent.ask(&["topology", "web", "--json"]);
    let answer = common::json(&answer);
    let topology = &answer["vms"][0]["topology"];
    assert_eq!(
        (&answer["vms"][0]["name"], &topology["told"]),
        (&"web".into(), &Value::Null)
    );
    let why = topology["why_not"]
        .as_str()
        .expect("a VM of the twin is told nothing");
    for args in [&["topology"][..], &["topology", "web"]] {
        let text = stdout(&agent.ask(args));
        assert!(
            text.contains("web") && text.contains("told nothing") && text.contains(why),
            "{text}"
        );
    }
    let output = agent.ask(&["topology", "absent"]);
    let (code, text) = (output.status.code(), stderr(&output));
    assert!(
        code == Some(2) && text.contains("there are: web"),
        "{code:?} {text}"
    );
}

#[test]
fn without_an_agent_permits_say_how_to_start_one() {
    let dir = tempfile::tempdir().unwrap();
    let state = dir.path().display().to_string();
    for args in [
        &["permit", "show"][..],
        &["permit", "set", "web", "250k"],
        &["permit", "suggest", "web"],
        &["permit", "usage"],
        &["policy", "show"],
        &["policy", "set", "web", "first-touch"],
        &["permit"],
        &["memory"],
        &["memory-policy"],
        &["memory", "show"],
        &["memory", "set", "web", "2GiB"],
        &["wss", "web"],
        &["wss"],
        &["topology"],
    ] {
        let (status, text) = common::refused(&run(&[args, &["--state", &state]].concat()));
        assert!(status == 1 && text.contains("homenode run"), "{args:?}: {text}");
    }
    let help = stdout(&run(&["permit", "--help"]));
    assert!(
        help.contains("homenode permit set web 250k") && help.contains("30 ms"),
        "{help}"
    );
}

#[test]
fn commands_that_only_need_a_subcommand_show_what_is_in_force_without_one() {
    let agent = Agent::on(tempfile::tempdir().unwrap(), POLLUTER, &["--period", "100ms"]);
    agent.eventually("the VM is there", || {
        agent.ask(&["vm", "web"]).status.success().then_some(())
    });
    for command in ["permit", "memory", "memory-policy"] {
        let keys = |args: &[&str]| {
            let answer = common::json(&agent.ask(&[args, &["--json"]].concat()));
            let vm = answer["vms"][0].as_object().unwrap().clone();
            vm.keys().cloned().collect::<Vec<String>>()
        };
        assert_eq!(keys(&[command]), keys(&[command, "show"]));
        let shown = common::text(&agent.ask(&[command]));
        assert!(shown.contains("web"), "{command}: {shown}");
    }
}

/// The period is long, so the question comes before the next sample: a new setting is shown at once.
#[test]
fn what_was_set_is_shown_by_the_next_question() {
    let agent = Agent::on(
        tempfile::tempdir().unwrap(),
        POLLUTER,
        &["--period", "5s", "--json"],
    );
    agent.eventually("the VM is there", || {
        agent.permit(&["show", "web"]).status.success().then_some(())
    });
    let vm = || common::json(&agent.ask(&["vm", "web", "--json"]))["vms"][0].clone();
    for permit in ["250k", "1M", "500MB/s"] {
        assert!(agent.permit(&["set", "web", permit]).status.success());
        assert_eq!(vm()["permit"]["permit"], permit);
        assert_eq!(agent.permit_json(&["show", "web"])["vms"][0]["permit"], permit);
    }
    assert!(agent.permit(&["set", "web", "none"]).status.success());
    assert_eq!(vm()["permit"]["permit"], Value::Null);
    assert!(
        agent
            .ask(&["memory-policy", "set", "web", "first-touch"])
            .status
            .success()
    );
    assert_eq!(vm()["memory_policy_chosen"], "first-touch");
    assert!(agent.ask(&["memory", "set", "web", "2GiB"]).status.success());
    assert_eq!(vm()["memory"]["floor_bytes"], 2_u64 << 30);
}

#[test]
fn a_permit_on_a_host_without_counters_is_said_to_hold_nothing_and_with_counters_it_is_not() {
    for (is_counted, disturbance) in [(true, ""), (false, "[disturbance]\nno_llc_counters = true\n")] {
        let dir = tempfile::tempdir().unwrap();
        let scenario = format!("{POLLUTER}{disturbance}");
        let agent = Agent::on(dir, &scenario, &["--period", "100ms"]);
        agent.eventually("the VM is there", || {
            agent.permit(&["show", "web"]).status.success().then_some(())
        });
        let said = stdout(&agent.permit(&["set", "web", "250k"]));
        assert!(said.starts_with("web has a permit of 250k"), "{said}");
        assert_eq!(!said.contains("VM web is not held to it"), is_counted, "{said}");
        if !is_counted {
            let remedies = [
                "does not count its LLC misses",
                "pass the PMU through",
                "homenode doctor",
            ];
            assert!(remedies.iter().all(|remedy| said.contains(remedy)), "{said}");
        }
        let said = stdout(&agent.permit(&["set", "web", "none"]));
        assert!(!said.contains("not held"), "{said}");
    }
}

#[test]
fn without_a_vm_there_is_no_legend_of_a_table() {
    let later = POLLUTER.replace("work_share", "arrival = \"3000s\"\nwork_share");
    let agent = Agent::on(tempfile::tempdir().unwrap(), &later, &[]);
    assert_eq!(common::text(&agent.ask(&["vm"])), "no VM runs on this host\n");
}
