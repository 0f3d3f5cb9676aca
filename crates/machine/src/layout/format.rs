//! What a machine file may contain: the types that read it, and from which its schema is made.

use homenode_units::{Bytes, BytesPerSec, CpuSet, NodeId, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};

use crate::model::Replacement;
use crate::notation;

/// The contents of a machine file. A host whose nodes are all alike is described by counts (`[shape]`), any other host node by
/// node (`[[node]]`); exactly one of the two must be present.
///
/// CPUs are numbered as Linux does if the firmware lists cores before threads: the first threads of all cores in node order, then
/// the second threads.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MachineFile {
    /// Name of the machine.
    pub(super) name: String,
    /// What a reader of its results should know.
    #[serde(default)]
    pub(super) notes: Vec<String>,
    /// Counts, if all nodes are alike.
    pub(super) shape: Option<Shape>,
    /// The nodes one by one, otherwise.
    #[serde(default)]
    pub(super) node: Vec<NodeEntry>,
    /// The last-level caches, all of one kind; absent if not known.
    pub(super) llc: Option<LlcEntry>,
    /// Links between nodes, in groups of one kind. Without any, every two nodes are joined by links of unknown bandwidth.
    #[serde(default)]
    pub(super) links: Vec<LinkGroup>,
    /// Routes between nodes, as far as they are known. Data takes the fewest links otherwise; among equals, those listed first.
    #[serde(default)]
    pub(super) routes: RouteEntry,
    /// Distances as the firmware reports them; 10 for local and 20 for remote nodes, as Linux assumes, if absent.
    #[serde(default)]
    pub(super) distances: DistanceEntry,
    /// PCI devices that VMs use.
    #[serde(default)]
    pub(super) devices: Vec<DeviceEntry>,
    /// Timing figures, which the twin needs and an agent does not.
    pub(super) hardware: Option<HardwareEntry>,
}

/// Nodes that are all alike.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct Shape {
    /// Sockets. A machine has at most 1024 nodes and 8192 CPUs.
    pub(super) sockets: u16,
    /// Nodes of a socket: more than 1 with NPS2 and NPS4 (AMD) or SNC (Intel).
    #[serde(default = "one")]
    pub(super) nodes_per_socket: u16,
    /// Physical cores of a node.
    pub(super) cores_per_node: u16,
    /// Hyperthreads of a core.
    #[serde(default = "one")]
    pub(super) threads_per_core: u16,
    /// Memory of a node.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Size")]
    pub(super) memory_per_node: Bytes,
    /// Bandwidth that a node's memory controllers sustain; absent if not known.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Rate>")]
    pub(super) memory_bandwidth_per_node: Option<BytesPerSec>,
}

/// One node.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct NodeEntry {
    /// Number of the node.
    pub(super) id: u16,
    /// Its socket; absent if it is one of its own.
    pub(super) socket: Option<u16>,
    /// Its CPUs; empty for a node that has memory only.
    #[serde(deserialize_with = "cpu_list")]
    #[schemars(with = "notation::List")]
    pub(super) cpus: CpuSet,
    /// Hyperthreads of a core: with 2, the lower half of the CPUs are the first threads.
    #[serde(default = "one")]
    pub(super) threads_per_core: u16,
    /// Its memory.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Size")]
    pub(super) memory: Bytes,
    /// Bandwidth that its memory controllers sustain; absent if not known.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Rate>")]
    pub(super) memory_bandwidth: Option<BytesPerSec>,
    /// Latency of its memory in nanoseconds, if it is slower than that of other nodes (CXL).
    pub(super) memory_ns: Option<f64>,
}

/// The last-level caches.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LlcEntry {
    /// Size of one cache, up to 64 GiB.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Size")]
    pub(super) size: Bytes,
    /// Ways of a set, 1 to 65536; absent if not known.
    pub(super) ways: Option<u32>,
    /// Bytes of a line: a power of two from 8 to 4096.
    pub(super) line_bytes: u32,
    /// How a set chooses the line to evict.
    #[serde(default)]
    pub(super) replacement: Replacement,
    /// Whose cores share a cache.
    #[serde(default)]
    pub(super) shared_by: SharedBy,
    /// Caches of a node, each for an equal part of its cores.
    #[serde(default = "one")]
    pub(super) per_node: u16,
}

