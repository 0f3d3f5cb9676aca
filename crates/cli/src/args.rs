//! The command line.

use clap::{Parser, Subcommand};

use crate::calibrate::{CalibrateArgs, KernelArgs};
use crate::doctor::DoctorArgs;
use crate::experiment::ExperimentArgs;
use crate::fleet::FleetCommand;
use crate::kernel_footprint::FootprintArgs;
use crate::maintenance::{DrainArgs, PauseArgs};
use crate::memory::MemoryCommand;
use crate::numad::HookArgs;
use crate::options::ShowArgs;
use crate::permit::PermitCommand;
use crate::policy::PolicyCommand;
use crate::profile::ProfileArgs;
use crate::query::{MachineArgs, PlaceArgs, VmArgs};
use crate::recommend::{ModeArgs, RecommendArgs, ReservationsArgs};
use crate::record::RecordCommand;
use crate::replay::ReplayArgs;
use crate::report::ReportArgs;
use crate::reproduce::ReproduceArgs;
use crate::restore::{GuardArgs, ReleaseArgs};
use crate::run::RunArgs;
use crate::search::SearchArgs;
use crate::settings::ConfigCommand;
use crate::sim::SimArgs;
use crate::sweep::{self, SweepArgs};
use crate::top::TopArgs;
use crate::whatif::WhatIfArgs;
use crate::why::WhyArgs;
use crate::wss::WssArgs;

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
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent: watch VMs, place them, schedule them and bring them home
    Run(RunArgs),
    /// Simulate a scenario to its end and show the results
    #[command(after_help = "Examples:
  homenode sim --list                          the scenarios that come with the program
  homenode sim tavo-mixed                      one of them, under the policies that it names
  homenode sim my.toml --seed 7 --json         a file; the same command gives the same bytes
  homenode sim my.toml --policy default --policy homenode
  homenode sim my.toml --policy default --policy 'exec:python3 mine.py'     a policy of your own (docs/POLICIES.md)
  homenode sim my.toml --machine amd48         the same VMs on another machine
  homenode sim gzip.toml                       a workload (`homenode profile` writes one), alone in a VM")]
    Sim(SimArgs),
    /// Search for the best possible decisions in a scenario, and show how far policies are from them
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
    /// Started by `calibrate --validate`: loads memory in a given pattern
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
    /// Show nodes, links and VMs on one page, now or at an earlier time
    #[command(after_help = crate::top::help())]
    Top(TopArgs),
    /// Show many hosts on one page
    #[command(subcommand)]
    Fleet(FleetCommand),
    /// Ask where a VM would go, and why
    Place(PlaceArgs),
    /// Show the VMs that the running agent manages
    Vm(VmArgs),
    /// Book how much a VM may pollute the caches, and see how well it keeps to that
    #[command(
        subcommand,
        after_help = "A permit is booked in LLC misses per slice of 30 ms of wall-clock time (`250k` is 250,000), or in memory
bandwidth (`500MB/s`). A VM that causes more loses processor time until it is back within its permit.

Examples:
  homenode permit suggest web          a permit for VM web, from its behaviour and from its size
  homenode permit set web 250k         book it; the VM's metadata keeps it, over restarts and migration
  homenode permit set web none         take it back
  homenode permit show                 permits, pollution now, VMs OVER theirs and the CPU they keep
  homenode permit usage web --json     used against booked, per hour"
    )]
    Permit(PermitCommand),
    /// Choose how VMs' memory is laid out over nodes, and see where it is
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
  homenode memory-policy advise web                   which one suits it, from its behaviour"
    )]
    MemoryPolicy(PolicyCommand),
    /// Ask how much memory a VM really uses
    #[command(
        after_help = "The working set is what a VM used within a window of time; a longer window gives a larger one. The agent watches the
VM's memory only on request, by the best means that the host has (docs/WORKING_SET.md).

Examples:
  homenode wss web                      watch VM web for a window, and say what it used, how sure that is, and what it is not
  homenode wss web --window 5min        what it uses within five minutes
  homenode wss web --json               the same for programs
  homenode wss                          all VMs, with their last figures
  homenode wss --log guest.pages        no agent: from a log that the emulator's plugin wrote of a guest"
    )]
    Wss(WssArgs),
    /// Let the agent take memory that VMs do not use, and see how much each has
    #[command(
        subcommand,
        after_help = "A VM with a memory floor has, by its balloon, what its working set needs and a reserve, never less than the floor,
