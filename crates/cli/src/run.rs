//! `homenode run`: which host, with which configuration.

use std::path::Path;

use homenode_agent::run::Pace;
use homenode_agent::{Show, live, twin};
use homenode_control::{Config, Mode};
use homenode_host::Bell;
use homenode_linux::LibvirtHost;
use homenode_linux::state_dir::STATE_DIR;
use homenode_units::Settings as _;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::args::{HostArg, RunArgs};
use crate::bad_input;
use crate::output::Output;

/// Of which commit the program is.
const COMMIT: &str = env!("HOMENODE_COMMIT");

/// Runs the agent until it is stopped, its time is up, or the twin's scenario is done.
///
/// # Errors
/// Bad input, or a host that cannot be managed.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    let config = config(args)?;
    let mut output = Output::new(args.shown.json);
    let bell = stop_on_signals()?;
    let mode = if args.dry_run { Mode::DryRun } else { Mode::Act };
    match choose_host(args, &mut output)? {
        HostArg::Twin(what) => {
            let spec = crate::twin::spec(what.as_deref(), args.seed)?;
            let run = twin::Run {
                state: args.state.clone(),
                mode,
                pace: if args.fast { Pace::Fast } else { Pace::Watched },
                duration: args.duration,
                commit: COMMIT,
            };
            twin::run(&run, &config, &spec, &mut output, &bell)?;
            crate::summary::compare(&spec, &config, &mut output)
        }
        HostArg::Libvirt(uri) => {
            let run = live::Run {
                uri: uri.unwrap_or_else(|| LibvirtHost::DEFAULT_URI.to_owned()),
                state: args.state.clone().unwrap_or_else(|| STATE_DIR.into()),
                mode,
                keep: args.keep,
                duration: args.duration,
                commit: COMMIT,
            };
            live::run(&run, &config, &mut output, &bell)
        }
    }
}

/// Has SIGINT and SIGTERM end the run in good order; a second one ends the process at once.
fn stop_on_signals() -> anyhow::Result<Bell> {
    let bell = Bell::default();
    let there = bell.clone();
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    std::thread::spawn(move || {
        for _ in signals.forever() {
            if there.is_stopping() {
                std::process::exit(130);
            }
            there.stop();
        }
    });
    Ok(bell)
}

fn config(args: &RunArgs) -> anyhow::Result<Config> {
    let mut config = match &args.config {
        Some(path) => homenode_machine_files::file::read_toml_file(path).map_err(bad_input)?,
        None => Config::default(),
    };
    config.period = args.period.unwrap_or(config.period);
    config.policies = args.policies.unwrap_or(config.policies);
    // A file's settings were checked as they were read; what the command line puts in their place is of the same kind.
    config
        .check()
        .map_err(|bad| bad_input(format!("--{}: {bad}", bad.key)))?;
    Ok(config)
}

/// The host asked for; else this one, if libvirt answers and there is something to choose from; else the twin.
fn choose_host(args: &RunArgs, output: &mut Output) -> anyhow::Result<HostArg> {
    if let Some(host) = &args.host {
        return Ok(host.clone());
    }
    let why = match homenode_machine_files::sysfs::read(Path::new("/")) {
        Err(error) => error.to_string(),
        Ok(machine) if machine.memory_nodes().len() < 2 => "this host has one NUMA node".to_owned(),
        Ok(_) => match LibvirtHost::probe(LibvirtHost::DEFAULT_URI) {
            Ok(()) => return Ok(HostArg::Libvirt(None)),
            Err(error) => error.to_string(),
        },
    };
    output.line(&format!("Running on the twin, a simulated host: {why}."));
    Ok(HostArg::Twin(None))
}
