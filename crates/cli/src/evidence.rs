//! `homenode evidence`: what the agent gains or costs the VMs of this host, as a randomised experiment.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use homenode_agent::wall_clock::now_ns;
use homenode_api::answer::{self, Overview};
use homenode_api::document::document;
use homenode_api::{ApiError, AskError, Request};
use homenode_control::{Mode, VmStatus};
use homenode_evidence::crossover::{Acting, Crossover, Look, Subject, run_block};
use homenode_evidence::report::{Hardware, HostFacts};
use homenode_evidence::{Effect, Report, Trial, page, read};
use homenode_machine_files::file::read_text_file;
use homenode_reproduce::jobs::Progress;
use homenode_screens::printable::OneLine;
use homenode_units::{Bytes, Ns};

use crate::ask::ask_agent;
use crate::bad_input;
use crate::options::{AgentArgs, OutDir};
use crate::print::{print_json, span, table};

/// The end of the command's help.
pub(crate) const HELP: &str = "The agent acts on the VMs and only observes them in turn, in short blocks whose order a coin decides; speeds of neighbouring
blocks are compared. While it observes, limits are lifted and homes released. Nothing else is changed or stored, and
whatever ends this command, the VMs have their own modes again within a minute. The agent must be in mode `act` for them.

DIR gets evidence.html (a page that needs nothing else), evidence.json, and to-share.json without the names of VMs. The same
command with the same DIR continues a run that was interrupted.

Examples:
  homenode evidence -o trial                       all VMs on which the agent acts
  homenode evidence --vms 'web*' --minutes 90 -o trial
  homenode evidence show trial/evidence.json       the result again";

/// Names of the files of a run.
const REPORT: &str = "evidence.json";
const PAGE: &str = "evidence.html";
const SHARED: &str = "to-share.json";
const COMMIT: &str = env!("HOMENODE_COMMIT");
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The usual length of a run.
const HOUR: Ns = Ns::from_secs(3600);
/// Most blocks that may be spoilt before the run ends.
const SPOILT_MAX: u32 = 8;
const REMEDY: &str = "start the agent with `homenode run --mode act`, or choose other VMs with --vms";
/// How long to wait before the agent is asked for its next sample.
const ASK_EVERY: Duration = Duration::from_millis(100);
/// How often the agent is asked in vain before the run ends: it may be restarting.
const SILENT_MAX: u32 = 300;
/// How often the agent is asked without a newer sample before the run ends: for ten minutes.
const OLD_MAX: u32 = 6000;

/// Options of `evidence`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct EvidenceArgs {
    #[command(subcommand)]
    pub command: Option<EvidenceCommand>,
    /// Length of the run, in minutes [default: an hour, or more if many VMs need it]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub minutes: Option<u64>,
    /// Only VMs whose names match, such as `web*`; may be given several times [default: all on which the agent acts]
    #[arg(long = "vms", value_name = "PATTERN")]
    pub vms: Vec<String>,
    /// Seed of the coin that orders the blocks [default: another one each time]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Directory for the results
    #[arg(short, long = "output", value_name = "DIR", required = true)]
    pub output: Option<OutDir>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Commands about results.
#[derive(Debug, Subcommand)]
pub(crate) enum EvidenceCommand {
    /// Show the result in a file
    #[command(after_help = "Examples:\n  homenode evidence show trial/evidence.json")]
    Show(ShowArgs),
}

/// Options of `evidence show`.
#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// The file: evidence.json or to-share.json
    #[arg(value_name = "FILE")]
    pub file: PathBuf,
    #[command(flatten)]
    pub shown: crate::options::ShownArgs,
}

