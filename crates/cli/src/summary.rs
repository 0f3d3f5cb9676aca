//! The comparison after a run: the same VMs and seed under the default scheduler, the baselines and the run's policies.

use std::sync::mpsc::{self, TryRecvError};
use std::time::Duration;

use anyhow::Context as _;
use homenode_agent::Show;
use homenode_control::{Config, Mode, PolicySet};
use homenode_host::WakeSignal;
use homenode_search::contender::Contender;
use homenode_search::trial::{Trial, run_all, sentences};
use homenode_twin::Setup;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::output::{Output, Style};
use crate::trial::{about_input, side_by_side};

#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Summary {
    policies: Vec<Trial>,
    /// Whether a signal ended the comparison before all policies had run.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    #[schemars(default)]
    cut_short: bool,
}

/// Whether the comparison was completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// All policies were compared.
    Whole,
    /// A signal ended it before all policies were compared.
    CutShort,
}

/// Longest wait before checking for the next result. Each result and each signal end the wait earlier.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The host's own scheduler, and two usual baselines.
const BASELINES: [PolicySet; 3] = [PolicySet::Default, PolicySet::FfPin, PolicySet::Numad];

/// Returns what is compared after a run of these policies: the baselines and the policies, or all of Homenode if the run was one
/// of a baseline.
fn compared(policies: PolicySet) -> [PolicySet; 4] {
    let [default, ff_pin, numad] = BASELINES;
    let last = match BASELINES.contains(&policies) {
        true => PolicySet::Homenode,
        false => policies,
    };
    [default, ff_pin, numad, last]
}

/// Says that a run in a mode other than `act` has nothing to compare: all policies would leave the VMs alike.
pub(crate) fn leave_out(mode: Mode, output: &mut Output) -> Ended {
    output.notice(&left_out(mode));
    Ended::Whole
}

fn left_out(mode: Mode) -> String {
    let carried_out = match mode {
        Mode::Recommend => "nothing but what you approved",
        Mode::Observe | Mode::Act => "nothing",
    };
    format!(
        "In mode {mode} the agent carried out {carried_out}, so the run is not compared with other policies; \
         `homenode sim` compares them on a scenario."
    )
}

/// Runs the scenario to its end under each set of policies and shows the runtimes side by side. If the wake signal requests a
/// stop, returns at once with the results so far.
///
/// The runs have their own thread, since one step of a large simulated host may take longer than a user wants to wait after a
/// signal. The thread is then left behind, and ends with the process.
///
/// # Errors
/// If the simulator cannot start.
pub(crate) fn compare(
    spec: &Setup,
    config: &Config,
    output: &mut Output,
    wake_signal: &WakeSignal,
) -> anyhow::Result<Ended> {
    output.text(format_args!(
        "\nThe same VMs and seed, each program run to its end, under:"
    ));
    let (to_us, results) = mpsc::channel();
    let (spec, config, worker) = (spec.clone(), config.clone(), wake_signal.clone());
    let named = std::thread::Builder::new().name("comparison".into());
    let compared = compared(config.policies);
    let thread = named.spawn(move || {
        let contenders = compared.map(Contender::PolicySet);
        for trial in run_all(&spec, &config, &contenders, |_, _, _| ()) {
            let goes_on = trial.is_ok() && !worker.is_stopping();
            if to_us.send(trial.map_err(about_input)).is_err() || !goes_on {
                break;
            }
            worker.wake();
        }
        drop(to_us);
        worker.wake();
    });
    thread.context("cannot start the thread that compares policies")?;
    let mut policies: Vec<Trial> = Vec::new();
    let mut shown_count = 0;
    let is_whole = loop {
        if output.style() == Style::Terminal
            && shown_count <= policies.len()
            && let Some(now) = compared.get(policies.len())
        {
            output.line(&format!("  … {}", now.name()));
            shown_count += 1;
        }
        match results.try_recv() {
            Ok(trial) => policies.push(trial?),
            Err(TryRecvError::Disconnected) => break policies.len() == compared.len(),
            Err(TryRecvError::Empty) if wake_signal.is_stopping() => break false,
            Err(TryRecvError::Empty) => drop(wake_signal.wait(LOOK_EVERY)),
        }
    };
    if !policies.is_empty() {
        output.text(format_args!("{}", side_by_side(&policies)));
    }
    for sentence in sentences(&policies) {
        output.line(&sentence);
    }
    if !is_whole {
        output.line(&cut_short(&compared[policies.len()..]));
    }
    let cut_short = !is_whole;
    output.object("summary", json!(Summary { policies, cut_short }));
    Ok(match is_whole {
        true => Ended::Whole,
        false => Ended::CutShort,
    })
}

fn cut_short(left: &[PolicySet]) -> String {
    let left: Vec<&str> = left.iter().map(|policies| policies.name()).collect();
    format!("stopped by a signal: no results for {}", left.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_policies_of_the_run_are_compared_with_the_baselines() {
        for policies in PolicySet::ALL {
            let compared = compared(policies);
            let is_baseline = BASELINES.contains(&policies);
            assert_eq!(compared[..3], BASELINES);
            assert_eq!(compared[3] == policies, !is_baseline, "{policies:?}");
            assert_eq!(
                compared[3] == PolicySet::Homenode,
                is_baseline || policies == PolicySet::Homenode
            );
        }
    }

    #[test]
    fn a_run_that_carried_out_nothing_names_the_command_that_compares() {
        let said = left_out(Mode::Observe);
        assert!(
            said.contains("mode observe") && said.contains("carried out nothing,"),
            "{said}"
        );
        assert!(said.contains("`homenode sim`"), "{said}");
        assert!(left_out(Mode::Recommend).contains("nothing but what you approved"));
    }
}
