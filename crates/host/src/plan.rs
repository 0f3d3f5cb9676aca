//! What policies ask of a host, and what the host answers.

use homenode_machine::Machine;
use homenode_units::{Bytes, CpuSet, MemoryPolicy, NodeId, NodeSet, Ns, Pages, VmId};
use serde::Serialize;

use crate::feed::GuestTopology;
use crate::limit::{CpuQuota, Limit, Percent};
use crate::sample::{Sample, Version};

/// The shortest window of [`Action::Watch`].
pub const WINDOW_MIN: Ns = Ns::from_millis(100);
/// The longest.
pub const WINDOW_MAX: Ns = Ns::from_secs(3600);

/// One thing to do. Amounts are upper bounds; the [`Receipt`] says what was really done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum Action {
    /// Let these vCPUs run on these CPUs only.
    PinVcpus {
        /// Whose.
        vm: VmId,
        /// Which, by index.
        vcpus: Vec<u16>,
        /// Where they may run.
        cpus: CpuSet,
    },
    /// Make these nodes the VM's home: its emulator and I/O threads run there, and memory that it touches from now on
    /// is allocated there (interleaved over several nodes) as far as the host can still decide that.
    SetHome {
        /// Whose.
        vm: VmId,
        /// Home nodes, all with memory.
        nodes: NodeSet,
    },
    /// Move touched pages that lie on `from` onto `to`, evenly over its nodes: any of them, as many as the budget allows.
    MovePages {
        /// Whose.
        vm: VmId,
        /// Where pages shall leave; no node of `to`, and none at all where nothing is to be done.
        from: NodeSet,
        /// Where they shall lie.
        to: NodeSet,
        /// Budget: at most so many in this commit.
        pages_max: Pages,
    },
    /// Move what was touched of one virtual node's memory onto `to` from wherever else it lies.
    MoveVirtualNode {
        /// Whose.
        vm: VmId,
        /// Which of [`crate::VmSample::virtual_nodes`].
        virtual_node: u16,
        /// Where it shall lie.
        to: NodeId,
        /// Budget: at most so many in this commit.
        pages_max: Pages,
    },
    /// Move these pages and no others.
    MoveFrames {
        /// Whose.
        vm: VmId,
        /// Which, from where, to where.
        moves: Vec<FrameMove>,
    },
    /// From now on place and sample the VM's pages by this policy. Pages that are touched already stay where they are.
    SetMemoryPolicy {
        /// Whose.
        vm: VmId,
        /// How.
        policy: MemoryPolicy,
    },
    /// Hold the VM to a limit in the place of the one that this agent may have set before. The host lifts it once the lease
    /// is over; committing it again renews the lease.
    Limit {
        /// Whose.
        vm: VmId,
        /// To what.
        limit: Limit,
        /// For how long from now.
        lease_ns: Ns,
    },
    /// Watch which of its memory the VM uses, window after window; what each complete one showed is in
    /// [`crate::VmSample::observed`]. Clearing what tells of use costs the VM walks of its page tables, so watching ends
    /// once the lease is over; committing it again renews the lease, and another length of windows holds from then on, at
    /// the cost of the running one.
    Watch {
        /// Whose.
        vm: VmId,
        /// Length of a window.
        window_ns: Ns,
        /// For how long from now.
        lease_ns: Ns,
    },
    /// Tell the guest where its vCPUs and its virtual nodes' memory are. It stays told until it is told otherwise: where it
    /// is not so any more the guest is as badly off as one that never learns anything, and no worse.
    TellTopology {
        /// Whose.
        vm: VmId,
        /// What is so.
        topology: GuestTopology,
    },
    /// Lift what [`Action::Limit`], [`Action::Watch`] or [`Action::SetHome`] set on a lever: what the operator had set
    /// before is in force again. Without a home ([`Lever::Home`]) the VM is free: vCPUs and helper threads run where they
    /// did before the agent's first pin, memory that it touches from now on is allocated where the kernel would, and
    /// pages stay where they are. Where nothing of the agent's is in force nothing happens.
    Lift {
        /// Whose.
        vm: VmId,
        /// On which lever.
        lever: Lever,
    },
}

