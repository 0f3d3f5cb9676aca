//! The heartbeat between an agent and its guard.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The byte of a heartbeat, and of its answer.
pub(crate) const BEAT: u8 = b'.';
/// Least time between two beats of an agent.
const BEAT_EVERY: Duration = Duration::from_secs(1);
/// How long an agent may be silent: twice as long as a libvirt call may take.
pub const SILENCE_MAX: Duration = Duration::from_secs(20);

/// The agent's heartbeat, to its guard and to other listeners. Anything that takes long must beat in between.
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

/// The pipes between an agent and its guard. Neither end ever blocks.
#[derive(Debug)]
pub(crate) struct Line {
    pub beats: OwnedFd,
    pub answers: OwnedFd,
    /// When the agent beat last.
    pub said: Instant,
    /// When the guard answered last.
    pub heard: Instant,
    /// Whether the guard no longer reads.
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
    /// A heartbeat that calls `others` with each heartbeat; they must not block.
    pub fn heard_by(others: impl Fn() + Send + Sync + 'static) -> Heartbeat {
        Heartbeat {
            line: Arc::default(),
            others: Some(Arc::new(others)),
        }
    }

    /// Beats: the agent is alive. Costs nothing if the last beat was less than a second ago.
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
