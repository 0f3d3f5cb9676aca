//! Decides by which memory policy a VM's pages are laid out over its home nodes, and lays them out.
//!
//! # Problem
//! A VM on one node wants its memory there. For a VM that needs several nodes there is a choice [Policies, section 3]: each
//! page is near the CPU that touched it first, or all pages are spread evenly, and in both cases pages may follow their
//! users. Each choice is right for some programs and very wrong for others. If several policies moved the same pages, they
//! would undo each other's work.
//!
//! # Terms
//! *Memory policy*: [`MemoryPolicy`] of a VM, chosen by the operator or else by [`crate::advisor`]; without a choice the host's
//! own stays in force. *Strays*: pages outside all home nodes. [`crate::repatriate`] brings them home under any memory policy.
//!
//! # Algorithm
//! Each cycle, for each VM:
//! 1. If a chosen policy is not in force, it is set, unless there is an [`objection`], which is reported once. If the agent may
//!    not follow the advisor any more (`changes`), the policy from before its first choice is restored.
//! 2. The pages of a VM under round-4K with several home nodes are evened out: if a home node holds more than an even share by
//!    over [`Config::spread_excess`], the excess moves to home nodes that hold less. The simulator deals pages out evenly from
//!    the beginning. Linux places them by first touch, and the agent moves them afterwards.
//! 3. Under [`carrefour`] single pages follow their users. If the policy is round-4K, pages are first evened out, once; after
//!    that only Carrefour moves them.
//!
//! Budgets are what repatriation leaves unused of its own.
//!
//! # Properties
//! - `pages_are_evened_out_over_the_home_nodes`
//! - `what_repatriation_leaves_of_the_budgets_is_used`
//! - `a_policy_that_cannot_be_is_said_once_with_the_reason`
//! - `first_touch_leaves_pages_where_they_are`
//! - `a_vm_that_is_paused_or_migrating_keeps_pages_and_policy_until_that_is_over`
//! - `first_touch_without_releases_is_cautioned_against`
//! - `a_policy_on_trial_is_restored_once_the_advisor_may_not_be_followed`
//! - `a_policy_on_trial_that_cannot_be_restored_at_once_is_restored_later`
//!
//! # Departures
//! - [`crate::placement`] chooses a VM's home nodes, not Xen (section 3.1), and they may change.

pub mod carrefour;
mod changes;

use std::collections::BTreeSet;

use homenode_host::{Act, Action, HandsOff, Lever, Plan, Sample, View, VmSample, VmView};
use homenode_units::{MemoryPolicy, Migration, NodeSet, Pages, Placing, Section, VmId};
use serde::{Deserialize, Serialize};

use self::changes::Changes;
use crate::bounds::{PAGES, SHARE};
use crate::{advisor, repatriate};

/// Name of this policy in plans.
pub const POLICY: &str = "memory";

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// How a policy is chosen if the operator chose none.
    pub advisor: advisor::Config,
    /// Thresholds and budgets of Carrefour.
    pub carrefour: carrefour::Config,
    /// Excess over an even share of pages that is tolerated on a node under round-4K, as a share of the even share, 0 to 1.
    pub spread_excess: f64,
    /// An excess of fewer pages than this on a node is not worth a move.
    pub spread_pages_min: Pages,
}

impl Default for Config {
    /// A twentieth: what a busy guest touches while pages move stays within it.
    fn default() -> Self {
        Config {
            advisor: advisor::Config::default(),
            carrefour: carrefour::Config::default(),
            spread_excess: 0.05,
            spread_pages_min: Pages(256),
        }
    }
}

homenode_units::settings! {
    Config { advisor: Section, carrefour: Section, spread_excess: SHARE, spread_pages_min: PAGES }
}

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// State of the advisor.
    pub advisor: advisor::State,
    /// State of Carrefour.
    pub carrefour: carrefour::State,
    /// Objections that were already reported.
    told: BTreeSet<(VmId, MemoryPolicy)>,
    /// VMs under Carrefour whose pages were evened out.
    spread: BTreeSet<VmId>,
    changes: Changes,
}

impl State {
    /// Notes whether the mode of this policy is `observe`. Then nothing that the advisor chose may stay in force.
    pub fn observe_only(&mut self, is_observed: bool) {
        self.changes.is_observed = is_observed;
    }

