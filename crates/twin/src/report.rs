//! The outcome of a run, in figures that compare policies.
//!
//! # Terms
//!
//! - *Access*: an LLC miss of a VM's program, counted at the node whose memory answers it. Writes back, first touches
//!   and page moves are traffic (bytes of controllers and links), not accesses.
//! - *Imbalance*: standard deviation over mean of the accesses by node, without nodes that have no memory
//!   [Policies, section 3.5.2]. It is 0 if all nodes answer equally many, `sqrt(nodes - 1)` if one node answers all.
//! - *Load of a link*: the bytes that it carried over the bytes that it could have carried.
//! - *Interconnect load*: the load of the most loaded link in each second, averaged over seconds [Policies, section 3.5.2].
//!
//! Rates and counts are those since the mark ([`crate::Twin::mark`]), or since the start if there is none.

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
    /// Time from which the figures below count: the mark, or 0 without one.
    pub measured_from_ns: Ns,
    /// Every VM of the scenario, in the scenario's order.
    pub vms: Vec<VmReport>,
    /// Every node.
    #[serde(rename = "node_loads", serialize_with = "on_nodes")]
    #[schemars(with = "Vec<OnNode<NodeReport>>")]
    pub nodes: NodeMap<NodeReport>,
    /// Every link, in the machine's order.
    pub links: Vec<LinkReport>,
    /// Imbalance of the accesses of all VMs by node; `None` before the first access.
    pub imbalance: Option<f64>,
    /// Mean over seconds of the load of the most loaded link, in [0, 1]. `None` before a second has passed, or if no link's
    /// bandwidth is known.
    pub interconnect_load: Option<f64>,
    /// Events of the scenario that have happened so far.
    pub events: Vec<EventReport>,
    /// Sentences about requests of the scenario that the machine cannot meet and that were therefore left out.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
}

/// A node's value, as an object that names the node.
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
    /// When the event happened.
    pub at_s: f64,
    /// Name of the event's VM.
    pub vm: String,
    /// Kind of the event, as in the scenario's file.
    pub event: &'static str,
    /// Outcome of the event.
    pub result: EventResult,
    /// The reason if not all of the event was done, or another remark.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

/// How far an event was carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum EventResult {
    /// All of it was done.
    Done,
    /// The event is still going on.
    Running,
    /// Only a part was possible.
    Partly,
    /// Nothing was possible.
    Skipped,
}

/// The report on one VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct VmReport {
    /// Name.
    pub name: String,
    /// Workload.
    pub workload: String,
    /// When the VM was started; `None` if it has not been started yet.
    pub arrival_s: Option<f64>,
    /// How long the VM's last program ran, from its first page touched to its end, whatever the mark. `None` while it runs, and
    /// for idle VMs.
    pub runtime_s: Option<f64>,
    /// The VM's programs so far, if it runs several, whatever the mark.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<ProgramReport>,
    /// Each of the VM's starts and its outcome. The figures above are those of the last start.
    pub starts: Vec<StartReport>,
    /// The VM's present memory policy, and how many times the host was given another, whatever the mark.
    pub memory_policy: MemoryPolicy,
    /// See [`VmReport::memory_policy`].
    pub policy_changes: u32,
    /// Instructions of the VM's programs, in thousand millions, over all vCPUs.
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
    /// Imbalance of these accesses; `None` if there are none.
    pub imbalance: Option<f64>,
    /// Pages that the guest's kernel moved (AutoNUMA), and the CPU time in seconds that it spent looking for them.
    pub guest_pages_moved: u64,
    /// How many times the host's AutoNUMA moved a vCPU to its memory.
    pub vcpus_drawn: u64,
    /// See [`VmReport::guest_pages_moved`].
    pub guest_scan_s: f64,
    /// Pages that the host moved for a policy.
    pub host_pages_moved: u64,
    /// Work of the host's kernel to bring the VM's pages to where they are used (`kernel.numa_balancing`, or a memory policy with
    /// `+autonuma`), since the kernel began this; absent if it does not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub balancing: Option<BalancingReport>,
    /// Pages that the VM's guest released; absent if the hypervisor is not notified of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub releases: Option<ReleaseReport>,
    /// How many times the VM's vCPUs changed nodes.
    pub node_changes: u64,
    /// Time that the VM's vCPUs were runnable but did not run, in seconds, summed over the vCPUs.
    pub waiting_s: f64,
    /// Bytes that the VM's program requested from devices, including those still under way.
    pub io_bytes: u64,
    /// How long the VM's clients waited, if its threads rest between pieces of work; absent before the first request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests: Option<RequestReport>,
    /// Effects of the VM's I/O on its pages, whatever the mark; absent if it has no driver domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_domain: Option<FlipReport>,
    /// The VM's permit and its use of it; absent if it booked none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permit: Option<PermitReport>,
    /// State of the VM's memory, if the host may take some of it.
    pub memory: Option<MemoryReport>,
}

impl VmReport {
    /// Returns the run times of all programs that were begun, over all starts, in seconds; `None` for a program that did not end.
    pub fn runtimes_s(&self) -> impl Iterator<Item = Option<f64>> {
        self.starts
            .iter()
            .flat_map(|start| start.runtimes_s.iter().copied())
    }

    /// Returns the total run time of all programs over all starts, in seconds; `None` if one did not end.
    pub fn whole_s(&self) -> Option<f64> {
        self.runtimes_s().sum()
    }

