//! Notifies the service manager (systemd's `sd_notify`): ready, status, and the watchdog's heartbeat. Only the loop's own thread
//! sends these, so a stalled loop does not look alive. Without a service manager they do nothing. A failure to send one does not
//! stop the loop.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The connection to the service manager. All clones share it.
#[derive(Clone, Debug)]
pub struct Service(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Time between two heartbeats, well below the watchdog's limit; `None` if there is no watchdog.
    every: Option<Duration>,
    fed: Option<Instant>,
    is_ready: bool,
    status: String,
}

impl Service {
    /// Connects to the service manager named in the environment, if any.
    pub fn of_environment() -> Service {
        Service(Arc::new(Mutex::new(State {
            every: sd_notify::watchdog_enabled().map(|most| most / 4),
            fed: None,
            is_ready: false,
            status: String::new(),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a heartbeat, unless the last one was sent recently.
    pub fn feed(&self) {
        let mut state = self.lock();
        let Some(every) = state.every else { return };
        let now = Instant::now();
        if state.fed.is_none_or(|fed| now - fed >= every) {
            state.fed = Some(now);
            tell(&[NotifyState::Watchdog]);
        }
    }

    /// Reports a completed cycle; the first one makes the service ready.
    pub(crate) fn goes_well(&self, status: &str) {
        self.says(status);
        let mut state = self.lock();
        if !state.is_ready {
            state.is_ready = true;
            tell(&[NotifyState::Ready]);
        }
    }

    /// Sets the status line.
    pub(crate) fn says(&self, status: &str) {
        let mut state = self.lock();
        if state.status != status {
            status.clone_into(&mut state.status);
            // A line break would begin another message.
            let line = status.replace(char::is_control, " ");
            tell(&[NotifyState::Status(&line)]);
        }
    }

    /// Reports that a reload of the settings begins.
    pub(crate) fn reloads(&self) {
        // systemd needs the time to match this reload with the report of its end.
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            tell(&[NotifyState::Reloading, now]);
        }
    }

    /// Reports that the reload has ended, whether or not the settings have changed.
    pub(crate) fn has_reloaded(&self) {
        if self.lock().is_ready {
            tell(&[NotifyState::Ready]);
        }
    }

    /// Reports that the run ends, and the agent begins to restore what it changed.
    pub(crate) fn stops(&self) {
        tell(&[NotifyState::Stopping]);
    }
}

fn tell(states: &[NotifyState<'_>]) {
    // A failure is ignored: without a listener nothing is lost.
    let _ = sd_notify::notify(states);
}
