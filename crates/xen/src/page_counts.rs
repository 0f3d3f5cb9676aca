//! Decides when Xen counts the pages of domains, and keeps the results. Xen blocks a CPU while it counts, so it is made to count
//! as rarely as possible.
//!
//! A new domain is counted at once. A domain that is missing from the results is counted again, with a pause that doubles each
//! time. So a domain that is being built is found a little later, and a domain that never appears costs no more than the regular
//! counts.

use std::collections::BTreeMap;

use homenode_units::{NodeMap, Ns, Pages};

use crate::memory;

/// How often all domains are counted.
const EVERY: Ns = Ns::from_secs(60);
/// The time between two counts is at least this many times the duration of a count.
const SHARE: u64 = 1000;
/// Pause after the first time that a domain is missing.
const AGAIN: Ns = Ns::from_secs(10);

/// Page counts and their schedule; see the module.
#[derive(Debug, Default)]
pub struct PageCounts {
    /// Pages by node, by the domain's number.
    pages: BTreeMap<u32, NodeMap<Pages>>,
    at: Option<Ns>,
    /// How long the last count took.
    took: Ns,
    /// Domains missing from the results: how many repeats they have had, and when to count again for them.
    untold: BTreeMap<u32, (u32, Ns)>,
}

impl PageCounts {
    /// Returns a domain's pages by node, if known.
    pub fn of(&self, domid: u32) -> Option<&NodeMap<Pages>> {
        self.pages.get(&domid)
    }

    /// Forgets all page counts.
    pub fn forget(&mut self) {
        self.pages.clear();
    }

    /// Makes the next reading count, because a domain's memory has moved.
    pub fn ask_again(&mut self) {
        self.at = None;
    }

    fn every(&self) -> Ns {
        EVERY.max(Ns(self.took.0.saturating_mul(SHARE)))
    }

    fn is_told(&self, domid: u32, pages: u64) -> bool {
        let sum = self
            .of(domid)
            .map(|of| of.values().map(|pages| pages.0).sum::<u64>());
        // A balloon moves pages gradually, so small differences are not worth a count each time.
        sum.is_some_and(|sum| sum.abs_diff(pages) <= pages / 16)
    }

    /// Returns true if Xen should count now. `domains` has the number of pages of each domain.
    pub fn is_due(&self, domains: &BTreeMap<u32, u64>, at: Ns) -> bool {
        let Some(last) = self.at else {
            return !domains.is_empty();
        };
        let since = at.saturating_sub(last);
        // Early counts, too, are limited in their share of the time.
        let may_be_early = since >= Ns(self.every().0 / 6);
        let wants = |(domid, pages): (&u32, &u64)| {
            !self.is_told(*domid, *pages) && self.untold.get(domid).is_none_or(|(_, next)| *next <= at)
        };
        !domains.is_empty() && (since >= self.every() || (may_be_early && domains.iter().any(wants)))
    }

    /// Stores the results of a count, from the console's output, with the count's time and duration.
    pub fn take_in(&mut self, console: &str, domains: &BTreeMap<u32, u64>, (at, took): (Ns, Ns)) {
        self.pages = memory::by_node(console);
        (self.at, self.took) = (Some(at), took);
        self.untold.retain(|domid, _| domains.contains_key(domid));
        for (domid, pages) in domains {
            if self.is_told(*domid, *pages) {
                self.untold.remove(domid);
                continue;
            }
            let times = self.untold.get(domid).map_or(0, |(times, _)| times + 1);
            let pause = Ns(AGAIN.0.saturating_mul(1 << times.min(10)));
            self.untold.insert(*domid, (times, at + pause.min(self.every())));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(domid: u32, pages: u64) -> String {
        format!("(XEN) Domain {domid} (total: {pages}):\n(XEN)     Node 0: {pages}\n")
    }

    /// Returns the seconds of an hour at which Xen is made to count, if this is asked every second.
    fn asked(counted: &mut PageCounts, domains: &BTreeMap<u32, u64>, says: &str, took: Ns) -> Vec<u64> {
        let mut times = Vec::new();
        for second in 0..3600 {
            let at = Ns::from_secs(1000 + second);
            if counted.is_due(domains, at) {
                counted.take_in(says, domains, (at, took));
                times.push(second);
            }
        }
        times
    }

    #[test]
    fn one_that_is_never_told_is_asked_for_less_and_less() {
        let domains = BTreeMap::from([(1, 100), (2, 100)]);
        let mut counted = PageCounts::default();
        let times = asked(&mut counted, &domains, &told(1, 100), Ns::from_millis(1));
        assert_eq!(times[..5], [0, 10, 30, 70, 130]);
        assert_eq!(times.len(), 3 + (3600 - 70_usize).div_ceil(60));
        // A new domain is counted at once.
        let domains = BTreeMap::from([(1, 100), (2, 100), (3, 100)]);
        assert!(counted.is_due(&domains, Ns::from_secs(1000 + 3599)));
    }

    #[test]
    fn what_takes_long_is_done_rarely() {
        let domains = BTreeMap::from([(1, 100)]);
        let times = asked(
            &mut PageCounts::default(),
            &domains,
            &told(1, 100),
            Ns::from_millis(600),
        );
        assert_eq!(times, [0, 600, 1200, 1800, 2400, 3000]);
        // If a domain stays missing, Xen counts at most six times as often.
        let times = asked(&mut PageCounts::default(), &domains, "", Ns::from_millis(600));
        assert_eq!(times[..3], [0, 100, 200]);
        assert!(
            asked(
                &mut PageCounts::default(),
                &BTreeMap::new(),
                "",
                Ns::from_millis(1)
            )
            .is_empty()
        );
    }

    #[test]
    fn a_balloon_that_moved_much_is_asked_for() {
        let mut counted = PageCounts::default();
        let at = Ns::from_secs(1000);
        counted.take_in(&told(1, 1600), &BTreeMap::from([(1, 1600)]), (at, Ns(1)));
        let later = at + Ns::from_secs(10);
        assert!(!counted.is_due(&BTreeMap::from([(1, 1510)]), later));
        assert!(counted.is_due(&BTreeMap::from([(1, 1500)]), later));
    }
}
