//! Decides which nodes a VM may have as its home, given its operator's CPU mask, anti-affinity and affinity.
//!
//! # Terms
//! - *Mates*: VMs to which the operator gave the same group name, for anti-affinity or for affinity.
//! - *Going first*: of two mates with homes, the one with the lower id goes first, and the other has to make way or to follow.
//!
//! # Algorithm
//! A VM that seeks a home may have the nodes that can be a home ([`View::homes`]) and on which its operator allows it a CPU,
//! except those of mates that it must be kept apart from. If mates that it must be kept together with go first, it must take
//! the whole of their home, even if a part of it has room. The first VM of such a group seeks a home with room for all its
//! mates that have none or that follow it. These limits may change: a node is drained, its CPUs go offline, or the operator
//! changes the settings. A VM whose home is then no longer allowed seeks another. Mates that it goes before do not count
//! then, because they make way. A VM whose memory cannot move stays, because its vCPUs would only be slower elsewhere. If a
//! node is drained, or its CPUs are gone, only memory has to find room; VMs then share CPUs.
//!
//! A VM whose operator bound its memory to nodes has exactly these nodes as its home, except those without CPUs (CXL): with a
//! home on some of them, its memory on the others would be remote. It leaves any other home. So if its two cells are bound to
//! nodes 0 and 1, its home is 0-1; if one of the two is drained, or cannot be a home for another reason, the VM stays
//! unplaced. A home that the operator names has priority over the binding.
//!
//! # Properties
//! - `vms_with_anti_affinity_share_no_node`
//! - `vms_with_affinity_have_one_home_with_room_for_all`
//! - `a_vm_leaves_a_node_that_is_drained_and_no_other_comes`
//! - `where_a_node_is_drained_vms_share_cpus_and_memory_needs_room`
//! - `whose_memory_cannot_move_stays_and_so_does_whose_home_the_operator_chose`
//! - `a_vm_whose_memory_is_bound_has_all_nodes_of_the_binding_for_its_home_or_none`

use homenode_host::{Immovable, View, VmSettings, VmView};
use homenode_units::{NodeId, NodeSet, VmId};

use super::demand_of as demand_of_one;
use crate::demand::{Demand, History};

/// Whether the operator set anti-affinity or affinity for the VM.
pub fn has_company(settings: &VmSettings) -> bool {
    settings.anti_affinity.is_some() || settings.affinity.is_some()
}

/// Which question about a VM's home is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asked {
    /// Which home could the VM take?
    New,
    /// Which home can the VM keep?
    Kept,
}

/// Returns the nodes that a VM may take as a home; `None` if it may take any.
pub fn allowed_nodes(view: &View<'_>, vm: &VmView<'_>) -> Option<NodeSet> {
    allowed(view, vm, Asked::New, |_| None)
}

/// Returns the same nodes, but takes into account homes that are `reserved` for VMs and that the view does not show yet.
pub(super) fn allowed<'a>(
    view: &'a View<'_>,
    vm: &VmView<'_>,
    asked: Asked,
    reserved: impl Fn(VmId) -> Option<&'a NodeSet>,
) -> Option<NodeSet> {
    let settings = &vm.sample.settings;
    let homes = view.homes();
    let mut allowed = homes.clone();
    if let Some(cpus) = &settings.cpus_allowed {
        let cpus = view.cpus_for(Some(cpus));
        let nodes: NodeSet = cpus.iter().filter_map(|cpu| view.machine.node_of(cpu)).collect();
        allowed = view.machine.home_nodes().intersection(&nodes);
    }
    if let Some(bound) = bound_home(view, vm) {
        allowed = allowed.intersection(&bound);
    } else if let Some(Immovable::BoundAtStart { nodes }) = vm.memory_fixed() {
        allowed = allowed.intersection(nodes);
    }
    for mate in view.vms.iter().filter(|mate| mate.sample.id != vm.sample.id) {
        let Some(home) = reserved(mate.sample.id).or(mate.home) else {
            continue;
        };
        let makes_way = asked == Asked::Kept && goes_before(vm, mate);
        if is_same(&settings.anti_affinity, &mate.sample.settings.anti_affinity) && !makes_way {
            allowed = allowed.difference(home);
        }
    }
    if let Some(home) = led_to(view, vm, reserved) {
        allowed = allowed.intersection(home);
    }
    (allowed != view.machine.home_nodes()).then_some(allowed)
}

