//! Traffic of memory controllers and links, counted by PMUs outside the cores (`/sys/bus/event_source/devices`).
//!
//! | PMU | events | counts |
//! |---|---|---|
//! | `uncore_imc_N` | `cas_count_{read,write}`, newer `…_sch{0,1}` | traffic of one memory channel (Intel servers) |
//! | `uncore_imc` | `data_reads`, `data_writes` | traffic of all channels (Intel clients) |
//! | `uncore_imc_free_running_N` | `read`/`write`, `data_read`/`data_write` | the same, used if the first two have nothing |
//! | `amd_umc_N` | CAS commands, 64 bytes each | traffic of one channel (AMD since Zen 4) |
//! | `uncore_upi_N` | data flits sent | traffic to the socket that the link leads to (Intel) |
//!
//! Event names, their encoding, scale and unit come from sysfs if it has them. These PMUs count per socket, so a figure is a
//! node's only if the socket is one node. With several nodes per socket (sub-NUMA clusters, NPS4) there is no answer, only a
//! note. `amd_df` names no events in sysfs and counts differently on each generation, so it is not used. A node whose counters
//! cannot all be opened has no answer either, since part of its traffic would be missing.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;

use homenode_host::LinkSample;
use homenode_machine::Machine;
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeMap};

use crate::perf::{self, Accumulator, Attr, Reading, Scope};
use crate::read::{self, ReadError};

const PMUS_MAX: usize = 4096;
/// Data flits of UPI carry 64 bytes in nine slots.
const UPI_BYTES_PER_FLIT: f64 = 64.0 / 9.0;
/// One CAS command of DDR4 or DDR5 moves one cache line.
const UMC_BYTES_PER_CAS: f64 = 64.0;

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
    /// CPU to open it on: the one through which its socket's counters are read.
    pub cpu: CpuId,
    /// Bytes that one count stands for.
    pub bytes_per_count: f64,
    /// Its purpose.
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

/// The bits of a configuration word that a term fills: `config:0-7,32`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Format {
    word: usize,
    bits: Vec<(u32, u32)>,
}

fn parse_format(text: &str) -> Option<Format> {
    let (word, ranges) = text.trim().split_once(':')?;
    let word = match word {
        "config" => 0,
        "config1" => 1,
        "config2" => 2,
        _ => return None,
    };
    let mut bits = Vec::new();
    for range in ranges.split(',') {
        let (low, high) = range.split_once('-').unwrap_or((range, range));
        let (low, high) = (low.parse().ok()?, high.parse().ok()?);
        if low > high || high > 63 {
            return None;
        }
        bits.push((low, high));
    }
    Some(Format { word, bits })
}

impl Format {
    /// Puts a value into these bits, lowest first; `None` if it does not fit.
    fn encode(&self, value: u64, words: &mut [u64; 3]) -> Option<()> {
        let mut rest = value;
        for &(low, high) in &self.bits {
            let width = high - low + 1;
            let mask = if width == 64 { u64::MAX } else { (1 << width) - 1 };
            words[self.word] |= (rest & mask) << low;
            rest = if width == 64 { 0 } else { rest >> width };
        }
        (rest == 0).then_some(())
    }
}

/// One PMU, as sysfs describes it.
struct Pmu {
    name: String,
    kind: u32,
    cpus: CpuSet,
    formats: BTreeMap<String, Format>,
    /// Terms and bytes per count of each event, by name.
    events: BTreeMap<String, (String, Option<f64>)>,
}

