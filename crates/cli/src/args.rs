//! What can be said on the command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use homenode_agent::managed::Managed;
use homenode_api::http::Listen;
use homenode_control::{Mode, PolicySet};
use homenode_search::program::EXEC;
use homenode_units::{BytesPerSec, MemoryPolicy, Ns, Permit};

use crate::calibrate::{CalibrateArgs, KernelArgs};
use crate::doctor::DoctorArgs;
use crate::experiment::ExperimentArgs;
use crate::fleet::FleetCommand;
use crate::kernel_footprint::FootprintArgs;
use crate::maintenance::{DrainArgs, PauseArgs};
use crate::options::{AgentArgs, OrNone, ShownArgs, Size, StateArgs, TwinKernelArgs};
use crate::page_log::LogArgs;
use crate::profile::ProfileArgs;
use crate::recommend::{ModeArgs, PromisesArgs, RecommendArgs};
use crate::record::RecordCommand;
use crate::replay::ReplayArgs;
use crate::reproduce::ReproduceArgs;
use crate::search::SearchArgs;
use crate::settings::ConfigCommand;
use crate::sim::SimArgs;
use crate::sweep::{self, SweepArgs};
use crate::top::TopArgs;
use crate::why::WhyArgs;

/// Keeps virtual machines fast and predictable on NUMA hosts.
#[derive(Debug, Parser)]
#[command(name = "homenode", version, arg_required_else_help = true)]
#[command(after_help = "Examples:
  homenode run                            the agent on this host
  homenode run --host twin --fast         try it: a simulated four-node host with seven VMs
  homenode sim overcommit                 simulate a scenario and show what came of it
  homenode run --host libvirt --dry-run   what it would do here, without doing it
  homenode machine                        nodes, CPUs, caches, distances of this host
  homenode place --vcpus 4 --memory 8GiB  where would such a VM go, and why")]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent: watch, place, schedule and bring home VMs
    Run(RunArgs),
    /// Simulate a scenario to its end and show what came of it
    #[command(after_help = "Examples:
  homenode sim --list                          the scenarios that come with the program
  homenode sim tavo-mixed                      one of them, under the policies that it names
  homenode sim my.toml --seed 7 --json         a file; the same command gives the same bytes
  homenode sim my.toml --policy default --policy homenode
  homenode sim my.toml --policy default --policy 'exec:python3 mine.py'     a policy of your own (docs/POLICIES.md)
  homenode sim my.toml --machine amd48         the same VMs on another machine
  homenode sim gzip.toml                       a workload (`homenode profile` writes one), alone in a VM")]
    Sim(SimArgs),
    /// Search for the best decisions that are possible in a scenario, and say how far policies are from them
    #[command(
        after_help = "Runs the scenario under all policies, then tries schedules on copies of the twin: which VM is where from when on, acted
on from the agent's first sample, within its budgets of pages. It knows the future; no policy does, so some of the gap is luck.

Examples:
  homenode search tavo-mixed                                 300 evaluations, some minutes on one core
  homenode search my.toml --evaluations 1000 --jobs 8        more, and side by side: the number of jobs changes no result
  homenode search my.toml --seed 7 --json
  homenode search my.toml --policy 'exec:python3 mine.py'    a policy of your own beside the others
  homenode search my.toml --known my-known.toml              go on from what was found before, and keep what is better"
    )]
    Search(SearchArgs),
    /// Show a host: nodes, CPUs, caches, distances, devices
    Machine(MachineArgs),
    /// Measure this host and write it as a machine file for the twin
    Calibrate(CalibrateArgs),
    /// Started by `calibrate --validate`: loads memory as it is told
    #[command(hide = true)]
    CalibrateKernel(KernelArgs),
    /// Run a program under emulation and write what it does to caches as a workload for the twin
    #[command(after_help = "Examples:
  homenode profile -- gzip -9 -c FILE > FILE.gz       writes gzip.toml
  homenode sim gzip.toml --machine r420               runs it in a VM of the twin
  homenode profile --machine amd48 --rate 10% --output mine.toml -- ./server --once
  homenode profile --system -- qemu-system-x86_64 -nographic -kernel vmlinuz ...

