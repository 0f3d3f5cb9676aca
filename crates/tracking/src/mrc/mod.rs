//! Miss-ratio curves: the share of a stream's accesses that misses in an LRU cache of any size, from one pass.
//!
//! # Terms
//!
//! - Stack distance of an access: the number of other lines used since this line's last use. An LRU cache of `c` lines hits if
//!   and only if the distance is below `c` (Mattson and others, IBM Systems Journal 9, 1970).
//! - [`Mattson`] is exact. [`Shards`] samples only lines whose hash is below a threshold, a share `R` of all lines, and
//!   multiplies distances by `1 / R` (Waldspurger and others, FAST 2015). `R` is fixed, or lowered to keep the number of tracked
//!   lines fixed.
//!
//! # Left out
//!
//! Write-backs; and policies other than LRU, whose curves are measured by running a cache of each size.

mod mattson;
mod shards;

pub use mattson::Mattson;
pub use shards::Shards;

/// Miss ratios at capacities that are multiples of a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Curve {
    /// Number of lines from one point to the next.
    pub step: f64,
    /// Miss ratios with no line, with `step` lines, with twice `step` lines, …
    pub ratios: Vec<f64>,
}

impl Curve {
    /// Returns the miss ratio with this many lines, interpolated between points and constant beyond the last.
    pub fn at(&self, lines: f64) -> f64 {
        let place = (lines / self.step).max(0.0);
        let last = self.ratios.len() - 1;
        let below = (place as usize).min(last);
        let above = (below + 1).min(last);
        let share = (place - below as f64).min(1.0);
        self.ratios[below] + (self.ratios[above] - self.ratios[below]) * share
    }

    /// Returns the curve that follows from the weights of accesses by stack distance. `total` is the weight of all accesses.
    fn of_distances(step: f64, by_step: &[f64], total: f64) -> Curve {
        let mut hits = 0.0;
        let mut ratios = vec![1.0];
        for weight in by_step {
            hits += weight;
            ratios.push(if total > 0.0 {
                (1.0 - hits / total).clamp(0.0, 1.0)
            } else {
                1.0
            });
        }
        Curve { step, ratios }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Pattern, Stream};
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn mattson_is_an_lru_list_of_every_size(uses in prop::collection::vec(0u64..60, 1..500)) {
            let (mut mattson, mut list, mut misses) = (Mattson::new(64), Vec::<u64>::new(), vec![0.0; 65]);
            for line in &uses {
                let depth = list.iter().position(|known| known == line);
                prop_assert_eq!(mattson.access(*line), depth);
                for (lines, misses) in misses.iter_mut().enumerate() {
                    *misses += if depth.is_some_and(|depth| depth < lines) { 0.0 } else { 1.0 };
                }
                list.retain(|known| known != line);
                list.insert(0, *line);
            }
            let curve = mattson.curve();
            for (lines, misses) in misses.iter().enumerate() {
                prop_assert!((curve.at(lines as f64) - misses / uses.len() as f64).abs() < 1e-9);
            }
        }
    }

    #[test]
    fn samples_tell_the_curve_within_two_points() {
        let parts = vec![
            (0.2, Pattern::Sequential),
            (0.4, Pattern::Uniform { lines: 20_000 }),
            (
                0.4,
                Pattern::Zipf {
                    lines: 100_000,
                    exponent: 0.8,
                },
            ),
        ];
        let mut stream = Stream::new(&Pattern::Mix(parts), 0, 1);
        let mut exact = Mattson::new(60_000);
        let mut sampled = [Shards::with_rate(0.1, 60_000), Shards::with_size(8_000, 60_000)];
        for _ in 0..600_000 {
            let line = stream.next_line();
            exact.access(line);
            sampled.iter_mut().for_each(|shards| shards.access(line));
        }
        assert!(sampled[1].rate() < 0.1);
        let exact = exact.curve();
        for shards in &sampled {
            let curve = shards.curve();
            let error = |at: usize| (curve.at(at as f64 * 600.0) - exact.at(at as f64 * 600.0)).abs();
            let mean = (1..=100).map(error).sum::<f64>() / 100.0;
            assert!(mean < 0.02, "mean error {mean} at rate {}", shards.rate());
        }
    }
}
