//! Nodes that are to be empty, and pauses.

use homenode_control::DrainStatus;
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the operator wants of the whole host for a while.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Maintenance {
    /// The host's clock.
    pub at_ns: Ns,
    /// Nodes that are to be empty, ascending, with what is left on them.
    pub drains: Vec<DrainStatus>,
    /// How much longer nothing is changed; `None` where the agent is not paused.
    pub paused_for_ns: Option<Ns>,
    /// What there is to know of it, if anything.
    pub note: Option<String>,
}
