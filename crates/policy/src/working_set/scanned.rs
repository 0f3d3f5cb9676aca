//! Estimates from observations that do not name pages: regions sampled by a tracker, or only an amount.
//!
//! # Algorithm
//! A region that is found used in at least half of the interval's readings is hot, and one found used at all is warm. The working
//! set is both. An amount is all hot. For regions the interval covers only this window, and its lower end is what is hot: a
//! region that is rarely found used may be one used page among many unused ones.
//!
//! For an amount, least and most are those of the last eight windows, with two corrections. A larger page (2 MiB) counts as a
//! whole but may hold only one used page, so the least counts one page for it. The most includes the tracker's blind spot.
//!
//! The paper adds the guest kernel's footprint epsilon to the hot pages (equation 1). A tracker on a host finds the kernel's
//! pages like others, and does not tell them apart. So epsilon is the least size, and the most supposes that no page of the
//! kernel was found: it is the paper's. An exact set is without the kernel's pages, so epsilon is added to all three.
//!
//! Both kinds have settled when the last three windows differ by at most an eighth.
//!
//! # Properties (tests of the same name)
//! - `regions_found_in_half_of_the_looks_are_hot`
//! - `an_amount_has_the_spread_of_recent_windows`
//! - `of_a_larger_page_perhaps_one_page_is_used`
//! - `three_windows_alike_have_settled`
//! - `the_kernels_footprint_is_the_least_and_at_most_comes_on_top`

use std::collections::VecDeque;

use homenode_host::observation::{ObservationRef, Tracker, UsedRef};
use homenode_units::{Bytes, Pages};

use super::estimate::kind;
use super::{Certainty, Estimate, Estimator, Sequence, Settled, Unfit};

// The following are rules of the estimate, not settings: with other rules, figures of two hosts could not be compared.
/// Number of windows whose spread is an amount's interval.
const RECENT: usize = 8;
/// Number of windows that must be alike, and (next) number of pages in a larger page (2 MiB).
const ALIKE: usize = 3;
const PAGES_PER_LARGE: u64 = 512;

/// Estimates from regions or amounts.
#[derive(Clone, Debug)]
pub struct Scanned {
    epsilon: Bytes,
    sequence: Sequence,
    recent: VecDeque<Looked>,
}

/// What a window showed.
#[derive(Clone, Copy, Debug)]
struct Looked {
    least: Pages,
    /// Without the tracker's blind spot.
    most: Pages,
    /// Memory that the VM had.
    memory: Pages,
}

impl Scanned {
    /// Returns an estimator without observations. `epsilon` is the guest kernel's footprint, zero if unknown.
    pub fn new(epsilon: Bytes) -> Scanned {
        Scanned {
            epsilon,
            sequence: Sequence::default(),
            recent: VecDeque::with_capacity(RECENT),
        }
    }
}

impl Scanned {
    fn settled(&self) -> Settled {
        let last = self.recent.iter().rev().take(ALIKE).map(|window| window.most.0);
        let (low, high) = last.fold((u64::MAX, 0), |(low, high), most| (low.min(most), high.max(most)));
        match self.recent.len() >= ALIKE && 8 * (high - low) <= high {
            true => Settled::Yes,
            false => Settled::No,
        }
    }
}

