//! Tests the guard with real processes: this binary plays the test, the agent or the guard, depending on its arguments.

#![allow(clippy::print_stderr, reason = "a test of its own says itself what it skips")]

use std::collections::BTreeMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::RecvTimeoutError;
use std::time::{Duration, Instant};

use homenode_host::CpuQuota;
use homenode_undo::guard::{self, Patience};
use homenode_undo::journal::{Before, Journal, Run, Written};
use homenode_undo::lock::{ActingLock, Lock, Waits};
use homenode_undo::{Heartbeat, Undone, acting};
use homenode_units::{CpuId, CpuSet, Ns, VmId};
use serde::{Deserialize, Serialize};

/// A lever's entry for pins.
#[derive(Serialize, Deserialize)]
struct Pins(BTreeMap<u16, Vec<CpuSet>>);

impl Written for Pins {
    const KEY: &'static str = "vcpus";
}

/// A lever's journal entry for a quota: the agent's quota, and the operator's.
#[derive(Serialize, Deserialize)]
struct Quotas(CpuQuota, CpuQuota);

impl Written for Quotas {
    const KEY: &'static str = "cpu-quota";
}

const PATIENCE: Patience = Patience {
    silence: Duration::from_secs(3),
    grace: Duration::from_millis(1500),
};
const GRACE: Duration = PATIENCE.grace;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("play-agent") => play_agent(Path::new(&args[2]), &args[3]),
        // With this argument, the program is a guard.
        Some("guard") => play_guard(Path::new(&args[2])),
        Some("play-successor") => play_successor(Path::new(&args[2])),
        // `cargo test` may pass filters and flags, which are ignored because there is only one test.
        Some("--list") => {}
        _ => {
            an_agent_that_is_killed_is_undone_once();
            an_agent_that_restarts_within_the_grace_is_not_undone();
            an_agent_that_says_goodbye_is_not_undone();
            a_signal_to_the_agents_group_does_not_end_the_guard();
            an_agent_that_hangs_is_ended_and_undone();
            a_guard_that_dies_or_hangs_is_followed_by_another();
            somebody_who_holds_the_lock_is_no_successor();
            a_stopped_guard_of_a_dead_agent_is_ended_by_who_follows();
            a_guard_that_hangs_while_it_undoes_is_ended_by_who_follows();
            a_guard_that_undoes_is_not_ended_however_long_it_takes();
            a_stopped_guard_of_a_stopped_agent_is_left_and_said_with_the_remedy();
            two_who_follow_a_stopped_guard_act_one_after_the_other();
            a_state_directory_that_is_moved_away_takes_no_undo_with_it();
            a_journal_that_is_gone_is_said_by_who_follows();
            a_full_or_read_only_disk_keeps_nothing_from_being_undone();
            a_guard_that_cannot_start_is_an_error();
        }
    }
}

/// Plays an agent: takes the locks, starts a guard, journals one pinned VM, reports that it is up, and waits until it is told to
/// leave.
fn play_agent(dir: &Path, how: &str) {
    let mut lock = Lock::take(dir, Duration::from_secs(15)).expect("the lock");
    let _acting = ActingLock::take(dir, dir, Duration::from_secs(15)).expect("the host");
    let heartbeat = Heartbeat::default();
    let start = || {
        let exe = std::env::current_exe().expect("this binary");
        guard::spawn(&exe, &["guard".into(), dir.into()], &heartbeat).expect("a guard")
    };
    let mut guard = start();
    lock.set_guarded(true);
    let mut journal = Journal::open(dir).expect("a journal");
    if journal.entries().is_empty() {
        let run = Run {
            vm: VmId(7),
            name: "seven".into(),
            runtime_id: 1,
            pid: 4,
            start_ticks: 5,
        };
        let before = Before {
            vcpus: [(0, CpuSet::one(CpuId(3)))].into(),
            ..Before::default()
        };
        journal.begin(run, before).expect("a line");
        let pins = Pins([(0, vec![CpuSet::one(CpuId(1))])].into());
        journal.set(VmId(7), &pins).expect("a line");
        let slice = Ns::from_millis(30);
        let quotas = Quotas(CpuQuota::of(0.1, slice), CpuQuota::of(0.5, slice));
        journal.set(VmId(7), &quotas).expect("a line");
    }
    std::fs::write(markers().join(format!("up-{how}")), "").expect("a marker");
    let (told, word) = std::sync::mpsc::channel::<()>();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0u8; 1]);
        drop(told);
    });
    while word.recv_timeout(Duration::from_millis(100)) == Err(RecvTimeoutError::Timeout) {
        heartbeat.beat();
        if !guard.is_there() {
            guard.end();
            guard = start();
        }
    }
    guard.goodbye();
}

