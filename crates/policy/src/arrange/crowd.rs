//! Tells whether a host is crowded for long, and not just for a moment.
//!
//! A polluter's home pays for the move only if it lasts for minutes ([`super::Config::horizon_balanced`]). If VMs rest now
//! and then, as most do, a crowd is gone within seconds, and a home assigned because of it only keeps its VM from idle cores.

use homenode_units::{Ewma, Weight};

/// Number of cycles over which the share is averaged.
const OVER: f64 = 300.0;
/// A host counts as crowded for long if it was crowded in at least this share of the last [`OVER`] cycles.
const MOSTLY: f64 = 0.9;

/// The share of recent cycles in which a host was crowded.
#[derive(Clone, Debug, Default)]
pub(super) struct Crowd {
    share: Ewma,
    cycles: f64,
}

impl Crowd {
    /// Records a cycle. The share is a plain mean over the first [`OVER`] cycles, and a moving one after that.
    pub(super) fn note(&mut self, is_crowded: bool) {
        self.cycles = (self.cycles + 1.0).min(OVER);
        self.share
            .update(f64::from(u8::from(is_crowded)), Weight(1.0 / self.cycles));
    }

    /// Whether the host was crowded nearly all of the time.
    pub(super) fn lasts(&self) -> bool {
        self.share.value().is_some_and(|share| share >= MOSTLY)
    }
}

#[cfg(test)]
mod tests {
    use homenode_host::NumaBalancing;
    use proptest::prelude::*;

    use super::*;
    use crate::arrange::State;
    use crate::arrange::tests::{crowded, run};
    use crate::testing::Scene;

    #[test]
    fn where_the_kernel_balances_a_crowd_that_is_there_for_a_moment_gets_no_homes() {
        let mut scene = crowded();
        scene.kernel.numa_balancing = NumaBalancing::of(1);
        assert!(
            !run(&mut scene, &mut State::default(), 12).is_empty(),
            "from the start"
        );
        let (mut scene, mut state) = (crowded(), State::default());
        scene.kernel.numa_balancing = NumaBalancing::of(1);
        let busy = |scene: &mut Scene, running: f64| {
            (1..=8).for_each(|vm| {
                scene.vm(vm).vcpus_busy(running);
            });
        };
        busy(&mut scene, 0.0);
        assert_eq!(run(&mut scene, &mut state, 20), []);
        busy(&mut scene, 1.0);
        assert_eq!(run(&mut scene, &mut state, 100), []);
        assert!(!run(&mut scene, &mut state, 200).is_empty(), "it lasts");
    }

    /// Returns whether a crowd lasts, given in which cycles the host was crowded.
    fn lasts(cycles: impl IntoIterator<Item = bool>) -> bool {
        let mut crowd = Crowd::default();
        cycles.into_iter().for_each(|cycle| crowd.note(cycle));
        crowd.lasts()
    }

    proptest! {
        #[test]
        fn who_is_crowded_now_and_then_is_not_crowded_for_long(idle in 1usize..60, busy in 1usize..120, times in 5usize..40) {
            prop_assume!(busy < 4 * idle);
            let cycles = (0..times).flat_map(|_| (0..idle + busy).map(|at| at >= idle));
            prop_assert!(!lasts(cycles));
        }

        #[test]
        fn a_crowd_lasts_if_it_was_there_at_first_or_for_twelve_minutes(before in 0usize..3600, cycles in 1usize..50) {
            prop_assert!(lasts((0..cycles).map(|_| true)));
            let began = (0..before).map(|_| false).chain((0..720).map(|_| true));
            prop_assert!(lasts(began));
        }
    }
}
