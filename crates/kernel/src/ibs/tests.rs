//! Tests with rings made from the published layout. No AMD processor took part: these are not recordings.

use std::sync::atomic::AtomicU64;

use homenode_units::Bytes;
use proptest::prelude::*;
use rustix::mm::mmap_anonymous;

use super::*;
use crate::fake::{Tree, machine, page_use};
use crate::memory_blocks;
use crate::numa_maps::Sharing;
use crate::pagemap::Place;
use crate::pagemap::tests::write;

const START: u64 = 1 << 30;
const HAS_ALL: u32 = 0x1BFF; // the capabilities of a Zen 4, as CPUID 8000_001B reports them
const HAS_OLD: u32 = 0x3FF;
/// A load that missed all caches and came from local DRAM: `IBS_OP_DATA2`, `IBS_OP_DATA3`.
const LOAD: (u64, u64) = (3, 1 | 1 << 7 | 1 << 17 | 1 << 18 | 1 << 20);
const STORE: (u64, u64) = (0, 2 | 1 << 7 | 1 << 17 | 1 << 18 | 1 << 20);

fn record(kind: u32, body: &[u64]) -> Vec<u64> {
    let bytes = 8 * (body.len() as u64 + 1);
    let mut words = vec![u64::from(kind) | bytes << 48];
    words.extend(body);
    words
}

/// A sample as `perf_ibs_handle_irq` builds it with `PERF_SAMPLE_RAW`.
fn sample(caps: u32, (data2, data3): (u64, u64), physical: u64) -> Vec<u64> {
    let mut registers = vec![
        0x6_0000 | 0xFFFF,
        0x40_1000,
        0,
        data2,
        data3,
        0x7f00_0000_1234,
        physical,
    ];
    registers.extend((caps & 1 << 5 != 0).then_some(0)); // the branch target
    registers.extend((caps & 1 << 10 != 0).then_some(0)); // IBS_OP_DATA4
    let raw_bytes = 4 + 8 * registers.len() as u64;
    let mut body = vec![raw_bytes | u64::from(caps) << 32];
    body.extend(registers);
    record(9, &body)
}

/// Puts records into a ring of this many words, the first at `tail` bytes. Returns the ring and its head.
fn ring(words: usize, tail: u64, records: &[Vec<u64>]) -> (Vec<AtomicU64>, u64) {
    let ring: Vec<AtomicU64> = (0..words).map(|_| AtomicU64::new(u64::MAX)).collect();
    let mut head = tail;
    for word in records.iter().flatten() {
        ring[(head / 8) as usize % words].store(*word, Ordering::Relaxed);
        head += 8;
    }
    (ring, head)
}

fn read(records: &[Vec<u64>]) -> (Vec<Access>, Drained) {
    let (ring, head) = ring(1 << 12, 0, records);
    let mut seen = Vec::new();
    let drained = ring::drain(&ring, 0, head, &mut |access| seen.push(access));
    (seen, drained)
}

#[test]
fn accesses_to_memory_are_kept_and_all_others_left_out() {
    let is_kept = |caps, data: (u64, u64)| {
        let (seen, drained) = read(&[sample(caps, data, 0x12_3456)]);
        assert_eq!((drained.samples, drained.malformed), (1, 0));
        seen
    };
    let access = |is_write| Access {
        frame: 0x123,
        is_write,
    };
    for caps in [HAS_OLD, HAS_ALL] {
        assert_eq!(is_kept(caps, LOAD), [access(false)]);
        assert_eq!(is_kept(caps, STORE), [access(true)]);
        // An op that reads memory, changes the value and writes it back.
        assert_eq!(is_kept(caps, (LOAD.0, LOAD.1 | 2)), [access(true)]);
        let remote = (LOAD.0 | 1 << 4, LOAD.1);
        assert_eq!(is_kept(caps, remote), [access(false)]);
        for (bit, what) in [
            (1, "neither load nor store"),
            (1 << 7, "hit the core's cache"),
            (1 << 18, "no valid address"),
        ] {
            assert!(is_kept(caps, (LOAD.0, LOAD.1 & !bit)).is_empty(), "{what}");
        }
        for (bit, what) in [
            (1 << 14, "uncached"),
            (1 << 16, "on its way already"),
            (1 << 21, "software prefetch"),
        ] {
            assert!(is_kept(caps, (LOAD.0, LOAD.1 | bit)).is_empty(), "{what}");
        }
        for source in [0, 1, 2, 4, 5, 7] {
            assert!(is_kept(caps, (source, LOAD.1)).is_empty(), "source {source}");
        }
        assert!(is_kept(caps, (0, STORE.1 & !(1 << 20))).is_empty(), "hit the L2");
    }
    // Sources 6 and 8 are known since Zen 4. Source 11 is reserved there, and looks like 3 to older processors.
    let wide = |source: u64| (source & 7 | source >> 3 << 6, LOAD.1);
    let kept = |caps| (0..32).filter(move |source| !is_kept(caps, wide(*source)).is_empty());
    assert_eq!(kept(HAS_ALL).collect::<Vec<_>>(), [3, 6, 8]);
    assert_eq!(kept(HAS_OLD).collect::<Vec<_>>(), [3, 11, 19, 27]);
}

