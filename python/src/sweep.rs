//! Sweeps: a plan, the rows of its tasks as bytes that processes exchange, and the table of all rows.

use std::path::Path;

use homenode_reproduce::jobs::{self, Progress};
use homenode_sweep::{Asked, Plan, Program, Rows, Shard, Store, SweepError};
use homenode_table::Kind;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyTuple};
use serde_json::Value;
use toml::Value as Toml;

use crate::errors::{Failed, bad_input};
use crate::scenario::Scenario;
use crate::table::{Columns, Table};
use crate::values;
use crate::wait::apart;

fn raised(error: SweepError) -> PyErr {
    match error {
        SweepError::Input(said) => bad_input(said),
        other => Failed::new_err(other.to_string()),
    }
}

/// Converts Python values to TOML, as in a plan's file.
fn toml_of(value: &Bound<'_, PyAny>) -> PyResult<Toml> {
    Toml::try_from(values::to_json(value)?).map_err(bad_input)
}

/// A self-contained, checked plan: runs of a scenario over values, policies and seeds. See `homenode.sweep`.
#[pyclass(frozen, module = "homenode._native", from_py_object)]
#[derive(Clone, Debug)]
pub struct SweepPlan {
    plan: Plan,
}

/// Options that override a plan's file.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Given<'py> {
    set: Vec<(String, Bound<'py, PyAny>)>,
    seeds: Option<Bound<'py, PyAny>>,
    policies: Vec<String>,
    machine: Option<String>,
    config: Option<Bound<'py, PyAny>>,
    metrics: Vec<String>,
    runs_per_task: Option<usize>,
}

fn planned(mut asked: Asked, given: Given<'_>) -> PyResult<SweepPlan> {
    for (key, values) in given.set {
        asked.set.insert(key, toml_of(&values)?);
    }
    if let Some(seeds) = given.seeds {
        asked.seeds = Some(toml_of(&seeds)?);
    }
    if let Some(config) = given.config {
        asked.config = Some(toml_of(&config)?);
    }
    if !given.policies.is_empty() {
        asked.policies = given.policies;
    }
    if !given.metrics.is_empty() {
        asked.metrics = given.metrics;
    }
    asked.machine = given.machine.or(asked.machine);
    asked.runs_per_task = given.runs_per_task.or(asked.runs_per_task);
    let plan = Plan::of(asked).map_err(raised)?;
    Ok(SweepPlan { plan })
}

#[pymethods]
impl SweepPlan {
    /// Creates a plan from a file or the name of a scenario, with overriding options.
    #[staticmethod]
    fn of_name(what: &str, given: Given<'_>) -> PyResult<SweepPlan> {
        planned(Plan::asked_by(what).map_err(raised)?, given)
    }

    /// Creates a plan from a scenario.
    #[staticmethod]
    fn of_scenario(scenario: &Scenario, given: Given<'_>) -> PyResult<SweepPlan> {
        let whole: toml::Table = scenario.to_toml().parse().map_err(bad_input)?;
        let asked = Asked {
            scenario: Some(whole.into()),
            ..Asked::default()
        };
        planned(asked, given)
    }

    /// Parses the text of a self-contained plan.
    #[staticmethod]
    fn from_toml(text: &str) -> PyResult<SweepPlan> {
        let plan = Plan::parse("plan", text).map_err(raised)?;
        Ok(SweepPlan { plan })
    }

    /// Formats the self-contained plan.
    fn to_toml(&self) -> PyResult<String> {
        self.plan.to_toml().map_err(raised)
    }

    /// Digest of everything that determines the results of the runs, except the program.
    fn digest(&self) -> PyResult<String> {
        self.plan.digest().map_err(raised)
    }

    /// Number of runs.
    fn runs(&self) -> usize {
        self.plan.runs()
    }

    /// Number of tasks.
    fn tasks(&self) -> usize {
        self.plan.tasks()
    }

