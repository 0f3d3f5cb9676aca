//! The clock of a real host.

use std::time::Duration;

use homenode_host::WakeSignal;
use homenode_units::Ns;

/// Returns the monotonic clock: the clock of [`homenode_host::Sample::at`] on a real host.
pub fn now() -> Ns {
    #[cfg(any(test, feature = "testing"))]
    if let Some(system) = crate::system::simulated() {
        return system.now();
    }
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    Ns(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
}

/// Waits for this time, or until the signal is set. Returns whether it was set.
pub fn wait(signal: &WakeSignal, time: Duration) -> bool {
    #[cfg(any(test, feature = "testing"))]
    if let Some(system) = crate::system::simulated() {
        system.wait(time);
        return signal.wait(Duration::ZERO);
    }
    signal.wait(time)
}
