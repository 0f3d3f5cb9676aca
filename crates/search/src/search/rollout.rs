//! A run from a point in time to its end.

use std::collections::BTreeMap;

use homenode_control::Config;
use homenode_twin::Twin;
use homenode_units::{Ns, VmId};

use super::arranger::{Arranger, POLICY};
use super::schedule::Schedule;
use crate::run::{Run, Setup, Starts};
use crate::score::value;

/// At most so many points of a run are kept.
const POINTS_MAX: usize = 12;

/// A point of a run from which it can go on differently.
#[derive(Clone, Debug)]
pub struct Point {
    twin: Twin,
    arranger: Arranger,
    starts: Starts,
}

impl Point {
    /// The beginning of a run.
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
            starts: Starts::new(&setup.scenario),
            twin,
        })
    }

    /// When it is.
    pub fn at(&self) -> Ns {
        self.twin.now()
    }
}

/// What came of a schedule.
#[derive(Clone, Debug)]
pub struct Rollout {
    /// What each VM did.
    pub run: Run,
    /// Mean over VMs of the ratio beside the base run; infinite where there is none.
    pub mean: f64,
    /// Points after the one from which it was rolled out: where VMs came, went, began or ended their work, and now and then.
    pub points: Vec<Point>,
}

/// Goes on from a point to the end of the run.
///
/// # Errors
/// When the host cannot be read, or refuses a plan.
pub fn rollout(
    setup: &Setup,
    config: &Config,
    base: &Run,
    from: &Point,
    schedule: &Schedule,
) -> anyhow::Result<Rollout> {
    let Point {
        mut twin,
        arranger,
        mut starts,
    } = from.clone();
    let mut arranger = arranger.following(schedule.clone());
    let often = Ns(base.report.at_ns.0 / POINTS_MAX as u64 * 2);
    let (mut points, mut active, mut last) = (Vec::new(), arranger.active(), twin.now());
    while !setup.is_over(&twin) {
        if active != arranger.active() || twin.now().saturating_sub(last) > often {
            active = arranger.active();
            last = twin.now();
            points.push(Point {
                twin: twin.clone(),
                arranger: arranger.clone(),
                starts: starts.clone(),
            });
        }
        starts.look(&twin);
        arranger.step(&mut twin)?;
        setup.wait(&mut twin, config.period);
    }
    let run = Run::of(setup, &twin, &starts, POLICY, arranger.decisions);
    let all = points.len().max(1);
    // Of too many, evenly spread ones.
    let kept = POINTS_MAX.min(all);
    let mut at = 0;
    points.retain(|_| {
        at += 1;
        at * kept / all > (at - 1) * kept / all
    });
    Ok(Rollout {
        mean: value(base, &run),
        run,
        points,
    })
}
