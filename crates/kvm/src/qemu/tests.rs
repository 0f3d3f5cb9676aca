//! Tests with real QEMUs that emulate: what this module does to them does not need KVM.

use std::process::{Child, Command as Program, Stdio};
use std::time::{Duration, Instant};

use homenode_host::{Act, Host as _, Outcome, Plan, Setting};
use homenode_undo::Options;
use homenode_undo::RealHost as _;
use rustix::process::Pid;

use super::monitor::{Command, MonitorError};
use super::questions::standstill;
use super::visits::Target;
use super::*;
use crate::{KvmHost, Vms};

mod claims;
mod real_options;

const VCPUS: u16 = 2;
/// Only one agent may act on a host at a time, in tests too.
static ACTS: std::sync::Mutex<()> = std::sync::Mutex::new(());

/// Starts an agent that acts on this host, with its state in `dir`, and locks out other tests that do. A failed test may have
/// left a record of a state directory that is gone, after which the next agent would refuse to begin; that record is removed.
fn acting(dir: &tempfile::TempDir) -> (std::sync::MutexGuard<'static, ()>, KvmHost) {
    let acts = ACTS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let left = Path::new("/run/homenode/private/acting.lock");
    let of_a_test = format!("\"state\":\"{}/.tmp", std::env::temp_dir().display());
    if std::fs::read_to_string(left).is_ok_and(|said| said.contains(&of_a_test)) {
        let _ = std::fs::remove_file(left);
    }
    let options = Options {
        state_dir: dir.path().join("state"),
        topology_socket: dir.path().join("topology.sock"),
        ..Options::new(homenode_kernel::fake::machine(&[1, 1]))
    };
    let host = KvmHost::connect(&Vms::Qemu, options).expect("no other agent acts here");
    (acts, host)
}

/// A QEMU process, which ends when this is dropped, and the directory of its monitor.
struct Guest {
    child: Child,
    dir: tempfile::TempDir,
    id: VmId,
}

impl Guest {
    /// Starts a QEMU. `around` wraps its command (such as `unshare`), `name` is the value of `-name`.
    fn start(around: &[&str], name: &str, number: u128) -> Guest {
        Guest::start_with(around, name, number, &[])
    }

