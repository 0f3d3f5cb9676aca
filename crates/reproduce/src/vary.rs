//! Changes an input of a run: multiplies one input of its machine or its workloads by a factor.
//!
//! A paper leaves inputs open. A value at both ends of the range of such an input forms its band (see
//! [`crate::scoreboard`]). The same mechanism evaluates a claim on another machine.

use std::fmt;

use anyhow::{Result, anyhow, ensure};
use homenode_machine::Machine;
use homenode_twin::{Scenario, Workload, workload};
use homenode_units::{Bytes, BytesPerSec, Candidates};
use serde::{Deserialize, Serialize};

/// An input that can be changed. Inputs of workloads change equally for all workloads of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Input {
    /// Sustained bandwidth of each node's memory controllers.
    #[serde(rename = "machine.controllers")]
    Controllers,
    /// Sustained bandwidth for scattered lines, as a share of that of the controllers, at most 1.
    #[serde(rename = "machine.scattered")]
    Scattered,
    /// Bandwidth of each link.
    #[serde(rename = "machine.links")]
    Links,
    /// Latency that a hop adds.
    #[serde(rename = "machine.hop")]
    Hop,
    /// Latency of local memory.
    #[serde(rename = "machine.memory")]
    Memory,
    /// Accesses to the LLC per instruction.
    #[serde(rename = "workload.llc-accesses")]
    LlcAccesses,
    /// Number of misses in flight, at least one.
    #[serde(rename = "workload.misses-in-flight")]
    MissesInFlight,
    /// Sizes of regions, and the capacities at which accesses are reused.
    #[serde(rename = "workload.working-set")]
    WorkingSet,
    /// Capacities at which accesses are reused, without the sizes of regions.
    #[serde(rename = "workload.reuse")]
    Reuse,
    /// Share of missed lines that are written, at most 1.
    #[serde(rename = "workload.writes")]
    Writes,
    /// Inequality of the work of the threads between two barriers.
    #[serde(rename = "workload.imbalance")]
    Imbalance,
    /// Instructions between two barriers.
    #[serde(rename = "workload.barrier-interval")]
    BarrierInterval,
    /// Rate at which a thread wakes a sleeping thread.
    #[serde(rename = "workload.wakeups")]
    Wakeups,
    /// Bytes moved to and from devices.
    #[serde(rename = "workload.io")]
    Io,
    /// Memory that the program's runtime library allocates and frees.
    #[serde(rename = "workload.allocations")]
    Allocations,
    /// Share of each VM's memory that its past life has scattered over the nodes, at most 1.
    #[serde(rename = "vm.memory-scattered")]
    MemoryScattered,
}

impl Input {
    /// Returns the input's name in files.
    pub fn name(self) -> String {
        name(&self)
    }
}

/// Returns the name of a variant without data in tables and files.
pub(crate) fn name(variant: &impl Serialize) -> String {
    let name = serde_json::to_value(variant).ok();
    name.and_then(|name| name.as_str().map(str::to_owned))
        .unwrap_or_default()
}

/// An input that a publication leaves open. It is an input of the runs, or a value in the experiment's file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Open {
    /// The input of the runs, if it is one.
    #[serde(default)]
    pub input: Option<Input>,
    /// The value in the experiment's file, otherwise.
    #[serde(default)]
    pub value: Option<String>,
    /// Smallest possible factor relative to the chosen value.
    pub from: f64,
    /// Largest possible factor.
    pub to: f64,
    /// Reason for this range.
    pub because: String,
}

/// An end of an open input.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    /// A changed input of the runs.
    Run(Change),
    /// A changed value in the experiment's file: its name, and the factor.
    Value(String, f64),
}

impl Open {
    /// Returns the ends of the range, without an end that is the chosen value itself.
    pub fn ends(&self) -> impl Iterator<Item = End> {
        let factors = [self.from, self.to].into_iter().filter(|factor| *factor != 1.0);
        factors.flat_map(|factor| {
            let of_runs = self.input.map(|input| End::Run(Change { input, factor }));
            let of_file = self.value.clone().map(|name| End::Value(name, factor));
            of_runs.into_iter().chain(of_file)
        })
    }
}

/// Prefix that tells the values of an experiment's file from inputs of runs; it is the name of their table.
const VALUES: &str = "values.";

