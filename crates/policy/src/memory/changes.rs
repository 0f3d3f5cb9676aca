//! What the advisor's choices replaced on VMs, and when that is restored.
//!
//! A trial of [`crate::advisor`] ends with a choice: the tried policy stays, or the earlier one returns. If the agent may not
//! follow the advisor any more while it tries a policy, or while one that it adopted is in force, there is no such choice. What
//! was in force before the first change then returns. If that is not possible at once, it is tried in each cycle.

use std::collections::BTreeMap;

use homenode_host::{Mode, View, VmView};
use homenode_units::{MemoryPolicy, Ns, VmId};

use crate::advisor;

/// For how long the changes of a VM that is missing from samples are remembered. It bounds memory, and is not a setting.
const MISSING_MAX: Ns = Ns::from_secs(3600);

/// What was changed on a VM.
#[derive(Clone, Debug)]
struct Change {
    /// The policy in force before the first change.
    before: MemoryPolicy,
    /// The policies that were set since.
    set: Vec<MemoryPolicy>,
    /// When a sample first lacked the VM. The advisor has then forgotten what it tried.
    missing_since: Option<Ns>,
}

/// The VMs on which a policy that the advisor chose is in force.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    vms: BTreeMap<VmId, Change>,
    /// Whether the mode of this policy is `observe`.
    pub(super) is_observed: bool,
}

impl Changes {
    /// Takes in a sample: forgets VMs on which the earlier policy, or one that the agent did not set, is in force.
    pub(super) fn look(&mut self, view: &View<'_>) {
        self.vms.retain(|id, change| match view.sample.vm(*id) {
            Some(vm) => change.set.contains(&vm.memory_policy),
            None => {
                let since = *change.missing_since.get_or_insert(view.at);
                view.at.saturating_sub(since) <= MISSING_MAX
            }
        });
    }

    /// Notes that a policy of the advisor is about to replace the one in force. [`Changes::look`] forgets it if it does not.
    pub(super) fn note(&mut self, vm: VmId, now: MemoryPolicy, chosen: MemoryPolicy) {
        let change = self.vms.entry(vm).or_insert_with(|| Change {
            before: now,
            set: Vec::new(),
            missing_since: None,
        });
        if chosen != change.before && !change.set.contains(&chosen) {
            change.set.push(chosen);
        }
    }

    /// Returns the policy to restore on a VM, and why; `None` if what is in force may stay.
    pub(super) fn to_restore(
        &self,
        vm: &VmView<'_>,
        config: &advisor::Config,
    ) -> Option<(MemoryPolicy, &'static str)> {
        let change = self.vms.get(&vm.sample.id)?;
        let settings = &vm.sample.settings;
        let why = match () {
            () if !change.set.contains(&vm.sample.memory_policy) => return None,
            () if settings.memory_policy.is_some() => return None,
            () if self.is_observed || settings.mode == Some(Mode::Observe) => {
                "mode observe is in force for it"
            }
            () if !config.acts => "the agent no longer follows the advisor",
            () if vm.layout.is_some() => "its guest is told its NUMA topology",
            () if change.missing_since.is_some() => "it was missing from samples during a trial",
            () => return None,
        };
        Some((change.before, why))
    }

    /// Returns true if this policy was in force on the VM before the advisor's choices replaced it.
    pub(super) fn was_before(&self, vm: VmId, policy: MemoryPolicy) -> bool {
        self.vms.get(&vm).is_some_and(|change| change.before == policy)
    }
}