    /// Returns 10^9 instructions per second of the time that the VM had work; `None` if it had no work or executed no
    /// instructions.
    pub fn speed(&self) -> Option<f64> {
        let busy_s = self.busy_s();
        (self.instructions_g > 0.0 && busy_s > 0.0).then(|| self.instructions_g / busy_s)
    }

    /// Returns the time in which the VM executed [`VmReport::instructions_g`], in seconds.
    pub fn busy_s(&self) -> f64 {
        self.starts.iter().map(|start| start.busy_s).sum()
    }

    /// Returns when the VM was first started, in seconds; `None` if it never was.
    pub fn first_arrival_s(&self) -> Option<f64> {
        self.starts.first().map(|start| start.arrival_s)
    }
}

/// Counts of a kernel's balancing of a VM's memory, as in the host's `/proc/vmstat`. Pages are of 4 KiB.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BalancingReport {
    /// How many times the kernel went through all of the VM's memory.
    pub passes: u64,
    /// Pages that the kernel marked to see which node uses them next (`numa_pte_updates`).
    pub pages_marked: u64,
    /// Faults on marked pages, one for a huge page (`numa_hint_faults`).
    pub faults: u64,
    /// Faults that came from the page's own node (`numa_hint_faults_local`).
    pub faults_local: u64,
    /// Pages that the kernel moved (`numa_pages_migrated`).
    pub pages_moved: u64,
    /// CPU time spent marking, in seconds.
    pub scan_s: f64,
}

/// Durations of a program's pieces of work from one rest to the next, like a server's requests: from the arrival of the work to
/// its end, including waits for a CPU.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct RequestReport {
    /// Number of requests that were done.
    pub count: u64,
    /// Mean duration of the requests, in milliseconds.
    pub mean_ms: f64,
    /// Half of the requests took at most this many milliseconds (up to 5 percent less).
    pub p50_ms: f64,
    /// 99 of 100 requests took at most this many milliseconds (up to 5 percent less).
    pub p99_ms: f64,
}

/// One start of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct StartReport {
    /// When the VM was started.
    pub arrival_s: f64,
    /// The run times of all programs that were begun, in seconds; `None` for a program that did not end, and before the first
    /// program.
    pub runtimes_s: Vec<Option<f64>>,
    /// Time from the VM's arrival, or the mark, to the end of its programs, its stop, or now; in seconds.
    pub busy_s: f64,
}

/// Pages that a guest released, since the start.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ReleaseReport {
    /// Number of released pages.
    pub released: u64,
    /// Number of released pages that the hypervisor invalidated.
    pub invalidated: u64,
    /// Seconds that vCPUs spent in hypercalls that send queues of released pages, without waits for locks; the sum over vCPUs.
    pub sending_s: f64,
    /// Seconds that they spent invalidating these pages, without waits for locks; the sum over vCPUs.
    pub invalidating_s: f64,
}

impl ReleaseReport {
    /// Returns the share of the time of the guest's calls that was spent invalidating pages, in [0, 1]; `None` before the first
    /// call.
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
    /// When the program began.
    pub began_s: f64,
    /// How long the program ran; `None` while it runs.
    pub runtime_s: Option<f64>,
    /// Pages that the program touched.
    pub pages_touched: u64,
    /// Number of these pages that were outside the VM's home when the program touched them.
    pub pages_touched_away: u64,
}

/// A VM's I/O through a driver domain.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct FlipReport {
    /// Pages that were exchanged.
    pub pages_flipped: u64,
    /// Pages that were copied.
    pub pages_copied: u64,
    /// CPU time that the driver domain owed for this VM's I/O, in seconds: exchanges, copies, pages brought home.
    pub backend_s: f64,
    /// Pages of the VM that are now outside its home.
    pub pages_away: u64,
    /// Present number of pages in the VM's pool; 0 if it has none.
    pub pool_pages: u64,
    /// Largest number of pages that were posted or under way at once.
    pub pages_used_max: u64,
}

/// The memory of a VM with a floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct MemoryReport {
    /// Memory that the VM's guest has now.
    pub given_bytes: Bytes,
    /// Host memory that the VM holds now.
    pub held_bytes: Bytes,
    /// Pages that the VM's guest has read back from swap since the VM was started.
    pub faults: u64,
}

/// A VM's permit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct PermitReport {
    /// The permit that the VM booked.
    pub booked: Permit,
    /// Mean debit per slice of 30 ms, in LLC misses or bytes.
    pub used_per_slice: f64,
    /// How many times the VM went OVER.
    pub punished_count: u32,
    /// Remaining balance, in misses or bytes; a debt if below zero.
    pub balance_units: i64,
    /// Time that a limit held the VM's vCPUs back, in seconds, summed over the vCPUs.
    pub throttled_s: f64,
}

/// One node.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct NodeReport {
    /// Mean data rate of the node's memory controllers.
    pub bandwidth_bytes_per_s: BytesPerSec,
    /// Mean number of busy CPUs.
    pub cpus_busy: f64,
    /// Memory accesses of all VMs that the node's memory answered.
    pub accesses: u64,
}

/// One directed link.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct LinkReport {
    /// Node at which the link starts.
    pub from: NodeId,
    /// Node to which the link leads.
    pub to: NodeId,
    /// Bytes that the link carried.
    pub bytes: u64,
    /// Mean load of the link, in [0, 1]; `None` if its bandwidth is unknown.
    pub load: Option<f64>,
}
