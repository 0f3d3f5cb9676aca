//! What can be done to a VM, and the levers that it changes.

use homenode_machine::Machine;
use homenode_units::{CpuSet, MemoryPolicy, NodeId, NodeSet, Ns, Pages, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limit::Limit;
use crate::topology::GuestTopology;

/// The shortest window of [`Act::Watch`].
pub const WINDOW_MIN: Ns = Ns::from_millis(100);
/// The longest.
pub const WINDOW_MAX: Ns = Ns::from_secs(3600);

/// One thing to do to a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Action {
    /// Whose.
    pub vm: VmId,
    /// What.
    #[serde(flatten)]
    pub act: Act,
}

/// What can be done to a VM. Amounts are upper bounds; the [`crate::Receipt`] says what was really done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum Act {
    /// Let these vCPUs run on these CPUs only.
    PinVcpus {
        /// Which, by index.
        vcpus: Vec<u16>,
        /// Where they may run.
        cpus: CpuSet,
    },
    /// Make these nodes the VM's home: its emulator and I/O threads run there, and memory that it touches from now on
    /// is allocated there (interleaved over several nodes) as far as the host can still decide that.
    SetHome {
        /// Home nodes, all with memory.
        nodes: NodeSet,
    },
    /// Move touched pages that lie on `from` onto `to`, evenly over its nodes: any of them, as many as the budget allows.
    MovePages {
        /// Where pages shall leave; no node of `to`, and none at all where nothing is to be done.
        from: NodeSet,
        /// Where they shall lie.
        to: NodeSet,
        /// Budget: at most so many in this commit.
        pages_max: Pages,
    },
    /// Move what was touched of one virtual node's memory onto `to` from wherever else it lies.
    MoveVirtualNode {
        /// Which of [`crate::VmSample::virtual_nodes`].
        virtual_node: u16,
        /// Where it shall lie.
        to: NodeId,
        /// Budget: at most so many in this commit.
        pages_max: Pages,
    },
    /// Move these pages and no others.
    MoveFrames {
        /// Which, from where, to where.
        moves: Vec<FrameMove>,
    },
    /// From now on place and sample the VM's pages by this policy. Pages that are touched already stay where they are.
    SetMemoryPolicy {
        /// How.
        // `policy` is whose decision it is, in the same object.
        #[serde(rename = "memory_policy")]
        policy: MemoryPolicy,
    },
    /// Hold the VM to a limit in the place of the one that this agent may have set before. The host lifts it once the lease
    /// is over; committing it again renews the lease.
    Limit {
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
        /// Length of a window.
        window_ns: Ns,
        /// For how long from now.
        lease_ns: Ns,
    },
    /// Tell the guest where its vCPUs and its virtual nodes' memory are. It stays told until it is told otherwise: where it
    /// is not so any more the guest is as badly off as one that never learns anything, and no worse.
    #[serde(rename = "tell-topology")]
    PublishTopology {
        /// What is so.
        topology: GuestTopology,
    },
    /// Lift what [`Act::Limit`], [`Act::Watch`] or [`Act::SetHome`] set on a lever: what the operator had set
    /// before is in force again. Without a home ([`Lever::Home`]) the VM is free: vCPUs and helper threads run where they
    /// did before the agent's first pin, memory that it touches from now on is allocated where the kernel would, and
    /// pages stay where they are. Where nothing of the agent's is in force nothing happens.
    Lift {
        /// On which lever.
        lever: Lever,
    },
}

/// A move of pages that are used alike, as [`crate::PageUse`] named them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
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
    /// Whether what is set on it ends with a lease.
    pub fn is_leased(self) -> bool {
        matches!(
            self,
            Lever::CpuQuota | Lever::Resctrl | Lever::Watching | Lever::Memory
        )
    }

    /// Whether [`Act::Lift`] takes back what was set on it.
    pub fn can_be_lifted(self) -> bool {
        self.is_leased() || self == Lever::Home
    }

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
        let from = machine.home_nodes().difference(&to);
        let act = Act::MovePages { from, to, pages_max };
        act.on(vm)
    }
}

impl Act {
    /// Done to this VM.
    pub fn on(self, vm: VmId) -> Action {
        Action { vm, act: self }
    }

    /// What it is called in JSON.
    pub fn kind(&self) -> &'static str {
        match self {
            Act::PinVcpus { .. } => "pin-vcpus",
            Act::SetHome { .. } => "set-home",
            Act::MovePages { .. } => "move-pages",
            Act::MoveVirtualNode { .. } => "move-virtual-node",
            Act::MoveFrames { .. } => "move-frames",
            Act::SetMemoryPolicy { .. } => "set-memory-policy",
            Act::Limit { .. } => "limit",
            Act::Watch { .. } => "watch",
            Act::PublishTopology { .. } => "tell-topology",
            Act::Lift { .. } => "lift",
        }
    }

    /// How many pages it may move.
    pub fn pages_max(&self) -> Pages {
        match self {
            Act::MovePages { pages_max, .. } | Act::MoveVirtualNode { pages_max, .. } => *pages_max,
            Act::MoveFrames { moves } => moves.iter().map(|each| each.pages).sum(),
            _ => Pages::ZERO,
        }
    }

    /// What it changes.
    pub fn lever(&self) -> Lever {
        match self {
            Act::PinVcpus { .. } => Lever::VcpuPlacement,
            Act::SetHome { .. } => Lever::Home,
            Act::MovePages { .. } | Act::MoveVirtualNode { .. } | Act::MoveFrames { .. } => Lever::Pages,
            Act::PublishTopology { .. } => Lever::Topology,
            Act::SetMemoryPolicy { .. } => Lever::MemoryPolicy,
            Act::Limit { limit, .. } => limit.lever(),
            Act::Watch { .. } => Lever::Watching,
            Act::Lift { lever } => *lever,
        }
    }

    /// For how long from now it holds, where it ends by itself.
    pub fn lease(&self) -> Option<Ns> {
        match self {
            Act::Limit { lease_ns, .. } | Act::Watch { lease_ns, .. } => Some(*lease_ns),
            _ => None,
        }
    }
}

impl Limit {
    /// What it is set with.
    pub fn lever(self) -> Lever {
        match self {
            Limit::CpuQuota(_) => Lever::CpuQuota,
            Limit::CacheWays(_) | Limit::MemoryBandwidth(_) => Lever::Resctrl,
            Limit::Memory(_) => Lever::Memory,
        }
    }
}
