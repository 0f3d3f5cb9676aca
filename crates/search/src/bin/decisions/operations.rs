//! `decisions operations`: scores policies on VMs like those of an operator, on stock kernels, by class of hosts and
//! fullness.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use clap::Args;
use homenode_reproduce::jobs;
use homenode_search::contender::Contender;
use homenode_search::generate;
use homenode_search::held_out::{DrawnAs, HeldOutPolicy};
use homenode_search::operations::{self, Class, Hosts};
use homenode_search::score::{CaseScore, Total};
use homenode_twin::Setup;

use crate::document::{drawn_from, keep};
use crate::scores::{print_case, print_total, scores};
use crate::{seeds, show, write_all};

#[derive(Debug, Args)]
pub(crate) struct Operations {
    /// Number of cases, in rotation over kinds of hosts and four degrees of fullness
    #[arg(long, default_value_t = 24)]
    cases: usize,
    /// Kinds of hosts (repeatable)
    #[arg(long, value_enum, default_values_t = [Hosts::Today, Hosts::Old])]
    hosts: Vec<Hosts>,
    /// Seeds of each case, such as 1-5 or 7
    #[arg(long, default_value = "1-5", value_parser = seeds)]
    seeds: RangeInclusive<u64>,
    /// Commit whose id determines the cases [default: the last one that changed the policies]; any other word draws cases for
    /// inspection
    #[arg(long)]
    commit: Option<String>,
    /// Policies compared with the stock kernel (repeatable) [default: all]
    #[arg(long = "policy")]
    policies: Vec<Contender>,
    /// Write the cases into this folder and run nothing
    #[arg(long)]
    out: Option<PathBuf>,
    /// File that the result is added to
    #[arg(long)]
    keep: Option<PathBuf>,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

pub(crate) fn run(args: &Operations) -> anyhow::Result<()> {
    let commit = drawn_from(args.commit.as_deref())?;
    let drawn = generate::held_out(&commit, args.cases).into_iter().enumerate();
    let cases: Vec<(Class, u64)> = drawn
        .map(|(at, seed)| (operations::class(at, &args.hosts), seed))
        .collect();
    if let Some(folder) = &args.out {
        let files = cases.iter().flat_map(|(class, seed)| {
            let case = operations::case(*class, *seed);
            [(case.name, case.scenario), (case.host_name, case.host)]
        });
        return write_all(folder, files);
    }
    let setup = |(class, seed): &(Class, u64)| {
        let (machine, scenario) = operations::case(*class, *seed).read();
        Setup::new(machine, scenario, 1)
    };
    let setups: Vec<Setup> = cases.iter().map(setup).collect();
    let contenders = match args.policies.as_slice() {
        [] => Contender::on_stock(),
        named => named.to_vec(),
    };
    let seeds: Vec<u64> = args.seeds.clone().collect();
    let scores = scores(&setups, &seeds, &contenders, args.jobs)?;
    let mut policies = Vec::new();
    for (contender, scores) in contenders.iter().zip(&scores) {
        println!("== {contender}");
        for (score, setup) in scores.iter().zip(&setups) {
            print!("{:14} ", setup.machine.name);
            print_case(score);
        }
        print_total(scores);
        policies.push(HeldOutPolicy::of(contender.name(), &Total::of(scores)));
        for (class, scores) in by_class(&cases, scores) {
            let total = Total::of(&scores);
            println!(
                "{class:24} mean {} p99 {} worst VM {}",
                show(total.mean),
                show(total.p99),
                show(total.worst_vm)
            );
            policies.push(HeldOutPolicy {
                class: Some(class),
                ..HeldOutPolicy::of(contender.name(), &total)
            });
        }
    }
    let of = (setups.len(), seeds.len(), DrawnAs::Operations);
    args.keep
        .as_deref()
        .map_or(Ok(()), |path| keep(path, &commit, of, policies))
}

/// Groups the scores of cases by class and by kind of host.
fn by_class(cases: &[(Class, u64)], scores: &[CaseScore]) -> BTreeMap<String, Vec<CaseScore>> {
    let mut classes: BTreeMap<String, Vec<CaseScore>> = BTreeMap::new();
    for (((hosts, fullness), _), score) in cases.iter().zip(scores) {
        for name in [
            hosts.name().to_owned(),
            format!("{}, {}", hosts.name(), fullness.name()),
        ] {
            classes.entry(name).or_default().push(score.clone());
        }
    }
    classes
}
