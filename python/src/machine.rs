//! Machines.

use std::path::Path;

use homenode_machine_files::{Comments, from_toml, preset_names, render_text, sysfs};
use homenode_twin::named;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::{Failed, bad_input};
use crate::table::{Columns, Table};
use crate::values;

/// A host's hardware: nodes, CPUs, caches and links, with their speeds if these are known.
#[pyclass(frozen, eq, module = "homenode", from_py_object)]
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    pub inner: homenode_machine::Machine,
}

#[pymethods]
impl Machine {
    /// Opens a preset by its name, or a file, whose name ends with `.toml`.
    #[new]
    fn new(what: &str) -> PyResult<Machine> {
        let inner = named::machine(what).map_err(bad_input)?;
        Ok(Machine { inner })
    }

    /// Parses the text of a machine file; `path` is only for messages.
    #[staticmethod]
    #[pyo3(signature = (text, path="machine.toml"))]
    fn from_toml(text: &str, path: &str) -> PyResult<Machine> {
        let inner = from_toml(path, text).map_err(bad_input)?;
        Ok(Machine { inner })
    }

    /// The current machine, as described by `/sys`. It has no speeds, so the simulator cannot simulate it.
    #[staticmethod]
    fn here() -> PyResult<Machine> {
        let inner = sysfs::read(Path::new("/")).map_err(|error| Failed::new_err(error.to_string()))?;
        Ok(Machine { inner })
    }

    #[staticmethod]
    fn _from_json(text: &str) -> PyResult<Machine> {
        let inner = serde_json::from_str(text).map_err(bad_input)?;
        Ok(Machine { inner })
    }

    /// Names of the presets.
    #[staticmethod]
    fn names() -> Vec<&'static str> {
        preset_names().collect()
    }

    /// The machine's name.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// Number of CPUs.
    #[getter]
    fn cpu_count(&self) -> usize {
        self.inner.cpus.len()
    }

    /// Memory of all nodes, in bytes.
    #[getter]
    fn memory_bytes(&self) -> u64 {
        self.inner.nodes.iter().map(|(_, node)| node.memory_bytes.0).sum()
    }

    /// A row for each node.
    #[getter]
    fn nodes(&self) -> PyResult<Table> {
        let nodes = || self.inner.nodes.iter();
        Columns::default()
            .counts("node", "its number", nodes().map(|(id, _)| u64::from(id.0)))
            .words(
                "cpus",
                "its CPUs, in list format",
                nodes().map(|(_, node)| node.cpus.to_string()),
            )
            .counts(
                "cpu_count",
                "how many these are",
                nodes().map(|(_, node)| node.cpus.len() as u64),
            )
            .counts(
                "memory_bytes",
                "its memory",
                nodes().map(|(_, node)| node.memory_bytes.0),
            )
            .numbers(
                "memory_bandwidth_bytes_per_s",
                "what its controllers sustain, where known",
                nodes().map(|(_, node)| node.memory_bandwidth.map(homenode_units::BytesPerSec::as_f64)),
            )
            .counts(
                "socket",
                "its socket, where known",
                nodes().map(|(_, node)| node.socket.map(u64::from)),
            )
            .table()
    }

    /// A row for each direction of each link.
    #[getter]
    fn links(&self) -> PyResult<Table> {
        let links = || self.inner.links.iter();
        Columns::default()
            .counts(
                "from",
                "node it comes from",
                links().map(|link| u64::from(link.from.0)),
            )
            .counts("to", "node it goes to", links().map(|link| u64::from(link.to.0)))
            .numbers(
                "bandwidth_bytes_per_s",
                "what it sustains, where known",
                links().map(|link| link.bandwidth.map(homenode_units::BytesPerSec::as_f64)),
            )
            .table()
    }

    /// Distances between nodes from firmware (10 is the node itself): a list for each node, with an entry for each node.
    #[getter]
    fn distances(&self) -> Vec<Vec<u32>> {
        self.inner.distances.rows.clone()
    }

    /// The machine as a dictionary, as printed by `homenode machine --json`.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values::document(py, "machine", &self.inner)
    }

    /// Formats the machine as a machine file.
    fn to_toml(&self) -> String {
        homenode_machine_files::to_toml(&self.inner, &Comments::default())
    }

    fn __str__(&self) -> String {
        render_text(&self.inner)
    }

    fn __repr__(&self) -> String {
        let (name, nodes) = (&self.inner.name, self.inner.nodes.iter().count());
        format!(
            "<homenode.Machine {name}: {nodes} nodes, {} CPUs>",
            self.cpu_count()
        )
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let text = serde_json::to_string(&self.inner).map_err(bad_input)?;
        let from_json = py.get_type::<Machine>().getattr("_from_json")?;
        Ok((from_json, PyTuple::new(py, [text])?))
    }
}
