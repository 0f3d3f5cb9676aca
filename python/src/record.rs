//! Reads files that agents and the emulator's plugin write: histories and page logs.

use std::path::Path;

use homenode_formats::page_log::{Log, Marks, PageLogError};
use homenode_recorder::table::{COLUMNS, From, vms};
use homenode_recorder::{Archive, Frame, Kind, RecordError, Wanted};
use homenode_table::Kind as Cell;
use pyo3::prelude::*;
use serde_json::Value;

use crate::errors::{Failed, bad_input};
use crate::table::{Columns, Table};

fn raised(error: RecordError) -> PyErr {
    match error {
        RecordError::Missing { .. } | RecordError::Foreign { .. } => bad_input(error),
        other => Failed::new_err(other.to_string()),
    }
}

/// A history written by an agent (docs/HISTORY.md), which may still be growing. Times are nanoseconds since 1970 (`wall_ns`)
/// and of the host's monotonic clock (`at_ns`).
#[pyclass(frozen, module = "homenode")]
#[derive(Debug)]
pub struct Recording {
    path: String,
}

impl Recording {
    fn open(&self) -> PyResult<Archive> {
        Archive::open(Path::new(&self.path)).map_err(raised)
    }
}

/// Returns the columns of `record export` for rows of periods and VMs.
fn status_columns(rows: &[(Frame, Value)]) -> Columns {
    let mut columns = Columns::default();
    for column in COLUMNS {
        let cell = |(frame, status): &(Frame, Value)| match column.from {
            From::Time | From::WallNs => frame.wall_ns.into(),
            From::Run => frame.run.into(),
            From::AtNs => frame.at.0.into(),
            From::Status(pointer) => status.pointer(pointer).cloned().unwrap_or_default(),
        };
        let cells = || rows.iter().map(cell);
        let about = "as in docs/HISTORY.md";
        columns = match column.cell {
            // `wall_ns` has the same time.
            Cell::Time => columns,
            Cell::Whole => columns.wholes(column.name, about, cells().map(|cell| cell.as_i64())),
            Cell::Figure => columns.numbers(column.name, about, cells().map(|cell| cell.as_f64())),
            Cell::Text => columns.words(
                column.name,
                about,
                cells().map(|cell| cell.as_str().map(str::to_owned)),
            ),
            Cell::Wholes => {
                let list = |cell: Value| {
                    let numbers: Vec<String> = cell.as_array()?.iter().map(ToString::to_string).collect();
                    Some(numbers.join(","))
                };
                columns.words(column.name, about, cells().map(list))
            }
        };
    }
    columns
}

#[pymethods]
impl Recording {
    /// Opens a history.
    #[new]
    fn new(path: String) -> PyResult<Recording> {
        let recording = Recording { path };
        recording.open()?;
        Ok(recording)
    }

    /// A row for each run of an agent.
    #[getter]
    fn runs(&self) -> PyResult<Table> {
        let runs = self.open()?.runs().map_err(raised)?;
        Columns::default()
            .wholes("run", "its number", runs.iter().map(|run| run.id))
            .wholes("wall_ns", "when it began", runs.iter().map(|run| run.wall_ns))
            .words(
                "version",
                "version and commit",
                runs.iter().map(|run| run.version.clone()),
            )
            .words("host", "what it ran on", runs.iter().map(|run| run.host.clone()))
            .words(
                "detail",
                "machine and settings, as JSON",
                runs.iter().map(|run| run.detail.to_string()),
            )
            .table()
    }

    /// A row for each event, optionally only those of a VM, a policy, a kind, or between two times.
    #[pyo3(signature = (*, vm=None, policy=None, kind=None, from_ns=None, to_ns=None))]
    fn events(
        &self,
        vm: Option<String>,
        policy: Option<String>,
        kind: Option<String>,
        from_ns: Option<i64>,
        to_ns: Option<i64>,
    ) -> PyResult<Table> {
        let wanted = Wanted {
            vm,
            policy,
            kind,
            from_ns,
            to_ns,
            ..Wanted::default()
        };
        let events = self.open()?.events(&wanted).map_err(raised)?;
        let events = || events.iter();
        let records = || events().map(|event| &event.record);
        Columns::default()
            .wholes(
                "id",
                "its number, by which `homenode` names it",
                events().map(|event| event.id),
            )
            .wholes("run", "of which run", events().map(|event| event.run))
            .wholes("wall_ns", "when", events().map(|event| event.wall_ns))
            .wholes(
                "at_ns",
                "when, by the host's clock",
                records().map(|record| record.at.0.cast_signed()),
            )
            .wholes("count", "how often in a row", events().map(|event| event.count))
            .words(
                "kind",
                "what: decided, found, refused, appeared, …",
                records().map(|record| record.kind.clone()),
            )
            .words("vm", "the VM's name", records().map(|record| record.name.clone()))
            .words(
                "policy",
                "policy that decided or found it",
                records().map(|record| record.policy.clone()),
            )
            .words(
                "action",
                "the action",
                records().map(|record| record.action.clone()),
            )
            .words(
                "outcome",
                "its outcome",
                records().map(|record| record.outcome.clone()),
            )
            .words("text", "for people", records().map(|record| record.text.clone()))
            .words(
                "detail",
                "for programs, as JSON",
                events().map(|event| event.detail.to_string()),
            )
            .table()
    }

