//! Memory overcommitment: balloons keep VMs at what they use plus a reserve, and return memory fast when it is needed.
//!
//! # Problem
//! Owners of VMs book more memory than they use [PRL, section 1], so a host that is fully booked is half empty. Taking memory
//! with a balloon is easy, but users complain about the effects: guests that are shrunk although they already swap, memory
//! that returns too late, and no explanation. (The paper cites Badis, which adapts each VM's memory to its working set from
//! time to time.)
//!
//! # Terms
//! - *Given* memory of a VM: the limit in force or, without a limit, the *maximum*, which the operator sets.
//! - *Floor*: the least memory that the operator allows for the VM. A VM without a floor is never touched.
//! - *Need*: the upper end of the VM's working set ([`Estimate::most`]) plus a reserve, at least the floor, at most the maximum.
//! - *Pressure*: the guest reads from swap ([`Config::swap_min`]), faults from disk ([`Config::faults_per_s_min`]), or has
//!   less than [`Config::usable_min`] of its memory usable.
//! - *Lack* of a node: its headroom less its free memory. *Room* of a node: its free memory less the share
//!   [`Config::kept_free`], and less what VMs under a limit were given there and have not touched.
//!
//! # Algorithm
//! For each VM with a floor, each period:
//! 1. A VM under pressure gets half as much memory again ([`Config::growth`]), and at least its need, at once. Then it is not
//!    shrunk for [`Config::backoff`]. This time doubles with each new spell of pressure, up to [`Config::backoff_max`], and
//!    is reset after calm. A VM whose need exceeds its given memory gets its need and a little more ([`Config::band`]), and
//!    is not shrunk for [`Config::backoff`] either.
//! 2. Otherwise, if [`Config::when`] is [`When::Scarce`] and all of the VM's home nodes have more than twice the headroom
//!    free, a tenth is returned to it at a time ([`Config::give_back`]).
//! 3. Otherwise the VM may be shrunk, if its balloon has followed the last step, [`Config::step_wait`] has passed, there is a
//!    settled estimate, and its given memory exceeds its need by more than [`Config::band`]. A step takes [`Config::step`] of
//!    the given memory, but does not go below the need, and takes no more than the guest's usable memory allows. Under
//!    [`When::Scarce`] it is taken only while a node with the VM's pages lacks memory, and is no larger than that lack
//!    requires. VMs with most to spare come first.
//! 4. Growth uses the room of the VM's home nodes; VMs in need come first. Memory that is taken is credited to the nodes that
//!    hold the VM's pages, so that two VMs are not shrunk for the same lack.
//! 5. A limit is renewed in every period. It is lifted when it reaches the maximum.
//!
//! If a balloon does not follow, if its driver does not answer, or if the guest or another program undid a limit, this is
//! reported, the limit is lifted, and the VM is left alone for [`Config::left_alone`].
//!
//! # Properties (tests of the same name)
//! - `never_below_the_floor_nor_below_working_set_and_reserve`
//! - `what_is_given_on_a_node_is_never_more_than_it_has`
//! - `pressure_is_answered_with_growth_in_the_same_cycle`
//! - `a_quiet_system_comes_to_rest`
//! - `every_limit_is_renewed_or_lifted`
//! - `without_a_floor_or_an_estimate_nothing_is_taken`
//! - `a_guest_decides_over_nobody_but_itself`
//! - `a_balloon_that_does_not_follow_is_said_and_let_go`
//! - `a_driver_that_does_not_answer_is_said_and_let_go`
//! - `a_limit_that_somebody_undid_is_not_set_again_at_once`
//! - `memory_is_taken_only_where_a_node_lacks_it`
//!
//! # Departures from the source, and why
//! - The estimate's `most` is used, never its `size`: an estimate that is too low costs the guest a disk access per page, one
//!   that is too high costs only memory.
//! - The guest's reports are used, although the paper's systems do without them: only the guest knows that it swaps, and no
//!   tracker sees a need beyond what the VM has. Reports count for that guest only, and only in its favour.
//! - Decisions are made by node: a node runs short of memory before the host does, and memory taken on another node does not
//!   help it.

