//! The types of a machine and their queries. The rules that every machine obeys are in `rules`.

use homenode_units::{Bytes, BytesPerSec, CpuId, CpuSet, NodeId, NodeMap, NodeSet, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A NUMA host. Built only through [`Machine::checked`], so every other crate may rely on its invariants.
///
/// Serializes to the JSON of `homenode machine --json` (see the module `json`).
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Preset name, or the host's own name.
    pub name: String,
    /// Online nodes. A node may lack CPUs (memory expander) or memory.
    pub nodes: NodeMap<Node>,
    /// Nodes whose memory may be used: all of them, unless the machine was read for one process.
    pub memory_allowed: NodeSet,
    /// Logical CPUs that are online, ascending by id.
    pub cpus: Vec<Cpu>,
    /// CPUs that the kernel keeps free of everything that is not bound to them (`isolcpus=`). VMs use them only if their
    /// operator names them. Not part of the JSON, except for a note.
    pub isolated: CpuSet,
    /// Last-level caches; a socket or a node may have several.
    pub llcs: Vec<Llc>,
    /// Firmware distances (SLIT), 10 = local.
    pub distances: Distances,
    /// Directed links between nodes; empty if the host does not report them (nodes then count as fully connected).
    pub links: Vec<Link>,
    /// PCI devices that the firmware assigns to a node.
    pub devices: Vec<Device>,
    /// Peculiarities of this host, in sentences for people (offline CPUs left out, cpuset limits, …).
    pub notes: Vec<String>,
    /// Timing figures, if a preset has them.
    pub hardware: Option<Hardware>,
}

/// One NUMA node.
#[derive(Clone, Debug, PartialEq)]
pub struct Node {
    /// Usable logical CPUs of the node.
    pub cpus: CpuSet,
    /// Memory of the node; zero for a memory-less node.
    pub memory_bytes: Bytes,
    /// Memory bandwidth that the node's controllers can sustain, if known (preset, or HMAT in sysfs).
    pub memory_bandwidth: Option<BytesPerSec>,
    /// Unloaded latency of its memory, nanoseconds, from its own CPUs, or for a node without CPUs from the nearest; `None`
    /// means [`Latency::memory_ns`]. Memory of several kinds differs.
    pub memory_ns: Option<f64>,
    /// Physical package, if known. Several nodes may share one (sub-NUMA clusters, two dies).
    pub socket: Option<u16>,
}

/// One logical CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cpu {
    /// Kernel's number.
    pub id: CpuId,
    /// Node it belongs to.
    pub node: NodeId,
    /// Physical package.
    pub socket: u16,
    /// Physical core, numbered over the whole host: hyperthread siblings share it.
    pub core: u32,
    /// Index into [`Machine::llcs`], if the host reports it.
    pub llc: Option<u32>,
}

/// One last-level cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Llc {
    /// CPUs that share it.
    pub cpus: CpuSet,
    /// Capacity.
    pub size_bytes: Bytes,
    /// Associativity, if known.
    pub ways: Option<u32>,
    /// Cache line in bytes.
    pub line_bytes: u32,
    /// Replacement policy, if known.
    pub replacement: Option<Replacement>,
}

/// How a set-associative cache chooses the line to evict from a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Replacement {
    /// The least recently used line.
    Lru,
    /// A binary tree of bits, each pointing away from the half that was used last.
    #[default]
    PseudoLru,
    /// One bit per line, set by its use: evicts the first line without it. When all have it, all but the last used lose it.
    NotRecentlyUsed,
    /// Ages 0 to 3: 1 when a line arrives, 1 after a use at age 2 or 3, else 0. Evicts the first line of age 3; while there
    /// is none, all grow older.
    QuadAge,
    /// Any line, with equal probability.
    Random,
}

impl Replacement {
    /// All policies.
    pub const ALL: [Replacement; 5] = [
        Replacement::Lru,
        Replacement::PseudoLru,
        Replacement::NotRecentlyUsed,
        Replacement::QuadAge,
        Replacement::Random,
    ];

    /// Returns the name in machine files.
    pub fn name(self) -> &'static str {
        match self {
            Replacement::Lru => "lru",
            Replacement::PseudoLru => "pseudo-lru",
            Replacement::NotRecentlyUsed => "not-recently-used",
            Replacement::QuadAge => "quad-age",
            Replacement::Random => "random",
        }
    }
}

/// A directed link between two nodes. The two directions of a cable are two links and may differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Source of the data.
    pub from: NodeId,
    /// Destination of the data.
    pub to: NodeId,
    /// Data rate that the link can sustain in this direction, if known.
    pub bandwidth: Option<BytesPerSec>,
    /// Latency that it adds, nanoseconds; `None` means [`LinkTiming::hop_ns`]. Links within a package and between packages
    /// differ.
    pub hop_ns: Option<f64>,
}

