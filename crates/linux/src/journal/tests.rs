use homenode_host::Percent;
use homenode_units::{CpuId, NodeId};
use proptest::prelude::*;

use super::*;

fn run(vm: u128) -> Run {
    Run {
        vm: VmId(vm),
        name: format!("vm{vm}"),
        runtime_id: 4,
        pid: 40,
        start_ticks: 77,
    }
}

fn cpus(list: &str) -> CpuSet {
    list.parse().unwrap()
}

fn nodes(list: &str) -> NodeSet {
    list.parse().unwrap()
}

fn quotas() -> Quotas {
    let slice = homenode_units::Ns::from_millis(30);
    Quotas {
        ours: CpuQuota::of(0.1, slice),
        previous: None,
        before: Some(CpuQuota::of(0.5, slice)),
    }
}

fn before() -> Before {
    Before {
        vcpus: [(0, cpus("0-3")), (1, cpus("0-3"))].into(),
        operator_pins: vec![1],
        emulator: cpus("0-3"),
        iothreads: [(1, cpus("2")), (2, cpus("3"))].into(),
        operator_helpers: vec![Helper::IoThread(2)],
        nodes: Some(nodes("0")),
    }
}

fn filled(dir: &Path) -> Journal {
    let mut journal = Journal::open(dir).unwrap();
    for record in [
        Record::First {
            run: run(1),
            before: before(),
        },
        Record::Pinned {
            vm: VmId(1),
            vcpus: vec![0],
            cpus: cpus("2"),
        },
        Record::First {
            run: run(2),
            before: Before::default(),
        },
        Record::Home {
            vm: VmId(1),
            nodes: nodes("2"),
        },
        Record::Nodes {
            vm: VmId(1),
            nodes: nodes("0,2"),
        },
        Record::Moving {
            vm: VmId(1),
            to: nodes("2"),
        },
        Record::Held {
            vm: VmId(1),
            quotas: quotas(),
        },
        Record::Confined {
            vm: VmId(1),
            limit: Limit::CacheWays(Percent(10)),
        },
        Record::First {
            run: run(3),
            before: before(),
        },
        Record::Forgotten { vm: VmId(3) },
    ] {
        journal.write(record).unwrap();
    }
    journal
}

#[test]
fn what_is_in_force_survives_and_the_file_is_compacted() {
    let dir = tempfile::tempdir().unwrap();
    let entries = filled(dir.path()).entries().clone();
    assert_eq!(entries.len(), 2);
    assert_eq!(peek(dir.path()), entries);
    let again = Journal::open(dir.path()).unwrap();
    assert_eq!(again.entries(), &entries);
    assert_eq!(again.warnings, Vec::<String>::new());
    let text = std::fs::read_to_string(dir.path().join(FILE)).unwrap();
    assert!(!text.contains("forgotten"), "{text}");
}

#[test]
fn undo_restores_what_was_changed_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let steps = filled(dir.path()).undo();
    let first = &steps[0];
    assert_eq!(first.vcpus, [(0, cpus("0-3"))].into(), "vCPU 1 was not touched");
    assert_eq!(first.emulator, Some(cpus("0-3")));
    assert_eq!(first.iothreads, [(1, cpus("2"))].into());
    assert_eq!(
        first.nodes,
        Some(nodes("0,2")),
        "taking node 2 away would move pages"
    );
    assert_eq!(first.quotas, Some(quotas()));
    assert_eq!(first.confined, Some(Limit::CacheWays(Percent(10))));
    assert_eq!(steps.len(), 1, "of VM 2 nothing is in force");
}

#[test]
fn a_lifted_quota_is_not_lifted_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    journal.write(Record::Lifted { vm: VmId(1) }).unwrap();
    journal.write(Record::Freed { vm: VmId(1) }).unwrap();
    assert_eq!(
        (journal.undo()[0].quotas, journal.undo()[0].confined),
        (None, None)
    );
    drop(journal);
    assert_eq!(peek(dir.path())[&VmId(1)].held, None);
}

#[test]
fn a_restored_vm_keeps_how_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    journal.write(Record::Restored { vm: VmId(1) }).unwrap();
    drop(journal);
    let journal = Journal::open(dir.path()).unwrap();
    assert!(journal.undo().is_empty());
    assert_eq!(journal.entry(VmId(1)).unwrap().before, before());
}

