//! What a VM needs of a node: CPU, memory, memory bandwidth.
//!
//! # Problem
//! Placement compares what a VM will need with what nodes have left ([TAVO, V.C]: a vector of three). A VM that just
//! started shows nothing yet; one that has run for a while is known.
//!
//! # Terms
//! - *settled*: observed running for [`Config::settle`] or longer.
//! - *size class*: VMs with the same number of vCPUs.
//!
//! # Algorithm
//! - CPU: a VM that is not settled counts with all its vCPUs, so that VMs started together do not pile up; a settled one
//!   counts with the moving average of what it used *and waited for* (what it wanted), at most its vCPUs.
//! - The host's own CPU load: the moving average of what is busy on a node and no VM's.
//! - Memory: what the guest may use, touched or not: memory that a VM has not touched yet is not free. Huge pages are counted
//!   by their size, apart from ordinary memory: neither can stand in for the other.
//! - Bandwidth (the paper is silent on a new VM's): what the operator declared; else the moving average of what was
//!   measured of this VM, in this life or an earlier one; else the median over settled VMs of its size class; else
//!   unknown. Every answer says which.
//!
//! # Properties
//! - `a_new_vm_counts_with_all_its_vcpus`
//! - `bandwidth_is_declared_else_measured_else_median`

use std::collections::BTreeMap;

use homenode_host::{HugeMemory, View};
use homenode_units::{Bytes, BytesPerSec, Ewma, NodeId, NodeSet, Ns, VmId, Weight};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::bounds::{PAUSE, SOME_SHARE};

/// What the operator may set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Observed running for this long, a VM counts with what it was measured to use.
    #[serde(with = "homenode_units::text")]
    pub settle: Ns,
    /// Weight of the newest epoch in averages, in (0, 1].
    pub average_weight: f64,
}

impl Default for Config {
    /// Half of the averages' memory is gone after about four epochs.
    fn default() -> Config {
        Config {
            settle: Ns::from_secs(30),
            average_weight: 0.16,
        }
    }
}

homenode_units::settings! { Config { settle: PAUSE, average_weight: SOME_SHARE } }

/// What is asked of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Demand {
    /// CPUs' worth of time.
    pub cpus: f64,
    /// Memory.
    pub memory_bytes: Bytes,
    /// Memory bandwidth, and how it is known.
    pub bandwidth: Option<BytesPerSec>,
    /// How the bandwidth is known.
    pub bandwidth_from: BandwidthFrom,
    /// Nodes of devices assigned to the VM: preferred.
    pub device_nodes: NodeSet,
    /// What of the memory lies in huge pages, by their size, each size once; the rest lies in ordinary ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub huge_pages: Vec<HugeMemory>,
}

impl Demand {
    /// Memory in ordinary pages.
    pub fn ordinary_bytes(&self) -> Bytes {
        let huge = self.huge_pages.iter().map(|part| part.memory_bytes.0);
        let huge = huge.fold(0, u64::saturating_add);
        self.memory_bytes.saturating_sub(Bytes(huge))
    }

    /// Takes in what another VM asks of the same nodes.
    pub fn join(&mut self, other: Demand) {
        self.cpus += other.cpus;
        self.memory_bytes += other.memory_bytes;
        self.bandwidth = match (self.bandwidth, other.bandwidth) {
            (Some(own), Some(other)) => Some(BytesPerSec(own.0.saturating_add(other.0))),
            _ => None,
        };
        for part in other.huge_pages {
            let own = self.huge_pages.iter_mut();
            match own.into_iter().find(|own| own.page_bytes == part.page_bytes) {
                Some(own) => own.memory_bytes += part.memory_bytes,
                None => self.huge_pages.push(part),
            }
        }
    }
}

/// How a VM's bandwidth is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BandwidthFrom {
    /// The operator declared it.
    Declared,
    /// Measured of this VM.
    Measured,
    /// Median over settled VMs with as many vCPUs.
    SizeClassMedian,
    /// Nobody knows.
    Unknown,
}

impl std::fmt::Display for BandwidthFrom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            BandwidthFrom::Declared => "declared",
            BandwidthFrom::Measured => "measured of it before",
            BandwidthFrom::SizeClassMedian => "median of VMs of its size",
            BandwidthFrom::Unknown => "unknown, left out",
        })
    }
}

/// What was measured of each VM, kept after it stops so that it is known when it comes back.
#[derive(Clone, Debug, Default)]
pub struct History {
    vms: BTreeMap<VmId, Record>,
    /// CPUs of each node that something else than VMs keeps busy.
    host: BTreeMap<NodeId, Ewma>,
}

#[derive(Clone, Debug)]
struct Record {
    vcpus: usize,
    observed_ns: Ns,
    is_settled: bool,
    cpus: Ewma,
    bandwidth: Ewma,
}

