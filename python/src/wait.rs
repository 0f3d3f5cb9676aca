//! Long work: the interpreter's lock is given away meanwhile, and signals are looked at now and then.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How long a signal may wait. Taking the lock costs a few microseconds, unless other threads of Python are busy: then up to their
/// turn of 5 ms.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// When signals were looked at last.
#[derive(Debug)]
pub struct Signals {
    looked: Instant,
}

impl Signals {
    /// From now on.
    pub fn new() -> Signals {
        Signals {
            looked: Instant::now(),
        }
    }

    /// Looks, if it is time, and has `then` done with the lock held.
    ///
    /// # Errors
    /// What a handler of signals raised (`KeyboardInterrupt` on Ctrl-C), and what `then` did.
    pub fn look(&mut self, then: impl FnOnce(Python<'_>) -> PyResult<()>) -> PyResult<()> {
        if self.looked.elapsed() < LOOK_EVERY {
            return Ok(());
        }
        self.looked = Instant::now();
        Python::attach(|py| {
            py.check_signals()?;
            then(py)
        })
    }
}
