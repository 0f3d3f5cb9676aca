//! Arithmetic that several crates share.

/// Divides `total` in proportion to `weights`, into whole parts that add up to `total` exactly. The remainder goes to the parts
/// with the largest fractions, the first of equals. All parts are zero if all weights are.
pub fn divide_proportionally(total: u64, weights: &[u64]) -> Vec<u64> {
    let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
    if sum == 0 {
        return vec![0; weights.len()];
    }
    let exact = |w: u64| u128::from(total) * u128::from(w);
    let mut parts: Vec<u64> = weights.iter().map(|w| (exact(*w) / sum) as u64).collect();
    let rest = total - parts.iter().sum::<u64>();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(exact(weights[i]) % sum));
    for &i in order.iter().take(rest as usize) {
        parts[i] += 1;
    }
    parts
}

/// Exponentially weighted moving average, which starts at its first value.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Ewma(Option<f64>);

/// Weight of a new value in a moving average, in (0, 1].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weight(pub f64);

impl Ewma {
    /// Adds a value with this weight, which may differ from call to call, and returns the new average.
    pub fn update(&mut self, value: f64, Weight(weight): Weight) -> f64 {
        debug_assert!(
            weight > 0.0 && weight <= 1.0,
            "an EWMA weight must be in (0, 1], not {weight}"
        );
        let next = self.0.map_or(value, |old| old + weight * (value - old));
        self.0 = Some(next);
        next
    }

    /// Returns the average; `None` if no value was added.
    pub fn value(&self) -> Option<f64> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_add_up_and_are_within_one_of_exact(
            total in 0u64..1 << 50,
            weights in prop::collection::vec(0u64..1 << 40, 1..12),
        ) {
            let parts = divide_proportionally(total, &weights);
            let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
            if sum == 0 {
                prop_assert!(parts.iter().all(|p| *p == 0));
                return Ok(());
            }
            prop_assert_eq!(parts.iter().sum::<u64>(), total);
            for (part, weight) in parts.iter().zip(&weights) {
                // The difference between part·sum and total·weight is at most one `sum`.
                let (scaled, exact) = (u128::from(*part) * sum, u128::from(total) * u128::from(*weight));
                prop_assert!(scaled <= exact + sum && exact < scaled + sum);
            }
        }
    }

    #[test]
    fn an_average_starts_at_its_first_value() {
        let mut average = Ewma::default();
        assert_eq!(average.value(), None);
        assert_eq!(average.update(8.0, Weight(0.25)), 8.0);
        assert_eq!(average.update(4.0, Weight(0.25)), 7.0);
        assert_eq!(average.update(3.0, Weight(0.5)), 5.0);
    }
}
