//! Writes a machine file node by node, with comments on its figures.

use std::collections::BTreeMap;

use homenode_machine::{Device, Hardware, Link, Llc, LoadCurve, Machine, Node};
use homenode_units::{Bytes, BytesPerSec, CpuSet, NodeId, NodeSet};
use toml_edit::{Array, ArrayOfTables, DocumentMut, InlineTable, Item, Table, Value};

/// Column at which comments begin.
const COMMENT_COLUMN: usize = 44;

/// Comments on the figures of a machine file, by key: `hardware.clock`, `node.0.memory_bandwidth`, `links.0.1`.
#[derive(Clone, Debug, Default)]
pub struct Comments(BTreeMap<String, String>);

impl Comments {
    /// Sets the comment on the figure of this key.
    pub fn set(&mut self, key: impl Into<String>, text: impl Into<String>) {
        self.0.insert(key.into(), text.into());
    }

    /// Inserts a value under a key of the table, with its comment in the comment column.
    fn put(&self, table: &mut Table, key: &str, value: impl Into<Value>, of: &str) {
        let mut value = value.into();
        if let Some(comment) = self.0.get(of) {
            let plain = |c: char| if c.is_control() { ' ' } else { c };
            let comment: String = comment.chars().map(plain).collect();
            // The line as the file shows it, which determines the gap; a curve's keys are dotted.
            let shown = of.strip_prefix("hardware.link.").unwrap_or(key);
            let columns = format!("{shown} = {value}").chars().count();
            let gap = COMMENT_COLUMN.saturating_sub(columns);
            value.decor_mut().set_suffix(format!("{:gap$} # {comment}", ""));
        }
        table.insert(key, Item::Value(value));
    }
}

/// Returns a machine in the format of `data/machines`, node by node. Reading the text restores the machine as far as the format
/// can express it: the format has its own rule for numbering a core's CPUs, and only one kind of LLC.
pub fn to_toml(machine: &Machine, comments: &Comments) -> String {
    let mut document = DocumentMut::new();
    document.insert("name", text(&machine.name));
    if !machine.notes.is_empty() {
        document.insert("notes", lines(machine.notes.iter().map(Value::from)));
    }
    let nodes = machine
        .nodes
        .iter()
        .map(|(id, described)| node(machine, id, described, comments));
    document.insert("node", Item::ArrayOfTables(nodes.collect()));
    if let Some(first) = machine.llcs.first() {
        document.insert("llc", Item::Table(llc(machine, first, comments)));
    }
    let groups: ArrayOfTables = machine.links.iter().map(|one| link(one, comments)).collect();
    document.insert("links", Item::ArrayOfTables(groups));
    if !machine.routes.is_empty() {
        let nodes = |route: &Vec<NodeId>| Value::from_iter(route.iter().map(|node| i64::from(node.0)));
        let routes = lines(machine.routes.iter().map(nodes));
        document.insert("routes", Item::Table(Table::from_iter([("directed", routes)])));
    }
    let rows = machine.distances.rows.iter();
    let rows = rows.map(|row| Value::from_iter(row.iter().map(|distance| i64::from(*distance))));
    document.insert(
        "distances",
        Item::Table(Table::from_iter([("rows", lines(rows))])),
    );
    let devices: ArrayOfTables = machine.devices.iter().map(device).collect();
    document.insert("devices", Item::ArrayOfTables(devices));
    if let Some(figures) = &machine.hardware {
        let has_links = machine.nodes.len() > 1 || figures.link.hop_ns > 0.0;
        document.insert("hardware", Item::Table(hardware(figures, has_links, comments)));
    }
    document.to_string()
}

fn text(text: impl Into<String>) -> Item {
    toml_edit::value(text.into())
}

fn count(number: usize) -> Item {
    toml_edit::value(i64::try_from(number).unwrap_or(i64::MAX))
}

/// Returns a list with a line for each entry.
fn lines(values: impl Iterator<Item = Value>) -> Item {
    let mut list: Array = values.collect();
    list.iter_mut()
        .for_each(|value| value.decor_mut().set_prefix("\n    "));
    list.set_trailing("\n");
    list.set_trailing_comma(true);
    toml_edit::value(list)
}

fn node(machine: &Machine, id: NodeId, node: &Node, comments: &Comments) -> Table {
    let mut table = Table::new();
    table.insert("id", toml_edit::value(i64::from(id.0)));
    if let Some(socket) = node.socket {
        table.insert("socket", toml_edit::value(i64::from(socket)));
    }
    table.insert("cpus", text(node.cpus.to_string()));
    let (cpus, cores) = (node.cpus.len(), machine.core_count(id));
    if cores > 0 && cpus > cores && cpus.is_multiple_of(cores) {
        table.insert("threads_per_core", count(cpus / cores));
    }
    table.insert("memory", text(size(node.memory_bytes)));
    if let Some(bandwidth) = node.memory_bandwidth {
        let of = format!("node.{id}.memory_bandwidth");
        comments.put(&mut table, "memory_bandwidth", rate(bandwidth), &of);
    }
    if let Some(ns) = node.memory_ns {
        let of = format!("node.{id}.memory_ns");
        comments.put(&mut table, "memory_ns", ns, &of);
    }
    table
}

