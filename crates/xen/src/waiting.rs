//! How long each domain's vCPUs waited for a CPU, in the form that samples use.
//!
//! While its domain has a cap, the time for which a vCPU was kept off counts as waiting and as throttled. Without a cap the vCPU
//! was paused, so that time counts as neither.

use std::collections::BTreeMap;

use homenode_units::{Ns, VmId};

use crate::domain::{Domain, OfVcpus, Waited};
use crate::runstates::{Runstates, Spent};
use crate::trace::Trace;

/// Waiting times of vCPUs, by index. vCPUs with unknown times are left out.
pub(crate) type Waits = OfVcpus<Waited>;

/// A running trace, and sums made from it.
#[derive(Debug)]
pub(crate) struct Waiting {
    trace: Trace,
    sums: Sums,
    is_said: bool,
}

impl Waiting {
    /// Starts from a trace that is already running.
    pub(crate) fn new(trace: Trace) -> Waiting {
        Waiting {
            trace,
            sums: Sums::default(),
            is_said: false,
        }
    }

    /// Returns the waiting times of these domains' vCPUs so far.
    pub(crate) fn look(&mut self, domains: &BTreeMap<VmId, Domain>) -> BTreeMap<VmId, Waits> {
        let mut told = self.trace.told();
        match told.ended {
            None => self.sums.look(&mut told.runstates, domains),
            Some(_) => BTreeMap::new(),
        }
    }

    /// Returns why waiting times are no longer known, but only once.
    pub(crate) fn ended(&mut self) -> Option<String> {
        let ended = self.trace.told().ended.clone().filter(|_| !self.is_said);
        self.is_said |= ended.is_some();
        ended
    }
}

/// For each domain's number and vCPU: how long it had been kept off at the last reading, and for how much of that by a cap.
#[derive(Debug, Default)]
struct Sums(BTreeMap<(u16, u16), (Ns, Ns)>);

impl Sums {
    fn look(&mut self, runstates: &mut Runstates, domains: &BTreeMap<VmId, Domain>) -> BTreeMap<VmId, Waits> {
        let number = |domain: &Domain| domain.run.runtime_id as u16;
        let numbers: Vec<u16> = domains.values().map(number).collect();
        runstates.keep_only(|domain| numbers.contains(&domain));
        self.0.retain(|(domain, _), _| numbers.contains(domain));
        let mut told = BTreeMap::new();
        for (vm, domain) in domains {
            let mut of = Waits::new();
            for (index, vcpu) in &domain.vcpus {
                if let Some(state) = vcpu.state {
                    runstates.begin(number(domain), *index, state);
                }
                if let Some(spent) = runstates.spent(number(domain), *index) {
                    let is_capped = domain.cap > 0 && !domain.listed.is_paused;
                    of.insert(*index, self.add((number(domain), *index), spent, is_capped));
                }
            }
            told.insert(*vm, of);
        }
        told
    }

    /// Adds a vCPU's times so far. Returns its waiting times.
    fn add(&mut self, key: (u16, u16), spent: Spent, is_capped: bool) -> Waited {
        let (before, throttled) = self.0.entry(key).or_default();
        let since = spent.offline.saturating_sub(*before);
        *before = spent.offline;
        if is_capped {
            *throttled += since;
        }
        Waited {
            waiting: spent.runnable + *throttled,
            throttled: *throttled,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_cap_kept_off_was_waited_for_and_a_pause_was_not() {
        let spent = |runnable, offline| Spent {
            runnable: Ns(runnable),
            offline: Ns(offline),
        };
        let waited = |waiting, throttled| Waited {
            waiting: Ns(waiting),
            throttled: Ns(throttled),
        };
        let mut sums = Sums::default();
        assert_eq!(sums.add((1, 0), spent(10, 100), false), waited(10, 0), "paused");
        assert_eq!(sums.add((1, 0), spent(10, 150), true), waited(60, 50), "capped");
        assert_eq!(sums.add((1, 0), spent(15, 150), false), waited(65, 50));
        assert_eq!(sums.add((1, 1), spent(0, 7), true), waited(7, 7), "another");
    }
}