The exit status is the program's. It is 1 or 2 where there is a complaint, 128 and its number where a signal ended the program.")]
    Profile(ProfileArgs),
    /// Find out how much memory a guest kernel takes for itself
    #[command(
        name = "kernel-footprint",
        alias = "epsilon",
        after_help = "A guest with this kernel and one small program boots with ever less memory until it does not. What it needs at least is
the kernel's footprint, epsilon, which a working set of programs is added to. Guests run one at a time, and end with this command.

Examples:
  homenode kernel-footprint --kernel /boot/vmlinuz-6.1.0-56-amd64
  homenode kernel-footprint --kernel vmlinuz --initrd initrd.img --json
  homenode kernel-footprint --kernel vmlinuz --as-published --step 5%      the paper's procedure, some sixty guests"
    )]
    KernelFootprint(FootprintArgs),
    /// Show nodes, links and VMs on one page, as they are or as they were
    #[command(after_help = crate::top::help())]
    Top(TopArgs),
    /// Show many hosts on one page
    #[command(subcommand)]
    Fleet(FleetCommand),
    /// Ask where a VM would go, and why
    Place(PlaceArgs),
    /// Show the VMs that the running agent manages
    Vm(VmArgs),
    /// Book how much a VM may pollute the caches, and see how it keeps that
    #[command(
        subcommand,
        after_help = "A permit is booked in LLC misses per slice of 30 ms of wall-clock time (`250k` is 250,000), or in memory
bandwidth (`500MB/s`). A VM that causes more loses processor time until it is back within its permit.

Examples:
  homenode permit suggest web          what VM web might book, by what it does and by its size
  homenode permit set web 250k         book it; the VM's metadata keeps it, over restarts and migration
  homenode permit set web none         take it back
  homenode permit show                 permits, pollution now, who is OVER and how much CPU that leaves him
  homenode permit bill web --json      used against booked, per hour"
    )]
    Permit(PermitCommand),
    /// Choose how VMs' memory is laid out over nodes, and see how it lies
    #[command(
        name = "memory-policy",
        alias = "policy",
        subcommand,
        after_help = "A memory policy says where pages of a VM go, over its home nodes: `first-touch`, near the CPU that touches a page
first; `round-4k`, spread evenly; and `+carrefour` after either, where hot pages follow their users. A VM with one home node
has its memory there whatever its policy.

Examples:
  homenode memory-policy show                         policy in force and pages per node, of all VMs
  homenode memory-policy set web round-4k             choose; the VM's metadata keeps it, over restarts and migration
  homenode memory-policy set web first-touch+carrefour
  homenode memory-policy set web none                 leave the choice to the agent
  homenode memory-policy advise web                   which would suit it, by what it does"
    )]
    MemoryPolicy(PolicyCommand),
    /// Ask how much memory a VM really uses
    #[command(
        after_help = "The working set is what a VM used within a window of time; a longer window gives a larger one. The agent watches the
VM's memory only while somebody asks, by the best means that the host has (docs/WORKING_SET.md).

Examples:
  homenode wss web                      watch VM web for a window, and say what it used, how sure that is, and what it is not
  homenode wss web --window 5min        what it uses within five minutes
  homenode wss web --json               the same for programs
  homenode wss                          all VMs, with their last figures
  homenode wss --log guest.pages        no agent: from a log that the emulator's plugin wrote of a guest"
    )]
    Wss(WssArgs),
    /// Let memory be taken from VMs that do not use it, and see who has how much
    #[command(
        subcommand,
        after_help = "A VM with a memory floor has, by its balloon, what its working set needs and a reserve, never less than the floor,
