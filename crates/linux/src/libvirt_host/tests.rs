//! With libvirt's in-process test driver and a handmade `/proc`. The driver remembers pins; nobody applies them
//! to the handmade threads, which is just what a host that does not do as asked looks like.

use homenode_host::{Action, ActionError, Management};
use homenode_units::NodeId;
use homenode_units::Pages;

use super::*;
use crate::fake::{Tree, machine};
use crate::task::tests::{stat, write_thread};

const UUID: &str = "6695eb01-f6a4-8304-79aa-97f2502e193f";
const PID: i32 = 40;

fn vm() -> VmId {
    VmId::parse(UUID).unwrap()
}

fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap()
}

/// A host of two nodes with one CPU each, running one VM of two vCPUs; `extra` goes into its XML.
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

fn connect(tree: &Tree, acting: Acting) -> LibvirtHost {
    let options = Options {
        root: tree.root().to_owned(),
        state_dir: tree.root().join("state"),
        acting,
        ..Options::new(machine(&[0, 1]))
    };
    let uri = format!("test://{}", tree.root().join("node.xml").display());
    LibvirtHost::connect(&uri, options).unwrap()
}

fn plan(version: Version, action: Action) -> Plan {
    let mut plan = Plan::new(version);
    plan.decide("test", action, "a test".into());
    plan
}

fn pin(vcpus: &[u16], to: &str) -> Action {
    Action::PinVcpus {
        vm: vm(),
        vcpus: vcpus.to_vec(),
        cpus: cpus(to),
    }
}

fn pinned_in_xml(host: &mut LibvirtHost) -> BTreeMap<u16, CpuSet> {
    let handle = host.libvirt.find(UUID).unwrap().unwrap();
    let xml = host.libvirt.xml(&handle).unwrap();
    crate::domain::Domain::parse(&xml).unwrap().vcpu_pins
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
        (seen.vcpus[0].running_ns, seen.vcpus[0].waiting_ns),
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
fn a_pin_goes_through_libvirt_and_the_journal_and_is_read_back() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let version = host.sample().unwrap().version;
    let receipt = host.commit(&plan(version, pin(&[0], "0-1"))).unwrap();
    assert_eq!(receipt.outcomes, [Outcome::Done]);
    let receipt = host.commit(&plan(receipt.version, pin(&[0, 1], "1"))).unwrap();
    let [Outcome::Failed(ActionError::Host { cause, .. })] = receipt.outcomes.as_slice() else {
        panic!("{receipt:?}");
    };
    assert_eq!(cause, "asked for CPUs 1, in force are 0-1");
    assert_eq!(pinned_in_xml(&mut host)[&0], cpus("1"));
    let entry = journal::peek(&tree.root().join("state"))[&vm()].clone();
    assert_eq!(
        (entry.before.vcpus[&0].clone(), entry.pinned[&0].clone()),
        (cpus("0-3"), cpus("1"))
    );
    assert_eq!(host.restore(), Vec::<String>::new());
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
    let handle = host.libvirt.find(UUID).unwrap().unwrap();
    host.libvirt.pin_vcpu(&handle, 1, &cpus("1")).unwrap();
    host.take_notices();
    let after = host.sample().unwrap();
    assert!(after.version > version);
    assert_eq!(after.vms[0].settings.pinned_vcpus, [1]);
    assert!(host.take_notices().iter().any(|n| n.contains("by someone else")));
    assert_eq!(host.take_notices(), Vec::<String>::new(), "said once");
    host.libvirt.pin_vcpu(&handle, 1, &cpus("0-3")).unwrap();
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
    // The driver forgets with its connection: let the next agent find what a real libvirt would show.
    let xml = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    tree.write(
        "node.xml",
        &xml.replace("<cputune>", "<cputune><vcpupin vcpu='0' cpuset='0'/>"),
    );
    let mut second = connect(&tree, Acting::Live);
    assert_eq!(second.sample().unwrap().vms[0].settings.pinned_vcpus, [1]);
    assert_eq!(second.vms[&vm()].ours[&0], cpus("0"));
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
    assert_eq!(second.restore(), Vec::<String>::new());
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
    assert_eq!(
        receipt.outcomes,
        [Outcome::Failed(ActionError::VmGone { name: "one".into() })]
    );
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
        matches!(&outcomes[0], Outcome::Failed(ActionError::Host { cause, .. }) if cause.contains("opted it out"))
    );
    assert_eq!(pinned_in_xml(&mut host), BTreeMap::new());
}

#[test]
fn a_home_moves_the_emulator_and_a_second_agent_must_wait() {
    let tree = host("");
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    let nodes: NodeSet = "0-1".parse().unwrap();
    let action = Action::SetHome {
        vm: vm(),
        nodes: nodes.clone(),
    };
    assert_eq!(
        host.commit(&plan(seen.version, action)).unwrap().outcomes,
        [Outcome::Done]
    );
    assert_eq!(host.vms[&vm()].home, Some(nodes));
    assert!(Lock::try_take(&tree.root().join("state")).unwrap().is_none());
}

#[test]
fn memory_that_cannot_move_is_said() {
    let tree = host(
        "<memoryBacking><locked/></memoryBacking><memtune><hard_limit unit='KiB'>4096</hard_limit></memtune>",
    );
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].immovable, Some(homenode_host::Immovable::Locked));
    let action = Action::MovePages {
        vm: vm(),
        to: NodeSet::one(NodeId(1)),
        pages_max: Pages(9),
    };
    let outcomes = host.commit(&plan(seen.version, action)).unwrap().outcomes;
    assert!(
        matches!(&outcomes[0], Outcome::Failed(ActionError::MemoryFixed { .. })),
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
fn unreadable_parts_of_a_vm_are_said_and_do_not_fail_the_sample() {
    let tree = host("");
    tree.write(&format!("proc/{PID}/numa_maps"), "garbage\n");
    let mut host = connect(&tree, Acting::Live);
    let seen = host.sample().unwrap();
    assert_eq!(seen.vms[0].pages, None);
    assert!(host.take_notices().iter().any(|n| n.contains("numa_maps")));
    tree.write(&format!("proc/{PID}/task/41/schedstat"), "x\n");
    let seen = host.sample().unwrap();
    assert!(seen.vms.is_empty());
    assert!(
        host.take_notices()
            .iter()
            .any(|n| n.contains("left out") && n.contains("schedstat"))
    );
}
