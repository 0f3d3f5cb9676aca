//! What is answered.

use homenode_control::{Line, PermitStatus, Status, VmStatus};
use homenode_host::CountedBy;
use homenode_host::observation::{Sees, TrackerChoice};
use homenode_policy::advisor;
use homenode_policy::arrange::Beside;
use homenode_policy::demand::BandwidthFrom;
use homenode_policy::placement::{Match, Shortage};
use homenode_units::{Bytes, MemoryPolicy, NodeSet, Ns, Pages, Permit, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use crate::approval::{ModeSet, OpenPromise, PromiseDropped, Promises, Recommendation, Recommendations};
pub use crate::maintenance::Maintenance;

/// What comes back.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// What was asked for.
    Answer(Answer),
    /// Why it is not to be had.
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
    /// No VM of this name runs here.
    #[error("no VM `{vm}` runs here; there are: {}", running.join(", "))]
    NoSuchVm {
        /// The name asked for.
        vm: String,
        /// Those that run.
        running: Vec<String>,
    },
    /// Several VMs of this name run here.
    #[error("{} VMs that run here are named `{vm}`: {}; say by its UUID which of them is meant", ids.len(), listed(.ids))]
    AmbiguousVm {
        /// The name asked for.
        vm: String,
        /// Those that have it.
        ids: Vec<VmId>,
    },
    /// There is none of this number.
    #[error("there is no {what} {id}; {}", there_are(.known))]
    NoSuchId {
        /// Of what: `recommendation`, `promise`.
        what: String,
        /// The number asked for.
        id: u64,
        /// Numbers that there are.
        known: Vec<u64>,
    },
    /// What was asked for is over or done already.
    #[error("{why}")]
    Conflict {
        /// What is so already.
        why: String,
    },
    /// What was asked is wrong in itself.
    #[error("{why}")]
    BadInput {
        /// What is wrong, with the remedy.
        why: String,
    },
    /// The agent does not know enough yet.
    #[error("{why}; ask again in a moment")]
    NotYet {
        /// What it is waiting for.
        why: String,
    },
    /// The agent cannot do or say that.
    #[error("{why}")]
    Refused {
        /// Why.
        why: String,
    },
    /// The request changes something, and this client may only read.
    #[error("{why}")]
    MayNot {
        /// Who may.
        why: String,
    },
    /// That was no request.
    #[error("not a request: {why}")]
    Malformed {
        /// What is wrong with it.
        why: String,
    },
}

/// At most so many numbers are listed in a sentence.
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
    /// Something that the agent cannot do or say.
    pub fn refused(why: impl Into<String>) -> ApiError {
        ApiError::Refused { why: why.into() }
    }

    /// Whether the client made a mistake.
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

/// An answer for each kind of request, and the way back from it.
macro_rules! answers {
    ($($(#[$about:meta])* $name:ident,)*) => {
        /// What was asked for.
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
    /// Of [`crate::Request::Announce`].
    Noted,
    /// Of [`crate::Request::Promise`].
    Promised,
    /// Of [`crate::Request::Place`].
    Placed,
    /// Of [`crate::Request::Vms`].
    Vms,
    /// Of [`crate::Request::Overview`].
    Overview,
    /// Of [`crate::Request::PermitSet`].
    PermitSet,
    /// Of [`crate::Request::PolicySet`].
    PolicySet,
    /// Of [`crate::Request::FloorSet`].
    FloorSet,
    /// Of [`crate::Request::PolicyAdvise`].
    PolicyAdvice,
    /// Of [`crate::Request::Permits`].
    Permits,
    /// Of [`crate::Request::PermitSuggest`].
    Suggestion,
    /// Of [`crate::Request::WorkingSets`].
    WorkingSets,
    /// Of [`crate::Request::WhatIf`].
    Forecast,
    /// Of [`crate::Request::Report`].
    Report,
    /// Of [`crate::Request::PermitBill`].
    Bill,
    /// Of [`crate::Request::Recommendations`].
    Recommendations,
    /// Of [`crate::Request::RecommendationApply`] and [`crate::Request::RecommendationReject`].
    Recommendation,
    /// Of [`crate::Request::ModeSet`].
    ModeSet,
    /// Of [`crate::Request::Promises`].
    Promises,
    /// Of [`crate::Request::PromiseDrop`].
    PromiseDropped,
    /// Of [`crate::Request::Maintenance`], [`crate::Request::Drain`] and [`crate::Request::Pause`].
    Maintenance,
}

/// A VM that is about to start was noted.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Noted {
    /// Always.
    pub noted: bool,
}

/// Nodes for a VM that is about to start.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Promised {
    /// Which; never none.
    pub nodes: NodeSet,
    /// The VM's name, where the hook told it.
    pub name: Option<String>,
    /// Why it was given all nodes, if it was.
    pub unplaceable: Option<String>,
}

/// Where a VM would go.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Placed {
    /// Where; `None` where it fits nowhere.
    pub nodes: Option<NodeSet>,
    /// Why, in sentences.
    pub reasons: Vec<String>,
    /// What is predicted of it beside the VMs that run, and of them; nothing is without an agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub beside: Option<Beside>,
    /// The same in figures.
    #[serde(flatten)]
    pub figures: PlacedFigures,
}

