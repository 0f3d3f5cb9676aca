//! Statistics: means, quantiles, spreads, confidence intervals and rank orders, for all figures of the laboratory.

mod student;

pub use student::Estimate;

/// Returns the arithmetic mean; `None` for no values.
pub fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let add = |(sum, count), value| (sum + value, count + 1);
    let (sum, count) = values.into_iter().fold((0.0, 0_u32), add);
    (count > 0).then(|| sum / f64::from(count))
}

/// Returns the median: the middle value, or the mean of the middle two. `None` for no values, or if the result is not finite.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let upper = *values.get(values.len() / 2)?;
    let lower = values[(values.len() - 1) / 2];
    Some((lower + upper) / 2.0).filter(|middle| middle.is_finite())
}

/// Returns the quantile of ascending values for a share in [0, 1], interpolated between neighbours. `None` for no values.
pub fn quantile(ascending: &[f64], share: f64) -> Option<f64> {
    let at = share * ascending.len().checked_sub(1)? as f64;
    let (below, above) = (ascending[at.floor() as usize], ascending[at.ceil() as usize]);
    Some(below + (above - below) * at.fract())
}

/// Returns the standard deviation of a sample (n - 1); `None` for fewer than two values.
pub fn stddev(values: &[f64]) -> Option<f64> {
    let mean = mean(values.iter().copied()).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean) * (value - mean)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

/// Returns the relative standard deviation in percent, of a sample (n - 1); `None` for fewer than two values.
pub fn rsd_percent(values: &[f64]) -> Option<f64> {
    Some(100.0 * stddev(values)? / mean(values.iter().copied())?)
}

/// Returns Kendall's rank correlation of two series: the pairs ordered alike minus the pairs ordered oppositely, divided by all
/// pairs. A pair that is tied in either series counts as zero. `None` for fewer than two values.
pub fn kendall_tau(a: &[f64], b: &[f64]) -> Option<f64> {
    assert_eq!(a.len(), b.len(), "both series rank the same things");
    let pairs = (a.len() * a.len().saturating_sub(1)) / 2;
    let direction = |x: f64, y: f64| i64::from(x > y) - i64::from(x < y);
    let mut agreement = 0;
    for i in 0..a.len() {
        for j in 0..i {
            agreement += direction(a[i], a[j]) * direction(b[i], b[j]);
        }
    }
    (pairs > 0).then(|| agreement as f64 / pairs as f64)
}

/// Returns Kendall's tau of two rankings of the same names. `None` if the names differ, or for fewer than two names.
pub fn kendall_tau_of_orders<S: AsRef<str>>(a: &[S], b: &[S]) -> Option<f64> {
    let rank = |name: &S| {
        let at = b.iter().position(|other| other.as_ref() == name.as_ref());
        at.map(|at| at as f64)
    };
    let ranks: Option<Vec<f64>> = a.iter().map(rank).collect();
    let ranks = ranks.filter(|_| a.len() == b.len())?;
    let own: Vec<f64> = (0..a.len()).map(|at| at as f64).collect();
    kendall_tau(&own, &ranks)
}

/// Returns the regret of a ranking, greatest first: the mean, over all pairs, of the extra cost of taking the lower-ranked item;
/// zero for a pair in which it does not cost more. `None` if a cost is unknown, or for fewer than two items.
pub fn regret<S: AsRef<str>>(ranking: &[S], cost: impl Fn(&str) -> Option<f64>) -> Option<f64> {
    let costs: Vec<f64> = ranking
        .iter()
        .map(|name| cost(name.as_ref()))
        .collect::<Option<_>>()?;
    of_ranked(&costs)
}

/// Like [`regret`], for items ranked by the numbers in `by`, the greatest first. Ties keep the given order.
pub fn regret_of(by: &[f64], costs: &[f64]) -> Option<f64> {
    let mut both: Vec<(f64, f64)> = by.iter().copied().zip(costs.iter().copied()).collect();
    both.sort_by(|a, b| b.0.total_cmp(&a.0));
    of_ranked(&both.into_iter().map(|(_, cost)| cost).collect::<Vec<_>>())
}

fn of_ranked(costs: &[f64]) -> Option<f64> {
    let pairs = costs.iter().enumerate().flat_map(|(at, left)| {
        let taken = costs[at + 1..].iter();
        taken.map(move |taken| (taken - left).max(0.0))
    });
    mean(pairs)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn spreads_by_hand() {
        // The mean is 4, the deviations are 2, 0 and 2: their squares add up to 8, divided by 2.
        let values = [2.0, 4.0, 6.0];
        assert_eq!(rsd_percent(&values), Some(50.0));
        assert_eq!(rsd_percent(&[1.0]), None);
    }

    #[test]
    fn between_two_values_quantiles_are_interpolated() {
        assert_eq!(
            [0.0, 0.25, 0.5, 1.0].map(|share| quantile(&[1.0, 2.0], share)),
            [1.0, 1.25, 1.5, 2.0].map(Some)
        );
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn a_right_ranking_costs_nothing_and_a_wrong_one_what_was_taken_wrongly() {
        let cost = |name: &str| Some(f64::from(name.as_bytes()[0] - b'a'));
        assert_eq!(regret(&["d", "c", "a"], cost), Some(0.0));
        // Three pairs: taking d instead of a costs 3 more, d instead of c costs 1 more, a instead of c costs no more.
        assert_eq!(regret(&["c", "a", "d"], cost), Some((3.0 + 1.0) / 3.0));
        assert_eq!(regret(&["a"], cost), None);
        assert_eq!(regret(&["a", "b"], |_| None), None);
    }

    #[test]
    fn orders_of_different_things_have_no_tau() {
        assert_eq!(kendall_tau_of_orders(&["a", "b"], &["a", "c"]), None);
        assert_eq!(kendall_tau_of_orders(&["a", "b"], &["a", "b", "c"]), None);
        assert_eq!(kendall_tau_of_orders(&["a"], &["a"]), None);
    }

    proptest! {
        /// Without ties, tau is 1 minus twice the share of pairs that a bubble sort must swap.
        #[test]
        fn kendall_tau_counts_the_swaps_of_bubble_sort(mut order in Just((0..12_u32).collect::<Vec<_>>()).prop_shuffle()) {
            let a: Vec<f64> = (0..12).map(f64::from).collect();
            let b: Vec<f64> = order.iter().copied().map(f64::from).collect();
            let mut swaps = 0;
            for _ in 0..order.len() {
                for at in 1..order.len() {
                    if order[at - 1] > order[at] {
                        order.swap(at - 1, at);
                        swaps += 1;
                    }
                }
            }
            let tau = kendall_tau(&a, &b).unwrap();
            prop_assert!((tau - (1.0 - 2.0 * f64::from(swaps) / 66.0)).abs() < 1e-12);
        }

        #[test]
        fn kendall_tau_is_symmetric_and_bounded(pairs in prop::collection::vec((0..9_i32, 0..9_i32), 2..20)) {
            let (a, b): (Vec<f64>, Vec<f64>) = pairs.iter().map(|(a, b)| (f64::from(*a), f64::from(*b))).unzip();
            let tau = kendall_tau(&a, &b).unwrap();
            prop_assert!((-1.0..=1.0).contains(&tau));
            prop_assert_eq!(tau, kendall_tau(&b, &a).unwrap());
            let negated: Vec<f64> = b.iter().map(|value| -value).collect();
            prop_assert_eq!(tau, -kendall_tau(&a, &negated).unwrap());
        }
    }
}
