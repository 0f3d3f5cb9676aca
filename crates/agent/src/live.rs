//! Runs the agent on a real host: the same loop as on the simulated host, made crash-safe.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, anyhow, bail};
use homenode_api::http::Listen;
use homenode_control::{Config, Control, Mode, PolicySet};
use homenode_host::WakeSignal;
use homenode_kvm::Vms;
use homenode_machine::Machine;
use homenode_recorder::WhenFull;
use homenode_undo::guard::{self, Guard, Patience, SILENCE_MAX};
use homenode_undo::{Acting, Heartbeat, Options, RealHost};
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::json;

use crate::drain_file::DrainFile;
use crate::feed::Feed;
use crate::handler::Handler;
use crate::history::{self, History};
use crate::http::{About, HttpServer, Site};
use crate::managed::Managed;
use crate::reload::Reload;
use crate::role::Readers;
use crate::run::{Agent, Pace, Show};
use crate::server::Server;
use crate::service::Service;
use crate::setting_queue::SettingQueue;
use crate::trace::{TraceFile, Tracer};
use crate::usage_file::{Clock, UsageFile};
use crate::wall_clock::WallClock;

/// How long a restarted agent has to take over before the guard restores what the dead agent had set.
const GRACE: &str = "10s";

/// The last document of a run on a real host.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Summary {
    policies: Vec<LivePolicy>,
    agent_cpu_s: f64,
    kept: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
struct LivePolicy {
    policy: &'static str,
    vms: Vec<homenode_control::VmStatus>,
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// What manages the VMs.
    pub vms: Managed,
    /// Directory of the journal, the usage file and the sockets.
    pub state: PathBuf,
    /// Path of the history. By default it is next to the state, and a dry run has none.
    pub history: Option<PathBuf>,
    /// Where to serve HTTP over TCP, in addition to a socket in the state directory.
    pub listen: Option<Listen>,
    /// Path of the trace to write, if any.
    pub trace: Option<PathBuf>,
    /// Whether plans are carried out.
    pub mode: Mode,
    /// The file of settings that a run in mode `recommend` names, for operators who want the agent to act.
    pub settings: PathBuf,
    /// Whether Xen's trace is read, to see how long vCPUs wait.
    pub trace_waiting: bool,
    /// Whether homes and pins are left in force at the end.
    pub keep: bool,
    /// Time after which the run stops.
    pub duration: Option<Ns>,
    /// Commit of the build.
    pub commit: &'static str,
    /// Reloads of the agent's own settings.
    pub reload: Reload,
}

/// Runs the agent on this host.
///
/// # Errors
/// If there is no libvirt or no permission, or another agent runs.
pub fn run(
    run: &Run,
    config: &Config,
    output: &mut dyn Show,
    wake_signal: &WakeSignal,
) -> anyhow::Result<()> {
    let (vms, state, mode) = (&run.vms, &run.state, run.mode);
    let is_dry = mode == Mode::Observe;
    let service = Service::of_environment();
    let heard_by = service.clone();
    let heartbeat = Heartbeat::heard_by(move || heard_by.feed());
    let machine = vms.machine()?;
    // Comes first, because failing to create this file is a mistake on the command line: nothing must have been changed yet.
    let trace_file = run.trace.as_deref().map(TraceFile::create).transpose()?;
    let mut host = connect((run, config), &machine, wake_signal, &heartbeat)?;
    // A dry run leaves nothing on disk.
    let kept = (!is_dry).then_some(state.as_path());
    let (usage_file, usage) = UsageFile::open(kept, Clock::Wall);
    let mut control = Control::new(config.clone(), mode).with_usage(usage);
    let (drains, drained) = take_up(host.as_ref(), kept, &mut control);
    let control = Arc::new(Mutex::new(control));
    let clock = WallClock::start(Clock::Wall);
    let named = format!("{} at {vms}", machine.name);
    // Comes before the guard starts: opening a long history reads it in full, and meanwhile the agent sends no heartbeat.
    let (path, history) = begin_history(run, config, clock, (&named, &machine));
    let watched = |state| Watched::start(state, vms, &heartbeat);
    let mut guard = kept.map(watched).transpose()?;
    host.right_mut().set_guarded(guard.is_some());
    let handler = Handler {
        machine: Arc::new(machine.clone()),
        control: Arc::clone(&control),
        clock,
        drains,
        settings: SettingQueue::new(wake_signal),
    };
    let readers = Readers::of(&config.http)?;
    let server = kept.map(|state| Server::open(state, readers, handler.clone()));
    let server = server.transpose()?;
    let site = Site::new(
        Feed::new(clock),
        About::new(named.clone(), config, mode, run.commit),
        path.as_deref().filter(|_| history.is_kept()),
        (handler.clone(), run.reload.clone()),
    );
    let http = HttpServer::open_where_asked(run.listen, kept, (&config.http, readers), site)?;
    let mut agent = Agent {
        control: Arc::clone(&control),
        settings: handler.settings,
        reload: run.reload.clone(),
        service,
        usage: usage_file,
        history,
        feed: http.as_ref().map(|http| http.feed().clone()),
        trace: begin_trace(trace_file, &machine)?,
        output,
        commit: run.commit,
        wake_signal: wake_signal.clone(),
        duration: run.duration,
        period: config.period,
        pace: Pace::Real,
    };
    agent.announce(named, None, mode, Some(&run.settings));
    agent.announce_address(http.as_ref().and_then(HttpServer::url));
    let limits = limits_of(vms, &machine, config.policies);
    for limit in drained.iter().chain(&limits) {
        agent.notice(limit);
    }
    let notices = |host: &mut Box<dyn RealHost>| notices_of(host.as_mut(), guard.as_mut());
    agent.run(&mut host, notices, |host| !host.right().owns_its_state());
    drop((server, http));
    let was_robbed = !host.right().owns_its_state();
    give_back(run, host, guard.and_then(|guard| guard.guard), &control, output)?;
    anyhow::ensure!(
        !was_robbed,
        "the files in {} were removed while the agent ran, so it restored all VMs and ended; start it again",
        state.display()
    );
    Ok(())
}

