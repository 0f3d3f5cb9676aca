//! Checks what commands do if the reader of their output is gone, or their output cannot be written.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::common;
use crate::common::{homenode, refused, run, stderr, text};

/// Commands that print and need nothing else.
const PRINTING: [&[&str]; 7] = [
    &["machine", "--preset", "r910"],
    &["machine", "--preset", "r910", "--json"],
    &["sim", "--list"],
    &["sim", "balloon", "--policy", "default", "--json"],
    &["completions", "bash"],
    &["man"],
    &["man", "run"],
];

fn with_output(args: &[&str], to: impl Into<Stdio>) -> std::process::Output {
    let mut command: Command = homenode();
    let child = command
        .args(args)
        .stdin(Stdio::null())
        .stdout(to)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program can be started");
    child.wait_with_output().expect("it ends")
}

#[test]
fn a_closed_pipe_ends_a_command_in_silence() {
    for args in PRINTING {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let ended = with_output(args, writer);
        assert!(
            ended.status.success() && ended.stderr.is_empty(),
            "{args:?}: {:?} {}",
            ended.status,
            stderr(&ended)
        );
    }
}

#[test]
fn a_full_disk_is_said_and_a_failure() {
    for args in PRINTING {
        let full = File::options()
            .write(true)
            .open("/dev/full")
            .expect("Linux has it");
        let ended = with_output(args, full);
        let said = stderr(&ended);
        assert_eq!(ended.status.code(), Some(1), "{args:?}: {said}");
        assert!(
            said.contains("cannot write to standard output: No space left on device")
                && said.lines().count() == 1,
            "{args:?}: {said}"
        );
    }
}

#[test]
fn a_simulation_waits_for_its_reader_and_loses_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("small.toml");
    let vm = "[[vm]]\nname = \"web\"\nvcpus = 1\nmemory = \"1GiB\"\nworkload = \"cg.B\"\nwork_share = 9.0\n";
    std::fs::write(&path, format!("name = \"small\"\nmachine = \"r420\"\n{vm}")).expect("written");
    let host = format!("twin:{}", path.display());
    // Each cycle prints some kilobytes, and a pipe holds the output of only a few cycles.
    let args = ["run", "--host", &host, "--fast", "--json", "--duration", "200s"];
    let prompt = text(&run(&args));
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = homenode();
    let mut child = command
        .args(args)
        .stdout(writer)
        .spawn()
        .expect("the program can be started");
    drop(command);
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(child.try_wait().expect("its status"), None, "it waits");
    let mut late = String::new();
    std::io::Read::read_to_string(&mut reader, &mut late).expect("text");
    assert!(child.wait().expect("its status").success());
    assert!(
        late == prompt && prompt.matches("\"cycle/").count() > 100,
        "{} of {} bytes",
        late.len(),
        prompt.len()
    );
}

#[test]
fn every_page_that_the_manual_names_is_there() {
    let page = text(&run(&["man"]));
    let names: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("homenode\\-")?.strip_suffix("(1)"))
        .collect();
    assert!(names.len() > 15, "{names:?}");
    // Packages write all pages at once.
    let dir = tempfile::tempdir().unwrap();
    let to = dir.path().join("man1");
    text(&run(&["man", "--to", to.to_str().unwrap()]));
    assert_eq!(std::fs::read_to_string(to.join("homenode.1")).unwrap(), page);
    for name in names {
        let name = name.replace('\\', "");
        let page = text(&run(&["man", &name]));
        assert!(page.contains(".TH"), "{name}: {page}");
        let written = std::fs::read_to_string(to.join(format!("homenode-{name}.1"))).unwrap();
        assert_eq!(written, page);
    }
    let (code, complaint) = refused(&run(&["man", "nope"]));
    assert!(
        code == 2 && complaint.contains("no command is named `nope`"),
        "{complaint}"
    );
}

/// A VM whose name clears the screen, turns text around, and pretends to be two lines.
const HOSTILE: &str = "web\u{1b}[2J\u{9b}31m\u{202e}\nroot: all is well\u{2066}";

