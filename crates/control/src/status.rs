//! One picture of the host for everybody who shows it: tables, JSON, the agent's socket.

use std::collections::BTreeMap;

use homenode_host::{
    CountedBy, CpuQuota, KernelSettings, Mode, Published, Rates, Sample, VirtualNode, VmRates, VmSample,
};
use homenode_machine::Machine;
use homenode_policy::memory::caution;
use homenode_policy::overcommit;
use homenode_policy::permits::{self, Account, Standing};
use homenode_policy::placement::{NodeLeft, Supply};
use homenode_policy::topology_feed;
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, NodeId, NodeMap, NodeSet, Ns, Pages, Permit, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// The host's monotonic clock.
    pub at_ns: Ns,
    /// Every node, ascending.
    pub nodes: Vec<NodeStatus>,
    /// Traffic between nodes, where counted.
    pub links: Vec<LinkStatus>,
    /// Every VM, by name.
    pub vms: Vec<VmStatus>,
    /// How much longer nothing is changed; `None` where the agent is not paused.
    #[serde(default)]
    pub paused_for_ns: Option<Ns>,
    /// What the host's kernel does with memory by itself.
    #[serde(default)]
    pub kernel: KernelSettings,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeStatus {
    /// Which.
    pub node: NodeId,
    /// Usable CPUs.
    pub cpus: usize,
    /// CPUs busy over the last period; `None` before there are two samples.
    pub cpus_busy: Option<f64>,
    /// vCPUs waiting over the last period.
    pub vcpus_waiting: Option<f64>,
    /// Memory of the node.
    pub memory_bytes: Bytes,
    /// Of it, free or reclaimable.
    pub memory_free_bytes: Bytes,
    /// Memory traffic, where counted.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// What the controllers can sustain, where known.
    pub bandwidth_max_bytes_per_s: Option<BytesPerSec>,
    /// What a VM that does not run yet could get here; `None` where VMs can have no home.
    #[serde(default)]
    pub headroom: Option<Headroom>,
    /// Whether it is to be empty ([`crate::Control::drain`]).
    #[serde(default)]
    pub is_drained: bool,
}

/// What a VM that does not run yet could get: what is left beside what was measured, and what is promised and not used yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Headroom {
    /// CPUs.
    pub cpus: f64,
    /// Memory.
    pub memory_bytes: Bytes,
    /// Bandwidth of the controllers, where that is known of all nodes.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
}

impl From<NodeLeft> for Headroom {
    fn from(left: NodeLeft) -> Headroom {
        Headroom {
            cpus: left.cpus,
            memory_bytes: left.memory,
            bandwidth_bytes_per_s: left.bandwidth,
        }
    }
}

/// Traffic from one node to another.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkStatus {
    /// Where data comes from.
    pub from: NodeId,
    /// Where it goes.
    pub to: NodeId,
    /// Data rate over the last period.
    pub bandwidth_bytes_per_s: BytesPerSec,
    /// Share of what the link can sustain, where known.
    pub busy: Option<f64>,
}

/// One VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VmStatus {
    /// Name.
    pub name: String,
    /// UUID.
    pub id: VmId,
    /// Home nodes; `None` for a VM that is free, where the kernel puts it.
    pub home: Option<NodeSet>,
    /// How many of its vCPUs last ran on each node.
    pub vcpus_by_node: Vec<NodeVcpus>,
    /// Memory policy in force.
    pub memory_policy: MemoryPolicy,
    /// Memory policy that the operator chose, if he did.
    pub memory_policy_chosen: Option<MemoryPolicy>,
    /// Who samples which nodes use its pages, where its memory policy wants to know.
    pub pages_sampled_by: Option<CountedBy>,
    /// What the operator should know of the policy that he chose.
    pub memory_policy_caution: Option<String>,
    /// Why its memory stays where it is, if it does.
    pub memory_fixed: Option<String>,
    /// Touched pages on each node, where known.
    pub pages_by_node: Option<Vec<NodePages>>,
    /// Memory that the guest may use.
    pub memory_bytes: Bytes,
    /// CPUs used over the last period.
    pub cpus_used: Option<f64>,
    /// vCPUs that waited over the last period, where the host can tell.
    pub vcpus_waiting: Option<f64>,
    /// Who counts its LLC misses, if anybody does.
    pub counted_by: Option<CountedBy>,
    /// LLC misses over references.
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that were local.
    pub local_access_ratio: Option<f64>,
    /// Memory traffic over the last period, by its LLC misses; `None` where they are not counted.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Which controllers serve it, an estimate: by its accesses where they are counted, else by where its pages are.
    pub traffic_by_node: Option<Vec<NodeTraffic>>,
    /// Why its vCPUs are left alone, if they are.
    pub left_alone: Option<String>,
    /// How far decisions about it go, unless its policy's go less far.
    pub mode: Mode,
    /// How far its operator lets them go, if he said so.
    pub mode_chosen: Option<Mode>,
    /// What it booked, and how it kept it.
    pub permit: PermitStatus,
    /// How much memory it has of what it could have.
    pub memory: MemoryStatus,
    /// What its guest sees of nodes, and is told of them.
    pub topology: TopologyStatus,
}