and gets memory back at once when its guest is short of it. Memory is taken while a node lacks some. All of it comes back
when the floor is removed or the agent stops or dies.

Examples:
  homenode memory set web 2GiB         memory may be taken from VM web down to 2 GiB; its metadata keeps that
  homenode memory set web none         it keeps all of its memory
  homenode memory show                 who has how much, needs how much, and why"
    )]
    Memory(MemoryCommand),
    /// See what the agent would do and waits for, and say yes or no to it
    #[command(after_help = crate::recommend::HELP)]
    Recommend(RecommendArgs),
    /// Say how far the agent may go with a VM: observe it, recommend, or act
    #[command(after_help = crate::recommend::MODE_HELP)]
    Mode(ModeArgs),
    /// Empty nodes of VMs, and keep them empty
    #[command(after_help = crate::maintenance::DRAIN_HELP)]
    Drain(DrainArgs),
    /// Change nothing for a while
    #[command(after_help = crate::maintenance::PAUSE_HELP)]
    Pause(PauseArgs),
    /// See nodes that are promised to VMs which do not run yet, and take promises back
    #[command(after_help = crate::recommend::PROMISES_HELP)]
    Promises(PromisesArgs),
    /// See what VMs' guests are told of where they are, and since when
    #[command(
        after_help = "A guest with virtual nodes and a topology device is told, live, on which of the host's nodes its vCPUs and its memory
are, and follows (docs/TOPOLOGY.md says what it needs).

Examples:
  homenode topology                    all VMs, in a line each
  homenode topology web                what the guest of VM web is told, since when, and what it concludes
  homenode topology web --json         the same for programs"
    )]
    Topology(ShowArgs),
    /// Ask how fast VMs would be with other homes
    #[command(
        name = "whatif",
        after_help = "Predicts, from what the agent has counted so far, how long the work of every VM takes if those that are named had these
homes and all others stayed where they are. Nothing is changed. 1.00 is as without an agent, less is faster. A home is a
node of the host (`0`), several (`0,1` or `0-2`), or none (`free`). The names of VMs may hold anything but white space.

Examples:
  homenode whatif                                    how all VMs are where they are now
  homenode whatif 'web=0 db=1,2 batch=free'          three VMs elsewhere
  homenode whatif web=3 --json                       the same for programs
  homenode whatif 'cg=0 lu=1' --scenario tavo-mixed --at 20s
                                                     no agent: on a scenario that the agent has managed for 20 s"
    )]
    WhatIf(WhatIfArgs),
    /// Show what the agent's changes gained and cost each VM
    #[command(
        after_help = "A change of home is a trial: some seconds later the VM's speed is held against its speed before, and what did not pay is
undone. The newest 64 trials of each VM are remembered, of a VM that is gone for an hour, and none over a restart of the
agent.

Examples:
  homenode report                      all trials that are remembered, and their sums
  homenode report --since 10min        those judged within the last ten minutes of the host's clock
  homenode report --json               the same for programs"
    )]
    Report(ReportArgs),
    /// What the agent saw and decided, as it is kept on disk
    #[command(subcommand)]
    #[command(
        after_help = "A running agent writes every period, decision and finding to a history, an SQLite database that other programs open as well
(docs/HISTORY.md). The settings `[record]` say how much is kept.

Examples:
  homenode record show                          the last decisions and findings
  homenode record show web --from 03:00 --to 03:30
  homenode record show --kind decided --json
  homenode record export --csv --from 1h > vms.csv
  homenode record export --parquet vms.parquet  the same rows, typed
  homenode record export --trace night.pftrace  lanes for Perfetto's viewer
  homenode record prune --older 7               drop what is older than a week"
    )]
    Record(RecordCommand),
    /// Decide a recorded run anew, and see where other settings decide otherwise
    #[command(
        after_help = "What a host said is in the history for a day (docs/HISTORY.md). It is put through the agent's loop once more: under the