    /// Returns true if this policy was in force on a VM before the advisor's choices replaced it.
    pub fn was_before(&self, vm: VmId, policy: MemoryPolicy) -> bool {
        self.changes.was_before(vm, policy)
    }
}

/// Returns what is wrong with a memory policy for a VM, with a remedy; `None` if nothing is.
pub fn objection(
    sample: &Sample,
    vm: &VmSample,
    hands_off: Option<HandsOff>,
    policy: MemoryPolicy,
) -> Option<String> {
    if let Some(why) = hands_off {
        return Some(format!("{why}, so the agent leaves its memory alone too"));
    }
    if vm.memory_policy == policy {
        return None;
    }
    if let Some(why) = &vm.immovable {
        return Some(format!("its pages cannot move: {why}"));
    }
    if policy.placing == Placing::Round1g && vm.memory_policy.placing != Placing::Round1g {
        let why = "round-1g takes effect only when a VM is created, and this VM is already running; choose round-4k";
        return Some(why.to_owned());
    }
    match (&sample.no_page_uses, policy.migration) {
        (Some(why), Migration::Carrefour) => Some(why.clone()),
        _ => None,
    }
}

/// Returns a warning about a memory policy that is possible but has a drawback; `None` if it has none.
pub fn caution(vm: &VmSample, policy: MemoryPolicy) -> Option<String> {
    let why = vm
        .no_releases
        .as_ref()
        .filter(|_| policy.placing == Placing::FirstTouch)?;
    Some(format!(
        "first-touch places each page once and never again: {why}"
    ))
}

/// Lays out the pages of VMs according to their memory policies. The budgets are reduced by what `earlier` plans of this
/// cycle, those of [`repatriate`], use.
pub fn plan(
    view: &View<'_>,
    config: &Config,
    budgets: &repatriate::Config,
    earlier: &[Plan],
    state: &mut State,
) -> Plan {
    let mut plan = Plan::new(view.version);
    state.changes.look(view);
    observe(view, &config.advisor, state);
    state.told.retain(|(id, _)| view.sample.vm(*id).is_some());
    state.spread.retain(|id| view.sample.vm(*id).is_some());
    let earlier = earlier
        .iter()
        .flat_map(|plan| &plan.decisions)
        .map(|decision| &decision.action);
    let strays: Vec<&Action> = earlier
        .filter(|action| action.act.lever() == Lever::Pages)
        .collect();
    let spent: Pages = strays.iter().map(|stray| stray.act.pages_max()).sum();
    let mut host_left = budgets.host_pages_per_cycle - spent.min(budgets.host_pages_per_cycle);
    for vm in view.vms.iter().filter(|vm| vm.managed()) {
        let id = vm.sample.id;
        let policy = in_force(view, vm, &config.advisor, state, &mut plan);
        if policy.migration == Migration::None {
            state.spread.remove(&id);
        }
        let has_strays = strays.iter().any(|stray| stray.vm == id);
        let home = &advisor::lives_on(view, vm);
        if home.len() < 2 {
            continue;
        }
        let is_movable = vm.hands_off.is_none() && vm.memory_fixed().is_none() && !has_strays;
        let is_spread = policy.placing == Placing::Round4k && !state.spread.contains(&id);
        if !is_movable || !is_spread {
            continue;
        }
        let budget = budgets.vm_pages_per_cycle.min(host_left);
        let spent = spread(vm, home, config, budget, &mut plan);
        host_left -= spent;
        if spent == Pages::ZERO && policy.migration != Migration::None {
            state.spread.insert(id);
        }
    }
    let carrefour = carrefour::Config {
        host_pages_per_cycle: config.carrefour.host_pages_per_cycle.min(host_left),
        ..config.carrefour.clone()
    };
    let follow = carrefour::plan(view, &carrefour, &mut state.carrefour);
    let is_moved = |id: VmId| {
        let decided = plan.decisions.iter().map(|decision| &decision.action);
        let mut decided = strays.iter().copied().chain(decided);
        decided.any(|action| action.vm == id && action.act.lever() == Lever::Pages)
    };
    let follow_decisions: Vec<_> = follow
        .decisions
        .into_iter()
        .filter(|d| !is_moved(d.action.vm))
        .collect();
    plan.decisions.extend(follow_decisions);
    plan.findings.extend(follow.findings);
    plan
}

