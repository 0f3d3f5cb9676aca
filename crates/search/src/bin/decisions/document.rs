//! `decisions document` and `decisions held-out`.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, bail};
use clap::Args;
use homenode_control::Policies;
use homenode_machine::preset;
use homenode_search::board::Board;
use homenode_search::held_out::{HeldOut, HeldOutPolicy, HeldOutRun};
use homenode_search::known::Known;
use homenode_search::run::Setup;
use homenode_search::score::Total;
use homenode_search::sweep::{self, Cell};
use homenode_search::{generate, jobs};

use crate::known::last_commit;
use crate::scores::{print_total, scores};
use crate::{read, seeds, swept};

/// What the policies are in: the last commit to touch it draws the held-out cases.
const POLICY_PATH: &str = "crates/policy";

#[derive(Debug, Args)]
pub struct Held {
    /// How many cases
    #[arg(long, default_value_t = 24)]
    cases: usize,
    /// Seeds of each case, as 1-3 or 7
    #[arg(long, default_value = "1-3", value_parser = seeds)]
    seeds: RangeInclusive<u64>,
    /// Commit to draw cases from [default: the last one that touched the policies]
    #[arg(long)]
    commit: Option<String>,
    /// Add the result to this list
    #[arg(long, default_value = "data/decisions/held-out.toml")]
    keep: PathBuf,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

#[derive(Debug, Args)]
pub struct Document {
    /// Folder of `cases`, `known` and `held-out.toml`
    #[arg(long, default_value = "data/decisions")]
    data: PathBuf,
    /// The document; its figure is written beside it
    #[arg(long, default_value = "docs/DECISIONS.md")]
    out: PathBuf,
    /// How many seeds, from 1 on
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// One machine's sweep and no lone VMs: to look at, not to commit
    #[arg(long)]
    quick: bool,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

/// The policies of the scoreboard beside `default`. `memory` places nothing: homes are what operators chose.
fn shown() -> Vec<Policies> {
    let all = Policies::ALL.into_iter();
    all.filter(|policies| !matches!(policies, Policies::Default | Policies::Memory))
        .collect()
}

pub fn held_out(args: &Held) -> anyhow::Result<()> {
    let mut list = HeldOut::read(&args.keep)?;
    let commit = match &args.commit {
        Some(commit) => commit.clone(),
        None => last_commit(POLICY_PATH)
            .with_context(|| format!("no commit is known that touched {POLICY_PATH}; run this in the work tree, or name one with --commit"))?,
    };
    let setup = |seed| {
        let scenario = generate::scenario(seed);
        let machine = preset(scenario.machine.as_deref().unwrap_or_default())?;
        Ok(Setup::new(machine, scenario, 1))
    };
    let setups: anyhow::Result<Vec<Setup>> = generate::held_out(&commit, args.cases)
        .into_iter()
        .map(setup)
        .collect();
    let (setups, seeds): (_, Vec<u64>) = (setups?, args.seeds.clone().collect());
    let policies = shown();
    let scores = scores(&setups, &seeds, &policies, args.jobs)?;
    let mut of_policies = Vec::new();
    for (policies, scores) in policies.iter().zip(&scores) {
        println!("== {}", policies.name());
        print_total(scores);
        of_policies.push(HeldOutPolicy::of(policies.name(), &Total::of(scores)));
    }
    list.runs.push(HeldOutRun {
        date: today()?,
        commit: commit.chars().take(12).collect(),
        cases: setups.len(),
        seeds: seeds.len(),
        policies: of_policies,
    });
    list.write(&args.keep)
        .with_context(|| format!("cannot write {}", args.keep.display()))
}

/// The day, in universal time.
#[allow(
    clippy::disallowed_methods,
    reason = "the date of a run is no part of its result"
)]
fn today() -> anyhow::Result<String> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let time = chrono::DateTime::from_timestamp(i64::try_from(since.as_secs())?, 0);
    Ok(time
        .context("this machine's clock shows no date")?
        .format("%Y-%m-%d")
        .to_string())
}

pub fn write(args: &Document) -> anyhow::Result<()> {
    let setups: Vec<Setup> = cases(&args.data.join("cases"))?
        .iter()
        .map(|path| read(path))
        .collect::<anyhow::Result<_>>()?;
    let seeds: Vec<u64> = (1..=args.seeds).collect();
    let policies = shown();
    let scores = scores(&setups, &seeds, &policies, args.jobs)?;
    let known = setups.iter().map(|setup| {
        let file = args
            .data
            .join("known")
            .join(format!("{}.toml", setup.scenario.name));
        Known::read(&file, setup)
    });
    let mut machines = generate::machines();
    if args.quick {
        machines.truncate(1);
    }
    let programs = sweep::PROGRAMS.map(str::to_owned);
    let sweep_cells: Vec<Cell> = machines
        .iter()
        .flat_map(|machine| sweep::sweep(machine, &programs, sweep::SOLO_S))
        .collect();
    let swept_policies = [Policies::Homenode, Policies::FfPin];
    let sweep = swept::run(sweep_cells, &swept_policies, &seeds, args.jobs)?;
    let lone = if args.quick {
        Vec::new()
    } else {
        let programs = swept::all_programs();
        let cells = machines
            .iter()
            .flat_map(|machine| sweep::lone(machine, &programs, sweep::SOLO_S));
        swept::run(cells.collect(), &[Policies::Homenode], &seeds, args.jobs)?
    };
    let board = Board {
        policies: policies
            .iter()
            .map(|policies| policies.name())
            .zip(scores)
            .collect(),
        known: known.collect::<Result<_, _>>()?,
        sweep,
        lone,
        held_out: HeldOut::read(&args.data.join("held-out.toml"))?,
        seeds,
    };
    let figure = board.figure();
    let svg = args.out.with_file_name(format!("{}.svg", figure.name));
    for (path, text) in [(&args.out, board.text()), (&svg, figure.svg())] {
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The scenario files of a folder, by name.
fn cases(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries =
        fs::read_dir(folder).with_context(|| format!("cannot read folder {} of cases", folder.display()))?;
    let paths: Vec<PathBuf> = entries
        .map(|entry| Ok(entry?.path()))
        .collect::<std::io::Result<_>>()?;
    let mut paths: Vec<PathBuf> = paths
        .into_iter()
        .filter(|path| path.extension().is_some_and(|ending| ending == "toml"))
        .collect();
    if paths.is_empty() {
        bail!(
            "no case is in {}; name the folder that holds `cases`",
            folder.display()
        );
    }
    paths.sort();
    Ok(paths)
}
