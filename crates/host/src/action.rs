//! Actions on VMs, and the levers that they change.

use homenode_machine::Machine;
use homenode_units::{CpuSet, MemoryPolicy, NodeId, NodeSet, Ns, Pages, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::limit::Limit;
use crate::topology::GuestTopology;

/// The shortest window of [`Act::Watch`].
pub const WINDOW_MIN: Ns = Ns::from_millis(100);
/// The longest window of [`Act::Watch`].
pub const WINDOW_MAX: Ns = Ns::from_secs(3600);

/// An action on a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Action {
    /// The VM.
    pub vm: VmId,
    /// The act.
    #[serde(flatten)]
    pub act: Act,
}

/// An act on a VM. Amounts in an act are upper bounds; the [`crate::Receipt`] reports what was really done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "action", rename_all = "kebab-case")]
pub enum Act {
    /// Let these vCPUs run on these CPUs only.
    PinVcpus {
        /// The vCPUs, by index.
        vcpus: Vec<u16>,
        /// The CPUs.
        cpus: CpuSet,
    },
    /// Make these nodes the VM's home. Its emulator and I/O threads then run there. Memory that it touches from now on is
    /// allocated there, interleaved if there are several nodes, as far as the host can still decide that.
    SetHome {
        /// Home nodes; each must have memory.
        nodes: NodeSet,
    },
    /// Move touched pages from `from` onto `to`, spread evenly over its nodes. The host picks the pages, up to the budget.
    MovePages {
        /// Nodes that pages leave. None may be in `to`; if the set is empty, nothing is done.
        from: NodeSet,
        /// Nodes that pages move to.
        to: NodeSet,
        /// Budget: the most pages that this commit may move.
        pages_max: Pages,
    },
    /// Move the touched part of one virtual node's memory onto `to` from all other nodes.
    MoveVirtualNode {
        /// Index into [`crate::VmSample::virtual_nodes`].
        virtual_node: u16,
        /// The node that the memory moves to.
        to: NodeId,
        /// Budget: the most pages that this commit may move.
        pages_max: Pages,
    },
    /// Move these pages and no others.
    MoveFrames {
        /// The moves.
        moves: Vec<FrameMove>,
    },
    /// Place and sample the VM's pages according to this policy from now on. Pages that are already touched stay in place.
    SetMemoryPolicy {
        /// The policy.
        // The key `policy` in the same JSON object names the policy that made the decision.
        #[serde(rename = "memory_policy")]
        policy: MemoryPolicy,
    },
    /// Hold the VM to a limit, which replaces this agent's earlier limit on the same lever. The host lifts it when the lease
    /// ends. Committing it again renews the lease.
    Limit {
        /// The limit.
        limit: Limit,
        /// Length of the lease from now.
        lease_ns: Ns,
    },
    /// Watch which of its memory the VM uses, window after window. [`crate::VmSample::observed`] has the result of each complete
    /// window. Watching costs the VM time, since it walks page tables again after its accessed bits were cleared. So watching
    /// ends with the lease, and committing it again renews the lease. A new window length applies at once and discards the
    /// running window.
    Watch {
        /// Length of a window.
        window_ns: Ns,
        /// Length of the lease from now.
        lease_ns: Ns,
    },
    /// Tell the guest which nodes its vCPUs and its virtual nodes' memory are on. The guest keeps this topology until the next
    /// one. With an outdated topology it is no worse off than a guest that is never told.
    #[serde(rename = "tell-topology")]
    PublishTopology {
        /// The topology.
        topology: GuestTopology,
    },
    /// Lift the agent's [`Act::Limit`], [`Act::Watch`] or [`Act::SetHome`] on a lever, so that the operator's earlier setting is
    /// in force again. Lifting the home ([`Lever::Home`]) leaves the VM unplaced: vCPUs and helper threads run where they did
    /// before the agent's first pin, the kernel allocates the memory that it touches from now on, and its pages stay in place. If
    /// no setting of the agent is in force, nothing happens.
    Lift {
        /// The lever.
        lever: Lever,
    },
}

/// A move of pages that are used alike, as [`crate::PageUse`] names them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct FrameMove {
    /// Guest frame of the first page.
    pub frame: u64,
    /// Number of pages: 1 on a real host.
    pub pages: Pages,
    /// The node that the pages are on now.
    pub from: NodeId,
    /// The node that the pages move to.
    pub to: NodeId,
}

/// The part of a VM that an action changes. Only one policy at a time owns a lever of a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Lever {
    /// The CPUs that the VM's vCPUs may run on.
    VcpuPlacement,
    /// The VM's home.
    Home,
    /// The nodes of the VM's pages.
    Pages,
    /// How the VM's pages are placed and sampled.
    MemoryPolicy,
    /// How long the VM's vCPUs may run per period.
    CpuQuota,
    /// The VM's part of caches and memory bandwidth, if the hardware supports that.
    Resctrl,
    /// Whether and how the use of the VM's memory is watched.
    Watching,
    /// How much memory the VM's guest has.
    Memory,
    /// The topology that the VM's guest sees.
    Topology,
}

