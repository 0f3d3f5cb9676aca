//! One run of the twin: what it is, and what is kept of it.

use homenode_control::{Config, Control, Epoch, Event, Mode, PolicySet};
use homenode_host::{Act, Counters, Host, Outcome as Done, Sample, VmSample};
use homenode_twin::{ProgramReport, Scenario, Twin, TwinReport};
use homenode_units::{BytesPerSec, MemoryPolicy, NodeId, Ns, Pages};
use serde::{Deserialize, Serialize};

/// Everything that decides what comes of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    /// Preset of the machine.
    pub machine: &'static str,
    /// What the memory controllers of each of its nodes sustain, where that is to be another than the preset's: what a claim
    /// would be on such a machine.
    pub controllers: Option<BytesPerSec>,
    /// VMs and their programs.
    pub scenario: Scenario,
    /// Which policies act, how often and within which bounds.
    pub config: Config,
    /// Arrival order, phase and all other chance.
    pub seed: u64,
    /// Simulated time after which counters are read for the first time; see [`Outcome::window`].
    pub warm_up: Ns,
    /// Simulated time after which the run ends, if its programs have not ended before.
    pub until: Ns,
    /// How often VMs are looked at after the warm-up, where what comes when matters; see [`Outcome::moments`].
    pub watch: Option<Ns>,
}

/// What is kept of a run. The same run has the same outcome, on any machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Outcome {
    /// Simulated time at the end.
    pub at_s: f64,
    /// The VMs, in the scenario's order.
    pub vms: Vec<VmOutcome>,
    /// What was counted between the end of the warm-up and the end of the run.
    pub window: Window,
    /// What counters said each time that somebody looked; empty where nobody was to.
    pub moments: Vec<Moment>,
}

/// One VM of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmOutcome {
    /// Its program.
    pub workload: String,
    /// How long that ran; `None` where it did not end.
    pub runtime_s: Option<f64>,
    /// Share of memory accesses to the vCPU's own node.
    pub local_access_ratio: Option<f64>,
    /// LLC misses over references.
    pub llc_miss_rate: Option<f64>,
    /// Its programs, where it runs several one after the other.
    pub programs: Vec<ProgramOutcome>,
    /// CPU time that its driver domain owed for its I/O, in seconds; 0 where it has none.
    pub backend_s: f64,
    /// Most pages that its I/O used at once; 0 where it has no driver domain.
    pub pages_used_max: u64,
    /// Its memory policy at the end.
    pub memory_policy: MemoryPolicy,
    /// How often policies changed that.
    pub policy_changes: u32,
    /// How often its vCPUs changed nodes, after the warm-up.
    pub node_changes: u64,
    /// How often the host's AutoNUMA moved a vCPU of it to its memory, after the warm-up.
    pub vcpus_drawn: u64,
    /// How often it was punished for going OVER its permit, after the warm-up; 0 where it has none.
    pub punished_count: u32,
    /// What it was debited per slice after the warm-up; `None` where it has no permit.
    pub used_per_slice: Option<f64>,
    /// Share of the time of its guest's calls about released pages that went into making them invalid; `None` where it makes no
    /// such calls.
    pub invalidating_share: Option<f64>,
}

/// One of several programs of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ProgramOutcome {
    /// When it began.
    pub began_s: f64,
    /// How long it ran; `None` where it did not end.
    pub runtime_s: Option<f64>,
    /// Pages that it took.
    pub pages_touched: u64,
    /// Those of them that lay outside the VM's home.
    pub pages_touched_away: u64,
}

/// Counters of all VMs at one time, cumulative, summed over vCPUs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Moment {
    /// Simulated time.
    pub at_ns: u64,
    /// By VM.
    pub vms: Vec<VmMoment>,
}

/// One VM at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmMoment {
    /// Time run.
    pub running_ns: u64,
    /// LLC references.
    pub llc_references: u64,
    /// LLC misses.
    pub llc_misses: u64,
    /// What its permit's account holds; 0 where it has none.
    pub balance_units: i64,
    /// Its pages outside its home; 0 where it has none.
    pub pages_away: u64,
}

