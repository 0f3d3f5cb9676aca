//! Judges whether a change paid, and undoes it if it did not.
//!
//! # Problem
//! A predicted gain is a guess. If a VM became slower because of it, its old home must be restored, and the change must not
//! be tried again soon.
//!
//! # Terms
//! - *Baseline* of a VM: its average measured speed before its change ([`Profiles::speed`]). For an unplaced VM this is its
//!   speed without an agent.
//! - *Company* of a VM: the VMs at work. Speed and baseline can be compared only if the company has not changed.
//! - *Hold*: time in which nothing is tried with a VM. It is [`Config::hold`] after a trial, and doubles with each trial that
//!   failed, up to [`Config::hold_max`].
//!
//! # Algorithm
//! A change begins a trial. The trial waits until the VM's memory is at home, or for [`Config::settle_max`] at most, and then
//! for [`Config::watch`]. Then the VM's speed is compared with its baseline.
//! 1. If the VM is slower by at most [`Config::loss_max`], the change stays. If the VM only moved between caches of a node,
//!    so that going back moves no memory, the limit is [`Config::loss_free`].
//! 2. If the VM is slower than that, its old home is restored ("undone"). A first home on some of a node's caches is instead
//!    widened to all of them. First homes are judged together, including their effect on neighbours that have no home,
//!    because a single VM that gives up its home is pushed off the memory that it touched. All of them are withdrawn if they
//!    made VMs slower on average by more than half of [`Config::loss_max`]. Later they are examined again for as long as they
//!    last ([`crate::arrange`]).
//! 3. For a VM that rests much of the time, its pace is compared (instructions per CPU time that it wants), because its amount of
//!    work depends on its clients. Pace is measured over as many cycles at work as it takes to know a VM, whatever the company.
//! 4. If the company has changed since the baseline, the comparison is unsure: the change stays if the loss is at most
//!    [`Config::loss_unsure`], and otherwise is undone as well.
//!
//! # Properties
//! - `a_change_that_does_not_pay_is_undone`
//! - `a_change_that_pays_stays`
//! - `of_a_vm_that_rests_the_pace_is_compared_and_not_how_much_it_does`
//! - `first_homes_fail_together`
//! - `first_homes_fail_by_what_they_do_to_vms_beside_them`
//! - `what_failed_is_tried_ever_more_rarely`
//! - `a_vm_that_ended_is_not_judged`
//! - `what_was_not_carried_out_is_not_judged`
//! - `a_kept_change_gains_or_loses_time_for_as_long_as_the_vm_keeps_that_home`
//! - `a_change_that_is_undone_costs_the_time_of_its_trial`
//! - `a_vm_whose_changes_were_not_measured_has_no_time`
//! - `a_trial_that_was_not_carried_out_adds_no_time_to_the_next`

mod results;
#[cfg(test)]
mod tests;
mod time;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Plan, View, VmRates, VmSample, VmView};
use homenode_units::{BadSetting, NodeSet, Ns, Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::{PAGES, PAUSE, SHARE};
use crate::placement::{self, Home};
use crate::predict::{self, Profiles};
pub use results::{KEPT_MAX, Past, Results};
pub use time::Time;
use time::Times;

/// Name, in plans, of the policy whose changes are tried ([`crate::arrange`]).
pub const POLICY: &str = "arrange";

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Longest time to wait for memory to move.
    #[serde(with = "homenode_units::text")]
    pub settle_max: Ns,
    /// A trial does not wait for the last pages away from home if there are at most this many.
    pub away_pages_max: Pages,
    /// Time over which the new speed is measured.
    #[serde(with = "homenode_units::text")]
    pub watch: Ns,
    /// Share of its speed that a VM may lose in a change that stays, 0 to 1.
    pub loss_max: f64,
    /// Share of its speed that it may lose if its company changed; at least [`Config::loss_max`].
    pub loss_unsure: f64,
    /// Share of its speed that it may lose if going back moves no memory, as between caches of one node, 0 to 1.
    pub loss_free: f64,
    /// Time between two trials of a VM.
    #[serde(with = "homenode_units::text")]
    pub hold: Ns,
    /// Longest time between two trials of a VM, after failures; at least [`Config::hold`].
    #[serde(with = "homenode_units::text")]
    pub hold_max: Ns,
    /// How long the results of a VM that left are kept after its last result.
    #[serde(with = "homenode_units::text")]
    pub results_kept: Ns,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            settle_max: Ns::from_secs(30),
            away_pages_max: Pages(4096),
            watch: Ns::from_secs(4),
            loss_max: 0.05,
            loss_unsure: 0.15,
            loss_free: 0.01,
            hold: Ns::from_secs(30),
            hold_max: Ns::from_secs(3600),
            results_kept: Ns::from_secs(3600),
        }
    }
}

