//! The JSON of `homenode machine --json`: what programs want, one object per node, units in the names.
//!
//! ```text
//! {"name", "nodes":[{"id","cpus","memory_bytes","memory_allowed","memory_bandwidth_bytes_per_s","socket","llcs"}],
//!  "cpus":[{"id","node","socket","core","llc"}], "llcs":[{"id","cpus","size_bytes","ways","line_bytes","replacement"}],
//!  "distances":[[…]], "links":[{"from","to","bandwidth_bytes_per_s"}], "devices":[{"address","class","node"}],
//!  "notes":[…], "hardware":{…}}
//! ```
//! What is not known is `null`; `hardware`, which only presets have, is left out.

use std::borrow::Cow;

use homenode_units::{Bytes, BytesPerSec, CpuSet, NodeId};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, Serializer};

use crate::model::{Cpu, Device, Hardware, Machine, Replacement};

#[derive(Serialize, JsonSchema)]
struct NodeJson<'a> {
    id: NodeId,
    cpus: &'a CpuSet,
    memory_bytes: Bytes,
    memory_allowed: bool,
    memory_bandwidth_bytes_per_s: Option<BytesPerSec>,
    socket: Option<u16>,
    llcs: Vec<u32>,
}

#[derive(Serialize, JsonSchema)]
struct LlcJson<'a> {
    id: usize,
    cpus: &'a CpuSet,
    size_bytes: Bytes,
    ways: Option<u32>,
    line_bytes: u32,
    replacement: Option<Replacement>,
}

#[derive(Serialize, JsonSchema)]
struct LinkJson {
    from: NodeId,
    to: NodeId,
    bandwidth_bytes_per_s: Option<BytesPerSec>,
}

#[derive(Serialize, JsonSchema)]
#[schemars(rename = "Machine")]
struct MachineJson<'a> {
    name: &'a str,
    nodes: Vec<NodeJson<'a>>,
    cpus: &'a [Cpu],
    llcs: Vec<LlcJson<'a>>,
    distances: &'a [Vec<u32>],
    links: Vec<LinkJson>,
    devices: &'a [Device],
    notes: &'a [String],
    #[serde(skip_serializing_if = "Option::is_none")]
    hardware: Option<&'a Hardware>,
}

impl Serialize for Machine {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let nodes = self.nodes.iter().map(|(id, node)| NodeJson {
            id,
            cpus: &node.cpus,
            memory_bytes: node.memory_bytes,
            memory_allowed: self.memory_allowed.contains(id),
            memory_bandwidth_bytes_per_s: node.memory_bandwidth,
            socket: node.socket,
            llcs: self.llcs_of(id),
        });
        let llcs = self.llcs.iter().enumerate().map(|(id, llc)| LlcJson {
            id,
            cpus: &llc.cpus,
            size_bytes: llc.size_bytes,
            ways: llc.ways,
            line_bytes: llc.line_bytes,
            replacement: llc.replacement,
        });
        let links = self.links.iter().map(|link| LinkJson {
            from: link.from,
            to: link.to,
            bandwidth_bytes_per_s: link.bandwidth,
        });
        let machine = MachineJson {
            name: &self.name,
            nodes: nodes.collect(),
            cpus: &self.cpus,
            llcs: llcs.collect(),
            distances: &self.distances.rows,
            links: links.collect(),
            devices: &self.devices,
            notes: &self.notes,
            hardware: self.hardware.as_ref(),
        };
        machine.serialize(s)
    }
}

impl JsonSchema for Machine {
    fn schema_name() -> Cow<'static, str> {
        MachineJson::schema_name()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        MachineJson::json_schema(generator)
    }
}
