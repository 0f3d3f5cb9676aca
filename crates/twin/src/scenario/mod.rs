//! Scenarios: which VMs arrive when and on which machine, what runs in them, and what happens to them.
//!
//! A scenario names the policies to run it under. Nothing else in it depends on a policy: the VMs, programs and events are the
//! same for each. Arrival order and phase come only from the seed, never from a policy's actions, so runs differ only in the
//! policy ([TAVO, section VI]).

mod backend;
mod check;
mod disturbance;
mod event;
mod library;
mod scattered;

use std::sync::Arc;

use homenode_machine::Machine;
use homenode_machine::notation;
use homenode_machine_files::file::{Source, read_toml};
use homenode_units::{Bytes, Candidates, Chance, CpuSet, MemoryPolicy, NodeSet, Ns, Permit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::index::{CpuIxSet, ThreadIx, marked};
use crate::workload::{self, Rest, Waiting, Workload, WorkloadError};

pub use backend::{Backend, NextProgram, PoolSpec, Transfer};
pub use check::TwinError;
pub use disturbance::{Disturbance, UnknownDisturbance};
pub use event::{EventAction, EventSpec};

/// VMs, their programs and when they arrive.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Name of the scenario.
    pub name: String,
    /// The scenario's purpose.
    #[serde(default)]
    pub about: String,
    /// Machine that the scenario was written for: a preset, or a machine file with its path relative to the scenario's. Callers
    /// may run it on another; without any, it runs on `r910`.
    #[serde(default)]
    pub machine: Option<String>,
    /// Scheduler of vCPUs.
    #[serde(default)]
    pub hypervisor: Hypervisor,
    /// Seed to use if the caller gives none.
    #[serde(default = "first_seed")]
    pub seed: u64,
    /// Enforcer that holds VMs to their permits, if the host itself enforces them.
    #[serde(default)]
    pub enforcer: Enforcer,
    /// Which misses the host's enforcer counts as a VM's pollution.
    #[serde(default)]
    pub attribution: Attribution,
    /// How many times a minute two running vCPUs on different nodes change places, at random. This models a balancer of which
    /// only the rate is known. It acts in addition to the hypervisor's scheduler.
    #[serde(default)]
    pub vcpu_exchanges_per_minute: f64,
    /// Whether the host's kernel moves pages and threads of all processes towards each other, as `kernel.numa_balancing` says
    /// (AutoNUMA). Only for `kvm` and `native`. If absent, it does, as on stock hosts. As in the kernel, a VM whose memory is
    /// bound or interleaved is left out.
    #[serde(default)]
    pub numa_balancing: Option<bool>,
    /// Share of VMs' memory, 0 to 1, that the host's kernel holds in transparent huge pages of 2 MiB. Only for `kvm` and
    /// `native`. The kernel marks, faults and moves these whole. If absent, it is 0.9 with a kernel that balances, because QEMU
    /// requests huge pages for all of a guest's memory and distributions grant them; it is 0 with any other kernel.
    #[serde(default)]
    pub huge_pages: Option<f64>,
    /// How long to simulate if the caller does not say. A run ends earlier if every program is done.
    #[serde(default = "long_enough", with = "homenode_units::text")]
    #[schemars(with = "notation::Time")]
    pub duration: Ns,
    /// Time from which figures count. Before it, caches and memory fill. Run times of programs always count in full.
    #[serde(default, with = "homenode_units::text")]
    #[schemars(with = "notation::Time")]
    pub warm_up: Ns,
    /// Names of the policies to run the scenario under, one after the other. Empty for the hypervisor alone.
    #[serde(default)]
    pub policies: Vec<String>,
    /// Whether VMs arrive as listed, or the seed shuffles their arrival times.
    #[serde(default)]
    pub arrival_order: ArrivalOrder,
    /// The seed delays each arrival by up to this much, which sets the phase between VMs.
    #[serde(default, with = "homenode_units::text")]
    #[schemars(with = "notation::Time")]
    pub arrival_jitter: Ns,
    /// How the host differs from what an agent sees; absent if it does not differ.
    #[serde(default)]
    pub disturbance: Disturbance,
    /// The VMs.
    #[serde(rename = "vm")]
    pub vms: Vec<VmSpec>,
    /// Workloads of this scenario's own, in addition to the built-in ones.
    #[serde(default, rename = "workload")]
    pub workloads: Vec<Workload>,
    /// Events that happen to VMs during the run.
    #[serde(default, rename = "event")]
    pub events: Vec<EventSpec>,
    /// The file that the scenario was read from. It takes no part in comparisons.
    #[serde(skip)]
    pub origin: Origin,
}

