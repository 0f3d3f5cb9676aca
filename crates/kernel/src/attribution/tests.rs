//! Tests with a page in memory and handmade `pagemap` files. The tests count into the page as the emulator's plugin would.

use std::sync::atomic::{AtomicU8, AtomicU64};

use homenode_formats::pmu_region::{Counts, Layout, Sampled, Use};
use homenode_units::{Bytes, NodeId, PAGE_BYTES};
use proptest::prelude::*;

use super::*;
use crate::fake::{Tree, machine, page_use};
use crate::memory_blocks;
use crate::numa_maps::Sharing;
use crate::pagemap::Place;
use crate::pagemap::tests::write;

const LAYOUT: Layout = Layout {
    cpus: 2,
    tags: 3,
    frames: 100,
    line_bytes: 64,
    samples: 16,
};
const START: u64 = 1 << 30;

/// A page that lives as long as the tests.
fn page() -> Page<'static> {
    let words: Vec<AtomicU64> = (0..LAYOUT.tags_at() / 8).map(|_| AtomicU64::new(0)).collect();
    let tags: Vec<AtomicU8> = (0..LAYOUT.frames).map(|_| AtomicU8::new(0)).collect();
    let page = Page::new(LAYOUT, words.leak(), tags.leak());
    page.begin();
    page
}

/// A sampler for a host of two nodes with one CPU each. Frames 0 to 31 are on node 0, frames 32 to 63 on node 1, and the others
/// on no node.
fn sampler(page: Page<'static>) -> Sampler {
    let tree = Tree::new(&[
        ("sys/devices/system/memory/block_size_bytes", "20000"),
        ("sys/devices/system/node/node0/memory0/online", "1"),
        ("sys/devices/system/node/node1/memory1/online", "1"),
    ]);
    let nodes = "0-1".parse().expect("nodes");
    let blocks = memory_blocks::read(tree.root(), &nodes).expect("readable");
    Sampler::new(page, &machine(&[0, 1]), blocks.expect("there"))
}

fn vm(at: u8) -> VmId {
    VmId::parse(&format!("6695eb01-f6a4-8304-79aa-97f2502e19{at:02x}")).expect("a UUID")
}

/// A tree for VMs with a given number of pages. A VM's number is also its process id.
struct Rig {
    tree: Tree,
    page: Page<'static>,
    attribution: Attribution,
    at: Ns,
    busy: Ns,
}

impl Rig {
    fn new() -> Rig {
        let page = page();
        let mut rig = Rig {
            tree: Tree::new(&[]),
            page,
            attribution: Attribution::new(page, Some(2_000_000_000), Ok(sampler(page))),
            at: Ns::ZERO,
            busy: Ns::ZERO,
        };
        rig.begin();
        rig
    }

    /// Lets time pass in which the machine executes two instructions per nanosecond.
    fn begin(&mut self) {
        self.at += Ns::from_secs(1000);
        self.busy += Ns(5);
        self.page.instructions(0, 10);
        self.attribution.begin(self.busy);
    }

    fn own(&self, number: u8, frames: &[u64]) {
        let places: Vec<Place> = frames.iter().map(|frame| Place::Own(*frame)).collect();
        write(&self.tree, number.into(), START, &places);
    }

    fn look(
        &mut self,
        number: u8,
        pages: u64,
        ran_ms: &[u64],
    ) -> Result<Option<BTreeMap<u16, Counters>>, NotCounted> {
        let range = Range {
            start: START,
            end: START + pages * PAGE_BYTES,
            sharing: Sharing::Private,
            page_bytes: Bytes(PAGE_BYTES),
        };
        let ran = (0..).zip(ran_ms.iter().map(|ms| Ns::from_millis(*ms))).collect();
        let seen = Seen {
            id: vm(number),
            process: Process {
                pid: number.into(),
                start_ticks: 1,
            },
            ranges: &[range],
            ran: &ran,
        };
        self.attribution.counters(self.tree.root(), self.at, seen)
    }

    /// Returns the references and misses of a VM whose only vCPU has run for this time.
    fn counts(&mut self, number: u8, pages: u64, ran_ms: u64) -> (u64, u64) {
        let counters = self
            .look(number, pages, &[ran_ms])
            .expect("counted")
            .expect("there");
        let counters = counters[&0];
        (
            counters.llc_references.expect("counted"),
            counters.llc_misses.expect("counted"),
        )
    }

