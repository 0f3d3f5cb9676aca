//! Validates the simulator against this machine: compares how much two real processes slow each other with the simulator's
//! prediction.
//!
//! # Approach
//!
//! Two worker processes ([`homenode_load::worker`]) run memory kernels on two CPUs that share the last-level cache. They
//! alternate between running alone and together, so that slow changes of the host affect both equally. The simulator runs the
//! same pair on the measured machine, with profiles made from solo times ([`profile`]). The compared figure is the slow-down:
//! time per line together over time per line alone.
//!
//! # Left out
//!
//! Writes, more than two processes, and processes on different nodes.

pub mod profile;

use std::io;
use std::process::Command;
use std::time::{Duration, Instant};

use homenode_host::Host;
use homenode_load::Kernel;
use homenode_load::worker::{Spans, Worker};
use homenode_machine::Machine;
use homenode_twin::workload::FittedCurve;
use homenode_twin::{Hypervisor, Scenario, Twin, TwinError, VmSpec, Workload};
use homenode_units::stats::mean;
use homenode_units::{Bytes, CpuId, NodeId, NodeSet, Ns};
use serde::Serialize;

use crate::host;
use crate::noise::{Noise, Watch};
use crate::stats::Spread;
use profile::{Facts, Parameters, SoloTimes};

/// The memory of both workers together is at most the free memory divided by this.
const MEMORY_SHARE: u64 = 3;
/// Nanoseconds per line in the worst case, in which a worker fills a cache.
const FILL_NS: f64 = 30.0;

/// Returns the command that starts a worker with a kernel, on a CPU, with memory on a node.
pub type Spawn<'a> = &'a dyn Fn(Kernel, CpuId, Option<NodeId>) -> Command;