/// A PCI device on a node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Device {
    /// PCI address, `0000:3b:00.0`.
    pub address: String,
    /// PCI class code in hexadecimal, `0x020000` for an Ethernet controller.
    pub class: String,
    /// Node that the device is attached to.
    pub node: NodeId,
    /// Its maximum data rate; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<BytesPerSec>,
    /// Time of a small request on an idle device, without a hypervisor; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Ns>,
    /// Its time from a guest that drives the device itself; `None` means [`Device::latency_ns`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_passthrough_ns: Option<Ns>,
    /// Its time from a guest with a virtual device of the hypervisor; `None` means [`Device::latency_ns`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_virtual_ns: Option<Ns>,
}

/// Distances between nodes, as firmware states them: 10 is local.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distances {
    /// One row per node, one value per node, both ascending by node.
    pub rows: Vec<Vec<u32>>,
}

/// Timing figures of a machine, all from its preset; the twin is the only reader.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Hardware {
    /// Core clock in Hz.
    pub clock_hz: u64,
    /// Unloaded load-to-use latencies.
    pub latency: Latency,
    /// Whether the LLC holds the contents of L1 and L2.
    pub llc_inclusive: bool,
    /// Outstanding misses that one core sustains (line fill buffers).
    pub misses_in_flight_max: u32,
    /// How memory latency grows with the controllers' load.
    pub memory_curve: LoadCurve,
    /// Latency and load curve of a link.
    pub link: LinkTiming,
    /// Bandwidth of a memory controller for lines scattered over its memory, as a share of that for streams
    /// ([`Node::memory_bandwidth`]), in (0, 1]: each line opens its own DRAM page. `None`: unknown, assumed equal to streams.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scattered_throughput: Option<f64>,
    /// Throughput of a core running two hyperthreads, as a multiple of one thread alone, in [1, 2].
    pub smt_throughput: f64,
    /// Entries of the data TLB (second level if there is one) for 4 KiB pages.
    pub tlb_entries_4k: u32,
    /// Entries of the data TLB for 2 MiB pages.
    pub tlb_entries_2m: u32,
    /// Private second-level cache of a core, bytes.
    pub l2_bytes: Bytes,
    /// Cost of a TLB miss.
    pub walk: PageWalk,
    /// Cost of an interrupt to another CPU, for its sender and receiver together.
    pub ipi: Ipi,
    /// Cost for a halted vCPU to run again, in addition to the interrupt. `None`: unknown, assumed zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake: Option<Wake>,
}

/// References to page tables that a TLB miss makes beyond the contents of page-walk caches. Without such caches they would be
/// 4 for a native walk and 24 for a nested one.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PageWalk {
    /// References per TLB miss without virtualization.
    pub native_refs: f64,
    /// References per TLB miss in a guest, whose walk is two-dimensional.
    pub nested_refs: f64,
}

/// Cost of an inter-processor interrupt, nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Ipi {
    /// On the bare machine.
    pub native_ns: f64,
    /// Between vCPUs, through the hypervisor.
    pub virtual_ns: f64,
}

/// Cost of a vCPU's halt and wake-up, nanoseconds. An idle CPU of the bare machine has no such cost.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Wake {
    /// The halt's exit to the hypervisor, and the entry that resumes the guest.
    pub exit_ns: f64,
    /// The hypervisor's scheduler and the guest's own, between the interrupt and the thread.
    pub schedule_ns: f64,
}

/// Unloaded latencies.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Latency {
    /// L1 hit, cycles.
    pub l1_cycles: f64,
    /// L2 hit, cycles.
    pub l2_cycles: f64,
    /// LLC hit, cycles.
    pub llc_cycles: f64,
    /// Memory of the CPU's own node, nanoseconds.
    pub memory_ns: f64,
}

/// Latency under load, `g(u) = 1 + alpha·u + beta·u^1.5 / (1 − u)`, with `u` the share of the sustained bandwidth in use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LoadCurve {
    /// Linear part.
    pub alpha: f64,
    /// Queueing part.
    pub beta: f64,
}

/// Timing of a link. The curve multiplies only [`LinkTiming::hop_ns`], not the whole latency of a remote access.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkTiming {
    /// Latency that one hop adds, nanoseconds, if the link does not have its own ([`Link::hop_ns`]).
    pub hop_ns: f64,
    /// Growth of the latency with the link's load.
    pub curve: LoadCurve,
}

