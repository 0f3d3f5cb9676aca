//! Measures the sections of a report.
//!
//! Each topic is a module with one function, which repeats a measurement as often as an interval needs, and says what came out.
//! What cannot be measured on a host is a section with its reason. Nothing that a section starts or changes outlives the
//! process: workers die with their parent, and no setting of the host is written.

mod afterwards;
mod balancing;
mod contention;
mod counters;
mod guests;
mod kyoto;
mod machine;
mod mix;
mod moving;
mod nearest;
mod numad;
mod placement;
mod requests;
mod scope;
mod working_set;

use std::path::PathBuf;
use std::time::Duration;

use homenode_calibrate::validate::{Spawn, partners};
use homenode_calibrate::{Noise, Watch};
use homenode_load::Kernel;
use homenode_load::worker::{Spans, Worker};
use homenode_machine::Machine;
use homenode_units::{CpuId, NodeId};

pub use afterwards::Afterwards;
pub use kyoto::{Permits, THRASHER, THRASHER_UUID};
pub use mix::Mix;

use crate::section::{Outcome, Section, Topic};

/// Repetitions of a measurement if time allows: the interval of nine leaves out the least and the greatest value.
const REPETITIONS: usize = 9;
/// Lines that a request of a server reads: some tens of microseconds of work.
const LINES: usize = 2000;
/// The share of the host's CPU time from which on others disturb a measurement.
const DISTURBED: f64 = 0.05;

/// What sections measure with.
pub struct Bench<'a> {
    /// The host: CPUs and nodes that this process may use.
    pub machine: &'a Machine,
    /// Starts a worker.
    pub spawn: Spawn<'a>,
    /// The file of this program, which also answers in place of numad.
    pub program: PathBuf,
    /// A directory whose files stay: the machine file that was measured is kept there.
    pub dir: PathBuf,
    /// How long a section may take.
    pub budget: Duration,
    /// The kernel image that guests boot; by default the host's own.
    pub kernel: Option<PathBuf>,
    /// The agent that acts here, if one does.
    pub agent: Option<&'a mut dyn Permits>,
    /// Is told what is measured now, and the share of the section that is done, in [0, 1].
    pub told: &'a mut dyn FnMut(&str, f64),
}

/// Why a section could not be measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Why {
    /// The reason and the remedy, without names.
    why: String,
    /// What the system said.
    detail: Option<String>,
}

impl std::fmt::Display for Why {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.why)?;
        self.detail
            .as_ref()
            .map_or(Ok(()), |detail| write!(f, ": {detail}"))
    }
}

impl std::error::Error for Why {}

impl Why {
    fn of(why: impl Into<String>) -> Why {
        Why {
            why: why.into(),
            detail: None,
        }
    }

    /// A reason with what the system said.
    fn said(why: impl Into<String>) -> impl FnOnce(&dyn std::fmt::Display) -> Why {
        let why = why.into();
        move |detail| Why {
            why,
            detail: Some(detail.to_string()),
        }
    }
}

impl From<std::io::Error> for Why {
    fn from(error: std::io::Error) -> Why {
        Why::said("a worker process failed; the same command tries again")(&error)
    }
}

/// Returns how a topic is measured, in whole sentences.
fn method(topic: Topic) -> &'static str {
    match topic {
        Topic::Machine => machine::METHOD,
        Topic::Counters => counters::METHOD,
        Topic::Contention => contention::METHOD,
        Topic::Kyoto => kyoto::METHOD,
        Topic::Placement => placement::METHOD,
        Topic::Moving => moving::METHOD,
        Topic::WorkingSet => working_set::METHOD,
        Topic::Balancing => balancing::METHOD,
        Topic::Numad => numad::METHOD,
        Topic::Requests => requests::METHOD,
    }
}

/// Returns how much of the time of all topics this one needs, in minutes of a run of 20.
pub fn minutes(topic: Topic) -> f64 {
    match topic {
        Topic::Machine | Topic::Contention => 4.0,
        Topic::Kyoto | Topic::Placement | Topic::Requests => 2.5,
        Topic::Balancing => 1.5,
        Topic::Counters | Topic::Moving | Topic::WorkingSet | Topic::Numad => 0.75,
    }
}