settings of then the same is decided to the last letter, and what is missing of the recording is said. Under other settings
differences are shown; what follows the first of them is decided of the host as it was, not as it would have been.

Examples:
  homenode replay                                     the last run in this host's history
  homenode replay history.sqlite --policies tavo      what other policies would have decided
  homenode replay history.sqlite --config new.toml --json"
    )]
    Replay(ReplayArgs),
    /// Say why a VM was slow: what changed, by how much, and who changed it
    #[command(
        after_help = "The stretch around --at is compared with four times as long before it, from samples in the history, which are kept
for a day (docs/HISTORY.md). The speed that was lost is divided among causes, the largest first, each with figures, with who
brought it about and with what was decided then. What was so all the time is no cause.

Examples:
  homenode why web                            the last five minutes
  homenode why web --at 03:12                 last night
  homenode why web --at 20m --window 10m --json"
    )]
    Why(WhyArgs),
    /// Compare published results, and claims of our own, with what the twin gives
    #[command(after_help = "Examples:
  homenode reproduce                        every claim; finished runs are kept, so it can be interrupted
  homenode reproduce tavo policies.imbalance --figures figures
  homenode reproduce TAVO --json --jobs 1")]
    Reproduce(ReproduceArgs),
    /// Make an experiment that a file describes: runs of the twin, what is computed of them, tests, tables, figures
    #[command(
        after_help = "A file says what is run (a grid of labels, each with its settings), what is computed of it, and how
that is shown. docs/EXPERIMENTS.md explains the format, and data/experiments/example.toml is one to
start from. Finished runs are kept, so it can be interrupted. With --vary it is made once more for
each factor, and the results stand side by side.

Examples:
  homenode experiment mine.toml --jobs 4
  homenode experiment mine.toml --vary machine.controllers=0.5,2 --vary machine.hop=2
  homenode experiment mine.toml --csv > runs.csv               a row for each VM of each run
  homenode experiment mine.toml --json --figures figures"
    )]
    Experiment(ExperimentArgs),
    /// Run a scenario over values of its keys, seeds and policies, and show means with confidence intervals
    #[command(after_help = sweep::EXAMPLES)]
    Sweep(Box<SweepArgs>),
    /// Say what this host has for all that the agent can do, what it lacks, and how to get it
    Doctor(DoctorArgs),
    /// Check a file of settings, or show all settings
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Give back what an agent that is gone left in force (pins, memory nodes)
    Release(ReleaseArgs),
    /// libvirt's hook: tells the agent which VM is about to start
    #[command(after_help = "Install it with one line:\n  \
        printf '#!/bin/sh\\nexec homenode hook \"$@\"\\n' > /etc/libvirt/hooks/qemu.d/homenode && chmod +x /etc/libvirt/hooks/qemu.d/homenode")]
    Hook(HookArgs),
    /// Started by the agent: lifts what the agent set, should the agent die
    #[command(hide = true)]
    Guard(GuardArgs),
    /// Started by the agent: moves a Xen domain's memory
    #[command(hide = true)]
    MoveDomain,
    /// Started by `move-domain`: passes on what xl sends
    #[command(hide = true)]
    MoveStream,
    /// Print shell completions
    Completions {
        /// For which shell.
        shell: clap_complete::Shell,
    },
    /// Print the manual page of the program, or of one of its commands
    Man {
        /// A command, as in `homenode man run`
        command: Option<String>,
        /// Write all pages into this directory instead: homenode.1, homenode-run.1 and so on
        #[arg(long, value_name = "DIR", conflicts_with = "command")]
        to: Option<std::path::PathBuf>,
    },
}

/// Which host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostArg {
    /// The simulated host: a preset's name, or a scenario file.
    Twin(Option<String>),
    /// This one.
    Live(Managed),
}