mod config;
mod nodes;

use std::collections::BTreeMap;

use homenode_host::{Act, Balloon, GuestMemory, Immovable, Lever, Limit, Plan, View, VmView};
use homenode_units::{Bytes, Ns, PAGE_BYTES, VmId};
use serde::{Deserialize, Serialize};

use crate::working_set::{self, Certainty, Estimate, Settled};
pub use config::{Config, When};
use nodes::Nodes;

/// Name of this policy in plans.
pub const POLICY: &str = "overcommit";

const UNDONE: &str = "is no longer in force: another program changed it, or its guest took the memory back";

/// A VM's situation, for people to read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Standing {
    /// Memory that the VM needs, if known.
    pub need_bytes: Option<Bytes>,
    /// Why the VM has its present memory.
    pub why: String,
}

/// State kept between periods.
#[derive(Clone, Debug, Default)]
pub struct State {
    vms: BTreeMap<VmId, Known>,
}

impl State {
    /// Returns the situation of a VM that has a floor.
    pub fn standing(&self, vm: VmId) -> Option<&Standing> {
        self.vms.get(&vm)?.standing.as_ref()
    }

    /// Notes that the agent itself lifted the limit of a VM, so that the limit does not count as undone by others.
    pub fn was_lifted(&mut self, vm: VmId) {
        if let Some(known) = self.vms.get_mut(&vm) {
            known.lifting = true;
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Known {
    /// The limit in the last sample, and whether the agent asked for it to be lifted.
    limit: Option<Bytes>,
    lifting: bool,
    /// When the balloon set out for the limit, and the guest's memory then.
    since: Ns,
    from: Bytes,
    /// The guest's last report, and when the agent saw it.
    report: Option<(GuestMemory, Ns)>,
    /// Time until which the agent waits for a first report.
    first_until: Option<Ns>,
    /// The VM is not shrunk before this time; and the length of the last wait after pressure.
    wait_until: Ns,
    backoff: Ns,
    pressed: bool,
    /// The VM is not touched before this time.
    alone_until: Ns,
    said: Option<String>,
    standing: Option<Standing>,
}

/// The memory that a VM should have.
#[derive(Debug)]
enum Wish {
    /// The VM's maximum.
    All(String),
    /// The VM's present memory.
    Same(String),
    /// As much as `to`, if there is room; an `urgent` wish goes before all others.
    More { to: Bytes, urgent: bool, why: String },
    /// Less, by at most `step`, and not below `least`.
    Less { least: Bytes, step: Bytes, why: String },
}

/// A VM and what the agent found out about it.
struct Case<'a, 'v> {
    vm: &'a VmView<'v>,
    given: Bytes,
    maximum: Bytes,
    wish: Wish,
}

/// Requests estimates of the working sets of VMs from which memory may be taken. To be called before the working sets are
/// planned.
pub fn want_working_sets(view: &View<'_>, config: &Config, working_sets: &mut working_set::State) {
    let may_be_shrunk = |vm: &&VmView<'_>| {
        vm.managed() && vm.sample.settings.memory_floor.is_some() && vm.sample.balloon.is_some()
    };
    for vm in view.vms.iter().filter(may_be_shrunk) {
        working_sets.want(vm.sample.id, None, view.at + config.lease);
    }
}

/// Decides how much memory each VM with a floor has.
pub fn plan<'e>(
    view: &View<'_>,
    config: &Config,
    estimate: impl Fn(VmId) -> Option<&'e Estimate>,
    state: &mut State,
) -> Plan {
    let mut plan = Plan::new(view.version);
    let has_part = |vm: &VmView<'_>| {
        let is_limited = vm.sample.balloon.is_some_and(|balloon| balloon.limit.is_some());
        vm.managed() && (vm.sample.settings.memory_floor.is_some() || is_limited)
    };
    state
        .vms
        .retain(|id, _| view.vms.iter().any(|vm| vm.sample.id == *id && has_part(vm)));
    let mut nodes = Nodes::new(view, config);
    let mut cases = Vec::new();
    for vm in view.vms.iter().filter(|vm| has_part(vm)) {
        let known = state.vms.entry(vm.sample.id).or_default();
        let estimate = estimate(vm.sample.id).filter(|estimate| is_fresh(estimate, view.at, config));
        let need = need(vm, config, estimate);
        known.standing = Some(Standing {
            need_bytes: need,
            why: String::new(),
        });
        let (wish, trouble) = known.wish(view, vm, config, need, estimate, &nodes);
        if trouble != known.said {
            if let Some(message) = trouble.clone() {
                plan.find(POLICY, Some(vm.sample.id), message);
            }
            known.said = trouble;
        }
        let Some(balloon) = vm.sample.balloon else {
            continue;
        };
        let given = balloon.limit.unwrap_or(balloon.maximum);
        cases.push(Case {
            vm,
            given,
            maximum: balloon.maximum,
            wish,
        });
    }
    // Urgent growth comes first, then other growth, then VMs with most to spare.
    cases.sort_by_key(|case| match case.wish {
        Wish::More { urgent: true, .. } => (0, 0),
        Wish::More { .. } => (1, 0),
        Wish::Less { least, .. } => (2, u64::MAX - case.given.saturating_sub(least).0),
        Wish::All(_) | Wish::Same(_) => (3, 0),
    });
    for case in cases {
        let id = case.vm.sample.id;
        let known = state.vms.get_mut(&id).expect("entered above");
        let (to, why) = case.settle(view, config, &mut nodes, &mut plan);
        if let Some(standing) = &mut known.standing {
            standing.why.clone_from(&why);
        }
        let is_limited = case
            .vm
            .sample
            .balloon
            .is_some_and(|balloon| balloon.limit.is_some());
        known.lifting = to >= case.maximum;
        if to < case.given {
            known.wait_until = known.wait_until.max(view.at + config.step_wait);
        }
        if to < case.maximum {
            let limit = Limit::Memory(to);
            let action = Act::Limit {
                limit,
                lease_ns: config.lease,
            }
            .on(id);
            plan.decide(POLICY, action, why);
        } else if is_limited {
            let lever = Lever::Memory;
            plan.decide(POLICY, Act::Lift { lever }.on(id), why);
        }
    }
    plan
}