    /// Counts misses of a CPU in a frame, as the plugin would.
    fn miss(&self, cpu: u64, frame: u64, times: u32) {
        for _ in 0..times {
            self.page.referenced(cpu, self.page.tag(frame), true);
        }
    }
}

#[test]
fn what_is_counted_for_a_frame_goes_to_the_vm_whose_it_is_also_after_it_moved() {
    let mut rig = Rig::new();
    rig.own(1, &[10, 11]);
    rig.own(2, &[20, 21]);
    rig.begin();
    assert_eq!((rig.counts(1, 2, 10), rig.counts(2, 2, 10)), ((0, 0), (0, 0)));
    rig.miss(0, 10, 3);
    rig.miss(1, 11, 4);
    rig.miss(1, 20, 5);
    rig.miss(1, 30, 100);
    rig.begin();
    assert_eq!((rig.counts(1, 2, 20), rig.counts(2, 2, 20)), ((7, 7), (5, 5)));
    // A page of VM 1 moves, and VM 2 gets the frame that it left. One of VM 2's pages takes the frame of the other.
    rig.own(1, &[10, 40]);
    rig.own(2, &[21, 11]);
    rig.begin();
    assert_eq!((rig.counts(1, 2, 30), rig.counts(2, 2, 30)), ((7, 7), (5, 5)));
    assert_eq!(
        [10, 40, 11, 20, 21].map(|frame| rig.page.tag(frame)),
        [1, 1, 2, 0, 2]
    );
    rig.miss(0, 40, 1);
    rig.miss(0, 11, 2);
    rig.begin();
    assert_eq!((rig.counts(1, 2, 40), rig.counts(2, 2, 40)), ((8, 8), (7, 7)));
}

#[test]
fn frames_of_a_vm_that_went_away_are_nobodys_and_its_tag_is_free_for_the_next() {
    let mut rig = Rig::new();
    (1..=3).for_each(|number| rig.own(number, &[10 * u64::from(number)]));
    rig.begin();
    assert_eq!((rig.counts(1, 1, 0), rig.counts(2, 1, 0)), ((0, 0), (0, 0)));
    assert_eq!(rig.look(3, 1, &[0]), Err(NotCounted::NoTag { tags: 2 }));
    rig.miss(0, 10, 9);
    rig.attribution.keep_only(|known| known != vm(1));
    assert_eq!([10, 20].map(|frame| rig.page.tag(frame)), [0, 2]);
    assert_eq!(rig.counts(3, 1, 0), (0, 0), "what its predecessor did is not its");
    rig.miss(0, 30, 1);
    assert_eq!(rig.counts(3, 1, 5), (1, 1));
    // The same VM in another process counts as a new VM.
    let another = Process {
        pid: 3,
        start_ticks: 2,
    };
    let known = rig.attribution.vms.get_mut(&vm(3)).expect("known");
    known.frames.process = another;
    rig.begin();
    assert_eq!(rig.counts(3, 1, 5), (0, 0));
}

#[test]
fn a_vm_that_vanishes_while_it_is_read_has_no_counters() {
    let mut rig = Rig::new();
    rig.own(1, &[10, 11]);
    rig.begin();
    assert_eq!(rig.look(1, 3, &[0]), Ok(None), "its memory ends early");
    assert_eq!(rig.look(2, 3, &[0]), Ok(None), "it has none");
}

#[test]
fn nothing_is_counted_before_all_memory_was_read() {
    let mut rig = Rig::new();
    let pages = PART_PAGES as u64 + 1;
    write(&rig.tree, 1, START, &vec![Place::Nowhere; PART_PAGES + 1]);
    rig.begin();
    assert_eq!(rig.look(1, pages, &[0]), Ok(None));
    rig.begin();
    assert!(rig.look(1, pages, &[0]).expect("counted").is_some());
}

#[test]
fn pages_of_several_processes_are_nobodys_unless_the_vms_memory_is_shared() {
    let mut rig = Rig::new();
    write(&rig.tree, 1, START, &[Place::Shared(10), Place::Own(11)]);
    rig.begin();
    assert_eq!(rig.counts(1, 2, 0), (0, 0));
    assert_eq!([10, 11].map(|frame| rig.page.tag(frame)), [0, 1]);
    let vm = rig.attribution.vms.get_mut(&vm(1)).expect("known");
    let mut changed = |before: &[u32], now: &[u32]| retag(rig.page, vm.tag, before, now);
    let places = [Place::Shared(10), Place::Own(11)];
    vm.frames.note(&places, Sharing::Shared, 100, &mut changed);
    assert_eq!([10, 11].map(|frame| rig.page.tag(frame)), [1, 1]);
}

