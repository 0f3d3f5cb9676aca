//! Timers, in order of time; timers for the same time fire in the order in which they were set.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use homenode_units::Ns;

use crate::guest::view::By;
use crate::index::{CpuIx, ThreadIx, VmIx};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    Arrival(VmIx),
    Event(usize),
    Daemon(usize),
    Housekeeping {
        vm: VmIx,
        thread: ThreadIx,
    },
    /// A kernel may be due to scan the memory of a group of threads.
    Scan {
        vm: VmIx,
        by: By,
        group: usize,
        /// The VM's AutoNUMA that it belongs to.
        number: u32,
    },
    /// An interrupt that was sent from a CPU arrives at a halted vCPU.
    Wake {
        vm: VmIx,
        thread: ThreadIx,
        waker: CpuIx,
    },
    /// A device may have served a thread's request.
    Served {
        vm: VmIx,
        thread: ThreadIx,
        /// The life of the VM that it belongs to.
        life: u32,
    },
    /// The rate at which a VM's accesses are sampled is chosen again.
    Sampling {
        vm: VmIx,
        /// The sampling of the VM that it belongs to.
        number: u32,
    },
    /// Pages that a VM's guest has released are placed again.
    Releases {
        vm: VmIx,
        /// The life of the VM that it belongs to.
        life: u32,
    },
    /// Memory that a VM's program has allocated is placed.
    Runtime {
        vm: VmIx,
        /// The life of the VM that it belongs to.
        life: u32,
    },
    /// Pages that passed to or from a VM's driver domain are settled.
    Flips {
        vm: VmIx,
    },
    /// The host's permits are settled.
    Permits,
    /// Two vCPUs change places.
    Exchange,
}

/// Timers that are still to fire.
#[derive(Clone, Debug, Default)]
pub(super) struct Agenda {
    timers: BinaryHeap<Reverse<(Ns, u64, Timer)>>,
    set: u64,
}

impl Agenda {
    /// Sets a timer.
    pub fn set(&mut self, at: Ns, timer: Timer) {
        self.set += 1;
        self.timers.push(Reverse((at, self.set, timer)));
    }

    /// Returns when the next timer fires; never if none is set.
    pub fn next(&self) -> Ns {
        self.timers.peek().map_or(Ns(u64::MAX), |Reverse((at, ..))| *at)
    }

    /// Takes the next timer, which is due.
    pub fn take(&mut self) -> Option<Timer> {
        self.timers.pop().map(|Reverse((.., timer))| timer)
    }
}
