//! The clock of a real host.

use homenode_units::Ns;

/// Returns the monotonic clock: the clock of [`homenode_host::Sample::at`] on a real host.
pub fn now() -> Ns {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Ns(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}
