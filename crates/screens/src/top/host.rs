//! Formats nodes and links as lines of the page.

use homenode_control::{LinkStatus, NodeStatus, Status, VmStatus};
use homenode_units::BytesPerSec;
use ratatui::text::{Line, Span};

use crate::figures::percent;
use crate::limits::{self, CONTROLLER, LINK, Level, NODE_WAITING};
use crate::printable::OneLine;
use crate::table::{Align, Cell, Colours, Column, Shape, Table, UNBOUNDED, cut};

/// Number of blanks between nodes and links.
const BETWEEN: usize = 4;

/// Formats a size in GiB.
pub(crate) fn gib(bytes: homenode_units::Bytes) -> String {
    let gib = bytes.as_f64() / homenode_units::Bytes::from_gib(1).as_f64();
    match gib {
        gib if gib >= 1000.0 => format!("{:.1}T", gib / 1024.0),
        gib if gib >= 100.0 => format!("{gib:.0}G"),
        gib => format!("{gib:.1}G"),
    }
}

/// Formats a rate in GB/s.
pub(super) fn gigabytes(rate: BytesPerSec) -> String {
    format!("{:.1}", rate.as_f64() / 1e9)
}

fn waiting(node: &NodeStatus) -> Cell {
    Cell::or_dash(node.vcpus_waiting, |waiting| {
        let level = NODE_WAITING.level(waiting / node.cpus.max(1) as f64);
        Cell::new(format!("{waiting:.1}"), level)
    })
}

/// Returns the traffic of a node's controllers, as a share of what they sustain.
pub(crate) fn load(node: &NodeStatus) -> Option<f64> {
    let max = node.bandwidth_max_bytes_per_s.filter(|max| max.0 > 0)?;
    Some(node.bandwidth_bytes_per_s?.as_f64() / max.as_f64())
}

fn controller(node: &NodeStatus) -> Cell {
    Cell::or_dash(node.bandwidth_bytes_per_s, |used| {
        match (node.bandwidth_max_bytes_per_s, load(node)) {
            (Some(max), Some(load)) => {
                let text = format!("{}/{}GB/s {:>4}", gigabytes(used), gigabytes(max), percent(load));
                Cell::new(text, CONTROLLER.level(load))
            }
            _ => Cell::plain(format!("{}GB/s", gigabytes(used))),
        }
    })
}

fn link_level(link: &LinkStatus) -> Level {
    link.busy.map_or(Level::Fine, |busy| LINK.level(busy))
}

fn busiest(status: &Status, node: &NodeStatus) -> Cell {
    let links = status.links.iter().filter(|link| link.from == node.node);
    let most = links.max_by(|a, b| {
        let load = |link: &LinkStatus| link.busy.unwrap_or(0.0);
        load(a)
            .total_cmp(&load(b))
            .then(a.bandwidth_bytes_per_s.cmp(&b.bandwidth_bytes_per_s))
    });
    Cell::or_dash(most, |link| {
        let busy = link
            .busy
            .map_or(String::new(), |busy| format!(" {:>4}", percent(busy)));
        let text = format!(
            "to {} {}GB/s{busy}",
            link.to,
            gigabytes(link.bandwidth_bytes_per_s)
        );
        Cell::new(text, link_level(link))
    })
}

/// Returns the sum of the levels of a node's figures and of its worst link.
fn trouble(status: &Status, node: &NodeStatus) -> usize {
    let of_node = load(node).map_or(Level::Fine, |load| CONTROLLER.level(load));
    let wait = node
        .vcpus_waiting
        .map(|waiting| NODE_WAITING.level(waiting / node.cpus.max(1) as f64));
    let links = status.links.iter().filter(|link| link.from == node.node);
    let link = links.map(link_level).max().unwrap_or_default();
    [of_node, wait.unwrap_or_default(), limits::free(node), link]
        .iter()
        .map(|level| *level as usize)
        .sum()
}

