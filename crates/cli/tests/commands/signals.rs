//! Signals to commands that take long: to a run on the simulated host, and to the others.

use crate::common;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write as _};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// A short run; the comparison after it takes a day of simulated time for each of four sets of policies.
const LONG: &str = "\
name = \"long\"
machine = \"r910\"
duration = \"86400s\"
[[vm]]
name = \"web\"
vcpus = 8
memory = \"8GiB\"
workload = \"milc\"
work_share = 100000.0
[[vm]]
name = \"db\"
vcpus = 8
memory = \"8GiB\"
workload = \"cg.B\"
work_share = 100000.0
";

fn start(dir: &tempfile::TempDir, args: &[&str]) -> Child {
    let path = dir.path().join("long.toml");
    std::fs::write(&path, LONG).expect("written");
    common::homenode()
        .args(["run", "--host", &format!("twin:{}", path.display()), "--fast"])
        .args(args)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program can be started")
}

/// Sends a signal. Returns the exit status, and the time that the process took to end.
fn signal(child: &mut Child, signal: Signal) -> (Option<i32>, Duration) {
    let sent = Instant::now();
    kill_process(Pid::from_child(child), signal).expect("it runs");
    let status = child.wait().expect("its status");
    (status.code(), sent.elapsed())
}

#[test]
fn a_signal_ends_the_closing_comparison_within_a_second_and_says_so() {
    let dir = tempfile::tempdir().expect("a directory");
    for (sent, status) in [(Signal::TERM, 143), (Signal::INT, 130)] {
        // This is the longest period. A step of the simulator that is this long takes time, too.
        let mut child = start(&dir, &["--duration", "1s", "--period", "30s"]);
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        while !line.starts_with("The same VMs and seed") {
            line.clear();
            assert!(
                out.read_line(&mut line).expect("text") > 0,
                "it ended before its comparison"
            );
        }
        std::thread::sleep(Duration::from_millis(300));
        let (code, took) = signal(&mut child, sent);
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("text");
        assert_eq!(code, Some(status), "{rest}");
        assert!(took < Duration::from_secs(1), "{took:?}");
        assert!(
            rest.contains("stopped by a signal") && rest.contains("homenode"),
            "{rest}"
        );
    }
}

#[test]
fn a_summary_that_was_cut_short_says_so_to_programs() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut child = start(&dir, &["--duration", "1s", "--json"]);
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    out.read_line(&mut line).expect("text");
    while out.read_line(&mut line).expect("text") > 0 && !line.contains("cycle/") {}
    // One cycle is over after a simulated second, so the comparison begins soon.
    std::thread::sleep(Duration::from_secs(3));
    let (code, took) = signal(&mut child, Signal::TERM);
    let mut rest = String::new();
    out.read_to_string(&mut rest).expect("text");
    assert!(took < Duration::from_secs(1), "{took:?}");
    let last = rest.lines().last().expect("a summary");
    let summary: serde_json::Value = serde_json::from_str(last).expect("JSON");
    common::is_as_its_schema_says(&summary);
    assert_eq!((code, &summary["cut_short"]), (Some(143), &true.into()), "{rest}");
}

#[test]
fn sigterm_ends_a_run_in_good_order_and_no_comparison_begins_and_sigint_leads_on_to_it() {
    let dir = tempfile::tempdir().expect("a directory");
    for sent in [Signal::TERM, Signal::INT] {
        let mut child = start(&dir, &[]);
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        out.read_line(&mut line).expect("text");
        std::thread::sleep(Duration::from_millis(300));
        if sent == Signal::INT {
            kill_process(Pid::from_child(&child), sent).expect("it runs");
            while !line.starts_with("The same VMs and seed") {
                line.clear();
                assert!(out.read_line(&mut line).expect("text") > 0, "no comparison");
            }
            assert_eq!(signal(&mut child, sent).0, Some(130));
            continue;
        }
        let (code, took) = signal(&mut child, sent);
        let mut rest = String::new();
        out.read_to_string(&mut rest).expect("text");
        assert!(
            code == Some(0) && took < Duration::from_secs(1),
            "{code:?} {took:?} {rest}"
        );
        assert!(
            rest.contains("skipping the comparison with other policies"),
            "{rest}"
        );
    }
}

