//! Runs a scenario under a set of policies.

use std::ops::ControlFlow;
use std::sync::{Mutex, PoisonError};

use homenode_control::external::Planner;
use homenode_control::{Around, Config, Control, Cycle, Event, Mode};
use homenode_host::HostError;
use homenode_twin::{Setup, Twin, TwinReport};
use homenode_units::Ns;

/// Result of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Name of the policies.
    pub policy: String,
    /// Decisions carried out.
    pub decisions: usize,
    /// What each VM and node did; VMs in the scenario's order.
    pub report: TwinReport,
}

/// Runs a scenario to its end, or for its duration; `look` is called before each of the agent's cycles, `told` with each
/// event.
///
/// # Errors
/// A scenario that the machine cannot run, a host that cannot be read.
pub fn run(
    setup: &Setup,
    config: Config,
    mut look: impl FnMut(&Twin),
    mut told: impl FnMut(&Event),
) -> anyhow::Result<Run> {
    let look = |twin: &Twin| {
        look(twin);
        Ok(())
    };
    run_watched(setup, config, look, |cycle, _| {
        cycle.events.iter().for_each(&mut told);
    })
}

/// Like [`run`], but calls `watch` with each cycle and the loop after it; an error of `look` ends the run.
///
/// # Errors
/// As [`run`], and those of `look`.
pub fn run_watched(
    setup: &Setup,
    config: Config,
    look: impl FnMut(&Twin) -> anyhow::Result<()>,
    watch: impl FnMut(&Cycle, &Control),
) -> anyhow::Result<Run> {
    let policy = config.policies.name().to_owned();
    run_control(setup, Control::new(config, Mode::Act), policy, (look, watch))
}

/// Like [`run_watched`], with an external planner in place of all policies.
///
/// # Errors
/// As [`run_watched`]; a planner that fails, as [`homenode_control::external::PlannerFailed`].
pub fn run_planned(
    setup: &Setup,
    config: Config,
    planner: Box<dyn Planner>,
    look: impl FnMut(&Twin) -> anyhow::Result<()>,
    watch: impl FnMut(&Cycle, &Control),
) -> anyhow::Result<Run> {
    let policy = planner.name().to_owned();
    let control = Control::new(config, Mode::Act).with_planner(planner);
    run_control(setup, control, policy, (look, watch))
}

fn run_control(
    setup: &Setup,
    control: Control,
    policy: String,
    (look, watch): (
        impl FnMut(&Twin) -> anyhow::Result<()>,
        impl FnMut(&Cycle, &Control),
    ),
) -> anyhow::Result<Run> {
    let mut twin = setup.start()?;
    let period = control.config().period;
    let control = Mutex::new(control);
    let mut to_end = ToEnd {
        setup,
        control: &control,
        period,
        look,
        watch,
        decisions: 0,
    };
    homenode_control::run(&mut twin, &control, &mut to_end)?;
    Ok(Run {
        policy,
        decisions: to_end.decisions,
        report: twin.report(),
    })
}

/// Runs until all programs have ended, or the scenario's time is over.
struct ToEnd<'a, L, W> {
    setup: &'a Setup,
    control: &'a Mutex<Control>,
    period: Ns,
    look: L,
    watch: W,
    decisions: usize,
}

impl<L: FnMut(&Twin) -> anyhow::Result<()>, W: FnMut(&Cycle, &Control)> Around<Twin> for ToEnd<'_, L, W> {
    type Error = anyhow::Error;

    fn before(&mut self, twin: &mut Twin) -> anyhow::Result<ControlFlow<()>> {
        if self.setup.is_over(twin) {
            return Ok(ControlFlow::Break(()));
        }
        (self.look)(twin)?;
        Ok(ControlFlow::Continue(()))
    }

    fn after(&mut self, _: &mut Twin, cycle: Result<Cycle, HostError>) -> anyhow::Result<ControlFlow<()>> {
        let cycle = cycle?;
        let decided = |event: &&Event| matches!(event, Event::Decided { .. });
        self.decisions += cycle.events.iter().filter(decided).count();
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        (self.watch)(&cycle, &control);
        match control.failed_planner() {
            Some(failed) => Err(failed.clone().into()),
            None => Ok(ControlFlow::Continue(())),
        }
    }

    fn wait(&mut self, twin: &mut Twin) {
        self.setup.wait(twin, self.period);
    }
}

#[cfg(test)]
mod tests {
    use homenode_control::PolicySet;
    use homenode_machine_files::preset;
    use homenode_twin::Scenario;

    use super::*;

    /// One VM that returns, one that is stopped, one that never arrives, one that runs two programs; figures count from 5 s
    /// on.
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
        let run = run(&setup, config, |_| (), |_| ()).unwrap();
        let [back, cut, late, two] = run.report.vms.as_slice() else {
            panic!("four VMs")
        };
        assert_eq!(back.first_arrival_s().map(f64::floor), Some(2.0));
        assert_eq!(back.runtimes_s().count(), 2);
        let (whole_s, last_s) = (back.whole_s().unwrap(), back.runtime_s.unwrap());
        assert!(whole_s > 1.5 * last_s, "{whole_s} {last_s}");
        // Its first three seconds were warm-up.
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
