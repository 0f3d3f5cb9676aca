//! The command line.

use std::fmt::Write as _;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::calibrate::{CalibrateArgs, KernelArgs};
use crate::doctor::DoctorArgs;
use crate::evidence::EvidenceArgs;
use crate::experiment::ExperimentArgs;
use crate::fleet::FleetCommand;
use crate::kernel_footprint::FootprintArgs;
use crate::list::ListArgs;
use crate::maintenance::{DrainArgs, PauseArgs};
use crate::memory::MemoryArgs;
use crate::numad::HookArgs;
use crate::options::ShowArgs;
use crate::permit::PermitArgs;
use crate::policy::PolicyArgs;
use crate::profile::ProfileArgs;
use crate::query::{MachineArgs, PlaceArgs, VmArgs};
use crate::recommend::{ModeArgs, RecommendArgs, ReservationsArgs};
use crate::record::RecordArgs;
use crate::replay::ReplayArgs;
use crate::report::ReportArgs;
use crate::reproduce::ReproduceArgs;
use crate::restore::{GuardArgs, ReleaseArgs};
use crate::run::RunArgs;
use crate::search::SearchArgs;
use crate::settings::ConfigArgs;
use crate::sim::SimArgs;
use crate::status::StatusArgs;
use crate::suggest;
use crate::sweep::{self, SweepArgs};
use crate::top::TopArgs;
use crate::whatif::WhatIfArgs;
use crate::why::WhyArgs;
use crate::wss::WssArgs;

/// Keeps virtual machines fast and predictable on NUMA hosts.
#[derive(Debug, Parser)]
#[command(name = "homenode", version, arg_required_else_help = true)]
#[command(after_help = "Examples:
  homenode run --host twin --fast         try it: a simulated four-node host
  homenode sim overcommit                 simulate a scenario
  homenode run --dry-run                  what the agent would do here
  homenode run                            the agent on this host; it recommends
  homenode run --mode act                 the agent on this host; it acts
  homenode machine                        nodes, CPUs, caches of this host
  homenode place --vcpus 4 --memory 8GiB  where would such a VM go, and why")]
pub(crate) struct Args {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands by purpose, as the program's help lists them.
const GROUPS: [(&str, &[&str]); 5] = [
    (
        "See",
        &[
            "status", "top", "why", "vm", "report", "evidence", "wss", "topology", "machine", "fleet",
            "doctor",
        ],
    ),
    (
        "Decide",
        &[
            "recommend",
            "mode",
            "pause",
            "drain",
            "place",
            "whatif",
            "reservations",
        ],
    ),
    ("Hold", &["permit", "memory", "memory-policy"]),
    (
        "Simulate",
        &[
            "sim",
            "list",
            "sweep",
            "search",
            "experiment",
            "reproduce",
            "replay",
            "profile",
            "calibrate",
            "kernel-footprint",
        ],
    ),
    (
        "Service",
        &["run", "config", "record", "release", "hook", "completions", "man"],
    ),
];

impl Args {
    /// Parses the process's command line.
    ///
    /// # Errors
    /// A bad command line, or a request for help or the version.
    pub(crate) fn of_process() -> Result<Args, clap::Error> {
        let all = Args::described();
        let improved = |error| {
            let args = std::env::args_os().skip(1);
            let args: Vec<String> = args.map(|arg| arg.to_string_lossy().into_owned()).collect();
            suggest::improve(error, &all, &args)
        };
        Args::from_arg_matches(&all.clone().try_get_matches().map_err(improved)?)
    }

