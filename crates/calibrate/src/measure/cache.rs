//! Measures latency by size, misses in flight, and TLB reach: everything that one CPU measures with chases.

use std::time::{Duration, Instant};

use crate::kernels::{self, Order, Places};
use crate::sys::{self, LINE_BYTES, LINE_WORDS};

/// Numbers of parallel chains tried to find the misses in flight.
const CHAINS: [usize; 11] = [1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32];

/// Returns the nanoseconds of CPU time per access of a chase, measured over about `window`; advances `at`.
///
/// CPU time is used because no access proceeds while other processes have the CPU. Their effect on the caches remains.
pub(crate) fn chase_ns<const K: usize>(words: &[u64], at: &mut [usize; K], window: Duration) -> f64 {
    // A batch takes some ten microseconds from L1, and a millisecond from memory.
    let batch = 8192 / K;
    let (begin, from, mut steps) = (Instant::now(), sys::cpu_time(), 0);
    loop {
        kernels::chase(words, at, batch);
        steps += batch * K;
        if begin.elapsed() >= window {
            return (sys::cpu_time() - from).as_secs_f64() * 1e9 / steps as f64;
        }
    }
}

/// Lays a chase over the first `bytes`, and measures its latency, starting from the line written longest ago. If the chase
/// is short compared with the window, one round warms the caches first.
pub(crate) fn latency_at(words: &mut [u64], bytes: usize, window: Duration) -> f64 {
    let count = (bytes / LINE_BYTES).clamp(1, words.len() / LINE_WORDS);
    let mut at = [kernels::lay_chase(words, count, Places::EachLine)];
    if count < 1 << 16 {
        kernels::chase(words, &mut at, count);
    }
    chase_ns(words, &mut at, window)
}

/// Returns the sizes of the latency curve in bytes, from 8 KiB on, with `per_octave` steps per octave.
pub(crate) fn curve_sizes(largest: usize, per_octave: u32) -> Vec<usize> {
    let at = |step: u32| {
        (8192.0 * (f64::from(step) / f64::from(per_octave)).exp2()) as usize / LINE_BYTES * LINE_BYTES
    };
    (0..).map(at).take_while(|bytes| *bytes <= largest).collect()
}

/// Returns the number of misses in flight that this core sustains: the highest throughput of several parallel chains over
/// that of one chain. The words must contain a chase through all of their lines.
pub(crate) fn misses_in_flight(words: &[u64], window: Duration) -> f64 {
    let count = words.len() / LINE_WORDS;
    let order = Order::of(count);
    // All chains start in the first half, because the lines written last may still be in the cache.
    let start = |chain: usize, chains: usize| order.nth(count / 2 * chain / chains) * LINE_WORDS;
    macro_rules! at_once {
        ($($k:literal),*) => {
            |chains: usize| match chains {
                $($k => chase_ns::<$k>(words, &mut std::array::from_fn(|chain| start(chain, $k)), window),)*
                _ => f64::NAN,
            }
        };
    }
    let ns = at_once!(1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 32);
    let one = ns(1);
    let best = CHAINS.iter().map(|chains| ns(*chains)).fold(one, f64::min);
    one / best
}

/// Returns the numbers of pages at which a TLB is tried: four per octave.
pub(crate) fn tlb_pages(most: usize) -> Vec<usize> {
    let at = |step: u32| (16.0 * (f64::from(step) / 4.0).exp2()) as usize;
    (0..).map(at).take_while(|pages| *pages <= most).collect()
}

/// Returns, for each number of pages, the extra nanoseconds per access if each line is in a page of its own instead of next
/// to the others. `far` has pages of `page_words`; `near` has room for as many adjacent lines.
pub(crate) fn tlb_extra_ns(
    far: &mut [u64],
    page_words: usize,
    near: &mut [u64],
    pages: &[usize],
    window: Duration,
) -> Vec<f64> {
    let time = |words: &mut [u64], count: usize, places: Places| {
        let mut at = [kernels::lay_chase(words, count, places)];
        kernels::chase(words, &mut at, count);
        chase_ns(words, &mut at, window)
    };
    let extra =
        |count: &usize| time(far, *count, Places::OnePer(page_words)) - time(near, *count, Places::EachLine);
    pages.iter().map(extra).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_the_curve_rise_to_the_largest() {
        let sizes = curve_sizes(1 << 20, 2);
        assert_eq!(
            (sizes[0], *sizes.last().unwrap(), sizes.len()),
            (8192, 1 << 20, 15)
        );
        assert!(sizes.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(tlb_pages(2048).windows(2).all(|pair| pair[0] < pair[1]));
    }

    #[test]
    fn a_latency_is_above_nothing_and_misses_overlap_or_do_not() {
        let mut words = vec![0; 1 << 17];
        let window = Duration::from_millis(2);
        assert!(latency_at(&mut words, 1 << 20, window) > 0.0);
        let in_flight = misses_in_flight(&words, window);
        assert!(in_flight >= 1.0 && in_flight.is_finite(), "{in_flight}");
    }
}
