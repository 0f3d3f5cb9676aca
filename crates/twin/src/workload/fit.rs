//! Fits measured or computed miss ratios to the family of curves that profiles state.

use homenode_units::Bytes;
use homenode_units::stats::mean;

use super::MissRatioCurve;

/// The curve of the family that is nearest to given miss ratios, and its distance from them.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct FittedCurve {
    /// The nearest curve.
    pub curve: MissRatioCurve,
    /// Mean difference in miss ratio.
    pub error_mean: f64,
    /// Largest difference in miss ratio.
    pub error_max: f64,
}

impl FittedCurve {
    /// Fits points of (capacity in bytes, miss ratio) by least squares. For given `c0` and `k` the best `m_inf` has a closed
    /// form. `c0` and `k` are searched on a coarse grid around a first guess of `c0` (up to 16 times larger and smaller), then on
    /// finer grids around the best point.
    pub fn of(points: &[(f64, f64)], c0_guess: f64) -> FittedCurve {
        let (mut best, mut width) = ((c0_guess, 1.0), (4.0, 4.0));
        for _ in 0..10 {
            let (c0, k) = best;
            let steps = (-4..=4).map(|step| f64::from(step) / 4.0);
            let tries = steps.clone().flat_map(|a| {
                let c0 = c0 * libm::pow(width.0, a);
                let at = move |b| (c0, (k * libm::pow(width.1, b)).clamp(0.2, 20.0));
                steps.clone().map(at)
            });
            best = tries
                .map(|(c0, k)| (squares(points, &curve(points, c0, k)), (c0, k)))
                .min_by(|x, y| x.0.total_cmp(&y.0))
                .map_or(best, |(_, found)| found);
            width = (libm::pow(width.0, 0.7), libm::pow(width.1, 0.7));
        }
        let curve = curve(points, best.0, best.1);
        let distance = |(bytes, wanted): &(f64, f64)| (curve.at(*bytes) - wanted).abs();
        let error_mean = mean(points.iter().map(distance)).unwrap_or(0.0);
        let error_max = points.iter().map(distance).fold(0.0, f64::max);
        FittedCurve {
            curve,
            error_mean,
            error_max,
        }
    }
}

/// Returns the curve with this `c0` and `k` and the best `m_inf`.
fn curve(points: &[(f64, f64)], c0: f64, k: f64) -> MissRatioCurve {
    let mut curve = MissRatioCurve::family(0.0, Bytes(c0.max(1.0) as u64), k);
    // m = m_inf (1 - e) + e is linear in m_inf.
    let (mut above, mut below) = (0.0, 0.0);
    for (bytes, wanted) in points {
        let e = curve.at(*bytes);
        above += (1.0 - e) * (wanted - e);
        below += (1.0 - e) * (1.0 - e);
    }
    if below > 0.0 {
        curve.m_inf = (above / below).clamp(0.0, 1.0);
    }
    curve
}

fn squares(points: &[(f64, f64)], curve: &MissRatioCurve) -> f64 {
    let square = |(bytes, wanted): &(f64, f64)| {
        let distance = curve.at(*bytes) - wanted;
        distance * distance
    };
    points.iter().map(square).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn curves_of_the_family_are_found_again() {
        for (m_inf, c0, k) in [
            (0.08, 300_000, 1.7),
            (0.999, 500_000, 1.0),
            (0.0, 4_000_000, 0.4),
            (0.5, 2_000_000, 8.0),
        ] {
            let c0 = Bytes(c0);
            let wanted = MissRatioCurve::family(m_inf, c0, k);
            let points: Vec<(f64, f64)> = (0..60)
                .map(|at| libm::pow(2.0, 16.0 + f64::from(at) / 6.0))
                .map(|bytes| (bytes, wanted.at(bytes)))
                .collect();
            let fitted = FittedCurve::of(&points, 1e6);
            assert!(fitted.error_max < 0.01, "{wanted:?}: {fitted:?}");
        }
    }
}