/// The CPUs that share a last-level cache.
#[derive(Clone, Copy, Default, Serialize, Deserialize, PartialEq, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum SharedBy {
    /// Those of a node, or an equal part of them.
    #[default]
    Node,
    /// Those of a socket.
    Socket,
}

/// Links of one kind.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkGroup {
    /// Bandwidth of each link in each direction; absent if not known.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Rate>")]
    pub(super) bandwidth: Option<BytesPerSec>,
    /// Latency in nanoseconds that a link adds, up to 100000; `hardware.link.hop_ns` if absent.
    pub(super) hop_ns: Option<f64>,
    /// Pairs of nodes that are joined in both directions.
    #[serde(default)]
    pub(super) between: Vec<(NodeId, NodeId)>,
    /// Pairs of nodes, from and to, that are joined in one direction.
    #[serde(default)]
    pub(super) directed: Vec<(NodeId, NodeId)>,
}

/// Routes of data, each as the nodes on its way: `[0, 2, 3]` leads from node 0 over node 2 to node 3.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct RouteEntry {
    /// Routes that data takes in both directions.
    #[serde(default)]
    pub(super) between: Vec<Vec<NodeId>>,
    /// Routes that data takes in one direction, from the first node to the last.
    #[serde(default)]
    pub(super) directed: Vec<Vec<NodeId>>,
}

/// Distances between nodes: one of the two.
#[derive(Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DistanceEntry {
    /// One distance for each number of links between two nodes, from 0.
    pub(super) by_hops: Option<Vec<u32>>,
    /// The table itself, with a row for each node.
    pub(super) rows: Option<Vec<Vec<u32>>>,
}

/// A PCI device.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct DeviceEntry {
    /// PCI address, `0000:3b:00.0`.
    pub(super) address: String,
    /// PCI class in hexadecimal, `0x020000` for an Ethernet controller.
    pub(super) class: String,
    /// Node that it is attached to.
    pub(super) node: NodeId,
    /// Most that it transfers; absent if not known.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Rate>")]
    pub(super) bandwidth: Option<BytesPerSec>,
    /// Time of a small request to the idle device without a hypervisor; absent if not known.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Time>")]
    pub(super) latency: Option<Ns>,
    /// The same for a guest that drives the device itself; `latency` if absent.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Time>")]
    pub(super) latency_passthrough: Option<Ns>,
    /// The same for a guest with a virtual device; `latency` if absent.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Time>")]
    pub(super) latency_virtual: Option<Ns>,
}

/// Timing figures.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct HardwareEntry {
    /// Clock of the cores, 100 MHz to 20 GHz.
    #[serde(deserialize_with = "hertz")]
    #[schemars(with = "notation::Clock")]
    pub(super) clock: u64,
    /// Whether the LLC also holds everything that L1 and L2 hold.
    pub(super) llc_inclusive: bool,
    /// Most misses that one core can have in flight, 1 to 1024.
    pub(super) misses_in_flight_max: u32,
    /// Bandwidth of a memory controller for scattered lines, as a share of its bandwidth for streams, in (0, 1]; equal if absent.
    pub(super) scattered_throughput: Option<f64>,
    /// Throughput of a core that runs two hyperthreads, as a multiple of its throughput with one, in [1, 2].
    pub(super) smt_throughput: f64,
    /// Entries of the data TLB for 4 KiB pages, 1 to 1048576.
    pub(super) tlb_entries_4k: u32,
    /// Entries of the data TLB for 2 MiB pages, 1 to 1048576.
    pub(super) tlb_entries_2m: u32,
    /// Size of a core's second-level cache, up to 1 GiB.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Size")]
    pub(super) l2: Bytes,
    /// A core's stream prefetcher, for `homenode profile`; as Intel's L2 streamer if absent.
    pub(super) prefetcher: Option<PrefetcherEntry>,
    /// Cost of a TLB miss.
    pub(super) walk: WalkEntry,
    /// Cost of an interrupt to another CPU, for sender and receiver together.
    pub(super) ipi: IpiEntry,
    /// Cost of waking a halted vCPU, in addition to the interrupt; zero if absent.
    pub(super) wake: Option<WakeEntry>,
    /// Unloaded latencies.
    pub(super) latency: LatencyEntry,
    /// How memory latency grows with the controllers' load.
    pub(super) memory_curve: CurveEntry,
    /// Timing of links; required on a machine of several nodes.
    pub(super) link: Option<LinkEntry>,
}

