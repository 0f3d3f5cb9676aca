//! The outcome of a run, in figures that compare policies.
//!
//! # Terms
//!
//! - *Access*: an LLC miss of a VM's program, counted at the node whose memory answers it. Writes back, first touches
//!   and page moves are traffic (bytes of controllers and links), not accesses.
//! - *Imbalance*: standard deviation over mean of the accesses by node, nodes without memory left out [Policies, section 3.5.2]:
//!   0 if all nodes answer alike, `sqrt(nodes - 1)` if one node answers all.
//! - *Load of a link*: bytes that it carried over those that it could have carried.
//! - *Interconnect load*: for each second the load of the most loaded link, averaged over seconds [Policies,
//!   section 3.5.2].
//!
//! Rates and counts are those since the mark ([`crate::Twin::mark`]), or since the start.

use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, NodeId, NodeMap, Ns, Permit};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The outcome of a run so far.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
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
    /// Time from which the figures below count: 0, or the mark.
    pub measured_from_ns: Ns,
    /// Every VM of the scenario, in its order.
    pub vms: Vec<VmReport>,
    /// Every node.
    #[serde(rename = "node_loads", serialize_with = "on_nodes")]
    #[schemars(with = "Vec<OnNode<NodeReport>>")]
    pub nodes: NodeMap<NodeReport>,
    /// Every link, in the machine's order.
    pub links: Vec<LinkReport>,
    /// Imbalance of the accesses of all VMs by node; `None` before the first.
    pub imbalance: Option<f64>,
    /// Mean over seconds of the load of the most loaded link, in [0, 1]; `None` before a second has passed, and if no link's
    /// bandwidth is known.
    pub interconnect_load: Option<f64>,
    /// Events of the scenario that have come so far.
    pub events: Vec<EventReport>,
    /// Requests of the scenario that the machine cannot meet, in sentences: they were left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A value of a node, as an object that names the node.
#[derive(Serialize, Deserialize, JsonSchema)]
struct OnNode<T> {
    node: NodeId,
    #[serde(flatten)]
    of: T,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct Accesses {
    accesses: u64,
}

fn on_nodes<S: Serializer>(nodes: &NodeMap<NodeReport>, s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(nodes.iter().map(|(node, of)| OnNode { node, of }))
}

fn accesses_on_nodes<S: Serializer>(nodes: &NodeMap<u64>, s: S) -> Result<S::Ok, S::Error> {
    let named = nodes.iter().map(|(node, accesses)| OnNode {
        node,
        of: Accesses { accesses: *accesses },
    });
    s.collect_seq(named)
}

fn accesses_from_nodes<'de, D: Deserializer<'de>>(d: D) -> Result<NodeMap<u64>, D::Error> {
    let named = Vec::<OnNode<Accesses>>::deserialize(d)?;
    Ok(named.into_iter().map(|on| (on.node, on.of.accesses)).collect())
}

/// The outcome of an event.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EventReport {
    /// When it happened.
    pub at_s: f64,
    /// Name of its VM.
    pub vm: String,
    /// Its kind, as in the scenario's file.
    pub event: &'static str,
    /// Its outcome.
    pub result: EventResult,
    /// Why not all of it was done, or another remark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How far an event got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventResult {
    /// All of it was done.
    Done,
    /// It is going on.
    Running,
    /// Not all of it was possible.
    Partly,
    /// Nothing of it was possible.
    Skipped,
}

