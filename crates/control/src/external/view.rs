//! A view as a document: what the agent's own policies read, in the terms of the status.

use homenode_host::{
    Balloon, CountedBy, CpuQuota, HandsOff, Mode, Version, View, VmRates, VmSample, VmView,
    observation::Observation,
};
use homenode_machine::Machine;
use homenode_units::{
    Bytes, BytesPerSec, CpuId, CpuSet, MemoryPolicy, NodeId, NodeMap, NodeSet, Ns, Pages, Permit, VmId,
};
use schemars::JsonSchema;
use serde::Serialize;

use super::LastPlan;
use crate::status::{
    LinkStatus, NodePages, NodeTraffic, NodeVcpus, VirtualNodeStatus, links, pages_by_node, traffic_by_node,
    vcpus_by_node, virtual_nodes,
};

/// Name of this form of view documents.
pub const VIEW_SCHEMA: &str = "view/1";

/// Everything from which a planner decides in one cycle. Values that are not measured are `None`. Rates are over the last period,
/// so all of them are `None` in the first cycle.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ViewDocument<'a> {
    /// Kind and version of the document's form: `view/1`.
    pub schema: &'static str,
    /// Version that the plan must name. The host refuses a plan made from another version.
    pub version: Version,
    /// The host's monotonic clock.
    pub at_ns: Ns,
    /// Time since the previous sample.
    pub period_ns: Option<Ns>,
    /// The fate of the previous plan; `None` if there was none.
    pub last: Option<&'a LastPlan>,
    /// The host's machine, as in `homenode machine --json`.
    pub machine: &'a Machine,
    /// Every node, ascending.
    pub nodes: Vec<NodeDocument>,
    /// Traffic between nodes, if counted.
    pub links: Vec<LinkStatus>,
    /// Every VM that runs, by id.
    pub vms: Vec<VmDocument<'a>>,
}

/// One node.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct NodeDocument {
    /// The node.
    pub node: NodeId,
    /// CPUs that VMs may use: they are online, not reserved for the host, and not on a node that is being drained.
    pub usable_cpus: CpuSet,
    /// Whether the node can be a home: it has memory, and CPUs that VMs may use.
    pub can_be_home: bool,
    /// Whether it is being drained.
    pub is_drained: bool,
    /// CPUs busy.
    pub cpus_busy: Option<f64>,
    /// vCPUs waiting on the node's run queues.
    pub vcpus_waiting: Option<f64>,
    /// Memory of the node.
    pub memory_bytes: Bytes,
    /// Part of the node's memory that is free or reclaimable.
    pub memory_free_bytes: Bytes,
    /// Memory traffic.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Rate that the node's controllers can sustain.
    pub bandwidth_max_bytes_per_s: Option<BytesPerSec>,
}

/// One VM.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VmDocument<'a> {
    /// UUID, which plans use as the VM's name.
    pub id: VmId,
    /// Name.
    pub name: &'a str,
    /// Mode of decisions about the VM; under `act` they are carried out.
    pub mode: Mode,
    /// Why the VM's vCPUs must be left alone, if they must. A plan that pins them is refused.
    pub left_alone: Option<HandsOff>,
    /// Why the VM's CPU quota must be left alone, if it must.
    pub quota_left_alone: Option<HandsOff>,
    /// Home nodes; `None` for an unplaced VM: the kernel decides where it runs.
    pub home: Option<&'a NodeSet>,
    /// The operator's settings for the VM.
    pub chosen: ChosenDocument<'a>,
    /// Its online vCPUs.
    pub vcpus: Vec<VcpuDocument<'a>>,
    /// Number of the VM's vCPUs that last ran on each node.
    pub vcpus_by_node: Vec<NodeVcpus>,
    /// Memory that the guest may use.
    pub memory_bytes: Bytes,
    /// Its balloon, if it has one.
    pub balloon: Option<Balloon>,
    /// Touched pages on each node, if known.
    pub pages_by_node: Option<Vec<NodePages>>,
    /// Memory policy in force.
    pub memory_policy: MemoryPolicy,
    /// Why the VM's memory cannot move, if it cannot.
    pub memory_fixed: Option<String>,
    /// The nodes that the guest sees, in the order of their numbers; empty if it sees only one.
    pub virtual_nodes: Vec<VirtualNodeStatus>,
    /// Nodes of devices that are assigned to the VM.
    pub device_nodes: &'a NodeSet,
    /// The source of LLC miss counts, if there is one.
    pub counted_by: Option<CountedBy>,
    /// Number of CPUs' worth of time that the VM used.
    pub cpus_used: Option<f64>,
    /// Number of the VM's vCPUs that waited for a CPU.
    pub vcpus_waiting: Option<f64>,
    /// Instructions of all its vCPUs per second.
    pub instructions_per_s: Option<f64>,
    /// Cycles per second in which its vCPUs were not halted.
    pub cycles_per_s: Option<f64>,
    /// LLC references.
    pub llc_references_per_s: Option<f64>,
    /// LLC misses.
    pub llc_misses_per_s: Option<f64>,
    /// LLC misses divided by references, in [0, 1].
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that were local, in [0, 1].
    pub local_access_ratio: Option<f64>,
    /// Memory accesses over the period, by the node of the page.
    pub accesses_by_node: Option<Vec<NodeAccesses>>,
    /// Memory traffic, estimated from LLC misses.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Estimated traffic by the node of the controllers: from the VM's accesses if they are counted, else from where its pages
    /// are.
    pub traffic_by_node: Option<Vec<NodeTraffic>>,
    /// Observed use of the VM's memory in the last complete window, if it is watched.
    pub observed: Option<&'a Observation>,
    /// Use of the VM's pages by node, if its memory policy has them sampled.
    pub page_uses: Option<Vec<PageUseDocument>>,
}

