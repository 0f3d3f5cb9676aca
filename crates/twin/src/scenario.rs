//! Scenarios: which VMs arrive when on which machine, and what runs in them.
//!
//! A scenario says nothing of policies: the same file is run under each. Arrival order and phase come from the seed
//! alone (seed 002, section VI: runs differ in nothing else), never from what a policy does.

use homenode_machine::Machine;
use homenode_machine::file::{FileError, read_toml};
use homenode_units::{Bytes, CpuId, CpuSet, NodeSet, Ns};
use serde::Deserialize;

use crate::chance::Chance;
use crate::workload::{self, Workload};

/// VMs, their programs and when they arrive.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// Name of the scenario.
    pub name: String,
    /// What it is for.
    #[serde(default)]
    pub about: String,
    /// Preset of the machine that it was written for; callers may run it on another.
    #[serde(default)]
    pub machine: Option<String>,
    /// Who schedules vCPUs.
    #[serde(default)]
    pub hypervisor: Hypervisor,
    /// Seed where the caller gives none.
    #[serde(default = "first_seed")]
    pub seed: u64,
    /// How long to simulate where the caller does not say; a run may end before, when every program is done.
    #[serde(default = "long_enough", with = "homenode_units::text")]
    pub duration: Ns,
    /// Whether VMs arrive as listed, or the seed shuffles their arrival times.
    #[serde(default)]
    pub arrival_order: ArrivalOrder,
    /// The seed delays each arrival by up to this much: the phase of VMs to each other.
    #[serde(default, with = "homenode_units::text")]
    pub arrival_jitter: Ns,
    /// The VMs.
    #[serde(rename = "vm")]
    pub vms: Vec<VmSpec>,
    /// Workloads of this scenario's own, beside those that come with the twin.
    #[serde(default, rename = "workload")]
    pub workloads: Vec<Workload>,
}

/// One VM of a scenario.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VmSpec {
    /// Name, unique in the scenario.
    pub name: String,
    /// How many vCPUs it has.
    pub vcpus: u16,
    /// How much memory it is given.
    #[serde(with = "homenode_units::text")]
    pub memory: Bytes,
    /// Which workload runs in it.
    pub workload: String,
    /// When it is started.
    #[serde(default, with = "homenode_units::text")]
    pub arrival: Ns,
    /// Share of the program's work to do, above 0: shortens a long program, 2 runs it twice.
    #[serde(default = "whole")]
    pub work_share: f64,
    /// What it does when its program has ended.
    #[serde(default)]
    pub after: AfterProgram,
    /// CPUs that the operator allows it, in list format; absent where there is no limit.
    #[serde(default, deserialize_with = "list")]
    pub cpus: Option<CpuSet>,
    /// Nodes that the operator binds its memory to, in list format; absent where the kernel decides.
    #[serde(default, deserialize_with = "list")]
    pub memory_nodes: Option<NodeSet>,
    /// Where the hypervisor places its pages.
    #[serde(default)]
    pub memory_policy: MemoryPolicy,
    /// Size of the pages by which guest and hypervisor map its memory: what the TLB holds.
    #[serde(default)]
    pub page_size: PageSize,
    /// What its guest knows of the host's nodes.
    #[serde(default)]
    pub vnuma: Vnuma,
    /// Where its guest places pages among the nodes that it knows.
    #[serde(default)]
    pub allocation: Allocation,
    /// Whether its guest's kernel moves pages to the node that uses them (AutoNUMA); needs a guest that knows nodes.
    #[serde(default)]
    pub autonuma: bool,
    /// Scheduler weight against other VMs: Xen's scale, 256 is usual.
    #[serde(default = "usual_weight")]
    pub weight: u32,
    /// Most CPU time that all of its vCPUs together get, in percent of one CPU; absent where there is no limit.
    #[serde(default)]
    pub cap_percent: Option<u32>,
    /// Whether it drives devices itself (PCI passthrough).
    #[serde(default)]
    pub passthrough: bool,
}

/// Where the hypervisor places a VM's pages (seed 004, section 3).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryPolicy {
    /// On the node of the CPU that touches a page first.
    #[default]
    FirstTouch,
    /// Page by page in turn over the nodes, when the VM is created.
    #[serde(rename = "round-4k")]
    Round4k,
    /// GiB by GiB in turn over the nodes, when the VM is created.
    #[serde(rename = "round-1g")]
    Round1g,
}

