//! Private second-level caches above a shared last-level cache.
//!
//! The LLC only sees misses of the private caches: a line in constant use in a private cache looks unused in the LLC. If the
//! LLC is inclusive, evicting the line there removes it from the private caches too, and its next use misses.

use crate::cache::{Cache, Counts, Outcome, Shape};

/// How lines of the private caches and of the shared one relate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inclusion {
    /// The LLC holds everything that private caches hold.
    Inclusive,
    /// Each cache follows its own policy.
    NonInclusive,
    /// The LLC holds lines evicted from private caches, and returns a line when it is used again.
    Victim,
}

/// The level that had the line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Level {
    /// The core's own cache.
    Private,
    /// The shared one.
    Shared,
    /// None: it comes from memory.
    Memory,
}

/// Private caches above a shared one; a core is a stream.
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

    /// Records a core's use of a line.
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

    /// Returns a core's counts in the shared cache: its accesses are the private cache's misses.
    pub fn shared(&self, core: usize) -> Counts {
        self.shared.counts(core)
    }

    /// Returns the lines removed from private caches because the shared one evicted them.
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
        // Core 0 uses line 1 only; core 1 streams four lines through the shared cache, which evicts line 1.
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
        // A loop over six lines fits into 2 + 4; it does not fit into an LLC of 4 that also holds the private lines.
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
