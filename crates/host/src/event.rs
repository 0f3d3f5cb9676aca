//! Events, in the words used to report, keep and search them.

use homenode_units::{Ns, VmId};

use crate::plan::Outcome;

/// An event of the agent. The control loop makes it, the history keeps it, and whatever shows or explains the past reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// When it happened, by the host's monotonic clock.
    pub at: Ns,
    /// Its kind: `decided`, `found`, `refused` and so on, as in JSON.
    pub kind: String,
    /// The VM that the event is about, if any.
    pub vm: Option<VmId>,
    /// The VM's name at that time.
    pub name: Option<String>,
    /// The policy that made the decision or finding.
    pub policy: Option<String>,
    /// The action (`limit`, `pin-vcpus` and so on).
    pub action: Option<String>,
    /// The outcome of a decision.
    pub outcome: Option<String>,
    /// A sentence for people.
    pub text: String,
}

impl EventRecord {
    /// The kind of an event that reports a decision and its outcome.
    pub const DECIDED: &str = "decided";

    /// Returns true if the event is a decision that was carried out.
    pub fn was_carried_out(&self) -> bool {
        let is_done = |outcome: &str| outcome == Outcome::Done.kind() || outcome == Outcome::MOVED;
        self.kind == EventRecord::DECIDED && self.outcome.as_deref().is_some_and(is_done)
    }
}
