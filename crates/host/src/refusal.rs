//! Why a plan is refused, and why an action failed.

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
    /// Why.
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
        /// Why.
        why: String,
    },
    /// The target has no free memory left.
    NoMemory {
        /// Where memory was wanted.
        nodes: NodeSet,
    },
    /// The host or the VM cannot have this memory policy.
    MemoryPolicy {
        /// What was asked for.
        policy: MemoryPolicy,
        /// Why, and what to do instead.
        why: String,
    },
    /// The guest cannot be told where it is.
    #[serde(rename = "no-feed")]
    NoTopologyDevice {
        /// Why, with the remedy.
        why: String,
    },
    /// Nobody can tell which memory the VM uses.
    NoTracker {
        /// What each tracker lacks, with the remedy.
        why: String,
    },
    /// The host said no, or did something else than asked.
    Host {
        /// What was tried.
        what: String,
        /// What the host said, or what was found when reading back.
        cause: String,
    },
}

impl Failure {
    /// What an operator wanted could not be set.
    pub fn to_set(settings: &[Setting], cause: String) -> Failure {
        let names: Vec<&str> = settings.iter().map(|setting| setting.name()).collect();
        Failure::Host {
            what: format!("setting the {}", names.join(" and the ")),
            cause,
        }
    }

    /// Of the VM of this name.
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
            Failure::NoTracker { why } => format!("nobody can watch which memory VM {name} uses: {why}"),
            Failure::Host { what, cause } => format!("{what} of VM {name} failed: {cause}"),
        }
    }
}

/// Why a whole plan is refused. Nothing of it was done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error, JsonSchema)]
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
    /// An action is impossible for its VM.
    #[error("VM {name}: {why}")]
    Vm {
        /// Its name.
        name: String,
        /// Why.
        #[serde(flatten)]
        why: Impossible,
    },
    /// It goes against what an operator said. Hosts say this of nothing: it is the loop that keeps to it.
    #[error("{why}")]
    Forbidden {
        /// Which VM, and what he said.
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
        /// The index asked for.
        index: u16,
    },
    /// CPUs that the host lacks, that the VM may not use, or none at all.
    #[error("CPUs {{{cpus}}} are not a non-empty part of the CPUs {usable} that the VM may use")]
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
    #[error("its pages cannot move from nodes {{{from}}} to nodes {{{to}}}: some are both")]
    SameNodes {
        /// Where pages should leave.
        from: NodeSet,
        /// Where they should go.
        to: NodeSet,
    },
    /// No such virtual node.
    #[error("it has no virtual node {virtual_node}: its guest sees {count}")]
    UnknownVirtualNode {
        /// The one asked for.
        virtual_node: u16,
        /// How many there are.
        count: usize,
    },
    /// A topology that says nothing of where memory is, or of more than there is.
    #[error(
        "its guest cannot be told of {vcpus} vCPUs and {memory} virtual nodes: it sees {count}, some must have memory, and all of it on nodes of this host"
    )]
    Topology {
        /// vCPUs in what it should be told.
        vcpus: usize,
        /// Virtual nodes there.
        memory: usize,
        /// Virtual nodes of its guest.
        count: usize,
    },
    /// A quota that no kernel takes.
    #[error(
        "its vCPUs cannot be held to {quota}: the least is {} of a period of at most {}",
        CpuQuota::MIN,
        CpuQuota::PERIOD_MAX
    )]
    Quota {
        /// What was asked for.
        quota: CpuQuota,
    },
    /// No part of anything.
    #[error("it cannot be held to {percent} percent: it is 1 to 100")]
    Part {
        /// What was asked for.
        percent: u8,
    },
    /// More memory than it may have, none, or memory of a VM without a balloon.
    #[error("it cannot be held to {memory} of memory: {}", why_not(.maximum))]
    Memory {
        /// What was asked for.
        memory: Bytes,
        /// What it may have; `None` where it has no balloon.
        maximum: Option<Bytes>,
    },
    /// A limit or a watch that would have to be lifted at once.
    #[error("what would hold it carries no lease")]
    NoLease,
    /// A window too short to see anything in, or too long to wait for.
    #[error(
        "its memory cannot be watched in windows of {window_ns}: they last from {} to {}",
        WINDOW_MIN,
        WINDOW_MAX
    )]
    Window {
        /// What was asked for.
        window_ns: Ns,
    },
    /// A lever on which there are no limits.
    #[error("there is nothing to lift on {}", .lever.of_vm())]
    NoLimit {
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
