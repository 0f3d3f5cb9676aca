use super::*;
use crate::tlb::{Access, PageSize, Space, core};
use proptest::prelude::*;

use Access::{Read, Write};

/// A guest of 64 MiB whose pages are in frames of the same number. Its tables take the last 256 frames.
const FRAMES: u64 = 1 << 14;
const TABLES: u64 = FRAMES - 256;

fn guest(pages: u64, guest_size: PageSize, nested_size: PageSize) -> Guest {
    let mut guest = Guest::new(FRAMES, FRAMES - TABLES, nested_size, Flags::Kept);
    let space = guest.tables.space().unwrap();
    for page in (0..pages).step_by(guest_size.pages() as usize) {
        guest.tables.map(space, page, page, guest_size).unwrap();
    }
    guest
}

fn small(pages: u64) -> Guest {
    guest(pages, PageSize::Small, PageSize::Small)
}

fn vcpu(mode: Mode, entries: u16, options: Options) -> Vcpu {
    let core = core("cascade-lake").unwrap();
    Vcpu::new(core, Buffer::new(mode, entries, options))
}

fn paml(entries: u16) -> Vcpu {
    vcpu(Mode::Paml, entries, Options::PUBLISHED)
}

/// Returns the log so far, oldest first.
fn log(vcpu: &Vcpu) -> Vec<u64> {
    vcpu.log.contents().collect()
}

#[test]
fn a_cold_walk_makes_24_references_and_a_warm_one_5() {
    let (mut guest, mut vcpu) = (small(100), paml(512));
    assert_eq!(vcpu.access(&mut guest, 0, Read), Step::Walked);
    assert_eq!(vcpu.counts().references, 24);
    // The next page's table and the table's location are cached: one reference reads the table, four walk to the page.
    assert_eq!(vcpu.access(&mut guest, 1, Read), Step::Walked);
    assert_eq!(vcpu.counts().references, 24 + 5);
    assert_eq!(vcpu.access(&mut guest, 1, Read), Step::Hit);
    // With nested pages of 2 MiB, a nested walk takes 3 references: four tables of 1 + 3 each, and 3 for the page.
    let (mut guest, mut vcpu) = (guest_with(PageSize::Medium), paml(512));
    vcpu.access(&mut guest, 0, Read);
    assert_eq!(vcpu.counts().references, 4 * (1 + 3) + 3);
}

fn guest_with(nested: PageSize) -> Guest {
    guest(1024, PageSize::Small, nested)
}

#[test]
fn pml_logs_what_was_written_and_the_tables_that_were_walked() {
    let (mut guest, mut vcpu) = (small(100), vcpu(Mode::Pml, 512, Options::PUBLISHED));
    for page in 0..50 {
        let access = if page % 2 == 0 { Write } else { Read };
        vcpu.access(&mut guest, page, access);
        vcpu.access(&mut guest, page, access);
    }
    // The tables come first, the root at their head; then the written pages.
    let tables = guest.tables.table_frames();
    let expected: Vec<u64> = tables.clone().chain((0..50).step_by(2)).collect();
    assert_eq!(log(&vcpu), expected);
    assert_eq!(tables.count(), 4);
    // A page that was read is logged at its first write, although its translation is cached.
    assert_eq!(vcpu.access(&mut guest, 1, Write), Step::Walked);
    assert_eq!(log(&vcpu).last(), Some(&1));
    assert_eq!(guest.ept.flags(1), (true, true));
    assert_eq!(
        (guest.ept.flags(3), guest.ept.flags(60)),
        ((true, false), (false, false))
    );
}

