//! What an estimator says, and what it does not.

use homenode_host::observation::{Tracker, UsedRef};
use homenode_units::{Bytes, Ns, Pages};
use schemars::JsonSchema;
use serde::Serialize;

/// How large a VM's working set is.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Estimate {
    /// Whose word it is.
    pub tracker: Tracker,
    /// When it was made: the end of the last interval in it.
    pub at: Ns,
    /// Over which time memory was looked at: a longer window gives a larger working set.
    pub window: Ns,
    /// The working set, the guest kernel's footprint included [PRL, equation 1].
    pub size: Bytes,
    /// Its lower end; see [`Estimate::certainty`].
    pub least: Bytes,
    /// Its upper end.
    pub most: Bytes,
    /// What the two ends mean.
    pub certainty: Certainty,
    /// Memory used again and again.
    pub hot: Bytes,
    /// Memory used, but too rarely to be called hot.
    pub warm: Bytes,
    /// The guest kernel's footprint (epsilon) that is part of `size`; zero where nobody said.
    pub kernel: Bytes,
    /// Whether more of the same would change it.
    pub settled: Settled,
    /// What less memory would cost, where the tracker knows how often pages are used.
    pub curve: Option<Curve>,
    /// Entries of the last interval that were left out: frames that the VM does not have.
    pub outside: u64,
    /// Accesses of the last interval that the tracker lost.
    pub lost: u64,
}

/// What an interval's ends are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Certainty {
    /// The true value lies between them, if the tracker works as it says.
    Bounds,
    /// It does so in 95 of 100 cases.
    Percent95,
    /// They are the least and the most of recent windows, the most with what the tracker may not have seen, and promise nothing.
    Spread,
}

/// Whether an estimator has come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Settled {
    /// The figure still moves.
    No,
    /// The stop rule is met.
    Yes,
}

/// Why an observation was not taken in.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    /// An estimator was given what it cannot read.
    #[error("this estimator reads {reads}, and {} gives {given}: choose the estimator by the tracker", tracker.name())]
    Kind {
        /// What it reads.
        reads: &'static str,
        /// Who gave something else.
        tracker: Tracker,
        /// What that was.
        given: &'static str,
    },
    /// Observations of two trackers do not add up.
    #[error("observations of {} came among those of {}: give each tracker its own estimator", now.name(), before.name())]
    Tracker {
        /// Whose observations it had.
        before: Tracker,
        /// Whose came.
        now: Tracker,
    },
    /// Time went backwards or stood still.
    #[error(
        "an observation ends at {at} ns, and the one before at {before} ns: observations must come in order"
    )]
    Order {
        /// End of the last.
        before: u64,
        /// End of this.
        at: u64,
    },
    /// Something in it contradicts itself.
    #[error("{what}: the observation at {at} ns cannot be right")]
    Contradiction {
        /// What.
        what: &'static str,
        /// Its end.
        at: u64,
    },
}

/// What `UsedRef` is, for messages.
pub(super) fn kind(seen: &UsedRef<'_>) -> &'static str {
    match seen {
        UsedRef::Frames(_) => "frames",
        UsedRef::Regions { .. } => "regions",
        UsedRef::Amount { .. } => "an amount",
        UsedRef::Sample { .. } => "a sample",
    }
}

/// What less memory would cost: uses per second that would find their page gone, if the pages used least went first.
///
/// It is a lower bound on what a real guest pays, which does not know its coldest pages, and an upper bound on faults, since
/// of several uses of a page only the first would fault while it stays. A tracker that sees only TLB misses counts those.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Curve {
    /// Memory left and uses per second lost, memory ascending, losses not.
    points: Vec<(Bytes, f64)>,
}

impl Curve {
    /// From how many pages were used how often in so many seconds: `pages[n]` pages `n` times.
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

    /// Uses per second that would find their page gone with this much memory.
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

    /// Memory left and uses per second lost, memory ascending.
    pub fn points(&self) -> &[(Bytes, f64)] {
        &self.points
    }
}

impl Estimate {
    /// Uses per second that would be lost if this much were taken from a VM that has just its working set.
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
        // 10 pages used once, 5 used 4 times, in 2 s: 10 pages cost 5 uses a second, all 15 cost 15.
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
            "this estimator reads samples, and prl gives frames: choose the estimator by the tracker"
        );
    }
}
