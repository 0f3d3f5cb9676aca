//! `homenode run`: which host, with which configuration.

use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::ensure;
use homenode_agent::managed::{FindError, Managed};
use homenode_agent::run::Pace;
use homenode_agent::{Show, live, twin};
use homenode_control::{Config, Mode};
use homenode_host::Bell;
use homenode_kvm::Vms;
use homenode_undo::state_dir::STATE_DIR;
use signal_hook::iterator::Signals;

use crate::args::{HostArg, RunArgs};
use crate::bad_input;
use crate::complaint::Complaint;
use crate::output::{Clock, Output};
use crate::settings::{FILE, Wanted};
use crate::signals::{self, Reached};
use crate::stand_in;
use crate::summary::{self, Ended};
use crate::web::Web;

/// Of which commit the program is.
const COMMIT: &str = env!("HOMENODE_COMMIT");

/// How long a reader may take for what is left once a run on a real host has given everything back.
const PATIENCE: Duration = Duration::from_secs(3);

/// Runs the agent until it is stopped, its time is up, or the twin's scenario is done. One that is stopped ends in good order,
/// with status 0; a comparison after it that is cut short with 128 and the signal.
///
/// # Errors
/// Bad input, or a host that cannot be managed.
pub fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let caught = signals::caught()?;
    let mut output = Output::new(args.shown.json);
    let bell = Bell::default();
    let host = choose_host(args, &mut output)?;
    ensure!(
        !args.trace_waiting || matches!(host, HostArg::Live(Managed::Xen)),
        "--trace-waiting reads Xen's trace, and this host is not Xen: leave it out"
    );
    if args.kernel.numa_balancing.is_some() && !matches!(host, HostArg::Twin(_)) {
        return Err(bad_input(
            "--numa-balancing is for the twin: the kernel of this host is set with `sysctl kernel.numa_balancing=0` (or 1)",
        ));
    }
    match host {
        HostArg::Twin(what) => simulate(args, what.as_deref(), &mut output, (&bell, caught)),
        HostArg::Live(vms) => {
            let machine = vms.machine()?;
            let wanted = wanted(args, Some(FILE));
            let config = wanted.read(&machine)?;
            let reload = wanted.reload(&bell, machine);
            let mode = mode(args, &config);
            let web = Web::of(args, mode != Mode::Observe, &mut output)?;
            let run = live::Run {
                vms,
                state: args.state.clone().unwrap_or_else(|| STATE_DIR.into()),
                history: web.history.clone(),
                listen: web.listen,
                trace: args.trace.clone(),
                mode,
                trace_waiting: args.trace_waiting,
                keep: args.keep,
                duration: args.duration,
                commit: COMMIT,
                reload: reload.clone(),
            };
            signals::wait_for(
                caught,
                Reached {
                    run: bell.clone(),
                    comparison: None,
                    reload,
                },
            )?;
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

/// A run on the twin, and the comparison after it.
fn simulate(
    args: &RunArgs,
    what: Option<&str>,
    output: &mut Output,
    (bell, caught): (&Bell, Signals),
) -> anyhow::Result<ExitCode> {
    let mut spec = crate::twin::spec(what, args.seed)?;
    spec.scenario = args.kernel.of(spec.scenario);
    let wanted = wanted(args, None);
    let config = wanted.read(&spec.machine)?;
    let reload = wanted.reload(bell, spec.machine.clone());
    let mode = mode(args, &config);
    let web = Web::of(args, false, output)?;
    let run = twin::Run {
        state: args.state.clone(),
        history: web.history.clone(),
        listen: web.listen,
        trace: args.trace.clone(),
        mode,
        pace: if args.fast { Pace::Fast } else { Pace::Watched },
        duration: args.duration,
        commit: COMMIT,
        reload: reload.clone(),
    };
    let comparison = Bell::default();
    signals::wait_for(
        caught,
        Reached {
            run: bell.clone(),
            comparison: Some(comparison.clone()),
            reload,
        },
    )?;
    let ended = twin::run(&run, &config, &spec, output, bell);
    output.end_of_epochs();
    ended?;
    drop(web);
    if comparison.is_stopping() {
        output.line("stopped: other policies are not compared");
        return Ok(ExitCode::SUCCESS);
    }
    // From now on there is one thing to end.
    bell.stop();
    Ok(match summary::compare(&spec, &config, output, &comparison)? {
        Ended::Whole => ExitCode::SUCCESS,
        Ended::CutShort => ExitCode::from(signals::status()),
    })
}

/// Where settings are from; `usual` is the file of a run on a real host.
fn wanted(args: &RunArgs, usual: Option<&str>) -> Wanted {
    Wanted {
        file: args.config.clone(),
        usual: usual.map(Into::into),
        period: args.period,
        policies: args.policies,
        mode: args.mode,
        web_config: args.web_config.clone(),
        listen: args.listen,
    }
}

fn mode(args: &RunArgs, config: &Config) -> Mode {
    if args.dry_run { Mode::Observe } else { config.mode }
}

/// Says what went wrong to a reader that may not read; the exit status.
fn complained(error: anyhow::Error, json: bool) -> ExitCode {
    let (done, said) = mpsc::channel();
    let complaint = move || done.send(Complaint::of(&error).print(json));
    // Without a thread nobody is told, and the status says it.
    let _ = std::thread::Builder::new().spawn(complaint);
    said.recv_timeout(PATIENCE).unwrap_or(ExitCode::FAILURE)
}

/// The host asked for; else this one, if it is dom0 of Xen, libvirt answers or QEMUs run without it, or where a service waits for
/// them; else the twin, for a user at a terminal.
fn choose_host(args: &RunArgs, output: &mut Output) -> anyhow::Result<HostArg> {
    if let Some(host) = &args.host {
        return Ok(host.clone());
    }
    let why = match Managed::here() {
        Ok(vms) => return Ok(HostArg::Live(vms)),
        // This is a real host, for which no twin stands in.
        Err(error @ FindError::Xen(_)) => return Err(error.into()),
        // Without libvirt on this host the agent waits for the first QEMU. Where libvirt is installed and does not answer, its
        // machines must not be managed beside it.
        Err(FindError::Kvm(_)) if stand_in::is_a_service() && homenode_kvm::load_libvirt().is_err() => {
            output.line("No VM runs here, and libvirt is not installed: waiting for the first QEMU.");
            return Ok(HostArg::Live(Managed::Kvm(Vms::Qemu)));
        }
        Err(FindError::Kvm(error)) => error.to_string(),
    };
    stand_in::only_where_a_user_looks(&why)?;
    output.line(&format!("Running on the twin, a simulated host: {why}."));
    Ok(HostArg::Twin(None))
}
