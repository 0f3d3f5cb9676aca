//! What the loop tells the service manager (systemd's `sd_notify`): that it is ready, what it does, and that it goes on. Only the
//! loop's own thread says so, so a loop that stands still is not taken for one that runs. Nothing is told where no service
//! manager listens, and no failure to tell it stops the loop.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

/// The service manager's end. All clones are one.
#[derive(Clone, Debug)]
pub struct Service(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    /// Between two signs of life, where the service manager wants any: well below what it allows.
    every: Option<Duration>,
    fed: Option<Instant>,
    is_ready: bool,
    status: String,
}

impl Service {
    /// The one that this process was started by, by its environment.
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

    /// The loop goes on. Costs nothing where that was said lately.
    pub fn feed(&self) {
        let mut state = self.lock();
        let Some(every) = state.every else { return };
        let now = Instant::now();
        if state.fed.is_none_or(|fed| now - fed >= every) {
            state.fed = Some(now);
            tell(&[NotifyState::Watchdog]);
        }
    }

    /// An epoch is over: the agent does what it is there for.
    pub(crate) fn goes_well(&self, status: &str) {
        self.says(status);
        let mut state = self.lock();
        if !state.is_ready {
            state.is_ready = true;
            tell(&[NotifyState::Ready]);
        }
    }

    /// What it does now, in a line.
    pub(crate) fn says(&self, status: &str) {
        let mut state = self.lock();
        if state.status != status {
            status.clone_into(&mut state.status);
            // What ends a line would begin another message.
            let line = status.replace(char::is_control, " ");
            tell(&[NotifyState::Status(&line)]);
        }
    }

    /// Settings are about to be read anew.
    pub(crate) fn reloads(&self) {
        // Without the time systemd would not know which reload has ended.
        if let Ok(now) = NotifyState::monotonic_usec_now() {
            tell(&[NotifyState::Reloading, now]);
        }
    }

    /// They have been, or the old ones stay.
    pub(crate) fn has_reloaded(&self) {
        if self.lock().is_ready {
            tell(&[NotifyState::Ready]);
        }
    }

    /// The run ends: what was changed is given back now.
    pub(crate) fn stops(&self) {
        tell(&[NotifyState::Stopping]);
    }
}

fn tell(states: &[NotifyState<'_>]) {
    // Who does not listen misses nothing.
    let _ = sd_notify::notify(states);
}
