//! Tests with libvirt's in-process test driver and a handmade `/proc`. The driver remembers pins but does not apply them to the
//! handmade threads, like a host that does not do what is requested.

use homenode_host::observation::{Observation, Tracker, Used};
use homenode_host::{Act, Action, CpuQuota, Lever, Limit, Management, Outcome, Percent, Version, VmSettings};
use homenode_kernel::fake::{Tree, machine};
use homenode_kernel::fake::{stat, write_thread};
use homenode_undo::heartbeat::Heartbeat;
use homenode_undo::journal::Journal;
use homenode_units::{NodeId, NodeSet, Pages, Permit};

mod balloon;
mod bound;
mod bounds;
mod carrefour;
mod faults;
mod home;
mod marks;
mod quota;
mod settings;
mod threads;
mod watching;

use std::path::Path;

use super::*;
use crate::levers::Quotas;
use crate::levers::watching::Watched;
use crate::manager::Manager;

const UUID: &str = "6695eb01-f6a4-8304-79aa-97f2502e193f";
const PID: i32 = 40;

/// Both copies of the journal.
const JOURNAL: [&str; 2] = ["state/private/journal", "state/private/journal.copy"];

fn vm() -> VmId {
    VmId::parse(UUID).unwrap()
}

fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap()
}

