//! Converts Python dictionaries to TOML and JSON. Python's own `json` turns them into text, so there is one rule for valid
//! values.

use pyo3::prelude::*;
use serde::Serialize;
use serde_json::Value;

use crate::errors::bad_input;

/// Converts a Python value to JSON.
///
/// # Errors
/// The exception of `json.dumps`.
pub(crate) fn to_json(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let text: String = value
        .py()
        .import("json")?
        .call_method1("dumps", (value,))?
        .extract()?;
    serde_json::from_str(&text)
        .map_err(|error| bad_input(format!("not a finite number, or no JSON: {error}")))
}

/// Converts a value to Python dictionaries, lists, numbers and strings.
///
/// # Errors
/// A value that JSON cannot express.
pub(crate) fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(bad_input)?;
    py.import("json")?.call_method1("loads", (text,))
}

/// Converts a value to the document that the command prints, which names its kind and the version of the format.
///
/// # Errors
/// A value that JSON cannot express.
pub(crate) fn document<'py>(
    py: Python<'py>,
    kind: &str,
    value: &impl Serialize,
) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(value).map_err(bad_input)?;
    to_python(py, &homenode_api::document::document(kind, value))
}

/// Converts a dictionary to a TOML table. `None` is dropped, as TOML has no null.
///
/// # Errors
/// Not a dictionary, or values that TOML cannot express.
pub(crate) fn to_toml(value: &Bound<'_, PyAny>) -> PyResult<toml::Table> {
    let json = without_nulls(to_json(value)?);
    toml::Table::try_from(json).map_err(bad_input)
}

fn without_nulls(value: Value) -> Value {
    match value {
        Value::Object(fields) => {
            let kept = fields.into_iter().filter(|(_, value)| !value.is_null());
            kept.map(|(name, value)| (name, without_nulls(value))).collect()
        }
        Value::Array(items) => items.into_iter().map(without_nulls).collect(),
        other => other,
    }
}

/// Formats a table as TOML.
///
/// # Errors
/// A value that TOML cannot express.
pub(crate) fn text_of(table: &impl Serialize) -> PyResult<String> {
    toml::to_string(table).map_err(bad_input)
}

/// Formats a dictionary as the text of a TOML file.
#[pyfunction]
pub(crate) fn toml_of(keys: &Bound<'_, PyAny>) -> PyResult<String> {
    text_of(&to_toml(keys)?)
}
