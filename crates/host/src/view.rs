//! A policy's input: the host, its last sample and rates, and what the agent knows of each VM.

use homenode_machine::Machine;
use homenode_units::{CpuSet, NodeId, NodeSet, Ns};
use schemars::JsonSchema;
use serde::Serialize;

use crate::rates::{Rates, VmRates};
use crate::sample::{Immovable, Management, Sample, Version, VmSample};
use crate::topology::VirtualNode;

/// For this long after CPUs went offline or returned, affinities are checked for changes by the kernel. The kernel makes these
/// changes late, and hosts do not read affinities in every period.
pub const CPUS_SETTLE: Ns = Ns::from_secs(30);

/// A policy's input, built for each cycle from references only.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// Version of the view, which plans carry. The host refuses a plan whose version is not current.
    pub version: Version,
    /// The host's monotonic clock at the sample.
    pub at: Ns,
    /// The host's hardware.
    pub machine: &'a Machine,
    /// The host's sample.
    pub sample: &'a Sample,
    /// Activity since the last sample; `None` in the first cycle.
    pub rates: Option<&'a Rates>,
    /// CPUs that all VMs may use: online, not reserved for the host, not isolated, and not on a drained node.
    pub cpus: CpuSet,
    /// CPUs that the kernel isolates. VMs whose operator names them may use them like other CPUs.
    pub isolated: CpuSet,
    /// Drained nodes.
    pub drained: NodeSet,
    /// Every VM, ascending by id.
    pub vms: Vec<VmView<'a>>,
}

/// Parts of a host that VMs may not use.
#[derive(Clone, Copy, Debug, Default)]
pub struct Barred<'a> {
    /// CPUs reserved for the host.
    pub cpus: Option<&'a CpuSet>,
    /// Nodes to drain.
    pub nodes: Option<&'a NodeSet>,
}

/// One VM as a policy sees it.
#[derive(Clone, Debug)]
pub struct VmView<'a> {
    /// The host's sample of the VM.
    pub sample: &'a VmSample,
    /// The VM's activity since the last sample.
    pub rates: Option<&'a VmRates>,
    /// Home nodes; `None` until the VM has been placed.
    pub home: Option<&'a NodeSet>,
    /// Home node, present or intended, of each virtual node's memory, if the VM's guest is told its topology.
    pub layout: Option<&'a [NodeId]>,
    /// Why no policy may touch the VM's vCPUs; `None` if policies may.
    pub hands_off: Option<HandsOff>,
    /// Why no policy may touch the VM's CPU quota; `None` if policies may.
    pub quota_hands_off: Option<HandsOff>,
}

/// Why the agent leaves a VM's vCPUs or its quota alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HandsOff {
    /// The operator opted the VM out.
    Ignored,
    /// The operator pinned vCPUs by hand, before or while the agent ran.
    PinnedByHand,
    /// Another program changed the CPU quota that the agent had set.
    QuotaByHand,
    /// The VM is alone in its cache, or away from it, for a measurement of seconds ([Kyoto, section 3.2.3]).
    Isolating,
    /// The host could not read the VM for the last sample.
    Unread,
    /// The VM is migrating. Meanwhile libvirt changes nothing on it, and the target host takes over its present settings.
    Migrating,
}

impl std::fmt::Display for HandsOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            HandsOff::Ignored => "the operator opted it out",
            HandsOff::PinnedByHand => "the operator pinned its vCPUs by hand",
            HandsOff::QuotaByHand => "another program set its CPU quota",
            HandsOff::Isolating => "a measurement of seconds keeps VMs off a cache",
            HandsOff::Unread => "the host could not read it for the last sample",
            HandsOff::Migrating => "it is being migrated between hosts",
        })
    }
}

