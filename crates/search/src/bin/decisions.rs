//! Scores policies over cases, draws cases, and sweeps loads: `decisions --help`.

#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

use std::collections::BTreeMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::process::Command as Process;

use anyhow::{Context as _, bail};
use clap::{Args, Parser, Subcommand};
use homenode_control::{Config, Policies};
use homenode_machine::preset;
use homenode_search::best::best;
use homenode_search::generate;
use homenode_search::jobs::{self, Progress};
use homenode_search::known::Known;
use homenode_search::run::{Run, Setup, run};
use homenode_search::score::{CaseScore, Total};
use homenode_search::search::Effort;
use homenode_search::sweep::{self, Cell};
use homenode_twin::Scenario;

/// Scores policies over cases × seeds beside `default`
#[derive(Debug, Parser)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    score: Score,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write cases drawn by seeds into a folder
    Generate {
        /// Seeds of the cases, as 1-24 (1-40 are for training)
        #[arg(long, value_parser = seeds)]
        seeds: RangeInclusive<u64>,
        /// The folder
        #[arg(long)]
        out: PathBuf,
    },
    /// Search for the best of cases, and keep it in files where it is better than what they know
    Known(Search),
    /// From one VM of 4 vCPUs to a full host, all of one program, on each preset with several nodes
    Sweep(Sweep),
    /// One VM of 4 and of 8 vCPUs alone on each preset with several nodes
    Lone(Sweep),
}

#[derive(Debug, Args)]
struct Score {
    /// Scenario files
    #[arg(required = true, value_name = "SCENARIO.toml")]
    cases: Vec<PathBuf>,
    #[command(flatten)]
    common: Common,
    /// Show each VM
    #[arg(short, long)]
    verbose: bool,
}

#[derive(Debug, Args)]
struct Search {
    /// Scenario files
    #[arg(required = true, value_name = "SCENARIO.toml")]
    cases: Vec<PathBuf>,
    /// Folder of what is known, a file for each case
    #[arg(long, default_value = "data/decisions/known")]
    known: PathBuf,
    /// Runs on the twin per case and seed
    #[arg(long, default_value_t = 300)]
    evaluations: usize,
    /// Seeds, as 1-5 or 7
    #[arg(long, default_value = "1-3", value_parser = seeds)]
    seeds: RangeInclusive<u64>,
    /// Seed of the search's own draws
    #[arg(long, default_value_t = 1)]
    search_seed: u64,
    /// Commit to note [default: of the work tree]
    #[arg(long)]
    commit: Option<String>,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

#[derive(Debug, Args)]
struct Sweep {
    /// Programs; a few of different kinds, or for `lone` all, without any
    #[arg(long, value_delimiter = ',')]
    programs: Vec<String>,
    /// Presets; all with several nodes without any
    #[arg(long, value_delimiter = ',')]
    machines: Vec<String>,
    #[command(flatten)]
    common: Common,
    /// What a program lasts alone, in seconds; a run ends after five times as long
    #[arg(long, default_value_t = sweep::SOLO_S)]
    solo: f64,
    /// Show cells that do less than this share of default's work only
    #[arg(long)]
    below: Option<f64>,
}

#[derive(Debug, Args)]
struct Common {
    /// Seeds, as 1-5 or 7
    #[arg(long, default_value = "1-3", value_parser = seeds)]
    seeds: RangeInclusive<u64>,
    /// Policies beside default (again for more) [default: homenode]
    #[arg(long = "policy")]
    policies: Vec<Policies>,
    /// Runs at the same time [default: as many as there are CPUs]
    #[arg(long, default_value_t = jobs::available(), hide_default_value = true)]
    jobs: usize,
}

impl Common {
    /// Without `default`, beside which all are.
    fn policies(&self) -> Vec<Policies> {
        let mut named: Vec<Policies> = self.policies.clone();
        named.retain(|policies| *policies != Policies::Default);
        named.dedup();
        if named.is_empty() {
            named.push(Policies::Homenode);
        }
        named
    }
}

fn seeds(text: &str) -> Result<RangeInclusive<u64>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| {
        text.parse()
            .map_err(|_| format!("`{text}` is no seed; write 1-5, or 7"))
    };
    let (first, last) = (number(first)?, number(last)?);
    if first > last {
        return Err(format!("{first}-{last} holds no seed; write the smaller first"));
    }
    Ok(first..=last)
}

