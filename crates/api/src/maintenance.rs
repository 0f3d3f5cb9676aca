//! Drained nodes, and pauses.

use homenode_control::DrainStatus;
use homenode_units::Ns;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Maintenance of the whole host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Maintenance {
    /// The host's clock.
    pub at_ns: Ns,
    /// Drained nodes, ascending, with the VMs left on them.
    pub drains: Vec<DrainStatus>,
    /// How much longer the pause lasts; `None` if the agent is not paused.
    pub paused_for_ns: Option<Ns>,
    /// A note for the operator, if any.
    pub note: Option<String>,
}
