//! A domain, with what the agent knows of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use homenode_host::{Counters, CpuQuota, VcpuSample, VmSettings};
use homenode_undo::journal::{Entry, Run};
use homenode_units::{CpuSet, Ns, VmId};
use homenode_vm_settings::OperatorSettings;
use homenode_vm_settings::file::{self, FileError, Whose};

use crate::changed::{Cap, Pins};
use crate::error::CallError;
use crate::hypervisor::{Hypervisor, Listed, Pool, Vcpu};

/// How long a vCPU waited since tracing began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Waited {
    /// Time for which the vCPU wanted to run and did not, including the time for which its cap throttled it.
    pub waiting: Ns,
    /// Time for which the vCPU's cap throttled it.
    pub throttled: Ns,
}

/// A value per vCPU, by index.
pub(crate) type OfVcpus<T> = BTreeMap<u16, T>;

/// Length of the credit schedulers' accounting period, over which caps apply.
const PERIOD: Ns = Ns::from_millis(30);

/// A domain; see the module.
#[derive(Debug)]
pub(crate) struct Domain {
    /// The run of the domain that this describes.
    pub run: Run,
    /// Other domains with the same name.
    pub namesakes: Vec<VmId>,
    /// The domain's last listing.
    pub listed: Listed,
    /// The domain's pool of CPUs.
    pub pool: Pool,
    /// The domain's online vCPUs, ascending by number.
    pub vcpus: Vec<(u16, Vcpu)>,
    /// The domain's cap, in percent of one CPU; 0 for none.
    pub cap: u16,
    /// The target of the domain's balloon in KiB; `None` if the domain has no balloon.
    pub target: Option<u64>,
    /// The settings of the domain's operator, or why they cannot be read.
    pub said: Result<OperatorSettings, FileError>,
}

impl Domain {
    /// Reads a domain.
    pub(crate) fn look(
        hypervisor: &Hypervisor,
        (root, run, listed): (&Path, Run, Listed),
        pool: Pool,
        namesakes: Vec<VmId>,
    ) -> Result<Domain, CallError> {
        let vcpus = (0..listed.vcpu_count).filter_map(|at| Some((at, hypervisor.vcpu(listed.domid, at)?)));
        let vcpus = vcpus.collect();
        let cap = match pool.has_caps() {
            true => hypervisor.cap(listed.domid, &pool)?,
            false => 0,
        };
        let whose = Whose {
            vm: run.vm,
            name: &run.name,
            namesakes: &namesakes,
            keeps_uuid: false,
        };
        Ok(Domain {
            said: file::read(root, whose),
            namesakes,
            run,
            listed,
            pool,
            vcpus,
            cap,
            target: None,
        })
    }

