//! Mean of a sample and its 95 percent confidence interval, from Student's t.

use super::{mean, stddev};

/// Two-sided 95 percent points of Student's t for 1 to 30 degrees of freedom, from the NIST/SEMATECH e-Handbook of Statistical
/// Methods, section 1.3.6.7.2. A table gives identical bits on every machine; a library might not.
const T95: [f64; 30] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
];
/// Points for more degrees of freedom. Between them, interpolate over the reciprocal of the degrees.
const T95_BEYOND: [(f64, f64); 5] = [
    (30.0, 2.042),
    (40.0, 2.021),
    (60.0, 2.000),
    (120.0, 1.980),
    (f64::INFINITY, 1.960),
];

/// Returns the two-sided 95 percent point for a number of degrees of freedom, within 0.001; `None` for zero.
fn t95(degrees: usize) -> Option<f64> {
    let at = degrees.checked_sub(1)?;
    if let Some(listed) = T95.get(at) {
        return Some(*listed);
    }
    let (own, mut below) = (1.0 / degrees as f64, T95_BEYOND[0]);
    for above in T95_BEYOND {
        let (low, high) = (1.0 / above.0, 1.0 / below.0);
        if own >= low && high > low {
            return Some(above.1 + (below.1 - above.1) * (own - low) / (high - low));
        }
        below = above;
    }
    None
}

/// Statistics of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Number of values.
    pub count: usize,
    /// Arithmetic mean; `None` for no values.
    pub mean: Option<f64>,
    /// Standard deviation of a sample (n - 1); `None` for fewer than two values.
    pub stddev: Option<f64>,
    /// Half of the confidence interval's width; `None` for fewer than two values.
    pub half: Option<f64>,
}

impl Estimate {
    /// Estimates the statistics. The order of the values matters, because sums of floating-point numbers depend on it.
    pub fn of(values: &[f64]) -> Estimate {
        let count = values.len();
        let stddev = stddev(values);
        let half = stddev
            .zip(t95(count.saturating_sub(1)))
            .map(|(stddev, t)| t * stddev / (count as f64).sqrt());
        Estimate {
            count,
            mean: mean(values.iter().copied()),
            stddev,
            half,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the probability that a value lies within ±`t`. Integrates by Simpson's rule over the angle whose tangent is t
    /// divided by the root of `degrees`, which turns the density into a power of a cosine.
    fn within(t: f64, degrees: usize) -> f64 {
        let power = degrees as f64 - 1.0;
        let area = |to: f64| {
            let (steps, f) = (20_000, |angle: f64| libm::pow(libm::cos(angle).max(0.0), power));
            let width = to / f64::from(steps);
            let inner: f64 = (1..steps)
                .map(|step| f(f64::from(step) * width) * if step % 2 == 1 { 4.0 } else { 2.0 })
                .sum();
            width / 3.0 * (f(0.0) + inner + f(to))
        };
        area(libm::atan(t / (degrees as f64).sqrt())) / area(std::f64::consts::FRAC_PI_2)
    }

    #[test]
    fn the_tables_points_have_95_percent_within() {
        for degrees in (1..=130).chain([200, 500, 1000, 10_000]) {
            let inside = within(t95(degrees).unwrap(), degrees);
            assert!((inside - 0.95).abs() < 2e-4, "{degrees}: {inside}");
        }
        assert_eq!(t95(0), None);
    }

    #[test]
    fn an_interval_by_hand() {
        // Mean 4, squares 8 over 2, t of two degrees 4.303: 4.303 * 2 / sqrt(3).
        let of = Estimate::of(&[2.0, 4.0, 6.0]);
        assert_eq!((of.count, of.mean, of.stddev), (3, Some(4.0), Some(2.0)));
        assert!((of.half.unwrap() - 4.968_676).abs() < 1e-5, "{of:?}");
        assert_eq!(Estimate::of(&[1.0]).half, None);
        assert_eq!(Estimate::of(&[]), Estimate::default());
    }
}
