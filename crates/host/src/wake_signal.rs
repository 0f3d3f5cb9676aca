//! A signal that wakes an agent's thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// Wakes a waiting agent because there is work, or because it should stop. All clones share one signal.
#[derive(Clone, Debug, Default)]
pub struct WakeSignal(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    is_stopping: AtomicBool,
    is_set: Mutex<bool>,
    changes: Condvar,
}

impl WakeSignal {
    /// Wakes the waiting thread. If no thread waits, the next wait ends at once.
    pub fn wake(&self) {
        *self.0.is_set.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.0.changes.notify_all();
    }

    /// Requests a stop, and wakes the waiting thread.
    pub fn stop(&self) {
        self.0.is_stopping.store(true, Ordering::Relaxed);
        self.wake();
    }

    /// Returns true if a stop was requested.
    pub fn is_stopping(&self) -> bool {
        self.0.is_stopping.load(Ordering::Relaxed)
    }

    /// Sleeps until it is woken or the time is over. Returns true if it was woken.
    pub fn wait(&self, at_most: Duration) -> bool {
        let is_set = self.0.is_set.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.0.changes.wait_timeout_while(is_set, at_most, |set| !*set);
        let (mut is_set, _) = waited.unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *is_set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer than any test should have to wait for its wake-up.
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_wake_up_before_the_wait_is_not_lost_and_wakes_once() {
        let wake_signal = WakeSignal::default();
        wake_signal.clone().wake();
        assert!(wake_signal.wait(LONG));
        assert!(!wake_signal.wait(Duration::ZERO));
    }

    #[test]
    fn who_is_to_stop_is_woken() {
        let wake_signal = WakeSignal::default();
        let there = wake_signal.clone();
        let waiter = std::thread::spawn(move || there.wait(LONG) && there.is_stopping());
        assert!(!wake_signal.is_stopping());
        wake_signal.stop();
        assert!(waiter.join().unwrap());
    }
}
