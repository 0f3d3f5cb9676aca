//! `homenode report`: what the agent's changes gained VMs, and what they cost, as its trials saw it.

use homenode_control::Control;
use homenode_machine::Machine;
use homenode_policy::trial::{Results, Verdict};
use homenode_units::{Ns, Pages, VmId};
use serde::{Deserialize, Serialize};

use crate::args::ReportArgs;
use crate::desk::Request;
use crate::output::{or_dash, percent, print_json, table};
use crate::query::ask_agent;

/// Trials that are listed; the sums have all of them.
const LISTED_MAX: usize = 1000;

/// What the agent answers.
#[derive(Debug, Serialize, Deserialize)]
pub struct Answer {
    /// The host's clock.
    at_ns: Ns,
    /// How far back, if not as far as is remembered.
    since_ns: Option<Ns>,
    /// The newest trials, oldest first.
    trials: Vec<Trial>,
    /// Older ones that the sums have and the list does not.
    unlisted_count: usize,
    vms: Vec<VmSum>,
    total: Sum,
    /// Changes that are not judged yet.
    running_count: usize,
}

/// One change, judged.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Trial {
    name: String,
    id: VmId,
    at_ns: Ns,
    age_ns: Ns,
    /// Speed after over speed before.
    predicted: f64,
    seen: f64,
    undone: bool,
    pages_moved: Option<Pages>,
}

/// What came of the trials of one VM.
#[derive(Debug, Serialize, Deserialize)]
struct VmSum {
    name: String,
    id: VmId,
    /// Whether it is gone.
    is_gone: bool,
    #[serde(flatten)]
    sum: Sum,
}

/// What came of several trials.
#[derive(Debug, Serialize, Deserialize)]
struct Sum {
    trials_count: usize,
    undone_count: usize,
    /// Of a VM: speed now over speed before all, if nothing else had changed; of all VMs: the geometric mean of that.
    gain: f64,
    /// Pages that came home; `None` where not known.
    pages_moved: Option<Pages>,
    /// Median error of the predictions, as a share.
    error_median: Option<f64>,
}

impl Sum {
    fn of(verdicts: &[Verdict], gain: f64) -> Sum {
        let moved = || verdicts.iter().filter_map(|verdict| verdict.pages_moved);
        Sum {
            trials_count: verdicts.len(),
            undone_count: verdicts.iter().filter(|verdict| verdict.undone).count(),
            gain,
            pages_moved: moved().next().is_some().then(|| moved().sum()),
            error_median: Results::error(verdicts),
        }
    }

    /// Of one VM: what was undone gained nothing, what stayed multiplies.
    fn of_vm(verdicts: &[Verdict]) -> Sum {
        let kept = verdicts.iter().filter(|verdict| !verdict.undone);
        Sum::of(verdicts, kept.map(|verdict| verdict.seen).product())
    }
}

impl Answer {
    /// What the agent's loop remembers.
    ///
    /// # Errors
    /// Why it tries nothing, if so.
    pub fn of(control: &Control, machine: &Machine, since: Option<Ns>) -> Result<Answer, String> {
        if let Some(idle) = control.trials_idle() {
            return Err(format!("there is nothing to report: {idle}"));
        }
        let status = control.status(machine);
        let now = status.at_ns;
        let (mut trials, mut vms, mut all) = (Vec::new(), Vec::new(), Vec::new());
        for (id, past) in control.trials().past() {
            let is_asked =
                |verdict: &&Verdict| since.is_none_or(|since| now.saturating_sub(verdict.at) <= since);
            let verdicts: Vec<Verdict> = past.verdicts.iter().filter(is_asked).copied().collect();
            if verdicts.is_empty() {
                continue;
            }
            trials.extend(
                verdicts
                    .iter()
                    .map(|verdict| Trial::of(&past.name, id, verdict, now)),
            );
            vms.push(VmSum {
                name: past.name.clone(),
                id,
                is_gone: status.vms.iter().all(|vm| vm.id != id),
                sum: Sum::of_vm(&verdicts),
            });
            all.extend(verdicts);
        }
        trials.sort_by(|a, b| a.at_ns.cmp(&b.at_ns).then_with(|| a.name.cmp(&b.name)));
        vms.sort_by(|a, b| a.name.cmp(&b.name));
        let unlisted_count = trials.len().saturating_sub(LISTED_MAX);
        trials.drain(..unlisted_count);
        let logs: f64 = vms.iter().map(|vm| vm.sum.gain.ln()).sum();
        let gain = (logs / vms.len().max(1) as f64).exp();
        Ok(Answer {
            at_ns: now,
            since_ns: since,
            trials,
            unlisted_count,
            total: Sum::of(&all, gain),
            vms,
            running_count: control.trials().running_count(),
        })
    }
}

