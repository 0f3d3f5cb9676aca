//! The decisions of a scheduler, and what the host does to carry them out.

use homenode_units::{Chance, Ns};

use super::queues::Queues;
use crate::index::{CpuIx, TaskIx, VmIx};

/// Time of an event that never comes.
pub(super) const NEVER: Ns = Ns(u64::MAX);

/// Returns the earliest of some times; [`NEVER`] if there is none. Every event asks for it twice, over all CPUs. A minimum is a
/// chain of comparisons, so four of them are taken in parallel.
pub(crate) fn earliest(times: &[Ns]) -> Ns {
    let mut least = [NEVER; 4];
    let fours = times.chunks_exact(4);
    for time in fours.remainder() {
        least[0] = least[0].min(*time);
    }
    for four in fours {
        for (least, time) in least.iter_mut().zip(four) {
            *least = (*least).min(*time);
        }
    }
    least[0].min(least[1]).min(least[2].min(least[3]))
}

/// The decisions of a scheduling discipline: order, slices, the CPU on which a task wakes, and balancing.
pub(super) trait Discipline {
    /// Adds the VM with the next number. `weight` is usually 256; `cap_percent` is the most CPU time that the VM gets, in percent
    /// of one CPU.
    fn add_vm(&mut self, weight: u32, cap_percent: Option<u32>);

    /// Adds the task with the next number: a vCPU of this VM, or a task of the host's own.
    fn added(&mut self, vm: Option<VmIx>);

    /// Charges a task for a stretch of running on a CPU that ends now.
    fn charge(&mut self, queues: &Queues, cpu: CpuIx, task: TaskIx, ns: u64);

    /// Starts a sleeping task for the first time.
    fn fork(&mut self, queues: &mut Queues, task: TaskIx, now: Ns, chance: &mut Chance);

    /// Wakes a sleeping task. `waker` is the CPU of the task that wakes it, if a task does.
    fn wake(&mut self, queues: &mut Queues, task: TaskIx, waker: Option<CpuIx>, now: Ns);

    /// Chooses the task to run on a CPU that has no current task.
    fn pick(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns);

    /// Notes that a waiting task was taken off a CPU's queue.
    fn left(&mut self, queues: &Queues, cpu: CpuIx, now: Ns);

    /// Finds a CPU for a sleeping task that may no longer run on the CPU where it was.
    fn rehome(&mut self, queues: &mut Queues, task: TaskIx, now: Ns);

    /// Makes a task that was taken off its queue or CPU runnable again, on the CPU that the task now names.
    fn requeue(&mut self, queues: &mut Queues, task: TaskIx, now: Ns);

    /// Returns the time of the next event that can change anything.
    fn next_event(&self) -> Ns;

    /// Handles the events that are due.
    fn handle_events(&mut self, queues: &mut Queues, now: Ns);

    /// Accounts for a CPU's time up to `now`.
    fn settle(&mut self, queues: &mut Queues, cpu: CpuIx, now: Ns) {
        if let Some((task, ns)) = queues.settle(cpu, now) {
            self.charge(queues, cpu, task, ns);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_earliest_time_is_the_least(times in prop::collection::vec(any::<u64>().prop_map(Ns), 0..60)) {
            prop_assert_eq!(earliest(&times), times.iter().copied().min().unwrap_or(NEVER));
        }
    }
}