impl std::str::FromStr for HostArg {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, rest) = text
            .split_once(':')
            .map_or((text, None), |(kind, rest)| (kind, Some(rest.to_owned())));
        if rest.as_deref() == Some("") {
            return Err(format!("nothing follows the colon in `{text}`"));
        }
        match kind {
            "twin" => Ok(HostArg::Twin(rest)),
            _ => text.parse().map(HostArg::Live).map_err(|_| {
                "a host is `twin`, `twin:MACHINE`, `twin:SCENARIO.toml`, `libvirt`, `libvirt:URI`, `qemu` or `xen`".into()
            }),
        }
    }
}

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// `twin[:NAME|:FILE.toml]` (a scenario or a machine), `libvirt[:URI]`, `qemu` (VMs that no libvirt manages:
    /// Proxmox, Incus, KubeVirt's pods, plain QEMU) or `xen` (all domains, from dom0); default: `xen` in dom0, else libvirt if it
    /// answers, else `qemu` if such VMs run, else the twin, but never as root, as a service or without a terminal
    #[arg(long, value_name = "HOST")]
    pub host: Option<HostArg>,
    /// Plan and explain, and touch nothing: the same as `--mode observe`
    #[arg(long, conflicts_with = "mode")]
    pub dry_run: bool,
    /// How far decisions go: `observe` (they are told, and nothing is touched), `recommend` (they wait for `homenode recommend
    /// apply`) or `act`; default: what the configuration file says, else `act`
    #[arg(long)]
    pub mode: Option<Mode>,
    /// On Xen, read the hypervisor's trace to know how long vCPUs wait for a CPU; it is one host-wide trace, which nobody else
    /// can use meanwhile
    #[arg(long)]
    pub trace_waiting: bool,
    /// Stop after this much of the host's time, such as `60s`; default: until Ctrl-C, or until the scenario is done
    #[arg(long)]
    pub duration: Option<Ns>,
    #[command(flatten)]
    pub shown: ShownArgs,
    /// Configuration file (TOML); default: /etc/homenode/homenode.toml where it is there, and none on a twin
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Time between samples, such as `1s`
    #[arg(long)]
    pub period: Option<Ns>,
    /// Which policies act: `default` (none), `ff-pin`, `numad`, `memory`, `tavo` or `homenode`
    #[arg(long, value_parser = of_host)]
    pub policies: Option<PolicySet>,
    /// The twin's seed: same seed, same run
    #[arg(long)]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub kernel: TwinKernelArgs,
    /// Do not wait between the twin's simulated seconds
    #[arg(long)]
    pub fast: bool,
    /// Where the journal and the agent's socket are; default: /run/homenode, and no socket for a twin
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// Where what happens is recorded; default: /var/lib/homenode/history.sqlite, or in --state's directory, and nowhere for a
    /// twin or with --dry-run
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Answer HTTP here, such as `127.0.0.1:9464` (port 0: any that is free): metrics, and JSON below /v1. Elsewhere than on
    /// loopback only with --web-config
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<Listen>,
    /// Serve the page for browsers (docs/PAGE.md): where --listen says, else at 127.0.0.1:9464, or at a free port where that one
    /// is taken. Where no history is kept, one is until the run ends
    #[arg(long)]
    pub web: bool,
    /// TLS and passwords for --listen, in the format of Prometheus' exporters (docs/API.md)
    #[arg(long, value_name = "FILE")]
    pub web_config: Option<String>,
    /// Write what happens as a trace for Perfetto's viewer (docs/HISTORY.md)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Leave pins and homes as they are when the agent stops in good order, for the next agent to continue; limits are lifted
    #[arg(long)]
    pub keep: bool,
}

/// Options of `machine`.
#[derive(Debug, clap::Args)]
pub struct MachineArgs {
    /// Show the machine of this file instead (`homenode calibrate --output` writes one)
    #[arg(value_name = "FILE", conflicts_with_all = ["sysfs", "preset"])]
    pub file: Option<PathBuf>,
    /// Read the `sys` and `proc` trees below this directory
    #[arg(long, value_name = "ROOT", default_value = "/", conflicts_with = "preset")]
    pub sysfs: PathBuf,
    /// Show a machine that comes with the program instead (a published experiment's host)
    #[arg(long, value_name = "NAME")]
    pub preset: Option<String>,
    #[command(flatten)]
    pub shown: ShownArgs,
}