    /// Returns the command line, with a help that lists commands by purpose and is wrapped only once.
    pub(crate) fn described() -> clap::Command {
        let all = with_whole_paragraphs(Args::command());
        let mut list = String::new();
        for (purpose, names) in GROUPS {
            let _ = writeln!(list, "{purpose}:");
            for name in names {
                let about = all.find_subcommand(name).and_then(clap::Command::get_about);
                let about = about.map(ToString::to_string).unwrap_or_default();
                let _ = writeln!(list, "  {name:17} {about}");
            }
            list.push('\n');
        }
        all.help_template(format!(
            "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n\n{list}Options:\n{{options}}{{after-help}}"
        ))
    }
}

/// Joins the lines of each paragraph below the options: clap wraps them to the terminal's width.
fn with_whole_paragraphs(command: clap::Command) -> clap::Command {
    let text = command
        .get_after_help()
        .map(|text| whole_paragraphs(&text.to_string()));
    let command = command.mut_subcommands(with_whole_paragraphs);
    match text {
        Some(text) => command.after_help(text),
        None => command,
    }
}

/// Joins consecutive lines, except for those that are indented, as examples are.
fn whole_paragraphs(text: &str) -> String {
    let mut joined = String::new();
    for line in text.lines() {
        if !joined.is_empty() {
            let begins = line.is_empty() || line.starts_with(' ') || joined.ends_with(['\n', ':']);
            joined.push(if begins { '\n' } else { ' ' });
        }
        joined.push_str(line);
    }
    joined
}

/// The commands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the agent: place VMs, and bring their memory to them
    Run(RunArgs),
    /// Simulate a scenario and show the results
    #[command(after_help = "Examples:
  homenode sim --list                          the scenarios that come with the program
  homenode sim tavo-mixed                      one of them, under the policies that it names
  homenode sim my.toml --seed 7 --json         a file; the same command gives the same bytes
  homenode sim my.toml --policy default --policy homenode
  homenode sim my.toml --policy default --policy 'exec:python3 mine.py'     a policy of your own (docs/POLICIES.md)
  homenode sim my.toml --machine amd48         the same VMs on another machine
  homenode sim gzip.toml                       a workload (`homenode profile` writes one), alone in a VM")]
    Sim(SimArgs),
    /// Search for the best decisions in a scenario
    #[command(
        after_help = "Runs the scenario under all policies, then tries schedules on copies of the twin: which VM has which home from when on,
within the agent's budgets for moving pages. A search knows the future, which no policy does, so some of the gap is luck.

Examples:
  homenode search tavo-mixed                                 300 evaluations, some minutes on one core
  homenode search my.toml --evaluations 1000 --jobs 8        more, and side by side: the number of jobs changes no result
  homenode search my.toml --seed 7 --json
  homenode search my.toml --policy 'exec:python3 mine.py'    a policy of your own beside the others
  homenode search my.toml --known my-known.toml              go on from what was found before, and keep what is better"
    )]
    Search(SearchArgs),
    /// List machines, workloads, scenarios or policies
    List(ListArgs),
    /// Show a host: nodes, CPUs, caches, distances, devices
    Machine(MachineArgs),
    /// Measure this host and write it as a machine file
    Calibrate(CalibrateArgs),
    /// Started by `calibrate --validate`: loads memory in a given pattern
    #[command(hide = true)]
    CalibrateKernel(KernelArgs),
    /// Run a program under emulation and write it as a workload
    #[command(after_help = "Examples:
  homenode profile -- gzip -9 -c FILE > FILE.gz       writes gzip.toml
  homenode sim gzip.toml --machine r420               runs it in a VM of the twin
  homenode profile --machine amd48 --rate 10% --output mine.toml -- ./server --once
  homenode profile --system -- qemu-system-x86_64 -nographic -kernel vmlinuz ...

The exit status is the program's own. It is 1 or 2 if `homenode` itself fails, and 128 plus the signal's number if a signal
ended the program.")]
    Profile(ProfileArgs),
    /// Measure how much memory a guest kernel needs for itself
    #[command(
        name = "kernel-footprint",
        alias = "epsilon",
        after_help = "Boots a guest with this kernel and one small program with less and less memory, until it no longer boots. The least that it
needs is the kernel's footprint (epsilon), to which the working set of programs is added. Guests run one at a time, and end
with this command.

Examples:
  homenode kernel-footprint --kernel /boot/vmlinuz-6.1.0-56-amd64
  homenode kernel-footprint --kernel vmlinuz --initrd initrd.img --json
  homenode kernel-footprint --kernel vmlinuz --as-published --step 5%      the paper's procedure, some sixty guests"
    )]
    KernelFootprint(FootprintArgs),
    /// Show what the agent does, what is in force, what is wrong
    #[command(after_help = crate::status::HELP)]
    Status(StatusArgs),
    /// Show nodes, links and VMs on one screen, now or earlier
    #[command(after_help = crate::top::help())]
    Top(TopArgs),
    /// Show many hosts on one screen
    #[command(subcommand)]
    Fleet(FleetCommand),
    /// Show where a new VM would go, and why
    Place(PlaceArgs),
    /// List the VMs that the agent manages
    Vm(VmArgs),
    /// Book how much a VM may pollute the caches
    #[command(
        after_help = "A permit is booked in LLC misses per slice of 30 ms of wall-clock time (`250k` is 250,000), or in memory
