//! Events, in the words that reports, histories and searches use.

use homenode_units::{Ns, VmId};

use crate::plan::Outcome;

/// An event of the agent. The control loop makes it, the history keeps it, and whatever shows or explains the past reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRecord {
    /// When the event happened, by the host's monotonic clock.
    pub at: Ns,
    /// The event's kind: `decided`, `found`, `refused` and so on, as in JSON.
    pub kind: String,
    /// The VM that the event is about, if any.
    pub vm: Option<VmId>,
    /// The VM's name when the event happened.
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
        EventRecord::is_carried_out(&self.kind, self.outcome.as_deref())
    }

    /// Returns true if an event of this kind and outcome is a decision that was carried out.
    pub fn is_carried_out(kind: &str, outcome: Option<&str>) -> bool {
        let is_done = |outcome: &str| outcome == Outcome::Done.kind() || outcome == Outcome::MOVED;
        kind == EventRecord::DECIDED && outcome.is_some_and(is_done)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_and_moves_are_carried_out_and_renewals_and_failures_are_not() {
        let is_carried_out = |outcome| EventRecord::is_carried_out(EventRecord::DECIDED, Some(outcome));
        assert!(["done", "moved"].into_iter().all(is_carried_out));
        assert!(!["renewed", "dry-run", "failed"].into_iter().any(is_carried_out));
        assert!(!EventRecord::is_carried_out("found", None));
        assert!(!EventRecord::is_carried_out("found", Some("done")));
    }
}
