//! Moves a VM's memory home.
//!
//! # Problem
//! Pages of a VM get to nodes other than its home: the kernel scattered them before the VM had a home, its home changed ([TAVO,
//! V.D]: "the scheduler migrates the VM's corresponding memory pages to its new home"), or its I/O exchanged them with a driver
//! domain on another node [Flip, IV-B]. Every access to these pages is remote. Moving pages costs bandwidth and stalls the VM, so
//! budgets limit it. Moving a few pages at a time costs more than it gains, so it starts only when it is worthwhile.
//!
//! # Algorithm
//! Each cycle:
//! 1. A VM with a home and more than [`Config::outside_pages_max`] pages outside it starts to move them according to
//!    [`Config::start`]: by amount, when more than this amount is outside; or periodically, when this time has passed since
//!    its last start, or since it was first seen. It then goes on until at most [`Config::outside_pages_max`] pages are
//!    outside. If a VM's guest is shown its location, each virtual node's memory has its own home node ([`VmView::layout`]),
//!    and pages elsewhere are outside. All pages leave a drained node at once, however few they are. If a VM's memory moves
//!    whole or not at all ([`homenode_host::VmSample::moves_whole`]), all of it moves at once, and budgets do not apply,
//!    because they are for pages that move within a cycle.
//! 2. VMs whose pages are to move, and can, are served in descending order of pages outside. Each moves at most
//!    [`Config::vm_pages_per_cycle`], and all together move at most [`Config::host_pages_per_cycle`].
//!
//! # Properties
//! - `budgets_hold_per_vm_and_host`
//! - `a_vm_at_home_is_left_alone`
//! - `memory_that_cannot_move_is_said_once`
//! - `by_amount_all_goes_home_once_enough_is_away`
//! - `periodically_all_goes_home_however_little_is_away`
//! - `what_moves_whole_is_asked_for_whole`
//! - `each_virtual_node_goes_whole_to_its_own_node`
//!
//! # Departures
//! - \[Flip\] starts at 500 MB or every 900 s, and moves all remote pages at once. The default here starts at 1 MiB: on a
//!   host whose kernel scatters pages they then move soon after they were touched, before they cost much. A host with a
//!   driver domain needs a higher amount, because pages that move home are exchanged again.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Act, Action, Plan, View, VmView};
use homenode_units::{Allowed as _, BadSetting, Bytes, NodeId, NodeSet, Ns, Pages, Section, Settings, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::{MEMORY, PAGES, SPAN};

/// Name of this policy in plans.
pub const POLICY: &str = "repatriate";

/// Default of the setting `start`, as an amount.
const START_AMOUNT: Bytes = Bytes::from_mib(1);
/// Default of `start`, as a time; \[Flip\] moves pages at such intervals.
const START_PERIOD: Ns = Ns::from_secs(900);

/// When a VM's memory starts to move home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Start {
    /// When more than this amount is outside its home.
    Amount(#[serde(with = "homenode_units::text")] Bytes),
    /// Each time that this period has passed.
    Period(#[serde(with = "homenode_units::text")] Ns),
}

/// The operator's settings. Pages are base pages of 4 KiB.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// At most this many pages outside home are not worth a move.
    pub outside_pages_max: Pages,
    /// When a VM's pages start to move.
    pub start: Start,
    /// Most pages of one VM that move per cycle.
    #[serde(alias = "vm_pages_per_epoch")]
    pub vm_pages_per_cycle: Pages,
    /// Most pages of the host that move per cycle.
    #[serde(alias = "host_pages_per_epoch")]
    pub host_pages_per_cycle: Pages,
}

impl Default for Config {
    /// 1 MiB may stay outside. Per cycle, 512 MiB of a VM and 1 GiB of a host may move: a fifth of what one memory controller
    /// of the oldest machine here moves in a second.
    fn default() -> Self {
        Config {
            outside_pages_max: Pages(256),
            start: Start::Amount(START_AMOUNT),
            vm_pages_per_cycle: Pages(131_072),
            host_pages_per_cycle: Pages(262_144),
        }
    }
}

homenode_units::settings! {
    Config { outside_pages_max: PAGES, start: Section, vm_pages_per_cycle: PAGES, host_pages_per_cycle: PAGES } budgets
}

/// A VM's budget may not exceed the host's.
fn budgets(config: &Config) -> Result<(), BadSetting> {
    let vm = ("vm_pages_per_cycle", config.vm_pages_per_cycle);
    BadSetting::unless_ordered(vm, ("host_pages_per_cycle", config.host_pages_per_cycle))
}

impl Settings for Start {
    fn check(&self) -> Result<(), BadSetting> {
        match self {
            Start::Amount(amount) => MEMORY.check("amount", amount, &START_AMOUNT),
            Start::Period(period) => SPAN.check("period", period, &START_PERIOD),
        }
    }
}

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    told: BTreeSet<VmId>,
    /// VMs whose memory is moving.
    under_way: BTreeSet<VmId>,
    /// When each VM's memory last started to move, or was first seen.
    since: BTreeMap<VmId, Ns>,
}

