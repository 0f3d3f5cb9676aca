//! Documents for programs: JSON objects that name their own kind.
//!
//! ```text
//!   {"schema":"vms/1","vms":[…]}
//! ```
//!
//! `schema` names the kind of document and the version of its format; `data/schema/json/vms.schema.json` describes it.
//! Adding a key keeps the version; removing one or changing its meaning raises it.
//!
//! # Conventions
//!
//! - A key ends in the unit of its number: `_bytes`, `_bytes_per_s`, `_ns`, `_hz`, `_count`. Shares are numbers from 0 to 1.
//! - Unknown values are `null`.
//! - Values per node are objects that name the node: `{"node":0,"pages":512}`.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde::Serialize;
use serde_json::{Value, json};

/// Returns the version of the format of a kind of document.
pub fn version(kind: &str) -> u32 {
    match kind {
        "evidence" => 2,
        _ => 1,
    }
}

/// Returns an object as a document of a kind. Returns a value that is not an object unchanged.
pub fn document(kind: &str, mut object: Value) -> Value {
    if let Some(map) = object.as_object_mut() {
        map.insert("schema".into(), format!("{kind}/{}", version(kind)).into());
    }
    object
}

/// Returns the schema of a kind of document, in its committed form.
pub fn schema<T: JsonSchema + Serialize>(kind: &str) -> String {
    // The schema describes the documents that we write, not everything that we would accept.
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), format!("Homenode's {kind}").into());
    let mut value = schema.to_value();
    value["properties"]["schema"] = json!({ "const": format!("{kind}/{}", version(kind)) });
    if let Some(required) = value["required"].as_array_mut()
        && !required.iter().any(|key| key == "schema")
    {
        required.push("schema".into());
    }
    format!("{value:#}\n")
}

/// Returns the schema of a kind of document that other programs write, in its committed form. It describes what we accept.
pub fn read_schema<T: JsonSchema>(kind: &str) -> String {
    let settings = SchemaSettings::draft2020_12();
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), format!("Homenode's {kind}").into());
    format!("{:#}\n", schema.to_value())
}
