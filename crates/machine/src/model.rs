//! The types of a machine and their queries. The rules that every machine obeys are in `rules`.

use homenode_units::{Bytes, BytesPerSec, CpuId, CpuSet, NodeId, NodeMap, NodeSet, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A NUMA host. Only [`Machine::checked`] builds one, so every other crate may rely on its invariants.
///
/// Serializes to the JSON of `homenode machine --json` (see the module `json`).
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    /// Name of the preset, or the host's own name.
    pub name: String,
    /// Online nodes. A node may lack CPUs (memory expander) or memory.
    pub nodes: NodeMap<Node>,
    /// Nodes whose memory may be used: all nodes, unless the machine was read for one process.
    pub memory_allowed: NodeSet,
    /// Online logical CPUs, ascending by id.
    pub cpus: Vec<Cpu>,
    /// CPUs that the kernel reserves for tasks bound to them (`isolcpus=`). A VM uses them only if its operator names them. The
    /// JSON does not contain them, except as a note.
    pub isolated: CpuSet,
    /// Last-level caches; a socket or a node may have several.
    pub llcs: Vec<Llc>,
    /// Distances that the firmware reports (SLIT); 10 is local.
    pub distances: Distances,
    /// Directed links between nodes; empty if the host does not report them (nodes then count as fully connected).
    pub links: Vec<Link>,
    /// Routes that are known, each as the nodes on its way from source to destination. [`Machine::route`] finds the others.
    pub routes: Vec<Vec<NodeId>>,
    /// PCI devices, each with the node that the firmware assigns it to.
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
    /// Unloaded latency of the node's memory in nanoseconds, from its own CPUs, or from the nearest ones if it has none. Kinds of
    /// memory differ in this. `None` means [`Latency::memory_ns`].
    pub memory_ns: Option<f64>,
    /// Physical package, if known. Several nodes may share a package (sub-NUMA clusters, two dies).
    pub socket: Option<u16>,
}

/// One logical CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cpu {
    /// The number that the kernel gives it.
    pub id: CpuId,
    /// Node that the CPU belongs to.
    pub node: NodeId,
    /// Physical package.
    pub socket: u16,
    /// Physical core, numbered over the whole host. Hyperthread siblings have the same number.
    pub core: u32,
    /// Index into [`Machine::llcs`], if the host reports it.
    pub llc: Option<u32>,
}

/// One last-level cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Llc {
    /// CPUs that share the cache.
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
    /// A line found by a tree of bits; after each use, the bits on the line's path point away from it.
    #[default]
    PseudoLru,
    /// The first line whose bit is clear. A use sets the line's bit; once all bits are set, all others are cleared.
    NotRecentlyUsed,
    /// The first line of age 3; if there is none, all lines age. Ages are 0 to 3: a line arrives at age 1. A use at age 2 or 3
    /// sets it to 1, a use at a lower age to 0.
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

    /// Returns the name that machine files use.
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
    /// Latency that the link adds, in nanoseconds; `None` means [`LinkTiming::hop_ns`]. Links within a package and links between
    /// packages differ in this.
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
    /// Maximum data rate of the device; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<BytesPerSec>,
    /// Time of a small request to an idle device, without a hypervisor; `None` if unknown.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<Ns>,
    /// The same time for a guest that drives the device itself (passthrough); `None` means [`Device::latency_ns`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_passthrough_ns: Option<Ns>,
    /// The same time for a guest with a virtual device of the hypervisor; `None` means [`Device::latency_ns`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub latency_virtual_ns: Option<Ns>,
}

/// Distances between nodes, as the firmware reports them; 10 is local.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Distances {
    /// One row per node, with one value per node; both in ascending order of nodes.
    pub rows: Vec<Vec<u32>>,
}

/// Timing figures of a machine. Only presets have them, and only the twin reads them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Hardware {
    /// Core clock in Hz.
    pub clock_hz: u64,
    /// Unloaded load-to-use latencies.
    pub latency: Latency,
    /// Whether the LLC also holds everything that L1 and L2 hold.
    pub llc_inclusive: bool,
    /// Most misses that one core can have in flight (line fill buffers).
    pub misses_in_flight_max: u32,
    /// How memory latency grows with the controllers' load.
    pub memory_curve: LoadCurve,
    /// Latency and load curve of a link.
    pub link: LinkTiming,
    /// Bandwidth of a memory controller for scattered lines, as a share of its bandwidth for streams
    /// ([`Node::memory_bandwidth`]), in (0, 1]. Each scattered line opens its own DRAM page. `None`: unknown, assumed equal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scattered_throughput: Option<f64>,
    /// Throughput of a core that runs two hyperthreads, as a multiple of its throughput with one, in [1, 2].
    pub smt_throughput: f64,
    /// Entries of the data TLB for 4 KiB pages (of its second level, if there is one).
    pub tlb_entries_4k: u32,
    /// Entries of the data TLB for 2 MiB pages.
    pub tlb_entries_2m: u32,
    /// Size of a core's private second-level cache.
    pub l2_bytes: Bytes,
    /// A core's stream prefetcher. `None`: as Intel's L2 streamer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefetcher: Option<Prefetcher>,
    /// Cost of a TLB miss.
    pub walk: PageWalk,
    /// Cost of an interrupt to another CPU, for sender and receiver together.
    pub ipi: Ipi,
    /// Cost of waking a halted vCPU, in addition to the interrupt. `None`: unknown, assumed zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake: Option<Wake>,
}

