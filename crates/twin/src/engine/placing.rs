//! Memory policies that change while a VM runs.
//!
//! # Model [Policies, section 4.2.1]
//!
//! Pages that are touched stay where they are. A change to *first-touch* returns to the host all memory that the VM has but has
//! not touched (the guest says which pages are free); the host places it when it is touched. After a change to *round-4K*, pages
//! are dealt out in turn over the home nodes, or over all nodes if there are none, when they are touched. *Round-1G* is only for
//! VMs that are created with it, as in the paper. A VM that drives devices itself cannot have first-touch: a device's access to a
//! page that is not mapped fails (section 4.4.1). A change of policy discards what the host's AutoNUMA knows of a VM.

use homenode_units::{MemoryPolicy, Migration, Ns, Placing};

use super::Engine;
use super::agenda::Timer;
use crate::guest::View;
use crate::hypervisor::sampling::Sampling;
use crate::hypervisor::turns::{Turns, WhenFull};
use crate::index::VmIx;
use crate::scenario::Allocation;

/// Interval at which the rate of memory sampling is chosen.
const SAMPLING_PERIOD: Ns = Ns::from_secs(1);

impl Engine {
    /// Places and samples a VM's pages by this policy from now on.
    ///
    /// # Errors
    /// Why the VM cannot have the policy, and what to do instead. Nothing is changed in this case.
    pub(crate) fn set_memory_policy(&mut self, vm: VmIx, policy: MemoryPolicy) -> Result<(), &'static str> {
        let owner = &self.vms[vm];
        let native = owner.memory.view == View::Truth;
        if native && policy.migration == Migration::AutoNuma {
            return Err(
                "without a hypervisor, the guest's kernel is the host's; set autonuma = true for the VM in the scenario",
            );
        }
        if policy.placing != owner.memory_policy.placing {
            match policy.placing {
                Placing::Round1g => {
                    return Err("only VMs that were created with round-1g can use it; use round-4k");
                }
                Placing::Round4k if matches!(owner.memory.view, View::Virtual { .. }) => {
                    return Err("round-4k would spread every virtual node over the host; use first-touch");
                }
                Placing::FirstTouch if owner.passthrough && !native => {
                    return Err(
                        "the VM drives devices directly, and a device cannot access a page before it is mapped; use round-4k",
                    );
                }
                Placing::Round4k => {
                    let home = owner.memory.home.clone().filter(|home| !home.is_empty());
                    let nodes = home.unwrap_or_else(|| self.memory.nodes());
                    self.vms[vm].memory.turns = Some(Turns::even(nodes));
                }
                Placing::FirstTouch => self.place_when_touched(vm),
            }
        }
        if policy != self.vms[vm].memory_policy {
            self.settle_all();
            self.vms[vm].memory_policy = policy;
            self.vms[vm].counts.policy_changes += 1;
            self.set_sampling(vm);
            self.set_host_autonuma(vm);
            self.set_speeds_of(vm);
            self.version += 1;
        }
        Ok(())
    }

    fn place_when_touched(&mut self, vm: VmIx) {
        let owner = &mut self.vms[vm];
        let all = self.memory.nodes();
        let memory = &mut owner.memory;
        if memory.view != View::Truth {
            memory.when_full = WhenFull::InTurn;
        }
        let interleaves = owner.allocation == Allocation::Interleave && memory.view.chooses();
        memory.turns = interleaves.then(|| Turns::even(memory.view.nodes(&all)));
        let free = std::mem::replace(&mut memory.free_list, vec![0; self.memory.total.len()]);
        self.memory.release(&free);
    }

    /// Starts or stops sampling which nodes use a VM's pages, as the VM's policy requires.
    pub(super) fn set_sampling(&mut self, vm: VmIx) {
        let owner = &mut self.vms[vm];
        if owner.memory_policy.migration != Migration::Carrefour {
            owner.host.sampling = None;
        } else if owner.host.sampling.is_none() {
            owner.host.sampling = Some(Sampling::new(owner.threads.len(), self.topology.nodes()));
            owner.host.samplings += 1;
            let number = owner.host.samplings;
            self.agenda
                .set(Ns(self.now.0 + SAMPLING_PERIOD.0), Timer::Sampling { vm, number });
        }
    }

    /// Ends a second of sampling, unless the sampling has been stopped since it began.
    pub(super) fn sampled(&mut self, vm: VmIx, number: u32) {
        let owner = &mut self.vms[vm];
        if number != owner.host.samplings || !owner.present() {
            return;
        }
        if owner.host.sampling.is_none() {
            return;
        }
        self.settle_all();
        if let Some(sampling) = &mut self.vms[vm].host.sampling {
            sampling.second();
        }
        self.set_speeds_of(vm);
        self.agenda
            .set(Ns(self.now.0 + SAMPLING_PERIOD.0), Timer::Sampling { vm, number });
    }
}
