//! Recommendations of policies, which wait for the operator's approval: mode `recommend` ([`Mode`]).
//!
//! # Problem
//! An operator wants to see each change before it is made, and to approve or reject it once, not in every period. While its
//! decision waits, a policy must be able to continue. The change that is made must be the one that was approved.
//!
//! # Terms
//! - *Subject*: a VM, a policy, and a lever. Each subject has one recommendation at a time. The recommendation of a home includes
//!   what follows the home: pinning the vCPUs, and moving the pages there.
//! - A policy *wants* a recommendation in each cycle in which it makes a decision on the recommendation's subject.
//!
//! # Algorithm
//! ```text
//!            wanted              the operator's word            carried out
//!   nothing ───────▶ open ──────────────────────────▶ approved ────────────▶ applied ──▶ over
//!                     │ └──── the operator's word ──▶ rejected
//!                     └── not wanted for long, too old, or its VM or cause is gone ──▶ expired
//! ```
//! 1. A decision that waits becomes a recommendation, or renews the open one of its subject. A home on other nodes is a different
//!    recommendation, since an operator must see what they approve. The arranger's homes are predicted together, so a new
//!    arrangement ends the open recommendations of the previous arrangement. It waits, however, until its mean gain is predicted
//!    to be greater by [`Config::much_more`], or a VM needs a home that had none in the previous arrangement.
//! 2. An approved decision goes through from the next cycle on, for as long as its policy wants it, because pages take many
//!    cycles and leases must be renewed. The approval ends when the policy has not wanted the decision for [`Config::pause_max`],
//!    and at the latest after [`Config::life_max`]. A home is decided only once, so its policy need not want it again: it is
//!    assigned in the next cycle as recommended.
//! 3. A rejected decision is not recommended again for [`Config::rejected_for`], unless its predicted gain grows by
//!    [`Config::much_more`].
//!
//! 4. A recommendation ends at once if its cause is gone: the VM's permit or memory floor was removed, its operator lets the
//!    agent only observe it, or [`placement`](homenode_policy::placement) no longer seeks a home for it, as at the end of a
//!    drain.
//!
//! Nothing here acts or reads a clock. Recommendations are part of the loop, whose inputs are recorded.
//!
//! # Properties
//! - `what_is_wanted_again_is_one_recommendation_and_told_once`
//! - `a_home_on_other_nodes_is_another_recommendation`
//! - `a_new_arrangement_takes_the_place_of_the_one_before`
//! - `an_arrangement_stays_open_until_another_is_predicted_to_gain_much_more`
//! - `what_has_lost_its_cause_ends_at_once`
//! - `what_was_replaced_names_its_successor`
//! - `what_is_rejected_stays_away_unless_much_more_is_predicted`
//! - `what_nobody_wants_any_more_expires`
//! - `what_is_approved_goes_through_until_it_is_no_longer_wanted_or_too_old`
//! - `pages_follow_an_approved_home_and_go_nowhere_else`
//! - `what_is_kept_is_bounded`

mod closing;

use std::collections::{BTreeMap, VecDeque};

use homenode_host::{Act, Decision, Lever, Mode, Outcome, Sample, View};
use homenode_policy::arrange;
use homenode_units::{NodeSet, Ns, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::Event;

/// Most recommendations that may be open or approved. Further decisions wait until one of these ends.
const LIVE_MAX: usize = 4096;
/// Number of past recommendations that are remembered.
const PAST_MAX: usize = 256;
/// Number of rejections that are remembered; beyond it the oldest are forgotten. These three limits bound memory, and are not
/// settings.
const REJECTED_MAX: usize = 4096;

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How long a recommendation stays open after its policy last wanted it.
    #[serde(with = "homenode_units::text")]
    pub quiet_max: Ns,
    /// How long a recommendation stays open at most, and how long an approved one lets decisions through at most.
    #[serde(with = "homenode_units::text")]
    pub life_max: Ns,
    /// How long a rejected recommendation is not made again.
    #[serde(with = "homenode_units::text")]
    pub rejected_for: Ns,
    /// How long an approved recommendation lets decisions through after its policy last wanted it.
    #[serde(with = "homenode_units::text")]
    pub pause_max: Ns,
    /// How much the predicted gain of a rejected recommendation must grow, as a share of the VM's speed, for it to be made again;
    /// also by how much a new arrangement must be better than the open one, on average, to replace it.
    pub much_more: f64,
}