fn play_guard(dir: &Path) {
    let undone = markers().join("undone");
    let undo_one = |journal: &mut Journal, vm: VmId| -> Result<(), String> {
        // Imitates a lock in libvirt's library that is never released, or a slow libvirt.
        while markers().join("hang").exists() {
            std::thread::sleep(Duration::from_secs(3600));
        }
        std::fs::write(markers().join("undoing"), "").expect("a marker");
        while markers().join("slow").exists() {
            std::thread::sleep(Duration::from_millis(20));
        }
        let before = std::fs::read_to_string(&undone).unwrap_or_default();
        let entry = journal.entry(vm).expect("what is to be undone");
        let Quotas(_, quota) = entry.get().expect("a quota");
        let Pins(pins) = entry.get().expect("pins");
        let given_back = entry
            .before
            .vcpus
            .iter()
            .filter(|(index, _)| pins.contains_key(index));
        let vcpus: BTreeMap<_, _> = given_back.collect();
        let line = format!("{} {vcpus:?} {quota}\n", entry.run.name);
        std::fs::write(&undone, before + &line).map_err(|e| e.to_string())?;
        journal.clear_all(vm);
        Ok(())
    };
    let undo = |journal: &mut Journal| {
        let mut undone = Undone::default();
        for vm in journal.in_force() {
            match undo_one(journal, vm) {
                Ok(()) => undone.vms.push(vm),
                Err(cause) => undone.failures.push(cause),
            }
        }
        undone
    };
    std::fs::write(markers().join("guard"), std::process::id().to_string()).expect("a marker");
    let ending = guard::run(
        std::io::stdin(),
        &mut std::io::stdout(),
        (dir, dir),
        PATIENCE,
        undo,
        |_| (),
    )
    .expect("a guard's life");
    let pid = std::process::id();
    std::fs::write(markers().join(format!("ended-{pid}")), format!("{ending:?}")).expect("a marker");
}

fn agent(dir: &Path, how: &str) -> Child {
    agent_with(dir, dir, how)
}

/// Directory where processes of a test record what they did.
const MARKERS: &str = "HOMENODE_TEST_MARKERS";

fn markers() -> PathBuf {
    std::env::var_os(MARKERS).expect("set by the test").into()
}

fn agent_with(dir: &Path, markers: &Path, how: &str) -> Child {
    let exe = std::env::current_exe().expect("this binary");
    let mut command = Command::new(exe);
    command
        .args(["play-agent", &dir.display().to_string(), how])
        .env(MARKERS, markers)
        .stdin(Stdio::piped());
    // The agent has its own process group, like a shell's job.
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let child = command.spawn().expect("an agent");
    eventually(&format!("agent {how} is up"), || {
        markers.join(format!("up-{how}")).exists()
    });
    child
}

fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < Duration::from_secs(40),
            "{what}: not within 40 s"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// How the guards ended so far.
fn endings(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir)
        .expect("the directory")
        .flatten()
        .map(|e| e.path());
    let is_ending = |p: &PathBuf| {
        p.file_name()
            .is_some_and(|n| n.to_string_lossy().starts_with("ended-"))
    };
    entries
        .filter(is_ending)
        .filter_map(|p| std::fs::read_to_string(p).ok())
        .filter(|t| !t.is_empty())
        .collect()
}