/// A stream prefetcher. `homenode profile` models it; the twin does not read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Prefetcher {
    /// Steps in one direction that make a stream.
    pub steps: u32,
    /// Largest step of a stream, lines.
    pub step_lines: u32,
    /// Distance to the nearest line that an access of a stream requests, lines.
    pub nearest: u32,
    /// Distance to the farthest, lines; all lines in between are requested too.
    pub farthest: u32,
}

/// Reads of page-table entries that a TLB miss causes, apart from those that page-walk caches save. Without such caches a native
/// walk would need 4 and a nested walk 24.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PageWalk {
    /// Reads per TLB miss without virtualization.
    pub native_refs: f64,
    /// Reads per TLB miss in a guest, whose walk is two-dimensional.
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
    /// The exit to the hypervisor when the vCPU halts, plus the entry that resumes the guest.
    pub exit_ns: f64,
    /// The time that the hypervisor's scheduler and the guest's scheduler take between the interrupt and the woken thread.
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
    /// Access to memory of the CPU's own node, nanoseconds.
    pub memory_ns: f64,
}

/// Latency under load, as a multiple of the unloaded latency: `g(u) = 1 + alpha·u + beta·u^1.5 / (1 − u)`, where `u` is the share
/// of the sustained bandwidth that is in use.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LoadCurve {
    /// Coefficient of the linear term.
    pub alpha: f64,
    /// Coefficient of the queueing term.
    pub beta: f64,
}

/// Timing of a link. The load curve multiplies only [`LinkTiming::hop_ns`], not the whole latency of a remote access.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct LinkTiming {
    /// Latency that one hop adds, in nanoseconds, if the link has none of its own ([`Link::hop_ns`]).
    pub hop_ns: f64,
    /// How the latency grows with the link's load.
    pub curve: LoadCurve,
}

impl Machine {
    /// Returns all nodes.
    pub fn node_set(&self) -> NodeSet {
        self.nodes.node_set()
    }

    /// Returns the nodes with both memory and CPUs. Only these can be a VM's home, and memory is spread only over them: memory
    /// without CPUs is of another kind, slower (CXL, persistent) or scarcer (HBM), and the kernel decides what goes there.
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

    /// Returns the number of a node's physical cores with at least one usable CPU.
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

    /// Returns the most usable hyperthreads that any core has; 1 without hyperthreads, or if all siblings are offline.
    pub fn threads_per_core(&self) -> usize {
        let mut cores: Vec<u32> = self.cpus.iter().map(|cpu| cpu.core).collect();
        cores.sort_unstable();
        cores.chunk_by(|a, b| a == b).map(<[u32]>::len).max().unwrap_or(1)
    }

    /// Returns indices into [`Machine::llcs`] of the last-level caches that a node's CPUs use.
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

    /// Returns the links that data takes from one node to another, as indices into [`Machine::links`]: those of the known route,
    /// if there is one, else a route with the fewest hops, and among equal routes the links listed first. Empty from a node to
    /// itself; `None` if there is no route.
    pub fn route(&self, from: NodeId, to: NodeId) -> Option<Vec<usize>> {
        let is_this = |nodes: &&Vec<NodeId>| nodes.first() == Some(&from) && nodes.last() == Some(&to);
        match self.routes.iter().find(is_this) {
            Some(nodes) => {
                let hops = nodes.windows(2);
                hops.map(|hop| self.link(hop[0], hop[1])).collect()
            }
            None => self.shortest(from, to),
        }
    }

    /// Returns the link between two nodes in this direction, as an index into [`Machine::links`].
    fn link(&self, from: NodeId, to: NodeId) -> Option<usize> {
        let mut links = self.links.iter();
        links.position(|link| (link.from, link.to) == (from, to))
    }

    fn shortest(&self, from: NodeId, to: NodeId) -> Option<Vec<usize>> {
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

    /// Returns true if a link joins the two nodes, in either direction. If no links are known, all nodes count as joined.
    pub fn adjacent(&self, a: NodeId, b: NodeId) -> bool {
        self.links.is_empty()
            || self
                .links
                .iter()
                .any(|l| (l.from, l.to) == (a, b) || (l.from, l.to) == (b, a))
    }
}
