//! The command line of the testbed; see the library for what it does.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what this program is for"
)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Args, Parser, Subcommand};

use homenode_testbed::inside::console::GuestVanished;
use homenode_testbed::inside::server::EXIT_GUEST_VANISHED;
use homenode_testbed::outside::emulated::HostKind;
use homenode_testbed::outside::{Options, by_hand};
use homenode_testbed::{cases, inside, outside};

/// Runs cases on an emulated 4-node NUMA host with real libvirt and KVM guests.
#[derive(Debug, Parser)]
#[command(name = "homenode-testbed", version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    run: RunArguments,
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Cases or groups [default: all but those run by name only]
    #[arg(value_name = "GROUP|CASE")]
    names: Vec<String>,
    /// List the cases and exit
    #[arg(long)]
    list: bool,
    /// Write the result to this file as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Show what cases print while they run
    #[arg(long, short)]
    verbose: bool,
    /// Boot the newer kernel that 'scripts/testbed-setup.sh --damon' installs
    #[arg(long)]
    newer: bool,
    #[command(flatten)]
    common: CommonArguments,
}

#[derive(Debug, Default, Args)]
struct CommonArguments {
    /// The homenode binary to test; default: the one next to this program
    #[arg(long, value_name = "FILE")]
    homenode: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run cases (the default)
    Run(RunArguments),
    /// Boot a host and keep it, to work in it by hand
    Up {
        /// Boot two nodes of two CPUs and a modelled PMU
        #[arg(long)]
        counted: bool,
        /// Boot a kernel that has DAMON (scripts/testbed-setup.sh --damon)
        #[arg(long, conflicts_with = "counted")]
        damon: bool,
        /// Boot under Xen (scripts/xen-setup.sh): commands and cases run in its dom0
        #[arg(long, conflicts_with = "damon")]
        xen: bool,
        /// Use systemd as dom0's first process
        #[arg(long, requires = "xen", conflicts_with = "counted")]
        systemd: bool,
        #[command(flatten)]
        common: CommonArguments,
    },
    /// Run a shell command in the host that 'up' keeps
    Sh {
        /// Shell command
        command: String,
    },
    /// Run one case of this program in the host that 'up' keeps
    Case {
        /// The case's name
        name: String,
        #[command(flatten)]
        common: CommonArguments,
    },
    /// Internal: the process that ends everything that the testbed started
    #[command(hide = true)]
    Guard,
    /// Internal: main loop inside the emulated host
    #[command(hide = true)]
    Inside {
        /// Directory through which this program and the emulated host talk
        exchange: PathBuf,
    },
    /// Internal: one case, in this process
    #[command(hide = true)]
    InsideCase {
        /// Directory through which this program and the emulated host talk
        exchange: PathBuf,
        /// The case's name
        name: String,
        /// Destroy the case's guests afterwards
        #[arg(long)]
        clean: bool,
    },
}

const EXIT_FAILED: u8 = 1;
const EXIT_BAD_INPUT: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match cli.command.unwrap_or(Command::Run(cli.run)) {
        Command::Run(arguments) => run(&arguments),
        Command::Up {
            counted,
            damon,
            xen,
            systemd,
            common,
        } => {
            let kind = match (counted, damon, xen) {
                _ if systemd => HostKind::XenService,
                (true, _, true) => HostKind::XenCounted,
                (true, _, _) => HostKind::Counted,
                (_, true, _) => HostKind::Damon,
                (_, _, true) => HostKind::Xen,
                _ => HostKind::Plain,
            };
            by_hand::up(&options(&common, true), kind).map(|()| ExitCode::SUCCESS)
        }
        Command::Sh { command } => {
            by_hand::shell(&options(&CommonArguments::default(), true), &command).map(|()| ExitCode::SUCCESS)
        }
        Command::Case { name, common } => {
            by_hand::case(&options(&common, true), &name).map(|()| ExitCode::SUCCESS)
        }
        Command::Guard => {
            outside::guard::guard_main();
            Ok(ExitCode::SUCCESS)
        }
        Command::Inside { exchange } => inside::server::serve(&exchange).map(|()| ExitCode::SUCCESS),
        Command::InsideCase {
            exchange,
            name,
            clean,
        } => {
            let outcome = inside_case(&exchange, &name);
            let cleaned = if clean {
                inside::libvirtd::clean_up()
            } else {
                Ok(())
            };
            outcome.and_then(|code| cleaned.map(|()| code))
        }
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("{error:#}");
        ExitCode::from(EXIT_FAILED)
    })
}

/// Runs one case. The exit status tells a guest that vanished from a failure.
fn inside_case(exchange: &Path, name: &str) -> anyhow::Result<ExitCode> {
    match inside::run_case(exchange, name) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) if error.downcast_ref::<GuestVanished>().is_some() => {
            eprintln!("{error:#}");
            Ok(ExitCode::from(EXIT_GUEST_VANISHED))
        }
        Err(error) => Err(error),
    }
}

/// Returns the options: the workspace that this program was built in, and what to test.
fn options(common: &CommonArguments, verbose: bool) -> Options {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .unwrap_or(Path::new("/"))
        .to_owned();
    let homenode = common.homenode.clone().or_else(|| {
        let beside = std::env::current_exe().ok()?.with_file_name("homenode");
        beside.exists().then_some(beside)
    });
    Options {
        workspace,
        homenode,
        verbose,
        newer: false,
    }
}

fn run(arguments: &RunArguments) -> anyhow::Result<ExitCode> {
    let cases = match cases::select(&arguments.names) {
        Ok(cases) => cases,
        Err(unknown) => {
            let known: Vec<&str> = cases::ALL.iter().map(|case| case.name).collect();
            eprintln!(
                "no case or group is called '{unknown}': the cases are {}",
                known.join(", ")
            );
            return Ok(ExitCode::from(EXIT_BAD_INPUT));
        }
    };
    if arguments.list {
        for case in cases {
            println!("{:<9} {:<22} {}", case.group.name(), case.name, case.about);
        }
        return Ok(ExitCode::SUCCESS);
    }
    let options = Options {
        newer: arguments.newer,
        ..options(&arguments.common, arguments.verbose)
    };
    let report = outside::run(&cases, options)?;
    if let Some(path) = &arguments.json {
        let text = serde_json::to_string_pretty(&report)?;
        fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    println!("{} passed, {} failed", report.passed(), report.failed());
    Ok(if report.all_passed() {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(EXIT_FAILED)
    })
}