impl Default for Config {
    /// Five minutes, since policies review whole arrangements every two minutes; then an hour, and a day.
    fn default() -> Self {
        Config {
            quiet_max: Ns::from_secs(300),
            life_max: Ns::from_secs(3600),
            rejected_for: Ns::from_secs(86_400),
            pause_max: Ns::from_secs(60),
            much_more: 0.1,
        }
    }
}

/// Limits of these times: from the shortest time between two samples to a day.
const SPAN: std::ops::RangeInclusive<Ns> = Ns::from_millis(10)..=Ns::from_secs(86_400);

homenode_units::settings! {
    Config { quiet_max: SPAN, life_max: SPAN, rejected_for: SPAN, pause_max: SPAN, much_more: 0.0..=10.0 }
}

/// State of a recommendation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// It waits for the operator.
    Open,
    /// The operator approved it, and it lets decisions through.
    Approved,
    /// The operator approved it, and it was carried out.
    Applied,
    /// The operator rejected it.
    Rejected,
    /// It expired before it was approved, or before it could be carried out.
    Expired,
}

impl State {
    /// Returns the state's name in JSON.
    pub fn name(self) -> &'static str {
        match self {
            State::Open => "open",
            State::Approved => "approved",
            State::Applied => "applied",
            State::Rejected => "rejected",
            State::Expired => "expired",
        }
    }
}

/// One recommendation.
#[derive(Clone, Debug, PartialEq)]
pub struct Recommendation {
    /// Number of the recommendation in this run of the agent, from 1.
    pub id: u64,
    /// The VM's name.
    pub name: String,
    /// The decision; if there are several, the one that the others follow.
    pub decision: Decision,
    /// The decision and those that follow it, as last decided.
    decisions: Vec<Decision>,
    /// The decision in words.
    pub text: String,
    /// Predicted gain, as a share of the VM's speed (.12 means 12 percent faster), if there is a prediction.
    pub gain: Option<f64>,
    /// Other recommendations of the same arrangement, on which the prediction also depends.
    pub together: Vec<u64>,
    /// When the recommendation was made.
    pub made_at: Ns,
    /// When the recommendation will end if nothing happens; for a past one, when it ended.
    pub expires_at: Ns,
    /// The recommendation's state.
    pub state: State,
    /// When the policy last wanted this recommendation, or when it last went through after approval.
    wanted_at: Ns,
}

impl Recommendation {
    fn subject(&self) -> Subject {
        subject_of(&self.decision)
    }

    fn is_home_on(&self) -> Option<&NodeSet> {
        match &self.decision.action.act {
            Act::SetHome { nodes } => Some(nodes),
            _ => None,
        }
    }

    /// Notes that the policy of this open recommendation still wants it.
    fn renew(&mut self, config: &Config, now: Ns) {
        self.wanted_at = now;
        self.expires_at = (now + config.quiet_max).min(self.made_at + config.life_max);
    }

    /// Returns true if this recommendation is approved and lets a decision through.
    fn lets_through(&self, decision: &Decision) -> bool {
        if !matches!(self.state, State::Approved | State::Applied) {
            return false;
        }
        let act = &decision.action.act;
        let is_own = self.decision.policy == decision.policy;
        match self.is_home_on() {
            None => is_own && act.lever() == self.decision.action.act.lever(),
            Some(home) => match act {
                Act::SetHome { nodes } => is_own && nodes == home,
                Act::PinVcpus { .. } => is_own,
                Act::MovePages { to, .. } => to.is_subset(home),
                Act::MoveVirtualNode { to, .. } => home.contains(*to),
                Act::MoveFrames { moves } => moves.iter().all(|each| home.contains(each.to)),
                _ => false,
            },
        }
    }

