//! Printing: lines and JSON on standard output, complaints on standard error, and how values are written in tables.

use std::fmt;
use std::io::{ErrorKind, Write};
use std::process::{ExitCode, exit};
use std::sync::atomic::{AtomicBool, Ordering};

use comfy_table::{CellAlignment, Table, presets};
use homenode_api::document::document;
use homenode_host::CountedBy;
pub(crate) use homenode_screens::figures::{or_none, percent, span};
use homenode_screens::printable::{self, OneLine};
use serde::Serialize;

/// Prints one or more lines with terminal control characters escaped. Where `println!` would panic, it ends the command
/// silently if the reader has gone (`| head`), and with a message if the disk is full.
macro_rules! say {
    ($($arg:tt)*) => {
        $crate::print::print(format_args!("{}\n", homenode_screens::printable::Lines(format_args!($($arg)*))))
    };
}

/// Prints a complaint to standard error, like `eprintln!`, with terminal control characters escaped.
macro_rules! complain {
    ($($arg:tt)*) => { eprintln!("{}", homenode_screens::printable::Sentence(&format!($($arg)*))) };
}

/// True once output was lost for any reason other than a reader that is gone.
static IS_CUT_SHORT: AtomicBool = AtomicBool::new(false);

/// Prints text unescaped. Ends the process if it cannot.
pub(crate) fn print(text: fmt::Arguments<'_>) {
    if let Err(error) = std::io::stdout().write_fmt(text) {
        unwritable(&error);
        exit(i32::from(IS_CUT_SHORT.load(Ordering::Relaxed)));
    }
}

/// Flushes standard output and returns the command's exit status: a failure if any output was lost.
pub(crate) fn flushed(code: ExitCode) -> ExitCode {
    if let Err(error) = std::io::stdout().flush() {
        unwritable(&error);
    }
    match IS_CUT_SHORT.load(Ordering::Relaxed) {
        true => ExitCode::FAILURE,
        false => code,
    }
}

pub(crate) fn unwritable(error: &std::io::Error) {
    if error.kind() != ErrorKind::BrokenPipe && !IS_CUT_SHORT.swap(true, Ordering::Relaxed) {
        // If this write fails too, the exit status still reports it.
        let _ = writeln!(
            std::io::stderr(),
            "homenode: cannot write to standard output: {error}"
        );
    }
}

/// Prints a JSON document of this kind.
///
/// # Errors
/// If JSON cannot express the value.
pub(crate) fn print_json(kind: &str, value: &impl Serialize) -> anyhow::Result<()> {
    let document = document(kind, serde_json::to_value(value)?);
    let text = serde_json::to_string_pretty(&document)?;
    print(format_args!("{}\n", printable::json(&text)));
    Ok(())
}

/// Prints what a command has done as a JSON document of this kind, and returns the command's result. The document also has what
/// was done before an error, because a program cannot learn that in another way.
///
/// # Errors
/// The command's error, or as [`print_json`].
pub(crate) fn print_done(kind: &str, value: &impl Serialize, done: anyhow::Result<()>) -> anyhow::Result<()> {
    print_json(kind, value)?;
    done
}

/// Returns a table in the project's style: right-aligned except for the first column, each cell on one line.
pub(crate) fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> Table {
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

/// Prints a table with a row for each VM, or says that none runs.
pub(crate) fn say_vms(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) {
    let rows: Vec<Vec<String>> = rows.into_iter().collect();
    match rows.is_empty() {
        true => say!("no VM runs on this host"),
        false => say!("{}", table(header, rows)),
    }
}

/// Shows a value, or `-` if it is unknown.
pub(crate) fn or_dash<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| "-".to_owned(), show)
}

/// Formats a time in milliseconds.
pub(crate) fn millis(ms: f64) -> String {
    format!("{ms:.1}ms")
}

/// Marks a figure as modelled if a model counted it.
pub(crate) fn counted(figure: String, by: Option<CountedBy>) -> String {
    match by {
        Some(CountedBy::Model) => format!("{figure} modelled"),
        Some(CountedBy::Hardware) | None => figure,
    }
}