fn undone(dir: &Path) -> String {
    std::fs::read_to_string(dir.join("undone")).unwrap_or_default()
}

fn an_agent_that_is_killed_is_undone_once() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut agent = agent(dir.path(), "first");
    agent.kill().expect("SIGKILL");
    agent.wait().expect("the agent's end");
    assert_eq!(undone(dir.path()), "", "not before the grace is over");
    eventually("the guard ends", || !endings(dir.path()).is_empty());
    assert_eq!(endings(dir.path()), ["Undone(1)"]);
    assert_eq!(undone(dir.path()), "seven {0: {3}} 15ms of every 30ms\n");
    assert!(
        Journal::open(dir.path())
            .expect("a journal")
            .in_force()
            .is_empty(),
        "nothing is in force any more"
    );
}

fn an_agent_that_restarts_within_the_grace_is_not_undone() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut first = agent(dir.path(), "first");
    first.kill().expect("SIGKILL");
    first.wait().expect("the agent's end");
    let mut second = agent(dir.path(), "second");
    eventually("the first guard ends", || !endings(dir.path()).is_empty());
    assert_eq!(endings(dir.path()), ["TakenOver"]);
    std::thread::sleep(GRACE);
    assert_eq!(undone(dir.path()), "");
    second.kill().expect("SIGKILL");
    second.wait().expect("the agent's end");
    eventually("the second guard ends", || endings(dir.path()).len() == 2);
    assert_eq!(undone(dir.path()), "seven {0: {3}} 15ms of every 30ms\n");
}

fn an_agent_that_says_goodbye_is_not_undone() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut agent = agent(dir.path(), "first");
    drop(agent.stdin.take());
    assert!(agent.wait().expect("the agent's end").success());
    assert_eq!(
        endings(dir.path()),
        ["Goodbye"],
        "the guard ends before the agent does"
    );
    std::thread::sleep(GRACE + Duration::from_millis(500));
    assert_eq!(undone(dir.path()), "");
}

fn a_signal_to_the_agents_group_does_not_end_the_guard() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut agent = agent(dir.path(), "first");
    let group = rustix::process::Pid::from_child(&agent);
    // SIGINT would do as well, but a test that runs in the background may have inherited it as ignored.
    rustix::process::kill_process_group(group, rustix::process::Signal::TERM).expect("a signal to the group");
    agent.wait().expect("the agent's end");
    eventually("the guard ends", || !endings(dir.path()).is_empty());
    assert_eq!(endings(dir.path()), ["Undone(1)"]);
}

fn an_agent_that_hangs_is_ended_and_undone() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut agent = agent(dir.path(), "first");
    let pid = rustix::process::Pid::from_child(&agent);
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("a stopped agent");
    eventually("the guard ends", || !endings(dir.path()).is_empty());
    assert_eq!(endings(dir.path()), ["Undone(1)"]);
    let end = agent.wait().expect("the agent's end");
    assert_eq!(
        std::os::unix::process::ExitStatusExt::signal(&end),
        Some(9),
        "it must not wake up and act on"
    );
}

fn a_guard_that_dies_or_hangs_is_followed_by_another() {
    for how in [rustix::process::Signal::KILL, rustix::process::Signal::STOP] {
        let dir = tempfile::tempdir().expect("a directory");
        let mut agent = agent(dir.path(), "first");
        let guard = || {
            std::fs::read_to_string(dir.path().join("guard"))
                .ok()?
                .parse()
                .ok()
        };
        let mut first = None;
        eventually("the guard is there", || {
            first = guard();
            first.is_some()
        });
        let pid = first.and_then(rustix::process::Pid::from_raw).expect("a guard");
        rustix::process::kill_process(pid, how).expect("a signal to the guard");
        eventually("there is another guard", || {
            guard().is_some_and(|now| Some(now) != first)
        });
        agent.kill().expect("SIGKILL");
        agent.wait().expect("the agent's end");
        eventually("the second guard ends", || !endings(dir.path()).is_empty());
        assert_eq!(endings(dir.path()), ["Undone(1)"]);
    }
}

