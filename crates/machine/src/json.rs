//! The JSON of `homenode machine --json`: what programs want, one object per node, units in the names.
//!
//! ```text
//! {"name", "nodes":[{"id","cpus","memory_bytes","memory_allowed","memory_bandwidth_bytes_per_sec","socket","llcs"}],
//!  "cpus":[{"id","node","socket","core","llc"}], "llcs":[{"id","cpus","size_bytes","ways","line_bytes","replacement"}],
//!  "distances":[[…]], "links":[{"from","to","bandwidth_bytes_per_sec"}], "devices":[{"address","class","node"}],
//!  "notes":[…], "hardware":{…}}
//! ```
//! What is not known is `null`; `hardware`, which only presets have, is left out.

use homenode_units::{Bytes, BytesPerSec, CpuSet, NodeId};
use serde::ser::SerializeStruct;
use serde::{Serialize, Serializer};

use crate::model::{Machine, Replacement};

#[derive(Serialize)]
struct NodeJson<'a> {
    id: NodeId,
    cpus: &'a CpuSet,
    memory_bytes: Bytes,
    memory_allowed: bool,
    memory_bandwidth_bytes_per_sec: Option<BytesPerSec>,
    socket: Option<u16>,
    llcs: Vec<u32>,
}

#[derive(Serialize)]
struct LlcJson<'a> {
    id: usize,
    cpus: &'a CpuSet,
    size_bytes: Bytes,
    ways: Option<u32>,
    line_bytes: u32,
    replacement: Option<Replacement>,
}

#[derive(Serialize)]
struct LinkJson {
    from: NodeId,
    to: NodeId,
    bandwidth_bytes_per_sec: Option<BytesPerSec>,
}

impl Serialize for Machine {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let nodes: Vec<NodeJson<'_>> = self
            .nodes
            .iter()
            .map(|(id, node)| NodeJson {
                id,
                cpus: &node.cpus,
                memory_bytes: node.memory_bytes,
                memory_allowed: self.memory_allowed.contains(id),
                memory_bandwidth_bytes_per_sec: node.memory_bandwidth,
                socket: node.socket,
                llcs: self.llcs_of(id),
            })
            .collect();
        let llcs: Vec<LlcJson<'_>> = self
            .llcs
            .iter()
            .enumerate()
            .map(|(id, llc)| LlcJson {
                id,
                cpus: &llc.cpus,
                size_bytes: llc.size_bytes,
                ways: llc.ways,
                line_bytes: llc.line_bytes,
                replacement: llc.replacement,
            })
            .collect();
        let links: Vec<LinkJson> = self
            .links
            .iter()
            .map(|link| LinkJson {
                from: link.from,
                to: link.to,
                bandwidth_bytes_per_sec: link.bandwidth,
            })
            .collect();
        let mut json = s.serialize_struct("Machine", if self.hardware.is_some() { 9 } else { 8 })?;
        json.serialize_field("name", &self.name)?;
        json.serialize_field("nodes", &nodes)?;
        json.serialize_field("cpus", &self.cpus)?;
        json.serialize_field("llcs", &llcs)?;
        json.serialize_field("distances", &self.distances.rows)?;
        json.serialize_field("links", &links)?;
        json.serialize_field("devices", &self.devices)?;
        json.serialize_field("notes", &self.notes)?;
        match &self.hardware {
            Some(hardware) => json.serialize_field("hardware", hardware)?,
            None => json.skip_field("hardware")?,
        }
        json.end()
    }
}