/// A column of nodes: heading, rank (the highest is left out first), and the function that makes its cells.
type NodeColumn = (&'static str, u8, fn(&Status, &NodeStatus) -> Cell);

const COLUMNS: [NodeColumn; 9] = [
    ("node", 0, |_, node| {
        Cell::plain(match node.is_drained {
            true => format!("{} drained", node.node),
            false => node.node.to_string(),
        })
    }),
    ("CPUs busy", 2, |_, node| {
        Cell::or_dash(node.cpus_busy, |busy| {
            Cell::plain(format!("{busy:.1}/{}", node.cpus))
        })
    }),
    ("wait", 1, |_, node| waiting(node)),
    ("used", 6, |_, node| {
        Cell::plain(gib(node.memory_bytes.saturating_sub(node.memory_free_bytes)))
    }),
    (NOT_VMS, 7, |_, node| {
        Cell::or_dash(node.memory_outside_vms_bytes, |bytes| Cell::plain(gib(bytes)))
    }),
    ("free", 3, |_, node| {
        Cell::new(gib(node.memory_free_bytes), limits::free(node))
    }),
    ("controller", 4, |_, node| controller(node)),
    (BUSIEST, 5, busiest),
    (FILLED_BY, 8, |status, node| {
        Cell::or_dash(filled_by(status, node), Cell::plain)
    }),
];
/// Memory that is used, but not by VMs.
const NOT_VMS: &str = "not VMs";
const BUSIEST: &str = "busiest link out";
const FILLED_BY: &str = "filled by";
/// Most VMs that are named as filling a controller.
const FILLERS_MAX: usize = 3;
/// Most characters of such a VM's name that are shown.
const FILLER_NAME_MAX: usize = 12;

/// Returns the VMs with the most traffic to a node's controllers, in GB/s.
fn filled_by(status: &Status, node: &NodeStatus) -> Option<String> {
    let named = |(vm, rate): &(&VmStatus, BytesPerSec)| {
        let name: String = vm.name.chars().take(FILLER_NAME_MAX).collect();
        format!("{} {}", OneLine(&name), gigabytes(*rate))
    };
    let fillers = status.fillers(node.node);
    let named: Vec<String> = fillers.iter().take(FILLERS_MAX).map(named).collect();
    (!named.is_empty()).then(|| named.join(", "))
}

/// Returns the node with the fullest controllers and the VMs that fill them. Shown if there is no room for this at each node.
fn fullest(status: &Status) -> Option<String> {
    let loaded = status.nodes.iter().filter_map(|node| Some((node, load(node)?)));
    let (node, _) = loaded.max_by(|a, b| a.1.total_cmp(&b.1))?;
    Some(format!(
        "traffic to node {}: {} GB/s",
        node.node,
        filled_by(status, node)?
    ))
}

/// Returns the nodes, with links beside them if there is room. If not all nodes fit, shows those with the most trouble.
pub(super) fn lines(
    status: &Status,
    (width, height): (usize, usize),
    colours: Colours,
) -> Vec<Line<'static>> {
    let rows_max = height.saturating_sub(1).max(1);
    let mut shown: Vec<&NodeStatus> = status.nodes.iter().collect();
    let is_cut = shown.len() > rows_max;
    if is_cut {
        shown.sort_by_key(|node| std::cmp::Reverse(trouble(status, node)));
        shown.truncate(rows_max.saturating_sub(1));
        shown.sort_by_key(|node| node.node);
    }
    let table = |width: usize, is_wanted: fn(&str) -> bool| {
        let wanted = COLUMNS.iter().filter(|(head, ..)| is_wanted(head));
        let columns = wanted.map(|(head, rank, of)| Column {
            head: (*head).to_owned(),
            shape: Shape {
                rank: *rank,
                align: Align::Right,
                is_shown_empty: true,
            },
            cells: shown.iter().map(|node| of(status, node)).collect(),
        });
        Table::new(columns.collect(), width)
    };
    let matrix = matrix(status, &shown);
    let fits = |beside: &Table| {
        !status.links.is_empty() && width != UNBOUNDED && beside.width() + BETWEEN + matrix.width() <= width
    };
    let all = table(UNBOUNDED, |head| head != BUSIEST);
    let some = table(UNBOUNDED, |head| head != BUSIEST && head != FILLED_BY);
    let beside = [all, some].into_iter().find(fits);
    let is_beside = beside.is_some();
    let nodes = beside.unwrap_or_else(|| table(width, |_| true));
    let joined = |mut left: Line<'static>, right: Line<'static>| {
        if is_beside {
            left.push_span(Span::raw(" ".repeat(BETWEEN)));
            left.extend(right.spans);
        }
        left
    };
    let mut lines = vec![joined(nodes.header(), matrix.header())];
    lines.extend((0..shown.len()).map(|row| joined(nodes.row(row, colours), matrix.row(row, colours))));
    let has_fillers = lines[0].spans.iter().any(|span| span.content.contains(FILLED_BY));
    // The summary line must not take the place of a node.
    if !has_fillers && lines.len() + usize::from(is_cut) < height {
        lines.extend(fullest(status).map(|text| Line::raw(cut(&text, width))));
    }
    if is_cut {
        let left_out = status.nodes.len() - shown.len();
        lines.push(Line::raw(format!("{left_out} more nodes, none worse than these")));
    }
    lines
}

/// Returns a table of the loads of links from each shown node to every node.
fn matrix(status: &Status, shown: &[&NodeStatus]) -> Table {
    let shape = Shape {
        rank: 0,
        align: Align::Right,
        is_shown_empty: true,
    };
    let from = shown
        .iter()
        .map(|node| Cell::plain(format!("from {}", node.node)));
    let mut columns = vec![Column {
        head: "links".to_owned(),
        shape,
        cells: from.collect(),
    }];
    for to in &status.nodes {
        let load = |from: &&NodeStatus| {
            let link = status
                .links
                .iter()
                .find(|link| link.from == from.node && link.to == to.node);
            let Some(link) = link else {
                return Cell::plain(if from.node == to.node { "" } else { "-" });
            };
            match link.busy {
                Some(busy) => Cell::new(percent(busy), link_level(link)),
                None => Cell::plain(format!("{}GB/s", gigabytes(link.bandwidth_bytes_per_s))),
            }
        };
        columns.push(Column {
            head: format!("to {}", to.node),
            shape,
            cells: shown.iter().map(load).collect(),
        });
    }
    Table::new(columns, UNBOUNDED)
}