/// Sizes of pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
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
    /// Bytes of one.
    pub fn bytes(self) -> Bytes {
        match self {
            PageSize::Small => Bytes(4096),
            PageSize::Large => Bytes::from_mib(2),
        }
    }
}

/// What a guest knows of the host's nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Vnuma {
    /// Nothing: it sees one node.
    #[default]
    None,
    /// Which node each vCPU was on when it booted, and which nodes its memory came from.
    Static,
}

/// Where a guest places pages among the nodes that it knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Allocation {
    /// On the node of the vCPU that touches a page first.
    #[default]
    FirstTouch,
    /// In turn over all of them.
    Interleave,
}

/// Who schedules vCPUs, and what virtualisation costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Hypervisor {
    /// None: the "VM" is the bare machine's Linux, fair scheduler, native costs.
    Native,
    /// KVM: the fair scheduler.
    #[default]
    Kvm,
    /// Xen: credit1.
    Xen,
}

/// In which order VMs arrive.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrivalOrder {
    /// Each at the time it states.
    #[default]
    AsListed,
    /// The stated times are dealt out by the seed.
    BySeed,
}

/// What a VM does when its program has ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AfterProgram {
    /// It stays, keeps its memory and idles.
    #[default]
    Idle,
    /// It shuts down and leaves the host.
    Leave,
}

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
    let text = String::deserialize(d)?;
    text.parse().map(Some).map_err(serde::de::Error::custom)
}

/// What is wrong with a scenario, or with a machine to run it on.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum TwinError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Workload(#[from] workload::WorkloadError),
    #[error(
        "machine {machine} has no timing figures, and the twin needs them; run it on a preset, or add [hardware] to its file"
    )]
    NoHardware { machine: String },
    #[error("machine {machine}: {what} is missing, and the twin needs it; add it to the machine's file")]
    MissingFigure { machine: String, what: String },
    #[error("scenario {scenario}: no VM; add a [[vm]]")]
    NoVms { scenario: String },
    #[error("scenario {scenario}: two VMs are named {vm}; names must differ")]
    VmTwice { scenario: String, vm: String },
    #[error("VM {vm}: {what} is {value}; {expected}")]
    Figure {
        vm: String,
        what: &'static str,
        value: String,
        expected: &'static str,
    },
    #[error("VM {vm}: unknown workload `{workload}`{candidates}")]
    UnknownWorkload {
        vm: String,
        workload: String,
        candidates: homenode_machine::file::Candidates,
    },
    #[error("VM {vm}: {setting} {problem}; {remedy}")]
    Contradiction {
        vm: String,
        setting: &'static str,
        problem: &'static str,
        remedy: &'static str,
    },
    #[error("VM {vm} has {vcpus} vCPUs, and machine {machine} only {cpus} CPUs; give it at most {cpus}")]
    VcpusBeyondHost {
        vm: String,
        vcpus: u16,
        machine: String,
        cpus: usize,
    },
    #[error("VM {vm} has {memory} of memory, and machine {machine} only {host}; give it less")]
    MemoryBeyondHost {
        vm: String,
        memory: Bytes,
        machine: String,
        host: Bytes,
    },
    #[error(
        "VM {vm} has {memory} of memory, and its guest with workload {workload} touches {footprint}; give it more"
    )]
    FootprintBeyondVm {
        vm: String,
        memory: Bytes,
        workload: String,
        footprint: Bytes,
    },
    #[error(
        "the VMs need {footprint} in all, and machine {machine} has {host}; the twin has no swap: run fewer VMs"
    )]
    FootprintBeyondHost {
        footprint: Bytes,
        machine: String,
        host: Bytes,
    },
    #[error("VM {vm}: CPUs {{{cpus}}} are not a non-empty part of the CPUs {usable} of machine {machine}")]
    Cpus {
        vm: String,
        cpus: CpuSet,
        usable: CpuSet,
        machine: String,
    },
    #[error(
        "VM {vm}: nodes {{{nodes}}} are not a non-empty part of the nodes with memory {usable} of machine {machine}"
    )]
    Nodes {
        vm: String,
        nodes: NodeSet,
        usable: NodeSet,
        machine: String,
    },
}

/// Names and texts of the scenarios that come with the twin; the first is the default of `homenode run`.
const BUILTIN: &[(&str, &str)] = &[(
    "tavo-mixed",
    include_str!("../../../data/scenarios/tavo-mixed.toml"),
)];

