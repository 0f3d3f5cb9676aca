//! Waits until something is true, or explains why it did not become true.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;

/// The result of looking once.
#[derive(Debug)]
pub enum Look<T> {
    /// The event has happened, with this result.
    Done(T),
    /// The event has not happened yet. The text says what was seen instead.
    NotYet(String),
}

/// Looks repeatedly until it is done. A look under emulation is slow by itself, so the pause between looks is short.
///
/// # Errors
/// When time is up: the error says what was waited for, how long, and what was last seen. Or when a look fails.
pub fn wait_until<T>(
    what: &str,
    limit: Duration,
    mut look: impl FnMut() -> anyhow::Result<Look<T>>,
) -> anyhow::Result<T> {
    let begin = Instant::now();
    loop {
        let seen = match look()? {
            Look::Done(value) => return Ok(value),
            Look::NotYet(seen) => seen,
        };
        if begin.elapsed() >= limit {
            bail!("waited {} s for {what}; last seen: {seen}", limit.as_secs());
        }
        thread::sleep(Duration::from_millis(250));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_in_vain_says_what_it_saw() {
        let outcome = wait_until("rain", Duration::ZERO, || {
            Ok(Look::<()>::NotYet("sun".to_owned()))
        });
        let text = outcome.map_err(|error| error.to_string());
        assert_eq!(text, Err("waited 0 s for rain; last seen: sun".to_owned()));
    }
}