    /// Returns what identifies the VM when its operator's settings are read.
    pub(crate) fn whose(&self) -> Whose<'_> {
        Whose {
            vm: self.run.vm,
            name: &self.run.name,
            namesakes: &self.namesakes,
            keeps_uuid: false,
        }
    }

    /// Returns the domain's cap as a quota per vCPU, the form that the host contract uses.
    pub(crate) fn quota(&self) -> Option<CpuQuota> {
        quota_of(self.cap, self.vcpus.len())
    }

    /// Returns the domain's vCPUs for a sample, with counters and waiting times if they are known.
    pub(crate) fn samples(
        &self,
        usable: &CpuSet,
        (counted, waited): (Option<&OfVcpus<Counters>>, Option<&OfVcpus<Waited>>),
    ) -> Vec<VcpuSample> {
        let usable = self.pool.cpus.intersection(usable);
        let waited = |index: &u16| waited.and_then(|waited| waited.get(index)).copied();
        let sample = |(index, vcpu): &(u16, Vcpu)| VcpuSample {
            index: *index,
            running_ns: vcpu.running,
            waiting_ns: waited(index).map(|waited| waited.waiting),
            throttled_ns: waited(index).map(|waited| waited.throttled).unwrap_or_default(),
            cpu: Some(vcpu.cpu),
            affinity: vcpu.affinity.intersection(&usable),
            quota: self.quota(),
            counters: counted.and_then(|counted| counted.get(index).copied()),
        };
        self.vcpus.iter().map(sample).collect()
    }

    /// Returns the settings of the domain's operator: those in the file, and those that follow from where the vCPUs may run apart
    /// from the agent's pins. If all vCPUs have the same CPUs, these are a limit (`cpus=` in xl's file). If they differ, the
    /// operator pinned vCPUs by hand.
    pub(crate) fn settings(&self, entry: Option<&Entry>, usable: &CpuSet) -> VmSettings {
        let ours = entry.and_then(Entry::get::<Pins>).unwrap_or_default().0;
        let all = self.pool.cpus.intersection(usable);
        let wanted = |(index, vcpu): &(u16, Vcpu)| {
            let is_ours = ours.get(index).is_some_and(|ours| ours.contains(&vcpu.affinity));
            let before = entry
                .filter(|_| is_ours)
                .and_then(|entry| entry.before.vcpus.get(index));
            let cpus = before.unwrap_or(&vcpu.affinity).intersection(&all);
            (*index, if cpus.is_empty() { all.clone() } else { cpus })
        };
        let wanted: Vec<(u16, CpuSet)> = self.vcpus.iter().map(wanted).collect();
        let different: BTreeSet<String> = wanted.iter().map(|(_, cpus)| cpus.to_string()).collect();
        let said = self.said.clone().unwrap_or_else(|_| OperatorSettings::ignored());
        let (allowed, pinned) = match (different.len(), wanted.first()) {
            (1, Some((_, cpus))) => (cpus.clone(), Vec::new()),
            _ => {
                let pinned = wanted.iter().filter(|(_, cpus)| *cpus != all);
                (all.clone(), pinned.map(|(index, _)| *index).collect())
            }
        };
        let settings = said.of_vm(Some(allowed).filter(|cpus| cpus != usable), pinned);
        let cap = entry
            .and_then(Entry::get::<Cap>)
            .filter(|cap| cap.ours.contains(&self.cap));
        VmSettings {
            quota: quota_of(cap.map_or(self.cap, |cap| cap.before), self.vcpus.len()),
            ..settings
        }
    }
}

/// Returns a domain's cap as a quota per vCPU; `None` if it has no cap.
fn quota_of(cap: u16, vcpus: usize) -> Option<CpuQuota> {
    let of_vcpu = PERIOD.0 * u64::from(cap) / 100 / vcpus.max(1) as u64;
    (cap > 0).then_some(CpuQuota {
        run_ns: Ns(of_vcpu),
        period_ns: PERIOD,
    })
}

/// Returns the cap that gives each of this many vCPUs this quota. It is in percent of one CPU, and at least 1.
pub(crate) fn cap_of(quota: CpuQuota, vcpus: usize) -> u16 {
    let most = 100 * vcpus.max(1);
    // A cap is a whole percentage. It is rounded up, so that no vCPU gets less than its due.
    let percent = (quota.share() * most as f64 - 1e-9).ceil().max(1.0);
    // A quota of all CPU time becomes a cap too, so that reading it back shows the request.
    percent.min(most as f64) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cap_gives_each_vcpu_its_share() {
        let quota = CpuQuota {
            run_ns: Ns::from_millis(6),
            period_ns: PERIOD,
        };
        for vcpus in [1, 2, 7] {
            let cap = cap_of(quota, vcpus);
            assert_eq!(usize::from(cap), 20 * vcpus);
            assert_eq!(quota_of(cap, vcpus), Some(quota));
        }
        assert_eq!(quota_of(0, 2), None);
    }

    #[test]
    fn a_share_between_two_percents_is_rounded_up_and_one_of_all_is_a_cap_too() {
        let of = |share: f64, vcpus| cap_of(CpuQuota::of(share, PERIOD), vcpus);
        assert_eq!((of(0.0001, 1), of(0.301, 1), of(0.255, 2)), (4, 31, 51));
        assert_eq!((of(1.0, 1), of(3.0, 2), of(0.999, 1)), (100, 200, 100));
    }
}
