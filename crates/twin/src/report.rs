//! What came of a run, in figures that compare policies.
//!
//! # Terms
//!
//! - *Access*: an LLC miss of a VM's program, counted at the node whose memory answers it. Writes back, first touches
//!   and page moves are traffic (bytes of controllers and links), not accesses.
//! - *Imbalance*: standard deviation over mean of the accesses by node, nodes without memory left out [Policies, section 3.5.2]:
//!   0 where all nodes answer alike, `sqrt(nodes - 1)` where one node answers all.
//! - *Load of a link*: bytes that it carried over those that it could have carried.
//! - *Interconnect load*: for each second the load of the most loaded link, averaged over seconds [Policies,
//!   section 3.5.2].
//!
//! Rates and counts are those since the mark ([`crate::Twin::mark`]), or since the start.

use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, NodeId, NodeMap, Ns, Permit};
use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What came of a run so far.
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
    /// Since when the figures below count: 0, or the mark.
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
    /// Mean over seconds of the load of the most loaded link, in [0, 1]; `None` before a second has passed, and where no
    /// link's bandwidth is known.
    pub interconnect_load: Option<f64>,
    /// Events of the scenario that have come so far.
    pub events: Vec<EventReport>,
    /// What the scenario asks for and the machine cannot give, in sentences: it was left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// What belongs to a node, as an object that names it.
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

/// What came of an event.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
pub struct EventReport {
    /// When it came.
    pub at_s: f64,
    /// Name of its VM.
    pub vm: String,
    /// What it was, as in the scenario's file.
    pub event: &'static str,
    /// What came of it.
    pub result: EventResult,
    /// Why not all of it was done, or what there is to say of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How far an event got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventResult {
    /// All of it happened.
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
    /// When it was started; `None` if that is still to come.
    pub arrival_s: Option<f64>,
    /// How long its last program ran, from its first page touched to its end, whatever the mark; `None` while it runs, and
    /// for idle VMs.
    pub runtime_s: Option<f64>,
    /// Its programs so far, where it runs several, whatever the mark.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<ProgramReport>,
    /// Each time that it was started, and what came of it: the figures above are those of the last.
    pub starts: Vec<StartReport>,
    /// Its memory policy now, and how often the host was told another, whatever the mark.
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
    /// Imbalance of these; `None` where there are none.
    pub imbalance: Option<f64>,
    /// Pages that its guest's kernel moved (AutoNUMA), and the CPU time in seconds that it took to look for them.
    pub guest_pages_moved: u64,
    /// How often the host's AutoNUMA moved a vCPU to its memory.
    pub vcpus_drawn: u64,
    /// See [`VmReport::guest_pages_moved`].
    pub guest_scan_s: f64,
    /// Pages that the host moved for a policy.
    pub host_pages_moved: u64,
    /// What the host's kernel has done by itself to bring the VM's pages to where they are used (`kernel.numa_balancing`, or a
    /// memory policy with `+autonuma`), since that began; absent where the kernel does nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balancing: Option<BalancingReport>,
    /// What came of pages that its guest released; absent where nobody is told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub releases: Option<ReleaseReport>,
    /// How often its vCPUs changed nodes.
    pub node_changes: u64,
    /// Time that its vCPUs were runnable and did not run, in seconds, summed over them.
    pub waiting_s: f64,
    /// Bytes that its program asked devices for; what is still on its way is among them.
    pub io_bytes: u64,
    /// What its clients waited for, where its threads rest between pieces of work; absent before the first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestReport>,
    /// What its I/O did to its pages, whatever the mark; absent where it has no driver domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_domain: Option<FlipReport>,
    /// What it booked and what it did; absent where it booked nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permit: Option<PermitReport>,
    /// What became of its memory, if some may be taken.
    pub memory: Option<MemoryReport>,
}

impl VmReport {
    /// How long each program ran that was begun, over all starts, in seconds; `None` for one that did not end.
    pub fn runtimes_s(&self) -> impl Iterator<Item = Option<f64>> {
        self.starts
            .iter()
            .flat_map(|start| start.runtimes_s.iter().copied())
    }

    /// Time of all programs together, over all starts, in seconds; `None` where one did not end.
    pub fn whole_s(&self) -> Option<f64> {
        self.runtimes_s().sum()
    }

    /// Time in which [`VmReport::instructions_g`] were made, in seconds.
    pub fn busy_s(&self) -> f64 {
        self.starts.iter().map(|start| start.busy_s).sum()
    }

    /// When it was started first, in seconds; `None` where it never was.
    pub fn first_arrival_s(&self) -> Option<f64> {
        self.starts.first().map(|start| start.arrival_s)
    }
}

/// What a kernel's balancing of a VM's memory has counted, as `/proc/vmstat` has it for the host. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BalancingReport {
    /// How often it went through all of the VM's memory.
    pub passes: u64,
    /// Pages that it marked, to see who uses them next (`numa_pte_updates`).
    pub pages_marked: u64,
    /// Uses of marked pages, one for a huge page (`numa_hint_faults`).
    pub faults: u64,
    /// Those from the page's own node (`numa_hint_faults_local`).
    pub faults_local: u64,
    /// Pages that it moved (`numa_pages_migrated`).
    pub pages_moved: u64,
    /// CPU time of marking, in seconds.
    pub scan_s: f64,
}

/// Pieces of a program's work from one rest to the next, as a server's requests: times from the moment that work was there to its
/// end, waits for a CPU included.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestReport {
    /// How many were done.
    pub count: u64,
    /// Their mean time, in milliseconds.
    pub mean_ms: f64,
    /// Half of them took at most so many milliseconds (up to 5 percent less).
    pub p50_ms: f64,
    /// 99 of 100 took at most so many milliseconds (up to 5 percent less).
    pub p99_ms: f64,
}

/// One start of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StartReport {
    /// When it was.
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
    /// Of these, how many the hypervisor made invalid.
    pub invalidated: u64,
    /// Time of calls and of sending queues, and of making pages invalid, in seconds, summed over vCPUs; waiting for locks is in
    /// neither.
    pub sending_s: f64,
    /// See [`ReleaseReport::sending_s`].
    pub invalidating_s: f64,
}

impl ReleaseReport {
    /// Share of the time of its guest's calls that went into making pages invalid, in [0, 1]; `None` before the first.
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
    /// Those of them that lay outside the VM's home when it took them.
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
    /// Pages of its pool now; 0 where it has none.
    pub pool_pages: u64,
    /// Most pages that were posted or under way at once.
    pub pages_used_max: u64,
}

/// The memory of a VM with a floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryReport {
    /// What its guest has now.
    pub given_bytes: Bytes,
    /// What of the host's it has now.
    pub held_bytes: Bytes,
    /// Pages that it read back from swap since it was started.
    pub faults: u64,
}

/// A VM's permit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PermitReport {
    /// What it booked.
    pub booked: Permit,
    /// What it was debited per slice of 30 ms, on average: LLC misses, or bytes.
    pub used_per_slice: f64,
    /// How often it went OVER.
    pub punished_count: u32,
    /// What it has left, in misses or bytes; below zero what it owes.
    pub balance_units: i64,
    /// Time that a limit kept its vCPUs from running, in seconds, summed over them.
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
    /// Where it comes from.
    pub from: NodeId,
    /// Where it goes.
    pub to: NodeId,
    /// Bytes that it carried.
    pub bytes: u64,
    /// Mean load, in [0, 1]; `None` where its bandwidth is unknown.
    pub load: Option<f64>,
}