#[test]
fn long_work_ends_within_two_seconds_of_a_signal_and_says_what_is_kept() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (scenario, out, store) = (path("long.toml"), path("out.toml"), path("store"));
    std::fs::write(&scenario, LONG).expect("written");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../data/experiments/example.toml");
    let factors = "machine.hop=2,3,4,5,6,7,8,9";
    let long: [(&[&str], &str); 7] = [
        (&["sim", &scenario], "there is no result"),
        (&["search", &scenario], "there is no result"),
        (
            &["sweep", &scenario, "--seeds", "1..64", "--store", &store],
            "finished tasks are kept",
        ),
        (&["reproduce", "tavo.npb", "--fresh"], "finished runs are kept"),
        (
            &["experiment", example, "--fresh", "--jobs", "1", "--vary", factors],
            "finished runs are kept",
        ),
        (&["calibrate", "--output", &out], "the measurement is dropped"),
        (
            &["whatif", "--scenario", &scenario, "--at", "86000s"],
            "there is no result",
        ),
    ];
    for (args, said) in long {
        for (sent, status) in [(Signal::INT, 130), (Signal::TERM, 143)] {
            let mut child = common::homenode()
                .args(args)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .expect("the program can be started");
            std::thread::sleep(Duration::from_millis(700));
            assert_eq!(child.try_wait().expect("its status"), None, "{args:?} takes long");
            let (code, took) = signal(&mut child, sent);
            let mut complaint = String::new();
            let mut stderr = child.stderr.take().expect("piped");
            stderr.read_to_string(&mut complaint).expect("text");
            assert_eq!(code, Some(status), "{args:?}: {complaint}");
            assert!(took < Duration::from_secs(2), "{args:?}: {took:?}");
            assert!(
                complaint.contains("stopped by SIG") && complaint.contains(said),
                "{args:?}: {complaint}"
            );
        }
    }
    assert!(!dir.path().join("out.toml").exists());
}

/// A process, and the other end of the terminal that controls it.
pub(crate) struct OnTerminal {
    pub terminal: Option<File>,
    pub child: Child,
}

impl OnTerminal {
    /// Starts the program on a terminal of its own.
    pub(crate) fn start(args: &[&str]) -> OnTerminal {
        use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
        let terminal =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).expect("a terminal");
        grantpt(&terminal)
            .and_then(|()| unlockpt(&terminal))
            .expect("it may be opened");
        let name = ptsname(&terminal, Vec::new()).expect("its name");
        let name = name.to_str().expect("text");
        let other = File::options()
            .read(true)
            .write(true)
            .open(name)
            .expect("its other end");
        let copy = || other.try_clone().expect("a copy");
        // `setsid --ctty` makes standard input the controlling terminal.
        let child = common::heeding_signals("setsid")
            .args(["--ctty", env!("CARGO_BIN_EXE_homenode")])
            .args(args)
            .stdin(copy())
            .stdout(copy())
            .stderr(copy())
            .spawn()
            .expect("setsid, which Debian always has");
        OnTerminal {
            terminal: Some(terminal.into()),
            child,
        }
    }

    /// Reads until the terminal shows this text.
    fn until(&mut self, text: &str) -> String {
        let mut shown = Vec::new();
        let mut part = [0; 4096];
        loop {
            let so_far = String::from_utf8_lossy(&shown).into_owned();
            if so_far.contains(text) {
                return so_far;
            }
            let read = self.terminal.as_mut().expect("it is open").read(&mut part);
            let count = read.unwrap_or_else(|error| panic!("`{text}` is not shown: {error}: {so_far}"));
            shown.extend_from_slice(&part[..count]);
        }
    }

    pub(crate) fn ends_within(&mut self, time: Duration) -> bool {
        let begun = Instant::now();
        while begun.elapsed() < time {
            if self.child.try_wait().expect("its status").is_some() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        false
    }
}

impl Drop for OnTerminal {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_run_on_the_twin_ends_with_its_terminal_and_its_history_with_it() {
    let mut run = OnTerminal::start(&["run", "--host", "twin"]);
    let shown = run.until("until the run ends");
    let path = shown
        .split("`homenode why VM --history ")
        .nth(1)
        .and_then(|rest| rest.split('`').next());
    let history = PathBuf::from(path.expect("its path"));
    // While the terminal is there, SIGHUP reloads the settings.
    kill_process(Pid::from_child(&run.child), Signal::HUP).expect("it runs");
    assert!(!run.ends_within(Duration::from_secs(1)));
    assert!(history.exists());
    run.terminal = None;
    assert!(run.ends_within(Duration::from_secs(3)));
    assert!(!history.parent().expect("a directory").exists());
}

/// A run of one simulated second, whose comparison ends soon, too.
pub(crate) const SHORT: &str = "name = \"short\"\nmachine = \"r420\"\n[[vm]]\nname = \"web\"\nvcpus = 1\nmemory = \"1GiB\"\n\
                     workload = \"cg.B\"\nwork_share = 0.01\n";

#[test]
fn a_page_outlives_its_run_on_a_terminal_until_a_key_and_elsewhere_only_on_request() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("short.toml");
    std::fs::write(&path, SHORT).expect("written");
    let host = format!("twin:{}", path.display());
    let args = [
        "run",
        "--host",
        &host,
        "--fast",
        "--web",
        "--listen",
        "127.0.0.1:0",
    ];
    let mut run = OnTerminal::start(&args);
    let shown = run.until("to end now");
    let address = shown
        .split("Its page stays at http://")
        .nth(1)
        .and_then(|rest| rest.split(['/', ' ']).next());
    let address = address.expect("its address").to_owned();
    let answers = || std::net::TcpStream::connect(&address).is_ok();
    assert!(!run.ends_within(Duration::from_secs(1)) && answers());
    let terminal = run.terminal.as_mut().expect("it is open");
    terminal.write_all(b" ").expect("a key");
    assert!(run.ends_within(Duration::from_secs(3)) && !answers());

