//! Runs a scenario to its end under several sets of policies, and compares each with the first.

use homenode_control::{Config, Control, Cycle, UnknownPolicy};
use homenode_reproduce::engine::Run;
use homenode_twin::{Disturbance, Scenario, Setup, TwinError, TwinReport};
use homenode_units::Ns;
use homenode_units::stats::mean;
use schemars::JsonSchema;
use serde::Serialize;

use crate::contender::Contender;

/// All settings of a simulation, and its results.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Simulation<'a> {
    /// Version of the program.
    pub version: &'static str,
    /// Commit of the program's sources.
    pub commit: &'static str,
    scenario: &'a str,
    machine: &'a str,
    seed: u64,
    epoch_ns: Ns,
    duration_ns: Ns,
    warm_up_ns: Ns,
    period_ns: Ns,
    #[serde(skip_serializing_if = "Disturbance::is_none")]
    disturbance: Disturbance,
    /// Whether the host's kernel balances NUMA memory; `None` if this kernel has no such balancing.
    numa_balancing: Option<bool>,
    policies: Vec<&'a Trial>,
}

impl<'a> Simulation<'a> {
    /// Assembles the document of some trials.
    pub fn of(
        setup: &'a Setup,
        config: &Config,
        trials: impl IntoIterator<Item = &'a Trial>,
        (version, commit): (&'static str, &'static str),
    ) -> Simulation<'a> {
        Simulation {
            version,
            commit,
            scenario: &setup.scenario.name,
            machine: &setup.machine.name,
            seed: setup.seed,
            epoch_ns: setup.epoch,
            duration_ns: setup.scenario.duration,
            warm_up_ns: setup.scenario.warm_up,
            period_ns: config.period,
            disturbance: setup.scenario.disturbance,
            numa_balancing: setup.scenario.balances(),
            policies: trials.into_iter().collect(),
        }
    }
}

/// Result of a scenario under a set of policies.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Trial {
    /// Name of the policies, or the program as the user wrote it.
    pub policy: String,
    /// Runtime relative to the policies that ran first: mean over the VMs whose programs ended in both runs.
    pub relative_runtime_mean: Option<f64>,
    /// Number of VMs whose programs ended in both runs.
    pub ended_count: usize,
    /// Instructions, per second in which the VM had work, relative to the policies that ran first: mean over the VMs whose
    /// programs did not end in both runs.
    pub relative_instructions_mean: Option<f64>,
    /// Number of VMs whose programs did not end in both runs.
    pub not_ended_count: usize,
    /// Mean time of a request, relative to the policies that ran first: mean over the VMs that serve requests.
    pub relative_request_time_mean: Option<f64>,
    /// 99th percentile of the times of requests, relative to the policies that ran first: mean over the VMs that serve requests.
    pub relative_request_p99_mean: Option<f64>,
    /// Number of VMs that serve requests.
    pub serving_count: usize,
    /// Number of decisions of the policies.
    pub decisions: usize,
    /// Results of VMs and nodes.
    #[serde(flatten)]
    pub report: TwinReport,
}

impl Trial {
    /// Compares a run with the run under the `first` policies; `first` is `None` for that run itself.
    pub fn of(run: Run, first: Option<&TwinReport>) -> Trial {
        let compared = Compared::of(first.unwrap_or(&run.report), &run.report);
        Trial {
            policy: run.policy,
            relative_runtime_mean: mean(compared.runtimes.iter().copied()),
            ended_count: compared.runtimes.len(),
            relative_instructions_mean: mean(compared.instructions.iter().copied()),
            not_ended_count: compared.instructions.len(),
            relative_request_time_mean: mean(compared.request_means.iter().copied()),
            relative_request_p99_mean: mean(compared.request_p99s.iter().copied()),
            serving_count: compared.request_means.len(),
            decisions: run.decisions,
            report: run.report,
        }
    }
}

/// Returns the default contenders: those that the scenario names, or else only the hypervisor. A scenario is untrusted
/// input, so it cannot start programs.
///
/// # Errors
/// An unknown name, with its position.
pub fn contenders(scenario: &Scenario) -> Result<Vec<Contender>, TwinError> {
    if scenario.policies.is_empty() {
        return Ok(vec![Contender::DEFAULT]);
    }
    let named = scenario.policies.iter().enumerate().map(|(at, name)| {
        let unknown =
            |error: UnknownPolicy| scenario.complaint(&format!("policies[{at}]"), error.to_string());
        name.parse().map(Contender::PolicySet).map_err(unknown)
    });
    named.collect()
}

