//! When the whole arrangement is looked at again: after news, and not too often.

use std::collections::{BTreeMap, BTreeSet};

use homenode_units::{Ns, VmId};

use super::Config;

/// What a look would begin from.
#[derive(Clone, Debug, Default)]
pub struct News {
    /// Speeds of active VMs; paces of those that rest, where the kernel balances.
    pub speeds: BTreeMap<VmId, f64>,
    /// VMs that are known, and may move.
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

/// What is remembered of looks that were taken.
#[derive(Clone, Debug, Default)]
pub struct Rest {
    until: Ns,
    /// What the last look began from.
    seen: News,
    /// Whether it gave homes to a few only, and more may follow.
    has_more: bool,
    /// Looks that may be taken, all of an hour's at first, and when they were counted.
    looks: Option<f64>,
    counted: Ns,
}

impl Rest {
    /// Whether it is time for a look; `arrived` says whether no VM's memory is on its way, and `news` is asked for where it
    /// counts.
    pub fn is_over(&mut self, now: Ns, config: &Config, arrived: bool, news: impl FnOnce() -> News) -> bool {
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

    /// A look was taken.
    pub fn begin(&mut self, now: Ns, config: &Config, news: News) {
        self.looks = Some(self.looks.unwrap_or(config.looks_per_hour) - 1.0);
        self.until = now + config.rest;
        (self.seen, self.has_more) = (news, false);
    }

    /// The look gave homes to a few only: the next one is due as soon as they live there.
    pub fn expect_more(&mut self) {
        self.has_more = true;
    }
}
