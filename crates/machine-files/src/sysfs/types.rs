//! The contents of the files, as read; nothing is derived from them here.

use std::path::PathBuf;

use homenode_units::{Bytes, BytesPerSec, CpuId, CpuSet, NodeId, NodeSet};

/// The contents of a tree.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Told {
    /// Path of the nodes' description, for messages.
    pub nodes_path: PathBuf,
    pub name: String,
    /// `None` if the kernel knows no nodes.
    pub nodes: Option<Vec<ToldNode>>,
    /// Nodes whose memory belongs to a device.
    pub nodes_of_devices: NodeSet,
    /// Node numbers that the kernel could use.
    pub nodes_possible: Option<NodeSet>,
    /// Memory of the whole host.
    pub memory: Option<Bytes>,
    pub cpus_online: CpuSet,
    pub cpus_present: Option<CpuSet>,
    /// Online CPUs, ascending.
    pub cpus: Vec<ToldCpu>,
    pub devices: Vec<ToldDevice>,
    /// CPUs that the kernel reserves for tasks bound to them.
    pub cpus_isolated: CpuSet,
    /// CPUs and nodes that this process may use; `None` if the machine is read as a whole.
    pub cpus_allowed: Option<CpuSet>,
    pub nodes_allowed: Option<NodeSet>,
}

/// One `nodeN` directory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToldNode {
    pub id: NodeId,
    /// The directory, for messages.
    pub path: PathBuf,
    pub cpus: CpuSet,
    pub memory: Bytes,
    pub distances: Option<Vec<u32>>,
    pub memory_bandwidth: Option<BytesPerSec>,
    /// Latency of the node's memory, nanoseconds.
    pub memory_ns: Option<f64>,
}

/// One `cpuN` directory.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToldCpu {
    pub id: CpuId,
    /// The directory, for messages.
    pub path: PathBuf,
    /// Hyperthreads of the same core, including this one.
    pub siblings: Option<CpuSet>,
    /// `None` if the file is missing or holds `-1`.
    pub package: Option<u32>,
    /// The data cache of the highest level.
    pub llc: Option<ToldCache>,
}

/// One `cache/indexM` directory of the last level.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToldCache {
    pub level: u32,
    pub size: Option<Bytes>,
    pub ways: Option<u32>,
    pub line_bytes: Option<u32>,
    pub shared: Option<CpuSet>,
}

/// One PCI device with a node.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct ToldDevice {
    pub address: String,
    pub class: String,
    pub node: u32,
}
