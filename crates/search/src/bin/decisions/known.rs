//! `decisions known`: searches for the best decisions, and keeps them in files.

use std::fs;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::Command;

use anyhow::Context as _;
use clap::Args;
use homenode_control::Config;
use homenode_reproduce::jobs::{self, Progress};
use homenode_search::best::best;
use homenode_search::known::Known;
use homenode_search::search::Effort;
use homenode_twin::Setup;
use homenode_units::file_name;

use crate::{read, seeds, show};

#[derive(Debug, Args)]
pub(crate) struct Search {
    /// Scenario files
    #[arg(required = true, value_name = "SCENARIO.toml")]
    cases: Vec<PathBuf>,
    /// Folder of the best known decisions, one file per case
    #[arg(long, default_value = "data/decisions/known")]
    known: PathBuf,
    /// Simulated runs per case and seed
    #[arg(long, default_value_t = 300)]
    evaluations: usize,
    /// Seeds, such as 1-5 or 7
    #[arg(long, default_value = "1-3", value_parser = seeds)]
    seeds: RangeInclusive<u64>,
    /// Seed of the search's random choices
    #[arg(long, default_value_t = 1)]
    search_seed: u64,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

pub(crate) fn search(args: &Search) -> anyhow::Result<()> {
    fs::create_dir_all(&args.known).with_context(|| format!("cannot create {}", args.known.display()))?;
    let commit = last_commit(".").unwrap_or_default();
    for path in &args.cases {
        let case = read(path)?;
        let name = case.scenario.name.clone();
        let file = args.known.join(file_name(&name, ".toml")?);
        for seed in args.seeds.clone() {
            let setup = Setup { seed, ..case.clone() };
            let mut known = Known::read(&file, &setup)?;
            let effort = Effort {
                evaluations: args.evaluations,
                jobs: args.jobs,
                seed: args.search_seed,
            };
            let progress = Progress::new(format!("{name} seed {seed}: ")).of(args.evaluations);
            let before = known.schedules(&setup);
            let best = best(&setup, &Config::default(), (&[], &before), &effort, &progress)?;
            drop(progress);
            let was = known.of_seed(seed).map(|known| known.mean);
            known.add(&setup, &best, &commit);
            known.write(&file)?;
            println!(
                "{name:14} seed {seed}: known {}, now {:.4} by {} (static {:.4}) in {} evaluations",
                show(was),
                best.mean(),
                best.found_by(),
                best.found.static_mean,
                best.evaluations()
            );
        }
    }
    Ok(())
}

/// Returns the id of the last commit that touched a path; `None` without git or a work tree.
pub(crate) fn last_commit(path: &str) -> Option<String> {
    let output = Command::new("git")
        .args(["log", "-1", "--format=%H", "--", path])
        .output()
        .ok()?;
    let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
