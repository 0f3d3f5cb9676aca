//! A fast model of a core's private caches. Their misses are the accesses that the LLC sees.
//!
//! L2 selects sets by the low bits of the line number and replaces the least recently used line. A direct-mapped L1 is in front
//! of it, so most of a program's accesses cost one comparison. As in real caches, L2 does not see a hit in L1 as a use. L1 does
//! not write lines back; instead, it tells L2 of a line's first write.
//!
//! # Left out
//!
//! Prefetching, instruction fetches, back-invalidations by L2 or an inclusive LLC.

pub use homenode_formats::pmu_region::Use;

/// Result of an access to private caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// The line was present: the LLC sees nothing.
    Held,
    /// The line was absent and is present now. The LLC sees a read of it, and a write-back if the evicted line was written.
    Missed {
        /// The evicted line, if it had been written.
        written_back: Option<u64>,
    },
}

/// The private caches of a core.
#[derive(Clone, Debug)]
pub struct Filter {
    /// L1: line number, and whether L2 knows that the line was written (lowest bit); [`EMPTY`] without a line.
    recent: Box<[u64; L1_LINES]>,
    sets: u64,
    ways: usize,
    /// L2: line number, and whether the line was written (lowest bit); set after set, in order of use; [`EMPTY`] without a line.
    entries: Vec<u64>,
}

/// Lines of L1: the usual 32 KiB.
pub const L1_LINES: usize = 512;

const EMPTY: u64 = u64::MAX;

impl Filter {
    /// Creates empty caches, with an L2 of about this many lines: the nearest whole number of sets. Line numbers must be
    /// below 2^63 - 1.
    ///
    /// # Panics
    /// L2 has no way.
    pub fn new(lines: usize, ways: usize) -> Filter {
        assert!(ways > 0, "a set has at least one way");
        let sets = ((lines + ways / 2) / ways).max(1);
        Filter {
            recent: Box::new([EMPTY; L1_LINES]),
            sets: sets as u64,
            ways,
            entries: vec![EMPTY; sets * ways],
        }
    }

    /// Records that the core uses a line, which is in both caches afterwards.
    #[inline]
    pub fn access(&mut self, line: u64, wanted: Use) -> Passed {
        let written = u64::from(wanted == Use::Write);
        let recent = &mut self.recent[line as usize % L1_LINES];
        // L1 has the line; if this is a write, L2 already knows of an earlier one.
        if *recent | 1 == line << 1 | 1 && *recent & 1 >= written {
            return Passed::Held;
        }
        *recent = line << 1 | written;
        self.second(line, written)
    }

    fn second(&mut self, line: u64, written: u64) -> Passed {
        let set = if self.sets.is_power_of_two() {
            line & (self.sets - 1)
        } else {
            line % self.sets
        };
        let first = set as usize * self.ways;
        let entries = &mut self.entries[first..first + self.ways];
        // Eight ways are usual. If the number is known at compile time, the code needs no branches on the line's position.
        let gone = match <&mut [u64; 8]>::try_from(&mut *entries) {
            Ok(entries) => to_front(entries, line, written),
            Err(_) => to_front(entries, line, written),
        };
        let Some(gone) = gone else {
            return Passed::Held;
        };
        let was_written = gone != EMPTY && gone & 1 == 1;
        Passed::Missed {
            written_back: was_written.then_some(gone >> 1),
        }
    }
}

/// Moves a line to the front of its set. Returns the evicted entry, or `None` if the line was already in the set.
#[inline(always)]
fn to_front<E: AsMut<[u64]> + ?Sized>(entries: &mut E, line: u64, written: u64) -> Option<u64> {
    let entries = entries.as_mut();
    let ways = entries.len();
    let (mut found, mut entry) = (ways, line << 1);
    for way in (0..ways).rev() {
        if entries[way] >> 1 == line {
            (found, entry) = (way, entries[way]);
        }
    }
    let last = entries[ways - 1];
    for way in (1..ways).rev() {
        entries[way] = if way <= found {
            entries[way - 1]
        } else {
            entries[way]
        };
    }
    entries[0] = entry | written;
    (found == ways).then_some(last)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn each_set_of_l2_is_a_list_in_order_of_use(
            uses in prop::collection::vec((0u64..60, any::<bool>()), 1..500),
            sets in 1usize..6,
            ways in 1usize..6,
        ) {
            let mut filter = Filter::new(sets * ways, ways);
            let mut lists = vec![Vec::<(u64, bool)>::new(); sets];
            let mut first = None;
            for (line, write) in uses {
                // All these lines share one place in L1, so only the last used one is in L1.
                let (line, was) = (line * L1_LINES as u64, first);
                first = Some((line, write));
                if was == Some((line, true)) || was == first {
                    first = was;
                    prop_assert_eq!(filter.access(line, if write { Use::Write } else { Use::Read }), Passed::Held);
                    continue;
                }
                let list = &mut lists[line as usize % sets];
                let known = list.iter().position(|(known, _)| *known == line);
                let written = known.is_some_and(|at| list.remove(at).1);
                list.insert(0, (line, written || write));
                let gone = (list.len() > ways).then(|| list.pop()).flatten();
                let expected = match known {
                    Some(_) => Passed::Held,
                    None => Passed::Missed { written_back: gone.filter(|gone| gone.1).map(|gone| gone.0) },
                };
                let wanted = if write { Use::Write } else { Use::Read };
                prop_assert_eq!(filter.access(line, wanted), expected);
            }
        }
    }
}
