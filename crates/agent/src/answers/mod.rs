//! What the loop knows, as answers.

pub mod forecast;
pub mod permits;
pub mod report;
pub mod working_sets;

use homenode_api::answer::{Placed, PlacedFigures};
use homenode_policy::placement::{Placement, Unplaceable};

/// Where a VM would go.
pub fn placed(found: &Result<Placement, Unplaceable>) -> Placed {
    match found {
        Ok(placement) => Placed {
            nodes: Some(placement.nodes.clone()),
            reasons: placement.reasons(),
            figures: PlacedFigures::Fits {
                matched: placement.matched,
                needs: placement.requirement.into(),
                left: placement.capacity.into(),
                bandwidth_from: placement.bandwidth_from,
            },
        },
        Err(unplaceable) => Placed {
            nodes: None,
            reasons: vec![unplaceable.to_string()],
            figures: PlacedFigures::Short {
                shortages: unplaceable.shortages.clone(),
            },
        },
    }
}
