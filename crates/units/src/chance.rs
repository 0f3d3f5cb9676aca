//! Randomness as an argument: one seeded generator, divided into named streams.
//!
//! Every consumer gets its own stream, split off by a label. A policy's actions change how many numbers the scheduler draws, but
//! they cannot change the workloads' draws: runs under several policies with one seed face the same arrivals, phases and
//! imbalances. `exp`, `log` and `cos` come from a software maths crate, so the same seed produces the same bits on any machine.

use rand_core::{Rng, SeedableRng};
use rand_pcg::Pcg64Mcg;

/// A stream of random numbers.
#[derive(Clone, Debug)]
pub struct Chance(Pcg64Mcg);

impl Chance {
    /// Returns the stream that a seed starts.
    pub fn new(seed: u64) -> Chance {
        Chance(Pcg64Mcg::seed_from_u64(seed))
    }

    /// Returns the stream for one purpose, from a seed; `index` distinguishes several users of that purpose.
    pub fn labelled(seed: u64, label: &str, index: usize) -> Chance {
        // FNV-1a. Any fixed hash of the label will do, since the generator mixes its seed well.
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for byte in label
            .bytes()
            .chain((index as u64).to_le_bytes())
            .chain(seed.to_le_bytes())
        {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        Chance::new(hash)
    }

    /// Returns a number drawn uniformly from all 64-bit numbers.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number drawn uniformly from [0, 1).
    #[inline]
    pub fn unit(&mut self) -> f64 {
        unit(self.bits())
    }

    /// Returns a number drawn uniformly from [0, limit); `limit` must not be 0. Its bias of one part in 2^64 / limit is
    /// negligible.
    #[inline]
    pub fn below(&mut self, limit: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(limit)) >> 64) as u64
    }

    /// Returns an exponentially distributed number with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * libm::log(1.0 - self.unit())
    }

    /// Returns a normally distributed number with mean 0 and standard deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * libm::log(1.0 - self.unit())).sqrt();
        radius * libm::cos(std::f64::consts::TAU * self.unit())
    }

    /// Returns a Poisson-distributed number of events with this mean. Exact up to a mean of 48 (products of uniform numbers,
    /// Knuth); a normal approximation beyond that.
    pub fn poisson(&mut self, mean: f64) -> u64 {
        if mean > 48.0 {
            return libm::round(mean + mean.sqrt() * self.normal()).max(0.0) as u64;
        }
        let (limit, mut product, mut count) = (libm::exp(-mean), self.unit(), 0);
        while product > limit {
            product *= self.unit();
            count += 1;
        }
        count
    }

    /// Shuffles a list (Fisher and Yates).
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.below(last as u64 + 1) as usize);
        }
    }

    /// Draws `draws` of `total` items without replacement, and returns how many of the `marked` ones were drawn (hypergeometric).
    /// Exact if the number of draws or of marked items is at most 48. Otherwise a normal approximation with the exact mean and
    /// variance, rounded and clamped to the possible range.
    pub fn hypergeometric(&mut self, total: u64, marked: u64, draws: u64) -> u64 {
        debug_assert!(marked <= total && draws <= total);
        let (least, most) = ((draws + marked).saturating_sub(total), draws.min(marked));
        if least == most {
            return least;
        }
        // The distribution is symmetric in `draws` and `marked`, so loop over the smaller of the two.
        let (few, many) = (draws.min(marked), draws.max(marked));
        if few <= 48 {
            return self.urn(total, many, few);
        }
        let (n, k, whole) = (few as f64, many as f64, total as f64);
        let mean = n * k / whole;
        let variance = mean * (1.0 - k / whole) * ((whole - n) / (whole - 1.0));
        let drawn = libm::round(mean + variance.sqrt() * self.normal());
        (drawn.max(0.0) as u64).clamp(least, most)
    }

    fn urn(&mut self, mut total: u64, mut marked: u64, draws: u64) -> u64 {
        let before = marked;
        for _ in 0..draws {
            if self.below(total) < marked {
                marked -= 1;
            }
            total -= 1;
        }
        before - marked
    }
}

