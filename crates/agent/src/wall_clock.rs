//! Converts the host's monotonic clock to wall-clock time.

use std::time::{SystemTime, UNIX_EPOCH};

use homenode_api::http::WallTime;
use homenode_units::Ns;

use crate::usage_file::Clock;

/// The wall clock of a run: this machine's clock, or on the simulated host, the start of the run plus simulated time.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    clock: Clock,
    begun_ns: i64,
}

impl WallClock {
    /// Starts the clock of a run that begins now.
    pub fn start(clock: Clock) -> WallClock {
        WallClock {
            clock,
            begun_ns: now_ns(),
        }
    }

    /// Returns the kind of clock.
    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// Returns when the run began, in nanoseconds since 1970.
    pub fn begun_ns(&self) -> i64 {
        self.begun_ns
    }

    /// Returns the wall-clock time, in nanoseconds since 1970, of a sample just taken at host time `at`.
    pub fn at(&self, at: Ns) -> i64 {
        match self.clock {
            Clock::Wall => now_ns(),
            Clock::Host => self.begun_ns.saturating_add_unsigned(at.0),
        }
    }

    /// Converts host time `then`, which may be past or future. `now` is the current time of the host's clock.
    pub fn of(&self, then: Ns, now: Ns) -> WallTime {
        let at = self.at(now);
        WallTime(match then >= now {
            true => at.saturating_add_unsigned((then - now).0),
            false => at.saturating_sub_unsigned((now - then).0),
        })
    }
}

/// Returns this machine's wall-clock time, in nanoseconds since 1970.
pub fn now_ns() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