    /// Like [`Guest::start`], with further options.
    fn start_with(around: &[&str], name: &str, number: u128, more: &[&str]) -> Guest {
        let dir = tempfile::tempdir().unwrap();
        // A QEMU that runs as another user creates its monitor there too.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        std::fs::set_permissions(dir.path(), mode).unwrap();
        let id = VmId((0xfeed << 64) + (u128::from(std::process::id()) << 8) + number);
        let monitor = format!("unix:{}/qmp,server=on,wait=off", dir.path().display());
        let uuid = id.to_string();
        let qemu = [
            "qemu-system-x86_64",
            "-M",
            "q35",
            "-accel",
            "tcg,thread=multi",
            "-m",
            "64",
            "-smp",
            "2",
            "-nodefaults",
            "-display",
            "none",
            "-name",
            name,
            "-uuid",
            &uuid,
            "-qmp",
            &monitor,
            "-device",
            "virtio-balloon-pci,id=b0",
        ];
        let words: Vec<&str> = around.iter().chain(&qemu).chain(more).copied().collect();
        let child = Program::new(words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .spawn();
        let guest = Guest {
            child: child.expect("qemu-system-x86 is installed"),
            dir,
            id,
        };
        let found = until(|| Qemu::new(Path::new("/")).list().unwrap().contains(&guest.id));
        assert!(found, "its process is not found");
        let socket = guest.socket();
        assert!(until(|| Path::new(&socket).exists()), "no monitor");
        guest
    }

    fn socket(&self) -> String {
        self.dir.path().join("qmp").display().to_string()
    }

    /// Returns the agent's view of the QEMU.
    fn seen(&self) -> Qemu {
        let mut qemu = Qemu::new(Path::new("/"));
        assert!(qemu.list().unwrap().contains(&self.id));
        qemu
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // A QEMU in its own namespace is not a child, so it is killed first; its namespace's creator then ends too.
        if let Some(vm) = Qemu::new(Path::new("/")).found(self.id) {
            let _ = rustix::process::kill_process(Pid::from_raw(vm).unwrap(), rustix::process::Signal::KILL);
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Qemu {
    fn found(&mut self, vm: VmId) -> Option<i32> {
        self.list().unwrap();
        Some(self.vms.get(&vm)?.process.pid)
    }

    fn run(&self, id: VmId) -> Run {
        let vm = &self.vms[&id];
        Run {
            vm: id,
            name: vm.name.clone(),
            runtime_id: vm.process.pid as u32,
            pid: vm.process.pid,
            start_ticks: vm.process.start_ticks,
        }
    }

    fn affinities(&mut self, id: VmId) -> BTreeMap<Role, CpuSet> {
        let run = self.run(id);
        let threads = self.threads(&run).unwrap();
        threads
            .into_iter()
            .map(|thread| (thread.role, thread.affinity))
            .collect()
    }
}

fn until(mut is_so: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + Duration::from_secs(20);
    while Instant::now() < end {
        if is_so() {
            return true;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    false
}

/// Sends commands to a process's monitor, one after the other.
fn ask(pid: i32, path: &str, commands: &[Command]) -> Result<Vec<Value>, MonitorError> {
    let target = Target {
        name: "it".to_owned(),
        pid,
        monitors: vec![path.to_owned()],
        is_asked: false,
    };
    let mut asker = Asker::new(Path::new("/"));
    asker.watch(VmId(1), target);
    asker.command(VmId(1), commands.to_vec(), Ns::from_secs(10))
}

/// As `ask`, once no other client is connected.
fn ask_in_turn(pid: i32, path: &str, command: &Command) -> Result<Vec<Value>, MonitorError> {
    let mut asked = Ok(Vec::new());
    let is_free = until(|| {
        asked = ask(pid, path, std::slice::from_ref(command));
        !matches!(asked, Err(MonitorError::Busy { .. }))
    });
    assert!(is_free, "{asked:?}");
    asked
}

/// Carries out a change; retries, since the machine may be busy.
fn done<T>(qemu: &mut Qemu, mut change: impl FnMut(&mut Qemu) -> Result<T, CallError>) -> T {
    let mut last = None;
    let is_done = until(|| {
        qemu.take_time();
        last = Some(change(qemu));
        matches!(last, Some(Ok(_)))
    });
    assert!(is_done, "{:?}", last.and_then(Result::err));
    last.unwrap().unwrap()
}

fn vcpus_of(qemu: &mut Qemu, id: VmId) -> usize {
    let roles = qemu.affinities(id);
    roles.keys().filter(|role| matches!(role, Role::Vcpu(_))).count()
}

#[test]
fn a_qemu_is_found_and_its_threads_are_pinned_and_given_back() {
    let guest = Guest::start(&[], "real-pins,debug-threads=on", 1);
    let mut qemu = guest.seen();
    let domain = qemu.describe(guest.id).unwrap();
    assert_eq!((domain.name.as_str(), domain.vcpus_current), ("real-pins", VCPUS));
    assert_eq!(domain.ram_sizes, [Bytes(64 << 20)]);
    assert!(
        Arc::ptr_eq(&domain, &qemu.describe(guest.id).unwrap()),
        "the same as long as nothing changes"
    );
    assert!(until(|| vcpus_of(&mut qemu, guest.id) == 2));
    let run = qemu.run(guest.id);
    assert_eq!(qemu.knows(&run), Ok(true));

    let before = qemu.affinities(guest.id);
    let all = before[&Role::Emulator].clone();
    let one: CpuSet = CpuSet::one(all.iter().next().unwrap());
    qemu.pin_vcpu(guest.id, 1, &one).unwrap();
    qemu.pin_emulator(guest.id, &one).unwrap();
    let pinned = qemu.affinities(guest.id);
    assert_eq!((&pinned[&Role::Vcpu(1)], &pinned[&Role::Emulator]), (&one, &one));
    assert_eq!(pinned[&Role::Vcpu(0)], all, "that one is not pinned");
    let threads = qemu.threads(&run).unwrap();
    // Without a limit, the cgroup's CPUs are all CPUs that the QEMU could run on at first.
    let described = Domain {
        cpuset: Some(all.clone()),
        ..Domain::clone(&domain)
    };
    let pins = [(0, all.clone()), (1, one.clone())];
    assert_eq!(qemu.pins(&described, &threads), pins.into());
    assert!(qemu.is_unpinned(&described, &all) && !qemu.is_unpinned(&described, &one));
    qemu.pin_vcpu(guest.id, 1, &all).unwrap();
    qemu.pin_emulator(guest.id, &all).unwrap();
    assert_eq!(qemu.affinities(guest.id), before);
}

/// Pins are restored even if nothing shows the cgroup's CPUs, as when systemd delegates no cpuset. So are the CPUs of a vCPU that
/// was added later, which QEMU starts where the agent had put the emulator.
#[test]
fn pins_are_given_back_also_of_a_vcpu_that_is_plugged_in_at_home() {
    let guest = Guest::start_with(
        &[],
        "real-plug,debug-threads=on",
        8,
        &["-smp", "1,sockets=3,maxcpus=3"],
    );
    let mut qemu = guest.seen();
    assert!(until(|| vcpus_of(&mut qemu, guest.id) == 1));
    let before = qemu.affinities(guest.id);
    let dir = tempfile::tempdir().unwrap();
    let (_acts, mut host) = acting(&dir);
    let mut plan = Plan::new(host.sample().unwrap().version);
    let node = NodeSet::one(homenode_units::NodeId(1));
    plan.decide(
        "test",
        Act::SetHome { nodes: node }.on(guest.id),
        "to go there".into(),
    );
    let cpu = CpuSet::one(homenode_units::CpuId(1));
    let pin = Act::PinVcpus {
        vcpus: vec![0],
        cpus: cpu.clone(),
    };
    plan.decide("test", pin.on(guest.id), "to run there".into());
    let receipt = host.commit(&plan).unwrap();
    assert_eq!(receipt.outcomes, [Outcome::Done, Outcome::Done]);

    let pid = qemu.found(guest.id).unwrap();
    let plug = |socket: u16| {
        let place = json!({"driver": "qemu64-x86_64-cpu", "socket-id": socket, "core-id": 0, "thread-id": 0});
        ask_in_turn(pid, &guest.socket(), &("device_add", place)).unwrap();
    };
    plug(1);
    let mut seen = Vec::new();
    assert!(until(|| {
        seen = host.sample().unwrap().vms;
        seen.iter().any(|vm| vm.id == guest.id && vm.vcpus.len() == 2)
    }));
    assert_eq!(qemu.affinities(guest.id)[&Role::Vcpu(1)], cpu);
    let vm = seen.iter().find(|vm| vm.id == guest.id).unwrap();
    assert_eq!(vm.settings.pinned_vcpus, [0; 0], "it was not pinned by hand");
    // Also a vCPU that the agent has not seen before it ends.
    plug(2);
    assert!(until(|| vcpus_of(&mut qemu, guest.id) == 3));
    assert_eq!(host.restore().failures, Vec::<String>::new());
    let after = qemu.affinities(guest.id);
    let all = &before[&Role::Emulator];
    assert!(
        after.values().all(|cpus| cpus == all),
        "{after:?}, it was {before:?}"
    );
}

/// Like a pod: its own mounts, its own process numbers, and a monitor that only it can see.
#[test]
fn a_qemu_in_namespaces_of_its_own_is_found_asked_and_told_apart() {
    if !rustix::process::geteuid().is_root() {
        return; // only root can make namespaces, and only root manages VMs
    }
    let around = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "--mount-proc",
        "sh",
        "-c",
    ];
    let dir = tempfile::tempdir().unwrap();
    let id = VmId((0xfeed << 64) + (u128::from(std::process::id()) << 8) + 6);
    let (inside, uuid) = (dir.path().display(), id.to_string());
    let script = format!(
        "mount -t tmpfs tmpfs {inside} && exec qemu-system-x86_64 -M q35 -accel tcg,thread=multi -m 64 -smp 2 -nodefaults \
         -display none -name real-pod -uuid {uuid} -qmp unix:{inside}/qmp,server=on,wait=off"
    );
    let child = Program::new(around[0])
        .args(&around[1..])
        .arg(script)
        .stdin(Stdio::null())
        .spawn();
    let guest = Guest {
        child: child.unwrap(),
        dir,
        id,
    };
    assert!(until(|| Qemu::new(Path::new("/"))
        .list()
        .unwrap()
        .contains(&guest.id)));
    assert!(
        !Path::new(&guest.socket()).exists(),
        "it is not to be seen from here"
    );
    let mut qemu = guest.seen();
    done(&mut qemu, |qemu| {
        qemu.command(guest.id, ("query-status", json!({})))
    });
    assert!(
        until(|| vcpus_of(&mut qemu, guest.id) == 2),
        "by numbers that it knows them by"
    );
    qemu.describe(guest.id).unwrap();
    assert_eq!(qemu.standstill(guest.id), Ok(None));
}

#[test]
fn what_ends_is_gone_and_says_so() {
    let guest = Guest::start(&[], "real-gone,debug-threads=on", 7);
    let mut qemu = guest.seen();
    let (id, run) = (guest.id, qemu.run(guest.id));
    drop(guest);
    assert!(qemu.is_gone(id));
    assert!(!qemu.list().unwrap().contains(&id));
    assert_eq!(qemu.knows(&run), Ok(false));
    let refused = qemu
        .pin_vcpu(id, 0, &CpuSet::one(homenode_units::CpuId(0)))
        .unwrap_err();
    assert!(refused.cause().contains("ended"), "{refused:?}");
}

/// Writes the `/proc` entry of a process of this user.
fn write_process(tree: &homenode_kernel::fake::Tree, pid: i32, user: u32) {
    let stat = homenode_kernel::fake::stat(pid, "kvm", 'S', 7, 0);
    tree.write(&format!("proc/{pid}/stat"), &stat);
    tree.write(
        &format!("proc/{pid}/status"),
        &format!("Name:\tkvm\nUid:\t{user}\t{user}\t{user}\t{user}\n"),
    );
}

#[test]
fn who_may_log_in_runs_no_vm_of_the_hosts() {
    let tree = homenode_kernel::fake::Tree::new(&[]);
    let own = rustix::process::geteuid().as_raw();
    for (pid, user) in [
        (50, 0),
        (51, 107),
        (52, 65534),
        (53, own),
        (54, 1000),
        (55, 100_107),
    ] {
        let line = format!("kvm\0-name\0vm-{pid}\0");
        tree.write(&format!("proc/{pid}/cmdline"), &line);
        write_process(&tree, pid, user);
    }
    // A setuid program that a user started under QEMU's name, and a program that only has QEMU's name.
    for (pid, ids) in [(56, "4711\t0\t0\t0"), (57, "0\t0\t0\t0")] {
        let line = format!("qemu-system-x86_64\0-name\0vm-{pid}\0");
        tree.write(&format!("proc/{pid}/cmdline"), &line);
        write_process(&tree, pid, 0);
        tree.write(&format!("proc/{pid}/status"), &format!("Uid:\t{ids}\n"));
    }
    std::os::unix::fs::symlink("/usr/bin/su", tree.root().join("proc/57/exe")).unwrap();
    let upgraded = "/usr/bin/qemu-system-x86_64 (deleted)";
    std::os::unix::fs::symlink(upgraded, tree.root().join("proc/50/exe")).unwrap();
    let mut qemu = Qemu::new(tree.root());
    assert_eq!(qemu.list().unwrap().len(), 4);
    let notices = qemu.take_notices();
    assert_eq!(notices.len(), 3, "{notices:?}");
    for (notice, user) in notices.iter().zip(["user 1000 ", "user 4711 ", "user 100107 "]) {
        assert!(notice.contains(user), "{notices:?}");
    }
}

#[test]
fn a_vm_of_libvirts_one_without_a_machine_and_a_bad_name_are_left_out_with_a_reason() {
    let tree = homenode_kernel::fake::Tree::new(&[("run/libvirt/qemu/theirs.pid", "51\n")]);
    let words = |words: &[&str]| words.iter().map(|word| format!("{word}\0")).collect::<String>();
    for (pid, line) in [
        (50, words(&["/usr/bin/kvm", "-name", "mine"])),
        (
            51,
            words(&["/usr/bin/qemu-system-x86_64", "-name", "guest=theirs"]),
        ),
        (52, words(&["/usr/bin/qemu-system-x86_64", "-M", "none", "-S"])),
        (53, words(&["qemu-kvm", "-name", "../../etc/passwd"])),
        (54, words(&["/usr/bin/vim", "qemu-system-x86_64"])),
        (55, words(&["kvm", "-name", "other", "-uuid", "not-one"])),
        (56, words(&["kvm", "-name", "mine"])),
    ] {
        tree.write(&format!("proc/{pid}/cmdline"), &line);
        write_process(&tree, pid, 0);
    }
    let mut qemu = Qemu::new(tree.root());
    let listed = qemu.list().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(qemu.describe(listed[0]).unwrap().name, "mine");
    let notices = qemu.take_notices().join("\n");
    for word in ["--host libvirt", "process 53", "not-one", "processes 50 and 56"] {
        assert!(notices.contains(word), "{word}:\n{notices}");
    }
    assert!(
        !notices.contains("process 52") && !notices.contains("process 54"),
        "{notices}"
    );
}

#[test]
fn a_process_that_becomes_a_qemu_late_is_found_in_a_later_scan() {
    let tree = homenode_kernel::fake::Tree::new(&[]);
    for pid in [50, 51] {
        tree.write(&format!("proc/{pid}/cmdline"), "/bin/sh\0start-vm\0");
        write_process(&tree, pid, 0);
    }
    let mut qemu = Qemu::new(tree.root());
    qemu.scan(false).unwrap();
    // A new process may be about to start a VM.
    tree.write("proc/50/cmdline", "kvm\0-name\0soon\0");
    qemu.scan(false).unwrap();
    assert_eq!(qemu.vms.len(), 1);
    for _ in 0..3 {
        qemu.scan(false).unwrap();
    }
    tree.write("proc/51/cmdline", "kvm\0-name\0late\0");
    let scans = (1..100).find(|_| {
        qemu.scan(false).unwrap();
        qemu.vms.len() == 2
    });
    assert!(scans.is_some_and(|scans| scans <= 20), "{scans:?}");
    // The guard looks for a VM that must exist, so it scans all processes.
    let mut qemu = Qemu::new(tree.root());
    for _ in 0..5 {
        tree.write("proc/51/cmdline", "/bin/sh\0start-vm\0");
        qemu.scan(false).unwrap();
    }
    tree.write("proc/51/cmdline", "kvm\0-name\0late\0");
    qemu.scan(true).unwrap();
    assert_eq!(qemu.vms.len(), 2);
}

#[test]
fn what_is_set_is_in_the_next_description_and_what_is_written_by_hand_within_seconds() {
    let tree = homenode_kernel::fake::Tree::new(&[("proc/50/cmdline", "kvm\0-name\0web\0")]);
    write_process(&tree, 50, 0);
    let mut qemu = Qemu::new(tree.root());
    let id = qemu.list().unwrap()[0];
    let home = |qemu: &mut Qemu| qemu.describe(id).unwrap().settings.clone().unwrap().home;
    assert_eq!(home(&mut qemu), None);
    tree.write("etc/homenode/vms/web.toml", "home = 1");
    assert_eq!(home(&mut qemu), None, "it was just looked up");
    qemu.vms.get_mut(&id).unwrap().next_look = now();
    let written = home(&mut qemu);
    assert_eq!(written.map(|home| home.to_string()), Some("1".into()));
    let permit = "250k".parse().unwrap();
    assert_eq!(set(&mut qemu, id, Setting::Permit(Some(permit))), Ok(true));
    let said = qemu.describe(id).unwrap().settings.clone().unwrap();
    assert_eq!(said.permit, Some(permit));
}

fn set(qemu: &mut Qemu, vm: VmId, setting: Setting) -> Result<bool, CallError> {
    let (settings, holds) = (&[setting], &|_: &homenode_host::VmSettings| true);
    qemu.change_settings(vm, &Change { settings, holds })
}

#[test]
fn of_settings_in_a_row_without_a_look_between_none_is_lost() {
    let tree = homenode_kernel::fake::Tree::new(&[("proc/50/cmdline", "kvm\0-name\0web\0")]);
    write_process(&tree, 50, 0);
    let mut qemu = Qemu::new(tree.root());
    let id = qemu.list().unwrap()[0];
    qemu.describe(id).unwrap();
    let mode = Some(homenode_host::Mode::Observe);
    assert_eq!(set(&mut qemu, id, Setting::Mode(mode)), Ok(true));
    let policy = Some("round-4k".parse().unwrap());
    assert_eq!(set(&mut qemu, id, Setting::MemoryPolicy(policy)), Ok(true));
    let said = qemu.describe(id).unwrap().settings.clone().unwrap();
    assert_eq!((said.mode, said.memory_policy), (mode, policy));
}

#[test]
fn a_file_of_a_name_is_no_ones_from_the_moment_that_a_second_vm_has_the_name() {
    let uuids = [
        "11111111-2222-3333-4444-555555555555",
        "66666666-7777-8888-9999-aaaaaaaaaaaa",
    ];
    let line = |uuid: &str| format!("kvm\0-name\0web\0-uuid\0{uuid}\0");
    let tree = homenode_kernel::fake::Tree::new(&[
        ("proc/50/cmdline", &line(uuids[0])),
        ("etc/homenode/vms/web.toml", "home = 1"),
    ]);
    write_process(&tree, 50, 0);
    let mut qemu = Qemu::new(tree.root());
    let first = qemu.list().unwrap()[0];
    assert!(
        qemu.describe(first)
            .unwrap()
            .settings
            .as_ref()
            .unwrap()
            .home
            .is_some()
    );
    tree.write("proc/51/cmdline", &line(uuids[1]));
    write_process(&tree, 51, 0);
    qemu.scan(true).unwrap();
    let all = qemu.list().unwrap();
    assert_eq!(all.len(), 2);
    for vm in &all {
        let why = qemu.describe(*vm).unwrap().settings.clone().unwrap_err();
        let why = why.to_string();
        assert!(uuids.iter().all(|uuid| why.contains(uuid)), "{why}");
    }
    std::fs::remove_file(tree.root().join("etc/homenode/vms/web.toml")).unwrap();
    let modes = [homenode_host::Mode::Observe, homenode_host::Mode::Recommend].map(Some);
    for (vm, mode) in all.iter().zip(modes) {
        assert_eq!(set(&mut qemu, *vm, Setting::Mode(mode)), Ok(true));
    }
    let said = |vm: &VmId| qemu.describe(*vm).unwrap().settings.clone().unwrap().mode;
    assert!(all.iter().map(said).eq(modes));
}

#[test]
fn a_vm_without_a_uuid_has_the_same_one_whenever_it_is_started() {
    let id_of = |pid: i32| {
        let tree = homenode_kernel::fake::Tree::new(&[]);
        tree.write(&format!("proc/{pid}/cmdline"), "kvm\0-name\0web\0");
        write_process(&tree, pid, 0);
        Qemu::new(tree.root()).list().unwrap()
    };
    assert_eq!(id_of(50), id_of(4711));
}

#[test]
fn a_state_is_no_reason_to_wait_a_pause_and_a_migration_are() {
    assert_eq!(standstill(Some("running"), Some("none")), None);
    assert_eq!(standstill(Some("running"), Some("completed")), None);
    assert_eq!(
        standstill(Some("running"), Some("active")),
        Some(Immovable::Migrating)
    );
    assert_eq!(standstill(Some("inmigrate"), None), Some(Immovable::Migrating));
    assert_eq!(standstill(Some("io-error"), None), Some(Immovable::Paused));
    assert_eq!(standstill(None, None), None);
}

mod monitors;