/// Returns how much memory a VM needs; `None` without a reliable estimate.
fn need(vm: &VmView<'_>, config: &Config, estimate: Option<&Estimate>) -> Option<Bytes> {
    let estimate = estimate.filter(|estimate| estimate.settled == Settled::Yes)?;
    let floor = vm.sample.settings.memory_floor?;
    let share = match estimate.certainty {
        Certainty::Spread => 2.0 * config.reserve,
        Certainty::Bounds | Certainty::Percent95 => config.reserve,
    };
    let reserve = part(estimate.most, share).max(config.reserve_min);
    Some(Bytes(estimate.most.0.saturating_add(reserve.0)).max(floor))
}

/// Says in words what a VM needs according to an estimate.
fn needed(estimate: &Estimate, floor: Bytes, need: Option<Bytes>) -> String {
    format!(
        "its working set is at most {} ({} over {}); with its reserve and its floor of {floor}, it needs {}",
        estimate.most,
        estimate.tracker.name(),
        estimate.window,
        need.unwrap_or(estimate.most)
    )
}

/// Whether an estimate is still current. Once a VM's figure has settled, it is watched again only after a rest of ten windows.
fn is_fresh(estimate: &Estimate, at: Ns, config: &Config) -> bool {
    let windows = Ns(estimate.window.0.saturating_mul(20));
    at.saturating_sub(estimate.at) <= windows.max(config.report_age_max)
}

fn part(of: Bytes, share: f64) -> Bytes {
    Bytes((of.as_f64() * share) as u64)
}

fn whole_pages(bytes: Bytes) -> Bytes {
    Bytes(bytes.0 / PAGE_BYTES * PAGE_BYTES)
}