/// Differences of counters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Window {
    /// Simulated time between the two readings.
    pub seconds: f64,
    /// Bytes moved by the controllers of each node, ascending by node.
    pub node_bytes: Vec<u64>,
    /// Standard deviation over mean of the accesses of all VMs by node, percent; `None` where there were none.
    pub imbalance_percent: Option<f64>,
    /// Load of the busiest link, mean over seconds, percent; `None` where no second passed.
    pub interconnect_percent: Option<f64>,
    /// All vCPUs, by VM and index.
    pub vcpus: Vec<VcpuCounts>,
}

/// One vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VcpuCounts {
    /// Node of its CPU at the end.
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
    /// A run of a scenario under policies, to the end of its programs; `until` is only there to end it should that not
    /// come.
    pub fn to_end(machine: &'static str, scenario: Scenario, policies: PolicySet, seed: u64) -> Run {
        Run {
            machine,
            controllers: None,
            scenario,
            config: published(policies),
            seed,
            warm_up: Ns::ZERO,
            until: Ns::from_secs(4000),
            watch: None,
        }
    }

    /// A run of which counts what happens between two times, under the hypervisor alone.
    pub fn between(machine: &'static str, scenario: Scenario, warm_up: Ns, until: Ns) -> Run {
        Run {
            warm_up,
            until,
            ..Run::to_end(machine, scenario, PolicySet::Default, 1)
        }
    }

    /// What tells this run from all others, as text. Profiles and machines that come with the program are named, not
    /// contained: whoever keeps this beside a result must keep which program it was too.
    pub fn description(&self) -> String {
        format!("{self:?}")
    }

    /// Simulates it.
    ///
    /// # Errors
    /// A machine or workload that does not exist, a scenario that the machine cannot run; in a sentence.
    pub fn execute(&self) -> Result<Outcome, String> {
        let mut machine = homenode_machine_files::preset(self.machine).map_err(|error| error.to_string())?;
        if let Some(sustained) = self.controllers {
            for (_, node) in machine.nodes.iter_mut() {
                node.memory_bandwidth = Some(sustained);
            }
        }
        let mut twin = Twin::new(machine, &self.scenario, self.seed).map_err(|error| error.to_string())?;
        let mut control = Control::new(self.config.clone(), Mode::Act);
        let acts = self.config.policies != PolicySet::Default;
        let (mut begin, mut moments) = (None, Vec::new());
        let mut policy_changes = vec![0; self.scenario.vms.len()];
        while !twin.finished() && twin.now() < self.until {
            if begin.is_none() && twin.now() >= self.warm_up {
                begin = Some(sample(&mut twin)?);
                twin.mark();
            }
            if acts {
                let epoch = control.step(&mut twin).map_err(|error| error.to_string())?;
                self.count_policy_changes(&epoch, &mut policy_changes);
            }
            let now = twin.now();
            let mut period = self.config.period;
            if let (Some(watch), true) = (self.watch, begin.is_some()) {
                let due = |last: &Moment| now.0 >= last.at_ns + watch.0;
                if moments.last().is_none_or(due) {
                    moments.push(moment(&mut twin)?);
                }
                period = period.min(watch);
            }
            let mark = if begin.is_none() { self.warm_up } else { self.until };
            twin.wait(period.min(Ns(mark.0.saturating_sub(now.0).max(1))));
        }
        let end = sample(&mut twin)?;
        let report = twin.report();
        let window = window(&twin, &report, begin.as_ref(), &end);
        Ok(Outcome {
            at_s: twin.now().as_secs_f64(),
            vms: report
                .vms
                .into_iter()
                .zip(&self.scenario.vms)
                .zip(policy_changes)
                .map(|((vm, spec), policy_changes)| VmOutcome {
                    memory_policy: memory_policy(&end, &vm.name).unwrap_or(spec.memory_policy),
                    policy_changes,
                    workload: vm.workload,
                    runtime_s: vm.runtime_s,
                    local_access_ratio: vm.local_access_ratio,
                    llc_miss_rate: vm.llc_miss_rate,
                    programs: vm.programs.iter().map(program).collect(),
                    backend_s: vm.driver_domain.map_or(0.0, |domain| domain.backend_s),
                    pages_used_max: vm.driver_domain.map_or(0, |domain| domain.pages_used_max),
                    node_changes: vm.node_changes,
                    vcpus_drawn: vm.vcpus_drawn,
                    punished_count: vm.permit.map_or(0, |permit| permit.punished_count),
                    used_per_slice: vm.permit.map(|permit| permit.used_per_slice),
                    invalidating_share: vm.releases.map(|releases| {
                        releases.invalidating_s / (releases.sending_s + releases.invalidating_s)
                    }),
                })
                .collect(),
            window,
            moments,
        })
    }

    fn count_policy_changes(&self, epoch: &Epoch, changes: &mut [u32]) {
        for event in &epoch.events {
            let Event::Decided {
                name,
                decision,
                result,
            } = event
            else {
                continue;
            };
            if matches!(decision.action.act, Act::SetMemoryPolicy { .. }) && matches!(result, Done::Done) {
                let vms = self.scenario.vms.iter().zip(&mut *changes);
                vms.filter(|(vm, _)| vm.name == *name)
                    .for_each(|(_, count)| *count += 1);
            }
        }
    }
}

