//! Finds VMs that together fill one node's memory controllers while other nodes have room: step 6 of [`super`].

use homenode_host::{Rates, View, VmRates, VmView};
use homenode_units::{BytesPerSec, NodeId, NodeSet, VmId};

use super::Config;
use crate::placement;

/// Returns the VM that should leave a crowded home, and the nodes where it would meet less traffic. Of the VMs on the first
/// crowded node, the one with the least memory is taken.
pub(super) fn crowded(view: &View<'_>, rates: &Rates, config: &Config) -> Option<(VmId, NodeSet)> {
    let homes = view.machine.home_nodes();
    homes.iter().find_map(|node| {
        let capacity = view.machine.nodes.get(node)?.memory_bandwidth?.as_f64();
        let traffic = traffic(rates, node)?;
        if traffic < config.full * capacity {
            return None;
        }
        let uses = |vm: &VmView<'_>| {
            vm.rates
                .and_then(VmRates::bandwidth)
                .map_or(0.0, BytesPerSec::as_f64)
        };
        let may_leave = |vm: &&VmView<'_>| {
            vm.managed()
                && vm.hands_off.is_none()
                && vm.home == Some(&NodeSet::one(node))
                && vm.sample.settings.home.is_none()
                && vm.sample.settings.affinity.is_none()
                && vm.memory_fixed().is_none()
                && uses(vm) >= config.gain_min * capacity
        };
        let vm = view
            .vms
            .iter()
            .filter(may_leave)
            .min_by_key(|vm| (vm.sample.memory_bytes, vm.sample.id))?;
        let met_here = traffic - uses(vm);
        let allowed = placement::allowed_nodes(view, vm);
        let less = |to: &NodeId| {
            allowed.as_ref().is_none_or(|allowed| allowed.contains(*to))
                && traffic_is_less(rates, *to, met_here - config.gain_min * capacity)
        };
        let nodes: NodeSet = homes.iter().filter(|to| *to != node).filter(less).collect();
        (!nodes.is_empty()).then_some((vm.sample.id, nodes))
    })
}

fn traffic(rates: &Rates, node: NodeId) -> Option<f64> {
    Some(rates.nodes.get(node)?.bandwidth?.as_f64())
}

fn traffic_is_less(rates: &Rates, node: NodeId, than: f64) -> bool {
    traffic(rates, node).is_some_and(|traffic| traffic <= than)
}
