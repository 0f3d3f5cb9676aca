//! Memory that a VM was given at creation. Its guest takes pages for its programs from its own free pages, wherever they are by
//! then, and exchanges pages with a driver domain ([`crate::io::flip`]).

use super::{VmMemory, draw_evenly};
use homenode_units::Chance;

/// Pages taken out of a VM's memory, and the gaps that other pages must fill.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lifted {
    /// Number of lifted pages of each population, in order.
    slots: Vec<u64>,
    /// Number of lifted pages from each node.
    pub on: Vec<u64>,
}

impl VmMemory {
    /// Returns the populations whose pages may be exchanged: the pool if there is one, else free pages and the program's pages.
    fn spare(&mut self) -> Vec<&mut Vec<u64>> {
        match &mut self.pool {
            Some(pool) => vec![pool],
            None => {
                let of_program = self.regions.iter_mut().skip(1);
                let classes = of_program.flat_map(|region| &mut region.classes);
                std::iter::once(&mut self.free_list)
                    .chain(classes.map(|class| &mut class.on))
                    .collect()
            }
        }
    }

    /// Returns how many pages may be exchanged.
    pub(crate) fn spare_pages(&mut self) -> u64 {
        self.spare().iter().map(|on| on.iter().sum::<u64>()).sum()
    }

    /// Takes out `pages` pages, drawn evenly from those that may be exchanged. At least that many must exist.
    pub(crate) fn lift(&mut self, pages: u64, chance: &mut Chance) -> Lifted {
        let mut lifted = Lifted {
            slots: Vec::new(),
            on: vec![0; self.nodes],
        };
        let (mut rest, mut draws) = (self.spare_pages(), pages);
        debug_assert!(draws <= rest, "a VM cannot give more pages than it has");
        for population in self.spare() {
            let before = draws;
            draw_evenly(population, &mut rest, &mut draws, &mut lifted.on, chance);
            lifted.slots.push(before - draws);
        }
        lifted
    }

    /// Puts pages, counted by node, where as many were lifted.
    pub(crate) fn lay(&mut self, lifted: &Lifted, mut pages: Vec<u64>, chance: &mut Chance) {
        debug_assert_eq!(pages.iter().sum::<u64>(), lifted.slots.iter().sum::<u64>());
        let mut slots = lifted.slots.iter();
        for population in self.spare() {
            let mut rest: u64 = pages.iter().sum();
            let mut draws = slots.next().copied().unwrap_or(0);
            draw_evenly(&mut pages, &mut rest, &mut draws, population, chance);
        }
        self.exchanged += lifted.slots.iter().sum::<u64>();
        // A single page changes the spread of a thread's accesses by next to nothing, so the weights wait until more have been
        // exchanged.
        if self.exchanged > self.spare_pages() >> 10 {
            self.exchanged = 0;
            self.stale = true;
        }
    }

    /// Touches pages of a region for the first time, drawn evenly from the guest's own free pages, and adds them to `placed` by
    /// node. Returns how many pages are missing because no more were free.
    pub(crate) fn touch_own(
        &mut self,
        region: usize,
        pages: u64,
        placed: &mut [u64],
        chance: &mut Chance,
    ) -> u64 {
        let here = pages.min(self.free_list.iter().sum());
        for (class, pages) in self.by_class(region, here).into_iter().enumerate() {
            let mut free: u64 = self.free_list.iter().sum();
            let mut draws = pages;
            let mut taken = vec![0; self.nodes];
            draw_evenly(&mut self.free_list, &mut free, &mut draws, &mut taken, chance);
            for (node, pages) in taken.into_iter().enumerate() {
                self.touch(region, class, node, pages);
                placed[node] += pages;
            }
        }
        pages - here
    }

    /// Returns the number of pages outside the VM's home nodes; 0 if it has no home.
    pub(crate) fn pages_away(&self) -> u64 {
        let Some(home) = &self.home else { return 0 };
        let pages = self.pages().into_iter().enumerate();
        pages
            .filter(|(node, _)| !home.contains(node))
            .map(|(_, pages)| pages)
            .sum()
    }

    /// Returns the number of pages in the pool.
    pub(crate) fn pool_pages(&self) -> u64 {
        self.pool.iter().flatten().sum()
    }

    /// Brings the pool to a size, as far as possible. Grows it with free pages, drawn evenly, and shrinks it by pages on the VM's
    /// home nodes.
    pub(crate) fn size_pool(&mut self, size: u64, chance: &mut Chance) {
        let Some(pool) = &mut self.pool else { return };
        let has: u64 = pool.iter().sum();
        let mut free: u64 = self.free_list.iter().sum();
        let mut draws = size.saturating_sub(has).min(free);
        draw_evenly(&mut self.free_list, &mut free, &mut draws, pool, chance);
        let mut back = has.saturating_sub(size);
        for node in self.home.iter().flatten() {
            let here = back.min(pool[*node]);
            pool[*node] -= here;
            self.free_list[*node] += here;
            back -= here;
        }
    }

