//! Maps errors to exceptions.

use std::fmt::Display;

use homenode_control::external::PlannerFailed;
use homenode_search::program::NotStarted;
use homenode_twin::TwinError;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;

create_exception!(
    homenode,
    Error,
    PyException,
    "Something that Homenode could not do; the message is the command's sentence."
);
create_exception!(
    homenode,
    BadInput,
    Error,
    "What was given is wrong: the message names it, with file, line and column where it is of a file. The command ends with 2 then."
);
create_exception!(
    homenode,
    Failed,
    Error,
    "Everything else that went wrong. The command ends with 1 then."
);

/// Adds the exceptions to the module.
pub(crate) fn add(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    module.add("Error", py.get_type::<Error>())?;
    module.add("BadInput", py.get_type::<BadInput>())?;
    module.add("Failed", py.get_type::<Failed>())
}

/// Returns the exception for invalid input.
pub(crate) fn bad_input(error: impl Display) -> PyErr {
    BadInput::new_err(error.to_string())
}

/// Converts an error to an exception. Python's own exceptions stay as they are, the simulator's refusals become bad input, and
/// every other error becomes a failure.
pub(crate) fn raised(error: anyhow::Error) -> PyErr {
    match error.downcast::<PyErr>() {
        Ok(own) => own,
        Err(error) if error.is::<TwinError>() || error.is::<NotStarted>() => bad_input(format!("{error:#}")),
        Err(error) => Failed::new_err(format!("{error:#}")),
    }
}

/// Returns the exception of a run that ended because a policy in Python failed, with the policy's exception as its cause.
pub(crate) fn raised_by_policy(error: anyhow::Error, cause: Option<PyErr>, py: Python<'_>) -> PyErr {
    let is_policys = error.is::<PlannerFailed>();
    let raised = raised(error);
    if is_policys && cause.is_some() {
        raised.set_cause(py, cause);
    }
    raised
}
