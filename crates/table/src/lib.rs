//! Writes rows as Parquet and CSV. A row has a JSON value for each column. A null, or a value of the wrong type, is missing.
//!
//! # Properties (tests of the same names)
//! - What is written reads back.
//! - The same rows give the same bytes: a file contains the version that wrote it, but not the time.
//! - Rows are written in groups, so memory does not grow with them.

use std::io::Write;
use std::sync::Arc;

use parquet::basic::{Compression, ConvertedType, LogicalType, Repetition, TimeUnit, Type as Physical};
use parquet::data_type::{ByteArray, ByteArrayType, DoubleType, Int32Type, Int64Type};
pub use parquet::errors::ParquetError;
use parquet::file::metadata::KeyValue;
use parquet::file::properties::WriterProperties;
use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
use parquet::schema::types::{PrimitiveTypeBuilder, Type};
use serde_json::Value;

/// Number of rows that are written at once. They take some MiB of memory.
const ROWS_AT_ONCE: usize = 1 << 16;

/// The type of a column's cells, any of which may be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Whole number of 64 bits.
    Whole,
    /// Nanoseconds since 1970, as a time.
    Time,
    /// Floating-point number.
    Figure,
    /// Text. A value of another type is written as JSON.
    Text,
    /// List of whole numbers of 32 bits.
    Wholes,
}

/// A column's name and type.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Column {
    /// The column's name.
    pub name: String,
    /// The type of the column's cells.
    pub kind: Kind,
}

impl Column {
    /// Creates a column.
    pub fn new(name: impl Into<String>, kind: Kind) -> Column {
        let name = name.into();
        Column { name, kind }
    }

    fn schema(&self) -> Result<Type, ParquetError> {
        fn of(name: &str, physical: Physical, repetition: Repetition) -> PrimitiveTypeBuilder<'_> {
            Type::primitive_type_builder(name, physical).with_repetition(repetition)
        }
        let optional = |physical| of(&self.name, physical, Repetition::OPTIONAL);
        let time = LogicalType::timestamp(true, TimeUnit::NANOS);
        match self.kind {
            Kind::Whole => optional(Physical::INT64).build(),
            Kind::Time => optional(Physical::INT64).with_logical_type(Some(time)).build(),
            Kind::Figure => optional(Physical::DOUBLE).build(),
            Kind::Text => optional(Physical::BYTE_ARRAY)
                .with_logical_type(Some(LogicalType::String))
                .with_converted_type(ConvertedType::UTF8)
                .build(),
            Kind::Wholes => {
                let element = of("element", Physical::INT32, Repetition::REQUIRED).build()?;
                let list = Type::group_type_builder("list")
                    .with_repetition(Repetition::REPEATED)
                    .with_fields(vec![Arc::new(element)])
                    .build()?;
                Type::group_type_builder(&self.name)
                    .with_repetition(Repetition::OPTIONAL)
                    .with_logical_type(Some(LogicalType::List))
                    .with_converted_type(ConvertedType::LIST)
                    .with_fields(vec![Arc::new(list)])
                    .build()
            }
        }
    }
}

/// Cells of a column that are not written yet. `levels` has the definition level of each.
#[derive(Debug)]
enum Cells {
    Whole(Vec<i64>),
    Figure(Vec<f64>),
    Text(Vec<ByteArray>),
    /// Also has, for each level, whether it continues the list of the previous level.
    Wholes(Vec<i32>, Vec<i16>),
}

#[derive(Debug)]
struct Waiting {
    cells: Cells,
    levels: Vec<i16>,
}

/// Writes rows to a typed Parquet file, compressed with zstd.
pub struct Parquet<W: Write + Send> {
    to: SerializedFileWriter<W>,
    waiting: Vec<Waiting>,
    rows: usize,
}

impl<W: Write + Send> Parquet<W> {
    /// Creates a file without rows. `name` is the name of its rows; `about` is stored as metadata.
    ///
    /// # Errors
    /// If the table cannot be written.
    pub fn new(
        to: W,
        name: &str,
        columns: &[Column],
        about: &[(&str, String)],
    ) -> Result<Parquet<W>, ParquetError> {
        let fields = columns.iter().map(|column| column.schema().map(Arc::new));
        let schema = Type::group_type_builder(name).with_fields(fields.collect::<Result<_, _>>()?);
        let about = about
            .iter()
            .map(|(key, value)| KeyValue::new((*key).to_owned(), value.clone()));
        let about: Vec<KeyValue> = about.collect();
        // Sets the writer's name explicitly, so that a new release of the library does not change it.
        let properties = WriterProperties::builder()
            .set_compression(Compression::ZSTD(Default::default()))
            .set_created_by(concat!("homenode ", env!("CARGO_PKG_VERSION")).to_owned())
            .set_key_value_metadata(Some(about).filter(|about| !about.is_empty()));
        Ok(Parquet {
            to: SerializedFileWriter::new(to, Arc::new(schema.build()?), Arc::new(properties.build()))?,
            waiting: columns.iter().map(Waiting::new).collect(),
            rows: 0,
        })
    }

