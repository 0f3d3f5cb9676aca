//! `homenode sweep`: runs a scenario over values, seeds and policies.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::{Args, Subcommand};
use homenode_reproduce::jobs::{self, Progress};
use homenode_sweep::{Asked, Plan, Program, Rows, Shard, Slurm, Store, SweepError, Table};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use crate::bad_input;
use crate::options::OutFile;
use crate::print::{print, print_json, table};

/// The end of `sweep`'s help.
pub(crate) const EXAMPLES: &str = "Keys are paths into the scenario's file: vm.NAME.KEY (vm.*.KEY is every VM), workload.NAME.program.KEY, event.0.KEY, a key
of its own such as duration, config.KEY of the agent's settings, machine. Ranges have both ends; with /geometric they grow by
a factor. Every key and value is checked before anything runs.

Examples:
  homenode sweep permits --set vm.fluid.permit=50k..3M/20 --seeds 1..10
  homenode sweep my.toml --set machine=r910,amd48 --csv             the same VMs on two machines
  homenode sweep my.toml --set 'vm.\"a.b\".vcpus=1..8' --parquet means.parquet
  homenode sweep PLAN.toml --store runs --shard 1/2     a half of it
  homenode sweep merge runs --parquet means.parquet     the same bytes as without shards
  homenode sweep PLAN.toml --store runs --slurm > job.sh && sh job.sh";

/// Options of `sweep`.
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub(crate) struct SweepArgs {
    #[command(subcommand)]
    command: Option<SweepCommand>,
    /// A scenario file, the name of a built-in scenario, or a plan (docs/SWEEPS.md)
    #[arg(value_name = "FILE", required = true)]
    file: Option<String>,
    #[command(flatten)]
    asked: AskedArgs,
    #[command(flatten)]
    result: ResultArgs,
    /// Number of runs at a time [default: the number of CPUs]; results do not depend on it
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    jobs: Option<u16>,
    /// Keep finished tasks in this directory, and reuse those already there
    #[arg(long, value_name = "DIR")]
    store: Option<PathBuf>,
    /// Run only this part of the tasks (`1/8` to `8/8`), and keep the results in the store
    #[arg(long, value_name = "I/N", requires = "store", conflicts_with_all = ["csv", "json", "parquet", "all_runs", "slurm"])]
    shard: Option<Shard>,
    /// Check the plan, print it as one self-contained file, and run nothing
    #[arg(long, conflicts_with_all = ["shard", "slurm"])]
    print_plan: bool,
    /// Print the script of a Slurm job array that runs the plan and keeps the results in the store, and run nothing; `--jobs` is
    /// the number of CPUs of each part
    #[arg(long, requires = "store")]
    slurm: bool,
    /// Number of parts of the array [default: 16, or the number of tasks if that is smaller]
    #[arg(long, value_name = "N", requires = "slurm", value_parser = clap::value_parser!(u16).range(1..))]
    shards: Option<u16>,
    /// Maximum number of parts that run at the same time
    #[arg(long, value_name = "N", requires = "slurm", value_parser = clap::value_parser!(u16).range(1..))]
    at_once: Option<u16>,
    /// A further option of sbatch, such as `--partition=long`. May be given several times
    #[arg(long, value_name = "OPTION", requires = "slurm", allow_hyphen_values = true)]
    sbatch: Vec<String>,
}

/// The runs of a sweep, as the user requests them.
#[derive(Debug, Args)]
struct AskedArgs {
    /// A key and its values: `vm.NAME.permit=50k..3M/20`, `machine=r910,amd48`, `config.period=1s,2s`. May be given several times
    #[arg(long, value_name = "KEY=VALUES")]
    set: Vec<String>,
    /// Seeds: `1..10`, `1,2,5` [default: the scenario's]
    #[arg(long, value_name = "SEEDS")]
    seeds: Option<String>,
    /// Policies, each in its own runs; may be given several times [default: the scenario's, else `default`]
    #[arg(long = "policy", value_name = "NAME")]
    policies: Vec<String>,
    /// A machine other than the scenario's: a preset's name, or a machine file
    #[arg(long, value_name = "NAME|FILE")]
    machine: Option<String>,
    /// File with the agent's settings
    #[arg(long, value_name = "FILE")]
    config: Option<String>,
    /// Number of runs per task, the unit that a store keeps [default: a 64th of all runs]; at most 64
    #[arg(long, value_name = "N")]
    runs_per_task: Option<usize>,
}