    /// Ends the program. Its pages are free for the next program.
    pub(crate) fn end_program(&mut self) {
        self.swapped = 0;
        for region in self.regions.drain(1..) {
            for class in region.classes {
                for (node, pages) in class.on.into_iter().enumerate() {
                    self.free_list[node] += pages;
                    if !self.owns_frames {
                        self.view.give_back(node, pages);
                    }
                }
            }
        }
        self.stale = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::View;
    use crate::index::ThreadIx;
    use crate::io::flip::rounds;
    use homenode_units::Bytes;
    use proptest::prelude::*;

    /// Returns a VM with a kernel of one page on a node, `free` free pages on that node, and a pool if asked for.
    fn vm(node: usize, free: u64, pool: Option<u64>) -> VmMemory {
        let (mut memory, ..) = VmMemory::new(2, 1, Bytes(4096), None, View::Blind);
        memory.owns_frames = true;
        memory.home = Some(vec![node]);
        memory.touch(0, 0, node, 1);
        memory.free_list[node] = free;
        if let Some(pages) = pool {
            memory.pool = Some(vec![0; 2]);
            memory.size_pool(pages, &mut Chance::new(1));
        }
        memory
    }

    fn exchange(guest: &mut VmMemory, driver: &mut VmMemory, flips: u64, chance: &mut Chance) {
        for part in rounds(flips, guest.spare_pages(), driver.spare_pages()) {
            let (given, taken) = (guest.lift(part, chance), driver.lift(part, chance));
            guest.lay(&given, taken.on.clone(), chance);
            driver.lay(&taken, given.on.clone(), chance);
        }
    }

    proptest! {
        #[test]
        fn an_exchange_conserves_the_pages_of_vm_driver_domain_and_node(
            guest in 1u64..20_000, driver in 1u64..20_000, pool in prop::option::of(1u64..20_000),
            flips in 0u64..50_000, seed: u64,
        ) {
            let mut chance = Chance::new(seed);
            let (mut vm_a, mut vm_b) = (vm(0, guest, pool), vm(1, driver, None));
            exchange(&mut vm_a, &mut vm_b, flips, &mut chance);
            let (a, b) = (vm_a.pages(), vm_b.pages());
            prop_assert_eq!(a.iter().sum::<u64>(), guest + 1);
            prop_assert_eq!(b.iter().sum::<u64>(), driver + 1);
            prop_assert_eq!((a[0] + b[0], a[1] + b[1]), (guest + 1, driver + 1));
        }

        #[test]
        fn what_is_remote_never_exceeds_the_pool_and_no_program_gets_it(
            guest in 1000u64..20_000, pool in 1u64..900, flips in 0u64..50_000,
            sizes in prop::collection::vec(1u64..900, 0..5), seed: u64,
        ) {
            let mut chance = Chance::new(seed);
            let (mut vm_a, mut vm_b) = (vm(0, guest, Some(pool)), vm(1, 10_000, None));
            exchange(&mut vm_a, &mut vm_b, flips, &mut chance);
            for size in sizes {
                vm_a.size_pool(size, &mut chance);
                exchange(&mut vm_a, &mut vm_b, flips, &mut chance);
                prop_assert!(vm_a.pages()[1] <= vm_a.pool_pages());
                prop_assert_eq!(vm_a.free_list[1], 0);
            }
            prop_assert_eq!(vm_a.pages().iter().sum::<u64>(), guest + 1);
        }
    }

    #[test]
    fn two_urns_mix_as_the_module_says() {
        // The guest has 40000 pages and the driver domain 10000. After n flips, 1/5 * (1 - exp(-n * (1/40000 + 1/10000))) of the
        // guest's pages are remote.
        for flips in [1_000_u64, 8_000, 30_000] {
            let mut chance = Chance::new(flips);
            let (mut guest, mut driver) = (vm(0, 40_000, None), vm(1, 10_000, None));
            exchange(&mut guest, &mut driver, flips, &mut chance);
            let expected = 0.2 * (1.0 - libm::exp(-(flips as f64) * (1.0 / 40_000.0 + 1.0 / 10_000.0)));
            let ours = guest.pages()[1] as f64 / 40_000.0;
            // Up to a 64th of the pages is exchanged at a time; chance adds a few pages in a hundred.
            assert!(
                (ours - expected).abs() < 0.03 * expected + 0.001,
                "{ours} for {expected}"
            );
        }
    }

    #[test]
    fn a_program_gets_free_pages_wherever_they_lie_by_now() {
        let program = crate::workload::builtin("soplex").unwrap().program.unwrap();
        let (mut memory, ..) = VmMemory::new(2, 1, Bytes(4096), None, View::Blind);
        memory.owns_frames = true;
        let starts = memory.add_program(&program);
        let pages = starts[ThreadIx(0)][0].pages;
        memory.free_list = vec![pages, pages];
        let mut placed = [0; 2];
        let left = memory.touch_own(
            starts[ThreadIx(0)][0].region,
            pages,
            &mut placed,
            &mut Chance::new(1),
        );
        assert_eq!((left, placed[0] + placed[1]), (0, pages));
        let share = placed[1] as f64 / pages as f64;
        assert!((share - 0.5).abs() < 0.02, "{share}");
        memory.end_program();
        assert_eq!(memory.free_list, [pages, pages]);
    }
}
