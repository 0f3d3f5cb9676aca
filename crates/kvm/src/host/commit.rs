//! Commits plans: checks that what they rely on still holds, acts, and samples again.

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{
    Action, ActionError, CpuQuota, Failure, Limit, Outcome, Plan, Refusal, Sample, VcpuSample, Version,
    VmSample, VmSettings,
};
use homenode_kernel::{now, task};
use homenode_undo::{Commit, Heartbeat};
use homenode_units::{Bytes, CpuSet, VmId};

use super::KvmHost;
use crate::vm::failed;

/// What a plan relies on: two samples with equal views have equal versions.
pub(super) type Fingerprint = BTreeMap<
    VmId,
    (
        u32,
        Vec<(u16, CpuSet, Option<CpuQuota>)>,
        Option<Bytes>,
        VmSettings,
    ),
>;

impl KvmHost {
    /// Returns the version of this view; it is new if the view differs from the last.
    pub(super) fn version_of(&mut self, vms: &[VmSample]) -> Version {
        let runtime = |vm: &VmSample| self.vms.get(&vm.id).map_or(0, |known| known.run.runtime_id);
        let is_as_before = |vm: &VmSample| {
            self.fingerprint
                .get(&vm.id)
                .is_some_and(|(run, affinities, limit, settings)| {
                    let vcpus = vm.vcpus.iter().map(|v| (&v.index, &v.affinity, &v.quota));
                    *run == runtime(vm)
                        && vcpus.eq(affinities.iter().map(|(index, cpus, quota)| (index, cpus, quota)))
                        && *limit == vm.balloon.and_then(|balloon| balloon.limit)
                        && *settings == vm.settings
                })
        };
        let is_known = self.last.version != Version::default() && vms.len() == self.fingerprint.len();
        if is_known && vms.iter().all(is_as_before) {
            return self.last.version;
        }
        let view = |vm: &VmSample| {
            let vcpus = vm.vcpus.iter();
            let affinities = vcpus.map(|v| (v.index, v.affinity.clone(), v.quota)).collect();
            let limit = vm.balloon.and_then(|balloon| balloon.limit);
            (vm.id, (runtime(vm), affinities, limit, vm.settings.clone()))
        };
        self.fingerprint = vms.iter().map(view).collect();
        self.last.version = Version(self.last.version.0 + 1);
        self.last.version
    }
}

impl Commit for KvmHost {
    fn last(&self) -> &Sample {
        &self.last
    }

    /// Refuses a plan if since the sample another program pinned or bounded one of its VMs, or gave it a quota or a vCPU.
    fn refuse_changed(&mut self, plan: &Plan) -> Result<(), Refusal> {
        let usable = self.context.machine.cpu_set();
        for id in plan.vms() {
            let Some(mut vm) = self.vms.remove(&id) else {
                continue;
            };
            vm.look_soon();
            // If threads cannot be read, the VM may have ended; acting then fails and reports that.
            let is_read = self.look_at_threads(&mut vm, now()).is_ok();
            // The next sample must see the results of this plan.
            vm.look_soon();
            let is_other = |vcpu: &VcpuSample| {
                let Some(thread) = vm.vcpu_thread(vcpu.index) else {
                    return false;
                };
                // A quota that cannot be read counts as unchanged.
                let quota = vm.max_of(thread.tid).ok().flatten();
                let same_quota = quota.is_none_or(|max| max.quota() == vcpu.quota);
                thread.affinity.intersection(&usable) != vcpu.affinity || !same_quota
            };
            let limit = vm.left(&self.context).limit(&self.context.machine);
            let sampled = is_read.then(|| self.last.vm(id)).flatten();
            let is_changed = sampled.is_some_and(|sampled| {
                let is_new = |index: &u16| sampled.vcpus.iter().all(|vcpu| vcpu.index != *index);
                sampled.settings.cpus_allowed != limit
                    || sampled.vcpus.iter().any(is_other)
                    || vm.vcpu_indices().iter().any(is_new)
            });
            self.vms.insert(id, vm);
            if is_changed {
                let planned = self.last.version;
                let current = Version(planned.0 + 1);
                self.last.version = current;
                return Err(Refusal::Stale { planned, current });
            }
        }
        Ok(())
    }

    fn is_dry_run(&self) -> bool {
        self.context.journal.is_none()
    }

    fn act(&mut self, action: &Action) -> Result<Outcome, ActionError> {
        let sampled = self.last.vm(action.vm);
        let name = sampled.map(|vm| vm.name.clone()).unwrap_or_default();
        let kept = self.right.kept_from(sampled, &action.act);
        let Some(vm) = self.vms.get_mut(&action.vm) else {
            return Err(Failure::VmGone.on(&name));
        };
        if let Some(cause) = kept {
            return Err(failed(vm, vm.what(&action.act), cause));
        }
        let result = vm.act(&mut self.context, &action.act);
        // If the VM has ended, that is the reason for any failure.
        match task::is_alive(&self.context.root, vm.run.process()) {
            true => result,
            false => Err(Failure::VmGone.on(&name)),
        }
    }

    fn heartbeat(&self) -> &Heartbeat {
        &self.context.heartbeat
    }

    fn look_again(&mut self, touched: &BTreeSet<VmId>) {
        let usable = self.context.machine.cpu_set();
        let mut has_changed = false;
        for sampled in self.last.vms.iter_mut().filter(|vm| touched.contains(&vm.id)) {
            let Some(vm) = self.vms.get(&sampled.id) else {
                continue;
            };
            for vcpu in &mut sampled.vcpus {
                let Some(thread) = vm.vcpu_thread(vcpu.index) else {
                    continue;
                };
                let Ok(Some(affinity)) = task::affinity(&self.context.root, vm.run.pid, thread.tid) else {
                    continue;
                };
                let affinity = affinity.intersection(&usable);
                has_changed |= affinity != vcpu.affinity;
                vcpu.affinity = affinity;
                if let Some(max) = vm.max_of(thread.tid).ok().flatten() {
                    has_changed |= max.quota() != vcpu.quota;
                    vcpu.quota = max.quota();
                }
            }
            if let Some(balloon) = &mut sampled.balloon {
                let limit = vm.levers.limits().find_map(|limit| match limit {
                    Limit::Memory(limit) => Some(limit),
                    _ => None,
                });
                has_changed |= limit != balloon.limit;
                balloon.limit = limit;
            }
            if let Some((_, affinities, limit, _)) = self.fingerprint.get_mut(&sampled.id) {
                *limit = sampled.balloon.and_then(|balloon| balloon.limit);
                *affinities = sampled
                    .vcpus
                    .iter()
                    .map(|v| (v.index, v.affinity.clone(), v.quota))
                    .collect();
            }
        }
        if has_changed {
            self.last.version = Version(self.last.version.0 + 1);
        }
    }
}
