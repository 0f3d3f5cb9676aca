//! TLBs of a core: a first level by page size, a shared second level, and entries tagged by address space.
//!
//! # Model
//!
//! An entry translates one page of 4 KiB, 2 MiB or 1 GiB, of one address space (PCID and VPID together are a [`Space`]). The
//! [`Core`] defines the arrays, the page sizes that each holds, its ways and its set hash. If no array of a level holds a page
//! size, such pages are entered in the next smaller size, as Zen does with 1 GiB. Each set has LRU replacement.
//!
//! An entry remembers whether the page may be written without another walk. If a processor cached a translation whose dirty flag
//! was clear, the first write needs another walk.
//!
//! # Left out
//!
//! Entries that a processor drops without being told; entries for instructions.

mod array;
mod cores;

pub(crate) use array::Array;
pub use array::{Hash, Shape};
pub use cores::{CORES, Core, core};

use array::MARK;

/// Size of a page, in guest tables or nested tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PageSize {
    /// 4 KiB.
    Small,
    /// 2 MiB.
    Medium,
    /// 1 GiB.
    Large,
}

impl PageSize {
    /// All sizes, ascending.
    pub const ALL: [PageSize; 3] = [PageSize::Small, PageSize::Medium, PageSize::Large];

    /// Returns the number of base pages, as a power of two.
    pub const fn order(self) -> u32 {
        9 * self as u32
    }

    /// Returns the number of base pages.
    pub const fn pages(self) -> u64 {
        1 << self.order()
    }
}

/// Read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// A load.
    Read,
    /// A store.
    Write,
}

/// Number of an address space, with which a processor tags entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Space(pub u16);

/// Result of a lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// The first level has the translation.
    First,
    /// The second level had the translation; the first level has it now too.
    Second,
    /// A level has the translation, but it must not be used for writing before the page's dirty flag is set.
    Clean,
    /// No level has the translation.
    Nothing,
}

const SIZE_SHIFT: u32 = 1;
const SPACE_SHIFT: u32 = 3;
const PAGE_SHIFT: u32 = SPACE_SHIFT + u16::BITS;

/// Returns the key of a page, without the mark for writable entries.
#[inline]
fn key(number: u64, size: PageSize, space: Space) -> u64 {
    number << PAGE_SHIFT | u64::from(space.0) << SPACE_SHIFT | (size as u64) << SIZE_SHIFT
}

/// Returns the result of a lookup that found this key.
#[inline]
fn answer(found: u64, needs: u64, level: Found) -> Found {
    if found & needs == needs {
        level
    } else {
        Found::Clean
    }
}

/// The arrays of one level.
#[derive(Clone, Debug)]
struct Level {
    arrays: Vec<Array>,
    /// For each page size, the array that holds such pages, and the size in which the array enters them.
    place: [Option<(usize, PageSize)>; 3],
}

impl Level {
    fn new(shapes: &[(Shape, &[PageSize])]) -> Level {
        let holds = |size: &PageSize| shapes.iter().position(|(_, sizes)| sizes.contains(size));
        let place = PageSize::ALL.map(|size| {
            let smaller = PageSize::ALL.iter().rev().filter(|held| **held <= size);
            smaller
                .filter_map(|held| holds(held).map(|at| (at, *held)))
                .next()
        });
        assert!(
            shapes[0].1.contains(&PageSize::Small),
            "a level's first array holds small pages"
        );
        Level {
            arrays: shapes.iter().map(|(shape, _)| Array::new(*shape)).collect(),
            place,
        }
    }

    #[inline]
    fn find(&mut self, page: u64, size: PageSize, space: Space) -> Option<u64> {
        let (at, size) = self.place[size as usize]?;
        let number = page >> size.order();
        let (_, found) = self.arrays[at].find(number, key(number, size, space))?;
        Some(found)
    }

    fn holds(&self, page: u64, size: PageSize, space: Space) -> bool {
        self.place[size as usize].is_some_and(|(at, size)| {
            let number = page >> size.order();
            self.arrays[at].holds(number, key(number, size, space))
        })
    }

    /// Returns the array for small pages, which every level has as its first.
    #[inline]
    fn small(&mut self) -> &mut Array {
        &mut self.arrays[0]
    }

    /// Enters a translation that is missing; returns its slot.
    #[inline]
    fn fill(&mut self, page: u64, size: PageSize, space: Space, mark: u64) -> usize {
        let Some((at, size)) = self.place[size as usize] else {
            return 0;
        };
        let number = page >> size.order();
        self.arrays[at].fill(number, key(number, size, space) | mark)
    }

    /// Adds a mark to a translation, if present.
    fn mark(&mut self, page: u64, size: PageSize, space: Space, mark: u64) {
        if let Some((at, size)) = self.place[size as usize] {
            let number = page >> size.order();
            self.arrays[at].mark(number, key(number, size, space) | mark);
        }
    }

    fn drop_page(&mut self, page: u64, space: Space) {
        for size in PageSize::ALL {
            if let Some((at, held)) = self.place[size as usize]
                && held == size
            {
                let number = page >> size.order();
                self.arrays[at].drop_one(number, key(number, size, space));
            }
        }
    }

