//! The loops that load caches and memory. They are safe code over words, without side effects except the time they take.
//!
//! # Why they measure what they say
//!
//! - A *chase* follows a cycle in which each word names the next one, so an access cannot begin before the previous one has
//!   ended. The order has no pattern that prefetchers know, and visits each place once per round.
//! - *Streams* read or update every word in order, the best case for prefetchers.
//! - *Uniform* accesses draw lines independently of each other. Each of the [`CHAINS`] generators depends on the value that
//!   it read last, so exactly [`CHAINS`] accesses are in flight.

use crate::sys::LINE_WORDS;

/// Number of accesses that [`uniform`] keeps in flight.
pub const CHAINS: usize = 4;

/// A bijection of `0..count` without a visible pattern. It multiplies and shifts twice, modulo the next power of two, and
/// repeats this until the result is in range.
#[derive(Clone, Copy, Debug)]
pub struct Order {
    count: u64,
    mask: u64,
    shift: u32,
}

impl Order {
    /// Creates an order of `count` places; a `count` of 0 is taken as 1.
    pub fn of(count: usize) -> Order {
        let count = count.max(1) as u64;
        let mask = count.next_power_of_two() - 1;
        Order {
            count,
            mask,
            shift: mask.count_ones() / 2 + 1,
        }
    }

    /// Returns the place visited at this step.
    pub fn nth(&self, step: usize) -> usize {
        let mut place = step as u64;
        loop {
            // Each step is a bijection of 0..=mask: multiplication by odd factors, and xor with right shifts.
            place ^= place >> self.shift;
            place = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) & self.mask;
            place ^= place >> self.shift;
            place = place.wrapping_mul(0xd6e8_feb8_6659_fd93) & self.mask;
            place ^= place >> self.shift;
            if place < self.count {
                return place as usize;
            }
        }
    }
}

/// The places that a chase visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    /// One in every line.
    EachLine,
    /// One in each stretch of this many words. The line differs from stretch to stretch, so that the places do not fall into
    /// the same cache sets.
    OnePer(usize),
}

impl Places {
    fn word(self, place: usize) -> usize {
        match self {
            Places::EachLine => place * LINE_WORDS,
            Places::OnePer(stretch) => place * stretch + place * LINE_WORDS % stretch,
        }
    }
}

/// Writes a cycle through `count` places into these words, and returns the word at which the cycle begins.
pub fn lay_chase(words: &mut [u64], count: usize, places: Places) -> usize {
    let order = Order::of(count);
    let first = places.word(order.nth(0));
    let mut at = first;
    for step in 1..count {
        let next = places.word(order.nth(step));
        words[at] = next as u64;
        at = next;
    }
    words[at] = first as u64;
    first
}

/// Follows a cycle from each of these words in parallel, for `steps` steps, and advances the words.
pub fn chase<const K: usize>(words: &[u64], at: &mut [usize; K], steps: usize) {
    let mut now = *at;
    for _ in 0..steps {
        for place in &mut now {
            *place = words[*place] as usize;
        }
    }
    *at = std::hint::black_box(now);
}

/// Reads every word and returns their sum.
pub fn read(words: &[u64]) -> u64 {
    std::hint::black_box(words.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)))
}

/// Adds one to every word, which reads and writes it.
pub fn update(words: &mut [u64]) {
    for word in std::hint::black_box(words) {
        *word = word.wrapping_add(1);
    }
}

/// State of the generators of [`uniform`], which continue where they stopped.
pub type Generators = [u64; CHAINS];

/// Creates generators from a seed.
pub fn generators(seed: u64) -> Generators {
    std::array::from_fn(|chain| {
        seed.wrapping_add(chain as u64)
            .wrapping_mul(0xd6e8_feb8_6659_fd93)
    })
}

/// Reads [`CHAINS`] lines drawn uniformly from the words, and repeats this `rounds` times.
pub fn uniform(words: &[u64], states: &mut Generators, rounds: usize) {
    let lines = (words.len() / LINE_WORDS) as u64;
    let mut now = *states;
    for _ in 0..rounds {
        for state in &mut now {
            // With fewer than 2^32 lines (256 GiB), no bits are lost.
            let line = ((*state >> 32) * lines) >> 32;
            let value = words[line as usize * LINE_WORDS];
            // A linear congruential generator (Knuth's constants). Adding the value, which is zero, makes the processor wait
            // for it.
            *state = state
                .wrapping_add(value)
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
        }
    }
    *states = std::hint::black_box(now);
}

