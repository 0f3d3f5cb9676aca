//! The Rust side of the Python package: machines, scenarios, runs, tables. The Python side is in `homenode/`, with the user
//! documentation.
//!
//! | file | contents |
//! |---|---|
//! | `errors` | maps errors to exceptions, in one place |
//! | `values` | dictionaries of Python as TOML and JSON |
//! | `wait` | releases the interpreter's lock, and checks signals |
//! | `table` | columns for Arrow readers |
//! | `machine`, `workload`, `scenario` | inputs of simulations |
//! | `simulate`, `one`, `report`, `over_time` | a scenario's runs, their records, and their tables |
//! | `policy` | policies in Python |
//! | `asked` | questions about scenarios |
//! | `experiment` | experiments and published claims |
//! | `sweep` | sweeps |
//! | `record` | recordings and logs of pages |

// Functions called from Python own their arguments.
#![allow(clippy::needless_pass_by_value)]

mod asked;
mod errors;
mod experiment;
mod machine;
mod one;
mod over_time;
mod policy;
mod record;
mod report;
mod scenario;
mod simulate;
mod sweep;
mod table;
mod values;
mod wait;
mod workload;

use pyo3::prelude::*;

/// `homenode._native`.
#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("__commit__", homenode_sweep::COMMIT)?;
    errors::add(module)?;
    module.add_class::<table::Table>()?;
    module.add_class::<machine::Machine>()?;
    module.add_class::<workload::Workload>()?;
    module.add_class::<scenario::Scenario>()?;
    module.add_class::<report::Simulated>()?;
    module.add_function(wrap_pyfunction!(values::toml_of, module)?)?;
    module.add_function(wrap_pyfunction!(simulate::simulate, module)?)?;
    module.add_class::<record::Recording>()?;
    module.add_class::<record::PageLog>()?;
    module.add_class::<experiment::MadeExperiment>()?;
    module.add_class::<experiment::Decided>()?;
    module.add_class::<asked::Searched>()?;
    module.add_class::<sweep::SweepPlan>()?;
    module.add_class::<sweep::SweepTable>()?;
    module.add_function(wrap_pyfunction!(experiment::experiment, module)?)?;
    module.add_function(wrap_pyfunction!(experiment::published, module)?)?;
    module.add_function(wrap_pyfunction!(experiment::reproduce, module)?)?;
    module.add_function(wrap_pyfunction!(asked::whatif, module)?)?;
    module.add_function(wrap_pyfunction!(asked::search, module)?)?;
    Ok(())
}
