//! Shows a machine to people: the output of `homenode machine`.

use std::fmt::Write;

use comfy_table::{CellAlignment, Table, presets};
use homenode_units::{Bytes, BytesPerSec, CpuSet, NodeId, NodeSet};

use homenode_machine::{Hardware, Machine};

/// Most devices that are listed by address; the others are only counted.
const DEVICES_SHOWN_MAX: usize = 16;

/// Returns the machine as text: nodes, caches, links, distances, devices and peculiarities. Ends with a line break.
pub fn render_text(machine: &Machine) -> String {
    let mut out = String::new();
    headline(&mut out, machine);
    let mut sections = vec![
        nodes(machine),
        distances(machine),
        links(machine),
        devices(machine),
    ];
    sections.extend(
        machine
            .hardware
            .as_ref()
            .map(|hardware| timing(machine, hardware)),
    );
    for section in sections.into_iter().filter(|section| !section.is_empty()) {
        let _ = write!(out, "\n{}\n", section.trim_end());
    }
    for (at, note) in machine.notes.iter().enumerate() {
        let _ = writeln!(out, "{}note: {note}", if at == 0 { "\n" } else { "" });
    }
    out
}

/// Returns a machine's size in a line: nodes, CPUs, last-level caches, memory.
pub fn render_summary(machine: &Machine) -> String {
    format!(
        "{}, {}, {}, {}",
        count(machine.nodes.len(), "node"),
        count(machine.cpus.len(), "CPU"),
        count(machine.llcs.len(), "last-level cache"),
        memory(machine)
    )
}

fn memory(machine: &Machine) -> Bytes {
    machine.nodes.values().map(|node| node.memory_bytes).sum()
}

fn headline(out: &mut String, machine: &Machine) {
    let memory = memory(machine);
    let cores: usize = machine.nodes.keys().map(|node| machine.core_count(node)).sum();
    let _ = writeln!(
        out,
        "{}: {}, {} ({}, {} per core), {memory} of memory",
        machine.name,
        count(machine.nodes.len(), "node"),
        count(machine.cpus.len(), "CPU"),
        count(cores, "core"),
        count(machine.threads_per_core(), "thread"),
    );
}

fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

fn table<S: Into<String>>(header: impl IntoIterator<Item = S>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.into_iter().map(Into::into).collect::<Vec<String>>());
    table
}

/// Aligns figures to the right. All columns are figures, except the first and those in `text_columns`.
fn finish(mut table: Table, text_columns: &[usize]) -> String {
    for (at, column) in table.column_iter_mut().enumerate() {
        let figures = at > 0 && !text_columns.contains(&at);
        column.set_cell_alignment(if figures {
            CellAlignment::Right
        } else {
            CellAlignment::Left
        });
        column.set_padding((0, 2));
    }
    table.trim_fmt()
}

fn nodes(machine: &Machine) -> String {
    let mut table = table(["node", "socket", "CPUs", "cores", "memory", "bandwidth", "LLC"]);
    for (id, node) in machine.nodes.iter() {
        let forbidden = if machine.memory_allowed.contains(id) {
            ""
        } else {
            " (not allowed)"
        };
        table.add_row([
            id.to_string(),
            node.socket.map_or("-".to_owned(), |socket| socket.to_string()),
            cpu_list(&node.cpus),
            machine.core_count(id).to_string(),
            format!("{}{forbidden}", node.memory_bytes),
            rate(node.memory_bandwidth),
            llcs(machine, id),
        ]);
    }
    finish(table, &[2, 6])
}

fn cpu_list(cpus: &CpuSet) -> String {
    if cpus.is_empty() {
        "none".to_owned()
    } else {
        cpus.to_string()
    }
}

fn rate(rate: Option<BytesPerSec>) -> String {
    rate.map_or("-".to_owned(), |rate| rate.to_string())
}

