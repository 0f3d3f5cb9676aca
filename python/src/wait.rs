//! Long work: the interpreter's lock is given away meanwhile, and signals are looked at now and then.

use std::time::{Duration, Instant};

use pyo3::prelude::*;

/// How long a signal may wait. Taking the lock costs a few microseconds, unless other threads of Python are busy: then up to
/// their turn of 5 ms.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// When signals were looked at last.
#[derive(Debug)]
pub struct Signals {
    /// `None` before the first time, which is at once: what is short is told of as well.
    looked: Option<Instant>,
}

impl Signals {
    /// From now on.
    pub fn new() -> Signals {
        Signals { looked: None }
    }

    /// Looks, if it is time, and has `then` done with the lock held.
    ///
    /// # Errors
    /// What a handler of signals raised (`KeyboardInterrupt` on Ctrl-C), and what `then` did.
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

/// What is known of work on other threads, and whether it is still wanted.
pub trait Work: Sync {
    /// Pieces done, and how many there are.
    fn done(&self) -> (usize, usize);
    /// Nobody wants the rest any more.
    fn end(&self);
}

/// Has work done on a thread of its own, without the interpreter's lock. `progress` is called now and then with what it is and
/// how much is done; what that or a signal raises ends the work after the pieces that have begun.
///
/// # Errors
/// What was raised meanwhile.
pub fn apart<T: Send>(
    py: Python<'_>,
    what: &str,
    progress: Option<&Py<PyAny>>,
    of: &dyn Work,
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
