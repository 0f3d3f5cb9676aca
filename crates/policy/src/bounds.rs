//! Ranges that settings of several policies share. They keep values far from the limits of arithmetic; values outside these
//! ranges make no sense on any host.

use std::ops::RangeInclusive;

use homenode_units::{Bytes, Ns, Pages};

const DAY: Ns = Ns::from_secs(86_400);

/// A fraction of a whole.
pub(crate) const SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// A fraction that must not be zero.
pub(crate) const SOME_SHARE: RangeInclusive<f64> = 0.001..=1.0;
/// An amount of memory, up to a pebibyte.
pub(crate) const MEMORY: RangeInclusive<Bytes> = Bytes::ZERO..=Bytes::from_gib(1 << 20);
/// An amount of memory in pages. A budget of 0 moves nothing.
pub(crate) const PAGES: RangeInclusive<Pages> = Pages::ZERO..=Pages(1 << 38);
/// A time to wait; 0 means no wait.
pub(crate) const PAUSE: RangeInclusive<Ns> = Ns::ZERO..=DAY;
/// A period or interval: at least the shortest time between two samples.
pub(crate) const SPAN: RangeInclusive<Ns> = Ns::from_millis(10)..=DAY;
