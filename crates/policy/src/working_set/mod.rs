//! Estimates how much memory a VM really uses [PRL, section 4.4].
//!
//! # Problem
//! Operators ask how much memory a VM needs. Its allocated memory does not tell, "active memory" figures are one poll of
//! unrelated pages, and every mechanism that watches pages has a blind spot. Here every figure comes with its window, an
//! interval, the meaning of the interval, and its tracker's blind spot.
//!
//! # Terms
//! - *Tracker*: a source of figures on a guest's memory use. *Observation*: what it reports ([`homenode_host::observation`]).
//! - *Hot* memory: used again and again. *Warm* memory: used, but less often. Each estimator defines both.
//! - *Working set*: hot pages plus the guest kernel's footprint *epsilon* (equation 1: `M = wss * page size + epsilon`).
//! - *Window*: the time that an estimate covers. A longer window yields a larger working set.
//!
//! # Estimators
//!
//! | | reads | hot is a page |
//! |---|---|---|
//! | [`Logged`] with [`logged::HeatBy::Logs`] | frames | logged at least tau times: the paper's, for PRL and PML |
//! | [`Logged`] with [`logged::HeatBy::Windows`] | frames | seen in tau of the last windows: scans, and PRL repaired |
//! | [`Sampling`] | a sample | of a poll of 100 pages: ESX's, with its moving averages |
//! | [`Scanned`] | regions, an amount | found used in at least half of the looks |
//!
//! [`suited`] chooses an estimator according to what the tracker reports, and [`plan`] decides which VMs are watched
//! ([`watch`]). All estimators refuse observations that they cannot read ([`Unfit`]). They drop frames that the VM does not
//! have, and count them.
//!
//! # Properties (tests of the same name)
//! - `a_working_set_is_never_larger_than_its_vm` (generated): [`Estimate::within`]
//!
//! # Limits of an estimate
//! It cannot show that a VM needs more memory than it has: a guest that swaps looks like one that fits. It does not tell how
//! performance falls with less memory, but [`Curve`] tells how many uses would miss their page.

mod estimate;
mod heat;
pub mod logged;
pub mod sampling;
pub mod scanned;
pub mod watch;

pub use estimate::{Certainty, Curve, Estimate, Settled, Unfit};
pub use homenode_host::observation::{ObservationRef, Region, Sees, Tracker, UsedRef};
pub use logged::Logged;
pub use sampling::Sampling;
pub use scanned::Scanned;
pub use watch::{Config, Measured, POLICY, State, Whom, observe, plan};

use homenode_units::{Bytes, Ns};

