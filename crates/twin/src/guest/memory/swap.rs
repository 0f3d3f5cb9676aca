//! Pages that a guest has written to swap because its balloon left it too few.
//!
//! # Model
//!
//! A guest that is left with less memory than its programs have touched writes their coldest pages to swap: whole classes in
//! ascending order of accesses per page, evenly within a class. An access to a class hits a swapped page with a probability equal
//! to the swapped share of the class. The access then waits for the disk. The page is back afterwards if the guest has room;
//! otherwise another page of the class leaves for it. Each access that leaves the core's own caches counts as an access to a
//! different page: an upper bound for programs that read pages in a row.
//!
//! # Left out
//!
//! Writing to swap (no thread waits for it); a guest that knows its cold pages less well than this; a guest without swap, which
//! kills programs instead.

use super::{Class, Needs, Region, Users, VmMemory, draw_evenly};
use homenode_units::Chance;

use crate::index::ThreadIx;

impl VmMemory {
    /// Returns the number of the programs' pages in swap.
    pub(crate) fn swapped(&self) -> u64 {
        self.swapped
    }

    /// Returns the number of touched pages that the guest cannot spare and that are not in swap.
    pub(crate) fn resident(&self, needs: Needs) -> u64 {
        let needed = self.regions.iter().filter(|region| region.is_needed(needs));
        needed.map(Region::touched).sum()
    }

    /// Writes up to `pages` of the programs' pages to swap, the coldest first. Returns how many left each node.
    pub(crate) fn swap_out(&mut self, pages: u64, chance: &mut Chance) -> Vec<u64> {
        let mut taken = vec![0; self.nodes];
        let of_program = self
            .regions
            .iter_mut()
            .filter(|region| region.users != Users::Kernel);
        let mut classes: Vec<(f64, &mut Class)> = of_program
            .flat_map(|region| {
                let share = region.access_share;
                region
                    .classes
                    .iter_mut()
                    .map(move |class| (share * class.heat(), class))
            })
            .collect();
        classes.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut left = pages;
        for (_, class) in classes {
            let mut there = class.touched();
            let mut draws = left.min(there);
            left -= draws;
            class.swapped += draws;
            self.swapped += draws;
            draw_evenly(&mut class.on, &mut there, &mut draws, &mut taken, chance);
        }
        self.stale |= left < pages;
        taken
    }

    /// Returns the share of a thread's accesses that hit a page in swap.
    pub(crate) fn fault_share(&self, thread: ThreadIx) -> f64 {
        if self.swapped == 0 {
            return 0.0;
        }
        let is_used = |region: &&Region| region.users == Users::All || region.users == Users::One(thread);
        let (mut all, mut gone) = (0.0, 0.0);
        for region in self.regions.iter().filter(is_used) {
            for class in region.classes.iter().filter(|class| class.present() > 0) {
                let share = region.access_share * class.access_share;
                all += share;
                gone += share * class.swapped as f64 / class.present() as f64;
            }
        }
        if all > 0.0 { gone / all } else { 0.0 }
    }

    /// Takes up to `pages` of a thread's pages out of swap, the hottest first. Returns them by region and class; the host has to
    /// place them.
    pub(crate) fn swap_in(&mut self, thread: ThreadIx, pages: u64) -> Vec<(usize, usize, u64)> {
        let mut found: Vec<(f64, usize, usize)> = Vec::new();
        for (at, region) in self.regions.iter().enumerate() {
            if region.users == Users::All || region.users == Users::One(thread) {
                let classes = region
                    .classes
                    .iter()
                    .enumerate()
                    .filter(|(_, class)| class.swapped > 0);
                found.extend(classes.map(|(number, class)| (region.access_share * class.heat(), at, number)));
            }
        }
        found.sort_by(|a, b| b.0.total_cmp(&a.0));
        let mut left = pages;
        let mut back = Vec::new();
        for (_, region, class) in found {
            let part = left.min(self.regions[region].classes[class].swapped);
            self.regions[region].classes[class].swapped -= part;
            self.swapped -= part;
            left -= part;
            back.push((region, class, part));
        }
        back.retain(|(.., pages)| *pages > 0);
        back
    }
}

impl Class {
    /// Returns the relative number of accesses per page.
    fn heat(&self) -> f64 {
        self.access_share / self.pages_planned.max(1) as f64
    }

    /// Returns the number of pages that were touched, in memory or in swap.
    pub(super) fn present(&self) -> u64 {
        self.touched() + self.swapped
    }
}
