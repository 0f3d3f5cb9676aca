//! The answers to requests.

use homenode_control::{Line, PermitStatus, Status, VmStatus};
use homenode_host::observation::{Sees, TrackerChoice};
use homenode_host::{CountedBy, EventRecord};
use homenode_policy::advisor;
use homenode_policy::arrange::{Beside, Slowed};
use homenode_policy::demand::BandwidthFrom;
use homenode_policy::placement::{Match, Shortage};
use homenode_units::{Bytes, MemoryPolicy, NodeSet, Ns, Pages, Permit, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::approval::{
    ModeSet, OpenReservation, Recommendation, Recommendations, ReservationDropped, Reservations,
};
pub use crate::maintenance::Maintenance;

/// A reply to a request.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// The answer.
    Answer(Answer),
    /// Why there is no answer.
    Error(ApiError),
}

impl From<Result<Answer, ApiError>> for Reply {
    fn from(result: Result<Answer, ApiError>) -> Reply {
        match result {
            Ok(answer) => Reply::Answer(answer),
            Err(error) => Reply::Error(error),
        }
    }
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum ApiError {
    /// No VM with this name runs here.
    #[error("no VM `{vm}` runs here; there are: {}", running.join(", "))]
    NoSuchVm {
        /// The requested name.
        vm: String,
        /// Names of the VMs that run here.
        running: Vec<String>,
    },
    /// Several VMs with this name run here.
    #[error("{} VMs that run here are named `{vm}`: {}; name the one that you mean by its UUID", ids.len(), listed(.ids))]
    AmbiguousVm {
        /// The requested name.
        vm: String,
        /// The VMs with that name.
        ids: Vec<VmId>,
    },
    /// The number in the request belongs to no recommendation or reservation.
    #[error("there is no {what} {id}; {}", there_are(.known))]
    NoSuchId {
        /// Kind of the numbered thing: `recommendation`, `reservation`.
        what: String,
        /// The requested number.
        id: u64,
        /// The numbers that exist.
        known: Vec<u64>,
    },
    /// The recommendation or setting that the request is about is over, or was changed already.
    #[error("{why}")]
    Conflict {
        /// The reason, as a sentence: what the request conflicts with.
        why: String,
    },
    /// The request is invalid in itself.
    #[error("{why}")]
    BadInput {
        /// The mistake in the request, with the remedy.
        why: String,
    },
    /// The agent does not know enough yet.
    #[error("{why}; try again in a moment")]
    NotYet {
        /// The data that the agent waits for.
        why: String,
    },
    /// The agent cannot carry out or answer the request.
    #[error("{why}")]
    Refused {
        /// Why.
        why: String,
    },
    /// The request changes something, and this client may only read.
    #[error("{why}")]
    MayNot {
        /// The users who may change it.
        why: String,
    },
    /// The line is not a request.
    #[error("not a request: {why}")]
    Malformed {
        /// The mistake in the line.
        why: String,
    },
}

/// Most numbers that are listed in a sentence.
const LISTED_MAX: usize = 32;

fn listed<T: ToString>(ids: &[T]) -> String {
    let shown: Vec<String> = ids.iter().take(LISTED_MAX).map(T::to_string).collect();
    shown.join(", ")
}

fn there_are(ids: &[u64]) -> String {
    match ids {
        [] => "there are none".to_owned(),
        _ => format!("there are: {}", listed(ids)),
    }
}

impl ApiError {
    /// Creates an error that says that the agent cannot carry out or answer a request.
    pub fn refused(why: impl Into<String>) -> ApiError {
        ApiError::Refused { why: why.into() }
    }

