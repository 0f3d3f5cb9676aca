//! Estimates from what does not name pages: regions that a carrier samples, or an amount alone.
//!
//! # Algorithm
//! Hot is a region that was found used in at least half of the interval's looks, warm one that was found used at all; the
//! working set is both. Of an amount all is hot. The interval is what this window alone can say: a region found rarely may be
//! one page in use among many that are not, so the least is what is hot.
//!
//! For an amount, least and most are those of the last eight windows.
//!
//! # Properties (tests of the same name)
//! - `regions_found_in_half_of_the_looks_are_hot`
//! - `an_amount_has_the_spread_of_recent_windows`

use std::collections::VecDeque;

use homenode_host::observed::{Observation, Seen};
use homenode_units::{Bytes, Pages};

use super::estimate::kind;
use super::{Certainty, Estimate, Estimator, Sequence, Settled, Unfit};

/// Windows that an amount's spread is taken from.
const RECENT: usize = 8;

/// Estimates from regions or amounts.
#[derive(Clone, Debug)]
pub struct Scanned {
    epsilon: Bytes,
    sequence: Sequence,
    recent: VecDeque<Pages>,
}

impl Scanned {
    /// An estimator that has seen nothing. Carriers see the kernel's pages as others, so epsilon is only what remains in use
    /// however little is found.
    pub fn new(epsilon: Bytes) -> Scanned {
        Scanned {
            epsilon,
            sequence: Sequence::default(),
            recent: VecDeque::with_capacity(RECENT),
        }
    }
}

impl Estimator for Scanned {
    fn observe(&mut self, seen: &Observation<'_>) -> Result<Option<Estimate>, Unfit> {
        let unfit = Unfit::Kind {
            reads: "regions or amounts",
            carrier: seen.carrier,
            given: kind(&seen.seen),
        };
        let mut outside = 0_u64;
        let (hot, warm, certainty) = match seen.seen {
            Seen::Frames(_) | Seen::Sample { .. } => return Err(unfit),
            Seen::Regions { regions, looks } => {
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
                (Pages(hot), Pages(warm), Certainty::Bounds)
            }
            Seen::Amount { used } => {
                self.sequence.next(seen)?;
                if self.recent.len() == RECENT {
                    self.recent.pop_front();
                }
                self.recent.push_back(used);
                (used, Pages::ZERO, Certainty::Spread)
            }
        };
        let at_least_kernel = |pages: Pages| pages.to_bytes().max(self.epsilon);
        let size = at_least_kernel(hot + warm);
        let (least, most) = match certainty {
            Certainty::Spread => (
                at_least_kernel(self.recent.iter().copied().min().unwrap_or(hot)),
                at_least_kernel(self.recent.iter().copied().max().unwrap_or(hot)),
            ),
            Certainty::Bounds | Certainty::Percent95 => (
                at_least_kernel(hot),
                size + seen.blind.min(seen.memory).to_bytes(),
            ),
        };
        Ok(Some(Estimate {
            carrier: seen.carrier,
            at: seen.at,
            window: seen.interval,
            size,
            least,
            most,
            certainty,
            hot: hot.to_bytes(),
            warm: warm.to_bytes(),
            kernel: self.epsilon,
            settled: Settled::Yes,
            curve: None,
            outside,
            lost: seen.lost,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::observation;
    use super::super::{Carrier, Region};
    use super::*;

    #[test]
    fn regions_found_in_half_of_the_looks_are_hot() {
        let region = |first, pages, found| Region {
            first,
            pages: Pages(pages),
            found,
        };
        // The last reaches 20 pages over the VM's 100 frames.
        let regions = [
            region(0, 10, 10),
            region(10, 40, 9),
            region(50, 20, 0),
            region(90, 30, 20),
        ];
        let seen = Seen::Regions {
            regions: &regions,
            looks: 20,
        };
        let seen = observation(Carrier::Damon, 1, seen);
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
            let seen = Seen::Amount { used: Pages(used) };
            let seen = observation(Carrier::AccessedBits, second as u64 + 1, seen);
            last = scanned.observe(&seen).unwrap();
        }
        // The 90 is nine windows old, and the kernel needs 15.
        let last = last.unwrap();
        assert_eq!(
            [last.least, last.size, last.most].map(|bytes| bytes.to_pages().0),
            [15, 40, 50]
        );
    }
}
