//! Pages that a VM's program releases. The effects are in `engine/releases.rs`.

use homenode_units::Chance;

use crate::page_queue::{self, Entry, Op, Outcome, PARTITIONS, Scratch};

use crate::index::{IxVec, ThreadIx, VmIx};
use crate::scenario::ReleaseCalls;

/// Number of entries at which a queue is sent (as in the paper's published guest).
pub(crate) const QUEUE: usize = 32;

/// Releases of one VM's program.
#[derive(Clone, Debug)]
pub(crate) struct Releases {
    pub calls: ReleaseCalls,
    pub per_instruction: f64,
    /// Number of each thread's releases that have been handled.
    pub done: IxVec<ThreadIx, f64>,
    pub scratch: Scratch,
    pub chance: Chance,
    /// Share of a queue's entries that invalidate their pages.
    pub invalidating: f64,
    pub counts: ReleaseCounts,
}

/// Counts of releases so far.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReleaseCounts {
    pub released: u64,
    pub invalidated: u64,
    /// Time spent sending queues or calling, and time spent invalidating pages.
    pub sending_ns: f64,
    pub invalidating_ns: f64,
}

impl Releases {
    pub(crate) fn new(
        calls: ReleaseCalls,
        per_instruction: f64,
        threads: usize,
        seed: u64,
        vm: VmIx,
    ) -> Releases {
        let mut chance = Chance::labelled(seed, "releases", vm.0);
        Releases {
            calls,
            per_instruction,
            done: IxVec::filled(0.0, threads),
            scratch: Scratch::new(QUEUE, chance.below(u64::MAX)),
            chance,
            invalidating: 0.5,
            counts: ReleaseCounts::default(),
        }
    }

    /// Fills one queue as a guest does and reads it as the hypervisor does. Every other entry releases one of `used` frames; the
    /// other entries allocate free frames.
    pub(crate) fn queue(&mut self, used: u64, frames: u64) -> Outcome {
        let of = self.chance.below(PARTITIONS as u64);
        let per_queue = |frames: u64| (frames / PARTITIONS as u64).max(1);
        let (used, frames) = (per_queue(used), per_queue(frames));
        let free = frames.saturating_sub(used);
        let (mut queue, mut released) = (Vec::with_capacity(QUEUE), Vec::new());
        for at in 0..QUEUE {
            let number = if at % 2 == 0 {
                let number = self.chance.below(used);
                released.push(number);
                number
            } else {
                let drawn = self.chance.below(free + released.len() as u64);
                match drawn.checked_sub(free) {
                    Some(again) => released.swap_remove(again as usize),
                    None => used + drawn,
                }
            };
            let op = if at % 2 == 0 { Op::Release } else { Op::Allocation };
            queue.push(Entry::new(op, number * PARTITIONS as u64 + of));
        }
        let total = (used + free) * PARTITIONS as u64;
        let outcome = page_queue::reconcile(&queue, of as usize, total, &mut self.scratch, |_| {});
        outcome.expect("it is as long as agreed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_rarely_taken_again_before_its_queue_is_sent() {
        let mut releases = Releases::new(ReleaseCalls::Batched, 1e-5, 1, 1, VmIx(0));
        let roomy: u32 = (0..100)
            .map(|_| releases.queue(1 << 20, 1 << 22).invalidated)
            .sum();
        assert!(roomy > 1590, "{roomy} of 1600 releases");
        // If no other frame is free, a guest allocates those that it has just released.
        let full: u32 = (0..100)
            .map(|_| releases.queue(1 << 22, 1 << 22).invalidated)
            .sum();
        assert_eq!(full, 0);
    }
}
