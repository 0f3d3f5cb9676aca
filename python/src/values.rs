//! Dictionaries of Python as TOML and JSON. Python's own `json` turns them into text, so there is one rule of what fits.

use pyo3::prelude::*;
use serde::Serialize;
use serde_json::Value;

use crate::errors::bad_input;

/// What a value of Python is as JSON.
///
/// # Errors
/// What `json.dumps` raises.
pub fn to_json(value: &Bound<'_, PyAny>) -> PyResult<Value> {
    let text: String = value
        .py()
        .import("json")?
        .call_method1("dumps", (value,))?
        .extract()?;
    serde_json::from_str(&text)
        .map_err(|error| bad_input(format!("not a finite number, or no JSON: {error}")))
}

/// A value as Python has it: dictionaries, lists, numbers, strings.
///
/// # Errors
/// What cannot be JSON.
pub fn to_python<'py>(py: Python<'py>, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let text = serde_json::to_string(value).map_err(bad_input)?;
    py.import("json")?.call_method1("loads", (text,))
}

/// A document as the command prints it: it says what it is, and keys of before stay for a version.
///
/// # Errors
/// What cannot be JSON.
pub fn document<'py>(py: Python<'py>, kind: &str, value: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(value).map_err(bad_input)?;
    to_python(py, &homenode_api::document::document(kind, value))
}

/// A dictionary as a table of TOML. `None` is left out, as TOML has no null.
///
/// # Errors
/// What is no dictionary, or has values that TOML has not.
pub fn to_toml(value: &Bound<'_, PyAny>) -> PyResult<toml::Table> {
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

/// The text of a table.
///
/// # Errors
/// What cannot be TOML.
pub fn text_of(table: &impl Serialize) -> PyResult<String> {
    toml::to_string(table).map_err(bad_input)
}

/// A dictionary as the text of a TOML file.
#[pyfunction]
pub fn toml_of(keys: &Bound<'_, PyAny>) -> PyResult<String> {
    text_of(&to_toml(keys)?)
}