/// vCPUs on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeVcpus {
    /// Which node.
    pub node: NodeId,
    /// How many.
    pub vcpus: usize,
}

/// Pages on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodePages {
    /// Which node.
    pub node: NodeId,
    /// How many, of 4 KiB.
    pub pages: Pages,
}

/// Memory traffic on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeTraffic {
    /// Whose controllers.
    pub node: NodeId,
    /// How much.
    pub bytes_per_s: BytesPerSec,
}

/// How a VM keeps its permit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PermitStatus {
    /// What it booked, if it did.
    pub permit: Option<Permit>,
    /// What it caused per slice in the last period: LLC misses, or bytes where bandwidth is booked.
    pub units_per_slice: Option<u64>,
    /// UNDER or OVER.
    pub standing: Option<Standing>,
    /// What its account holds; below zero what it owes.
    pub balance_units: Option<i64>,
    /// How often it went OVER.
    pub punished_count: u32,
    /// CPU quota in force on its vCPUs, whoever set it.
    pub quota: Option<CpuQuota>,
    /// Why its pollution is not known, if it is not.
    pub unmetered: Option<String>,
}

impl PermitStatus {
    /// As the sample and the policy's memory have it.
    pub(crate) fn of(vm: &VmSample, state: &permits::State) -> PermitStatus {
        let account = state.account(vm.id);
        let conduct = state.conduct(vm.id);
        PermitStatus {
            permit: vm.settings.permit,
            units_per_slice: conduct.and_then(|conduct| conduct.units_per_slice),
            standing: account.map(Account::standing),
            balance_units: account.map(Account::balance_units),
            punished_count: account.map_or(0, Account::punished_count),
            quota: vm.vcpus.first().and_then(|vcpu| vcpu.quota),
            unmetered: conduct.and_then(|conduct| conduct.unmetered.map(|why| why.to_string())),
        }
    }
}

/// How much memory a VM has, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryStatus {
    /// What its operator gave it; `None` where it has no balloon.
    pub maximum_bytes: Option<Bytes>,
    /// What the agent left it, while that is less.
    pub limit_bytes: Option<Bytes>,
    /// How little its operator lets it be left with, if the agent may take memory.
    pub floor_bytes: Option<Bytes>,
    /// What it needs, where that is known.
    pub need_bytes: Option<Bytes>,
    /// What its guest says that it could spare.
    pub usable_bytes: Option<Bytes>,
    /// Why it has what it has.
    pub why: Option<String>,
}

impl MemoryStatus {
    /// As the sample and the policy's memory have it.
    pub(crate) fn of(vm: &VmSample, state: &overcommit::State) -> MemoryStatus {
        let standing = state.standing(vm.id);
        let why = standing.map(|standing| standing.why.clone());
        MemoryStatus {
            maximum_bytes: vm.balloon.map(|balloon| balloon.maximum),
            limit_bytes: vm.balloon.and_then(|balloon| balloon.limit),
            floor_bytes: vm.settings.memory_floor,
            need_bytes: standing.and_then(|standing| standing.need_bytes),
            usable_bytes: vm.balloon.and_then(|balloon| balloon.guest?.usable),
            why: why.filter(|why| !why.is_empty()),
        }
    }
}