#[test]
fn records_that_the_rings_end_cuts_are_read() {
    let records = [sample(HAS_OLD, LOAD, 5 << 12), sample(HAS_ALL, STORE, 6 << 12)];
    let expected = [(5, false), (6, true)].map(|(frame, is_write)| Access { frame, is_write });
    for tail in (0..64).chain([u64::MAX / 8 - 3]).map(|word| word * 8) {
        let ring: Vec<AtomicU64> = (0..32).map(|_| AtomicU64::new(0)).collect();
        let mut head = tail;
        for word in records.iter().flatten() {
            ring[(head / 8) as usize % 32].store(*word, Ordering::Relaxed);
            head = head.wrapping_add(8);
        }
        let mut seen = Vec::new();
        let drained = ring::drain(&ring, tail, head, &mut |access| seen.push(access));
        assert_eq!((seen.as_slice(), drained.malformed), (&expected[..], 0), "{tail}");
    }
}

#[test]
fn lost_samples_are_counted() {
    let records = [
        record(2, &[7, 40]),
        record(13, &[2]),
        record(5, &[0, 0, 0]), // throttled
        record(77, &[1, 2, 3]),
        record(2, &[7, u64::MAX]),
        sample(HAS_OLD, LOAD, 1 << 12),
    ];
    let (seen, drained) = read(&records);
    let expected = Drained {
        samples: 1,
        lost: u64::MAX,
        malformed: 0,
    };
    assert_eq!((seen.len(), drained), (1, expected));
    assert_eq!(read(&records[..4]).1.lost, 42);
}

#[test]
fn bad_records_are_counted_and_end_reading_where_the_next_is_unknown() {
    let whole = sample(HAS_OLD, LOAD, 1 << 12);
    let with_size = |bytes: u64| {
        let mut words = whole.clone();
        words[0] = 9 | bytes << 48;
        words
    };
    for bytes in [0, 4, 7, 12, 8 * whole.len() as u64 + 8, 0xFFF8] {
        let (seen, drained) = read(&[with_size(bytes)]);
        assert_eq!((seen.len(), drained.malformed), (0, 1), "{bytes}");
    }
    let with_raw = |raw_bytes: u64| {
        let mut words = whole.clone();
        words[1] = raw_bytes | u64::from(HAS_OLD) << 32;
        words
    };
    for bad in [
        with_raw(0),
        with_raw(59),
        with_raw(8 * whole.len() as u64),
        with_raw(u64::from(u32::MAX)),
        record(9, &[]),
        record(2, &[7]),
        record(13, &[]),
    ] {
        let (seen, drained) = read(&[bad.clone(), whole.clone()]);
        assert_eq!((seen.len(), drained.malformed), (1, 1), "{bad:?}");
    }
    // Positions that cannot be: more unread bytes than the ring has, and half a word.
    let (ring, _) = ring(16, 0, &[]);
    for (tail, head) in [(0, 129), (0, 136), (8, 0), (0, u64::MAX), (3, 8)] {
        let drained = ring::drain(&ring, tail, head, &mut |_| panic!("there is none"));
        assert_eq!(drained.malformed, 1, "{tail} {head}");
    }
    assert_eq!(ring::drain(&[], 0, 0, &mut |_| ()).malformed, 1);
}

proptest! {
    #[test]
    fn whatever_a_ring_contains_reading_ends(
        words in prop::collection::vec(prop_oneof![any::<u64>(), (0u64..20, 0u64..20).prop_map(|(a, b)| a | b << 51)], 64),
        tail: u64, unread in 0u64..70,
    ) {
        let ring: Vec<AtomicU64> = words.into_iter().map(AtomicU64::new).collect();
        let mut seen = 0;
        let drained = ring::drain(&ring, tail, tail.wrapping_add(8 * unread), &mut |access| {
            assert!(access.frame < 1 << 40);
            seen += 1;
        });
        prop_assert!(seen <= drained.samples && drained.samples + drained.malformed <= 65);
    }
}