/// A host with two nodes of one CPU each that runs one VM with two vCPUs; `extra` is added to the VM's XML.
fn host(extra: &str) -> Tree {
    let tree = Tree::new(&[
        (
            "proc/self/mountinfo",
            "24 23 0:21 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        ),
        ("proc/stat", "cpu0 1 1 1 1 1 1 1 1\ncpu1 2 2 2 2 2 2 2 2\n"),
    ]);
    for node in 0..2 {
        let mem = format!(
            "Node {node} MemTotal: 1000 kB\nNode {node} MemFree: 500 kB\nNode {node} Active(file): 1 kB\nNode {node} Inactive(file): 1 kB\n"
        );
        tree.write(&format!("sys/devices/system/node/node{node}/meminfo"), &mem);
    }
    tree.write("run/libvirt/qemu/one.pid", &format!("{PID}\n"));
    tree.write(&format!("proc/{PID}/stat"), &stat(PID, "qemu", 'S', 77, 0));
    tree.write(&format!("proc/{PID}/cmdline"), &format!("qemu\0-uuid\0{UUID}\0"));
    for (tid, comm) in [(PID, "qemu-system-x86"), (41, "CPU 0/KVM"), (42, "CPU 1/KVM")] {
        write_thread(&tree, PID, tid, comm, "0-3");
    }
    tree.write(
        &format!("proc/{PID}/maps"),
        "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 \n",
    );
    tree.write(
        &format!("proc/{PID}/numa_maps"),
        "7f0000000000 default anon=9 N0=5 N1=4 kernelpagesize_kB=4\n",
    );
    let domain = format!(
        "<domain type='test'><name>one</name><uuid>{UUID}</uuid><memory unit='KiB'>1024</memory>{extra}<vcpu>2</vcpu><os><type>hvm</type></os></domain>"
    );
    tree.write("node.xml", &format!("<node>{domain}</node>"));
    tree
}

fn connect(tree: &Tree, acting: Acting) -> KvmHost {
    let options = Options {
        root: tree.root().to_owned(),
        state_dir: tree.root().join("state"),
        topology_socket: tree.root().join("run/topology.sock"),
        acting,
        ..Options::new(machine(&[0, 1]))
    };
    connect_as(tree, options)
}

/// Connects an agent that has these options and reads everything in each sample.
fn connect_as(tree: &Tree, options: Options) -> KvmHost {
    let uri = format!("test://{}", tree.root().join("node.xml").display());
    let mut host = KvmHost::connect(&Vms::Libvirt(uri), options).unwrap();
    let (affinities, all, pages) = (Ns::ZERO, Ns::ZERO, Ns::ZERO);
    host.look_every = LookEvery {
        affinities,
        all,
        pages,
    };
    host
}

fn plan(version: Version, action: Action) -> Plan {
    let mut plan = Plan::new(version);
    plan.decide("test", action, "a test".into());
    plan
}

/// Runs the guard on a copy of this host's journal, as after the agent's end; the original stays unchanged.
fn guard_undoes(host: &mut KvmHost, tree: &Tree) {
    let dir = tempfile::tempdir().unwrap();
    std::fs::create_dir(dir.path().join("private")).unwrap();
    std::fs::copy(tree.root().join(JOURNAL[0]), dir.path().join("private/journal")).unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    levers::undo(host.context.manager.as_mut(), tree.root(), &mut journal, vm()).unwrap();
    assert_eq!(journal.in_force(), []);
}

fn pin(vcpus: &[u16], to: &str) -> Action {
    Act::PinVcpus {
        vcpus: vcpus.to_vec(),
        cpus: cpus(to),
    }
    .on(vm())
}

/// libvirt's description of the VM.
fn parsed(libvirt: &mut dyn Manager) -> crate::domain::Domain {
    crate::domain::Domain::clone(&libvirt.describe(vm()).unwrap())
}

fn pinned_in_xml(host: &mut KvmHost) -> BTreeMap<u16, CpuSet> {
    parsed(host.context.manager.as_mut()).vcpu_pins
}

/// Ends an agent. Returns its libvirt for the next agent, since the VMs of the test driver live in this process.
fn ended(mut host: KvmHost) -> Box<dyn Manager> {
    let other = Vms::Libvirt("test:///default".to_owned()).unconnected(Path::new("/"), Heartbeat::default());
    std::mem::replace(&mut host.context.manager, other)
}

#[test]
fn a_sample_has_the_vm_and_the_version_is_stable() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let first = host.sample().unwrap();
    let seen = first.vm(vm()).unwrap();
    assert_eq!((seen.name.as_str(), seen.vcpus.len()), ("one", 2));
    assert_eq!(
        seen.vcpus[1].affinity,
        cpus("0-1"),
        "offline CPUs 2 and 3 are not the host's"
    );
    assert_eq!(
        (seen.vcpus[0].running_ns, seen.vcpus[0].waiting_ns.unwrap()),
        (Ns(5000), Ns(700))
    );
    assert_eq!(seen.pages.as_ref().unwrap()[NodeId(1)], Pages(4));
    assert_eq!(seen.pages_touched(), Some(Pages(9)));
    assert_eq!(seen.settings, VmSettings::default());
    assert_eq!(first.nodes[NodeId(0)].memory_free_bytes, Bytes(502 << 10));
    assert_eq!(first.cpus.len(), 2);
    assert_eq!(host.sample().unwrap().version, first.version);
}

#[test]
fn a_cpu_that_goes_offline_is_not_sampled_until_it_is_back() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let mut online = || {
        host.sample()
            .unwrap()
            .cpus
            .iter()
            .map(|cpu| cpu.id.0)
            .collect::<Vec<_>>()
    };
    assert_eq!(online(), [0, 1]);
    tree.write("proc/stat", "cpu0 1 1 1 1 1 1 1 1\n");
    assert_eq!(online(), [0]);
    tree.write(
        "proc/stat",
        "cpu0 1 1 1 1 1 1 1 1\ncpu1 2 2 2 2 2 2 2 2\ncpu7 1 1 1 1 1 1 1 1\n",
    );
    assert_eq!(online(), [0, 1], "7 was not there at the start");
}