impl Trial {
    fn of(name: &str, id: VmId, verdict: &Verdict, now: Ns) -> Trial {
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
}

/// `homenode report`.
///
/// # Errors
/// No agent, or one that tries nothing.
pub fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let since = args.since;
    let answer = ask_agent(&args.state, &Request::Report { since })?;
    let answer: Answer = serde_json::from_value(answer)?;
    if args.json {
        return print_json(&answer);
    }
    show(&answer);
    Ok(())
}

fn show(answer: &Answer) {
    let within = answer.since_ns.map(|since| format!(" within {}", span(since)));
    let within = within.unwrap_or_default();
    let running = match answer.running_count {
        0 => String::new(),
        1 => "; 1 is on trial now".to_owned(),
        count => format!("; {count} are on trial now"),
    };
    if answer.trials.is_empty() {
        say!("no change was judged{within}{running}");
        return;
    }
    let memory = |pages: Option<Pages>| or_dash(pages, |pages| pages.to_bytes().to_string());
    let rows = answer.trials.iter().map(|trial| {
        vec![
            trial.name.clone(),
            format!("{} ago", span(trial.age_ns)),
            format!("{:.2}", trial.predicted),
            format!("{:.2}", trial.seen),
            if trial.undone { "undone" } else { "kept" }.to_owned(),
        ]
    });
    say!("{}\n", table(&["VM", "judged", "predicted", "seen", ""], rows));
    if answer.unlisted_count > 0 {
        say!("{} older ones are not listed\n", answer.unlisted_count);
    }
    let sum = |name: String, sum: &Sum, note: &str| {
        vec![
            name,
            sum.trials_count.to_string(),
            sum.undone_count.to_string(),
            format!("{:.2}", sum.gain),
            memory(sum.pages_moved),
            or_dash(sum.error_median, percent),
            note.to_owned(),
        ]
    };
    let mut rows: Vec<Vec<String>> = answer
        .vms
        .iter()
        .map(|vm| sum(vm.name.clone(), &vm.sum, if vm.is_gone { "gone" } else { "" }))
        .collect();
    rows.push(sum(format!("{} VMs", answer.vms.len()), &answer.total, ""));
    let header = ["VM", "trials", "undone", "gain", "moved", "off by", ""];
    say!("{}\n", table(&header, rows));
    say!(
        "predicted and seen are speeds over those before the change, above 1 faster; gain is what was kept, of all VMs the mean;"
    );
    say!("moved is memory that came home; off by is the median of how far seen is from predicted{running}");
}

/// A time span for people.
fn span(time: Ns) -> String {
    match time.as_secs_f64() {
        s if s < 120.0 => format!("{s:.0}s"),
        s if s < 7200.0 => format!("{:.0}min", s / 60.0),
        s => format!("{:.1}h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        let sum = Sum::of_vm(&[
            verdict(1.5, false, Some(10)),
            verdict(0.5, true, None),
            verdict(1.25, false, Some(5)),
        ]);
        let counts = (sum.trials_count, sum.undone_count, sum.pages_moved);
        assert_eq!(counts, (3, 1, Some(Pages(15))));
        assert_eq!(sum.gain, 1.875);
        // Off by a fifth, by three fifths and by nothing.
        assert!(sum.error_median.is_some_and(|error| (error - 0.2).abs() < 1e-9));
        let undone = Sum::of_vm(&[verdict(0.5, true, None)]);
        assert_eq!((undone.gain, undone.pages_moved), (1.0, None));
    }

    #[test]
    fn spans_are_short() {
        let secs = [0, 119, 120, 7199, 7200].map(|secs| span(Ns::from_secs(secs)));
        assert_eq!(secs, ["0s", "119s", "2min", "120min", "2.0h"]);
    }
}