/// Where a scenario was read from. Later errors use it to name file, line and column.
#[derive(Clone, Debug, Default)]
pub struct Origin(Option<Arc<Source>>);

impl PartialEq for Origin {
    fn eq(&self, _: &Origin) -> bool {
        true
    }
}

/// One VM of a scenario.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Name, unique in the scenario.
    pub name: String,
    /// Number of vCPUs.
    pub vcpus: u16,
    /// Memory that the VM is assigned.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Size")]
    pub memory: Bytes,
    /// Workload that runs in the VM.
    pub workload: String,
    /// When the VM is started; omitted for a VM whose first event starts it.
    #[serde(default, with = "homenode_units::text")]
    #[schemars(with = "notation::Time")]
    pub arrival: Ns,
    /// Share of the program's work to do, above 0. Less than 1 shortens a long program; 2 runs it twice.
    #[serde(default = "whole")]
    pub work_share: f64,
    /// Programs that the VM's guest runs afterwards, one after the other and without a reboot.
    #[serde(default)]
    pub then: Vec<NextProgram>,
    /// What the VM does after its last program has ended.
    #[serde(default)]
    pub after: AfterProgram,
    /// CPUs that the operator allows the VM, in list format; absent if there is no limit.
    #[serde(default, deserialize_with = "list")]
    #[schemars(with = "Option<notation::List>")]
    pub cpus: Option<CpuSet>,
    /// Which of these CPUs each of the VM's vCPUs may use.
    #[serde(default)]
    pub pinning: Pinning,
    /// Nodes that the operator binds the VM's memory to, in list format; absent if the kernel decides.
    #[serde(default, deserialize_with = "list")]
    #[schemars(with = "Option<notation::List>")]
    pub memory_nodes: Option<NodeSet>,
    /// VMs that have the same word here share no home node, if the agent assigns homes.
    #[serde(default, alias = "apart")]
    pub anti_affinity: Option<String>,
    /// VMs that have the same word here share one home, if the agent assigns homes.
    #[serde(default, alias = "together")]
    pub affinity: Option<String>,
    /// Where the hypervisor places the VM's pages, and what moves them later: `first-touch`, `round-4k` or `round-1g`, optionally
    /// followed by `+carrefour` or `+autonuma`.
    #[serde(default)]
    #[schemars(with = "notation::MemoryPolicy")]
    pub memory_policy: MemoryPolicy,
    /// Share of the program's memory that the guest has used before and that has since been spread evenly over all nodes; 0 for a
    /// guest that has just booted. Only for VMs whose guest sees one node and whose pages are placed by first touch.
    #[serde(default)]
    pub memory_scattered: f64,
    /// Size of the pages with which guest and hypervisor map the VM's memory, and so of the pages in the TLB.
    #[serde(default)]
    pub page_size: PageSize,
    /// How many times a minute, 0 to 60000, the guest's scheduler moves each thread of the VM's program to another vCPU, at
    /// random: two threads exchange vCPUs. 0 for threads that stay. A program of one thread stays.
    #[serde(default)]
    pub thread_moves_per_minute: f64,
    /// What the VM's guest knows of the host's nodes.
    #[serde(default)]
    pub vnuma: Vnuma,
    /// What the runtime library of the VM's program knows of those nodes, if the program has one.
    #[serde(default)]
    pub runtime_nodes: RuntimeNodes,
    /// Where the VM's guest places pages among the nodes that it knows.
    #[serde(default)]
    pub allocation: Allocation,
    /// Whether the guest's kernel moves pages to the node that uses them (AutoNUMA). Requires a guest that knows nodes.
    #[serde(default)]
    pub autonuma: bool,
    /// How the VM's guest notifies the hypervisor of pages that it releases, so that first-touch places them again.
    #[serde(default)]
    pub release_calls: ReleaseCalls,
    /// Scheduler weight relative to other VMs, on Xen's scale, where 256 is usual.
    #[serde(default = "usual_weight")]
    pub weight: u32,
    /// What the program's threads do while they wait at a barrier; absent if the program decides. A guest's library may spin
    /// instead of sleeping in the kernel, and so save interrupts [Policies, section 5.3.2].
    #[serde(default)]
    pub waiting: Option<Waiting>,
    /// How the program's threads rest between pieces of work, in place of the program's own rests. So the same program can be
    /// a batch job or a lightly used server.
    #[serde(default)]
    pub rest: Option<Rest>,
    /// Most CPU time that all of the VM's vCPUs together get, in percent of one CPU; absent if there is no limit.
    #[serde(default)]
    pub cap_percent: Option<u32>,
    /// Whether the VM drives devices itself (PCI passthrough). Not possible with pages that are mapped at first touch.
    #[serde(default)]
    pub passthrough: bool,
    /// Driver domain that the VM's I/O goes through; absent if the host serves its devices.
    #[serde(default)]
    pub driver_domain: Option<Backend>,
    /// The VM's permit: LLC misses per slice of 30 ms, or memory bandwidth; absent if it booked none.
    #[serde(default)]
    #[schemars(with = "Option<notation::Permit>")]
    pub permit: Option<Permit>,
    /// Least memory that the VM's balloon leaves it; absent if the VM keeps all of its memory.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Size>")]
    pub memory_floor: Option<Bytes>,
    /// What the guest's kernel takes for itself, as the operator states it for working sets; absent if unknown.
    #[serde(default, with = "homenode_units::text::option")]
    #[schemars(with = "Option<notation::Size>")]
    pub kernel_footprint: Option<Bytes>,
}