    /// Runs these tasks, or all, and returns the rows of each task as bytes. `library` is this extension's own file: a store uses
    /// its contents to tell builds apart.
    #[pyo3(signature = (tasks, jobs, store, library, progress))]
    fn run<'py>(
        &self,
        py: Python<'py>,
        tasks: Option<Vec<usize>>,
        jobs: Option<usize>,
        store: Option<&str>,
        library: &str,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let store = store.map(|directory| -> PyResult<Store> {
            let program = Program::of(|| std::fs::read(library));
            let program = program.map_err(|error| Failed::new_err(format!("{library}: {error}")))?;
            let store = Store::open(Path::new(directory), program).map_err(raised)?;
            store.keep_plan(&self.plan).map_err(raised)?;
            Ok(store)
        });
        let store = store.transpose()?;
        let tasks = tasks.unwrap_or_else(|| Shard::ALL.tasks(&self.plan));
        let jobs = jobs.unwrap_or_else(jobs::available);
        let runs = Progress::silent();
        let rows = apart(py, "runs", progress.as_ref(), &runs, || {
            homenode_sweep::run(&self.plan, &tasks, jobs, store.as_ref(), &runs)
        })?;
        let bytes =
            |rows: Rows| serde_json::to_vec(&rows).map_err(|error| Failed::new_err(error.to_string()));
        let rows = rows.map_err(raised)?.into_iter();
        rows.map(|rows| Ok(PyBytes::new(py, &bytes(rows)?))).collect()
    }

    /// The table of all rows: means over seeds, or a row for each run.
    fn table(&self, rows: Vec<Vec<u8>>, all_runs: bool) -> PyResult<SweepTable> {
        let read = |bytes: &Vec<u8>| serde_json::from_slice::<Rows>(bytes);
        let mut rows: Vec<Rows> = rows
            .iter()
            .map(read)
            .collect::<Result<_, _>>()
            .map_err(|error| bad_input(format!("no rows of a task: {error}")))?;
        rows.sort_by_key(|rows| rows.first);
        let made = match all_runs {
            true => homenode_sweep::Table::runs(&self.plan, &rows),
            false => homenode_sweep::Table::means(&self.plan, &rows),
        };
        let made = made.map_err(raised)?;
        Ok(SweepTable { made })
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let from_toml = py.get_type::<SweepPlan>().getattr("from_toml")?;
        Ok((from_toml, PyTuple::new(py, [self.to_toml()?])?))
    }
}

/// Results of a sweep.
#[pyclass(frozen, module = "homenode._native")]
#[derive(Debug)]
pub struct SweepTable {
    made: homenode_sweep::Table,
}

/// Meanings of the columns that every sweep's table has.
const COLUMNS: [(&str, &str); 12] = [
    ("policy", "policies of the runs"),
    ("seed", "seed of the run"),
    ("vm", "the VM's name; none of figures of nodes and the host"),
    ("node", "the node's number; none of figures of VMs and the host"),
    ("metric", "which figure; its unit is in its name"),
    ("value", "the figure; none where the run has none"),
    ("count", "number of seeds that have the figure"),
    ("missing", "number of seeds without it"),
    ("mean", "mean over seeds"),
    (
        "ci95_low",
        "lower end of the 95 percent confidence interval, by Student's t",
    ),
    ("ci95_high", "its upper end"),
    ("stddev", "standard deviation of the sample"),
];

#[pymethods]
impl SweepTable {
    /// The results as a table.
    fn table(&self) -> PyResult<Table> {
        let mut columns = Columns::default();
        for (at, column) in self.made.columns.iter().enumerate() {
            let known = COLUMNS.iter().find(|(name, _)| *name == column.name);
            let about = known.map_or("a key that is set", |(_, about)| about);
            let cells = || {
                self.made
                    .rows
                    .iter()
                    .map(|row| row.get(at).unwrap_or(&Value::Null))
            };
            let word = |cell: &Value| match cell {
                Value::Null => None,
                Value::String(text) => Some(text.clone()),
                other => Some(other.to_string()),
            };
            columns = match column.kind {
                Kind::Figure => columns.numbers(&column.name, about, cells().map(Value::as_f64)),
                Kind::Whole | Kind::Time => columns.wholes(&column.name, about, cells().map(Value::as_i64)),
                Kind::Text | Kind::Wholes => columns.words(&column.name, about, cells().map(word)),
            };
        }
        columns.table()
    }

    /// The results as CSV, as printed by `--csv`.
    fn csv(&self) -> String {
        self.made.csv()
    }

    /// The results as Parquet, as written by `--parquet`.
    fn parquet<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.made.parquet().map_err(raised)?))
    }
}
