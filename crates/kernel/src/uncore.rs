//! Traffic of memory controllers and links, counted by PMUs outside the cores (`/sys/bus/event_source/devices`).
//!
//! | PMU | events | bytes each | counts |
//! |---|---|---|---|
//! | `uncore_imc_N` | `cas_count_{read,write}`, newer `…_sch{0,1}` | by sysfs | traffic of one memory channel (Intel servers) |
//! | `uncore_imc` | `data_reads`, `data_writes` | by sysfs | traffic of all channels (Intel clients) |
//! | `uncore_imc_free_running_N` | `read`/`write`, `data_read`/`data_write` | by sysfs | the same, if those two have nothing |
//! | `amd_umc_N` | CAS commands | 64 | traffic of one channel (AMD since Zen 4) |
//! | `amd_df` | requests with data, of each channel | 64 | traffic of all channels (EPYC 7001 to 7003, Zen to Zen 3) |
//! | `arm_cmn_N` | `hnf_mc_reqs`, newer `hns_mc_reqs_local_all` | 64 | requests of a mesh to its memory controllers (Arm) |
//! | `uncore_upi_N` | data flits sent | 64 / 9 | traffic of one link to another socket (Intel since Skylake) |
//! | `uncore_qpi_N` | data flits sent | 8 | the same (Intel before Skylake) |
//! | `amd_df` | outbound data, of each link | 32; 64 since Zen 4 | traffic of all links to the other socket (AMD) |
//!
//! Event names, their encoding, scale and unit come from sysfs if it has them; other encodings are those of the public tables in
//! Linux' `tools/perf/pmu-events`. `amd_df` has fewer counters than events, so the kernel rotates them and the figures are scaled
//! up. A mesh may count a request twice that its controller sends back (`hnf_mc_retries`), so under load its figure may be high.
//! A mesh's watchpoints, `sbsx_*` and `rnid_*` are not used: they count flits of links and of I/O, not what memory moves.
//! `amd_l3` is not read: it counts by L3 and not by VM, and [`crate::perf`] has an LLC event for threads on the same processors.
//!
//! # Whose traffic it is
//!
//! - *Memory.* If a socket is one node, it is that node's. If a socket is several nodes (sub-NUMA clusters, NPS2 and NPS4), it is
//!   a node's only if the PMU has a copy on each of them (`cpumask`), or if public text says which channel belongs to which
//!   cluster: Linux' `tools/perf/arch/x86/util/pmu.c` does for Sapphire, Emerald and Granite Rapids. A mesh is a node's if each
//!   socket has its own.
//! - *Links.* `/sys/devices/uncore_upi_N/dieD` (Linux 5.18) names a link's destination. On a host of two sockets a link can lead
//!   only to the other one. A socket of several nodes has no figure, since a link serves all of them.
//!
//! Otherwise there is no answer, only a note with the reason. A node or link whose counters cannot all be opened has no answer
//! either, since part of its traffic would be missing.
//!
//! `data/event_source` has trees of processors of each kind, with the figures that tests expect of them.

use std::collections::BTreeMap;
use std::fs::File;

use homenode_host::LinkSample;
use homenode_units::{CpuId, NodeId, NodeMap};

use crate::perf::{self, Accumulator, Attr, Reading, Scope};

pub use find::discover;

mod find;

/// What an event is counted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Traffic of the memory controllers of a node.
    Memory(NodeId),
    /// Traffic from one node to another.
    Link(NodeId, NodeId),
}

/// One event to open.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The PMU's name.
    pub pmu: String,
    /// The event's name.
    pub name: String,
    /// CPU to open it on: the one through which the PMU's copy is read.
    pub cpu: CpuId,
    /// Bytes that one count stands for.
    pub bytes_per_count: f64,
    /// What the event is counted for.
    pub purpose: Purpose,
    attr: Attr,
}

/// What this host's PMUs could count.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Layout {
    /// Events to open.
    pub events: Vec<Event>,
    /// Notes for the operator on what is not counted and why.
    pub notes: Vec<String>,
}

struct Meter {
    event: Event,
    file: File,
    sums: Accumulator<1>,
}

/// Open counters of memory controllers and links.
#[derive(Default)]
pub struct Uncore {
    meters: Vec<Meter>,
    /// Purposes for which at least one counter is missing.
    incomplete: Vec<Purpose>,
    /// Notes for the operator on what is not counted and why.
    pub notes: Vec<String>,
}

impl Uncore {
    /// Opens the discovered events. Events that cannot be opened are noted; they are not an error.
    pub fn open(layout: Layout) -> Uncore {
        let mut uncore = Uncore {
            notes: layout.notes,
            ..Uncore::default()
        };
        for event in layout.events {
            match perf::open(&event.attr, Scope::Cpu(event.cpu.0), None) {
                Ok(file) => uncore.meters.push(Meter {
                    event,
                    file,
                    sums: Accumulator::new(),
                }),
                Err(error) => uncore.lose(
                    &event,
                    &perf::absence(&error).unwrap_or_else(|| error.to_string()),
                ),
            }
        }
        uncore
    }

    /// Returns how many counters are open.
    pub fn count(&self) -> usize {
        self.meters.len()
    }

    fn lose(&mut self, event: &Event, why: &str) {
        if !self.incomplete.contains(&event.purpose) {
            self.incomplete.push(event.purpose);
            let what = match event.purpose {
                Purpose::Memory(node) => format!("memory bandwidth of node {node}"),
                Purpose::Link(from, to) => format!("traffic from node {from} to node {to}"),
            };
            self.notes.push(format!(
                "{what} is not counted: {}/{}: {why}",
                event.pmu, event.name
            ));
        }
    }

    /// Returns the bytes until now for each node and link that is counted completely.
    pub fn read(&mut self) -> (NodeMap<u64>, Vec<LinkSample>) {
        let mut bytes: BTreeMap<Purpose, f64> = BTreeMap::new();
        let mut lost = Vec::new();
        for meter in &mut self.meters {
            let reading = Reading::read(&meter.file).ok().flatten();
            match reading.and_then(|reading| meter.sums.update(reading)) {
                Some([count]) => {
                    let moved = count as f64 * meter.event.bytes_per_count;
                    *bytes.entry(meter.event.purpose).or_default() += moved;
                }
                None => lost.push(meter.event.clone()),
            }
        }
        for event in lost {
            self.lose(&event, "the counter never runs");
        }
        bytes.retain(|purpose, _| !self.incomplete.contains(purpose));
        let mut nodes = NodeMap::new();
        let mut links = Vec::new();
        for (purpose, bytes) in bytes {
            match purpose {
                Purpose::Memory(node) => nodes.insert(node, bytes as u64),
                Purpose::Link(from, to) => links.push(LinkSample {
                    from,
                    to,
                    bytes: bytes as u64,
                }),
            }
        }
        (nodes, links)
    }
}

#[cfg(test)]
mod tests;