/// Measures a topic.
pub fn measure(topic: Topic, bench: &mut Bench<'_>) -> Section {
    let watch = Watch::begin();
    let measured = match topic {
        Topic::Machine => machine::measure(bench),
        Topic::Counters => counters::measure(bench),
        Topic::Contention => contention::measure(bench),
        Topic::Moving => moving::measure(bench),
        Topic::WorkingSet => working_set::measure(bench),
        Topic::Balancing => balancing::measure(bench),
        Topic::Numad => numad::measure(bench),
        Topic::Requests => requests::measure(bench),
        Topic::Kyoto => kyoto::measure(bench),
        Topic::Placement => placement::measure(bench),
    };
    let mut section = measured
        .unwrap_or_else(|Why { why, detail }| Section::not_possible(topic, method(topic), why, detail));
    if let (Outcome::Measured { means, .. }, Some(noise)) = (&mut section.outcome, watch.seen()) {
        means.push_str(&disturbed(noise).unwrap_or_default());
    }
    section
}

/// Says that others used the host meanwhile; `None` if they hardly did.
fn disturbed(noise: Noise) -> Option<String> {
    let Noise {
        steal_share,
        others_share,
    } = noise;
    (steal_share + others_share > DISTURBED).then(|| {
        format!(
            "  Meanwhile other programs used {:.0} percent of the CPU time, and a hypervisor below took {:.0} percent: \
             measure again when it is quiet.",
            100.0 * others_share,
            100.0 * steal_share
        )
    })
}

impl Bench<'_> {
    /// Starts a worker; its memory is bound to a node if there is a choice.
    fn worker(&self, kernel: Kernel, cpu: CpuId, node: NodeId) -> Result<Worker, Why> {
        let bound = (self.machine.memory_nodes().len() > 1).then_some(node);
        Ok(Worker::start((self.spawn)(kernel, cpu, bound))?)
    }

    /// Returns two CPUs that share a last-level cache, the cache's bytes, and the nearest node with memory.
    fn neighbours(&self) -> Result<([CpuId; 2], usize, NodeId), Why> {
        let none = || {
            Why::of(
                "no two CPUs that this process may use share a last-level cache; run it on a host with two cores or more",
            )
        };
        let cpus = partners(self.machine).ok_or_else(none)?;
        let llc = self.machine.cpu(cpus[0]).and_then(|cpu| cpu.llc);
        let llc = llc.and_then(|llc| self.machine.llcs.get(llc as usize));
        let node = self.machine.node_of(cpus[0]);
        let memory = self.machine.memory_nodes();
        let near = node.and_then(|node| {
            memory
                .iter()
                .min_by_key(|other| self.machine.distance(node, *other))
        });
        let (llc, near) = llc.zip(near).ok_or_else(none)?;
        Ok((
            cpus,
            usize::try_from(llc.size_bytes.0).unwrap_or(usize::MAX),
            near,
        ))
    }

    /// Returns two nodes with CPUs and memory: a pair that is far apart.
    fn far_pair(&self) -> Result<[NodeId; 2], Why> {
        let machine = self.machine;
        let homes = machine.home_nodes();
        let pairs = homes
            .iter()
            .flat_map(|one| homes.iter().map(move |other| [one, other]))
            .filter(|[one, other]| one != other);
        let farthest = pairs.max_by_key(|[one, other]| machine.distance(*one, *other));
        farthest.ok_or_else(|| {
            Why::of("this host has one NUMA node, or this process may use only one: memory is never far, and cannot move")
        })
    }

    fn first_cpu(&self, node: NodeId) -> Result<CpuId, Why> {
        let cpus = self.machine.nodes.get(node).map(|node| &node.cpus);
        let first = cpus.and_then(|cpus| cpus.iter().next());
        first.ok_or_else(|| Why::of("a node has no CPU that this process may use"))
    }
}

/// Returns the values of `b` over those of `a` in percent: 100 if both are equal.
fn percent_of(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| 100.0 * b / a).collect()
}

/// Returns durations of a run, of which half a second or a bit more is measured.
fn spans(llc: usize, measure_ms: u64) -> Spans {
    // A worker fills the cache in this time, at 30 ns for each line.
    let fill_ms = (llc as f64 / 64.0 * 30.0 / 1e6) as u64;
    Spans {
        warm: (2 * fill_ms).clamp(100, 1000),
        measure: measure_ms,
        tail: 50,
    }
}
