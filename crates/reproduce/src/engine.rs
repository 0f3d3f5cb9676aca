//! The only engine that runs scenarios on the simulated host. `sim`, `search`, `sweep`, `whatif`, experiments and claims use it.

use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};

use anyhow::Result;
use homenode_control::{Around, Control, Cycle, Event};
use homenode_host::{Host as _, HostError};
use homenode_twin::{Setup, Twin, TwinReport};
use homenode_units::Ns;

/// Result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Name of the policies.
    pub policy: String,
    /// Number of decisions that were carried out.
    pub decisions: usize,
    /// The results of each VM and each node; VMs are in the scenario's order.
    pub report: TwinReport,
}

/// Runs a scenario to its end, or for its duration, under the policies of `control`; the result calls them `policy`. `watch`
/// is called after each cycle with the cycle and the control loop. If it fails, the run ends.
///
/// # Errors
/// A scenario that the machine cannot run; a host that cannot be read; a planner that fails, as
/// [`homenode_control::external::PlannerFailed`]; those of `watch`.
pub fn run(
    setup: &Setup,
    policy: &str,
    control: Control,
    watch: impl FnMut(&Cycle, &Control) -> Result<()>,
) -> Result<Run> {
    let ended = simulate(setup.start()?, control, setup.scenario.duration, Watched(watch))?;
    Ok(Run {
        policy: policy.to_owned(),
        decisions: ended.decisions,
        report: ended.twin.report(),
    })
}

/// Runs up to a time, or until all programs have ended. Returns the host and the control loop in the state of that time.
///
/// # Errors
/// The errors of [`run`].
pub fn run_until(
    twin: Twin,
    control: Control,
    at: Ns,
    watch: impl FnMut(&Cycle, &Control) -> Result<()>,
) -> Result<(Twin, Control)> {
    let ended = simulate(twin, control, at, Watched(watch))?;
    Ok((ended.twin, ended.control))
}

/// Returns true if a run is over, because every program has ended or this time has come.
pub fn is_over(twin: &Twin, until: Ns) -> bool {
    twin.finished() || twin.now() >= until
}

/// Looks at a run before and after each cycle.
pub(crate) trait Probe {
    /// Called before a cycle.
    ///
    /// # Errors
    /// An error that ends the run.
    fn before(&mut self, _: &mut Twin) -> Result<()> {
        Ok(())
    }

    /// Called after a cycle.
    ///
    /// # Errors
    /// An error that ends the run.
    fn after(&mut self, twin: &mut Twin, cycle: &Cycle, control: &Control) -> Result<()>;

    /// Returns the time until the next cycle. `left` is the rest of the run, `period` the policies' period.
    fn pause(&self, _now: Ns, left: Ns, period: Ns) -> Ns {
        left.min(period)
    }
}

/// A probe that calls a closure after each cycle.
struct Watched<W>(W);

impl<W: FnMut(&Cycle, &Control) -> Result<()>> Probe for Watched<W> {
    fn after(&mut self, _: &mut Twin, cycle: &Cycle, control: &Control) -> Result<()> {
        (self.0)(cycle, control)
    }
}

/// The result of a run that has ended.
pub(crate) struct Ended<P> {
    pub(crate) twin: Twin,
    pub(crate) control: Control,
    pub(crate) probe: P,
    pub(crate) decisions: usize,
}

/// Runs until all programs have ended, or until this time.
///
/// # Errors
/// See [`run`].
pub(crate) fn simulate<P: Probe>(mut twin: Twin, control: Control, until: Ns, probe: P) -> Result<Ended<P>> {
    let period = control.config().period;
    let control = Mutex::new(control);
    let mut to_end = ToEnd {
        until,
        period,
        control: &control,
        probe,
        decisions: 0,
    };
    homenode_control::run(&mut twin, &control, &mut to_end)?;
    let ToEnd { probe, decisions, .. } = to_end;
    Ok(Ended {
        twin,
        control: control.into_inner().unwrap_or_else(PoisonError::into_inner),
        probe,
        decisions,
    })
}

