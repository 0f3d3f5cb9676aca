//! `homenode run`: chooses the host and the configuration, and runs the agent.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{bail, ensure};
use homenode_agent::managed::{FindError, Managed};
use homenode_agent::run::Pace;
use homenode_agent::{Show, live, twin};
use homenode_api::http::Listen;
use homenode_control::{Config, Mode, PolicySet};
use homenode_host::WakeSignal;
use homenode_kvm::Vms;
use homenode_search::program::EXEC;
use homenode_undo::state_dir::STATE_DIR;
use homenode_units::Ns;

use crate::complaint::Complaint;
use crate::options::{HostArg, OutFile, ShownArgs, TwinKernelArgs};
use crate::output::{Clock, Output};
use crate::settings::{FILE, MODE_OF_HOST, Wanted};
use crate::signals::{self, Caught, Reached};
use crate::summary::{self, Ended};
use crate::web::Web;
use crate::{bad_input, linger, twin_fallback};

/// Returns where to answer HTTP and where to keep the history. `--web` adds what the page needs; a run on the simulated host that
/// a user watches gets a temporary history, so that `homenode why` has an answer.
fn web(args: &RunArgs, host: For, output: &mut Output) -> anyhow::Result<Web> {
    let web = Web::new(args.listen, args.history.clone());
    let web = if args.web { web.with_page(output)? } else { web };
    let is_needed = match host {
        For::KeptHost => false,
        For::Host => args.web,
        For::Twin => args.web || (!args.fast && args.state.is_none()),
    };
    match (is_needed, args.web) {
        (false, _) => Ok(web),
        (true, true) => web.with_history(),
        (true, false) => {
            let (web, why_not) = web.with_history_if_possible();
            if let Some(why_not) = why_not {
                output.early_notice(&why_not);
            }
            Ok(web)
        }
    }
}

/// The kind of run, as far as it decides about the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum For {
    /// A real host, where the agent keeps a history anyway.
    KeptHost,
    /// A real host without a history, because the agent changes nothing.
    Host,
    /// A simulated host.
    Twin,
}

/// Options of `run`.
#[derive(Debug, clap::Args)]
pub(crate) struct RunArgs {
    /// Host to manage: `twin[:NAME|:FILE.toml]` (a simulated host, from a scenario or a machine), `libvirt[:URI]`, `qemu` (VMs
    /// without libvirt: Proxmox, Incus, KubeVirt's pods, plain QEMU) or `xen` (all domains, from dom0). Default: `xen` in dom0,
    /// else libvirt if it answers, else `qemu` if such VMs run. If there are none, a user at a terminal gets a simulated host;
    /// root, a service or a script gets an error
    #[arg(long, value_name = "HOST")]
    pub host: Option<HostArg>,
    /// Plan and explain, but change nothing: the same as `--mode observe`
    #[arg(long, conflicts_with = "mode")]
    pub dry_run: bool,
    /// How far decisions go: `observe` (reported only), `recommend` (they wait for `homenode recommend apply`) or `act` (carried
    /// out); default: the configuration file's mode, else `recommend`, or `act` on a simulated host
    #[arg(long)]
    pub mode: Option<Mode>,
    /// On Xen, read the hypervisor's trace to learn how long vCPUs wait for a CPU; there is one trace per host, which no
    /// other program can use meanwhile
    #[arg(long)]
    pub trace_waiting: bool,
    /// Stop after this much of the host's time, such as `60s`; default: until Ctrl-C, or until the scenario is done
    #[arg(long)]
    pub duration: Option<Ns>,
    #[command(flatten)]
    pub shown: ShownArgs,
    /// Configuration file (TOML); default: /etc/homenode/homenode.toml if it exists, and none for a simulated host
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Time between samples, such as `1s`
    #[arg(long)]
    pub period: Option<Ns>,
    /// Which policies act: `default` (none), `ff-pin`, `numad`, `memory`, `tavo` or `homenode`
    #[arg(long, value_parser = of_host)]
    pub policies: Option<PolicySet>,
    /// The simulation's seed: same seed, same run
    #[arg(long)]
    pub seed: Option<u64>,
    #[command(flatten)]
    pub kernel: TwinKernelArgs,
    /// Simulate as fast as possible, without waiting between simulated seconds
    #[arg(long)]
    pub fast: bool,
    /// Directory of the journal and the agent's socket; default: /run/homenode, or none for a simulated host
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// File for the history; default: /var/lib/homenode/history.sqlite, or a file in the directory of --state. By default, a
    /// simulated host and a run with --dry-run keep no history
    #[arg(long, value_name = "FILE")]
    pub history: Option<PathBuf>,
    /// Answer HTTP here, such as `127.0.0.1:9464` (port 0: any free port): metrics, and JSON below /v1. Addresses other than
    /// loopback need --web-config
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub listen: Option<Listen>,
    /// Serve the page for browsers (docs/PAGE.md) at --listen, else at 127.0.0.1:9464, or at a free port if that one is taken. A
    /// run without a history then keeps a temporary one until it ends
    #[arg(long)]
    pub web: bool,
    /// For a simulated host, how long the page stays after the run [default: 1min at a terminal without --json, else 0s]
    #[arg(long, value_name = "TIME", requires = "web")]
    pub linger: Option<Ns>,
    /// TLS and passwords for --listen, in the format of Prometheus' exporters (docs/API.md)
    #[arg(long, value_name = "FILE")]
    pub web_config: Option<String>,
    /// Write a trace for Perfetto's viewer (docs/HISTORY.md)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<OutFile>,
    /// When the agent stops normally, leave CPU pins and home nodes in force for the next agent; limits are lifted
    #[arg(long)]
    pub keep: bool,
}

