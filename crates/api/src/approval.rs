//! What waits for the operator, how far the agent may go, and what it has promised: answers.

use homenode_control::recommendations::State;
use homenode_host::{Act, Mode};
use homenode_units::{Bytes, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::time::WallTime;

/// What policies would do, and what came of that.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Recommendations {
    /// Those that are remembered, by number: all that are not over, and the newest of the others.
    pub recommendations: Vec<Recommendation>,
}

/// What a policy would do to a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Recommendation {
    /// Its number in this run of the agent.
    pub id: u64,
    /// When it was made.
    pub time: WallTime,
    /// The VM's name.
    pub vm: String,
    /// Its UUID.
    pub vm_id: VmId,
    /// Who recommends it.
    pub policy: String,
    /// What would be done.
    pub action: Act,
    /// The same in words.
    pub text: String,
    /// Why.
    pub reason: String,
    /// Predicted gain, as a share of the VM's speed: 0.12 is 12 percent faster; `null` where nothing is predicted.
    pub gain: Option<f64>,
    /// Others that were recommended at the same time; the gain is predicted for all of them together.
    pub together: Vec<u64>,
    /// When it ends unless it is wanted again; of one that is over when it ended.
    pub expires: WallTime,
    /// How far it has come.
    pub state: State,
}

/// It was said how far decisions about a VM go.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct ModeSet {
    /// Which VM.
    pub vm: String,
    /// How far at most; `None` where they go as far as the run and its policies.
    pub mode: Option<Mode>,
    /// What the operator should know of it.
    pub note: Option<String>,
}

/// Nodes that are promised to VMs which do not run yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Promises {
    /// The oldest first.
    pub promises: Vec<OpenPromise>,
}

/// Nodes that are promised to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct OpenPromise {
    /// Its number.
    pub id: u64,
    /// The VM's name, where libvirt's hook told it.
    pub vm: Option<String>,
    /// The nodes, as a list (`0-1`).
    pub nodes: String,
    /// vCPUs that are promised.
    pub vcpus: u32,
    /// Memory that is promised.
    pub memory_bytes: Bytes,
    /// When it was made.
    pub made: WallTime,
    /// When it ends unless its VM appears.
    pub expires: WallTime,
}

/// A promise was taken back.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
pub struct PromiseDropped {
    /// Its number.
    pub id: u64,
}
