//! Progress of long work: one line of standard error if that is a terminal, nothing in a pipe.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::time::{Duration, Instant};

use homenode_screens::printable::OneLine;

/// Shows text in place of the last; the line stays until it is erased.
pub fn progress(text: &str) {
    let mut err = stderr();
    if err.is_terminal() {
        // Progress is a courtesy: failing to show it changes nothing.
        let _ = write!(err, "\r\x1b[K{}", OneLine(text)).and_then(|()| err.flush());
    }
}

/// Work in progress and its start, from which the remaining time is estimated. Dropping it erases the line.
pub struct Work {
    began: Instant,
}

impl Work {
    /// Starts now.
    pub fn begin() -> Work {
        Work {
            began: Instant::now(),
        }
    }

    /// Shows the current step and the estimated time left; `done` is the finished share, from 0 to 1.
    pub fn at(&self, text: &str, done: f64) {
        progress(&format!("{text}{}", left(self.began.elapsed(), done)));
    }

    /// Erases the line.
    pub fn erase(&self) {
        progress("");
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.erase();
    }
}

/// Returns a progress callback for steps of about equal length: number of the step that begins, total, name.
pub fn by_step() -> impl FnMut(usize, usize, &str) {
    let work = Work::begin();
    move |at, of, what| {
        let done = at.saturating_sub(1) as f64 / of.max(1) as f64;
        work.at(&format!("[{at}/{of}] {what}"), done);
    }
}

/// The time left in words; empty before any work is done.
fn left(spent: Duration, done: f64) -> String {
    if done <= 0.0 {
        return String::new();
    }
    let seconds = spent.as_secs_f64() * (1.0 - done).max(0.0) / done;
    match seconds < 90.0 {
        true => format!(", {seconds:.0} s left"),
        false => format!(", {:.0} minutes left", seconds / 60.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_left_is_told_in_seconds_or_minutes() {
        let spent = Duration::from_secs(30);
        assert_eq!(left(spent, 0.0), "");
        assert_eq!(left(spent, 0.75), ", 10 s left");
        assert_eq!(left(spent, 0.1), ", 4 minutes left");
        assert_eq!(left(spent, 1.1), ", 0 s left");
    }
}
