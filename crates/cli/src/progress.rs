//! Progress of long work that comes in steps.

use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;

/// Returns a progress callback for steps of about equal length. It takes the number of the step that begins, the number of all
/// steps, and the step's name.
pub(crate) fn by_step() -> impl FnMut(usize, usize, &str) {
    let progress = Progress::new("");
    move |at, of, what| {
        let done = at.saturating_sub(1) as f64 / of.max(1) as f64;
        progress.at(&format!("[{at}/{of}] {}", OneLine(what)), done);
    }
}
