//! One picture of the host that all views share: tables, JSON, the agent's socket.

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
use homenode_policy::trial;
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, NodeId, NodeMap, NodeSet, Ns, Pages, Permit, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::migrations::Migrations;

/// The host at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Status {
    /// The host's monotonic clock.
    pub at_ns: Ns,
    /// Every node, ascending.
    pub nodes: Vec<NodeStatus>,
    /// Traffic between nodes, if counted.
    pub links: Vec<LinkStatus>,
    /// Every VM, in the order of names.
    pub vms: Vec<VmStatus>,
    /// How much longer the pause lasts; `None` if the agent is not paused.
    #[serde(default)]
    pub paused_for_ns: Option<Ns>,
    /// How the host's kernel manages memory by itself.
    #[serde(default)]
    pub kernel: KernelSettings,
}

/// One node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct NodeStatus {
    /// The node.
    pub node: NodeId,
    /// Usable CPUs.
    pub cpus: usize,
    /// CPUs busy over the last period; `None` before there are two samples.
    pub cpus_busy: Option<f64>,
    /// vCPUs waiting over the last period.
    pub vcpus_waiting: Option<f64>,
    /// Memory of the node.
    pub memory_bytes: Bytes,
    /// Part of the node's memory that is free or reclaimable.
    pub memory_free_bytes: Bytes,
    /// Used memory of the node that is no VM's guest memory: of the kernel, its caches that cannot be dropped, and all processes,
    /// QEMU's own memory included. `None` if it is not known where some VM's memory is.
    #[serde(default)]
    pub memory_outside_vms_bytes: Option<Bytes>,
    /// Memory traffic, if counted.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Rate that the node's controllers can sustain, if known.
    pub bandwidth_max_bytes_per_s: Option<BytesPerSec>,
    /// Resources that a further VM could get here; `None` if the node cannot be a home.
    #[serde(default)]
    pub headroom: Option<Headroom>,
    /// Whether the node is being drained ([`crate::Control::drain`]).
    #[serde(default)]
    pub is_drained: bool,
}

/// Resources left for a further VM, after measured use and after reservations of VMs that do not run yet.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Headroom {
    /// CPUs.
    pub cpus: f64,
    /// Memory.
    pub memory_bytes: Bytes,
    /// Bandwidth of the nodes' controllers, if known for all nodes.
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
    /// Node that data comes from.
    pub from: NodeId,
    /// Node that data goes to.
    pub to: NodeId,
    /// Data rate over the last period.
    pub bandwidth_bytes_per_s: BytesPerSec,
    /// Share of what the link can sustain, if known.
    pub busy: Option<f64>,
}

/// One VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VmStatus {
    /// Name.
    pub name: String,
    /// UUID.
    pub id: VmId,
    /// Home nodes; `None` for an unplaced VM: the kernel decides where it runs.
    pub home: Option<NodeSet>,
    /// Number of the VM's vCPUs that last ran on each node.
    pub vcpus_by_node: Vec<NodeVcpus>,
    /// Memory policy in force.
    pub memory_policy: MemoryPolicy,
    /// Memory policy that the operator chose, if any.
    pub memory_policy_chosen: Option<MemoryPolicy>,
    /// The source of samples that show which nodes use the VM's pages, if its memory policy needs them.
    pub pages_sampled_by: Option<CountedBy>,
    /// Caution about the policy that the operator chose.
    pub memory_policy_caution: Option<String>,
    /// Why the VM's memory stays where it is, if it does.
    pub memory_fixed: Option<String>,
    /// Touched pages on each node, if known.
    pub pages_by_node: Option<Vec<NodePages>>,
    /// Memory that the guest may use.
    pub memory_bytes: Bytes,
    /// CPUs used over the last period.
    pub cpus_used: Option<f64>,
    /// vCPUs that waited for a CPU over the last period, if the host can tell.
    pub vcpus_waiting: Option<f64>,
    /// The source of LLC miss counts, if there is one.
    pub counted_by: Option<CountedBy>,
    /// Instructions per second of all its vCPUs over the last period; `None` if they are not counted.
    #[serde(default)]
    pub instructions_per_s: Option<f64>,
    /// Unhalted cycles per instruction over the last period; `None` if they are not counted, or the VM ran none.
    #[serde(default)]
    pub cycles_per_instruction: Option<f64>,
    /// The VM's speed over the last period: instructions per second of CPU time that it wanted (ran, waited, or was throttled).
    /// Unlike `instructions_per_s` it does not grow with the guest's work. `None` if instructions are not counted, or the VM
    /// wanted less than a tenth of a CPU.
    #[serde(default)]
    pub instructions_per_cpu_s: Option<f64>,
    /// The VM's usual speed, in instructions per second of CPU time that it wanted: the median of its last hour at work. `None`
    /// until this agent has seen it at work for a minute.
    #[serde(default)]
    pub instructions_per_cpu_s_usual: Option<f64>,
    /// The VM's speed divided by its usual speed: 1 if it is as fast as usual, less if it is slower. `None` if one of these is
    /// not known.
    #[serde(default)]
    pub speed_ratio: Option<f64>,
    /// CPU time that the VM saved through changes of its home, as trials measured them: what it did since then would have taken
    /// that much longer. Counted since this agent first saw the VM; `None` until one of its trials is judged.
    #[serde(default)]
    pub time_gained_ns: Option<Ns>,
    /// CPU time that the VM lost through changes of its home while they made it slower, trials that were undone included. `None`
    /// as for `time_gained_ns`.
    #[serde(default)]
    pub time_lost_ns: Option<Ns>,
    /// LLC misses divided by references.
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that were local.
    pub local_access_ratio: Option<f64>,
    /// Memory traffic over the last period, estimated from LLC misses; `None` if these are not counted.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Estimated traffic by the node of the controllers: from the VM's accesses if they are counted, else from where its pages
    /// are.
    pub traffic_by_node: Option<Vec<NodeTraffic>>,
    /// Why the VM's vCPUs are left alone, if they are.
    pub left_alone: Option<String>,
    /// Mode of decisions about the VM, unless the policy's own mode is more careful.
    pub mode: Mode,
    /// Mode that the operator chose for the VM, if any.
    pub mode_chosen: Option<Mode>,
    /// How much longer the VM is only observed before its own mode applies again; `None` if its own mode applies.
    pub observed_for_ns: Option<Ns>,
    /// The VM's permit, and how it keeps the permit.
    pub permit: PermitStatus,
    /// The VM's memory, and how much it could have.
    pub memory: MemoryStatus,
    /// The nodes that the guest sees, and the topology that it was last notified of.
    pub topology: TopologyStatus,
    /// How often the VM and its vCPUs went to other nodes, and how much of its memory was moved.
    #[serde(default)]
    pub migrations: Migrations,
}

