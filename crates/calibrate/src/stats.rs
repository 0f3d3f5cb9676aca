//! Median and spread of repeated measurements.

use homenode_units::stats::quantile;
use serde::Serialize;

/// A figure is noisy if its quartile range over its median exceeds this.
pub(crate) const NOISY: f64 = 0.2;

/// Result of a repeated measurement, in the unit that the field's name says.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Number of repetitions.
    pub count: usize,
    /// Minimum.
    pub min: f64,
    /// First quartile.
    pub q1: f64,
    /// Median: the figure that is used.
    pub median: f64,
    /// Third quartile.
    pub q3: f64,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    /// Computes the spread of the finite values; `None` if there are none. Quantiles are interpolated between values.
    pub fn of(values: &[f64]) -> Option<Spread> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|value| value.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        Some(Spread {
            count: sorted.len(),
            min: quantile(&sorted, 0.0)?,
            q1: quantile(&sorted, 0.25)?,
            median: quantile(&sorted, 0.5)?,
            q3: quantile(&sorted, 0.75)?,
            max: quantile(&sorted, 1.0)?,
        })
    }

    /// Applies an increasing function to every value.
    #[must_use]
    pub fn map(&self, rising: impl Fn(f64) -> f64) -> Spread {
        Spread {
            count: self.count,
            min: rising(self.min),
            q1: rising(self.q1),
            median: rising(self.median),
            q3: rising(self.q3),
            max: rising(self.max),
        }
    }

    /// Returns the quartile range over the median.
    pub fn relative(&self) -> f64 {
        if self.median == 0.0 {
            return 0.0;
        }
        (self.q3 - self.q1) / self.median.abs()
    }

    /// Returns true if the spread, relative to the median, exceeds `NOISY`.
    pub fn noisy(&self) -> bool {
        self.relative() > NOISY
    }

    /// Formats the spread like `median of 9, 92.1 to 101.3 ns`.
    pub fn in_words(&self, unit: &str) -> String {
        let digits = usize::from(self.median.abs() < 100.0) + usize::from(self.median.abs() < 1.0);
        let Spread { count, min, max, .. } = self;
        format!("median of {count}, {min:.digits$} to {max:.digits$} {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn quartiles_of_five_are_the_second_and_the_fourth() {
        let spread = Spread::of(&[5.0, 1.0, 4.0, 2.0, 3.0]).unwrap();
        let all = (spread.min, spread.q1, spread.median, spread.q3, spread.max);
        assert_eq!((spread.count, all), (5, (1.0, 2.0, 3.0, 4.0, 5.0)));
        assert!((spread.relative() - 2.0 / 3.0).abs() < 1e-12 && spread.noisy());
    }

    #[test]
    fn between_two_values_quantiles_are_interpolated() {
        let spread = Spread::of(&[1.0, 2.0]).unwrap();
        assert_eq!((spread.q1, spread.median, spread.q3), (1.25, 1.5, 1.75));
    }

    #[test]
    fn nothing_has_no_median_and_what_is_not_finite_does_not_count() {
        assert_eq!(Spread::of(&[]), None);
        assert_eq!(Spread::of(&[f64::NAN, f64::INFINITY]), None);
        assert_eq!(Spread::of(&[f64::NAN, 2.0]).unwrap().count, 1);
    }

    proptest! {
        #[test]
        fn quantiles_are_in_order_whatever_the_order_of_values(mut values in prop::collection::vec(0.0..1e9f64, 1..40)) {
            let spread = Spread::of(&values).unwrap();
            prop_assert!(spread.min <= spread.q1 && spread.q1 <= spread.median);
            prop_assert!(spread.median <= spread.q3 && spread.q3 <= spread.max);
            values.reverse();
            prop_assert_eq!(Spread::of(&values).unwrap(), spread);
        }
    }
}
