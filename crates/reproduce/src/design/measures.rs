//! Sources of an experiment's numbers: outcomes of runs, additional measures in code, and published tables.

use anyhow::{Result, bail};
use homenode_twin::VmReport;
use serde_json::{Value, json};

use super::Csv;
use super::array::{Array, Axis, Cell, Labels, Named, Row, labels};
use crate::claims::{TABLE_1, TABLE_4};
use crate::models::OfRun;
use crate::run::{Outcome, Run};

/// Metrics that every run has; `vms` contains those of each VM, along axis `vm`.
const METRICS: [&str; 6] = [
    "seconds",
    "at_s",
    "node_bytes",
    "imbalance_percent",
    "interconnect_percent",
    "vms",
];

/// Metrics of a run.
pub(crate) struct Counted {
    json: Value,
    more: Named,
}

/// Returns a run's metrics as JSON: those of the window, and the VMs' reports with their counters.
///
/// # Errors
/// Those of an additional measure.
pub(crate) fn of_run(run: &Run, outcome: &Outcome, more: Option<OfRun>) -> Result<Counted> {
    let mut vcpus = outcome.window.vcpus.iter();
    let vms = run.scenario.vms.iter().zip(&outcome.vms).map(|(spec, report)| {
        let mut counted = [0; 4];
        for vcpu in vcpus.by_ref().take(spec.vcpus.into()) {
            let all = [
                vcpu.instructions,
                vcpu.cycles,
                vcpu.llc_references,
                vcpu.llc_misses,
            ];
            counted.iter_mut().zip(all).for_each(|(sum, own)| *sum += own);
        }
        let mut vm = json!(report);
        if let Value::Object(vm) = &mut vm {
            for (name, count) in COUNTERS.iter().zip(counted) {
                vm.insert((*name).to_owned(), json!(count));
            }
        }
        vm
    });
    let window = &outcome.window;
    let more = more.map(|more| more(outcome)).transpose()?.unwrap_or_default();
    let json = json!({
        "seconds": window.seconds,
        "at_s": outcome.at_s,
        "node_bytes": window.node_bytes,
        "imbalance_percent": window.imbalance_percent,
        "interconnect_percent": window.interconnect_percent,
        "vms": vms.collect::<Vec<Value>>(),
    });
    Ok(Counted { json, more })
}

impl Counted {
    /// Returns a row for each VM: first these cells, then the figures of the run, then those of the VM.
    pub(crate) fn rows(&self, first: &Row) -> Vec<Row> {
        let mut of_run = first.clone();
        flatten(&self.json, "", &mut of_run);
        let vms = self.json["vms"].as_array().into_iter().flatten();
        vms.map(|vm| {
            let mut row = of_run.clone();
            row.push(("vm".to_owned(), vm["name"].clone()));
            flatten(vm, "", &mut row);
            row.retain(|(column, _)| column != "name");
            row
        })
        .collect()
    }
}

/// Flattens an object and its nested objects into cells named after their paths. Skips lists.
fn flatten(value: &Value, path: &str, row: &mut Row) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                let path = if path.is_empty() {
                    name.clone()
                } else {
                    format!("{path}.{name}")
                };
                flatten(value, &path, row);
            }
        }
        Value::Number(_) | Value::String(_) | Value::Bool(_) => row.push((path.to_owned(), value.clone())),
        Value::Null | Value::Array(_) => {}
    }
}

/// Counters of a VM while it is measured, summed over its vCPUs.
const COUNTERS: [&str; 4] = ["instructions", "cycles", "llc_references", "llc_misses"];

/// Keys that a VM's report may lack.
const SOMETIMES: [&str; 5] = ["permit", "releases", "driver_domain", "memory", "programs"];

/// Returns a metric of one run, as cells with the labels of further axes. Empty if the run does not have the metric.
pub(crate) fn metric(run: &Counted, name: &str) -> Vec<(Labels, Cell)> {
    let path: Vec<&str> = name.split('.').collect();
    let mut found = Vec::new();
    if METRICS.contains(&path[0]) {
        walk(&run.json, &path, "", &mut Vec::new(), &mut found);
        return found;
    }
    if let Some(own) = run.more.get(name) {
        return labels(&own.axes).zip(own.cells().iter().cloned()).collect();
    }
    for vm in run.json["vms"].as_array().into_iter().flatten() {
        let label = vm["name"].as_str().unwrap_or_default().to_owned();
        let (mut labels, before) = (vec![("vm".to_owned(), label)], found.len());
        walk(vm, &path, "", &mut labels, &mut found);
        if found.len() == before {
            found.push((labels, Cell::Absent));
        }
    }
    found
}

fn walk(value: &Value, path: &[&str], key: &str, labels: &mut Labels, found: &mut Vec<(Labels, Cell)>) {
    match (value, path) {
        (Value::Array(_), []) if key == "vms" => found.push((
            labels.clone(),
            Cell::Number(value.as_array().map_or(0, Vec::len) as f64),
        )),
        (Value::Array(list), _) => {
            // A list becomes an axis with the list's name.
            for (at, value) in list.iter().enumerate() {
                labels.push((key.to_owned(), (at + 1).to_string()));
                walk(value, path, key, labels, found);
                labels.pop();
            }
        }
        (Value::Object(fields), [first, rest @ ..]) => {
            if let Some(value) = fields.get(*first) {
                walk(value, rest, first, labels, found);
            }
        }
        (Value::Number(number), []) => found.push((labels.clone(), number.as_f64().into())),
        (Value::String(text), []) => found.push((labels.clone(), Cell::Text(text.clone()))),
        (Value::Bool(is), []) => found.push((labels.clone(), Cell::Number(f64::from(*is)))),
        (Value::Null, _) => found.push((labels.clone(), Cell::Absent)),
        _ => {}
    }
}

/// Returns the names of all metrics that a run may have.
pub(crate) fn names() -> Vec<String> {
    let of_vm = json!(VmReport::default());
    let of_vm = of_vm
        .as_object()
        .map_or(Vec::new(), |fields| fields.keys().cloned().collect());
    let own = METRICS.into_iter().chain(COUNTERS).chain(SOMETIMES);
    own.map(str::to_owned).chain(of_vm).collect()
}

/// Returns the columns of a published table, along the table's axis.
pub(super) fn published(csv: &Csv) -> Result<Named> {
    let text = match csv.file.as_str() {
        "numa-policies-table1.csv" => TABLE_1,
        "numa-policies-table4.csv" => TABLE_4,
        other => bail!("data/published has no table `{other}`"),
    };
    let written = |cell: &str| {
        csv.write
            .iter()
            .fold(cell.to_owned(), |cell, (from, to)| cell.replace(from, to))
    };
    let mut lines = text.lines().filter(|line| !line.starts_with('#'));
    let head: Vec<&str> = lines.next().unwrap_or_default().split(',').collect();
    let rows: Vec<Vec<String>> = lines.map(|line| line.split(',').map(written).collect()).collect();
    let axis = Axis::new(&csv.axis, rows.iter().map(|row| row[0].clone()));
    let column = |(at, name): (usize, &&str)| {
        let cell = |text: &String| {
            text.parse()
                .map_or_else(|_| Cell::Text(text.clone()), Cell::Number)
        };
        let cells = rows.iter().map(|row| row.get(at).map_or(Cell::Absent, cell));
        ((*name).to_owned(), Array::of(vec![axis.clone()], cells.collect()))
    };
    Ok(head.iter().enumerate().skip(1).map(column).collect())
}