/// `homenode evidence`.
///
/// # Errors
/// No agent; VMs on which it does not act; files that cannot be read or written.
pub(crate) fn run(args: &EvidenceArgs) -> anyhow::Result<()> {
    if let Some(EvidenceCommand::Show(args)) = &args.command {
        return show(&read(&args.file)?, args.shown.json);
    }
    let directory = args.output.as_ref().context("-o is required")?.create()?;
    let before = match directory.join(REPORT).exists() {
        true => Some(read(&directory.join(REPORT))?),
        false => None,
    };
    let state = args.agent.dir();
    let now: Overview = ask_agent(state, &Request::Overview)?;
    let mut agent = Agent {
        state,
        vms: chosen(
            &now,
            &args.vms,
            before.as_ref().is_some_and(|before| !is_complete(before)),
        )?,
        seen: now.status.at_ns,
    };
    let mut report = match before {
        Some(before) => continued(args, &agent, before, directory)?,
        None => begun(args, &agent, &now)?,
    };
    if is_complete(&report) {
        complain!(
            "homenode: {} is complete; choose another -o for another run",
            directory.join(REPORT).display()
        );
        return show(&report, args.agent.json());
    }
    begin(&agent, trial(&report)?, args.agent.json());
    let measured = measure(&mut agent, &mut report, directory);
    // Whatever happened; leases end by themselves, too.
    let released = agent.set(Acting::Acts, Ns::ZERO);
    measured.context("finished blocks are kept, and the same command continues")?;
    released?;
    show(&report, args.agent.json())
}

/// Plans a new run.
fn begun(args: &EvidenceArgs, agent: &Agent<'_>, now: &Overview) -> anyhow::Result<Report> {
    let vms = agent.vms.len();
    let seed = args.seed.unwrap_or_else(|| now_ns().unsigned_abs());
    let of = |length| Crossover::of(length, vms, seed);
    let plan = match args.minutes {
        Some(minutes) => of(Ns::from_secs(60 * minutes)),
        None => of(HOUR).or_else(|short| short.least.map_or(Err(short), of)),
    };
    let plan =
        plan.map_err(|short| bad_input(format!("{short}; give --minutes, or fewer VMs with --vms")))?;
    let trial = Trial::begun(agent.names(), plan);
    Ok(Report::begun(VERSION, COMMIT, facts(now)).with_crossover(trial))
}

/// Checks that a run that was interrupted can be continued by this command.
fn continued(
    args: &EvidenceArgs,
    agent: &Agent<'_>,
    before: Report,
    directory: &Path,
) -> anyhow::Result<Report> {
    let old = trial(&before)?;
    let is_same = old.about == agent.names() && args.seed.is_none_or(|seed| seed == old.plan.seed);
    if !is_same {
        return Err(bad_input(format!(
            "{} is of a run with other VMs ({}) or another seed; choose another -o",
            directory.join(REPORT).display(),
            old.about
                .iter()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        )));
    }
    if old.is_complete() {
        return Ok(before);
    }
    let mut blocks = old.blocks.clone();
    blocks.truncate(old.plan.next(blocks.len()));
    let continued = old.clone().with_blocks(blocks);
    Ok(before.with_crossover(continued))
}

/// Returns the agent on and off.
fn trial(report: &Report) -> anyhow::Result<&Trial> {
    report
        .crossover
        .as_ref()
        .ok_or_else(|| bad_input("the report in this directory has no trial of the agent; choose another -o"))
}

fn is_complete(report: &Report) -> bool {
    report.crossover.as_ref().is_some_and(Trial::is_complete)
}

/// Runs the blocks that are left, and keeps each.
fn measure(agent: &mut Agent<'_>, report: &mut Report, directory: &Path) -> anyhow::Result<()> {
    let progress = Progress::new("");
    let mut spoilt = 0;
    let mut trial = trial(report)?.clone();
    while !trial.is_complete() {
        let (at, all) = (trial.blocks.len(), trial.plan.blocks.len());
        let acting = trial.plan.blocks[at];
        progress.at(
            &format!("[{}/{all}] the agent {}", at + 1, doing(acting)),
            at as f64 / all as f64,
        );
        let block = run_block(agent, &trial.plan, acting)?;
        let mut blocks = trial.blocks.clone();
        match block {
            Some(block) => blocks.push(block),
            None => {
                spoilt += 1;
                anyhow::ensure!(
                    spoilt < SPOILT_MAX,
                    "{SPOILT_MAX} blocks were spoilt, as the agent was restarted or paused, or modes were set meanwhile"
                );
                progress.note("a block was spoilt: the agent was restarted or paused, or modes were set; its pair runs again");
                blocks.truncate(trial.plan.next(at));
            }
        }
        trial = trial.with_blocks(blocks);
        *report = report.clone().with_crossover(trial.clone());
        keep(directory, report)?;
    }
    Ok(())
}

fn doing(acting: Acting) -> &'static str {
    match acting {
        Acting::Acts => "acts",
        Acting::Observes => "observes",
    }
}