impl History {
    /// Takes in one epoch. Called once for each view that has rates.
    pub fn observe(&mut self, view: &View<'_>, config: &Config) {
        let weight = Weight(config.average_weight);
        let Some(rates) = view.rates else { return };
        // What a VM did that was not there a period ago is nobody's yet; it must not count as the host's own load.
        if view.vms.iter().all(|vm| vm.rates.is_some()) {
            for (node, busy) in rates.nodes.iter() {
                let vcpus = rates
                    .vms
                    .iter()
                    .flat_map(|vm| &vm.vcpus)
                    .filter(|vcpu| vcpu.node == Some(node));
                let own = busy.cpus_busy - vcpus.map(|vcpu| vcpu.running).sum::<f64>();
                self.host.entry(node).or_default().update(own.max(0.0), weight);
            }
        }
        for vm in &view.vms {
            let Some(measured) = vm.rates else { continue };
            let record = self.vms.entry(vm.sample.id).or_insert_with(|| Record {
                vcpus: 0,
                observed_ns: Ns::ZERO,
                is_settled: false,
                cpus: Ewma::default(),
                bandwidth: Ewma::default(),
            });
            record.vcpus = vm.sample.vcpus.len();
            record.observed_ns += rates.period_ns;
            record.is_settled = record.observed_ns >= config.settle;
            record.cpus.update(
                measured.vcpus.iter().map(|v| v.running + v.waited()).sum(),
                weight,
            );
            if let Some(bandwidth) = measured.bandwidth() {
                record.bandwidth.update(bandwidth.as_f64(), weight);
            }
        }
    }

    /// CPUs of a node that something else than VMs keeps busy, on average.
    pub fn host_cpus(&self, node: NodeId) -> f64 {
        self.host.get(&node).and_then(Ewma::value).unwrap_or(0.0)
    }

    /// CPUs that a VM with so many vCPUs counts with.
    pub fn cpus(&self, vm: VmId, vcpus: usize) -> f64 {
        let settled = self.vms.get(&vm).filter(|record| record.is_settled);
        settled
            .and_then(|record| record.cpus.value())
            .map_or(vcpus as f64, |cpus| cpus.min(vcpus as f64))
    }

    /// Bandwidth of a VM, and how it is known.
    pub fn bandwidth(
        &self,
        vm: Option<VmId>,
        vcpus: usize,
        declared: Option<BytesPerSec>,
    ) -> (Option<BytesPerSec>, BandwidthFrom) {
        if declared.is_some() {
            return (declared, BandwidthFrom::Declared);
        }
        let measured = |record: &Record| record.bandwidth.value().map(|b| BytesPerSec(b as u64));
        if let Some(own) = vm.and_then(|vm| self.vms.get(&vm)).and_then(measured) {
            return (Some(own), BandwidthFrom::Measured);
        }
        let mut class: Vec<BytesPerSec> = self
            .vms
            .values()
            .filter(|record| record.vcpus == vcpus && record.is_settled)
            .filter_map(measured)
            .collect();
        class.sort_unstable();
        match class.get(class.len() / 2) {
            Some(median) => (Some(*median), BandwidthFrom::SizeClassMedian),
            None => (None, BandwidthFrom::Unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Scene, vm_id};

    fn observed(seconds: u64, busy: f64, misses_per_s: u64) -> History {
        observed_by(&Config::default(), seconds, busy, misses_per_s)
    }

    fn observed_by(config: &Config, seconds: u64, busy: f64, misses_per_s: u64) -> History {
        let mut scene = Scene::four_nodes(4);
        scene
            .add_vm(1, 4, Bytes::from_gib(1), 0)
            .vcpus_busy(busy)
            .misses_per_s(misses_per_s);
        let mut history = History::default();
        for _ in 0..seconds {
            scene.with_view(|view| history.observe(view, config));
        }
        history
    }

    #[test]
    fn a_new_vm_counts_with_all_its_vcpus() {
        assert_eq!(History::default().cpus(vm_id(1), 4), 4.0);
        assert_eq!(observed(5, 0.1, 0).cpus(vm_id(1), 4), 4.0);
        let settled = observed(60, 0.1, 0).cpus(vm_id(1), 4);
        assert!((settled - 0.4).abs() < 0.01, "{settled}");
        // Its operator lets it count with what it uses sooner, or later.
        let within = |secs| Config {
            settle: Ns::from_secs(secs),
            ..Config::default()
        };
        assert!(observed_by(&within(3), 5, 0.1, 0).cpus(vm_id(1), 4) < 1.0);
        assert_eq!(observed_by(&within(90), 60, 0.1, 0).cpus(vm_id(1), 4), 4.0);
    }

    #[test]
    fn bandwidth_is_declared_else_measured_else_median() {
        let history = observed(60, 1.0, 1_000_000);
        let declared = Some(BytesPerSec(7));
        assert_eq!(
            history.bandwidth(Some(vm_id(1)), 4, declared),
            (declared, BandwidthFrom::Declared)
        );
        let (measured, from) = history.bandwidth(Some(vm_id(1)), 4, None);
        // Four vCPUs with a million misses a second each, 64 bytes a miss.
        assert_eq!(
            (measured, from),
            (Some(BytesPerSec(256_000_000)), BandwidthFrom::Measured)
        );
        assert_eq!(
            history.bandwidth(Some(vm_id(2)), 4, None),
            (measured, BandwidthFrom::SizeClassMedian)
        );
        assert_eq!(
            history.bandwidth(Some(vm_id(2)), 2, None),
            (None, BandwidthFrom::Unknown)
        );
    }
}
