//! Timers in order of time. Timers for the same time fire in the order in which they were set.

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
    /// A kernel may have to scan the memory of a group of threads.
    Scan {
        vm: VmIx,
        by: By,
        group: usize,
        /// The number of the VM's AutoNUMA that the timer belongs to.
        number: u32,
    },
    /// An interrupt that a CPU sent arrives at a halted vCPU.
    Wake {
        vm: VmIx,
        thread: ThreadIx,
        waker: CpuIx,
    },
    /// A device may have finished serving a thread's request.
    Served {
        vm: VmIx,
        thread: ThreadIx,
        /// Which start of the VM the timer belongs to.
        life: u32,
    },
    /// The sampling rate of a VM's accesses has to be chosen again.
    Sampling {
        vm: VmIx,
        /// The number of the VM's sampling that the timer belongs to.
        number: u32,
    },
    /// Pages that a VM's guest has released have to be placed again.
    Releases {
        vm: VmIx,
        /// Which start of the VM the timer belongs to.
        life: u32,
    },
    /// Memory that a VM's program has allocated has to be placed.
    Runtime {
        vm: VmIx,
        /// Which start of the VM the timer belongs to.
        life: u32,
    },
    /// Pages that passed between a VM and its driver domain have to be settled.
    Flips {
        vm: VmIx,
    },
    /// The host's permits have to be settled.
    Permits,
    /// Two vCPUs change places.
    Exchange,
    /// A VM's guest moves threads between vCPUs.
    ThreadMove {
        vm: VmIx,
        /// Which start of the VM the timer belongs to.
        life: u32,
    },
}

/// Timers that have not fired yet.
#[derive(Clone, Debug, Default)]
pub(super) struct Agenda {
    timers: BinaryHeap<Reverse<(Ns, u64, Timer)>>,
    set: u64,
}

impl Agenda {
    /// Sets a timer.
    pub(super) fn set(&mut self, at: Ns, timer: Timer) {
        self.set += 1;
        self.timers.push(Reverse((at, self.set, timer)));
    }

    /// Returns the time at which the next timer fires, or the end of time if none is set.
    pub(super) fn next(&self) -> Ns {
        self.timers.peek().map_or(Ns(u64::MAX), |Reverse((at, ..))| *at)
    }

    /// Removes and returns the next timer, which is due.
    pub(super) fn take(&mut self) -> Option<Timer> {
        self.timers.pop().map(|Reverse((.., timer))| timer)
    }
}
