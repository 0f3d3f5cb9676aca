//! What settings of several policies may be. The ranges keep arithmetic far from the ends of its types, and what is outside of
//! them makes no sense on any host.

use std::ops::RangeInclusive;

use homenode_units::{Bytes, Ns, Pages};

const DAY: Ns = Ns::from_secs(86_400);

/// A part of something.
pub const SHARE: RangeInclusive<f64> = 0.0..=1.0;
/// A part of something that must not be nothing.
pub const SOME_SHARE: RangeInclusive<f64> = 0.001..=1.0;
/// An amount of memory, up to a pebibyte.
pub const MEMORY: RangeInclusive<Bytes> = Bytes::ZERO..=Bytes::from_gib(1 << 20);
/// The same in pages. A budget of none moves nothing.
pub const PAGES: RangeInclusive<Pages> = Pages::ZERO..=Pages(1 << 38);
/// A time to wait, if at all.
pub const PAUSE: RangeInclusive<Ns> = Ns::ZERO..=DAY;
/// A time in which something is done or looked at: at least the shortest time between two samples.
pub const SPAN: RangeInclusive<Ns> = Ns::from_millis(10)..=DAY;
