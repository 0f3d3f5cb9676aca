//! Pages that guests release: what it costs to notify the hypervisor, and where the pages are placed again.
//!
//! # Model [Policies, section 4.2]
//!
//! A program releases as many pages as its profile says, and allocates as many again. Under first-touch, a hypervisor that is
//! notified of a release invalidates the page; the next touch places the page on the node of that touch. Calls are
//! - *empty*: one call per release, and the hypervisor does nothing; the paper timed this;
//! - *each*: one call per release, and the hypervisor invalidates the page;
//! - *batched*: releases and allocations go to one of four queues, chosen by the two low bits of the frame. The thread that adds
//!   the 32nd entry sends its queue. [`crate::page_queue`] reads such queues to find which pages to invalidate: released frames
//!   are drawn from the program's, allocated frames from those free at the time, including the queue's own releases.
//!
//! A guest holds a lock during a call: the lock of its list of free pages, or that of the queue. So threads wait for each other.
//! The model is mean value analysis with one customer per thread, the program's own time between two visits, and the mean time
//! that the lock is held (closed network, exponential times). Passing a lock on costs the fetch of a line from another node.
//!
//! The result is not fitted. Empty calls make the paper's wrmem on 48 CPUs 2.1 times slower here and 3 times slower there.
//! Invalidation takes 78 percent of the time of sent queues here, 87.5 percent there. The paper mentions neither a lock around
//! the single call nor the length of a queue; its published guest sends 32 entries.
//!
//! Every 10 ms, the pages that a thread has released since the last time are drawn evenly from its private pages (if it has none,
//! from all that it uses). They are then placed on the thread's node as far as that has room.
//!
//! # Left out
//!
//! That a queue's holder keeps others longer than exponential times say; the holder of a lock that loses its CPU; released pages
//! that another thread allocates; the guest's own work for releases and allocations; other guests' use of the hypervisor's locks.

use crate::page_queue::{Entry, PARTITIONS};
use homenode_units::{Ns, Placing};

use super::Engine;
use super::agenda::Timer;
use crate::guest::releases::{QUEUE, Releases};
use crate::guest::{Stage, View, Vm};
use crate::hypervisor::EXIT_CYCLES;
use crate::hypervisor::memory::Toucher;
use crate::index::{ThreadIx, VmIx};
use crate::scenario::ReleaseCalls;

/// Bytes of a queue, which the hypervisor fetches line by line from where they were written.
const QUEUE_BYTES: f64 = (QUEUE * size_of::<Entry>()) as f64;
/// CPU cycles to invalidate one entry of the hypervisor's page table and to free its page: a page-table walk in the cache, and an
/// insertion into the allocator's list (estimate).
const INVALIDATE_CYCLES: f64 = 600.0;
/// CPU cycles of the hypervisor's fault when an invalidated page is touched: an exit, and allocating a page (estimate).
const FAULT_CYCLES: f64 = EXIT_CYCLES + 1000.0;
/// CPU cycles of adding an entry to a queue (estimate).
const ENQUEUE_CYCLES: f64 = 20.0;
/// Interval at which released pages are placed again.
const PERIOD: Ns = Ns::from_millis(10);

/// Cost of a release to its thread.
struct Cost {
    /// Locks taken per release, number of locks to choose from, and time that one lock is held.
    visits: f64,
    locks: f64,
    held_ns: f64,
    /// Time spent outside the lock.
    apart_ns: f64,
}

/// Returns a VM's releases if its hypervisor is notified of them and places pages on first touch.
fn active(vm: &Vm) -> Option<&Releases> {
    let first_touch = vm.memory_policy.placing == Placing::FirstTouch && vm.memory.view != View::Truth;
    vm.releases.as_ref().filter(|_| first_touch)
}

/// Returns the mean time from requesting a lock to releasing it. Each of the `customers` thinks for `think_ns` and then visits
/// one of `locks` locks.
fn response_ns(customers: usize, think_ns: f64, held_ns: f64, locks: f64) -> f64 {
    let (mut there, mut response) = (0.0, held_ns);
    for customer in 1..=customers {
        response = held_ns * (1.0 + there);
        there = customer as f64 * response / (think_ns + response) / locks;
    }
    response
}

impl Engine {
    /// Returns the time that releases add to an instruction that takes `instruction_ns` without them.
    pub(super) fn release_ns(&self, vm: VmIx, instruction_ns: f64) -> f64 {
        let owner = &self.vms[vm];
        let Some(releases) = active(owner) else { return 0.0 };
        let cost = self.release_cost(releases);
        let think_ns = (instruction_ns / releases.per_instruction + cost.apart_ns) / cost.visits;
        let response = response_ns(owner.threads.len(), think_ns, cost.held_ns, cost.locks);
        releases.per_instruction * (cost.visits * response + cost.apart_ns)
    }