#[test]
fn a_pin_goes_through_libvirt_and_the_journal_and_is_read_back() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let version = host.sample().unwrap().version;
    let receipt = host.commit(&plan(version, pin(&[0], "0-1"))).unwrap();
    assert_eq!(receipt.outcomes, [Outcome::Done]);
    let receipt = host.commit(&plan(receipt.version, pin(&[0, 1], "1"))).unwrap();
    let [
        Outcome::Failed(ActionError {
            why: Failure::Host { cause, .. },
            ..
        }),
    ] = receipt.outcomes.as_slice()
    else {
        panic!("{receipt:?}");
    };
    assert_eq!(cause, "asked for CPUs 1, but CPUs 0-1 are in force");
    assert_eq!(pinned_in_xml(&mut host)[&0], cpus("0-1"), "it was rolled back");
    let entry = journal::peek(&tree.root().join("state"))[&vm()].clone();
    assert_eq!(
        (
            entry.before.vcpus[&0].clone(),
            entry.get::<Pins>().unwrap().0[&0].clone()
        ),
        (cpus("0-3"), vec![cpus("0-1")])
    );
    assert_eq!(host.restore().failures, Vec::<String>::new());
    assert_eq!(pinned_in_xml(&mut host)[&0], cpus("0-3"));
    let settings = host.sample().unwrap().vms[0].settings.clone();
    assert_eq!(
        settings.pinned_vcpus,
        Vec::<u16>::new(),
        "what restoring left is not the operator's"
    );
}

#[test]
fn what_someone_else_pins_makes_plans_stale_and_is_respected() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let version = host.sample().unwrap().version;
    write_thread(&tree, PID, 42, "CPU 1/KVM", "1");
    match host.commit(&plan(version, pin(&[0], "0"))) {
        Err(Refusal::Stale { planned, current }) => assert!(planned == version && current > planned),
        other => panic!("{other:?}"),
    }
    assert_eq!(pinned_in_xml(&mut host), BTreeMap::new());
    host.context.manager.pin_vcpu(vm(), 1, &cpus("1")).unwrap();
    host.take_notices();
    let after = host.sample().unwrap();
    assert!(after.version > version);
    assert_eq!(after.vms[0].settings.pinned_vcpus, [1]);
    assert!(
        host.take_notices()
            .iter()
            .any(|n| n.contains("by another program"))
    );
    assert_eq!(host.take_notices(), Vec::<String>::new(), "said once");
    host.context.manager.pin_vcpu(vm(), 1, &cpus("0-3")).unwrap();
    write_thread(&tree, PID, 42, "CPU 1/KVM", "0-3");
    assert_eq!(
        host.sample().unwrap().vms[0].settings.pinned_vcpus,
        Vec::<u16>::new(),
        "the operator let go"
    );
}

#[test]
fn an_agents_own_pins_survive_its_restart_and_are_not_taken_for_the_operators() {
    let tree = host("<cputune><vcpupin vcpu='1' cpuset='1'/></cputune>");
    write_thread(&tree, PID, 42, "CPU 1/KVM", "1");
    let mut first = connect(&tree, Acting::Live);
    let seen = first.sample().unwrap();
    assert_eq!(seen.vms[0].settings.pinned_vcpus, [1]);
    write_thread(&tree, PID, 41, "CPU 0/KVM", "0");
    let version = first.sample().unwrap().version;
    assert_eq!(
        first.commit(&plan(version, pin(&[0], "0"))).unwrap().outcomes,
        [Outcome::Done]
    );
    drop(first);
    // The driver forgets pins when its connection ends, so the XML gets what a real libvirt would show to the next agent.
    let xml = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    tree.write(
        "node.xml",
        &xml.replace("<cputune>", "<cputune><vcpupin vcpu='0' cpuset='0'/>"),
    );
    let mut second = connect(&tree, Acting::Live);
    assert_eq!(second.sample().unwrap().vms[0].settings.pinned_vcpus, [1]);
    assert_eq!(second.vms[&vm()].pins.ours[&0], [cpus("0")]);
    let pins = [(0, cpus("0"))].into();
    assert_eq!(
        second.carried_over(),
        [CarriedOver {
            vm: vm(),
            home: None,
            pins,
            moving: None
        }]
    );
    assert_eq!(second.restore().failures, Vec::<String>::new());
    assert_eq!(second.carried_over(), [], "nothing is in force any more");
}