/// A move of pages that are used alike, as [`crate::PageUse`] named them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct FrameMove {
    /// Guest frame of the first of them.
    pub frame: u64,
    /// How many: 1 on a real host.
    pub pages: Pages,
    /// Where they lie.
    pub from: NodeId,
    /// Where they shall lie.
    pub to: NodeId,
}

/// What an action changes. Of all policies one owns a lever of a VM at a time (DESIGN, section 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Lever {
    /// Where the VM's vCPUs may run.
    VcpuPlacement,
    /// Where its home is.
    Home,
    /// Where its pages lie.
    Pages,
    /// How its pages are placed and sampled.
    MemoryPolicy,
    /// How long its vCPUs may run per period.
    CpuQuota,
    /// Its part of caches and memory bandwidth, where the hardware has one.
    Resctrl,
    /// Whether the use of its memory is watched, and how.
    Watching,
    /// How much memory its guest has.
    Memory,
    /// What its guest is told of where it is.
    Topology,
}

impl Lever {
    /// What it changes, as in "a policy decides on its home".
    pub fn of_vm(self) -> &'static str {
        match self {
            Lever::VcpuPlacement => "its vCPUs",
            Lever::Home => "its home",
            Lever::Pages => "its pages",
            Lever::MemoryPolicy => "its memory policy",
            Lever::CpuQuota => "its CPU quota",
            Lever::Resctrl => "its part of caches and memory bandwidth",
            Lever::Watching => "the watch on its memory",
            Lever::Memory => "its memory",
            Lever::Topology => "what its guest is told",
        }
    }
}

impl Action {
    /// Moves pages onto `to` from wherever else they lie.
    pub fn gather(machine: &Machine, vm: VmId, to: NodeSet, pages_max: Pages) -> Action {
        let from = machine.memory_nodes().difference(&to);
        Action::MovePages {
            vm,
            from,
            to,
            pages_max,
        }
    }

    /// The VM that it acts on.
    pub fn vm(&self) -> VmId {
        match self {
            Action::PinVcpus { vm, .. }
            | Action::SetHome { vm, .. }
            | Action::MovePages { vm, .. }
            | Action::MoveVirtualNode { vm, .. }
            | Action::MoveFrames { vm, .. }
            | Action::TellTopology { vm, .. }
            | Action::SetMemoryPolicy { vm, .. }
            | Action::Limit { vm, .. }
            | Action::Watch { vm, .. }
            | Action::Lift { vm, .. } => *vm,
        }
    }

    /// How many pages it may move.
    pub fn pages_max(&self) -> Pages {
        match self {
            Action::MovePages { pages_max, .. } | Action::MoveVirtualNode { pages_max, .. } => *pages_max,
            Action::MoveFrames { moves, .. } => moves.iter().map(|each| each.pages).sum(),
            _ => Pages::ZERO,
        }
    }

    /// What it changes.
    pub fn lever(&self) -> Lever {
        match self {
            Action::PinVcpus { .. } => Lever::VcpuPlacement,
            Action::SetHome { .. } => Lever::Home,
            Action::MovePages { .. } | Action::MoveVirtualNode { .. } | Action::MoveFrames { .. } => {
                Lever::Pages
            }
            Action::TellTopology { .. } => Lever::Topology,
            Action::SetMemoryPolicy { .. } => Lever::MemoryPolicy,
            Action::Limit { limit, .. } => limit.lever(),
            Action::Watch { .. } => Lever::Watching,
            Action::Lift { lever, .. } => *lever,
        }
    }
}

/// An action and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Decision {
    /// Policy that decided (`placement`, `balance`, …).
    pub policy: &'static str,
    /// What to do.
    #[serde(flatten)]
    pub action: Action,
    /// Why, in a sentence for the operator.
    pub reason: String,
}

/// Something that a policy wants the operator to know, and that nobody acts on (a VM that fits nowhere).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Policy that found it.
    pub policy: &'static str,
    /// The VM it is about, if it is about one.
    pub vm: Option<VmId>,
    /// What, and what to do about it.
    pub message: String,
}

/// What policies want done, from one view.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Plan {
    /// Version of the view it was made from.
    pub version: Version,
    /// In the order to carry out.
    pub decisions: Vec<Decision>,
    /// What nobody acts on.
    pub findings: Vec<Finding>,
}

