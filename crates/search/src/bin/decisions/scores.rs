//! `decisions CASE...`: compares policies with `default`, case by case and VM by VM.

use std::path::PathBuf;

use clap::Args;
use homenode_reproduce::engine::Run;
use homenode_search::contender::Contender;
use homenode_search::grid::runs;
use homenode_search::score::{CaseScore, MUCH_WORSE, Total};
use homenode_twin::Setup;
use homenode_twin::VmReport;
use homenode_units::stats::mean;

use crate::{Common, read, show};

#[derive(Debug, Args)]
pub(crate) struct Scores {
    /// Scenario files
    #[arg(required = true, value_name = "SCENARIO.toml")]
    cases: Vec<PathBuf>,
    #[command(flatten)]
    common: Common,
    /// Show each VM
    #[arg(short, long)]
    verbose: bool,
}

/// Returns the scores of every contender in every case.
pub(crate) fn scores(
    setups: &[Setup],
    seeds: &[u64],
    contenders: &[Contender],
    jobs: usize,
) -> anyhow::Result<Vec<Vec<CaseScore>>> {
    let runs = runs(setups, seeds, contenders, jobs)?;
    let of_policies = |number: usize| {
        let cases = setups.iter().zip(&runs);
        cases
            .map(|(setup, runs)| score(setup, &runs[0], &runs[number + 1]))
            .collect()
    };
    Ok((0..contenders.len()).map(of_policies).collect())
}

pub(crate) fn score(setup: &Setup, base: &[Run], other: &[Run]) -> CaseScore {
    CaseScore::of(&setup.scenario.name, base, other)
}

pub(crate) fn print(args: &Scores) -> anyhow::Result<()> {
    let setups: Vec<Setup> = args
        .cases
        .iter()
        .map(|path| Ok(read(path)?.disturbed(args.common.disturbance())))
        .collect::<anyhow::Result<_>>()?;
    let seeds: Vec<u64> = args.common.seeds.clone().collect();
    let contenders = args.common.contenders();
    let runs = runs(&setups, &seeds, &contenders, args.common.jobs)?;
    for (number, contender) in contenders.iter().enumerate() {
        println!("== {contender}");
        let mut scores = Vec::new();
        for (setup, runs) in setups.iter().zip(&runs) {
            let (base, other) = (&runs[0], &runs[number + 1]);
            let score = score(setup, base, other);
            print_case(&score);
            if args.verbose {
                print_vms(&score, base, other);
            }
            scores.push(score);
        }
        print_total(&scores);
    }
    Ok(())
}

pub(crate) fn print_case(score: &CaseScore) {
    println!(
        "{:14} mean {} worst-run {} worst-vm {} decisions {:.0} moved {:.1} GiB",
        score.case,
        show(score.mean()),
        show(score.worst_run()),
        show(score.worst_vm()),
        score.decisions,
        score.moved_gib
    );
}

fn print_vms(score: &CaseScore, base: &[Run], other: &[Run]) {
    for (at, vm) in score.vms.iter().enumerate() {
        let of_runs = |runs: &[Run], of: fn(&VmReport) -> Option<f64>| {
            show(mean(runs.iter().filter_map(|run| of(&run.report.vms[at]))))
        };
        let by_seed: Vec<String> = score.ratios.iter().map(|vms| show(vms[at])).collect();
        let both = |of| format!("{}->{}", of_runs(base, of), of_runs(other, of));
        println!(
            "    {:18} {:11} {}  [{}]  local {} miss {} node changes {} waited {} s runtime {} s p99 {} ms",
            vm.name,
            vm.workload,
            show(vm.ratio),
            by_seed.join(" "),
            both(|vm| vm.local_access_ratio),
            both(|vm| vm.llc_miss_rate),
            both(|vm| Some(vm.node_changes as f64)),
            both(|vm| Some(vm.waiting_s)),
            both(|vm| vm.runtime_s),
            both(|vm| Some(vm.requests?.p99_ms)),
        );
    }
}

pub(crate) fn print_total(scores: &[CaseScore]) {
    let total = Total::of(scores);
    let slowed: Vec<String> = scores
        .iter()
        .flat_map(|case| {
            case.slowed()
                .map(|vm| format!("{}/{} {}", case.case, vm.name, show(vm.ratio)))
        })
        .collect();
    println!(
        "mean of cases {}; p99 {}; worst VM {}; slowed {}/{}: {}; runs over {MUCH_WORSE:.2}: {}/{}",
        total
            .mean
            .map_or_else(|| "-".to_owned(), |mean| format!("{mean:.4}")),
        show(total.p99),
        show(total.worst_vm),
        total.slowed.0,
        total.slowed.1,
        slowed.join(", "),
        total.much_worse.0,
        total.much_worse.1
    );
}
