//! Recent events, for viewers of a running agent.

use std::collections::VecDeque;

use homenode_units::Ns;

use crate::Event;

/// Number of events that are remembered; the history has all of them. It bounds memory, and is no setting.
const EVENTS_MAX: usize = 256;

/// An event in few words: a decision may list many thousand frames.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remembered {
    /// The host's clock at the time.
    pub at: Ns,
    /// Its kind, as in JSON.
    pub kind: &'static str,
    /// The VM's name, if it concerns one.
    pub name: Option<String>,
    /// The policy that decided or found it.
    pub policy: Option<&'static str>,
    /// Its outcome.
    pub outcome: Option<&'static str>,
    /// Text for people.
    pub text: String,
}

impl Remembered {
    fn new(at: Ns, event: &Event) -> Remembered {
        let (kind, name, policy, outcome) = match event {
            Event::Appeared { name, .. } => ("appeared", Some(name), None, None),
            Event::Vanished { name, .. } => ("vanished", Some(name), None, None),
            Event::ChangedByOther { name, .. } => ("changed-by-other", Some(name), None, None),
            Event::GivenBack { name, .. } => ("given-back", Some(name), None, None),
            Event::QuotaChangedByOther { name, .. } => ("quota-changed-by-other", Some(name), None, None),
            Event::QuotaGivenBack { name, .. } => ("quota-given-back", Some(name), None, None),
            Event::Decided {
                name,
                decision,
                result,
            } => ("decided", Some(name), Some(decision.policy), Some(result.kind())),
            Event::Recommended { name, decision, .. } => {
                ("recommended", Some(name), Some(decision.policy), None)
            }
            Event::Approved { name, policy, .. } => ("approved", Some(name), Some(*policy), None),
            Event::Rejected { name, policy, .. } => ("rejected", Some(name), Some(*policy), None),
            Event::Expired { name, policy, .. } => ("expired", Some(name), Some(*policy), None),
            Event::Found { name, finding } => ("found", name.as_ref(), Some(finding.policy), None),
            Event::Refused { .. } => ("refused", None, None, None),
        };
        Remembered {
            at,
            kind,
            name: name.cloned(),
            policy,
            outcome,
            text: event.to_string(),
        }
    }
}

/// The last events, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct Recent(VecDeque<Remembered>);

impl Recent {
    /// Remembers events of this time of the host's clock.
    pub fn extend(&mut self, at: Ns, events: &[Event]) {
        self.0
            .extend(events.iter().map(|event| Remembered::new(at, event)));
        self.0.drain(..self.0.len().saturating_sub(EVENTS_MAX));
    }

    /// Returns all that is remembered.
    pub fn iter(&self) -> impl Iterator<Item = &Remembered> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_host::Refusal;
    use homenode_units::VmId;

    fn gone(number: usize) -> Event {
        Event::Vanished {
            vm: VmId(1),
            name: number.to_string(),
        }
    }

    #[test]
    fn the_last_events_are_remembered_and_no_more() {
        let mut recent = Recent::default();
        for number in 0..EVENTS_MAX + 7 {
            recent.extend(Ns::from_secs(number as u64), &[gone(number)]);
        }
        assert_eq!(recent.iter().count(), EVENTS_MAX);
        let first = recent.iter().next().expect("events");
        assert_eq!((first.at, first.name.as_deref()), (Ns::from_secs(7), Some("7")));
    }

    #[test]
    fn kinds_are_called_as_json_calls_them() {
        let (vm, name) = (VmId(1), String::new());
        let refused = Event::Refused {
            refusal: Refusal::UnknownVm { vm },
        };
        let given_back = Event::QuotaGivenBack { vm, name };
        for event in [gone(1), given_back, refused] {
            let json = serde_json::json!(event);
            assert_eq!(json["event"], Remembered::new(Ns::ZERO, &event).kind);
        }
    }
}
