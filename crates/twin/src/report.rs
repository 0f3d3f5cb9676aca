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

use homenode_machine::Machine;
use homenode_policy::permits::Account;
use homenode_units::{Bytes, BytesPerSec, NodeId, NodeMap, Ns, Pages, Permit};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};

use crate::engine::Engine;
use crate::guest::Vm;
use crate::index::{CpuIx, IxVec, VmIx, first};

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
#[derive(Serialize, JsonSchema)]
struct OnNode<T> {
    node: NodeId,
    #[serde(flatten)]
    of: T,
}

#[derive(Serialize, JsonSchema)]
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
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
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
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub programs: Vec<ProgramReport>,
    /// Instructions of its program, in thousand millions, over all vCPUs.
    pub instructions_g: f64,
    /// LLC misses over references, in [0, 1].
    pub llc_miss_rate: Option<f64>,
    /// Share of memory accesses that went to the node of the vCPU, in [0, 1].
    pub local_access_ratio: Option<f64>,
    /// Memory accesses by the node that answered them.
    #[serde(rename = "node_accesses", serialize_with = "accesses_on_nodes")]
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
    /// What came of pages that its guest released; absent where nobody is told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub releases: Option<ReleaseReport>,
    /// How often its vCPUs changed nodes.
    pub node_changes: u64,
    /// Time that its vCPUs were runnable and did not run, in seconds, summed over them.
    pub waiting_s: f64,
    /// Bytes that its program asked devices for; what is still on its way is among them.
    pub io_bytes: u64,
    /// What its I/O did to its pages, whatever the mark; absent where it has no driver domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub driver_domain: Option<FlipReport>,
    /// What it booked and what it did; absent where it booked nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub permit: Option<PermitReport>,
    /// What became of its memory, if some may be taken.
    pub memory: Option<MemoryReport>,
}

/// Pages that a guest released, since the start.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
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

/// One of several programs of a VM.
#[derive(Clone, Debug, PartialEq, Serialize, JsonSchema)]
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
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
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
pub struct MemoryReport {
    /// What its guest has now.
    pub given_bytes: Bytes,
    /// What of the host's it has now.
    pub held_bytes: Bytes,
    /// Pages that it read back from swap since it was started.
    pub faults: u64,
}

/// A VM's permit.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, JsonSchema)]
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

/// Counts of a host at one point in time; the difference of two of them is what happened in between.
#[derive(Clone, Debug, Default)]
pub(crate) struct Counts {
    at: Ns,
    controllers: Vec<f64>,
    links: Vec<f64>,
    busy_ns: IxVec<CpuIx, u64>,
    /// Summed load of the most loaded link, each counted for the seconds that it was measured over.
    busiest: f64,
    busiest_seconds: f64,
    vms: Vec<VmCounts>,
}

#[derive(Clone, Debug, Default)]
struct VmCounts {
    instructions: f64,
    references: f64,
    misses: f64,
    local: f64,
    by_node: Vec<f64>,
    guest_pages_moved: u64,
    vcpus_drawn: u64,
    guest_scan_ns: f64,
    host_pages_moved: u64,
    node_changes: u64,
    waiting_ns: u64,
    io_bytes: f64,
    throttled_ns: u64,
    used_units: u64,
    punished_count: u32,
}

impl Counts {
    /// What a host has counted since its start; it must be settled.
    pub fn of(engine: &Engine) -> Counts {
        let now = engine.now;
        Counts {
            at: now,
            controllers: engine.totals.controllers(),
            links: engine.link_bytes(),
            busy_ns: engine
                .topology
                .cpus
                .places()
                .map(|cpu| engine.scheduler.queues.busy_ns(cpu, now))
                .collect(),
            busiest: engine.totals.busiest.sum,
            busiest_seconds: engine.totals.busiest.seconds,
            vms: engine.vms.places().map(|vm| VmCounts::of(engine, vm)).collect(),
        }
    }

