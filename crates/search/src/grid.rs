//! Runs of cases under contenders and seeds.

use std::cmp::Reverse;

use anyhow::anyhow;
use homenode_control::Config;
use homenode_reproduce::engine::Run;
use homenode_reproduce::jobs::{self, Progress};
use homenode_twin::Setup;

use crate::contender::Contender;

/// Runs each case under `default` and these contenders with each of these seeds, on `jobs` threads. Returns the runs by
/// case, then by contender with `default` first, then by seed.
///
/// # Errors
/// The first run that fails, with the name of its scenario.
pub fn runs(
    setups: &[Setup],
    seeds: &[u64],
    contenders: &[Contender],
    jobs: usize,
) -> anyhow::Result<Vec<Vec<Vec<Run>>>> {
    let mut work = Vec::new();
    for setup in setups {
        for contender in [Contender::DEFAULT].iter().chain(contenders) {
            work.extend(seeds.iter().map(|seed| (setup, contender.clone(), *seed)));
        }
    }
    // Cases with the most vCPUs take longest. They start first, so that no long run is left for the end.
    let vcpus = |setup: &Setup| -> u32 { setup.scenario.vms.iter().map(|vm| u32::from(vm.vcpus)).sum() };
    let mut order: Vec<usize> = (0..work.len()).collect();
    order.sort_by_key(|at| Reverse(vcpus(work[*at].0)));
    let done = jobs::each(jobs, &order, &Progress::new(""), |at| {
        let (setup, contender, seed) = &work[*at];
        let setup = Setup {
            seed: *seed,
            ..(*setup).clone()
        };
        let run = contender.run(&setup, &Config::default(), |_, _| Ok(()));
        run.map_err(|error| anyhow!("{}: {error:#}", setup.scenario.name))
    })?;
    let mut done: Vec<_> = order.into_iter().zip(done).collect();
    done.sort_by_key(|(at, _)| *at);
    let mut done = done.into_iter().map(|(_, run)| run);
    let mut of_seeds = || done.by_ref().take(seeds.len()).collect();
    let of_cases = setups.iter();
    Ok(of_cases
        .map(|_| (0..=contenders.len()).map(|_| of_seeds()).collect())
        .collect())
}
