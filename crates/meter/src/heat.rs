//! Tracks which pages are hot, shared by vCPUs, or only read. Also models the first level of a TLB.

use std::collections::BTreeMap;

use homenode_formats::profile_log::Pages;

/// Number of address bits within a page of 4 KiB.
pub const PAGE_BITS: u32 = 12;

/// The pages of a program, with their accesses to the LLC.
#[derive(Debug, Default)]
pub struct Heat {
    pages: BTreeMap<u64, Page>,
    /// Number of accesses so far. It serves as a clock for the times below.
    now: u64,
}

#[derive(Debug)]
struct Page {
    accesses: u64,
    used: u64,
    /// Time of the last write; 0 if never.
    written: u64,
    /// The vCPU that used the page first; `shared` tells whether others used it too.
    first: usize,
    shared: bool,
}

impl Heat {
    /// Counts a vCPU's access to a line of a page.
    pub fn access(&mut self, vcpu: usize, page: u64, writes: bool) {
        self.now += 1;
        let now = self.now;
        let page = self.pages.entry(page).or_insert(Page {
            accesses: 0,
            used: 0,
            written: 0,
            first: vcpu,
            shared: false,
        });
        page.accesses += 1;
        page.used = now;
        page.shared |= page.first != vcpu;
        if writes {
            page.written = now;
        }
    }

    /// Records that a line of the page was written earlier, when a private cache evicts it.
    pub fn written(&mut self, page: u64) {
        if let Some(page) = self.pages.get_mut(&page) {
            page.written = self.now;
        }
    }

    /// Forgets all pages.
    pub fn restart(&mut self) {
        *self = Heat::default();
    }

    /// Summarises the pages.
    pub fn pages(&self) -> Pages {
        let mut counts: Vec<u64> = self.pages.values().map(|page| page.accesses).collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let all = counts.iter().sum::<u64>().max(1) as f64;
        let of_hottest = |part: f64| {
            let pages = (part * counts.len() as f64).ceil() as usize;
            counts.iter().take(pages).sum::<u64>() as f64 / all
        };
        let share = |some: usize, of: usize| some as f64 / of.max(1) as f64;
        let shared = || self.pages.values().filter(|page| page.shared);
        let half = self.now / 2;
        let late = || self.pages.values().filter(|page| page.used > half);
        Pages {
            used: counts.len() as u64,
            heat: Pages::PARTS.map(of_hottest).to_vec(),
            shared: share(shared().count(), counts.len()),
            shared_accesses: shared().map(|page| page.accesses).sum::<u64>() as f64 / all,
            only_read: share(late().filter(|page| page.written <= half).count(), late().count()),
        }
    }
}

/// Sets and ways of [`Tlb`].
const SETS: usize = 16;
const WAYS: usize = 4;

/// A first-level TLB of 64 pages with LRU replacement: accesses that hit it are not examined further.
#[derive(Debug)]
pub struct Tlb {
    /// The page used last. Most accesses are to it.
    last: u64,
    entries: [[u64; WAYS]; SETS],
}

impl Tlb {
    /// Creates an empty TLB. The largest number stands for no page.
    pub fn new() -> Tlb {
        Tlb {
            last: u64::MAX,
            entries: [[u64::MAX; WAYS]; SETS],
        }
    }

    /// Returns true if the TLB lacks a page; the page is present afterwards.
    #[inline]
    pub fn misses(&mut self, page: u64) -> bool {
        if page == self.last {
            return false;
        }
        self.last = page;
        let set = &mut self.entries[page as usize % SETS];
        let held = set.iter().position(|held| *held == page);
        set[..=held.unwrap_or(WAYS - 1)].rotate_right(1);
        set[0] = page;
        held.is_none()
    }
}

impl Default for Tlb {
    fn default() -> Tlb {
        Tlb::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_told_apart_by_use() {
        // The first 10 of 100 pages get half of the accesses. vCPU 1 also uses the last 20. Pages 50 to 99 are written only at
        // first, but pages 90 to 99 turn out late to have been written.
        let mut heat = Heat::default();
        for round in 0..10 {
            for page in 0..100 {
                heat.access(0, page, page < 50 || round == 0);
                if page < 10 {
                    (0..9).for_each(|_| heat.access(0, page, false));
                }
                if page >= 80 && round == 9 {
                    heat.access(1, page, false);
                }
            }
        }
        (90..100).for_each(|page| heat.written(page));
        heat.written(1000);
        let found = heat.pages();
        assert_eq!(found.used, 100);
        let all = 1000.0 + 900.0 + 20.0;
        assert!((found.heat[3] - 1000.0 / all).abs() < 1e-9, "{found:?}");
        assert_eq!((found.shared, found.only_read), (0.2, 0.4));
        assert!((found.shared_accesses - 20.0 * 11.0 / all).abs() < 1e-9);
        heat.restart();
        assert_eq!(
            heat.pages(),
            Pages {
                heat: vec![0.0; 9],
                ..Pages::default()
            }
        );
    }

    #[test]
    fn the_first_tlb_holds_64_pages() {
        let mut tlb = Tlb::new();
        let mut misses = |pages: std::ops::Range<u64>| pages.filter(|page| tlb.misses(*page)).count();
        assert_eq!(misses(0..64), 64);
        assert_eq!((misses(0..64), misses(0..64)), (0, 0));
        assert_eq!(misses(0..80), 16);
        assert_eq!(
            misses(0..80),
            80,
            "a set used in turn by five pages holds none when it is due"
        );
    }
}