    fn drop_where(&mut self, doomed: impl Fn(u64) -> bool) {
        self.arrays.iter_mut().for_each(|array| array.drop_where(&doomed));
    }

    /// Returns how many base pages the level translates at once, if each array holds its largest pages up to `largest`.
    fn reach(&self, largest: PageSize) -> u64 {
        let of = |(at, array): (usize, &Array)| {
            let sizes = PageSize::ALL.iter().filter(|size| **size <= largest);
            let held = sizes.filter(|size| self.place[**size as usize] == Some((at, **size)));
            held.map(|size| size.pages()).max().unwrap_or(0) * array.entries() as u64
        };
        self.arrays.iter().enumerate().map(of).sum()
    }
}

/// The TLBs of one core.
#[derive(Clone, Debug)]
pub struct Tlb {
    first: Level,
    second: Level,
    /// Where small pages are expected in the first level: slots, by the page number's low bits.
    guesses: [u16; GUESSES],
    /// Whether larger pages were entered since the last flush. If not, lookups skip them.
    larger: bool,
}

const GUESSES: usize = 256;

impl Tlb {
    /// Creates empty TLBs.
    pub fn new(core: &Core) -> Tlb {
        Tlb {
            first: Level::new(core.first),
            second: Level::new(core.second),
            guesses: [0; GUESSES],
            larger: false,
        }
    }

    /// Looks up the translation of a base page.
    #[inline]
    pub fn look_up(&mut self, page: u64, space: Space, access: Access) -> Found {
        let needs = match access {
            Access::Read => 0,
            Access::Write => MARK,
        };
        let small = key(page, PageSize::Small, space);
        let guess = usize::from(self.guesses[page as usize % GUESSES]);
        if self.first.small().find_at(guess, page, small, needs) {
            return Found::First;
        }
        self.look_around(page, space, needs)
    }

    /// Looks up a page that is not in the expected slot.
    #[inline]
    fn look_around(&mut self, page: u64, space: Space, needs: u64) -> Found {
        let small = key(page, PageSize::Small, space);
        if let Some((slot, found)) = self.first.small().find(page, small) {
            self.guesses[page as usize % GUESSES] = slot as u16;
            return answer(found, needs, Found::First);
        }
        if self.larger {
            for size in [PageSize::Medium, PageSize::Large] {
                if let Some(found) = self.first.find(page, size, space) {
                    return answer(found, needs, Found::First);
                }
            }
        }
        if let Some((_, found)) = self.second.small().find(page, small) {
            self.enter_first(page, PageSize::Small, space, found & MARK);
            return answer(found, needs, Found::Second);
        }
        if self.larger {
            for size in [PageSize::Medium, PageSize::Large] {
                if let Some(found) = self.second.find(page, size, space) {
                    self.enter_first(page, size, space, found & MARK);
                    return answer(found, needs, Found::Second);
                }
            }
        }
        Found::Nothing
    }

    /// Returns true if a level has the translation of a page; does not count as a use.
    pub(crate) fn knows(&self, page: u64, space: Space) -> bool {
        PageSize::ALL
            .into_iter()
            .any(|size| self.first.holds(page, size, space) || self.second.holds(page, size, space))
    }

    /// Enters the translation of a base page, as part of a page of this size. `found` is the result of the preceding lookup.
    #[inline]
    pub fn enter(&mut self, page: u64, size: PageSize, space: Space, writable: Access, found: Found) {
        let mark = u64::from(writable == Access::Write);
        if found == Found::Nothing && size == PageSize::Small {
            let key = key(page, size, space) | mark;
            let slot = self.first.small().fill(page, key);
            self.guesses[page as usize % GUESSES] = slot as u16;
            self.second.small().fill(page, key);
        } else if found == Found::Nothing {
            self.enter_first(page, size, space, mark);
            self.enter_second(page, size, space, writable);
        } else {
            self.first.mark(page, size, space, mark);
            self.second.mark(page, size, space, mark);
        }
    }

    #[inline]
    fn enter_first(&mut self, page: u64, size: PageSize, space: Space, mark: u64) {
        let slot = self.first.fill(page, size, space, mark);
        if size == PageSize::Small {
            self.guesses[page as usize % GUESSES] = slot as u16;
        }
    }

    /// Enters a translation that no level has into the second level only, as a prefetch does.
    #[inline]
    pub fn enter_second(&mut self, page: u64, size: PageSize, space: Space, writable: Access) {
        self.second
            .fill(page, size, space, u64::from(writable == Access::Write));
        self.larger |= size != PageSize::Small;
    }

    /// Drops a page's translation, whatever its size (`INVLPG`, or the local part of a shootdown).
    pub fn drop_page(&mut self, page: u64, space: Space) {
        self.first.drop_page(page, space);
        self.second.drop_page(page, space);
    }

