//! Costs of a guest: its time and its own memory.

use homenode_units::{Bytes, Ns};

/// CPU time that booting takes on vCPU 0: about a second for a small cloud image (estimate). Longer than the agent's
/// period, so that an agent sees a new VM before its program allocates memory, as on a live host.
pub(crate) const BOOT_CPU: Ns = Ns::from_millis(1200);
/// CPU time that booting takes on every other vCPU (estimate).
pub(crate) const BOOT_CPU_SECONDARY: Ns = Ns::from_millis(60);
/// CPU time to touch a page for the first time: guest fault, EPT violation, host fault, zeroing 4 KiB twice; spread over huge
/// pages if there are any (estimate).
pub(crate) const TOUCH_NS: f64 = 1500.0;
/// Mean time after which an idle vCPU wakes for its kernel's timers (estimate: a tickless guest wakes about ten times a second).
pub(crate) const HOUSEKEEPING_PERIOD: Ns = Ns::from_millis(100);
/// Time that an idle vCPU runs when its kernel's timers wake it.
pub(crate) const HOUSEKEEPING_RUN: Ns = Ns(40_000);

/// Start of Linux's normal memory, which it allocates first.
pub(crate) const HIGH_MEMORY: Bytes = Bytes::from_gib(4);

/// Memory that a booted guest has touched before any program runs: a 64th of its memory, between 64 and 256 MiB
/// (estimate from small Linux guests).
pub fn boot_footprint(memory: Bytes) -> Bytes {
    Bytes((memory.0 / 64).clamp(64 << 20, 256 << 20).min(memory.0))
}