/// Runs a chain of dependent additions: `2 * pairs` core cycles on every processor that adds in one cycle.
pub fn dependent_cycles(pairs: usize) -> u64 {
    let (step, flip) = std::hint::black_box((0x9e37_79b9_u64, 0x5555_5555_u64));
    let mut value = step;
    for _ in 0..pairs / 16 {
        // A compiler cannot fold additions that alternate with exclusive-or.
        for _ in 0..16 {
            value = value.wrapping_add(step) ^ flip;
        }
    }
    std::hint::black_box(value)
}

/// Does work with instruction-level parallelism and hardly any memory access, so hyperthreads compete for the core.
pub fn independent_work(rounds: usize) -> u64 {
    let mut lanes: [u64; 8] = std::hint::black_box([1, 2, 3, 4, 5, 6, 7, 8]);
    for round in 0..rounds as u64 {
        for lane in &mut lanes {
            *lane = (*lane ^ round).rotate_left(7).wrapping_add(round);
        }
    }
    std::hint::black_box(lanes.iter().fold(0, |sum, lane| sum ^ lane))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Counts the visits of a chase to each word in `count` steps.
    fn visits(words: &[u64], first: usize, count: usize) -> Vec<u32> {
        let mut visits = vec![0; words.len()];
        let mut at = [first];
        for _ in 0..count {
            visits[at[0]] += 1;
            chase(words, &mut at, 1);
        }
        assert_eq!(at[0], first, "the cycle closes");
        visits
    }

    proptest! {
        #[test]
        fn a_chase_visits_every_line_once(count in 1usize..3000) {
            let mut words = vec![0; count * LINE_WORDS];
            let first = lay_chase(&mut words, count, Places::EachLine);
            let visits = visits(&words, first, count);
            prop_assert!(visits.iter().step_by(LINE_WORDS).all(|v| *v == 1));
            prop_assert_eq!(visits.iter().sum::<u32>() as usize, count);
        }

        #[test]
        fn a_strided_chase_visits_every_page_once(count in 1usize..300) {
            const PAGE: usize = 512;
            let mut words = vec![0; count * PAGE];
            let first = lay_chase(&mut words, count, Places::OnePer(PAGE));
            let visits = visits(&words, first, count);
            prop_assert!(visits.chunks(PAGE).all(|page| page.iter().sum::<u32>() == 1));
        }

        #[test]
        fn an_order_is_a_bijection(count in 1usize..5000) {
            let order = Order::of(count);
            let mut seen = vec![false; count];
            for step in 0..count {
                prop_assert!(!std::mem::replace(&mut seen[order.nth(step)], true));
            }
        }

        #[test]
        fn parallel_chases_walk_as_single_ones(count in 4usize..500, steps in 0usize..200) {
            let mut words = vec![0; count * LINE_WORDS];
            lay_chase(&mut words, count, Places::EachLine);
            let begin = [0, LINE_WORDS, 2 * LINE_WORDS];
            let mut together = begin;
            chase(&words, &mut together, steps);
            for (first, last) in begin.into_iter().zip(together) {
                let mut alone = [first];
                chase(&words, &mut alone, steps);
                prop_assert_eq!(alone[0], last);
            }
        }
    }

    #[test]
    fn an_order_has_no_stride() {
        let order = Order::of(1 << 16);
        let near = (0..1000)
            .filter(|step| order.nth(*step).abs_diff(order.nth(step + 1)) < 64)
            .count();
        assert!(near < 30, "{near} of 1000 steps stay within a page");
    }

    #[test]
    fn streams_touch_every_word() {
        let mut words: Vec<u64> = (0..1000).collect();
        assert_eq!(read(&words), 499_500);
        update(&mut words);
        assert_eq!(read(&words), 500_500);
    }

    #[test]
    fn uniform_accesses_reach_all_lines_about_evenly() {
        // Distinct lines would change the draw, so the distribution is tested with a single generator.
        let mut states = generators(7);
        let words = vec![0; 64 * LINE_WORDS];
        let mut seen = [0_u32; 64];
        for _ in 0..4000 {
            for state in states {
                seen[(((state >> 32) * 64) >> 32) as usize] += 1;
            }
            uniform(&words, &mut states, 1);
        }
        assert!(seen.iter().all(|count| (150..350).contains(count)), "{seen:?}");
    }
}
