//! Tables: columns with names, types and meanings. Arrow readers use them without a copy.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::ffi::FFI_ArrowSchema;
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::types::{Float64Type, Int64Type, UInt64Type};
use arrow_array::{
    Array, ArrayRef, BooleanArray, Float64Array, Int64Array, RecordBatch, RecordBatchIterator, StringArray,
    UInt64Array,
};
use arrow_schema::{DataType, Field, Schema};
use homenode_units::Candidates;
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyList};
use serde_json::Value;

use crate::errors::{Failed, bad_input};

/// Maximum number of rows that a table prints.
const SHOWN_MAX: usize = 20;

/// Columns of a table under construction.
#[derive(Debug, Default)]
pub(crate) struct Columns {
    fields: Vec<Field>,
    arrays: Vec<ArrayRef>,
}

impl Columns {
    fn with(mut self, name: &str, about: &str, kind: DataType, array: ArrayRef) -> Columns {
        let about = HashMap::from([("about".to_owned(), about.to_owned())]);
        self.fields
            .push(Field::new(name, kind, true).with_metadata(about));
        self.arrays.push(array);
        self
    }

    /// Adds a column of numbers.
    pub(crate) fn numbers<T: Into<Option<f64>>>(
        self,
        name: &str,
        about: &str,
        cells: impl IntoIterator<Item = T>,
    ) -> Columns {
        let array: Float64Array = cells.into_iter().map(Into::into).collect();
        self.with(name, about, DataType::Float64, Arc::new(array))
    }

    /// Adds a column of counts.
    pub(crate) fn counts<T: Into<Option<u64>>>(
        self,
        name: &str,
        about: &str,
        cells: impl IntoIterator<Item = T>,
    ) -> Columns {
        let array: UInt64Array = cells.into_iter().map(Into::into).collect();
        self.with(name, about, DataType::UInt64, Arc::new(array))
    }

    /// Adds a column of text.
    pub(crate) fn words<T: Into<Option<String>>>(
        self,
        name: &str,
        about: &str,
        cells: impl IntoIterator<Item = T>,
    ) -> Columns {
        let array: StringArray = cells.into_iter().map(Into::into).collect();
        self.with(name, about, DataType::Utf8, Arc::new(array))
    }

    /// Adds a column of whole numbers.
    pub(crate) fn wholes<T: Into<Option<i64>>>(
        self,
        name: &str,
        about: &str,
        cells: impl IntoIterator<Item = T>,
    ) -> Columns {
        let array: Int64Array = cells.into_iter().map(Into::into).collect();
        self.with(name, about, DataType::Int64, Arc::new(array))
    }

    /// Adds a column of booleans.
    pub(crate) fn flags<T: Into<Option<bool>>>(
        self,
        name: &str,
        about: &str,
        cells: impl IntoIterator<Item = T>,
    ) -> Columns {
        let cells: Vec<Option<bool>> = cells.into_iter().map(Into::into).collect();
        self.with(
            name,
            about,
            DataType::Boolean,
            Arc::new(BooleanArray::from(cells)),
        )
    }

    /// Adds a column for each cell name in the rows. It has numbers if all of its cells are numbers, else text.
    pub(crate) fn cells<'a>(
        mut self,
        rows: impl Iterator<Item = &'a Vec<(String, Value)>> + Clone,
    ) -> Columns {
        let mut names: Vec<&str> = Vec::new();
        for (name, _) in rows.clone().flatten() {
            if !names.contains(&name.as_str()) {
                names.push(name);
            }
        }
        for name in names {
            let cell = |row: &'a Vec<(String, Value)>| {
                let found = row.iter().find(|(own, _)| own == name);
                found.map(|(_, value)| value).filter(|value| !value.is_null())
            };
            let cells = || rows.clone().map(cell);
            self = if cells().flatten().all(Value::is_number) {
                self.numbers(name, "", cells().map(|cell| cell.and_then(Value::as_f64)))
            } else {
                let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
                self.words(name, "", cells().map(|cell| cell.map(word)))
            };
        }
        self
    }

    /// Returns the table.
    ///
    /// # Errors
    /// Columns of different lengths, which are a bug.
    pub(crate) fn table(self) -> PyResult<Table> {
        let batch = RecordBatch::try_new(Arc::new(Schema::new(self.fields)), self.arrays);
        let batch = batch.map_err(|error| Failed::new_err(error.to_string()))?;
        Ok(Table { batch })
    }
}

/// Named columns of equal length: a mapping from names to lists, and an Arrow stream.
///
/// `polars.DataFrame(table)`, `pyarrow.table(table)` and `pandas.DataFrame.from_arrow(table)` read it without a copy.
/// `table["runtime_s"]` needs none of these packages. `None` means unknown or not applicable. The name of a column ends in its
/// unit.
#[pyclass(frozen, module = "homenode", mapping)]
#[derive(Debug)]
pub struct Table {
    batch: RecordBatch,
}

impl Table {
    fn column(&self, name: &str) -> PyResult<&ArrayRef> {
        self.batch.column_by_name(name).ok_or_else(|| {
            let valid = Candidates::of(name, self.names());
            PyKeyError::new_err(format!("no column is named `{name}`{valid}"))
        })
    }

    fn names(&self) -> impl Iterator<Item = String> {
        let schema = self.batch.schema();
        let names: Vec<String> = schema.fields().iter().map(|field| field.name().clone()).collect();
        names.into_iter()
    }

