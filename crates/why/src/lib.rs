//! Explains why a VM was slow: what changed compared with the time before, by how much, and what changed it.
//!
//! # Problem
//! A VM that slows down does not report the cause, and most of what happens on its host at that time is unrelated. Neighbours may
//! be loud all day, and other victims of the same cause change at the same time.
//!
//! # Terms
//! - *Cost* of an instruction: the time for which vCPUs wanted a CPU (ran, waited or were throttled), divided by the instructions
//!   retired. It grows with everything that slows a VM down, but not with the amount of work in the guest.
//! - *Window*: the time in question. *Baseline*: the time before it, four times as long.
//! - *Step*: a piece of the window or the baseline. A window has about thirty steps.
//!
//! # Method
//! 1. Find the slow part of the window: the steps whose cost is over the midpoint between the baseline's cost and the highest
//!    cost. If no mean over a few steps exceeds all such means of the baseline, nothing is wrong, and nothing is blamed.
//! 2. Divide the growth of the cost. The host counts waiting and throttling. The rest is time per instruction, which `model`
//!    divides: `core x siblings + stall x misses x latency`, with `core` and `stall` fitted over all steps.
//! 3. Report each part that grew as a [`Cause`], with the share of speed that it took. Attribute the unexplained rest to the
//!    guest.
//! 4. Find the culprit: among all VMs and the host, the one whose *demand* on the same CPUs, cache, controller or link grew most.
//!    Another victim has more misses, but not more accesses. The demand of a neighbour that was as loud before has not grown.
//!
//! # Properties
//! - `a_planted_cause_and_its_culprit_come_first`
//! - `a_busy_but_steady_run_blames_nobody`
//!
//! # What may be missing
//! Without counters, the cost is the time wanted divided by the time run, so only waiting and throttling can be found. If the
//! traffic of nodes or links is not counted, these are never blamed. If the VM's history is shorter than window and baseline,
//! [`within`] shortens the window; if there are too few steps to compare, the answer is the VM's speed only. Everything is
//! derived from samples and the agent's recorded decisions; the host is not queried.
//!
//! # Sources
//! The baseline is that of Netdata's metric correlations. The model's terms are from (Eyerman) TOCS 2009, the latency of a loaded
//! controller from (Lazowska) 1984, and the sharing of a cache according to accesses from (Chandra) HPCA 2005.

mod culprits;
mod facts;
mod model;

use homenode_host::{EventRecord, Sample};
use homenode_machine::Machine;
use homenode_units::{Ns, VmId};
use schemars::JsonSchema;
use serde::Serialize;

use facts::{Facts, Step};

/// Steps per window.
const WINDOW_STEPS: u64 = 30;
/// Length of the baseline, in windows.
pub const BASELINE: u64 = 4;
/// Number of steps that are averaged to tell change from noise.
const SMOOTH: usize = 5;
/// A loss of less than this share of speed is ignored.
const LOSS_MIN: f64 = 0.03;
/// The share by which the most expensive part of the window must exceed every part of the baseline.
const ABOVE: f64 = 0.02;
/// A cause that took less than this share of the VM's speed is not reported.
const CAUSE_MIN: f64 = 0.01;
/// A decision may have caused a change if it was made at most this long before it.
const DECIDED_BEFORE: Ns = Ns::from_secs(5);
/// A decision is a response to a cause if it was made at most this long after the cause ended.
const DECIDED_AFTER: Ns = Ns::from_secs(60);

/// Causes of slowness.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The VM's vCPUs waited for CPUs.
    Waiting,
    /// A CPU quota kept the VM's vCPUs from running.
    Quota,
    /// The agent enforced the VM's permit.
    Permit,
    /// More of the VM's accesses went to memory on other nodes.
    RemoteMemory,
    /// Other VMs took more of the last-level cache that the VM uses.
    LlcPollution,
    /// A memory controller that the VM uses was busier.
    Controller,
    /// A link between nodes that the VM uses was busier.
    Link,
    /// The sibling hyperthreads of the VM's vCPUs were busier.
    SmtSibling,
    /// The VM's pages were being moved.
    PageMoves,
    /// The VM's balloon left it less memory than it used, so it swapped.
    Balloon,
    /// The VM's cores ran at a lower clock frequency.
    Clock,
    /// The guest did different work than before.
    OwnPhase,
}

