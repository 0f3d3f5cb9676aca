//! What a policy reads: the host, its last sample and rates, and what the agent holds of each VM.

use homenode_machine::Machine;
use homenode_units::{CpuSet, NodeId, NodeSet, Ns};
use schemars::JsonSchema;
use serde::Serialize;

use crate::rates::{Rates, VmRates};
use crate::sample::{Immovable, Management, Sample, Version, VmSample};
use crate::topology::VirtualNode;

/// For so long after CPUs went offline or came back it is looked for changes of affinities that the kernel made: it makes them
/// later, and hosts do not look at affinities in every period.
pub const CPUS_SETTLE: Ns = Ns::from_secs(30);

/// What a policy decides from. Made anew each epoch; holds references only.
#[derive(Clone, Debug)]
pub struct View<'a> {
    /// Plans carry it back; the host refuses a plan whose version is not current.
    pub version: Version,
    /// The host's monotonic clock at the sample.
    pub at: Ns,
    /// What the host is.
    pub machine: &'a Machine,
    /// What it said.
    pub sample: &'a Sample,
    /// What happened since the sample before; `None` in the first epoch.
    pub rates: Option<&'a Rates>,
    /// CPUs that all VMs may use: online, not the host's own, not isolated, and on no node that is to be emptied.
    pub cpus: CpuSet,
    /// CPUs that the kernel keeps free, and that are as usable as those above for the VMs whose operator names them.
    pub isolated: CpuSet,
    /// Nodes that are to be emptied of VMs.
    pub drained: NodeSet,
    /// Every VM, ascending by id.
    pub vms: Vec<VmView<'a>>,
}

/// What of a host is not for VMs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Barred<'a> {
    /// CPUs that the operator keeps for the host.
    pub cpus: Option<&'a CpuSet>,
    /// Nodes that he wants to be emptied.
    pub nodes: Option<&'a NodeSet>,
}

/// One VM as a policy sees it.
#[derive(Clone, Debug)]
pub struct VmView<'a> {
    /// What the host said of it.
    pub sample: &'a VmSample,
    /// What it did since the sample before.
    pub rates: Option<&'a VmRates>,
    /// Home nodes, once it has been placed.
    pub home: Option<&'a NodeSet>,
    /// Home node on which each virtual node's memory lies, or shall, of a VM whose guest is told where it is.
    pub layout: Option<&'a [NodeId]>,
    /// Why no policy may touch its vCPUs, if none may.
    pub hands_off: Option<HandsOff>,
    /// Why no policy may touch its CPU quota, if none may.
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
    /// Somebody else changed the CPU quota that the agent had set.
    QuotaByHand,
    /// It is between two hosts: libvirt changes nothing of it meanwhile, and what it has on its way there it has there.
    Migrating,
}

impl std::fmt::Display for HandsOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            HandsOff::Ignored => "the operator opted it out",
            HandsOff::PinnedByHand => "the operator pinned its vCPUs by hand",
            HandsOff::QuotaByHand => "somebody else set its CPU quota",
            HandsOff::Migrating => "it is being migrated between hosts",
        })
    }
}

impl<'a> View<'a> {
    /// What a host is, what it said, and what is held of each VM. VMs may use CPUs that are online, which are those that the host
    /// tells of, and that are not barred.
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
        // Before the first sample nothing is known of any.
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
    /// Nodes that can be a home: they have memory, and CPUs that VMs may use.
    pub fn homes(&self) -> NodeSet {
        let memory = self.machine.home_nodes();
        let has_cpus = |node: &NodeId| !self.cpus_of(*node).is_empty();
        memory.iter().filter(has_cpus).collect()
    }

    /// Nodes whose pages belong on `home`: all others with CPUs, and those that are to be emptied. What the kernel put on a node
    /// without CPUs is its own to bring back.
    pub fn away_from(&self, home: &NodeSet) -> NodeSet {
        self.machine.home_nodes().union(&self.drained).difference(home)
    }

    /// CPUs that a VM may use of which the host says this: `None` where nothing keeps it from what all VMs may use.
    pub fn cpus_for(&self, allowed: Option<&CpuSet>) -> CpuSet {
        allowed.map_or_else(
            || self.cpus.clone(),
            |allowed| self.cpus.union(&self.isolated).intersection(allowed),
        )
    }

    /// CPUs of a node that all VMs may use.
    pub fn cpus_of(&self, node: NodeId) -> CpuSet {
        let of_node = self.machine.nodes.get(node);
        of_node.map_or_else(CpuSet::new, |of| of.cpus.intersection(&self.cpus))
    }

    /// Whether a directed pair of nodes uses less than `share` of the bandwidth of the link between them. Where use
    /// or bandwidth is unknown the link counts as quiet: absent is not busy.
    pub fn link_below(&self, from: NodeId, to: NodeId, share: f64) -> bool {
        let used = self
            .rates
            .and_then(|rates| rates.link_use(self.machine, from, to));
        used.is_none_or(|used| used < share)
    }
}

impl VmView<'_> {
    /// Why its memory must stay where it is, if it must.
    pub fn memory_fixed(&self) -> Option<&Immovable> {
        self.sample.immovable.as_ref()
    }

    /// Whether policies may act on the VM at all.
    pub fn managed(&self) -> bool {
        self.sample.settings.management == Management::Managed
    }

    /// The home node on which a vCPU finds what its guest took for local at boot; `None` where the guest is told nothing, and for
    /// a vCPU that belonged to no virtual node then.
    pub fn seat(&self, index: u16) -> Option<NodeId> {
        let belongs = |virtual_node: &VirtualNode| virtual_node.vcpus.contains(&index);
        let at = self.sample.virtual_nodes.iter().position(belongs)?;
        self.layout?.get(at).copied()
    }

    /// Node that a vCPU is confined to away from home: the nodes of its affinity, where none of them is a home node.
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