fn main() -> anyhow::Result<()> {
    let cli = Cli::parse();
    match cli.command {
        None => score_all(&cli.score),
        Some(Command::Generate { seeds, out }) => {
            fs::create_dir_all(&out).with_context(|| format!("cannot make {}", out.display()))?;
            for seed in seeds {
                let path = out.join(format!("{}.toml", generate::name(seed)));
                fs::write(&path, generate::case(seed))
                    .with_context(|| format!("cannot write {}", path.display()))?;
            }
            Ok(())
        }
        Some(Command::Known(args)) => known(&args),
        Some(Command::Sweep(args)) => {
            let programs = sweep::PROGRAMS.map(str::to_owned).to_vec();
            swept(&args, programs, sweep::sweep)
        }
        Some(Command::Lone(args)) => {
            let programs = generate::programs().into_iter();
            swept(
                &args,
                programs.map(|(name, _)| name.to_owned()).collect(),
                sweep::lone,
            )
        }
    }
}

fn read(path: &PathBuf) -> anyhow::Result<Setup> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let scenario = Scenario::from_toml(&path.display().to_string(), &text)?;
    let machine = preset(scenario.machine.as_deref().unwrap_or("r910"))?;
    Ok(Setup::new(machine, scenario, 1))
}

fn score_all(args: &Score) -> anyhow::Result<()> {
    let setups: Vec<Setup> = args.cases.iter().map(read).collect::<anyhow::Result<_>>()?;
    let policies = args.common.policies();
    let mut work = Vec::new();
    for case in 0..setups.len() {
        for seed in args.common.seeds.clone() {
            let all = [Policies::Default].into_iter().chain(policies.iter().copied());
            work.extend(all.map(|policies| (case, seed, policies)));
        }
    }
    let progress = Progress::new("runs", work.len());
    let runs = jobs::each(args.common.jobs, &work, &progress, |(case, seed, policies)| {
        let setup = Setup {
            seed: *seed,
            ..setups[*case].clone()
        };
        let config = Config {
            policies: *policies,
            ..Config::default()
        };
        run(&setup, config, |_| (), |_| ())
    });
    drop(progress);
    let mut done: BTreeMap<(usize, &str), Vec<Run>> = BTreeMap::new();
    for ((case, _, policies), run) in work.iter().zip(runs) {
        done.entry((*case, policies.name())).or_default().push(run?);
    }
    for policies in policies {
        println!("== {}", policies.name());
        let mut scores = Vec::new();
        for (case, setup) in setups.iter().enumerate() {
            let base: Vec<&Run> = done[&(case, "default")].iter().collect();
            let other: Vec<&Run> = done[&(case, policies.name())].iter().collect();
            let score = CaseScore::of(&setup.scenario.name, &base, &other);
            print_case(&score);
            if args.verbose {
                print_vms(&score, &base, &other);
            }
            scores.push(score);
        }
        print_total(&scores);
    }
    Ok(())
}

