//! Compares a sample of one line in a hundred with exact stack distances, on streams of over a million lines, which give ten
//! thousand sampled ones.

use homenode_tracking::mrc::{Mattson, Shards};
use homenode_tracking::stream::{Pattern, Stream};
use proptest::prelude::*;

/// Number of capacities at which curves are compared.
const POINTS: u32 = 100;
const LINES_MAX: usize = 1 << 21;

/// Returns the mean distance between the two curves, at capacities spread evenly from zero to all lines of the stream.
fn distance(pattern: &Pattern, lines: usize, seed: u64) -> f64 {
    let mut stream = Stream::new(pattern, 0, seed);
    let (mut exact, mut sampled) = (Mattson::new(LINES_MAX), Shards::with_rate(0.01, LINES_MAX));
    for _ in 0..2 * lines {
        let line = stream.next_line();
        exact.access(line);
        sampled.access(line);
    }
    let (exact, sampled) = (exact.curve(), sampled.curve());
    let at = |point: u32| {
        let capacity = lines as f64 * f64::from(point) / f64::from(POINTS);
        (exact.at(capacity) - sampled.at(capacity)).abs()
    };
    (1..=POINTS).map(at).sum::<f64>() / f64::from(POINTS)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    #[test]
    fn one_line_in_a_hundred_tells_the_curve_within_two_points(
        lines in 1_000_000u32..1_300_000,
        kind in 0usize..4,
        exponent in 0.3f64..0.9,
        seed in any::<u64>(),
    ) {
        let zipf = Pattern::Zipf { lines, exponent };
        let uniform = |lines: u32| Pattern::Uniform { lines: lines.into() };
        let pattern = match kind {
            0 => uniform(lines),
            1 => zipf,
            2 => Pattern::Mix(vec![(0.5, uniform(lines / 4)), (0.5, zipf)]),
            _ => Pattern::Mix(vec![(0.3, Pattern::Sequential), (0.7, uniform(lines))]),
        };
        let distance = distance(&pattern, lines as usize, seed);
        prop_assert!(distance < 0.02, "{pattern:?}: {distance}");
    }
}
