//! The heartbeat between an agent and its guard.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The byte that is a heartbeat, and the guard's answer to it.
pub(crate) const BEAT: u8 = b'.';
/// Least time between two beats of an agent.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How long an agent may be silent: twice as long as a libvirt call may take.
pub const SILENCE_MAX: Duration = Duration::from_secs(20);

/// The agent's heartbeat, to its guard and to other listeners. Code that takes long must call [`Heartbeat::beat`] meanwhile.
#[derive(Clone, Default)]
pub struct Heartbeat {
    line: Arc<Mutex<Option<Line>>>,
    others: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl fmt::Debug for Heartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heartbeat")
            .field("line", &self.line)
            .finish_non_exhaustive()
    }
}

/// The agent's ends of the pipes to and from its guard. Neither ever blocks.
#[derive(Debug)]
pub(crate) struct Line {
    pub beats: OwnedFd,
    pub answers: OwnedFd,
    /// When the agent last sent a heartbeat.
    pub said: Instant,
    /// When the guard last answered.
    pub heard: Instant,
    /// Whether the guard has stopped reading.
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

impl Heartbeat {
    /// Creates a heartbeat that calls `others` at each beat; `others` must not block.
    pub fn heard_by(others: impl Fn() + Send + Sync + 'static) -> Heartbeat {
        Heartbeat {
            line: Arc::default(),
            others: Some(Arc::new(others)),
        }
    }

    /// Sends a heartbeat; the guard gets at most one per second.
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