/// Begins the trace, which replaces a former one.
fn begin_trace(file: Option<TraceFile>, machine: &Machine) -> anyhow::Result<Option<Tracer>> {
    let begin = |file| Tracer::begin_in(file, &machine.name, machine, WhenFull::LeaveOut);
    Ok(file.map(begin).transpose()?)
}

/// Returns the host's notices, and a notice if the guard was lost.
fn notices_of(host: &mut dyn RealHost, mut guard: Option<&mut Watched<'_>>) -> Vec<String> {
    let lost = guard.as_mut().and_then(|guard| guard.look());
    if let Some(guard) = guard {
        host.right_mut().set_guarded(guard.guard.is_some());
    }
    host.take_notices().into_iter().chain(lost).collect()
}

/// Takes over the homes and drained nodes of an earlier agent. Also returns a notice if a drain could not be fully taken over.
fn take_up(host: &dyn RealHost, kept: Option<&Path>, control: &mut Control) -> (DrainFile, Option<String>) {
    for vm in host.carried_over() {
        control.adopt(vm.vm, vm.home);
    }
    let drains = DrainFile::of(kept);
    let begun = drains.read().and_then(|nodes| {
        // A drained node may be gone: its repair can remove it.
        let there = nodes.intersection(&host.machine().node_set());
        if !there.is_empty() {
            let drained = control.drain(host.machine(), there.clone());
            drained.map_err(|error| {
                anyhow!("the nodes that an earlier agent drained cannot be drained again: {error}")
            })?;
        }
        match nodes.difference(&there) {
            gone if gone.is_empty() => Ok(()),
            gone => bail!("node {gone} was drained, but no longer exists"),
        }
    });
    (drains, begun.err().map(|error| error.to_string()))
}

/// Returns notices on what cannot be done on this host.
fn limits_of(vms: &Managed, machine: &Machine, policies: PolicySet) -> Vec<String> {
    let mut limits = machine.notes.clone();
    if machine.home_nodes().len() < 2 {
        let (idle, busy) = homenode_control::stages_by_need_of_nodes(policies);
        let (idle, busy) = (idle.join(", "), busy.join(", "));
        limits.push(format!(
            "this host has one NUMA node: {idle} have nothing to choose from; {busy} work as usual"
        ));
    }
    if matches!(vms, Managed::Kvm(Vms::Libvirt(uri)) if uri.starts_with("test:")) {
        limits.push(
            "libvirt's test driver has no processes: its VMs are listed, but not measured or changed"
                .to_owned(),
        );
    }
    limits
}