impl VmSpec {
    /// A VM that arrives at once, runs its whole program and then idles.
    pub fn new(name: &str, vcpus: u16, memory: Bytes, workload: &str) -> VmSpec {
        VmSpec {
            name: name.to_owned(),
            vcpus,
            memory,
            workload: workload.to_owned(),
            arrival: Ns::ZERO,
            work_share: 1.0,
            after: AfterProgram::Idle,
            cpus: None,
            memory_nodes: None,
            memory_policy: MemoryPolicy::FirstTouch,
            page_size: PageSize::Small,
            vnuma: Vnuma::None,
            allocation: Allocation::FirstTouch,
            autonuma: false,
            weight: usual_weight(),
            cap_percent: None,
            passthrough: false,
        }
    }

    /// The same VM, started at another time.
    #[must_use]
    pub fn arriving(mut self, at: Ns) -> VmSpec {
        self.arrival = at;
        self
    }

    /// The same VM, doing this share of its program's work.
    #[must_use]
    pub fn doing(mut self, work_share: f64) -> VmSpec {
        self.work_share = work_share;
        self
    }

    /// The same VM, its vCPUs bound to these CPUs.
    #[must_use]
    pub fn on_cpus(mut self, cpus: CpuSet) -> VmSpec {
        self.cpus = Some(cpus);
        self
    }

    /// The same VM, its memory bound to these nodes.
    #[must_use]
    pub fn with_memory_on(mut self, nodes: NodeSet) -> VmSpec {
        self.memory_nodes = Some(nodes);
        self
    }
}

impl Scenario {
    /// Reads a scenario file. Whether a machine can run it is checked by [`crate::Twin::new`].
    ///
    /// # Errors
    /// Everything that does not read, with its place.
    pub fn from_toml(path: &str, text: &str) -> Result<Scenario, TwinError> {
        let scenario: Scenario = read_toml(path, text)?;
        for workload in &scenario.workloads {
            workload.clone().checked()?;
        }
        Ok(scenario)
    }

    /// A scenario of these VMs, arriving as they say.
    pub fn of(name: &str, vms: Vec<VmSpec>) -> Scenario {
        Scenario {
            name: name.to_owned(),
            about: String::new(),
            machine: None,
            hypervisor: Hypervisor::Kvm,
            seed: first_seed(),
            duration: long_enough(),
            arrival_order: ArrivalOrder::AsListed,
            arrival_jitter: Ns::ZERO,
            vms,
            workloads: Vec::new(),
        }
    }

    /// The same scenario with a workload of its own.
    #[must_use]
    pub fn with_workload(mut self, workload: Workload) -> Scenario {
        self.workloads.push(workload);
        self
    }