/// One VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VmReport {
    /// Name.
    pub name: String,
    /// Workload.
    pub workload: String,
    /// When it was started; `None` if it has not been yet.
    pub arrival_s: Option<f64>,
    /// How long its last program ran, from its first page touched to its end, whatever the mark; `None` while it runs, and
    /// for idle VMs.
    pub runtime_s: Option<f64>,
    /// Its programs so far, if it runs several, whatever the mark.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<ProgramReport>,
    /// Each of its starts, and the outcome: the figures above are those of the last.
    pub starts: Vec<StartReport>,
    /// Its memory policy now, and how many times the host was given another, whatever the mark.
    pub memory_policy: MemoryPolicy,
    /// See [`VmReport::memory_policy`].
    pub policy_changes: u32,
    /// Instructions of its program, in thousand millions, over all vCPUs.
    pub instructions_g: f64,
    /// LLC misses over references, in [0, 1].
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that went to the node of the vCPU, in [0, 1].
    pub local_access_ratio: Option<f64>,
    /// Memory accesses by the node that answered them.
    #[serde(
        rename = "node_accesses",
        serialize_with = "accesses_on_nodes",
        deserialize_with = "accesses_from_nodes"
    )]
    #[schemars(with = "Vec<OnNode<Accesses>>")]
    pub accesses_by_node: NodeMap<u64>,
    /// Imbalance of these; `None` if there are none.
    pub imbalance: Option<f64>,
    /// Pages that its guest's kernel moved (AutoNUMA), and the CPU time in seconds that it took to look for them.
    pub guest_pages_moved: u64,
    /// How many times the host's AutoNUMA moved a vCPU to its memory.
    pub vcpus_drawn: u64,
    /// See [`VmReport::guest_pages_moved`].
    pub guest_scan_s: f64,
    /// Pages that the host moved for a policy.
    pub host_pages_moved: u64,
    /// Work of the host's kernel to bring the VM's pages to where they are used (`kernel.numa_balancing`, or a memory policy
    /// with `+autonuma`), since that began; absent if the kernel does nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balancing: Option<BalancingReport>,
    /// Pages that its guest released; absent if nothing is notified of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub releases: Option<ReleaseReport>,
    /// How many times its vCPUs changed nodes.
    pub node_changes: u64,
    /// Time that its vCPUs were runnable but did not run, in seconds, summed over them.
    pub waiting_s: f64,
    /// Bytes that its program requested from devices, including those still under way.
    pub io_bytes: u64,
    /// Times that its clients waited, if its threads rest between pieces of work; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestReport>,
    /// Effects of its I/O on its pages, whatever the mark; absent if it has no driver domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_domain: Option<FlipReport>,
    /// Its permit and its use of it; absent if it booked nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permit: Option<PermitReport>,
    /// State of its memory, if some may be taken.
    pub memory: Option<MemoryReport>,
}

impl VmReport {
    /// Returns how long each program ran that was begun, over all starts, in seconds; `None` for one that did not end.
    pub fn runtimes_s(&self) -> impl Iterator<Item = Option<f64>> {
        self.starts
            .iter()
            .flat_map(|start| start.runtimes_s.iter().copied())
    }

    /// Returns the time of all programs together, over all starts, in seconds; `None` if one did not end.
    pub fn whole_s(&self) -> Option<f64> {
        self.runtimes_s().sum()
    }

    /// Returns 10^9 instructions per second that it had work; `None` if it had none, or executed nothing.
    pub fn speed(&self) -> Option<f64> {
        let busy_s = self.busy_s();
        (self.instructions_g > 0.0 && busy_s > 0.0).then(|| self.instructions_g / busy_s)
    }

    /// Returns the time in which [`VmReport::instructions_g`] were executed, in seconds.
    pub fn busy_s(&self) -> f64 {
        self.starts.iter().map(|start| start.busy_s).sum()
    }

    /// Returns when it was first started, in seconds; `None` if it never was.
    pub fn first_arrival_s(&self) -> Option<f64> {
        self.starts.first().map(|start| start.arrival_s)
    }
}

/// Counts of a kernel's balancing of a VM's memory, as in the host's `/proc/vmstat`. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BalancingReport {
    /// How many times it went through all of the VM's memory.
    pub passes: u64,
    /// Pages that it marked, to see which node uses them next (`numa_pte_updates`).
    pub pages_marked: u64,
    /// Uses of marked pages, one for a huge page (`numa_hint_faults`).
    pub faults: u64,
    /// Faults from the page's own node (`numa_hint_faults_local`).
    pub faults_local: u64,
    /// Pages that it moved (`numa_pages_migrated`).
    pub pages_moved: u64,
    /// CPU time of marking, in seconds.
    pub scan_s: f64,
}

