//! Workloads: what runs in VMs.

use homenode_machine_files::file::read_text_file;
use homenode_twin::named::is_file;
use homenode_twin::workload;
use homenode_units::Candidates;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::errors::bad_input;
use crate::values;

/// A program in a VM: its instructions, its memory use and its waits.
#[pyclass(frozen, eq, module = "homenode", from_py_object)]
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    pub inner: homenode_twin::Workload,
}

#[pymethods]
impl Workload {
    /// Opens a built-in workload by its name, or a file, whose name ends with `.toml`.
    #[new]
    fn new(what: &str) -> PyResult<Workload> {
        if is_file(what) {
            return Workload::from_toml(&read_text_file(what).map_err(bad_input)?, what);
        }
        let valid = || Candidates::of(what, workload::names());
        let inner = workload::builtin(what)
            .ok_or_else(|| bad_input(format!("no workload is named `{what}`{}", valid())))?;
        Ok(Workload { inner })
    }

    /// Parses the text of a workload file; `path` is only for messages.
    #[staticmethod]
    #[pyo3(signature = (text, path="workload.toml"))]
    fn from_toml(text: &str, path: &str) -> PyResult<Workload> {
        let inner = homenode_twin::Workload::from_toml(path, text).map_err(bad_input)?;
        Ok(Workload { inner })
    }

    /// Creates a workload from a dictionary with the keys of a workload file.
    #[staticmethod]
    fn from_dict(keys: &Bound<'_, PyAny>) -> PyResult<Workload> {
        Workload::from_toml(&values::text_of(&values::to_toml(keys)?)?, "workload.toml")
    }

    /// Names of the built-in workloads.
    #[staticmethod]
    fn names() -> Vec<&'static str> {
        workload::names().collect()
    }

    /// The name that scenarios use.
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    /// A description of the workload.
    #[getter]
    fn about(&self) -> &str {
        &self.inner.about
    }

    /// Formats the workload as a workload file.
    fn to_toml(&self) -> PyResult<String> {
        values::text_of(&self.inner)
    }

    /// The workload as a dictionary.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        values::to_python(py, &self.inner)
    }

    /// Memory in bytes that the program touches in a VM with this many vCPUs.
    fn footprint_bytes(&self, vcpus: u16) -> u64 {
        let program = self.inner.program.as_ref();
        program.map_or(0, |program| program.footprint(vcpus).0)
    }

    fn __repr__(&self) -> String {
        format!("<homenode.Workload {}>", self.inner.name)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, Bound<'py, PyTuple>)> {
        let from_toml = py.get_type::<Workload>().getattr("from_toml")?;
        Ok((from_toml, PyTuple::new(py, [self.to_toml()?])?))
    }
}