    /// A row for each VM and period, optionally only those of one VM or between two times, like `homenode record export`.
    #[pyo3(signature = (*, vm=None, from_ns=None, to_ns=None))]
    fn vms(&self, vm: Option<String>, from_ns: Option<i64>, to_ns: Option<i64>) -> PyResult<Table> {
        let archive = self.open()?;
        let span = (from_ns.unwrap_or(i64::MIN), to_ns.unwrap_or(i64::MAX));
        let mut rows: Vec<(Frame, Value)> = Vec::new();
        let take = |frame: Frame| {
            for status in vms(&frame, vm.as_deref()) {
                let of_period = Frame {
                    value: Value::Null,
                    ..frame.clone()
                };
                rows.push((of_period, status.clone()));
            }
            true
        };
        archive.frames(Kind::Status, span, take).map_err(raised)?;
        status_columns(&rows).table()
    }

    fn __repr__(&self) -> String {
        format!("<homenode.Recording {}>", self.path)
    }
}

/// A log of a guest's pages written by the emulator's plugin (`pages=FILE`), complete or still growing.
#[pyclass(frozen, module = "homenode")]
#[derive(Debug)]
pub struct PageLog {
    log: Log,
}

#[pymethods]
impl PageLog {
    /// Reads a log.
    #[new]
    fn new(path: &str) -> PyResult<PageLog> {
        let log = Log::read(Path::new(path)).map_err(|error| match error {
            PageLogError::Io { .. } => Failed::new_err(error.to_string()),
            other => bad_input(other),
        })?;
        Ok(PageLog { log })
    }

    /// The modelled core.
    #[getter]
    fn core(&self) -> &str {
        &self.log.header.core
    }

    /// vCPUs of the guest.
    #[getter]
    fn vcpus(&self) -> u32 {
        self.log.header.vcpus
    }

    /// Frames of the guest's memory, of 4 KiB.
    #[getter]
    fn frames(&self) -> u64 {
        self.log.header.frames
    }

    /// A message about the missing part, if the log is incomplete.
    #[getter]
    fn missing(&self) -> Option<String> {
        self.log.missing.map(|missing| missing.to_string())
    }

    /// A row for each window. Times are nanoseconds of the guest.
    #[getter]
    fn windows(&self) -> PyResult<Table> {
        let windows = || self.log.windows.iter();
        Columns::default()
            .counts("window", "its number", windows().map(|window| window.number))
            .counts(
                "begin_ns",
                "when it began",
                windows().map(|window| window.begin_ns),
            )
            .counts("end_ns", "when it ended", windows().map(|window| window.end_ns))
            .words(
                "label",
                "what the guest called it",
                windows().map(|window| window.label.clone()),
            )
            .counts("walks", "page walks", windows().map(|window| window.walks))
            .counts("logged", "frames logged", windows().map(|window| window.logged))
            .counts("lost", "of them, lost", windows().map(|window| window.lost))
            .counts(
                "filled",
                "buffers that were filled",
                windows().map(|window| window.filled),
            )
            .counts(
                "outside",
                "logged outside of memory",
                windows().map(|window| window.outside),
            )
            .table()
    }

    /// A row for each frame used or logged in each window, or in those with a label.
    #[pyo3(signature = (label=None))]
    fn pages(&self, label: Option<&str>) -> PyResult<Table> {
        let windows = self.log.windows.iter();
        let rows: Vec<_> = windows
            .filter(|window| label.is_none_or(|label| window.label == label))
            .flat_map(|window| window.rows.iter().map(|row| (window.number, row)))
            .collect();
        let rows = || rows.iter().copied();
        let marked = |mark: u8| rows().map(move |(_, row)| row.marks.0 & mark != 0);
        Columns::default()
            .counts("window", "the window's number", rows().map(|(window, _)| window))
            .counts(
                "frame",
                "guest frame, of 4 KiB",
                rows().map(|(_, row)| u64::from(row.frame)),
            )
            .counts(
                "count",
                "how often it was logged",
                rows().map(|(_, row)| u64::from(row.count)),
            )
            .flags("used", "whether the program used it", marked(Marks::USED))
            .flags("written", "whether the program wrote it", marked(Marks::WRITTEN))
            .flags(
                "fetched",
                "whether the program fetched instructions from it",
                marked(Marks::FETCHED),
            )
            .flags(
                "kernel_used",
                "whether the kernel used it",
                marked(Marks::KERNEL_USED),
            )
            .flags(
                "kernel_written",
                "whether the kernel wrote it",
                marked(Marks::KERNEL_WRITTEN),
            )
            .flags(
                "kernel_fetched",
                "whether the kernel fetched instructions from it",
                marked(Marks::KERNEL_FETCHED),
            )
            .table()
    }

    fn __repr__(&self) -> String {
        let (windows, frames) = (self.log.windows.len(), self.log.header.frames);
        format!("<homenode.PageLog: {windows} windows of a guest of {frames} frames>")
    }
}
