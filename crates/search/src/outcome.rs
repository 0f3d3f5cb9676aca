//! What came of a search, as programs read it.

use homenode_twin::{Setup, VmReport};
use schemars::JsonSchema;
use serde::Serialize;

use crate::best::{Best, PolicyRun};
use crate::run::Run;
use crate::score::ratio;

/// What was searched, and what was found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Search<'a> {
    /// Of the program.
    pub version: &'static str,
    /// Of the program's sources.
    pub commit: &'static str,
    /// Its name.
    pub scenario: &'a str,
    /// Its name.
    pub machine: &'a str,
    /// Of what is drawn.
    pub seed: u64,
    /// Runs on the twin.
    pub evaluations: usize,
    /// Policies beside `default`.
    pub policies: Vec<OfPolicy<'a>>,
    /// The best known.
    pub best: OfBest<'a>,
}

/// Policies beside `default` and the best known.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OfPolicy<'a> {
    /// Their name.
    pub policy: &'a str,
    /// Mean over VMs of the ratio beside `default`; absent where a VM did nothing.
    pub mean: Option<f64>,
    /// The VM that fares worst.
    pub worst: Option<f64>,
    /// Its mean over the best known, less 1.
    pub gap: Option<f64>,
    /// VMs in the scenario's order.
    pub vms: Vec<OfVm>,
}

/// The best that is known.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OfBest<'a> {
    /// `search`, or the policies that did better.
    pub found_by: &'a str,
    /// Mean over VMs of the ratio beside `default`.
    pub mean: f64,
    /// The VM that fares worst.
    pub worst: Option<f64>,
    /// VMs in the scenario's order.
    pub vms: Vec<OfVm>,
    /// What was decided, a line each.
    pub decisions: Vec<String>,
}

/// A VM beside the same under `default`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct OfVm {
    /// Its name.
    pub name: String,
    /// Its runtime, or what it did, beside `default`; absent where it did nothing.
    pub ratio: Option<f64>,
}

impl<'a> Search<'a> {
    /// Everything of a search.
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
    let pairs = base.report.vms.iter().zip(&run.report.vms);
    let of_vm = |(base, vm): (&VmReport, _)| OfVm {
        name: base.name.clone(),
        ratio: ratio(base, vm).filter(|ratio| ratio.is_finite()),
    };
    pairs.map(of_vm).collect()
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
