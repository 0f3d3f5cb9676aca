//! Events in the words in which they are reported, kept and searched.

use homenode_units::{Ns, VmId};

use crate::plan::Outcome;

/// An event of the agent: the loop makes it, the history keeps it, and whatever shows or explains the past reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// The host's monotonic clock.
    pub at: Ns,
    /// Its kind: `decided`, `found`, `refused` and so on, as in JSON.
    pub kind: String,
    /// The VM, if it is about one.
    pub vm: Option<VmId>,
    /// The VM's name at that time.
    pub name: Option<String>,
    /// The policy that decided or found it.
    pub policy: Option<String>,
    /// The action (`limit`, `pin-vcpus` and so on).
    pub action: Option<String>,
    /// The outcome of a decision.
    pub outcome: Option<String>,
    /// A sentence for people.
    pub text: String,
}

impl EventRecord {
    /// The kind of a decision and its outcome.
    pub const DECIDED: &str = "decided";

    /// Whether it is a decision that was carried out.
    pub fn was_carried_out(&self) -> bool {
        let is_done = |outcome: &str| outcome == Outcome::Done.kind() || outcome == Outcome::MOVED;
        self.kind == EventRecord::DECIDED && self.outcome.as_deref().is_some_and(is_done)
    }
}