/// Which of a VM's CPUs each of its vCPUs may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Pinning {
    /// Each vCPU may use all of them, and the scheduler chooses.
    #[default]
    None,
    /// Each vCPU may use one: the first vCPU the first CPU, and so on [Policies, section 5.4.1].
    OneToOne,
}

/// Sizes of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum PageSize {
    /// 4 KiB.
    #[default]
    #[serde(rename = "4KiB")]
    Small,
    /// 2 MiB.
    #[serde(rename = "2MiB")]
    Large,
}

impl PageSize {
    /// Returns the bytes of one page.
    pub fn bytes(self) -> Bytes {
        match self {
            PageSize::Small => Bytes(4096),
            PageSize::Large => Bytes::from_mib(2),
        }
    }
}

/// What a guest knows of the host's nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Vnuma {
    /// Nothing: the guest sees one node.
    #[default]
    None,
    /// The node of each vCPU when the guest booted, and the nodes that its memory came from.
    Static,
    /// The present node of each vCPU, and the nodes that the guest's memory comes from (XPV, [XPV, section 4.2]).
    Live,
}

/// What the library that hands out a program's memory (an allocator, a Java virtual machine) knows of nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RuntimeNodes {
    /// Nothing.
    #[default]
    None,
    /// The node that its kernel reported for each vCPU when the program began.
    Static,
    /// The node that its kernel reports for each vCPU at present; the library checks for changes [XPV, section 4.3.3].
    Live,
}

/// Where a guest places pages among the nodes that it knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// On the node of the vCPU that touches a page first.
    #[default]
    FirstTouch,
    /// On all known nodes in turn.
    Interleave,
}

/// How a guest notifies its hypervisor of pages that it releases [Policies, section 4.2].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ReleaseCalls {
    /// The guest does not notify it: a page that was touched once stays.
    #[default]
    None,
    /// With a call per page that does nothing; this shows the cost of the calls alone.
    Empty,
    /// With a call per page.
    Each,
    /// Through four queues of 32 operations.
    Batched,
}

/// Scheduler of vCPUs, and the costs of virtualisation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Hypervisor {
    /// No hypervisor: the "VM" is Linux on the bare machine, with the fair scheduler and native costs.
    Native,
    /// KVM, which uses Linux's fair scheduler.
    #[default]
    Kvm,
    /// Xen with the credit1 scheduler.
    Xen,
}

