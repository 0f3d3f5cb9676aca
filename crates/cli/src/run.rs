//! `homenode run`: the agent.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::Context;
use homenode_control::{Config, Control, Mode};
use homenode_host::{Host, HostError};
use homenode_linux::{ConnectError, LibvirtHost};
use homenode_machine::Machine;
use homenode_twin::{Scenario, Twin};
use homenode_units::Ns;
use serde::Serialize;

use crate::args::{HostArg, RunArgs};
use crate::bad_input;
use crate::desk::Desk;
use crate::output::Output;

/// The twin's machine where none is named.
const TWIN_MACHINE: &str = "r910";
/// Longest sleep before looking whether a signal came.
const LOOK_EVERY: Ns = Ns::from_millis(100);

/// Set by SIGINT and SIGTERM; a second one ends the process at once.
pub type Stop = Arc<AtomicBool>;

/// What a run was, said first: version, commit, host and every option, so that it can be repeated.
#[derive(Debug, Serialize)]
struct Start<'a> {
    version: &'static str,
    commit: &'static str,
    host: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    seed: Option<u64>,
    mode: Mode,
    config: &'a Config,
}

/// Runs the agent until it is stopped, its time is up, or the twin's scenario is done.
///
/// # Errors
/// Bad input, or a host that cannot be managed.
pub fn run(args: &RunArgs) -> anyhow::Result<()> {
    let config = config(args)?;
    let mut output = Output::new(args.json);
    let stop = stop_on_signals()?;
    match choose_host(args, &mut output)? {
        HostArg::Twin(what) => run_twin(args, &config, what.as_deref(), output, &stop),
        HostArg::Libvirt(uri) => crate::live::run(args, &config, uri.as_deref(), output, &stop),
    }
}

fn stop_on_signals() -> anyhow::Result<Stop> {
    let stop = Stop::default();
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&stop))?;
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}

fn config(args: &RunArgs) -> anyhow::Result<Config> {
    let mut config = match &args.config {
        Some(path) => homenode_machine::file::read_toml_file(path).map_err(bad_input)?,
        None => Config::default(),
    };
    config.period = args.period.unwrap_or(config.period);
    config.policies = args.policies.unwrap_or(config.policies);
    if config.period < Ns::from_millis(10) {
        return Err(bad_input(format!(
            "a period of {} is too short: at least 10ms",
            config.period
        )));
    }
    let busy_max = config.placement.link_busy_max;
    if !(busy_max > 0.0 && busy_max <= 1.0) {
        return Err(bad_input(format!(
            "placement.link_busy_max is {busy_max}; it lies above 0 and at most at 1"
        )));
    }
    Ok(config)
}

/// The host asked for; else this one, if libvirt answers and there is something to choose from; else the twin.
fn choose_host(args: &RunArgs, output: &mut Output) -> anyhow::Result<HostArg> {
    if let Some(host) = &args.host {
        return Ok(host.clone());
    }
    let why = match homenode_machine::sysfs::read(Path::new("/")) {
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

/// A loop over one host, and how it is shown.
pub struct Agent<'a> {
    /// State of the loop, shared with the desk.
    pub control: Arc<Mutex<Control>>,
    /// Where it is shown.
    pub output: &'a mut Output,
    /// Set when it shall stop.
    pub stop: &'a Stop,
    /// Host time after which it stops.
    pub duration: Option<Ns>,
    /// Time between samples.
    pub period: Ns,
    /// Wall-clock time that each simulated second takes: the twin's runs are watched.
    pub pace: Pace,
}

/// Whether a simulated second takes a second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pace {
    /// The host's own time passes, or nobody wants to wait.
    Own,
    /// Wait as long as is simulated.
    Watched,
}

