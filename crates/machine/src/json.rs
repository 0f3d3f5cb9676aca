//! The JSON of `homenode machine --json`, for programs: one object per node, with units in the field names.
//!
//! ```text
//! {"name", "nodes":[{"id","cpus","memory_bytes","memory_allowed","memory_bandwidth_bytes_per_s","socket","llcs"}],
//!  "cpus":[{"id","node","socket","core","llc"}], "llcs":[{"id","cpus","size_bytes","ways","line_bytes","replacement"}],
//!  "distances":[[…]], "links":[{"from","to","bandwidth_bytes_per_s"}], "routes":[[…]], "devices":[{"address","class","node"}],
//!  "notes":[…], "hardware":{…}}
//! ```
//! Unknown values are `null`. Only presets have `hardware`; otherwise it is left out.

use std::borrow::Cow;

use homenode_units::{Bytes, BytesPerSec, CpuSet, NodeId};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::{Cpu, Device, Distances, Hardware, Link, Llc, Machine, Node, Replacement};

#[derive(Serialize, Deserialize, JsonSchema)]
struct NodeJson<'a> {
    id: NodeId,
    cpus: Cow<'a, CpuSet>,
    memory_bytes: Bytes,
    memory_allowed: bool,
    memory_bandwidth_bytes_per_s: Option<BytesPerSec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    memory_ns: Option<f64>,
    socket: Option<u16>,
    llcs: Vec<u32>,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct LlcJson<'a> {
    id: usize,
    cpus: Cow<'a, CpuSet>,
    size_bytes: Bytes,
    ways: Option<u32>,
    line_bytes: u32,
    replacement: Option<Replacement>,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct LinkJson {
    from: NodeId,
    to: NodeId,
    bandwidth_bytes_per_s: Option<BytesPerSec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    hop_ns: Option<f64>,
}

#[derive(Serialize, Deserialize, JsonSchema)]
#[schemars(rename = "Machine")]
struct MachineJson<'a> {
    name: Cow<'a, str>,
    nodes: Vec<NodeJson<'a>>,
    cpus: Cow<'a, [Cpu]>,
    llcs: Vec<LlcJson<'a>>,
    distances: Cow<'a, [Vec<u32>]>,
    links: Vec<LinkJson>,
    #[serde(default, skip_serializing_if = "<[_]>::is_empty")]
    routes: Cow<'a, [Vec<NodeId>]>,
    devices: Cow<'a, [Device]>,
    notes: Cow<'a, [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    hardware: Option<Cow<'a, Hardware>>,
}

impl Serialize for Machine {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let nodes = self.nodes.iter().map(|(id, node)| NodeJson {
            id,
            cpus: Cow::Borrowed(&node.cpus),
            memory_bytes: node.memory_bytes,
            memory_allowed: self.memory_allowed.contains(id),
            memory_bandwidth_bytes_per_s: node.memory_bandwidth,
            memory_ns: node.memory_ns,
            socket: node.socket,
            llcs: self.llcs_of(id),
        });
        let llcs = self.llcs.iter().enumerate().map(|(id, llc)| LlcJson {
            id,
            cpus: Cow::Borrowed(&llc.cpus),
            size_bytes: llc.size_bytes,
            ways: llc.ways,
            line_bytes: llc.line_bytes,
            replacement: llc.replacement,
        });
        let links = self.links.iter().map(|link| LinkJson {
            from: link.from,
            to: link.to,
            bandwidth_bytes_per_s: link.bandwidth,
            hop_ns: link.hop_ns,
        });
        let machine = MachineJson {
            name: Cow::Borrowed(&self.name),
            nodes: nodes.collect(),
            cpus: Cow::Borrowed(&self.cpus),
            llcs: llcs.collect(),
            distances: Cow::Borrowed(&self.distances.rows),
            links: links.collect(),
            routes: Cow::Borrowed(&self.routes),
            devices: Cow::Borrowed(&self.devices),
            notes: Cow::Borrowed(&self.notes),
            hardware: self.hardware.as_ref().map(Cow::Borrowed),
        };
        machine.serialize(s)
    }
}

impl<'de> Deserialize<'de> for Machine {
    /// Reads the JSON back, and refuses a machine that breaks a rule.
    fn deserialize<D: Deserializer<'de>>(d: D) -> Result<Machine, D::Error> {
        let json = MachineJson::deserialize(d)?;
        let allowed = json.nodes.iter().filter(|node| node.memory_allowed);
        let memory_allowed = allowed.map(|node| node.id).collect();
        let node = |node: NodeJson<'_>| {
            let described = Node {
                cpus: node.cpus.into_owned(),
                memory_bytes: node.memory_bytes,
                memory_bandwidth: node.memory_bandwidth_bytes_per_s,
                memory_ns: node.memory_ns,
                socket: node.socket,
            };
            (node.id, described)
        };
        let llc = |llc: LlcJson<'_>| Llc {
            cpus: llc.cpus.into_owned(),
            size_bytes: llc.size_bytes,
            ways: llc.ways,
            line_bytes: llc.line_bytes,
            replacement: llc.replacement,
        };
        let link = |link: LinkJson| Link {
            from: link.from,
            to: link.to,
            bandwidth: link.bandwidth_bytes_per_s,
            hop_ns: link.hop_ns,
        };
        let machine = Machine {
            name: json.name.into_owned(),
            nodes: json.nodes.into_iter().map(node).collect(),
            memory_allowed,
            isolated: CpuSet::new(),
            cpus: json.cpus.into_owned(),
            llcs: json.llcs.into_iter().map(llc).collect(),
            distances: Distances {
                rows: json.distances.into_owned(),
            },
            links: json.links.into_iter().map(link).collect(),
            routes: json.routes.into_owned(),
            devices: json.devices.into_owned(),
            notes: json.notes.into_owned(),
            hardware: json.hardware.map(Cow::into_owned),
        };
        machine.checked().map_err(serde::de::Error::custom)
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
