//! Runs long work without the interpreter's lock, and checks for signals meanwhile.

use std::time::{Duration, Instant};

use homenode_reproduce::jobs::Progress;
use pyo3::prelude::*;

/// How long a signal may wait. Taking the lock costs a few microseconds, unless other Python threads are busy: then up to
/// their time slice of 5 ms.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Time of the last check for signals.
#[derive(Debug)]
pub struct Signals {
    /// `None` before the first check, which is immediate, so that short work reports progress as well.
    looked: Option<Instant>,
}

impl Signals {
    /// Starts without a check so far.
    pub fn new() -> Signals {
        Signals { looked: None }
    }

    /// Checks for signals if it is time, and runs `then` with the lock held.
    ///
    /// # Errors
    /// The exception of a signal handler (`KeyboardInterrupt` on Ctrl-C), or of `then`.
    pub fn look(&mut self, then: impl FnOnce(Python<'_>) -> PyResult<()>) -> PyResult<()> {
        if self.looked.is_some_and(|looked| looked.elapsed() < LOOK_EVERY) {
            return Ok(());
        }
        self.looked = Some(Instant::now());
        Python::attach(|py| {
            py.check_signals()?;
            then(py)
        })
    }
}

/// Runs work on a thread of its own, without the interpreter's lock. `progress` is regularly called with the work and its
/// progress; an exception from it or from a signal ends the work after the pieces that have begun.
///
/// # Errors
/// The exception raised meanwhile.
pub fn apart<T: Send>(
    py: Python<'_>,
    what: &str,
    progress: Option<&Py<PyAny>>,
    of: &Progress,
    work: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    py.detach(|| {
        std::thread::scope(|scope| {
            let thread = scope.spawn(work);
            let mut raised = Ok(());
            while !thread.is_finished() && raised.is_ok() {
                std::thread::sleep(LOOK_EVERY / 10);
                raised = Python::attach(|py| {
                    py.check_signals()?;
                    let (done, all) = of.done();
                    match progress {
                        Some(progress) => progress.call1(py, (what, done as f64, all as f64)).map(drop),
                        None => Ok(()),
                    }
                });
            }
            if raised.is_err() {
                of.end();
            }
            let result = thread
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            raised.map(|()| result)
        })
    })
}