/// What a host did about a plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Receipt {
    /// Version of the host after it.
    pub version: Version,
    /// One per decision, in the plan's order.
    pub outcomes: Vec<Outcome>,
}

/// What became of one decision.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "outcome", rename_all = "kebab-case")]
pub enum Outcome {
    /// Done, and read back.
    Done,
    /// It was in force already, as reading back showed; only its lease is new.
    Renewed,
    /// Pages were moved, and where they are was read back.
    Moved {
        /// Now on the wanted nodes.
        moved: Pages,
        /// Still where they should leave, known afterwards.
        left: Pages,
        /// Refused by the kernel this time because somebody used them; may succeed later.
        busy: Pages,
    },
    /// Not tried: the agent runs with `--dry-run`.
    DryRun,
    /// Tried and failed; the VM is as it was.
    Failed(ActionError),
}

/// Why an action failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "error", rename_all = "kebab-case")]
pub enum ActionError {
    /// The VM ended between sample and commit, or in mid-move.
    #[error("VM {name} is gone")]
    VmGone {
        /// Its name.
        name: String,
    },
    /// Its memory cannot move.
    #[error("memory of VM {name} cannot move: {why}")]
    MemoryFixed {
        /// Its name.
        name: String,
        /// Why.
        why: String,
    },
    /// The target has no free memory left.
    #[error("nodes {nodes} have no free memory left for VM {name}")]
    NoMemory {
        /// Its name.
        name: String,
        /// Where memory was wanted.
        nodes: NodeSet,
    },
    /// The host or the VM cannot have this memory policy.
    #[error("VM {name} cannot have memory policy {policy}: {why}")]
    MemoryPolicy {
        /// Its name.
        name: String,
        /// What was asked for.
        policy: MemoryPolicy,
        /// Why, and what to do instead.
        why: String,
    },
    /// The guest cannot be told where it is.
    #[error("the guest of VM {name} cannot be told where it is: {why}")]
    NoFeed {
        /// Its name.
        name: String,
        /// Why, with the remedy.
        why: String,
    },
    /// Nobody can tell which memory the VM uses.
    #[error("nobody can watch which memory VM {name} uses: {why}")]
    NoCarrier {
        /// Its name.
        name: String,
        /// What each carrier lacks, with the remedy.
        why: String,
    },
    /// The host said no, or did something else than asked.
    #[error("{what} of VM {name} failed: {cause}")]
    Host {
        /// Its name.
        name: String,
        /// What was tried.
        what: String,
        /// What the host said, or what was found when reading back.
        cause: String,
    },
}