/// Lets the advisor take in a cycle. It takes VMs whose earlier policy is restored for VMs whose operator chose, and so ends
/// their trials.
fn observe(view: &View<'_>, config: &advisor::Config, state: &mut State) {
    let is_restored = |vm: &&VmView<'_>| state.changes.to_restore(vm, config).is_some();
    let held = view.vms.iter().filter(is_restored).map(|vm| {
        let mut sample = vm.sample.clone();
        sample.settings.memory_policy = Some(sample.memory_policy);
        sample
    });
    let held: Vec<VmSample> = held.collect();
    if held.is_empty() {
        return advisor::observe(view, config, &mut state.advisor);
    }
    let mut view = view.clone();
    for vm in &mut view.vms {
        let sample = held.iter().find(|held| held.id == vm.sample.id);
        vm.sample = sample.unwrap_or(vm.sample);
    }
    advisor::observe(&view, config, &mut state.advisor);
}

/// Returns the memory policy that is in force for the VM. If the operator or the advisor chose another and it is possible,
/// decides to set it.
fn in_force(
    view: &View<'_>,
    vm: &VmView<'_>,
    config: &advisor::Config,
    state: &mut State,
    plan: &mut Plan,
) -> MemoryPolicy {
    let now = vm.sample.memory_policy;
    let (id, name) = (vm.sample.id, &vm.sample.name);
    let restored = state.changes.to_restore(vm, config);
    let is_operators = vm.sample.settings.memory_policy.is_some();
    let chosen = match (vm.sample.settings.memory_policy, restored) {
        (Some(chosen), _) => Some(chosen),
        (None, Some((before, _))) => Some(before),
        // A guest that is shown its location sees whole virtual nodes, so the agent chooses no policy that would scatter
        // their pages.
        (None, None) => state.advisor.choice(id).filter(|_| vm.layout.is_none()),
    };
    let Some(chosen) = chosen.filter(|chosen| *chosen != now) else {
        return now;
    };
    match objection(view.sample, vm.sample, vm.hands_off, chosen) {
        None => {
            let by = if is_operators {
                "the operator"
            } else {
                "the advisor"
            };
            let why = match restored {
                Some((_, why)) => format!("restored: {why}; the advisor had chosen {now}"),
                None => format!("{by} chose {chosen} for it; it had {now}"),
            };
            if !is_operators {
                state.changes.note(id, now, chosen);
            }
            let set = Act::SetMemoryPolicy { policy: chosen }.on(id);
            plan.decide(POLICY, set, why);
        }
        Some(why) => {
            if state.told.insert((id, chosen)) {
                plan.find(
                    POLICY,
                    Some(id),
                    format!("VM {name} keeps memory policy {now} instead of {chosen}: {why}"),
                );
            }
        }
    }
    now
}

/// Evens out a VM's pages over its home nodes; returns the number of pages that may move.
fn spread(vm: &VmView<'_>, home: &NodeSet, config: &Config, budget: Pages, plan: &mut Plan) -> Pages {
    let Some(pages) = &vm.sample.pages else {
        return Pages::ZERO;
    };
    let on = |node| pages.get(node).map_or(0, |pages| pages.0);
    let total: u64 = home.iter().map(on).sum();
    let even = total / home.len() as u64;
    let excess_max = ((even as f64 * config.spread_excess) as u64).max(config.spread_pages_min.0);
    let to: NodeSet = home.iter().filter(|node| on(*node) < even).collect();
    let mut left = budget;
    for node in home.iter().filter(|node| on(*node) > even + excess_max) {
        let pages_max = Pages(on(node) - even).min(left);
        if pages_max == Pages::ZERO || to.is_empty() {
            break;
        }
        left -= pages_max;
        let reason = format!(
            "round-4k needs an equal share, {}, on each of nodes {home}, but node {node} has {}",
            Pages(even),
            Pages(on(node))
        );
        let action = Act::MovePages {
            from: NodeSet::one(node),
            to: to.clone(),
            pages_max,
        }
        .on(vm.sample.id);
        plan.decide(POLICY, action, reason);
    }
    budget - left
}

#[cfg(test)]
mod tests;