    let piped = |more: &[&str]| {
        let begun = Instant::now();
        let said = common::text(&common::run(&[&args[..], more].concat()));
        (said.contains("Its page stays"), begun.elapsed())
    };
    assert!(!piped(&[]).0);
    let formats: [&[&str]; 2] = [&[], &["--json"]];
    for format in formats {
        let (stays, took) = piped(&[&["--linger", "2s"], format].concat());
        assert!(stays && took >= Duration::from_secs(2), "{format:?}: {took:?}");
    }

    // A program that reads JSON does not wait for a page.
    let mut run = OnTerminal::start(&[&args[..], &["--json"]].concat());
    run.until("\"type\":\"summary\"");
    assert!(run.ends_within(Duration::from_secs(10)));

    // Everything is done by then, so a signal is no failure.
    let mut child = common::homenode()
        .args(args)
        .args(["--linger", "60s"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program can be started");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut line = String::new();
    while !line.contains("Its page stays") {
        line.clear();
        assert!(out.read_line(&mut line).expect("text") > 0, "it does not stay");
    }
    let (code, took) = signal(&mut child, Signal::INT);
    assert_eq!(code, Some(0));
    assert!(took < Duration::from_secs(3), "{took:?}");
}

#[test]
fn a_signal_that_was_ignored_at_the_start_stays_ignored() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("long.toml");
    std::fs::write(&path, LONG).expect("written");
    let scenario = path.display().to_string();
    let host = format!("twin:{scenario}");
    for (args, status) in [
        (&["sim", &scenario][..], 143),
        (&["run", "--host", &host, "--fast"], 0),
    ] {
        let mut child = std::process::Command::new("sh")
            .args([
                "-c",
                "trap '' INT; exec \"$0\" \"$@\"",
                env!("CARGO_BIN_EXE_homenode"),
            ])
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a shell");
        std::thread::sleep(Duration::from_millis(700));
        kill_process(Pid::from_child(&child), Signal::INT).expect("it runs");
        std::thread::sleep(Duration::from_millis(700));
        assert_eq!(child.try_wait().expect("its status"), None, "{args:?}");
        assert_eq!(signal(&mut child, Signal::TERM).0, Some(status), "{args:?}");
    }
}

#[test]
fn another_user_who_takes_the_place_of_a_temporary_history_stops_no_run() {
    let dir = tempfile::tempdir().expect("a directory");
    let temporary = tempfile::tempdir().expect("a directory");
    let user = rustix::process::geteuid().as_raw();
    // A file cannot be used as a directory, even by its owner.
    std::fs::write(temporary.path().join(format!("homenode-twin-{user}")), "").expect("written");
    let path = dir.path().join("short.toml");
    std::fs::write(&path, SHORT).expect("written");
    let run = |args: &[&str]| {
        let ran = common::homenode()
            .args([
                "run",
                "--host",
                &format!("twin:{}", path.display()),
                "--duration",
                "1s",
            ])
            .args(args)
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::null())
            .output();
        common::text(&ran.expect("the program can be started"))
    };
    assert!(run(&[]).contains("this run keeps no history: "));
    let documents: Vec<serde_json::Value> = run(&["--json"])
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!(documents[0]["type"], "start");
    assert_eq!(documents[1]["type"], "notice");
    common::is_as_its_schema_says(&documents[1]);
    // The page needs a history, so it gets one elsewhere.
    let said = run(&["--web", "--listen", "127.0.0.1:0"]);
    let aside = format!("--history {}/homenode-", temporary.path().display());
    assert!(
        said.contains(&aside) && !said.contains("keeps no history"),
        "{said}"
    );
    let left = std::fs::read_dir(temporary.path())
        .expect("a directory")
        .flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().starts_with("homenode-"));
    assert_eq!(left.count(), 1, "only the file is left");
}