    fn release_cost(&self, releases: &Releases) -> Cost {
        let ns = |cycles: f64| cycles / self.figures.clock_ghz;
        let single = |held_cycles: f64, apart_cycles: f64| Cost {
            visits: 1.0,
            locks: 1.0,
            held_ns: self.figures.handoff_ns + ns(held_cycles),
            apart_ns: ns(apart_cycles),
        };
        match releases.calls {
            ReleaseCalls::None => single(0.0, 0.0),
            ReleaseCalls::Empty => single(EXIT_CYCLES, 0.0),
            ReleaseCalls::Each => single(EXIT_CYCLES + INVALIDATE_CYCLES, FAULT_CYCLES),
            ReleaseCalls::Batched => {
                let (sending, invalidating) = self.queue_ns(releases);
                Cost {
                    // One visit for the release, and one for the allocation that follows it some time later.
                    visits: 2.0,
                    locks: PARTITIONS as f64,
                    held_ns: self.figures.handoff_ns
                        + ns(ENQUEUE_CYCLES)
                        + (sending + invalidating) / QUEUE as f64,
                    apart_ns: ns(FAULT_CYCLES) * 2.0 * releases.invalidating,
                }
            }
        }
    }

    /// Returns the time to send a queue, and the time to invalidate what it releases.
    fn queue_ns(&self, releases: &Releases) -> (f64, f64) {
        let sending = EXIT_CYCLES / self.figures.clock_ghz
            + QUEUE_BYTES / self.figures.line_bytes * self.figures.handoff_ns;
        let invalidating = releases.invalidating * QUEUE as f64 * INVALIDATE_CYCLES / self.figures.clock_ghz;
        (sending, invalidating)
    }

    /// Starts handling releases when a VM's program starts.
    pub(super) fn start_releases(&mut self, vm: VmIx) {
        let owner = &self.vms[vm];
        if owner.releases.is_some() {
            let life = owner.life;
            self.agenda
                .set(Ns(self.now.0 + PERIOD.0), Timer::Releases { vm, life });
        }
    }

    pub(super) fn place_released(&mut self, vm: VmIx, life: u32) {
        if self.vms[vm].life != life || self.vms[vm].stage != Stage::Program {
            return;
        }
        self.settle_vm(vm);
        self.agenda
            .set(Ns(self.now.0 + PERIOD.0), Timer::Releases { vm, life });
        let told = active(&self.vms[vm]).is_some();
        let Some(mut releases) = self.vms[vm].releases.take() else {
            return;
        };
        let frames = self.vms[vm].memory_bytes.to_pages().0;
        let used = self.vms[vm].memory.touched();
        if told && releases.calls == ReleaseCalls::Batched {
            let outcome = releases.queue(used, frames);
            releases.invalidating = f64::from(outcome.invalidated) / QUEUE as f64;
        }
        for thread in self.vms[vm].threads.places() {
            let all = self.vms[vm].threads[thread].instructions * releases.per_instruction;
            let released = (all - releases.done[thread]) as u64;
            releases.done[thread] += released as f64;
            releases.counts.released += released;
            if told && released > 0 {
                self.told_of(vm, thread, released, &mut releases);
            }
        }
        self.vms[vm].releases = Some(releases);
    }

    fn told_of(&mut self, vm: VmIx, thread: ThreadIx, released: u64, releases: &mut Releases) {
        let ns = |cycles: f64| released as f64 * cycles / self.figures.clock_ghz;
        let invalidated = match releases.calls {
            ReleaseCalls::None => return,
            ReleaseCalls::Empty => {
                releases.counts.sending_ns += ns(EXIT_CYCLES);
                0
            }
            ReleaseCalls::Each => {
                releases.counts.sending_ns += ns(EXIT_CYCLES);
                releases.counts.invalidating_ns += ns(INVALIDATE_CYCLES);
                released
            }
            ReleaseCalls::Batched => {
                let (sending, invalidating) = self.queue_ns(releases);
                let queues = 2.0 * released as f64 / QUEUE as f64;
                releases.counts.sending_ns += queues * sending;
                releases.counts.invalidating_ns += queues * invalidating;
                let expected = 2.0 * released as f64 * releases.invalidating;
                ((expected + releases.chance.unit()) as u64).min(released)
            }
        };
        releases.counts.invalidated += invalidated;
        let task = self.vms[vm].task(thread);
        let node = self.topology.cpus[self.scheduler.queues.tasks[task].cpu].node;
        let memory = &mut self.vms[vm].memory;
        let taken = memory.invalidate(thread, node, invalidated, &mut releases.chance);
        for (region, from, pages) in taken {
            self.memory.free[from] += pages;
            self.placed.fill(0);
            self.place(vm, region, Toucher { vcpu: thread, node }, pages);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_customer_never_waits_and_many_are_served_one_after_the_other() {
        assert!((response_ns(1, 100.0, 10.0, 1.0) - 10.0).abs() < 1e-9);
        // 48 customers hold a lock for 10 each, without time to think, so a visit waits for all 48 turns.
        assert!((response_ns(48, 0.0, 10.0, 1.0) - 480.0).abs() < 1e-6);
        // With M = 4 locks and N = 48 customers, a visit takes (N + M - 1) / M turns: (48 + 3) / 4.
        assert!((response_ns(48, 0.0, 10.0, 4.0) - 10.0 * 51.0 / 4.0).abs() < 1e-6);
    }
}
