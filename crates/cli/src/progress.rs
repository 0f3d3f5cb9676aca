//! How far long work is: one line of standard error where that is a terminal, nothing in a pipe.

use std::io::{IsTerminal as _, Write as _, stderr};
use std::time::{Duration, Instant};

use crate::printable::OneLine;

/// Says it, over what was said last; nothing takes the line away.
pub fn progress(text: &str) {
    let mut err = stderr();
    if err.is_terminal() {
        // Whether it can be seen changes nothing.
        let _ = write!(err, "\r\x1b[K{}", OneLine(text)).and_then(|()| err.flush());
    }
}

/// Work, and when it began: how long the rest takes follows from that. The line goes with it.
pub struct Work {
    began: Instant,
}

impl Work {
    /// It begins now.
    pub fn begin() -> Work {
        Work {
            began: Instant::now(),
        }
    }

    /// Says where it is, and how long the rest takes if it goes on so; `done` is the share that is done, from 0 to 1.
    pub fn at(&self, text: &str, done: f64) {
        progress(&format!("{text}{}", left(self.began.elapsed(), done)));
    }

    /// Takes the line away.
    pub fn erase(&self) {
        progress("");
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.erase();
    }
}

/// What is told of steps that take about as long each: which begins, of how many, and what it is.
pub fn by_step() -> impl FnMut(usize, usize, &str) {
    let work = Work::begin();
    move |at, of, what| {
        let done = at.saturating_sub(1) as f64 / of.max(1) as f64;
        work.at(&format!("[{at}/{of}] {what}"), done);
    }
}

/// What is left, as people say it; nothing where nothing is done yet.
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
