//! Finds the pages that a guest has released and not allocated again, from its queue of page operations
//! [Policies, section 4.2.4].
//!
//! # Problem
//! A hypervisor's first-touch needs to know which pages a guest no longer uses. It invalidates the entries of these pages, so
//! that the next touch places them again. A call per page is too expensive, so the guest queues its operations and sends a full
//! queue. By then it may have allocated a page again; invalidating that page would lose its contents.
//!
//! # Terms
//! *Entry*: an operation (allocation or release) and a guest frame, in one word that the guest writes. *Partition*: one of four
//! queues, chosen by the two low bits of the frame, each with its own lock in the guest. So all operations on a page are in one
//! queue.
//!
//! # Algorithm
//! Reads from the newest entry to the oldest. The first entry found for a page counts; older ones are superseded. If it is a
//! release, the page is invalid from now on. If it is an allocation, the page stays.
//!
//! # Hostile guests
//! Entries are untrusted input. An entry is dropped and counted if the VM does not have its frame or the frame belongs to another
//! partition. A queue that is longer than agreed is refused as a whole. Nothing is allocated. Pages that were seen are found
//! through a hash whose key the guest does not know, so no choice of frames makes a call long.
//!
//! # Properties (tests of the same name)
//! - `the_newest_operation_on_a_page_counts_as_a_naive_reading_says`
//! - `every_entry_is_accounted_for_once`
//! - `what_a_hostile_guest_writes_is_left_out_and_counted`
//! - `a_queue_that_is_too_long_is_refused_and_nothing_is_done`
//!
//! # Departures from the source
//! None in the decisions. The source's code keeps a list of visited pages.

/// Number of queues of a guest.
pub const PARTITIONS: usize = 4;
/// Frames that an entry can name, and that a VM can have: 4 PiB.
pub const FRAMES_MAX: u64 = 1 << FRAME_BITS;

const FRAME_BITS: u32 = 40;
const RELEASE: u64 = 1 << 63;

/// A guest's operation on a page of its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// The guest allocated the page.
    Allocation,
    /// The guest put the page onto its list of free pages.
    Release,
}

/// An operation on a page, as the guest writes it: the operation in the highest bit, the frame in the other bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Entry(pub u64);

impl Entry {
    /// Returns the guest's entry for an operation on a frame.
    pub fn new(op: Op, frame: u64) -> Entry {
        let op = if op == Op::Release { RELEASE } else { 0 };
        Entry(op | frame & !RELEASE)
    }

    /// Returns the operation.
    pub fn op(self) -> Op {
        if self.0 & RELEASE > 0 {
            Op::Release
        } else {
            Op::Allocation
        }
    }

    /// Returns the guest frame.
    pub fn frame(self) -> u64 {
        self.0 & !RELEASE
    }
}

/// Returns the queue for operations on a frame.
pub fn partition(frame: u64) -> usize {
    frame as usize % PARTITIONS
}

/// Numbers of a queue's entries by result. Their sum is the length of the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Releases that are the newest for their page: these pages are invalid now.
    pub invalidated: u32,
    /// Allocations that are the newest for their page: these pages stay.
    pub reallocated: u32,
    /// Entries that a newer operation on their page follows.
    pub superseded: u32,
    /// Entries dropped because the VM has no such frame.
    pub outside: u32,
    /// Entries dropped because the frame belongs to another partition, whose lock does not cover this queue.
    pub misplaced: u32,
}

/// A queue is longer than agreed, and was not processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the queue has {entries} page operations, but at most {most} are allowed; none was carried out")]
pub struct TooLong {
    /// The queue's length.
    pub entries: usize,
    /// The agreed length.
    pub most: usize,
}

/// Working memory of [`reconcile`], which the caller keeps from queue to queue.
#[derive(Clone, Debug)]
pub struct Scratch {
    /// The pages seen: the number of the call in the high bits, the frame in the low bits. Open addressing.
    slots: Vec<u64>,
    shift: u32,
    generation: u64,
    /// Odd, and unknown to guests. Multiplies frames to hash them.
    key: u64,
    entries_max: usize,
}

impl Scratch {
    /// Returns memory for queues of at most this many entries (at least one is allowed). The key must be unknown to guests.
    pub fn new(entries_max: usize, key: u64) -> Scratch {
        let entries_max = entries_max.max(1);
        // With twice as many slots as pages, the next free slot is near.
        let slots = (2 * entries_max).next_power_of_two();
        Scratch {
            slots: vec![0; slots],
            shift: 64 - slots.trailing_zeros(),
            generation: 0,
            key: key | 1,
            entries_max,
        }
    }

    fn next_generation(&mut self) {
        self.generation += 1;
        if self.generation >> (64 - FRAME_BITS) > 0 {
            self.slots.fill(0);
            self.generation = 1;
        }
    }

    /// Returns true if a page is seen for the first time in this call.
    #[inline]
    fn is_new(&mut self, frame: u64) -> bool {
        let stamp = self.generation << FRAME_BITS | frame;
        let mask = self.slots.len() - 1;
        let mut at = (frame.wrapping_mul(self.key) >> self.shift) as usize & mask;
        loop {
            let seen = self.slots[at];
            if seen == stamp {
                return false;
            }
            if seen >> FRAME_BITS != self.generation {
                self.slots[at] = stamp;
                return true;
            }
            at = (at + 1) & mask;
        }
    }
}

