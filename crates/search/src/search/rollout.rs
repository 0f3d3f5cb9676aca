//! Continues a run from a point in time to its end.

use std::collections::BTreeMap;

use homenode_control::Config;
use homenode_host::Host as _;
use homenode_reproduce::engine::{Run, is_over};
use homenode_twin::{Twin, TwinReport, VmReport};
use homenode_units::stats::mean;
use homenode_units::{Ns, VmId};

use super::arranger::Arranger;
use super::schedule::Schedule;
use crate::score::value;
use homenode_twin::Setup;

/// Maximum number of points kept of a run.
const POINTS_MAX: usize = 24;

/// A point of a run from which it can continue differently.
#[derive(Clone, Debug)]
pub struct Point {
    twin: Twin,
    arranger: Arranger,
}

impl Point {
    /// Returns the beginning of a run.
    ///
    /// # Errors
    /// A scenario that the machine cannot run.
    pub fn beginning(setup: &Setup, config: &Config) -> anyhow::Result<Point> {
        let twin = setup.start()?;
        let vms = setup.scenario.vms.iter().enumerate();
        let places: BTreeMap<VmId, usize> = vms
            .filter_map(|(at, vm)| Some((twin.vm_id(&vm.name)?, at)))
            .collect();
        Ok(Point {
            arranger: Arranger::new(config.clone(), places),
            twin,
        })
    }

    /// Returns the time of this point.
    pub fn at(&self) -> Ns {
        self.twin.now()
    }
}

/// Result of a schedule.
#[derive(Clone, Debug)]
pub struct Rollout {
    /// The results of each VM in the run.
    pub run: Run,
    /// Mean over VMs of the ratio to the base run; infinite if no VM has a ratio.
    pub mean: f64,
    /// Points after the one from which the run was rolled out: when VMs became active or idle, and some times in between.
    pub points: Vec<Point>,
}

/// Decides when a rollout stops early: when it could not beat a bound even if each VM, from now on, were as fast as in its
/// best run so far.
///
/// For a VM at work, the time so far is spent, and the rest of its work takes the same share of the least time seen.
#[derive(Clone, Debug)]
pub struct Cut {
    /// A rollout with this value or a higher one is of no use.
    pub bound: f64,
    /// The lowest ratio of each VM in any run so far; above 0.
    pub least: Vec<f64>,
}

/// Factor by which a VM may still fall below its lowest ratio so far.
const SLACK: f64 = 0.97;
/// Upper bound for the time of boot and first touches, which runtimes leave out.
const BOOT_S: f64 = 4.0;
/// Cycles between two checks for stopping early.
const LOOK_CYCLES: u32 = 5;

impl Cut {
    fn is_hopeless(&self, base: &Run, report: &TwinReport) -> bool {
        let vms = base.report.vms.iter().zip(&report.vms).zip(&self.least);
        let least = |((base, vm), least): ((&VmReport, &VmReport), &f64)| {
            let least = least * SLACK;
            // For a VM with several starts or programs, nothing is known before the end.
            let (Some(base_s), 1, [] | [_]) =
                (base.whole_s(), base.runtimes_s().count(), vm.programs.as_slice())
            else {
                return least;
            };
            let Some(arrival_s) = vm.arrival_s else {
                return least;
            };
            if let Some(runtime_s) = vm.runtime_s {
                return runtime_s / base_s;
            }
            let elapsed_s = (report.at_ns.as_secs_f64() - arrival_s - BOOT_S).max(0.0);
            let left = (1.0 - vm.instructions_g / base.instructions_g).clamp(0.0, 1.0);
            (elapsed_s / base_s + left * least).max(least)
        };
        // Without the warm-up's instructions, the remaining work cannot be estimated.
        report.measured_from_ns == Ns::ZERO && mean(vms.map(least)).is_some_and(|mean| mean > self.bound)
    }
}

/// Continues from a point to the end of the run; `None` if the cut stopped it.
///
/// # Errors
/// When the host cannot be read, or refuses a plan.
pub fn rollout(
    setup: &Setup,
    config: &Config,
    base: &Run,
    from: &Point,
    schedule: &Schedule,
    cut: Option<&Cut>,
) -> anyhow::Result<Option<Rollout>> {
    let Point { mut twin, arranger } = from.clone();
    let mut arranger = arranger.following(schedule.clone());
    let often = Ns(base.report.at_ns.0 / POINTS_MAX as u64);
    let (mut points, mut active, mut last) = (Vec::new(), arranger.active(), twin.now());
    let until = setup.scenario.duration;
    for cycle in 1.. {
        if is_over(&twin, until) {
            break;
        }
        if cycle % LOOK_CYCLES == 0 && cut.is_some_and(|cut| cut.is_hopeless(base, &twin.report())) {
            return Ok(None);
        }
        if active != arranger.active() || twin.now().saturating_sub(last) > often {
            active = arranger.active();
            last = twin.now();
            points.push(Point {
                twin: twin.clone(),
                arranger: arranger.clone(),
            });
        }
        arranger.step(&mut twin)?;
        twin.wait(until.saturating_sub(twin.now()).min(config.period));
    }
    let run = arranger.came_to(&twin);
    let all = points.len().max(1);
    // Keep at most this many points, evenly distributed.
    let kept = POINTS_MAX.min(all);
    let mut at = 0;
    points.retain(|_| {
        at += 1;
        at * kept / all > (at - 1) * kept / all
    });
    Ok(Some(Rollout {
        mean: value(base, &run),
        run,
        points,
    }))
}