fn somebody_who_holds_the_lock_is_no_successor() {
    // On a busy machine, the guard may have undone everything before this process runs again; the test then starts over.
    for _ in 0..20 {
        let dir = tempfile::tempdir().expect("a directory");
        let mut agent = agent(dir.path(), "first");
        agent.kill().expect("SIGKILL");
        agent.wait().expect("the agent's end");
        let lock = std::fs::File::open(dir.path().join("private/agent.lock")).expect("the lock's file");
        let is_held = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive).is_ok();
        eventually("the guard ends", || !endings(dir.path()).is_empty());
        assert_eq!(endings(dir.path()), ["Undone(1)"]);
        if is_held {
            return;
        }
    }
    panic!("the lock was never free between the agent's end and the guard's");
}

/// How long a successor waits in these tests.
const WAITS: Waits = Waits {
    patience: Duration::from_secs(3),
    silence: Duration::from_secs(2),
};

/// Kills an agent whose guard is stopped or hangs: its changes stay in the journal.
fn killed(mut agent: Child) {
    agent.kill().expect("SIGKILL");
    agent.wait().expect("the agent's end");
}

/// The process of the most recently started guard.
fn guard_of(markers: &Path) -> rustix::process::Pid {
    let mut guard = None;
    eventually("the guard is there", || {
        let pid = std::fs::read_to_string(markers.join("guard")).ok();
        guard = pid.and_then(|pid| rustix::process::Pid::from_raw(pid.parse().ok()?));
        guard.is_some()
    });
    guard.expect("a guard")
}

fn signal(pid: rustix::process::Pid, signal: rustix::process::Signal) {
    rustix::process::kill_process(pid, signal).expect("a signal");
}

/// Stops a process, and waits until it is stopped.
fn stop(pid: rustix::process::Pid) {
    signal(pid, rustix::process::Signal::STOP);
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    eventually("the process stops", || {
        std::fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "))
    });
}

fn is_gone(pid: rustix::process::Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| stat.contains(") Z ")) || rustix::process::test_kill_process(pid).is_err()
}

/// Takes over what a dead agent left; holds the exclusive right to act for a while.
fn play_successor(dir: &Path) {
    let waits = Waits {
        patience: Duration::from_secs(40),
        ..WAITS
    };
    let (journal, locks) = acting::take_over_within(dir, dir, waits).expect("the right to act");
    let alone = markers().join("alone");
    std::fs::File::create_new(&alone).expect("no other acts at the same time");
    assert_eq!(journal.in_force(), [VmId(7)]);
    std::thread::sleep(Duration::from_millis(200));
    std::fs::remove_file(&alone).expect("the marker");
    drop((journal, locks));
    let own = markers().join(format!("followed-{}", std::process::id()));
    std::fs::write(own, "").expect("a marker");
}

fn a_stopped_guard_of_a_dead_agent_is_ended_by_who_follows() {
    let dir = tempfile::tempdir().expect("a directory");
    let agent = agent(dir.path(), "first");
    let guard = guard_of(dir.path());
    stop(guard);
    killed(agent);
    let (journal, locks) = acting::take_over_within(dir.path(), dir.path(), WAITS).expect("the right to act");
    assert!(
        is_gone(guard),
        "it must not wake up and undo what the next one does"
    );
    assert_eq!(journal.in_force(), [VmId(7)], "what it left is to be undone");
    let said = journal.warnings.join("\n");
    assert!(
        said.contains(&guard.as_raw_nonzero().to_string()) && said.contains("stopped"),
        "{said}"
    );
    drop(locks);
    assert_eq!(undone(dir.path()), "");
}

