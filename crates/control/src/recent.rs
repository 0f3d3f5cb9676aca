//! Recent events, for viewers of a running agent.

use std::collections::VecDeque;

use homenode_host::EventRecord;
use homenode_units::Ns;

use crate::Event;

/// Number of events that are remembered; the history has all events. Bounds memory, and is not a setting.
const EVENTS_MAX: usize = 256;

/// The last events, the oldest first, in short form: a decision may list many thousand frames.
#[derive(Debug, Default)]
pub(crate) struct Recent(VecDeque<EventRecord>);

impl Recent {
    /// Remembers events that happened at this time of the host's clock.
    pub(crate) fn extend(&mut self, at: Ns, events: &[Event]) {
        self.0.extend(events.iter().map(|event| event.record(at)));
        self.0.drain(..self.0.len().saturating_sub(EVENTS_MAX));
    }

    /// Returns all remembered events.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &EventRecord> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_units::VmId;

    #[test]
    fn the_last_events_are_remembered_and_no_more() {
        let mut recent = Recent::default();
        for number in 0..EVENTS_MAX + 7 {
            let gone = Event::Vanished {
                vm: VmId(1),
                name: number.to_string(),
            };
            recent.extend(Ns::from_secs(number as u64), &[gone]);
        }
        assert_eq!(recent.iter().count(), EVENTS_MAX);
        let first = recent.iter().next().expect("events");
        assert_eq!((first.at, first.name.as_deref()), (Ns::from_secs(7), Some("7")));
    }
}