/// What a VM's guest sees of nodes, and what it is told.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TopologyStatus {
    /// The nodes that it sees, by number; none where it sees one.
    pub virtual_nodes: Vec<VirtualNodeStatus>,
    /// What it was told last.
    #[serde(rename = "told")]
    pub published: Option<Published>,
    /// How long ago.
    #[serde(rename = "told_age_ns")]
    pub published_age_ns: Option<Ns>,
    /// Virtual node that it takes each vCPU to be on since, by index.
    pub vcpus_believed_on: Vec<usize>,
    /// Why it is told nothing, if so.
    pub why_not: Option<String>,
}

/// A node as a guest sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VirtualNodeStatus {
    /// Its vCPUs as the guest booted.
    pub vcpus: Vec<u16>,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// The home node that is to hold all of it, once the VM has a home.
    pub home: Option<NodeId>,
    /// Where it lies, where known.
    pub pages_by_node: Option<Vec<NodePages>>,
}

impl TopologyStatus {
    /// As the sample and the layout have it.
    pub(crate) fn of(machine: &Machine, vm: &VmSample, now: Ns, layout: Option<&[NodeId]>) -> TopologyStatus {
        let published = vm.published.as_ref();
        let believed = |published: &Published| {
            let at_boot = |vcpu: usize| {
                let has = |seen: &VirtualNode| seen.vcpus.iter().any(|own| usize::from(*own) == vcpu);
                vm.virtual_nodes.iter().position(has).unwrap_or(0)
            };
            let vcpus = 0..published.topology.vcpus.len();
            vcpus
                .map(|vcpu| published.topology.virtual_node(machine, vcpu, at_boot(vcpu)))
                .collect()
        };
        TopologyStatus {
            virtual_nodes: virtual_nodes(vm, layout),
            published: published.cloned(),
            published_age_ns: published.map(|published| now.saturating_sub(published.at)),
            vcpus_believed_on: published.map(believed).unwrap_or_default(),
            why_not: topology_feed::why_not(vm),
        }
    }
}

/// What the agent knows of a VM beyond what the host says.
pub(crate) struct Known {
    pub home: Option<NodeSet>,
    pub left_alone: Option<String>,
    pub mode: Mode,
    pub permit: PermitStatus,
    pub memory: MemoryStatus,
    pub topology: TopologyStatus,
}

impl Status {
    /// The picture of a sample, its rates, what is left, and what the agent knows of each VM.
    pub(crate) fn new(
        machine: &Machine,
        (sample, rates): (&Sample, Option<&Rates>),
        supply: &Supply,
        known: impl Fn(&VmSample) -> Known,
    ) -> Status {
        let nodes = machine.nodes.iter().map(|(id, node)| {
            let now = sample.nodes.get(id).cloned().unwrap_or_default();
            let over = rates.and_then(|rates| rates.nodes.get(id));
            NodeStatus {
                node: id,
                cpus: node.cpus.len(),
                cpus_busy: over.map(|over| over.cpus_busy),
                vcpus_waiting: over.map(|over| over.vcpus_waiting),
                memory_bytes: now.memory_total_bytes,
                memory_free_bytes: now.memory_free_bytes,
                bandwidth_bytes_per_s: over.and_then(|over| over.bandwidth),
                bandwidth_max_bytes_per_s: node.memory_bandwidth,
                headroom: supply.left().find(|left| left.node == id).map(Headroom::from),
                is_drained: false,
            }
        });
        let mut vms: Vec<VmStatus> = sample
            .vms
            .iter()
            .map(|vm| {
                let known = known(vm);
                let over = rates.and_then(|rates| rates.vm(vm.id));
                let is_counted = vm.vcpus.iter().any(|vcpu| vcpu.counters.is_some());
                VmStatus {
                    name: vm.name.clone(),
                    id: vm.id,
                    home: known.home,
                    vcpus_by_node: vcpus_by_node(machine, vm),
                    pages_by_node: vm.pages.as_ref().map(pages_by_node),
                    memory_policy: vm.memory_policy,
                    memory_policy_chosen: vm.settings.memory_policy,
                    pages_sampled_by: vm.page_uses.as_ref().map(|_| sample.counted_by),
                    memory_policy_caution: vm.settings.memory_policy.and_then(|policy| caution(vm, policy)),
                    memory_fixed: vm.immovable.as_ref().map(ToString::to_string),
                    memory_bytes: vm.memory_bytes,
                    cpus_used: over.map(|over| over.cpus_used),
                    vcpus_waiting: over.and_then(|over| over.vcpus.iter().map(|vcpu| vcpu.waiting).sum()),
                    counted_by: is_counted.then_some(sample.counted_by),
                    llc_miss_rate: over.and_then(|over| over.llc_miss_rate),
                    local_access_ratio: over.and_then(|over| over.local_access_ratio),
                    bandwidth_bytes_per_s: over.and_then(VmRates::bandwidth),
                    traffic_by_node: over
                        .and_then(|over| over.traffic_by_node(machine, vm))
                        .map(|traffic| traffic_by_node(&traffic)),
                    left_alone: known.left_alone,
                    mode: known.mode,
                    mode_chosen: vm.settings.mode,
                    permit: known.permit,
                    memory: known.memory,
                    topology: known.topology,
                }
            })
            .collect();
        vms.sort_by(|a, b| a.name.cmp(&b.name));
        Status {
            at_ns: sample.at,
            nodes: nodes.collect(),
            links: links(machine, rates),
            vms,
            paused_for_ns: None,
            kernel: sample.kernel,
        }
    }
}

