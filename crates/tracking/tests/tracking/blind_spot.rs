//! Shows which accesses of a loop over some pages accessed bits miss, because clearing them does not flush the TLB.
//! `docs/WORKING_SET.md` compares this with measurements on a Cascade Lake.

use homenode_tracking::paging::{Buffer, Flags, Guest, Mode, Options, Vcpu};
use homenode_tracking::tlb::{Access, PageSize, core};

/// The program's memory: 64 MiB.
const PAGES: u64 = 16_384;
/// First of the other pages, which are used between two passes.
const OTHERS: u64 = 1 << 16;

/// Returns how many KiB of `hot` pages show as accessed after passes over them, with this many other pages used between passes.
fn seen_kib(hot: u64, others: u64) -> u64 {
    let mut guest = Guest::new(1 << 18, 1024, PageSize::Small, Flags::Kept);
    let space = guest.tables.space().expect("frames for tables");
    let place = |page: u64| page * 40_503 % (1 << 17);
    for page in (0..PAGES).chain(OTHERS..OTHERS + others) {
        guest
            .tables
            .map(space, page, place(page), PageSize::Small)
            .expect("frames for tables");
    }
    let mut vcpu = Vcpu::new(
        core("cascade-lake").expect("a core"),
        Buffer::new(Mode::Off, 2, Options::PUBLISHED),
    );
    let mut pass = |guest: &mut Guest, pages: u64| {
        for page in (0..pages).chain(OTHERS..OTHERS + others) {
            vcpu.access(guest, page, Access::Read);
        }
    };
    pass(&mut guest, PAGES);
    (0..10).for_each(|_| pass(&mut guest, hot));
    guest.ept.clear_accessed();
    (0..10).for_each(|_| pass(&mut guest, hot));
    4 * (0..hot).filter(|page| guest.ept.flags(place(*page)).0).count() as u64
}

#[test]
fn accessed_bits_are_blind_up_to_the_second_levels_size() {
    let table = [64, 512, 1024, 1536, 2048].map(|hot| (hot, seen_kib(hot, 0), seen_kib(hot, 100)));
    let [
        (_, tiny, _),
        (_, small, busy),
        (_, half, busier),
        (full, edge, crowded),
        (beyond, all, all_too),
    ] = table;
    // The TLB's 1536 entries hold 1536 consecutive pages; one page more overfills its set.
    assert_eq!([tiny, small, half, edge, all], [0, 0, 0, 0, 4 * beyond]);
    assert_eq!([busy, busier, all_too], [0, 0, 4 * beyond]);
    // If the hot pages just fit, the use of other pages decides.
    assert_eq!((full, crowded), (1536, 4800));
}