    /// Names of the scenarios that come with the twin.
    pub fn names() -> impl Iterator<Item = &'static str> {
        BUILTIN.iter().map(|(name, _)| *name)
    }

    /// The scenario with this name that comes with the twin, if there is one.
    pub fn builtin(name: &str) -> Option<Scenario> {
        let (_, text) = BUILTIN.iter().find(|(known, _)| *known == name)?;
        // A test reads every one of them.
        Some(Scenario::from_toml(&format!("data/scenarios/{name}.toml"), text).expect("embedded scenario"))
    }

    /// The default scenario: a mixed set of VMs on the quad-socket R910 of seed 002.
    pub fn tavo_mixed() -> Scenario {
        Scenario::builtin("tavo-mixed").expect("it comes with the twin")
    }

    /// A mixed set of VMs sized for a machine: each has half of a node's CPUs (at most 8) and half of its memory (at
    /// most 8 GiB), and together they have about seven eighths of the machine's CPUs. The programs take turns in the
    /// order below as far as their memory fits, and are shortened to about 60 seconds of a solo run.
    pub fn mixed_for(machine: &Machine, seed: u64) -> Scenario {
        const PROGRAMS: [&str; 8] = [
            "cg.B", "povray", "soplex", "sp.B", "ep.B", "milc", "lu.B", "sphinx3",
        ];
        const SOLO_S: f64 = 60.0;
        let cpus_least = machine
            .nodes
            .values()
            .map(|n| n.cpus.len())
            .filter(|n| *n > 0)
            .min()
            .unwrap_or(1);
        let memory_least = machine
            .nodes
            .values()
            .map(|n| n.memory_bytes)
            .filter(|m| *m > Bytes::ZERO)
            .min();
        let vcpus = (cpus_least / 2).clamp(1, 8) as u16;
        let half = Bytes::from_mib(memory_least.unwrap_or_default().0 / 2 / Bytes::from_mib(1).0);
        let memory = half.min(Bytes::from_gib(8));
        let count = (machine.cpus.len() * 7 / 8 / usize::from(vcpus)).max(1);
        let host: Bytes = machine.nodes.values().map(|n| n.memory_bytes).sum();
        let mut room = Bytes(host.0 / 10 * 8);
        let mut vms: Vec<VmSpec> = Vec::new();
        for name in PROGRAMS.iter().cycle().take(count.max(PROGRAMS.len()) * 2) {
            let workload = workload::builtin(name).expect("listed workloads come with the twin");
            let program = workload.program.as_ref().expect("listed workloads have programs");
            let footprint = program.footprint(vcpus) + crate::guest::boot_footprint(memory);
            if vms.len() == count || footprint > memory || footprint > room {
                continue;
            }
            room = room.saturating_sub(footprint);
            let solo_s = machine
                .hardware
                .as_ref()
                .map_or(SOLO_S, |hw| program.solo_seconds(machine, hw));
            let spec = VmSpec::new(&format!("vm{}-{name}", vms.len() + 1), vcpus, memory, name);
            vms.push(
                spec.arriving(Ns::from_millis(700 * vms.len() as u64))
                    .doing((SOLO_S / solo_s).min(4.0)),
            );
        }
        let mut scenario = Scenario::of(&format!("mixed-{}", machine.name), vms);
        scenario.about = "A mixed set of VMs sized for the machine.".to_owned();
        scenario.machine = Some(machine.name.clone());
        scenario.seed = seed;
        scenario.arrival_order = ArrivalOrder::BySeed;
        scenario.arrival_jitter = Ns::from_millis(500);
        scenario
    }

    /// The workload of a name: the scenario's own first, then those that come with the twin.
    pub(crate) fn workload(&self, vm: &VmSpec) -> Result<Workload, TwinError> {
        if let Some(own) = self.workloads.iter().find(|w| w.name == vm.workload) {
            return Ok(own.clone().checked()?);
        }
        workload::builtin(&vm.workload).ok_or_else(|| {
            let own = self.workloads.iter().map(|w| w.name.clone());
            let known = own.chain(workload::names().map(str::to_owned));
            let candidates = homenode_machine::file::Candidates::of(&vm.workload, known);
            TwinError::UnknownWorkload {
                vm: vm.name.clone(),
                workload: vm.workload.clone(),
                candidates,
            }
        })
    }

    /// When each VM arrives, in the order of [`Scenario::vms`].
    pub(crate) fn arrivals(&self, seed: u64) -> Vec<Ns> {
        let mut chance = Chance::labelled(seed, "arrivals", 0);
        let mut times: Vec<Ns> = self.vms.iter().map(|vm| vm.arrival).collect();
        if self.arrival_order == ArrivalOrder::BySeed {
            chance.shuffle(&mut times);
        }
        let jitter = |time: Ns| Ns(time.0 + (self.arrival_jitter.as_f64() * chance.unit()) as u64);
        times.into_iter().map(jitter).collect()
    }

    /// Whether a machine can run this.
    pub(crate) fn check(&self, machine: &Machine) -> Result<(), TwinError> {
        if self.vms.is_empty() {
            return Err(TwinError::NoVms {
                scenario: self.name.clone(),
            });
        }
        let host: Bytes = machine.nodes.values().map(|n| n.memory_bytes).sum();
        let mut touched = Bytes::ZERO;
        for (at, vm) in self.vms.iter().enumerate() {
            if self.vms[..at].iter().any(|other| other.name == vm.name) {
                return Err(TwinError::VmTwice {
                    scenario: self.name.clone(),
                    vm: vm.name.clone(),
                });
            }
            vm.check(machine, host)?;
            vm.check_guest(self.hypervisor)?;
            let program = self.workload(vm)?.program;
            let footprint = crate::guest::boot_footprint(vm.memory)
                + program.map_or(Bytes::ZERO, |program| program.footprint(vm.vcpus));
            if footprint > vm.memory {
                let (vm, memory, workload) = (vm.name.clone(), vm.memory, vm.workload.clone());
                return Err(TwinError::FootprintBeyondVm {
                    vm,
                    memory,
                    workload,
                    footprint,
                });
            }
            touched += if vm.allocated_at_creation(self.hypervisor) {
                vm.memory
            } else {
                footprint
            };
        }
        if touched > host {
            return Err(TwinError::FootprintBeyondHost {
                footprint: touched,
                machine: machine.name.clone(),
                host,
            });
        }
        Ok(())
    }
}

