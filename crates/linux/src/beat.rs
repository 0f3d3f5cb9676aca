//! How an agent and its guard know of each other that they go on.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is said, either way.
pub(crate) const BEAT: u8 = b'.';
/// How often an agent says that it goes on, at most.
const BEAT_EVERY: Duration = Duration::from_secs(1);

/// How an agent says to its guard that it goes on. Whatever takes long beats in between.
#[derive(Clone, Debug, Default)]
pub struct Beat(Arc<Mutex<Option<Line>>>);

/// What connects an agent to its guard. Neither end ever waits.
#[derive(Debug)]
pub(crate) struct Line {
    pub beats: OwnedFd,
    pub answers: OwnedFd,
    /// When the agent beat last.
    pub said: Instant,
    /// When the guard answered last.
    pub heard: Instant,
    /// It reads no more.
    pub is_broken: bool,
}

impl Line {
    fn beat(&mut self, now: Instant) {
        if now - self.said < BEAT_EVERY {
            return;
        }
        self.said = now;
        self.is_broken |= rustix::io::write(&self.beats, &[BEAT]).is_err();
        let mut answers = [0u8; 64];
        while rustix::io::read(&self.answers, &mut answers).is_ok_and(|count| count > 0) {
            self.heard = now;
        }
    }
}

impl Beat {
    /// The agent goes on. Costs nothing where it was said within the last second.
    pub fn beat(&self) {
        if let Some(line) = &mut *self.line() {
            line.beat(Instant::now());
        }
    }

    pub(crate) fn line(&self) -> std::sync::MutexGuard<'_, Option<Line>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
