//! JSON schemas of the files that people write, generated from the types that read them.

use schemars::JsonSchema;
use schemars::generate::SchemaSettings;

use crate::scenario::Scenario;
use crate::workload::Workload;

/// Returns name and text of every schema in `data/schema`.
pub fn files() -> [(&'static str, String); 2] {
    [
        ("scenario.schema.json", text::<Scenario>("scenario")),
        ("workload.schema.json", text::<Workload>("workload")),
    ]
}

fn text<T: JsonSchema>(what: &str) -> String {
    let settings = SchemaSettings::draft2020_12();
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), format!("Homenode {what} file").into());
    format!("{:#}\n", schema.to_value())
}