/// A pseudo-random sequence (SplitMix64; Steele, Lea, Flood, OOPSLA 2014) whose whole state is one number.
#[derive(Clone, Debug)]
pub struct SplitMix(pub u64);

impl SplitMix {
    /// Returns the next number, uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        unit(self.bits())
    }

    /// Returns the next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let bits = mix(self.0);
        self.0 = self.0.wrapping_add(GOLDEN);
        bits
    }
}

/// 2^64 divided by the golden ratio: the increment of SplitMix64's state.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Spreads numbers that differ little over all 64 bits (one step of SplitMix64).
#[inline]
pub fn mix(number: u64) -> u64 {
    finalize(number.wrapping_add(GOLDEN))
}

/// The finalizer of SplitMix64: like [`mix`], except that 0 stays 0.
#[inline]
pub fn finalize(number: u64) -> u64 {
    let z = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// The upper 53 bits as a fraction.
#[inline]
fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_draw_is_possible(total in 1u64..1_000_000, a in 0.0..1.0f64, b in 0.0..1.0f64, seed: u64) {
            let (marked, draws) = ((total as f64 * a) as u64, (total as f64 * b) as u64);
            let drawn = Chance::new(seed).hypergeometric(total, marked, draws);
            prop_assert!(drawn <= marked && drawn <= draws && draws - drawn <= total - marked);
        }
    }

    #[test]
    fn the_mean_and_the_variance_of_poisson_counts_are_what_is_expected() {
        for expected in [0.0, 0.3, 12.0, 300.0] {
            let mut chance = Chance::new(1);
            let counts: Vec<f64> = (0..20_000).map(|_| chance.poisson(expected) as f64).collect();
            let mean = counts.iter().sum::<f64>() / counts.len() as f64;
            let variance = counts
                .iter()
                .map(|count| (count - mean) * (count - mean))
                .sum::<f64>()
                / counts.len() as f64;
            // The tolerance is four standard deviations of the mean of 20 000 draws; the variance needs a wider one.
            assert!(
                (mean - expected).abs() <= 4.0 * (expected / 2e4).sqrt(),
                "{mean}, {expected} expected"
            );
            assert!(
                (variance - expected).abs() <= 0.06 * expected,
                "{variance}, {expected} expected"
            );
        }
    }

    #[test]
    fn the_mean_of_draws_is_the_hypergeometric_mean() {
        // Mean = draws * marked / total: 40 * 300 / 1000 = 12 (urn) and 400 * 300 / 1000 = 120 (normal).
        for (draws, mean) in [(40, 12.0), (400, 120.0)] {
            let mut chance = Chance::new(1);
            let sum: u64 = (0..4000).map(|_| chance.hypergeometric(1000, 300, draws)).sum();
            let got = sum as f64 / 4000.0;
            assert!(
                (got - mean).abs() < 0.02 * mean,
                "{got} where {mean} was expected"
            );
        }
    }

    #[test]
    fn streams_of_one_seed_differ_and_repeat() {
        let draw = |label, index| Chance::labelled(7, label, index).below(1 << 60);
        assert_eq!(draw("daemons", 0), draw("daemons", 0));
        assert_ne!(draw("daemons", 0), draw("daemons", 1));
        assert_ne!(draw("daemons", 0), draw("guest", 0));
    }

    #[test]
    fn splitmix_draws_its_published_sequence() {
        // The first numbers of the reference implementation with state 1234567.
        let mut state = 1_234_567_u64;
        for expected in [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
        ] {
            assert_eq!(mix(state), expected);
            state = state.wrapping_add(GOLDEN);
        }
        let mut draws = SplitMix(1_234_567);
        assert_eq!(draws.unit(), unit(6_457_827_717_110_365_317));
        assert_eq!(draws.unit(), unit(3_203_168_211_198_807_973));
    }
}