/// The part of the host that holds VMs to their permits [Kyoto, sections 3.2.2 and 3.3.4]. An agent that watches the host may do
/// this instead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Enforcer {
    /// None: permits are metered, and an agent may enforce them.
    #[default]
    None,
    /// Xen's credit scheduler: a VM that is OVER does not run.
    Ks4xen,
    /// Quotas of Linux's fair scheduler.
    Ks4linux,
    /// A host whose VMs own their CPUs and memory: the CPUs of a VM that is OVER stand still.
    Ks4pisces,
}

/// Which misses count as a VM's pollution. A VM must not be punished for the misses of others [Kyoto, section 3.2.3].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Attribution {
    /// The misses that the VM would have on its own, found by replaying its accesses on a model of the machine's cache.
    #[default]
    Replay,
    /// The misses that the counters of the VM's CPUs show, whichever VM evicted the lines.
    Counted,
}

/// The order in which VMs arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ArrivalOrder {
    /// Each VM arrives at the time that it states.
    #[default]
    AsListed,
    /// The seed deals the stated times out to the VMs.
    BySeed,
}

/// What a VM does after its program has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum AfterProgram {
    /// The VM stays, keeps its memory and idles.
    #[default]
    Idle,
    /// The VM shuts down and leaves the host.
    Leave,
}

/// Share of guests' memory in huge pages on a stock host (estimate; 0.7 to 1, depending on how fragmented the host is).
const STOCK_HUGE_PAGES: f64 = 0.9;

fn first_seed() -> u64 {
    1
}

fn long_enough() -> Ns {
    Ns::from_secs(600)
}

fn usual_weight() -> u32 {
    256
}

fn whole() -> f64 {
    1.0
}

fn list<'de, D, T>(d: D) -> Result<Option<T>, D::Error>
where
    D: serde::Deserializer<'de>,
    T: std::str::FromStr<Err = homenode_units::ParseSetError>,
{
    some_list(d).map(Some)
}

fn some_list<'de, D, T>(d: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: std::str::FromStr<Err = homenode_units::ParseSetError>,
{
    String::deserialize(d)?.parse().map_err(serde::de::Error::custom)
}

impl VmSpec {
    /// Creates a VM that arrives at once, runs its whole program and then idles.
    pub fn new(name: &str, vcpus: u16, memory: Bytes, workload: &str) -> VmSpec {
        VmSpec {
            name: name.to_owned(),
            vcpus,
            memory,
            workload: workload.to_owned(),
            arrival: Ns::ZERO,
            work_share: 1.0,
            then: Vec::new(),
            after: AfterProgram::Idle,
            cpus: None,
            pinning: Pinning::None,
            memory_nodes: None,
            memory_policy: MemoryPolicy::default(),
            page_size: PageSize::Small,
            vnuma: Vnuma::None,
            runtime_nodes: RuntimeNodes::None,
            allocation: Allocation::FirstTouch,
            autonuma: false,
            release_calls: ReleaseCalls::None,
            memory_scattered: 0.0,
            thread_moves_per_minute: 0.0,
            weight: usual_weight(),
            waiting: None,
            rest: None,
            cap_percent: None,
            passthrough: false,
            driver_domain: None,
            permit: None,
            memory_floor: None,
            kernel_footprint: None,
            anti_affinity: None,
            affinity: None,
        }
    }

    /// Sets the time at which the VM is started.
    #[must_use]
    pub fn arriving(mut self, at: Ns) -> VmSpec {
        self.arrival = at;
        self
    }

    /// Sets the share of the program's work to do.
    #[must_use]
    pub fn doing(mut self, work_share: f64) -> VmSpec {
        self.work_share = work_share;
        self
    }

    /// Binds the VM's vCPUs to these CPUs.
    #[must_use]
    pub fn on_cpus(mut self, cpus: CpuSet) -> VmSpec {
        self.cpus = Some(cpus);
        self
    }

    /// Binds the VM's memory to these nodes.
    #[must_use]
    pub fn with_memory_on(mut self, nodes: NodeSet) -> VmSpec {
        self.memory_nodes = Some(nodes);
        self
    }

