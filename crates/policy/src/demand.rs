//! Estimates what a VM needs from a node: CPU, memory and memory bandwidth.
//!
//! # Problem
//! Placement compares what a VM will need with what nodes have left ([TAVO, V.C]: a vector of three). A VM that has run for a
//! while can be measured; one that just started cannot.
//!
//! # Terms
//! - *settled* VM: observed running for at least [`Config::settle`].
//! - *size class*: VMs with the same number of vCPUs.
//!
//! # Algorithm
//! - CPU: a VM that is not settled counts with all its vCPUs, so that VMs which start together do not pile up on a node. A
//!   settled VM counts with the moving average of the CPU time that it used *or waited for*, at most its vCPUs.
//! - The host's own CPU load: the moving average of a node's busy CPUs, less what VMs use.
//! - Memory: all that the guest may use, because memory that a VM has not touched yet is not free. Huge pages are counted by
//!   their size, apart from ordinary memory, because neither can replace the other.
//! - Bandwidth (the paper does not cover a new VM): the first known of what the operator declared, the moving average of this
//!   VM's measurements, in this run or an earlier one, and the median over settled VMs of its size class. Else it is unknown.
//!   Every answer names its source.
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

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// A VM counts with its measured use once it was observed running for this long.
    #[serde(with = "homenode_units::text")]
    pub settle: Ns,
    /// Weight of the newest cycle in averages, in (0, 1].
    pub average_weight: f64,
}

impl Default for Config {
    /// With this weight, averages forget half of their past after about four cycles.
    fn default() -> Config {
        Config {
            settle: Ns::from_secs(30),
            average_weight: 0.16,
        }
    }
}

homenode_units::settings! { Config { settle: PAUSE, average_weight: SOME_SHARE } }

/// What a VM needs from a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Demand {
    /// CPU time, in CPUs.
    pub cpus: f64,
    /// Memory.
    pub memory_bytes: Bytes,
    /// Memory bandwidth, if known.
    pub bandwidth: Option<BytesPerSec>,
    /// Source of the bandwidth.
    pub bandwidth_from: BandwidthFrom,
    /// Nodes of the devices that are assigned to the VM; placement prefers them.
    pub device_nodes: NodeSet,
    /// Memory in huge pages, with one entry for each page size. The rest of the memory is in ordinary pages.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub huge_pages: Vec<HugeMemory>,
}

impl Demand {
    /// Returns the memory in ordinary pages.
    pub fn ordinary_bytes(&self) -> Bytes {
        let huge = self.huge_pages.iter().map(|part| part.memory_bytes.0);
        let huge = huge.fold(0, u64::saturating_add);
        self.memory_bytes.saturating_sub(Bytes(huge))
    }

    /// Adds the demand of another VM that is to live on the same nodes.
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

/// Source of a VM's bandwidth.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum BandwidthFrom {
    /// The operator declared it.
    Declared,
    /// Measured on this VM.
    Measured,
    /// Median over settled VMs with the same number of vCPUs.
    SizeClassMedian,
    /// The bandwidth is unknown.
    Unknown,
}

impl std::fmt::Display for BandwidthFrom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            BandwidthFrom::Declared => "declared",
            BandwidthFrom::Measured => "as measured earlier",
            BandwidthFrom::SizeClassMedian => "the median of VMs of its size",
            BandwidthFrom::Unknown => "unknown, and so ignored",
        })
    }
}

/// Measurements of each VM. They are kept after it stops, in case it returns.
#[derive(Clone, Debug, Default)]
pub struct History {
    vms: BTreeMap<VmId, Record>,
    /// Number of each node's CPUs that something other than VMs keeps busy.
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
    /// Records one cycle. To be called once for each view that has rates.
    pub fn observe(&mut self, view: &View<'_>, config: &Config) {
        let weight = Weight(config.average_weight);
        let Some(rates) = view.rates else { return };
        // A VM that is less than a period old has no rates yet. Its load must not count as the host's own.
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

    /// Returns the average number of a node's CPUs that something other than VMs keeps busy.
    pub fn host_cpus(&self, node: NodeId) -> f64 {
        self.host.get(&node).and_then(Ewma::value).unwrap_or(0.0)
    }

    /// Returns the number of CPUs that a VM with this many vCPUs counts with.
    pub fn cpus(&self, vm: VmId, vcpus: usize) -> f64 {
        let settled = self.vms.get(&vm).filter(|record| record.is_settled);
        settled
            .and_then(|record| record.cpus.value())
            .map_or(vcpus as f64, |cpus| cpus.min(vcpus as f64))
    }

    /// Returns the bandwidth of a VM, and its source.
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
        // The operator may let measured use count sooner, or later.
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
        // Four vCPUs, each with a million misses per second of 64 bytes.
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
