//! The runtime library of a VM's program. Its behaviour is in `engine/runtime.rs`.

use homenode_units::Chance;

use crate::index::{IxVec, ThreadIx};
use crate::workload::Reuse;

/// The runtime library of one VM's program.
#[derive(Clone, Debug)]
pub(crate) struct Runtime {
    pub reuse: Reuse,
    pub pages_per_instruction: f64,
    /// Node of each vCPU when the program began.
    pub began_on: IxVec<ThreadIx, usize>,
    /// Number of each thread's instructions that have been handled.
    pub done: Vec<f64>,
    pub chance: Chance,
}