    /// Returns true if the client made a mistake.
    pub fn is_about_input(&self) -> bool {
        matches!(
            self,
            ApiError::NoSuchVm { .. }
                | ApiError::AmbiguousVm { .. }
                | ApiError::NoSuchId { .. }
                | ApiError::BadInput { .. }
        )
    }
}

/// Defines an answer for each kind of request, and the conversions from and to it.
macro_rules! answers {
    ($($(#[$about:meta])* $name:ident,)*) => {
        /// The answer to a request.
        #[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
        #[serde(tag = "of", rename_all = "kebab-case")]
        pub enum Answer {
            $($(#[$about])* $name($name),)*
        }

        $(
            impl From<$name> for Answer {
                fn from(answer: $name) -> Answer {
                    Answer::$name(answer)
                }
            }

            impl TryFrom<Answer> for $name {
                type Error = Answer;

                fn try_from(answer: Answer) -> Result<$name, Answer> {
                    match answer {
                        Answer::$name(answer) => Ok(answer),
                        other => Err(other),
                    }
                }
            }
        )*
    };
}

answers! {
    /// The answer to [`crate::Request::Announce`].
    Noted,
    /// The answer to [`crate::Request::Reserve`].
    #[serde(alias = "promised")]
    Reserved,
    /// The answer to [`crate::Request::Place`].
    Placed,
    /// The answer to [`crate::Request::Vms`].
    Vms,
    /// The answer to [`crate::Request::Overview`].
    Overview,
    /// The answer to [`crate::Request::PermitSet`].
    PermitSet,
    /// The answer to [`crate::Request::PolicySet`].
    PolicySet,
    /// The answer to [`crate::Request::FloorSet`].
    FloorSet,
    /// The answer to [`crate::Request::PolicyAdvise`].
    PolicyAdvice,
    /// The answer to [`crate::Request::Permits`].
    Permits,
    /// The answer to [`crate::Request::PermitSuggest`].
    Suggestion,
    /// The answer to [`crate::Request::WorkingSets`].
    WorkingSets,
    /// The answer to [`crate::Request::WhatIf`].
    Forecast,
    /// The answer to [`crate::Request::Report`].
    Report,
    /// The answer to [`crate::Request::PermitUsage`].
    #[serde(alias = "bill")]
    PermitUsage,
    /// The answer to [`crate::Request::Recommendations`].
    Recommendations,
    /// The answer to [`crate::Request::RecommendationApply`] and [`crate::Request::RecommendationReject`].
    Recommendation,
    /// The answer to [`crate::Request::ModeSet`].
    ModeSet,
    /// The answer to [`crate::Request::Reservations`].
    #[serde(alias = "promises")]
    Reservations,
    /// The answer to [`crate::Request::ReservationDrop`].
    #[serde(alias = "promise-dropped")]
    ReservationDropped,
    /// The answer to [`crate::Request::Maintenance`], [`crate::Request::Drain`] and [`crate::Request::Pause`].
    Maintenance,
}

/// The announcement of a VM that is about to start was noted.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Noted {
    /// Always true.
    pub noted: bool,
}

/// Nodes for a VM that is about to start.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Reserved {
    /// The nodes; never empty.
    pub nodes: NodeSet,
    /// The VM's name, if libvirt's hook announced it.
    pub name: Option<String>,
    /// Why the VM was given all nodes; `None` if it fits somewhere.
    pub unplaceable: Option<String>,
}

/// Where a VM would be placed.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Placed {
    /// The nodes; `None` if the VM fits nowhere.
    pub nodes: Option<NodeSet>,
    /// Reasons, in sentences.
    pub reasons: Vec<String>,
    /// Predicted speeds of the VM and of its neighbours; absent without an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// If the VM fits nowhere but its memory does: the best home, with its price.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crowded: Option<CrowdedHome>,
    /// The numbers behind the reasons.
    #[serde(flatten)]
    pub figures: PlacedFigures,
}

/// A home that a VM would overcommit, and what that costs.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct CrowdedHome {
    /// The nodes. They have room for the VM's memory.
    pub nodes: NodeSet,
    /// The resources that the nodes have too little of.
    pub shortages: Vec<Shortage>,
    /// Predicted speed of the VM there, over its speed alone on this host; absent without an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub own_speed: Option<f64>,
    /// VMs that would be slowed by at least 1 percent, the worst first; empty without an agent.
    #[serde(default)]
    pub slowed: Vec<Slowed>,
}

impl CrowdedHome {
    /// Returns the home and its price in sentences.
    pub fn sentences(&self) -> Vec<String> {
        let percent = |share: f64| format!("{:.0}%", share * 100.0);
        let mut sentences = vec![format!(
            "the best possible place is node {}, overcommitted",
            self.nodes
        )];
        sentences.extend(self.shortages.iter().map(ToString::to_string));
        if let Some(own) = self.own_speed {
            sentences.push(format!(
                "predicted to run there at {} of its speed alone on this host",
                percent(own)
            ));
            let slowed = |one: &Slowed| format!("{} to {}", one.vm, percent(one.speed));
            let slowed: Vec<String> = self.slowed.iter().map(slowed).collect();
            sentences.push(match slowed.is_empty() {
                true => "no other VM is predicted to be slowed by 1% or more".to_owned(),
                false => format!(
                    "other VMs slow down, relative to their present speed: {}",
                    slowed.join(", ")
                ),
            });
        }
        sentences
    }
}

/// Shares of a host's resources, from 0 to 1.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Shares {
    /// CPUs.
    pub cpu_share: f64,
    /// Memory.
    pub memory_share: f64,
    /// Memory bandwidth.
    pub bandwidth_share: f64,
}

impl From<[f64; 3]> for Shares {
    fn from([cpu_share, memory_share, bandwidth_share]: [f64; 3]) -> Shares {
        Shares {
            cpu_share,
            memory_share,
            bandwidth_share,
        }
    }
}