/// Connects to the host and to what manages its VMs.
fn connect(
    (run, config): (&Run, &Config),
    machine: &Machine,
    wake_signal: &WakeSignal,
    heartbeat: &Heartbeat,
) -> anyhow::Result<Box<dyn RealHost>> {
    let options = Options {
        state_dir: run.state.clone(),
        acting: match run.mode {
            Mode::Observe => Acting::DryRun,
            Mode::Recommend | Mode::Act => Acting::Live,
        },
        wake_signal: wake_signal.clone(),
        heartbeat: heartbeat.clone(),
        local_migration: config.local_migration.clone(),
        trace_waiting: run.trace_waiting,
        reserved_cpus: config.placement.reserved_cpus.clone(),
        ..Options::new(machine.clone())
    };
    run.vms.connect(options)
}

/// Begins the history of a run. A dry run has a history only if the operator gave its path.
fn begin_history(
    run: &Run,
    config: &Config,
    clock: WallClock,
    (named, machine): (&str, &Machine),
) -> (Option<PathBuf>, History) {
    let usual = || (run.mode != Mode::Observe).then(|| history::beside(&run.state));
    let path = run.history.clone().or_else(usual);
    let begin = |path: &PathBuf| {
        let what = (named.to_owned(), machine);
        History::begin(path, (config, run.mode), clock, what, run.commit)
    };
    let history = path.as_ref().map_or_else(History::none, begin);
    (path, history)
}

/// Ends a run: restores the VMs' settings, and reports what could not be restored.
fn give_back(
    run: &Run,
    mut host: Box<dyn RealHost>,
    guard: Option<Guard>,
    control: &Mutex<Control>,
    output: &mut dyn Show,
) -> anyhow::Result<()> {
    let failures = if run.keep {
        host.lift_limits()
    } else {
        host.restore().failures
    };
    let is_guarded = guard.is_some();
    // The guard restores the rest: it retries once the agent is gone.
    match guard {
        Some(guard) if failures.is_empty() => guard.goodbye(),
        guard => drop(guard),
    }
    let machine = host.machine().clone();
    // Dropping the host also releases its locks. This comes before printing, which may wait for a slow reader.
    drop(host);
    for failure in &failures {
        output.line(failure);
    }
    let control = control.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let summary = Summary {
        policies: vec![LivePolicy {
            policy: control.config().policies.name(),
            vms: control.status(&machine).vms,
        }],
        agent_cpu_s: cpu_time().as_secs_f64(),
        kept: run.keep,
    };
    output.object("live-summary", json!(summary));
    let cpu_time = format!("stopped after {:.2} s of CPU time", summary.agent_cpu_s);
    match last_words(run.keep, failures.len(), is_guarded, &run.state) {
        Ok(left) => output.line(&format!("{cpu_time}; {left}")),
        Err(left) => {
            output.line(&cpu_time);
            return Err(left);
        }
    }
    Ok(())
}

/// Returns a sentence on how the run left the VMs. If something was not restored, returns an error that says what still tries.
fn last_words(
    is_kept: bool,
    failures: usize,
    is_guarded: bool,
    state: &Path,
) -> anyhow::Result<&'static str> {
    let what = match (is_kept, failures) {
        (true, 0) => return Ok("homes and pins are left as they are"),
        (false, 0) => return Ok("homes and pins are released"),
        (true, _) => "homes and pins are left as they are, but not every limit could be lifted",
        (false, _) => "not everything could be restored",
    };
    let state = state.display();
    let who = match is_guarded {
        true => "the guard keeps trying; you can also run",
        false => "no guard keeps trying; run",
    };
    bail!("{what} (see above); {who} `homenode release --state {state}`")
}

/// Returns the CPU time that this process has used.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The agent's guard: the process that undoes the agent's changes if the agent dies. Each of the two watches the other.
struct Watched<'a> {
    state: &'a Path,
    vms: &'a Managed,
    heartbeat: &'a Heartbeat,
    guard: Option<Guard>,
    /// A notice from the start of the first guard, if any.
    begun_so: Option<String>,
    /// The last notice, kept so that it is not repeated every period.
    said: Option<String>,
}