    /// Drops all translations of an address space (`MOV CR3` without PCID, `INVPCID`).
    pub fn drop_space(&mut self, space: Space) {
        let of = |key: u64| (key >> SPACE_SHIFT) as u16 == space.0;
        self.first.drop_where(of);
        self.second.drop_where(of);
    }

    /// Drops all translations (`INVEPT`, `INVVPID`).
    pub fn drop_all(&mut self) {
        self.first.drop_where(|_| true);
        self.second.drop_where(|_| true);
        self.larger = false;
    }

    /// Returns the number of sets for small pages in the first level, if a page's low bits choose the set; otherwise 1.
    ///
    /// The page that was used last in a set is the youngest there, so using it again changes nothing in any TLB.
    pub fn first_sets(&self) -> usize {
        self.first.arrays[0].sets_by_low_bits().unwrap_or(1)
    }

    /// Returns the number of base pages whose translations the TLBs hold at once, with pages up to this size. Pages that stay in
    /// the TLBs may never show in a log of page walks.
    pub fn reach(&self, largest: PageSize) -> u64 {
        // First-level entries are mostly in the second level too. If they are not, both levels count.
        self.second.reach(largest) + self.first.reach(largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HERE: Space = Space(1);

    fn cascade_lake() -> Tlb {
        Tlb::new(core("cascade-lake").unwrap())
    }

    /// Looks pages up one after the other, and enters those that are missing. Returns the number of misses.
    fn misses(tlb: &mut Tlb, pages: impl Iterator<Item = u64>, size: PageSize) -> usize {
        let mut missed = 0;
        for page in pages {
            if tlb.look_up(page, HERE, Access::Read) == Found::Nothing {
                tlb.enter(page, size, HERE, Access::Read, Found::Nothing);
                missed += 1;
            }
        }
        missed
    }

    #[test]
    fn a_loop_over_what_the_second_level_holds_misses_once() {
        // Consecutive pages spread evenly over the sets of 1536 entries. One page more, and LRU misses in that page's set.
        let turns = |pages: u64| (0..5).flat_map(move |_| 0..pages);
        assert_eq!(misses(&mut cascade_lake(), turns(1536), PageSize::Small), 1536);
        let beyond = misses(&mut cascade_lake(), turns(4 * 1536), PageSize::Small);
        assert_eq!(beyond, 5 * 4 * 1536);
    }

    #[test]
    fn larger_pages_reach_further() {
        // The program accesses 64 MiB page by page. As 32 pages of 2 MiB they fit into the first level of the TLB, as 16384 small
        // pages into no level.
        let pages = || (0..2).flat_map(|_| 0..16_384);
        assert_eq!(misses(&mut cascade_lake(), pages(), PageSize::Medium), 32);
        assert_eq!(misses(&mut cascade_lake(), pages(), PageSize::Small), 2 * 16_384);
        let tlb = cascade_lake();
        assert_eq!(tlb.reach(PageSize::Small), 64 + 1536);
        assert_eq!(tlb.reach(PageSize::Medium), 64 + 512 * (32 + 1536));
    }

    #[test]
    fn zen_enters_a_page_of_1_gib_as_pages_of_2_mib() {
        let mut tlb = Tlb::new(core("zen2").unwrap());
        assert_eq!(misses(&mut tlb, 0..1 << 18, PageSize::Large), 512);
        assert_eq!(misses(&mut cascade_lake(), 0..1 << 18, PageSize::Large), 1);
    }

    #[test]
    fn the_first_write_to_a_page_that_was_read_walks_again() {
        for size in PageSize::ALL {
            let mut tlb = cascade_lake();
            tlb.enter(5, size, HERE, Access::Read, Found::Nothing);
            assert_eq!(tlb.look_up(5, HERE, Access::Read), Found::First);
            assert_eq!(tlb.look_up(5, HERE, Access::Write), Found::Clean);
            tlb.enter(5, size, HERE, Access::Write, Found::Clean);
            assert_eq!(tlb.look_up(5, HERE, Access::Write), Found::First);
            assert_eq!(tlb.look_up(5, HERE, Access::Read), Found::First);
        }
    }

    proptest! {
        #[test]
        fn what_was_dropped_is_not_found_and_the_rest_is(
            pages in prop::collection::btree_set((0_u64..32, 0_u16..3), 1..40), gone in 0_u64..32, space in 0_u16..3,
        ) {
            // With 32 pages in each of three address spaces, no set of 12 ways is overfull.
            let mut tlb = cascade_lake();
            for (page, space) in &pages {
                tlb.enter(*page, PageSize::Small, Space(*space), Access::Write, Found::Nothing);
            }
            let mut by_page = tlb.clone();
            by_page.drop_page(gone, Space(space));
            let mut by_space = tlb.clone();
            by_space.drop_space(Space(space));
            tlb.drop_all();
            for (page, of) in pages {
                let there = |tlb: &mut Tlb| tlb.look_up(page, Space(of), Access::Write) != Found::Nothing;
                prop_assert_eq!(there(&mut by_page), (page, of) != (gone, space));
                prop_assert_eq!(there(&mut by_space), of != space);
                prop_assert!(!there(&mut tlb));
            }
        }
    }
}
