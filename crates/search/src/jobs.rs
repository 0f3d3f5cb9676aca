//! Runs independent pieces of work on plain threads; the number of threads does not change the order of results.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

/// Processes each item on up to `jobs` threads, and returns the results in the items' order.
pub fn each<T: Sync, R: Send>(
    jobs: usize,
    items: &[T],
    progress: &Progress,
    work: impl Fn(&T) -> R + Sync,
) -> Vec<R> {
    homenode_reproduce::each(jobs, items, |item| {
        let result = work(item);
        progress.one_done();
        result
    })
}

/// Progress of long work: a line on a terminal, with the time left; silent in a pipe.
#[derive(Debug)]
pub struct Progress {
    what: String,
    all: usize,
    done: AtomicUsize,
    begin: Instant,
    shown: bool,
    is_over: AtomicBool,
}

impl Progress {
    /// Creates a progress line for a number of pieces.
    #[allow(
        clippy::disallowed_methods,
        reason = "what people see of a run is no part of its result"
    )]
    pub fn new(what: impl Into<String>, all: usize) -> Progress {
        Progress {
            what: what.into(),
            all,
            done: AtomicUsize::new(0),
            begin: Instant::now(),
            shown: stderr().is_terminal(),
            is_over: AtomicBool::new(false),
        }
    }

    /// Creates a progress that shows nothing.
    pub fn silent() -> Progress {
        let mut progress = Progress::new("", 0);
        progress.shown = false;
        progress
    }

    /// Returns the number of finished pieces.
    pub fn done(&self) -> usize {
        self.done.load(Ordering::Relaxed)
    }

    /// Cancels the rest of the work.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Checks for cancellation; workers call this between pieces.
    ///
    /// # Errors
    /// The work was cancelled.
    pub fn go_on(&self) -> anyhow::Result<()> {
        anyhow::ensure!(!self.is_over.load(Ordering::Relaxed), "cut short");
        Ok(())
    }

    /// Counts a piece.
    pub fn one_done(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        if self.shown {
            let left =
                self.begin.elapsed().as_secs_f64() / done as f64 * self.all.saturating_sub(done) as f64;
            let (what, all) = (&self.what, self.all);
            // A failed write to the terminal is harmless.
            let _ = write!(stderr(), "\r\x1b[K{what}: {done} of {all}, {} left", time(left));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K");
        }
    }
}

fn time(seconds: f64) -> String {
    match seconds {
        s if s < 100.0 => format!("{s:.0} s"),
        s if s < 6000.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Returns the number of CPUs of the machine.
pub fn available() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_come_in_the_order_of_items_for_any_number_of_jobs() {
        let items: Vec<u64> = (0..40).collect();
        let squares: Vec<u64> = items.iter().map(|n| n * n).collect();
        for jobs in [0, 1, 3, 100] {
            assert_eq!(each(jobs, &items, &Progress::silent(), |n| n * n), squares);
        }
        assert_eq!(each(4, &[0u8; 0], &Progress::silent(), |n| *n), [0u8; 0]);
    }

    #[test]
    fn time_left_is_short_to_read() {
        assert_eq!(
            [time(12.3), time(600.0), time(7200.0)],
            ["12 s", "10 min", "2.0 h"]
        );
    }
}
