//! Detects changes by operators and other programs. Each cycle compares the values that the agent set with those in force. If
//! they differ, the operator (or another tool) wants something else, and the agent steps back until that change is undone.

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{CPUS_SETTLE, CpuQuota, Sample, VcpuSample, VmSample};
use homenode_units::{CpuSet, Ns, VcpuId, VmId};

use crate::Event;

/// Affinities and CPU quotas that the agent set, and VMs where another program then changed them.
#[derive(Clone, Debug, Default)]
pub(crate) struct ForeignChanges {
    expected: BTreeMap<VcpuId, CpuSet>,
    vms: BTreeSet<VmId>,
    /// Quotas that the agent set, each with the end of its lease. A quota that disappears after that has expired, and was not
    /// removed.
    quotas: BTreeMap<VmId, (CpuQuota, Ns)>,
    /// Until this time, a changed affinity is the kernel's work.
    kernels_until: Ns,
    /// The quotas found in place of the agent's.
    foreign_quotas: BTreeMap<VmId, Option<CpuQuota>>,
}

impl ForeignChanges {
    /// Notes that the agent set this affinity for a vCPU.
    pub(crate) fn expect(&mut self, vm: VmId, index: u16, cpus: CpuSet) {
        self.expected.insert(VcpuId { vm, index }, cpus);
    }

    /// Forgets the affinities that the agent set for these vCPUs.
    pub(crate) fn forget(&mut self, vm: VmId, vcpus: &[u16]) {
        self.expected
            .retain(|vcpu, _| vcpu.vm != vm || !vcpus.contains(&vcpu.index));
    }

    /// Forgets all pins of a VM that loses its home: its vCPUs then run where they did before the agent pinned them.
    pub(crate) fn forget_pins(&mut self, vm: VmId) {
        self.expected.retain(|vcpu, _| vcpu.vm != vm);
    }

    /// Returns true if another program pinned vCPUs of the VM while the agent managed it.
    pub(crate) fn changed_by_other(&self, vm: VmId) -> bool {
        self.vms.contains(&vm)
    }

    /// Notes that the agent holds a VM to this quota until the lease ends.
    pub(crate) fn expect_quota(&mut self, vm: VmId, quota: CpuQuota, until: Ns) {
        self.quotas.insert(vm, (quota, until));
    }

    /// Notes that the agent holds a VM to no quota, or to an unknown one.
    pub(crate) fn forget_quota(&mut self, vm: VmId) {
        self.quotas.remove(&vm);
    }

    /// Returns true if another program changed the quota that the agent had set.
    pub(crate) fn quota_changed_by_other(&self, vm: VmId) -> bool {
        self.foreign_quotas.contains_key(&vm)
    }

    /// Lets the agent decide on a VM's quota again, because the operator wants that.
    pub(crate) fn give_back_quota(&mut self, vm: VmId) {
        self.foreign_quotas.remove(&vm);
    }

    /// Finds quotas that differ from what the agent set. When the foreign quota is removed, the agent manages the VM's quota
    /// again. If the foreign change was to remove the agent's quota, the operator wants none, and only
    /// [`ForeignChanges::give_back_quota`] ends that.
    fn compare_quotas(&mut self, now: &Sample, events: &mut Vec<Event>) {
        self.quotas
            .retain(|id, (_, until)| *until > now.at && now.vm(*id).is_some());
        self.foreign_quotas.retain(|id, _| now.vm(*id).is_some());
        let of = |vm: &VmSample| vm.vcpus.first().and_then(|vcpu| vcpu.quota);
        for vm in &now.vms {
            if let Some((expected, _)) = self.quotas.get(&vm.id).copied()
                && vm.vcpus.iter().any(|vcpu| vcpu.quota != Some(expected))
            {
                let found = of(vm);
                self.quotas.remove(&vm.id);
                self.foreign_quotas.insert(vm.id, found);
                events.push(Event::QuotaChangedByOther {
                    vm: vm.id,
                    name: vm.name.clone(),
                    expected,
                    found,
                });
            } else if of(vm).is_none() && self.foreign_quotas.get(&vm.id).is_some_and(Option::is_some) {
                self.foreign_quotas.remove(&vm.id);
                events.push(Event::QuotaGivenBack {
                    vm: vm.id,
                    name: vm.name.clone(),
                });
            }
        }
    }

