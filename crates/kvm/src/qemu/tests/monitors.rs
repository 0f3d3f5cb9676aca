//! Answers of monitors, monitors that do not answer, and restoring without them.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};

use homenode_undo::journal::{Before, Journal};

use super::super::visits::MONITORS_MAX;
use super::*;
use crate::levers::{Home, Pins};
use crate::{Leftovers, levers};

#[test]
fn threads_without_names_are_told_by_the_monitor() {
    let guest = Guest::start(&[], "real-nameless", 2);
    let mut qemu = guest.seen();
    assert!(until(|| vcpus_of(&mut qemu, guest.id) == 2));
}

#[test]
fn a_monitor_tells_the_state_sets_the_balloon_and_is_left_at_once() {
    let guest = Guest::start(&[], "real-monitor,debug-threads=on", 3);
    let mut qemu = guest.seen();
    assert_eq!(
        qemu.describe(guest.id).unwrap().balloon,
        None,
        "it was not asked yet"
    );
    assert!(until(|| qemu.describe(guest.id).unwrap().balloon.is_some()));
    assert_eq!(qemu.standstill(guest.id), Ok(None));
    done(&mut qemu, |qemu| qemu.set_memory(guest.id, Bytes(48 << 20)));
    done(&mut qemu, |qemu| qemu.set_stats_period(guest.id, 2));
    let interval = json!({"path": "/machine/peripheral/b0", "property": "guest-stats-polling-interval"});
    let polled = done(&mut qemu, |qemu| {
        qemu.command(guest.id, ("qom-get", interval.clone()))
    });
    assert_eq!(polled, json!(2));
    assert_eq!(qemu.guest_memory(guest.id), Ok(None), "no driver speaks");
    let path = || {
        qemu.asker
            .said(guest.id, qemu.vms[&guest.id].process.pid)?
            .heard
            .balloon_path
            .clone()
    };
    assert!(until(
        || path().is_some_and(|path| path == "/machine/peripheral/b0")
    ));
    let pid = qemu.found(guest.id).unwrap();
    ask_in_turn(pid, &guest.socket(), &("stop", json!({}))).unwrap();
    let mut again = guest.seen();
    assert!(until(|| {
        again.describe(guest.id).unwrap();
        again.standstill(guest.id) == Ok(Some(Immovable::Paused))
    }));
    let refused = ask_in_turn(pid, &guest.socket(), &("no-such-command", json!({}))).unwrap_err();
    assert!(refused.to_string().contains("no-such-command"), "{refused:?}");
}

#[test]
fn a_monitor_that_somebody_else_uses_is_busy_and_then_free() {
    let guest = Guest::start(&[], "real-busy,debug-threads=on", 4);
    let pid = guest.seen().found(guest.id).unwrap();
    let ask = || ask(pid, &guest.socket(), &[("query-status", json!({}))]);
    assert!(until(|| ask().is_ok()));
    // Connects like Proxmox' daemon, which stays for as long as its question takes.
    let mut other = UnixStream::connect(guest.socket()).unwrap();
    let mut greeting = [0; 16];
    other.read_exact(&mut greeting).unwrap();
    assert!(matches!(ask(), Err(MonitorError::Busy { .. })));
    drop(other);
    assert!(until(|| ask().is_ok()));
}

#[test]
fn a_socket_of_another_process_is_refused_and_hears_nothing() {
    let guest = Guest::start(&[], "real-foreign,debug-threads=on", 5);
    let pid = guest.seen().found(guest.id).unwrap();
    let path = guest.dir.path().join("foreign");
    let listener = UnixListener::bind(&path).unwrap();
    let asked = ask(pid, &path.display().to_string(), &[]);
    let own = std::process::id().cast_signed();
    assert_eq!(
        asked,
        Err(MonitorError::Foreign {
            path: path.display().to_string(),
            pid: own
        })
    );
    let (mut heard, _) = listener.accept().unwrap();
    let mut text = Vec::new();
    heard.read_to_end(&mut text).unwrap();
    assert_eq!(text, [0; 0]);
    // A file that is not a socket, and a path without a file.
    for (name, text) in [("file", Some("x")), ("none", None)] {
        let path = guest.dir.path().join(name);
        if let Some(text) = text {
            std::fs::write(&path, text).unwrap();
        }
        let asked = ask(pid, &path.display().to_string(), &[]);
        assert!(
            matches!(asked, Err(MonitorError::Broken { .. })),
            "{name}: {asked:?}"
        );
    }
}

/// VMs that seem to be run by the test's own process, with monitors that never accept a connection.
struct Silent {
    tree: homenode_kernel::fake::Tree,
    listeners: Vec<UnixListener>,
    paths: Vec<String>,
}

impl Silent {
    fn new(monitor_count: usize) -> Silent {
        let tree = homenode_kernel::fake::Tree::new(&[("proc/stat", "")]);
        let own = std::process::id();
        std::os::unix::fs::symlink(format!("/proc/{own}"), tree.root().join(format!("proc/{own}"))).unwrap();
        let path = |at: usize| tree.root().join(format!("qmp-{at}"));
        let listener = |at: usize| {
            let listener = UnixListener::bind(path(at)).unwrap();
            listener.set_nonblocking(true).unwrap();
            listener
        };
        Silent {
            listeners: (0..monitor_count).map(listener).collect(),
            paths: (0..monitor_count)
                .map(|at| path(at).display().to_string())
                .collect(),
            tree,
        }
    }

