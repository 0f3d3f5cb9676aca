//! Which recommendations end before their time, because their cause is gone or another arrangement replaces them.

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Decision, Lever, Management, Mode, Sample, VmSample};
use homenode_policy::{arrange, overcommit, permits, placement};
use homenode_units::{NodeSet, Ns, VmId};

use super::{Config, Recommendation, Recommendations, State, Subject, home_of, subject_of};

impl Recommendations {
    /// Ends recommendations whose time is over, or whose VM or cause is gone.
    pub(crate) fn expire(&mut self, config: &Config, sample: &Sample) {
        let now = sample.at;
        self.rejected.retain(|_, (until, _)| *until > now);
        let is_over = |one: &Recommendation| {
            let rests = one.state == State::Applied && now.saturating_sub(one.wanted_at) >= config.pause_max;
            let vm = sample.vm(one.decision.action.vm);
            rests || now >= one.expires_at || vm.is_none_or(|vm| is_without_cause(one, vm))
        };
        self.end_all(now, is_over);
    }

    /// Ends the recommendations of homes that these VMs were to get only while a node was drained.
    pub(crate) fn end_of_drain(&mut self, sheltered: &BTreeSet<VmId>, now: Ns) {
        self.end_all(now, |one| {
            let is_pending = matches!(one.state, State::Open | State::Approved);
            let is_for_drain = sheltered.contains(&one.decision.action.vm) && is_placed(one);
            is_pending && is_for_drain
        });
    }

    /// Ends the open recommendations of `placement` that it did not want in this cycle. It decides in every cycle on each VM that
    /// seeks a home, so what it does not want has lost its cause.
    pub(super) fn end_unwanted(&mut self, now: Ns) {
        self.end_all(now, |one| {
            one.state == State::Open && is_placed(one) && one.wanted_at < now
        });
    }

    /// Ends the open recommendations of the previous arrangement that are not part of the new one.
    pub(super) fn replace_arrangement(&mut self, arranged: &[Subject], now: Ns) {
        if arranged.is_empty() {
            return;
        }
        self.end_all(now, |one| {
            let is_arranged = one.decision.policy == arrange::POLICY;
            is_arranged && one.state == State::Open && !arranged.contains(&one.subject())
        });
    }

    fn end_all(&mut self, now: Ns, is_over: impl Fn(&Recommendation) -> bool) {
        let over = self.live.iter().filter(|(_, one)| is_over(one));
        let over: Vec<(Subject, State)> = over.map(|(subject, one)| (*subject, one.state)).collect();
        for (subject, state) in over {
            let state = match state {
                State::Applied => State::Applied,
                _ => State::Expired,
            };
            self.end(&subject, state, now);
        }
    }

    /// Keeps the open arrangement, and drops the new one from `groups`, unless the new one is predicted to gain more by
    /// [`Config::much_more`], on average over the VMs of the open one. Otherwise the homes would change with every look, before
    /// an operator has read them.
    pub(super) fn keep_arrangement(
        &mut self,
        config: &Config,
        now: Ns,
        groups: &mut Vec<Vec<Decision>>,
        gains: impl Fn(&[(VmId, NodeSet)]) -> BTreeMap<VmId, f64>,
    ) {
        let home = |decision: &Decision| Some((decision.action.vm, home_of(decision)?.clone()));
        let is_arranged =
            |decision: &Decision| decision.policy == arrange::POLICY && home_of(decision).is_some();
        let is_open = |one: &&Recommendation| one.state == State::Open && is_arranged(&one.decision);
        let open: Vec<(VmId, NodeSet)> = self
            .live
            .values()
            .filter(is_open)
            .filter_map(|one| home(&one.decision))
            .collect();
        // Homes that were rejected, or approved before, are not recommended again.
        let is_new = |decision: &&Decision| {
            let subject = subject_of(decision);
            let is_decided = self
                .live
                .get(&subject)
                .is_some_and(|one| one.state != State::Open);
            is_arranged(decision) && !is_decided && !self.rejected.contains_key(&subject)
        };
        let wanted = groups.iter().filter_map(|group| group.first());
        let wanted: Vec<(VmId, NodeSet)> = wanted.filter(is_new).filter_map(home).collect();
        let is_of_open = |(vm, _): &(VmId, NodeSet)| open.iter().any(|(known, _)| known == vm);
        let is_same = wanted.len() == open.len() && wanted.iter().all(|one| open.contains(one));
        if wanted.is_empty() || open.is_empty() || is_same || !wanted.iter().all(is_of_open) {
            return;
        }
        let old = gains(&open);
        let mean = |of: &BTreeMap<VmId, f64>| of.values().sum::<f64>() / open.len() as f64;
        let is_known = open.iter().all(|(vm, _)| old.contains_key(vm));
        if !is_known || mean(&old) <= 0.0 || mean(&gains(&wanted)) >= mean(&old) + config.much_more {
            return;
        }
        groups.retain(|group| !group.first().is_some_and(is_arranged));
        let subjects: Vec<Subject> = open
            .iter()
            .map(|(vm, _)| (*vm, arrange::POLICY, Lever::Home))
            .collect();
        for subject in &subjects {
            if let Some(one) = self.live.get_mut(subject) {
                one.renew(config, now);
            }
        }
        self.note_together(&subjects, &old);
    }
}

/// Returns true if the recommendation is a home that `placement` chose.
fn is_placed(one: &Recommendation) -> bool {
    one.decision.policy == placement::POLICY && one.is_home_on().is_some()
}

/// Returns true if the recommendation's VM no longer has the setting that the recommendation serves, or if its operator wants the
/// agent to change nothing.
fn is_without_cause(one: &Recommendation, vm: &VmSample) -> bool {
    let settings = &vm.settings;
    let is_left_alone = settings.management == Management::Ignored || settings.mode == Some(Mode::Observe);
    let is_removed = match one.decision.policy {
        permits::POLICY => settings.permit.is_none(),
        // What was approved stays, since taken memory may be returned in parts.
        overcommit::POLICY => settings.memory_floor.is_none() && one.state == State::Open,
        _ => false,
    };
    is_removed || (is_left_alone && one.state == State::Open)
}
