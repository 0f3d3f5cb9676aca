//! Pages that change hands inside the guest: released and allocated again, mixed among threads, gathered for all threads, or
//! used from another vCPU because their thread has moved there.

use homenode_units::Chance;

use super::{Region, Users, VmMemory, draw_evenly};
use crate::index::{IxVec, ThreadIx};

impl VmMemory {
    /// Releases pages of a thread, drawn evenly from its own pages, or from all that it uses if it has no own. The host takes
    /// back those that are not on node `stay`. Returns these as (region, node, pages).
    pub(crate) fn invalidate(
        &mut self,
        thread: ThreadIx,
        stay: usize,
        pages: u64,
        chance: &mut Chance,
    ) -> Vec<(usize, usize, u64)> {
        let is_own = |region: &Region| region.users == Users::One(thread);
        let has_own = self
            .regions
            .iter()
            .any(|region| is_own(region) && region.touched() > 0);
        let mine = |region: &Region| is_own(region) || !has_own && region.users == Users::All;
        let mut rest: u64 = self
            .regions
            .iter()
            .filter(|region| mine(region))
            .map(Region::touched)
            .sum();
        let mut draws = pages.min(rest);
        let mut taken = Vec::new();
        for (at, region) in self
            .regions
            .iter_mut()
            .enumerate()
            .filter(|(_, region)| mine(region))
        {
            for class in &mut region.classes {
                for (node, on) in class.on.iter_mut().enumerate() {
                    let drawn = chance.hypergeometric(rest, *on, draws);
                    rest -= *on;
                    draws -= drawn;
                    if node != stay && drawn > 0 {
                        *on -= drawn;
                        taken.push((at, node, drawn));
                    }
                }
            }
        }
        for (_, node, pages) in &taken {
            self.view.give_back(*node, *pages);
        }
        self.stale |= !taken.is_empty();
        taken
    }

    /// Mixes the threads' own pages: each thread puts in as many as `pages` says, and gets as many back, drawn from those of all
    /// threads.
    pub(crate) fn mix(&mut self, pages: &IxVec<ThreadIx, u64>, chance: &mut Chance) {
        let mut pool = vec![0; self.nodes];
        let mut given = Vec::new();
        for (thread, &pages) in pages.placed() {
            let own = || {
                self.regions
                    .iter()
                    .filter(|region| region.users == Users::One(thread))
            };
            let mut rest = own().map(Region::touched).sum::<u64>();
            let mut draws = pages.min(rest);
            for (at, class) in (self.regions.iter_mut().enumerate())
                .filter(|(_, region)| region.users == Users::One(thread))
                .flat_map(|(at, region)| {
                    region
                        .classes
                        .iter_mut()
                        .enumerate()
                        .map(move |(number, class)| ((at, number), class))
                })
            {
                let before = draws;
                draw_evenly(&mut class.on, &mut rest, &mut draws, &mut pool, chance);
                given.push((at, before - draws));
            }
        }
        let mut rest = pool.iter().sum::<u64>();
        for ((region, class), pages) in given {
            let mut draws = pages;
            let mut left = rest;
            let on = &mut self.regions[region].classes[class].on;
            draw_evenly(&mut pool, &mut left, &mut draws, on, chance);
            rest -= pages;
        }
        self.stale = true;
    }

    /// Exchanges two threads: each uses and owns what the other did. Pages stay where they are.
    pub(crate) fn exchange(&mut self, one: ThreadIx, other: ThreadIx) {
        let exchanged = |thread: ThreadIx| match thread {
            thread if thread == one => other,
            thread if thread == other => one,
            thread => thread,
        };
        for region in &mut self.regions {
            if let Users::One(thread) = region.users {
                region.users = Users::One(exchanged(thread));
            }
            region.owner = region.owner.map(exchanged);
        }
        self.stale = true;
    }

    /// Lets all threads use one thread's own pages in place of their own.
    pub(crate) fn gather(&mut self, thread: ThreadIx) {
        for region in &mut self.regions {
            match region.owner {
                Some(owner) if owner == thread => region.users = Users::All,
                Some(_) => region.users = Users::Nobody,
                None => {}
            }
        }
        self.stale = true;
    }
}
