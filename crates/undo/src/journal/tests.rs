use homenode_host::{CpuQuota, Limit, Percent};
use homenode_units::{CpuId, NodeId};
use proptest::prelude::*;

use super::line::{Line, Replay, replay};
use super::*;
use levers::{Confined, Home, MemoryNodes, Moving, Pins, Quotas, Watched};

/// Journal entries of several shapes.
pub(crate) mod levers {
    use homenode_host::{CpuQuota, Limit};

    use super::*;

    macro_rules! written {
        ($name:ident($($of:ty)?), $key:expr) => {
            #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
            pub(crate) struct $name($(pub $of)?);

            impl Written for $name {
                const KEY: &'static str = $key;
            }
        };
    }

    written!(Pins(BTreeMap<u16, Vec<CpuSet>>), "vcpus");
    written!(Home(NodeSet), "home");
    written!(MemoryNodes(NodeSet), "memory-nodes");
    written!(Moving(NodeSet), MOVING);
    written!(Confined(Limit), "resctrl");
    written!(Watched(), "watched");
    written!(Quotas((CpuQuota, Option<CpuQuota>)), "cpu-quota");
}

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
    Quotas((CpuQuota::of(0.1, slice), Some(CpuQuota::of(0.5, slice))))
}

fn before() -> Before {
    Before {
        vcpus: [(0, cpus("0-3")), (1, cpus("0-3"))].into(),
        operator_pins: vec![1],
        emulator: cpus("0-3"),
        iothreads: [(1, cpus("2")), (2, cpus("3"))].into(),
        operator_helpers: vec![Helper::IoThread(2)],
        nodes: Some(nodes("0")),
        ..Before::default()
    }
}

/// The first copy.
fn file(dir: &Path) -> std::path::PathBuf {
    dir.join("private").join(COPIES[0])
}

/// Removes the second copy.
fn lose_second(dir: &Path) {
    std::fs::remove_file(dir.join("private").join(COPIES[1])).unwrap();
}

fn filled(dir: &Path) -> Journal {
    let mut journal = Journal::open(dir).unwrap();
    let vm = VmId(1);
    journal.begin(run(1), before()).unwrap();
    journal.set(vm, &Pins([(0, vec![cpus("2")])].into())).unwrap();
    journal.begin(run(2), Before::default()).unwrap();
    journal.set(vm, &Home(nodes("2"))).unwrap();
    journal.set(vm, &MemoryNodes(nodes("0,2"))).unwrap();
    journal.set(vm, &Moving(nodes("2"))).unwrap();
    journal.set(vm, &quotas()).unwrap();
    journal.set(vm, &Confined(Limit::CacheWays(Percent(10)))).unwrap();
    journal.begin(run(3), before()).unwrap();
    journal.forget(VmId(3));
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
    let text = std::fs::read_to_string(file(dir.path())).unwrap();
    let struck = text.matches("\"entry\":null").count();
    assert!(
        struck == 1 && !text.contains("vm3"),
        "nothing but the reset: {text}"
    );
}

#[test]
fn what_was_set_and_not_lifted_is_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let journal = filled(dir.path());
    assert_eq!(journal.in_force(), [VmId(1)], "of VM 2 nothing is in force");
    let entry = journal.entry(VmId(1)).unwrap();
    assert_eq!(
        entry.get(),
        Some(Pins([(0, vec![cpus("2")])].into())),
        "vCPU 1 was not touched"
    );
    assert_eq!(entry.get(), Some(MemoryNodes(nodes("0,2"))));
    assert_eq!(entry.get(), Some(quotas()));
    assert!(entry.get::<Confined>().is_some() && entry.get::<Watched>().is_none());
}

#[test]
fn a_lifted_quota_is_not_lifted_again() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    journal.clear(VmId(1), &[Quotas::KEY, Confined::KEY]);
    let entry = journal.entry(VmId(1)).unwrap();
    assert_eq!((entry.get::<Quotas>(), entry.get::<Confined>()), (None, None));
    drop(journal);
    assert_eq!(peek(dir.path())[&VmId(1)].get::<Quotas>(), None);
}

#[test]
fn a_restored_vm_keeps_how_it_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    journal.clear_all(VmId(1));
    drop(journal);
    let journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.in_force(), []);
    assert_eq!(journal.entry(VmId(1)).unwrap().before, before());
}