impl Agent<'_> {
    /// Steps until stopped, out of time, or `done`. `notices` are what the host wants told beside its samples.
    pub fn run<H: Host>(
        &mut self,
        host: &mut H,
        mut notices: impl FnMut(&mut H) -> Vec<String>,
        done: impl Fn(&H) -> bool,
    ) {
        let mut started = None;
        let mut trouble: Option<HostError> = None;
        while !self.stop.load(Ordering::Relaxed) {
            match host.sample() {
                Err(error) => {
                    // Said once, not in every period that it lasts.
                    if trouble.as_ref() != Some(&error) {
                        self.output.line(&format!("{error}"));
                        self.output
                            .object("trouble", &serde_json::json!({ "message": error.to_string() }));
                        trouble = Some(error);
                    }
                }
                Ok(sample) => {
                    if trouble.take().is_some() {
                        self.output.line("the host answers again");
                    }
                    let at = sample.at;
                    let lock = || {
                        self.control
                            .lock()
                            .unwrap_or_else(std::sync::PoisonError::into_inner)
                    };
                    let begun = lock().begin(host.machine(), sample);
                    let answer = begun.commit(host);
                    let epoch = lock().finish(host.machine(), begun, answer);
                    self.output.epoch(&epoch);
                    let since = at.saturating_sub(*started.get_or_insert(at));
                    if self.duration.is_some_and(|duration| since >= duration) || done(host) {
                        break;
                    }
                }
            }
            for notice in notices(host) {
                self.output.line(&notice);
                self.output
                    .object("notice", &serde_json::json!({ "message": notice }));
            }
            self.wait(host);
        }
    }

    fn wait<H: Host>(&self, host: &mut H) {
        let mut left = self.period;
        while left > Ns::ZERO && !self.stop.load(Ordering::Relaxed) {
            let part = left.min(LOOK_EVERY);
            host.wait(part);
            if self.pace == Pace::Watched {
                std::thread::sleep(Duration::from_nanos(part.0));
            }
            left -= part;
        }
    }

    /// Says what is about to run.
    pub fn announce(&mut self, host: String, seed: Option<u64>, mode: Mode) {
        let control = self
            .control
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("HOMENODE_COMMIT"));
        let start = Start {
            version,
            commit,
            host,
            seed,
            mode,
            config: control.config(),
        };
        self.output.object("start", &start);
        let seed = seed.map(|seed| format!(", seed {seed}")).unwrap_or_default();
        let how = if mode == Mode::DryRun {
            ", dry run: nothing is touched"
        } else {
            ""
        };
        self.output.line(&format!(
            "homenode {version} ({commit}) on {}{seed}, policies {}, every {}{how}",
            start.host,
            start.config.policies.name(),
            self.period
        ));
    }
}

/// What a twin simulates.
pub struct TwinSpec {
    /// The machine.
    pub machine: Machine,
    /// Its VMs.
    pub scenario: Scenario,
    /// The seed.
    pub seed: u64,
}

/// Reads `twin`, `twin:MACHINE` or `twin:FILE.toml`.
///
/// # Errors
/// An unknown machine (with the nearest name), a bad file.
pub fn twin_spec(what: Option<&str>, seed: Option<u64>) -> anyhow::Result<TwinSpec> {
    let preset = |name: &str| homenode_machine::preset(name).map_err(bad_input);
    let is_file = |name: &&str| name.ends_with(".toml") || name.contains('/');
    let (machine, scenario) = match what {
        None => (preset(TWIN_MACHINE)?, Scenario::tavo_mixed()),
        Some(path) if is_file(&path) => {
            let text = homenode_machine::file::read_text_file(path).map_err(bad_input)?;
            let scenario = Scenario::from_toml(path, &text).map_err(bad_input)?;
            (
                preset(scenario.machine.as_deref().unwrap_or(TWIN_MACHINE))?,
                scenario,
            )
        }
        Some(TWIN_MACHINE) => (preset(TWIN_MACHINE)?, Scenario::tavo_mixed()),
        Some(name) => {
            let machine = preset(name)?;
            let scenario = Scenario::mixed_for(&machine, seed.unwrap_or(1));
            (machine, scenario)
        }
    };
    let seed = seed.unwrap_or(scenario.seed);
    Ok(TwinSpec {
        machine,
        scenario,
        seed,
    })
}

impl TwinSpec {
    /// The simulated host at its beginning.
    ///
    /// # Errors
    /// A scenario that the machine cannot run.
    pub fn start(&self) -> anyhow::Result<Twin> {
        Twin::new(self.machine.clone(), &self.scenario, self.seed).map_err(bad_input)
    }
}

fn run_twin(
    args: &RunArgs,
    config: &Config,
    what: Option<&str>,
    mut output: Output,
    stop: &Stop,
) -> anyhow::Result<()> {
    let spec = twin_spec(what, args.seed)?;
    let mut twin = spec.start().context("the twin cannot start")?;
    let mode = if args.dry_run { Mode::DryRun } else { Mode::Act };
    let control = Arc::new(Mutex::new(Control::new(config.clone(), mode)));
    // Only where asked for: a VM that really starts must not be answered from a simulation by accident.
    let machine = Arc::new(spec.machine.clone());
    let desk = args
        .state
        .as_deref()
        .map(|state| Desk::open(state, machine, Arc::clone(&control)))
        .transpose()?;
    let mut agent = Agent {
        control,
        output: &mut output,
        stop,
        duration: args.duration,
        period: config.period,
        pace: if args.fast { Pace::Own } else { Pace::Watched },
    };
    let name = format!(
        "the twin of {} with scenario {}",
        spec.machine.name, spec.scenario.name
    );
    agent.announce(name, Some(spec.seed), mode);
    agent.run(&mut twin, |_| Vec::new(), Twin::finished);
    drop(desk);
    crate::summary::compare(&spec, config, &mut output)
}

/// Connection errors that the user's input caused, apart from the world's.
pub fn connect_error(error: ConnectError) -> anyhow::Error {
    match error {
        ConnectError::BadUri { .. } => bad_input(error),
        other => other.into(),
    }
}