    /// Formats a cell for people.
    fn shown(column: &ArrayRef, row: usize) -> String {
        if column.is_null(row) {
            return "-".to_owned();
        }
        match column.data_type() {
            DataType::Float64 => {
                let number = column.as_primitive::<Float64Type>().value(row);
                match number.abs() {
                    0.0 => "0".to_owned(),
                    size if (1e-3..1e7).contains(&size) => format!("{number:.3}"),
                    _ => format!("{number:.3e}"),
                }
            }
            DataType::UInt64 => column.as_primitive::<UInt64Type>().value(row).to_string(),
            DataType::Int64 => column.as_primitive::<Int64Type>().value(row).to_string(),
            DataType::Boolean => (if column.as_boolean().value(row) {
                "yes"
            } else {
                "no"
            })
            .to_owned(),
            _ => column.as_string::<i32>().value(row).to_owned(),
        }
    }

    fn shown_rows(&self) -> impl Iterator<Item = Vec<String>> {
        let rows = 0..self.batch.num_rows().min(SHOWN_MAX);
        rows.map(|row| {
            let columns = self.batch.columns().iter();
            columns.map(|column| Table::shown(column, row)).collect()
        })
    }

    fn shape(&self) -> String {
        let (rows, columns) = (self.batch.num_rows(), self.batch.num_columns());
        format!("{rows} rows of {columns} columns")
    }
}

#[pymethods]
impl Table {
    /// Names of the columns, in order.
    #[getter]
    fn columns(&self) -> Vec<String> {
        self.names().collect()
    }

    /// Meaning of each column, by name.
    #[getter]
    fn about<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let about = PyDict::new(py);
        for field in self.batch.schema().fields() {
            about.set_item(field.name(), field.metadata().get("about"))?;
        }
        Ok(about)
    }

    /// Names of the columns, in order.
    fn keys(&self) -> Vec<String> {
        self.names().collect()
    }

    fn __len__(&self) -> usize {
        self.batch.num_rows()
    }

    fn __contains__(&self, name: &str) -> bool {
        self.batch.column_by_name(name).is_some()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        PyList::new(py, self.names())?.call_method0("__iter__")
    }

    /// A column as a list.
    fn __getitem__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyList>> {
        let column = self.column(name)?;
        match column.data_type() {
            DataType::Float64 => PyList::new(py, column.as_primitive::<Float64Type>()),
            DataType::UInt64 => PyList::new(py, column.as_primitive::<UInt64Type>()),
            DataType::Int64 => PyList::new(py, column.as_primitive::<Int64Type>()),
            DataType::Boolean => PyList::new(py, column.as_boolean().iter().collect::<Vec<_>>()),
            _ => PyList::new(py, column.as_string::<i32>().iter().collect::<Vec<_>>()),
        }
    }

    /// All columns as lists, by name.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let all = PyDict::new(py);
        for name in self.names() {
            all.set_item(&name, self.__getitem__(py, &name)?)?;
        }
        Ok(all)
    }

    /// All rows as dictionaries.
    fn rows<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let rows: Vec<_> = (0..self.batch.num_rows()).map(|_| PyDict::new(py)).collect();
        for name in self.names() {
            for (row, cell) in rows.iter().zip(self.__getitem__(py, &name)?) {
                row.set_item(&name, cell)?;
            }
        }
        Ok(rows)
    }

    /// The schema, by Arrow's PyCapsule interface.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        let schema = FFI_ArrowSchema::try_from(self.batch.schema().as_ref());
        let schema = schema.map_err(|error| Failed::new_err(error.to_string()))?;
        PyCapsule::new_with_value(py, schema, c"arrow_schema")
    }

    /// The columns, by Arrow's PyCapsule interface. A request for another schema is ignored, as the interface allows.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        drop(requested_schema);
        let batches = RecordBatchIterator::new([Ok(self.batch.clone())], self.batch.schema());
        let stream = FFI_ArrowArrayStream::new(Box::new(batches));
        PyCapsule::new_with_value(py, stream, c"arrow_array_stream")
    }

    fn __eq__(&self, other: &Table) -> bool {
        self.batch == other.batch
    }

    fn __repr__(&self) -> String {
        let names: Vec<String> = self.names().collect();
        format!("<homenode.Table: {}: {}>", self.shape(), names.join(", "))
    }

    fn _repr_html_(&self) -> String {
        let cells = |tag: &str, cells: Vec<String>| {
            let cells = cells
                .iter()
                .map(|cell| format!("<{tag}>{}</{tag}>", escaped(cell)));
            format!("<tr>{}</tr>", cells.collect::<String>())
        };
        let head = cells("th", self.names().collect());
        let rows: String = self.shown_rows().map(|row| cells("td", row)).collect();
        let shape = self.shape();
        format!("<table><thead>{head}</thead><tbody>{rows}</tbody></table><p>{shape}</p>")
    }

    /// The first rows as text in columns.
    fn __str__(&self) -> String {
        let head: Vec<String> = self.names().collect();
        let lines: Vec<Vec<String>> = std::iter::once(head).chain(self.shown_rows()).collect();
        let width = |at: usize| {
            lines
                .iter()
                .map(|line| line[at].chars().count())
                .max()
                .unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.batch.num_columns()).map(width).collect();
        let line = |line: &Vec<String>| {
            let cells = line.iter().zip(&widths);
            let cells: Vec<String> = cells.map(|(cell, width)| format!("{cell:>width$}")).collect();
            cells.join("  ")
        };
        let mut text = lines.iter().map(line).collect::<Vec<_>>().join("\n");
        if self.batch.num_rows() > SHOWN_MAX {
            text += &format!("\n({})", self.shape());
        }
        text
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Parses a duration.
///
/// # Errors
/// Text that is not a duration; the message contains `name`.
pub(crate) fn duration(name: &str, text: &str) -> PyResult<homenode_units::Ns> {
    text.parse()
        .map_err(|error| bad_input(format!("{name}: {error}")))
}
