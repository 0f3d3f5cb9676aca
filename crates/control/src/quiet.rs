//! Keeps a log readable: an event that repeats is printed once, and its repeats are summed up with a count.
//!
//! Decisions and findings that differ only in figures are alike: they have the same VM, policy, kind and outcome. The first is
//! printed. Later ones are counted, and once a minute the last of them is printed with the count. Changes of a VM's state (it
//! came, left, got another home, was changed by another program) are always printed, and so is the first failure of each kind.
//! JSON output and the history get every event.

use std::collections::BTreeMap;

use homenode_units::Ns;

use crate::event::Event;

/// Time for which repeats are counted before they are summed up.
const SUMMED_UP_EVERY: Ns = Ns::from_secs(60);

/// Events with the same key are alike.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    vm: String,
    policy: &'static str,
    kind: String,
}

/// A printed event, and its repeats since then.
#[derive(Debug)]
struct Row {
    /// When it was last printed or summed up.
    since: Ns,
    /// The number of repeats since then, and the text of the last one.
    more: Option<(u64, String)>,
}

/// The events printed recently.
#[derive(Debug, Default)]
pub struct Quiet {
    rows: BTreeMap<Key, Row>,
}

impl Quiet {
    /// Returns the lines to print for a period's events.
    pub fn of(&mut self, at: Ns, events: &[Event]) -> Vec<String> {
        let said = self.with_events(at, events).into_iter();
        said.map(|(text, _)| text).collect()
    }

    /// Like [`Quiet::of`], but returns each line with its event. Sums have no event.
    pub fn with_events<'e>(&mut self, at: Ns, events: &'e [Event]) -> Vec<(String, Option<&'e Event>)> {
        let sums = |said: Vec<String>| said.into_iter().map(|text| (text, None));
        let mut said: Vec<_> = sums(self.summed_up(at, SUMMED_UP_EVERY)).collect();
        for event in events {
            if let Event::Vanished { name, .. } = event {
                said.extend(sums(self.end_of(name, at)));
            }
            let Some(key) = key(event) else {
                said.push((event.to_string(), Some(event)));
                continue;
            };
            match self.rows.get_mut(&key) {
                Some(row) => {
                    row.more = Some((
                        row.more.take().map_or(1, |(count, _)| count + 1),
                        event.to_string(),
                    ));
                }
                None => {
                    said.push((event.to_string(), Some(event)));
                    self.rows.insert(
                        key,
                        Row {
                            since: at,
                            more: None,
                        },
                    );
                }
            }
        }
        said
    }

    /// Sums up the remaining repeats after the last cycle.
    pub fn end(&mut self, at: Ns) -> Vec<String> {
        self.summed_up(at, Ns::ZERO)
    }

    /// Sums up repeats that were counted for at least `every`, and forgets events that did not repeat.
    fn summed_up(&mut self, at: Ns, every: Ns) -> Vec<String> {
        let mut said = Vec::new();
        self.rows.retain(|_, row| {
            let lasted = at.saturating_sub(row.since);
            if lasted < every {
                return true;
            }
            row.since = at;
            let more = row.more.take();
            let goes_on = more.is_some();
            said.extend(more.map(|more| sentence(more, lasted)));
            goes_on
        });
        said
    }

    /// Sums up the repeats of a VM that is gone.
    fn end_of(&mut self, vm: &str, at: Ns) -> Vec<String> {
        let mut said = Vec::new();
        self.rows.retain(|key, row| {
            let is_of = key.vm == vm;
            if is_of {
                said.extend(
                    row.more
                        .take()
                        .map(|more| sentence(more, at.saturating_sub(row.since))),
                );
            }
            !is_of
        });
        said
    }
}

fn sentence((count, last): (u64, String), lasted: Ns) -> String {
    let seconds = lasted.as_secs_f64();
    match count {
        1 => last,
        _ => format!("{last} ({} more like this in the last {seconds:.0} s)", count - 1),
    }
}

/// Returns the key of an event that may repeat, or `None` for events that are always printed.
fn key(event: &Event) -> Option<Key> {
    match event {
        Event::Decided {
            name,
            decision,
            result,
        } => Some(Key {
            vm: name.clone(),
            policy: decision.policy,
            kind: format!(
                "{} {} {}",
                decision.action.act.kind(),
                result.kind(),
                decision.action.act.state()
            ),
        }),
        Event::Found { name, finding } => Some(Key {
            vm: name.clone().unwrap_or_default(),
            policy: finding.policy,
            kind: without_figures(&finding.message),
        }),
        Event::Refused { refusal } => Some(Key {
            vm: String::new(),
            policy: "",
            kind: without_figures(&refusal.to_string()),
        }),
        Event::Appeared { .. }
        | Event::Vanished { .. }
        | Event::ChangedByOther { .. }
        | Event::GivenBack { .. }
        | Event::QuotaChangedByOther { .. }
        | Event::QuotaGivenBack { .. }
        | Event::Recommended { .. }
        | Event::Approved { .. }
        | Event::Rejected { .. }
        | Event::Expired { .. } => None,
    }
}

