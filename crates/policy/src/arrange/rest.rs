//! When the whole arrangement is looked at again: after news, and not too often.

use std::collections::{BTreeMap, BTreeSet};

use homenode_units::{Ns, VmId};

/// Least time between two looks at the whole arrangement.
pub const REST: Ns = Ns::from_secs(5);
/// The same where there is no news.
pub const REST_IDLE: Ns = Ns::from_secs(120);
/// Looks at the whole arrangement in an hour; as many may follow each other.
pub const LOOKS: f64 = 30.0;
/// A speed that changed by less than this share is no news.
pub const NEWS_MIN: f64 = 0.1;

/// What a look would begin from.
#[derive(Clone, Debug, Default)]
pub struct News {
    /// Speeds of active VMs.
    pub speeds: BTreeMap<VmId, f64>,
    /// VMs that are known, and may move.
    pub movable: BTreeSet<VmId>,
}

impl News {
    fn differs_from(&self, before: &News) -> bool {
        let is_new = |(vm, speed): (&VmId, &f64)| {
            let old = before.speeds.get(vm);
            old.is_none_or(|old| (speed / old - 1.0).abs() > NEWS_MIN)
        };
        self.speeds.len() != before.speeds.len()
            || self.speeds.iter().any(is_new)
            || !self.movable.is_subset(&before.movable)
    }
}

/// What is remembered of looks that were taken.
#[derive(Clone, Debug)]
pub struct Rest {
    until: Ns,
    /// What the last look began from.
    seen: News,
    /// Looks that may be taken, and when they were counted.
    looks: f64,
    counted: Ns,
}

impl Default for Rest {
    fn default() -> Self {
        Rest {
            until: Ns::ZERO,
            seen: News::default(),
            looks: LOOKS,
            counted: Ns::ZERO,
        }
    }
}

impl Rest {
    /// Whether it is time for a look; `news` is asked for where it counts.
    pub fn is_over(&mut self, now: Ns, news: impl FnOnce() -> News) -> bool {
        let hours = now.saturating_sub(self.counted).as_secs_f64() / 3600.0;
        self.looks = (self.looks + LOOKS * hours).min(LOOKS);
        self.counted = now;
        now >= self.until
            && self.looks >= 1.0
            && (now.saturating_sub(self.until) + REST >= REST_IDLE || news().differs_from(&self.seen))
    }

    /// A look is taken.
    pub fn begin(&mut self, now: Ns, news: News) {
        self.looks -= 1.0;
        self.until = now + REST;
        self.seen = news;
    }
}
