//! What programs read: JSON objects that say what they are.
//!
//! ```text
//!   {"schema":"vms/1","vms":[…]}
//! ```
//!
//! `schema` names the kind of document and the version of its form; `data/schema/json/vms.schema.json` describes it. A key
//! that is added changes no version; one that goes, or means something else, does.
//!
//! # Conventions
//!
//! - A key ends in the unit of its number: `_bytes`, `_bytes_per_s`, `_ns`, `_hz`, `_count`. Shares are numbers from 0 to 1.
//! - What is not known is `null`.
//! - What belongs to a node is an object that names it: `{"node":0,"pages":512}`.

use schemars::{JsonSchema, generate::SchemaSettings};
use serde::Serialize;
use serde_json::{Value, json};

/// Version of all documents' form.
pub const VERSION: u32 = 1;

/// An object as a document of a kind. What is no object is left as it is.
pub fn document(kind: &str, mut object: Value) -> Value {
    if let Some(map) = object.as_object_mut() {
        map.insert("schema".into(), format!("{kind}/{VERSION}").into());
    }
    object
}

/// The schema of a kind of document, as it is committed.
pub fn schema<T: JsonSchema + Serialize>(kind: &str) -> String {
    // What is written is described, not what could be read.
    let settings = SchemaSettings::draft2020_12().for_serialize();
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), format!("Homenode's {kind}").into());
    let mut value = schema.to_value();
    value["properties"]["schema"] = json!({ "const": format!("{kind}/{VERSION}") });
    if let Some(required) = value["required"].as_array_mut()
        && !required.iter().any(|key| key == "schema")
    {
        required.push("schema".into());
    }
    format!("{value:#}\n")
}

/// The schema of a kind of document that others write, as it is committed: what is read is described.
pub fn read_schema<T: JsonSchema>(kind: &str) -> String {
    let settings = SchemaSettings::draft2020_12();
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), format!("Homenode's {kind}").into());
    format!("{:#}\n", schema.to_value())
}