bandwidth (`500MB/s`). A VM that causes more loses processor time until it is back within its permit.

Examples:
  homenode permit suggest web          a permit for VM web, from its behaviour and from its size
  homenode permit set web 250k         book it; it is stored with the VM
  homenode permit set web none         take it back
  homenode permit                      permits, pollution now, VMs OVER theirs and the CPU they keep
  homenode permit usage web --json     used against booked, per hour"
    )]
    Permit(PermitArgs),
    /// Choose how a VM's memory is laid out over nodes
    #[command(
        name = "memory-policy",
        alias = "policy",
        after_help = "A memory policy says how a VM's pages are spread over its home nodes. `first-touch` puts a page near the CPU that touches it
first; `round-4k` spreads pages evenly. Adding `+carrefour` to either also moves hot pages to the nodes that use them. A VM
with one home node has all of its memory there, whatever its policy.

Examples:
  homenode memory-policy                              policy in force and pages per node, of all VMs
  homenode memory-policy set web round-4k             choose; it is stored with the VM
  homenode memory-policy set web first-touch+carrefour
  homenode memory-policy set web none                 leave the choice to the agent
  homenode memory-policy advise web                   which one suits it, from its behaviour"
    )]
    MemoryPolicy(PolicyArgs),
    /// Show how much memory a VM really uses
    #[command(
        after_help = "The working set is the memory that a VM used within a window of time; a longer window gives a larger one. The agent watches
a VM's memory only on request, with the best tracker that the host has (docs/WORKING_SET.md).

Examples:
  homenode wss web                      watch VM web for a window; show what it used, and how certain that is
  homenode wss web --window 5min        what it uses within five minutes
  homenode wss web --json               the same, as JSON
  homenode wss                          all VMs, with their last figures
  homenode wss --log guest.pages        no agent needed: from a log of a guest, written by the plugin"
    )]
    Wss(WssArgs),
    /// Let the agent take memory that VMs do not use
    #[command(
        after_help = "The agent sets the balloon of a VM with a memory floor so that the VM keeps its working set and a reserve, and never less
than the floor. Memory is taken only while a node is short of it, and is returned at once when the guest needs it. All of it
is returned when the floor is removed, or when the agent stops or dies.

Examples:
  homenode memory set web 2GiB         memory may be taken from VM web down to 2 GiB; that is stored with the VM
  homenode memory set web none         VM web keeps all of its memory
  homenode memory                      what each VM has and needs, and why"
    )]
    Memory(MemoryArgs),
    /// List what the agent recommends; approve or reject it
    #[command(after_help = crate::recommend::HELP)]
    Recommend(RecommendArgs),
    /// Set how far the agent may go with a VM
    #[command(after_help = crate::recommend::MODE_HELP)]
    Mode(ModeArgs),
    /// Empty nodes of VMs, and keep them empty
    #[command(after_help = crate::maintenance::DRAIN_HELP)]
    Drain(DrainArgs),
    /// Pause all changes for a while
    #[command(after_help = crate::maintenance::PAUSE_HELP)]
    Pause(PauseArgs),
    /// List or drop nodes reserved for VMs that do not run yet
    #[command(after_help = crate::recommend::RESERVATIONS_HELP, alias = "promises")]
    Reservations(ReservationsArgs),
    /// Show what guests were told about their nodes
    #[command(
        after_help = "If a guest has virtual nodes and a topology device, the agent informs it, while it runs, of which host nodes its vCPUs and
memory are on (docs/TOPOLOGY.md says what a guest needs).

Examples:
  homenode topology                    all VMs, one line each
  homenode topology web                what the guest of VM web was told, and when
  homenode topology web --json         the same, as JSON"
    )]
    Topology(ShowArgs),
    /// Predict how fast VMs would be with other home nodes
    #[command(
        name = "whatif",
        after_help = "Predicts, from what the agent has counted so far, how long each VM's work would take if the named VMs had these homes and
all others stayed where they are. Nothing is changed. 1.00 means as fast as without an agent; lower is faster. A home is a
node of the host (`0`), several (`0,1` or `0-2`), or none (`none`). The name of a VM may contain anything but white space.