fn a_guard_that_hangs_while_it_undoes_is_ended_by_who_follows() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("hang"), "").expect("a marker");
    let agent = agent(dir.path(), "first");
    let guard = guard_of(dir.path());
    killed(agent);
    eventually("the guard holds the journal", || {
        let owner = Lock::owner(dir.path()).expect("the lock");
        owner.is_some_and(|owner| owner.process.pid == guard.as_raw_nonzero().get())
    });
    let (journal, _locks) =
        acting::take_over_within(dir.path(), dir.path(), WAITS).expect("the right to act");
    assert!(is_gone(guard));
    assert_eq!(journal.in_force(), [VmId(7)]);
    assert!(
        journal.warnings.join("\n").contains("silent"),
        "{:?}",
        journal.warnings
    );
}

fn a_guard_that_undoes_is_not_ended_however_long_it_takes() {
    let dir = tempfile::tempdir().expect("a directory");
    std::fs::write(dir.path().join("slow"), "").expect("a marker");
    let agent = agent(dir.path(), "first");
    let guard = guard_of(dir.path());
    killed(agent);
    eventually("the guard undoes", || dir.path().join("undoing").exists());
    // Shorter than on a host, and yet far longer than a working guard appears idle on a busy machine.
    let waits = Waits {
        patience: Duration::from_secs(3),
        silence: Duration::from_secs(20),
    };
    let said = acting::take_over_within(dir.path(), dir.path(), waits)
        .expect_err("the guard undoes")
        .to_string();
    assert!(
        said.contains(&guard.as_raw_nonzero().to_string()) && said.contains("wait for it"),
        "{said}"
    );
    assert!(!is_gone(guard));
    std::fs::remove_file(dir.path().join("slow")).expect("the marker");
    eventually("the guard ends", || !endings(dir.path()).is_empty());
    assert_eq!(endings(dir.path()), ["Undone(1)"]);
}

fn a_stopped_guard_of_a_stopped_agent_is_left_and_said_with_the_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut agent = agent(dir.path(), "first");
    let guard = guard_of(dir.path());
    stop(guard);
    stop(rustix::process::Pid::from_child(&agent));
    let said = acting::take_over_within(dir.path(), dir.path(), WAITS)
        .expect_err("the agent may wake up")
        .to_string();
    assert!(said.contains(&format!("kill -KILL {}", agent.id())), "{said}");
    assert!(!is_gone(guard) && agent.try_wait().expect("a child").is_none());
    killed(agent);
    drop(acting::take_over_within(dir.path(), dir.path(), WAITS).expect("the right to act"));
    assert!(is_gone(guard));
}

fn two_who_follow_a_stopped_guard_act_one_after_the_other() {
    let dir = tempfile::tempdir().expect("a directory");
    let agent = agent(dir.path(), "first");
    stop(guard_of(dir.path()));
    killed(agent);
    let follow = || {
        let mut command = Command::new(std::env::current_exe().expect("this binary"));
        command
            .arg("play-successor")
            .arg(dir.path())
            .env(MARKERS, dir.path());
        command.spawn().expect("a successor")
    };
    for mut one in [follow(), follow()] {
        assert!(one.wait().expect("its end").success());
    }
    assert!(endings(dir.path()).is_empty());
}

fn a_state_directory_that_is_moved_away_takes_no_undo_with_it() {
    let outside = tempfile::tempdir().expect("a directory");
    let state = outside.path().join("state");
    let agent = agent_with(&state, outside.path(), "first");
    std::fs::rename(&state, outside.path().join("elsewhere")).expect("a directory that is moved");
    killed(agent);
    eventually("the guard ends", || !endings(outside.path()).is_empty());
    assert_eq!(endings(outside.path()), ["Undone(1)"]);
    assert_eq!(undone(outside.path()), "seven {0: {3}} 15ms of every 30ms\n");
    assert!(!state.exists(), "nothing new is made in its place");
}