/// Reads a partition's queue, whose oldest entry is first, from a guest with this many frames. Invalidates every page that is
/// free now.
///
/// # Errors
/// [`TooLong`]; nothing is done in this case.
pub fn reconcile(
    queue: &[Entry],
    of: usize,
    frames: u64,
    scratch: &mut Scratch,
    mut invalidate: impl FnMut(u64),
) -> Result<Outcome, TooLong> {
    if queue.len() > scratch.entries_max {
        return Err(TooLong {
            entries: queue.len(),
            most: scratch.entries_max,
        });
    }
    let frames = frames.min(FRAMES_MAX);
    scratch.next_generation();
    let mut outcome = Outcome::default();
    for entry in queue.iter().rev() {
        let frame = entry.frame();
        let count = if frame >= frames {
            &mut outcome.outside
        } else if partition(frame) != of {
            &mut outcome.misplaced
        } else if !scratch.is_new(frame) {
            &mut outcome.superseded
        } else if entry.op() == Op::Allocation {
            &mut outcome.reallocated
        } else {
            invalidate(frame);
            &mut outcome.invalidated
        };
        *count += 1;
    }
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use proptest::prelude::*;

    /// Entries of a guest that mostly behaves: few frames, so pages recur.
    fn queue() -> impl Strategy<Value = Vec<Entry>> {
        let frame = prop_oneof![
            8 => (0u64..40).prop_map(|n| n * 4 + 2),
            1 => 0u64..200,
            1 => any::<u64>(),
        ];
        let op = prop_oneof![Just(Op::Allocation), Just(Op::Release)];
        prop::collection::vec((op, frame).prop_map(|(op, frame)| Entry::new(op, frame)), 0..200)
    }

    fn sum(outcome: &Outcome) -> usize {
        let Outcome {
            invalidated,
            reallocated,
            superseded,
            outside,
            misplaced,
        } = outcome;
        (invalidated + reallocated + superseded + outside + misplaced) as usize
    }

    proptest! {
        #[test]
        fn the_newest_operation_on_a_page_counts_as_a_naive_reading_says(
            queues in prop::collection::vec(queue(), 1..6), frames in 0u64..300, key: u64,
        ) {
            let mut scratch = Scratch::new(200, key);
            for queue in queues {
                // Reads the oldest entry first and keeps the last operation on each page.
                let mut last = BTreeMap::new();
                for entry in queue.iter().filter(|entry| entry.frame() < frames && entry.frame() % 4 == 2) {
                    last.insert(entry.frame(), entry.op());
                }
                let mut freed = Vec::new();
                let outcome = reconcile(&queue, 2, frames, &mut scratch, |frame| freed.push(frame)).unwrap();
                freed.sort_unstable();
                let released = |(frame, op): (&u64, &Op)| (*op == Op::Release).then_some(*frame);
                let expected: Vec<u64> = last.iter().filter_map(released).collect();
                prop_assert_eq!(&freed, &expected);
                prop_assert_eq!(outcome.invalidated as usize, freed.len());
                prop_assert_eq!(outcome.reallocated as usize, last.len() - freed.len());
            }
        }

        #[test]
        fn every_entry_is_accounted_for_once(
            words in prop::collection::vec(any::<u64>(), 0..64), of in 0usize..4, frames: u64, key: u64,
        ) {
            let queue: Vec<Entry> = words.into_iter().map(Entry).collect();
            let outcome = reconcile(&queue, of, frames, &mut Scratch::new(64, key), |_| {}).unwrap();
            prop_assert_eq!(sum(&outcome), queue.len());
        }

        #[test]
        fn an_entry_is_read_as_it_was_written(frame in 0..FRAMES_MAX) {
            for op in [Op::Allocation, Op::Release] {
                let entry = Entry::new(op, frame);
                prop_assert_eq!((entry.op(), entry.frame()), (op, frame));
            }
        }
    }

    #[test]
    fn what_a_hostile_guest_writes_is_left_out_and_counted() {
        let release = |frame| Entry::new(Op::Release, frame);
        let queue = [
            release(100),
            release(5),
            release(4),
            release(4),
            Entry(u64::MAX),
            release(8),
        ];
        let mut freed = Vec::new();
        let outcome = reconcile(&queue, 0, 100, &mut Scratch::new(8, 77), |frame| {
            freed.push(frame);
        });
        let expected = Outcome {
            invalidated: 2,
            superseded: 1,
            outside: 2,
            misplaced: 1,
            reallocated: 0,
        };
        assert_eq!(outcome, Ok(expected));
        assert_eq!(freed, [8, 4]);
    }

    #[test]
    fn a_queue_that_is_too_long_is_refused_and_nothing_is_done() {
        let queue = vec![Entry::new(Op::Release, 4); 33];
        let mut scratch = Scratch::new(32, 1);
        let refused = reconcile(&queue, 0, 100, &mut scratch, |_| panic!("nothing is done"));
        assert_eq!(
            refused,
            Err(TooLong {
                entries: 33,
                most: 32
            })
        );
    }

    #[test]
    fn generations_that_wrap_forget_what_was_seen() {
        let mut scratch = Scratch::new(4, 3);
        scratch.generation = (1 << (64 - FRAME_BITS)) - 1;
        scratch.slots.fill(1 << FRAME_BITS | 4);
        let outcome = reconcile(&[Entry::new(Op::Release, 4)], 0, 100, &mut scratch, |_| {}).unwrap();
        assert_eq!((outcome.invalidated, scratch.generation), (1, 1));
    }
}
