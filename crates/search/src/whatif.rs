//! Asks the agent, in the middle of a scenario, how fast VMs would be with other homes.

use homenode_api::answer::{Forecast, Simulated};
use homenode_api::{ApiError, Homes, forecast};
use homenode_control::{Config, Control, Mode};
use homenode_reproduce::engine;
use homenode_twin::{Setup, TwinError};
use homenode_units::Ns;

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum WhatIfError {
    /// The request is invalid.
    #[error("{0}")]
    Input(String),
    /// A scenario that the machine cannot run.
    #[error(transparent)]
    Twin(#[from] TwinError),
    /// The agent refuses.
    #[error(transparent)]
    Refused(ApiError),
    /// Any other failure, such as too little data.
    #[error(transparent)]
    Failed(#[from] anyhow::Error),
}

/// Runs the agent on a scenario up to a time, and then asks it. `look` receives the progress; if it fails, the run ends.
///
/// # Errors
/// A time outside the scenario, or a refusal by the simulator or the agent.
pub fn ask(
    setup: &Setup,
    at: Ns,
    homes: &Homes,
    mut look: impl FnMut(Ns) -> anyhow::Result<()>,
) -> Result<Forecast, WhatIfError> {
    let (name, duration) = (&setup.scenario.name, setup.scenario.duration);
    if at > duration {
        return Err(WhatIfError::Input(format!(
            "scenario {name} lasts only {duration}, not {at}; choose an earlier time with --at"
        )));
    }
    let control = Control::new(Config::default(), Mode::Act);
    let (mut twin, mut control) =
        engine::run_until(setup.start()?, control, at, |cycle, _| look(cycle.status.at_ns))?;
    let now = twin.now();
    if now < at {
        return Err(WhatIfError::Input(format!(
            "all programs of scenario {name} ended by {now}; choose an earlier time with --at"
        )));
    }
    control.step(&mut twin).map_err(anyhow::Error::new)?;
    let answer = forecast(&control, &setup.machine, homes).map_err(|complaint| match complaint {
        ApiError::NotYet { why } => anyhow::anyhow!("{why}; ask about a later time with --at").into(),
        other => WhatIfError::Refused(other),
    })?;
    let simulated = Some(Simulated {
        scenario: name.clone(),
        machine: setup.machine.name.clone(),
        seed: setup.seed,
    });
    Ok(Forecast { simulated, ..answer })
}