impl End {
    /// Returns the input of this name, or the value of the experiment's file (`values.exit_ns`), with a factor.
    ///
    /// # Errors
    /// An unknown name, with the closest match; a factor that is not above 0.
    pub fn parse(name: &str, factor: f64) -> Result<End> {
        match name.strip_prefix(VALUES) {
            None => Change::parse(name, factor).map(End::Run),
            Some(value) => above_none(name, factor).map(|factor| End::Value(value.to_owned(), factor)),
        }
    }
}

fn above_none(name: &str, factor: f64) -> Result<f64> {
    let valid = factor > 0.0 && factor.is_finite();
    ensure!(valid, "the factor of `{name}` must be above 0, got {factor}");
    Ok(factor)
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Run(change) => change.fmt(f),
            End::Value(name, factor) => write!(f, "{VALUES}{name} x {factor}"),
        }
    }
}

/// An input and the factor by which it changes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// The input.
    pub input: Input,
    /// Multiplier; above 0.
    pub factor: f64,
}

impl Change {
    /// Returns the change of the input with this name by a factor.
    ///
    /// # Errors
    /// An unknown name, with the closest match; a factor that is not above 0.
    pub fn parse(name: &str, factor: f64) -> Result<Change> {
        let input = serde_json::from_value(serde_json::Value::String(name.to_owned()));
        let input = input.map_err(|error| {
            let known = Candidates::of(name, names_in(&error.to_string()));
            anyhow!("no input is named `{name}`{known}")
        })?;
        above_none(name, factor).map(|factor| Change { input, factor })
    }
}

/// Returns the names that Serde expected, according to its message.
fn names_in(error: &str) -> impl Iterator<Item = String> {
    let expected = error
        .rsplit_once("expected one of ")
        .map_or("", |(_, names)| names);
    expected.split('`').skip(1).step_by(2).map(str::to_owned)
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}", self.input.name(), self.factor)
    }
}

/// Changes a machine; workload inputs are ignored.
pub fn machine(machine: &mut Machine, changes: &[Change]) {
    let rate = |rate: BytesPerSec, factor: f64| BytesPerSec((rate.0 as f64 * factor).round() as u64);
    for Change { input, factor } in changes.iter().copied() {
        match input {
            Input::Controllers => {
                for (_, node) in machine.nodes.iter_mut() {
                    node.memory_bandwidth = node.memory_bandwidth.map(|own| rate(own, factor));
                }
            }
            Input::Links => {
                for link in &mut machine.links {
                    link.bandwidth = link.bandwidth.map(|own| rate(own, factor));
                }
            }
            Input::Hop | Input::Memory | Input::Scattered => {
                if let Some(hardware) = &mut machine.hardware {
                    match input {
                        Input::Hop => hardware.link.hop_ns *= factor,
                        Input::Memory => hardware.latency.memory_ns *= factor,
                        _ => {
                            let part = hardware.scattered_throughput.unwrap_or(1.0);
                            hardware.scattered_throughput = Some((part * factor).min(1.0));
                        }
                    }
                }
            }
            _ => {}
        }
    }
}

/// Changes the VMs and workloads of a scenario: built-in workloads become the scenario's own, under the same name.
pub fn scenario(scenario: &mut Scenario, changes: &[Change]) {
    if changes.is_empty() {
        return;
    }
    for Change { input, factor } in changes {
        if *input == Input::MemoryScattered {
            for vm in &mut scenario.vms {
                vm.memory_scattered = (vm.memory_scattered * factor).min(1.0);
            }
        }
    }
    for vm in &scenario.vms {
        if !scenario.workloads.iter().any(|own| own.name == vm.workload) {
            // An unknown workload causes an error when it runs.
            scenario.workloads.extend(workload::builtin(&vm.workload));
        }
    }
    for workload in &mut scenario.workloads {
        for change in changes {
            vary(workload, *change);
        }
    }
}