#[test]
fn the_period_stays_within_its_bounds() {
    let next = |period, fullest, lost| next_period(period, PERIOD_MIN, fullest, lost);
    let mut period = PERIOD_MAX;
    for _ in 0..9 {
        period = next(period, 0, 0);
        assert!(period.is_multiple_of(16) && (PERIOD_MIN..=PERIOD_MAX).contains(&period));
    }
    assert_eq!(period, PERIOD_MIN);
    assert_eq!(next(period, RING_BYTES / 4, 0), period);
    assert_eq!(next(period, RING_BYTES / 4, 1), 2 * period);
    assert_eq!(next(period, RING_BYTES / 2 + 8, 0), 2 * period);
    assert_eq!(next(PERIOD_MAX, RING_BYTES, 9), PERIOD_MAX);
    // Where each marked op interrupts, quiet rings do not shorten it.
    assert_eq!(next_period(PERIOD_MAX, PERIOD_MAX, 0, 0), PERIOD_MAX);
}

#[allow(unsafe_code)] // memory that stands for the kernel's
impl Ring {
    /// A ring that only the test writes to.
    fn of_test(node: NodeId) -> Ring {
        let (bytes, access) = (HEAD_BYTES + RING_BYTES, ProtFlags::READ | ProtFlags::WRITE);
        // SAFETY: a new mapping of no file.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes as usize, access, MapFlags::PRIVATE) };
        Ring {
            node,
            event: None,
            start: NonNull::new(start.expect("memory").cast()).expect("not at 0"),
        }
    }

    /// Writes records as the kernel does: first these, then the head.
    fn write(&self, records: &[Vec<u64>]) {
        let head = &self.words(0, HEAD_BYTES)[DATA_HEAD];
        let ring = self.words(HEAD_BYTES, RING_BYTES);
        let mut at = head.load(Ordering::Relaxed);
        for word in records.iter().flatten() {
            ring[(at / 8) as usize % ring.len()].store(*word, Ordering::Relaxed);
            at += 8;
        }
        head.store(at, Ordering::Release);
    }
}

/// A sampler for two nodes with a CPU each, which do not ask the kernel. Frames 0 to 31 are on node 0, 32 to 63 on node 1.
fn sampler() -> Ibs {
    let tree = Tree::new(&[
        ("sys/devices/system/memory/block_size_bytes", "20000"),
        ("sys/devices/system/node/node0/memory0/online", "1"),
        ("sys/devices/system/node/node1/memory1/online", "1"),
    ]);
    let nodes = "0-1".parse().expect("nodes");
    let blocks = memory_blocks::read(tree.root(), &nodes).expect("readable");
    let device = Device {
        kind: 0,
        config: 0,
        period_min: PERIOD_MIN,
    };
    let mut ibs = Ibs::new(device, &machine(&[0, 1]), blocks.expect("there"));
    ibs.rings = [0, 1].map(|node| Ring::of_test(NodeId(node))).into();
    ibs
}

fn vm(at: u8) -> VmId {
    VmId::parse(&format!("6695eb01-f6a4-8304-79aa-97f2502e19{at:02x}")).expect("a UUID")
}

fn uses(ibs: &mut Ibs, tree: &Tree, at: u64, vm: VmId) -> Option<Vec<PageUse>> {
    let range = Range {
        start: START,
        end: START + 3 * 4096,
        sharing: Sharing::Private,
        page_bytes: Bytes(4096),
    };
    let process = Process {
        pid: 7,
        start_ticks: 1,
    };
    ibs.page_uses(tree.root(), Ns::from_secs(at), vm, (process, &[range]))
        .expect("readable")
}

#[test]
fn samples_go_to_the_page_that_has_the_frame() {
    let (mut ibs, tree) = (sampler(), Tree::new(&[]));
    write(
        &tree,
        7,
        START,
        &[Place::Own(10), Place::Own(40), Place::Shared(11)],
    );
    assert_eq!(ibs.look(), Looked::default());
    assert_eq!(uses(&mut ibs, &tree, 100, vm(1)), Some(Vec::new()));
    let load = |frame: u64| sample(HAS_ALL, LOAD, frame << 12 | 0xF40);
    let store = |frame: u64| sample(HAS_ALL, STORE, frame << 12);
    ibs.rings[0].write(&[
        load(10),
        load(40),
        load(11),
        load(50),
        load(1 << 30),
        load(1 << 39),
    ]);
    ibs.rings[1].write(&[store(10), record(2, &[1, 4]), load(10)]);
    assert_eq!(ibs.look(), Looked { samples: 8, lost: 4 });
    let expected = vec![page_use(0, 0, &[(0, 1), (1, 2)], 1), page_use(1, 1, &[(0, 1)], 0)];
    assert_eq!(uses(&mut ibs, &tree, 200, vm(1)), Some(expected));
    ibs.look();
    assert_eq!(uses(&mut ibs, &tree, 300, vm(1)), Some(Vec::new()), "said once");
    // Page 1 moved to a frame on node 0.
    write(&tree, 7, START, &[Place::Own(10), Place::Own(12), Place::Nowhere]);
    ibs.rings[1].write(&[load(40), load(12)]);
    ibs.look();
    let expected = vec![page_use(1, 0, &[(1, 1)], 0)];
    assert_eq!(uses(&mut ibs, &tree, 1000, vm(1)), Some(expected));
    ibs.keep_only(|_| false);
    assert!(
        ibs.rings.is_empty() && ibs.vms.is_empty(),
        "nothing is sampled any more"
    );
}

