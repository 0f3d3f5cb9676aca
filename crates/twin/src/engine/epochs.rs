//! When caches are brought up to date and latencies are solved again.

use homenode_units::Ns;

/// An epoch of a cache to whose CPUs no other vCPU comes lasts at least this many times the base length. Longer epochs change
/// outcomes where vCPUs take turns, because each finds its lines gone, and not where they only pause (`docs/SPEED.md`).
pub(crate) const CALM: u64 = 4;

/// When a cache is brought up to date.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cadence {
    pub began: Ns,
    /// Least time its epoch lasts, whatever the drift of miss ratios: the base length after another vCPU has come to one of its
    /// CPUs, and up to [`CALM`] times as long while none comes.
    pub least: Ns,
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
            least: length,
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

    /// Notes that another vCPU runs on a CPU of a cache, so the cache is brought up to date at the next boundary.
    pub(crate) fn unsettle(&mut self, llc: usize, now: Ns) {
        let soon = self.next_boundary(now);
        let cadence = &mut self.cadences[llc];
        cadence.least = self.length;
        cadence.due = cadence.due.min(soon);
        self.end = self.end.min(soon);
    }

    /// Notes that the vCPU of a cache's CPU pauses or continues. The cache is brought up to date when an epoch of the least
    /// length would end.
    pub(crate) fn disturb(&mut self, llc: usize, now: Ns) {
        let soon = self.next_boundary(now);
        let cadence = &mut self.cadences[llc];
        let soon = soon.max(Ns(cadence.began.0 + cadence.least.0));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_vcpu_ends_an_epoch_sooner_than_a_pause() {
        // The epoch began at 8 ms and lasts at least 4 ms. At 9.5 ms a pause lets it end at 12 ms, another vCPU at 10 ms.
        let ms = Ns::from_millis;
        let mut epochs = Epochs::new(ms(1), 1);
        epochs.cadences[0] = Cadence {
            began: ms(8),
            least: ms(CALM),
            stride: ms(16),
            due: ms(24),
        };
        epochs.end = ms(24);
        epochs.disturb(0, Ns(9_500_000));
        assert_eq!((epochs.cadences[0].due, epochs.end), (ms(12), ms(12)));
        epochs.unsettle(0, Ns(9_500_000));
        let Cadence { due, least, .. } = epochs.cadences[0];
        assert_eq!((due, least, epochs.end), (ms(10), ms(1), ms(10)));
    }
}
