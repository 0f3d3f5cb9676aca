//! Reasons for refused plans and failed actions.

use homenode_units::{Bytes, CpuSet, MemoryPolicy, NodeSet, Ns, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::action::{Lever, WINDOW_MAX, WINDOW_MIN};
use crate::limit::CpuQuota;
use crate::sample::{Setting, Version};

/// Why an action failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, JsonSchema)]
#[error("{}", .why.of(.name))]
pub struct ActionError {
    /// The VM's name.
    pub name: String,
    /// The reason.
    #[serde(flatten)]
    pub why: Failure,
}

/// Why an action on a VM failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "error", rename_all = "kebab-case")]
pub enum Failure {
    /// The VM ended between sample and commit, or while it was being moved.
    VmGone,
    /// The VM's memory cannot move.
    MemoryFixed {
        /// The reason.
        why: String,
    },
    /// The target nodes have no free memory left.
    NoMemory {
        /// The target nodes.
        nodes: NodeSet,
    },
    /// The host or the VM does not support this memory policy.
    MemoryPolicy {
        /// The requested policy.
        policy: MemoryPolicy,
        /// The reason, and what to do instead.
        why: String,
    },
    /// The guest cannot be told its topology.
    #[serde(rename = "no-feed")]
    NoTopologyDevice {
        /// The reason, with the remedy.
        why: String,
    },
    /// No tracker can report which memory the VM uses.
    NoTracker {
        /// For each tracker, what it lacks, with the remedy.
        why: String,
    },
    /// The host refused, or did something other than what was asked.
    Host {
        /// The attempted operation.
        what: String,
        /// The host's message, or the state that was read back.
        cause: String,
    },
}

impl Failure {
    /// Returns the error that says why the host could not change the operator's settings of a VM.
    pub fn to_set(settings: &[Setting], cause: String) -> Failure {
        let names: Vec<&str> = settings.iter().map(|setting| setting.name()).collect();
        Failure::Host {
            what: format!("setting the {}", names.join(" and the ")),
            cause,
        }
    }

    /// Returns this failure as an error for the VM of this name.
    pub fn on(self, name: &str) -> ActionError {
        ActionError {
            name: name.to_owned(),
            why: self,
        }
    }

    fn of(&self, name: &str) -> String {
        match self {
            Failure::VmGone => format!("VM {name} is gone"),
            Failure::MemoryFixed { why } => format!("memory of VM {name} cannot move: {why}"),
            Failure::NoMemory { nodes } => format!("nodes {nodes} have no free memory left for VM {name}"),
            Failure::MemoryPolicy { policy, why } => {
                format!("VM {name} cannot have memory policy {policy}: {why}")
            }
            Failure::NoTopologyDevice { why } => {
                format!("the guest of VM {name} cannot be told its NUMA topology: {why}")
            }
            Failure::NoTracker { why } => format!("no tracker can watch which memory VM {name} uses: {why}"),
            Failure::Host { what, cause } => format!("{what} of VM {name} failed: {cause}"),
        }
    }
}

/// Why a whole plan was refused. Nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, JsonSchema)]
#[serde(tag = "refusal", rename_all = "kebab-case")]
pub enum Refusal {
    /// The host changed after the plan's view was made.
    #[error("plan was made from version {}, but the host is at {}; a new plan will be made", planned.0, current.0)]
    Stale {
        /// Version that the plan was made from.
        planned: Version,
        /// The host's present version.
        current: Version,
    },
    /// No VM with this id runs on the host.
    #[error("no VM {vm} runs on this host")]
    UnknownVm {
        /// The requested id.
        vm: VmId,
    },
    /// An action is impossible for its VM.
    #[error("VM {name}: {why}")]
    Vm {
        /// The VM's name.
        name: String,
        /// The reason.
        #[serde(flatten)]
        why: Impossible,
    },
    /// The plan contradicts an operator's setting. Hosts never report this: the control loop enforces such settings.
    #[error("{why}")]
    Forbidden {
        /// The VM, and the operator's setting.
        why: String,
    },
}

/// Why an action is impossible for a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, JsonSchema)]
#[serde(tag = "why", rename_all = "kebab-case")]
pub enum Impossible {
    /// No online vCPU has this index.
    #[error("no online vCPU has index {index}")]
    UnknownVcpu {
        /// The requested index.
        index: u16,
    },
    /// The CPU set is empty, or has CPUs that the host lacks or that the VM may not use.
    #[error("CPUs {{{cpus}}} must be one or more of the CPUs {usable} that the VM may use")]
    Cpus {
        /// Requested CPUs.
        cpus: CpuSet,
        /// CPUs that the VM may use.
        usable: CpuSet,
    },
    /// The node set is empty, or has nodes that the host lacks or that have no memory.
    #[error("nodes {{{nodes}}} must be one or more of the host's nodes with memory, {usable}")]
    Nodes {
        /// Requested nodes.
        nodes: NodeSet,
        /// Nodes that can hold memory.
        usable: NodeSet,
    },
    /// Some nodes are both source and target of the move.
    #[error("pages cannot move from nodes {{{from}}} to nodes {{{to}}}: some nodes are in both sets")]
    SameNodes {
        /// Nodes that pages should leave.
        from: NodeSet,
        /// Nodes that pages should move to.
        to: NodeSet,
    },
    /// The VM has no such virtual node.
    #[error("there is no virtual node {virtual_node}: the guest sees {count} virtual nodes")]
    UnknownVirtualNode {
        /// The requested virtual node.
        virtual_node: u16,
        /// Number of virtual nodes that the guest sees.
        count: usize,
    },
    /// The topology has no memory, the wrong number of virtual nodes, or nodes that the host lacks.
    #[error(
        "the guest cannot be told of {vcpus} vCPUs and {memory} virtual nodes: a topology needs at least one vCPU, {count} virtual nodes, memory in at least one of them, and only nodes of this host"
    )]
    Topology {
        /// Number of vCPUs in the topology.
        vcpus: usize,
        /// Number of virtual nodes in the topology.
        memory: usize,
        /// Number of virtual nodes that the guest sees.
        count: usize,
    },
    /// The quota is below the least that kernels accept, or its period is too long.
    #[error(
        "the vCPUs cannot be held to {quota}: the minimum is {} in a period of at most {}",
        CpuQuota::MIN,
        CpuQuota::PERIOD_MAX
    )]
    Quota {
        /// The requested quota.
        quota: CpuQuota,
    },
    /// A percentage outside 1 to 100.
    #[error("the VM cannot be held to {percent} percent: the limit must be 1 to 100 percent")]
    Part {
        /// The requested percentage.
        percent: u8,
    },
    /// The requested memory is zero or more than the VM's maximum, or the VM has no balloon.
    #[error("the VM cannot be held to {memory} of memory: {}", why_not(.maximum))]
    Memory {
        /// The requested memory.
        memory: Bytes,
        /// The VM's maximum; `None` if it has no balloon.
        maximum: Option<Bytes>,
    },
    /// A limit or a watch without a lease, which would be lifted at once.
    #[error("the limit or watch has no lease")]
    NoLease,
    /// The window is too short to see anything, or too long to wait for.
    #[error(
        "the memory cannot be watched in windows of {window_ns}: they must last {} to {}",
        WINDOW_MIN,
        WINDOW_MAX
    )]
    Window {
        /// The requested window.
        window_ns: Ns,
    },
    /// The lever has no settings that could be lifted.
    #[error("there is nothing to lift on {}", .lever.of_vm())]
    NoLimit {
        /// The requested lever.
        lever: Lever,
    },
}

fn why_not(maximum: &Option<Bytes>) -> String {
    maximum.map_or_else(
        || "the VM has no balloon".to_owned(),
        |maximum| format!("the limit must be above 0 and at most {maximum}"),
    )
}