impl Lever {
    /// Returns true if settings on this lever end with a lease.
    pub fn is_leased(self) -> bool {
        matches!(
            self,
            Lever::CpuQuota | Lever::Resctrl | Lever::Watching | Lever::Memory
        )
    }

    /// Returns true if [`Act::Lift`] can remove a setting on this lever.
    pub fn can_be_lifted(self) -> bool {
        self.is_leased() || self == Lever::Home
    }

    /// Returns the part of a VM that this lever changes, as in "a policy decides on its home".
    pub fn of_vm(self) -> &'static str {
        match self {
            Lever::VcpuPlacement => "its vCPUs",
            Lever::Home => "its home",
            Lever::Pages => "its pages",
            Lever::MemoryPolicy => "its memory policy",
            Lever::CpuQuota => "its CPU quota",
            Lever::Resctrl => "its share of caches and memory bandwidth",
            Lever::Watching => "the watch on its memory",
            Lever::Memory => "its memory",
            Lever::Topology => "the topology that its guest is told",
        }
    }
}

impl Action {
    /// Returns an action that moves pages onto `to` from all other nodes that can be homes.
    pub fn gather(machine: &Machine, vm: VmId, to: NodeSet, pages_max: Pages) -> Action {
        let from = machine.home_nodes().difference(&to);
        let act = Act::MovePages { from, to, pages_max };
        act.on(vm)
    }
}

impl Act {
    /// Applies the act to this VM.
    pub fn on(self, vm: VmId) -> Action {
        Action { vm, act: self }
    }

    /// Returns the act's name in JSON.
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

    /// Returns the act as an order to the VM of this name: "move memory of VM web to node 1".
    pub fn in_words(&self, name: &str) -> String {
        match self {
            Act::PinVcpus { vcpus, cpus } => {
                let vcpus: Vec<String> = vcpus.iter().map(u16::to_string).collect();
                format!("run vCPU {} of VM {name} on CPUs {cpus}", vcpus.join(", "))
            }
            Act::SetHome { nodes } => format!("give VM {name} a home on node {nodes}"),
            Act::MovePages { to, .. } => format!("move memory of VM {name} to node {to}"),
            Act::MoveVirtualNode { virtual_node, to, .. } => {
                format!("move memory of virtual node {virtual_node} of VM {name} to node {to}")
            }
            Act::MoveFrames { .. } => format!("move pages of VM {name} to where they are used"),
            Act::SetMemoryPolicy { policy } => format!("set memory policy {policy} for VM {name}"),
            Act::Limit { limit, .. } => match limit {
                Limit::CpuQuota(quota) => format!("let each vCPU of VM {name} run {quota}"),
                Limit::CacheWays(part) => format!("limit VM {name} to {} percent of the cache", part.0),
                Limit::MemoryBandwidth(part) => {
                    format!("limit VM {name} to {} percent of the memory bandwidth", part.0)
                }
                Limit::Memory(bytes) => format!("limit VM {name} to {bytes} of memory"),
            },
            Act::Watch { .. } => format!("watch which memory VM {name} uses"),
            Act::PublishTopology { .. } => format!("tell the guest of VM {name} its NUMA topology"),
            Act::Lift { lever } => format!("undo what was set on VM {name}: {}", lever.of_vm()),
        }
    }

    /// Returns the state in which the act leaves a VM. Two acts with different states are different decisions. Amounts, such as
    /// memory moved or the length of a quota, do not count.
    pub fn state(&self) -> String {
        match self {
            Act::SetHome { nodes } => nodes.to_string(),
            Act::SetMemoryPolicy { policy } => policy.to_string(),
            Act::MovePages { to, .. } => to.to_string(),
            Act::MoveVirtualNode { virtual_node, to, .. } => format!("{virtual_node} {to}"),
            Act::PinVcpus { vcpus, cpus } => format!("{vcpus:?} {cpus}"),
            Act::Limit { limit, .. } => format!("{:?}", limit.lever()),
            Act::Lift { lever } => format!("{lever:?}"),
            Act::MoveFrames { .. } | Act::Watch { .. } | Act::PublishTopology { .. } => String::new(),
        }
    }

    /// Returns the maximum number of pages that the act moves.
    pub fn pages_max(&self) -> Pages {
        match self {
            Act::MovePages { pages_max, .. } | Act::MoveVirtualNode { pages_max, .. } => *pages_max,
            Act::MoveFrames { moves } => moves.iter().map(|each| each.pages).sum(),
            _ => Pages::ZERO,
        }
    }

    /// Returns the lever that the act changes.
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

    /// Returns the length of the act's lease from now, if it has one.
    pub fn lease(&self) -> Option<Ns> {
        match self {
            Act::Limit { lease_ns, .. } | Act::Watch { lease_ns, .. } => Some(*lease_ns),
            _ => None,
        }
    }
}

impl Limit {
    /// Returns the lever that this limit is set on.
    pub fn lever(self) -> Lever {
        match self {
            Limit::CpuQuota(_) => Lever::CpuQuota,
            Limit::CacheWays(_) | Limit::MemoryBandwidth(_) => Lever::Resctrl,
            Limit::Memory(_) => Lever::Memory,
        }
    }
}
