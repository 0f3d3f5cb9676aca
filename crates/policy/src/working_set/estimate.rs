//! Estimates of working sets, and what they do not tell.

use homenode_host::observation::{Tracker, UsedRef};
use homenode_units::{Bytes, Ns, Pages};
use schemars::JsonSchema;
use serde::Serialize;

/// An estimate of a VM's working set.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Estimate {
    /// The tracker whose observations it is based on.
    pub tracker: Tracker,
    /// When the estimate was made: the end of its last interval.
    pub at: Ns,
    /// Time over which memory was observed. A longer window yields a larger working set.
    pub window: Ns,
    /// The working set, including the guest kernel's footprint [PRL, equation 1].
    pub size: Bytes,
    /// The lower end of its interval; see [`Estimate::certainty`].
    pub least: Bytes,
    /// The upper end of the interval.
    pub most: Bytes,
    /// What the two ends mean.
    pub certainty: Certainty,
    /// Memory that is used again and again.
    pub hot: Bytes,
    /// Memory that is used, but too rarely to count as hot.
    pub warm: Bytes,
    /// The guest kernel's footprint (epsilon) that is part of `size`; zero if unknown.
    pub kernel: Bytes,
    /// Whether the figure has settled.
    pub settled: Settled,
    /// What less memory would cost, if the tracker knows how many times pages are used.
    pub curve: Option<Curve>,
    /// Number of entries in the last interval that were dropped because the VM does not have their frames.
    pub outside: u64,
    /// Number of accesses in the last interval that the tracker lost.
    pub lost: u64,
}

/// What the ends of an interval mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Certainty {
    /// The true value is between them, if the tracker works as specified.
    Bounds,
    /// The true value is between them in 95 of 100 cases.
    Percent95,
    /// The ends are the least and the most of recent windows; the most includes what the tracker may have missed. There is no
    /// guarantee.
    Spread,
}

/// Whether an estimate has settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Settled {
    /// The figure still changes.
    No,
    /// The stop rule is met.
    Yes,
}

/// Why an observation was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// The estimator cannot read this kind of observation.
    #[error("this estimator reads {reads}, but {} gives {given}: choose an estimator for this tracker", tracker.name())]
    Kind {
        /// The kind that it reads.
        reads: &'static str,
        /// The tracker of the observation.
        tracker: Tracker,
        /// The kind of the observation.
        given: &'static str,
    },
    /// Observations from two trackers cannot be combined.
    #[error("observations of {} are mixed with those of {}: use a separate estimator for each tracker", now.name(), before.name())]
    Tracker {
        /// The tracker of the earlier observations.
        before: Tracker,
        /// The tracker of this observation.
        now: Tracker,
    },
    /// Time went backwards or did not advance since the last observation.
    #[error(
        "an observation ends at {at} ns, and the one before at {before} ns: observations must come in order"
    )]
    Order {
        /// End of the last observation.
        before: u64,
        /// End of this observation.
        at: u64,
    },
    /// The observation contradicts itself.
    #[error("{what}: the observation at {at} ns cannot be right")]
    Contradiction {
        /// The contradiction.
        what: &'static str,
        /// End of the observation.
        at: u64,
    },
}

/// Returns the kind of an observation in words, for messages.
pub(super) fn kind(seen: &UsedRef<'_>) -> &'static str {
    match seen {
        UsedRef::Frames(_) => "frames",
        UsedRef::Regions { .. } => "regions",
        UsedRef::Amount { .. } => "an amount",
        UsedRef::Sample { .. } => "a sample",
    }
}

/// What less memory would cost: the uses per second that would miss their page if the least used pages were evicted first.
///
/// It is a lower bound on the cost to a real guest, which does not know its coldest pages. It is an upper bound on faults,
/// since of several uses of a page only the first would fault, as long as the page then stays. If a tracker sees only TLB
/// misses, these are the uses that it counts.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Curve {
    /// Memory left, and uses lost per second with it; memory ascends, losses descend.
    points: Vec<(Bytes, f64)>,
}

impl Curve {
    /// Builds the curve from counts of uses over `seconds`: `pages[n]` pages were used `n` times.
    pub(super) fn of_counts(pages: &[u64; 256], kernel: Bytes, seconds: f64) -> Curve {
        let mut held: u64 = pages[1..].iter().sum();
        let mut lost = 0.0;
        let mut points = vec![(kernel + Pages(held).to_bytes(), 0.0)];
        for (uses, count) in pages.iter().enumerate().skip(1).filter(|(_, count)| **count > 0) {
            held -= count;
            lost += uses as f64 * *count as f64;
            points.push((kernel + Pages(held).to_bytes(), lost / seconds));
        }
        points.reverse();
        Curve { points }
    }

    /// Returns the uses per second that would miss their page with this much memory.
    pub fn lost_per_second(&self, memory: Bytes) -> f64 {
        let after = self.points.partition_point(|(held, _)| *held < memory);
        match (
            after.checked_sub(1).map(|at| self.points[at]),
            self.points.get(after),
        ) {
            (_, None) => 0.0,
            (None, Some((_, lost))) => *lost,
            (Some((low, most)), Some((high, least))) => {
                let share = (memory - low).as_f64() / (*high - low).as_f64();
                most + share * (least - most)
            }
        }
    }

    /// Returns memory left, and uses lost per second with it; memory ascends.
    pub fn points(&self) -> &[(Bytes, f64)] {
        &self.points
    }
}

impl Estimate {
    /// Returns this estimate for a VM with `memory`: no working set is larger than its VM. Trackers may report frames that a
    /// balloon has taken, and the kernel's footprint may exceed a small VM. `memory_max` is the most memory that the VM had in
    /// the windows that [`Estimate::most`] covers.
    #[must_use]
    pub fn within(self, memory: Pages, memory_max: Pages) -> Estimate {
        let memory = memory.to_bytes();
        let hot = self.hot.min(memory);
        Estimate {
            size: self.size.min(memory),
            least: self.least.min(memory),
            most: self.most.min(memory_max.to_bytes().max(memory)),
            warm: self.warm.min(memory.saturating_sub(hot)),
            kernel: self.kernel.min(memory),
            hot,
            ..self
        }
    }

    /// Returns the uses per second that would be lost if this much memory were taken from a VM that has just its working set.
    pub fn cost_of_taking(&self, bytes: Bytes) -> Option<f64> {
        let left = self.size.saturating_sub(bytes);
        Some(self.curve.as_ref()?.lost_per_second(left))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_curve_gives_up_the_coldest_pages_first() {
        // 10 pages were used once and 5 were used 4 times, in 2 s. Taking 10 pages costs 5 uses a second, and taking all 15
        // costs 15.
        let mut counts = [0; 256];
        (counts[1], counts[4]) = (10, 5);
        let curve = Curve::of_counts(&counts, Bytes::ZERO, 2.0);
        let pages = |pages| curve.lost_per_second(Pages(pages).to_bytes());
        assert_eq!([pages(0), pages(5), pages(15), pages(99)], [15.0, 5.0, 0.0, 0.0]);
        assert_eq!(pages(10), 2.5);
    }

    #[test]
    fn refusals_name_what_came_and_what_to_do() {
        let unfit = Unfit::Kind {
            reads: "samples",
            tracker: Tracker::Prl,
            given: "frames",
        };
        assert_eq!(
            unfit.to_string(),
            "this estimator reads samples, but prl gives frames: choose an estimator for this tracker"
        );
    }
}
