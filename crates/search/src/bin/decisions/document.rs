//! `decisions document` and `decisions held-out`.

use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::{Context as _, bail};
use clap::Args;
use homenode_control::{Config, PolicySet};
use homenode_machine::Machine;
use homenode_machine_files::preset;
use homenode_reproduce::engine::Run;
use homenode_reproduce::jobs::{self, Progress};
use homenode_search::board::{Board, Disturbed};
use homenode_search::contender::Contender;
use homenode_search::generate;
use homenode_search::grid::runs;
use homenode_search::held_out::{DrawnAs, HeldOut, HeldOutPolicy, HeldOutRun};
use homenode_search::known::Known;
use homenode_search::score::{CaseScore, Total};
use homenode_search::search::{Point, rollout};
use homenode_search::sweep::{self, Cell, Work};
use homenode_twin::Disturbance;
use homenode_twin::Setup;
use homenode_units::file_name;

use crate::known::last_commit;
use crate::scores::{print_total, score, scores};
use crate::{read, seeds, swept};

/// Path of the policies' sources. The last commit that touched it determines the held-out cases.
const POLICY_PATH: &str = "crates/policy";

#[derive(Debug, Args)]
pub(crate) struct Held {
    /// Number of cases
    #[arg(long, default_value_t = 24)]
    cases: usize,
    /// Seeds of each case, such as 1-3 or 7
    #[arg(long, default_value = "1-3", value_parser = seeds)]
    seeds: RangeInclusive<u64>,
    /// Commit whose id determines the cases [default: the last one that changed the policies]
    #[arg(long)]
    commit: Option<String>,
    /// File that the result is added to
    #[arg(long, default_value = "data/decisions/held-out.toml")]
    keep: PathBuf,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

#[derive(Debug, Args)]
pub(crate) struct Document {
    /// Folder of `cases`, `known` and `held-out.toml`
    #[arg(long, default_value = "data/decisions")]
    data: PathBuf,
    /// File for the document; its figure is written next to it
    #[arg(long, default_value = "docs/DECISIONS.md")]
    out: PathBuf,
    /// Number of seeds, from 1 on
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Sweep one machine only, without VMs that run alone: for a quick look, not to commit
    #[arg(long)]
    quick: bool,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

pub(crate) fn held_out(args: &Held) -> anyhow::Result<()> {
    // An unreadable list is reported before the runs.
    HeldOut::read(&args.keep)?;
    let commit = drawn_from(args.commit.as_deref())?;
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
    let contenders = Contender::all();
    let scores = scores(&setups, &seeds, &contenders, args.jobs)?;
    let mut policies = Vec::new();
    for (contender, scores) in contenders.iter().zip(&scores) {
        println!("== {contender}");
        print_total(scores);
        policies.push(HeldOutPolicy::of(contender.name(), &Total::of(scores)));
    }
    let of = (setups.len(), seeds.len(), DrawnAs::Benchmarks);
    keep(&args.keep, &commit, of, policies)
}

/// Returns the commit that cases are drawn from: the requested one, else the last one that touched the policies.
pub(crate) fn drawn_from(named: Option<&str>) -> anyhow::Result<String> {
    match named {
        Some(commit) => Ok(commit.to_owned()),
        None => last_commit(POLICY_PATH)
            .with_context(|| format!("cannot find the last commit that changed {POLICY_PATH}; run this in the work tree, or name a commit with --commit")),
    }
}

/// Appends the result of a held-out run to the list in a file.
pub(crate) fn keep(
    path: &Path,
    commit: &str,
    (cases, seeds, drawn_as): (usize, usize, DrawnAs),
    policies: Vec<HeldOutPolicy>,
) -> anyhow::Result<()> {
    let mut list = HeldOut::read(path)?;
    list.runs.push(HeldOutRun {
        date: today()?,
        commit: commit.chars().take(12).collect(),
        cases,
        seeds,
        drawn_as,
        policies,
    });
    list.write(path)
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Returns today's date in UTC.
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

pub(crate) fn write(args: &Document) -> anyhow::Result<()> {
    let paths = cases(&args.data.join("cases"))?;
    let setups: Vec<Setup> = paths
        .iter()
        .map(|path| read(path))
        .collect::<anyhow::Result<_>>()?;
    let seeds: Vec<u64> = (1..=args.seeds).collect();
    let contenders = Contender::all();
    let scores = scores(&setups, &seeds, &contenders, args.jobs)?;
    let known = setups.iter().map(|setup| {
        let name = file_name(&setup.scenario.name, ".toml")?;
        anyhow::Ok(Known::read(&args.data.join("known").join(name), setup)?)
    });
    let known: Vec<Known> = known.collect::<Result<_, _>>()?;
    let mut machines = generate::machines();
    if args.quick {
        machines.truncate(1);
    }
    let lone = match args.quick {
        true => Vec::new(),
        false => lone(&machines, &seeds, args.jobs)?,
    };
    let names = Disturbance::names().into_iter();
    let disturbed = names.map(|name| disturbed(name, &setups, &known, &machines, &seeds, args.jobs));
    let board = Board {
        policies: contenders
            .iter()
            .map(|one| one.name().to_owned())
            .zip(scores)
            .collect(),
        sweep: load_sweep(&machines, &seeds, Disturbance::default(), args.jobs)?,
        lone,
        disturbed: disturbed.collect::<anyhow::Result<_>>()?,
        held_out: HeldOut::read(&args.data.join("held-out.toml"))?,
        known,
        seeds,
    };
    let figure = board.figure();
    let svg = args.out.with_file_name(format!("{}.svg", figure.name));
    for (path, text) in [(&args.out, board.text()), (&svg, figure.svg())] {
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn load_sweep(
    machines: &[Machine],
    seeds: &[u64],
    disturbance: Disturbance,
    jobs: usize,
) -> anyhow::Result<Vec<(Cell, Vec<Work>)>> {
    let programs = sweep::PROGRAMS.map(str::to_owned);
    let cells = machines
        .iter()
        .flat_map(|machine| sweep::sweep(machine, &programs, sweep::SOLO_S));
    let cells = cells.map(|cell| Cell { disturbance, ..cell }).collect();
    let contenders = [Contender::OURS, Contender::PolicySet(PolicySet::FfPin)];
    swept::run(cells, &contenders, seeds, jobs)
}

fn lone(machines: &[Machine], seeds: &[u64], jobs: usize) -> anyhow::Result<Vec<(Cell, Vec<Work>)>> {
    let programs = swept::all_programs();
    let cells = machines
        .iter()
        .flat_map(|machine| sweep::lone(machine, &programs, sweep::SOLO_S));
    swept::run(cells.collect(), &[Contender::OURS], seeds, jobs)
}

/// Runs `default`, the product and the best known decisions in all cases on simulated hosts that are wrong in one way. Also runs
/// the load sweep on these simulated hosts with the first seed.
fn disturbed(
    name: &'static str,
    setups: &[Setup],
    known: &[Known],
    machines: &[Machine],
    seeds: &[u64],
    jobs: usize,
) -> anyhow::Result<Disturbed> {
    let disturbance: Disturbance = name.parse()?;
    let setups: Vec<Setup> = setups.iter().map(|setup| setup.disturbed(disturbance)).collect();
    let runs = runs(&setups, seeds, &[Contender::OURS], jobs)?;
    let ours = setups
        .iter()
        .zip(&runs)
        .map(|(setup, runs)| score(setup, &runs[0], &runs[1]));
    let ours: Vec<CaseScore> = ours.collect();
    let mut best = Vec::new();
    for ((setup, known), runs) in setups.iter().zip(known).zip(&runs) {
        let bases = seeds.iter().zip(&runs[0]);
        let bases: Vec<_> = bases
            .filter(|(seed, _)| known.of_seed(**seed).is_some())
            .collect();
        let again = jobs::each(jobs, &bases, &Progress::new("best known: "), |(seed, base)| {
            let setup = Setup {
                seed: **seed,
                ..setup.clone()
            };
            let schedule = known.schedules(&setup).into_iter().next().unwrap_or_default();
            let config = Config::default();
            let beginning = Point::beginning(&setup, &config)?;
            let whole = rollout(&setup, &config, base, &beginning, &schedule, None)?;
            Ok::<_, anyhow::Error>(whole.context("a run without a time limit was cut short")?.run)
        })?;
        let bases: Vec<Run> = bases.into_iter().map(|(_, base)| base.clone()).collect();
        best.push(score(setup, &bases, &again));
    }
    let first = seeds.get(..1).unwrap_or_default();
    Ok(Disturbed {
        name,
        about: disturbance.to_string(),
        ours: Total::of(&ours),
        best: Total::of(&best),
        sweep: load_sweep(machines, first, disturbance, jobs)?,
    })
}

/// Returns the scenario files of a folder, sorted by name.
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
            "there are no cases in {}; name the folder that contains `cases`",
            folder.display()
        );
    }
    paths.sort();
    Ok(paths)
}
