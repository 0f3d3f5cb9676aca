//! Notices for the operator, each reported once.

use std::collections::{BTreeSet, VecDeque};

/// How many notices are remembered so that each is reported once; a few for each VM of a large host.
const SAID_MAX: usize = 32_768;
/// How many notices may wait to be reported.
const WAITING_MAX: usize = 4096;

/// Notices for the operator, each reported once for as long as it is remembered. When there are too many, the oldest is
/// dropped.
#[derive(Debug, Default)]
pub struct Notices {
    said: BTreeSet<String>,
    /// The notices in `said` by age, the oldest first.
    by_age: VecDeque<String>,
    waiting: VecDeque<String>,
    /// How many notices were dropped before they were reported.
    dropped_count: u64,
}

impl Notices {
    /// Adds a notice, unless the same notice is remembered.
    pub fn add(&mut self, text: String) {
        if !self.said.insert(text.clone()) {
            return;
        }
        self.by_age.push_back(text.clone());
        if self.by_age.len() > SAID_MAX
            && let Some(oldest) = self.by_age.pop_front()
        {
            self.said.remove(&oldest);
        }
        self.waiting.push_back(text);
        if self.waiting.len() > WAITING_MAX {
            self.waiting.pop_front();
            self.dropped_count += 1;
        }
    }

    /// Takes the notices that were not reported yet.
    pub fn take(&mut self) -> Vec<String> {
        let dropped = match std::mem::take(&mut self.dropped_count) {
            0 => None,
            1 => Some("one earlier notice was dropped: too many came at once".to_owned()),
            count => Some(format!(
                "{count} earlier notices were dropped: too many came at once"
            )),
        };
        dropped.into_iter().chain(self.waiting.drain(..)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_go_on_after_any_number_of_them() {
        let mut notices = Notices::default();
        for number in 0..3 * SAID_MAX {
            notices.add(format!("notice {number}"));
            assert_eq!(notices.take(), [format!("notice {number}")]);
        }
        let last = format!("notice {}", 3 * SAID_MAX - 1);
        notices.add(last);
        assert_eq!(notices.take(), Vec::<String>::new(), "said once");
        assert!(notices.said.len() <= SAID_MAX && notices.by_age.len() == notices.said.len());
    }

    #[test]
    fn of_too_many_notices_at_once_the_newest_are_told_and_the_others_counted() {
        let mut notices = Notices::default();
        for number in 0..WAITING_MAX + 3 {
            notices.add(format!("notice {number}"));
        }
        let told = notices.take();
        assert!(
            told[0].starts_with("3 earlier notices were dropped"),
            "{}",
            told[0]
        );
        assert_eq!((told[1].as_str(), told.len()), ("notice 3", WAITING_MAX + 1));
        notices.add("another".into());
        assert_eq!(notices.take(), ["another"]);
    }
}