/// Parses policies, and rejects those that are programs. A program may hang and cannot help to undo its changes, so it may not
/// act on a host's VMs.
fn of_host(text: &str) -> anyhow::Result<PolicySet> {
    match text.starts_with(EXEC) {
        true => bail!(
            "a policy that is a program may run only on the twin: `homenode sim SCENARIO --policy '{text}'`; \
             `homenode record scenario` makes a scenario from a host's recording"
        ),
        false => Ok(text.parse()?),
    }
}

/// Commit of the program.
const COMMIT: &str = env!("HOMENODE_COMMIT");

/// How long a reader may take for the remaining output, after a run on a real host has restored everything.
const PATIENCE: Duration = Duration::from_secs(3);

/// Runs the agent until it is stopped, its time is up, or the simulator's scenario is done. Returns status 0 for a run that was
/// stopped, and 128 plus the signal's number if a signal cut short the comparison after it.
///
/// # Errors
/// Bad input, or a host that cannot be managed.
pub(crate) fn run(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let caught = signals::caught()?;
    let mut output = Output::new(args.shown.json);
    let wake_signal = WakeSignal::default();
    let host = choose_host(args, &mut output)?;
    ensure!(
        !args.trace_waiting || matches!(host, HostArg::Live(Managed::Xen)),
        "--trace-waiting reads Xen's trace, but this host does not run Xen: leave it out"
    );
    if args.kernel.numa_balancing.is_some() && !matches!(host, HostArg::Twin(_)) {
        return Err(bad_input(
            "--numa-balancing is only for the twin; on this host, use `sysctl kernel.numa_balancing=0` (or 1)",
        ));
    }
    match host {
        HostArg::Twin(what) => simulate(args, what.as_deref(), &mut output, (&wake_signal, caught)),
        HostArg::Live(vms) => {
            let machine = vms.machine()?;
            let wanted = wanted(args, (Some(FILE), MODE_OF_HOST));
            let config = wanted.read(&machine)?;
            let reload = wanted.reload(&wake_signal, machine);
            let mode = mode(args, &config);
            let kept = if mode == Mode::Observe {
                For::Host
            } else {
                For::KeptHost
            };
            let web = web(args, kept, &mut output)?;
            let run = live::Run {
                vms,
                state: args.state.clone().unwrap_or_else(|| STATE_DIR.into()),
                history: web.history.clone(),
                listen: web.listen,
                trace: args.trace.as_deref().map(Into::into),
                mode,
                settings: wanted.file().map_or_else(|| FILE.into(), Into::into),
                trace_waiting: args.trace_waiting,
                keep: args.keep,
                duration: args.duration,
                commit: COMMIT,
                reload: reload.clone(),
            };
            signals::wait_for(
                caught,
                Reached {
                    run: wake_signal.clone(),
                    comparison: None,
                    reload,
                },
            )?;
            let mut output = output.by(Clock::Wall).unwaiting()?;
            let ended = live::run(&run, &config, &mut output, &wake_signal);
            output.end_of_cycles();
            let is_read = output.drain(PATIENCE);
            match ended {
                // The reader of the run's output may get complaints, too. Everything is restored, so do not wait for it.
                Err(error) if !is_read => Ok(complained(error, args.shown.json)),
                ended => ended.map(|()| ExitCode::SUCCESS),
            }
        }
    }
}