#[test]
fn a_lifted_home_leaves_limits_and_how_the_vm_was() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    let keys = [Pins::KEY, Home::KEY, MemoryNodes::KEY, Moving::KEY];
    journal.clear(VmId(1), &keys);
    drop(journal);
    let mut journal = Journal::open(dir.path()).unwrap();
    let entry = journal.entry(VmId(1)).unwrap();
    assert!(!entry.has(&keys));
    assert_eq!((entry.get(), &entry.before), (Some(quotas()), &before()));
    // Another program changed the VM: it is journalled again before it is touched, and the limit is still known.
    let changed = Before {
        vcpus: [(0, cpus("1")), (1, cpus("0-3"))].into(),
        ..before()
    };
    journal.begin(run(1), changed).unwrap();
    journal
        .set(VmId(1), &Pins([(0, vec![cpus("3")])].into()))
        .unwrap();
    drop(journal);
    let journal = Journal::open(dir.path()).unwrap();
    let entry = journal.entry(VmId(1)).unwrap();
    assert_eq!(
        (&entry.before.vcpus[&0], entry.get()),
        (&cpus("1"), Some(quotas()))
    );
    // Another run of the VM has none of the previous run's entries.
    let mut journal = Journal::open(dir.path()).unwrap();
    let next = Run {
        runtime_id: 5,
        ..run(1)
    };
    journal.begin(next, before()).unwrap();
    assert!(!journal.entry(VmId(1)).unwrap().is_in_force());
    drop(journal);
    assert!(!peek(dir.path())[&VmId(1)].is_in_force());
}

#[test]
fn a_torn_last_line_is_dropped_at_every_length() {
    let dir = tempfile::tempdir().unwrap();
    drop(filled(dir.path()));
    let whole = std::fs::read(file(dir.path())).unwrap();
    let lines = whole.iter().filter(|b| **b == b'\n').count();
    let last = whole[..whole.len() - 1]
        .iter()
        .rposition(|b| *b == b'\n')
        .unwrap()
        + 1;
    for cut in last..whole.len() - 1 {
        let Replay { damaged, .. } = replay(&[&whole[..cut]]);
        assert!(damaged.is_empty());
    }
    let entries = peek(dir.path());
    std::fs::write(file(dir.path()), &whole[..whole.len() - 5]).unwrap();
    assert_eq!(peek(dir.path()), entries, "the other copy has it");
    lose_second(dir.path());
    let journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.warnings, Vec::<String>::new());
    let after = std::fs::read(file(dir.path())).unwrap();
    let reset = 1;
    assert!(after.iter().filter(|b| **b == b'\n').count() < reset + lines);
}

#[test]
fn a_damaged_line_is_set_aside_and_loses_no_other_vm() {
    let dir = tempfile::tempdir().unwrap();
    drop(filled(dir.path()));
    let path = file(dir.path());
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
        std::fs::read(dir.path().join("private").join(DAMAGED))
            .unwrap()
            .ends_with(b" garbage\n")
    );
    assert!(
        Journal::open(dir.path()).unwrap().warnings.is_empty(),
        "said once"
    );
}

/// After a downgrade, a newer format reads as damage, and a damaged journal does not count as complete.
#[test]
fn what_a_newer_version_wrote_is_set_aside_and_said_and_what_is_understood_counts() {
    let dir = tempfile::tempdir().unwrap();
    let entries = filled(dir.path()).entries().clone();
    let json = r#"{"n":900,"vm":9,"lever":"home","entry":null,"since":"0.9"}"#;
    let newer = format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()));
    for copy in COPIES {
        let path = dir.path().join("private").join(copy);
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.extend_from_slice(newer.as_bytes());
        std::fs::write(&path, bytes).unwrap();
    }
    let journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.entries(), &entries);
    assert!(!journal.is_whole());
    assert!(
        journal.warnings[0].contains("set aside"),
        "{:?}",
        journal.warnings
    );
    let aside = std::fs::read_to_string(dir.path().join("private").join(DAMAGED)).unwrap();
    assert!(aside.contains(json), "{aside}");
}

#[test]
fn what_a_witness_says_is_known_also_where_nothing_can_be_written() {
    let (ours, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let seen = filled(other.path()).entry(VmId(1)).unwrap().clone();
    let mut journal = Journal::open(ours.path()).unwrap();
    std::fs::remove_dir_all(ours.path().join("private")).unwrap();
    journal.take_in(&seen);
    assert_eq!(journal.entry(VmId(1)), Some(&seen));
    // But an action is refused if it cannot be written down first.
    assert!(journal.set(VmId(1), &Home(nodes("1"))).is_err());
    assert_eq!(journal.entry(VmId(1)), Some(&seen));
    journal.clear_all(VmId(1));
    assert!(journal.in_force().is_empty());
}

#[test]
fn a_crash_while_compacting_leaves_the_old_file() {
    let dir = tempfile::tempdir().unwrap();
    let entries = filled(dir.path()).entries().clone();
    std::fs::write(dir.path().join("private/journal.new"), "half").unwrap();
    assert_eq!(Journal::open(dir.path()).unwrap().entries(), &entries);
}

#[test]
fn a_directory_that_cannot_be_made_is_named() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("file"), "").unwrap();
    let error = Journal::open(&dir.path().join("file/below")).unwrap_err();
    assert!(error.to_string().contains("/file"), "{error}");
    assert!(peek(&dir.path().join("none")).is_empty());
}