/// Latencies without load.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LatencyEntry {
    /// L1 hit, cycles.
    pub(super) l1_cycles: f64,
    /// L2 hit, cycles.
    pub(super) l2_cycles: f64,
    /// LLC hit, cycles.
    pub(super) llc_cycles: f64,
    /// Access to memory of the CPU's own node, nanoseconds.
    pub(super) memory_ns: f64,
}

/// A stream prefetcher; steps and distances are in lines.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct PrefetcherEntry {
    /// Steps in one direction that make a stream, 1 to 63.
    pub(super) steps: u32,
    /// Largest step of a stream, 1 to 63.
    pub(super) step_lines: u32,
    /// Distance to the nearest line that an access requests, 1 to 63.
    pub(super) nearest: u32,
    /// Distance to the farthest; lines in between are requested too.
    pub(super) farthest: u32,
}

/// Reads of page-table entries that a TLB miss causes, without those that page-walk caches save.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct WalkEntry {
    /// Without virtualization, 0 to 35; 4 without page-walk caches.
    pub(super) native_refs: f64,
    /// In a guest, 0 to 35; 24 without page-walk caches.
    pub(super) nested_refs: f64,
}

/// Cost of an interrupt to another CPU.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct IpiEntry {
    /// On the bare machine, nanoseconds, 0 to 1000000.
    pub(super) native_ns: f64,
    /// Between vCPUs, nanoseconds, 0 to 1000000.
    pub(super) virtual_ns: f64,
}

/// Cost of waking a halted vCPU.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct WakeEntry {
    /// The exit to the hypervisor and the entry that resumes the guest, nanoseconds.
    #[serde(default)]
    pub(super) exit_ns: f64,
    /// What the schedulers of hypervisor and guest take, nanoseconds.
    #[serde(default)]
    pub(super) schedule_ns: f64,
}

/// Latency at load `u`, a share of the bandwidth, over that without load: `1 + alpha·u + beta·u^1.5 / (1 − u)`.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct CurveEntry {
    /// Coefficient of the linear term, 0 to 100.
    pub(super) alpha: f64,
    /// Coefficient of the queueing term, 0 to 100.
    pub(super) beta: f64,
}

/// Timing of a link.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct LinkEntry {
    /// Latency in nanoseconds that one hop adds.
    pub(super) hop_ns: f64,
    /// How that grows with the link's load.
    pub(super) curve: CurveEntry,
}

fn one() -> u16 {
    1
}

fn cpu_list<'de, D: Deserializer<'de>>(d: D) -> Result<CpuSet, D::Error> {
    String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
}

/// Reads `"1.87GHz"`.
fn hertz<'de, D: Deserializer<'de>>(d: D) -> Result<u64, D::Error> {
    let text = String::deserialize(d)?;
    let parsed = [("GHz", 1e9), ("MHz", 1e6)].iter().find_map(|(unit, factor)| {
        let number = text.strip_suffix(unit)?.trim();
        let plain = number.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        plain
            .then(|| number.parse::<f64>().ok())
            .flatten()
            .map(|value| (value * factor).round())
    });
    match parsed {
        Some(value) if value < 1e12 => Ok(value as u64),
        _ => Err(serde::de::Error::custom(format!(
            "`{text}` is not a clock such as `1.87GHz`"
        ))),
    }
}
