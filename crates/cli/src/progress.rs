//! Progress of long work: one line of standard error if that is a terminal, nothing in a pipe.

use std::io::{IsTerminal as _, Write as _, stderr};

use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;

/// Shows text in place of the last; the line stays until it is erased.
pub fn progress(text: &str) {
    let mut err = stderr();
    if err.is_terminal() {
        // Progress is a courtesy: failing to show it changes nothing.
        let _ = write!(err, "\r\x1b[K{}", OneLine(text)).and_then(|()| err.flush());
    }
}

/// Returns a progress callback for steps of about equal length: number of the step that begins, total, name.
pub fn by_step() -> impl FnMut(usize, usize, &str) {
    let progress = Progress::new("");
    move |at, of, what| {
        let done = at.saturating_sub(1) as f64 / of.max(1) as f64;
        progress.at(&format!("[{at}/{of}] {}", OneLine(what)), done);
    }
}