/// An operator's settings for a VM. A plan that goes against them is refused.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ChosenDocument<'a> {
    /// Home nodes.
    pub home: Option<&'a NodeSet>,
    /// Nodes that the VM may have for a home, considering where, and next to which VMs, its operator lets it run.
    pub home_allowed: NodeSet,
    /// CPUs that the VM may run on; `None` if there is no limit.
    pub cpus_allowed: Option<&'a CpuSet>,
    /// VMs with the same word here must not share a home node.
    pub anti_affinity: Option<&'a str>,
    /// VMs with the same word here must have the same home.
    pub affinity: Option<&'a str>,
    /// Memory policy.
    pub memory_policy: Option<MemoryPolicy>,
    /// Memory bandwidth that it is declared to need.
    pub bandwidth_bytes_per_s: Option<BytesPerSec>,
    /// Its permit.
    pub permit: Option<Permit>,
    /// Memory below which the VM may not be held. Without a floor, none of its memory may be taken.
    pub memory_floor_bytes: Option<Bytes>,
    /// CPU quota of each vCPU.
    pub quota: Option<CpuQuota>,
}

/// One online vCPU.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VcpuDocument<'a> {
    /// Position in the VM, from 0.
    pub index: u16,
    /// CPU it last ran on.
    pub cpu: Option<CpuId>,
    /// Node of that CPU.
    pub node: Option<NodeId>,
    /// The vCPU's affinity in force.
    pub affinity: &'a CpuSet,
    /// CPU quota in force, whichever program set it.
    pub quota: Option<CpuQuota>,
    /// Share of the period in which the vCPU ran, in [0, 1].
    pub running: Option<f64>,
    /// Share of the period in which the vCPU waited for a CPU without being throttled.
    pub waiting: Option<f64>,
    /// Share of the period in which a CPU quota throttled the vCPU.
    pub throttled: Option<f64>,
    /// LLC misses divided by references.
    pub llc_miss_rate: Option<f64>,
}

/// Memory accesses on a node.
#[derive(Clone, Copy, Debug, Serialize, JsonSchema)]
pub struct NodeAccesses {
    /// The node.
    pub node: NodeId,
    /// Number of accesses.
    pub accesses: u64,
}

/// Use of a range of pages by node, as sampled.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PageUseDocument {
    /// Guest frame of the first page.
    pub frame: u64,
    /// Number of pages.
    pub pages: Pages,
    /// Node of the pages.
    pub node: NodeId,
    /// Number of sampled accesses to each page from the CPUs of each node. Nodes without accesses are left out.
    pub accesses_by_node: Vec<NodeAccesses>,
    /// Number of these samples of a page that were writes.
    pub writes: u32,
}

impl<'a> ViewDocument<'a> {
    /// Builds the document from the policies' view, the fate of the previous plan, and the mode for each VM.
    pub fn of(
        view: &'a View<'a>,
        last: Option<&'a LastPlan>,
        mode: impl Fn(&VmSample) -> Mode,
    ) -> ViewDocument<'a> {
        let homes = view.homes();
        let vm = |vm: &'a VmView<'a>| VmDocument::of(view, &homes, vm, mode(vm.sample));
        ViewDocument {
            schema: VIEW_SCHEMA,
            version: view.version,
            at_ns: view.at,
            period_ns: view.rates.map(|rates| rates.period_ns),
            last,
            machine: view.machine,
            nodes: nodes(view, &homes),
            links: links(view.machine, view.rates),
            vms: view.vms.iter().map(vm).collect(),
        }
    }
}

fn nodes(view: &View<'_>, homes: &NodeSet) -> Vec<NodeDocument> {
    let node = |(node, of): (NodeId, &homenode_machine::Node)| {
        let now = view.sample.nodes.get(node).cloned().unwrap_or_default();
        let over = view.rates.and_then(|rates| rates.nodes.get(node));
        NodeDocument {
            node,
            usable_cpus: view.cpus_of(node),
            can_be_home: homes.contains(node),
            is_drained: view.drained.contains(node),
            cpus_busy: over.map(|over| over.cpus_busy),
            vcpus_waiting: over.map(|over| over.vcpus_waiting),
            memory_bytes: now.memory_total_bytes,
            memory_free_bytes: now.memory_free_bytes,
            bandwidth_bytes_per_s: over.and_then(|over| over.bandwidth),
            bandwidth_max_bytes_per_s: of.memory_bandwidth,
        }
    };
    view.machine.nodes.iter().map(node).collect()
}