homenode_units::settings! {
    Config {
        settle_max: PAUSE,
        away_pages_max: PAGES,
        watch: PAUSE,
        loss_max: SHARE,
        loss_unsure: SHARE,
        loss_free: SHARE,
        hold: PAUSE,
        hold_max: PAUSE,
        results_kept: PAUSE,
    } ordered
}

impl Config {
    /// Returns the share of its speed that a VM may lose. `is_same` tells whether its company is unchanged; `moves_memory`,
    /// whether going back moves memory.
    fn loss_borne(&self, is_same: bool, moves_memory: bool) -> f64 {
        match (is_same, moves_memory) {
            (false, _) => self.loss_unsure,
            (true, true) => self.loss_max,
            (true, false) => self.loss_free,
        }
    }
}

fn ordered(config: &Config) -> Result<(), BadSetting> {
    let loss = ("loss_max", config.loss_max);
    BadSetting::unless_ordered(loss, ("loss_unsure", config.loss_unsure))?;
    BadSetting::unless_ordered(("hold", config.hold), ("hold_max", config.hold_max))
}

/// All settings for trials.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Settings for choosing nodes and CPUs.
    pub placement: &'a placement::Config,
    /// Settings for telling which VMs are at work.
    pub predict: &'a predict::Config,
    /// Settings for trials.
    pub trial: &'a Config,
}

/// A change that is not judged yet.
#[derive(Clone, Debug)]
struct Trial {
    began: Ns,
    /// When the VM's memory was found at home.
    home_at: Option<Ns>,
    /// Most pages that were away from the new home; `None` if unknown.
    away_most: Option<Pages>,
    before: f64,
    /// Whether the VM rests much of the time. Then its pace is compared, whatever its company.
    rests: bool,
    /// Number of cycles in which the VM had been seen at work when its memory was found at home.
    cycles: u32,
    predicted: f64,
    company: BTreeSet<VmId>,
    from: Option<Home>,
    to: Home,
}

impl Trial {
    /// Whether the VM was watched long enough; `cycles` is the number of cycles in which it has been seen at work. A VM that
    /// rests is watched for as many cycles at work as it takes to know a VM.
    fn is_due(&self, now: Ns, settings: Settings<'_>, cycles: u32) -> bool {
        let is_watched = self.home_at.is_some_and(|at| now >= at + settings.trial.watch);
        is_watched && (!self.rests || cycles >= self.cycles + settings.predict.known_cycles)
    }

    fn is_in_force(&self, view: &View<'_>, vm: &VmView<'_>) -> bool {
        let is_there = |home: &&NodeSet| {
            **home == self.to.nodes && placement::cpus_at_home(view, vm, home).is_subset(&self.to.cpus)
        };
        vm.hands_off.is_none() && vm.home.filter(is_there).is_some()
    }

    /// Returns the home to restore. If a first home was on some of a node's caches, that is the whole node, because this
    /// pushes no VM off its memory.
    fn back(&self, view: &View<'_>) -> Option<Home> {
        let whole = Home::whole(view, &self.to.nodes);
        let is_narrow = !whole.cpus.intersection(&view.cpus).is_subset(&self.to.cpus);
        self.from.clone().or(is_narrow.then_some(whole))
    }
}

/// The result of a trial.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Verdict {
    /// When the trial was judged.
    pub at: Ns,
    /// Predicted ratio of the speed after the change to the speed before it.
    pub predicted: f64,
    /// Measured ratio of the speed after the change to the speed before it.
    pub seen: f64,
    /// Whether the VM's old home was restored.
    pub undone: bool,
    /// Number of pages that came home during the trial; `None` if unknown.
    pub pages_moved: Option<Pages>,
}

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    running: BTreeMap<VmId, Trial>,
    holds: BTreeMap<VmId, (Ns, u32)>,
    /// Results of first homes that were assigned together, of those judged in unchanged company.
    first: Vec<f64>,
    /// Speeds of all VMs at work when the first of these homes was assigned.
    first_before: BTreeMap<VmId, f64>,
    results: Results,
    times: Times,
    /// VMs whose old home was restored when trials were last judged.
    undone: BTreeSet<VmId>,
}

impl State {
    /// Whether nothing may be tried with a VM now.
    pub fn holds(&self, vm: VmId, now: Ns) -> bool {
        self.running.contains_key(&vm) || self.holds.get(&vm).is_some_and(|(until, _)| now < *until)
    }

    /// Returns a VM's results, oldest first. Only the newest [`KEPT_MAX`] are kept.
    pub fn results(&self, vm: VmId) -> &[Verdict] {
        self.results.of(vm)
    }

