//! How long a program's pieces of work take from one rest to the next: the time that a server's clients wait for an answer.

use homenode_units::Ns;

/// Upper end of the first class. Shorter times are not distinguished.
const LEAST_NS: f64 = 1000.0;
/// Ratio of the upper ends of two consecutive classes, and so the precision of a quantile.
const STEP: f64 = 1.05;
/// Enough classes to reach from [`LEAST_NS`] to five minutes.
const CLASSES: usize = 400;

/// Numbers of requests by their duration.
#[derive(Clone, Debug)]
pub(crate) struct RequestTimes {
    /// Number of requests in each class. The first class ends at [`LEAST_NS`]; the last one holds all longer requests.
    classes: Box<[u32; CLASSES]>,
    sum_ns: f64,
}

impl Default for RequestTimes {
    fn default() -> RequestTimes {
        RequestTimes {
            classes: Box::new([0; CLASSES]),
            sum_ns: 0.0,
        }
    }
}

impl RequestTimes {
    /// Counts one request.
    pub(crate) fn note(&mut self, took: Ns) {
        let above = libm::log((took.as_f64() / LEAST_NS).max(1.0)) / libm::log(STEP);
        self.classes[(libm::ceil(above) as usize).min(CLASSES - 1)] += 1;
        self.sum_ns += took.as_f64();
    }

    /// Subtracts the counts of an earlier state.
    pub(crate) fn less(&mut self, earlier: &RequestTimes) {
        for (now, then) in self.classes.iter_mut().zip(&*earlier.classes) {
            *now -= then;
        }
        self.sum_ns -= earlier.sum_ns;
    }

    /// Returns the number of requests.
    pub(crate) fn count(&self) -> u64 {
        self.classes.iter().map(|count| u64::from(*count)).sum()
    }

    /// Returns the mean duration of the requests in nanoseconds, or `None` if there were none.
    pub(crate) fn mean_ns(&self) -> Option<f64> {
        let count = self.count();
        (count > 0).then(|| self.sum_ns / count as f64)
    }

    /// Returns the time, in nanoseconds, within which this share of the requests was done: up to 5 percent too long. Returns
    /// `None` if there were none.
    pub(crate) fn quantile_ns(&self, share: f64) -> Option<f64> {
        let wanted = (self.count() as f64 * share).max(1.0);
        let mut sum = 0.0;
        let is_reached = |count: &u32| {
            sum += f64::from(*count);
            sum >= wanted
        };
        let class = self.classes.iter().position(is_reached)?;
        Some(LEAST_NS * libm::pow(STEP, class as f64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_within_a_class_and_nothing_is_lost() {
        let mut times = RequestTimes::default();
        assert_eq!(
            (times.count(), times.mean_ns(), times.quantile_ns(0.5)),
            (0, None, None)
        );
        for ms in 1..=1000 {
            times.note(Ns::from_millis(ms));
        }
        times.note(Ns(1));
        let earlier = times.clone();
        for (share, exact_ms) in [(0.5, 500.0), (0.99, 990.0)] {
            let ms = times.quantile_ns(share).unwrap() / 1e6;
            assert!((0.999..1.051).contains(&(ms / exact_ms)), "{ms} {exact_ms}");
        }
        // A request that is longer than the last class, as from a server that stands still: it counts, and so does its duration.
        times.note(Ns::from_secs(3600));
        times.less(&earlier);
        assert_eq!(times.count(), 1);
        assert_eq!(times.mean_ns(), Some(3600e9));
        assert!(times.quantile_ns(0.5).unwrap() > 250e9);
    }
}
