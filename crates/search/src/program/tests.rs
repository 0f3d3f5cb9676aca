//! Tests that programs and their child processes end.

use std::path::{Path, PathBuf};

use super::*;

/// Environment variable that names the directory for the process that is killed.
const HELD: &str = "HOMENODE_TEST_HOLDS_A_PROGRAM_IN";

/// Writes a program that starts another program and records both ids; neither program ends by itself.
fn program(dir: &Path, begin: &str) -> Program {
    let script = dir.join("policy.sh");
    let ids = dir.join("ids");
    let text = format!(
        "{begin}\nsh -c 'trap \"\" HUP INT TERM; while :; do sleep 1000; done' &\necho $$ $! > {0}.new\nmv {0}.new {0}\n\
         trap '' HUP INT TERM\nwhile :; do sleep 1000; done\n",
        ids.display()
    );
    std::fs::write(&script, text).unwrap();
    format!("exec:/bin/sh {}", script.display()).parse().unwrap()
}

/// Waits until `look` finds something, up to a time limit.
fn eventually<T>(what: &str, look: impl Fn() -> Option<T>) -> T {
    for _ in 0..6_000 {
        if let Some(found) = look() {
            return found;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{what}");
}

fn ids(dir: &Path) -> Vec<String> {
    let ids = eventually("the program starts", || {
        std::fs::read_to_string(dir.join("ids")).ok()
    });
    let ids: Vec<String> = ids.split_whitespace().map(str::to_owned).collect();
    assert_eq!(ids.len(), 2);
    ids
}

/// Whether a process runs; a zombie counts as ended.
fn runs(id: &str) -> bool {
    let stat = std::fs::read_to_string(PathBuf::from("/proc").join(id).join("stat"));
    let state = |stat: String| {
        stat.rsplit_once(") ")
            .map(|(_, rest)| rest.starts_with(['Z', 'X']))
    };
    stat.is_ok_and(|stat| state(stat) == Some(false))
}

fn all_end(ids: &[String]) {
    for id in ids {
        eventually("the process ends", || (!runs(id)).then_some(()));
    }
}

#[test]
fn a_program_and_what_it_started_end_with_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let running = program(dir.path(), "").start().unwrap();
    let ids = ids(dir.path());
    assert!(ids.iter().all(|id| runs(id)));
    drop(running);
    all_end(&ids);
}

#[test]
fn what_a_program_started_ends_though_the_program_ended_before() {
    let dir = tempfile::tempdir().unwrap();
    let running = program(dir.path(), "").start().unwrap();
    let ids = ids(dir.path());
    let program = Pid::from_raw(ids[0].parse().unwrap()).unwrap();
    rustix::process::kill_process(program, Signal::KILL).unwrap();
    eventually("the program ends", || (!runs(&ids[0])).then_some(()));
    assert!(runs(&ids[1]));
    drop(running);
    all_end(&ids);
}

/// Holds a program until this process, which the test below starts, is killed. Does nothing in a normal test run.
#[test]
fn a_process_that_holds_a_program() {
    let Some(dir) = std::env::var_os(HELD) else { return };
    let running = program(Path::new(&dir), "").start().unwrap();
    std::thread::sleep(Duration::from_secs(600));
    drop(running);
}

#[test]
fn a_program_ends_with_a_process_that_is_killed() {
    for signal in [Signal::KILL, Signal::INT] {
        let dir = tempfile::tempdir().unwrap();
        let mut held = Command::new(std::env::current_exe().unwrap());
        held.args(["--exact", "program::tests::a_process_that_holds_a_program"]);
        held.env(HELD, dir.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut held = held.spawn().unwrap();
        let ids = ids(dir.path());
        let id = Pid::from_raw(held.id().cast_signed()).unwrap();
        rustix::process::kill_process(id, signal).unwrap();
        // A process just being started may ignore the first signal.
        std::thread::sleep(Duration::from_millis(50));
        let _ = held.kill();
        held.wait().unwrap();
        all_end(&ids);
    }
}

#[test]
fn a_program_signals_its_own_group_and_ends_all_the_same() {
    let dir = tempfile::tempdir().unwrap();
    let running = program(dir.path(), "trap '' TERM; kill -TERM 0").start().unwrap();
    let ids = ids(dir.path());
    drop(running);
    all_end(&ids);
}

#[test]
fn a_program_outlasts_the_thread_that_started_it() {
    let dir = tempfile::tempdir().unwrap();
    let program = program(dir.path(), "");
    let running = std::thread::spawn(move || program.start().unwrap())
        .join()
        .unwrap();
    let ids = ids(dir.path());
    std::thread::sleep(Duration::from_millis(50));
    assert!(ids.iter().all(|id| runs(id)));
    drop(running);
    all_end(&ids);
}