/// How to show the results.
#[derive(Debug, Args)]
struct ResultArgs {
    /// A figure for the table (docs/SWEEPS.md lists them); may be given several times [default: each VM's runtime, or its
    /// instructions per second if its program does not end]
    #[arg(long = "metric", value_name = "NAME")]
    metrics: Vec<String>,
    /// Show a row for each run instead of means over seeds
    #[arg(long)]
    all_runs: bool,
    /// Print the table as CSV
    #[arg(long)]
    csv: bool,
    /// Print the table as JSON for programs (docs/JSON.md)
    #[arg(long, conflicts_with = "csv")]
    json: bool,
    /// Write the table as Parquet
    #[arg(long, value_name = "FILE")]
    parquet: Option<OutFile>,
}

#[derive(Debug, Subcommand)]
enum SweepCommand {
    /// Make the table from stores; if tasks are missing, list them and exit with status 1
    Merge(MergeArgs),
}

#[derive(Debug, Args)]
struct MergeArgs {
    /// Directories that were given to `--store`
    #[arg(value_name = "STORE", required = true)]
    stores: Vec<PathBuf>,
    /// First digits of the plan's digest, if the stores have several plans
    #[arg(long, value_name = "DIGEST")]
    plan: Option<String>,
    #[command(flatten)]
    result: ResultArgs,
}

/// Turns a sweep's error into one with the right exit status.
fn told(error: SweepError) -> anyhow::Error {
    match error {
        SweepError::Input(said) => bad_input(said),
        other => anyhow::Error::new(other),
    }
}

/// Runs `homenode sweep`, or `homenode sweep merge`.
///
/// # Errors
/// Bad input; a run that fails; tasks that are missing; files that cannot be written.
pub(crate) fn run(args: &SweepArgs) -> anyhow::Result<()> {
    if let Some(SweepCommand::Merge(args)) = &args.command {
        return merge(args);
    }
    let what = args.file.as_deref().unwrap_or_default();
    let plan = args.asked.plan(what, &args.result.metrics).map_err(told)?;
    if args.print_plan {
        print(format_args!("{}", plan.to_toml().map_err(told)?));
        return Ok(());
    }
    let store = args.store.as_deref().map(open).transpose()?;
    let kept = store
        .as_ref()
        .map(|store| store.keep_plan(&plan))
        .transpose()
        .map_err(told)?;
    if args.slurm {
        return slurm(args, &plan, &kept.unwrap_or_default());
    }
    let jobs = args.jobs.map_or_else(jobs::available, usize::from);
    let shard = args.shard.unwrap_or(Shard::ALL);
    let progress = Progress::new("");
    let rows = homenode_sweep::run(&plan, &shard.tasks(&plan), jobs, store.as_ref(), &progress);
    drop(progress);
    let rows = rows.map_err(told)?;
    match args.shard {
        Some(_) => Ok(()),
        None => args.result.show(&plan, &rows),
    }
}

fn open(directory: &Path) -> anyhow::Result<Store> {
    let program = Program::running()
        .context("cannot read this program's own file, which identifies the results in a store")?;
    Store::open(directory, program).map_err(told)
}

impl AskedArgs {
    /// Returns the plan in a file, changed by the options.
    fn plan(&self, what: &str, metrics: &[String]) -> Result<Plan, SweepError> {
        let mut asked: Asked = Plan::asked_by(what)?;
        for set in &self.set {
            let (key, values) = set.split_once('=').ok_or_else(|| {
                SweepError::Input(format!(
                    "--set {set}: write a key, `=` and values: `vm.NAME.permit=50k..3M/20`"
                ))
            })?;
            let values = values.trim().to_owned();
            asked.set.insert(key.trim().to_owned(), values.into());
        }
        if let Some(seeds) = &self.seeds {
            asked.seeds = Some(seeds.clone().into());
        }
        if !self.policies.is_empty() {
            asked.policies.clone_from(&self.policies);
        }
        if !metrics.is_empty() {
            asked.metrics = metrics.to_vec();
        }
        if let Some(config) = &self.config {
            asked.config = Some(config.clone().into());
        }
        asked.machine = self.machine.clone().or(asked.machine);
        asked.runs_per_task = self.runs_per_task.or(asked.runs_per_task);
        Plan::of(asked)
    }
}

impl ResultArgs {
    fn show(&self, plan: &Plan, rows: &[Rows]) -> anyhow::Result<()> {
        let made = match self.all_runs {
            true => Table::runs(plan, rows),
            false => Table::means(plan, rows),
        };
        let made = made.map_err(told)?;
        if let Some(path) = &self.parquet {
            let bytes = made.parquet().map_err(told)?;
            fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
        }
        match (self.csv, self.json, &self.parquet) {
            (true, ..) => print(format_args!("{}", made.csv())),
            (_, true, _) => print_json("sweep", &Swept::of(&made))?,
            (_, _, None) => print(format_args!("{}", picture(&made))),
            (_, _, Some(_)) => {}
        }
        Ok(())
    }

