//! A run of the simulator: its inputs and its recorded outcome.

use anyhow::Result;
use homenode_control::{Config, Control, Cycle, Mode};
use homenode_host::{Counters, Host as _, Sample, VmSample};
use homenode_twin::{Scenario, Twin, TwinReport, VmReport};
use homenode_units::{NodeId, Ns};
use serde::{Deserialize, Serialize};

use crate::engine::{self, Probe};
use crate::vary::{self, Change};

/// All inputs that determine the outcome of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Preset of the machine.
    pub machine: String,
    /// Changes to inputs of the machine and the workloads.
    pub changes: Vec<Change>,
    /// VMs and their programs.
    pub scenario: Scenario,
    /// The acting policies, with their periods and bounds.
    pub config: Config,
    /// Seed of arrival order, phase and all other random draws.
    pub seed: u64,
    /// Simulated time at which counters are first read; see [`Outcome::window`].
    pub warm_up: Ns,
    /// Simulated time after which the run ends, if its programs have not ended before.
    pub until: Ns,
    /// Interval at which VMs are sampled after the warm-up, for measures over time; see [`Outcome::moments`].
    pub watch: Option<Ns>,
}

/// The recorded outcome of a run. The same run has the same outcome on any machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Simulated time at the end.
    pub at_s: f64,
    /// Reports of the VMs, in the scenario's order.
    pub vms: Vec<VmReport>,
    /// Counts between the end of the warm-up and the end of the run.
    pub window: Window,
    /// Counters at each sample; empty if the run has no `watch`.
    pub moments: Vec<Moment>,
}

/// Counters of all VMs at one time. They are cumulative, and summed over vCPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    /// Simulated time.
    pub at_ns: u64,
    /// Counters of each VM.
    pub vms: Vec<VmMoment>,
}

/// A VM at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmMoment {
    /// Running time.
    pub running_ns: u64,
    /// LLC references.
    pub llc_references: u64,
    /// LLC misses.
    pub llc_misses: u64,
    /// Balance of the VM's permit account; 0 if the VM has no permit.
    pub balance_units: i64,
    /// Number of the VM's pages outside its home; 0 if the VM has no home.
    pub pages_away: u64,
}

/// Differences of counters between two readings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Simulated time between the two readings.
    pub seconds: f64,
    /// Bytes moved by the memory controllers of each node, in the order of nodes.
    pub node_bytes: Vec<u64>,
    /// Imbalance of the accesses of all VMs over the nodes: standard deviation over mean, in percent; `None` without
    /// accesses.
    pub imbalance_percent: Option<f64>,
    /// Load of the busiest link in percent, as the mean over seconds; `None` if less than a second passed.
    pub interconnect_percent: Option<f64>,
    /// Counts of all vCPUs, by VM and index.
    pub vcpus: Vec<VcpuCounts>,
}

/// Counts of one vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuCounts {
    /// Node of the CPU on which the vCPU was at the end.
    pub node: u32,
    /// Unhalted cycles.
    pub cycles: u64,
    /// Instructions retired.
    pub instructions: u64,
    /// LLC references.
    pub llc_references: u64,
    /// LLC misses.
    pub llc_misses: u64,
}

impl Run {
    /// Creates a run of a scenario under policies, which ends when its programs end.
    #[cfg(test)]
    pub fn to_end(
        machine: &str,
        scenario: Scenario,
        policies: homenode_control::PolicySet,
        seed: u64,
    ) -> Run {
        Run {
            machine: machine.to_owned(),
            changes: Vec::new(),
            scenario,
            config: Config {
                policies,
                ..Config::default()
            },
            seed,
            warm_up: Ns::ZERO,
            until: Ns::from_secs(4000),
            watch: None,
        }
    }

    /// Returns a text that identifies this run, regardless of the scenario's name. The text names embedded profiles and machines
    /// without their contents, so a cache must store with it which program made the result.
    pub fn description(&self) -> String {
        let mut nameless = self.clone();
        nameless.scenario.name.clear();
        format!("{nameless:?}")
    }

    /// Simulates the run.
    ///
    /// # Errors
    /// A message: a machine or workload that does not exist, a scenario that the machine cannot run.
    pub fn execute(&self) -> Result<Outcome> {
        let mut machine = homenode_machine_files::preset(&self.machine)?;
        vary::machine(&mut machine, &self.changes);
        let mut scenario = self.scenario.clone();
        vary::scenario(&mut scenario, &self.changes);
        let twin = Twin::new(machine, &scenario, self.seed)?;
        let control = Control::new(self.config.clone(), Mode::Act);
        let measured = Measured {
            run: self,
            begin: None,
            moments: Vec::new(),
        };
        let mut ended = engine::simulate(twin, control, self.until, measured)?;
        let end = ended.twin.sample()?;
        let (twin, report) = (&ended.twin, ended.twin.report());
        Ok(Outcome {
            at_s: twin.now().as_secs_f64(),
            window: window(twin, &report, ended.probe.begin.as_ref(), &end),
            vms: report.vms,
            moments: ended.probe.moments,
        })
    }
}