impl<'a> View<'a> {
    /// Builds a view from a host, its sample, and what the agent knows of each VM. VMs may use CPUs that are online, which means
    /// in the sample, and not barred.
    pub fn new(
        machine: &'a Machine,
        sample: &'a Sample,
        rates: Option<&'a Rates>,
        barred: Barred<'_>,
        vms: Vec<VmView<'a>>,
    ) -> View<'a> {
        let drained = barred.nodes.cloned().unwrap_or_default();
        let online: CpuSet = sample.cpus.iter().map(|cpu| cpu.id).collect();
        let mut cpus = machine.cpu_set().difference(&machine.cpus_of(&drained));
        // Before the first sample, no CPU is known to be online: do not restrict the set.
        if !online.is_empty() {
            cpus = cpus.intersection(&online);
        }
        if let Some(reserved) = barred.cpus {
            cpus = cpus.difference(reserved);
        }
        View {
            version: sample.version,
            at: sample.at,
            machine,
            sample,
            rates,
            isolated: cpus.intersection(&machine.isolated),
            cpus: cpus.difference(&machine.isolated),
            drained,
            vms,
        }
    }
}

impl View<'_> {
    /// Returns the nodes that can be a home: those with memory, and with CPUs that VMs may use.
    pub fn homes(&self) -> NodeSet {
        let memory = self.machine.home_nodes();
        let has_cpus = |node: &NodeId| !self.cpus_of(*node).is_empty();
        memory.iter().filter(has_cpus).collect()
    }

    /// Returns the nodes whose pages should move to `home`: all other nodes with CPUs, and drained nodes. Nodes without CPUs are
    /// left out, because the kernel brings back what it put there.
    pub fn away_from(&self, home: &NodeSet) -> NodeSet {
        self.machine.home_nodes().union(&self.drained).difference(home)
    }

    /// Returns the CPUs that a VM with this mask may use. `None` means no mask: all CPUs that VMs may use.
    pub fn cpus_for(&self, allowed: Option<&CpuSet>) -> CpuSet {
        allowed.map_or_else(
            || self.cpus.clone(),
            |allowed| self.cpus.union(&self.isolated).intersection(allowed),
        )
    }

    /// Returns the CPUs of a node that all VMs may use.
    pub fn cpus_of(&self, node: NodeId) -> CpuSet {
        let of_node = self.machine.nodes.get(node);
        of_node.map_or_else(CpuSet::new, |of| of.cpus.intersection(&self.cpus))
    }

    /// Returns true if a directed link between two nodes uses less than `share` of its bandwidth. A link of unknown use or
    /// bandwidth counts as quiet.
    pub fn link_below(&self, from: NodeId, to: NodeId, share: f64) -> bool {
        let used = self
            .rates
            .and_then(|rates| rates.link_use(self.machine, from, to));
        used.is_none_or(|used| used < share)
    }
}

impl VmView<'_> {
    /// Returns why the VM's memory must stay in place, if it must.
    pub fn memory_fixed(&self) -> Option<&Immovable> {
        self.sample.immovable.as_ref()
    }

    /// Returns true if policies may act on the VM at all.
    pub fn managed(&self) -> bool {
        self.sample.settings.management == Management::Managed
    }

    /// Returns the home node with the memory that was local to a vCPU at the guest's boot. `None` if the guest gets no topology,
    /// or if the vCPU belonged to no virtual node at boot.
    pub fn seat(&self, index: u16) -> Option<NodeId> {
        let belongs = |virtual_node: &VirtualNode| virtual_node.vcpus.contains(&index);
        let at = self.sample.virtual_nodes.iter().position(belongs)?;
        self.layout?.get(at).copied()
    }

    /// Returns the node away from home that a vCPU's affinity confines it to; `None` if its affinity includes a home node.
    pub fn away_node(&self, machine: &Machine, index: u16) -> Option<NodeId> {
        let home = self.home?;
        let affinity = &self.sample.vcpu(index)?.affinity;
        let mut first = None;
        for cpu in affinity.iter() {
            let Some(node) = machine.node_of(cpu) else {
                continue;
            };
            if home.contains(node) {
                return None;
            }
            first.get_or_insert(node);
        }
        first
    }
}