    /// Returns a view of this many VMs, each with `of_each` of the monitors.
    fn seen(&self, mut qemu: Qemu, vm_count: usize, of_each: usize) -> (Qemu, Vec<VmId>) {
        let own = std::process::id().cast_signed();
        let mut ids = Vec::new();
        for at in 0..vm_count {
            let tree = homenode_kernel::fake::Tree::new(&[]);
            let line = format!("kvm\0-name\0silent-{at}\0-device\0virtio-balloon-pci,id=b0\0");
            tree.write("proc/50/cmdline", &line);
            write_process(&tree, 50, 0);
            let mut one = Qemu::new(tree.root());
            one.scan(true).unwrap();
            let (id, mut vm) = one.vms.pop_first().unwrap();
            vm.process = task::process(Path::new("/"), own).unwrap().unwrap();
            vm.tasks = Tasks::new(Path::new("/"), own);
            vm.told.monitors = self.paths[at * of_each..][..of_each].to_vec();
            qemu.vms.insert(id, vm);
            ids.push(id);
        }
        (qemu, ids)
    }

    /// Returns how many connections have been made since the last call.
    fn taken(&self) -> usize {
        let taken = |listener: &UnixListener| std::iter::from_fn(|| listener.accept().ok()).count();
        self.listeners.iter().map(taken).sum()
    }
}

#[test]
fn no_look_at_a_vm_waits_for_its_monitor_and_no_command_for_one_that_gave_no_answer() {
    let silent = Silent::new(40);
    let (mut qemu, ids) = silent.seen(Qemu::new(silent.tree.root()), 40, 1);
    // This is checked before any monitor has been visited, and again after all have.
    for round in 0..2 {
        assert_eq!(qemu.list().unwrap().len(), ids.len());
        for id in &ids {
            let domain = qemu.describe(*id).unwrap();
            assert_eq!(
                domain.balloon, None,
                "what it holds is not known, so it is not changed"
            );
            assert_eq!(qemu.standstill(*id), Ok(None));
            assert_eq!(qemu.guest_memory(*id), Ok(None));
            let run = qemu.run(*id);
            let mut threads = qemu.threads(&run).unwrap();
            qemu.roles(&run, &mut threads);
            assert!(threads.iter().all(|thread| !matches!(thread.role, Role::Vcpu(_))));
            assert!(qemu.set_memory(*id, Bytes(1 << 20)).is_err());
            assert!(qemu.set_stats_period(*id, 2).is_err());
        }
        assert_eq!(
            qemu.time_left, COMMANDS_MAX,
            "round {round}: nothing was waited for"
        );
        qemu.asker.wait_for(&ids, Duration::from_secs(60));
    }
    let notices = qemu.take_notices().join("\n");
    for word in [
        "VM silent-7 is left alone",
        "debug-threads=on",
        "sends no greeting",
    ] {
        assert!(notices.contains(word), "{word}: {notices}");
    }
    assert_eq!(silent.taken(), 40, "one connection each, in all that time");
}

#[test]
fn of_many_monitors_of_a_vm_a_few_are_asked_each_once_and_that_is_said() {
    let silent = Silent::new(60);
    let (mut qemu, ids) = silent.seen(Qemu::new(silent.tree.root()), 1, 60);
    qemu.list().unwrap();
    qemu.asker.wait_for(&ids, Duration::from_secs(60));
    assert_eq!(silent.taken(), MONITORS_MAX);
    let notices = qemu.take_notices().join("\n");
    assert!(notices.contains("has 60 monitors"), "{notices}");

    drop(qemu);
    let (mut qemu, ids) = silent.seen(Qemu::new(silent.tree.root()), 1, 1);
    let path = silent.paths[0].clone();
    let spelt = (0..60).map(|count| format!("/{}{path}", "./".repeat(count)));
    qemu.vms.get_mut(&ids[0]).unwrap().told.monitors = spelt.collect();
    qemu.list().unwrap();
    qemu.asker.wait_for(&ids, Duration::from_secs(60));
    assert_eq!(silent.taken(), 1, "they are one");
}

#[test]
fn all_commands_share_one_time_and_those_without_any_are_refused_at_once() {
    let silent = Silent::new(60);
    let (mut qemu, ids) = silent.seen(Qemu::for_restoring(silent.tree.root()), 60, 1);
    qemu.list().unwrap();
    assert_eq!(silent.taken(), 0, "who restores asks no monitor of itself");
    let refusals: Vec<String> = ids
        .iter()
        .map(|id| qemu.memory_now(*id).unwrap_err().cause().to_owned())
        .collect();
    assert_eq!(qemu.time_left, Ns::ZERO);
    let waited = refusals.iter().filter(|cause| !cause.contains("used up")).count();
    assert_eq!(waited, 1, "{refusals:?}");
    // The next call must know which monitors answer.
    qemu.asker.wait_for(&ids, Duration::from_secs(60));
    for id in &ids {
        qemu.hear(*id);
        assert!(qemu.vms[id].heard.said.trouble.is_some());
    }
}