#[test]
fn a_lifted_home_leaves_limits_and_how_the_vm_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    journal.write(Record::HomeLifted { vm: VmId(1) }).unwrap();
    drop(journal);
    let mut journal = Journal::open(dir.path()).unwrap();
    let entry = journal.entry(VmId(1)).unwrap();
    assert!(!entry.is_placed() && entry.moving.is_none());
    assert_eq!((entry.held, &entry.before), (Some(quotas()), &before()));
    let undo = journal.undo().remove(0);
    assert_eq!(
        (undo.vcpus.len(), undo.emulator, undo.iothreads.len(), undo.nodes),
        (0, None, 0, None)
    );
    // Somebody changed it: it is journalled anew before it is touched, and the limit is still known.
    let changed = Before {
        vcpus: [(0, cpus("1")), (1, cpus("0-3"))].into(),
        ..before()
    };
    for record in [
        Record::First {
            run: run(1),
            before: changed,
        },
        Record::Pinned {
            vm: VmId(1),
            vcpus: vec![0],
            cpus: cpus("3"),
        },
    ] {
        journal.write(record).unwrap();
    }
    drop(journal);
    let undo = Journal::open(dir.path()).unwrap().undo().remove(0);
    assert_eq!(
        (undo.vcpus, undo.quotas),
        ([(0, cpus("1"))].into(), Some(quotas()))
    );
    // Another run of the VM has nothing of the former's.
    let mut journal = Journal::open(dir.path()).unwrap();
    let next = Run {
        runtime_id: 5,
        ..run(1)
    };
    journal
        .write(Record::First {
            run: next,
            before: before(),
        })
        .unwrap();
    assert!(!journal.entry(VmId(1)).unwrap().is_in_force());
}

#[test]
fn a_torn_last_line_is_dropped_at_every_length() {
    let dir = tempfile::tempdir().unwrap();
    drop(filled(dir.path()));
    let whole = std::fs::read(dir.path().join(FILE)).unwrap();
    let lines = whole.iter().filter(|b| **b == b'\n').count();
    let last = whole[..whole.len() - 1]
        .iter()
        .rposition(|b| *b == b'\n')
        .unwrap()
        + 1;
    for cut in last..whole.len() - 1 {
        let Replay { damaged, .. } = replay(&whole[..cut]);
        assert!(damaged.is_empty());
    }
    std::fs::write(dir.path().join(FILE), &whole[..whole.len() - 5]).unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.warnings, Vec::<String>::new());
    let after = std::fs::read(dir.path().join(FILE)).unwrap();
    assert_eq!(after.iter().filter(|b| **b == b'\n').count(), lines - 1);
}

#[test]
fn a_damaged_line_is_set_aside_and_loses_no_other_vm() {
    let dir = tempfile::tempdir().unwrap();
    drop(filled(dir.path()));
    let path = dir.path().join(FILE);
    let mut bytes = std::fs::read(&path).unwrap();
    let second = bytes.iter().position(|b| *b == b'\n').unwrap() + 30;
    bytes[second] ^= 0x55;
    bytes.extend_from_slice(b"\x00\xff garbage\n");
    std::fs::write(&path, &bytes).unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.entries().len(), 2);
    assert!(
        journal.warnings[0].contains("2 damaged lines"),
        "{:?}",
        journal.warnings
    );
    assert!(
        std::fs::read(dir.path().join(DAMAGED))
            .unwrap()
            .ends_with(b" garbage\n")
    );
    assert!(
        Journal::open(dir.path()).unwrap().warnings.is_empty(),
        "said once"
    );
}

#[test]
fn a_crash_while_compacting_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let entries = filled(dir.path()).entries().clone();
    std::fs::write(dir.path().join("journal.new"), "half").unwrap();
    assert_eq!(Journal::open(dir.path()).unwrap().entries(), &entries);
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let error = Journal::open(&dir.path().join("file/below")).unwrap_err();
    assert!(error.to_string().contains("file/below"), "{error}");
    assert!(peek(&dir.path().join("none")).is_empty());
}

#[test]
fn one_agent_at_a_time() {
    let dir = tempfile::tempdir().unwrap();
    let lock = Lock::try_take(dir.path()).unwrap().unwrap();
    assert!(Lock::try_take(dir.path()).unwrap().is_none());
    let error = Lock::take(dir.path(), std::time::Duration::ZERO).unwrap_err();
    assert!(error.to_string().contains("another agent"), "{error}");
    drop(lock);
    assert!(Lock::try_take(dir.path()).unwrap().is_some());
}

proptest! {
    #[test]
    fn any_bytes_replay(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = replay(&bytes);
    }

    #[test]
    fn a_flipped_bit_is_found(at in 0usize..400, bit in 0u8..8) {
        let record = Record::Pinned { vm: VmId(7), vcpus: vec![1, 2], cpus: CpuSet::one(CpuId(3)) };
        let mut line = encode(&record).into_bytes();
        line.pop();
        let at = at % line.len();
        line[at] ^= 1 << bit;
        // Hexadecimal digits may change case without changing the sum.
        prop_assert!(decode(&line).is_none_or(|same| same == record));
    }

    #[test]
    fn records_read_back(vcpus in prop::collection::vec(0u16..64, 0..5), node in 0u16..8) {
        for record in [
            Record::Pinned { vm: VmId(1), vcpus: vcpus.clone(), cpus: CpuSet::one(CpuId(9)) },
            Record::Moving { vm: VmId(2), to: NodeSet::one(NodeId(node)) },
            Record::Held { vm: VmId(2), quotas: quotas() },
            Record::HomeLifted { vm: VmId(2) },
            Record::First { run: run(5), before: before() },
        ] {
            let line = encode(&record);
            prop_assert_eq!(decode(line.trim_end().as_bytes()), Some(record));
        }
    }
}
