//! `homenode evidence`: what this host can do, what the agent relies on, and what the agent gains or costs here.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use clap::Subcommand;
use homenode_evidence::report::HostFacts;
use homenode_evidence::{Report, Topic};
use homenode_machine::Machine;
use homenode_machine_files::file::read_text_file;
use homenode_machine_files::sysfs;
use homenode_units::Bytes;

use crate::bad_input;
use crate::options::{AgentArgs, OutDir};

use self::beside::busy_vms;
use self::files::{REPORT, read_report};
use self::sections::{Part, Sections};
use self::show::{ShowArgs, show};
use self::tried::{Crossover, Tried};

mod beside;
mod files;
mod hardware;
mod permits;
mod sections;
mod show;
mod trial;
mod tried;

/// The end of the command's help.
pub(crate) const HELP: &str =
    "Sections measure the host itself, with programs and VMs of this command that end with it, and change no setting; --list
shows them. What cannot be measured here is reported with its reason.

In the crossover the agent acts on the VMs and only observes them in turn, in short blocks whose order a coin decides; speeds of
neighbouring blocks are compared. While it observes, limits are lifted and homes released. Nothing else is changed or stored, and
whatever ends this command, the VMs have their own modes again within a minute. The agent must be in mode `act` for them. On a
host without VMs the command starts some of its own, which end with it.

DIR gets evidence.html (a page that needs nothing else), evidence.json, and to-share.tar.gz, which has both without what names
your host and VMs. The same command with the same DIR continues a run that was interrupted.

Examples:
  homenode evidence -o trial                       everything that can be measured here
  homenode evidence --only machine,contention --minutes 10 -o host
  homenode evidence --vms 'web*' --minutes 90 -o trial
  homenode evidence show trial/evidence.json       the result again";

const COMMIT: &str = env!("HOMENODE_COMMIT");
const VERSION: &str = env!("CARGO_PKG_VERSION");
/// The usual length of all sections.
const SECTIONS: Duration = Duration::from_secs(20 * 60);
/// The share of a run with a crossover that sections get: nine minutes of an hour.
const SECTIONS_SHARE: f64 = 0.15;

/// Options of `evidence`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct EvidenceArgs {
    #[command(subcommand)]
    pub command: Option<EvidenceCommand>,
    /// Length of the run, in minutes [default: 20 for all sections, and an hour or more for the crossover]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=1440))]
    pub minutes: Option<u64>,
    /// Only these parts, such as `machine,contention` [default: all; with --vms, the crossover]
    #[arg(long, value_name = "PART", value_delimiter = ',')]
    pub only: Vec<Part>,
    /// List the parts of a run
    #[arg(long)]
    pub list: bool,
    /// Measure although VMs are busy, which disturb it and are disturbed
    #[arg(long)]
    pub beside_others: bool,
    /// Kernel image that VMs of this command boot [default: this host's own in /boot]
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// In the crossover, only VMs whose names match, such as `web*`; may be given several times [default: all on which the
    /// agent acts]
    #[arg(long = "vms", value_name = "PATTERN")]
    pub vms: Vec<String>,
    /// Seed of the coin that orders the blocks [default: another one each time]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Directory for the results
    #[arg(short, long = "output", value_name = "DIR", required_unless_present = "list")]
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

/// `homenode evidence`.
///
/// # Errors
/// A crossover that was asked for and cannot be; busy VMs; files that cannot be read or written.
pub(crate) fn run(args: &EvidenceArgs) -> anyhow::Result<()> {
    if let Some(EvidenceCommand::Show(args)) = &args.command {
        return show(&read_report(&args.file)?, args.shown.json);
    }
    if args.list {
        sections::list();
        return Ok(());
    }
    let directory = args.output.as_ref().context("-o is required")?.create()?;
    let (topics, crossover) = parts(args);
    let before = match directory.join(REPORT).exists() {
        true => Some(read_report(&directory.join(REPORT))?),
        false => None,
    };
    let (machine, is_begun) = (sysfs::read_confined(Path::new("/"))?, before.is_some());
    let mut report = before.unwrap_or_else(|| Report::begun(VERSION, COMMIT, facts(&machine)));
    let mut tried = Tried::of(args, &machine, &topics, crossover, &report, directory)?;
    let time = sections_time(args, !matches!(tried, Tried::None));
    let sections = Sections::of(&topics, time, &report);
    if sections.is_empty() && tried.is_complete(&report) {
        complain!(
            "homenode: {} is complete; choose another -o for another run",
            directory.join(REPORT).display()
        );
        return show(&report, args.agent.json());
    }
    report.host.vms = tried.vms().unwrap_or(report.host.vms);
    if !sections.is_empty() {
        refuse_busy(args)?;
    }
    if !args.agent.json() {
        if is_begun {
            say!("continuing {}", directory.join(REPORT).display());
        }
        if !sections.is_empty() {
            sections.announce();
        }
        tried.announce();
    }
    let measured = sections
        .run(args, &machine, &mut report, directory)
        .and_then(|()| tried.run(&mut report, directory));
    measured.context("finished sections and blocks are kept, and the same command continues")?;
    show(&report, args.agent.json())
}

/// Returns what a run consists of.
fn parts(args: &EvidenceArgs) -> (Vec<Topic>, Crossover) {
    match (args.only.as_slice(), args.vms.is_empty()) {
        ([], true) => (Topic::ALL.into(), Crossover::IfPossible),
        ([], false) => (Vec::new(), Crossover::Asked),
        (only, _) => {
            let topics = Topic::ALL
                .into_iter()
                .filter(|topic| only.contains(&Part::Section(*topic)));
            let crossover = match only.contains(&Part::Crossover) {
                true => Crossover::Asked,
                false => Crossover::No,
            };
            (topics.collect(), crossover)
        }
    }
}

fn sections_time(args: &EvidenceArgs, has_crossover: bool) -> Duration {
    let share = if has_crossover { SECTIONS_SHARE } else { 1.0 };
    match args.minutes {
        Some(minutes) => Duration::from_secs(60 * minutes).mul_f64(share),
        None => SECTIONS,
    }
}

/// # Errors
/// A VM is busy, and the user did not allow that.
fn refuse_busy(args: &EvidenceArgs) -> anyhow::Result<()> {
    if args.beside_others {
        return Ok(());
    }
    let busy = busy_vms(Path::new("/"));
    let Some(most) = busy.iter().max_by(|a, b| a.cpus.total_cmp(&b.cpus)) else {
        return Ok(());
    };
    Err(bad_input(format!(
        "{} VMs are busy here, such as process {} with {:.0} percent of a CPU: they would disturb what is measured, and \
             be disturbed; \
         stop them, choose only the crossover (--only crossover), or give --beside-others",
        busy.len(),
        most.pid,
        100.0 * most.cpus
    )))
}

/// Describes the host. The number of VMs is that which the agent sees.
fn facts(machine: &Machine) -> HostFacts {
    let (hardware, cpu_model) = hardware::hardware();
    HostFacts {
        hardware,
        cpu_model,
        nodes: machine.nodes.len(),
        cpus: machine.cpus.len(),
        memory_bytes: Bytes(machine.nodes.iter().map(|(_, node)| node.memory_bytes.0).sum()),
        kernel: read_text_file("/proc/sys/kernel/osrelease")
            .map_or_else(|_| "?".to_owned(), |text| text.trim().to_owned()),
        vms: 0,
    }
}