    /// Adds a row, which has a value for each column.
    ///
    /// # Errors
    /// If the table cannot be written.
    pub fn row<'a>(&mut self, cells: impl IntoIterator<Item = &'a Value>) -> Result<(), ParquetError> {
        let mut cells = cells.into_iter();
        for waiting in &mut self.waiting {
            waiting.push(cells.next().unwrap_or(&Value::Null));
        }
        self.rows += 1;
        if self.rows >= ROWS_AT_ONCE {
            self.write()?;
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), ParquetError> {
        if self.rows == 0 {
            return Ok(());
        }
        let mut group = self.to.next_row_group()?;
        for waiting in &mut self.waiting {
            waiting.write(&mut group)?;
        }
        group.close()?;
        self.rows = 0;
        Ok(())
    }

    /// Ends the file.
    ///
    /// # Errors
    /// If the table cannot be written.
    pub fn finish(mut self) -> Result<(), ParquetError> {
        self.write()?;
        self.to.close().map(drop)
    }
}

impl Waiting {
    fn new(column: &Column) -> Waiting {
        let cells = match column.kind {
            Kind::Whole | Kind::Time => Cells::Whole(Vec::new()),
            Kind::Figure => Cells::Figure(Vec::new()),
            Kind::Text => Cells::Text(Vec::new()),
            Kind::Wholes => Cells::Wholes(Vec::new(), Vec::new()),
        };
        let levels = Vec::new();
        Waiting { cells, levels }
    }

    fn push(&mut self, value: &Value) {
        let levels = &mut self.levels;
        match &mut self.cells {
            Cells::Whole(cells) => put(cells, levels, value.as_i64()),
            Cells::Figure(cells) => put(cells, levels, value.as_f64()),
            Cells::Text(cells) => {
                let text = match value {
                    Value::Null => None,
                    Value::String(text) => Some(ByteArray::from(text.as_str())),
                    other => Some(ByteArray::from(other.to_string().into_bytes())),
                };
                put(cells, levels, text);
            }
            Cells::Wholes(cells, goes_on) => {
                let list = value.as_array();
                let numbers = list
                    .into_iter()
                    .flatten()
                    .map(|item| item.as_i64().and_then(|n| i32::try_from(n).ok()));
                let before = goes_on.len();
                for number in numbers.flatten() {
                    goes_on.push(i16::from(goes_on.len() > before));
                    levels.push(2);
                    cells.push(number);
                }
                if goes_on.len() == before {
                    goes_on.push(0);
                    levels.push(i16::from(list.is_some()));
                }
            }
        }
    }

    /// Writes the waiting cells, as the next column of a row group.
    fn write<W: Write + Send>(
        &mut self,
        group: &mut SerializedRowGroupWriter<'_, W>,
    ) -> Result<(), ParquetError> {
        let mut column = group
            .next_column()?
            .ok_or(ParquetError::EOF("no column is left".to_owned()))?;
        let levels = Some(&self.levels[..]);
        match &mut self.cells {
            Cells::Whole(cells) => {
                column.typed::<Int64Type>().write_batch(cells, levels, None)?;
                cells.clear();
            }
            Cells::Figure(cells) => {
                column.typed::<DoubleType>().write_batch(cells, levels, None)?;
                cells.clear();
            }
            Cells::Text(cells) => {
                column.typed::<ByteArrayType>().write_batch(cells, levels, None)?;
                cells.clear();
            }
            Cells::Wholes(cells, goes_on) => {
                column
                    .typed::<Int32Type>()
                    .write_batch(cells, levels, Some(goes_on))?;
                cells.clear();
                goes_on.clear();
            }
        }
        self.levels.clear();
        column.close()
    }
}

fn put<T>(cells: &mut Vec<T>, levels: &mut Vec<i16>, value: Option<T>) {
    levels.push(i16::from(value.is_some()));
    cells.extend(value);
}

