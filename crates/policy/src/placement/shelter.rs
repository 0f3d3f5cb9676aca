//! VMs that need a home, or another home, only because a node is drained.

use std::collections::BTreeSet;

use homenode_host::{View, VmView};
use homenode_units::VmId;

use super::State;

impl State {
    /// Returns the VMs that no longer need a home: they got one because a node was drained, and no node is drained now.
    pub fn released(&mut self, view: &View<'_>) -> BTreeSet<VmId> {
        self.sheltered.retain(|id| view.sample.vm(*id).is_some());
        if !view.drained.is_empty() {
            return BTreeSet::new();
        }
        let has_home = |id: &VmId| view.vms.iter().any(|vm| vm.sample.id == *id && vm.home.is_some());
        let sheltered = std::mem::take(&mut self.sheltered).into_iter();
        let (released, waiting): (BTreeSet<VmId>, BTreeSet<VmId>) = sheltered.partition(has_home);
        // The homes of these VMs were only recommended. A VM with a reservation seeks a home, which would reserve it again in
        // every cycle.
        waiting.iter().for_each(|id| self.ledger.withdraw(*id));
        released
    }

    /// Returns the VMs that have a home, or are to get one, only because a node is drained.
    pub fn sheltered(&self) -> &BTreeSet<VmId> {
        &self.sheltered
    }

    /// Returns the reason for a home, preceded by the drain if the VM must move because of it.
    pub(super) fn with_drain(&self, view: &View<'_>, vm: &VmView<'_>, reason: String) -> String {
        let drained = &view.drained;
        let is_put_out = match vm.home {
            Some(home) => !home.intersection(drained).is_empty(),
            None => self.sheltered.contains(&vm.sample.id),
        };
        match is_put_out {
            true => format!("because node {drained} is drained; {reason}"),
            false => reason,
        }
    }
}
