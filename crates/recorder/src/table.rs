//! Exports a history as CSV or Parquet, with a row for each VM and period.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use homenode_table::{Kind as Cell, ParquetError};
use serde_json::Value;

use crate::{Frame, RecordError};

/// Where a cell's value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum From {
    /// The wall clock, in a form for people.
    Time,
    /// The wall clock, in nanoseconds since 1970.
    WallNs,
    /// The run's number.
    Run,
    /// The host's monotonic clock.
    AtNs,
    /// The value in the VM's status at this JSON pointer.
    Status(&'static str),
}

/// A column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// The column's name.
    pub name: &'static str,
    /// Where the values of the column's cells come from.
    pub from: From,
    /// The type of the column's cells; any cell may be empty.
    pub cell: Cell,
}

const fn column(name: &'static str, from: From, cell: Cell) -> Column {
    Column { name, from, cell }
}

const fn status(name: &'static str, pointer: &'static str, cell: Cell) -> Column {
    column(name, From::Status(pointer), cell)
}

/// All columns.
pub const COLUMNS: [Column; 28] = [
    column("time", From::Time, Cell::Time),
    column("wall_ns", From::WallNs, Cell::Whole),
    column("run", From::Run, Cell::Whole),
    column("at_ns", From::AtNs, Cell::Whole),
    status("vm", "/name", Cell::Text),
    status("id", "/id", Cell::Text),
    status("home", "/home", Cell::Wholes),
    status("memory_policy", "/memory_policy", Cell::Text),
    status("cpus_used", "/cpus_used", Cell::Figure),
    status("vcpus_waiting", "/vcpus_waiting", Cell::Figure),
    status("instructions_per_s", "/instructions_per_s", Cell::Figure),
    status("cycles_per_instruction", "/cycles_per_instruction", Cell::Figure),
    status("instructions_per_cpu_s", "/instructions_per_cpu_s", Cell::Figure),
    status(
        "instructions_per_cpu_s_usual",
        "/instructions_per_cpu_s_usual",
        Cell::Figure,
    ),
    status("speed_ratio", "/speed_ratio", Cell::Figure),
    status("time_gained_ns", "/time_gained_ns", Cell::Whole),
    status("time_lost_ns", "/time_lost_ns", Cell::Whole),
    status("llc_miss_rate", "/llc_miss_rate", Cell::Figure),
    status("local_access_ratio", "/local_access_ratio", Cell::Figure),
    status("bandwidth_bytes_per_s", "/bandwidth_bytes_per_s", Cell::Whole),
    status("memory_bytes", "/memory_bytes", Cell::Whole),
    status("memory_limit_bytes", "/memory/limit_bytes", Cell::Whole),
    status("memory_need_bytes", "/memory/need_bytes", Cell::Whole),
    status("permit_units_per_slice", "/permit/units_per_slice", Cell::Whole),
    status("permit_standing", "/permit/standing", Cell::Text),
    status("quota_run_ns", "/permit/quota/run_ns", Cell::Whole),
    status("quota_period_ns", "/permit/quota/period_ns", Cell::Whole),
    status("left_alone", "/left_alone", Cell::Text),
];