fn known(args: &Search) -> anyhow::Result<()> {
    fs::create_dir_all(&args.known).with_context(|| format!("cannot make {}", args.known.display()))?;
    let commit = args.commit.clone().unwrap_or_else(|| head("."));
    for path in &args.cases {
        let case = read(path)?;
        let name = case.scenario.name.clone();
        let file = args.known.join(format!("{name}.toml"));
        for seed in args.seeds.clone() {
            let setup = Setup { seed, ..case.clone() };
            let mut known = Known::read(&file, &setup)?;
            let effort = Effort {
                evaluations: args.evaluations,
                jobs: args.jobs,
                seed: args.search_seed,
            };
            let progress = Progress::new(format!("{name} seed {seed}"), args.evaluations);
            let before = known.schedules(&setup);
            let best = best(&setup, &Config::default(), &before, &effort, &progress)?;
            drop(progress);
            let was = known.of_seed(seed).map(|known| known.mean);
            known.add(&setup, &best, &commit);
            known.write(&file)?;
            println!(
                "{name:14} seed {seed}: known {}, best of this search {:.4} by {} (static {:.4}) in {} evaluations",
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

/// The short id of the last commit that touched a path; empty where that cannot be found out.
fn head(path: &str) -> String {
    let output = Process::new("git")
        .args(["log", "-1", "--format=%h", "--", path])
        .output();
    let text = output
        .ok()
        .filter(|output| output.status.success())
        .map(|output| output.stdout);
    String::from_utf8_lossy(&text.unwrap_or_default())
        .trim()
        .to_owned()
}

fn show(value: Option<f64>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| format!("{value:.3}"))
}

fn print_case(score: &CaseScore) {
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

fn print_vms(score: &CaseScore, base: &[&Run], other: &[&Run]) {
    for (at, vm) in score.vms.iter().enumerate() {
        let mean = |runs: &[&Run], of: fn(&homenode_twin::VmReport) -> Option<f64>| {
            let values = runs.iter().filter_map(|run| of(&run.report.vms[at]));
            show(homenode_search::score::mean(values))
        };
        let by_seed: Vec<String> = score.ratios.iter().map(|vms| show(vms[at])).collect();
        let both = |of| format!("{}->{}", mean(base, of), mean(other, of));
        println!(
            "    {:18} {:11} {}  [{}]  local {} miss {} runtime {} s",
            vm.name,
            vm.workload,
            show(vm.ratio),
            by_seed.join(" "),
            both(|vm| vm.local_access_ratio),
            both(|vm| vm.llc_miss_rate),
            both(|vm| vm.runtime_s),
        );
    }
}

fn print_total(scores: &[CaseScore]) {
    let total = Total::of(scores);
    let hurt: Vec<String> = scores
        .iter()
        .flat_map(|case| {
            case.hurt()
                .map(|vm| format!("{}/{} {}", case.case, vm.name, show(vm.ratio)))
        })
        .collect();
    println!(
        "mean of cases {}; worst VM {}; hurt {}/{}: {}; runs over 1.10: {}/{}",
        total
            .mean
            .map_or_else(|| "-".to_owned(), |mean| format!("{mean:.4}")),
        show(total.worst_vm),
        total.hurt.0,
        total.hurt.1,
        hurt.join(", "),
        total.much_worse.0,
        total.much_worse.1
    );
}

fn swept(
    args: &Sweep,
    usual: Vec<String>,
    cells: fn(&homenode_machine::Machine, &[String], f64) -> Vec<Cell>,
) -> anyhow::Result<()> {
    let programs = if args.programs.is_empty() {
        usual
    } else {
        args.programs.clone()
    };
    let machines = match args.machines.as_slice() {
        [] => generate::machines(),
        named => named.iter().map(|name| preset(name)).collect::<Result<_, _>>()?,
    };
    let cells: Vec<Cell> = machines
        .iter()
        .flat_map(|machine| cells(machine, &programs, args.solo))
        .collect();
    if cells.is_empty() {
        bail!("none of these machines has room for any of these programs; name others");
    }
    let policies = args.common.policies();
    let seeds: Vec<u64> = args.common.seeds.clone().collect();
    let outcomes = sweep::run_all(&cells, &policies, &seeds, args.common.jobs);
    println!("work beside default, mean over VMs and seeds (decisions, GiB moved)");
    let mut of_all: Vec<Vec<f64>> = vec![Vec::new(); policies.len()];
    for (cell, outcome) in cells.iter().zip(outcomes) {
        let works = outcome.map_err(anyhow::Error::msg)?;
        for (all, work) in of_all.iter_mut().zip(&works) {
            all.push(work.of_default);
        }
        if args
            .below
            .is_some_and(|below| works.iter().all(|work| work.of_default >= below))
        {
            continue;
        }
        let words: Vec<String> = works
            .iter()
            .map(|work| {
                let (name, score) = (work.policies.name(), &work.score);
                format!(
                    "{name} {:.3} ({:.0}, {:.1})",
                    work.of_default, score.decisions, score.moved_gib
                )
            })
            .collect();
        let base_s = works.first().and_then(|work| work.score.vms.first()?.base_s);
        println!(
            "{:11} {:15} {:2} VMs of {} vCPUs, default {} s  {}",
            cell.machine.name,
            cell.program,
            cell.vms,
            cell.vcpus,
            base_s.map_or_else(|| "-".to_owned(), |s| format!("{s:.0}")),
            words.join("  ")
        );
    }
    for (policies, all) in policies.iter().zip(&of_all) {
        let least = all.iter().copied().fold(f64::INFINITY, f64::min);
        println!(
            "{}: mean {}, least {least:.3}, under .98 in {} of {}",
            policies.name(),
            show(homenode_search::score::mean(all.iter().copied())),
            all.iter().filter(|work| **work < 0.98).count(),
            all.len()
        );
    }
    Ok(())
}