/// Runs a scenario to its end, or for its duration, under each contender in turn, and compares each with the first one.
/// `watch` is called after each cycle with the cycle and the control loop.
///
/// # Errors
/// For each contender, those of [`Contender::run`].
pub fn run_all<'a>(
    setup: &'a Setup,
    config: &'a Config,
    contenders: &'a [Contender],
    mut watch: impl FnMut(&Contender, &Cycle, &Control) + 'a,
) -> impl Iterator<Item = anyhow::Result<Trial>> + 'a {
    let mut first: Option<TwinReport> = None;
    contenders.iter().map(move |contender| {
        let run = contender.run(setup, config, |cycle, control| {
            watch(contender, cycle, control);
            Ok(())
        })?;
        let trial = Trial::of(run, first.as_ref());
        first.get_or_insert_with(|| trial.report.clone());
        Ok(trial)
    })
}

/// Ratios of VMs under two sets of policies. A VM is compared by its requests if it serves any, else by its runtime if its
/// program ended under both, else by its instructions.
#[derive(Debug, Default)]
struct Compared {
    runtimes: Vec<f64>,
    instructions: Vec<f64>,
    request_means: Vec<f64>,
    request_p99s: Vec<f64>,
}

impl Compared {
    fn of(base: &TwinReport, other: &TwinReport) -> Compared {
        let mut compared = Compared::default();
        for (a, b) in base.vms.iter().zip(&other.vms) {
            if let Some((a, b)) = a.requests.zip(b.requests) {
                compared.request_means.push(b.mean_ms / a.mean_ms);
                compared.request_p99s.push(b.p99_ms / a.p99_ms);
                continue;
            }
            // A VM that did not run, or that has no program, cannot be compared.
            match (a.runtime_s.zip(b.runtime_s), a.speed().zip(b.speed())) {
                (Some((a, b)), _) => compared.runtimes.push(b / a),
                (None, Some((a, b))) => compared.instructions.push(b / a),
                (None, None) => {}
            }
        }
        compared
    }
}

/// Compares each set of policies with the first one, in sentences.
pub fn sentences(trials: &[Trial]) -> Vec<String> {
    let Some((first, others)) = trials.split_first() else {
        return Vec::new();
    };
    let of = |trial| {
        sentence(first, trial)
            .into_iter()
            .chain(sentence_of_requests(first, trial))
    };
    others.iter().flat_map(of).collect()
}

fn sentence_of_requests(first: &Trial, trial: &Trial) -> Option<String> {
    let change = |ratio: f64| {
        let change = (1.0 - ratio) * 100.0;
        format!(
            "{:.1} percent {}",
            change.abs(),
            if change >= 0.0 { "less" } else { "more" }
        )
    };
    Some(format!(
        "{}: requests take {} time than under {}, the 99th percentile {}, on average over {} of {} VMs",
        trial.policy,
        change(trial.relative_request_time_mean?),
        first.policy,
        change(trial.relative_request_p99_mean?),
        trial.serving_count,
        first.report.vms.len()
    ))
}

fn sentence(first: &Trial, trial: &Trial) -> Option<String> {
    let (all, ended, not_ended) = (first.report.vms.len(), trial.ended_count, trial.not_ended_count);
    let more = trial.relative_instructions_mean.map(|ratio| {
        let change = (ratio - 1.0) * 100.0;
        let word = if change >= 0.0 { "more" } else { "fewer" };
        format!("{:.1} percent {word} instructions in the same time", change.abs())
    });
    let Some(runtime) = trial.relative_runtime_mean else {
        return more.map(|more| {
            format!(
                "{}: programs execute {more} than under {}, on average over {not_ended} of {all} VMs; none ended",
                trial.policy, first.policy
            )
        });
    };
    let change = (1.0 - runtime) * 100.0;
    let word = if change >= 0.0 { "shorter" } else { "longer" };
    let rest = more.map_or(String::new(), |more| {
        format!("; {not_ended} did not end and execute {more}")
    });
    Some(format!(
        "{}: programs run {:.1} percent {word} than under {}, on average over {ended} of {all} VMs{rest}",
        trial.policy,
        change.abs(),
        first.policy
    ))
}
