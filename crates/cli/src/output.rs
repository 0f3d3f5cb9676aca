//! What commands print. `run` shows a picture on a terminal that is redrawn below the events, in a pipe the events alone, with
//! `--json` one object per line.

use std::fmt;
use std::io::{ErrorKind, IsTerminal, Write};
use std::process::{ExitCode, exit};
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::{CellAlignment, Table, presets};
use homenode_agent::Show;
use homenode_api::document::document;
use homenode_control::{Epoch, Status};
use homenode_host::CountedBy;
use homenode_units::{Bytes, NodeSet};
use serde::Serialize;
use serde_json::{Value, json};

use crate::printable::{self, Lines, OneLine};

/// Prints a line, or several, with nothing in it that a terminal obeys. As `println!`, but a reader that has gone (`| head`) ends
/// the command in silence, and a full disk with a sentence, where that panics.
macro_rules! say {
    ($($arg:tt)*) => {
        $crate::output::print(format_args!("{}\n", $crate::printable::Lines(format_args!($($arg)*))))
    };
}

/// Says on standard error what is wrong. As `eprintln!`, with nothing in it that a terminal obeys.
macro_rules! complain {
    ($($arg:tt)*) => { eprintln!("{}", $crate::printable::Sentence(&format!($($arg)*))) };
}

/// Whether something could not be written, other than for want of a reader.
static IS_CUT_SHORT: AtomicBool = AtomicBool::new(false);

/// Prints text as it is. Ends the process where it cannot.
pub fn print(text: fmt::Arguments<'_>) {
    if let Err(error) = std::io::stdout().write_fmt(text) {
        unwritable(&error);
        exit(i32::from(IS_CUT_SHORT.load(Ordering::Relaxed)));
    }
}

/// The status of a command that ends: what it printed must have come to where it was to go.
pub fn flushed(code: ExitCode) -> ExitCode {
    if let Err(error) = std::io::stdout().flush() {
        unwritable(&error);
    }
    match IS_CUT_SHORT.load(Ordering::Relaxed) {
        true => ExitCode::FAILURE,
        false => code,
    }
}

fn unwritable(error: &std::io::Error) {
    if error.kind() != ErrorKind::BrokenPipe && !IS_CUT_SHORT.swap(true, Ordering::Relaxed) {
        // If this cannot be said either, the status says it.
        let _ = writeln!(
            std::io::stderr(),
            "homenode: cannot write to standard output: {error}"
        );
    }
}

/// Prints what programs read, as a document of this kind.
///
/// # Errors
/// What cannot be JSON.
pub fn print_json(kind: &str, value: &impl Serialize) -> anyhow::Result<()> {
    let document = document(kind, serde_json::to_value(value)?);
    let text = serde_json::to_string_pretty(&document)?;
    print(format_args!("{}\n", printable::json(&text)));
    Ok(())
}

/// How to show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Events scroll, tables stay below them.
    Terminal,
    /// Events as lines.
    Lines,
    /// JSON objects as lines.
    Json,
}

/// Where a run is shown.
pub struct Output {
    style: Style,
    /// Height of the picture that is on the terminal now.
    drawn_lines: usize,
    closed: bool,
}

impl Output {
    /// JSON if asked for, else what standard output is.
    pub fn new(json: bool) -> Output {
        let style = match (json, std::io::stdout().is_terminal()) {
            (true, _) => Style::Json,
            (false, true) => Style::Terminal,
            (false, false) => Style::Lines,
        };
        Output {
            style,
            drawn_lines: 0,
            closed: false,
        }
    }

    /// How it shows.
    pub fn style(&self) -> Style {
        self.style
    }

    /// The control sequence that takes the picture off the terminal.
    fn erase(&mut self) -> String {
        match std::mem::take(&mut self.drawn_lines) {
            0 => String::new(),
            lines => format!("\x1b[{lines}A\x1b[J"),
        }
    }

    /// Says lines to people: tables, and what stands around them.
    pub fn text(&mut self, text: fmt::Arguments<'_>) {
        if self.style != Style::Json {
            let erase = self.erase();
            self.write(&format!("{erase}{}\n", Lines(text)));
        }
    }

    fn write(&mut self, text: &str) {
        let mut out = std::io::stdout().lock();
        if let Err(error) = out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
            self.closed = true;
            unwritable(&error);
        }
    }
}

impl Show for Output {
    fn object(&mut self, kind: &str, mut object: Value) {
        if self.style != Style::Json {
            return;
        }
        if let Some(map) = object.as_object_mut() {
            map.insert("type".into(), kind.into());
        }
        let text = document(kind, object).to_string();
        self.write(&format!("{}\n", printable::json(&text)));
    }

    fn line(&mut self, text: &str) {
        self.text(format_args!("{}", OneLine(text)));
    }