/// Estimates one VM's working set from one tracker's observations.
pub trait Estimator: std::fmt::Debug {
    /// Records an observation. Returns an estimate if one is due.
    ///
    /// # Errors
    /// [`Unfit`]; then nothing is recorded.
    fn observe(&mut self, seen: &ObservationRef<'_>) -> Result<Option<Estimate>, Unfit>;
}

/// Returns the estimator that suits a tracker's observations. `epsilon` is the guest kernel's footprint, zero if unknown;
/// `mu` is the interval after which frames are judged.
///
/// Observations of frames are read with the paper's algorithm in its repaired form ([`logged::Config::repaired`]). The
/// exception is PML, which reports each frame once until its dirty flag is cleared.
pub fn suited(tracker: Tracker, seen: &UsedRef<'_>, epsilon: Bytes, mu: Ns) -> Box<dyn Estimator + Send> {
    match seen {
        UsedRef::Frames(_) if tracker == Tracker::Pml => Box::new(Logged::new(logged::Config {
            mu,
            epsilon,
            ..logged::Config::pml()
        })),
        UsedRef::Frames(_) => Box::new(Logged::new(logged::Config {
            mu,
            epsilon,
            ..logged::Config::repaired()
        })),
        UsedRef::Sample { .. } => Box::new(Sampling::new(sampling::Averages::Three, epsilon)),
        UsedRef::Regions { .. } | UsedRef::Amount { .. } => Box::new(Scanned::new(epsilon)),
    }
}

/// What every estimator checks first: observations come in order, from one tracker, and with possible figures.
#[derive(Clone, Copy, Debug, Default)]
struct Sequence(Option<(Tracker, Ns)>);

/// Most guest frames that an estimator tracks; they are 16 TiB.
pub const FRAMES_MAX: u64 = 1 << 32;

impl Sequence {
    fn next(&mut self, seen: &ObservationRef<'_>) -> Result<(), Unfit> {
        if let Some((before, at)) = self.0 {
            if before != seen.tracker {
                return Err(Unfit::Tracker {
                    before,
                    now: seen.tracker,
                });
            }
            if seen.at <= at {
                return Err(Unfit::Order {
                    before: at.0,
                    at: seen.at.0,
                });
            }
        }
        let wrong = |what| Err(Unfit::Contradiction { what, at: seen.at.0 });
        if seen.interval == Ns::ZERO {
            return wrong("an interval has no length");
        }
        if seen.frames > FRAMES_MAX {
            return wrong("the VM has frames beyond 16 TiB");
        }
        if seen.memory.0 > seen.frames {
            return wrong("the VM has more memory than guest frames");
        }
        match seen.seen {
            UsedRef::Amount { used, .. } if used > seen.memory => {
                return wrong("more pages were used than the VM has");
            }
            UsedRef::Amount { used, coarse } if coarse > used => {
                return wrong("more used pages are part of larger ones than were used at all");
            }
            UsedRef::Sample { used, drawn, .. } if drawn == 0 || used > drawn => {
                return wrong("a sample is empty, or has more used pages than pages");
            }
            UsedRef::Regions { regions, looks }
                if looks == 0 || regions.iter().any(|region| region.found > looks) =>
            {
                return wrong("a region was found used more often than it was looked at");
            }
            _ => {}
        }
        self.0 = Some((seen.tracker, seen.at));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_units::Pages;
    use proptest::prelude::*;

    /// An observation of a VM of 100 frames, which ends in this second and covers 1 s.
    pub(super) fn observation<'a>(tracker: Tracker, second: u64, seen: UsedRef<'a>) -> ObservationRef<'a> {
        ObservationRef {
            tracker,
            at: Ns::from_secs(second),
            interval: Ns::from_secs(1),
            memory: Pages(100),
            frames: 100,
            seen,
            lost: 0,
            blind: Pages::ZERO,
        }
    }

    #[test]
    fn what_cannot_be_is_refused_and_nothing_is_taken_in() {
        let frames = UsedRef::Frames(&[1, 2, 3]);
        let mut estimator = suited(Tracker::Prl, &frames, Bytes::ZERO, Ns::from_secs(1));
        let first = observation(Tracker::Prl, 5, frames);
        assert!(estimator.observe(&first).is_ok());
        let before = Ns::from_secs(5).0;
        assert_eq!(
            estimator.observe(&first),
            Err(Unfit::Order { before, at: before })
        );
        let pml = observation(Tracker::Pml, 6, frames);
        assert!(matches!(estimator.observe(&pml), Err(Unfit::Tracker { .. })));
        let amount = UsedRef::Amount {
            used: Pages(3),
            coarse: Pages::ZERO,
        };
        let amount = observation(Tracker::Prl, 6, amount);
        assert!(matches!(estimator.observe(&amount), Err(Unfit::Kind { .. })));
        let endless = ObservationRef {
            frames: u64::MAX,
            ..observation(Tracker::Prl, 6, frames)
        };
        let crowded = ObservationRef {
            memory: Pages(101),
            ..observation(Tracker::Prl, 6, frames)
        };
        for impossible in [endless, crowded] {
            let refused = estimator.observe(&impossible);
            assert!(matches!(refused, Err(Unfit::Contradiction { .. })), "{refused:?}");
        }
        // The refused observations left no trace, so second 6 is still free.
        assert!(estimator.observe(&observation(Tracker::Prl, 6, frames)).is_ok());
    }

