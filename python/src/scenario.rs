//! Scenarios: the text of a file, and its parsed form. A change edits the text and parses it again, so its errors are reported
//! like those of a file.

use homenode_machine_files::file::read_text_file;
use homenode_twin::named::{self, is_file, is_workload};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use toml::{Table, Value};

use crate::errors::bad_input;
use crate::values;
use crate::workload::Workload;

/// The path that messages name for a scenario without a file.
const PATH: &str = "scenario.toml";

/// VMs, their programs, arrivals and events. It is immutable: methods return changed copies.
///
/// Keys are those of scenario files (docs/SCENARIOS.md).
#[pyclass(frozen, eq, module = "homenode", from_py_object)]
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The path of the file. Its folder is the base of relative paths. If there is no file, messages still name this path.
    pub path: String,
    text: String,
    pub inner: homenode_twin::Scenario,
}

impl PartialEq for Scenario {
    fn eq(&self, other: &Scenario) -> bool {
        self.inner == other.inner
    }
}

impl Scenario {
    fn read(path: &str, text: String) -> PyResult<Scenario> {
        let beside = |named: &str| named::workload_beside(path, named);
        let inner = homenode_twin::Scenario::from_toml_with(path, &text, &beside).map_err(bad_input)?;
        let mut scenario = Scenario {
            path: path.to_owned(),
            text,
            inner,
        };
        scenario.take_in_workloads()?;
        Ok(scenario)
    }

    /// Copies workloads from their own files into the text, so that it is self-contained.
    fn take_in_workloads(&mut self) -> PyResult<()> {
        let mut table = self.table()?;
        let mut taken = Vec::new();
        for vm in array(&mut table, "vm")? {
            let workload = vm
                .get("workload")
                .and_then(Value::as_str)
                .filter(|name| is_file(name));
            let Some(Ok(found)) = workload.and_then(|file| named::workload_beside(&self.path, file)) else {
                continue;
            };
            if let Some(own) = vm.get_mut("workload") {
                *own = Value::String(found.name.clone());
            }
            taken.push(found);
        }
        if taken.is_empty() {
            return Ok(());
        }
        for found in taken {
            add_workload(&mut table, &found)?;
        }
        self.text = values::text_of(&table)?;
        Ok(())
    }

    fn table(&self) -> PyResult<Table> {
        self.text.parse().map_err(bad_input)
    }

    /// Returns a changed copy. Positions in later errors refer to [`Scenario::to_toml`].
    fn changed(&self, change: impl FnOnce(&mut Table) -> PyResult<()>) -> PyResult<Scenario> {
        let mut table = self.table()?;
        change(&mut table)?;
        let path = match self.path.ends_with(" (changed)") {
            true => self.path.clone(),
            false => format!("{} (changed)", self.path),
        };
        Scenario::read(&path, values::text_of(&table)?)
    }

    /// Returns the scenario of a single VM with a workload.
    fn of_workload(workload: &homenode_twin::Workload) -> PyResult<Scenario> {
        let alone = homenode_twin::Scenario::alone(workload.clone());
        let mut table = Table::new();
        table.insert("name".to_owned(), alone.name.into());
        table.insert("about".to_owned(), alone.about.into());
        for vm in alone.vms {
            let mut own = Table::new();
            own.insert("name".to_owned(), vm.name.into());
            own.insert("vcpus".to_owned(), i64::from(vm.vcpus).into());
            own.insert("memory".to_owned(), vm.memory.to_string().into());
            own.insert("workload".to_owned(), vm.workload.into());
            array(&mut table, "vm")?.push(own.into());
        }
        add_workload(&mut table, workload)?;
        Scenario::read(PATH, values::text_of(&table)?)
    }
}

/// Returns the list under a key, which is created if missing.
fn array<'a>(table: &'a mut Table, key: &str) -> PyResult<&'a mut Vec<Value>> {
    let list = table
        .entry(key.to_owned())
        .or_insert_with(|| Value::Array(Vec::new()));
    list.as_array_mut()
        .ok_or_else(|| bad_input(format!("`{key}` is no list")))
}

fn add_workload(table: &mut Table, workload: &homenode_twin::Workload) -> PyResult<()> {
    let own = Table::try_from(workload).map_err(bad_input)?;
    let known = array(table, "workload")?;
    known.retain(|known| known.get("name").and_then(Value::as_str) != Some(&workload.name));
    known.push(own.into());
    Ok(())
}

/// Sets keys of a table; `None` removes them.
fn put(table: &mut Table, keys: Option<&Bound<'_, PyDict>>) -> PyResult<()> {
    let Some(keys) = keys else { return Ok(()) };
    for (name, value) in keys {
        if value.is_none() {
            table.remove(&name.extract::<String>()?);
        }
    }
    table.extend(values::to_toml(keys)?);
    Ok(())
}

fn named_vm<'a>(
    scenario: &homenode_twin::Scenario,
    table: &'a mut Table,
    name: &str,
) -> PyResult<&'a mut Table> {
    let found = array(table, "vm")?
        .iter_mut()
        .filter_map(Value::as_table_mut)
        .find(|vm| vm.get("name").and_then(Value::as_str) == Some(name));
    found.ok_or_else(|| {
        let names: Vec<&str> = scenario.vms.iter().map(|vm| vm.name.as_str()).collect();
        bad_input(format!(
            "no VM of the scenario is named `{name}`; there are: {}",
            names.join(", ")
        ))
    })
}

