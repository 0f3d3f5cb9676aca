//! Memory use of a VM, as a host that sees every access would know it.
//!
//! # Model
//!
//! A window is divided into [`LOOKS`] equal parts. The accesses of a thread that leave its core's own caches fall on the classes
//! of pages according to their shares, and evenly on the pages of a class. If `N` pages get `A` accesses in a part, each of them
//! is used in that part with probability `p = 1 - exp(-A / N)`. Then `N` times the binomial distribution of `p` is how many pages
//! are used in none, one, … all of the parts. The expected values are reported: nothing is drawn at random, and watching changes
//! nothing. Pages that a program touched for the first time in the window were used in it at least once.
//!
//! # Left out
//!
//! Accesses that a core's own caches answer (a page is not seen if no line of it leaves them in a whole window); accesses of the
//! guest's kernel (an idle guest uses no pages); what a real tracker misses or costs.

use homenode_host::observation::{Observation, Region, Tracker, Used};
use homenode_units::{Ns, Pages};

use crate::guest::Vm;
use crate::guest::memory::ClassUse;
use crate::index::{IxVec, ThreadIx};

/// Number of parts of a window.
const LOOKS: usize = 4;

/// A watch on one VM.
#[derive(Clone, Debug)]
pub(crate) struct Watching {
    /// Length of windows, from the next one on.
    pub window: Ns,
    /// Time at which the watch ends unless it is renewed.
    pub until: Ns,
    /// End of the running window.
    pub ends: Ns,
    /// Observation of the last complete window.
    pub last: Option<Observation>,
    began: Ns,
    /// Accesses by thread, and pages by class, when the window began.
    accesses: Vec<f64>,
    pages: Vec<u64>,
}

impl Watching {
    pub(crate) fn begin(vm: &Vm, window: Ns, until: Ns, now: Ns) -> Watching {
        Watching {
            window,
            until,
            ends: now + window,
            last: None,
            began: now,
            accesses: accesses(vm),
            pages: pages(vm),
        }
    }

    /// Ends the running window, and begins the next.
    pub(crate) fn turn(&mut self, vm: &Vm, now: Ns) {
        let seen = self.observe(vm, now);
        *self = Watching {
            last: Some(seen),
            ..Watching::begin(vm, self.window, self.until, now)
        };
    }

    fn observe(&self, vm: &Vm, now: Ns) -> Observation {
        let since: IxVec<ThreadIx, f64> = accesses(vm)
            .iter()
            .zip(&self.accesses)
            .map(|(now, before)| (now - before).max(0.0))
            .collect();
        let classes = vm.memory.class_uses();
        let there: Vec<_> = classes
            .iter()
            .enumerate()
            .filter(|(_, class)| class.pages() > 0)
            .collect();
        // A thread's accesses fall only on classes that have pages.
        let whole = |thread: ThreadIx| -> f64 {
            let mine = there.iter().filter(|(_, class)| class.used_by(thread));
            mine.map(|(_, class)| class.share).sum()
        };
        let wholes: IxVec<ThreadIx, f64> = since.places().map(whole).collect();
        let mut regions = Vec::new();
        for (number, class) in &there {
            let mine = since
                .places()
                .filter(|thread| class.used_by(*thread) && wholes[*thread] > 0.0);
            let hits: f64 = mine
                .map(|thread| since[thread] * class.share / wholes[thread])
                .sum();
            let before = self.pages.get(*number).copied().unwrap_or(0);
            let new = class.pages().saturating_sub(before);
            let mut first = class.first_frame;
            for (found, pages) in found(class.pages(), hits, new).into_iter().enumerate().rev() {
                if found > 0 && pages > 0 {
                    regions.push(Region {
                        first,
                        pages: Pages(pages),
                        found: found as u32,
                    });
                }
                first += pages;
            }
        }
        let memory = vm.memory_bytes.to_pages();
        let ends = classes.iter().map(|class| class.first_frame + class.pages());
        Observation {
            tracker: Tracker::Exact,
            at: now,
            interval: now.saturating_sub(self.began),
            memory,
            frames: ends.max().unwrap_or(0).max(memory.0),
            found: Used::Regions {
                regions,
                looks: LOOKS as u32,
            },
            lost: 0,
            blind: Pages::ZERO,
            cost: Ns::ZERO,
        }
    }
}

fn accesses(vm: &Vm) -> Vec<f64> {
    vm.threads.iter().map(|thread| thread.llc_references).collect()
}

fn pages(vm: &Vm) -> Vec<u64> {
    let classes = vm.memory.class_uses();
    classes.iter().map(ClassUse::pages).collect()
}

/// Returns how many of a class's pages were used in none, one, … all parts of a window with `hits` accesses to the class. `new`
/// of the pages were first touched in the window. The counts add up to all pages.
fn found(pages: u64, hits: f64, new: u64) -> [u64; LOOKS + 1] {
    let missed = libm::exp(-hits / (LOOKS as f64 * pages.max(1) as f64));
    let used = 1.0 - missed;
    // The row of Pascal's triangle for LOOKS, term by term.
    let mut shares = [1.0, 0.0, 0.0, 0.0, 0.0];
    for _ in 0..LOOKS {
        for found in (0..=LOOKS).rev() {
            let less = if found > 0 { shares[found - 1] } else { 0.0 };
            shares[found] = shares[found] * missed + less * used;
        }
    }
    // Rounds the running sum, so that rounding errors do not add up.
    let (mut sum, mut given) = (0.0, 0);
    let mut counts = shares.map(|share| {
        sum += share;
        let to = ((pages as f64 * sum + 0.5) as u64).clamp(given, pages);
        let count = to - given;
        given = to;
        count
    });
    counts[LOOKS] += pages - given;
    let unused = counts[0].min(pages - new);
    counts[1] += counts[0] - unused;
    counts[0] = unused;
    counts
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pages_hit_rarely_are_found_rarely() {
        assert_eq!(found(1000, 0.0, 0), [1000, 0, 0, 0, 0]);
        // There are 4000 hits on 1000 pages: one per page in each part, so a share of 1 - 1/e of the pages is used in each. By
        // hand: p = 0.632, (1 - p)^4 = 0.0183, 4 p (1 - p)^3 = 0.1259, 6 p^2 (1 - p)^2 = 0.3245, 4 p^3 (1 - p) = 0.3717, p^4 =
        // 0.1597.
        assert_eq!(found(1000, 4000.0, 0), [18, 126, 325, 371, 160]);
        assert_eq!(found(1000, 1e9, 0), [0, 0, 0, 0, 1000]);
        assert_eq!(
            found(1000, 0.0, 300),
            [700, 300, 0, 0, 0],
            "touched for the first time"
        );
    }

    proptest! {
        #[test]
        fn every_page_is_counted_once(pages in 1_u64..1 << 30, hits in 0.0..1e12, new in 0_u64..1 << 30) {
            let new = new.min(pages);
            let counts = found(pages, hits, new);
            prop_assert_eq!(counts.iter().sum::<u64>(), pages);
            prop_assert!(pages - counts[0] >= new);
        }
    }
}