#[test]
fn an_accessed_flag_alone_can_exit_with_a_full_log() {
    // The log has four entries, which the four tables of the first walk fill.
    let (mut guest, mut vcpu) = (small(100), vcpu(Mode::Pml, 4, Options::PUBLISHED));
    let full = Step::Exit(Exit::LogFull);
    assert_eq!(vcpu.access(&mut guest, 0, Read), full);
    assert_eq!(
        guest.ept.flags(0),
        (false, false),
        "no flag is set before an exit"
    );
    assert_eq!(vcpu.access(&mut guest, 0, Read), full, "it restarts");
    vcpu.log.reset();
    vcpu.log.refresh();
    assert_eq!(vcpu.access(&mut guest, 0, Read), Step::Walked);
    for page in 0..4 {
        assert_eq!(vcpu.access(&mut guest, page, Write), Step::Walked);
    }
    // An access that sets no flag needs no entry in the log.
    guest.ept.clear_accessed();
    assert_eq!(vcpu.access(&mut guest, 3, Read), Step::Hit);
    assert_eq!(vcpu.access(&mut guest, 4, Read), full);
}

#[test]
fn an_interrupt_owed_by_a_walk_that_exits_goes_out_with_the_next() {
    let each = Options {
        tables: TablePages::Each,
        ..Options::PUBLISHED
    };
    let (mut guest, mut vcpu) = (small(100), vcpu(Mode::Paml, 4, each));
    // The log holds three frames; the four tables of this walk fill it. Then the page turns out to be unmapped.
    assert_eq!(vcpu.access(&mut guest, 150, Read), Step::Exit(Exit::Unmapped));
    assert!(vcpu.log.is_full());
    assert_eq!(vcpu.access(&mut guest, 7, Read), Step::Raised);
    assert_eq!(vcpu.access(&mut guest, 8, Read), Step::Walked);
}

#[test]
fn flags_cleared_without_a_flush_are_not_set_again() {
    let (mut guest, mut vcpu) = (small(100), paml(512));
    vcpu.access(&mut guest, 7, Write);
    guest.ept.clear_accessed();
    guest.ept.clear_dirty();
    assert_eq!(vcpu.access(&mut guest, 7, Write), Step::Hit);
    assert_eq!(guest.ept.flags(7), (false, false));
    vcpu.flush();
    assert_eq!(vcpu.access(&mut guest, 7, Write), Step::Walked);
    assert_eq!(guest.ept.flags(7), (true, true));
}

#[test]
fn flags_that_are_not_kept_are_not_set_and_nothing_is_logged_as_dirty() {
    let mut guest = Guest::new(FRAMES, 256, PageSize::Small, Flags::Ignored);
    let space = guest.tables.space().unwrap();
    guest.tables.map(space, 0, 9, PageSize::Small).unwrap();
    let mut vcpu = vcpu(Mode::Pml, 512, Options::PUBLISHED);
    assert_eq!(vcpu.access(&mut guest, 0, Write), Step::Walked);
    assert_eq!((guest.ept.flags(9), log(&vcpu).len()), ((false, false), 0));
    // The next walk notices the write protection.
    guest.ept.protect_all();
    assert_eq!(vcpu.access(&mut guest, 0, Write), Step::Hit);
    vcpu.flush();
    let denied = Denied::NotWritable;
    assert_eq!(
        vcpu.access(&mut guest, 0, Write),
        Step::Exit(Exit::Violation { frame: 9, denied })
    );
    guest.ept.restore(9);
    assert_eq!(vcpu.access(&mut guest, 0, Write), Step::Walked);
}

#[test]
fn what_a_guest_maps_beyond_its_memory_or_not_at_all_exits() {
    let mut guest = small(10);
    guest
        .tables
        .map(Space(0), 11, FRAMES + 5, PageSize::Small)
        .unwrap();
    let mut vcpu = paml(512);
    let denied = Denied::NotPresent;
    let frame = FRAMES + 5;
    assert_eq!(
        vcpu.access(&mut guest, 11, Read),
        Step::Exit(Exit::Violation { frame, denied })
    );
    assert_eq!(vcpu.access(&mut guest, 500, Read), Step::Exit(Exit::Unmapped));
    guest.ept.invalidate_all();
    let invalid = vcpu.access(&mut guest, 3, Read);
    assert_eq!(invalid, Step::Exit(Exit::Violation { frame: 3, denied }));
}