impl Known {
    /// Returns the memory that a VM should have, and the problem with its balloon, if any.
    fn wish(
        &mut self,
        view: &View<'_>,
        vm: &VmView<'_>,
        config: &Config,
        need: Option<Bytes>,
        estimate: Option<&Estimate>,
        nodes: &Nodes,
    ) -> (Wish, Option<String>) {
        let (at, balloons, name) = (view.at, view.sample.balloons, &vm.sample.name);
        let Some(balloon) = vm.sample.balloon else {
            let remedy = balloons.how_to_get_one();
            let why = format!("VM {name} has a memory floor and no balloon: {remedy}");
            return (Wish::Same(String::new()), Some(why));
        };
        let all = |why: &str| Wish::All(why.to_owned());
        let Some(floor) = vm.sample.settings.memory_floor else {
            return (all("its memory floor was removed"), None);
        };
        let was_undone = self.limit.is_some() && balloon.limit.is_none() && !self.lifting;
        let moved = self.track(at, balloon, config.follow_max);
        let (report, is_first_awaited) = self.report(at, balloon, config);
        let pressure = self.pressure(at, report, balloon, config);
        if at < self.alone_until {
            return (all("its balloon is left alone for a while"), self.said.clone());
        }
        if matches!(
            vm.sample.immovable,
            Some(Immovable::Paused | Immovable::Migrating)
        ) {
            self.since = at;
            return (Wish::Same("the VM is paused or migrating".into()), None);
        }
        if is_first_awaited {
            return (Wish::Same("its guest has not reported yet".into()), None);
        }
        let trouble = match was_undone {
            true => Some(format!("the limit on the memory of VM {name} {UNDONE}")),
            false => self.trouble(view, vm, config, report.is_none(), moved),
        };
        if let Some(trouble) = trouble {
            self.alone_until = at + config.left_alone;
            let why = format!("{trouble}; its balloon is left alone for {}", config.left_alone);
            return (all(&why), Some(why));
        }
        let given = balloon.limit.unwrap_or(balloon.maximum);
        let short = need.filter(|need| *need > given && given < balloon.maximum);
        if let Some(why) = pressure {
            self.back_off(at, config);
            let to =
                Bytes(given.0 + part(given, config.growth).max(config.step_min).0).max(need.unwrap_or(given));
            let urgent = true;
            return (Wish::More { to, urgent, why }, None);
        }
        self.pressed = false;
        let sentence = |estimate: &Estimate| needed(estimate, floor, need);
        if let (Some(need), Some(estimate)) = (short, estimate) {
            self.wait_until = self.wait_until.max(at + config.backoff);
            let to = need + part(need, 2.0 * config.band);
            let urgent = true;
            let why = format!("{}, more than the {given} it has", sentence(estimate));
            return (Wish::More { to, urgent, why }, None);
        }
        if config.when == When::Scarce && given < balloon.maximum && nodes.is_plentiful(vm) {
            let to = given + part(given, config.give_back).max(config.step_min);
            let (urgent, why) = (false, "its home has memory to spare".to_owned());
            return (Wish::More { to, urgent, why }, None);
        }
        let now = Now {
            at,
            given,
            config,
            need,
            report,
            moved,
        };
        (self.less(&now, estimate.map(sentence)), None)
    }

    /// Returns the guest's report if it is recent, and whether to wait for its first report.
    fn report(&mut self, at: Ns, balloon: Balloon, config: &Config) -> (Option<GuestMemory>, bool) {
        let report = balloon.guest.map(|guest| guest.bounded(balloon.current));
        let is_first = report.is_none_or(|guest| guest.age.is_none());
        let first_until = *self.first_until.get_or_insert(at + config.first_report_max);
        if !is_first {
            self.first_until = Some(at);
        }
        let is_new = |guest: &GuestMemory| guest.age.is_some_and(|age| age <= config.report_age_max);
        (report.filter(is_new), is_first && at < first_until)
    }