impl VmSpec {
    fn check(&self, machine: &Machine, host: Bytes) -> Result<(), TwinError> {
        let name = || self.name.clone();
        let figure = |what, value: String, expected| TwinError::Figure {
            vm: name(),
            what,
            value,
            expected,
        };
        if self.vcpus == 0 {
            return Err(figure("vcpus", "0".into(), "a VM needs at least one"));
        }
        if !(self.work_share > 0.0 && self.work_share.is_finite()) {
            return Err(figure(
                "work_share",
                self.work_share.to_string(),
                "it must be above 0",
            ));
        }
        if usize::from(self.vcpus) > machine.cpus.len() {
            let (vcpus, cpus) = (self.vcpus, machine.cpus.len());
            return Err(TwinError::VcpusBeyondHost {
                vm: name(),
                vcpus,
                machine: machine.name.clone(),
                cpus,
            });
        }
        if self.memory > host {
            let (memory, machine) = (self.memory, machine.name.clone());
            return Err(TwinError::MemoryBeyondHost {
                vm: name(),
                memory,
                machine,
                host,
            });
        }
        if let Some(cpus) = &self.cpus {
            let usable: CpuSet = machine.cpu_set();
            if cpus.is_empty() || !cpus.is_subset(&usable) {
                let (cpus, machine) = (cpus.clone(), machine.name.clone());
                return Err(TwinError::Cpus {
                    vm: name(),
                    cpus,
                    usable,
                    machine,
                });
            }
        }
        if let Some(nodes) = &self.memory_nodes {
            let usable = machine.memory_nodes();
            if nodes.is_empty() || !nodes.is_subset(&usable) {
                let (nodes, machine) = (nodes.clone(), machine.name.clone());
                return Err(TwinError::Nodes {
                    vm: name(),
                    nodes,
                    usable,
                    machine,
                });
            }
        }
        Ok(())
    }

    /// What its guest is told must fit what its host is.
    fn check_guest(&self, hypervisor: Hypervisor) -> Result<(), TwinError> {
        let refuse = |setting, problem, remedy| {
            Err(TwinError::Contradiction {
                vm: self.name.clone(),
                setting,
                problem,
                remedy,
            })
        };
        let native = hypervisor == Hypervisor::Native;
        let rounds = self.memory_policy != MemoryPolicy::FirstTouch;
        if native && self.vnuma == Vnuma::Static {
            return refuse(
                "vnuma = \"static\"",
                "contradicts hypervisor = \"native\", whose kernel knows the nodes itself",
                "leave it out",
            );
        }
        if native && self.memory_policy == MemoryPolicy::Round1g {
            return refuse(
                "memory_policy = \"round-1g\"",
                "is a hypervisor's, and the scenario has hypervisor = \"native\"",
                "use round-4k or first-touch",
            );
        }
        if rounds && self.vnuma == Vnuma::Static {
            return refuse(
                "memory_policy = \"round-...\"",
                "spreads every virtual node of vnuma = \"static\" over the host",
                "use first-touch, or vnuma = \"none\"",
            );
        }
        let one_node = !native && self.vnuma == Vnuma::None;
        if one_node && self.allocation == Allocation::Interleave {
            return refuse(
                "allocation = \"interleave\"",
                "has no effect in a guest that sees one node",
                "set vnuma = \"static\", or memory_policy = \"round-4k\"",
            );
        }
        if one_node && self.autonuma {
            return refuse(
                "autonuma",
                "has no effect in a guest that sees one node",
                "set vnuma = \"static\"",
            );
        }
        Ok(())
    }

    /// Whether it gets all of its memory when it is created.
    fn allocated_at_creation(&self, hypervisor: Hypervisor) -> bool {
        hypervisor != Hypervisor::Native && self.memory_policy != MemoryPolicy::FirstTouch
    }

    /// CPUs that it may run on.
    pub(crate) fn allowed(&self, cpu: CpuId) -> bool {
        self.cpus.as_ref().is_none_or(|cpus| cpus.contains(cpu))
    }
}
