//! When caches are brought up to date and latencies are solved again.

use homenode_units::Ns;

/// When a cache is brought up to date.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cadence {
    pub began: Ns,
    /// How long its epoch may be while nothing is switched on its CPUs.
    pub stride: Ns,
    pub due: Ns,
}

/// The epochs of all caches.
#[derive(Clone, Debug)]
pub(crate) struct Epochs {
    /// The base length.
    pub length: Ns,
    /// When the last epoch ended, of any cache.
    pub began: Ns,
    /// When the next epoch ends.
    pub end: Ns,
    /// When all CPUs were last accounted.
    pub settled: Ns,
    /// When each cache is brought up to date.
    pub cadences: Vec<Cadence>,
    /// Whether latencies no longer fit what runs.
    pub dirty: bool,
    /// Whether to solve in every epoch, whatever has changed.
    pub always_solve: bool,
}

impl Epochs {
    /// Creates the epochs of `caches` caches, at the start.
    pub fn new(length: Ns, caches: usize) -> Epochs {
        let cadence = Cadence {
            began: Ns::ZERO,
            stride: length,
            due: length,
        };
        Epochs {
            length,
            began: Ns::ZERO,
            end: length,
            settled: Ns::ZERO,
            cadences: vec![cadence; caches],
            dirty: true,
            always_solve: false,
        }
    }

    /// Notes that a CPU of a cache does something else now: the cache is brought up to date soon.
    pub fn unsettle(&mut self, llc: usize, now: Ns) {
        let soon = self.next_boundary(now);
        let cadence = &mut self.cadences[llc];
        cadence.due = cadence.due.min(soon);
        self.end = self.end.min(soon);
    }

    /// Has latencies solved again soon, since the load on memory has changed.
    pub fn solve_soon(&mut self, now: Ns) {
        self.dirty = true;
        self.end = self.end.min(self.next_boundary(now));
    }

    /// Returns the next multiple of the base length: epochs end there, so that those of several caches end together.
    fn next_boundary(&self, now: Ns) -> Ns {
        Ns((now.0 / self.length.0 + 1) * self.length.0)
    }
}