/// Pieces of a program's work from one rest to the next, like a server's requests: times from the arrival of work to its
/// end, including waits for a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestReport {
    /// How many were done.
    pub count: u64,
    /// Their mean time, in milliseconds.
    pub mean_ms: f64,
    /// Half of them took at most this many milliseconds (up to 5 percent less).
    pub p50_ms: f64,
    /// 99 of 100 took at most this many milliseconds (up to 5 percent less).
    pub p99_ms: f64,
}

/// One start of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StartReport {
    /// When it was started.
    pub arrival_s: f64,
    /// How long each program ran that was begun, in seconds; `None` for one that did not end, and before the first.
    pub runtimes_s: Vec<Option<f64>>,
    /// From the arrival, or the mark, to the end of its programs, its stop or now; in seconds.
    pub busy_s: f64,
}

/// Pages that a guest released, since the start.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReleaseReport {
    /// How many.
    pub released: u64,
    /// Number of released pages that the hypervisor made invalid.
    pub invalidated: u64,
    /// Time of calls and of sending queues, and of making pages invalid, in seconds, summed over vCPUs; neither includes
    /// waiting for locks.
    pub sending_s: f64,
    /// See [`ReleaseReport::sending_s`].
    pub invalidating_s: f64,
}

impl ReleaseReport {
    /// Returns the share of the time of its guest's calls that went into making pages invalid, in [0, 1]; `None` before the
    /// first.
    pub fn invalidating_share(&self) -> Option<f64> {
        let all_s = self.sending_s + self.invalidating_s;
        (all_s > 0.0).then(|| self.invalidating_s / all_s)
    }
}

/// One of several programs of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ProgramReport {
    /// Workload.
    pub workload: String,
    /// When it began.
    pub began_s: f64,
    /// How long it ran; `None` while it does.
    pub runtime_s: Option<f64>,
    /// Pages that it took.
    pub pages_touched: u64,
    /// Part of these pages that were outside the VM's home when it took them.
    pub pages_touched_away: u64,
}

/// A VM's I/O through a driver domain.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlipReport {
    /// Pages that were exchanged.
    pub pages_flipped: u64,
    /// Pages that were copied.
    pub pages_copied: u64,
    /// CPU time that the driver domain owed for it, in seconds: exchanges, copies, pages brought home.
    pub backend_s: f64,
    /// Pages of the VM outside its home now.
    pub pages_away: u64,
    /// Pages of its pool now; 0 if it has none.
    pub pool_pages: u64,
    /// Most pages that were posted or under way at once.
    pub pages_used_max: u64,
}

/// The memory of a VM with a floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryReport {
    /// Memory that its guest has now.
    pub given_bytes: Bytes,
    /// Host memory that it holds now.
    pub held_bytes: Bytes,
    /// Pages that it read back from swap since it was started.
    pub faults: u64,
}

/// A VM's permit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PermitReport {
    /// The permit that it booked.
    pub booked: Permit,
    /// Debit per slice of 30 ms, on average: LLC misses, or bytes.
    pub used_per_slice: f64,
    /// How many times it went OVER.
    pub punished_count: u32,
    /// Remaining balance, in misses or bytes; a debt if below zero.
    pub balance_units: i64,
    /// Time that a limit held its vCPUs back, in seconds, summed over them.
    pub throttled_s: f64,
}

/// One node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct NodeReport {
    /// Mean data rate of its memory controllers.
    pub bandwidth_bytes_per_s: BytesPerSec,
    /// CPUs that were busy, on average.
    pub cpus_busy: f64,
    /// Memory accesses of all VMs that its memory answered.
    pub accesses: u64,
}

/// One directed link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct LinkReport {
    /// Node that it starts from.
    pub from: NodeId,
    /// Node that it leads to.
    pub to: NodeId,
    /// Bytes that it carried.
    pub bytes: u64,
    /// Mean load, in [0, 1]; `None` if its bandwidth is unknown.
    pub load: Option<f64>,
}
