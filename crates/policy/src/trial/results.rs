//! Results of trials: the newest of each VM, including VMs that left, which are kept for a while.

use std::collections::BTreeMap;

use homenode_units::{Ns, VmId};

use super::{Config, Verdict};

/// Most verdicts that are kept per VM. It bounds memory, and is not a setting.
pub const KEPT_MAX: usize = 64;

/// Results of one VM's trials.
#[derive(Clone, Debug)]
pub struct Past {
    /// The VM's last known name.
    pub name: String,
    /// Verdicts, oldest first; at most [`KEPT_MAX`].
    pub verdicts: Vec<Verdict>,
}

/// Results of all trials.
#[derive(Clone, Debug, Default)]
pub struct Results {
    vms: BTreeMap<VmId, Past>,
}

impl Results {
    /// Records a verdict.
    pub fn note(&mut self, vm: VmId, name: &str, verdict: Verdict) {
        let past = self.vms.entry(vm).or_insert_with(|| Past {
            name: String::new(),
            verdicts: Vec::new(),
        });
        name.clone_into(&mut past.name);
        past.verdicts.push(verdict);
        let excess = past.verdicts.len().saturating_sub(KEPT_MAX);
        past.verdicts.drain(..excess);
    }

    /// Drops the results of VMs that left and whose last result is older than [`Config::results_kept`].
    pub fn forget(&mut self, now: Ns, config: &Config, is_here: impl Fn(VmId) -> bool) {
        let is_fresh = |verdict: &Verdict| now.saturating_sub(verdict.at) <= config.results_kept;
        self.vms
            .retain(|id, past| is_here(*id) || past.verdicts.last().is_some_and(is_fresh));
    }

    /// Returns the verdicts of a VM, oldest first.
    pub fn of(&self, vm: VmId) -> &[Verdict] {
        self.vms.get(&vm).map_or(&[], |past| &past.verdicts)
    }

    /// Returns all VMs that were judged, including those that left.
    pub fn iter(&self) -> impl Iterator<Item = (VmId, &Past)> {
        self.vms.iter().map(|(id, past)| (*id, past))
    }

    /// Returns the median relative error of predictions, comparing measured with predicted ratios; `None` without verdicts.
    pub fn error<'a>(verdicts: impl IntoIterator<Item = &'a Verdict>) -> Option<f64> {
        let mut errors: Vec<f64> = verdicts
            .into_iter()
            .map(|verdict| (verdict.seen / verdict.predicted - 1.0).abs())
            .collect();
        errors.sort_by(f64::total_cmp);
        errors.get(errors.len() / 2).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(secs: u64, predicted: f64, seen: f64) -> Verdict {
        Verdict {
            at: Ns::from_secs(secs),
            predicted,
            seen,
            undone: false,
            pages_moved: None,
        }
    }

    #[test]
    fn only_the_newest_of_a_vm_are_kept() {
        let mut results = Results::default();
        for n in 0..100 {
            results.note(VmId(1), "one", at(n, 1.0, 1.0));
        }
        results.note(VmId(2), "two", at(7, 1.0, 1.0));
        let kept = results.of(VmId(1));
        assert_eq!((kept.len(), kept[0].at), (KEPT_MAX, Ns::from_secs(36)));
        assert_eq!(results.of(VmId(2)).len(), 1);
        assert_eq!(results.of(VmId(3)), []);
    }

    #[test]
    fn a_vm_that_is_gone_is_forgotten_an_hour_after_its_last_verdict() {
        let mut results = Results::default();
        for id in [1, 2] {
            results.note(VmId(id), "a", at(10, 1.0, 1.0));
            results.note(VmId(id), "b", at(100, 1.0, 1.0));
        }
        let is_here = |vm| vm == VmId(2);
        results.forget(Ns::from_secs(3700), &Config::default(), is_here);
        let names: Vec<&str> = results.iter().map(|(_, past)| past.name.as_str()).collect();
        assert_eq!(names, ["b", "b"], "the name is the last one");
        results.forget(Ns::from_secs(3701), &Config::default(), is_here);
        assert_eq!(results.iter().map(|(id, _)| id).collect::<Vec<_>>(), [VmId(2)]);
    }

    #[test]
    fn the_error_is_the_median_and_of_nothing_there_is_none() {
        assert_eq!(Results::error([]), None);
        let seen = [at(1, 1.0, 1.5), at(2, 2.0, 2.0), at(3, 1.0, 0.75)];
        assert_eq!(Results::error(&seen), Some(0.25));
    }
}