/// vCPUs on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeVcpus {
    /// The node.
    pub node: NodeId,
    /// Number of vCPUs.
    pub vcpus: usize,
}

/// Pages on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodePages {
    /// The node.
    pub node: NodeId,
    /// Number of pages of 4 KiB.
    pub pages: Pages,
}

/// Memory traffic on a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct NodeTraffic {
    /// Node of the controllers.
    pub node: NodeId,
    /// Rate of the traffic.
    pub bytes_per_s: BytesPerSec,
}

/// How a VM keeps its permit.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PermitStatus {
    /// The permit that it booked, if any.
    pub permit: Option<Permit>,
    /// The VM's use per slice in the last period: LLC misses, or bytes if bandwidth is booked.
    pub units_per_slice: Option<u64>,
    /// UNDER or OVER.
    pub standing: Option<Standing>,
    /// Balance of the VM's account; a debt if negative.
    pub balance_units: Option<i64>,
    /// How many times it went OVER.
    pub punished_count: u32,
    /// CPU quota in force on the VM's vCPUs, whichever program set it.
    pub quota: Option<CpuQuota>,
    /// Why the VM's pollution is unknown, if it is.
    pub unmetered: Option<String>,
    /// Which of its misses the permit is charged for, and why; `None` without a permit, or without counters.
    #[serde(default)]
    pub charged: Option<String>,
    /// Time for which the agent kept the VM off a cache, so that a neighbour's own misses could be counted.
    #[serde(default)]
    pub away_ns: Ns,
}

impl PermitStatus {
    /// Combines the sample with the state of the policy.
    pub(crate) fn of(sample: &Sample, vm: &VmSample, state: &permits::State) -> PermitStatus {
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
            charged: state.attribution.in_words(vm.id, sample),
            away_ns: state.attribution.away(vm.id),
        }
    }
}

/// How much memory a VM has, and why.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryStatus {
    /// Memory that the operator assigned to the VM; `None` if it has no balloon.
    pub maximum_bytes: Option<Bytes>,
    /// Memory that the agent left the VM, if that is less.
    pub limit_bytes: Option<Bytes>,
    /// Memory below which no agent may hold the VM. `None` if the operator does not let the agent take memory.
    pub floor_bytes: Option<Bytes>,
    /// Memory that the VM needs, if known.
    pub need_bytes: Option<Bytes>,
    /// Memory that the guest says it could spare.
    pub usable_bytes: Option<Bytes>,
    /// Why the VM has this much memory.
    pub why: Option<String>,
}

impl MemoryStatus {
    /// Combines the sample with the state of the policy.
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

/// The nodes that a VM's guest sees, and what the guest is notified of.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct TopologyStatus {
    /// The nodes that the guest sees, in the order of their numbers; empty if it sees only one.
    pub virtual_nodes: Vec<VirtualNodeStatus>,
    /// The last topology published to the guest.
    #[serde(rename = "told")]
    pub published: Option<Published>,
    /// Time since that publication.
    #[serde(rename = "told_age_ns")]
    pub published_age_ns: Option<Ns>,
    /// For each vCPU, by index, the virtual node that the guest believes it to be on since then.
    pub vcpus_believed_on: Vec<usize>,
    /// Why nothing is published to the guest, if so.
    pub why_not: Option<String>,
}