/// Shares of a host, from 0 to 1.
#[derive(Clone, Copy, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Shares {
    /// Of its CPUs.
    pub cpu_share: f64,
    /// Of its memory.
    pub memory_share: f64,
    /// Of its memory bandwidth.
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

/// What a placement rests on.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum PlacedFigures {
    /// It fits.
    Fits {
        /// How the home was found.
        matched: Match,
        /// What the VM needs.
        needs: Shares,
        /// What its home has left without it.
        left: Shares,
        /// Share of its free hyperthreads that stay free beside it, 0 to 1.
        cpus_stay: f64,
        /// How the VM's bandwidth is known.
        bandwidth_from: BandwidthFrom,
    },
    /// It does not.
    Short {
        /// What is short on each node, and on all together.
        shortages: Vec<Shortage>,
    },
}

/// What the agent manages.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Vms {
    /// Every VM, by name.
    pub vms: Vec<VmStatus>,
}

/// Nodes, links and VMs as they are, and what happened lately.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Overview {
    /// The host.
    #[serde(flatten)]
    pub status: Status,
    /// What happened, the first first; some hundreds at most.
    pub events: Vec<Happened>,
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Happened {
    /// The host's clock then.
    pub at_ns: Ns,
    /// How long ago.
    pub age_ns: Ns,
    /// What: `decided`, `found`, `refused`, `appeared` and so on.
    pub kind: String,
    /// The VM's name, where it is about one.
    pub vm: Option<String>,
    /// Who decided or found it.
    pub policy: Option<String>,
    /// What came of it.
    pub outcome: Option<String>,
    /// How often in a row.
    pub count: u64,
    /// For people.
    pub text: String,
}

/// A permit was booked, or given up.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PermitSet {
    /// By this VM.
    pub vm: String,
    /// What it books.
    pub permit: Option<Permit>,
    /// What the operator should know of it.
    pub note: Option<String>,
}

/// A memory policy was chosen, or left to the agent.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PolicySet {
    /// For this VM.
    pub vm: String,
    /// Which.
    pub policy: Option<MemoryPolicy>,
    /// What the operator should know of it.
    pub notes: Vec<String>,
}

/// It was said how little memory a VM may be left with.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct FloorSet {
    /// Which VM.
    pub vm: String,
    /// How little; `None` where it keeps all.
    pub floor_bytes: Option<Bytes>,
    /// What the operator should know of it.
    pub note: Option<String>,
}

/// Which memory policy would suit a VM.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PolicyAdvice {
    /// Which VM.
    pub vm: String,
    /// The policy that it has.
    pub memory_policy: MemoryPolicy,
    /// What is thought of it.
    #[serde(flatten)]
    pub advice: advisor::Advice,
}

/// Permits and how they are kept.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Permits {
    /// The VMs.
    pub vms: Vec<VmPermit>,
}

/// A VM's permit.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct VmPermit {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub id: VmId,
    /// Who counts what it pollutes, if anybody does.
    pub counted_by: Option<CountedBy>,
    /// What it booked, and how it kept it.
    #[serde(flatten)]
    pub permit: PermitStatus,
}

/// What a VM might book.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Suggestion {
    /// Which VM.
    pub vm: String,
    /// By what it did.
    pub from_behaviour: Option<Permit>,
    /// What that rests on.
    pub behaviour: String,
    /// By its memory.
    pub from_memory: Option<Permit>,
    /// What that rests on.
    pub memory: String,
}

/// What was used of what was booked.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Bill {
    /// By VM and hour.
    pub lines: Vec<Line>,
}

/// What the agent knows of one VM's working set.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct WorkingSet {
    /// Its name.
    pub vm: String,
    /// Memory that the guest may use.
    pub memory_bytes: Bytes,
    /// Whether its memory is watched now.
    pub is_watched: bool,
    /// Why there is no fresh figure, if something speaks against one.
    pub why_not: Option<String>,
    /// The last figure.
    pub working_set: Option<Figure>,
}