impl<'a> VmDocument<'a> {
    fn of(view: &View<'a>, homes: &NodeSet, vm: &'a VmView<'a>, mode: Mode) -> VmDocument<'a> {
        let (machine, sample, rates) = (view.machine, vm.sample, vm.rates);
        let is_counted = sample.vcpus.iter().any(|vcpu| vcpu.counters.is_some());
        let page_uses = sample.page_uses.as_ref();
        VmDocument {
            id: sample.id,
            name: &sample.name,
            mode,
            left_alone: vm.hands_off,
            quota_left_alone: vm.quota_hands_off,
            home: vm.home,
            chosen: ChosenDocument::of(view, homes, vm),
            vcpus: vcpus(machine, sample, rates),
            vcpus_by_node: vcpus_by_node(machine, sample),
            memory_bytes: sample.memory_bytes,
            balloon: sample.balloon,
            pages_by_node: sample.pages.as_ref().map(pages_by_node),
            memory_policy: sample.memory_policy,
            memory_fixed: vm.memory_fixed().map(ToString::to_string),
            virtual_nodes: virtual_nodes(sample, vm.layout),
            device_nodes: &sample.device_nodes,
            counted_by: is_counted.then_some(view.sample.counted_by),
            cpus_used: rates.map(|rates| rates.cpus_used),
            vcpus_waiting: rates.and_then(|rates| rates.vcpus.iter().map(|vcpu| vcpu.waiting).sum()),
            instructions_per_s: rates.and_then(|rates| rates.instructions_per_s),
            cycles_per_s: rates.and_then(|rates| rates.cycles_per_s),
            llc_references_per_s: rates.and_then(|rates| rates.llc_references_per_s),
            llc_misses_per_s: rates.and_then(|rates| rates.llc_misses_per_s),
            llc_miss_rate: rates.and_then(|rates| rates.llc_miss_rate),
            local_access_ratio: rates.and_then(|rates| rates.local_access_ratio),
            accesses_by_node: rates.and_then(|rates| rates.accesses_on.as_ref().map(by_node)),
            bandwidth_bytes_per_s: rates.and_then(VmRates::bandwidth),
            traffic_by_node: rates
                .and_then(|rates| rates.traffic_by_node(machine, sample))
                .map(|traffic| traffic_by_node(&traffic)),
            observed: sample.observed.as_ref(),
            page_uses: page_uses.map(|uses| uses.iter().map(PageUseDocument::of).collect()),
        }
    }
}

impl<'a> ChosenDocument<'a> {
    fn of(view: &View<'_>, homes: &NodeSet, vm: &'a VmView<'a>) -> ChosenDocument<'a> {
        let settings = &vm.sample.settings;
        let allowed = homenode_policy::placement::allowed_nodes(view, vm);
        ChosenDocument {
            home: settings.home.as_ref(),
            home_allowed: allowed.unwrap_or_else(|| homes.clone()),
            cpus_allowed: settings.cpus_allowed.as_ref(),
            anti_affinity: settings.anti_affinity.as_deref(),
            affinity: settings.affinity.as_deref(),
            memory_policy: settings.memory_policy,
            bandwidth_bytes_per_s: settings.bandwidth,
            permit: settings.permit,
            memory_floor_bytes: settings.memory_floor,
            quota: settings.quota,
        }
    }
}

impl PageUseDocument {
    fn of(of: &homenode_host::PageUse) -> PageUseDocument {
        PageUseDocument {
            frame: of.frame,
            pages: of.pages,
            node: of.on,
            accesses_by_node: by_node(&of.samples),
            writes: of.writes,
        }
    }
}

fn vcpus<'a>(machine: &Machine, sample: &'a VmSample, rates: Option<&VmRates>) -> Vec<VcpuDocument<'a>> {
    let vcpu = |vcpu: &'a homenode_host::VcpuSample| {
        let over = rates.and_then(|rates| rates.vcpus.iter().find(|own| own.index == vcpu.index));
        VcpuDocument {
            index: vcpu.index,
            cpu: vcpu.cpu,
            node: vcpu.cpu.and_then(|cpu| machine.node_of(cpu)),
            affinity: &vcpu.affinity,
            quota: vcpu.quota,
            running: over.map(|over| over.running),
            waiting: over.and_then(|over| over.waiting),
            throttled: over.map(|over| over.throttled),
            llc_miss_rate: over.and_then(|over| over.llc_miss_rate),
        }
    };
    sample.vcpus.iter().map(vcpu).collect()
}

fn by_node<T: Copy + Into<u64>>(counts: &NodeMap<T>) -> Vec<NodeAccesses> {
    let of = |(node, count): (NodeId, &T)| NodeAccesses {
        node,
        accesses: (*count).into(),
    };
    counts.iter().map(of).collect()
}
