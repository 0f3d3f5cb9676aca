//! The `homenode` command. Called as `numad`, it replaces numad for libvirt's `placement='auto'`.
//!
//! Exit status: 0 done, 1 failure, 2 bad input, 130 or 143 cut short by SIGINT or SIGTERM.

// Commands write complaints to standard error and their output through `output`.
#![allow(clippy::print_stderr)]

#[macro_use]
mod print;

mod args;
mod ask;
mod calibrate;
mod complaint;
mod doctor;
#[cfg(test)]
mod documents;
mod evidence;
mod experiment;
mod fleet;
mod kernel_footprint;
mod linger;
mod list;
mod maintenance;
mod memory;
mod numad;
mod options;
mod output;
mod page_log;
mod permit;
mod policy;
mod profile;
mod progress;
mod query;
mod recommend;
mod record;
mod replay;
mod report;
mod reproduce;
mod restore;
mod run;
mod search;
mod settings;
mod signals;
mod sim;
mod status;
mod suggest;
mod summary;
mod sweep;
mod top;
mod topology;
mod trial;
mod twin;
mod twin_fallback;
mod twin_history;
mod web;
mod whatif;
mod why;
mod wss;

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context as _;
use homenode_api::AskError;
use homenode_kvm::ConnectError;
use homenode_screens::terminal::NoTerminal;
use homenode_screens::wall::NoSuchTime;
use homenode_twin::TwinError;
use homenode_units::Candidates;

use args::{Args, Command};
use complaint::Complaint;
use record::{RecordArgs, RecordCommand};

/// An error in the user's input, which exits with status 2. Every other failure exits with 1.
#[derive(Debug)]
pub struct BadInput(pub String);

impl std::fmt::Display for BadInput {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// Turns an error about the user's input into one that exits with 2.
pub fn bad_input(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow::Error::new(BadInput(error.to_string()))
}

/// Returns true if the error is in the user's input, no matter if the command line, libvirt, the simulator or the agent found it.
fn is_about_input(error: &anyhow::Error) -> bool {
    error.is::<BadInput>()
        || error.is::<TwinError>()
        || error.is::<NoTerminal>()
        || error.is::<NoSuchTime>()
        || matches!(
            error.downcast_ref(),
            Some(ConnectError::BadUri { .. } | ConnectError::Remote { .. })
        )
        || matches!(error.downcast_ref(), Some(AskError::Agent(error)) if error.is_about_input())
}

fn main() -> ExitCode {
    let called_as = std::env::args_os().next().unwrap_or_default();
    if Path::new(&called_as)
        .file_name()
        .is_some_and(|name| numad::NAMES.iter().any(|known| name == *known))
    {
        return print::flushed(numad::main());
    }
    // Parsing may have failed before `--json` was reached, so look for the word itself.
    let json = std::env::args_os()
        .take_while(|arg| arg != "--")
        .any(|arg| arg == "--json");
    let args = match Args::of_process() {
        Ok(args) => args,
        Err(error) if json && error.use_stderr() => {
            let message = error.render().to_string();
            return Complaint::usage(message.trim_end()).print(json);
        }
        Err(error) => error.exit(),
    };
    match dispatch(args) {
        Ok(code) => print::flushed(code),
        Err(error) => Complaint::of(&error).print(json),
    }
}

/// Prints the manual page of the program or of one of its commands, or writes them all.
fn manual(name: Option<&str>, to: Option<&std::path::Path>) -> anyhow::Result<()> {
    let mut all = Args::described();
    // Building names the commands' pages, and copies the global options into each command.
    all.build();
    let known: Vec<_> = all
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .collect();
    if let Some(dir) = to {
        std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
        let pages = known
            .iter()
            .map(|command| (format!("homenode-{}.1", command.get_name()), *command));
        for (name, command) in std::iter::once(("homenode.1".to_owned(), &all)).chain(pages) {
            let path = dir.join(name);
            std::fs::write(&path, page(command)?)
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        return Ok(());
    }
    let of = match name {
        None => &all,
        Some(name) => known
            .iter()
            .find(|command| command.get_name() == name)
            .ok_or_else(|| {
                let known = known.iter().map(|command| command.get_name());
                let known = Candidates::of(name, known.filter(|known| *known != "help"));
                bad_input(format!("no command is named `{name}`{known}"))
            })?,
    };
    print::print(format_args!("{}", String::from_utf8(page(of)?)?));
    Ok(())
}

fn page(of: &clap::Command) -> std::io::Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(of.clone()).render(&mut page)?;
    Ok(page)
}

/// Returns what a signal that ends a command leaves of its work, for commands that may take long and change no host.
fn kept(command: &Command) -> Option<&'static str> {
    Some(match command {
        Command::Sim(_) | Command::WhatIf(_) | Command::Replay(_) | Command::Why(_) => "there is no result",
        Command::Search(_) => "there is no result, and no --known file was changed",
        Command::Calibrate(args) if args.validate && args.output.is_some() => {
            "without a comparison yet, the measurement is dropped; else its file is complete"
        }
        Command::Calibrate(_) => "the measurement is dropped",
        Command::Record(RecordArgs {
            command: Some(RecordCommand::Export(args)),
            ..
        }) if !args.is_to_file() => "its output is incomplete",
        Command::Record(RecordArgs {
            command: Some(RecordCommand::Export(_) | RecordCommand::Scenario(_)),
            ..
        }) => "its file is missing or incomplete",
        Command::Reproduce(_) | Command::Experiment(_) => {
            "finished runs are kept, unless --fresh is given; the same command continues with the rest"
        }
        Command::Evidence(_) => {
            "what is finished is kept, the same command continues; VMs have their own modes again within a minute"
        }
        Command::Sweep(_) => {
            "finished tasks are kept if --store is given; the same command continues with the rest"
        }
        _ => return None,
    })
}