#[test]
fn paml_logs_reads_and_repeats_and_no_tlb_hits() {
    // Passes twice through 3000 pages, which no TLB holds, and uses each page four times in a row.
    let (mut guest, mut vcpu) = (small(3000), paml(8192));
    for page in (0..2).flat_map(|_| 0..3000) {
        for _ in 0..4 {
            vcpu.access(&mut guest, page, Read);
        }
    }
    assert!(log(&vcpu).into_iter().eq((0..3000).chain(0..3000)));
    // The first write to a page that was only read is also a walk, and PRL logs every walk [PRL, 4.1].
    vcpu.access(&mut guest, 2999, Write);
    assert_eq!(log(&vcpu).last(), Some(&2999));
    assert_eq!(log(&vcpu).len(), 6001);
}

#[test]
fn what_the_tlb_holds_is_not_logged_until_it_is_flushed() {
    let (mut guest, mut vcpu) = (small(1000), paml(8192));
    let mut turns = |vcpu: &mut Vcpu, turns| {
        for page in (0..turns).flat_map(|_| 0..1000) {
            vcpu.access(&mut guest, page, Write);
        }
        log(vcpu).len()
    };
    assert_eq!(turns(&mut vcpu, 5), 1000);
    vcpu.flush();
    assert_eq!(turns(&mut vcpu, 5), 2000);
    vcpu.drop_page(17);
    vcpu.drop_page(18);
    assert_eq!(turns(&mut vcpu, 1), 2002);
    vcpu.drop_space();
    assert_eq!(turns(&mut vcpu, 1), 3002);
}

#[test]
fn a_large_page_is_logged_once_at_the_frame_that_was_used() {
    let mut guest = guest(2048, PageSize::Medium, PageSize::Medium);
    let mut vcpu = paml(512);
    for page in 700..1100 {
        vcpu.access(&mut guest, page, Write);
    }
    // Page 700 is in the large page that begins at 512; page 1024 begins the next one.
    assert_eq!(log(&vcpu), [700, 1024]);
    assert_eq!(
        (guest.ept.flags(512), guest.ept.flags(1536)),
        ((true, true), (false, false))
    );
    // Splits the page, as software does to see more detail. The small pages inherit its flags, and each needs a walk.
    guest.ept.split(700);
    assert_eq!(
        (guest.ept.size_of(700), guest.ept.flags(700)),
        (PageSize::Small, (true, true))
    );
    vcpu.flush();
    for page in 700..720 {
        vcpu.access(&mut guest, page, Write);
    }
    assert_eq!(log(&vcpu).len(), 22);
}

#[test]
fn each_option_changes_what_it_says() {
    let run = |options: Options| {
        let (mut guest, mut vcpu) = (small(1000), vcpu(Mode::Paml, 8192, options));
        for page in 0..1000 {
            vcpu.access(&mut guest, page, Read);
        }
        let logged = log(&vcpu);
        let tables = logged.iter().filter(|frame| **frame >= TABLES).count();
        (logged.len() - tables, tables)
    };
    let seed = Options::PUBLISHED;
    // Two tables map pages, and each of the three levels above has one table.
    assert_eq!(run(seed), (1000, 0));
    let tables = TablePages::Walked;
    assert_eq!(run(Options { tables, ..seed }), (1000, 5));
    // The first walk reads four tables, and each later one reads one table, except the walk to page 512, which reads two: the
    // table above the page's own is cached.
    let tables = TablePages::Each;
    assert_eq!(run(Options { tables, ..seed }).1, 4 + 2 + 998);
    // Each page, except the first of a table, was prefetched by the walk to the page before, so it needs no walk of its own.
    let next = NextPage::Walked;
    assert_eq!(run(Options { next, ..seed }), (1000, 0));
    let (mut guest, mut vcpu) = (small(10), vcpu(Mode::Paml, 512, Options { next, ..seed }));
    vcpu.access(&mut guest, 3, Read);
    assert_eq!(log(&vcpu), [3, 4], "a page that was not used");
}

