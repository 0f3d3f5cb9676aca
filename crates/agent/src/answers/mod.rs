//! Answers built from the loop's state.

pub(crate) mod maintenance;
pub(crate) mod permits;
pub(crate) mod recommendations;
pub(crate) mod report;
pub(crate) mod reservations;
pub(crate) mod working_sets;

use homenode_api::answer::{Placed, PlacedFigures};
use homenode_policy::arrange::Beside;
use homenode_policy::placement::{Placement, Unplaceable};

/// Returns the nodes where a VM would be placed, and what is predicted for it there.
pub fn placed(found: &Result<Placement, Unplaceable>, beside: Option<Beside>) -> Placed {
    match found {
        Ok(placement) => Placed {
            nodes: Some(placement.nodes.clone()),
            reasons: placement
                .reasons()
                .into_iter()
                .chain(beside.map(|beside| beside.to_string()))
                .collect(),
            beside,
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
            figures: PlacedFigures::Short {
                shortages: unplaceable.shortages.clone(),
            },
        },
    }
}