impl Code {
    /// Returns a description for people.
    pub fn text(self) -> &'static str {
        match self {
            Code::Waiting => "its vCPUs waited for CPUs",
            Code::Quota => "a CPU quota kept its vCPUs from running",
            Code::Permit => "the agent limited it to the cache pollution of its permit",
            Code::RemoteMemory => "more of its memory was on nodes other than those of its vCPUs",
            Code::LlcPollution => "others filled the last-level cache that it uses",
            Code::Controller => "a memory controller that it uses was busier",
            Code::Link => "a link between nodes that it uses was busier",
            Code::SmtSibling => "the hyperthreads beside its vCPUs were busier",
            Code::PageMoves => "its pages were being moved",
            Code::Balloon => "it had less memory than it used, and swapped",
            Code::Clock => "its cores ran at a lower clock",
            Code::OwnPhase => "its guest did different work than before",
        }
    }
}

/// The culprit of a cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(tag = "who", rename_all = "kebab-case")]
pub enum Culprit {
    /// Another VM.
    Vm {
        /// The VM's id.
        id: VmId,
        /// The VM's name.
        name: String,
    },
    /// The VM itself.
    Itself,
    /// Processes of the host outside VMs.
    Host,
    /// The agent, through a decision.
    Agent {
        /// Id of the decision.
        decision: i64,
    },
    /// Another program or person, not the agent, that changed pins, quota, memory or balloon.
    Somebody,
    /// The data does not show the culprit.
    Unknown,
}

impl std::fmt::Display for Culprit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Culprit::Vm { name, .. } => write!(f, "VM {name}"),
            Culprit::Itself => write!(f, "the VM itself"),
            Culprit::Host => write!(f, "processes of the host outside VMs"),
            Culprit::Agent { decision } => write!(f, "the agent (decision {decision})"),
            Culprit::Somebody => write!(f, "another program's change"),
            Culprit::Unknown => write!(f, "not known"),
        }
    }
}

/// A figure that shows a cause.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Figure {
    /// The quantity, with its unit (`local accesses, percent`).
    pub what: &'static str,
    /// The quantity's value in the baseline.
    pub before: f64,
    /// The quantity's value while the VM was slow.
    pub during: f64,
}

/// A cause of slowness.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Cause {
    /// The cause's kind.
    pub code: Code,
    /// Share of the VM's speed that the cause took, in [0, 1].
    pub lost: f64,
    /// The VM or program that brought the cause about.
    pub culprit: Culprit,
    /// The figures that show the cause.
    pub figures: Vec<Figure>,
    /// The agent's decision in response to the cause, or why it decided nothing.
    pub followed: Followed,
}

/// The agent's response to a cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Followed {
    /// Id of the decision or finding; `None` if there is none.
    pub id: Option<i64>,
    /// A sentence for people.
    pub text: String,
}

/// The quantity that stands for a VM's speed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Measure {
    /// Instructions per second of CPU time that the VM wanted: its vCPUs ran, waited or were throttled.
    InstructionsPerCpuS,
    /// Share of the CPU time that the VM wanted in which its vCPUs ran, since its instructions are not counted.
    ShareRan,
}

/// How fast the VM was, compared with its baseline.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Speed {
    /// The measure of both figures.
    pub measure: Measure,
    /// The VM's usual speed, that of the baseline; `None` if too little was recorded to compare.
    pub usual: Option<f64>,
    /// The VM's speed in the slow part; in the whole window if the VM was not slow.
    pub then: f64,
    /// `then` divided by `usual`.
    pub ratio: Option<f64>,
}

impl Speed {
    fn of(usual: Option<&Step>, then: &Step) -> Speed {
        let measure = then.measure();
        let usual = usual.filter(|usual| usual.measure() == measure);
        let usual = usual.map(Step::speed);
        let then = then.speed();
        Speed {
            measure,
            usual,
            then,
            ratio: usual.filter(|usual| *usual > 0.0).map(|usual| then / usual),
        }
    }
}