    proptest! {
        #[test]
        fn any_observation_gives_an_ordered_interval_or_a_reason(
            steps in prop::collection::vec((0_u64..3, prop::collection::vec(0_u64..200, 0..60), 0_u64..150, 0_u64..200), 1..20),
            kind in 0..4,
        ) {
            let mut estimator = None;
            let mut at = 0;
            for (pause, frames, memory, bound) in steps {
                at += pause;
                let regions: Vec<Region> = frames.chunks_exact(2)
                    .map(|pair| Region { first: pair[0], pages: Pages(pair[1]), found: pair[0] as u32 % 21 })
                    .collect();
                let seen = match kind {
                    0 => UsedRef::Frames(&frames),
                    1 => UsedRef::Regions { regions: &regions, looks: 20 },
                    2 => UsedRef::Amount { used: Pages(memory.min(bound)), coarse: Pages(frames.len() as u64) },
                    _ => UsedRef::Sample { used: frames.len() as u32, drawn: 60, complete: pause != 2 },
                };
                let observation = ObservationRef {
                    memory: Pages(memory.min(bound)), frames: bound, ..observation(Tracker::Exact, at, seen)
                };
                let estimator = estimator.get_or_insert_with(|| suited(Tracker::Exact, &seen, Bytes(4096), Ns::from_secs(2)));
                if let Ok(Some(estimate)) = estimator.observe(&observation) {
                    prop_assert!(estimate.least <= estimate.size && estimate.size <= estimate.most, "{:?}", estimate);
                    prop_assert!(estimate.window > Ns::ZERO);
                }
            }
        }

        #[test]
        fn a_working_set_is_never_larger_than_its_vm(
            steps in prop::collection::vec(
                (prop::collection::vec(0_u64..200, 0..120), 0_u64..150, 0_u64..200, 0_u64..200), 1..12,
            ),
            kind in 0..5,
            epsilon in 0_u64..100 * 4096,
        ) {
            let mut estimator = None;
            let mut memory_max = Pages::ZERO;
            for (second, (frames, memory, bound, blind)) in (1..).zip(steps) {
                let memory = Pages(memory.min(bound));
                memory_max = memory_max.max(memory);
                let regions: Vec<Region> = frames.chunks_exact(2)
                    .map(|pair| Region { first: pair[0], pages: Pages(pair[1]), found: pair[0] as u32 % 21 })
                    .collect();
                let (tracker, seen) = match kind {
                    0 => (Tracker::Exact, UsedRef::Frames(&frames)),
                    1 => (Tracker::Pml, UsedRef::Frames(&frames)),
                    2 => (Tracker::Exact, UsedRef::Regions { regions: &regions, looks: 20 }),
                    3 => (Tracker::Exact, UsedRef::Amount { used: memory, coarse: Pages::ZERO }),
                    _ => (Tracker::Exact, UsedRef::Sample { used: frames.len() as u32 / 2, drawn: 60, complete: true }),
                };
                let observation = ObservationRef {
                    memory, frames: bound, blind: Pages(blind), ..observation(tracker, second, seen)
                };
                let estimator =
                    estimator.get_or_insert_with(|| suited(tracker, &seen, Bytes(epsilon), Ns::from_secs(1)));
                if let Ok(Some(estimate)) = estimator.observe(&observation) {
                    let (memory, most) = (memory.to_bytes(), memory_max.to_bytes());
                    prop_assert!(estimate.size <= memory && estimate.hot + estimate.warm <= memory, "{:?}", estimate);
                    prop_assert!(estimate.kernel <= memory && estimate.most <= most, "{:?}", estimate);
                    prop_assert!(estimate.least <= estimate.size && estimate.size <= estimate.most, "{:?}", estimate);
                }
            }
        }
    }
}