/// Options of `place`.
#[derive(Debug, clap::Args)]
pub struct PlaceArgs {
    /// vCPUs of the VM
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=8192))]
    pub vcpus: u32,
    /// Its memory, such as `8GiB` or `8G`; a number alone is MiB
    #[arg(long)]
    pub memory: Size,
    /// The memory bandwidth that it needs, such as `2GB/s`
    #[arg(long)]
    pub bandwidth: Option<BytesPerSec>,
    /// All its memory lies in huge pages of this size, such as `2MiB` or `1GiB`: only free ones count; a number alone is MiB
    #[arg(long, value_name = "SIZE")]
    pub huge_pages: Option<Size>,
    /// Print two lines for xl's file of the VM, `cpus` and `cpus_soft`: together they decide where Xen takes its memory from
    #[arg(long, conflicts_with = "json")]
    pub xl: bool,
    /// Ask about another host: `twin:MACHINE` is the idle machine of that name; default: the running agent, else this host
    #[arg(long, value_name = "HOST")]
    pub host: Option<HostArg>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `vm`.
#[derive(Debug, clap::Args)]
pub struct VmArgs {
    /// Only this VM
    pub name: Option<String>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// What to do about permits.
#[derive(Debug, Subcommand)]
pub enum PermitCommand {
    /// Book a permit for a VM, or take it back
    #[command(
        after_help = "Examples:\n  homenode permit set web 250k\n  homenode permit set web 500MB/s\n  homenode permit set web none"
    )]
    Set(SetArgs),
    /// Show permits and how they are kept
    Show(ShowArgs),
    /// Say what a VM might book, by its recorded behaviour and by its memory
    Suggest(SuggestArgs),
    /// Show what was used of what was booked, per VM and hour
    Bill(BillArgs),
}

/// A policy that is a program may hang, and is no part of what undoes its changes: it acts on no host's VMs.
fn of_host(text: &str) -> Result<PolicySet, String> {
    match text.starts_with(EXEC) {
        true => Err(format!(
            "a policy that is a program decides on the twin alone: `homenode sim SCENARIO --policy '{text}'`; \
             `homenode record scenario` makes a scenario of a host's recording"
        )),
        false => text.parse(),
    }
}

/// What to do about memory policies.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Choose a VM's memory policy, or leave the choice to the agent
    #[command(
        after_help = "Examples:\n  homenode memory-policy set web first-touch\n  homenode memory-policy set web round-4k+carrefour\n  homenode memory-policy set web none"
    )]
    Set(PolicySetArgs),
    /// Show memory policies, and how pages lie
    Show(ShowArgs),
    /// Say which memory policy would suit a VM, by what it does
    Advise(SuggestArgs),
}

/// What to do about VMs' memory.
#[derive(Debug, Subcommand)]
pub enum MemoryCommand {
    /// Say how little memory a VM may be left with, or that it keeps all
    #[command(after_help = "Examples:\n  homenode memory set web 2GiB\n  homenode memory set web none")]
    Set(FloorArgs),
    /// Show who has how much memory, and why
    Show(ShowArgs),
}