#[test]
fn a_kernel_with_another_layout_ends_sampling_with_the_reason() {
    let (mut ibs, tree) = (sampler(), Tree::new(&[]));
    ibs.rings[0].write(&[sample(HAS_OLD, LOAD, 1 << 12), record(9, &[1])]);
    ibs.look();
    let why = ibs.absence().expect("ended").to_owned();
    assert!(why.contains("published layout"), "{why}");
    assert!(ibs.rings.is_empty());
    assert_eq!(uses(&mut ibs, &tree, 1, vm(1)), None);
    assert_eq!(ibs.look(), Looked::default());
}

#[test]
fn a_host_that_cannot_sample_says_why() {
    let device = |files: &[(&str, &str)]| Device::read(Tree::new(files).root());
    let kind = ("sys/bus/event_source/devices/ibs_op/type", "9\n");
    let format = |name: &str| format!("sys/bus/event_source/devices/ibs_op/format/{name}");
    let (ops, misses) = (format("cnt_ctl"), format("l3missonly"));
    let config = |found: Result<Option<Device>, ReadError>| found.expect("read").expect("there").config;
    assert_eq!(config(device(&[kind])), 0);
    assert_eq!(
        device(&[kind]).expect("read").expect("there").period_min,
        PERIOD_MAX
    );
    let zen_4 = device(&[kind, (&misses, "config:16\n")]);
    assert_eq!(zen_4.expect("read").expect("there").period_min, PERIOD_MIN);
    assert_eq!(
        config(device(&[kind, (&ops, "config:19\n"), (&misses, "config:16\n")])),
        1 << 19 | 1 << 16
    );
    for bad in ["config:64", "config1:3", "19", ""] {
        let error = device(&[kind, (&ops, bad)]).expect_err("refused").to_string();
        assert!(error.contains("cnt_ctl"), "{error}");
    }
    assert_eq!(device(&[]), Ok(None));
    for (files, part) in [
        (
            &[("proc/cpuinfo", "processor\t: 0\nvendor_id\t: GenuineIntel\n")][..],
            "PEBS",
        ),
        (
            &[("proc/cpuinfo", "processor\t: 0\nvendor_id\t: AuthenticAMD\n")],
            "no ibs_op",
        ),
        (&[("sys/bus/event_source/devices/arm_spe_0/type", "9")], "SPE"),
        (&[], "AMD"),
    ] {
        let why = Device::find(Tree::new(files).root())
            .expect_err("absent")
            .to_string();
        assert!(
            why.contains(part) && why.contains("which node uses a page"),
            "{why}"
        );
    }
}

#[test]
fn an_event_that_the_kernel_refuses_ends_sampling_with_the_reason() {
    let (mut ibs, tree) = (sampler(), Tree::new(&[]));
    ibs.rings.clear();
    ibs.device.kind = u32::MAX;
    assert_eq!(uses(&mut ibs, &tree, 1, vm(1)), None);
    let why = ibs.absence().expect("refused");
    assert!(why.contains("CPU 0"), "{why}");
}

#[test]
fn the_kernels_own_ring_is_mapped_enabled_and_read() {
    // Any event has such a ring. This one is the clock of CPU 0, whose samples are not IBS's.
    let attr = Attr::sampling(1, 0, 100_000, PERF_SAMPLE_RAW);
    let ring = match Ring::open(&attr, CpuId(0), NodeId(0)) {
        Ok(ring) => ring,
        Err(error) => return assert!(perf::absence(&error).is_some(), "{error}"),
    };
    ring.enable().expect("enabled");
    ring.set_period(200_000).expect("set");
    std::thread::sleep(std::time::Duration::from_millis(50));
    let (bytes, drained) = ring.drain(&mut |access| panic!("not IBS: {access:?}"));
    assert!(bytes > 0 && drained.samples > 0, "{drained:?}");
    assert_eq!(drained.malformed, drained.samples);
}