/// The numbers behind a placement.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PlacedFigures {
    /// The VM fits.
    Fits {
        /// How the home was found.
        matched: Match,
        /// Shares of the host that the VM needs.
        needs: Shares,
        /// Shares of the home that are free before the VM arrives.
        left: Shares,
        /// Share of the home's free hyperthreads that stay free with the VM there, from 0 to 1.
        cpus_stay: f64,
        /// How the VM's bandwidth is known.
        bandwidth_from: BandwidthFrom,
    },
    /// The VM fits nowhere.
    Short {
        /// The resources that are short on each node, and on all nodes together.
        shortages: Vec<Shortage>,
    },
}

/// The VMs that the agent manages.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Vms {
    /// Every VM, in the order of names.
    pub vms: Vec<VmStatus>,
}

/// The current nodes, links and VMs, and recent events.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Overview {
    /// The host.
    #[serde(flatten)]
    pub status: Status,
    /// Recent events, oldest first; some hundreds at most.
    pub events: Vec<Happened>,
}

/// An event.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Happened {
    /// The host's clock at that time.
    pub at_ns: Ns,
    /// Time since the event.
    pub age_ns: Ns,
    /// The event's kind: `decided`, `found`, `refused`, `appeared` and so on.
    pub kind: String,
    /// The VM's name, if the event is about a VM.
    pub vm: Option<String>,
    /// The policy that made the decision or finding.
    pub policy: Option<String>,
    /// The outcome, if the event is a decision.
    pub outcome: Option<String>,
    /// Number of consecutive occurrences.
    pub count: u64,
    /// A sentence for people.
    pub text: String,
}

impl Happened {
    /// Returns an event that occurred `count` times in a row, the first time `age_ns` ago.
    pub fn of(record: EventRecord, age_ns: Ns, count: u64) -> Happened {
        Happened {
            at_ns: record.at,
            age_ns,
            kind: record.kind,
            vm: record.name,
            policy: record.policy,
            outcome: record.outcome,
            count,
            text: record.text,
        }
    }
}

/// A permit was booked or given up.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PermitSet {
    /// The VM.
    pub vm: String,
    /// The permit that the VM booked.
    pub permit: Option<Permit>,
    /// A note for the operator.
    pub note: Option<String>,
}

/// A memory policy was chosen, or left to the agent.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PolicySet {
    /// The VM.
    pub vm: String,
    /// The policy.
    pub policy: Option<MemoryPolicy>,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

/// A VM's memory floor was set.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct FloorSet {
    /// The VM.
    pub vm: String,
    /// The least memory that the VM keeps; `None` if it keeps all.
    pub floor_bytes: Option<Bytes>,
    /// A note for the operator.
    pub note: Option<String>,
}

/// Which memory policy suits a VM.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PolicyAdvice {
    /// The VM.
    pub vm: String,
    /// The policy in force.
    pub memory_policy: MemoryPolicy,
    /// The advice.
    #[serde(flatten)]
    pub advice: advisor::Advice,
}

/// Permits, and whether VMs stay within them.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Permits {
    /// The VMs.
    pub vms: Vec<VmPermit>,
}

/// A VM's permit.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct VmPermit {
    /// The VM's name.
    pub name: String,
    /// The VM's UUID.
    pub id: VmId,
    /// How the VM's pollution is counted; `None` if it is not.
    pub counted_by: Option<CountedBy>,
    /// The permit, and whether the VM stayed within it.
    #[serde(flatten)]
    pub permit: PermitStatus,
}

/// Permits that a VM might book.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Suggestion {
    /// The VM.
    pub vm: String,
    /// The permit that suits the VM's behaviour.
    pub from_behaviour: Option<Permit>,
    /// The reason for the permit, or why there is none.
    pub behaviour: String,
    /// The permit that suits the VM's memory.
    pub from_memory: Option<Permit>,
    /// The reason for the permit, or why there is none.
    pub memory: String,
}

/// Usage of booked permits.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PermitUsage {
    /// Lines by VM and hour.
    pub lines: Vec<Line>,
}

/// The working set of one VM, as far as the agent knows it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct WorkingSet {
    /// The VM's name.
    pub vm: String,
    /// Memory that the guest may use.
    pub memory_bytes: Bytes,
    /// Whether the VM's memory is watched now.
    pub is_watched: bool,
    /// Why there is no current figure; `None` if there is one.
    pub why_not: Option<String>,
    /// The last figure.
    pub working_set: Option<Figure>,
}