/// Options of `memory set`.
#[derive(Debug, clap::Args)]
pub struct FloorArgs {
    /// The VM's name
    pub vm: String,
    /// Memory below which it is never taken (`2GiB`, `2G`; a number alone is MiB), or `none`
    pub floor: OrNone<Size>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `memory-policy set`.
#[derive(Debug, clap::Args)]
pub struct PolicySetArgs {
    /// The VM's name
    pub vm: String,
    /// `first-touch`, `round-4k`, either with `+carrefour`, or `none`
    pub policy: OrNone<MemoryPolicy>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `permit set`.
#[derive(Debug, clap::Args)]
pub struct SetArgs {
    /// The VM's name
    pub vm: String,
    /// LLC misses per slice of 30 ms (`250k`), memory bandwidth (`500MB/s`), or `none`
    #[arg(allow_hyphen_values = true)]
    pub permit: OrNone<Permit>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `permit show`, `memory-policy show`, `memory show` and `topology`.
#[derive(Debug, clap::Args)]
pub struct ShowArgs {
    /// Only this VM
    pub vm: Option<String>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `permit suggest` and `memory-policy advise`.
#[derive(Debug, clap::Args)]
pub struct SuggestArgs {
    /// The VM's name
    pub vm: String,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `wss`.
#[derive(Debug, clap::Args)]
pub struct WssArgs {
    /// The VM's name; without it, all VMs with their last figures
    #[arg(conflicts_with = "log")]
    pub vm: Option<String>,
    /// Instead of a VM: a log of pages that the emulator's plugin wrote (`pages=FILE`)
    #[arg(long, value_name = "FILE", conflicts_with = "window")]
    pub log: Option<PathBuf>,
    #[command(flatten)]
    pub of_log: LogArgs,
    /// Over which time [default: the agent's, 30s unless configured]
    #[arg(long, value_name = "TIME")]
    pub window: Option<Ns>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `whatif`.
#[derive(Debug, clap::Args)]
pub struct WhatIfArgs {
    /// Homes, such as `web=0 db=1,2 batch=free`; VMs that are not named stay where they are
    #[arg(value_name = "VM=NODES")]
    pub homes: Vec<String>,
    /// Ask on the twin instead of the running agent: a scenario file, or the name of a scenario that comes with the program
    #[arg(long, value_name = "SCENARIO", conflicts_with = "state")]
    pub scenario: Option<String>,
    /// How long the agent manages the scenario before it is asked
    #[arg(
        long,
        value_name = "TIME",
        default_value = "15s",
        requires = "scenario",
        conflicts_with = "state"
    )]
    pub at: Ns,
    /// Another seed than the scenario's: same seed, same answer
    #[arg(long, requires = "scenario", conflicts_with = "state")]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `report`.
#[derive(Debug, clap::Args)]
pub struct ReportArgs {
    /// Only trials judged within this time up to now, such as `1h`
    #[arg(long, value_name = "TIME")]
    pub since: Option<Ns>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `permit bill`.
#[derive(Debug, clap::Args)]
pub struct BillArgs {
    /// Only this VM, which may have ended
    pub vm: Option<String>,
    #[command(flatten)]
    pub agent: AgentArgs,
}

/// Options of `release`.
#[derive(Debug, clap::Args)]
pub struct ReleaseArgs {
    /// Who manages the VMs: `libvirt[:URI]`, `qemu` or `xen`; default: as for `run`
    #[arg(long, value_name = "HOST")]
    pub host: Option<Managed>,
    #[command(flatten)]
    pub state: StateArgs,
}

/// What libvirt passes to a hook, and where the agent is.
#[derive(Debug, clap::Args)]
pub struct HookArgs {
    /// Name of the domain
    pub guest: String,
    /// What happens (`prepare`, `start`, …)
    pub operation: String,
    /// Which part of it (`begin`, `end`)
    pub part: Option<String>,
    /// A further argument that libvirt gives, or `-`
    pub extra: Option<String>,
    #[command(flatten)]
    pub state: StateArgs,
}

/// Options of `guard`.
#[derive(Debug, clap::Args)]
pub struct GuardArgs {
    /// Who manages the VMs: `libvirt[:URI]`, `qemu` or `xen`
    #[arg(long)]
    pub host: Managed,
    /// Where the journal is
    #[arg(long)]
    pub state: PathBuf,
    /// How long a new agent has to take over
    #[arg(long)]
    pub grace: Ns,
}