/// A virtual node, as a guest sees it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VirtualNodeStatus {
    /// Its vCPUs when the guest booted.
    pub vcpus: Vec<u16>,
    /// Its memory.
    pub memory_bytes: Bytes,
    /// The home node that is to hold all of this memory, once the VM has a home.
    pub home: Option<NodeId>,
    /// Host nodes of its pages, if known.
    pub pages_by_node: Option<Vec<NodePages>>,
}

impl TopologyStatus {
    /// Combines the sample with the VM's layout.
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

/// What the agent knows of a VM and the host does not.
pub(crate) struct Known {
    pub home: Option<NodeSet>,
    pub left_alone: Option<String>,
    pub mode: Mode,
    pub mode_chosen: Option<Mode>,
    pub observed_for: Option<Ns>,
    pub permit: PermitStatus,
    pub memory: MemoryStatus,
    pub topology: TopologyStatus,
    /// Usual speed, in instructions per CPU-second.
    pub speed_usual: Option<f64>,
    /// CPU time that changes of its home gained and lost.
    pub time: Option<trial::Time>,
    pub migrations: Migrations,
}

impl Status {
    /// Builds the picture from a sample, its rates, the resources left, and the agent's knowledge of each VM.
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
                memory_outside_vms_bytes: memory_outside_vms(sample, id),
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
                let speed = over.and_then(VmRates::speed);
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
                    instructions_per_s: over.and_then(|over| over.instructions_per_s),
                    cycles_per_instruction: over.and_then(VmRates::cycles_per_instruction),
                    instructions_per_cpu_s: speed,
                    instructions_per_cpu_s_usual: known.speed_usual,
                    speed_ratio: speed.zip(known.speed_usual).map(|(speed, usual)| speed / usual),
                    time_gained_ns: known.time.map(|time| time.gained),
                    time_lost_ns: known.time.map(|time| time.lost),
                    llc_miss_rate: over.and_then(|over| over.llc_miss_rate),
                    local_access_ratio: over.and_then(|over| over.local_access_ratio),
                    bandwidth_bytes_per_s: over.and_then(VmRates::bandwidth),
                    traffic_by_node: over
                        .and_then(|over| over.traffic_by_node(machine, vm))
                        .map(|traffic| traffic_by_node(&traffic)),
                    left_alone: known.left_alone,
                    mode: known.mode,
                    mode_chosen: known.mode_chosen,
                    observed_for_ns: known.observed_for,
                    permit: known.permit,
                    memory: known.memory,
                    topology: known.topology,
                    migrations: known.migrations,
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
    /// Returns the VMs that load the controllers of a node, the greatest load first. VMs without traffic there are left out.
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

/// Returns the memory of a node that is in use, without VMs' guest memory and without free pages of pools of huge pages.
fn memory_outside_vms(sample: &Sample, node: NodeId) -> Option<Bytes> {
    let now = sample.nodes.get(node)?;
    let pages = |vm: &VmSample| Some(vm.pages.as_ref()?.get(node).map_or(0, |pages| pages.to_bytes().0));
    let of_vms: u64 = sample.vms.iter().map(pages).sum::<Option<u64>>()?;
    let pools = now.huge_pages.iter().flatten();
    let in_pools: u64 = pools
        .map(|pool| pool.free_count.saturating_mul(pool.page_bytes.0))
        .sum();
    let used = now.memory_total_bytes.saturating_sub(now.memory_free_bytes);
    Some(used.saturating_sub(Bytes(of_vms.saturating_add(in_pools))))
}

/// Returns the traffic between nodes.
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

/// Returns the nodes that a VM's guest sees, each with the home of its memory.
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

/// Lists traffic by node. Nodes without traffic are left out.
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

#[cfg(test)]
mod tests {
    use homenode_host::{HugePages, NodeSample};

    use super::*;

    #[test]
    fn memory_outside_vms_is_what_is_used_without_guests_and_free_pools() {
        let of_node = NodeSample {
            memory_total_bytes: Bytes::from_gib(64),
            memory_free_bytes: Bytes::from_gib(40),
            huge_pages: Some(vec![HugePages {
                page_bytes: Bytes::from_gib(1),
                total_count: 8,
                free_count: 4,
            }]),
            ..NodeSample::default()
        };
        let vm = |id: u128, gib: u64| VmSample {
            pages: Some([(NodeId(0), Pages(gib << 18))].into_iter().collect()),
            ..VmSample::new(VmId(id), "web")
        };
        let mut sample = Sample {
            nodes: [(NodeId(0), of_node)].into_iter().collect(),
            vms: vec![vm(1, 8), vm(2, 9)],
            ..Sample::default()
        };
        // Of the memory, 24 GiB are used: 17 GiB by guests, and 4 GiB wait in the pool.
        assert_eq!(memory_outside_vms(&sample, NodeId(0)), Some(Bytes::from_gib(3)));
        sample.vms.push(vm(3, 100));
        assert_eq!(
            memory_outside_vms(&sample, NodeId(0)),
            Some(Bytes::ZERO),
            "never less than none"
        );
        sample.vms.push(VmSample::new(VmId(4), "unseen"));
        assert_eq!(memory_outside_vms(&sample, NodeId(0)), None);
        assert_eq!(memory_outside_vms(&sample, NodeId(1)), None);
    }
}
