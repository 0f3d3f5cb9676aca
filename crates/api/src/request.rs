//! The requests to an agent.

use std::collections::BTreeMap;

use homenode_host::Mode;
use homenode_policy::placement::{Announcement, Asked};
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, NodeSet, Ns, Permit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Requested homes by the names of VMs; `None` means no home.
pub type Homes = BTreeMap<String, Option<NodeSet>>;

/// A request to the agent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Announce a VM that is about to start, and what libvirt will request for it.
    Announce(Announcement),
    /// Reserve nodes for a VM that is about to start.
    #[serde(alias = "promise")]
    Reserve(Asked),
    /// Evaluate where a VM would be placed, and why. Nothing is reserved.
    Place {
        /// Number of the VM's vCPUs.
        vcpus: u32,
        /// The VM's memory.
        memory_bytes: Bytes,
        /// The bandwidth that the VM needs, if known.
        bandwidth_bytes_per_s: Option<BytesPerSec>,
        /// Size of the huge pages that back all of the memory; `None` for ordinary pages.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        huge_page_bytes: Option<Bytes>,
    },
    /// List the VMs that the agent manages.
    Vms,
    /// Return the current nodes, links and VMs, and recent events.
    Overview,
    /// Book a permit for a VM, or give it up.
    PermitSet {
        /// The VM's name.
        vm: String,
        /// The permit.
        permit: Option<Permit>,
    },
    /// Choose a memory policy for a VM, or leave the choice to the agent.
    PolicySet {
        /// The VM's name.
        vm: String,
        /// The policy.
        policy: Option<MemoryPolicy>,
    },
    /// Set a VM's memory floor, or let the VM keep all of its memory.
    FloorSet {
        /// The VM's name.
        vm: String,
        /// The least memory that the VM keeps; `None` if it keeps all.
        floor_bytes: Option<Bytes>,
    },
    /// Advise on a VM's memory policy.
    PolicyAdvise {
        /// The VM's name.
        vm: String,
    },
    /// List permits, and whether VMs stay within them.
    Permits {
        /// The VM whose permit to list; by default all.
        vm: Option<String>,
    },
    /// Suggest permits for a VM.
    PermitSuggest {
        /// The VM's name.
        vm: String,
    },
    /// List the working sets of VMs.
    WorkingSets {
        /// The VM, which is watched from now on. By default, all VMs with their last figures.
        vm: Option<String>,
        /// Length of the windows.
        window_ns: Option<Ns>,
        /// How long to watch the VM from now on.
        wait_ns: Ns,
    },
    /// Predict how fast VMs would be with other homes.
    WhatIf {
        /// The homes of these VMs; other VMs keep theirs.
        homes: Homes,
    },
    /// Report the results of trials of homes.
    Report {
        /// List only trials judged within this time before now.
        since_ns: Option<Ns>,
    },
    /// List what policies recommend, and what became of it.
    Recommendations,
    /// Approve a recommendation.
    RecommendationApply {
        /// The recommendation's number.
        id: u64,
    },
    /// Reject a recommendation.
    RecommendationReject {
        /// The recommendation's number.
        id: u64,
    },
    /// Set a VM's mode, which limits decisions about it; or reset it, so only the run and its policies limit them.
    ModeSet {
        /// The VM's name.
        vm: String,
        /// The mode.
        mode: Option<Mode>,
        /// How long the VM has this mode, which must be [`Mode::Observe`]; zero ends it. The agent keeps it in memory only. By
        /// default the mode is stored with the VM.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        span_ns: Option<Ns>,
    },
    /// List nodes reserved for VMs that do not run yet.
    #[serde(alias = "promises")]
    Reservations,
    /// Drop the reservation with this number.
    #[serde(alias = "promise-drop")]
    ReservationDrop {
        /// The reservation's number.
        id: u64,
    },
    /// List drained nodes with the VMs left on them, and whether the agent is paused.
    Maintenance,
    /// Start or end draining nodes.
    Drain {
        /// The nodes whose drain begins or ends; other nodes keep theirs.
        nodes: NodeSet,
        /// Whether the drain begins or ends.
        is_on: bool,
    },
    /// Pause all changes for a while.
    Pause {
        /// Length of the pause from now; zero ends a pause.
        span_ns: Ns,
    },
    /// List usage of booked permits.
    #[serde(alias = "permit-bill")]
    PermitUsage {
        /// The VM whose permit usage to return; by default all.
        vm: Option<String>,
    },
}

impl Request {
    /// Returns true if the request changes nothing. A request for the working set of a named VM does: the VM is then watched.
    pub fn only_reads(&self) -> bool {
        match self {
            Request::Place { .. }
            | Request::Vms
            | Request::Overview
            | Request::PolicyAdvise { .. }
            | Request::Permits { .. }
            | Request::PermitSuggest { .. }
            | Request::WorkingSets { vm: None, .. }
            | Request::WhatIf { .. }
            | Request::Report { .. }
            | Request::Recommendations
            | Request::Reservations
            | Request::Maintenance
            | Request::PermitUsage { .. } => true,
            Request::Announce(_)
            | Request::Reserve(_)
            | Request::PermitSet { .. }
            | Request::PolicySet { .. }
            | Request::FloorSet { .. }
            | Request::WorkingSets { vm: Some(_), .. }
            | Request::RecommendationApply { .. }
            | Request::RecommendationReject { .. }
            | Request::ModeSet { .. }
            | Request::ReservationDrop { .. }
            | Request::Drain { .. }
            | Request::Pause { .. } => false,
        }
    }

    /// Returns true if the agent's loop must carry something out before there is an answer.
    pub fn is_for_the_loop(&self) -> bool {
        matches!(
            self,
            Request::PermitSet { .. }
                | Request::PolicySet { .. }
                | Request::FloorSet { .. }
                | Request::ModeSet { span_ns: None, .. }
        )
    }
}