impl Estimator for Scanned {
    fn observe(&mut self, seen: &ObservationRef<'_>) -> Result<Option<Estimate>, Unfit> {
        let unfit = Unfit::Kind {
            reads: "regions or amounts",
            tracker: seen.tracker,
            given: kind(&seen.seen),
        };
        let mut outside = 0_u64;
        let (hot, warm, least, certainty) = match seen.seen {
            UsedRef::Frames(_) | UsedRef::Sample { .. } => return Err(unfit),
            UsedRef::Regions { regions, looks } => {
                self.sequence.next(seen)?;
                let (mut hot, mut warm) = (0_u64, 0_u64); // regions that overlap must not overflow them
                for region in regions.iter().filter(|region| region.found > 0) {
                    let there = seen.frames.saturating_sub(region.first).min(region.pages.0);
                    outside = region.pages.0.saturating_sub(there).saturating_add(outside);
                    let sum = if 2 * u64::from(region.found) >= u64::from(looks) {
                        &mut hot
                    } else {
                        &mut warm
                    };
                    *sum = sum.saturating_add(there).min(seen.frames);
                }
                (Pages(hot), Pages(warm), Pages(hot), Certainty::Bounds)
            }
            UsedRef::Amount { used, coarse } => {
                self.sequence.next(seen)?;
                let least = used.saturating_sub(coarse) + Pages(coarse.0.div_ceil(PAGES_PER_LARGE));
                (used, Pages::ZERO, least, Certainty::Spread)
            }
        };
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(Looked {
            least,
            most: hot + warm,
            memory: seen.memory,
        });
        let (epsilon, is_apart) = (self.epsilon, seen.tracker == Tracker::Exact);
        let with_kernel = |pages: Pages| match is_apart {
            true => pages.to_bytes() + epsilon,
            false => pages.to_bytes().max(epsilon),
        };
        let blind = seen.blind.min(seen.memory.saturating_sub(hot + warm)).to_bytes();
        let size = with_kernel(hot + warm);
        let (least, most) = match certainty {
            Certainty::Spread => (
                self.recent.iter().map(|window| window.least).min().unwrap_or(hot),
                self.recent.iter().map(|window| window.most).max().unwrap_or(hot),
            ),
            Certainty::Bounds | Certainty::Percent95 => (least, hot + warm),
        };
        let (least, most) = (with_kernel(least), most.to_bytes() + epsilon + blind);
        let estimate = Estimate {
            tracker: seen.tracker,
            at: seen.at,
            window: seen.interval,
            size,
            least,
            most,
            certainty,
            hot: hot.to_bytes(),
            warm: warm.to_bytes(),
            kernel: self.epsilon,
            settled: self.settled(),
            curve: None,
            outside,
            lost: seen.lost,
        };
        let memory_max = self.recent.iter().map(|window| window.memory).max();
        Ok(Some(
            estimate.within(seen.memory, memory_max.unwrap_or(seen.memory)),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Region;
    use super::super::tests::observation;
    use super::*;

    #[test]
    fn regions_found_in_half_of_the_looks_are_hot() {
        let region = |first, pages, found| Region {
            first,
            pages: Pages(pages),
            found,
        };
        // The last region extends 20 pages beyond the VM's 100 frames.
        let regions = [
            region(0, 10, 10),
            region(10, 40, 9),
            region(50, 20, 0),
            region(90, 30, 20),
        ];
        let seen = UsedRef::Regions {
            regions: &regions,
            looks: 20,
        };
        let seen = observation(Tracker::Damon, 1, seen);
        let estimate = Scanned::new(Bytes::ZERO).observe(&seen).unwrap().unwrap();
        assert_eq!(
            [estimate.hot, estimate.warm, estimate.least, estimate.size].map(|bytes| bytes.to_pages().0),
            [20, 40, 20, 60]
        );
        assert_eq!(estimate.outside, 20);
    }

    #[test]
    fn an_amount_has_the_spread_of_recent_windows() {
        let mut scanned = Scanned::new(Pages(15).to_bytes());
        let mut last = None;
        for (second, used) in [90, 50, 40, 30, 20, 10, 20, 30, 40].into_iter().enumerate() {
            let coarse = Pages::ZERO;
            let seen = UsedRef::Amount {
                used: Pages(used),
                coarse,
            };
            let seen = observation(Tracker::AccessedBits, second as u64 + 1, seen);
            last = scanned.observe(&seen).unwrap();
        }
        // The window with 90 is nine windows old and no longer counts, and the kernel needs 15.
        let last = last.unwrap();
        assert_eq!(
            [last.least, last.size, last.most].map(|bytes| bytes.to_pages().0),
            [15, 40, 50 + 15]
        );
        assert_eq!(last.settled, Settled::No);
    }

    #[test]
    fn of_a_larger_page_perhaps_one_page_is_used() {
        let seen = UsedRef::Amount {
            used: Pages(1124),
            coarse: Pages(1024),
        };
        let seen = ObservationRef {
            memory: Pages(2000),
            frames: 2000,
            blind: Pages(1000),
            ..observation(Tracker::AccessedBits, 1, seen)
        };
        let estimate = Scanned::new(Bytes::ZERO).observe(&seen).unwrap().unwrap();
        // Two large pages hold at least two used pages, and no more can be in use than exists.
        assert_eq!(
            [estimate.least, estimate.size, estimate.most].map(|bytes| bytes.to_pages().0),
            [102, 1124, 2000]
        );
    }

    #[test]
    fn the_kernels_footprint_is_the_least_and_at_most_comes_on_top() {
        let sizes = |tracker, used, epsilon| {
            let coarse = Pages::ZERO;
            let seen = UsedRef::Amount {
                used: Pages(used),
                coarse,
            };
            let seen = observation(tracker, 1, seen);
            let mut scanned = Scanned::new(Pages(epsilon).to_bytes());
            let estimate = scanned.observe(&seen).unwrap().unwrap();
            [estimate.kernel, estimate.least, estimate.size, estimate.most].map(|bytes| bytes.to_pages().0)
        };
        assert_eq!(sizes(Tracker::Invalidation, 40, 0), [0, 40, 40, 40]);
        // An idle guest, and a busy one: of its 40 pages between 0 and 20 are the kernel's.
        assert_eq!(sizes(Tracker::Invalidation, 3, 20), [20, 20, 20, 23]);
        assert_eq!(sizes(Tracker::Invalidation, 40, 20), [20, 40, 40, 60]);
        assert_eq!(sizes(Tracker::Exact, 40, 20), [20, 60, 60, 60]);
        // The VM has 100 pages.
        assert_eq!(sizes(Tracker::Invalidation, 90, 20), [20, 90, 90, 100]);
        assert_eq!(sizes(Tracker::Exact, 90, 200), [100, 100, 100, 100]);
    }

    #[test]
    fn three_windows_alike_have_settled() {
        let mut scanned = Scanned::new(Bytes::ZERO);
        let settled = [50, 80, 76, 78, 60]
            .into_iter()
            .enumerate()
            .map(|(second, used)| {
                let seen = UsedRef::Amount {
                    used: Pages(used),
                    coarse: Pages::ZERO,
                };
                let seen = observation(Tracker::AccessedBits, second as u64 + 1, seen);
                scanned.observe(&seen).unwrap().unwrap().settled == Settled::Yes
            });
        assert_eq!(settled.collect::<Vec<_>>(), [false, false, false, true, false]);
    }
}
