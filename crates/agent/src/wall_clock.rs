//! Which time by the wall clock the host's monotonic clock stands for.

use std::time::{SystemTime, UNIX_EPOCH};

use homenode_api::http::WallTime;
use homenode_units::Ns;

use crate::bill_file::Clock;

/// The wall clock of a run: that of this machine, or on the twin the time since it was started.
#[derive(Clone, Copy, Debug)]
pub struct WallClock {
    clock: Clock,
    begun_ns: i64,
}

impl WallClock {
    /// Of a run that begins now.
    pub fn start(clock: Clock) -> WallClock {
        WallClock {
            clock,
            begun_ns: now(),
        }
    }

    /// Which clock it is.
    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    /// When the run began, in nanoseconds since 1970.
    pub fn begun_ns(&self) -> i64 {
        self.begun_ns
    }

    /// The time of what was seen just now, at this time of the host, in nanoseconds since 1970.
    pub fn at(&self, at: Ns) -> i64 {
        match self.clock {
            Clock::Wall => now(),
            Clock::Host => self.begun_ns.saturating_add_unsigned(at.0),
        }
    }

    /// The time of what was, or will be, at `then` by the host's clock, which says `now` just now.
    pub fn of(&self, then: Ns, now: Ns) -> WallTime {
        let at = self.at(now);
        WallTime(match then >= now {
            true => at.saturating_add_unsigned((then - now).0),
            false => at.saturating_sub_unsigned((now - then).0),
        })
    }
}

/// In nanoseconds since 1970.
fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
}