/// Describes a node's caches, such as `2 x 8MiB`, and names the other nodes that share them.
fn llcs(machine: &Machine, node: NodeId) -> String {
    let of_node: Vec<_> = machine
        .llcs_of(node)
        .into_iter()
        .map(|at| &machine.llcs[at as usize])
        .collect();
    let Some(first) = of_node.first() else {
        return "-".to_owned();
    };
    let same = of_node.iter().all(|llc| llc.size_bytes == first.size_bytes);
    let mut text = match (of_node.len(), same) {
        (1, _) => first.size_bytes.to_string(),
        (n, true) => format!("{n} x {}", first.size_bytes),
        _ => of_node
            .iter()
            .map(|llc| llc.size_bytes.to_string())
            .collect::<Vec<_>>()
            .join(" + "),
    };
    if let Some(ways) = first
        .ways
        .filter(|_| of_node.iter().all(|llc| llc.ways == first.ways))
    {
        let _ = write!(text, ", {ways}-way");
    }
    let sharers = of_node
        .iter()
        .flat_map(|llc| llc.cpus.iter())
        .filter_map(|cpu| machine.node_of(cpu));
    let others: NodeSet = sharers.filter(|other| *other != node).collect();
    if !others.is_empty() {
        let _ = write!(text, ", with node {others}");
    }
    text
}

fn distances(machine: &Machine) -> String {
    if machine.nodes.len() == 1 {
        return String::new();
    }
    let mut table = table(
        ["distance"]
            .into_iter()
            .map(str::to_owned)
            .chain(machine.nodes.keys().map(|id| id.to_string())),
    );
    for (from, row) in machine.nodes.keys().zip(&machine.distances.rows) {
        table.add_row(
            [from.to_string()]
                .into_iter()
                .chain(row.iter().map(u32::to_string)),
        );
    }
    finish(table, &[])
}

/// Lists links. If both directions are alike, they share a line.
fn links(machine: &Machine) -> String {
    if machine.links.is_empty() {
        return String::new();
    }
    let mut table = table(["link", "bandwidth"]);
    for link in &machine.links {
        let back = machine
            .links
            .iter()
            .find(|other| (other.from, other.to) == (link.to, link.from));
        let both = back.is_some_and(|back| (back.bandwidth, back.hop_ns) == (link.bandwidth, link.hop_ns));
        if both && link.from > link.to {
            continue;
        }
        let arrow = if both { "<->" } else { "->" };
        let each = if both { " each way" } else { "" };
        let hop = link.hop_ns.map_or(String::new(), |hop| format!(", {hop} ns"));
        let bandwidth = link
            .bandwidth
            .map_or(format!("-{hop}"), |rate| format!("{rate}{each}{hop}"));
        table.add_row([format!("{} {arrow} {}", link.from, link.to), bandwidth]);
    }
    finish(table, &[1])
}

fn devices(machine: &Machine) -> String {
    if machine.devices.is_empty() {
        return String::new();
    }
    let mut table = table(["device", "node", "kind"]);
    for device in machine.devices.iter().take(DEVICES_SHOWN_MAX) {
        table.add_row([
            device.address.clone(),
            device.node.to_string(),
            kind(&device.class),
        ]);
    }
    let mut text = finish(table, &[2]);
    if machine.devices.len() > DEVICES_SHOWN_MAX {
        let _ = write!(text, "\nand {} more", machine.devices.len() - DEVICES_SHOWN_MAX);
    }
    text
}

/// Returns a PCI base class in words if it matters for placing VMs, otherwise the code.
fn kind(class: &str) -> String {
    let word = match class.get(2..4) {
        Some("01") => "storage",
        Some("02") => "network",
        Some("03") => "display",
        Some("06") => "bridge",
        Some("0b") => "processor",
        Some("0c") => "serial bus",
        Some("12") => "accelerator",
        _ => return class.to_owned(),
    };
    format!("{word} ({class})")
}

fn timing(machine: &Machine, hardware: &Hardware) -> String {
    let latency = hardware.latency;
    let mut table = table(["timing", ""]);
    table.add_row([
        "clock".to_owned(),
        format!("{:.2} GHz", hardware.clock_hz as f64 / 1e9),
    ]);
    let caches = format!(
        "{} / {} / {} cycles",
        latency.l1_cycles, latency.l2_cycles, latency.llc_cycles
    );
    table.add_row(["L1 / L2 / LLC".to_owned(), caches]);
    let hops = if machine.nodes.len() > 1 {
        let own = match machine.links.iter().any(|link| link.hop_ns.is_some()) {
            true => " where no link says otherwise",
            false => "",
        };
        format!(", and {} ns per hop{own}", hardware.link.hop_ns)
    } else {
        String::new()
    };
    table.add_row(["memory".to_owned(), format!("{} ns{hops}", latency.memory_ns)]);
    finish(table, &[1])
}

#[cfg(test)]
mod tests;
