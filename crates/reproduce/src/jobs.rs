//! The only pool of workers. Processes independent items on plain threads, without changing the order of results.

use std::fmt;
use std::io::{IsTerminal as _, Write as _, stderr};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Why an item was not processed: the work was cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutShort;

impl fmt::Display for CutShort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("cut short")
    }
}

impl std::error::Error for CutShort {}

/// Processes each item on up to `jobs` threads, and returns the results in the items' order. After a failure or a
/// cancellation, no further item begins.
///
/// # Errors
/// The failure of the first item that failed, whatever the number of jobs; [`CutShort`] if the work was cancelled.
pub fn each<T: Sync, R: Send, E: Send + From<CutShort>>(
    jobs: usize,
    items: &[T],
    progress: &Progress,
    work: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    progress.expect(items.len());
    let (next, has_failed) = (AtomicUsize::new(0), AtomicBool::new(false));
    let results: Vec<Mutex<Option<Result<R, E>>>> = items.iter().map(|_| Mutex::new(None)).collect();
    let worker = || {
        while !progress.is_over() && !has_failed.load(Ordering::Relaxed) {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some(item), Some(place)) = (items.get(at), results.get(at)) else {
                return;
            };
            let result = work(item);
            has_failed.fetch_or(result.is_err(), Ordering::Relaxed);
            progress.one_done();
            *place.lock().expect("nothing panics while it holds this") = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..jobs.clamp(1, items.len().max(1)) {
            scope.spawn(worker);
        }
        worker();
    });
    // Items begin in order, so items without a result come after the first one that failed.
    let done = results.into_iter().map(|place| place.into_inner().ok().flatten());
    done.map(|result| result.unwrap_or_else(|| Err(CutShort.into())))
        .collect()
}

/// Progress of long work: on a terminal, a line with the estimated time left; in a pipe, nothing.
#[derive(Debug)]
pub struct Progress {
    what: String,
    all: AtomicUsize,
    done: AtomicUsize,
    begin: Instant,
    /// Whether notes are only stored; otherwise they are also printed.
    is_silent: bool,
    shown: bool,
    notes: Mutex<Vec<String>>,
    is_over: AtomicBool,
}

impl Progress {
    /// Creates a line that shows `what` and counts runs; [`each`] sets the number of runs.
    #[allow(
        clippy::disallowed_methods,
        reason = "what people see of a run is no part of its result"
    )]
    pub fn new(what: impl Into<String>) -> Progress {
        Progress {
            what: what.into(),
            all: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            begin: Instant::now(),
            is_silent: false,
            shown: stderr().is_terminal(),
            notes: Mutex::default(),
            is_over: AtomicBool::new(false),
        }
    }

    /// Creates a progress without output.
    pub fn silent() -> Progress {
        let mut progress = Progress::new("");
        (progress.is_silent, progress.shown) = (true, false);
        progress
    }

    /// Returns the same progress for a known number of items. Needed if the work goes through [`each`] in parts.
    #[must_use]
    pub fn of(self, all: usize) -> Progress {
        self.expect(all);
        self
    }

    fn expect(&self, more: usize) {
        let all = self.done.load(Ordering::Relaxed) + more;
        self.all.fetch_max(all, Ordering::Relaxed);
    }

    /// Returns the number of finished items, and of all items known so far.
    pub fn done(&self) -> (usize, usize) {
        (
            self.done.load(Ordering::Relaxed),
            self.all.load(Ordering::Relaxed),
        )
    }

    /// Cancels the rest of the work.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::Relaxed);
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    /// Reports something odd, in a sentence, on standard error.
    pub fn note(&self, text: &str) {
        if !self.is_silent {
            self.erase();
            // A failed write to the terminal is harmless, here and below.
            let _ = writeln!(stderr(), "homenode: {text}");
        }
        let mut notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.push(text.to_owned());
    }

    /// Returns the notes so far.
    pub fn notes(&self) -> Vec<String> {
        let notes = self.notes.lock().unwrap_or_else(PoisonError::into_inner);
        notes.clone()
    }

    fn one_done(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        let all = self.all.load(Ordering::Relaxed);
        self.at(
            &format!("{}{done} of {all} runs", self.what),
            done as f64 / all as f64,
        );
    }

    /// Shows the current step and the estimated time left; `done` is the finished share, from 0 to 1.
    pub fn at(&self, text: &str, done: f64) {
        let left = left(self.begin.elapsed().as_secs_f64(), done);
        self.show(&format!("{text}{left}"));
    }

    /// Replaces the text that is shown.
    pub fn show(&self, text: &str) {
        if self.shown {
            let _ = write!(stderr(), "\r\x1b[K{text}");
        }
    }

    fn erase(&self) {
        self.show("");
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.erase();
    }
}

/// Returns the estimated time left as text; empty before any work is done.
fn left(spent_s: f64, done: f64) -> String {
    match spent_s * (1.0 - done).max(0.0) / done {
        _ if done <= 0.0 => String::new(),
        s if s < 100.0 => format!(", {s:.0} s left"),
        s if s < 6000.0 => format!(", {:.0} min left", s / 60.0),
        s => format!(", {:.1} h left", s / 3600.0),
    }
}

/// Returns the number of CPUs of this machine.
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
            let all = each(jobs, &items, &Progress::silent(), |n| Ok::<_, CutShort>(n * n));
            assert_eq!(all.as_ref(), Ok(&squares));
        }
        let none = each(4, &[0u8; 0], &Progress::silent(), |n| Ok::<_, CutShort>(*n));
        assert_eq!(none, Ok(Vec::new()));
    }

    #[test]
    fn the_first_failure_is_returned_and_nothing_begins_after_a_cancellation() {
        #[derive(Debug, PartialEq)]
        enum Failed {
            At(u64),
            Cut,
        }
        impl From<CutShort> for Failed {
            fn from(_: CutShort) -> Failed {
                Failed::Cut
            }
        }
        let items: Vec<u64> = (0..40).collect();
        for jobs in [1, 3, 100] {
            let odd = |n: &u64| if n % 7 == 6 { Err(Failed::At(*n)) } else { Ok(()) };
            assert_eq!(each(jobs, &items, &Progress::silent(), odd), Err(Failed::At(6)));
        }
        let progress = Progress::silent();
        progress.end();
        assert_eq!(each(2, &items, &progress, |_| Ok(())), Err(Failed::Cut));
        assert_eq!(progress.done(), (0, 40));
    }

    #[test]
    fn time_left_is_short_to_read() {
        assert_eq!(
            [0.0, 0.75, 0.1, 0.001, 1.1].map(|done| left(30.0, done)),
            ["", ", 10 s left", ", 4 min left", ", 8.3 h left", ", 0 s left"]
        );
    }
}
