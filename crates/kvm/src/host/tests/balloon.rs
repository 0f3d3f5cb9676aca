//! Tests of VMs' memory. The balloons of libvirt's test driver follow at once.

use homenode_host::Impossible;

use super::*;
use crate::levers::Shrink;

pub(super) const BALLOON: &str = "<devices><memballoon model='virtio'/></devices>";

pub(super) fn give(kib: u64, lease_ns: Ns) -> Action {
    Act::Limit {
        limit: Limit::Memory(Bytes(kib << 10)),
        lease_ns,
    }
    .on(vm())
}

/// The VM's memory in KiB according to libvirt's test driver.
fn memory_kib(host: &mut KvmHost) -> u64 {
    parsed(host.context.manager.as_mut()).memory_current_bytes.0 >> 10
}

/// A host whose VM has 64 MiB, of which its operator left it 48.
fn ballooned() -> Tree {
    let tree = host(&format!(
        "<currentMemory unit='KiB'>49152</currentMemory>{BALLOON}"
    ));
    let xml = std::fs::read_to_string(tree.root().join("node.xml")).unwrap();
    tree.write("node.xml", &xml.replace(">1024</memory>", ">65536</memory>"));
    tree
}

#[test]
fn memory_is_journalled_set_seen_renewed_and_given_back_to_what_the_operator_had_set() {
    let tree = ballooned();
    let mut host = connect(&tree, Acting::Live);
    let before = host.sample().unwrap().vms[0].balloon.unwrap();
    assert_eq!(
        (before.current, before.maximum, before.limit),
        (Bytes(48 << 20), Bytes(48 << 20), None)
    );
    let version = host.sample().unwrap().version;
    assert_eq!(commit(&mut host, give(32 << 10, LONG)), Outcome::Done);
    let seen = host.sample().unwrap();
    assert!(seen.version > version);
    let held = seen.vms[0].balloon.unwrap();
    assert_eq!(
        (held.current, held.maximum, held.limit),
        (Bytes(32 << 20), Bytes(48 << 20), Some(Bytes(32 << 20)))
    );
    assert_eq!(commit(&mut host, give(32 << 10, LONG)), Outcome::Renewed);
    assert_eq!(commit(&mut host, give(40 << 10, LONG)), Outcome::Done);
    let shrunk = journal::peek(&tree.root().join("state"))[&vm()]
        .get::<Shrink>()
        .unwrap();
    assert_eq!((shrunk.ours, shrunk.before), (Bytes(40 << 20), Bytes(48 << 20)));
    let lever = Lever::Memory;
    assert_eq!(commit(&mut host, Act::Lift { lever }.on(vm())), Outcome::Done);
    assert_eq!(memory_kib(&mut host), 48 << 10);
    assert!(!journal::peek(&tree.root().join("state"))[&vm()].is_in_force());
}

#[test]
fn memory_comes_back_with_its_lease_by_the_guard_and_when_the_agent_stops() {
    let tree = ballooned();
    let mut host = connect(&tree, Acting::Live);
    assert_eq!(
        commit(&mut host, give(32 << 10, Ns::from_millis(1))),
        Outcome::Done
    );
    host.wait(Ns::from_millis(60));
    assert_eq!(memory_kib(&mut host), 48 << 10, "its lease is over");
    assert_eq!(commit(&mut host, give(32 << 10, LONG)), Outcome::Done);
    guard_undoes(&mut host, &tree);
    assert_eq!(memory_kib(&mut host), 48 << 10, "as the guard does");
    host.context.manager.set_memory(vm(), Bytes(32 << 20)).unwrap();
    assert_eq!(host.lift_limits(), Vec::<String>::new());
    assert_eq!(memory_kib(&mut host), 48 << 10, "as an agent does that stops");
}

#[test]
fn memory_that_somebody_else_set_is_theirs_and_memory_plugged_in_is_added() {
    let tree = ballooned();
    let mut host = connect(&tree, Acting::Live);
    assert_eq!(commit(&mut host, give(32 << 10, LONG)), Outcome::Done);
    host.sample().unwrap();
    host.context.manager.set_memory(vm(), Bytes(20 << 20)).unwrap();
    host.take_notices();
    let theirs = host.sample().unwrap().vms[0].balloon.unwrap();
    assert_eq!((theirs.limit, theirs.maximum), (None, Bytes(20 << 20)));
    assert!(
        host.take_notices()
            .iter()
            .any(|notice| notice.contains("another program changed it"))
    );
    assert_eq!(host.lift_limits(), Vec::<String>::new());
    assert_eq!(
        memory_kib(&mut host),
        20 << 10,
        "nothing of the agent's is in force"
    );
    host.sample().unwrap();
    // As if the VM had 16 MiB less: the next sample sees 16 MiB plugged in.
    host.vms.get_mut(&vm()).unwrap().domain.memory_kib -= 16 << 10;
    assert_eq!(commit(&mut host, give(16 << 10, LONG)), Outcome::Done);
    let plugged = host.sample().unwrap().vms[0].balloon.unwrap();
    let more = Bytes(16 << 20);
    assert_eq!(
        (plugged.limit, plugged.maximum),
        (Some(Bytes(16 << 20) + more), Bytes(20 << 20) + more)
    );
}

#[test]
fn memory_of_a_vm_without_a_balloon_or_beyond_what_it_has_is_refused() {
    let refused = |tree: &Tree, kib| {
        let mut host = connect(tree, Acting::Live);
        let version = host.sample().unwrap().version;
        host.commit(&plan(version, give(kib, LONG))).unwrap_err()
    };
    let maximum = |refusal| match refusal {
        Refusal::Vm {
            why: Impossible::Memory { maximum, .. },
            ..
        } => maximum,
        other => panic!("{other:?}"),
    };
    assert_eq!(maximum(refused(&host(""), 512)), None);
    for kib in [0, 49_153] {
        assert_eq!(maximum(refused(&ballooned(), kib)), Some(Bytes(48 << 20)));
    }
}
