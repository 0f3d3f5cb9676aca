//! What the loop publishes to readers: the host's last state, recent events, and sums over the run. One lock guards it, and is
//! held only while pointers are swapped; readers do the formatting themselves.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use homenode_control::{Control, Cycle, Event, Phase, Status};
use homenode_host::{Act, FrameMove, LinkSample, Outcome};
use homenode_recorder::Written;
use homenode_units::{NodeId, NodeSet, Ns, VmId};
use tokio::sync::watch;

use crate::wall_clock::WallClock;

/// Most events kept for late readers. A move of many frames counts as several events.
const KEPT_MAX: usize = 4096;
/// Most notices that may wait.
const NOTICES_MAX: usize = 16;
/// Number of frame moves that count as one event.
const MOVES_PER_EVENT: usize = 64;
/// Upper bounds of the duration buckets, in seconds.
pub const DURATIONS_S: [f64; 12] = [
    0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0,
];

/// The host at the last sample.
#[derive(Clone, Debug)]
pub struct Seen {
    /// Wall-clock time, in nanoseconds since 1970.
    pub wall_ns: i64,
    /// Number of cycles so far.
    pub cycle_count: u64,
    /// Time between cycles.
    pub period: Ns,
    /// The agent's view of the host.
    pub status: Status,
    /// Bytes transferred between nodes, if counted.
    pub links: Vec<LinkSample>,
    /// Bytes moved by the memory controllers, if counted.
    pub node_traffic: Vec<(NodeId, u64)>,
}

/// A message to listeners.
#[derive(Clone, Debug)]
pub struct Message {
    /// Sequence number within the run, from 0.
    pub number: u64,
    /// Wall-clock and host time of the sample that the message belongs to.
    pub seen_ns: (i64, Ns),
    /// What happened; `None` marks the end of a cycle.
    pub event: Option<Event>,
    /// Number of cycles so far.
    pub cycle_count: u64,
}

/// A route of moved pages: VM, its name, from, to, policy. `from` is not known for every move.
pub type Route = (VmId, String, Option<NodeSet>, NodeSet, &'static str);

/// For each policy, action and outcome, the last such decision that is in the history.
pub type LastWritten = BTreeMap<(String, String, String), Written>;

/// A histogram of durations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Durations {
    /// Count per bucket of [`DURATIONS_S`], not cumulative. The last count is of all longer durations.
    pub counts: [u64; DURATIONS_S.len() + 1],
    /// Total duration.
    pub sum: Duration,
}

impl Durations {
    fn add(&mut self, took: Duration) {
        let class = DURATIONS_S.iter().position(|end| took.as_secs_f64() <= *end);
        self.counts[class.unwrap_or(DURATIONS_S.len())] += 1;
        self.sum += took;
    }
}