    /// What was counted since an earlier point; nothing was counted before the default.
    fn since(mut self, earlier: &Counts) -> Counts {
        self.at = Ns(self.at.0 - earlier.at.0);
        less(&mut self.controllers, &earlier.controllers);
        less(&mut self.links, &earlier.links);
        for (now, then) in self.busy_ns.iter_mut().zip(&earlier.busy_ns) {
            *now -= then;
        }
        self.busiest -= earlier.busiest;
        self.busiest_seconds -= earlier.busiest_seconds;
        for (now, then) in self.vms.iter_mut().zip(&earlier.vms) {
            now.instructions -= then.instructions;
            now.references -= then.references;
            now.misses -= then.misses;
            now.local -= then.local;
            less(&mut now.by_node, &then.by_node);
            now.guest_pages_moved -= then.guest_pages_moved;
            now.vcpus_drawn -= then.vcpus_drawn;
            now.guest_scan_ns -= then.guest_scan_ns;
            now.host_pages_moved -= then.host_pages_moved;
            now.node_changes -= then.node_changes;
            now.waiting_ns -= then.waiting_ns;
            now.io_bytes -= then.io_bytes;
            now.throttled_ns -= then.throttled_ns;
            // A VM that was started again has a new account.
            now.used_units = now.used_units.saturating_sub(then.used_units);
            now.punished_count = now.punished_count.saturating_sub(then.punished_count);
        }
        self
    }
}

impl VmCounts {
    fn of(engine: &Engine, number: VmIx) -> VmCounts {
        let vm = &engine.vms[number];
        let account = engine
            .permits
            .as_ref()
            .and_then(|permits| permits.account(number));
        let tasks = vm.tasks();
        VmCounts {
            instructions: vm.threads.iter().map(|t| t.instructions).sum(),
            references: vm.threads.iter().map(|t| t.llc_references).sum(),
            misses: vm.threads.iter().map(|t| t.llc_misses).sum(),
            local: vm.accesses_local,
            by_node: vm.accesses.clone(),
            guest_pages_moved: vm.autonuma.as_ref().map_or(0, |autonuma| autonuma.pages_moved),
            vcpus_drawn: vm.vcpus_drawn,
            guest_scan_ns: vm.autonuma.as_ref().map_or(0.0, |autonuma| autonuma.scan_ns),
            host_pages_moved: vm.pages_moved,
            node_changes: tasks
                .clone()
                .map(|task| engine.scheduler.queues.tasks[task].node_changes)
                .sum(),
            waiting_ns: tasks
                .clone()
                .map(|task| engine.scheduler.queues.tasks[task].waiting_ns(engine.now))
                .sum(),
            io_bytes: vm.threads.iter().map(|t| t.requests.bytes).sum(),
            throttled_ns: tasks
                .map(|task| engine.scheduler.queues.tasks[task].throttled_ns(engine.now))
                .sum(),
            used_units: account.map_or(0, Account::used_units),
            punished_count: account.map_or(0, Account::punished_count),
        }
    }
}

fn less(counts: &mut [f64], earlier: &[f64]) {
    for (now, then) in counts.iter_mut().zip(earlier) {
        *now -= then;
    }
}

/// Imbalance over the nodes with memory.
fn imbalance(machine: &Machine, counts: &[f64]) -> Option<f64> {
    let with_memory = machine.nodes.values().map(|node| node.memory_bytes.0 > 0);
    let counts: Vec<f64> = counts
        .iter()
        .zip(with_memory)
        .filter_map(|(count, has)| has.then_some(*count))
        .collect();
    homenode_host::imbalance(&counts)
}