and gets memory back at once when its guest is short of it. Memory is taken while a node lacks some. All of it comes back
when the floor is removed or the agent stops or dies.

Examples:
  homenode memory set web 2GiB         memory may be taken from VM web down to 2 GiB; its metadata keeps that
  homenode memory set web none         it keeps all of its memory
  homenode memory show                 what each VM has and needs, and why"
    )]
    Memory(MemoryCommand),
    /// See the changes that the agent recommends, and approve or reject them
    #[command(after_help = crate::recommend::HELP)]
    Recommend(RecommendArgs),
    /// Set how far the agent may go with a VM: observe, recommend or act
    #[command(after_help = crate::recommend::MODE_HELP)]
    Mode(ModeArgs),
    /// Empty nodes of VMs, and keep them empty
    #[command(after_help = crate::maintenance::DRAIN_HELP)]
    Drain(DrainArgs),
    /// Change nothing for a while
    #[command(after_help = crate::maintenance::PAUSE_HELP)]
    Pause(PauseArgs),
    /// See nodes reserved for VMs that do not run yet, and drop reservations
    #[command(after_help = crate::recommend::RESERVATIONS_HELP, alias = "promises")]
    Reservations(ReservationsArgs),
    /// See what VMs' guests were told about their nodes, and when
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
node of the host (`0`), several (`0,1` or `0-2`), or none (`none`). The names of VMs may hold anything but white space.

Examples:
  homenode whatif                                    how all VMs are where they are now
  homenode whatif 'web=0 db=1,2 batch=none'          three VMs elsewhere
  homenode whatif web=3 --json                       the same for programs
  homenode whatif 'cg=0 lu=1' --scenario tavo-mixed --at 20s
                                                     no agent: on a scenario that the agent has managed for 20 s"
    )]
    WhatIf(WhatIfArgs),
    /// Show what the agent's changes gained and cost each VM
    #[command(
        after_help = "A change of home is a trial: some seconds later the VM's speed is compared with its speed before, and a change that did not
pay is undone. The newest 64 trials of each VM are remembered, of a VM that is gone for an hour, and none over a restart of
the agent.

Examples:
  homenode report                      all trials that are remembered, and their sums
  homenode report --since 10min        those judged within the last ten minutes of the host's clock
  homenode report --json               the same for programs"
    )]
    Report(ReportArgs),
    /// Show, export and prune the history that the agent keeps on disk
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
    /// Replay the decisions of a recorded run, and see where other settings decide differently
    #[command(
        after_help = "Samples of the host are in the history for a day (docs/HISTORY.md). They are put through the agent's loop again: under the
same settings the decisions are the same to the last letter, and gaps in the recording are reported. Under other settings
differences are shown; later decisions are made on the host as it was recorded, not as it would have become.

Examples:
  homenode replay                                     the last run in this host's history
  homenode replay history.sqlite --policies tavo      what other policies would have decided
  homenode replay history.sqlite --config new.toml --json"
    )]
    Replay(ReplayArgs),
    /// Explain why a VM was slow: what changed, by how much, and what changed it
    #[command(
        after_help = "The stretch around --at is compared with four times as long before it, from samples in the history, which are kept
for a day (docs/HISTORY.md). The lost speed is divided among causes, the largest first, each with figures, with the VM or
program responsible, and with the agent's decisions at the time. Conditions that held before as well are not blamed.

Examples:
  homenode why web                            the last five minutes
  homenode why web --at 03:12                 last night
  homenode why web --at 20m --window 10m --json"
    )]
    Why(WhyArgs),
    /// Compare published results, and claims of our own, with results of the twin
    #[command(after_help = "Examples:
  homenode reproduce                        every claim; finished runs are kept, so it can be interrupted
  homenode reproduce tavo policies.imbalance --figures figures
  homenode reproduce TAVO --json --jobs 1")]
    Reproduce(ReproduceArgs),
    /// Run an experiment that a file describes: runs of the twin, computed results, tests, tables, figures
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
    /// Check this host for everything the agent can do, and say how to get what is missing
    Doctor(DoctorArgs),
    /// Check a settings file, or show all settings
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Undo what a stopped agent left in force (pins, memory nodes)
    Release(ReleaseArgs),
    /// libvirt's hook: tells the agent which VM is about to start
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
        /// Shell to print them for
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