/// One figure.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Figure {
    /// How much is used.
    pub size_bytes: Bytes,
    /// The lower end of the interval.
    pub least_bytes: Bytes,
    /// The upper end.
    pub most_bytes: Bytes,
    /// What the two ends mean: `bounds`, `percent95`, `spread`.
    pub certainty: String,
    /// The same in words.
    pub certainty_means: String,
    /// The larger distance of the ends from the size.
    pub error_bytes: Bytes,
    /// Length of the window.
    pub window_ns: Ns,
    /// Who saw it.
    pub tracker: String,
    /// What it is good at.
    pub tracker_merit: String,
    /// Which accesses it sees: `all`, `writes`.
    pub sees: Sees,
    /// What it does not see.
    pub blind_spot: String,
    /// How much of that there may be.
    pub blind_bytes: Bytes,
    /// Used in every recent window.
    pub hot_bytes: Bytes,
    /// Used in some.
    pub warm_bytes: Bytes,
    /// The guest's kernel's part, where told apart.
    pub kernel_bytes: Bytes,
    /// Whether more windows would hardly change it.
    pub is_settled: bool,
    /// Entries that got lost.
    pub lost: u64,
    /// CPU time per window on the host.
    pub cost_ns: Ns,
    /// The host's clock then.
    pub at_ns: Ns,
    /// How long ago.
    pub age_ns: Ns,
}

/// How much memory VMs really use.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct WorkingSets {
    /// The host's clock now.
    pub at_ns: Ns,
    /// Who can tell, and why others cannot.
    pub trackers: Vec<TrackerChoice>,
    /// The VMs.
    pub vms: Vec<WorkingSet>,
}

/// What is predicted.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Forecast {
    /// The host's clock.
    pub at_ns: Ns,
    /// The scenario that was run, if the host is a twin of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub simulated: Option<Simulated>,
    /// The VMs.
    pub vms: Vec<Predicted>,
    /// Median error of predictions so far, as a share; `None` before the first trial was judged.
    pub error_median: Option<f64>,
    /// Trials that this rests on.
    pub trials_count: usize,
    /// What the operator should know.
    pub notes: Vec<String>,
}

/// What was run.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Simulated {
    /// Its name.
    pub scenario: String,
    /// On which machine.
    pub machine: String,
    /// With which seed.
    pub seed: u64,
}

/// What is predicted of one VM.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Predicted {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub id: VmId,
    /// Its home now.
    pub home: Option<NodeSet>,
    /// Its home then.
    pub home_then: Option<NodeSet>,
    /// Time that its work takes over the time without an agent.
    pub slow_down: Option<f64>,
    /// The same with the homes that were asked about.
    pub slow_down_then: Option<f64>,
    /// Why there is no prediction, if so.
    pub why_unknown: Option<String>,
    /// What keeps it from the home that was asked for, if anything does.
    pub obstacle: Option<String>,
}

/// What came of changes of homes.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The host's clock.
    pub at_ns: Ns,
    /// How far back, if not as far as is remembered.
    pub since_ns: Option<Ns>,
    /// The newest trials, oldest first.
    pub trials: Vec<Trial>,
    /// Older ones that the sums have and the list does not.
    pub unlisted_count: usize,
    /// The VMs.
    pub vms: Vec<VmSum>,
    /// All of them together.
    pub total: Sum,
    /// Changes that are not judged yet.
    pub running_count: usize,
}

/// One change, judged.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Trial {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub id: VmId,
    /// The host's clock then.
    pub at_ns: Ns,
    /// How long ago.
    pub age_ns: Ns,
    /// Speed after over speed before.
    pub predicted: f64,
    /// The same as it was measured.
    pub seen: f64,
    /// Whether it was undone.
    pub undone: bool,
    /// Pages that came home; `None` where not known.
    pub pages_moved: Option<Pages>,
}

/// What came of the trials of one VM.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct VmSum {
    /// Its name.
    pub name: String,
    /// Its UUID.
    pub id: VmId,
    /// Whether it is gone.
    pub is_gone: bool,
    /// What came of its trials.
    #[serde(flatten)]
    pub sum: Sum,
}

/// What came of several trials.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct Sum {
    /// Judged trials.
    pub trials_count: usize,
    /// Of them, undone.
    pub undone_count: usize,
    /// Of a VM: speed now over speed before all, if nothing else had changed; of all VMs: the geometric mean of that.
    pub gain: f64,
    /// Pages that came home; `None` where not known.
    pub pages_moved: Option<Pages>,
    /// Median error of the predictions, as a share.
    pub error_median: Option<f64>,
}
