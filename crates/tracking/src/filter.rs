//! A fast model of a core's private caches: their misses are the LLC's accesses.
//!
//! L2 selects sets by the low bits of the line number and replaces the least recently used line. In front of it is a
//! direct-mapped L1, so that most accesses of programs cost one comparison; as in real caches, hits there do not count as
//! uses in L2. L1 does not write lines back: L2 is notified at the first write.
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
    /// It was absent and is present now: the LLC sees a read of the line, and possibly a write-back of the evicted one.
    Missed {
        /// The evicted line, if it had been written.
        written_back: Option<u64>,
    },
}

/// The private caches of a core.
#[derive(Clone, Debug)]
pub struct Filter {
    /// L1: line number and whether L2 knows that it was written (lowest bit); [`EMPTY`] if there is none.
    recent: Box<[u64; L1_LINES]>,
    sets: u64,
    ways: usize,
    /// L2: line number and whether it was written (lowest bit), set after set, in order of use; [`EMPTY`] as above.
    entries: Vec<u64>,
}

/// Lines of L1: 32 KiB of the usual size.
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

    /// Records the core's use of a line, which is in both caches afterwards.
    #[inline]
    pub fn access(&mut self, line: u64, wanted: Use) -> Passed {
        let written = u64::from(wanted == Use::Write);
        let recent = &mut self.recent[line as usize % L1_LINES];
        // The line is present, and was already written if it is written now.
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
        // Eight ways are the usual number; knowing it at compile time avoids branches on the line's position.
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

/// Moves a line to the front of its set; returns the evicted line, unless it was present.
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
                // Lines that share their place in L1: only the last used is present.
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