#[test]
fn switching_spaces_keeps_translations_apart() {
    let mut guest = small(10);
    let other = guest.tables.space().unwrap();
    guest.tables.map(other, 5, 77, PageSize::Small).unwrap();
    let mut vcpu = paml(512);
    vcpu.access(&mut guest, 5, Read);
    vcpu.switch(other);
    assert_eq!(vcpu.access(&mut guest, 5, Read), Step::Walked);
    vcpu.switch(Space(0));
    assert_eq!(vcpu.access(&mut guest, 5, Read), Step::Hit);
    assert_eq!(log(&vcpu), [5, 77]);
}

#[test]
fn one_run_of_the_handler_drains_all_full_buffers() {
    let costs = Costs {
        begin_ns: 1000.0,
        entry_ns: 10.0,
        refresh_ns: 50.0,
    };
    let mut guest = small(4000);
    let mut vcpus = vec![paml(5), paml(5), paml(5)];
    let (mut handler, mut frames) = (Handler::new(costs), Vec::new());
    let mut fill = |vcpus: &mut [Vcpu], at: usize, first: u64| {
        let steps = (first..first + 5).map(|page| vcpus[at].access(&mut guest, page, Read));
        steps.filter(|step| *step == Step::Raised).count()
    };
    assert_eq!(fill(&mut vcpus, 0, 0), 1);
    handler.raise(0.0);
    // The second buffer fills while the interrupt is on its way, and the third while the handler copies.
    assert_eq!(fill(&mut vcpus, 1, 1000), 1);
    handler.raise(500.0);
    handler.advance(1001.0, &mut vcpus, &mut frames);
    assert_eq!(frames.len(), 0);
    assert_eq!(fill(&mut vcpus, 2, 2000), 1);
    handler.raise(1050.0);
    assert!(vcpus.iter().all(|vcpu| vcpu.log.is_full()));
    // Two buffers of 4 entries and two refreshes take 180 ns; then the third takes 90 ns.
    handler.advance(1179.0, &mut vcpus, &mut frames);
    assert_eq!(frames.len(), 0);
    handler.advance(1180.0, &mut vcpus, &mut frames);
    assert_eq!(frames, [0, 1, 2, 3, 1000, 1001, 1002, 1003]);
    handler.advance(2000.0, &mut vcpus, &mut frames);
    assert_eq!(frames.len(), 12);
    assert!(vcpus.iter().all(|vcpu| !vcpu.log.is_full()));
    assert_eq!(handler.counts(), (3, 1, 1270.0));
}

proptest! {
    #[test]
    fn every_walk_is_logged_or_lost_and_flags_tell_what_was_used(
        uses in prop::collection::vec((0_u64..4000, any::<bool>()), 1..3000), entries in 2_u16..64, two: bool,
    ) {
        let buffers = if two { Buffers::Two } else { Buffers::One };
        let mut guest = small(4000);
        let mut vcpus = vec![vcpu(Mode::Paml, entries, Options { buffers, ..Options::PUBLISHED })];
        let costs = Costs { begin_ns: 20.0, entry_ns: 0.5, refresh_ns: 1.0 };
        let (mut handler, mut frames) = (Handler::new(costs), Vec::new());
        let mut truth = std::collections::BTreeMap::new();
        for (now, (page, write)) in uses.iter().enumerate() {
            let access = if *write { Write } else { Read };
            handler.advance(now as f64, &mut vcpus, &mut frames);
            if vcpus[0].access(&mut guest, *page, access) == Step::Raised {
                handler.raise(now as f64);
            }
            *truth.entry(*page).or_insert(false) |= *write;
        }
        let (logged, lost, filled) = vcpus[0].log.counts();
        prop_assert_eq!(logged + lost, vcpus[0].counts().walks);
        prop_assert_eq!(handler.counts().0, filled);
        prop_assert!(frames.len() as u64 <= logged);
        prop_assert!(frames.iter().all(|frame| truth.contains_key(frame)));
        for page in 0..4000 {
            let expected = truth.get(&page).map_or((false, false), |write| (true, *write));
            prop_assert_eq!(guest.ept.flags(page), expected);
        }
    }
}
