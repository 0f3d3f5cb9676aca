//! How an agent and its guard know of each other that they go on.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is said, either way.
pub(crate) const BEAT: u8 = b'.';
/// How often an agent says that it goes on, at most.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How long an agent may say nothing: twice as long as a call of libvirt's may take.
pub const SILENCE_MAX: Duration = Duration::from_secs(20);

/// How an agent says to its guard that it goes on, and to others who want to know. Whatever takes long beats in between.
#[derive(Clone, Default)]
pub struct Beat {
    line: Arc<Mutex<Option<Line>>>,
    others: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Beat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Beat")
            .field("line", &self.line)
            .finish_non_exhaustive()
    }
}

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
    /// One that others hear as well, with each beat: they must not wait.
    pub fn heard_by(others: impl Fn() + Send + Sync + 'static) -> Beat {
        Beat {
            line: Arc::default(),
            others: Some(Arc::new(others)),
        }
    }

    /// The agent goes on. Costs nothing where it was said within the last second.
    pub fn beat(&self) {
        if let Some(others) = &self.others {
            others();
        }
        if let Some(line) = &mut *self.line() {
            line.beat(Instant::now());
        }
    }

    pub(crate) fn line(&self) -> std::sync::MutexGuard<'_, Option<Line>> {
        self.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