impl<'a> Watched<'a> {
    fn start(state: &'a Path, vms: &'a Managed, heartbeat: &'a Heartbeat) -> anyhow::Result<Watched<'a>> {
        let (guard, said) = start_guard(state, vms, heartbeat)?;
        Ok(Watched {
            state,
            vms,
            heartbeat,
            guard: Some(guard),
            begun_so: said,
            said: None,
        })
    }

    /// Starts another guard if this one has ended or hangs. Returns a notice for the operator, if any.
    fn look(&mut self) -> Option<String> {
        if self.guard.as_mut().is_some_and(Guard::is_there) {
            return self.begun_so.take();
        }
        if let Some(lost) = self.guard.take() {
            lost.end();
        }
        let again = start_guard(self.state, self.vms, self.heartbeat);
        let said = match &again {
            Ok(_) => "the guard process had ended or hung; a new one has taken its place".to_owned(),
            Err(error) => format!(
                "the guard process ended or hung, and no new one can be started: {error:#}; until one runs, no VM is changed"
            ),
        };
        self.guard = again.ok().map(|(guard, _)| guard);
        if self.said.as_ref() == Some(&said) {
            return None;
        }
        self.said = Some(said.clone());
        Some(said)
    }
}

/// Starts a guard. Also returns a notice if the guard could not get a systemd unit of its own.
fn start_guard(
    state: &Path,
    vms: &Managed,
    heartbeat: &Heartbeat,
) -> anyhow::Result<(Guard, Option<String>)> {
    let exe = std::env::current_exe()
        .context("cannot find the file of the running program, which the guard needs")?;
    // An upgrade replaces the file of a running agent, but the kernel still has the old program.
    let exe = if exe.exists() {
        exe
    } else {
        "/proc/self/exe".into()
    };
    let state = state.as_os_str();
    let [guard, of_host, of_state, of_grace] = ["guard", "--host", "--state", "--grace"].map(OsStr::new);
    let host = vms.to_string();
    let arguments = [
        guard,
        of_host,
        OsStr::new(&host),
        of_state,
        state,
        of_grace,
        OsStr::new(GRACE),
    ];
    let arguments = arguments.map(OsStr::to_owned);
    let (guard, why_not_apart) = guard::spawn_apart(Path::new("/"), &exe, &arguments, heartbeat)?;
    let said = why_not_apart.map(|why| {
        format!("the guard has no unit of its own, because {why}: killing all processes of the agent's unit also kills the guard")
    });
    Ok((guard, said))
}

/// Runs the guard process: waits for the agent's end, and undoes its changes unless another agent takes over within `grace`.
/// Standard input is the pipe from the agent. `say` reports what could not be undone yet.
///
/// # Errors
/// If the guard cannot share the right to act on this host.
pub fn guard(vms: &Managed, state: &Path, grace: Ns, say: impl FnMut(&str)) -> anyhow::Result<()> {
    let (pipe, mut answers) = (std::io::stdin(), std::io::stdout());
    let root = Path::new("/");
    let patience = Patience {
        silence: SILENCE_MAX,
        grace: Duration::from_nanos(grace.0),
    };
    guard::run(
        pipe,
        &mut answers,
        (root, state),
        patience,
        vms.undoing(root),
        say,
    )?;
    Ok(())
}

/// The result of `homenode release`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Released {
    /// Number of VMs restored.
    pub count: usize,
    /// Further notices for the operator.
    pub notices: Vec<String>,
    /// If the journal was lost, why changes that it listed may still be in force.
    pub lost_journal: Option<String>,
}

/// Restores what the journal and the marks on VMs list. First ends the guard of a dead agent if that guard is stopped or hangs.
pub fn release(vms: &Managed, state: &Path) -> anyhow::Result<Released> {
    let options = Options {
        state_dir: state.to_owned(),
        ..Options::new(vms.machine()?)
    };
    let mut host = vms.connect(options)?;
    let undone = host.restore();
    anyhow::ensure!(undone.failures.is_empty(), "{}", undone.failures.join("\n"));
    let lost_journal = host.right().lost_journal().map(str::to_owned);
    let mut notices = host.take_notices();
    notices.retain(|notice| Some(notice) != lost_journal.as_ref());
    Ok(Released {
        count: undone.vms.len(),
        notices,
        lost_journal,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_words_of_a_run_never_say_that_all_is_given_back_where_it_is_not() {
        let words =
            |is_kept, failures, is_guarded| last_words(is_kept, failures, is_guarded, Path::new("/x"));
        assert_eq!(words(false, 0, true).unwrap(), "homes and pins are released");
        assert_eq!(
            words(true, 0, true).unwrap(),
            "homes and pins are left as they are"
        );
        let said = words(false, 2, true).unwrap_err().to_string();
        assert!(
            !said.contains("are released") && said.contains("guard keeps trying"),
            "{said}"
        );
        let said = words(false, 1, false).unwrap_err().to_string();
        assert!(
            said.contains("no guard") && said.contains("homenode release --state /x"),
            "{said}"
        );
        let said = words(true, 1, true).unwrap_err().to_string();
        assert!(said.contains("limit"), "{said}");
    }
}