/// The explanation of why a VM was slow.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct Explanation {
    /// The VM.
    pub vm: VmId,
    /// The VM's name.
    pub name: String,
    /// Start of the slow part, by the host's clock; start of the window if nothing was slow.
    pub from_ns: Ns,
    /// End of the slow part, or of the window.
    pub to_ns: Ns,
    /// Start of the baseline; that of the window if there is none.
    pub baseline_from_ns: Ns,
    /// Length of the VM's history that the answer is based on, baseline and window together.
    pub history_ns: Ns,
    /// How fast the VM was.
    pub speed: Speed,
    /// Share of its speed that the VM lost in the slow part, in [0, 1]; 0 if it was not slow.
    pub lost: f64,
    /// The causes, largest loss first; empty if the VM was not slow.
    pub causes: Vec<Cause>,
    /// Limits of the answer, such as missing counters or a short history.
    pub notes: Vec<String>,
}

/// A decision, finding or other event from the history.
#[derive(Clone, Debug)]
pub struct Happening {
    /// The event's id in the history.
    pub id: i64,
    /// The event.
    pub record: EventRecord,
}

/// Why there is no explanation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WhyError {
    /// The VM did not run at that time.
    #[error("VM {vm} did not run at that time: `homenode record show` lists when it appeared and vanished")]
    NotThere {
        /// The VM.
        vm: VmId,
    },
    /// The VM wanted no CPU time in the window, or only one sample has it.
    #[error(
        "VM {name} has no two samples at that time between which it wanted CPU time: it idled, or it has just appeared; ask \
         again in a few seconds, or with --at about a time when it ran"
    )]
    Idle {
        /// The VM's name.
        name: String,
    },
}

/// Returns the time from which samples are needed to explain this window, and the smallest useful distance between samples.
pub fn wanted(from: Ns, to: Ns) -> (Ns, Ns) {
    let window = to.saturating_sub(from);
    let begin = from.saturating_sub(Ns(window.0.saturating_mul(BASELINE)));
    (begin, Ns(window.0 / WINDOW_STEPS))
}

/// Returns the window to explain if the VM's history begins at `history_from`: the window in question, or a shorter one with the
/// same end if there is no baseline before it. The shorter one is a fifth of the history, but includes the time `about` if the
/// question names one.
pub fn within(history_from: Ns, about: Option<Ns>, (from, to): (Ns, Ns)) -> (Ns, Ns) {
    let (_, apart) = wanted(from, to);
    if from.saturating_sub(history_from).0 >= apart.0.saturating_mul(SMOOTH as u64) {
        return (from, to);
    }
    let part = Ns(to.saturating_sub(history_from).0 / (BASELINE + 1));
    let shorter = to.saturating_sub(part);
    let shorter = about.map_or(shorter, |about| shorter.min(about));
    (shorter.max(history_from), to)
}

/// Explains why a VM was slow between two times. `samples` must be of one run, ascending in time, and begin at the time that
/// [`wanted`] returns.
///
/// # Errors
/// If the VM did not run, or wanted no CPU time.
pub fn explain(
    machine: &Machine,
    samples: &[Sample],
    vm: VmId,
    (from, to): (Ns, Ns),
    happenings: &[Happening],
) -> Result<Explanation, WhyError> {
    let facts = Facts::of(machine, samples, vm, wanted(from, to));
    let name = facts.name.clone().ok_or(WhyError::NotThere { vm })?;
    let (before, during) = parts(&facts, (from, to));
    let (Some(first), Some(end)) = (before.first().or(during.first()), during.last()) else {
        return Err(WhyError::Idle { name });
    };
    let is_enough = before.len() >= SMOOTH && during.len() >= SMOOTH;
    let base = is_enough.then(|| Step::mean(before));
    let mut explanation = Explanation {
        vm,
        name,
        from_ns: before.last().map_or(from, |last| from.max(last.at)),
        to_ns: to,
        baseline_from_ns: before.first().map_or(from, |first| first.at),
        history_ns: end.at.saturating_sub(first.began()),
        speed: Speed::of(base.as_ref(), &Step::mean(during)),
        lost: 0.0,
        causes: Vec::new(),
        notes: facts.notes(),
    };
    let Some(base) = base else {
        explanation.notes.push(format!(
            "the history of the VM is {:.0} s long: {} samples before and {} in the window are too few to tell whether it was \
             slow, since {SMOOTH} each are needed",
            explanation.history_ns.as_secs_f64(),
            before.len(),
            during.len()
        ));
        return Ok(explanation);
    };
    if before.len() < during.len() * BASELINE as usize / 2 {
        explanation
            .notes
            .push("little was recorded before: a long-standing condition may look new".to_owned());
    }
    let slow = slow_steps(before, during);
    let (Some(first), Some(last)) = (slow.first(), slow.last()) else {
        return Ok(explanation);
    };
    let slow_mean = Step::mean_of(&slow);
    explanation.from_ns = first.began();
    explanation.to_ns = last.at;
    explanation.speed = Speed::of(Some(&base), &slow_mean);
    explanation.lost = 1.0 - base.cost() / slow_mean.cost();
    explanation.causes = causes(&facts, (&base, &slow_mean), explanation.from_ns, happenings);
    Ok(explanation)
}