/// Returns a sentence without the words that contain digits.
fn without_figures(text: &str) -> String {
    let is_figure = |word: &&str| word.contains(|c: char| c.is_ascii_digit());
    text.split_whitespace()
        .filter(|word| !is_figure(word))
        .collect::<Vec<_>>()
        .join(" ")
}

#[cfg(test)]
mod tests {
    use homenode_host::{Act, Action, CpuQuota, Decision, Finding, Limit, Outcome};
    use homenode_units::{NodeSet, VmId};

    use super::*;

    fn at(seconds: u64) -> Ns {
        Ns::from_secs(seconds)
    }

    fn decided(act: Act, result: Outcome, reason: &str) -> Event {
        let decision = Decision {
            policy: "permits",
            action: Action { vm: VmId(1), act },
            reason: reason.to_owned(),
        };
        let name = "web".to_owned();
        Event::Decided {
            name,
            decision,
            result,
        }
    }

    fn limit(run_ms: u64, result: Outcome) -> Event {
        let quota = CpuQuota {
            run_ns: Ns::from_millis(run_ms),
            period_ns: Ns::from_millis(100),
        };
        let act = Act::Limit {
            limit: Limit::CpuQuota(quota),
            lease_ns: at(3),
        };
        decided(act, result, &format!("it has {run_ms} ms"))
    }

    #[test]
    fn what_repeats_is_said_once_and_then_counted() {
        let mut quiet = Quiet::default();
        let mut said = Vec::new();
        for second in 0..=120 {
            said.extend(quiet.of(at(second), &[limit(10 + second % 7, Outcome::Done)]));
        }
        assert_eq!(
            said,
            [
                "permits: VM web: it has 10 ms".to_owned(),
                "permits: VM web: it has 13 ms (58 more like this in the last 60 s)".to_owned(),
                "permits: VM web: it has 10 ms (59 more like this in the last 60 s)".to_owned(),
            ]
        );
        // One repeat is left; a single repeat is printed without a count.
        assert_eq!(quiet.end(at(121)), ["permits: VM web: it has 11 ms"]);
        assert_eq!(quiet.end(at(121)), Vec::<String>::new());
    }

    #[test]
    fn what_is_said_and_what_is_counted_is_all_there_was() {
        let mut quiet = Quiet::default();
        let (mut lines, mut told) = (Vec::new(), 0);
        for second in 0..1000 {
            // Zero to four limits, and every third second a lift, which is of another kind.
            let count = (second * 7 % 5) as usize;
            let mut events = vec![limit(second % 50, Outcome::Done); count];
            if second % 3 == 0 {
                events.push(decided(
                    Act::Lift {
                        lever: homenode_host::Lever::CpuQuota,
                    },
                    Outcome::Done,
                    "it is UNDER",
                ));
            }
            told += events.len();
            lines.extend(quiet.of(at(second), &events));
        }
        lines.extend(quiet.end(at(1000)));
        let more = |line: &String| -> usize {
            let counted = line
                .split(" (")
                .nth(1)
                .and_then(|rest| rest.split(' ').next()?.parse().ok());
            1 + counted.unwrap_or(0)
        };
        assert_eq!(lines.iter().map(more).sum::<usize>(), told);
        assert!(lines.len() < 45, "{}", lines.len());
    }

    #[test]
    fn changes_of_state_and_failures_are_always_said() {
        let mut quiet = Quiet::default();
        let home = |node: &str| {
            let nodes: NodeSet = node.parse().unwrap();
            decided(
                Act::SetHome { nodes },
                Outcome::Done,
                &format!("a home on node {node}"),
            )
        };
        assert_eq!(quiet.of(at(0), &[home("0")]).len(), 1);
        assert_eq!(quiet.of(at(1), &[home("1")]).len(), 1);
        let gone = Event::Vanished {
            vm: VmId(1),
            name: "web".to_owned(),
        };
        assert_eq!(quiet.of(at(2), std::slice::from_ref(&gone)).len(), 1);
        assert_eq!(quiet.of(at(3), &[gone]).len(), 1);
        assert_eq!(quiet.of(at(4), &[limit(10, Outcome::Done)]).len(), 1);
        let failed = homenode_host::Failure::VmGone.on("web");
        assert_eq!(quiet.of(at(5), &[limit(10, Outcome::Failed(failed))]).len(), 1);
    }

    #[test]
    fn findings_that_differ_in_figures_only_are_alike_and_what_is_counted_of_a_vm_is_said_when_it_goes() {
        let mut quiet = Quiet::default();
        let found = |bytes: &str| Event::Found {
            name: Some("web".to_owned()),
            finding: Finding {
                policy: "arrange",
                vm: Some(VmId(1)),
                message: format!("VM web lacks {bytes} on node 2"),
            },
        };
        assert_eq!(quiet.of(at(0), &[found("1.2GiB")]).len(), 1);
        assert_eq!(quiet.of(at(1), &[found("7MiB"), found("9MiB")]).len(), 0);
        let gone = Event::Vanished {
            vm: VmId(1),
            name: "web".to_owned(),
        };
        let said = quiet.of(at(2), &[gone]);
        assert_eq!(
            said,
            [
                "arrange: VM web lacks 9MiB on node 2 (1 more like this in the last 2 s)",
                "VM web is gone"
            ]
        );
    }
}