#[pymethods]
impl Scenario {
    /// Opens a built-in scenario by its name, or a file, whose name ends with `.toml`. A workload file becomes a scenario with
    /// one VM that runs the workload.
    #[new]
    fn new(what: &str) -> PyResult<Scenario> {
        if !is_file(what) {
            let (path, text) = named::scenario_text(what).map_err(bad_input)?;
            return Scenario::read(&path, text);
        }
        let text = read_text_file(what).map_err(bad_input)?;
        match is_workload(&text) {
            true => Scenario::of_workload(&named::workload(what).map_err(bad_input)?),
            false => Scenario::read(what, text),
        }
    }

    /// Parses the text of a scenario file; `path` is for messages, and its folder is the base of relative paths.
    #[staticmethod]
    #[pyo3(signature = (text, path="scenario.toml"))]
    fn from_toml(text: String, path: &str) -> PyResult<Scenario> {
        Scenario::read(path, text)
    }

    /// Creates a scenario from a dictionary with the keys of a scenario file: `name`, `vm` (a list of dictionaries), …
    #[staticmethod]
    fn from_dict(keys: &Bound<'_, PyAny>) -> PyResult<Scenario> {
        Scenario::read(PATH, values::text_of(&values::to_toml(keys)?)?)
    }

    /// Creates a scenario with one VM that runs this workload and has enough memory for it.
    #[staticmethod]
    fn alone(workload: &Workload) -> PyResult<Scenario> {
        Scenario::of_workload(&workload.inner)
    }

    /// Names of the built-in scenarios.
    #[staticmethod]
    fn names() -> Vec<&'static str> {
        homenode_twin::Scenario::names().collect()
    }

    /// The scenario's name.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// The scenario's purpose.
    #[getter]
    fn about(&self) -> &str {
        &self.inner.about
    }

    /// The machine that the scenario was written for, if the scenario names one: a preset or a file.
    #[getter]
    fn machine(&self) -> Option<&str> {
        self.inner.machine.as_deref()
    }

    /// Default seed for `simulate`.
    #[getter]
    fn seed(&self) -> u64 {
        self.inner.seed
    }

    /// Maximum duration, in seconds.
    #[getter]
    fn duration_s(&self) -> f64 {
        self.inner.duration.as_secs_f64()
    }

    /// Start of the measurement, in seconds.
    #[getter]
    fn warm_up_s(&self) -> f64 {
        self.inner.warm_up.as_secs_f64()
    }

    /// Policies to run the scenario under.
    #[getter]
    fn policies(&self) -> Vec<String> {
        self.inner.policies.clone()
    }

    /// Names of the scenario's VMs, in order.
    #[getter]
    fn vm_names(&self) -> Vec<&str> {
        self.inner.vms.iter().map(|vm| vm.name.as_str()).collect()
    }

    /// A copy with these keys (`duration="60s"`, `policies=["default"]`); `None` removes a key.
    #[pyo3(signature = (**keys))]
    fn replace(&self, keys: Option<&Bound<'_, PyDict>>) -> PyResult<Scenario> {
        self.changed(|table| put(table, keys))
    }

    /// A copy with another VM: `with_vm(name="web", vcpus=4, memory="8GiB", workload="cg.B")`.
    #[pyo3(signature = (**keys))]
    fn with_vm(&self, keys: Option<&Bound<'_, PyDict>>) -> PyResult<Scenario> {
        let mut vm = Table::new();
        put(&mut vm, keys)?;
        self.changed(|table| {
            array(table, "vm")?.push(vm.into());
            Ok(())
        })
    }

    /// A copy with other keys of the VM `name`: `change_vm("web", vcpus=8)`; `None` removes a key.
    #[pyo3(signature = (name, /, **keys))]
    fn change_vm(&self, name: &str, keys: Option<&Bound<'_, PyDict>>) -> PyResult<Scenario> {
        self.changed(|table| put(named_vm(&self.inner, table, name)?, keys))
    }

    /// A copy without the VM `name` and its events.
    fn without_vm(&self, name: &str) -> PyResult<Scenario> {
        self.changed(|table| {
            named_vm(&self.inner, table, name)?;
            let is_other =
                |key: &'static str| move |entry: &Value| entry.get(key).and_then(Value::as_str) != Some(name);
            array(table, "vm")?.retain(is_other("name"));
            array(table, "event")?.retain(is_other("vm"));
            Ok(())
        })
    }

    /// A copy with another event of a VM: `with_event(at="30s", vm="web", action="stop")`; an action with details is a
    /// dictionary, `action={"pin": {"cpus": "0-3"}}`.
    #[pyo3(signature = (**keys))]
    fn with_event(&self, keys: Option<&Bound<'_, PyDict>>) -> PyResult<Scenario> {
        let mut event = Table::new();
        put(&mut event, keys)?;
        self.changed(|table| {
            array(table, "event")?.push(event.into());
            Ok(())
        })
    }

    /// A copy that contains this workload, which VMs may then name.
    fn with_workload(&self, workload: &Workload) -> PyResult<Scenario> {
        self.changed(|table| add_workload(table, &workload.inner))
    }

    /// Formats the scenario as a scenario file. A scenario that was not changed keeps the comments of its file.
    pub fn to_toml(&self) -> &str {
        &self.text
    }

    /// The scenario as a dictionary.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values::to_python(py, &self.table()?)
    }

    fn __repr__(&self) -> String {
        let (name, vms) = (&self.inner.name, self.inner.vms.len());
        format!(
            "<homenode.Scenario {name}: {vms} VMs, at most {}>",
            self.inner.duration
        )
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let from_toml = py.get_type::<Scenario>().getattr("from_toml")?;
        Ok((from_toml, PyTuple::new(py, [&self.text, &self.path])?))
    }
}