/// Returns the home of the first VM that must be kept together with this one and goes before it.
pub(super) fn led_to<'a>(
    view: &'a View<'_>,
    vm: &VmView<'_>,
    reserved: impl Fn(VmId) -> Option<&'a NodeSet>,
) -> Option<&'a NodeSet> {
    let affinity = &vm.sample.settings.affinity;
    // Return early: this runs for each VM in every period, and most VMs have no mates.
    affinity.as_ref()?;
    let homes = view.homes();
    // A mate that cannot move to another node must not tie the others to its home.
    let leads = |mate: &&VmView<'_>| {
        mate.sample.id != vm.sample.id
            && !goes_before(vm, mate)
            && is_same(affinity, &mate.sample.settings.affinity)
            && may_move(mate)
    };
    view.vms
        .iter()
        .filter(leads)
        .filter_map(|mate| reserved(mate.sample.id).or(mate.home))
        .find(|home| home.is_subset(&homes))
}

/// Whether the VM keeps its home, so that this mate has to make way or to follow.
fn goes_before(vm: &VmView<'_>, mate: &VmView<'_>) -> bool {
    vm.home.is_some() && vm.sample.id < mate.sample.id
}

/// Returns the nodes with CPUs to which a VM's memory is bound: its only possible home. `None` if its memory is not bound.
pub(super) fn bound_home(view: &View<'_>, vm: &VmView<'_>) -> Option<NodeSet> {
    let bound = vm.sample.bound_to.as_ref()?;
    let has_cpus = |node: &NodeId| {
        view.machine
            .nodes
            .get(*node)
            .is_some_and(|node| !node.cpus.is_empty())
    };
    Some(bound.iter().filter(has_cpus).collect())
}

/// Whether the agent may assign a VM another home.
fn may_move(vm: &VmView<'_>) -> bool {
    vm.managed() && vm.hands_off.is_none()
}

fn is_same(own: &Option<String>, other: &Option<String>) -> bool {
    own.is_some() && own == other
}

/// Whether a VM may no longer have its home, and can leave it.
pub(super) fn must_leave(view: &View<'_>, vm: &VmView<'_>, home: &NodeSet) -> bool {
    if let Some(bound) = bound_home(view, vm) {
        return vm.sample.settings.home.is_none() && bound != *home;
    }
    vm.sample.settings.home.is_none()
        && vm.memory_fixed().is_none()
        && allowed(view, vm, Asked::Kept, |_| None).is_some_and(|allowed| !home.is_subset(&allowed))
}

/// Whether a VM must leave even if CPUs are short elsewhere, because a node is drained or its CPUs are gone.
pub(super) fn is_put_out(view: &View<'_>, vm: &VmView<'_>) -> bool {
    match vm.home {
        Some(home) => !home.is_subset(&view.homes()),
        None => !view.drained.is_empty(),
    }
}

/// Returns what a VM needs, including its mates that must be kept together with it and have no home yet or follow it.
pub(super) fn demand_of<'a>(
    view: &View<'_>,
    vm: &VmView<'_>,
    history: &History,
    reserved: impl Fn(VmId) -> Option<&'a NodeSet>,
) -> Demand {
    let mut demand = demand_of_one(vm, history);
    let affinity = &vm.sample.settings.affinity;
    let mates = view.vms.iter().filter(|mate| {
        mate.sample.id > vm.sample.id
            && is_same(affinity, &mate.sample.settings.affinity)
            && may_move(mate)
            && mate.memory_fixed().is_none()
    });
    for mate in mates {
        if mate.home.is_some() && vm.home.is_none() || reserved(mate.sample.id).is_some() {
            continue;
        }
        demand.join(demand_of_one(mate, history));
    }
    demand
}

#[cfg(test)]
mod tests;
