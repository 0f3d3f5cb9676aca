//! A core's private caches, made to be fast: what gets past them is what the LLC sees.
//!
//! L2 has sets by the low bits of the line number, least recently used line out first. In front of it lies an L1 that is
//! direct-mapped, so that most accesses of programs cost one comparison; what hits there does not count as a use in L2, as in
//! real caches. L1 does not hand written lines back: L2 is told at the first write.
//!
//! # Left out
//!
//! Prefetching, instruction fetches, lines that L2 or an inclusive LLC takes away from the levels above.

/// What an access wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// To read.
    Read,
    /// To write.
    Write,
}

/// What private caches make of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Passed {
    /// The line was there: the LLC sees nothing.
    Held,
    /// It was not, and is now: the LLC sees a read of the line, and maybe a written one that had to go.
    Missed {
        /// The line that had to go, if it had been written.
        written_back: Option<u64>,
    },
}

/// The private caches of a core.
#[derive(Clone, Debug)]
pub struct Filter {
    /// L1: line number and whether L2 knows that it was written (lowest bit); [`EMPTY`] where there is none.
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
    /// Empty caches, L2 of about this many lines: the nearest whole number of sets. Line numbers must be below 2^63 - 1.
    ///
    /// # Panics
    /// If L2 has no way.
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

    /// The core uses a line: it is in both caches afterwards.
    #[inline]
    pub fn access(&mut self, line: u64, wanted: Use) -> Passed {
        let written = u64::from(wanted == Use::Write);
        let recent = &mut self.recent[line as usize % L1_LINES];
        // The line is there, and if it is written now it was before.
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
        if entries[0] >> 1 == line {
            entries[0] |= written;
            return Passed::Held;
        }
        // Each entry moves one place down as it is looked at, until the line is found or the last falls out.
        let mut above = entries[0];
        for entry in &mut entries[1..] {
            let this = std::mem::replace(entry, above);
            if this >> 1 == line {
                entries[0] = this | written;
                return Passed::Held;
            }
            above = this;
        }
        entries[0] = line << 1 | written;
        let was_written = above != EMPTY && above & 1 == 1;
        Passed::Missed {
            written_back: was_written.then_some(above >> 1),
        }
    }
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
                // Lines that share their place in L1: only what was used last is there.
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