#[test]
fn any_bit_may_turn_in_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    let entries = filled(dir.path()).entries().clone();
    let whole = std::fs::read(file(dir.path())).unwrap();
    for bit in 0..8 * whole.len() {
        let mut flipped = whole.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        for copies in [[&flipped[..], &whole], [&whole, &flipped]] {
            let replay = replay(&copies);
            assert_eq!((&replay.entries, replay.lost), (&entries, 0), "bit {bit}");
        }
    }
}

#[test]
fn a_lost_copy_is_made_anew() {
    for lost in COPIES {
        let dir = tempfile::tempdir().unwrap();
        let entries = filled(dir.path()).entries().clone();
        std::fs::remove_file(dir.path().join("private").join(lost)).unwrap();
        let journal = Journal::open(dir.path()).unwrap();
        assert_eq!((journal.entries(), &journal.warnings[..]), (&entries, &[][..]));
        assert_eq!(peek(dir.path()), entries);
        assert!(dir.path().join("private").join(lost).exists());
    }
}

#[test]
fn what_was_struck_out_before_a_rewriting_stays_so_whichever_copy_is_older() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    let second = dir.path().join("private").join(COPIES[1]);
    let old = std::fs::read(&second).unwrap();
    journal.forget(VmId(1));
    drop(journal);
    drop(Journal::open(dir.path()).unwrap());
    // The state after a crash between writing the two files.
    std::fs::write(&second, old).unwrap();
    assert_eq!(peek(dir.path()).keys().copied().collect::<Vec<_>>(), [VmId(2)]);
}

#[test]
fn the_files_stay_small_however_long_the_agent_runs() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = filled(dir.path());
    let mut longest = 0;
    let pins = Pins((0..200).map(|vcpu| (vcpu, vec![cpus("0-3")])).collect());
    for _ in 0..500 {
        journal.set(VmId(1), &pins).unwrap();
        journal.clear(VmId(1), &[Pins::KEY]);
        longest = longest.max(std::fs::metadata(file(dir.path())).unwrap().len());
    }
    assert!(longest < 2 * REWRITE_BYTES, "{longest}");
    assert_eq!(Journal::open(dir.path()).unwrap().entries(), journal.entries());
}

/// Limits the size of files in this process: writes beyond the limit fail as on a full disk.
fn limit_files_to(bytes: u64) {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit {
        current: Some(bytes),
        maximum: None,
    };
    setrlimit(Resource::Fsize, limit).unwrap();
}

/// Runs in its own process, because the limit applies to the whole process.
#[test]
fn where_nothing_can_be_written_nothing_is_begun_and_what_ended_is_struck_out_later() {
    const CHILD: &str = "HOMENODE_TEST_FULL_DISK";
    let Some(dir) = std::env::var_os(CHILD) else {
        let dir = tempfile::tempdir().unwrap();
        let name = "journal::tests::where_nothing_can_be_written_nothing_is_begun_and_what_ended_is_struck_out_later";
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, dir.path())
            .output()
            .unwrap();
        let said =
            String::from_utf8_lossy(&child.stdout).into_owned() + &String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success() && said.contains("1 passed"), "{said}");
        return;
    };
    // Without a handler, the signal that comes with the limit would end the process.
    signal_hook::flag::register(libc::SIGXFSZ, std::sync::Arc::default()).unwrap();
    let dir = Path::new(&dir);
    let mut journal = filled(dir);
    let entries = journal.entries().clone();
    limit_files_to(1);
    let error = journal.set(VmId(2), &Home(nodes("1"))).unwrap_err();
    assert!(error.to_string().contains("the agent changes nothing"), "{error}");
    assert_eq!(journal.entries(), &entries, "what is not on disk is not in force");
    journal.clear_all(VmId(1));
    assert_eq!(journal.in_force(), []);
    assert_eq!(peek(dir), entries, "nothing is half written");
    let read = Journal::open(dir).unwrap();
    assert_eq!(
        read.entries(),
        &entries,
        "what cannot be written can be read, and undone"
    );
    assert!(!read.warnings.is_empty());
    limit_files_to(u64::MAX);
    journal.set(VmId(2), &Home(nodes("1"))).unwrap();
    let read = Journal::open(dir).unwrap();
    assert_eq!(read.in_force(), [VmId(2)]);
}