/// A thread of the test's own process that plays a vCPU's thread without a name.
struct Nameless {
    thread: VcpuThread,
    _end: std::sync::mpsc::Sender<()>,
}

impl Nameless {
    fn begin() -> Nameless {
        let (tell, told) = std::sync::mpsc::channel();
        let (end, is_over) = std::sync::mpsc::channel::<()>();
        std::thread::spawn(move || {
            tell.send(rustix::thread::gettid().as_raw_nonzero().get())
                .unwrap();
            let _ = is_over.recv();
        });
        let tid = told.recv().unwrap();
        let own = std::process::id().cast_signed();
        let start_ticks = task::thread_start(Path::new("/"), own, tid).unwrap();
        Nameless {
            thread: VcpuThread { tid, start_ticks },
            _end: end,
        }
    }

    fn affinity(&self) -> CpuSet {
        let own = std::process::id().cast_signed();
        task::affinity(Path::new("/"), own, self.thread.tid)
            .unwrap()
            .unwrap()
    }
}

#[test]
fn what_a_vm_ran_on_is_restored_by_the_journal_without_its_monitor() {
    let silent = Silent::new(1);
    let (mut qemu, ids) = silent.seen(Qemu::for_restoring(silent.tree.root()), 1, 1);
    let (vcpu, other) = (Nameless::begin(), Nameless::begin());
    let all = vcpu.affinity();
    let one = CpuSet::one(all.iter().next().unwrap());
    qemu.pin(&[vcpu.thread.tid, other.thread.tid], &one).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    // The start time of the second thread does not match, as if its number now belonged to another thread.
    let gone = VcpuThread {
        start_ticks: other.thread.start_ticks + 1,
        ..other.thread
    };
    let before = Before {
        vcpus: [(0, all.clone()), (1, all.clone())].into(),
        emulator: all.clone(),
        threads: [(0, vcpu.thread), (1, gone)].into(),
        ..Before::default()
    };
    journal.begin(qemu.run(ids[0]), before).unwrap();
    let pins = [(0, vec![one.clone()]), (1, vec![one.clone()])];
    journal.set(ids[0], &Pins(pins.into())).unwrap();
    journal
        .set(
            ids[0],
            &Home(homenode_host::HomeInForce::On {
                nodes: NodeSet::one(homenode_units::NodeId(0)),
                cpus: CpuSet::new(),
            }),
        )
        .unwrap();
    levers::undo(&mut qemu, silent.tree.root(), &mut journal, ids[0]).unwrap();
    assert!(journal.in_force().is_empty());
    assert_eq!(vcpu.affinity(), all);
    assert_eq!(other.affinity(), one, "that is no vCPU of it");
    assert_eq!(silent.taken(), 0, "no monitor was asked");
}

#[test]
fn a_guard_restores_a_qemu_that_stands_still_and_gives_its_threads_no_names() {
    let guest = Guest::start(&[], "real-still", 9);
    let mut qemu = guest.seen();
    assert!(until(|| vcpus_of(&mut qemu, guest.id) == 2));
    let before = qemu.affinities(guest.id);
    let dir = tempfile::tempdir().unwrap();
    let (_acts, mut host) = acting(&dir);
    let mut version = None;
    assert!(until(|| {
        let sample = host.sample().unwrap();
        version = Some(sample.version);
        sample
            .vms
            .iter()
            .any(|vm| vm.id == guest.id && vm.vcpus.len() == 2)
    }));
    let mut plan = Plan::new(version.unwrap());
    let node = NodeSet::one(homenode_units::NodeId(1));
    plan.decide(
        "test",
        Act::SetHome { nodes: node }.on(guest.id),
        "to go there".into(),
    );
    let cpu = CpuSet::one(homenode_units::CpuId(1));
    let pin = Act::PinVcpus {
        vcpus: vec![0, 1],
        cpus: cpu.clone(),
    };
    plan.decide("test", pin.on(guest.id), "to run there".into());
    let receipt = host.commit(&plan).unwrap();
    assert_eq!(receipt.outcomes, [Outcome::Done, Outcome::Done]);
    assert_eq!(qemu.affinities(guest.id)[&Role::Vcpu(1)], cpu);
    // The agent is killed, and QEMU hangs.
    drop(host);
    let pid = Pid::from_raw(qemu.found(guest.id).unwrap()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).unwrap();
    let mut journal = Journal::open(&dir.path().join("state")).unwrap();
    let undone = Leftovers::new(&Vms::Qemu, Path::new("/")).undo(&mut journal);
    assert_eq!((undone.failures, undone.vms), (Vec::new(), vec![guest.id]));
    assert_eq!(qemu.affinities(guest.id), before);
    // The next agent, which has its own state directory, must not consider this journal lost.
    drop(journal);
    let (_, mut locks) = homenode_undo::acting::take_over(Path::new("/"), &dir.path().join("state")).unwrap();
    locks.set_undone();
}
