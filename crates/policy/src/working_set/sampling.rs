//! ESX's estimate from a poll of pages (Waldspurger, OSDI 2002, section 5.3; [PRL, section 5.1]).
//!
//! # Algorithm
//! In each period (30 s of the VM's time) 100 pages, drawn at random, are made invalid. The share of them that has faulted by
//! the end of the period is the share of memory in use. Two moving averages smooth this share, a slow and a fast one; a third
//! adds the present period's share so far to the fast one. The largest of the three counts, so growth of the working set
//! shows at once, and shrinking shows slowly.
//!
//! # Error
//! A share `f` of `n` pages has a standard deviation of `sqrt(f (1 - f) / n)`. For a quarter of 100 pages this is 4.3 points,
//! so the error is up to 8.5 points in 95 of 100 cases. The interval is Wilson's for the period's own sample. Averaging
//! narrows it, but how much depends on how the working set changes.
//!
//! # Properties (tests of the same name)
//! - `it_rises_at_once_and_falls_slowly`
//! - `a_running_period_can_only_raise_it`
//! - `nineteen_of_twenty_intervals_hold_the_truth`
//!
//! # Departures from the source
//! The weights of the averages are not published; 1/5 and 1/2 are ours. [`Averages::Last`] is the method without averages, as
//! the paper describes it.

use homenode_host::observation::{ObservationRef, UsedRef};
use homenode_units::{Bytes, Ewma, Pages, Weight};

use super::estimate::kind;
use super::{Certainty, Estimate, Estimator, Sequence, Settled, Unfit};

/// How the shares of successive periods are averaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Averages {
    /// Not at all: each share counts by itself, as \[PRL\] describes it.
    Last,
    /// The largest of a slow, a fast and a running average, as ESX does.
    Three,
}

// Weights of ESX's method, which is here for comparison. They are not settings.
const SLOW: Weight = Weight(0.2);
const FAST: Weight = Weight(0.5);

/// Estimates from samples.
#[derive(Clone, Debug)]
pub struct Sampling {
    averages: Averages,
    epsilon: Bytes,
    sequence: Sequence,
    slow: Ewma,
    fast: Ewma,
}

impl Sampling {
    /// Returns an estimator without observations. Samples cover all memory, including the kernel's, so `epsilon` is only what
    /// counts as used if less is found.
    pub fn new(averages: Averages, epsilon: Bytes) -> Sampling {
        Sampling {
            averages,
            epsilon,
            sequence: Sequence::default(),
            slow: Ewma::default(),
            fast: Ewma::default(),
        }
    }

    fn share(&mut self, used: f64, complete: bool) -> f64 {
        if self.averages == Averages::Last {
            return used;
        }
        let (mut slow, mut fast) = (self.slow, self.fast);
        let with_this = fast.update(used, FAST);
        if complete {
            slow.update(used, SLOW);
            (self.slow, self.fast) = (slow, fast);
        }
        let known = [self.slow.value(), self.fast.value(), Some(with_this)];
        known.into_iter().flatten().fold(0.0, f64::max)
    }
}

/// Returns Wilson's interval of a share at 95 percent.
fn wilson(share: f64, drawn: f64) -> (f64, f64) {
    const Z: f64 = 1.96;
    let z2 = Z * Z / drawn;
    let centre = share + z2 / 2.0;
    let half = Z * ((share * (1.0 - share) + z2 / 4.0) / drawn).sqrt();
    (
        ((centre - half) / (1.0 + z2)).max(0.0).min(share),
        ((centre + half) / (1.0 + z2)).min(1.0).max(share),
    )
}

impl Estimator for Sampling {
    fn observe(&mut self, seen: &ObservationRef<'_>) -> Result<Option<Estimate>, Unfit> {
        let UsedRef::Sample {
            used,
            drawn,
            complete,
        } = seen.seen
        else {
            return Err(Unfit::Kind {
                reads: "samples",
                tracker: seen.tracker,
                given: kind(&seen.seen),
            });
        };
        self.sequence.next(seen)?;
        let share = self.share(f64::from(used) / f64::from(drawn), complete);
        let (least, most) = wilson(share, f64::from(drawn));
        let of_memory = |share: f64| Pages((share * seen.memory.as_f64()).round() as u64).to_bytes();
        let size = of_memory(share).max(self.epsilon);
        let estimate = Estimate {
            tracker: seen.tracker,
            at: seen.at,
            window: seen.interval,
            size,
            least: of_memory(least).max(self.epsilon),
            most: of_memory(most).max(self.epsilon),
            certainty: Certainty::Percent95,
            hot: size.saturating_sub(self.epsilon),
            warm: Bytes::ZERO,
            kernel: self.epsilon,
            settled: if complete { Settled::Yes } else { Settled::No },
            curve: None,
            outside: 0,
            lost: seen.lost,
        };
        Ok(Some(estimate.within(seen.memory, seen.memory)))
    }
}

#[cfg(test)]
mod tests {
    use super::super::Tracker;
    use super::super::tests::observation;
    use super::*;

    /// Returns the estimates after samples of 100 pages, in percent of memory.
    fn percent(samples: &[(u32, bool)]) -> Vec<u64> {
        let mut sampling = Sampling::new(Averages::Three, Bytes::ZERO);
        let of = |(at, (used, complete)): (usize, &(u32, bool))| {
            let (used, complete) = (*used, *complete);
            let seen = UsedRef::Sample {
                used,
                drawn: 100,
                complete,
            };
            let seen = observation(Tracker::Sampling, at as u64 + 1, seen);
            let estimate = sampling.observe(&seen).unwrap().unwrap();
            estimate.size.to_pages().0 // of 100
        };
        samples.iter().enumerate().map(of).collect()
    }

    #[test]
    fn it_rises_at_once_and_falls_slowly() {
        // The fast average goes half of the way: (20 + 80) / 2 = 50. Then the slow one leads: from 32 to 25.6, while the fast
        // one goes from 25 to 12.5.
        assert_eq!(percent(&[(20, true), (80, true)]), [20, 50]);
        assert_eq!(percent(&[(80, true), (0, true), (0, true)]), [80, 64, 51]);
    }

    #[test]
    fn a_running_period_can_only_raise_it() {
        assert_eq!(
            percent(&[(40, true), (2, false), (60, false), (10, true)]),
            [40, 40, 50, 34]
        );
    }

    #[test]
    fn nineteen_of_twenty_intervals_hold_the_truth() {
        // Goes through all possible samples of 100 pages of which a quarter are used, with their binomial weights.
        let mut weight = 0.75_f64.powi(100);
        let mut held = 0.0;
        for used in 0..=100_u32 {
            let (least, most) = wilson(f64::from(used) / 100.0, 100.0);
            if (least..=most).contains(&0.25) {
                held += weight;
            }
            weight *= f64::from(100 - used) / f64::from(used + 1) / 3.0;
        }
        assert!((0.94..0.97).contains(&held), "{held}");
    }
}