    /// Returns why memory cannot be taken from a VM at present; `None` if it can.
    fn trouble(
        &self,
        view: &View<'_>,
        vm: &VmView<'_>,
        config: &Config,
        is_silent: bool,
        moved: Moved,
    ) -> Option<String> {
        let name = &vm.sample.name;
        if let Some(why) = vm.sample.immovable.as_ref().filter(|why| gives_nothing(why)) {
            return Some(format!(
                "taking memory from VM {name} would free none on the host: {why}"
            ));
        }
        if is_silent {
            return Some(format!(
                "the balloon driver of VM {name} does not report the guest's memory: {}",
                view.sample.balloons.why_silent()
            ));
        }
        let balloon = vm.sample.balloon.filter(|_| moved == Moved::Stuck)?;
        let (current, limit) = (balloon.current, self.limit.unwrap_or(balloon.maximum));
        let long = config.follow_max;
        Some(format!(
            "the balloon of VM {name} does not follow its target: its guest still has {current}, and {limit} was \
             requested at least {long} ago"
        ))
    }

    /// Returns the wish to shrink the VM, or to leave it as it is and why. `why` explains its need, if known.
    fn less(&self, now: &Now<'_>, why: Option<String>) -> Wish {
        let same = |why: &str| Wish::Same(why.to_owned());
        let Now {
            at,
            given,
            config,
            need,
            report,
            moved,
        } = *now;
        let (Some(need), Some(why)) = (need, why) else {
            return same("its working set is not known");
        };
        let least = need.min(given);
        let spare = given - least;
        if spare <= part(given, config.band).max(config.step_min) {
            return Wish::Same(why);
        }
        if at < self.wait_until {
            return same("it was short of memory recently, or has just given some up");
        }
        if moved == Moved::OnTheWay {
            return same("its balloon is still moving to its target");
        }
        let Some(usable) = report.and_then(|guest| guest.usable.or(guest.unused)) else {
            return same("its guest does not report how much memory it could spare");
        };
        let step = part(given, config.step).max(config.step_min).min(spare);
        let step = step.min(usable.saturating_sub(Bytes(2 * usable_min(given, config).0)));
        if step < Bytes(PAGE_BYTES) {
            return Wish::Same(format!("its guest reports only {usable} as usable"));
        }
        Wish::Less { least, step, why }
    }

    /// Returns how far the balloon is on its way to the limit.
    fn track(&mut self, at: Ns, balloon: Balloon, long: Ns) -> Moved {
        if self.limit != balloon.limit {
            (self.limit, self.since, self.from) = (balloon.limit, at, balloon.current);
        }
        let Some(limit) = balloon.limit else {
            return Moved::There;
        };
        let left = balloon.current.saturating_sub(limit);
        if left == Bytes::ZERO || Balloon::is_near(balloon.current, limit) {
            (self.since, self.from) = (at, balloon.current);
            return Moved::There;
        }
        if at.saturating_sub(self.since) < long {
            return Moved::OnTheWay;
        }
        let way = self.from.saturating_sub(limit);
        if self.from.saturating_sub(balloon.current).0.saturating_mul(4) < way.0 || left > way {
            return Moved::Stuck;
        }
        (self.since, self.from) = (at, balloon.current);
        Moved::OnTheWay
    }

    /// Returns why the guest is short of memory; `None` if it is not. Without a limit it counts as not short, because the
    /// agent holds back no memory that it could return.
    fn pressure(
        &mut self,
        at: Ns,
        report: Option<GuestMemory>,
        balloon: Balloon,
        config: &Config,
    ) -> Option<String> {
        let now = report?;
        let before = self.report.replace((now, at));
        balloon.limit?;
        let least = usable_min(balloon.current, config);
        if let Some(usable) = now.usable.filter(|usable| *usable < least) {
            return Some(format!(
                "its guest has only {usable} of {} usable",
                balloon.current
            ));
        }
        let (before, seen) = before?;
        let read = now.swapped_in?.0.checked_sub(before.swapped_in?.0).map(Bytes);
        if let Some(read) = read.filter(|read| *read >= config.swap_min) {
            return Some(format!("its guest read {read} back from swap"));
        }
        let faults = now.major_faults?.checked_sub(before.major_faults?)? as f64;
        let seconds = at.saturating_sub(seen).as_secs_f64().max(1.0);
        (faults >= config.faults_per_s_min * seconds).then(|| {
            format!(
                "its guest waits for the disk in {:.0} page faults a second",
                faults / seconds
            )
        })
    }

