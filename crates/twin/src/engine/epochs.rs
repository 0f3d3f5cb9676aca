//! When caches are brought up to date and latencies are solved again.

use homenode_units::Ns;

/// When a cache is brought up to date.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cadence {
    pub began: Ns,
    /// Longest time its epoch may last while no task is switched on its CPUs.
    pub stride: Ns,
    pub due: Ns,
}

/// The epochs of all caches.
#[derive(Clone, Debug)]
pub(crate) struct Epochs {
    /// Base length of an epoch.
    pub length: Ns,
    /// Time at which the last epoch of any cache ended.
    pub began: Ns,
    /// Time at which the next epoch ends.
    pub end: Ns,
    /// Time up to which all CPUs are accounted.
    pub settled: Ns,
    /// When each cache is brought up to date.
    pub cadences: Vec<Cadence>,
    /// Whether the latencies no longer fit the running tasks.
    pub dirty: bool,
    /// Whether to solve in every epoch, even if nothing has changed.
    pub always_solve: bool,
}

impl Epochs {
    /// Creates the epochs of `caches` caches at time 0.
    pub(crate) fn new(length: Ns, caches: usize) -> Epochs {
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

    /// Notes that a CPU of a cache now does something else, so the cache is brought up to date at the next boundary.
    pub(crate) fn unsettle(&mut self, llc: usize, now: Ns) {
        let soon = self.next_boundary(now);
        let cadence = &mut self.cadences[llc];
        cadence.due = cadence.due.min(soon);
        self.end = self.end.min(soon);
    }

    /// Has latencies solved again at the next boundary, because the load on memory has changed.
    pub(crate) fn solve_soon(&mut self, now: Ns) {
        self.dirty = true;
        self.end = self.end.min(self.next_boundary(now));
    }

    /// Returns the next multiple of the base length. Epochs end only there, so the epochs of several caches end together.
    fn next_boundary(&self, now: Ns) -> Ns {
        Ns((now.0 / self.length.0 + 1) * self.length.0)
    }
}