fn a_journal_that_is_gone_is_said_by_who_follows() {
    for (is_whole, is_guarded) in [(true, false), (false, false), (false, true)] {
        let outside = tempfile::tempdir().expect("a directory");
        let (root, state) = (outside.path(), outside.path().join("state"));
        let (journal, mut locks) = acting::take_over_within(root, &state, WAITS).expect("the right to act");
        assert_eq!(locks.lost_journal(), None, "{:?}", journal.warnings);
        locks.set_guarded(is_guarded);
        drop((journal, locks));
        if is_whole {
            std::fs::remove_dir_all(&state).expect("a directory that is removed");
        } else {
            for name in ["journal", "journal.copy"] {
                std::fs::remove_file(state.join("private").join(name)).expect("a file");
            }
        }
        // An agent with another state directory refuses to begin.
        let other = acting::take_over_within(root, &outside.path().join("other"), WAITS);
        let said = other.expect_err("what was changed is not known").to_string();
        assert!(
            said.contains("homenode release --state") && said.contains("/state"),
            "{said}"
        );
        // The successor reports the loss too, until everything was undone once.
        for _ in 0..2 {
            let (journal, locks) = acting::take_over_within(root, &state, WAITS).expect("the right to act");
            let said = locks.lost_journal().expect("it is said");
            assert!(
                said.contains("/state/private") && journal.warnings.contains(&said.to_owned()),
                "{said}"
            );
        }
        let (_journal, mut locks) = acting::take_over_within(root, &state, WAITS).expect("the right to act");
        locks.set_undone();
        drop(locks);
        let (journal, locks) = acting::take_over_within(root, &state, WAITS).expect("the right to act");
        assert_eq!(locks.lost_journal(), None, "{:?}", journal.warnings);
    }
}

/// The agent dies while its tmpfs is full or read-only, as can happen to `/run`.
fn a_full_or_read_only_disk_keeps_nothing_from_being_undone() {
    for is_full in [true, false] {
        let outside = tempfile::tempdir().expect("a directory");
        let small = outside.path().join("small");
        std::fs::create_dir(&small).expect("a directory");
        if !mount(&["-t", "tmpfs", "-o", "size=1m,mode=700", "tmpfs"], &small) {
            eprintln!("skipped: a full disk (mounting takes root)");
            return;
        }
        let mut agent = agent_with(&small, outside.path(), "first");
        if is_full {
            let filled = std::fs::write(small.join("filler"), vec![0u8; 2 << 20]);
            assert!(filled.is_err(), "the disk is full");
        } else {
            // Files open for writing keep a mount from being read-only, but not a second mount of the same disk.
            assert!(mount(&["--bind", &small.display().to_string()], &small));
            assert!(mount(&["-o", "remount,bind,ro"], &small));
        }
        agent.kill().expect("SIGKILL");
        agent.wait().expect("the agent's end");
        eventually("the guard ends", || !endings(outside.path()).is_empty());
        assert_eq!(endings(outside.path()), ["Undone(1)"]);
        assert_eq!(undone(outside.path()), "seven {0: {3}} 15ms of every 30ms\n");
        for _ in 0..if is_full { 1 } else { 2 } {
            let unmounted = Command::new("umount").arg(&small).status();
            assert!(unmounted.is_ok_and(|status| status.success()));
        }
    }
}

fn mount(arguments: &[&str], on: &Path) -> bool {
    let mounted = Command::new("mount").args(arguments).arg(on).status();
    mounted.is_ok_and(|status| status.success())
}

fn a_guard_that_cannot_start_is_an_error() {
    let error =
        guard::spawn(Path::new("/does/not/exist"), &[], &Heartbeat::default()).expect_err("no such binary");
    assert!(error.to_string().contains("/does/not/exist"), "{error}");
    let error = guard::spawn(Path::new("/bin/true"), &[], &Heartbeat::default()).expect_err("not a guard");
    assert!(matches!(error, guard::GuardError::NotReady { .. }), "{error}");
}
