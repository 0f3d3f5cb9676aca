//! `homenode search`: finds the best known decisions for a scenario, and compares them with the policies' decisions.

use anyhow::{anyhow, bail};
use homenode_agent::Show;
use homenode_control::Config;
use homenode_reproduce::jobs::{self, Progress};
use homenode_screens::printable::OneLine;
use homenode_search::best::{Best, best};
use homenode_search::known::Known;
use homenode_search::outcome::Search;
use homenode_search::program::{EXEC, Program};
use homenode_search::search::Effort;
use homenode_twin::Setup;
use serde_json::json;

use crate::bad_input;
use crate::options::{OutFile, ShownArgs, TwinKernelArgs};
use crate::output::Output;
use crate::print::{or_dash, table};
use crate::trial::about_input;
use crate::twin;

/// Options of `search`.
#[derive(Debug, clap::Args)]
pub(crate) struct SearchArgs {
    /// A scenario file, or the name of a scenario that comes with the program (`homenode sim --list`)
    #[arg(value_name = "SCENARIO")]
    pub scenario: String,
    /// Number of simulated runs, including the policies' runs
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = evaluations)]
    pub evaluations: usize,
    /// Number of runs at a time [default: the number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub jobs: Option<u16>,
    /// A seed other than the scenario's: same seed, same result
    #[arg(long)]
    pub seed: Option<u64>,
    /// A machine other than the scenario's: a preset's name, or a machine file
    #[arg(long, value_name = "NAME|FILE")]
    pub machine: Option<String>,
    #[command(flatten)]
    pub kernel: TwinKernelArgs,
    /// Start from the best decisions in this file, and save better ones there; the file is created if missing
    #[arg(long, value_name = "FILE")]
    pub known: Option<OutFile>,
    /// Include this program among the policies: `exec:PROGRAM ARG...` (docs/POLICIES.md). May be given several times
    #[arg(long = "policy", value_name = "exec:PROGRAM", value_parser = program)]
    pub programs: Vec<Program>,
    #[command(flatten)]
    pub shown: ShownArgs,
}

fn evaluations(text: &str) -> anyhow::Result<usize> {
    let least = homenode_search::search::EVALUATIONS_MIN;
    let number: Option<usize> = text.parse().ok();
    let number = number.filter(|number| *number >= least);
    number.ok_or_else(|| anyhow!("a search takes {least} evaluations or more; 300 is usual"))
}

fn program(text: &str) -> anyhow::Result<Program> {
    match text.starts_with(EXEC) {
        true => Ok(text.parse()?),
        false => {
            bail!("built-in policies are always included; write `exec:` before your own program")
        }
    }
}

/// Runs `homenode search`.
///
/// # Errors
/// Bad input; a scenario that the machine cannot run; a `--known` file that cannot be parsed or written.
pub(crate) fn run(args: &SearchArgs) -> anyhow::Result<()> {
    let mut output = Output::new(args.shown.json);
    let scenario = args.kernel.of(twin::scenario(&args.scenario)?);
    let machine = twin::machine_for(&scenario, &args.scenario, args.machine.as_deref())?;
    let seed = args.seed.unwrap_or(scenario.seed);
    let setup = Setup::new(machine, scenario, seed);
    let mut known = match &args.known {
        Some(path) => {
            path.replaced_by("--known", Known::new_file(path))?;
            Known::read(path, &setup).map_err(bad_input)?
        }
        None => Known::default(),
    };
    let effort = Effort {
        evaluations: args.evaluations,
        jobs: args.jobs.map_or_else(jobs::available, usize::from),
        seed: 1,
    };
    let progress =
        Progress::new(format!("{} seed {seed}: ", OneLine(&setup.scenario.name))).of(args.evaluations);
    let before = known.schedules(&setup);
    let best = best(
        &setup,
        &Config::default(),
        (&args.programs, &before),
        &effort,
        &progress,
    )
    .map_err(about_input)?;
    drop(progress);
    let built = (env!("CARGO_PKG_VERSION"), env!("HOMENODE_COMMIT"));
    let search = Search::of(&setup, &best, built);
    show(&search, &best, &mut output);
    output.object("search", json!(search));
    if let Some(path) = &args.known {
        known.add(&setup, &best, env!("HOMENODE_COMMIT"));
        known.write(path)?;
    }
    Ok(())
}

fn show(search: &Search<'_>, best: &Best, output: &mut Output) {
    let figure = |value: Option<f64>| or_dash(value, |value| format!("{value:.3}"));
    let percent = |gap: Option<f64>| or_dash(gap, |gap| format!("{:.1}%", gap * 100.0));
    output.text(format_args!(
        "{} on {}, seed {}: runtimes relative to default (default is 1); {} evaluations\n",
        search.scenario, search.machine, search.seed, search.evaluations
    ));
    let of_default = vec![
        "default".to_owned(),
        figure(Some(1.0)),
        figure(Some(1.0)),
        percent(Some(1.0 / best.mean() - 1.0)),
    ];
    let policies = search.policies.iter().map(|policy| {
        vec![
            policy.policy.to_owned(),
            figure(policy.mean),
            figure(policy.worst),
            percent(policy.gap),
        ]
    });
    let known = vec![
        format!("best known, by {}", search.best.found_by),
        figure(Some(search.best.mean)),
        figure(search.best.worst),
        percent(Some(0.0)),
    ];
    let rows = [of_default].into_iter().chain(policies).chain([known]);
    output.text(format_args!(
        "{}",
        table(&["", "mean", "worst VM", "over best known"], rows)
    ));
    let mut header = vec!["VM".to_owned(), "workload".to_owned()];
    header.extend(search.policies.iter().map(|policy| policy.policy.to_owned()));
    header.push("best known".to_owned());
    let rows = search.best.vms.iter().enumerate().map(|(at, vm)| {
        let mut row = vec![vm.name.clone(), best.base.report.vms[at].workload.clone()];
        row.extend(search.policies.iter().map(|policy| figure(policy.vms[at].ratio)));
        row.push(figure(vm.ratio));
        row
    });
    let header: Vec<&str> = header.iter().map(String::as_str).collect();
    output.text(format_args!("\n{}", table(&header, rows)));
    output.text(format_args!("\nThe best known decisions; each takes effect at the agent's first sample that has the VM, at or after its time:\n"));
    if search.best.decisions.is_empty() {
        output.line("    none: every VM stays where the kernel puts it");
    }
    for line in &search.best.decisions {
        output.line(&format!("    {line}"));
    }
}