    /// Returns the results of all VMs. Those of VMs that left are kept for [`Config::results_kept`].
    pub fn past(&self) -> impl Iterator<Item = (VmId, &Past)> {
        self.results.iter()
    }

    /// Returns the CPU time that a VM gained and lost through changes of its home, while it runs; `None` until a trial has
    /// measured one of them.
    pub fn time(&self, vm: VmId) -> Option<Time> {
        self.times.of(vm)
    }

    /// Returns the number of changes that are not judged yet.
    pub fn running_count(&self) -> usize {
        self.running.len()
    }

    /// Whether the memory of all VMs whose changes are not judged yet is at home.
    pub fn all_arrived(&self) -> bool {
        self.running.values().all(|trial| trial.home_at.is_some())
    }

    /// Returns the number of verdicts kept.
    pub fn count(&self) -> usize {
        self.past().map(|(_, past)| past.verdicts.len()).sum()
    }

    /// Returns the median relative error of predictions, comparing measured with predicted ratios, over all verdicts kept;
    /// `None` without verdicts.
    pub fn error(&self) -> Option<f64> {
        Results::error(self.past().flat_map(|(_, past)| &past.verdicts))
    }

    /// Begins the trial of a home in this cycle. `predicted` is the factor by which the VM's speed should change.
    pub fn begin(
        &mut self,
        view: &View<'_>,
        settings: Settings<'_>,
        vm: &VmView<'_>,
        to: Home,
        profiles: &Profiles,
        predicted: f64,
    ) {
        let rests = profiles.rests(vm);
        let Some(before) = profiles.progress(vm.sample.id, rests) else {
            return;
        };
        if vm.home.is_none() && !self.first_homes_run() {
            let at_work = company(view, profiles, settings.predict).into_iter();
            self.first_before = at_work.filter_map(|id| Some((id, profiles.speed(id)?))).collect();
        }
        let trial = Trial {
            began: view.at,
            home_at: None,
            away_most: None,
            before,
            rests,
            cycles: profiles.cycles(vm.sample.id),
            predicted,
            company: company(view, profiles, settings.predict),
            from: Home::of(view, vm),
            to,
        };
        self.running.insert(vm.sample.id, trial);
        self.times.begin(vm.sample.id);
    }

    /// Drops the trial of a change that was not carried out. There is nothing to judge, and nothing failed.
    pub fn forget(&mut self, vm: VmId) {
        self.running.remove(&vm);
    }

    /// Whether the last decision about a VM restored the home that it had before a trial.
    pub fn gives_back(&self, vm: VmId) -> bool {
        self.undone.contains(&vm)
    }

    /// Ends a VM's trial as failed, because homes are withdrawn.
    pub fn take_back(&mut self, vm: VmId, now: Ns, config: &Config) {
        self.running.remove(&vm);
        self.end(vm, now, config, true);
    }

    fn first_homes_run(&self) -> bool {
        self.running.values().any(|trial| trial.from.is_none())
    }

    /// Returns the mean ratio of VMs' times after to before first homes that were assigned together, including VMs without a
    /// home. Returns `None` unless all of these homes are judged, and VMs became slower.
    pub fn first_homes_failed(&mut self, config: &Config) -> Option<f64> {
        if self.first.is_empty() || self.first_homes_run() {
            return None;
        }
        let slow: f64 = self.first.iter().map(|seen| 1.0 / seen).sum();
        let mean = slow / self.first.len() as f64;
        self.first.clear();
        // Memory that has moved should stay, so a tie is no reason to move it again.
        (mean > 1.0 + config.loss_max / 2.0).then_some(mean)
    }

    /// Adds the results of VMs without a home, once all first homes are judged.
    fn judge_beside(&mut self, view: &View<'_>, profiles: &Profiles, config: &predict::Config) {
        if self.first_homes_run() {
            return;
        }
        let before = std::mem::take(&mut self.first_before);
        if self.first.is_empty() {
            return;
        }
        for vm in view.vms.iter().filter(|vm| vm.home.is_none()) {
            let id = vm.sample.id;
            let now = profiles.speed(id).filter(|_| profiles.is_active(id, config));
            if let Some((now, before)) = now.zip(before.get(&id)) {
                self.first.push(now / before);
            }
        }
    }

    /// Records a result. If it is sure, it also counts towards what the VM gained and lost.
    fn note(&mut self, vm: &VmSample, result: Verdict, is_sure: bool, to: &NodeSet) {
        self.results.note(vm.id, &vm.name, result);
        let kept_on = (!result.undone).then_some(to);
        match is_sure {
            true => self.times.judged(vm.id, result.seen, kept_on),
            false => self.times.unsure(vm.id, kept_on),
        }
    }