/// Samples counters from the end of the warm-up on.
struct Measured<'a> {
    run: &'a Run,
    /// The sample at the end of the warm-up.
    begin: Option<Sample>,
    moments: Vec<Moment>,
}

impl Probe for Measured<'_> {
    fn before(&mut self, twin: &mut Twin) -> Result<()> {
        if self.begin.is_none() && twin.now() >= self.run.warm_up {
            self.begin = Some(twin.sample()?);
            twin.mark();
        }
        Ok(())
    }

    fn after(&mut self, twin: &mut Twin, _: &Cycle, _: &Control) -> Result<()> {
        if let (Some(watch), Some(_)) = (self.run.watch, &self.begin) {
            let due = |last: &Moment| twin.now().0 >= last.at_ns + watch.0;
            if self.moments.last().is_none_or(due) {
                self.moments.push(moment(twin)?);
            }
        }
        Ok(())
    }

    fn pause(&self, now: Ns, left: Ns, period: Ns) -> Ns {
        let (left, look) = match self.begin {
            Some(_) => (left, self.run.watch.unwrap_or(period)),
            None => (self.run.warm_up.saturating_sub(now), period),
        };
        period.min(look).min(left.max(Ns(1)))
    }
}

fn moment(twin: &mut Twin) -> Result<Moment> {
    let sample = twin.sample()?;
    let report = twin.report();
    let away = |vm: &VmSample| vm.pages_outside(vm.settings.home.as_ref()?);
    // Both lists are in the scenario's order. A VM without a report has zero counts.
    let vms = report.vms.iter().map(|vm| {
        let seen = sample.vms.iter().find(|seen| seen.name == vm.name);
        let vcpus = || seen.iter().flat_map(|seen| &seen.vcpus);
        let counted =
            |of: fn(&Counters) -> u64| vcpus().filter_map(|vcpu| vcpu.counters.as_ref()).map(of).sum();
        VmMoment {
            running_ns: vcpus().map(|vcpu| vcpu.running_ns.0).sum(),
            llc_references: counted(|counters| counters.llc_references.unwrap_or(0)),
            llc_misses: counted(|counters| counters.llc_misses.unwrap_or(0)),
            balance_units: vm.permit.map_or(0, |permit| permit.balance_units),
            pages_away: seen.and_then(away).map_or(0, |pages| pages.0),
        }
    });
    Ok(Moment {
        at_ns: sample.at.0,
        vms: vms.collect(),
    })
}

/// Returns the counts between two readings, or since the start of the host if there is no first reading.
fn window(twin: &Twin, report: &TwinReport, begin: Option<&Sample>, end: &Sample) -> Window {
    let node_of = |vcpu: &homenode_host::VcpuSample| {
        let cpu = vcpu
            .cpu
            .and_then(|id| twin.machine().cpus.iter().find(|cpu| cpu.id == id));
        cpu.map_or(0, |cpu| cpu.node.0)
    };
    let traffic = |sample: &Sample, node: NodeId| {
        let node = sample.nodes.get(node);
        node.and_then(|node| node.memory_traffic_bytes).unwrap_or(0)
    };
    // The simulator counts at the LLC. A figure that the simulator does not report is not counted in a run.
    let grown = |before: Option<u64>, now: Option<u64>| now.unwrap_or(0) - before.unwrap_or(0);
    let vcpus = end
        .vms
        .iter()
        .flat_map(|vm| vm.vcpus.iter().map(move |vcpu| (vm.id, vcpu)));
    Window {
        seconds: Ns(end.at.0 - begin.map_or(0, |begin| begin.at.0)).as_secs_f64(),
        node_bytes: end
            .nodes
            .keys()
            .map(|node| traffic(end, node) - begin.map_or(0, |begin| traffic(begin, node)))
            .collect(),
        imbalance_percent: report.imbalance.map(|ratio| 100.0 * ratio),
        interconnect_percent: report.interconnect_load.map(|ratio| 100.0 * ratio),
        vcpus: vcpus
            .map(|(vm, vcpu)| {
                let now = vcpu.counters.unwrap_or_default();
                let before = begin
                    .and_then(|begin| begin.vm(vm))
                    .and_then(|vm| vm.vcpus.iter().find(|before| before.index == vcpu.index))
                    .and_then(|before| before.counters)
                    .unwrap_or_default();
                VcpuCounts {
                    node: node_of(vcpu).into(),
                    cycles: now.cycles - before.cycles,
                    instructions: now.instructions - before.instructions,
                    llc_references: grown(before.llc_references, now.llc_references),
                    llc_misses: grown(before.llc_misses, now.llc_misses),
                }
            })
            .collect(),
    }
}
