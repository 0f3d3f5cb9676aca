//! Runs long work without the interpreter's lock, and checks for signals meanwhile.

use std::time::{Duration, Instant};

use homenode_reproduce::jobs::Progress;
use pyo3::prelude::*;

/// Time between checks for signals. Each check takes the lock, which costs a few microseconds, or up to a time slice of 5 ms if
/// other Python threads are busy.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Time of the last check for signals.
#[derive(Debug)]
pub(crate) struct Signals {
    /// `None` before the first check. The first check does not wait, so that short work reports progress, too.
    looked: Option<Instant>,
}

impl Signals {
    /// Starts with the first check still due.
    pub(crate) fn new() -> Signals {
        Signals { looked: None }
    }

    /// If a check is due, checks for signals and calls `then`, with the lock held.
    ///
    /// # Errors
    /// The exception of a signal handler (`KeyboardInterrupt` on Ctrl-C), or of `then`.
    pub(crate) fn look(&mut self, then: impl FnOnce(Python<'_>) -> PyResult<()>) -> PyResult<()> {
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

/// Runs `work` on its own thread, without the interpreter's lock. Regularly calls `progress` with `what`, the number of finished
/// pieces and the total. An exception from `progress` or from a signal handler ends the work once the pieces in progress are
/// finished.
///
/// # Errors
/// The exception from `progress` or from the signal handler.
pub(crate) fn apart<T: Send>(
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