impl State {
    /// Whether the memory of a VM with more than a little outside its home is moving now.
    fn goes(&mut self, id: VmId, outside: Pages, start: Start, now: Ns) -> bool {
        let since = *self.since.entry(id).or_insert(now);
        let due = match start {
            Start::Amount(most) => outside > most.to_pages(),
            Start::Period(period) => now.0 - since.0 >= period.0,
        };
        if due && self.under_way.insert(id) {
            self.since.insert(id, now);
        }
        self.under_way.contains(&id)
    }
}

/// Moves memory home, within the budgets.
pub fn plan(view: &View<'_>, config: &Config, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    state.told.retain(|id| view.sample.vm(*id).is_some());
    state.under_way.retain(|id| view.sample.vm(*id).is_some());
    state.since.retain(|id, _| view.sample.vm(*id).is_some());
    let mut outside: Vec<_> = view
        .vms
        .iter()
        .filter(|vm| vm.managed() && vm.hands_off.is_none())
        .filter_map(|vm| {
            let home = vm.home?;
            let parts = astray(view, vm, home)?;
            let pages: Pages = parts.iter().map(|part| part.pages).sum();
            let id = vm.sample.id;
            // A drained node is emptied to the last page.
            let is_drained = view
                .drained
                .difference(home)
                .iter()
                .any(|node| has_pages(vm, node));
            if pages <= config.outside_pages_max && !is_drained {
                state.under_way.remove(&id);
                state.since.entry(id).or_insert(view.sample.at);
                return None;
            }
            let goes = is_drained || state.goes(id, pages, config.start, view.sample.at);
            goes.then_some((pages, parts, home, vm))
        })
        .collect();
    outside.sort_by_key(|(pages, _, _, vm)| (Reverse(*pages), vm.sample.id));
    let mut left = config.host_pages_per_cycle;
    for (pages, parts, home, vm) in outside {
        let id = vm.sample.id;
        if let Some(why) = vm.memory_fixed() {
            if state.told.insert(id) {
                let message = format!(
                    "{} of VM {} stays outside its home, node {home}: {why}",
                    pages.to_bytes(),
                    vm.sample.name
                );
                plan.find(POLICY, Some(id), message);
            }
            continue;
        }
        if vm.sample.moves_whole {
            let action = gather(view, id, home, pages);
            let size = pages.to_bytes();
            let reason = format!("moving all of its memory to home node {home} at once; {size} is elsewhere");
            plan.decide(POLICY, action, reason);
            continue;
        }
        let mut vm_left = config.vm_pages_per_cycle;
        for part in parts {
            let budget = part.pages.min(vm_left).min(left);
            if budget == Pages::ZERO {
                break;
            }
            left -= budget;
            vm_left -= budget;
            let (action, reason) = part.goes(view, id, home, budget);
            plan.decide(POLICY, action, reason);
        }
    }
    plan
}

fn has_pages(vm: &VmView<'_>, node: NodeId) -> bool {
    let pages = vm.sample.pages.as_ref().and_then(|pages| pages.get(node));
    pages.is_some_and(|pages| *pages > Pages::ZERO)
}

/// Pages of a VM that have one destination.
struct Part {
    pages: Pages,
    /// Their virtual node and the node where its memory belongs, if the guest is shown its location; otherwise `None`, and
    /// they go home.
    virtual_node: Option<(u16, NodeId)>,
}