#[test]
fn memory_beyond_the_page_is_said() {
    let mut rig = Rig::new();
    rig.own(1, &[10, 100]);
    rig.begin();
    assert_eq!(rig.look(1, 2, &[0]), Err(NotCounted::Beyond { frames: 100 }));
    rig.own(1, &[10, 99]);
    rig.begin();
    assert_eq!(rig.counts(1, 2, 0), (0, 0), "it moved to where it is counted");
}

#[test]
fn counts_that_run_backwards_are_said_and_begin_anew() {
    let mut rig = Rig::new();
    rig.own(1, &[10]);
    rig.begin();
    rig.counts(1, 1, 0);
    rig.miss(0, 10, 50);
    assert_eq!(rig.counts(1, 1, 5), (50, 50));
    let vm = rig.attribution.vms.get_mut(&vm(1)).expect("known");
    vm.dealt.since = vm.dealt.since.map(|since| Counts {
        references: since.references + 1,
        ..since
    });
    assert_eq!(rig.look(1, 1, &[6]), Err(NotCounted::Backwards));
    rig.miss(0, 10, 1);
    assert_eq!(rig.counts(1, 1, 7), (50, 50));
    rig.miss(0, 10, 1);
    assert_eq!(rig.counts(1, 1, 8), (51, 51));
}

#[test]
fn a_model_that_stands_still_is_said() {
    let mut rig = Rig::new();
    rig.own(1, &[10]);
    assert_eq!(rig.look(1, 1, &[0]), Ok(None), "one look tells nothing");
    rig.attribution.begin(rig.busy);
    assert_eq!(rig.look(1, 1, &[0]), Err(NotCounted::Silent));
    rig.begin();
    assert_eq!(rig.counts(1, 1, 0), (0, 0));
    assert!(rig.page.is_wanted());
}

#[test]
fn cycles_are_time_run_and_tags_of_an_earlier_agent_are_forgotten() {
    let mut rig = Rig::new();
    rig.own(1, &[10]);
    rig.page.set_tag(50, 1);
    rig.attribution = Attribution::new(rig.page, Some(2_000_000_000), Ok(sampler(rig.page)));
    assert_eq!(rig.page.tag(50), 0);
    rig.begin();
    rig.begin();
    let counters = rig.look(1, 1, &[3]).expect("counted").expect("there");
    assert_eq!(counters[&0].cycles, 6_000_000);
}

#[test]
fn instructions_are_those_of_a_machine_on_which_a_miss_takes_time_and_a_remote_one_more() {
    let mut rig = Rig::new();
    rig.own(1, &[10]);
    rig.begin();
    rig.counts(1, 1, 0);
    let made = |rig: &mut Rig, ran_ms| {
        let counters = rig.look(1, 1, &[ran_ms]).expect("counted").expect("there");
        counters[&0].instructions
    };
    rig.begin();
    assert_eq!(made(&mut rig, 1), 2_000_000, "at 2 GHz");
    // In the next millisecond the emulator again executes 2 million. 5000 misses take 240 cycles each, so 2 of 3.2 parts are
    // left.
    rig.miss(0, 10, 5000);
    rig.begin();
    assert_eq!(made(&mut rig, 2), 2_000_000 + 1_250_000);
    // CPU 1 is on the other node, where a miss takes 340 cycles.
    rig.miss(1, 10, 5000);
    let wanted = Use::Read;
    rig.page.sampled(1, Sampled { frame: 10, wanted });
    rig.begin();
    assert_eq!(made(&mut rig, 3), 3_250_000 + 1_081_081);
}

#[test]
fn a_vm_that_is_slowed_down_still_misses_as_often_for_each_instruction() {
    let mut rig = Rig::new();
    rig.own(1, &[10]);
    rig.begin();
    rig.counts(1, 1, 0);
    // As above, 5 of 8 parts of two million instructions are executed, and the counts shrink alike.
    rig.miss(0, 10, 5000);
    rig.begin();
    assert_eq!(rig.counts(1, 1, 1), (3125, 3125));
    // Now all misses are served by the other node: 2 of 3.7 parts are left.
    rig.miss(1, 10, 5000);
    let wanted = Use::Read;
    rig.page.sampled(1, Sampled { frame: 10, wanted });
    rig.begin();
    assert_eq!(rig.counts(1, 1, 2), (3125 + 2703, 3125 + 2703));
}