fn llc(machine: &Machine, llc: &Llc, comments: &Comments) -> Table {
    let mut table = Table::new();
    comments.put(&mut table, "size", size(llc.size_bytes), "llc.size");
    if let Some(ways) = llc.ways {
        table.insert("ways", toml_edit::value(i64::from(ways)));
    }
    if let Some(replacement) = llc.replacement {
        table.insert("replacement", text(replacement.name()));
    }
    table.insert("line_bytes", toml_edit::value(i64::from(llc.line_bytes)));
    let (shared_by, per_node) = sharing(machine);
    table.insert("shared_by", text(shared_by));
    if let Some(per_node) = per_node {
        table.insert("per_node", count(per_node));
    }
    table
}

/// Returns which CPUs share a cache, and how many caches a node has. Chooses the first of the format's ways that yields the
/// machine's groups of CPUs; one cache per node if no way does.
fn sharing(machine: &Machine) -> (&'static str, Option<usize>) {
    let groups: Vec<CpuSet> = machine.llcs.iter().map(|llc| llc.cpus.clone()).collect();
    let of_node = |node: NodeId| machine.cpus_of(&NodeSet::one(node));
    let by_node: Vec<CpuSet> = machine
        .nodes
        .keys()
        .map(of_node)
        .filter(|cpus| !cpus.is_empty())
        .collect();
    let mut by_socket: BTreeMap<u16, CpuSet> = BTreeMap::new();
    for cpu in &machine.cpus {
        by_socket.entry(cpu.socket).or_default().insert(cpu.id);
    }
    let per_node = groups.len() / by_node.len().max(1);
    let divides = |id: NodeId| machine.core_count(id).is_multiple_of(per_node);
    if groups == by_node || by_node.is_empty() {
        ("node", None)
    } else if groups.iter().eq(by_socket.values()) {
        ("socket", None)
    } else if per_node > 1 && machine.nodes.keys().all(divides) {
        ("node", Some(per_node))
    } else {
        ("node", None)
    }
}

fn link(link: &Link, comments: &Comments) -> Table {
    let mut table = Table::new();
    let ends = Value::from_iter([i64::from(link.from.0), i64::from(link.to.0)]);
    table.insert("directed", toml_edit::value(Array::from_iter([ends])));
    if let Some(bandwidth) = link.bandwidth {
        let of = format!("links.{}.{}", link.from, link.to);
        comments.put(&mut table, "bandwidth", rate(bandwidth), &of);
    }
    if let Some(hop) = link.hop_ns {
        table.insert("hop_ns", toml_edit::value(hop));
    }
    table
}

fn device(device: &Device) -> Table {
    let mut table = Table::new();
    table.insert("address", text(&device.address));
    table.insert("class", text(&device.class));
    table.insert("node", toml_edit::value(i64::from(device.node.0)));
    if let Some(bandwidth) = device.bandwidth {
        table.insert("bandwidth", text(rate(bandwidth)));
    }
    let latencies = [
        ("latency", device.latency_ns),
        ("latency_passthrough", device.latency_passthrough_ns),
        ("latency_virtual", device.latency_virtual_ns),
    ];
    for (key, latency) in latencies {
        if let Some(latency) = latency {
            table.insert(key, text(format!("{}ns", latency.0)));
        }
    }
    table
}

fn hardware(hardware: &Hardware, has_links: bool, comments: &Comments) -> Table {
    let figures = |of: &str, rows: Vec<(&str, Value)>| {
        let mut table = Table::new();
        for (key, value) in rows {
            comments.put(&mut table, key, value, &format!("{of}.{key}"));
        }
        table
    };
    let curve = |curve: LoadCurve| vec![("alpha", curve.alpha.into()), ("beta", curve.beta.into())];
    let mut walk = InlineTable::new();
    walk.insert("native_refs", hardware.walk.native_refs.into());
    walk.insert("nested_refs", hardware.walk.nested_refs.into());
    let whole = |number: u32| Value::from(i64::from(number));
    let mut own = vec![
        ("clock", format!("{}GHz", hardware.clock_hz as f64 / 1e9).into()),
        ("llc_inclusive", hardware.llc_inclusive.into()),
        ("misses_in_flight_max", whole(hardware.misses_in_flight_max)),
        ("smt_throughput", hardware.smt_throughput.into()),
        ("tlb_entries_4k", whole(hardware.tlb_entries_4k)),
        ("tlb_entries_2m", whole(hardware.tlb_entries_2m)),
        ("l2", size(hardware.l2_bytes).into()),
        ("walk", walk.into()),
    ];
    own.extend(
        hardware
            .scattered_throughput
            .map(|share| ("scattered_throughput", share.into())),
    );
    own.extend(hardware.prefetcher.map(|prefetcher| {
        let mut table = InlineTable::new();
        table.insert("steps", whole(prefetcher.steps));
        table.insert("step_lines", whole(prefetcher.step_lines));
        table.insert("nearest", whole(prefetcher.nearest));
        table.insert("farthest", whole(prefetcher.farthest));
        ("prefetcher", table.into())
    }));
    let latency = vec![
        ("l1_cycles", hardware.latency.l1_cycles.into()),
        ("l2_cycles", hardware.latency.l2_cycles.into()),
        ("llc_cycles", hardware.latency.llc_cycles.into()),
        ("memory_ns", hardware.latency.memory_ns.into()),
    ];
    let ipi = vec![
        ("native_ns", hardware.ipi.native_ns.into()),
        ("virtual_ns", hardware.ipi.virtual_ns.into()),
    ];
    let mut table = figures("hardware", own);
    table.insert("latency", Item::Table(figures("hardware.latency", latency)));
    let memory_curve = figures("hardware.memory_curve", curve(hardware.memory_curve));
    table.insert("memory_curve", Item::Table(memory_curve));
    table.insert("ipi", Item::Table(figures("hardware.ipi", ipi)));
    if let Some(wake) = hardware.wake {
        let wake = vec![
            ("exit_ns", wake.exit_ns.into()),
            ("schedule_ns", wake.schedule_ns.into()),
        ];
        table.insert("wake", Item::Table(figures("hardware.wake", wake)));
    }
    if has_links {
        let mut link = figures("hardware.link", vec![("hop_ns", hardware.link.hop_ns.into())]);
        let mut of_links = figures("hardware.link.curve", curve(hardware.link.curve));
        of_links.set_dotted(true);
        link.insert("curve", Item::Table(of_links));
        table.insert("link", Item::Table(link));
    }
    table
}