#[test]
fn a_vm_that_ends_is_not_in_the_sample_nor_in_the_journal() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let version = host.sample().unwrap().version;
    let version = host.commit(&plan(version, pin(&[0], "0-1"))).unwrap().version;
    std::fs::remove_dir_all(tree.root().join(format!("proc/{PID}"))).unwrap();
    let receipt = host.commit(&plan(version, pin(&[0], "1"))).unwrap();
    assert_eq!(receipt.outcomes, [Outcome::Failed(Failure::VmGone.on("one"))]);
    let after = host.sample().unwrap();
    assert!(after.vms.is_empty() && after.version > version);
    assert!(journal::peek(&tree.root().join("state")).is_empty());
}

#[test]
fn a_dry_run_and_an_opted_out_vm_are_not_touched() {
    let tree = host("");
    let mut dry = connect(&tree, Acting::DryRun);
    let version = dry.sample().unwrap().version;
    assert_eq!(
        dry.commit(&plan(version, pin(&[0], "1"))).unwrap().outcomes,
        [Outcome::DryRun]
    );
    assert_eq!(pinned_in_xml(&mut dry), BTreeMap::new());
    assert!(!tree.root().join("state").exists());
    let tree = self::host(&format!(
        "<metadata><h:vm xmlns:h='{}' manage='no'/></metadata>",
        crate::domain::NAMESPACE
    ));
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].settings.management, Management::Ignored);
    let outcomes = host.commit(&plan(seen.version, pin(&[0], "1"))).unwrap().outcomes;
    assert!(
        matches!(&outcomes[0], Outcome::Failed(ActionError { why: Failure::Host { cause, .. }, .. }) if cause.contains("opted it out"))
    );
    assert_eq!(pinned_in_xml(&mut host), BTreeMap::new());
}

#[test]
fn a_home_moves_the_emulator_and_a_second_agent_must_wait() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    let nodes: NodeSet = "0-1".parse().unwrap();
    let action = Act::SetHome { nodes: nodes.clone() }.on(vm());
    assert_eq!(
        host.commit(&plan(seen.version, action)).unwrap().outcomes,
        [Outcome::Done]
    );
    assert_eq!(host.vms[&vm()].home_nodes(), Some(&nodes));
    assert!(
        homenode_undo::lock::Lock::try_take(&tree.root().join("state"))
            .unwrap()
            .is_none()
    );
}

#[test]
fn memory_that_cannot_move_is_said() {
    let tree = host(
        "<memoryBacking><locked/></memoryBacking><memtune><hard_limit unit='KiB'>4096</hard_limit></memtune>",
    );
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].immovable, Some(homenode_host::Immovable::Locked));
    let action = Action::gather(host.machine(), vm(), NodeSet::one(NodeId(1)), Pages(9));
    let outcomes = host.commit(&plan(seen.version, action)).unwrap().outcomes;
    assert!(
        matches!(
            &outcomes[0],
            Outcome::Failed(ActionError {
                why: Failure::MemoryFixed { .. },
                ..
            })
        ),
        "{outcomes:?}"
    );
    for tid in [PID, 41, 42] {
        let path = format!("proc/{PID}/task/{tid}/status");
        tree.write(&path, "Cpus_allowed_list:\t0-3\nMems_allowed_list:\t1\n");
    }
    tree.write(
        "node.xml",
        &std::fs::read_to_string(tree.root().join("node.xml"))
            .unwrap()
            .replace("<locked/>", ""),
    );
    drop(host);
    let seen = connect(&tree, Acting::Live).sample().unwrap();
    let nodes = NodeSet::one(NodeId(1));
    assert_eq!(
        seen.vms[0].immovable,
        Some(homenode_host::Immovable::BoundAtStart { nodes })
    );
}

