//! Memory follows its VM home.
//!
//! # Problem
//! Pages of a VM end up on other nodes than its home: the kernel scattered them before the VM had a home, or its home
//! changed (seed 002, V.D: "the scheduler migrates the VM's corresponding memory pages to its new home"). Every access to
//! them is remote. Moving pages costs bandwidth and stalls the VM, so it is done in budgets.
//!
//! # Algorithm
//! Each epoch: VMs with a home, movable memory and more than [`Config::outside_pages_max`] pages outside are served in
//! order of most pages outside, each with at most [`Config::vm_pages_per_epoch`], all together with at most
//! [`Config::host_pages_per_epoch`].
//!
//! # Properties
//! - `budgets_hold_per_vm_and_host`
//! - `a_vm_at_home_is_left_alone`
//! - `memory_that_cannot_move_is_said_once`

use std::collections::BTreeSet;

use homenode_host::{Action, Plan, View};
use homenode_units::{Pages, VmId};
use serde::{Deserialize, Serialize};

/// Name of this policy in plans.
pub const POLICY: &str = "repatriate";

/// What the operator may set. Pages are base pages of 4 KiB.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Fewer pages than this outside home are not worth a move.
    pub outside_pages_max: Pages,
    /// Budget of one VM per epoch.
    pub vm_pages_per_epoch: Pages,
    /// Budget of the host per epoch.
    pub host_pages_per_epoch: Pages,
}

impl Default for Config {
    /// 1 MiB may stay outside; 256 MiB per VM and 512 MiB per host and epoch: a tenth of what one memory controller of the
    /// oldest machine here moves in a second.
    fn default() -> Self {
        Config {
            outside_pages_max: Pages(256),
            vm_pages_per_epoch: Pages(65_536),
            host_pages_per_epoch: Pages(131_072),
        }
    }
}

/// What the policy remembers between epochs.
#[derive(Clone, Debug, Default)]
pub struct State {
    told: BTreeSet<VmId>,
}

/// Moves what lies outside home, within the budgets.
pub fn plan(view: &View<'_>, config: &Config, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    state.told.retain(|id| view.sample.vm(*id).is_some());
    let mut outside: Vec<_> = view
        .vms
        .iter()
        .filter(|vm| vm.managed() && vm.hands_off.is_none())
        .filter_map(|vm| {
            let home = vm.home?;
            let pages = vm.sample.pages_outside(home)?;
            (pages > config.outside_pages_max).then_some((pages, home, vm))
        })
        .collect();
    outside.sort_by_key(|(pages, _, vm)| (std::cmp::Reverse(*pages), vm.sample.id));
    let mut left = config.host_pages_per_epoch;
    for (pages, home, vm) in outside {
        let id = vm.sample.id;
        if let Some(why) = vm.memory_fixed() {
            if state.told.insert(id) {
                let message = format!(
                    "{pages} of VM {} stay away from its home, node {home}: {why}",
                    vm.sample.name
                );
                plan.find(POLICY, Some(id), message);
            }
            continue;
        }
        let budget = pages.min(config.vm_pages_per_epoch).min(left);
        if budget == Pages::ZERO {
            break;
        }
        left -= budget;
        let reason =
            format!("{pages} lie away from its home, node {home}; {budget} of them go home in this epoch");
        plan.decide(
            POLICY,
            Action::gather(view.machine, id, home.clone(), budget),
            reason,
        );
    }
    plan
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
            .map(|d| match &d.action {
                Action::MovePages { vm, pages_max, .. } => (*vm, *pages_max),
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
            vm_pages_per_epoch: Pages(2_000),
            host_pages_per_epoch: Pages(4_500),
        };
        let plan = scene.with_view(|view| plan(view, &config, &mut State::default()));
        // Most pages outside first: 3000 and 2000 are cut to the VM's budget, the third gets what the host has left.
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
}