/// An estimate of a working set.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Figure {
    /// Size of the working set.
    pub size_bytes: Bytes,
    /// Lower bound.
    pub least_bytes: Bytes,
    /// Upper bound.
    pub most_bytes: Bytes,
    /// How sure the two bounds are: `bounds`, `percent95`, `spread`.
    pub certainty: String,
    /// How sure the two bounds are, in words.
    pub certainty_means: String,
    /// The distance of the size from the farther bound.
    pub error_bytes: Bytes,
    /// Length of the window in which use was observed.
    pub window_ns: Ns,
    /// The tracker.
    pub tracker: String,
    /// The tracker's advantage over the others.
    pub tracker_merit: String,
    /// Which accesses the tracker sees: `all`, `writes`.
    pub sees: Sees,
    /// The accesses that the tracker does not see.
    pub blind_spot: String,
    /// How much memory the tracker may have missed.
    pub blind_bytes: Bytes,
    /// Memory used in every recent window.
    pub hot_bytes: Bytes,
    /// Memory used in some recent windows.
    pub warm_bytes: Bytes,
    /// The part that the guest's kernel uses, if it is distinguished.
    pub kernel_bytes: Bytes,
    /// Whether the estimate would hardly change with more windows.
    pub is_settled: bool,
    /// Trace entries that were lost.
    pub lost: u64,
    /// CPU time that a window costs the host.
    pub cost_ns: Ns,
    /// The host's clock at the end of the window.
    pub at_ns: Ns,
    /// Time since the end of the window.
    pub age_ns: Ns,
}

/// The working sets of VMs.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct WorkingSets {
    /// The host's clock now.
    pub at_ns: Ns,
    /// The trackers, and why the unusable ones cannot be used.
    pub trackers: Vec<TrackerChoice>,
    /// The VMs.
    pub vms: Vec<WorkingSet>,
}

/// Predicted speeds of VMs with other homes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Forecast {
    /// The host's clock.
    pub at_ns: Ns,
    /// The simulation, if the host is a twin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<Simulated>,
    /// The VMs.
    pub vms: Vec<Predicted>,
    /// Median error of predictions so far, as a share; `None` before the first trial was judged.
    pub error_median: Option<f64>,
    /// Number of trials on which the predictions rest.
    pub trials_count: usize,
    /// Notes for the operator.
    pub notes: Vec<String>,
}

/// A simulated host.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Simulated {
    /// The scenario's name.
    pub scenario: String,
    /// The machine's name.
    pub machine: String,
    /// The seed of the run.
    pub seed: u64,
}

/// The prediction for one VM.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Predicted {
    /// The VM's name.
    pub name: String,
    /// The VM's UUID.
    pub id: VmId,
    /// The VM's current home.
    pub home: Option<NodeSet>,
    /// The VM's home in the request.
    pub home_then: Option<NodeSet>,
    /// Time that the VM's work takes now, divided by its time without an agent.
    pub slow_down: Option<f64>,
    /// Time that the VM's work would take with the homes of the request, divided by its time without an agent.
    pub slow_down_then: Option<f64>,
    /// Why there is no prediction; `None` if there is one.
    pub why_unknown: Option<String>,
    /// Why the requested home is impossible; `None` if it is possible.
    pub obstacle: Option<String>,
}

/// The results of trials of homes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The host's clock.
    pub at_ns: Ns,
    /// How far back the report goes; `None` if it includes all remembered trials.
    pub since_ns: Option<Ns>,
    /// The newest trials, in ascending order of time.
    pub trials: Vec<Trial>,
    /// Number of older trials, which are not listed; the sums include them.
    pub unlisted_count: usize,
    /// The VMs.
    pub vms: Vec<VmSum>,
    /// The sum over all VMs.
    pub total: Sum,
    /// Number of changes that are not judged yet.
    pub running_count: usize,
}

/// A change of a VM's home that was judged.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Trial {
    /// The VM's name.
    pub name: String,
    /// The VM's UUID.
    pub id: VmId,
    /// The host's clock when the change was judged.
    pub at_ns: Ns,
    /// Time since the change was judged.
    pub age_ns: Ns,
    /// Predicted speed after the change, divided by the speed before it.
    pub predicted: f64,
    /// Measured speed after the change, divided by the speed before it.
    pub seen: f64,
    /// Whether the change was undone.
    pub undone: bool,
    /// Pages that were moved home; `None` if not known.
    pub pages_moved: Option<Pages>,
}

/// The results of one VM's trials.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct VmSum {
    /// The VM's name.
    pub name: String,
    /// The VM's UUID.
    pub id: VmId,
    /// Whether the VM is gone.
    pub is_gone: bool,
    /// The sum of the VM's trials.
    #[serde(flatten)]
    pub sum: Sum,
}

/// The results of several trials.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Sum {
    /// Number of judged trials.
    pub trials_count: usize,
    /// Number of these trials that were undone.
    pub undone_count: usize,
    /// For one VM: its speed now divided by its speed before all trials, if nothing else had changed. For all VMs: the geometric
    /// mean of these quotients.
    pub gain: f64,
    /// Pages that were moved home; `None` if not known.
    pub pages_moved: Option<Pages>,
    /// Median error of the predictions, as a share.
    pub error_median: Option<f64>,
}