impl Pmu {
    fn read(root: &Path, name: &str) -> Result<Option<Pmu>, ReadError> {
        let dir = root.join("sys/bus/event_source/devices").join(name);
        let Some(kind) = read::value_if_there(&dir.join("type"), "the number of a PMU type")? else {
            return Ok(None);
        };
        let Some(cpus) = read::value_if_there::<CpuSet>(&dir.join("cpumask"), "a list of CPUs")? else {
            return Ok(None);
        };
        let mut formats = BTreeMap::new();
        for term in read::names(&dir.join("format"), 256)? {
            let path = dir.join("format").join(&term);
            let text = read::text(&path, read::SMALL_BYTES)?;
            let format =
                parse_format(&text).ok_or_else(|| ReadError::malformed(&path, "`config:LOW-HIGH`", &text))?;
            formats.insert(term, format);
        }
        let mut events = BTreeMap::new();
        for event in read::names(&dir.join("events"), 4096)? {
            if event.contains('.') {
                continue; // `.scale`, `.unit`, `.snapshot`, …
            }
            let terms = read::text(&dir.join("events").join(&event), read::SMALL_BYTES)?;
            let scale: Option<f64> =
                read::value_if_there(&dir.join(format!("events/{event}.scale")), "a number")?;
            let unit = read::text_if_there(&dir.join(format!("events/{event}.unit")), read::SMALL_BYTES)?;
            let bytes = unit
                .as_deref()
                .and_then(unit_bytes)
                .zip(scale)
                .map(|(unit, scale)| unit * scale);
            let bytes = bytes.filter(|b| b.is_finite() && *b > 0.0);
            events.insert(event, (terms.trim().to_owned(), bytes));
        }
        Ok(Some(Pmu {
            name: name.to_owned(),
            kind,
            cpus,
            formats,
            events,
        }))
    }

    /// Encodes terms such as `event=0x04,umask=0x03`; `None` if a term is unknown or does not fit.
    fn encode(&self, terms: &str) -> Option<Attr> {
        let mut words = [0; 3];
        for term in terms.split(',').filter(|t| !t.is_empty()) {
            let (name, value) = term.split_once('=').unwrap_or((term, "1"));
            let value = match value.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).ok()?,
                None => value.parse().ok()?,
            };
            self.formats.get(name.trim())?.encode(value, &mut words)?;
        }
        let mut attr = Attr::counting(self.kind, words[0]);
        (attr.config1, attr.config2) = (words[1], words[2]);
        Some(attr)
    }

    /// Returns the named events with their bytes per count; `None` unless sysfs has all of them.
    fn named(&self, names: &[&str]) -> Option<Vec<(String, Attr, f64)>> {
        let event = |name: &&str| {
            let (terms, bytes) = self.events.get(*name)?;
            Some(((*name).to_owned(), self.encode(terms)?, (*bytes)?))
        };
        names.iter().map(event).collect()
    }

    /// Returns events that together count all traffic of the memory channels behind this PMU.
    fn memory_events(&self) -> Option<Vec<(String, Attr, f64)>> {
        if self.name.starts_with("amd_umc") {
            // Without `rdwrmask`, both reads and writes count.
            return Some(vec![(
                "cas_cmd".to_owned(),
                self.encode("event=0x0a")?,
                UMC_BYTES_PER_CAS,
            )]);
        }
        // Try the new names first: if both sets are there, the old names count only one of two sub-channels.
        let sets: [&[&str]; 5] = [
            &[
                "cas_count_read_sch0",
                "cas_count_read_sch1",
                "cas_count_write_sch0",
                "cas_count_write_sch1",
            ],
            &["cas_count_read", "cas_count_write"],
            &["data_reads", "data_writes"],
            &["data_read", "data_write"],
            &["read", "write"],
        ];
        sets.iter().find_map(|names| self.named(names))
    }

    /// Returns the event that counts data sent over a link.
    fn link_event(&self) -> Option<(String, Attr, f64)> {
        if let Some(named) = self.named(&["txl_flits_all_data"]) {
            return named.into_iter().next();
        }
        let attr = self.encode("event=0x02,umask=0x0f")?;
        Some(("txl_flits.all_data".to_owned(), attr, UPI_BYTES_PER_FLIT))
    }
}

fn unit_bytes(unit: &str) -> Option<f64> {
    match unit.trim() {
        "MiB" => Some(Bytes::from_mib(1).as_f64()),
        "Bytes" | "bytes" | "B" => Some(1.0),
        "KiB" => Some(1024.0),
        "MB" => Some(1e6),
        _ => None,
    }
}

/// Returns the node of a socket, if the socket is one node with memory.
fn node_of_socket(machine: &Machine, socket: u16) -> Option<NodeId> {
    let mut nodes = machine.cpus.iter().filter(|c| c.socket == socket).map(|c| c.node);
    let first = nodes.next()?;
    nodes.all(|node| node == first).then_some(first)
}

