//! Marks in VMs' own metadata: when the journal is lost, from an earlier run, and from another host.

use homenode_undo::journal::{Before, Run};

use super::*;
use crate::mark::{self, Here, Mark};

const MACHINE_ID: &str = "0123456789abcdef0123456789abcdef\n";
const BOOT_ID: &str = "6b6b5f30-f5a4-4c9c-8d94-5b8b1b7c0000\n";

/// A host with an identity and with cgroups.
fn host_with_id() -> Tree {
    let tree = host_with_groups("max 100000");
    tree.write("etc/machine-id", MACHINE_ID);
    tree.write("proc/sys/kernel/random/boot_id", BOOT_ID);
    tree.write("sys/devices/system/cpu/online", "0-1\n");
    tree
}

fn mark_of(host: &mut KvmHost) -> Option<Mark> {
    parsed(host.context.manager.as_mut()).mark
}

/// Kills the agent and removes its state directory. Returns another agent with the same libvirt.
fn followed_without_journal(tree: &Tree, host: KvmHost) -> KvmHost {
    let libvirt = ended(host);
    std::fs::remove_dir_all(tree.root().join("state")).unwrap();
    let mut successor = connect(tree, Acting::Live);
    successor.context.manager = libvirt;
    successor
}

#[test]
fn what_is_changed_is_marked_in_the_vms_metadata_and_the_mark_goes_with_it() {
    let tree = host_with_id();
    let mut host = connect_with_quotas(&tree);
    host.sample().unwrap();
    assert_eq!(mark_of(&mut host), None);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    let held = mark_of(&mut host).unwrap();
    assert_eq!(commit(&mut host, hold(6, LONG)), Outcome::Done);
    assert_ne!(mark_of(&mut host).unwrap(), held, "the quota that is in force");
    // A mark that another program removed is written again.
    host.context.manager.set_mark(vm(), None).unwrap();
    host.sample().unwrap();
    assert!(mark_of(&mut host).is_some());
    assert_eq!(commit(&mut host, lift()), Outcome::Done);
    assert_eq!(mark_of(&mut host), None);
    assert_eq!(
        host.take_notices().iter().filter(|n| n.contains("mark")).count(),
        0
    );
}

#[test]
fn without_its_journal_an_agent_knows_by_the_mark_what_is_its_own() {
    let tree = host_with_id();
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    let mut successor = followed_without_journal(&tree, host);
    let seen = successor.sample().unwrap();
    assert_eq!(seen.vms[0].settings.quota, None, "the operator's");
    assert_eq!(seen.vms[0].vcpus[0].quota, Some(quota(3, 30)));
    let vm = &successor.vms[&vm()];
    assert!(
        vm.next_lease_end()
            .is_some_and(|until| until <= now() + homenode_undo::acting::CARRIED_LEASE),
        "it ends"
    );
    let notices = successor.take_notices();
    assert!(
        notices
            .iter()
            .any(|n| n.contains("the journal had lost the changes")),
        "{notices:?}"
    );
    assert_eq!(successor.lift_limits(), Vec::<String>::new());
    assert_eq!(
        (cpu_max(&tree)[0].as_str(), mark_of(&mut successor)),
        ("max 100000", None)
    );
}

#[test]
fn without_its_journal_the_guard_undoes_what_marks_say() {
    let tree = host_with_id();
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    let mut after = followed_without_journal(&tree, host);
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(dir.path()).unwrap();
    let mut must_look = false;
    let undone = leftovers::undo_all(
        after.context.manager.as_mut(),
        tree.root(),
        &mut journal,
        &mut must_look,
    );
    assert_eq!(
        (undone.vms, undone.failures, must_look),
        (vec![vm()], Vec::new(), false)
    );
    assert_eq!(
        (cpu_max(&tree)[0].as_str(), mark_of(&mut after)),
        ("max 100000", None)
    );
    // Without libvirt, the marks are unknown. That is reported, and again on the next try, when the journal's files are complete
    // again.
    let gone = "qemu+unix:///system?socket=/does/not/exist";
    let mut libvirt = crate::libvirt::Libvirt::unconnected(gone, tree.root(), Heartbeat::default());
    let dir = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let mut journal = Journal::open(dir.path()).unwrap();
        let undone = leftovers::undo_all(&mut libvirt, tree.root(), &mut journal, &mut must_look);
        assert!(
            undone.failures[0].contains("cannot tell whether"),
            "{:?}",
            undone.failures
        );
    }
    // A complete journal is trusted without the marks.
    let mut journal = Journal::open(dir.path()).unwrap();
    let undone = leftovers::undo_all(&mut libvirt, tree.root(), &mut journal, &mut false);
    assert_eq!(undone, Undone::default());
}

/// Returns the XML of a marked VM. An agent on `host`, in its boot `boot`, had pinned the VM to CPU 0 and limited it to 3 of 30
/// ms.
fn marked(host: &str, boot: &str, start_ticks: u64) -> String {
    let there = Tree::new(&[("etc/machine-id", host), ("proc/sys/kernel/random/boot_id", boot)]);
    let mut journal = Journal::open(&there.root().join("state")).unwrap();
    let run = Run {
        vm: vm(),
        name: "one".into(),
        runtime_id: 1,
        pid: PID,
        start_ticks,
    };
    let before = Before {
        vcpus: [(0, cpus("0-63")), (1, cpus("1"))].into(),
        operator_pins: vec![1],
        emulator: cpus("0-63"),
        ..Before::default()
    };
    journal.begin(run, before).unwrap();
    journal.set(vm(), &Pins([(0, vec![cpus("0")])].into())).unwrap();
    let quotas = Quotas {
        ours: quota(3, 30),
        previous: None,
        before: None,
        groups: Vec::new(),
    };
    journal.set(vm(), &quotas).unwrap();
    let mark = Mark::for_entry(&Here::read(there.root()), journal.entry(vm())).unwrap();
    let element = mark.element().replace("changed", "m:changed");
    let element = element.replacen(" host", &format!(" xmlns:m='{}' host", mark::NAMESPACE), 1);
    format!(
        "<metadata>{element}</metadata><cputune><vcpupin vcpu='0' cpuset='0'/><vcpupin vcpu='1' cpuset='1'/></cputune>"
    )
}