struct ToEnd<'a, P> {
    until: Ns,
    period: Ns,
    control: &'a Mutex<Control>,
    probe: P,
    decisions: usize,
}

impl<P: Probe> Around<Twin> for ToEnd<'_, P> {
    type Error = anyhow::Error;

    fn before(&mut self, twin: &mut Twin) -> Result<ControlFlow<()>> {
        if is_over(twin, self.until) {
            return Ok(ControlFlow::Break(()));
        }
        self.probe.before(twin)?;
        Ok(ControlFlow::Continue(()))
    }

    fn after(&mut self, twin: &mut Twin, cycle: Result<Cycle, HostError>) -> Result<ControlFlow<()>> {
        let cycle = cycle?;
        let decided = |event: &&Event| matches!(event, Event::Decided { .. });
        self.decisions += cycle.events.iter().filter(decided).count();
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        self.probe.after(twin, &cycle, &control)?;
        match control.failed_planner() {
            Some(failed) => Err(failed.clone().into()),
            None => Ok(ControlFlow::Continue(())),
        }
    }

    fn wait(&mut self, twin: &mut Twin) {
        let now = twin.now();
        twin.wait(self.probe.pause(now, self.until.saturating_sub(now), self.period));
    }
}

#[cfg(test)]
mod tests {
    use homenode_control::{Config, Mode, PolicySet};
    use homenode_machine_files::preset;
    use homenode_twin::Scenario;

    use super::*;

    /// One VM returns, one is stopped, one never arrives, and one runs two programs. Figures count from 5 s on.
    const CASE: &str = r#"
name = "case"
duration = "60s"
warm_up = "5s"
[[vm]]
name = "back"
vcpus = 2
memory = "2GiB"
workload = "cg.B"
work_share = 0.1
after = "leave"
[[vm]]
name = "cut"
vcpus = 2
memory = "2GiB"
workload = "povray"
[[vm]]
name = "late"
vcpus = 2
memory = "2GiB"
workload = "cg.B"
arrival = "70s"
[[vm]]
name = "two"
vcpus = 2
memory = "2GiB"
workload = "povray"
work_share = 0.02
then = [{ workload = "cg.B", work_share = 0.05 }]
[[event]]
at = "2s"
vm = "back"
action = "start"
[[event]]
at = "30s"
vm = "back"
action = "start"
[[event]]
at = "20s"
vm = "cut"
action = "stop"
"#;

    #[test]
    fn every_start_and_program_of_a_vm_counts() {
        let scenario = Scenario::from_toml("case.toml", CASE).unwrap();
        let setup = Setup::new(preset("r420").unwrap(), scenario, 1);
        let config = Config {
            policies: PolicySet::Default,
            ..Config::default()
        };
        let control = Control::new(config, Mode::Act);
        let run = run(&setup, "default", control, |_, _| Ok(())).unwrap();
        let [back, cut, late, two] = run.report.vms.as_slice() else {
            panic!("four VMs")
        };
        assert_eq!(back.first_arrival_s().map(f64::floor), Some(2.0));
        assert_eq!(back.runtimes_s().count(), 2);
        let (whole_s, last_s) = (back.whole_s().unwrap(), back.runtime_s.unwrap());
        assert!(whole_s > 1.5 * last_s, "{whole_s} {last_s}");
        // The first three seconds were warm-up.
        assert!((back.busy_s() - (whole_s - 3.0)).abs() < 0.1, "{}", back.busy_s());
        assert_eq!(cut.runtimes_s().collect::<Vec<_>>(), [None]);
        assert!((cut.busy_s() - 15.0).abs() < 0.01, "{}", cut.busy_s());
        assert_eq!(
            (late.first_arrival_s(), late.runtimes_s().count(), late.busy_s()),
            (None, 0, 0.0)
        );
        assert_eq!(two.runtimes_s().count(), 2);
        assert!(two.whole_s().is_some());
    }
}