    /// Returns the options as words, for the command line of a merge that makes the same table.
    fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        for metric in &self.metrics {
            words.extend(["--metric".to_owned(), metric.clone()]);
        }
        let flags = [
            (self.all_runs, "--all-runs"),
            (self.csv, "--csv"),
            (self.json, "--json"),
        ];
        words.extend(
            flags
                .iter()
                .filter(|(is_set, _)| *is_set)
                .map(|(_, flag)| (*flag).to_owned()),
        );
        if let Some(path) = &self.parquet {
            words.extend(["--parquet".to_owned(), path.display().to_string()]);
        }
        words
    }
}

/// A sweep's table, for programs.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct Swept<'a> {
    /// Version of the program.
    version: &'static str,
    /// Commit of the program's sources.
    commit: &'static str,
    /// The plan's digest, which identifies the plan.
    plan: &'a str,
    /// Names of all columns, in order: the keys that are set, then the columns of docs/SWEEPS.md.
    columns: Vec<&'a str>,
    /// A row for each combination, policy, VM (or node, or the host) and metric: values by the column's name.
    rows: Vec<BTreeMap<&'a str, &'a Value>>,
}

impl<'a> Swept<'a> {
    fn of(made: &'a Table) -> Swept<'a> {
        let columns: Vec<&str> = made.columns.iter().map(|column| column.name.as_str()).collect();
        let row = |row: &'a Vec<Value>| columns.iter().copied().zip(row).collect();
        Swept {
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("HOMENODE_COMMIT"),
            plan: made.digest(),
            rows: made.rows.iter().map(row).collect(),
            columns,
        }
    }
}

fn picture(made: &Table) -> String {
    let header: Vec<&str> = made.columns.iter().map(|column| column.name.as_str()).collect();
    let cell = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Number(number) if number.is_f64() => {
            homenode_reproduce::verdict::show(number.as_f64().unwrap_or_default())
        }
        other => other.to_string(),
    };
    let rows = made.rows.iter().map(|row| row.iter().map(cell).collect());
    format!("{}\n", table(&header, rows))
}

fn slurm(args: &SweepArgs, plan: &Plan, file: &Path) -> anyhow::Result<()> {
    let whole = |path: &Path| std::path::absolute(path).context("cannot find the current directory");
    let program =
        std::env::current_exe().context("cannot find this program's own file, which the job array runs")?;
    let store = whole(args.store.as_deref().unwrap_or(Path::new(".")))?;
    let mut merge = args.result.words();
    if let (Some(path), Some(last)) = (&args.result.parquet, merge.last_mut()) {
        *last = whole(path)?.display().to_string();
    }
    merge.extend(["--plan".to_owned(), plan.digest().map_err(told)?[..16].to_owned()]);
    let script = Slurm {
        program: &program.display().to_string(),
        plan: &whole(file)?,
        store: &store,
        shards: args.shards.map_or(16, usize::from).min(plan.tasks()),
        at_once: args.at_once.map(usize::from),
        cpus: args.jobs.map_or(1, usize::from),
        options: &args.sbatch,
        merge: &merge,
    };
    print(format_args!("{}", script.script()));
    Ok(())
}

fn merge(args: &MergeArgs) -> anyhow::Result<()> {
    let absent = args.stores.iter().find(|store| !store.is_dir());
    if let Some(absent) = absent {
        return Err(bad_input(format!("{}: there is no such store", absent.display())));
    }
    let stores: Vec<Store> = args
        .stores
        .iter()
        .map(|store| open(store))
        .collect::<Result<_, _>>()?;
    let mut plans: Vec<(String, Plan)> = Vec::new();
    for store in &stores {
        for plan in store.plans().map_err(told)? {
            let digest = plan.digest().map_err(told)?;
            let is_asked = args
                .plan
                .as_ref()
                .is_none_or(|asked| digest.starts_with(&**asked));
            if is_asked && plans.iter().all(|(known, _)| *known != digest) {
                plans.push((digest, plan));
            }
        }
    }
    let plan = match plans.len() {
        0 => {
            return Err(bad_input(
                "the stores have no such plan: name directories that `homenode sweep --store` made",
            ));
        }
        1 => plans.remove(0).1,
        _ => {
            let names: Vec<&str> = plans.iter().map(|(digest, _)| &digest[..16]).collect();
            return Err(bad_input(format!(
                "the stores have tasks of several plans: choose one with --plan: {}",
                names.join(", ")
            )));
        }
    };
    let rows = homenode_sweep::merge(&plan, &stores).map_err(told)?;
    let plan = match args.result.metrics.is_empty() {
        true => plan,
        false => plan.with_metrics(&args.result.metrics).map_err(told)?,
    };
    args.result.show(&plan, &rows)
}
