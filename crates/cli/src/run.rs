//! `homenode run`: which host, with which configuration.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::Context as _;
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
use crate::complaint::Complaint;
use crate::output::{Clock, Output};
use crate::summary::{self, Ended};
use crate::web::Web;

/// Of which commit the program is.
const COMMIT: &str = env!("HOMENODE_COMMIT");

/// How long a reader may take for what is left once a run on a real host has given everything back.
const PATIENCE: Duration = Duration::from_secs(3);

/// The status of a command that a signal cut short, as shells have it; 0 while none came.
static SIGNALLED: AtomicU8 = AtomicU8::new(0);

/// Runs the agent until it is stopped, its time is up, or the twin's scenario is done. One that is stopped ends in good order,
/// with status 0; a comparison after it that is cut short with 128 and the signal.
///
/// # Errors
/// Bad input, or a host that cannot be managed.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let config = config(args)?;
    let mut output = Output::new(args.shown.json);
    let bell = Bell::default();
    let mode = if args.dry_run { Mode::Observe } else { config.mode };
    match choose_host(args, &mut output)? {
        HostArg::Twin(what) => {
            let spec = crate::twin::spec(what.as_deref(), args.seed)?;
            let web = Web::of(args, false, &mut output)?;
            let run = twin::Run {
                state: args.state.clone(),
                history: web.history.clone(),
                listen: web.listen,
                trace: args.trace.clone(),
                mode,
                pace: if args.fast { Pace::Fast } else { Pace::Watched },
                duration: args.duration,
                commit: COMMIT,
            };
            let comparison = Bell::default();
            stop_on_signals(&bell, Some(&comparison))?;
            let ended = twin::run(&run, &config, &spec, &mut output, &bell);
            output.end_of_epochs();
            ended?;
            drop(web);
            if comparison.is_stopping() {
                output.line("stopped: other policies are not compared");
                return Ok(ExitCode::SUCCESS);
            }
            // From now on there is one thing to end.
            bell.stop();
            Ok(
                match summary::compare(&spec, &config, &mut output, &comparison)? {
                    Ended::Whole => ExitCode::SUCCESS,
                    Ended::CutShort => ExitCode::from(SIGNALLED.load(Ordering::Relaxed)),
                },
            )
        }
        HostArg::Libvirt(uri) => {
            let web = Web::of(args, mode != Mode::Observe, &mut output)?;
            let run = live::Run {
                uri: uri.unwrap_or_else(|| LibvirtHost::DEFAULT_URI.to_owned()),
                state: args.state.clone().unwrap_or_else(|| STATE_DIR.into()),
                history: web.history.clone(),
                listen: web.listen,
                trace: args.trace.clone(),
                mode,
                keep: args.keep,
                duration: args.duration,
                commit: COMMIT,
            };
            stop_on_signals(&bell, None)?;
            let mut output = output.by(Clock::Wall).unwaiting()?;
            let ended = live::run(&run, &config, &mut output, &bell);
            output.end_of_epochs();
            let is_read = output.drain(PATIENCE);
            match ended {
                // The reader of complaints may be the same one, and all is given back: nothing is left to wait for.
                Err(error) if !is_read => Ok(complained(error, args.shown.json)),
                ended => ended.map(|()| ExitCode::SUCCESS),
            }
        }
    }
}

/// Says what went wrong to a reader that may not read; the exit status.
fn complained(error: anyhow::Error, json: bool) -> ExitCode {
    let (done, said) = mpsc::channel();
    let complaint = move || done.send(Complaint::of(&error).print(json));
    // Without a thread nobody is told, and the status says it.
    let _ = std::thread::Builder::new().spawn(complaint);
    said.recv_timeout(PATIENCE).unwrap_or(ExitCode::FAILURE)
}

/// Has signals end the run in good order; SIGINT leads on to the comparison after it, if there is one, which any signal ends, and
/// SIGTERM ends both. One more ends the process at once.
fn stop_on_signals(run: &Bell, comparison: Option<&Bell>) -> anyhow::Result<()> {
    let (run, comparison) = (run.clone(), comparison.cloned());
    let mut signals = Signals::new([SIGINT, SIGTERM])?;
    let named = std::thread::Builder::new().name("signals".into());
    let thread = named.spawn(move || {
        for signal in signals.forever() {
            let last = comparison.as_ref().unwrap_or(&run);
            if last.is_stopping() {
                std::process::exit(128 + signal);
            }
            // Both numbers are small.
            SIGNALLED.store(128 + signal as u8, Ordering::Relaxed);
            if signal == SIGTERM || run.is_stopping() {
                last.stop();
            }
            run.stop();
        }
    });
    thread.context("cannot start the thread that waits for signals")?;
    Ok(())
}

fn config(args: &RunArgs) -> anyhow::Result<Config> {
    let mut config = match &args.config {
        Some(path) => homenode_machine_files::file::read_toml_file(path).map_err(bad_input)?,
        None => Config::default(),
    };
    config.period = args.period.unwrap_or(config.period);
    config.policies = args.policies.unwrap_or(config.policies);
    config.mode = args.mode.unwrap_or(config.mode);
    if let Some(web_config) = &args.web_config {
        config.http.web_config.clone_from(web_config);
    }
    homenode_agent::http::check(args.listen, &config.http).map_err(bad_input)?;
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