fn vary(workload: &mut Workload, Change { input, factor }: Change) {
    let Some(program) = &mut workload.program else {
        return;
    };
    let size = |size: Bytes| Bytes((size.as_f64() * factor).round() as u64);
    match input {
        Input::LlcAccesses => program.llc_accesses_per_kilo_instruction *= factor,
        Input::MissesInFlight => program.misses_in_flight = (program.misses_in_flight * factor).max(1.0),
        Input::Writes => program.write_share = (program.write_share * factor).min(1.0),
        Input::Wakeups => program.wakeups_per_m_instructions *= factor,
        Input::WorkingSet | Input::Reuse => {
            program.miss_ratio = program.miss_ratio.stretched(factor);
            if let Some(translation) = &mut program.translation {
                translation.miss_ratio = translation.miss_ratio.stretched(factor);
            }
            if input == Input::WorkingSet {
                program
                    .regions
                    .iter_mut()
                    .for_each(|region| region.size = size(region.size));
            }
        }
        Input::Imbalance | Input::BarrierInterval => {
            if let Some(barrier) = &mut program.barrier {
                match input {
                    Input::Imbalance => barrier.imbalance *= factor,
                    _ => barrier.interval_m_instructions *= factor,
                }
            }
        }
        Input::Io => {
            for io in &mut program.io {
                io.bytes_per_kilo_instruction *= factor;
            }
        }
        Input::Allocations => {
            if let Some(runtime) = &mut program.runtime {
                runtime.allocated_bytes_per_kilo_instruction *= factor;
            }
        }
        Input::Controllers
        | Input::Scattered
        | Input::Links
        | Input::Hop
        | Input::Memory
        | Input::MemoryScattered => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_twin::VmSpec;

    fn change(input: Input, factor: f64) -> Change {
        Change { input, factor }
    }

    #[test]
    fn an_input_is_changed_and_nothing_else() {
        let base = homenode_machine_files::preset("amd48").unwrap();
        let mut other = base.clone();
        machine(&mut other, &[change(Input::Controllers, 0.5)]);
        let rate = |of: &Machine| {
            of.nodes
                .iter()
                .map(|(_, node)| node.memory_bandwidth.unwrap().0)
                .sum::<u64>()
        };
        assert_eq!(2 * rate(&other), rate(&base));
        machine(&mut other, &[change(Input::Controllers, 2.0)]);
        assert_eq!(other, base);

        let vm = VmSpec::new("a", 1, Bytes::from_gib(1), "cg.B");
        let mut varied = Scenario::of("one", vec![vm]);
        scenario(
            &mut varied,
            &[change(Input::MissesInFlight, 0.5), change(Input::Links, 3.0)],
        );
        let own = workload::builtin("cg.B").unwrap();
        let [of_it] = &varied.workloads[..] else {
            panic!("one workload")
        };
        let (mut expected, now) = (own.clone(), of_it.clone());
        expected.program.as_mut().unwrap().misses_in_flight /= 2.0;
        assert_eq!(now, expected);
    }

    #[test]
    fn shares_and_overlap_stay_possible() {
        let vm = VmSpec::new("a", 1, Bytes::from_gib(1), "stream");
        let mut varied = Scenario::of("one", vec![vm]);
        scenario(
            &mut varied,
            &[change(Input::MissesInFlight, 1e-3), change(Input::Writes, 1e3)],
        );
        let program = varied.workloads[0].program.as_ref().unwrap();
        assert_eq!((program.misses_in_flight, program.write_share), (1.0, 1.0));
    }

    #[test]
    fn scattered_memory_changes_for_each_vm_that_has_some() {
        let mut vms = ["a", "b"].map(|name| VmSpec::new(name, 1, Bytes::from_gib(1), "stream"));
        vms[0].memory_scattered = 0.8;
        let base = Scenario::of("two", vms.to_vec());
        let shares = |factor: f64| {
            let mut varied = base.clone();
            scenario(&mut varied, &[change(Input::MemoryScattered, factor)]);
            [0, 1].map(|at: usize| varied.vms[at].memory_scattered)
        };
        assert_eq!((shares(0.5), shares(2.0)), ([0.4, 0.0], [1.0, 0.0]));
    }

    #[test]
    fn every_input_is_read_by_its_name_and_no_other() {
        let none = serde_json::from_value::<Input>("none".into())
            .unwrap_err()
            .to_string();
        assert_eq!(names_in(&none).count(), 16);
        for name in names_in(&none) {
            assert_eq!(
                Change::parse(&name, 2.0).unwrap().to_string(),
                format!("{name} x 2")
            );
        }
        let said = Change::parse("machine.controler", 2.0).unwrap_err().to_string();
        assert!(said.contains("did you mean `machine.controllers`?"), "{said}");
        assert!(
            Change::parse("machine.hop", 0.0)
                .unwrap_err()
                .to_string()
                .contains("above 0")
        );
    }
}