/// Divides a VM's steps into baseline and window. If there is almost nothing before the window, its first steps are the baseline.
fn parts(facts: &Facts, (from, to): (Ns, Ns)) -> (&[Step], &[Step]) {
    let steps = &facts.steps[..facts.steps.partition_point(|step| step.at <= to)];
    let mut before = steps.partition_point(|step| step.at <= from);
    if before < SMOOTH && steps.len() >= 2 * SMOOTH {
        before = SMOOTH;
    }
    steps.split_at(before)
}

/// Returns what took the VM's speed since this time, the largest loss first.
fn causes(facts: &Facts, (base, slow): (&Step, &Step), since: Ns, happenings: &[Happening]) -> Vec<Cause> {
    let mut parts = model::parts(facts, (base, slow));
    parts.retain(|(_, lost)| *lost >= CAUSE_MIN);
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let causes = parts.into_iter().map(|(code, lost)| {
        let look = culprits::Look {
            facts,
            base,
            slow,
            since,
            happenings,
        };
        let (code, culprit) = look.blame(code);
        Cause {
            code,
            lost,
            followed: followed(happenings, facts.vm, &culprit, (since, slow.at)),
            figures: culprits::figures(code, base, slow),
            culprit,
        }
    });
    causes.collect()
}

/// Returns the steps of a window in which the VM was slow. Returns none if the cost was as high in the baseline.
fn slow_steps<'a>(before: &[Step], during: &'a [Step]) -> Vec<&'a Step> {
    let smooth = |steps: &[Step]| {
        let windows = steps.windows(SMOOTH).map(|few| Step::mean(few).cost());
        windows.filter(|cost| cost.is_finite()).fold(0.0, f64::max)
    };
    let usual = Step::mean(before).cost();
    let (highest_before, highest) = (smooth(before), smooth(during));
    if !usual.is_finite() || highest < usual / (1.0 - LOSS_MIN) || highest < highest_before * (1.0 + ABOVE) {
        return Vec::new();
    }
    let bar = f64::midpoint(usual, highest);
    during.iter().filter(|step| step.cost() > bar).collect()
}

/// Returns what the agent decided about the VM or the culprit after the cause began, or why it decided nothing.
fn followed(happenings: &[Happening], vm: VmId, culprit: &Culprit, (from, to): (Ns, Ns)) -> Followed {
    let other = match culprit {
        Culprit::Vm { id, .. } => Some(*id),
        _ => None,
    };
    let within = |at: Ns| at > from && at <= Ns(to.0.saturating_add(DECIDED_AFTER.0));
    let about = |happening: &&Happening| {
        let EventRecord { at, vm: about, .. } = happening.record;
        within(at) && about.is_some() && (about == Some(vm) || about == other)
    };
    let by = match culprit {
        Culprit::Agent { decision } => Some(*decision),
        _ => None,
    };
    let mut about = happenings
        .iter()
        .filter(about)
        .filter(|happening| Some(happening.id) != by)
        .collect::<Vec<_>>();
    about.sort_by_key(|Happening { record, .. }| (!record.was_carried_out(), record.at));
    match about.first() {
        Some(happening) => Followed {
            id: Some(happening.id),
            text: happening.record.text.clone(),
        },
        None => Followed {
            id: None,
            text: "nothing was decided: no policy found anything to act on".to_owned(),
        },
    }
}