/// Why a whole plan is refused. Nothing of it was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(tag = "refusal", rename_all = "kebab-case")]
pub enum Refusal {
    /// Something changed since the view was made.
    #[error("plan was made from version {}, the host is at {}; it will be made anew", planned.0, current.0)]
    Stale {
        /// Version of the plan.
        planned: Version,
        /// Version of the host.
        current: Version,
    },
    /// No such VM runs.
    #[error("no VM {vm} runs on this host")]
    UnknownVm {
        /// The id asked for.
        vm: VmId,
    },
    /// No such vCPU is online.
    #[error("VM {name} has no online vCPU {index}")]
    UnknownVcpu {
        /// The VM.
        name: String,
        /// The index asked for.
        index: u16,
    },
    /// CPUs that the host lacks, or none at all.
    #[error("CPUs {{{cpus}}} are not a non-empty part of the host's CPUs {usable}")]
    Cpus {
        /// CPUs asked for.
        cpus: CpuSet,
        /// CPUs that there are.
        usable: CpuSet,
    },
    /// Nodes that the host lacks, that have no memory, or none at all.
    #[error("nodes {{{nodes}}} are not a non-empty part of the host's nodes with memory {usable}")]
    Nodes {
        /// Nodes asked for.
        nodes: NodeSet,
        /// Nodes that can hold memory.
        usable: NodeSet,
    },
    /// Pages that would move from a node to itself.
    #[error("pages of VM {name} cannot move from nodes {{{from}}} to nodes {{{to}}}: some are both")]
    SameNodes {
        /// The VM.
        name: String,
        /// Where pages should leave.
        from: NodeSet,
        /// Where they should go.
        to: NodeSet,
    },
    /// No such virtual node.
    #[error("VM {name} has no virtual node {virtual_node}: its guest sees {count}")]
    UnknownVirtualNode {
        /// The VM.
        name: String,
        /// The one asked for.
        virtual_node: u16,
        /// How many there are.
        count: usize,
    },
    /// A topology that says nothing of where memory is, or of more than there is.
    #[error(
        "VM {name} cannot be told of {vcpus} vCPUs and {memory} virtual nodes: its guest sees {count}, some must have memory, and all of it on nodes of this host"
    )]
    Topology {
        /// The VM.
        name: String,
        /// vCPUs in what it should be told.
        vcpus: usize,
        /// Virtual nodes there.
        memory: usize,
        /// Virtual nodes of its guest.
        count: usize,
    },
    /// A quota that no kernel takes.
    #[error(
        "vCPUs of VM {name} cannot be held to {quota}: the least is {} of a period of at most {}",
        CpuQuota::MIN,
        CpuQuota::PERIOD_MAX
    )]
    Quota {
        /// The VM.
        name: String,
        /// What was asked for.
        quota: CpuQuota,
    },
    /// No part of anything.
    #[error("VM {name} cannot be held to {percent} percent: it is 1 to 100")]
    Part {
        /// The VM.
        name: String,
        /// What was asked for.
        percent: u8,
    },
    /// More memory than it may have, none, or memory of a VM without a balloon.
    #[error("VM {name} cannot be held to {memory} of memory: {}", why_not(.maximum))]
    Memory {
        /// The VM.
        name: String,
        /// What was asked for.
        memory: Bytes,
        /// What it may have; `None` where it has no balloon.
        maximum: Option<Bytes>,
    },
    /// A limit that would have to be lifted at once.
    #[error("a limit of VM {name} carries no lease")]
    NoLease {
        /// The VM.
        name: String,
    },
    /// A window too short to see anything in, or too long to wait for.
    #[error(
        "memory of VM {name} cannot be watched in windows of {window_ns}: they last from {} to {}",
        WINDOW_MIN,
        WINDOW_MAX
    )]
    Window {
        /// The VM.
        name: String,
        /// What was asked for.
        window_ns: Ns,
    },
    /// A lever on which there are no limits.
    #[error("there is no limit on {} to lift from VM {name}", .lever.of_vm())]
    NoLimit {
        /// The VM.
        name: String,
        /// The lever asked for.
        lever: Lever,
    },
}

fn why_not(maximum: &Option<Bytes>) -> String {
    maximum.map_or_else(
        || "it has no balloon".to_owned(),
        |maximum| format!("it is more than nothing and at most {maximum}"),
    )
}

impl Plan {
    /// The empty plan for a version.
    pub fn new(version: Version) -> Plan {
        Plan {
            version,
            ..Plan::default()
        }
    }

    /// Adds an action with its reason.
    pub fn decide(&mut self, policy: &'static str, action: Action, reason: String) {
        self.decisions.push(Decision {
            policy,
            action,
            reason,
        });
    }

    /// Adds a finding.
    pub fn find(&mut self, policy: &'static str, vm: Option<VmId>, message: String) {
        self.findings.push(Finding { policy, vm, message });
    }

