//! A policy in Python that plans for the control loop: it receives a view as a dictionary, and returns a list of actions.

use std::sync::{Arc, Mutex, PoisonError};

use homenode_control::external::{PlanDocument, Planner, PlannerError, ViewDocument};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::values;

/// The exception that a policy raised, which the run reports to its caller.
pub(crate) type Raised = Arc<Mutex<Option<PyErr>>>;

/// A policy in Python.
pub(crate) struct PyPolicy {
    name: String,
    policy: Py<PyAny>,
    raised: Raised,
}

impl PyPolicy {
    /// Wraps an object that has a method `plan`. An exception raised by `plan` is stored in `raised`.
    ///
    /// # Errors
    /// An exception from reading the attribute `name`.
    pub(crate) fn new(policy: &Bound<'_, PyAny>, raised: Raised) -> PyResult<PyPolicy> {
        Ok(PyPolicy {
            name: PyPolicy::name_of(policy)?,
            policy: policy.clone().unbind(),
            raised,
        })
    }

    /// Returns a policy's name: its attribute `name`, or the name of its class.
    ///
    /// # Errors
    /// An exception from reading either name.
    pub(crate) fn name_of(policy: &Bound<'_, PyAny>) -> PyResult<String> {
        match policy.getattr_opt("name")? {
            Some(name) => Ok(name.str()?.to_string()),
            None => Ok(policy.get_type().name()?.to_string()),
        }
    }

    /// Asks the policy for a plan, and returns the plan as JSON.
    fn ask(&self, py: Python<'_>, view: &ViewDocument<'_>) -> PyResult<String> {
        let version = view.version;
        let view = values::to_python(py, view)?;
        let answer = self.policy.bind(py).call_method1("plan", (view,))?;
        // A method without `return` returns None, which means no action.
        let actions = match answer.is_none() {
            true => PyList::empty(py),
            false => answer
                .try_iter()?
                .collect::<PyResult<Vec<_>>>()
                .and_then(|all| PyList::new(py, all))?,
        };
        let plan = PyDict::new(py);
        plan.set_item("version", version.0)?;
        plan.set_item("actions", actions)?;
        Ok(values::to_json(&plan)?.to_string())
    }
}

impl Planner for PyPolicy {
    fn name(&self) -> &str {
        &self.name
    }

    fn plan(&mut self, view: &ViewDocument<'_>) -> Result<PlanDocument, PlannerError> {
        let text = Python::attach(|py| {
            self.ask(py, view).map_err(|error| {
                let said = error.value(py).to_string();
                *self.raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                said
            })
        })?;
        Ok(PlanDocument::from_json(text.as_bytes())?)
    }
}