/// Sums over the run.
#[derive(Clone, Debug, Default)]
pub struct Sums {
    /// Cycles.
    pub cycles: u64,
    /// Cycles in which the host could not be read.
    pub failed_looks: u64,
    /// Plans that the host refused.
    pub refused_plans: u64,
    /// Number of decisions by policy, action and outcome.
    pub decisions: BTreeMap<(&'static str, &'static str, &'static str), u64>,
    /// Number of findings by policy.
    pub findings: BTreeMap<&'static str, u64>,
    /// Bytes moved by route, for VMs that still run.
    pub moved: BTreeMap<Route, u64>,
    /// How long each phase of the cycles took.
    pub phases: BTreeMap<Phase, Durations>,
}

impl Sums {
    fn add(&mut self, event: &Event) {
        match event {
            Event::Decided {
                name,
                decision,
                result,
            } => {
                let (policy, act) = (decision.policy, &decision.action.act);
                *self
                    .decisions
                    .entry((policy, act.kind(), result.kind()))
                    .or_default() += 1;
                if let Outcome::Moved { moved, .. } = result
                    && let Some((from, to)) = ends(act)
                {
                    let route = (decision.action.vm, name.clone(), from, to, policy);
                    *self.moved.entry(route).or_default() += moved.to_bytes().0;
                }
            }
            Event::Found { finding, .. } => *self.findings.entry(finding.policy).or_default() += 1,
            Event::Refused { .. } => self.refused_plans += 1,
            Event::Vanished { vm, .. } => self.moved.retain(|(id, ..), _| id != vm),
            _ => {}
        }
    }
}

/// Returns where an action moves pages from and to.
fn ends(act: &Act) -> Option<(Option<NodeSet>, NodeSet)> {
    match act {
        Act::MovePages { from, to, .. } => Some((Some(from.clone()), to.clone())),
        Act::MoveVirtualNode { to, .. } => Some((None, [*to].into_iter().collect())),
        Act::MoveFrames { moves } => {
            let set = |end: fn(&FrameMove) -> NodeId| moves.iter().map(end).collect();
            Some((Some(set(|each| each.from)), set(|each| each.to)))
        }
        _ => None,
    }
}

/// What is published, shared by the loop and its readers.
#[derive(Clone, Debug)]
pub struct Feed {
    state: Arc<Mutex<State>>,
    /// Wakes the listeners of the event stream.
    news: watch::Sender<u64>,
    clock: WallClock,
    begun: Instant,
}

#[derive(Debug, Default)]
struct State {
    seen: Option<Arc<Seen>>,
    sums: Arc<Sums>,
    last_written: Arc<LastWritten>,
    trouble: Option<Arc<str>>,
    looked: Option<Instant>,
    kept: VecDeque<Arc<Message>>,
    kept_weight: usize,
    /// Notices for the operator.
    notices: Vec<String>,
    /// Sequence number of the next message.
    next: u64,
}

impl Feed {
    /// Creates an empty feed.
    pub fn new(clock: WallClock) -> Feed {
        Feed {
            state: Arc::default(),
            news: watch::Sender::new(0),
            clock,
            begun: Instant::now(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Recovering from poison is safe: no statement under this lock can panic and leave the state half changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the clock that times are reported in.
    pub fn clock(&self) -> WallClock {
        self.clock
    }

    /// Publishes a cycle and how long its phases took.
    pub(crate) fn publish(&self, cycle: &Cycle, control: &Mutex<Control>, took: &[(Phase, Duration)]) {
        let at = cycle.status.at_ns;
        let wall_ns = self.clock.at(at);
        let (period, links, node_traffic) = counters(control);
        let events: Vec<Event> = cycle.events.clone();
        let status = cycle.status.clone();
        let mut state = self.lock();
        // Copies the sums only if a reader holds them.
        let sums = Arc::make_mut(&mut state.sums);
        sums.cycles += 1;
        for event in &events {
            sums.add(event);
        }
        for (phase, took) in took {
            sums.phases.entry(*phase).or_default().add(*took);
        }
        let cycle_count = sums.cycles;
        state.trouble = None;
        state.looked = Some(Instant::now());
        state.seen = Some(Arc::new(Seen {
            wall_ns,
            cycle_count,
            period,
            status,
            links,
            node_traffic,
        }));
        for event in events.into_iter().map(Some).chain([None]) {
            state.keep((wall_ns, at), cycle_count, event);
        }
        let next = state.next;
        drop(state);
        self.news.send_replace(next);
    }

    /// Stores decisions that are now in the history.
    pub(crate) fn recorded(&self, written: Vec<Written>) {
        if written.is_empty() {
            return;
        }
        let mut state = self.lock();
        let last = Arc::make_mut(&mut state.last_written);
        last.extend(written.into_iter().map(|written| {
            let Written {
                policy,
                action,
                outcome,
                ..
            } = &written;
            ((policy.clone(), action.clone(), outcome.clone()), written)
        }));
    }

    /// Updates the published status after a setting changed, so that it shows before the next cycle.
    pub(crate) fn refresh(&self, status: Status) {
        let mut state = self.lock();
        if let Some(seen) = &mut state.seen {
            Arc::make_mut(seen).status = status;
        }
    }

    /// Publishes that the host cannot be read.
    pub(crate) fn trouble(&self, message: &str) {
        let mut state = self.lock();
        Arc::make_mut(&mut state.sums).failed_looks += 1;
        state.trouble = Some(message.into());
        state.looked = Some(Instant::now());
    }

    /// Queues a notice for the operator. At most [`NOTICES_MAX`] wait, since the loop may be busy.
    pub(crate) fn notice(&self, text: String) {
        let mut state = self.lock();
        if state.notices.len() < NOTICES_MAX {
            state.notices.push(text);
        }
    }

    /// Takes the waiting notices.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        std::mem::take(&mut self.lock().notices)
    }

    /// Returns the host at the last sample, and the current error if it cannot be read.
    pub fn seen(&self) -> (Option<Arc<Seen>>, Option<Arc<str>>) {
        let state = self.lock();
        (state.seen.clone(), state.trouble.clone())
    }

    /// Returns when the loop last sampled the host, successfully or not; before the first sample, when the run began.
    pub fn looked(&self) -> Instant {
        self.lock().looked.unwrap_or(self.begun)
    }

    /// Returns the sums over the run.
    pub fn sums(&self) -> Arc<Sums> {
        Arc::clone(&self.lock().sums)
    }

    /// Returns the last decisions that are in the history, by policy, action and outcome.
    pub fn last_written(&self) -> Arc<LastWritten> {
        Arc::clone(&self.lock().last_written)
    }

    /// Subscribes to publications; each carries the sequence number of the next message.
    pub fn news(&self) -> watch::Receiver<u64> {
        self.news.subscribe()
    }

    /// Returns the sequence number of the next message.
    pub fn next(&self) -> u64 {
        self.lock().next
    }

    /// Returns the message with this number, or the oldest one kept if that message was already dropped.
    pub fn from(&self, number: u64) -> Option<Arc<Message>> {
        let state = self.lock();
        let first = state.kept.front()?.number;
        let at = usize::try_from(number.saturating_sub(first)).ok()?;
        state.kept.get(at).cloned()
    }
}

impl State {
    fn keep(&mut self, seen_ns: (i64, homenode_units::Ns), cycle_count: u64, event: Option<Event>) {
        let number = self.next;
        self.next += 1;
        let message = Message {
            number,
            seen_ns,
            event,
            cycle_count,
        };
        self.kept_weight += weight(&message);
        self.kept.push_back(Arc::new(message));
        while self.kept_weight > KEPT_MAX
            && let Some(oldest) = self.kept.pop_front()
        {
            self.kept_weight -= weight(&oldest);
        }
    }
}

fn weight(message: &Message) -> usize {
    match &message.event {
        Some(Event::Decided { decision, .. }) => match &decision.action.act {
            Act::MoveFrames { moves } => 1 + moves.len() / MOVES_PER_EVENT,
            _ => 1,
        },
        _ => 1,
    }
}

/// Returns the period, and the host's counters of links and nodes.
fn counters(control: &Mutex<Control>) -> (Ns, Vec<LinkSample>, Vec<(NodeId, u64)>) {
    let control = control.lock().unwrap_or_else(PoisonError::into_inner);
    let period = control.config().period;
    let Some(sample) = control.sample() else {
        return (period, Vec::new(), Vec::new());
    };
    let nodes = sample.nodes.iter();
    let traffic = nodes.filter_map(|(node, of)| Some((node, of.memory_traffic_bytes?)));
    (period, sample.links.clone(), traffic.collect())
}

#[cfg(test)]
mod tests {
    use homenode_host::{Decision, Lever};
    use homenode_units::Pages;
    use serde_json::json;

    use super::*;

    const VM: VmId = VmId(1);

    fn nodes(number: u16) -> NodeSet {
        [NodeId(number)].into_iter().collect()
    }

    fn moves(count: u64) -> Act {
        let (pages, from, to) = (Pages(1), NodeId(0), NodeId(1));
        let each = |frame| FrameMove {
            frame,
            pages,
            from,
            to,
        };
        Act::MoveFrames {
            moves: (0..count).map(each).collect(),
        }
    }

    fn moved(pages: u64) -> Outcome {
        let (left, busy) = (Pages::ZERO, Pages::ZERO);
        Outcome::Moved {
            moved: Pages(pages),
            left,
            busy,
        }
    }

    fn decided(act: Act, result: Outcome) -> Event {
        let decision = Decision {
            policy: "repatriate",
            action: act.on(VM),
            reason: String::new(),
        };
        let name = "web".into();
        Event::Decided {
            name,
            decision,
            result,
        }
    }

    #[test]
    fn what_is_called_by_its_kind_is_called_so_in_json() {
        let (window_ns, lease_ns, pages_max) = (Ns(1), Ns(1), Pages(1));
        let (from, to) = (nodes(0), nodes(1));
        let acts = [
            Act::SetHome { nodes: nodes(1) },
            Act::MovePages { from, to, pages_max },
            moves(1),
            Act::Lift { lever: Lever::Home },
            Act::Watch { window_ns, lease_ns },
        ];
        for act in acts {
            assert_eq!(json!(act)["action"], act.kind());
        }
        for outcome in [Outcome::Done, Outcome::Renewed, Outcome::DryRun, moved(1)] {
            assert_eq!(json!(outcome)["outcome"], outcome.kind());
        }
    }

    #[test]
    fn sums_are_of_what_was_really_moved_and_forget_vms_that_are_gone() {
        let mut sums = Sums::default();
        let page_moves = || Act::MovePages {
            from: nodes(0),
            to: nodes(1),
            pages_max: Pages(99),
        };
        sums.add(&decided(page_moves(), moved(3)));
        sums.add(&decided(page_moves(), moved(4)));
        sums.add(&decided(page_moves(), Outcome::DryRun));
        let route = (VM, "web".to_owned(), Some(nodes(0)), nodes(1), "repatriate");
        assert_eq!(sums.moved, BTreeMap::from([(route, 7 * 4096)]));
        assert_eq!(sums.decisions[&("repatriate", "move-pages", "moved")], 2);
        assert_eq!(sums.decisions[&("repatriate", "move-pages", "dry-run")], 1);
        let name = "web".into();
        sums.add(&Event::Vanished { vm: VM, name });
        assert!(sums.moved.is_empty());
    }

    #[test]
    fn what_is_kept_is_bounded_also_where_events_are_large() {
        let mut state = State::default();
        for _ in 0..2 * KEPT_MAX {
            state.keep((0, Ns::ZERO), 1, None);
        }
        assert_eq!((state.kept.len(), state.next), (KEPT_MAX, 2 * KEPT_MAX as u64));
        for _ in 0..100 {
            state.keep((0, Ns::ZERO), 1, Some(decided(moves(64_000), moved(1))));
        }
        assert_eq!(state.kept.len(), 4);
        assert_eq!(state.kept_weight, 4 * 1001);
    }

    #[test]
    fn a_duration_is_in_the_first_class_that_holds_it() {
        let mut durations = Durations::default();
        for took in [0, 100, 101, 60_000_000] {
            durations.add(Duration::from_micros(took));
        }
        assert_eq!((durations.counts[0], durations.counts[1]), (2, 1));
        assert_eq!(durations.counts[DURATIONS_S.len()], 1);
    }
}
