//! Private second-level caches above a shared last-level cache.
//!
//! The LLC sees only the misses of private caches, so a line in constant use in a private cache looks unused in the LLC. If the
//! LLC is inclusive, it removes a line that it evicts from the private caches too, and the line's next use misses.

use crate::cache::{Cache, Counts, Outcome, Shape};

/// How the contents of private caches and of the shared cache are related.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inclusion {
    /// The LLC holds everything that private caches hold.
    Inclusive,
    /// Each cache decides independently.
    NonInclusive,
    /// The LLC holds only lines that private caches evicted, and gives up a line when a core uses it again.
    Victim,
}

/// The level that had a requested line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The core's private cache.
    Private,
    /// The shared cache.
    Shared,
    /// No cache; the line comes from memory.
    Memory,
}

/// Private caches above a shared one. Each core is a stream of the caches.
#[derive(Clone, Debug)]
pub struct Hierarchy {
    private: Vec<Cache>,
    shared: Cache,
    inclusion: Inclusion,
    back_invalidations: u64,
}

impl Hierarchy {
    /// Creates empty caches for this many cores.
    pub fn new(cores: usize, private: Shape, shared: Shape, inclusion: Inclusion, seed: u64) -> Hierarchy {
        Hierarchy {
            private: (0..cores)
                .map(|core| Cache::new(private, 1, seed ^ core as u64))
                .collect(),
            shared: Cache::new(shared, cores, seed),
            inclusion,
            back_invalidations: 0,
        }
    }

    /// Records that a core uses a line.
    #[inline]
    pub fn access(&mut self, core: usize, line: u64) -> Level {
        let Outcome::Miss(gone) = self.private[core].access(0, line) else {
            return Level::Private;
        };
        if self.inclusion == Inclusion::Victim {
            let level = if self.shared.take(core, line) {
                Level::Shared
            } else {
                Level::Memory
            };
            if let Some(gone) = gone {
                self.shared.put(core, gone);
            }
            return level;
        }
        match self.shared.access(core, line) {
            Outcome::Hit => Level::Shared,
            Outcome::Miss(gone) => {
                if let (Inclusion::Inclusive, Some(gone)) = (self.inclusion, gone) {
                    for cache in &mut self.private {
                        self.back_invalidations += u64::from(cache.invalidate(gone));
                    }
                }
                Level::Memory
            }
        }
    }

    /// Returns a core's counts in its private cache.
    pub fn private(&self, core: usize) -> Counts {
        self.private[core].counts(0)
    }

    /// Returns a core's counts in the shared cache. Its accesses there are the misses of its private cache.
    pub fn shared(&self, core: usize) -> Counts {
        self.shared.counts(core)
    }

    /// Returns the number of lines removed from private caches because the shared cache evicted them.
    pub fn back_invalidations(&self) -> u64 {
        self.back_invalidations
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_machine::Replacement::Lru;

    fn hierarchy(inclusion: Inclusion) -> Hierarchy {
        let shape = |sets, ways| Shape {
            sets,
            ways,
            replacement: Lru,
        };
        Hierarchy::new(2, shape(1, 2), shape(1, 4), inclusion, 1)
    }

    #[test]
    fn an_inclusive_cache_takes_a_busy_line_away_and_another_does_not() {
        // Core 0 uses only line 1. Core 1 streams four lines through the shared cache, which therefore evicts line 1.
        for (inclusion, level) in [
            (Inclusion::Inclusive, Level::Memory),
            (Inclusion::NonInclusive, Level::Private),
            (Inclusion::Victim, Level::Private),
        ] {
            let mut caches = hierarchy(inclusion);
            caches.access(0, 1);
            for line in 10..14 {
                assert_eq!(caches.access(0, 1), Level::Private);
                caches.access(1, line);
            }
            assert_eq!(caches.access(0, 1), level, "{inclusion:?}");
        }
    }

    #[test]
    fn a_victim_cache_adds_its_lines_to_the_private_ones() {
        // A loop over six lines fits into 2 private and 4 shared lines, but not if the shared cache also holds the private lines.
        for (inclusion, level) in [
            (Inclusion::Victim, Level::Shared),
            (Inclusion::NonInclusive, Level::Memory),
        ] {
            let mut caches = hierarchy(inclusion);
            for line in (0..60).map(|at| at % 6) {
                caches.access(0, line);
            }
            assert_eq!(caches.access(0, 0), level, "{inclusion:?}");
        }
    }
}