#[test]
fn a_paused_vm_keeps_its_pages_until_it_runs_again() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    assert_eq!(host.sample().unwrap().vms[0].immovable, None);
    let handle = host.context.manager.libvirt().domain(vm()).unwrap();
    handle.suspend().unwrap();
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].immovable, Some(homenode_host::Immovable::Paused));
    let action = Action::gather(host.machine(), vm(), NodeSet::one(NodeId(1)), Pages(9));
    let outcomes = host.commit(&plan(seen.version, action)).unwrap().outcomes;
    let [
        Outcome::Failed(ActionError {
            why: Failure::MemoryFixed { why, .. },
            ..
        }),
    ] = outcomes.as_slice()
    else {
        panic!("{outcomes:?}");
    };
    assert!(why.contains("paused"), "{why}");
    handle.resume().unwrap();
    assert_eq!(host.sample().unwrap().vms[0].immovable, None);
}

#[test]
fn a_guest_that_keeps_its_free_pages_is_said_with_the_remedy() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let why = host.sample().unwrap().vms[0].no_releases.clone().unwrap();
    assert!(
        why.contains("<memballoon model='virtio' freePageReporting='on'/>"),
        "{why}"
    );
}

#[test]
fn unreadable_parts_of_a_vm_are_said_and_do_not_fail_the_sample() {
    let tree = host("");
    tree.write(&format!("proc/{PID}/numa_maps"), "garbage\n");
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].pages, None);
    assert!(host.take_notices().iter().any(|n| n.contains("numa_maps")));
    tree.write(&format!("proc/{PID}/task/41/schedstat"), "x\n");
    let seen = host.sample().unwrap();
    assert!(seen.vms[0].is_unread);
    assert!(
        host.take_notices()
            .iter()
            .any(|n| n.contains("left out") && n.contains("schedstat"))
    );
}

/// A host with a cgroup per vCPU, all with this `cpu.max`.
fn host_with_groups(cpu_max: &str) -> Tree {
    let tree = host("");
    add_groups(&tree, cpu_max);
    tree
}

/// Gives the VM's vCPUs cgroups with this quota.
fn add_groups(tree: &Tree, cpu_max: &str) {
    for (index, tid) in [41, 42].into_iter().enumerate() {
        let group = format!("machine/one/vcpu{index}");
        tree.write(
            &format!("proc/{PID}/task/{tid}/cgroup"),
            &format!("0::/{group}\n"),
        );
        tree.write(&format!("sys/fs/cgroup/{group}/cpu.max"), &format!("{cpu_max}\n"));
        tree.write(&format!("sys/fs/cgroup/{group}/cpu.stat"), "throttled_usec 0\n");
    }
}

/// Connects to a fake libvirt whose quotas reach the cgroups, like a real one's.
fn connect_with_quotas(tree: &Tree) -> KvmHost {
    let mut host = connect(tree, Acting::Live);
    host.context.manager.libvirt().fake.groups = groups(tree);
    host
}

fn groups(tree: &Tree) -> Vec<std::path::PathBuf> {
    let group = |index| tree.root().join(format!("sys/fs/cgroup/machine/one/vcpu{index}"));
    (0..2).map(group).collect()
}

fn cpu_max(tree: &Tree) -> [String; 2] {
    [0, 1].map(|index| {
        let path = format!("sys/fs/cgroup/machine/one/vcpu{index}/cpu.max");
        std::fs::read_to_string(tree.root().join(path))
            .unwrap()
            .trim()
            .to_owned()
    })
}

/// Sets the quota of both vCPUs, as any program might.
fn hold_groups(tree: &Tree, cpu_max: &str) {
    for index in 0..2 {
        tree.write(&format!("sys/fs/cgroup/machine/one/vcpu{index}/cpu.max"), cpu_max);
    }
}

fn quota(run_ms: u64, period_ms: u64) -> CpuQuota {
    CpuQuota {
        run_ns: Ns::from_millis(run_ms),
        period_ns: Ns::from_millis(period_ms),
    }
}