/// Determines what this host could count, without opening any event.
///
/// # Errors
/// If a file of a PMU is malformed.
pub fn discover(root: &Path, machine: &Machine) -> Result<Layout, ReadError> {
    let names = read::names(&root.join("sys/bus/event_source/devices"), PMUS_MAX)?;
    let mut layout = Layout::default();
    let numbered = |name: &str, prefix: &str| {
        name.strip_prefix(prefix)
            .is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let is_channel = |n: &String| n == "uncore_imc" || numbered(n, "uncore_imc_") || numbered(n, "amd_umc_");
    for name in names.iter().filter(|n| is_channel(n)) {
        layout.add_memory(root, machine, name)?;
    }
    if layout.events.is_empty() {
        for name in names
            .iter()
            .filter(|n| numbered(n, "uncore_imc_free_running_") || *n == "uncore_imc_free_running")
        {
            layout.add_memory(root, machine, name)?;
        }
    }
    for name in names.iter().filter(|n| numbered(n, "uncore_upi_")) {
        layout.add_link(root, machine, name)?;
    }
    if names.iter().any(|n| n == "amd_df") && layout.events.is_empty() {
        layout.note(
            "amd_df counts memory traffic, but names no events in sysfs: node bandwidth is not read from it",
        );
    }
    if names.iter().any(|n| n.starts_with("uncore_qpi")) {
        layout.note("QPI links are not mapped to sockets in sysfs: traffic between nodes is not known");
    }
    Ok(layout)
}

impl Layout {
    fn note(&mut self, text: &str) {
        if !self.notes.iter().any(|n| n == text) {
            self.notes.push(text.to_owned());
        }
    }

    fn add_memory(&mut self, root: &Path, machine: &Machine, name: &str) -> Result<(), ReadError> {
        let Some(pmu) = Pmu::read(root, name)? else {
            return Ok(());
        };
        let Some(events) = pmu.memory_events() else {
            self.note(&format!(
                "{name} has no event that counts memory traffic in bytes"
            ));
            return Ok(());
        };
        for cpu in pmu.cpus.iter() {
            let Some(socket) = machine.cpu(cpu).map(|c| c.socket) else {
                self.note(&format!("{name} is read on CPU {cpu}, which is not usable here"));
                continue;
            };
            let Some(node) = node_of_socket(machine, socket) else {
                self.note(&format!("socket {socket} has several nodes and one set of memory counters: the bandwidth of its nodes is not known"));
                continue;
            };
            self.events
                .extend(events.iter().map(|(event, attr, bytes)| Event {
                    pmu: name.to_owned(),
                    name: event.clone(),
                    cpu,
                    bytes_per_count: *bytes,
                    purpose: Purpose::Memory(node),
                    attr: *attr,
                }));
        }
        Ok(())
    }

    /// Adds a UPI link. `/sys/devices/uncore_upi_N/dieD` (Linux 5.18) names its destination, `upi_X,die_Y`.
    fn add_link(&mut self, root: &Path, machine: &Machine, name: &str) -> Result<(), ReadError> {
        let Some(pmu) = Pmu::read(root, name)? else {
            return Ok(());
        };
        let Some((event, attr, bytes)) = pmu.link_event() else {
            return Ok(());
        };
        for cpu in pmu.cpus.iter() {
            let Some(socket) = machine.cpu(cpu).map(|c| c.socket) else {
                continue;
            };
            let path = root
                .join("sys/bus/event_source/devices")
                .join(name)
                .join(format!("die{socket}"));
            let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
                self.note("this kernel does not say where UPI links lead (Linux 5.18 and later do): traffic between nodes is not known");
                continue;
            };
            let peer = text
                .trim()
                .split_once(",die_")
                .and_then(|(_, die)| die.parse::<u16>().ok());
            let peer = peer.ok_or_else(|| ReadError::malformed(&path, "`upi_N,die_N`", &text))?;
            let ends = (node_of_socket(machine, socket), node_of_socket(machine, peer));
            let (Some(from), Some(to)) = ends else { continue };
            if from != to {
                let purpose = Purpose::Link(from, to);
                self.events.push(Event {
                    pmu: name.to_owned(),
                    name: event.clone(),
                    cpu,
                    bytes_per_count: bytes,
                    purpose,
                    attr,
                });
            }
        }
        Ok(())
    }
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