/// Says what will happen, and how long it takes.
fn begin(agent: &Agent<'_>, trial: &Trial, is_json: bool) {
    let plan = &trial.plan;
    if is_json {
        return;
    }
    let left = plan.blocks.len() - trial.blocks.len();
    say!(
        "{} VMs, {left} blocks of {}, {} in all: in half of them the agent only observes, with no limit and no home in force",
        agent.vms.len(),
        span(plan.block_ns),
        span(Ns(plan.block_ns.0 * left as u64)),
    );
}

/// Returns the VMs that the run is about, by UUID, with the names that the report has.
/// A lease on a VM is an earlier run's if that one is continued, and an operator's if not.
fn chosen(
    now: &Overview,
    patterns: &[String],
    is_continued: bool,
) -> anyhow::Result<BTreeMap<String, String>> {
    let all = &now.status.vms;
    let wanted = globs(patterns)?;
    let acts = |vm: &VmStatus| match vm.observed_for_ns {
        Some(_) => is_continued,
        None => vm.mode == Mode::Act && vm.left_alone.is_none(),
    };
    let is_wanted = |vm: &&VmStatus| match patterns.is_empty() {
        true => acts(vm),
        false => wanted.is_match(&vm.name),
    };
    let found: Vec<&VmStatus> = all.iter().filter(is_wanted).collect();
    if found.is_empty() {
        let names: Vec<&str> = all.iter().map(|vm| vm.name.as_str()).collect();
        let there = match names[..] {
            [] => return Err(bad_input("no VM runs here")),
            _ => names.join(", "),
        };
        return Err(bad_input(match patterns {
            [] => format!("the agent acts on none of the VMs here ({there}); {REMEDY}"),
            _ => format!("no VM matches {}; there are: {there}", patterns.join(", ")),
        }));
    }
    if let Some(vm) = found.iter().find(|vm| !acts(vm)) {
        let why = match (vm.observed_for_ns, &vm.left_alone) {
            (Some(left), _) => format!("it is to be only observed for another {}", span(left)),
            (None, Some(why)) => why.clone(),
            (None, None) => format!("the agent's mode for it is {}", vm.mode),
        };
        return Err(bad_input(format!(
            "VM `{}` would be the same in all blocks: {why}; {REMEDY}",
            vm.name
        )));
    }
    if found.iter().all(|vm| vm.counted_by.is_none()) {
        return Err(bad_input(
            "instructions are not counted on this host, so speeds are unknown; `homenode doctor` says why",
        ));
    }
    let is_alone = |vm: &VmStatus| all.iter().filter(|other| other.name == vm.name).count() == 1;
    let named = |vm: &&VmStatus| match is_alone(vm) {
        true => (vm.id.to_string(), vm.name.clone()),
        false => (vm.id.to_string(), format!("{} ({})", vm.name, vm.id)),
    };
    Ok(found.iter().map(named).collect())
}

fn globs(patterns: &[String]) -> anyhow::Result<GlobSet> {
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(GlobBuilder::new(pattern).build().map_err(bad_input)?);
    }
    set.build().map_err(bad_input)
}

fn facts(now: &Overview) -> HostFacts {
    let nodes = &now.status.nodes;
    HostFacts {
        hardware: Hardware::Unknown,
        cpu_model: None,
        nodes: nodes.len(),
        cpus: nodes.iter().map(|node| node.cpus).sum(),
        memory_bytes: Bytes(nodes.iter().map(|node| node.memory_bytes.0).sum()),
        kernel: read_text_file("/proc/sys/kernel/osrelease")
            .map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned()),
        vms: now.status.vms.len(),
    }
}

fn read(path: &Path) -> anyhow::Result<Report> {
    let text = read_text_file(path).map_err(bad_input)?;
    read::read(&text).map_err(|error| bad_input(format!("{}: {error}", path.display())))
}

/// Writes the files of a run. Each is replaced as a whole.
fn keep(directory: &Path, report: &Report) -> anyhow::Result<()> {
    let json = |report: &Report| {
        Ok::<_, anyhow::Error>(format!(
            "{:#}\n",
            document("evidence", serde_json::to_value(report)?)
        ))
    };
    let files = [
        (PAGE, page::page(report)),
        (SHARED, json(&report.clone().without_names())?),
        (REPORT, json(report)?),
    ];
    for (name, text) in files {
        let path = directory.join(name);
        let written = tempfile::NamedTempFile::new_in(directory).and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            // A new temporary file can be read by its owner only.
            file.as_file().set_permissions(Permissions::from_mode(0o644))?;
            file.as_file().sync_all()?;
            file.persist(&path)?;
            Ok(())
        });
        written.with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