    fn told(&self) -> (u64, VmId, String, &'static str, String) {
        let (vm, policy) = (self.decision.action.vm, self.decision.policy);
        (self.id, vm, self.name.clone(), policy, self.text.clone())
    }
}

/// A VM, a policy, and a lever.
type Subject = (VmId, &'static str, Lever);

fn subject_of(decision: &Decision) -> Subject {
    (decision.action.vm, decision.policy, decision.action.act.lever())
}

/// Why a recommendation cannot be approved or rejected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotThat {
    /// No recommendation has this number.
    #[error("there is no recommendation {id}; {}", open_ones(.open))]
    Unknown {
        /// The unknown number.
        id: u64,
        /// Numbers of the open recommendations.
        open: Vec<u64>,
    },
    /// A newer recommendation has replaced the one with this number.
    #[error("recommendation {id} was replaced by {by} ({text}); {}", open_ones(.open))]
    Replaced {
        /// The number.
        id: u64,
        /// Number of the open recommendation that replaced it.
        by: u64,
        /// The newer recommendation in words.
        text: String,
        /// Numbers of the open recommendations.
        open: Vec<u64>,
    },
    /// The recommendation is over, or already approved.
    #[error("recommendation {id} is already {}; {}", .state.name(), open_ones(.open))]
    Over {
        /// The number.
        id: u64,
        /// The recommendation's state.
        state: State,
        /// Numbers of the open recommendations.
        open: Vec<u64>,
    },
}

fn open_ones(open: &[u64]) -> String {
    let shown: Vec<String> = open.iter().take(32).map(u64::to_string).collect();
    match shown.len() {
        0 => "none is open".to_owned(),
        _ => format!("open are: {}", shown.join(", ")),
    }
}

/// All recommendations of a run.
#[derive(Debug, Default)]
pub(crate) struct Recommendations {
    last_id: u64,
    /// Recommendations that are open, and those that let decisions through.
    live: BTreeMap<Subject, Recommendation>,
    /// Recommendations that are over, the oldest first.
    past: VecDeque<Recommendation>,
    /// Rejected subjects, each with the end of the rejection and the gain predicted at that time.
    rejected: BTreeMap<Subject, (Ns, Option<f64>)>,
    /// Events since they were last taken.
    events: Vec<Event>,
}

impl Recommendations {
    /// Returns all remembered recommendations, by number.
    pub(crate) fn all(&self) -> Vec<&Recommendation> {
        let mut all: Vec<_> = self.past.iter().chain(self.live.values()).collect();
        all.sort_by_key(|one| one.id);
        all
    }