/// Writes the amount in the largest unit that divides it.
fn exact(value: u64, units: &[(&'static str, u64)]) -> String {
    let unit = units
        .iter()
        .find(|(_, factor)| value > 0 && value.is_multiple_of(*factor));
    unit.map_or(format!("{value}B"), |(name, factor)| {
        format!("{}{name}", value / factor)
    })
}

fn size(bytes: Bytes) -> String {
    exact(bytes.0, &[("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)])
}

fn rate(rate: BytesPerSec) -> String {
    let units = [("GB", 1_000_000_000), ("GiB", 1 << 30), ("MB", 1_000_000)];
    format!("{}/s", exact(rate.0, &units))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{from_toml, preset, preset_names};

    #[test]
    fn every_preset_written_and_read_is_the_same_machine() {
        for name in preset_names() {
            let machine = preset(name).unwrap();
            let text = to_toml(&machine, &Comments::default());
            assert_eq!(
                from_toml("written.toml", &text).unwrap(),
                machine,
                "{name}:\n{text}"
            );
        }
    }

    #[test]
    fn names_and_notes_survive_quoting() {
        let mut machine = preset("e5_1603v3").unwrap();
        machine.name = "\"it's\"".to_owned();
        machine.notes = vec!["a \"quoted\" \\ thing\twith\u{1}controls\n".to_owned()];
        let text = to_toml(&machine, &Comments::default());
        let read = from_toml("written.toml", &text).unwrap();
        assert_eq!((read.name, read.notes), (machine.name, machine.notes));
    }

    #[test]
    fn a_machine_as_people_read_it() {
        let mut machine = preset("r420").unwrap();
        machine.hardware.as_mut().unwrap().latency.memory_ns = 77.5;
        let mut comments = Comments::default();
        comments.set("node.1.memory_bandwidth", "measured:\ntwice");
        comments.set("hardware.latency.memory_ns", "measured");
        comments.set("hardware.link.curve.beta", "estimate");
        let text = to_toml(&machine, &comments);
        let begin = "\
name = \"r420\"
notes = [
    \"only the model and its two sockets are published; the processor is assumed to be the Xeon E5-2420\",
]

[[node]]
id = 0
socket = 0
cpus = \"0-5,12-17\"
threads_per_core = 2
memory = \"16GiB\"
memory_bandwidth = \"28GB/s\"

[[node]]
id = 1
socket = 1
cpus = \"6-11,18-23\"
threads_per_core = 2
memory = \"16GiB\"
memory_bandwidth = \"28GB/s\"                  # measured: twice

[llc]
size = \"15MiB\"
ways = 20
";
        assert!(text.starts_with(begin), "{text}");
        for part in [
            "\n[[links]]\ndirected = [[0, 1]]\nbandwidth = \"12GB/s\"\n",
            "\n[distances]\nrows = [\n    [10, 20],\n    [20, 10],\n]\n",
            "\nmemory_ns = 77.5                             # measured\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
        let last = text.lines().last().unwrap_or_default();
        assert!(
            last.starts_with("curve.beta = ") && last.ends_with("  # estimate"),
            "{text}"
        );
    }

    #[test]
    fn amounts_are_written_in_the_largest_exact_unit() {
        assert_eq!(size(Bytes::from_gib(16)), "16GiB");
        assert_eq!(size(Bytes((1 << 30) + 1)), "1073741825B");
        assert_eq!(
            (size(Bytes::ZERO), rate(BytesPerSec(1))),
            ("0B".to_owned(), "1B/s".to_owned())
        );
        assert_eq!(rate(BytesPerSec(13 << 30)), "13GiB/s");
    }
}