    /// Passes the VM's I/O through a driver domain.
    #[must_use]
    pub fn behind(mut self, backend: Backend) -> VmSpec {
        self.driver_domain = Some(backend);
        self
    }

    /// Gives the VM a permit.
    #[must_use]
    pub fn with_permit(mut self, permit: Permit) -> VmSpec {
        self.permit = Some(permit);
        self
    }

    /// Allows the VM's memory to be reduced to this floor.
    #[must_use]
    pub fn with_memory_floor(mut self, floor: Bytes) -> VmSpec {
        self.memory_floor = Some(floor);
        self
    }

    /// Binds each vCPU to one CPU.
    #[must_use]
    pub fn pinned(mut self) -> VmSpec {
        self.pinning = Pinning::OneToOne;
        self
    }

    /// Returns the CPUs that a vCPU may run on, by position. The scenario must have been checked for the machine.
    pub(crate) fn allowed(&self, vcpu: ThreadIx, machine: &Machine) -> CpuIxSet {
        let may = |id| self.cpus.as_ref().is_none_or(|cpus| cpus.contains(id));
        let allowed: CpuIxSet = marked(machine.cpus.iter().map(|cpu| may(cpu.id)));
        if self.pinning == Pinning::OneToOne {
            let own = allowed.iter().nth(vcpu.0);
            return CpuIxSet::one(own.expect("checked: there is a CPU for each"));
        }
        allowed
    }
}

impl Scenario {
    /// Reads a scenario file and checks it on its own. [`crate::Twin::new`] checks whether a machine can run it.
    ///
    /// # Errors
    /// If a part does not parse or is impossible, with its place.
    pub fn from_toml(path: &str, text: &str) -> Result<Scenario, TwinError> {
        Scenario::from_toml_with(path, text, &|_| None)
    }

    /// Reads a scenario file. `named` returns workloads that VMs may name in addition to those of the scenario and of the
    /// simulator. The `workload` of such a VM is replaced by the name that the workload gives itself.
    ///
    /// # Errors
    /// As [`Scenario::from_toml`]. If `named` returns an error, with the place in the scenario. If two different workloads have
    /// one name.
    pub fn from_toml_with(
        path: &str,
        text: &str,
        named: &dyn Fn(&str) -> Option<Result<Workload, WorkloadError>>,
    ) -> Result<Scenario, TwinError> {
        let mut scenario: Scenario = read_toml(path, text)?;
        // The default on stock hosts.
        let is_linux = scenario.hypervisor != Hypervisor::Xen;
        scenario.numa_balancing = scenario.numa_balancing.or(is_linux.then_some(true));
        scenario.origin = Origin(Some(Arc::new(Source::new(path, text))));
        for at in 0..scenario.vms.len() {
            let Some(found) = named(&scenario.vms[at].workload) else {
                continue;
            };
            let refused = |error: String| scenario.complaint(&format!("vm[{at}].workload"), error);
            let found = found.map_err(|error| refused(error.to_string()))?;
            let known = scenario.workloads.iter().find(|known| known.name == found.name);
            if known.is_some_and(|known| *known != found) {
                let name = &found.name;
                return Err(refused(format!(
                    "another workload of this scenario is also named {name}: change `name` in the file"
                )));
            }
            scenario.vms[at].workload.clone_from(&found.name);
            if known.is_none() {
                scenario.workloads.push(found);
            }
        }
        scenario.check()?;
        Ok(scenario)
    }

    /// Creates an error about a key of the scenario (`policies[1]`), with its place if the scenario comes from a file.
    pub fn complaint(&self, key: &str, message: impl Into<String>) -> TwinError {
        match &self.origin.0 {
            Some(source) => TwinError::File(source.complaint(key, message)),
            None => TwinError::Key {
                scenario: self.name.clone(),
                key: key.to_owned(),
                message: message.into(),
            },
        }
    }