Examples:
  homenode whatif                                    how fast all VMs are in their current homes
  homenode whatif 'web=0 db=1,2 batch=none'          three VMs elsewhere
  homenode whatif web=3 --json                       the same, as JSON
  homenode whatif 'cg=0 lu=1' --scenario tavo-mixed --at 20s
                                                     no agent: on a scenario that the agent has managed for 20 s"
    )]
    WhatIf(WhatIfArgs),
    /// Measure this host, and what the agent gains or costs its VMs
    #[command(after_help = crate::evidence::HELP)]
    Evidence(EvidenceArgs),
    /// Show what the agent's changes gained and cost each VM
    #[command(
        after_help = "A change of home is a trial: some seconds later the VM's speed is compared with its speed before, and a change that did not
pay is undone. The newest 64 trials of each VM are kept, for an hour after the VM is gone. A restart of the agent drops them.

Examples:
  homenode report                      all trials that are kept, and their sums
  homenode report --since 10min        those judged within the last ten minutes of the host's clock
  homenode report --json               the same, as JSON"
    )]
    Report(ReportArgs),
    /// Show, export and prune the agent's history
    #[command(
        after_help = "A running agent writes every period's measurements, every decision and every finding to a history, an SQLite database that
other programs can read, too (docs/HISTORY.md). The settings `[record]` say how much is kept.

Examples:
  homenode record                               the last decisions and findings
  homenode record show web --from 03:00 --to 03:30
  homenode record show --kind decided --json
  homenode record export --csv --from 1h > vms.csv
  homenode record export --parquet vms.parquet  the same rows, typed
  homenode record export --trace night.pftrace  lanes for Perfetto's viewer
  homenode record prune --older 7               delete what is older than 7 days"
    )]
    Record(RecordArgs),
    /// Replay recorded decisions, with the same or other settings
    #[command(
        after_help = "The history keeps samples of the host for a day (docs/HISTORY.md). A replay passes them through the agent's loop again. With
the same settings it makes exactly the same decisions; gaps in the recording are reported. With other settings it shows the
differences; each decision is still based on the recorded host, not on what the new decisions would have made of it.

Examples:
  homenode replay                                     the last run in this host's history
  homenode replay history.sqlite --policies tavo      what other policies would have decided
  homenode replay history.sqlite --config new.toml --json"
    )]
    Replay(ReplayArgs),
    /// Explain why a VM was slow
    #[command(
        after_help = "Compares the time around --at with the four times longer time before it, using samples that the history keeps for a day
(docs/HISTORY.md). Divides the lost speed among causes, the largest first, each with figures, the responsible VM or program,
and the agent's decisions at the time. A condition that was already present before is not counted as a cause.

Examples:
  homenode why web                            the last five minutes
  homenode why web --at 03:12                 last night
  homenode why web --at 20m --window 10m --json"
    )]
    Why(WhyArgs),
    /// Compare published results with simulated ones
    #[command(after_help = "Examples:
  homenode reproduce                        every claim; finished runs are kept, so it can be interrupted
  homenode reproduce tavo policies.imbalance --figures figures
  homenode reproduce TAVO --json --jobs 1")]
    Reproduce(ReproduceArgs),
    /// Run the experiment described in a file
    #[command(
        after_help = "A file says what is run (a grid of labels, each with its settings), what is computed from the runs, and how the
results are shown. docs/EXPERIMENTS.md explains the format, and data/experiments/example.toml is one to start from.
Finished runs are kept, so you can interrupt an experiment and continue it later. With --vary the whole experiment is
repeated for each factor, and the results are shown side by side.

