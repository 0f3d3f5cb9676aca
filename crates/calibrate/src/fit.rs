//! Fits latency under load, effective cache capacity, and the number of TLB entries.
//!
//! # Model
//!
//! - Latency under load is `g(u) = 1 + alpha u + beta u^1.5 / (1 - u)` with `u = min(load / (1.02 capacity), 0.985)`. Curve and
//!   `u` are the simulator's, so that the fit matches the simulator's computation.
//! - A chase visits `w` bytes in the order in which they were written, the oldest line first. In a cache of `c` bytes with
//!   random replacement, the last `w - c` bytes that were written have evicted other lines, so a line is still cached with
//!   probability `exp(-(w - c) / c)`. Hence `L(w) = L_memory - (L_memory - L_cache) * min(1, exp(-(w - c) / c))`. With LRU
//!   replacement there is a cliff at `c` instead, which the fit finds, too.
//!
//! Both are least-squares fits. The first has a closed form; the second has one unknown.

use homenode_machine::LoadCurve;
use homenode_units::stats::mean;

/// The queueing term is fitted only if loads reach this share of the sustained bandwidth.
pub(crate) const LOAD_NEEDED: f64 = 0.75;

/// Loads below this share of the sustained bandwidth carry no information about the curve.
pub(crate) const LOAD_LEAST: f64 = 0.2;

/// Default for the queueing term, used if the measured loads were too low to fit it. The fits of a measured DDR3 and a
/// measured DDR4 system agree on it.
pub(crate) const BETA_ESTIMATE: f64 = 0.015;

fn u_of(load_over_capacity: f64) -> f64 {
    (load_over_capacity / 1.02).clamp(0.0, 0.985)
}

/// Returns the terms of the curve by which alpha and beta are multiplied.
fn terms(load_over_capacity: f64) -> (f64, f64) {
    let u = u_of(load_over_capacity);
    (u, u * u.sqrt() / (1.0 - u))
}

/// A fitted curve and its quality.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct FittedCurve {
    /// The curve.
    pub curve: LoadCurve,
    /// Whether beta was fitted; if not, loads stayed below `LOAD_NEEDED` and beta is `BETA_ESTIMATE`.
    pub beta_fitted: bool,
    /// Highest load, as a share of the sustained bandwidth.
    pub load_max: f64,
    /// Mean absolute error of the fitted latencies, each relative to the measured one.
    pub error_mean: f64,
}

/// Fits the curve to points of (load over capacity, latency over idle latency). `None` if no point has a load.
///
/// Neither alpha nor beta is below 0: if the best fit has a negative one, only the other is fitted.
pub(crate) fn load_curve(points: &[(f64, f64)]) -> Option<FittedCurve> {
    let loaded: Vec<(f64, f64)> = points
        .iter()
        .copied()
        .filter(|(u, y)| *u > 0.0 && y.is_finite())
        .collect();
    let load_max = loaded.iter().map(|(u, _)| *u).reduce(f64::max)?;
    let beta_fitted = load_max >= LOAD_NEEDED;
    let (mut aa, mut ab, mut bb, mut ay, mut by) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (u, y) in &loaded {
        let ((a, b), y) = (terms(*u), y - 1.0);
        aa += a * a;
        ab += a * b;
        bb += b * b;
        ay += a * y;
        by += b * y;
    }
    let (alpha, beta) = if beta_fitted {
        let determinant = aa * bb - ab * ab;
        let both = (
            (ay * bb - by * ab) / determinant,
            (by * aa - ay * ab) / determinant,
        );
        match both {
            (alpha, beta) if alpha >= 0.0 && beta >= 0.0 => (alpha, beta),
            // The unconstrained optimum lies outside: the constrained one is on a border. A determinant of 0 (all points at
            // one load) also ends up here.
            (alpha, _) if alpha < 0.0 => (0.0, (by / bb).max(0.0)),
            _ => ((ay / aa).max(0.0), 0.0),
        }
    } else {
        (((ay - BETA_ESTIMATE * ab) / aa).max(0.0), BETA_ESTIMATE)
    };
    let error = |(u, y): &(f64, f64)| {
        let (a, b) = terms(*u);
        (1.0 + alpha * a + beta * b - y).abs() / y
    };
    let error_mean = mean(loaded.iter().map(error))?;
    Some(FittedCurve {
        curve: LoadCurve { alpha, beta },
        beta_fitted,
        load_max,
        error_mean,
    })
}

/// Returns the probability that the oldest of `bytes` is still in a cache of `capacity`.
fn survival(bytes: f64, capacity: f64) -> f64 {
    (-(bytes / capacity - 1.0)).exp().min(1.0)
}

/// Returns the capacity in bytes at which the model above best fits points of (bytes, nanoseconds). `None` if memory is not
/// slower than the cache, or if no point is clearly larger than the result; then the cache is at least that large.
pub(crate) fn capacity(points: &[(f64, f64)], cache_ns: f64, memory_ns: f64) -> Option<f64> {
    let largest = points.iter().map(|(bytes, _)| *bytes).reduce(f64::max)?;
    let least = points.iter().map(|(bytes, _)| *bytes).reduce(f64::min)?;
    let slower = memory_ns > cache_ns * 1.05;
    if !slower {
        return None;
    }
    let error = |capacity: f64| -> f64 {
        let of = |(bytes, ns): &(f64, f64)| {
            let expected = memory_ns - (memory_ns - cache_ns) * survival(*bytes, capacity);
            (expected - ns) * (expected - ns)
        };
        points.iter().map(of).sum()
    };
    // A hundred steps per octave: finer than any measured curve.
    let steps = (100.0 * (largest / least).log2()) as u32;
    let at = |step: u32| least * (f64::from(step) / 100.0).exp2();
    let best = (0..=steps)
        .map(at)
        .min_by(|a, b| error(*a).total_cmp(&error(*b)))?;
    (best < largest * 0.95).then_some(best)
}

