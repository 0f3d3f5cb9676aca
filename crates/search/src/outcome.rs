//! The result of a search, for machine readers.

use homenode_reproduce::engine::Run;
use homenode_twin::{Setup, VmReport};
use schemars::JsonSchema;
use serde::Serialize;

use crate::best::{Best, PolicyRun};
use crate::score::ratios;

/// The searched scenario, and the result.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Search<'a> {
    /// Version of the program.
    pub version: &'static str,
    /// Commit of the program's sources.
    pub commit: &'static str,
    /// Name of the scenario.
    pub scenario: &'a str,
    /// Name of the machine.
    pub machine: &'a str,
    /// Seed of the random draws.
    pub seed: u64,
    /// Number of runs on the twin.
    pub evaluations: usize,
    /// The policies, compared with `default`.
    pub policies: Vec<OfPolicy<'a>>,
    /// The best known decisions.
    pub best: OfBest<'a>,
}

/// A set of policies, compared with `default` and with the best known decisions.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OfPolicy<'a> {
    /// Name of the policies.
    pub policy: &'a str,
    /// Mean over VMs of the ratio to `default`; absent if no VM has a ratio, or a VM did nothing.
    pub mean: Option<f64>,
    /// Ratio of the VM that fares worst.
    pub worst: Option<f64>,
    /// `mean` divided by the best known mean, less 1.
    pub gap: Option<f64>,
    /// VMs in the scenario's order.
    pub vms: Vec<OfVm>,
}

/// The best known decisions.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OfBest<'a> {
    /// `search`, or the policies that found a better result.
    pub found_by: &'a str,
    /// Mean over VMs of the ratio to `default`.
    pub mean: f64,
    /// Ratio of the VM that fares worst.
    pub worst: Option<f64>,
    /// VMs in the scenario's order.
    pub vms: Vec<OfVm>,
    /// The decisions, one per line.
    pub decisions: Vec<String>,
}

/// A VM compared with itself under `default`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OfVm {
    /// Name of the VM.
    pub name: String,
    /// Time of the VM's work relative to `default`; below 1 is faster. Absent if the VM did nothing.
    pub ratio: Option<f64>,
}

impl<'a> Search<'a> {
    /// Assembles the result of a search.
    pub fn of(
        setup: &'a Setup,
        best: &'a Best,
        (version, commit): (&'static str, &'static str),
    ) -> Search<'a> {
        let policies = best.policies.iter();
        Search {
            version,
            commit,
            scenario: &setup.scenario.name,
            machine: &setup.machine.name,
            seed: setup.seed,
            evaluations: best.evaluations(),
            policies: policies.map(|policy| of_policy(best, policy)).collect(),
            best: of_best(setup, best),
        }
    }
}

fn of_vms(base: &Run, run: &Run) -> Vec<OfVm> {
    let vms = base.report.vms.iter().zip(ratios(base, run));
    let of_vm = |(vm, ratio): (&VmReport, Option<f64>)| OfVm {
        name: vm.name.clone(),
        ratio: ratio.filter(|ratio| ratio.is_finite()),
    };
    vms.map(of_vm).collect()
}

fn worst(vms: &[OfVm]) -> Option<f64> {
    vms.iter().filter_map(|vm| vm.ratio).reduce(f64::max)
}

fn of_policy<'a>(best: &Best, policy: &'a PolicyRun) -> OfPolicy<'a> {
    let mean = policy.mean;
    let vms = of_vms(&best.base, &policy.run);
    OfPolicy {
        policy: policy.contender.name(),
        mean: Some(mean).filter(|mean| mean.is_finite()),
        worst: worst(&vms),
        gap: Some(mean / best.mean() - 1.0).filter(|gap| gap.is_finite()),
        vms,
    }
}

fn of_best<'a>(setup: &Setup, best: &'a Best) -> OfBest<'a> {
    let vms = of_vms(&best.base, best.run());
    OfBest {
        found_by: best.found_by(),
        mean: best.mean(),
        worst: worst(&vms),
        vms,
        decisions: best.schedule().lines(&setup.scenario),
    }
}