fn dispatch(args: Args) -> anyhow::Result<ExitCode> {
    if let Some(kept) = kept(&args.command) {
        signals::end_at_once(kept)?;
    }
    match args.command {
        Command::Run(args) => return run::run(&args),
        Command::Sim(args) => sim::sim(&args)?,
        Command::Search(args) => search::run(&args)?,
        Command::List(args) => list::run(&args)?,
        Command::Machine(args) => query::machine(&args)?,
        Command::Calibrate(args) => calibrate::run(&args)?,
        Command::CalibrateKernel(args) => calibrate::kernel(&args)?,
        Command::Profile(args) => return profile::run(&args),
        Command::KernelFootprint(args) => kernel_footprint::run(&args)?,
        Command::Status(args) => status::run(&args)?,
        Command::Top(args) => return top::run(&args),
        Command::Fleet(command) => return fleet::run(&command),
        Command::Place(args) => query::place(&args)?,
        Command::Vm(args) => query::vm(&args)?,
        Command::Permit(args) => permit::run(&args)?,
        Command::MemoryPolicy(args) => policy::run(&args)?,
        Command::Wss(args) => wss::run(&args)?,
        Command::Memory(args) => memory::run(&args)?,
        Command::Recommend(args) => recommend::recommend(&args)?,
        Command::Mode(args) => recommend::mode(&args)?,
        Command::Drain(args) => return maintenance::drain(&args),
        Command::Pause(args) => maintenance::pause(&args)?,
        Command::Reservations(args) => recommend::reservations(&args)?,
        Command::Topology(args) => topology::run(&args)?,
        Command::WhatIf(args) => whatif::run(&args)?,
        Command::Evidence(args) => evidence::run(&args)?,
        Command::Report(args) => report::run(&args)?,
        Command::Record(args) => record::run(&args)?,
        Command::Replay(args) => replay::run(&args)?,
        Command::Why(args) => why::run(&args)?,
        Command::Reproduce(args) => reproduce::run(&args)?,
        Command::Experiment(args) => experiment::run(&args)?,
        Command::Sweep(args) => sweep::run(&args)?,
        Command::Doctor(args) => doctor::run(&args)?,
        Command::Config(args) => return settings::run(&args),
        Command::Release(args) => restore::release(&args)?,
        Command::Hook(args) => numad::hook(&args),
        Command::Guard(args) => restore::guard(&args)?,
        Command::MoveDomain => homenode_agent::managed::move_domain()?,
        Command::MoveStream => homenode_agent::managed::move_stream()?,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Args::described(), "homenode", &mut script);
            print::print(format_args!("{}", String::from_utf8(script)?));
        }
        Command::Man { command, to } => manual(command.as_deref(), to.as_deref())?,
    }
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[test]
    fn a_signal_says_of_each_output_what_is_left_of_it() {
        for (words, said) in [
            (
                &["record", "export", "--csv"][..],
                Some("its output is incomplete"),
            ),
            (
                &["record", "export", "--trace", "/dev/null"],
                Some("its file is missing or incomplete"),
            ),
            (&["calibrate", "--validate"], Some("the measurement is dropped")),
            (
                &["calibrate", "--validate", "--output", "/dev/null"],
                Some("without a comparison yet, the measurement is dropped; else its file is complete"),
            ),
            (&["vm"], None),
        ] {
            let args = Args::try_parse_from([&["homenode"], words].concat()).unwrap();
            assert_eq!(kept(&args.command), said, "{words:?}");
        }
    }
}