/// The report's figures of what a host did since a mark; it must be settled.
pub(crate) fn report(
    machine: &Machine,
    scenario: &str,
    seed: u64,
    engine: &Engine,
    mark: &Counts,
) -> TwinReport {
    let counts = Counts::of(engine).since(mark);
    let seconds = counts.at.as_secs_f64().max(1e-9);
    let mut accesses = vec![0.0; machine.nodes.len()];
    for vm in &counts.vms {
        for (sum, count) in accesses.iter_mut().zip(&vm.by_node) {
            *sum += count;
        }
    }
    let nodes = machine.nodes.keys().enumerate().map(|(at, node)| {
        let busy = |cpu: &CpuIx| counts.busy_ns[*cpu] as f64 / 1e9;
        let report = NodeReport {
            bandwidth_bytes_per_s: BytesPerSec((counts.controllers[at] / seconds) as u64),
            cpus_busy: engine.topology.node_cpus[at].iter().map(busy).sum::<f64>() / seconds,
            accesses: accesses[at] as u64,
        };
        (node, report)
    });
    let links = engine.topology.links.iter().zip(&engine.topology.link_caps);
    let links = links.zip(&counts.links).map(|((link, cap), bytes)| LinkReport {
        from: link.from,
        to: link.to,
        bytes: *bytes as u64,
        load: cap.is_finite().then(|| bytes / (cap * 1e9 * seconds)),
    });
    let vms = engine.vms.iter().zip(&counts.vms);
    TwinReport {
        scenario: scenario.to_owned(),
        machine: machine.name.clone(),
        seed,
        epoch_ns: engine.epoch,
        at_ns: engine.now,
        measured_from_ns: mark.at,
        vms: first(engine.vms.len())
            .zip(vms)
            .map(|(at, (vm, counts))| VmReport {
                permit: report_permit(engine, at, counts, seconds),
                ..report_vm(machine, vm, counts)
            })
            .collect(),
        nodes: nodes.collect(),
        links: links.collect(),
        imbalance: imbalance(machine, &accesses),
        interconnect_load: ratio(counts.busiest, counts.busiest_seconds),
        events: engine.script.log.clone(),
        notes: engine.notes.clone(),
    }
}

fn report_permit(engine: &Engine, vm: VmIx, counts: &VmCounts, seconds: f64) -> Option<PermitReport> {
    let permits = engine.permits.as_ref()?;
    let (booked, account) = (permits.permit(vm)?, permits.account(vm)?);
    Some(PermitReport {
        booked,
        used_per_slice: counts.used_units as f64 * Permit::SLICE.as_secs_f64() / seconds,
        punished_count: counts.punished_count,
        balance_units: account.balance_units(),
        throttled_s: counts.throttled_ns as f64 / 1e9,
    })
}

fn ratio(part: f64, whole: f64) -> Option<f64> {
    (whole > 0.0).then(|| part / whole)
}

fn report_vm(machine: &Machine, vm: &Vm, counts: &VmCounts) -> VmReport {
    let by_node = machine.nodes.keys().zip(&counts.by_node);
    VmReport {
        name: vm.name.clone(),
        workload: vm.workload.clone(),
        arrival_s: vm.arrived.map(Ns::as_secs_f64),
        runtime_s: vm
            .started
            .zip(vm.ended)
            .map(|(from, to)| Ns(to.0 - from.0).as_secs_f64()),
        programs: if vm.ran.is_empty() && vm.then.is_empty() {
            Vec::new()
        } else {
            vm.ran.iter().cloned().chain(vm.program_report()).collect()
        },
        driver_domain: vm.channel.as_ref().map(|channel| FlipReport {
            pages_flipped: channel.flipped,
            pages_copied: channel.copied,
            backend_s: channel.backend_ns / 1e9,
            pages_away: vm.memory.pages_away(),
            pool_pages: vm.memory.pool_pages(),
            pages_used_max: channel.used_max,
        }),
        instructions_g: counts.instructions / 1e9,
        llc_miss_rate: ratio(counts.misses, counts.references),
        local_access_ratio: ratio(counts.local, counts.by_node.iter().sum()),
        accesses_by_node: by_node.map(|(node, count)| (node, *count as u64)).collect(),
        imbalance: imbalance(machine, &counts.by_node),
        guest_pages_moved: counts.guest_pages_moved,
        vcpus_drawn: counts.vcpus_drawn,
        guest_scan_s: counts.guest_scan_ns / 1e9,
        host_pages_moved: counts.host_pages_moved,
        releases: vm.releases.as_ref().map(|releases| ReleaseReport {
            released: releases.counts.released,
            invalidated: releases.counts.invalidated,
            sending_s: releases.counts.sending_ns / 1e9,
            invalidating_s: releases.counts.invalidating_ns / 1e9,
        }),
        node_changes: counts.node_changes,
        waiting_s: counts.waiting_ns as f64 / 1e9,
        io_bytes: counts.io_bytes as u64,
        permit: None,
        memory: vm.memory_floor.map(|_| MemoryReport {
            given_bytes: vm.memory_bytes,
            held_bytes: Pages(vm.memory.pages().iter().sum()).to_bytes(),
            faults: vm.faults as u64,
        }),
    }
}
