//! The report on trials: what was gained by changing VMs' homes.

use homenode_api::ApiError;
use homenode_api::answer::{Report, Sum, Trial, VmSum};
use homenode_control::Control;
use homenode_machine::Machine;
use homenode_policy::trial::{Results, Verdict};
use homenode_units::{Ns, VmId};

/// Most trials that are listed; the sums include all of them.
const LISTED_MAX: usize = 1000;

fn sum(verdicts: &[Verdict], gain: f64) -> Sum {
    let moved = || verdicts.iter().filter_map(|verdict| verdict.pages_moved);
    Sum {
        trials_count: verdicts.len(),
        undone_count: verdicts.iter().filter(|verdict| verdict.undone).count(),
        gain,
        pages_moved: moved().next().is_some().then(|| moved().sum()),
        error_median: Results::error(verdicts),
    }
}

/// Sums up one VM's trials. A trial that was undone gains nothing; the gains of those kept multiply.
fn sum_of_vm(verdicts: &[Verdict]) -> Sum {
    let kept = verdicts.iter().filter(|verdict| !verdict.undone);
    sum(verdicts, kept.map(|verdict| verdict.seen).product())
}

/// Reports the trials, which are measured changes of a VM's home, that the loop remembers.
///
/// # Errors
/// If the loop makes no trials; the error says why.
pub(crate) fn report(control: &Control, machine: &Machine, since: Option<Ns>) -> Result<Report, ApiError> {
    if let Some(idle) = control.trials_idle() {
        return Err(ApiError::refused(format!("there is nothing to report: {idle}")));
    }
    let status = control.status(machine);
    let now = status.at_ns;
    let (mut trials, mut vms, mut all) = (Vec::new(), Vec::new(), Vec::new());
    for (id, past) in control.trials().past() {
        let is_asked = |verdict: &&Verdict| since.is_none_or(|since| now.saturating_sub(verdict.at) < since);
        let verdicts: Vec<Verdict> = past.verdicts.iter().filter(is_asked).copied().collect();
        if verdicts.is_empty() {
            continue;
        }
        trials.extend(verdicts.iter().map(|verdict| trial(&past.name, id, verdict, now)));
        vms.push(VmSum {
            name: past.name.clone(),
            id,
            is_gone: status.vms.iter().all(|vm| vm.id != id),
            sum: sum_of_vm(&verdicts),
        });
        all.extend(verdicts);
    }
    trials.sort_by(|a, b| a.at_ns.cmp(&b.at_ns).then_with(|| a.name.cmp(&b.name)));
    vms.sort_by(|a, b| a.name.cmp(&b.name));
    let unlisted_count = trials.len().saturating_sub(LISTED_MAX);
    trials.drain(..unlisted_count);
    let logs: f64 = vms.iter().map(|vm| vm.sum.gain.ln()).sum();
    let gain = (logs / vms.len().max(1) as f64).exp();
    Ok(Report {
        at_ns: now,
        since_ns: since,
        trials,
        unlisted_count,
        total: sum(&all, gain),
        vms,
        running_count: control.trials().running_count(),
    })
}

fn trial(name: &str, id: VmId, verdict: &Verdict, now: Ns) -> Trial {
    Trial {
        name: name.to_owned(),
        id,
        at_ns: verdict.at,
        age_ns: now.saturating_sub(verdict.at),
        predicted: verdict.predicted,
        seen: verdict.seen,
        undone: verdict.undone,
        pages_moved: verdict.pages_moved,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_units::Pages;

    fn verdict(seen: f64, undone: bool, pages: Option<u64>) -> Verdict {
        Verdict {
            at: Ns::ZERO,
            predicted: 1.25,
            seen,
            undone,
            pages_moved: pages.map(Pages),
        }
    }

    #[test]
    fn what_stays_multiplies_and_what_is_undone_gains_nothing() {
        let sum = sum_of_vm(&[
            verdict(1.5, false, Some(10)),
            verdict(0.5, true, None),
            verdict(1.25, false, Some(5)),
        ]);
        let counts = (sum.trials_count, sum.undone_count, sum.pages_moved);
        assert_eq!(counts, (3, 1, Some(Pages(15))));
        assert_eq!(sum.gain, 1.875);
        // The three predictions are off by a fifth, by three fifths and by nothing.
        assert!(sum.error_median.is_some_and(|error| (error - 0.2).abs() < 1e-9));
        let undone = sum_of_vm(&[verdict(0.5, true, None)]);
        assert_eq!((undone.gain, undone.pages_moved), (1.0, None));
    }
}
