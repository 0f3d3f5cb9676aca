//! A scenario's run under a set of policies, and what came of each VM.

use homenode_control::{Config, Control, Event, Mode};
use homenode_twin::{EventAction, Scenario, Setup, Twin, TwinReport, VmReport};

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Name of the policies.
    pub policy: &'static str,
    /// Decisions carried out.
    pub decisions: usize,
    /// What each VM did, in the scenario's order.
    pub vms: Vec<VmRun>,
    /// Figures of VMs and nodes at the end.
    pub report: TwinReport,
}

/// What a VM did in a run.
#[derive(Clone, Debug, PartialEq)]
pub struct VmRun {
    /// When it was started first, in seconds; `None` where it never was.
    pub arrival_s: Option<f64>,
    /// How long each program ran that was begun, over all starts of the VM, in seconds; `None` for one that did not end.
    pub programs: Vec<Option<f64>>,
    /// Instructions since the end of the warm-up, in thousand millions.
    pub instructions_g: f64,
    /// Time in which these were made, in seconds: from each arrival, or the end of the warm-up, to the end of its programs, its
    /// stop or the end of the run.
    pub busy_s: f64,
}

impl VmRun {
    /// Time of all programs together, in seconds; `None` where one did not end.
    pub fn whole_s(&self) -> Option<f64> {
        self.programs.iter().copied().sum()
    }
}

/// Runs a scenario to its end, or for its duration; `look` is called before each of the agent's epochs, `told` with what it
/// says.
///
/// # Errors
/// A scenario that the machine cannot run, a host that cannot be read.
pub fn run(
    setup: &Setup,
    config: Config,
    mut look: impl FnMut(&Twin),
    mut told: impl FnMut(&Event),
) -> anyhow::Result<Run> {
    let mut twin = setup.start()?;
    let (policy, period) = (config.policies.name(), config.period);
    let mut control = Control::new(config, Mode::Act);
    let mut starts = Starts::new(&setup.scenario);
    let mut decisions = 0;
    while !setup.is_over(&twin) {
        look(&twin);
        starts.look(&twin);
        for event in &control.step(&mut twin)?.events {
            decisions += usize::from(matches!(event, Event::Decided { .. }));
            told(event);
        }
        setup.wait(&mut twin, period);
    }
    Ok(Run::of(setup, &twin, &starts, policy, decisions))
}

impl Run {
    /// What came of a twin's run up to now.
    pub fn of(setup: &Setup, twin: &Twin, starts: &Starts, policy: &'static str, decisions: usize) -> Run {
        let report = twin.report();
        let mut starts = starts.clone();
        starts.note(&report);
        let vms = report.vms.iter().enumerate();
        Run {
            policy,
            decisions,
            vms: vms
                .map(|(at, vm)| starts.vm_run(setup, &report, at, vm))
                .collect(),
            report,
        }
    }
}

/// What each start of each VM came to: a report knows the last one only.
#[derive(Clone, Debug)]
pub struct Starts {
    /// Whether any VM may start more than once.
    several: bool,
    /// Of each VM the starts so far.
    vms: Vec<Vec<Start>>,
}

/// One start of a VM.
#[derive(Clone, Debug, PartialEq)]
struct Start {
    arrival_s: f64,
    programs: Vec<Option<f64>>,
}

impl Starts {
    /// No start yet.
    pub fn new(scenario: &Scenario) -> Starts {
        let starts = |event: &&homenode_twin::EventSpec| event.action == EventAction::Start;
        Starts {
            several: scenario.events.iter().any(|event| starts(&event)),
            vms: vec![Vec::new(); scenario.vms.len()],
        }
    }

    /// Looks before a start can hide what came of the one before.
    pub fn look(&mut self, twin: &Twin) {
        if self.several {
            self.note(&twin.report());
        }
    }

    fn note(&mut self, report: &TwinReport) {
        for (starts, vm) in self.vms.iter_mut().zip(&report.vms) {
            let Some(arrival_s) = vm.arrival_s else { continue };
            let programs = match vm.programs.as_slice() {
                [] => vec![vm.runtime_s],
                several => several.iter().map(|program| program.runtime_s).collect(),
            };
            let now = Start { arrival_s, programs };
            match starts.last_mut().filter(|last| last.arrival_s == arrival_s) {
                Some(last) => *last = now,
                None => starts.push(now),
            }
        }
    }

    fn vm_run(&self, setup: &Setup, report: &TwinReport, at: usize, vm: &VmReport) -> VmRun {
        let (end_s, from_s) = (report.at_ns.as_secs_f64(), report.measured_from_ns.as_secs_f64());
        let stops = setup.scenario.events.iter();
        let stops = stops.filter(|event| event.vm == vm.name && event.action == EventAction::Stop);
        let stops: Vec<f64> = stops.map(|event| event.at.as_secs_f64()).collect();
        let busy = |start: &Start| {
            let ran: Option<f64> = start.programs.iter().copied().sum();
            let stopped = stops.iter().copied().filter(|stop| *stop >= start.arrival_s);
            let cut = stopped.fold(end_s, f64::min);
            let until = ran.map_or(cut, |ran| (start.arrival_s + ran).min(cut));
            (until - start.arrival_s.max(from_s)).max(0.0)
        };
        let starts = &self.vms[at];
        VmRun {
            arrival_s: starts.first().map(|start| start.arrival_s),
            programs: starts.iter().flat_map(|start| start.programs.clone()).collect(),
            instructions_g: vm.instructions_g,
            busy_s: starts.iter().map(busy).sum(),
        }
    }
}

#[cfg(test)]
mod tests {
    use homenode_control::PolicySet;
    use homenode_machine_files::preset;

    use super::*;

    /// One VM that comes back, one that is stopped, one that never comes, one that runs two programs; figures count from 5 s on.
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
        let [back, cut, late, two] = run.vms.as_slice() else {
            panic!("four VMs")
        };
        assert_eq!(back.arrival_s.map(f64::floor), Some(2.0));
        assert_eq!(back.programs.len(), 2);
        let (whole_s, last_s) = (back.whole_s().unwrap(), run.report.vms[0].runtime_s.unwrap());
        assert!(whole_s > 1.5 * last_s, "{whole_s} {last_s}");
        // Its first three seconds were warm-up.
        assert!((back.busy_s - (whole_s - 3.0)).abs() < 0.1, "{}", back.busy_s);
        assert_eq!(cut.programs, [None]);
        assert!((cut.busy_s - 15.0).abs() < 0.01, "{}", cut.busy_s);
        assert_eq!((late.arrival_s, late.programs.len(), late.busy_s), (None, 0, 0.0));
        assert_eq!(two.programs.len(), 2);
        assert!(two.whole_s().is_some());
    }
}
