//! A bell that wakes the thread of an agent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Wakes an agent that waits: there is work, or it should stop. All clones are one bell.
#[derive(Clone, Debug, Default)]
pub struct Bell(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    is_stopping: AtomicBool,
    has_rung: Mutex<bool>,
    rings: Condvar,
}

impl Bell {
    /// Wakes the waiting thread; if none waits, the next wait ends at once.
    pub fn ring(&self) {
        *self.0.has_rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.rings.notify_all();
    }

    /// Requests a stop, and rings.
    pub fn stop(&self) {
        self.0.is_stopping.store(true, Ordering::Relaxed);
        self.ring();
    }

    /// Whether a stop was requested.
    pub fn is_stopping(&self) -> bool {
        self.0.is_stopping.load(Ordering::Relaxed)
    }

    /// Sleeps until it rings, or until the time is over. Returns whether it rang.
    pub fn wait(&self, at_most: Duration) -> bool {
        let has_rung = self.0.has_rung.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.rings.wait_timeout_while(has_rung, at_most, |rung| !*rung);
        let (mut has_rung, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *has_rung)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Far longer than any test waits for a ring.
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_ring_before_the_wait_is_not_lost_and_wakes_once() {
        let bell = Bell::default();
        bell.clone().ring();
        assert!(bell.wait(LONG));
        assert!(!bell.wait(Duration::ZERO));
    }

    #[test]
    fn who_is_to_stop_is_woken() {
        let bell = Bell::default();
        let there = bell.clone();
        let waiter = std::thread::spawn(move || there.wait(LONG) && there.is_stopping());
        assert!(!bell.is_stopping());
        bell.stop();
        assert!(waiter.join().unwrap());
    }
}