#[test]
fn a_vm_that_was_saved_or_came_from_another_host_is_given_back_what_it_had() {
    let elsewhere = "ffffffffffffffffffffffffffffffff\n";
    let then = "00000000-0000-0000-0000-000000000000\n";
    for (host, boot, start, before) in [
        // From this host: the CPUs that the VM had before.
        (MACHINE_ID, then, 77, "0-63"),
        (MACHINE_ID, BOOT_ID, 7, "0-63"),
        // From another host: all CPUs of this one.
        (elsewhere, BOOT_ID, 77, "0-1"),
    ] {
        let tree = host_with_id();
        let plain = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
        tree.write(
            "node.xml",
            &plain.replace("<vcpu>", &format!("{}<vcpu>", marked(host, boot, start))),
        );
        hold_groups(&tree, "3000 30000\n");
        let mut agent = connect_with_quotas(&tree);
        let seen = agent.sample().unwrap();
        assert_eq!(cpu_max(&tree), ["max 100000", "max 100000"]);
        let pins = pinned_in_xml(&mut agent);
        assert_eq!(
            pins.get(&0).unwrap_or(&cpus(before)),
            &cpus(before),
            "{host}{boot}{start}"
        );
        assert_eq!(pins[&1], cpus("1"), "the operator's");
        assert_eq!(seen.vms[0].settings.pinned_vcpus, [1]);
        assert_eq!(
            (mark_of(&mut agent), agent.vms[&vm()].levers.limits().count()),
            (None, 0)
        );
        let notices = agent.take_notices();
        assert!(
            notices.iter().any(|n| n.contains("where it ran before")),
            "{notices:?}"
        );
    }
}

#[test]
fn a_mark_that_cannot_be_read_is_said_and_nothing_is_done_by_it() {
    let tree = host_with_id();
    let plain = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    let torn = marked(MACHINE_ID, BOOT_ID, 77).replace("3000000", "3000001");
    assert_ne!(torn, marked(MACHINE_ID, BOOT_ID, 77));
    tree.write("node.xml", &plain.replace("<vcpu>", &format!("{torn}<vcpu>")));
    hold_groups(&tree, "3000 30000\n");
    let mut agent = connect_with_quotas(&tree);
    let seen = agent.sample().unwrap();
    assert_eq!(seen.vms[0].settings.quota, Some(quota(3, 30)));
    let notices = agent.take_notices();
    assert!(
        notices.iter().any(|n| n.contains("cannot be read")),
        "{notices:?}"
    );
    // A dry run neither adds a mark to the journal nor ends what is in force.
    drop(agent);
    tree.write(
        "node.xml",
        &plain.replace("<vcpu>", &format!("{}<vcpu>", marked(MACHINE_ID, BOOT_ID, 7))),
    );
    let mut dry = connect(&tree, Acting::DryRun);
    dry.sample().unwrap();
    assert!(mark_of(&mut dry).is_some());
    assert_eq!(cpu_max(&tree)[0], "3000 30000");
}

#[test]
fn a_vm_that_is_opted_out_is_given_back_at_once() {
    let tree = host_with_id();
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, LONG)), Outcome::Done);
    host.context
        .manager
        .libvirt()
        .say(
            vm(),
            &homenode_vm_settings::OperatorSettings::of(vec![("manage".into(), "no".into())]).unwrap(),
            virt::sys::VIR_DOMAIN_AFFECT_LIVE,
        )
        .unwrap();
    host.take_notices();
    host.sample().unwrap();
    assert_eq!(cpu_max(&tree)[0], "max 100000");
    assert!(!journal::peek(&tree.root().join("state"))[&vm()].is_in_force());
    assert_eq!(host.take_notices(), Vec::<String>::new());
}

#[test]
fn nothing_is_changed_of_a_vm_between_two_hosts_and_what_is_due_waits() {
    let tree = host_with_id();
    let mut host = connect_with_quotas(&tree);
    assert_eq!(commit(&mut host, hold(3, Ns::from_millis(50))), Outcome::Done);
    let version = host.last.version;
    host.vms.get_mut(&vm()).unwrap().standstill = Some(homenode_host::Immovable::Migrating);
    let receipt = host.commit(&plan(version, hold(6, LONG))).unwrap();
    assert!(
        matches!(&receipt.outcomes[..], [Outcome::Failed(error)] if error.to_string().contains("being migrated")),
        "{:?}",
        receipt.outcomes
    );
    let permit = Setting::Permit(Permit::pollution(1000).ok());
    assert!(
        host.set(vm(), permit)
            .unwrap_err()
            .to_string()
            .contains("being migrated")
    );
    host.wait(Ns::from_millis(100));
    assert_eq!(cpu_max(&tree)[0], "3000 30000");
    // The VM stays on this host after all.
    host.sample().unwrap();
    host.wait(Ns::from_millis(1));
    assert_eq!(cpu_max(&tree)[0], "max 100000");
}