    /// Whether the host that said `now` could carry this out: every host calls it first in `commit`.
    ///
    /// # Errors
    /// The first thing that is stale or impossible.
    pub fn check(&self, machine: &Machine, now: &Sample) -> Result<(), Refusal> {
        if self.version != now.version {
            return Err(Refusal::Stale {
                planned: self.version,
                current: now.version,
            });
        }
        let (cpus_usable, nodes_usable) = (machine.cpu_set(), machine.memory_nodes());
        let usable = |nodes: &NodeSet| match !nodes.is_empty() && nodes.is_subset(&nodes_usable) {
            true => Ok(()),
            false => Err(Refusal::Nodes {
                nodes: nodes.clone(),
                usable: nodes_usable.clone(),
            }),
        };
        for Decision { action, .. } in &self.decisions {
            let vm = now
                .vm(action.vm())
                .ok_or(Refusal::UnknownVm { vm: action.vm() })?;
            match action {
                Action::PinVcpus { vcpus, cpus, .. } => {
                    if let Some(&index) = vcpus.iter().find(|index| vm.vcpu(**index).is_none()) {
                        return Err(Refusal::UnknownVcpu {
                            name: vm.name.clone(),
                            index,
                        });
                    }
                    if cpus.is_empty() || !cpus.is_subset(&cpus_usable) {
                        return Err(Refusal::Cpus {
                            cpus: cpus.clone(),
                            usable: cpus_usable,
                        });
                    }
                }
                Action::SetHome { nodes, .. } => usable(nodes)?,
                Action::MovePages { from, to, .. } => {
                    usable(to)?;
                    if !from.is_empty() {
                        usable(from)?;
                    }
                    if !from.intersection(to).is_empty() {
                        return Err(Refusal::SameNodes {
                            name: vm.name.clone(),
                            from: from.clone(),
                            to: to.clone(),
                        });
                    }
                }
                Action::MoveFrames { moves, .. } => {
                    for &FrameMove { from, to, .. } in moves {
                        let (from, to) = (NodeSet::one(from), NodeSet::one(to));
                        usable(&from)?;
                        usable(&to)?;
                        if from == to {
                            let name = vm.name.clone();
                            return Err(Refusal::SameNodes { name, from, to });
                        }
                    }
                }
                Action::MoveVirtualNode { virtual_node, to, .. } => {
                    usable(&NodeSet::one(*to))?;
                    let count = vm.virtual_nodes.len();
                    if usize::from(*virtual_node) >= count {
                        let (name, virtual_node) = (vm.name.clone(), *virtual_node);
                        return Err(Refusal::UnknownVirtualNode {
                            name,
                            virtual_node,
                            count,
                        });
                    }
                }
                Action::TellTopology { topology, .. } => {
                    let GuestTopology { vcpus, memory } = topology;
                    let known = |node: &NodeId| machine.nodes.get(*node).is_some();
                    let named = vcpus.iter().chain(memory).flatten();
                    let count = vm.virtual_nodes.len();
                    let is_possible =
                        memory.len() == count && !vcpus.is_empty() && memory.iter().any(Option::is_some);
                    if !is_possible || !named.into_iter().all(known) {
                        return Err(Refusal::Topology {
                            name: vm.name.clone(),
                            vcpus: vcpus.len(),
                            memory: memory.len(),
                            count,
                        });
                    }
                }
                Action::SetMemoryPolicy { .. } => {}
                Action::Limit { limit, lease_ns, .. } => {
                    let name = vm.name.clone();
                    match *limit {
                        Limit::CpuQuota(quota) if !quota.is_possible() => {
                            return Err(Refusal::Quota { name, quota });
                        }
                        Limit::CacheWays(Percent(percent)) | Limit::MemoryBandwidth(Percent(percent))
                            if !(1..=100).contains(&percent) =>
                        {
                            return Err(Refusal::Part { name, percent });
                        }
                        Limit::Memory(memory) => {
                            let maximum = vm.balloon.map(|balloon| balloon.maximum);
                            if memory == Bytes::ZERO || maximum.is_none_or(|maximum| memory > maximum) {
                                return Err(Refusal::Memory {
                                    name,
                                    memory,
                                    maximum,
                                });
                            }
                        }
                        _ => {}
                    }
                    if *lease_ns == Ns::ZERO {
                        return Err(Refusal::NoLease {
                            name: vm.name.clone(),
                        });
                    }
                }
                Action::Watch {
                    window_ns, lease_ns, ..
                } => {
                    let name = vm.name.clone();
                    if !(WINDOW_MIN..=WINDOW_MAX).contains(window_ns) {
                        return Err(Refusal::Window {
                            name,
                            window_ns: *window_ns,
                        });
                    }
                    if *lease_ns == Ns::ZERO {
                        return Err(Refusal::NoLease { name });
                    }
                }
                Action::Lift {
                    lever: Lever::CpuQuota | Lever::Resctrl | Lever::Watching | Lever::Memory | Lever::Home,
                    ..
                } => {}
                Action::Lift { lever, .. } => {
                    let (name, lever) = (vm.name.clone(), *lever);
                    return Err(Refusal::NoLimit { name, lever });
                }
            }
        }
        Ok(())
    }
}