    /// Creates a scenario of these VMs, which arrive at the times that they state.
    pub fn of(name: &str, vms: Vec<VmSpec>) -> Scenario {
        Scenario {
            name: name.to_owned(),
            about: String::new(),
            machine: None,
            hypervisor: Hypervisor::Kvm,
            enforcer: Enforcer::None,
            attribution: Attribution::Replay,
            vcpu_exchanges_per_minute: 0.0,
            numa_balancing: None,
            huge_pages: None,
            seed: first_seed(),
            duration: long_enough(),
            warm_up: Ns::ZERO,
            policies: Vec::new(),
            arrival_order: ArrivalOrder::AsListed,
            arrival_jitter: Ns::ZERO,
            disturbance: Disturbance::default(),
            vms,
            workloads: Vec::new(),
            events: Vec::new(),
            origin: Origin::default(),
        }
    }

    /// Sets whether the host's kernel balances NUMA memory.
    #[must_use]
    pub fn with_numa_balancing(mut self, is_on: bool) -> Scenario {
        self.numa_balancing = Some(is_on);
        self
    }

    /// Whether the host's kernel balances NUMA memory; `None` if the host has no such kernel.
    pub fn balances(&self) -> Option<bool> {
        (self.hypervisor != Hypervisor::Xen).then(|| self.numa_balancing.unwrap_or(false))
    }

    /// Returns the share of VMs' memory that the host's kernel holds in huge pages.
    pub fn huge_share(&self) -> f64 {
        let stock = if self.balances() == Some(true) {
            STOCK_HUGE_PAGES
        } else {
            0.0
        };
        self.huge_pages.unwrap_or(stock)
    }

    /// Adds an event that happens to a VM.
    #[must_use]
    pub fn with_event(mut self, at: Ns, vm: &str, action: EventAction) -> Scenario {
        let vm = vm.to_owned();
        self.events.push(EventSpec { at, vm, action });
        self
    }

    /// Adds a workload of the scenario's own.
    #[must_use]
    pub fn with_workload(mut self, workload: Workload) -> Scenario {
        self.workloads.push(workload);
        self
    }

    /// Returns the first workload of a VM.
    pub(crate) fn workload(&self, vm: &VmSpec) -> Result<Workload, TwinError> {
        self.workload_named(vm, &vm.workload)
    }

    /// Returns the workload that runs in a VM under this name: the scenario's own workload, or the built-in one. If the VM says
    /// how its threads wait, the workload waits in that way.
    pub(crate) fn workload_named(&self, vm: &VmSpec, name: &str) -> Result<Workload, TwinError> {
        let own = self.workloads.iter().find(|w| w.name == name).cloned();
        let found = own.or_else(|| workload::builtin(name));
        let mut workload = found.ok_or_else(|| {
            let own = self.workloads.iter().map(|w| w.name.clone());
            let known = own.chain(workload::names().map(str::to_owned));
            let candidates = Candidates::of(name, known);
            TwinError::UnknownWorkload {
                vm: vm.name.clone(),
                workload: name.to_owned(),
                candidates,
            }
        })?;
        if let (Some(program), Some(waiting)) = (&mut workload.program, vm.waiting) {
            program.waiting = waiting;
        }
        if let (Some(program), Some(rest)) = (&mut workload.program, vm.rest) {
            program.rest = Some(rest);
            workload.check()?;
        }
        Ok(workload)
    }

    /// Returns when each VM arrives, in the order of [`Scenario::vms`]; `None` for a VM that an event starts.
    pub(crate) fn arrivals(&self, seed: u64) -> Vec<Option<Ns>> {
        let mut chance = Chance::labelled(seed, "arrivals", 0);
        let by_itself: Vec<bool> = self
            .vms
            .iter()
            .map(|vm| !self.started_by_event(&vm.name))
            .collect();
        let arriving = self
            .vms
            .iter()
            .zip(&by_itself)
            .filter(|(_, by_itself)| **by_itself);
        let mut times: Vec<Ns> = arriving.map(|(vm, _)| vm.arrival).collect();
        if self.arrival_order == ArrivalOrder::BySeed {
            chance.shuffle(&mut times);
        }
        let jitter = |time: Ns| Ns(time.0 + (self.arrival_jitter.as_f64() * chance.unit()) as u64);
        let mut times = times.into_iter().map(jitter);
        by_itself
            .into_iter()
            .map(|by_itself| by_itself.then(|| times.next()).flatten())
            .collect()
    }
}
