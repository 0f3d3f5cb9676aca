//! A scenario's run under a set of policies, and what came of each VM.

use homenode_control::{Config, Control, Event, Mode};
use homenode_host::Host;
use homenode_machine::Machine;
use homenode_twin::{EPOCH_DEFAULT, Scenario, Twin, TwinReport};
use homenode_units::Ns;

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Run {
    /// Figures of VMs and nodes.
    pub report: TwinReport,
    /// Decisions carried out.
    pub decisions: usize,
}

/// Runs a scenario to its end, or for its duration.
///
/// # Errors
/// When the twin cannot start.
pub fn run(
    machine: &Machine,
    scenario: &Scenario,
    seed: u64,
    config: Config,
    mut told: impl FnMut(&Event),
) -> anyhow::Result<Run> {
    let period = config.period;
    let mut twin = Twin::with_epoch(machine.clone(), scenario, seed, EPOCH_DEFAULT)?;
    let mut control = Control::new(config, Mode::Act);
    let mut decisions = 0;
    while !twin.finished() && twin.now() < scenario.duration {
        let epoch = control.step(&mut twin)?;
        for event in &epoch.events {
            told(event);
            decisions += usize::from(matches!(event, Event::Decided { .. }));
        }
        twin.wait(Ns(scenario.duration.0.saturating_sub(twin.now().0)).min(period));
    }
    Ok(Run {
        report: twin.report(),
        decisions,
    })
}

/// Runtime of each VM over its runtime in `base`; instructions where a program does not end in both.
pub fn slow_downs(base: &TwinReport, other: &TwinReport) -> Vec<f64> {
    let pairs = base.vms.iter().zip(&other.vms);
    pairs
        .map(|(a, b)| match (a.runtime_s, b.runtime_s) {
            (Some(a), Some(b)) => b / a,
            _ => a.instructions_g / b.instructions_g,
        })
        .filter(|ratio| ratio.is_finite())
        .collect()
}