#[test]
fn names_that_others_chose_are_shown_and_not_obeyed_and_json_stays_exact() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("hostile.toml");
    let name = "web\\u001b[2J\\u009b31m\\u202e\\nroot: all is well\\u2066";
    let vm = "vcpus = 1\nmemory = \"1GiB\"\nworkload = \"cg.B\"\nwork_share = 0.01\n";
    let scenario = format!("name = \"hostile\"\nmachine = \"r420\"\n[[vm]]\nname = \"{name}\"\n{vm}");
    std::fs::write(&path, scenario).expect("written");
    let path = path.display().to_string();
    let host = format!("twin:{path}");
    let unprintable = |text: &str| {
        text.chars().find(|c| {
            c.is_control() && *c != '\n'
                || ('\u{202a}'..='\u{202e}').contains(c)
                || ('\u{2066}'..='\u{2069}').contains(c)
        })
    };
    for args in [
        &["sim", &path, "--policy", "homenode"][..],
        &["run", "--host", &host, "--fast"],
    ] {
        let text = common::text(&common::run(args));
        assert_eq!(unprintable(&text), None, "{args:?}");
        let shown = "web\\u{1b}[2J\\u{9b}31m\\u{202e}\\nroot: all is well\\u{2066}";
        assert!(text.contains(shown), "{args:?}: {text}");
        assert!(
            !text.lines().any(|line| line.starts_with("root:")),
            "{args:?}: {text}"
        );
        let exact = common::text(&common::run(&[args, &["--json"]].concat()));
        assert_eq!(unprintable(&exact), None, "{args:?}");
        let last: serde_json::Value =
            serde_json::from_str(exact.lines().last().expect("lines")).expect("JSON");
        assert_eq!(last["policies"][0]["vms"][0]["name"], HOSTILE, "{args:?}");
    }
    // Errors must not print the name unescaped either.
    let (status, said) = common::refused(&common::run(&[
        "whatif",
        &format!("{HOSTILE}=9"),
        "--scenario",
        &path,
    ]));
    assert!(
        status != 0 && unprintable(&said).is_none() && !said.contains("\nroot:"),
        "{said}"
    );
}

/// A VM exceeds its permit and returns below it every ten seconds. Formerly each new quota was printed on its own line.
#[test]
fn a_run_says_what_repeats_once_a_minute_and_the_history_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let scenario = "name = \"lone\"\nmachine = \"r420\"\nduration = \"320s\"\n[[vm]]\nname = \"lbm\"\nvcpus = 1\n\
                    memory = \"1GiB\"\nworkload = \"lbm\"\npermit = \"1500k\"\n";
    let turns = (1..30).map(|turn| {
        let factor = [1.0, 0.6][turn % 2];
        format!("[[event]]\nat = \"{turn}0s\"\nvm = \"lbm\"\naction.phase = {{ llc_access_factor = {factor:.1} }}\n")
    });
    let scenario = [scenario.to_owned()].into_iter().chain(turns).collect::<String>();
    std::fs::write(path("lone.toml"), scenario).unwrap();
    let host = format!("twin:{}", path("lone.toml"));
    let history = path("h.sqlite");
    let args = [
        "run",
        "--host",
        &host,
        "--fast",
        "--duration",
        "300s",
        "--history",
        &history,
    ];
    let ran = common::text(&common::run(&args));
    let lines: Vec<&str> = ran.lines().filter(|line| line.starts_with('[')).collect();
    let shown = common::json(&common::run(&[
        "record",
        "show",
        "--history",
        &history,
        "--last",
        "0",
        "--json",
    ]));
    let events = shown["events"].as_array().unwrap();
    let kept: u64 = events.iter().map(|event| event["count"].as_u64().unwrap()).sum();
    assert!(kept > 20 && lines.len() < 10, "{kept} events\n{ran}");
    let more = |line: &&str| {
        let counted = line
            .rsplit_once(" (")
            .and_then(|(_, rest)| rest.split_once(" more like this"));
        1 + counted.map_or(0, |(count, _)| count.parse::<u64>().unwrap())
    };
    assert_eq!(lines.iter().map(more).sum::<u64>(), kept, "{ran}");
}

/// Returns the output of a command on a terminal, which `script` provides.
fn on_a_terminal(args: &[&str]) -> String {
    let program = env!("CARGO_BIN_EXE_homenode");
    let shown = Command::new("script")
        .args([
            "--quiet",
            "--return",
            "--command",
            &format!("{program} {}", args.join(" ")),
            "/dev/null",
        ])
        .stdin(Stdio::null())
        .output()
        .expect("script, which Debian always has");
    text(&shown)
}

#[test]
fn long_work_says_what_is_left_on_a_terminal_and_nothing_in_a_pipe() {
    let long: [(&[&str], &str); 4] = [
        (
            &["sim", "tavo-mixed", "--policy", "default"],
            "tavo-mixed under default: ",
        ),
        (
            &["whatif", "--scenario", "tavo-mixed", "--at", "30s"],
            "tavo-mixed: ",
        ),
        (&["sweep", "churn", "--seeds", "1..4"], "4 of 8 runs"),
        (&["calibrate", "--quick", "--seconds", "2"], "[2/"),
    ];
    for (args, what) in long {
        let shown = on_a_terminal(args);
        let said = |line: &str| line.contains(what) && line.ends_with(" left");
        assert!(shown.split("\r\x1b[K").any(said), "{args:?}: {shown:?}");
    }
    for (args, _) in &long[..3] {
        let piped = run(args);
        assert!(
            piped.status.success() && piped.stderr.is_empty(),
            "{args:?}: {}",
            stderr(&piped)
        );
    }
}