Examples:
  homenode experiment mine.toml --jobs 4
  homenode experiment mine.toml --vary machine.controllers=0.5,2 --vary machine.hop=2
  homenode experiment mine.toml --csv > runs.csv               a row for each VM of each run
  homenode experiment mine.toml --json --figures figures"
    )]
    Experiment(ExperimentArgs),
    /// Run a scenario over ranges of values, seeds and policies
    #[command(after_help = sweep::EXAMPLES)]
    Sweep(Box<SweepArgs>),
    /// Check what the agent can do on this host
    Doctor(DoctorArgs),
    /// Check a settings file, or show all settings
    Config(ConfigArgs),
    /// Undo what a stopped agent left in force
    Release(ReleaseArgs),
    /// libvirt's hook: announces a VM that is about to start
    #[command(after_help = "Install it with one line:\n  \
        printf '#!/bin/sh\\nexec homenode hook \"$@\"\\n' > /etc/libvirt/hooks/qemu.d/homenode && chmod +x /etc/libvirt/hooks/qemu.d/homenode")]
    Hook(HookArgs),
    /// Started by the agent: undoes the agent's changes if it dies
    #[command(hide = true)]
    Guard(GuardArgs),
    /// Started by the agent: moves a Xen domain's memory
    #[command(hide = true)]
    MoveDomain,
    /// Started by `move-domain`: passes on the stream from xl
    #[command(hide = true)]
    MoveStream,
    /// Print shell completions
    Completions {
        /// Shell that the completions are for
        shell: clap_complete::Shell,
    },
    /// Print the manual page of the program or of a command
    Man {
        /// A command, as in `homenode man run`
        command: Option<String>,
        /// Write all pages into this directory instead: homenode.1, homenode-run.1 and so on
        #[arg(long, value_name = "DIR", conflicts_with = "command")]
        to: Option<std::path::PathBuf>,
    },
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use clap::builder::{ValueParser, ValueParserFactory as _};

    use super::*;
    use crate::options::{OutDir, OutFile};

    #[test]
    fn paragraphs_are_joined_and_examples_are_not() {
        let text = "One\ntwo.\n\nExamples:\n  a   b\n  c   d\n\nThree\nfour.";
        assert_eq!(
            whole_paragraphs(text),
            "One two.\n\nExamples:\n  a   b\n  c   d\n\nThree four."
        );
    }

    /// All commands below this one and the command itself, each with its name after its parents' names.
    fn commands(of: &clap::Command, parents: &[String]) -> Vec<(Vec<String>, clap::Command)> {
        let names = [parents, &[of.get_name().to_owned()]].concat();
        let below: Vec<_> = of
            .get_subcommands()
            .flat_map(|below| commands(below, &names))
            .collect();
        [vec![(names, of.clone())], below].concat()
    }

    #[test]
    fn no_command_begins_work_whose_result_it_cannot_write() {
        let all = Args::described();
        let file = ValueParser::new(OutFile::value_parser()).type_id();
        let directory = ValueParser::new(OutDir::value_parser()).type_id();
        let mut checked = Vec::new();
        for (names, command) in commands(&all, &[]) {
            for option in command.get_arguments() {
                let (kind, Some(long)) = (option.get_value_parser().type_id(), option.get_long()) else {
                    continue;
                };
                let help = option.get_help().map(ToString::to_string).unwrap_or_default();
                let is_output = ["Write", "Draw", "Where to write", "File for"]
                    .iter()
                    .any(|begin| help.starts_with(begin));
                let is_unchecked = kind == std::any::TypeId::of::<std::path::PathBuf>();
                // The commands with these options create missing directories themselves, before any work.
                let is_exempt = ["to", "history"].contains(&long);
                assert!(
                    !is_output || !is_unchecked || is_exempt,
                    "{names:?} --{long}: make it an OutFile or an OutDir"
                );
                let (path, why) = match kind {
                    kind if kind == file => (
                        "/nonexistent/x.toml",
                        "the directory of this file does not exist; create it first",
                    ),
                    kind if kind == directory => ("/dev/null/x", "this directory cannot be created"),
                    _ => continue,
                };
                let args = names
                    .iter()
                    .cloned()
                    .chain([format!("--{long}"), path.to_owned()]);
                let error = all.clone().try_get_matches_from(args).unwrap_err();
                let said = error.render().to_string();
                assert_eq!(
                    error.kind(),
                    clap::error::ErrorKind::ValueValidation,
                    "{names:?} --{long}: {said}"
                );
                assert!(
                    said.contains(why) && said.contains(&format!("--{long}")),
                    "{said}"
                );
                checked.push(format!("{} --{long}", names[1..].join(" ")));
            }
        }
        for known in [
            "sim --trace",
            "run --trace",
            "profile --output",
            "calibrate --output",
            "experiment --parquet",
            "reproduce --document",
            "reproduce --figures",
            "record export --parquet",
            "record scenario --output",
            "search --known",
            "sweep merge --parquet",
        ] {
            assert!(checked.iter().any(|one| one == known), "{known}: {checked:?}");
        }
    }

    #[test]
    fn the_help_lists_each_command_once_on_a_line_of_80_columns() {
        let all = Args::command();
        let shown = all.get_subcommands().filter(|command| !command.is_hide_set());
        let shown: BTreeSet<&str> = shown.map(clap::Command::get_name).collect();
        let grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        assert_eq!(grouped.iter().copied().collect::<BTreeSet<_>>(), shown);
        assert_eq!(grouped.len(), shown.len());
        let help = Args::described().render_help().to_string();
        let wide: Vec<&str> = help.lines().filter(|line| line.chars().count() > 80).collect();
        assert!(wide.is_empty(), "{wide:?}");
    }
}