#[test]
fn samples_go_to_the_page_whose_frame_they_name_and_say_which_nodes_used_it() {
    let mut rig = Rig::new();
    rig.own(1, &[10, 40, 11]);
    rig.begin();
    rig.counts(1, 3, 0);
    let first = rig.attribution.accesses(vm(1)).expect("read");
    assert_eq!((first.local, first.remote), (0, 0));
    let sample = |cpu, frame, wanted| rig.page.sampled(cpu, Sampled { frame, wanted });
    sample(0, 10, Use::Read);
    sample(1, 10, Use::Write);
    sample(1, 10, Use::Read);
    sample(0, 40, Use::Read);
    sample(0, 50, Use::Read); // another VM's
    sample(0, 90, Use::Read); // on no node
    rig.begin();
    rig.counts(1, 3, 0);
    let expected = vec![page_use(0, 0, &[(0, 1), (1, 2)], 1), page_use(1, 1, &[(0, 1)], 0)];
    assert_eq!(rig.attribution.page_uses(vm(1)), Some(expected));
    let accesses = rig.attribution.accesses(vm(1)).expect("read");
    assert_eq!((accesses.local, accesses.remote), (61, 3 * 61));
    assert_eq!((accesses.on[NodeId(0)], accesses.on[NodeId(1)]), (3 * 61, 61));
    let traffic = rig.attribution.traffic();
    assert_eq!(
        (traffic[NodeId(0)], traffic[NodeId(1)]),
        (3 * 61 * 64, 2 * 61 * 64)
    );
    rig.begin();
    assert_eq!(rig.attribution.page_uses(vm(1)), Some(Vec::new()), "said once");
    // 40 samples are written into a ring that has room for 16. The 16 that are left stand for all 40.
    let sample = Sampled {
        frame: 40,
        wanted: Use::Read,
    };
    (0..40).for_each(|_| rig.page.sampled(1, sample));
    rig.begin();
    let more = rig.attribution.accesses(vm(1)).expect("read");
    assert_eq!(more.local - accesses.local, 40 * 61);
    assert_eq!(rig.attribution.page_uses(vm(2)), None, "never seen");
}

#[test]
fn a_host_that_does_not_say_where_frames_lie_has_no_samples() {
    let mut rig = Rig::new();
    rig.attribution = Attribution::new(rig.page, None, Err("no blocks".into()));
    rig.own(1, &[10]);
    rig.begin();
    rig.begin();
    rig.counts(1, 1, 0);
    assert_eq!(rig.attribution.no_samples(), Some("no blocks"));
    assert_eq!(
        (rig.attribution.page_uses(vm(1)), rig.attribution.accesses(vm(1))),
        (None, None)
    );
    assert!(rig.attribution.traffic().is_empty());
}

#[test]
fn the_emulator_gets_its_speed_back_when_nobody_reads() {
    let rig = Rig::new();
    let page = rig.page;
    assert!(page.is_wanted() && page.sample_period() > 0);
    drop(rig);
    assert!(!page.is_wanted() && page.sample_period() == 0);
}

proptest! {
    #[test]
    fn counts_dealt_to_vcpus_add_up(
        steps in prop::collection::vec((0u32..50, prop::array::uniform3(0u64..9)), 1..20),
    ) {
        let mut rig = Rig::new();
        rig.own(1, &[10]);
        rig.begin();
        let mut ran = [0; 3];
        rig.look(1, 1, &ran).expect("counted");
        let (mut caused, mut waiting) = (0, 0);
        for (misses, time) in steps {
            rig.miss(1, 10, misses);
            waiting += u64::from(misses);
            (0..3).for_each(|at| ran[at] += time[at]);
            let counters = rig.look(1, 1, &ran).expect("counted").expect("there");
            if time != [0; 3] {
                caused += std::mem::take(&mut waiting);
            }
            let dealt: u64 = counters.values().filter_map(|counters| counters.llc_misses).sum();
            prop_assert_eq!(dealt, caused);
            let references: u64 = counters.values().filter_map(|counters| counters.llc_references).sum();
            prop_assert_eq!(references, caused);
        }
    }
}