#[test]
fn a_copy_that_is_far_too_large_is_refused_at_once_and_the_other_read() {
    let dir = tempfile::tempdir().unwrap();
    let entries = filled(dir.path()).entries().clone();
    // More than memory can hold.
    const TOO_LARGE: u64 = 1 << 40;
    let large = File::options().write(true).open(file(dir.path())).unwrap();
    large.set_len(TOO_LARGE).unwrap();
    let journal = Journal::open(dir.path()).unwrap();
    assert_eq!(journal.entries(), &entries);
    assert!(journal.warnings[0].contains("larger"), "{:?}", journal.warnings);
    for copy in COPIES {
        let path = dir.path().join("private").join(copy);
        let large = File::options().write(true).open(path).unwrap();
        large.set_len(TOO_LARGE).unwrap();
    }
    let error = Journal::open(dir.path()).unwrap_err().to_string();
    assert!(
        error.contains("larger") && error.contains("private/journal"),
        "{error}"
    );
}

#[test]
fn an_entry_that_no_lever_can_read_is_in_force_and_said() {
    let dir = tempfile::tempdir().unwrap();
    drop(filled(dir.path()));
    let mut journal = Journal::open(dir.path()).unwrap();
    journal.clear_all(VmId(1));
    journal
        .write(vec![
            Line::new(VmId(1), Quotas::KEY, &"what is this"),
            Line::new(VmId(2), "of-0.9", &7),
        ])
        .unwrap();
    assert_eq!(journal.in_force(), [VmId(1), VmId(2)]);
}

proptest! {
    #[test]
    fn any_bytes_replay(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = replay(&[&bytes]);
    }

    #[test]
    fn a_flipped_bit_is_found(at in 0usize..400, bit in 0u8..8) {
        let whole = Line::new(VmId(7), Pins::KEY, &Pins([(1, vec![CpuSet::one(CpuId(3))])].into()));
        let mut line = whole.encode().into_bytes();
        line.pop();
        let at = at % line.len();
        line[at] ^= 1 << bit;
        // A hexadecimal digit of the checksum may change case without changing its value.
        prop_assert!(Line::decode(&line).is_none_or(|same| same == whole));
    }

    #[test]
    fn the_last_line_of_a_key_wins(sets in prop::collection::vec((0u128..3, 0usize..3, prop::option::of(0u16..8)), 0..30)) {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(dir.path()).unwrap();
        let mut last = BTreeMap::new();
        for vm in 0..3 {
            journal.begin(run(vm), before()).unwrap();
        }
        for (vm, lever, node) in sets {
            let at = node.map(|node| NodeSet::one(NodeId(node)));
            match (lever, at.clone()) {
                (0, Some(at)) => journal.set(VmId(vm), &Home(at)),
                (1, Some(at)) => journal.set(VmId(vm), &MemoryNodes(at)),
                (_, Some(at)) => journal.set(VmId(vm), &Moving(at)),
                (lever, None) => {
                    let key = [Home::KEY, MemoryNodes::KEY, Moving::KEY][lever];
                    journal.clear(VmId(vm), &[key]);
                    Ok(())
                }
            }
            .unwrap();
            last.insert((vm, lever), at);
        }
        let of = |entry: &Entry, lever: usize| match lever {
            0 => entry.get().map(|Home(at)| at),
            1 => entry.get().map(|MemoryNodes(at)| at),
            _ => entry.get().map(|Moving(at)| at),
        };
        let again = Journal::open(dir.path()).unwrap();
        for entries in [journal.entries(), again.entries()] {
            for ((vm, lever), at) in &last {
                prop_assert_eq!(&of(&entries[&VmId(*vm)], *lever), at);
            }
        }
    }
}

#[test]
fn a_run_of_another_vm_is_damage() {
    let dir = tempfile::tempdir().unwrap();
    let start = Start {
        run: run(2),
        before: before(),
    };
    let line = Line::new(VmId(1), RUN, &start).encode();
    drop(Journal::open(dir.path()).unwrap());
    std::fs::write(file(dir.path()), line.repeat(2)).unwrap();
    lose_second(dir.path());
    let journal = Journal::open(dir.path()).unwrap();
    assert!(journal.entries().is_empty());
    assert_eq!(journal.warnings.len(), 1);
}