fn show(report: &Report, is_json: bool) -> anyhow::Result<()> {
    if is_json {
        return print_json("evidence", report);
    }
    let row = |name: &str, effect: &Effect| {
        vec![
            name.to_owned(),
            format!("{:+.1} %", effect.percent),
            format!("{:+.1} to {:+.1} %", effect.low_percent, effect.high_percent),
            format!("{:.3}", effect.chance),
            effect.pairs.to_string(),
            if effect.is_claimed { "yes" } else { "no" }.to_owned(),
        ]
    };
    let Some(trial) = &report.crossover else {
        say!("the agent was not compared on and off");
        return Ok(());
    };
    let judged = &trial.judged;
    let all = judged.all.iter().map(|all| row("all together", all));
    let rows: Vec<_> = all
        .chain(judged.vms.iter().map(|(vm, effect)| row(vm, effect)))
        .collect();
    if !rows.is_empty() {
        say!(
            "{}",
            table(
                &[
                    "VM",
                    "speed while the agent acts",
                    "interval",
                    "chance",
                    "pairs",
                    "claimed"
                ],
                rows
            )
        );
    }
    if !judged.not_judged.is_empty() {
        say!(
            "not judged, as too few pairs of blocks have their speed: {}",
            OneLine(&judged.not_judged.join(", "))
        );
    }
    if !trial.is_complete() {
        say!(
            "not complete: {} of {} blocks",
            trial.blocks.len(),
            trial.plan.blocks.len()
        );
    }
    say!("{}", OneLine(&judged.verdict.to_string()));
    Ok(())
}

/// A running agent, and the VMs of a run.
struct Agent<'a> {
    state: &'a Path,
    /// Names by UUID.
    vms: BTreeMap<String, String>,
    /// The host's clock at the last look.
    seen: Ns,
}

impl Agent<'_> {
    fn names(&self) -> BTreeSet<String> {
        self.vms.values().cloned().collect()
    }

    /// Asks until there is an answer, as the agent may be restarting.
    fn overview(&self) -> anyhow::Result<Overview> {
        let mut silent = 0;
        loop {
            match ask_agent(self.state, &Request::Overview) {
                Ok(now) => return Ok(now),
                Err(error) if silent >= SILENT_MAX => return Err(error),
                Err(_) => silent += 1,
            }
            sleep(ASK_EVERY);
        }
    }
}

impl Subject for Agent<'_> {
    type Error = anyhow::Error;

    fn set(&mut self, acting: Acting, span: Ns) -> anyhow::Result<()> {
        let span_ns = Some(if acting == Acting::Acts { Ns::ZERO } else { span });
        let mut gone = Vec::new();
        for vm in self.vms.keys() {
            let request = Request::ModeSet {
                vm: vm.clone(),
                mode: Some(Mode::Observe),
                span_ns,
            };
            let set: anyhow::Result<answer::ModeSet> = ask_agent(self.state, &request);
            match set {
                Ok(_) => {}
                Err(error) if is_gone(&error) => gone.push(vm.clone()),
                Err(error) => return Err(error),
            }
        }
        for vm in gone {
            let name = self.vms.remove(&vm).unwrap_or_default();
            complain!("homenode: VM {name} has ended; what was measured of it counts");
        }
        anyhow::ensure!(!self.vms.is_empty(), "all VMs of this run have ended");
        Ok(())
    }

    fn look(&mut self) -> anyhow::Result<Look> {
        let mut now = self.overview()?;
        let mut old = 0;
        while now.status.at_ns == self.seen {
            anyhow::ensure!(
                old < OLD_MAX,
                "the agent has not sampled the host for ten minutes"
            );
            old += 1;
            sleep(ASK_EVERY);
            now = self.overview()?;
        }
        // A restarted host's clock begins again.
        let passed = now.status.at_ns.saturating_sub(self.seen);
        self.seen = now.status.at_ns;
        let named = |vm: &VmStatus| self.vms.get(&vm.id.to_string()).cloned();
        Ok(Look::of(passed, &now.status, named))
    }
}

fn is_gone(error: &anyhow::Error) -> bool {
    matches!(
        error.downcast_ref(),
        Some(AskError::Agent(ApiError::NoSuchVm { .. }))
    )
}