/// Runs the simulator, then the comparison.
fn simulate(
    args: &RunArgs,
    what: Option<&str>,
    output: &mut Output,
    (wake_signal, caught): (&WakeSignal, Caught),
) -> anyhow::Result<ExitCode> {
    let mut spec = crate::twin::spec(what, args.seed)?;
    spec.scenario = args.kernel.of(spec.scenario);
    let wanted = wanted(args, (None, Mode::Act));
    let config = wanted.read(&spec.machine)?;
    let reload = wanted.reload(wake_signal, spec.machine.clone());
    let mode = mode(args, &config);
    let web = web(args, For::Twin, output)?;
    if let Some(path) = web.temporary() {
        output.line(&format!(
            "`homenode why VM --history {}` reads this run's history until the run ends, as do `record` and `top --at`",
            path.display()
        ));
    }
    let run = twin::Run {
        state: args.state.clone(),
        history: web.history.clone(),
        listen: web.listen,
        trace: args.trace.as_deref().map(Into::into),
        mode,
        pace: if args.fast { Pace::Fast } else { Pace::Watched },
        duration: args.duration,
        commit: COMMIT,
        reload: reload.clone(),
    };
    let comparison = WakeSignal::default();
    signals::wait_for(
        caught,
        Reached {
            run: wake_signal.clone(),
            comparison: Some(comparison.clone()),
            reload,
        },
    )?;
    let ended = twin::run(&run, &config, &spec, output, wake_signal);
    output.end_of_cycles();
    let served = ended?;
    if comparison.is_stopping() || output.is_closed() {
        // Remove the history before the clients of the page are sent away, which may take longer than a signal allows.
        drop(web);
        output.line("stopped: skipping the comparison with other policies");
        return Ok(ExitCode::SUCCESS);
    }
    let is_stopped = wake_signal.is_stopping();
    // From now on, a signal can stop only the comparison.
    wake_signal.stop();
    if is_stopped && mode == Mode::Act {
        output.line("stopped: comparing with other policies; a second SIGINT (Ctrl-C) skips the comparison");
    }
    let compared = match mode {
        Mode::Act => summary::compare(&spec, &config, output, &comparison)?,
        Mode::Observe | Mode::Recommend => summary::leave_out(mode, output),
    };
    if let Some(url) = served
        .url()
        .filter(|_| args.web && !is_stopped && compared == Ended::Whole)
    {
        signals::all_is_done();
        let time = linger::time(args.linger, output.style());
        if time > Ns::ZERO {
            linger::wait(&url, time, output, &comparison);
        }
    }
    drop(web);
    Ok(match compared {
        Ended::Whole => ExitCode::SUCCESS,
        Ended::CutShort => ExitCode::from(signals::status()),
    })
}

/// Returns the sources of the settings. `usual` is the default file, which only a run on a real host reads;
/// `mode_unless_named` is the default mode.
fn wanted(args: &RunArgs, (usual, mode_unless_named): (Option<&str>, Mode)) -> Wanted {
    Wanted {
        file: args.config.clone(),
        usual: usual.map(Into::into),
        period: args.period,
        policies: args.policies,
        mode: args.mode,
        mode_unless_named,
        web_config: args.web_config.clone(),
        listen: args.listen,
    }
}

fn mode(args: &RunArgs, config: &Config) -> Mode {
    if args.dry_run { Mode::Observe } else { config.mode }
}

/// Prints the error without waiting long for a reader; returns the exit status.
fn complained(error: anyhow::Error, json: bool) -> ExitCode {
    let (done, said) = mpsc::channel();
    let complaint = move || done.send(Complaint::of(&error).print(json));
    // Without a thread nothing is printed, but the status still reports the failure.
    let _ = std::thread::Builder::new().spawn(complaint);
    said.recv_timeout(PATIENCE).unwrap_or(ExitCode::FAILURE)
}

/// Returns the requested host. By default, returns this host if it is Xen's dom0, libvirt answers, QEMUs run without libvirt, or
/// a service waits for them; otherwise the simulator, but only for a user at a terminal.
fn choose_host(args: &RunArgs, output: &mut Output) -> anyhow::Result<HostArg> {
    if let Some(host) = &args.host {
        return Ok(host.clone());
    }
    let why = match Managed::here() {
        Ok(vms) => return Ok(HostArg::Live(vms)),
        // The error means that this is a real host, which the simulator must not replace.
        Err(error @ FindError::Xen(_)) => return Err(error.into()),
        // Without libvirt on this host, the agent waits for the first QEMU. If libvirt is installed but does not answer, the
        // agent must not manage its machines in parallel.
        Err(FindError::Kvm(_)) if twin_fallback::is_a_service() && homenode_kvm::load_libvirt().is_err() => {
            output.line("No VM runs here, and libvirt is not installed: waiting for the first QEMU.");
            return Ok(HostArg::Live(Managed::Kvm(Vms::Qemu)));
        }
        Err(FindError::Kvm(error)) => error.to_string(),
    };
    twin_fallback::only_where_a_user_looks(&why)?;
    output.line(&format!("Running on the twin, a simulated host: {why}."));
    Ok(HostArg::Twin(None))
}
