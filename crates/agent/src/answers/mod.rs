//! Answers built from the loop's state.

pub(crate) mod maintenance;
pub(crate) mod permits;
pub(crate) mod recommendations;
pub(crate) mod report;
pub(crate) mod reservations;
pub(crate) mod working_sets;

use homenode_api::answer::{CrowdedHome, Placed, PlacedFigures};
use homenode_control::{Control, Request};
use homenode_machine::Machine;

/// Whether the agent has watched the host for long enough to predict speeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Predictions {
    /// The agent has watched the host for long enough.
    Known,
    /// The answer comes from a process that looked at the host only for this answer.
    Unknown,
}

/// Predicted speeds above this are not a loss.
const SLOWED_AT: f64 = 0.99;

/// Returns the nodes where a VM would be placed, and what is predicted for it there. If it fits nowhere, returns the best home
/// with its price.
pub(crate) fn placed(
    control: &Control,
    machine: &Machine,
    request: &Request,
    predictions: Predictions,
) -> Placed {
    let is_known = predictions == Predictions::Known;
    let found = control.place(machine, request);
    let beside = found.as_ref().ok().filter(|_| is_known);
    let beside = beside.map(|placement| control.beside(machine, request, &placement.nodes));
    match found {
        Ok(placement) => Placed {
            nodes: Some(placement.nodes.clone()),
            reasons: placement
                .reasons()
                .into_iter()
                .chain(beside.map(|beside| beside.to_string()))
                .collect(),
            beside,
            crowded: None,
            figures: PlacedFigures::Fits {
                matched: placement.matched,
                needs: placement.requirement.into(),
                left: placement.capacity.into(),
                cpus_stay: placement.cpus_stay,
                bandwidth_from: placement.bandwidth_from,
            },
        },
        Err(unplaceable) => Placed {
            nodes: None,
            beside: None,
            reasons: vec![unplaceable.to_string()],
            crowded: crowded(control, machine, request, is_known),
            figures: PlacedFigures::Short {
                shortages: unplaceable.shortages,
            },
        },
    }
}

fn crowded(control: &Control, machine: &Machine, request: &Request, is_known: bool) -> Option<CrowdedHome> {
    let (home, price) = control.place_crowded(machine, request)?;
    let mut slowed = price.neighbours;
    slowed.retain(|one| is_known && one.speed < SLOWED_AT);
    slowed.sort_by(|a, b| a.speed.total_cmp(&b.speed));
    Some(CrowdedHome {
        nodes: home.nodes,
        shortages: home.shortages,
        own_speed: is_known.then_some(price.own),
        slowed,
    })
}
