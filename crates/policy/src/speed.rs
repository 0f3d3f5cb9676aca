//! How fast a VM is compared with itself: its speed now over its usual speed.
//!
//! # Problem
//! Instructions per second grow with the guest's work, and one program's normal speed is half of another's. Whether a VM is slow
//! can be told only against its own past. The predictor's averages ([`crate::predict::Profiles`]) cannot serve as that past: they
//! follow a change within seconds.
//!
//! # Terms
//! - *Speed* of a VM: instructions per second of CPU time that it wanted ([`homenode_host::VmRates::speed`]).
//! - *Piece*: periods of at least [`PIECE`] together in which the speed was known. Periods in which the VM rested are left out.
//! - *Usual speed* of a VM: the median speed of its last [`KEPT`] pieces, an hour at work.
//!
//! # Algorithm
//! Each period at work is added to the current piece: its instructions, and the CPU time that the VM wanted. A full piece is
//! kept, in place of the oldest if there are [`KEPT`], and the median is taken again. The usual speed is known from [`KNOWN`]
//! pieces on, a minute at work; before that there is none.
//!
//! # Properties
//! - `a_vm_that_runs_as_ever_is_at_its_usual_speed_whatever_its_load`
//! - `the_usual_speed_is_known_after_a_minute_at_work`
//! - `a_slow_spell_shorter_than_half_of_what_is_kept_does_not_become_usual`
//! - `what_was_long_ago_is_forgotten`

use std::collections::{BTreeMap, VecDeque};

use homenode_host::View;
use homenode_units::{Ns, VmId, stats};

// The following bound memory and noise, and are not settings.
/// Length of a piece.
pub const PIECE: Ns = Ns::from_secs(10);
/// Number of pieces that are kept.
pub const KEPT: usize = 360;
/// Number of pieces from which on the usual speed is known.
pub const KNOWN: usize = 6;

/// The past speeds of one VM.
#[derive(Clone, Debug, Default)]
struct Past {
    /// The current piece: its length, instructions, and wanted CPU-seconds.
    lasted: Ns,
    instructions: f64,
    wanted_s: f64,
    /// Speeds of full pieces, oldest first.
    pieces: VecDeque<f64>,
    usual: Option<f64>,
}

/// The past speeds of all VMs.
#[derive(Clone, Debug, Default)]
pub struct Speeds {
    vms: BTreeMap<VmId, Past>,
}

impl Speeds {
    /// Adds the last period of every VM. Forgets VMs that are gone.
    pub fn observe(&mut self, view: &View<'_>) {
        self.vms.retain(|id, _| view.sample.vm(*id).is_some());
        let Some(rates) = view.rates else { return };
        for vm in &rates.vms {
            if let Some(speed) = vm.speed() {
                let past = self.vms.entry(vm.id).or_default();
                past.add(rates.period_ns, speed, vm.cpus_wanted());
            }
        }
    }

    /// Returns a VM's usual speed, in instructions per CPU-second; `None` until it was seen at work for a minute.
    pub fn usual(&self, vm: VmId) -> Option<f64> {
        self.vms.get(&vm)?.usual
    }
}

impl Past {
    fn add(&mut self, period: Ns, speed: f64, cpus_wanted: f64) {
        let wanted_s = cpus_wanted * period.as_secs_f64();
        self.lasted = Ns(self.lasted.0.saturating_add(period.0));
        self.instructions += speed * wanted_s;
        self.wanted_s += wanted_s;
        if self.lasted < PIECE {
            return;
        }
        if self.pieces.len() == KEPT {
            self.pieces.pop_front();
        }
        self.pieces.push_back(self.instructions / self.wanted_s);
        (self.lasted, self.instructions, self.wanted_s) = (Ns::ZERO, 0.0, 0.0);
        if self.pieces.len() >= KNOWN {
            // A VM that executed nothing for half of the time has no speed to compare with.
            let median = stats::median(self.pieces.iter().copied());
            self.usual = median.filter(|usual| *usual > 0.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use homenode_units::Bytes;

    use super::*;
    use crate::testing::{Scene, vm_id};

    struct Case {
        scene: Scene,
        speeds: Speeds,
    }

    impl Case {
        fn new() -> Case {
            let mut scene = Scene::four_nodes(4);
            scene.add_vm(1, 2, Bytes::from_gib(1), 0);
            Case {
                scene,
                speeds: Speeds::default(),
            }
        }

        /// Runs for some seconds, with this load of each of its two vCPUs. Returns the last ratio.
        fn run(&mut self, secs: u64, busy: f64, instructions_per_s: u64) -> Option<f64> {
            let mut ratio = None;
            for _ in 0..secs {
                self.scene.at += Ns::from_secs(1);
                self.scene
                    .vm(1)
                    .vcpus_busy(busy)
                    .instructions_per_s(instructions_per_s);
                let speeds = &mut self.speeds;
                ratio = self.scene.with_view(|view| {
                    speeds.observe(view);
                    let speed = view.vms[0].rates?.speed()?;
                    Some(speed / speeds.usual(vm_id(1))?)
                });
            }
            ratio
        }
    }

    fn is_near(ratio: Option<f64>, expected: f64) -> bool {
        ratio.is_some_and(|ratio| (ratio - expected).abs() < 0.01)
    }

    #[test]
    fn a_vm_that_runs_as_ever_is_at_its_usual_speed_whatever_its_load() {
        let mut case = Case::new();
        case.run(70, 1.0, 2_000_000_000);
        assert!(is_near(case.speeds.usual(vm_id(1)).map(|usual| usual / 2e9), 1.0));
        let ratio = case.run(1, 0.25, 500_000_000);
        assert!(is_near(ratio, 1.0), "{ratio:?}");
        let ratio = case.run(1, 0.25, 350_000_000);
        assert!(is_near(ratio, 0.7), "{ratio:?}");
    }

    #[test]
    fn the_usual_speed_is_known_after_a_minute_at_work() {
        let mut case = Case::new();
        let known = PIECE.0 / 1_000_000_000 * KNOWN as u64;
        assert_eq!(case.run(known - 1, 1.0, 2_000_000_000), None);
        assert_eq!(case.run(300, 0.01, 20_000_000), None, "rest does not count");
        case.run(2, 1.0, 2_000_000_000);
        assert!(is_near(case.run(1, 1.0, 2_000_000_000), 1.0));
    }

    #[test]
    fn a_slow_spell_shorter_than_half_of_what_is_kept_does_not_become_usual() {
        let mut case = Case::new();
        case.run(600, 1.0, 2_000_000_000);
        let ratio = case.run(590, 1.0, 1_000_000_000);
        assert!(is_near(ratio, 0.5), "{ratio:?}");
        let ratio = case.run(100, 1.0, 1_000_000_000);
        assert!(is_near(ratio, 1.0), "{ratio:?}");
    }

    #[test]
    fn what_was_long_ago_is_forgotten() {
        let mut case = Case::new();
        let all = PIECE.0 / 1_000_000_000 * KEPT as u64;
        case.run(all, 1.0, 2_000_000_000);
        case.run(all, 1.0, 4_000_000_000);
        assert_eq!(case.speeds.vms[&vm_id(1)].pieces.len(), KEPT);
        assert!(is_near(case.run(1, 1.0, 4_000_000_000), 1.0));
        // A VM that is gone is not remembered.
        case.scene = Scene::four_nodes(4);
        case.scene.with_view(|view| case.speeds.observe(view));
        assert!(case.speeds.vms.is_empty());
    }
}
