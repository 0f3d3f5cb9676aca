//! Set-associative caches, access by access.
//!
//! # Model
//!
//! A hash of a line's number selects its set, because neighbours in a program's memory are not neighbours in a cache: physical
//! pages are scattered over memory, and last-level caches hash addresses over their slices. In its set, a line takes an empty way
//! or that of the replacement policy's victim ([`Replacement`]). Every line remembers the stream that brought it in, so counts
//! and held lines are kept per stream.
//!
//! # Speed
//!
//! An access touches one set, which is contiguous in memory; nothing is allocated after [`Cache::new`].
//!
//! # Left out
//!
//! Dirty lines and writebacks, prefetching, way partitioning.

pub use homenode_machine::Replacement;

use crate::replacement::Policy;
use homenode_units::{Chance, mix};

/// Size of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Number of sets, at least 1. It need not be a power of two.
    pub sets: usize,
    /// Number of ways of a set, 1 to 64.
    pub ways: usize,
    /// How a set chooses the line to evict.
    pub replacement: Replacement,
}

impl Shape {
    /// Returns a shape for about this many lines: the nearest whole number of sets, at least one.
    pub fn of_lines(lines: usize, ways: usize, replacement: Replacement) -> Shape {
        let sets = ((lines + ways / 2) / ways).max(1);
        Shape {
            sets,
            ways,
            replacement,
        }
    }

    /// Returns the number of lines that the cache holds.
    pub fn lines(&self) -> usize {
        self.sets * self.ways
    }
}

/// Result of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The line was present.
    Hit,
    /// The line was absent and is present now. Holds the line that was evicted for it, if any.
    Miss(Option<u64>),
}

/// Counts of a stream in a cache. Two counts of one stream can be subtracted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All accesses.
    pub accesses: u64,
    /// Accesses that missed.
    pub misses: u64,
}

impl Counts {
    /// Returns misses divided by accesses; 0 without accesses.
    pub fn miss_ratio(&self) -> f64 {
        if self.accesses == 0 {
            0.0
        } else {
            self.misses as f64 / self.accesses as f64
        }
    }

    /// Returns the counts since an earlier reading.
    pub fn since(&self, earlier: &Counts) -> Counts {
        Counts {
            accesses: self.accesses - earlier.accesses,
            misses: self.misses - earlier.misses,
        }
    }
}

/// A set-associative cache that streams share.
#[derive(Clone, Debug)]
pub struct Cache {
    shape: Shape,
    policy: Policy,
    /// Line number and stream (lowest [`STREAM_BITS`] bits) of each way, set after set; [`EMPTY`] if the way is empty.
    entries: Vec<u64>,
    counts: Vec<Counts>,
    held: Vec<u64>,
    chance: Chance,
}

const STREAM_BITS: u32 = 8;
const STREAM_MASK: u64 = (1 << STREAM_BITS) - 1;
const EMPTY: u64 = u64::MAX;

impl Cache {
    /// Creates an empty cache for this many streams, at most 255. Line numbers must be below 2^56 - 1.
    ///
    /// # Panics
    /// If the shape has no set, no way or more than 64 ways, or if there are more than 255 streams.
    pub fn new(shape: Shape, streams: usize, seed: u64) -> Cache {
        assert!(shape.sets > 0, "a cache has at least one set");
        assert!((1..=64).contains(&shape.ways), "a set has 1 to 64 ways");
        assert!(streams < 256, "a cache tells at most 255 streams apart");
        Cache {
            policy: Policy::new(shape.replacement, shape.sets, shape.ways),
            entries: vec![EMPTY; shape.lines()],
            counts: vec![Counts::default(); streams],
            held: vec![0; streams],
            chance: Chance::new(seed),
            shape,
        }
    }

    /// Returns the cache's shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the counts of a stream so far.
    pub fn counts(&self, stream: usize) -> Counts {
        self.counts[stream]
    }

    /// Returns the number of lines in the cache that this stream brought in.
    pub fn held(&self, stream: usize) -> u64 {
        self.held[stream]
    }

    #[inline]
    fn set_of(&self, line: u64) -> usize {
        ((u128::from(mix(line)) * self.shape.sets as u128) >> 64) as usize
    }

    /// Records that a stream uses a line, which is in the cache afterwards.
    #[inline]
    pub fn access(&mut self, stream: usize, line: u64) -> Outcome {
        self.counts[stream].accesses += 1;
        let set = self.set_of(line);
        let ways = self.shape.ways;
        let entries = &mut self.entries[set * ways..(set + 1) * ways];
        if let Some(way) = entries.iter().position(|entry| entry >> STREAM_BITS == line) {
            self.policy.used(set, way, entries);
            return Outcome::Hit;
        }
        self.counts[stream].misses += 1;
        Outcome::Miss(self.fill(stream, line, set))
    }