    /// Finds VMs that appeared and vanished, and affinities and quotas that differ from what the agent set. If all vCPUs of a VM
    /// may run anywhere again, the agent manages it again; that is how an operator returns it. Offline CPUs do not count.
    pub(crate) fn compare(&mut self, before: Option<&Sample>, now: &Sample) -> Vec<Event> {
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
        self.vms.retain(|id| now.vm(*id).is_some());

        self.compare_quotas(now, &mut events);
        let online = |sample: &Sample| -> CpuSet { sample.cpus.iter().map(|cpu| cpu.id).collect() };
        let all = online(now);
        // When CPUs go offline or come back, the kernel itself changes affinities: no operator wanted that.
        if before.is_some_and(|before| online(before) != all) {
            self.kernels_until = now.at + CPUS_SETTLE;
        }
        let is_kernels = now.at < self.kernels_until;
        for vm in &now.vms {
            let anywhere = vm.settings.cpus_allowed.as_ref().unwrap_or(&all);
            let anywhere = anywhere.intersection(&all);
            let may_all = |vcpu: &VcpuSample| vcpu.affinity.intersection(&all) == anywhere;
            let given_back = vm.vcpus.iter().all(may_all);
            if given_back && self.vms.remove(&vm.id) {
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
                if *expected != vcpu.affinity && is_kernels {
                    expected.clone_from(&vcpu.affinity);
                } else if *expected != vcpu.affinity {
                    events.push(Event::ChangedByOther {
                        vm: vm.id,
                        name: vm.name.clone(),
                        vcpu: vcpu.index,
                        expected: std::mem::replace(expected, vcpu.affinity.clone()),
                        found: vcpu.affinity.clone(),
                    });
                    self.vms.insert(vm.id);
                }
            }
        }
        events
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_host::CpuSample;
    use homenode_units::{Bytes, NodeSet};

    const VM: VmId = VmId(7);

    fn quota(share: f64) -> CpuQuota {
        CpuQuota::of(share, Ns::from_millis(30))
    }

    /// Returns a sample at this second, with one VM of one vCPU that has this quota.
    fn sample(seconds: u64, quota: Option<CpuQuota>) -> Sample {
        let vcpu = VcpuSample {
            quota,
            ..VcpuSample::default()
        };
        let vm = VmSample {
            vcpus: vec![vcpu],
            memory_bytes: Bytes::from_gib(1),
            ..VmSample::new(VM, "seven")
        };
        Sample {
            at: Ns::from_secs(seconds),
            vms: vec![vm],
            ..Sample::default()
        }
    }

    fn events(foreign: &mut ForeignChanges, now: &Sample) -> Vec<Event> {
        foreign.compare(Some(now), now)
    }

    /// Returns a sample of a host with these CPUs, and one VM of one vCPU.
    fn on_cpus(online: &str, affinity: &str) -> Sample {
        let online: CpuSet = online.parse().unwrap();
        let mut sample = sample(1, None);
        sample.cpus = online
            .iter()
            .map(|id| CpuSample {
                id,
                busy_ns: Ns::ZERO,
            })
            .collect();
        sample.vms[0].vcpus[0].affinity = affinity.parse().unwrap();
        sample
    }

    #[test]
    fn what_the_kernel_makes_of_affinities_when_cpus_go_offline_is_nobodys_doing() {
        let mut foreign = ForeignChanges::default();
        foreign.expect(VM, 0, "2-3".parse().unwrap());
        let mut before = on_cpus("0-3", "2-3");
        for (online, affinity) in [("0-2", "2-3"), ("0-1", "0-1"), ("0-2", "0-2"), ("0-3", "0-2")] {
            let now = on_cpus(online, affinity);
            assert_eq!(foreign.compare(Some(&before), &now), [], "{online}");
            before = now;
        }
        assert!(!foreign.changed_by_other(VM));
        // After that time it is a foreign change.
        let mut later = on_cpus("0-3", "1");
        later.at = before.at + CPUS_SETTLE;
        let said = foreign.compare(Some(&before), &later);
        assert!(matches!(&said[..], [Event::ChangedByOther { .. }]) && foreign.changed_by_other(VM));
    }

    #[test]
    fn a_quota_that_somebody_else_changed_is_said_once_and_theirs_until_they_remove_it() {
        let mut foreign = ForeignChanges::default();
        foreign.expect_quota(VM, quota(0.1), Ns::from_secs(100));
        assert_eq!(events(&mut foreign, &sample(1, Some(quota(0.1)))), []);
        let theirs = sample(2, Some(quota(0.7)));
        let said = events(&mut foreign, &theirs);
        assert!(
            matches!(&said[..], [Event::QuotaChangedByOther { found: Some(found), .. }] if *found == quota(0.7)),
            "{said:?}"
        );
        assert!(foreign.quota_changed_by_other(VM));
        assert_eq!(events(&mut foreign, &theirs), []);
        let said = events(&mut foreign, &sample(3, None));
        assert!(matches!(&said[..], [Event::QuotaGivenBack { .. }]), "{said:?}");
        assert!(!foreign.quota_changed_by_other(VM));
    }

    #[test]
    fn a_quota_that_somebody_else_removed_stays_removed_until_asked_for() {
        let mut foreign = ForeignChanges::default();
        foreign.expect_quota(VM, quota(0.1), Ns::from_secs(100));
        let said = events(&mut foreign, &sample(1, None));
        assert!(matches!(
            &said[..],
            [Event::QuotaChangedByOther { found: None, .. }]
        ));
        assert_eq!(events(&mut foreign, &sample(2, None)), []);
        assert!(foreign.quota_changed_by_other(VM));
        foreign.give_back_quota(VM);
        assert!(!foreign.quota_changed_by_other(VM));
    }

    #[test]
    fn a_lifted_home_is_forgotten_and_its_pins_are_nobody_elses_doing() {
        use homenode_host::{Act, Lever, Outcome};
        let cpus = |list: &str| list.parse::<CpuSet>().expect("CPUs");
        let on = |list: &str| {
            let mut sample = sample(1, None);
            sample.vms[0].vcpus[0].affinity = cpus(list);
            sample
        };
        let nodes = NodeSet::one(homenode_units::NodeId(1));
        for (outcome, is_homed) in [(Outcome::Done, false), (Outcome::DryRun, false), (failed(), true)] {
            let mut control = crate::Control::default();
            let set_home = Act::SetHome { nodes: nodes.clone() }.on(VM);
            let pin = Act::PinVcpus {
                vcpus: vec![0],
                cpus: cpus("4-7"),
            }
            .on(VM);
            for action in [set_home, pin] {
                control.remember(&action, &Outcome::Done, Ns::ZERO);
            }
            assert_eq!(events(&mut control.foreign.clone(), &on("0-7")).len(), 1);
            let lever = Lever::Home;
            control.remember(&Act::Lift { lever }.on(VM), &outcome, Ns::ZERO);
            assert_eq!(events(&mut control.foreign, &on("0-7")), []);
            assert_eq!(control.homes.contains_key(&VM), is_homed, "{outcome:?}");
        }
    }

    #[test]
    fn what_a_host_gives_back_of_a_vm_that_is_opted_out_is_nobody_elses_doing() {
        use homenode_host::{Act, Management, Outcome};
        let machine = homenode_machine_files::preset("r910").expect("a preset");
        let mut control = crate::Control::default();
        let cpus = |list: &str| list.parse::<CpuSet>().expect("CPUs");
        let pin = Act::PinVcpus {
            vcpus: vec![0],
            cpus: cpus("2-3"),
        };
        let nodes = NodeSet::one(homenode_units::NodeId(1));
        for act in [Act::SetHome { nodes }, pin] {
            control.remember(&act.on(VM), &Outcome::Done, Ns::ZERO);
        }
        control.foreign.expect_quota(VM, quota(0.1), Ns::from_secs(100));
        let at = |seconds, management| {
            let mut sample = sample(seconds, None);
            sample.vms[0].vcpus[0].affinity = cpus("0-3");
            sample.vms[0].settings.management = management;
            sample
        };
        for (seconds, management) in [(1, Management::Ignored), (2, Management::Managed)] {
            control.begin(&machine, at(seconds, management));
        }
        assert!(!control.foreign.changed_by_other(VM) && !control.foreign.quota_changed_by_other(VM));
    }

    fn failed() -> homenode_host::Outcome {
        homenode_host::Outcome::Failed(homenode_host::Failure::VmGone.on("seven"))
    }

    #[test]
    fn a_quota_that_ends_with_its_lease_is_nobodys_doing() {
        let mut foreign = ForeignChanges::default();
        foreign.expect_quota(VM, quota(0.1), Ns::from_secs(5));
        assert_eq!(events(&mut foreign, &sample(5, None)), []);
        foreign.expect_quota(VM, quota(0.1), Ns::from_secs(50));
        foreign.forget_quota(VM);
        assert_eq!(events(&mut foreign, &sample(6, None)), []);
    }
}