fn memory_policy(sample: &Sample, name: &str) -> Option<MemoryPolicy> {
    let vm = sample.vms.iter().find(|vm| vm.name == name)?;
    Some(vm.memory_policy)
}

fn program(report: &ProgramReport) -> ProgramOutcome {
    ProgramOutcome {
        began_s: report.began_s,
        runtime_s: report.runtime_s,
        pages_touched: report.pages_touched,
        pages_touched_away: report.pages_touched_away,
    }
}

fn sample(twin: &mut Twin) -> Result<Sample, String> {
    twin.sample().map_err(|error| error.to_string())
}

fn moment(twin: &mut Twin) -> Result<Moment, String> {
    let sample = sample(twin)?;
    let report = twin.report();
    let away = |vm: &VmSample| vm.pages_outside(vm.settings.home.as_ref()?);
    // Both list VMs in the scenario's order; one that is not there has counted nothing.
    let vms = report.vms.iter().map(|vm| {
        let seen = sample.vms.iter().find(|seen| seen.name == vm.name);
        let vcpus = || seen.iter().flat_map(|seen| &seen.vcpus);
        let counted =
            |of: fn(&Counters) -> u64| vcpus().filter_map(|vcpu| vcpu.counters.as_ref()).map(of).sum();
        VmMoment {
            running_ns: vcpus().map(|vcpu| vcpu.running_ns.0).sum(),
            llc_references: counted(|counters| counters.llc_references),
            llc_misses: counted(|counters| counters.llc_misses),
            balance_units: vm.permit.map_or(0, |permit| permit.balance_units),
            pages_away: seen.and_then(away).map_or(0, |pages| pages.0),
        }
    });
    Ok(Moment {
        at_ns: sample.at.0,
        vms: vms.collect(),
    })
}

/// What was counted between two readings; since the start of the host where there is no first one.
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
                    llc_references: now.llc_references - before.llc_references,
                    llc_misses: now.llc_misses - before.llc_misses,
                }
            })
            .collect(),
    }
}

/// Settings under which published claims are judged: no policy acts that the publication does not have.
fn published(policies: PolicySet) -> Config {
    let mut config = Config {
        policies,
        ..Config::default()
    };
    config.memory.advisor.acts = false;
    // Budgets under which the claims were decided first: a gigabyte in four seconds for a VM.
    config.repatriate.vm_pages_per_epoch = Pages(65_536);
    config.repatriate.host_pages_per_epoch = Pages(131_072);
    config
}