/// Why the simulator was not validated.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ValidateError {
    #[error("no two CPUs that this process may use share a last-level cache; the comparison needs two")]
    NoPartners,
    #[error("machine {machine} lacks {what}")]
    Incomplete { machine: String, what: &'static str },
    #[error("a worker process failed: {0}")]
    Worker(#[from] io::Error),
    #[error("the simulator cannot run what this host ran: {0}")]
    Twin(#[from] TwinError),
}

/// Results of one process of a pair.
#[derive(Clone, Debug, Serialize)]
pub struct Side {
    /// The process's kernel.
    pub kernel: Kernel,
    /// Nanoseconds per line when running alone.
    pub solo_ns: Spread,
    /// The slow-down of each repetition, in order.
    pub slowdowns: Vec<f64>,
    /// The simulator's prediction of `solo_ns`.
    pub solo_predicted_ns: f64,
    /// Slow-down: time per line together over time per line alone.
    pub slowdown: Spread,
    /// The simulator's prediction of the slow-down.
    pub predicted: f64,
    /// Predicted slow-down over the measured median, less 1.
    pub error: f64,
}

/// Results of a pair of processes that run together.
#[derive(Clone, Debug, Serialize)]
pub struct Case {
    /// Name for people: sizes as shares of the LLC.
    pub name: String,
    /// Results of both processes.
    pub sides: [Side; 2],
}

/// The fit of the simulator's family of curves to a kernel.
#[derive(Clone, Debug, Serialize)]
pub struct CurveFit {
    /// The kernel.
    pub kernel: Kernel,
    /// The curve and its error.
    pub fitted: FittedCurve,
}

/// Measured against predicted slow-downs.
#[derive(Clone, Debug, Serialize)]
pub struct Validation {
    /// CPUs of the two workers.
    pub cpus: [CpuId; 2],
    /// LLC size in bytes, to which sizes in names refer.
    pub llc_bytes: Bytes,
    /// Solo times from which the profiles were made.
    pub solo: SoloTimes,
    /// Parameters of the kernels, derived from the solo times.
    pub parameters: Parameters,
    /// Curves of the kernels.
    pub curves: Vec<CurveFit>,
    /// All pairs.
    pub cases: Vec<Case>,
    /// Mean absolute error of the predictions.
    pub error_mean: f64,
    /// Largest absolute error of the predictions.
    pub error_max: f64,
    /// Number of processes whose predicted slow-down is between the measured minimum and maximum.
    pub within_spread: usize,
    /// Number of processes in all pairs.
    pub sides: usize,
    /// Other activity on the host during the validation.
    pub noise: Option<Noise>,
    /// Duration in seconds.
    pub seconds: f64,
}

struct Run<'a> {
    machine: &'a Machine,
    cpus: [CpuId; 2],
    node: NodeId,
    facts: Facts,
    spawn: Spawn<'a>,
    spans: Spans,
    repeats: usize,
}

/// Validates the simulator against the host, with this machine, which [`crate::machine_file`] made.
///
/// # Errors
/// A host with one CPU; workers that cannot run; a machine that the simulator rejects.
pub fn validate(
    machine: &Machine,
    quick: bool,
    spawn: Spawn<'_>,
    progress: &mut dyn FnMut(usize, usize, &str),
) -> Result<Validation, ValidateError> {
    let repeats = if quick { 3 } else { 7 };
    validate_with(machine, quick, repeats, spawn, progress)
}

/// Like [`validate`], with this many repetitions of each pair.
///
/// # Errors
/// A host with one CPU; workers that cannot run; a machine that the simulator rejects.
pub fn validate_with(
    machine: &Machine,
    quick: bool,
    repeats: usize,
    spawn: Spawn<'_>,
    progress: &mut dyn FnMut(usize, usize, &str),
) -> Result<Validation, ValidateError> {
    let (watch, begin) = (Watch::begin(), Instant::now());
    let cpus = partners(machine).ok_or(ValidateError::NoPartners)?;
    let lacks = |what| ValidateError::Incomplete {
        machine: machine.name.clone(),
        what,
    };
    let hardware = machine.hardware.as_ref().ok_or_else(|| lacks("timing figures"))?;
    let node = memory_node(machine, cpus[0]).ok_or_else(|| lacks("a node with memory"))?;
    let bandwidth = machine.nodes[node]
        .memory_bandwidth
        .ok_or_else(|| lacks("the memory bandwidth of a node"))?;
    let of_cpu = machine.cpu(cpus[0]).and_then(|cpu| cpu.llc);
    let llc = of_cpu
        .and_then(|llc| machine.llcs.get(llc as usize))
        .ok_or_else(|| lacks("a last-level cache"))?
        .size_bytes;
    let facts = Facts::of(hardware, bandwidth.as_f64() / 1e9, llc.as_f64());
    let spans = spans(llc, quick);
    let run = Run {
        machine,
        cpus,
        node,
        facts,
        spawn,
        spans,
        repeats,
    };
    let most = (host::memory_available(node) / MEMORY_SHARE / 2) as usize;
    let cases = cases(llc.0 as usize, most, quick);
    let steps = 1 + cases.len();
    progress(1, steps, "kernels alone");
    let solo = run.solo_times(most)?;
    let parameters = Parameters::of(&solo, &facts);
    let mut curves: Vec<CurveFit> = Vec::new();
    let mut measured = Vec::new();
    for (at, (name, kernels)) in cases.into_iter().enumerate() {
        progress(2 + at, steps, &name);
        let profiles = kernels.map(|kernel| {
            let (workload, fitted) = profile::profile(kernel, &parameters, &facts);
            if !curves.iter().any(|known| known.kernel == kernel) {
                curves.push(CurveFit { kernel, fitted });
            }
            workload
        });
        measured.push(run.case(name, kernels, &profiles)?);
    }
    let sides: Vec<&Side> = measured.iter().flat_map(|case| &case.sides).collect();
    let errors: Vec<f64> = sides.iter().map(|side| side.error.abs()).collect();
    let within = |side: &&&Side| (side.slowdown.min..=side.slowdown.max).contains(&side.predicted);
    Ok(Validation {
        cpus,
        llc_bytes: llc,
        solo,
        parameters,
        curves,
        error_mean: mean(errors.iter().copied()).unwrap_or(0.0),
        error_max: errors.iter().copied().fold(0.0, f64::max),
        within_spread: sides.iter().filter(within).count(),
        sides: sides.len(),
        noise: watch.seen(),
        seconds: begin.elapsed().as_secs_f64(),
        cases: measured,
    })
}

/// Returns the durations of each run. Runs are longer than it takes to fill an LLC of this size.
fn spans(llc: Bytes, quick: bool) -> Spans {
    let fill_ms = (llc.as_f64() / 64.0 * FILL_NS / 1e6) as u64;
    if quick {
        return Spans {
            warm: fill_ms.clamp(20, 120),
            measure: 60,
            tail: 10,
        };
    }
    Spans {
        warm: (2 * fill_ms).clamp(100, 1000),
        measure: 300,
        tail: 30,
    }
}

/// Returns two CPUs that share a last-level cache, on different cores if possible.
pub fn partners(machine: &Machine) -> Option<[CpuId; 2]> {
    let pairs = |apart: bool| {
        let all = machine.cpus.iter().enumerate();
        all.flat_map(move |(at, one)| machine.cpus[at + 1..].iter().map(move |other| (one, other)))
            .find(|(one, other)| {
                one.llc.is_some() && one.llc == other.llc && (one.core != other.core) == apart
            })
            .map(|(one, other)| [one.id, other.id])
    };
    pairs(true).or_else(|| pairs(false))
}

/// Returns the CPU's own node, or else the nearest node with memory.
fn memory_node(machine: &Machine, cpu: CpuId) -> Option<NodeId> {
    let own = machine.node_of(cpu)?;
    machine
        .memory_nodes()
        .iter()
        .min_by_key(|node| machine.distance(own, *node))
}

/// Returns pairs of kernels. Their sizes are shares of the LLC size, as far as memory allows.
fn cases(llc: usize, most: usize, quick: bool) -> Vec<(String, [Kernel; 2])> {
    let sized = |share: f64| ((llc as f64 * share) as usize).clamp(1 << 20, most.max(1 << 20));
    let uniform = |share| Kernel::Uniform(sized(share));
    let stream = Kernel::Stream(sized(4.0));
    let mix = Kernel::Mix(sized(0.5), sized(4.0).min(most / 2));
    let all = [
        ("uniform 1/4 + uniform 1/4", [uniform(0.25); 2], false),
        ("uniform 1/2 + uniform 1/2", [uniform(0.5); 2], true),
        ("uniform 1 + uniform 1", [uniform(1.0); 2], false),
        ("uniform 2 + uniform 2", [uniform(2.0); 2], false),
        ("uniform 1/4 + uniform 2", [uniform(0.25), uniform(2.0)], false),
        ("uniform 1/2 + stream", [uniform(0.5), stream], true),
        ("stream + stream", [stream; 2], false),
        ("uniform 1/2 + mix", [uniform(0.5), mix], false),
    ];
    all.into_iter()
        .filter(|(.., also_quick)| *also_quick || !quick)
        .map(|(name, kernels, _)| (name.to_owned(), kernels))
        .collect()
}

impl Run<'_> {
    fn worker(&self, side: usize, kernel: Kernel) -> io::Result<Worker> {
        let bound = (self.machine.memory_nodes().len() > 1).then_some(self.node);
        Worker::start((self.spawn)(kernel, self.cpus[side], bound))
    }

    /// Measures the times from which the profiles are made: medians of runs on the first CPU.
    fn solo_times(&self, most: usize) -> io::Result<SoloTimes> {
        let time = |kernel: Kernel| -> io::Result<f64> {
            let mut worker = self.worker(0, kernel)?;
            let mut times = Vec::new();
            for _ in 0..self.repeats {
                worker.run(self.spans)?;
                times.push(worker.ns_per_line()?);
            }
            Ok(Spread::of(&times).map_or(f64::NAN, |spread| spread.median))
        };
        let facts = &self.facts;
        let l1 = host::cache_sizes(self.cpus[0]).l1_bytes.unwrap_or(32 << 10) as usize / 2;
        let inside = (facts.l2 * facts.llc)
            .sqrt()
            .max(4.0 * facts.l2)
            .min(facts.llc / 2.0) as usize;
        let outside = ((4.0 * facts.llc) as usize).clamp(1 << 20, most.max(1 << 20));
        Ok(SoloTimes {
            uniform_l1_ns: time(Kernel::Uniform(l1))?,
            uniform_llc_ns: time(Kernel::Uniform(inside))?,
            uniform_llc_bytes: inside,
            uniform_memory_ns: time(Kernel::Uniform(outside))?,
            uniform_memory_bytes: outside,
            stream_l1_ns: time(Kernel::Stream(l1))?,
            stream_memory_ns: time(Kernel::Stream(outside))?,
        })
    }

    fn case(
        &self,
        name: String,
        kernels: [Kernel; 2],
        profiles: &[Workload; 2],
    ) -> Result<Case, ValidateError> {
        let mut workers = [self.worker(0, kernels[0])?, self.worker(1, kernels[1])?];
        let mut alone = [Vec::new(), Vec::new()];
        let mut slower = [Vec::new(), Vec::new()];
        for _ in 0..self.repeats {
            let mut solo = [0.0; 2];
            for (worker, solo) in workers.iter_mut().zip(&mut solo) {
                worker.run(self.spans)?;
                *solo = worker.ns_per_line()?;
            }
            for worker in &mut workers {
                worker.run(self.spans)?;
            }
            for (side, worker) in workers.iter_mut().enumerate() {
                slower[side].push(worker.ns_per_line()? / solo[side]);
                alone[side].push(solo[side]);
            }
        }
        drop(workers);
        let together = self.predict(&[(0, &profiles[0]), (1, &profiles[1])])?;
        let side = |at: usize| -> Result<Side, ValidateError> {
            let solo_predicted_ns = self.predict(&[(at, &profiles[at])])?[0];
            let predicted = together[at] / solo_predicted_ns;
            let nothing = || io::Error::other("a worker process reported no time");
            let slowdown = Spread::of(&slower[at]).ok_or_else(nothing)?;
            Ok(Side {
                kernel: kernels[at],
                solo_ns: Spread::of(&alone[at]).ok_or_else(nothing)?,
                solo_predicted_ns,
                slowdown,
                slowdowns: slower[at].clone(),
                predicted,
                error: predicted / slowdown.median - 1.0,
            })
        };
        Ok(Case {
            name,
            sides: [side(0)?, side(1)?],
        })
    }

    /// Returns the nanoseconds per line that the simulator predicts for these profiles, each on its worker's CPU.
    fn predict(&self, running: &[(usize, &Workload)]) -> Result<Vec<f64>, ValidateError> {
        let vm = |(side, workload): &(usize, &Workload)| {
            let touched = workload
                .program
                .as_ref()
                .map_or(Bytes::ZERO, |program| program.footprint(1));
            // Room for a guest's kernel.
            let memory = Bytes::from_mib(touched.0 / 4 * 5 / (1 << 20) + 512);
            VmSpec::new(&format!("side{side}"), 1, memory, &workload.name)
                .on_cpus([self.cpus[*side]].into_iter().collect())
                .with_memory_on(NodeSet::one(self.node))
        };
        let mut scenario = Scenario::of("validate", running.iter().map(vm).collect());
        scenario.hypervisor = Hypervisor::Native;
        for (_, workload) in running {
            if !scenario.workloads.iter().any(|known| known.name == workload.name) {
                scenario = scenario.with_workload((*workload).clone());
            }
        }
        let mut twin = Twin::new(self.machine.clone(), &scenario, 1)?;
        // By then memory is touched and caches have settled.
        twin.wait(Ns::from_secs(20));
        let window = Duration::from_secs(2);
        let instructions = |twin: &mut Twin| -> Vec<u64> {
            let sample = twin.sample().map(|sample| sample.vms).unwrap_or_default();
            let of = |vm: &homenode_host::VmSample| {
                vm.vcpus[0].counters.map_or(0, |counters| counters.instructions)
            };
            sample.iter().map(of).collect()
        };
        let before = instructions(&mut twin);
        twin.wait(Ns::from_secs(window.as_secs()));
        let after = instructions(&mut twin);
        let rate =
            |(before, after): (&u64, &u64)| after.saturating_sub(*before) as f64 / window.as_secs_f64();
        Ok(before
            .iter()
            .zip(&after)
            .map(rate)
            .map(profile::ns_per_line)
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partners_share_a_cache_and_no_core_where_that_can_be() {
        let machine = homenode_machine_files::preset("r910").unwrap();
        let [one, other] = partners(&machine).unwrap().map(|id| *machine.cpu(id).unwrap());
        assert!(one.llc == other.llc && one.core != other.core);
        let mut lonely = machine.clone();
        lonely.cpus.truncate(1);
        assert_eq!(partners(&lonely), None);
    }

    #[test]
    fn kernels_stay_within_the_memory_that_there_is() {
        for most in [1 << 20, 100 << 20, 1 << 40] {
            for (name, kernels) in cases(32 << 20, most, false) {
                for kernel in kernels {
                    assert!(
                        kernel.footprint() <= most.max(1 << 20) + most.max(1 << 21) / 2,
                        "{name}: {kernel} of {most}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_twin_slows_down_two_that_share_a_cache_and_not_one_alone() {
        let machine = homenode_machine_files::preset("e5_1603v3").unwrap();
        let hardware = machine.hardware.clone().unwrap();
        let facts = Facts::of(&hardware, 52.0, 10e6);
        let parameters = Parameters {
            uniform_work_ns: 2.0,
            uniform_hits_in_flight: 4.0,
            uniform_misses_in_flight: 4.0,
            stream_work_ns: 2.0,
            stream_misses_in_flight: 8.0,
        };
        let spawn = |_: Kernel, _: CpuId, _: Option<NodeId>| Command::new("true");
        let run = Run {
            machine: &machine,
            cpus: [CpuId(0), CpuId(1)],
            node: NodeId(0),
            facts,
            spawn: &spawn,
            spans: Spans {
                warm: 0,
                measure: 1,
                tail: 0,
            },
            repeats: 1,
        };
        let (workload, _) = profile::profile(Kernel::Uniform(8_000_000), &parameters, &facts);
        let alone = run.predict(&[(1, &workload)]).unwrap()[0];
        let both = run.predict(&[(0, &workload), (1, &workload)]).unwrap();
        assert!(
            both.iter().all(|ns| *ns > alone * 1.2 && *ns < alone * 10.0),
            "{alone} alone, {both:?} together"
        );
        assert!((2.0..200.0).contains(&alone), "{alone}");
    }
}