impl Machine {
    /// Returns all nodes.
    pub fn node_set(&self) -> NodeSet {
        self.nodes.node_set()
    }

    /// Returns the nodes with memory and CPUs: only these can be a home, and memory is spread only over them. A node without
    /// CPUs has memory of another kind, slower (CXL, persistent) or scarcer (HBM), whose contents the kernel decides.
    pub fn home_nodes(&self) -> NodeSet {
        let has_cpus = |node: &NodeId| self.nodes.get(*node).is_some_and(|node| !node.cpus.is_empty());
        self.memory_nodes().iter().filter(has_cpus).collect()
    }

    /// Returns the nodes whose memory may be used.
    pub fn memory_nodes(&self) -> NodeSet {
        let has_memory = |(id, node): &(NodeId, &Node)| {
            node.memory_bytes > Bytes::ZERO && self.memory_allowed.contains(*id)
        };
        self.nodes.iter().filter(has_memory).map(|(id, _)| id).collect()
    }

    /// Returns the CPU with this number, if it is usable.
    pub fn cpu(&self, id: CpuId) -> Option<&Cpu> {
        self.cpus
            .binary_search_by_key(&id, |cpu| cpu.id)
            .ok()
            .map(|at| &self.cpus[at])
    }

    /// Returns the node of a CPU, if the CPU is usable.
    pub fn node_of(&self, id: CpuId) -> Option<NodeId> {
        self.cpu(id).map(|cpu| cpu.node)
    }

    /// Returns the usable CPUs of a set of nodes.
    pub fn cpus_of(&self, nodes: &NodeSet) -> CpuSet {
        self.cpus
            .iter()
            .filter(|cpu| nodes.contains(cpu.node))
            .map(|cpu| cpu.id)
            .collect()
    }

    /// Returns all usable CPUs.
    pub fn cpu_set(&self) -> CpuSet {
        self.cpus.iter().map(|cpu| cpu.id).collect()
    }

    /// Returns the number of physical cores of a node that have at least one usable CPU.
    pub fn core_count(&self, node: NodeId) -> usize {
        let mut cores: Vec<u32> = self
            .cpus
            .iter()
            .filter(|cpu| cpu.node == node)
            .map(|cpu| cpu.core)
            .collect();
        cores.sort_unstable();
        cores.dedup();
        cores.len()
    }

    /// Returns the usable hyperthreads of the busiest core: 1 without hyperthreads, or if all siblings are offline.
    pub fn threads_per_core(&self) -> usize {
        let mut cores: Vec<u32> = self.cpus.iter().map(|cpu| cpu.core).collect();
        cores.sort_unstable();
        cores.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(1)
    }

    /// Returns indices into [`Machine::llcs`] of the last-level caches that CPUs of a node use.
    pub fn llcs_of(&self, node: NodeId) -> Vec<u32> {
        let mut llcs: Vec<u32> = self
            .cpus
            .iter()
            .filter(|cpu| cpu.node == node)
            .filter_map(|cpu| cpu.llc)
            .collect();
        llcs.sort_unstable();
        llcs.dedup();
        llcs
    }

    /// Returns the distance between two nodes (10 = local), if both exist.
    pub fn distance(&self, from: NodeId, to: NodeId) -> Option<u32> {
        let (i, j) = (self.nodes.position(from).ok()?, self.nodes.position(to).ok()?);
        self.distances.rows.get(i)?.get(j).copied()
    }

    /// Returns indices into [`Machine::links`] from one node to another: fewest hops, among equals the first links listed.
    /// Empty for a node to itself; `None` if there is no route.
    pub fn route(&self, from: NodeId, to: NodeId) -> Option<Vec<usize>> {
        let mut reached: NodeMap<Vec<usize>> = [(from, Vec::new())].into_iter().collect();
        let mut frontier = vec![from];
        while !frontier.is_empty() && reached.get(to).is_none() {
            let mut next = Vec::new();
            for node in frontier {
                for (at, link) in self
                    .links
                    .iter()
                    .enumerate()
                    .filter(|(_, link)| link.from == node)
                {
                    if reached.get(link.to).is_none() {
                        let mut path = reached[node].clone();
                        path.push(at);
                        reached.insert(link.to, path);
                        next.push(link.to);
                    }
                }
            }
            frontier = next;
        }
        reached.get(to).cloned()
    }

    /// Whether two nodes are joined by a link, in either direction. If no links are known, all nodes are.
    pub fn adjacent(&self, a: NodeId, b: NodeId) -> bool {
        self.links.is_empty()
            || self
                .links
                .iter()
                .any(|l| (l.from, l.to) == (a, b) || (l.from, l.to) == (b, a))
    }
}
