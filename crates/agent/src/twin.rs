//! Runs the agent on the simulated host.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use homenode_api::answer::Placed;
use homenode_api::http::Listen;
use homenode_control::{Config, Control, Mode, Request as Ask};
use homenode_host::{Host as _, WakeSignal};
use homenode_machine::Machine;
use homenode_recorder::WhenFull;
use homenode_twin::{Scenario, Setup, Twin, VmSpec};
use homenode_units::{Bytes, Ns};

use crate::answers::{self, Predictions};
use crate::feed::Feed;
use crate::handler::Handler;
use crate::history::History;
use crate::http::{About, HttpServer, Site};
use crate::reload::Reload;
use crate::role::Readers;
use crate::run::{Agent, Pace, Show};
use crate::server::Server;
use crate::service::Service;
use crate::setting_queue::SettingQueue;
use crate::trace::Tracer;
use crate::usage_file::{Clock, UsageFile};
use crate::wall_clock::WallClock;

/// Returns the nodes where a VM would be placed on an idle machine of the simulator, as its first VM.
///
/// # Errors
/// If the machine cannot be simulated.
pub fn place(machine: Machine, ask: &Ask) -> anyhow::Result<Placed> {
    let mut idle = Scenario::of("idle", vec![VmSpec::new("none", 1, Bytes::from_gib(1), "idle")]);
    // The scenario's only VM arrives long after the question is answered.
    idle.vms[0].arrival = Ns::from_secs(3600);
    let mut twin = Twin::new(machine, &idle, 1)?;
    let sample = twin.sample()?;
    let mut control = Control::new(Config::default(), Mode::Observe);
    control.begin(twin.machine(), sample);
    Ok(answers::placed(
        &control,
        twin.machine(),
        ask,
        Predictions::Unknown,
    ))
}

/// Options of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Directory of the usage file and the sockets. With `None`, the agent serves no requests on sockets, so a real VM's start is
    /// not answered from a simulation by accident.
    pub state: Option<PathBuf>,
    /// Path of the history, if one is kept.
    pub history: Option<PathBuf>,
    /// Where to serve HTTP over TCP, in addition to a socket in the state directory.
    pub listen: Option<Listen>,
    /// Path of the trace to write, if any.
    pub trace: Option<PathBuf>,
    /// Whether plans are carried out.
    pub mode: Mode,
    /// How simulated time relates to wall-clock time.
    pub pace: Pace,
    /// Simulated time after which the run stops.
    pub duration: Option<Ns>,
    /// Commit of the build.
    pub commit: &'static str,
    /// Reloads of the agent's own settings.
    pub reload: Reload,
}

/// The servers of a run that has ended. They answer from its last state until they are dropped.
pub struct Served {
    _server: Option<Server>,
    http: Option<HttpServer>,
}

impl Served {
    /// Returns the address for browsers, if the run serves HTTP over TCP.
    pub fn url(&self) -> Option<String> {
        self.http.as_ref().and_then(HttpServer::url)
    }
}

/// Runs the agent on the simulated host until it is stopped, its time is up, or every program has ended. The servers answer until
/// the result is dropped.
///
/// # Errors
/// If the machine cannot run the scenario, or the state directory cannot hold the agent's socket.
pub fn run(
    run: &Run,
    config: &Config,
    spec: &Setup,
    output: &mut dyn Show,
    wake_signal: &WakeSignal,
) -> anyhow::Result<Served> {
    let mut twin = spec.start().context("the simulated host cannot start")?;
    let state = run.state.as_deref();
    let (usage_file, usage) = UsageFile::open(state, Clock::Host);
    let control = Control::new(config.clone(), run.mode).with_usage(usage);
    let control = Arc::new(Mutex::new(control));
    let clock = WallClock::start(Clock::Host);
    let handler = Handler {
        machine: Arc::new(spec.machine.clone()),
        control: Arc::clone(&control),
        clock,
        drains: crate::drain_file::DrainFile::default(),
        settings: SettingQueue::new(wake_signal),
    };
    let to_close = handler.settings.clone();
    let readers = Readers::of(&config.http)?;
    let server = state.map(|state| Server::open(state, readers, handler.clone()));
    let server = server.transpose()?;
    let (machine, scenario) = (&spec.machine.name, &spec.scenario.name);
    let name = format!("the twin of {machine} with scenario {scenario}");
    let begin = |path: &PathBuf| {
        History::begin(
            path,
            (config, run.mode),
            clock,
            (name.clone(), &spec.machine),
            run.commit,
        )
    };
    let history = run.history.as_ref().map_or_else(History::none, begin);
    let site = Site::new(
        Feed::new(clock),
        About::new(name.clone(), config, run.mode, run.commit),
        run.history.as_deref().filter(|_| history.is_kept()),
        (handler.clone(), run.reload.clone()),
    );
    let http = HttpServer::open_where_asked(run.listen, state, (&config.http, readers), site)?;
    let trace = run
        .trace
        .as_deref()
        .map(|path| Tracer::begin(path, &name, &spec.machine, WhenFull::Wait));
    let trace = trace.transpose()?;
    let mut agent = Agent {
        control,
        settings: handler.settings,
        reload: run.reload.clone(),
        service: Service::of_environment(),
        usage: usage_file,
        history,
        feed: http.as_ref().map(|http| http.feed().clone()),
        trace,
        output,
        commit: run.commit,
        wake_signal: wake_signal.clone(),
        duration: run.duration,
        period: config.period,
        pace: run.pace,
    };
    agent.announce(name, Some(spec.seed), run.mode, None);
    agent.announce_address(http.as_ref().and_then(HttpServer::url));
    agent.run(&mut twin, |_| Vec::new(), Twin::finished);
    to_close.close();
    run.reload.close();
    Ok(Served {
        _server: server,
        http,
    })
}
