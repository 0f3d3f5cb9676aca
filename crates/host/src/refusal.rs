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
    /// The VM ended between sample and commit, or in mid-move.
    VmGone,
    /// Its memory cannot move.
    MemoryFixed {
        /// The reason.
        why: String,
    },
    /// The target has no free memory left.
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
        /// What each tracker lacks, with the remedy.
        why: String,
    },
    /// The host refused, or did something else.
    Host {
        /// What was tried.
        what: String,
        /// The host's message, or the state found when reading back.
        cause: String,
    },
}

impl Failure {
    /// Returns the failure to set an operator's settings.
    pub fn to_set(settings: &[Setting], cause: String) -> Failure {
        let names: Vec<&str> = settings.iter().map(|setting| setting.name()).collect();
        Failure::Host {
            what: format!("setting the {}", names.join(" and the ")),
            cause,
        }
    }

    /// Returns the failure for the VM of this name.
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
                format!("the guest of VM {name} cannot be told where it is: {why}")
            }
            Failure::NoTracker { why } => format!("no tracker can watch which memory VM {name} uses: {why}"),
            Failure::Host { what, cause } => format!("{what} of VM {name} failed: {cause}"),
        }
    }
}

/// Why a whole plan is refused. Nothing was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, JsonSchema)]
#[serde(tag = "refusal", rename_all = "kebab-case")]
pub enum Refusal {
    /// Something changed since the view was made.
    #[error("plan was made from version {}, the host is at {}; it will be made again", planned.0, current.0)]
    Stale {
        /// Version of the plan.
        planned: Version,
        /// Version of the host.
        current: Version,
    },
    /// No such VM runs.
    #[error("no VM {vm} runs on this host")]
    UnknownVm {
        /// The requested id.
        vm: VmId,
    },
    /// An action is impossible for its VM.
    #[error("VM {name}: {why}")]
    Vm {
        /// Its name.
        name: String,
        /// The reason.
        #[serde(flatten)]
        why: Impossible,
    },
    /// It contradicts an operator's setting. Hosts never report this: the control loop enforces such settings.
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
    /// No such vCPU is online.
    #[error("it has no online vCPU {index}")]
    UnknownVcpu {
        /// The requested index.
        index: u16,
    },
    /// CPUs that the host lacks, that the VM may not use, or none at all.
    #[error("CPUs {{{cpus}}} are not a non-empty part of the CPUs {usable} that the VM may use")]
    Cpus {
        /// Requested CPUs.
        cpus: CpuSet,
        /// CPUs that the VM may use.
        usable: CpuSet,
    },
    /// Nodes that the host lacks, that have no memory, or none at all.
    #[error("nodes {{{nodes}}} are not a non-empty part of the host's nodes with memory {usable}")]
    Nodes {
        /// Requested nodes.
        nodes: NodeSet,
        /// Nodes that can hold memory.
        usable: NodeSet,
    },
    /// Pages that would move from a node to itself.
    #[error("its pages cannot move from nodes {{{from}}} to nodes {{{to}}}: some are both")]
    SameNodes {
        /// Nodes that pages should leave.
        from: NodeSet,
        /// Nodes that they should move to.
        to: NodeSet,
    },
    /// No such virtual node.
    #[error("it has no virtual node {virtual_node}: its guest sees {count}")]
    UnknownVirtualNode {
        /// The requested one.
        virtual_node: u16,
        /// Number of virtual nodes.
        count: usize,
    },
    /// A topology without memory, with a wrong number of virtual nodes, or with nodes that the host lacks.
    #[error(
        "its guest cannot be told of {vcpus} vCPUs and {memory} virtual nodes: it needs a vCPU, {count} virtual nodes with some memory, and all of it on nodes of this host"
    )]
    Topology {
        /// vCPUs in the topology.
        vcpus: usize,
        /// Virtual nodes in the topology.
        memory: usize,
        /// Virtual nodes of its guest.
        count: usize,
    },
    /// A quota that no kernel accepts.
    #[error(
        "its vCPUs cannot be held to {quota}: the least is {} of a period of at most {}",
        CpuQuota::MIN,
        CpuQuota::PERIOD_MAX
    )]
    Quota {
        /// The requested quota.
        quota: CpuQuota,
    },
    /// A percentage outside 1 to 100.
    #[error("it cannot be held to {percent} percent: it is 1 to 100")]
    Part {
        /// The requested percentage.
        percent: u8,
    },
    /// More memory than it may have, none, or memory of a VM without a balloon.
    #[error("it cannot be held to {memory} of memory: {}", why_not(.maximum))]
    Memory {
        /// The requested memory.
        memory: Bytes,
        /// Its maximum; `None` without a balloon.
        maximum: Option<Bytes>,
    },
    /// A limit or a watch that would have to be lifted at once.
    #[error("what would hold it carries no lease")]
    NoLease,
    /// A window too short to see anything, or too long to wait for.
    #[error(
        "its memory cannot be watched in windows of {window_ns}: they last from {} to {}",
        WINDOW_MIN,
        WINDOW_MAX
    )]
    Window {
        /// The requested window.
        window_ns: Ns,
    },
    /// A lever without limits.
    #[error("there is nothing to lift on {}", .lever.of_vm())]
    NoLimit {
        /// The requested lever.
        lever: Lever,
    },
}

fn why_not(maximum: &Option<Bytes>) -> String {
    maximum.map_or_else(
        || "it has no balloon".to_owned(),
        |maximum| format!("it is more than nothing and at most {maximum}"),
    )
}