    /// Counts the CPU time of the last period towards what VMs gained and lost.
    fn count_time(&mut self, view: &View<'_>) {
        self.times.retain(|id| view.sample.vm(id).is_some());
        let Some(rates) = view.rates else { return };
        for vm in &view.vms {
            let id = vm.sample.id;
            let wanted = vm.rates.map_or(0.0, VmRates::cpus_wanted);
            let wanted_s = wanted * rates.period_ns.as_secs_f64();
            self.times
                .pass(id, wanted_s, vm.home, self.running.contains_key(&id));
        }
    }

    fn end(&mut self, vm: VmId, now: Ns, config: &Config, failed: bool) {
        let (until, failures) = self.holds.entry(vm).or_insert((now, 0));
        *failures = if failed { *failures + 1 } else { 0 };
        let hold = config.hold.0.saturating_mul(1 << (*failures).min(20));
        let hold = hold.min(config.hold_max.0);
        *until = Ns(now.0.saturating_add(hold));
    }
}

/// Returns the VMs at work.
fn company(view: &View<'_>, profiles: &Profiles, config: &predict::Config) -> BTreeSet<VmId> {
    let ids = view.vms.iter().map(|vm| vm.sample.id);
    ids.filter(|id| profiles.is_active(*id, config)).collect()
}

/// Judges the trials that are due, and undoes changes that did not pay.
pub fn judge(view: &View<'_>, settings: Settings<'_>, profiles: &Profiles, state: &mut State) -> Plan {
    let config = settings.trial;
    let mut plan = Plan::new(view.version);
    state.undone.clear();
    state.running.retain(|id, _| view.sample.vm(*id).is_some());
    state.holds.retain(|id, _| view.sample.vm(*id).is_some());
    state
        .results
        .forget(view.at, config, |id| view.sample.vm(id).is_some());
    state.count_time(view);
    let present = company(view, profiles, settings.predict);
    for vm in &view.vms {
        let id = vm.sample.id;
        let Some(trial) = state.running.get_mut(&id) else {
            continue;
        };
        // If the change failed, or was only reported in a dry run, there is nothing to judge.
        let Some(home) = vm.home.filter(|_| trial.is_in_force(view, vm)) else {
            if view.at > trial.began + config.settle_max {
                state.running.remove(&id);
            }
            continue;
        };
        let pages_away = vm.sample.pages_on(&view.away_from(home));
        trial.away_most = trial.away_most.max(pages_away);
        let is_home = pages_away.unwrap_or_default() <= config.away_pages_max;
        if trial.home_at.is_none() && (is_home || view.at >= trial.began + config.settle_max) {
            (trial.home_at, trial.cycles) = (Some(view.at), profiles.cycles(id));
        }
        if !trial.is_due(view.at, settings, profiles.cycles(id)) {
            continue;
        }
        let trial = trial.clone();
        state.running.remove(&id);
        let Some(now) = profiles
            .progress(id, trial.rests)
            .filter(|_| trial.rests || profiles.is_active(id, settings.predict))
        else {
            continue;
        };
        let seen = now / trial.before;
        let is_same = trial.rests || trial.company == present;
        let back = trial.back(view);
        let moves_memory = back.as_ref().is_none_or(|back| back.nodes != trial.to.nodes);
        let loss_max = config.loss_borne(is_same, moves_memory);
        // The earlier home may no longer be allowed, for example because its node is drained.
        let allowed = placement::allowed_nodes(view, vm);
        let may = |from: &Home| {
            allowed
                .as_ref()
                .is_none_or(|allowed| from.nodes.is_subset(allowed))
        };
        let undone = back.as_ref().is_some_and(may) && seen < 1.0 - loss_max;
        let result = Verdict {
            at: view.at,
            predicted: trial.predicted,
            seen,
            undone,
            pages_moved: trial
                .away_most
                .map(|most| most.saturating_sub(pages_away.unwrap_or(most))),
        };
        state.note(vm.sample, result, is_same, &trial.to.nodes);
        if is_same && !trial.rests && trial.from.is_none() {
            state.first.push(seen);
        }
        state.end(id, view.at, config, undone);
        if let Some(back) = back.filter(|_| undone) {
            let why = format!(
                "undone: it ran at {seen:.2} of its earlier speed; the prediction was {:.2}",
                trial.predicted
            );
            placement::settle(view, settings.placement, vm, &back, &why, POLICY, &mut plan);
            state.undone.insert(id);
        }
    }
    state.judge_beside(view, profiles, settings.predict);
    plan
}