    fn epoch(&mut self, epoch: &Epoch) {
        if self.style == Style::Json {
            return self.object("epoch", json!(epoch));
        }
        let at = epoch.status.at_ns.as_secs_f64();
        let events: String = epoch
            .events
            .iter()
            .map(|event| format!("[{at:8.1}s] {}\n", OneLine(&event.to_string())))
            .collect();
        match self.style {
            Style::Lines => self.write(&events),
            _ => {
                let picture = picture(&epoch.status);
                let erase = self.erase();
                self.drawn_lines = picture.lines().count();
                self.write(&format!("{erase}{events}{picture}"));
            }
        }
    }

    fn is_closed(&self) -> bool {
        self.closed
    }
}

/// One line of standard error if that is a terminal, over the last one; nothing in a pipe.
pub fn progress(text: &str) {
    let mut err = std::io::stderr();
    if err.is_terminal() {
        // Whether it can be seen changes nothing.
        let _ = write!(err, "\r\x1b[K{}", OneLine(text)).and_then(|()| err.flush());
    }
}

/// A table in the project's look: right-aligned but for the first column. Whatever a cell holds is on one line of it.
pub fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(header.to_vec());
    for row in rows {
        table.add_row(row.iter().map(|cell| OneLine(cell).to_string()));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// `-` for what is not known.
pub fn or_dash<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

/// Home nodes of a VM, or that it is where the kernel puts it.
pub fn or_free(home: Option<&NodeSet>) -> String {
    home.map_or_else(|| "free".to_owned(), ToString::to_string)
}

/// A share as percent.
pub fn percent(share: f64) -> String {
    format!("{:.0}%", share * 100.0)
}

/// A figure that rests on counters; says so where a model counts them.
pub fn counted(figure: String, by: Option<CountedBy>) -> String {
    match by {
        Some(CountedBy::Model) => format!("{figure} modelled"),
        Some(CountedBy::Hardware) | None => figure,
    }
}

fn used_of(free: Bytes, total: Bytes) -> String {
    let gib = |bytes: Bytes| bytes.as_f64() / Bytes::from_gib(1).as_f64();
    format!("{:.1}/{:.0}GiB", gib(total.saturating_sub(free)), gib(total))
}

/// Nodes and VMs as two tables.
pub fn picture(status: &Status) -> String {
    let nodes = status.nodes.iter().map(|node| {
        let links = status.links.iter().filter(|link| link.from == node.node);
        let busiest = links.max_by(|a, b| a.bandwidth_bytes_per_s.cmp(&b.bandwidth_bytes_per_s));
        vec![
            node.node.to_string(),
            or_dash(node.cpus_busy, |busy| format!("{busy:.1}/{}", node.cpus)),
            or_dash(node.vcpus_waiting, |waiting| format!("{waiting:.1}")),
            used_of(node.memory_free_bytes, node.memory_bytes),
            or_dash(node.bandwidth_bytes_per_s, |used| {
                match node.bandwidth_max_bytes_per_s {
                    Some(max) => format!("{:.1}/{:.1}GB/s", used.as_f64() / 1e9, max.as_f64() / 1e9),
                    None => format!("{:.1}GB/s", used.as_f64() / 1e9),
                }
            }),
            or_dash(busiest, |link| {
                let busy = or_dash(link.busy, percent);
                format!(
                    "{:.1}GB/s to {} ({busy})",
                    link.bandwidth_bytes_per_s.as_f64() / 1e9,
                    link.to
                )
            }),
        ]
    });
    let nodes = table(
        &[
            "node",
            "CPUs busy",
            "waiting",
            "memory",
            "bandwidth",
            "busiest link out",
        ],
        nodes,
    );
    let vms = status.vms.iter().map(|vm| {
        let vcpus = vm.vcpus_by_node.iter();
        let vcpus: Vec<String> = vcpus.map(|on| format!("{}:{}", on.node, on.vcpus)).collect();
        let pages = vm.pages_by_node.as_ref().map(|on| {
            let total: u64 = on.iter().map(|on| on.pages.0).sum();
            let share = |pages: u64| percent(pages as f64 / total.max(1) as f64);
            let on = on.iter().filter(|on| on.pages.0 > 0);
            on.map(|on| format!("{}:{}", on.node, share(on.pages.0)))
                .collect::<Vec<_>>()
                .join(" ")
        });
        vec![
            vm.name.clone(),
            or_free(vm.home.as_ref()),
            vcpus.join(" "),
            or_dash(pages, |pages| pages),
            or_dash(vm.cpus_used, |used| format!("{used:.1}")),
            or_dash(vm.vcpus_waiting, |waiting| format!("{waiting:.1}")),
            or_dash(vm.llc_miss_rate, |rate| counted(percent(rate), vm.counted_by)),
            or_dash(vm.local_access_ratio, percent),
            vm.left_alone.clone().unwrap_or_default(),
        ]
    });
    let header = [
        "VM", "home", "vCPUs on", "pages on", "CPUs", "waiting", "LLC miss", "local", "",
    ];
    let vms = table(&header, vms);
    format!("\n{nodes}\n\n{vms}\n")
}
