//! Answers about recommendations, modes and reservations.

use homenode_control::recommendations::State;
use homenode_host::{Act, Mode};
use homenode_units::{Bytes, Ns, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::time::WallTime;

/// The recommendations of policies, and their states.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Recommendations {
    /// The remembered recommendations, by number: all open ones, and the newest closed ones.
    pub recommendations: Vec<Recommendation>,
}

/// A change of a VM that a policy recommends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Recommendation {
    /// The recommendation's number in this run of the agent.
    pub id: u64,
    /// When the recommendation was made.
    pub time: WallTime,
    /// The VM's name.
    pub vm: String,
    /// The VM's UUID.
    pub vm_id: VmId,
    /// The policy that recommends it.
    pub policy: String,
    /// The action.
    pub action: Act,
    /// The action in words.
    pub text: String,
    /// Why the policy recommends it.
    pub reason: String,
    /// Predicted gain, as a share of the VM's speed: 0.12 means 12 percent faster; `null` if nothing is predicted.
    pub gain: Option<f64>,
    /// Numbers of other recommendations made at the same time. The gain is predicted for all of them together.
    pub together: Vec<u64>,
    /// When the recommendation expires unless the policy renews it; if it is over, when it ended.
    pub expires: WallTime,
    /// Whether the recommendation is open, and otherwise how it ended.
    pub state: State,
}

/// A VM's mode was set.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ModeSet {
    /// The VM.
    pub vm: String,
    /// How far decisions about the VM may go; `None` if only the modes of the run and its policies limit them.
    pub mode: Option<Mode>,
    /// How long the VM has this mode before its own applies again; `None` if this is its own from now on.
    #[serde(default)]
    pub span_ns: Option<Ns>,
    /// A note for the operator.
    pub note: Option<String>,
}

/// Nodes reserved for VMs that do not run yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Reservations {
    /// The reservations, oldest first.
    #[serde(alias = "promises")]
    pub reservations: Vec<OpenReservation>,
}

/// Nodes reserved for a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OpenReservation {
    /// The reservation's number.
    pub id: u64,
    /// The VM's name, if libvirt's hook announced it.
    pub vm: Option<String>,
    /// The nodes, as a list (`0-1`).
    pub nodes: String,
    /// Reserved vCPUs.
    pub vcpus: u32,
    /// Reserved memory.
    pub memory_bytes: Bytes,
    /// When the reservation was made.
    pub made: WallTime,
    /// When the reservation expires unless the VM appears.
    pub expires: WallTime,
}

/// A reservation was dropped.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ReservationDropped {
    /// The reservation's number.
    pub id: u64,
}
