//! What came of a run, in figures that compare policies.

use homenode_units::{BytesPerSec, NodeMap, Ns};
use serde::Serialize;

/// What came of a run so far.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TwinReport {
    /// Name of the scenario.
    pub scenario: String,
    /// Name of the machine.
    pub machine: String,
    /// Seed of the run.
    pub seed: u64,
    /// Epoch of the contention solver.
    pub epoch_ns: Ns,
    /// Simulated time.
    pub at_ns: Ns,
    /// Every VM of the scenario, in its order.
    pub vms: Vec<VmReport>,
    /// Every node.
    pub nodes: NodeMap<NodeReport>,
}

/// One VM.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmReport {
    /// Name.
    pub name: String,
    /// Workload.
    pub workload: String,
    /// When it was started; `None` if that is still to come.
    pub arrival_s: Option<f64>,
    /// How long its program ran, from its first page touched to its end; `None` while it runs, and for idle VMs.
    pub runtime_s: Option<f64>,
    /// LLC misses over references, in [0, 1].
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that went to the node of the vCPU, in [0, 1].
    pub local_access_ratio: Option<f64>,
    /// How often its vCPUs changed nodes.
    pub node_changes: u64,
    /// Time that its vCPUs were runnable and did not run, in seconds, summed over them.
    pub waiting_s: f64,
}

/// One node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct NodeReport {
    /// Mean data rate of its memory controllers.
    pub bandwidth_bytes_per_s: BytesPerSec,
    /// CPUs that were busy, on average.
    pub cpus_busy: f64,
}