/// Returns a cell in the format of RFC 4180; a null is an empty cell.
pub fn csv_cell(value: &Value) -> String {
    match value {
        Value::Null => String::new(),
        Value::String(text) if text.contains([',', '"', '\n', '\r']) => {
            format!("\"{}\"", text.replace('"', "\"\""))
        }
        Value::String(text) => text.clone(),
        Value::Array(_) | Value::Object(_) => csv_cell(&Value::String(value.to_string())),
        other => other.to_string(),
    }
}

/// Returns the column names and the rows as CSV.
pub fn csv<'a, R>(columns: &[Column], rows: impl IntoIterator<Item = R>) -> String
where
    R: IntoIterator<Item = &'a Value>,
{
    let names = columns
        .iter()
        .map(|column| csv_cell(&Value::from(column.name.as_str())));
    let head = names.collect::<Vec<String>>().join(",");
    let line = |row: R| row.into_iter().map(csv_cell).collect::<Vec<String>>().join(",");
    std::iter::once(head)
        .chain(rows.into_iter().map(line))
        .map(|line| line + "\n")
        .collect()
}

#[cfg(test)]
mod tests {
    use parquet::file::reader::{FileReader as _, SerializedFileReader};
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn columns() -> Vec<Column> {
        [
            ("n", Kind::Whole),
            ("vm.\"a b\".x", Kind::Figure),
            ("word", Kind::Text),
            ("on", Kind::Wholes),
        ]
        .map(|(name, kind)| Column::new(name, kind))
        .into()
    }

    fn written(rows: &[Vec<Value>]) -> Vec<u8> {
        let mut file = Vec::new();
        let about = [("plan", "abc".to_owned())];
        let mut parquet = Parquet::new(&mut file, "rows", &columns(), &about).unwrap();
        rows.iter().for_each(|row| parquet.row(row).unwrap());
        parquet.finish().unwrap();
        file
    }

    fn read(file: &[u8]) -> Vec<Vec<Value>> {
        let reader = SerializedFileReader::new(bytes::Bytes::copy_from_slice(file)).unwrap();
        let rows = reader.get_row_iter(None).unwrap();
        rows.map(|row| {
            let row = row.unwrap().to_json_value();
            columns().iter().map(|column| row[&column.name].clone()).collect()
        })
        .collect()
    }

    fn cell(kind: Kind) -> BoxedStrategy<Value> {
        let own = match kind {
            Kind::Whole | Kind::Time => any::<i64>().prop_map(Value::from).boxed(),
            Kind::Figure => any::<f64>()
                .prop_filter("JSON has no others", |x| x.is_finite())
                .prop_map(Value::from)
                .boxed(),
            Kind::Text => ".{0,9}".prop_map(Value::from).boxed(),
            Kind::Wholes => prop::collection::vec(any::<i32>(), 0..4)
                .prop_map(Value::from)
                .boxed(),
        };
        prop_oneof![Just(Value::Null), own].boxed()
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(
            rows in prop::collection::vec(
                columns().iter().map(|column| cell(column.kind)).collect::<Vec<_>>(), 0..20
            )
        ) {
            prop_assert_eq!(read(&written(&rows)), rows);
        }
    }

    #[test]
    fn the_same_rows_give_the_same_bytes() {
        let rows = vec![vec![json!(1), json!(0.5), json!("a"), json!([1, 2])]];
        let file = written(&rows);
        assert_eq!(file, written(&rows));
        let reader = SerializedFileReader::new(bytes::Bytes::from(file)).unwrap();
        let about = reader.metadata().file_metadata();
        assert_eq!(
            about.created_by(),
            Some(concat!("homenode ", env!("CARGO_PKG_VERSION")))
        );
        let kept = about.key_value_metadata().unwrap();
        assert_eq!((kept.len(), kept[0].value.as_deref()), (1, Some("abc")));
    }

    #[test]
    fn what_is_not_of_its_columns_kind_is_missing_and_text_takes_all() {
        let rows = vec![vec![json!("x"), json!(true), json!({"a": 1}), json!("1")]];
        let missing = vec![vec![Value::Null, Value::Null, json!("{\"a\":1}"), Value::Null]];
        assert_eq!(read(&written(&rows)), missing);
    }

    #[test]
    fn cells_of_csv_are_quoted_where_they_must_be() {
        let rows = [vec![json!(1), Value::Null, json!("a, \"b\""), json!([1])]];
        let text = csv(&columns(), rows.iter());
        assert_eq!(text, "n,\"vm.\"\"a b\"\".x\",word,on\n1,,\"a, \"\"b\"\"\",[1]\n");
    }
}