fn hold(run_ms: u64, lease_ns: Ns) -> Action {
    Act::Limit {
        limit: Limit::CpuQuota(quota(run_ms, 30)),
        lease_ns,
    }
    .on(vm())
}

const LONG: Ns = Ns::from_secs(1000);

fn lift() -> Action {
    Act::Lift {
        lever: Lever::CpuQuota,
    }
    .on(vm())
}

fn commit(host: &mut KvmHost, action: Action) -> Outcome {
    let version = host.sample().unwrap().version;
    host.commit(&plan(version, action)).unwrap().outcomes.remove(0)
}

#[test]
fn a_vm_is_confined_renewed_and_freed_by_lift_lease_guard_and_its_end() {
    use homenode_kernel::fake::{empty_group, fake_resctrl, refuse_schemata};
    let confine = |lease_ns| {
        Act::Limit {
            limit: Limit::CacheWays(Percent(10)),
            lease_ns,
        }
        .on(vm())
    };
    let tree = host("");
    let group = tree.root().join(format!("sys/fs/resctrl/homenode-{}", vm()));
    let mut host = connect(&tree, Acting::Live);
    let outcome = commit(&mut host, confine(LONG));
    assert!(
        matches!(&outcome, Outcome::Failed(ActionError { why: Failure::Host { cause, .. }, .. }) if cause.contains("no cache allocation"))
    );
    fake_resctrl(&tree);
    // The kernel refuses. The group is journalled, and lifted as if it held the VM.
    refuse_schemata(&tree, vm(), "Overlaps with exclusive group");
    let outcome = commit(&mut host, confine(LONG));
    assert!(
        matches!(&outcome, Outcome::Failed(ActionError { why: Failure::Host { cause, .. }, .. })
            if cause.contains("Overlaps with exclusive group")),
        "{outcome:?}"
    );
    std::fs::remove_file(group.join("schemata")).unwrap();
    let free = Act::Lift {
        lever: Lever::Resctrl,
    }
    .on(vm());
    assert_eq!(commit(&mut host, free.clone()), Outcome::Done);
    assert!(!group.exists());
    fake_resctrl(&tree);
    assert_eq!(commit(&mut host, confine(LONG)), Outcome::Done);
    assert_eq!(
        host.sample().unwrap().vms[0].confined,
        Some(Limit::CacheWays(Percent(10)))
    );
    assert_eq!(commit(&mut host, confine(LONG)), Outcome::Renewed);
    empty_group(&tree, vm());
    assert_eq!(commit(&mut host, free), Outcome::Done);
    assert!(!group.exists());
    assert_eq!(commit(&mut host, confine(Ns::from_millis(1))), Outcome::Done);
    empty_group(&tree, vm());
    host.wait(Ns::from_millis(60));
    assert!(!group.exists(), "its lease is over");
    assert_eq!(commit(&mut host, confine(LONG)), Outcome::Done);
    empty_group(&tree, vm());
    guard_undoes(&mut host, &tree);
    assert!(!group.exists(), "as the guard does");
    assert_eq!(commit(&mut host, confine(LONG)), Outcome::Done);
    empty_group(&tree, vm());
    std::fs::remove_dir_all(tree.root().join(format!("proc/{PID}"))).unwrap();
    host.sample().unwrap();
    assert!(!group.exists(), "the VM ended");
}

#[test]
fn an_idle_agent_wakes_at_most_twice_a_period() {
    let wakes = || {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status
            .lines()
            .find(|line| line.starts_with("voluntary_ctxt_switches"));
        let count = line.unwrap().rsplit(':').next().unwrap().trim();
        count.parse::<u64>().unwrap()
    };
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    host.sample().unwrap();
    let period = Ns::from_millis(500);
    let before = wakes();
    assert!(host.wait(period) >= period);
    assert!(wakes() - before <= 2, "{} wakes", wakes() - before);
    // The wake signal ends the wait before the period is over.
    host.context.wake_signal.wake();
    assert!(host.wait(LONG) < LONG);
}
