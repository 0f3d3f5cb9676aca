//! The hosts as lines: first those that do not answer, then those that are past the most limits.

use ratatui::style::{Modifier, Style};
use ratatui::text::{Line, Span};

use crate::figures::percent;
use crate::fleet::summary::{Pressure, Summary, WorstVm};
use crate::limits::{LOCAL, Level};
use crate::pictures::Host;
use crate::table::{Align, Cell, Colours, Column, Shape, Table, UNBOUNDED, cut};
use crate::top::{gib, text_of};

/// A host, as a line shows it.
pub struct Row<'a> {
    /// The host.
    pub host: &'a Host,
    /// Summary of the host's last answer.
    pub summary: Option<Summary>,
}

/// Returns the hosts in the order of their lines.
pub fn rows(all: &[Host]) -> Vec<Row<'_>> {
    let summary = |host: &Host| host.picture.as_ref().map(Summary::of);
    let mut rows: Vec<Row<'_>> = all
        .iter()
        .map(|host| Row {
            host,
            summary: summary(host),
        })
        .collect();
    rows.sort_by_key(|row| {
        let trouble = row.summary.as_ref().map_or(0, |summary| summary.trouble);
        std::cmp::Reverse((row.host.trouble.is_some(), trouble))
    });
    rows
}

fn worst(vm: &WorstVm) -> Cell {
    let level = match vm.trouble {
        0 => Level::Fine,
        1 => Level::Warn,
        _ => Level::Bad,
    };
    Cell::new(&vm.name, level)
}

fn pressure(pressure: &Pressure) -> Cell {
    let Pressure {
        what,
        at,
        load,
        level,
    } = pressure;
    Cell::new(format!("{what} {at} {:>4}", percent(*load)), *level)
}

/// A column of hosts: heading, rank (the highest is left out first), alignment, and the function that makes its cells.
type HostColumn = (&'static str, u8, Align, fn(&Row<'_>) -> Cell);

/// Returns a cell from a host's summary; `-` if there is no summary.
fn said(row: &Row<'_>, of: impl FnOnce(&Summary) -> Cell) -> Cell {
    Cell::or_dash(row.summary.as_ref(), of)
}

const COLUMNS: [HostColumn; 10] = [
    ("host", 0, Align::Left, |row| {
        let level = if row.host.trouble.is_some() {
            Level::Bad
        } else {
            Level::Fine
        };
        Cell::new(&row.host.name, level)
    }),
    ("VMs", 5, Align::Right, |row| {
        said(row, |of| Cell::plain(of.vms_count.to_string()))
    }),
    ("CPUs busy", 4, Align::Right, |row| {
        said(row, |of| {
            Cell::or_dash(of.cpus_busy, |busy| Cell::plain(format!("{busy:.1}/{}", of.cpus)))
        })
    }),
    ("pressure", 1, Align::Right, |row| {
        said(row, |of| Cell::or_dash(of.pressure.as_ref(), pressure))
    }),
    ("worst VM", 2, Align::Left, |row| {
        said(row, |of| Cell::or_dash(of.worst_vm.as_ref(), worst))
    }),
    ("wait", 7, Align::Right, |row| {
        said(row, |of| {
            let waiting = of.worst_vm.as_ref().and_then(|vm| vm.vcpus_waiting);
            Cell::or_dash(waiting, |waiting| Cell::plain(format!("{waiting:.1}")))
        })
    }),
    ("local", 8, Align::Right, |row| {
        said(row, |of| {
            let local = of.worst_vm.as_ref().and_then(|vm| vm.local_access_ratio);
            Cell::or_dash(local, |share| Cell::new(percent(share), LOCAL.level(share)))
        })
    }),
    ("room on a node", 3, Align::Right, |row| {
        said(row, |of| {
            Cell::or_dash(of.headroom_of_a_node, |room| {
                Cell::plain(format!("{:.1} CPUs {}", room.cpus, gib(room.memory_bytes)))
            })
        })
    }),
    ("room", 6, Align::Right, |row| {
        said(row, |of| {
            Cell::or_dash(of.headroom, |room| {
                Cell::plain(format!("{:.1} CPUs {}", room.cpus, gib(room.memory_bytes)))
            })
        })
    }),
    ("findings", 9, Align::Left, |row| {
        if let Some(trouble) = &row.host.trouble {
            return Cell::new(trouble, Level::Bad);
        }
        said(row, |of| match (&of.finding, of.findings_count) {
            (Some(finding), 1) => Cell::plain(finding),
            (Some(finding), count) => Cell::plain(format!("{count}: {finding}")),
            (None, _) => Cell::default(),
        })
    }),
];

/// Returns the hosts as a table.
pub(super) fn table(rows: &[Row<'_>], width: usize) -> Table {
    let columns = COLUMNS.iter().map(|(head, rank, align, of)| Column {
        head: (*head).to_owned(),
        shape: Shape {
            rank: *rank,
            align: *align,
            is_shown_empty: false,
        },
        cells: rows.iter().map(of).collect(),
    });
    Table::new(columns.collect(), width)
}

/// Returns a line about all hosts together.
pub(super) fn about(rows: &[Row<'_>]) -> String {
    let silent = rows.iter().filter(|row| row.host.trouble.is_some()).count();
    let waited_for = rows
        .iter()
        .filter(|row| row.host.trouble.is_none() && row.summary.is_none());
    let waited_for = waited_for.count();
    let vms: usize = rows
        .iter()
        .filter_map(|row| Some(row.summary.as_ref()?.vms_count))
        .sum();
    let mut text = format!("{} hosts, {vms} VMs", rows.len());
    if silent > 0 {
        text += &format!(", {silent} not answering");
    }
    if waited_for > 0 {
        text += &format!(", {waited_for} not asked yet");
    }
    text
}

/// Returns the page, at most `width` wide and exactly `height` high. The chosen row is among the rows shown.
pub(super) fn page(
    rows: &[Row<'_>],
    chosen: Option<usize>,
    (width, height): (usize, usize),
    colours: Colours,
) -> Vec<Line<'static>> {
    let bold = Style::new().add_modifier(Modifier::BOLD);
    let mut lines = vec![Line::from(Span::styled(cut(&about(rows), width), bold))];
    let table = table(rows, width);
    lines.push(table.header());
    let room = height.saturating_sub(lines.len() + 1);
    let first = chosen
        .unwrap_or(0)
        .saturating_sub(room / 2)
        .min(rows.len().saturating_sub(room));
    for number in first..rows.len().min(first + room) {
        let line = table.row(number, colours);
        lines.push(match chosen == Some(number) {
            true => line.patch_style(Style::new().add_modifier(Modifier::REVERSED)),
            false => line,
        });
    }
    lines.resize(height.saturating_sub(1), Line::default());
    let keys = "q quit   ↑↓ Enter a host   Esc back";
    let dim = Style::new().add_modifier(Modifier::DIM);
    lines.push(Line::from(Span::styled(cut(keys, width), dim)));
    lines
}

/// Returns the page as plain text.
pub fn plain(rows: &[Row<'_>], width: Option<usize>, colours: Colours) -> String {
    let wide = width.unwrap_or(UNBOUNDED);
    let table = table(rows, wide);
    let mut lines = vec![Line::raw(about(rows)), table.header()];
    lines.extend((0..rows.len()).map(|row| table.row(row, colours)));
    text_of(&lines)
}
