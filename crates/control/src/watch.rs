//! Sees what somebody else changed. What the agent set and what is in force are compared in every epoch; where they differ
//! the operator (or another tool) wants something else, and the agent steps back until it is undone.

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::Sample;
use homenode_units::{CpuSet, VcpuId, VmId};

use crate::Event;

/// Affinities that the agent set, and VMs whose affinities somebody else then changed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    expected: BTreeMap<VcpuId, CpuSet>,
    foreign: BTreeSet<VmId>,
}

impl Watch {
    /// The agent gave a vCPU this affinity.
    pub fn expect(&mut self, vm: VmId, index: u16, cpus: CpuSet) {
        self.expected.insert(VcpuId { vm, index }, cpus);
    }

    /// What the agent set is no longer known.
    pub fn forget(&mut self, vm: VmId, vcpus: &[u16]) {
        self.expected
            .retain(|vcpu, _| vcpu.vm != vm || !vcpus.contains(&vcpu.index));
    }

    /// Whether somebody else pinned vCPUs of the VM while the agent managed it.
    pub fn changed_by_other(&self, vm: VmId) -> bool {
        self.foreign.contains(&vm)
    }

    /// VMs that came and went, and affinities that are not what the agent set. A VM whose vCPUs may all run anywhere again
    /// is the agent's again: that is how an operator gives it back.
    pub fn compare(&mut self, before: Option<&Sample>, now: &Sample) -> Vec<Event> {
        let mut events = Vec::new();
        for vm in &now.vms {
            if before.is_none_or(|before| before.vm(vm.id).is_none()) {
                events.push(Event::Appeared {
                    vm: vm.id,
                    name: vm.name.clone(),
                    vcpus: vm.vcpus.len(),
                    memory_bytes: vm.memory_bytes,
                });
            }
        }
        for vm in before.map(|before| before.vms.as_slice()).unwrap_or_default() {
            if now.vm(vm.id).is_none() {
                events.push(Event::Vanished {
                    vm: vm.id,
                    name: vm.name.clone(),
                });
            }
        }
        self.expected
            .retain(|vcpu, _| now.vm(vcpu.vm).is_some_and(|vm| vm.vcpu(vcpu.index).is_some()));
        self.foreign.retain(|id| now.vm(*id).is_some());

        let all: CpuSet = now.cpus.iter().map(|cpu| cpu.id).collect();
        for vm in &now.vms {
            let anywhere = vm.settings.cpus_allowed.as_ref().unwrap_or(&all);
            let given_back = vm.vcpus.iter().all(|vcpu| vcpu.affinity == *anywhere);
            if given_back && self.foreign.remove(&vm.id) {
                self.expected.retain(|vcpu, _| vcpu.vm != vm.id);
                events.push(Event::GivenBack {
                    vm: vm.id,
                    name: vm.name.clone(),
                });
                continue;
            }
            for vcpu in &vm.vcpus {
                let Some(expected) = self.expected.get_mut(&VcpuId {
                    vm: vm.id,
                    index: vcpu.index,
                }) else {
                    continue;
                };
                if *expected != vcpu.affinity {
                    events.push(Event::ChangedByOther {
                        vm: vm.id,
                        name: vm.name.clone(),
                        vcpu: vcpu.index,
                        expected: std::mem::replace(expected, vcpu.affinity.clone()),
                        found: vcpu.affinity.clone(),
                    });
                    self.foreign.insert(vm.id);
                }
            }
        }
        events
    }
}
