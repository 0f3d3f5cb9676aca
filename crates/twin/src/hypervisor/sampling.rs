//! The rate at which a VM's accesses are sampled, and the expected numbers of samples. [`super::page_uses`] describes the
//! sampling.

use crate::index::ThreadIx;

/// CPU cycles between two marked instructions of a CPU.
const PERIOD_CYCLES: f64 = 0xFFF8 as f64;
/// CPU cycles between two marked instructions after a second in which samples led to few page moves.
const PERIOD_SLOW_CYCLES: f64 = 0x3_FFE0 as f64;
/// Number of moved pages in a second below which they are few.
const MOVES_FEW: u64 = 10;
/// CPU cycles to handle a mark's interrupt and to note the page (estimate: an interrupt, and an entry of a hash table that is
/// rarely in the cache; 3 percent of the CPU at the usual period).
const MARK_CYCLES: f64 = 2000.0;

/// Sampling of one VM.
#[derive(Clone, Debug)]
pub(crate) struct Sampling {
    nodes: usize,
    period_cycles: f64,
    /// Number of pages that samples have led to be moved in this second.
    pub moved: u64,
    /// Expected number of samples since the beginning, at `thread * nodes + node`, the node being that of the CPU.
    pub expected: Vec<f64>,
}

impl Sampling {
    pub(crate) fn new(threads: usize, nodes: usize) -> Sampling {
        Sampling {
            nodes,
            period_cycles: PERIOD_CYCLES,
            moved: 0,
            expected: vec![0.0; threads * nodes],
        }
    }

    /// Notes that a thread ran its program for some cycles on a node. `missing` is the share of its instructions that accessed
    /// memory.
    pub(crate) fn ran(&mut self, thread: ThreadIx, node: usize, cycles: f64, missing: f64) {
        self.expected[thread.0 * self.nodes + node] += cycles / self.period_cycles * missing.min(1.0);
    }

    /// Returns the share of a vCPU's time that sampling takes.
    pub(crate) fn share_of_time(&self) -> f64 {
        MARK_CYCLES / self.period_cycles
    }

    /// Ends a second and sets the period for the next.
    pub(crate) fn second(&mut self) {
        self.period_cycles = if std::mem::take(&mut self.moved) < MOVES_FEW {
            PERIOD_SLOW_CYCLES
        } else {
            PERIOD_CYCLES
        };
    }
}
