//! Decides when to review the whole arrangement (a *look*): after news, and not too often.

use std::collections::{BTreeMap, BTreeSet};

use homenode_units::{Ns, VmId};

use super::Config;

/// What a review of all VMs' homes starts from; a difference from the last one is news.
#[derive(Clone, Debug, Default)]
pub(super) struct News {
    /// Speeds of active VMs; paces of resting VMs, if the kernel balances.
    pub speeds: BTreeMap<VmId, f64>,
    /// VMs that are known and may move.
    pub movable: BTreeSet<VmId>,
}

impl News {
    fn differs_from(&self, before: &News, least: f64) -> bool {
        let is_new = |(vm, speed): (&VmId, &f64)| {
            let old = before.speeds.get(vm);
            old.is_none_or(|old| (speed / old - 1.0).abs() > least)
        };
        self.speeds.len() != before.speeds.len()
            || self.speeds.iter().any(is_new)
            || !self.movable.is_subset(&before.movable)
    }
}

/// Record of past reviews.
#[derive(Clone, Debug, Default)]
pub(super) struct Rest {
    until: Ns,
    /// What the last review started from.
    seen: News,
    /// Whether the last review assigned only a few homes, and more may follow.
    has_more: bool,
    /// Number of reviews that may be made now (a full hour's at first), and the time when this number was last updated.
    looks: Option<f64>,
    counted: Ns,
}

impl Rest {
    /// Returns whether it is time for another review of all VMs' homes. `arrived` tells whether no VM's memory is moving; `news`
    /// is called only if it matters.
    pub(super) fn is_over(
        &mut self,
        now: Ns,
        config: &Config,
        arrived: bool,
        news: impl FnOnce() -> News,
    ) -> bool {
        let hours = now.saturating_sub(self.counted).as_secs_f64() / 3600.0;
        let most = config.looks_per_hour;
        let looks = (self.looks.unwrap_or(most) + most * hours).min(most);
        self.looks = Some(looks);
        self.counted = now;
        let is_idle_over = || now.saturating_sub(self.until) + config.rest >= config.rest_idle;
        now >= self.until
            && looks >= 1.0
            && ((self.has_more && arrived)
                || is_idle_over()
                || news().differs_from(&self.seen, config.news_min))
    }

    /// Records a review.
    pub(super) fn begin(&mut self, now: Ns, config: &Config, news: News) {
        self.looks = Some(self.looks.unwrap_or(config.looks_per_hour) - 1.0);
        self.until = now + config.rest;
        (self.seen, self.has_more) = (news, false);
    }

    /// Notes that the last review assigned only a few homes, so the next one is due as soon as those VMs' memory has arrived.
    pub(super) fn expect_more(&mut self) {
        self.has_more = true;
    }
}