    /// Postpones shrinking; the wait doubles with each spell of pressure, unless the last spell was long ago.
    fn back_off(&mut self, at: Ns, config: &Config) {
        if !self.pressed {
            let is_calm = at.saturating_sub(self.wait_until) > self.backoff;
            self.backoff = if self.backoff == Ns::ZERO || is_calm {
                config.backoff
            } else {
                Ns(self.backoff.0.saturating_mul(2)).min(config.backoff_max.max(config.backoff))
            };
        }
        self.pressed = true;
        self.wait_until = self.wait_until.max(at + self.backoff);
    }
}

/// The state of a VM whose balloon has no problem.
#[derive(Clone, Copy, Debug)]
struct Now<'a> {
    at: Ns,
    given: Bytes,
    config: &'a Config,
    need: Option<Bytes>,
    report: Option<GuestMemory>,
    moved: Moved,
}

/// Position of a balloon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moved {
    There,
    OnTheWay,
    Stuck,
}

fn usable_min(given: Bytes, config: &Config) -> Bytes {
    part(given, config.usable_min).max(config.step_min)
}

/// Whether shrinking a VM that is immovable for this reason would free no memory on the host.
fn gives_nothing(why: &Immovable) -> bool {
    match why {
        Immovable::Vfio
        | Immovable::Locked
        | Immovable::Encrypted { .. }
        | Immovable::HugePages { .. }
        | Immovable::HugePagePool { .. } => true,
        Immovable::BoundAtStart { .. }
        | Immovable::BoundInParts { .. }
        | Immovable::Hypervisor { .. }
        | Immovable::Paused
        | Immovable::Migrating => false,
    }
}

impl Case<'_, '_> {
    /// Decides on a VM's memory, with the reason.
    fn settle(
        &self,
        view: &View<'_>,
        config: &Config,
        nodes: &mut Nodes,
        plan: &mut Plan,
    ) -> (Bytes, String) {
        match &self.wish {
            Wish::All(why) => (self.maximum, why.clone()),
            Wish::Same(why) => (self.given, why.clone()),
            Wish::More { to, urgent, why } => {
                let wanted = to.min(&self.maximum).saturating_sub(self.given);
                let granted = whole_pages(nodes.take(self.vm, wanted, *urgent));
                // If the maximum is not a multiple of a page, the last part of a page is granted too.
                let to = if granted + Bytes(PAGE_BYTES) > wanted && wanted + self.given == self.maximum {
                    self.maximum
                } else {
                    self.given + granted
                };
                if *urgent && granted == Bytes::ZERO && wanted > Bytes::ZERO {
                    let message = format!(
                        "VM {} is short of memory and its home nodes have none to give: {why}",
                        self.vm.sample.name
                    );
                    plan.find(POLICY, Some(self.vm.sample.id), message);
                }
                (
                    to,
                    format!("{why}; its memory changes from {} to {to}", self.given),
                )
            }
            Wish::Less { least, step, why } => {
                let useful = match config.when {
                    When::Always => *step,
                    When::Scarce => nodes.useful(self.vm).min(*step),
                };
                let to = Bytes((self.given - useful).0.next_multiple_of(PAGE_BYTES)).max(*least);
                let cut = self.given.saturating_sub(to);
                if cut == Bytes::ZERO {
                    return (
                        self.given,
                        format!("{why}; no node with its memory is short of memory"),
                    );
                }
                let short = nodes.credit(view, self.vm, cut);
                (
                    to,
                    format!("{why}; its memory changes from {} to {to}{short}", self.given),
                )
            }
        }
    }
}

#[cfg(test)]
mod tests;