/// Returns the misplaced parts of a VM's memory, largest first; `None` if its pages are not known.
fn astray(view: &View<'_>, vm: &VmView<'_>, home: &NodeSet) -> Option<Vec<Part>> {
    let Some(layout) = vm.layout else {
        let pages = vm.sample.pages_on(&view.away_from(home))?;
        let virtual_node = None;
        return Some(vec![Part { pages, virtual_node }]);
    };
    let mut parts = Vec::with_capacity(layout.len());
    for ((virtual_node, &to), number) in vm.sample.virtual_nodes.iter().zip(layout).zip(0..) {
        let elsewhere = virtual_node
            .pages
            .as_ref()?
            .iter()
            .filter(|(node, _)| *node != to);
        parts.push(Part {
            pages: elsewhere.map(|(_, pages)| *pages).sum(),
            virtual_node: Some((number, to)),
        });
    }
    parts.sort_by_key(|part| Reverse(part.pages));
    Some(parts)
}

/// Returns the action that moves pages home from all nodes where they do not belong.
fn gather(view: &View<'_>, vm: VmId, home: &NodeSet, pages_max: Pages) -> Action {
    let (from, to) = (view.away_from(home), home.clone());
    Act::MovePages { from, to, pages_max }.on(vm)
}

impl Part {
    fn goes(&self, view: &View<'_>, vm: VmId, home: &NodeSet, budget: Pages) -> (Action, String) {
        let moved = budget.to_bytes();
        let left = match self.pages.saturating_sub(budget) {
            Pages::ZERO => "none left".to_owned(),
            left => format!("{} left", left.to_bytes()),
        };
        let Some((virtual_node, to)) = self.virtual_node else {
            return (
                gather(view, vm, home, budget),
                format!("moving {moved} to home node {home}; {left}"),
            );
        };
        let action = Act::MoveVirtualNode {
            virtual_node,
            to,
            pages_max: budget,
        }
        .on(vm);
        let what = format!("moving {moved} of virtual node {virtual_node} to its node {to}; {left}");
        (action, what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scene, vm_id};
    use homenode_host::Immovable;
    use homenode_units::{Bytes, NodeId};

    fn budgets(plan: &Plan) -> Vec<(VmId, Pages)> {
        plan.decisions
            .iter()
            .map(|d| match &d.action.act {
                Act::MovePages { pages_max, .. } => (d.action.vm, *pages_max),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn budgets_hold_per_vm_and_host() {
        let mut scene = Scene::four_nodes(4);
        for n in 1..=3 {
            scene
                .add_vm(n, 1, Bytes::from_gib(4), 0)
                .home(0)
                .pages(1, 1_000 * n as u64);
        }
        let config = Config {
            outside_pages_max: Pages(256),
            vm_pages_per_cycle: Pages(2_000),
            host_pages_per_cycle: Pages(4_500),
            ..Config::default()
        };
        let plan = scene.with_view(|view| plan(view, &config, &mut State::default()));
        // VMs with most pages outside come first: 3000 and 2000 are cut to the VM's budget, and the third VM gets the rest of
        // the host's.
        assert_eq!(
            budgets(&plan),
            [
                (vm_id(3), Pages(2_000)),
                (vm_id(2), Pages(2_000)),
                (vm_id(1), Pages(500))
            ]
        );
    }

    #[test]
    fn what_moves_whole_is_asked_for_whole() {
        let mut scene = Scene::four_nodes(4);
        for n in 1..=2 {
            let vm = scene.add_vm(n, 1, Bytes::from_gib(4), 0);
            vm.home(0).pages(1, 3_000).pages(2, 2_000);
        }
        scene.vm(2).moves_whole();
        let config = Config {
            vm_pages_per_cycle: Pages(1_000),
            host_pages_per_cycle: Pages(1_000),
            ..Config::default()
        };
        let plan = scene.with_view(|view| plan(view, &config, &mut State::default()));
        assert_eq!(
            budgets(&plan),
            [(vm_id(1), Pages(1_000)), (vm_id(2), Pages(5_000))]
        );
    }

    #[test]
    fn each_virtual_node_goes_whole_to_its_own_node() {
        let mut scene = Scene::four_nodes(4);
        let vm = scene.add_vm(1, 2, Bytes::from_gib(4), 0).homes("0-1");
        // All of the memory is on home nodes, but part of it is on the wrong one.
        vm.pages(0, 6_000).pages(1, 6_000);
        vm.follows(&[
            (&[0], &[(0, 5_000), (1, 1_000)]),
            (&[1], &[(0, 1_000), (1, 2_000), (3, 3_000)]),
        ]);
        vm.layout(Some(&[NodeId(0), NodeId(1)]));
        let config = Config {
            vm_pages_per_cycle: Pages(4_500),
            ..Config::default()
        };
        let plan = scene.with_view(|view| plan(view, &config, &mut State::default()));
        let moves = |(virtual_node, to, pages_max): (u16, u16, u64)| {
            Act::MoveVirtualNode {
                virtual_node,
                to: NodeId(to),
                pages_max: Pages(pages_max),
            }
            .on(vm_id(1))
        };
        let actions: Vec<Action> = plan.decisions.into_iter().map(|d| d.action).collect();
        assert_eq!(actions, [(1, 1, 4_000), (0, 0, 500)].map(moves));
    }

    #[test]
    fn a_vm_at_home_is_left_alone() {
        let mut scene = Scene::four_nodes(4);
        scene
            .add_vm(1, 1, Bytes::from_gib(4), 0)
            .home(0)
            .pages(0, 1_000_000)
            .pages(1, 256);
        let plan = scene.with_view(|view| plan(view, &Config::default(), &mut State::default()));
        assert_eq!(plan, Plan::new(plan.version));
    }

    #[test]
    fn memory_that_cannot_move_is_said_once() {
        let mut scene = Scene::four_nodes(4);
        scene
            .add_vm(1, 1, Bytes::from_gib(4), 0)
            .home(0)
            .pages(1, 9_999)
            .immovable(Immovable::Vfio);
        let mut state = State::default();
        let first = scene.with_view(|view| plan(view, &Config::default(), &mut state));
        assert!(first.decisions.is_empty());
        assert!(first.findings[0].message.contains("VFIO"), "{:?}", first.findings);
        let second = scene.with_view(|view| plan(view, &Config::default(), &mut state));
        assert!(second.findings.is_empty());
        assert_eq!(scene.machine.nodes.keys().next(), Some(NodeId(0)));
    }

    /// Returns the number of pages that go home in one cycle if this many are outside.
    fn going(config: &Config, state: &mut State, at_s: u64, outside: u64) -> u64 {
        let mut scene = Scene::four_nodes(4);
        scene.at = Ns::from_secs(at_s);
        scene
            .add_vm(1, 1, Bytes::from_gib(4), 0)
            .home(0)
            .pages(0, 100_000)
            .pages(1, outside);
        let plan = scene.with_view(|view| plan(view, config, state));
        budgets(&plan).iter().map(|(_, pages)| pages.0).sum()
    }

    #[test]
    fn by_amount_all_goes_home_once_enough_is_away() {
        let config = Config {
            start: Start::Amount(Pages(10_000).to_bytes()),
            vm_pages_per_cycle: Pages(6_000),
            ..Config::default()
        };
        let mut state = State::default();
        let mut going = |at_s, outside| going(&config, &mut state, at_s, outside);
        assert_eq!(going(10, 10_000), 0);
        assert_eq!(going(11, 10_001), 6_000);
        // The VM's memory keeps moving: less than the amount is outside now, and it goes home too.
        assert_eq!(going(12, 4_101), 4_101);
        assert_eq!(going(13, 100), 0);
        assert_eq!(going(14, 9_999), 0);
    }

    #[test]
    fn periodically_all_goes_home_however_little_is_away() {
        let config = Config {
            start: Start::Period(Ns::from_secs(900)),
            vm_pages_per_cycle: Pages(6_000),
            ..Config::default()
        };
        let mut state = State::default();
        let mut going = |at_s, outside| going(&config, &mut state, at_s, outside);
        assert_eq!(going(100, 0), 0);
        assert_eq!(going(999, 50_000), 0);
        assert_eq!(going(1000, 7_000), 6_000);
        assert_eq!(going(1001, 1_000), 1_000);
        assert_eq!(going(1002, 0), 0);
        assert_eq!(going(1899, 50_000), 0);
        assert_eq!(going(1900, 257), 257);
    }
}