    /// Takes the events since the last call.
    pub(crate) fn take_events(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// Returns true if the operator approved a decision.
    pub(crate) fn lets_through(&self, decision: &Decision) -> bool {
        self.of(decision.action.vm).any(|one| one.lets_through(decision))
    }

    /// Returns true if the operator approved another home of a VM, to which it now moves.
    pub(crate) fn moves(&self, vm: VmId) -> bool {
        let is_approved = |one: &Recommendation| matches!(one.state, State::Approved | State::Applied);
        self.of(vm)
            .any(|one| one.is_home_on().is_some() && is_approved(one))
    }

    /// Returns true if the operator approved what a policy has in force on a lever of a VM.
    pub(crate) fn lets_stand(&self, vm: VmId, policy: &'static str, lever: Lever) -> bool {
        let found = self.live.get(&(vm, policy, lever));
        found.is_some_and(|one| matches!(one.state, State::Approved | State::Applied))
    }

    fn of(&self, vm: VmId) -> impl Iterator<Item = &Recommendation> {
        let of_vm = self.live.range((vm, "", Lever::VcpuPlacement)..);
        of_vm
            .take_while(move |((id, ..), _)| *id == vm)
            .map(|(_, one)| one)
    }

    fn end(&mut self, subject: &Subject, state: State, now: Ns) {
        let Some(mut one) = self.live.remove(subject) else {
            return;
        };
        (one.state, one.expires_at) = (state, now);
        let (id, vm, name, policy, text) = one.told();
        match state {
            State::Rejected => self.events.push(Event::Rejected {
                id,
                vm,
                name,
                policy,
                text,
            }),
            State::Expired => self.events.push(Event::Expired {
                id,
                vm,
                name,
                policy,
                text,
            }),
            State::Open | State::Approved | State::Applied => {}
        }
        self.past.push_back(one);
        self.past.drain(..self.past.len().saturating_sub(PAST_MAX));
    }

    /// Takes in the decisions that wait in this cycle. `gains` predicts the gains of VMs from these homes, all assigned together.
    pub(crate) fn take(
        &mut self,
        config: &Config,
        sample: &Sample,
        waiting: Vec<Decision>,
        gains: impl Fn(&[(VmId, NodeSet)]) -> BTreeMap<VmId, f64>,
    ) {
        let mut groups = groups(waiting);
        self.keep_arrangement(config, sample.at, &mut groups, &gains);
        let arranged: Vec<Subject> = groups
            .iter()
            .filter(|group| group[0].policy == arrange::POLICY && home_of(&group[0]).is_some())
            .map(|group| subject_of(&group[0]))
            .collect();
        self.replace_arrangement(&arranged, sample.at);
        let mut fresh: Vec<(Subject, Vec<Decision>)> = Vec::new();
        let mut homes: Vec<(VmId, NodeSet)> = Vec::new();
        for group in groups {
            let subject = subject_of(&group[0]);
            let is_known = self.renew(config, sample, &subject, &group);
            if let Some(home) = home_of(&group[0]).filter(|_| !is_known || arranged.contains(&subject)) {
                homes.push((subject.0, home.clone()));
            }
            if !is_known {
                fresh.push((subject, group));
            }
        }
        self.end_unwanted(sample.at);
        let gains = match homes.is_empty() {
            true => BTreeMap::new(),
            false => gains(&homes),
        };
        for (subject, group) in fresh {
            let gain = gains
                .get(&subject.0)
                .copied()
                .filter(|_| subject.2 == Lever::Home);
            self.recommend(config, sample, subject, group, gain);
        }
        self.note_together(&arranged, &gains);
    }

    /// Renews the recommendation of a subject. Returns false if there is none. If the home is on other nodes now, ends the open
    /// recommendation, and returns false.
    fn renew(&mut self, config: &Config, sample: &Sample, subject: &Subject, group: &[Decision]) -> bool {
        let now = sample.at;
        let Some(one) = self.live.get_mut(subject) else {
            return false;
        };
        // What was approved must be what is done, so it does not change any more.
        if one.state != State::Open {
            return true;
        }
        if one.is_home_on() != home_of(&group[0]) {
            self.end(subject, State::Expired, now);
            return false;
        }
        one.renew(config, now);
        // The VM may have another name now.
        (one.text, one.name) = words(sample, &group[0]);
        if one.is_home_on().is_none() {
            one.decision = group[0].clone();
        }
        one.decisions = group.to_vec();
        true
    }

    fn recommend(
        &mut self,
        config: &Config,
        sample: &Sample,
        subject: Subject,
        decisions: Vec<Decision>,
        gain: Option<f64>,
    ) {
        let now = sample.at;
        let stays_away = |(_, before): &(Ns, Option<f64>)| match (before, gain) {
            (Some(before), Some(gain)) => gain < before + config.much_more,
            _ => true,
        };
        if self.rejected.get(&subject).is_some_and(stays_away) || self.live.len() >= LIVE_MAX {
            return;
        }
        self.last_id += 1;
        let id = self.last_id;
        let (text, name) = words(sample, &decisions[0]);
        let decision = decisions[0].clone();
        self.events.push(Event::Recommended {
            id,
            name: name.clone(),
            decision: decision.clone(),
            text: text.clone(),
            gain,
        });
        let one = Recommendation {
            id,
            name,
            decision,
            decisions,
            text,
            gain,
            together: Vec::new(),
            made_at: now,
            expires_at: now + config.quiet_max.min(config.life_max),
            state: State::Open,
            wanted_at: now,
        };
        self.live.insert(subject, one);
    }

    /// Stores in each recommendation of an arrangement the numbers of the others, and the current prediction.
    fn note_together(&mut self, arranged: &[Subject], gains: &BTreeMap<VmId, f64>) {
        let is_open = |subject: &&Subject| self.live.get(subject).is_some_and(|one| one.state == State::Open);
        let open: Vec<Subject> = arranged.iter().filter(is_open).copied().collect();
        let ids: Vec<u64> = open.iter().map(|subject| self.live[subject].id).collect();
        for subject in &open {
            if let Some(one) = self.live.get_mut(subject) {
                one.together = ids.iter().copied().filter(|id| *id != one.id).collect();
                one.gain = gains.get(&subject.0).copied();
            }
        }
    }

    fn open(&self, id: u64) -> Result<Subject, NotThat> {
        let open = || {
            let open = self.live.values().filter(|one| one.state == State::Open);
            let mut open: Vec<u64> = open.map(|one| one.id).collect();
            open.sort_unstable();
            open
        };
        match self.all().into_iter().find(|one| one.id == id) {
            Some(one) if one.state == State::Open => Ok(one.subject()),
            Some(one) => Err(match self.successor(one) {
                Some(newer) => NotThat::Replaced {
                    id,
                    by: newer.id,
                    text: newer.text.clone(),
                    open: open(),
                },
                None => NotThat::Over {
                    id,
                    state: one.state,
                    open: open(),
                },
            }),
            None => Err(NotThat::Unknown { id, open: open() }),
        }
    }

    /// Returns the open recommendation that replaced an expired one: the newest on the lever of its VM, of any policy.
    fn successor(&self, one: &Recommendation) -> Option<&Recommendation> {
        let (vm, _, lever) = one.subject();
        let is_newer = |newer: &&Recommendation| {
            newer.state == State::Open && newer.id > one.id && newer.subject().2 == lever
        };
        let is_expired = one.state == State::Expired;
        self.of(vm)
            .filter(is_newer)
            .filter(|_| is_expired)
            .max_by_key(|newer| newer.id)
    }

    /// Approves a recommendation.
    pub(crate) fn approve(&mut self, id: u64, config: &Config, now: Ns) -> Result<Recommendation, NotThat> {
        let subject = self.open(id)?;
        let one = self.live.get_mut(&subject).expect("open ones are live");
        (one.state, one.wanted_at) = (State::Approved, now);
        one.expires_at = now + config.quiet_max.min(config.life_max);
        let one = one.clone();
        let (id, vm, name, policy, text) = one.told();
        self.events.push(Event::Approved {
            id,
            vm,
            name,
            policy,
            text,
        });
        Ok(one)
    }

    /// Rejects a recommendation.
    pub(crate) fn reject(&mut self, id: u64, config: &Config, now: Ns) -> Result<Recommendation, NotThat> {
        let subject = self.open(id)?;
        let gain = self.live[&subject].gain;
        self.rejected.insert(subject, (now + config.rejected_for, gain));
        if self.rejected.len() > REJECTED_MAX {
            let first = self.rejected.iter().min_by_key(|(_, (until, _))| *until);
            let first = first.map(|(subject, _)| *subject);
            self.rejected.retain(|subject, _| Some(*subject) != first);
        }
        self.end(&subject, State::Rejected, now);
        Ok(self.past.back().cloned().expect("it has just ended"))
    }

    /// Returns approved homes that are not assigned yet, each with the decisions that follow it, as recommended. Ends a
    /// recommendation whose home is no longer possible.
    pub(crate) fn due(&mut self, view: &View<'_>) -> Vec<(Recommendation, Vec<Decision>)> {
        let is_due = |one: &&Recommendation| one.state == State::Approved && one.is_home_on().is_some();
        let due: Vec<Recommendation> = self.live.values().filter(is_due).cloned().collect();
        let mut given = Vec::new();
        for one in due {
            let id = one.decision.action.vm;
            let vm = view.vms.iter().find(|vm| vm.sample.id == id);
            let vm = vm.filter(|vm| vm.managed() && vm.hands_off.is_none());
            let can_be = |decision: &Decision| {
                vm.is_some_and(|vm| decision.action.act.check(view.machine, vm.sample).is_ok())
            };
            // The home's nodes may have been drained since.
            let may_live = |nodes: &NodeSet| {
                let allowed = vm.and_then(|vm| homenode_policy::placement::allowed_nodes(view, vm));
                allowed.is_none_or(|allowed| nodes.is_subset(&allowed))
            };
            let may_live = match &one.decision.action.act {
                Act::SetHome { nodes } => may_live(nodes),
                _ => true,
            };
            if can_be(&one.decision) && may_live {
                let decisions = one
                    .decisions
                    .iter()
                    .filter(|decision| can_be(decision))
                    .cloned()
                    .collect();
                given.push((one, decisions));
            } else {
                self.end(&one.subject(), State::Expired, view.at);
            }
        }
        given
    }

    /// Takes in the outcome of a decision that was let through.
    pub(crate) fn outcome(&mut self, decision: &Decision, outcome: &Outcome, config: &Config, now: Ns) {
        let vm = decision.action.vm;
        let is_its = |one: &Recommendation| one.lets_through(decision);
        let Some(subject) = self.of(vm).find(|one| is_its(one)).map(Recommendation::subject) else {
            return;
        };
        let one = self.live.get_mut(&subject).expect("found above");
        let is_lead = subject_of(decision) == subject;
        match outcome {
            Outcome::Done | Outcome::Renewed | Outcome::Moved { .. } => {
                one.wanted_at = now;
                if is_lead && one.state == State::Approved {
                    one.state = State::Applied;
                    // The recommendation now ends when its policy no longer wants it, or after `life_max`.
                    one.expires_at = now + config.life_max;
                }
            }
            Outcome::Failed(_) if is_lead && one.is_home_on().is_some() => {
                self.end(&subject, State::Expired, now);
            }
            Outcome::Failed(_) | Outcome::DryRun => {}
        }
    }
}

fn home_of(decision: &Decision) -> Option<&NodeSet> {
    match &decision.action.act {
        Act::SetHome { nodes } => Some(nodes),
        _ => None,
    }
}

/// Groups decisions by subject. Each group begins with the decision that the others follow.
fn groups(waiting: Vec<Decision>) -> Vec<Vec<Decision>> {
    let mut groups: Vec<Vec<Decision>> = Vec::new();
    let follows_home = |lever| matches!(lever, Lever::VcpuPlacement | Lever::Pages);
    let (homes, others): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|one| home_of(one).is_some());
    for decision in homes.into_iter().chain(others) {
        let subject = subject_of(&decision);
        let is_its = |group: &&mut Vec<Decision>| {
            let (vm, policy, lever) = subject_of(&group[0]);
            let same = lever == subject.2 || (lever == Lever::Home && follows_home(subject.2));
            (vm, policy) == (subject.0, subject.1) && same
        };
        match groups.iter_mut().find(is_its) {
            Some(group) => group.push(decision),
            None => groups.push(vec![decision]),
        }
    }
    groups
}

/// Returns a decision in words, and the VM's name.
fn words(sample: &Sample, decision: &Decision) -> (String, String) {
    let id = decision.action.vm;
    let name = sample.vm(id).map_or_else(|| id.to_string(), |vm| vm.name.clone());
    (decision.action.act.in_words(&name), name)
}

/// Returns how far a decision goes: the most careful mode of the run, the policy and the VM.
pub(crate) fn most_careful(run: Mode, policy: Option<Mode>, vm: Option<Mode>) -> Mode {
    run.min(policy.unwrap_or(run)).min(vm.unwrap_or(run))
}

#[cfg(test)]
mod tests;