/// Returns the statuses of a period's VMs, or only of the VM with this name or id.
pub fn vms<'a>(frame: &'a Frame, vm: Option<&'a str>) -> impl Iterator<Item = &'a Value> {
    let vms = frame.value["vms"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    vms.iter()
        .filter(move |status| vm.is_none_or(|vm| status["name"] == vm || status["id"] == vm))
}

/// Writes rows to a typed Parquet file.
pub struct Parquet<W: Write + Send>(homenode_table::Parquet<W>);

impl Parquet<File> {
    /// Creates a file without rows.
    ///
    /// # Errors
    /// If the file cannot be created.
    pub fn create(path: &Path) -> Result<Parquet<File>, RecordError> {
        let failed = |cause: &dyn std::fmt::Display| RecordError::Export {
            path: path.display().to_string(),
            cause: cause.to_string(),
        };
        let file = File::create(path).map_err(|error| failed(&error))?;
        Parquet::new(file).map_err(|error| failed(&error))
    }
}

impl<W: Write + Send> Parquet<W> {
    /// Creates a writer without rows.
    ///
    /// # Errors
    /// If the rows cannot be written.
    pub fn new(to: W) -> Result<Parquet<W>, ParquetError> {
        let columns = COLUMNS.map(|column| homenode_table::Column::new(column.name, column.cell));
        homenode_table::Parquet::new(to, "vm_periods", &columns, &[]).map(Parquet)
    }

    /// Writes a row for each VM of a period, or only for the VM with this name or id.
    ///
    /// # Errors
    /// If the rows cannot be written.
    pub fn frame(&mut self, frame: &Frame, vm: Option<&str>) -> Result<(), ParquetError> {
        let (wall_ns, run, at_ns) = (frame.wall_ns.into(), frame.run.into(), frame.at.0.into());
        for status in vms(frame, vm) {
            self.0.row(COLUMNS.iter().map(|column| match column.from {
                From::Time | From::WallNs => &wall_ns,
                From::Run => &run,
                From::AtNs => &at_ns,
                From::Status(pointer) => status.pointer(pointer).unwrap_or(&Value::Null),
            }))?;
        }
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// If the rows cannot be written.
    pub fn finish(self) -> Result<(), ParquetError> {
        self.0.finish()
    }
}

#[cfg(test)]
mod tests {
    use homenode_units::Ns;
    use parquet::file::reader::{FileReader as _, SerializedFileReader};
    use serde_json::json;

    use super::*;

    /// Reads rows as JSON, using the parquet crate's own reader.
    fn read(file: Vec<u8>) -> Vec<Value> {
        let reader = SerializedFileReader::new(bytes::Bytes::from(file)).unwrap();
        reader
            .get_row_iter(None)
            .unwrap()
            .map(|row| row.unwrap().to_json_value())
            .collect()
    }

    fn written(frames: &[Frame], vm: Option<&str>) -> Vec<u8> {
        let mut file = Vec::new();
        let mut parquet = Parquet::new(&mut file).unwrap();
        frames.iter().for_each(|frame| parquet.frame(frame, vm).unwrap());
        parquet.finish().unwrap();
        file
    }

    fn frame(n: i64, vms: &Value) -> Frame {
        Frame {
            run: 3,
            at: Ns(n.unsigned_abs() * 1000),
            wall_ns: 1_700_000_000_000_000_000 + n,
            value: json!({"vms": vms}),
        }
    }

    #[test]
    fn what_is_written_to_parquet_reads_back_typed() {
        let web = json!({
            "name": "web, \"the\" first", "id": "a", "home": [0, 3], "memory_policy": "first-touch", "cpus_used": 1.25,
            "memory_bytes": 1_u64 << 40, "permit": {"standing": "OVER", "quota": {"run_ns": 5, "period_ns": 30}},
            "memory": {"limit_bytes": null},
        });
        let db = json!({"name": "db", "id": "b", "home": null, "cpus_used": 0, "left_alone": "by hand"});
        let odd = json!({"name": "odd", "home": [], "cpus_used": null, "memory_bytes": "many"});
        let frames = [
            frame(1, &json!([web, db])),
            frame(2, &json!([])),
            frame(3, &json!([odd])),
        ];
        let rows = read(written(&frames, None));
        assert_eq!(rows.len(), 3);
        let of = |row: usize, name: &str| rows[row][name].clone();
        assert_eq!(of(0, "vm"), "web, \"the\" first");
        assert_eq!(
            (of(0, "home"), of(1, "home"), of(2, "home")),
            (json!([0, 3]), Value::Null, json!([]))
        );
        assert_eq!(
            (of(0, "cpus_used"), of(1, "cpus_used"), of(2, "cpus_used")),
            (json!(1.25), json!(0.0), Value::Null)
        );
        assert_eq!(
            (of(0, "memory_bytes"), of(2, "memory_bytes")),
            (json!(1_u64 << 40), Value::Null)
        );
        assert_eq!(
            (of(0, "permit_standing"), of(0, "quota_period_ns")),
            (json!("OVER"), json!(30))
        );
        assert_eq!(
            (of(1, "left_alone"), of(1, "quota_run_ns")),
            (json!("by hand"), Value::Null)
        );
        assert_eq!(
            (of(2, "wall_ns"), of(2, "run"), of(2, "at_ns")),
            (json!(1_700_000_000_000_000_003_i64), json!(3), json!(3000))
        );
        assert_eq!(rows[0].as_object().unwrap().len(), COLUMNS.len());
        assert_eq!(read(written(&frames, Some("db"))).len(), 1);
        assert_eq!(read(written(&[], None)).len(), 0);
    }

    #[test]
    fn rows_are_written_in_groups_so_that_memory_does_not_grow_with_them() {
        let vms: Vec<Value> = (0..1000)
            .map(|n| json!({"name": format!("vm{n}"), "home": [n % 4]}))
            .collect();
        let frames: Vec<Frame> = (0..70).map(|n| frame(n, &json!(vms))).collect();
        let file = bytes::Bytes::from(written(&frames, None));
        let reader = SerializedFileReader::new(file).unwrap();
        assert_eq!(reader.metadata().num_row_groups(), 2);
        assert_eq!(reader.metadata().file_metadata().num_rows(), 70_000);
        let last = reader
            .get_row_iter(None)
            .unwrap()
            .last()
            .unwrap()
            .unwrap()
            .to_json_value();
        assert_eq!((&last["vm"], &last["home"]), (&json!("vm999"), &json!([3])));
    }
}
