//! A scenario's run to its end under a set of policies: the one way of it, and how several compare.

use comfy_table::Table;
use homenode_control::{Config, Control, Epoch, PolicySet};
use homenode_search::run;
use homenode_twin::Setup;
use homenode_twin::{Twin, TwinError, TwinReport};
use schemars::JsonSchema;
use serde::Serialize;

use crate::bad_input;
use crate::output::{or_dash, percent, table};

/// What came of a scenario under a set of policies.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Trial {
    /// The policies' name.
    pub policy: &'static str,
    /// Mean over the VMs that ended of runtime here over runtime under the policies run first.
    pub relative_runtime_mean: Option<f64>,
    /// How much the policies decided.
    pub decisions: usize,
    /// What came of VMs and nodes.
    #[serde(flatten)]
    pub report: TwinReport,
}

/// Runs a scenario to its end, or for its duration, under each set of policies; `look` is called now and then, `watch` with each
/// epoch of the agent's and the loop after it.
///
/// # Errors
/// When the twin cannot start.
pub fn run_all(
    spec: &Setup,
    config: &Config,
    sets: &[PolicySet],
    mut look: impl FnMut(PolicySet, &Twin),
    mut watch: impl FnMut(PolicySet, &Epoch, &Control),
) -> anyhow::Result<Vec<Trial>> {
    let mut trials: Vec<Trial> = Vec::new();
    for policies in sets {
        let first = trials.first().map(|first| &first.report);
        let (look, watch) = (
            |twin: &Twin| look(*policies, twin),
            |epoch: &_, control: &_| {
                watch(*policies, epoch, control);
            },
        );
        let trial = run_watched(spec, config, *policies, first, (look, watch))?;
        trials.push(trial);
    }
    Ok(trials)
}

/// Runs a scenario under one set of policies, to compare with what came of it under the `first`, where there was one.
///
/// # Errors
/// When the twin cannot start.
pub fn run(
    spec: &Setup,
    config: &Config,
    policies: PolicySet,
    first: Option<&TwinReport>,
) -> anyhow::Result<Trial> {
    run_watched(spec, config, policies, first, (|_: &_| (), |_: &_, _: &_| ()))
}

fn run_watched(
    spec: &Setup,
    config: &Config,
    policies: PolicySet,
    first: Option<&TwinReport>,
    (look, watch): (impl FnMut(&Twin), impl FnMut(&Epoch, &Control)),
) -> anyhow::Result<Trial> {
    let config = Config {
        policies,
        ..config.clone()
    };
    let run = run::run_watched(spec, config, look, watch).map_err(about_input)?;
    Ok(Trial {
        policy: run.policy,
        relative_runtime_mean: relative_runtime(first.unwrap_or(&run.report), &run.report),
        decisions: run.decisions,
        report: run.report,
    })
}

/// What a twin refuses is bad input; everything else is a failure.
pub fn about_input(error: anyhow::Error) -> anyhow::Error {
    if error.is::<TwinError>() {
        bad_input(error)
    } else {
        error
    }
}

fn relative_runtime(base: &TwinReport, other: &TwinReport) -> Option<f64> {
    let ratios: Vec<f64> = base
        .vms
        .iter()
        .zip(&other.vms)
        .filter_map(|(a, b)| Some(b.runtime_s? / a.runtime_s?))
        .collect();
    (!ratios.is_empty()).then(|| ratios.iter().sum::<f64>() / ratios.len() as f64)
}

/// Runtimes and local shares of accesses of every VM, side by side.
pub fn side_by_side(trials: &[Trial]) -> Table {
    let names = |first: &str| {
        let headed = |(at, trial): (usize, &Trial)| match at {
            0 => format!("{first}{}", trial.policy),
            _ => trial.policy.to_owned(),
        };
        trials.iter().enumerate().map(headed).collect::<Vec<_>>()
    };
    let mut header = vec!["VM".to_owned(), "workload".to_owned()];
    header.extend(names("runtime: "));
    header.extend(names("local: "));
    let vms = trials.first().map_or(&[][..], |trial| &trial.report.vms);
    let rows = vms.iter().enumerate().map(|(at, vm)| {
        let of_all = trials.iter().map(|trial| &trial.report.vms[at]);
        let mut row = vec![vm.name.clone(), vm.workload.clone()];
        row.extend(
            of_all
                .clone()
                .map(|vm| or_dash(vm.runtime_s, |s| format!("{s:.1}s"))),
        );
        row.extend(of_all.map(|vm| or_dash(vm.local_access_ratio, percent)));
        row
    });
    table(&header.iter().map(String::as_str).collect::<Vec<_>>(), rows)
}

/// A sentence for every set of policies but the first.
pub fn sentences(trials: &[Trial]) -> Vec<String> {
    let Some((first, others)) = trials.split_first() else {
        return Vec::new();
    };
    let sentence = |trial: &Trial| {
        let change = (1.0 - trial.relative_runtime_mean?) * 100.0;
        let word = if change >= 0.0 { "shorter" } else { "longer" };
        Some(format!(
            "{}: programs run {:.1} percent {word} than under {}, on average",
            trial.policy,
            change.abs(),
            first.policy
        ))
    };
    others.iter().filter_map(sentence).collect()
}