    /// Brings a missing line into its set, and returns the evicted line, if any.
    #[inline]
    fn fill(&mut self, stream: usize, line: u64, set: usize) -> Option<u64> {
        let ways = self.shape.ways;
        let entries = &mut self.entries[set * ways..(set + 1) * ways];
        let empty = entries.iter().position(|entry| *entry == EMPTY);
        let way = empty.unwrap_or_else(|| self.policy.victim(set, &mut self.chance));
        let gone = std::mem::replace(&mut entries[way], line << STREAM_BITS | stream as u64);
        self.policy.filled(set, way, entries);
        self.held[stream] += 1;
        if gone == EMPTY {
            return None;
        }
        self.held[(gone & STREAM_MASK) as usize] -= 1;
        Some(gone >> STREAM_BITS)
    }

    /// Records that a stream uses a line, and removes the line if it is present; a missing line is not brought in. Returns true
    /// if it was present.
    pub(crate) fn take(&mut self, stream: usize, line: u64) -> bool {
        self.counts[stream].accesses += 1;
        let there = self.invalidate(line);
        self.counts[stream].misses += u64::from(!there);
        there
    }

    /// Brings in a line that another cache evicted, unless it is present. Does not count as an access.
    pub(crate) fn put(&mut self, stream: usize, line: u64) {
        let set = self.set_of(line);
        let ways = self.shape.ways;
        let entries = &self.entries[set * ways..(set + 1) * ways];
        if !entries.iter().any(|entry| entry >> STREAM_BITS == line) {
            self.fill(stream, line, set);
        }
    }

    /// Drops a line; returns true if it was present.
    pub fn invalidate(&mut self, line: u64) -> bool {
        let set = self.set_of(line);
        let ways = self.shape.ways;
        let entries = &mut self.entries[set * ways..(set + 1) * ways];
        let Some(way) = entries.iter().position(|entry| entry >> STREAM_BITS == line) else {
            return false;
        };
        self.held[(entries[way] & STREAM_MASK) as usize] -= 1;
        entries[way] = EMPTY;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cache(sets: usize, ways: usize, replacement: Replacement) -> Cache {
        let shape = Shape {
            sets,
            ways,
            replacement,
        };
        Cache::new(shape, 3, 1)
    }

    /// Returns the lines of a set after these uses.
    fn left(replacement: Replacement, ways: usize, uses: &[u64]) -> Vec<u64> {
        let mut cache = cache(1, ways, replacement);
        for line in uses {
            cache.access(0, *line);
        }
        let mut lines: Vec<u64> = cache.entries.iter().map(|entry| entry >> STREAM_BITS).collect();
        lines.sort_unstable();
        lines
    }

    #[test]
    fn each_policy_evicts_whom_it_should() {
        // Lines 0 to 3 fill the set, 0 is used again, then 9 arrives.
        let uses = [0, 1, 2, 3, 0, 9];
        assert_eq!(left(Replacement::Lru, 4, &uses), [0, 2, 3, 9]); // 1 is the oldest
        // Line 0 was used last, so the top of the tree points to the other half, lines 2 and 3. There line 3 was used last, so
        // line 2 is evicted.
        assert_eq!(left(Replacement::PseudoLru, 4, &uses), [0, 1, 3, 9]);
        // The use of 3 set the last clear bit and cleared all others; 0 then set its own. The first line without a bit is 1.
        assert_eq!(left(Replacement::NotRecentlyUsed, 4, &uses), [0, 2, 3, 9]);
        // All four lines arrived at age 1, and the second use set 0 to age 0. After aging twice, 1 is the first line of age 3.
        assert_eq!(left(Replacement::QuadAge, 4, &uses), [0, 2, 3, 9]);
    }

    #[test]
    fn a_tree_over_any_number_of_ways_spares_the_line_used_last() {
        for ways in 2..=64 {
            let mut cache = cache(1, ways, Replacement::PseudoLru);
            for line in 0..1000 {
                let spared = line / 7 * 7;
                cache.access(0, spared);
                assert_ne!(cache.access(0, line), Outcome::Miss(Some(spared)), "{ways} ways");
            }
        }
    }

    proptest! {
        #[test]
        fn lines_held_add_up(
            uses in prop::collection::vec((0usize..3, 0u64..300), 1..2000),
            policy in 0usize..5,
            ways in 1usize..20,
        ) {
            let mut cache = cache(5, ways, Replacement::ALL[policy]);
            for (stream, line) in &uses {
                let missed = cache.access(*stream, *line) != Outcome::Hit;
                prop_assert_eq!(cache.access(*stream, *line), Outcome::Hit, "used twice, missed first: {}", missed);
                if line % 11 == 0 {
                    prop_assert!(cache.invalidate(*line));
                }
            }
            let there = cache.entries.iter().filter(|entry| **entry != EMPTY).count() as u64;
            prop_assert_eq!((0..3).map(|stream| cache.held(stream)).sum::<u64>(), there);
        }

        #[test]
        fn one_set_of_lru_is_a_list(uses in prop::collection::vec(0u64..30, 1..600), ways in 1usize..24) {
            let (mut cache, mut list) = (cache(1, ways, Replacement::Lru), Vec::<u64>::new());
            for line in uses {
                let hit = list.contains(&line);
                list.retain(|known| *known != line);
                list.insert(0, line);
                let gone = (list.len() > ways).then(|| list.pop()).flatten();
                prop_assert_eq!(cache.access(0, line), if hit { Outcome::Hit } else { Outcome::Miss(gone) });
            }
        }
    }
}
