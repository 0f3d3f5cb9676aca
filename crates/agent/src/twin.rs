//! The agent on the twin.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use homenode_control::{Config, Control, Mode};
use homenode_host::Bell;
use homenode_twin::Setup;
use homenode_twin::Twin;
use homenode_units::Ns;

use crate::bill_file::{BillFile, Clock};
use crate::handler::Handler;
use crate::run::{Agent, Pace, Show};
use crate::server::Server;
use crate::setting_queue::SettingQueue;

/// How to run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Where bill and socket lie, if anybody is to ask: a VM that really starts must not be answered from a simulation by
    /// accident.
    pub state: Option<PathBuf>,
    /// Whether plans are carried out.
    pub mode: Mode,
    /// Whether a simulated second takes a second.
    pub pace: Pace,
    /// Simulated time after which it stops.
    pub duration: Option<Ns>,
    /// Of which commit the program is.
    pub commit: &'static str,
}

/// Runs the agent on the twin: until it is stopped, its time is up, or every program has ended.
///
/// # Errors
/// A scenario that the machine cannot run; a state directory that cannot hold the agent's socket.
pub fn run(
    run: &Run,
    config: &Config,
    spec: &Setup,
    output: &mut dyn Show,
    bell: &Bell,
) -> anyhow::Result<()> {
    let mut twin = spec.start().context("the twin cannot start")?;
    let state = run.state.as_deref();
    let (bill_file, bill) = BillFile::open(state, Clock::Host);
    let control = Control::new(config.clone(), run.mode).with_bill(bill);
    let control = Arc::new(Mutex::new(control));
    let settings = SettingQueue::new(bell);
    let handler = Handler {
        machine: Arc::new(spec.machine.clone()),
        control: Arc::clone(&control),
    };
    let server = state.map(|state| Server::open(state, handler, settings.clone()));
    let server = server.transpose()?;
    let mut agent = Agent {
        control,
        settings,
        bill: bill_file,
        output,
        commit: run.commit,
        bell: bell.clone(),
        duration: run.duration,
        period: config.period,
        pace: run.pace,
    };
    let (machine, scenario) = (&spec.machine.name, &spec.scenario.name);
    let name = format!("the twin of {machine} with scenario {scenario}");
    agent.announce(name, Some(spec.seed), run.mode);
    agent.run(&mut twin, |_| Vec::new(), Twin::finished);
    drop(server);
    Ok(())
}
