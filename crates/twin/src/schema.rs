//! JSON schemas of the files that people write, generated from the types that read them, and the reference made from them.

use homenode_machine::MachineFile;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::Value;

use crate::scenario::Scenario;
use crate::workload::Workload;

mod reference;

/// Returns path below the project and text of every schema, and of the reference.
pub fn files() -> [(&'static str, String); 4] {
    let machine = schema::<MachineFile>("machine");
    let scenario = schema::<Scenario>("scenario");
    let workload = schema::<Workload>("workload");
    let mut reference = reference::Reference::default();
    reference.file("Scenario", &scenario, "data/scenarios/permits.toml");
    reference.file("Workload", &workload, "data/workloads/cpu2006/lbm.toml");
    reference.file("Machine", &machine, "data/machines/xeon26x2.toml");
    let text = |schema: &Value| format!("{schema:#}\n");
    [
        ("data/schema/machine.schema.json", text(&machine)),
        ("data/schema/scenario.schema.json", text(&scenario)),
        ("data/schema/workload.schema.json", text(&workload)),
        ("docs/FORMATS.md", reference.document()),
    ]
}

fn schema<T: JsonSchema>(what: &str) -> Value {
    let settings = SchemaSettings::draft2020_12();
    let mut schema = settings.into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), format!("Homenode {what} file").into());
    schema.to_value()
}