impl Status {
    /// VMs that fill the controllers of a node, those that fill them most first; without those that do not.
    pub fn fillers(&self, node: NodeId) -> Vec<(&VmStatus, BytesPerSec)> {
        let on = |vm: &VmStatus| {
            let traffic = vm.traffic_by_node.iter().flatten();
            traffic
                .filter(|on| on.node == node)
                .map(|on| on.bytes_per_s)
                .max()
        };
        let mut fillers: Vec<_> = self.vms.iter().filter_map(|vm| Some((vm, on(vm)?))).collect();
        fillers.sort_by_key(|(_, bytes_per_s)| std::cmp::Reverse(*bytes_per_s));
        fillers
    }
}

/// Traffic between nodes.
pub(crate) fn links(machine: &Machine, rates: Option<&Rates>) -> Vec<LinkStatus> {
    let counted = rates
        .iter()
        .flat_map(|rates| rates.links.iter().map(move |link| (rates, link)));
    let links = counted.map(|(rates, link)| LinkStatus {
        from: link.from,
        to: link.to,
        bandwidth_bytes_per_s: link.bandwidth,
        busy: rates.link_use(machine, link.from, link.to),
    });
    links.collect()
}

/// The nodes that a VM's guest sees, with the home of each one's memory.
pub(crate) fn virtual_nodes(vm: &VmSample, layout: Option<&[NodeId]>) -> Vec<VirtualNodeStatus> {
    let virtual_nodes = vm.virtual_nodes.iter().enumerate();
    let virtual_nodes = virtual_nodes.map(|(at, seen)| VirtualNodeStatus {
        vcpus: seen.vcpus.clone(),
        memory_bytes: seen.memory_bytes,
        home: layout.and_then(|nodes| nodes.get(at).copied()),
        pages_by_node: seen.pages.as_ref().map(pages_by_node),
    });
    virtual_nodes.collect()
}

pub(crate) fn pages_by_node(pages: &NodeMap<Pages>) -> Vec<NodePages> {
    pages
        .iter()
        .map(|(node, pages)| NodePages { node, pages: *pages })
        .collect()
}

/// Nodes without any are left out.
pub(crate) fn traffic_by_node(traffic: &NodeMap<BytesPerSec>) -> Vec<NodeTraffic> {
    let some = traffic.iter().filter(|(_, bytes_per_s)| bytes_per_s.0 > 0);
    let of = |(node, bytes_per_s): (NodeId, &BytesPerSec)| NodeTraffic {
        node,
        bytes_per_s: *bytes_per_s,
    };
    some.map(of).collect()
}

pub(crate) fn vcpus_by_node(machine: &Machine, vm: &VmSample) -> Vec<NodeVcpus> {
    let mut on: BTreeMap<NodeId, usize> = BTreeMap::new();
    for node in vm.vcpus.iter().filter_map(|vcpu| machine.node_of(vcpu.cpu?)) {
        *on.entry(node).or_default() += 1;
    }
    on.into_iter()
        .map(|(node, vcpus)| NodeVcpus { node, vcpus })
        .collect()
}