/// Returns the number of entries of a TLB. A point is a number of pages, and the extra cycles per access if each line is in a
/// page of its own instead of next to the others. The result is where the extra cost first exceeds half of its maximum,
/// interpolated on a log scale. `None` if the cost never exceeds `walk_cycles_min`, because then there were no misses, or if the
/// first point already exceeds half.
pub(crate) fn tlb_entries(points: &[(f64, f64)], walk_cycles_min: f64) -> Option<f64> {
    let most = points.iter().map(|(_, extra)| *extra).reduce(f64::max)?;
    let half = most / 2.0;
    let past = points.iter().position(|(_, extra)| *extra > half)?;
    if most < walk_cycles_min || past == 0 {
        return None;
    }
    let ((below, low), (above, high)) = (points[past - 1], points[past]);
    let way = (half - low) / (high - low);
    Some(below * (above / below).powf(way))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn synthetic(alpha: f64, beta: f64, loads: &[f64]) -> Vec<(f64, f64)> {
        let point = |load: &f64| {
            let (a, b) = terms(*load);
            (*load, 1.0 + alpha * a + beta * b)
        };
        loads.iter().map(point).collect()
    }

    #[test]
    fn a_load_that_did_not_go_far_leaves_beta_an_estimate() {
        let fitted = load_curve(&synthetic(0.4, BETA_ESTIMATE, &[0.0, 0.2, 0.5])).unwrap();
        assert!(!fitted.beta_fitted && fitted.curve.beta == BETA_ESTIMATE);
        assert!((fitted.curve.alpha - 0.4).abs() < 1e-9, "{fitted:?}");
    }

    #[test]
    fn latency_that_falls_with_load_gives_a_flat_curve_and_no_negative_part() {
        let fitted = load_curve(&[(0.1, 1.0), (0.5, 0.9), (0.9, 0.8)]).unwrap();
        assert_eq!((fitted.curve.alpha, fitted.curve.beta), (0.0, 0.0));
        assert_eq!(load_curve(&[(0.0, 1.0)]), None);
    }

    #[test]
    fn a_tlb_ends_where_pages_begin_to_cost() {
        // 7 cycles to the second level from 128 pages on, 40 more beyond 1536 pages.
        let cost = |pages: f64| 7.0 * f64::from(pages > 128.0) + 40.0 * f64::from(pages > 1536.0);
        let points: Vec<(f64, f64)> = (12..40)
            .map(|i| f64::from(i) / 3.0)
            .map(f64::exp2)
            .map(|p| (p, cost(p)))
            .collect();
        let entries = tlb_entries(&points, 10.0).unwrap();
        assert!((1290.0..1630.0).contains(&entries), "{entries}");
        assert_eq!(tlb_entries(&points[..15], 10.0), None, "no walk was seen");
    }

    proptest! {
        #[test]
        fn known_alpha_and_beta_are_recovered(alpha in 0.0..3.0f64, beta in 0.0..0.5f64) {
            let points = synthetic(alpha, beta, &[0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.95]);
            let fitted = load_curve(&points).unwrap();
            prop_assert!(fitted.beta_fitted && fitted.error_mean < 1e-6);
            prop_assert!((fitted.curve.alpha - alpha).abs() < 1e-6, "{fitted:?}");
            prop_assert!((fitted.curve.beta - beta).abs() < 1e-6, "{fitted:?}");
        }

        #[test]
        fn a_little_noise_changes_the_fitted_latencies_little(
            alpha in 0.1..2.0f64, beta in 0.0..0.3f64, noise in prop::collection::vec(-0.03..0.03f64, 7..8),
        ) {
            let exact = synthetic(alpha, beta, &[0.05, 0.2, 0.4, 0.6, 0.75, 0.85, 0.95]);
            let noisy: Vec<(f64, f64)> = exact.iter().zip(&noise).map(|((u, y), e)| (*u, y * (1.0 + e))).collect();
            let fitted = load_curve(&noisy).unwrap();
            prop_assert!(fitted.curve.alpha >= 0.0 && fitted.curve.beta >= 0.0);
            prop_assert!(fitted.error_mean < 0.06, "{fitted:?}");
        }

        #[test]
        fn a_cliff_is_found_where_it_is(capacity_mib in 4.0..200.0f64) {
            let ns = |mib: f64| if mib <= capacity_mib { 20.0 } else { 100.0 };
            let points: Vec<(f64, f64)> = (0..24).map(|i| 2.0 * (f64::from(i) / 2.0).exp2()).map(|mib| (mib, ns(mib))).collect();
            let found = capacity(&points, 20.0, 100.0).unwrap();
            prop_assert!((0.35..1.45).contains(&(found / capacity_mib)), "{found} for {capacity_mib}");
        }

        #[test]
        fn a_known_capacity_is_recovered(capacity_mib in 4.0..200.0f64) {
            let ns = |mib: f64| 100.0 - 80.0 * survival(mib, capacity_mib);
            let points: Vec<(f64, f64)> = (0..24).map(|i| 2.0 * (f64::from(i) / 2.0).exp2()).map(|mib| (mib, ns(mib))).collect();
            let found = capacity(&points, 20.0, 100.0).unwrap();
            prop_assert!((found / capacity_mib - 1.0).abs() < 0.02, "{found} for {capacity_mib}");
        }
    }
}
