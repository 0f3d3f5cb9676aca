//! What can be asked.

use std::collections::BTreeMap;

use homenode_host::Mode;
use homenode_policy::placement::{Announcement, Asked};
use homenode_units::{Bytes, BytesPerSec, MemoryPolicy, NodeSet, Ns, Permit};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Homes that are asked about, by the names of VMs; `None` is no home.
pub type Homes = BTreeMap<String, Option<NodeSet>>;

/// What can be asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "request", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// A VM is about to start: which, and what libvirt will ask for.
    Announce(Announcement),
    /// Nodes for a VM that is about to start; promised to it.
    Promise(Asked),
    /// Where a VM would go, and why; nothing is promised.
    Place {
        /// Its vCPUs.
        vcpus: u32,
        /// Its memory.
        memory_bytes: Bytes,
        /// The bandwidth it needs.
        bandwidth_bytes_per_s: Option<BytesPerSec>,
        /// Size of the huge pages that all of its memory lies in; `None`: in ordinary pages.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        huge_page_bytes: Option<Bytes>,
    },
    /// What the agent manages.
    Vms,
    /// Nodes, links and VMs as they are, and what happened lately.
    Overview,
    /// Book a permit for a VM, or none.
    PermitSet {
        /// Its name.
        vm: String,
        /// What it books.
        permit: Option<Permit>,
    },
    /// Choose a memory policy for a VM, or leave the choice to the agent.
    PolicySet {
        /// Its name.
        vm: String,
        /// What is chosen.
        policy: Option<MemoryPolicy>,
    },
    /// Say how little memory a VM may be left with, or that it keeps all.
    FloorSet {
        /// Its name.
        vm: String,
        /// How little.
        floor_bytes: Option<Bytes>,
    },
    /// Which memory policy would suit a VM.
    PolicyAdvise {
        /// Its name.
        vm: String,
    },
    /// Permits and how they are kept.
    Permits {
        /// Of this VM only.
        vm: Option<String>,
    },
    /// What a VM might book.
    PermitSuggest {
        /// Its name.
        vm: String,
    },
    /// How much memory VMs really use.
    WorkingSets {
        /// This VM, which is watched from now on; without a name all, as they were watched last.
        vm: Option<String>,
        /// In windows of this length.
        window_ns: Option<Ns>,
        /// For so long.
        wait_ns: Ns,
    },
    /// How fast VMs would be with other homes.
    WhatIf {
        /// Of these VMs; the others stay where they are.
        homes: Homes,
    },
    /// What came of changes of homes.
    Report {
        /// Judged within this time up to now.
        since_ns: Option<Ns>,
    },
    /// What policies would do and wait for, and what came of that.
    Recommendations,
    /// Agree to a recommendation.
    RecommendationApply {
        /// Its number.
        id: u64,
    },
    /// Do not agree to it.
    RecommendationReject {
        /// Its number.
        id: u64,
    },
    /// Say how far decisions about a VM go, or that they go as far as the run and its policies.
    ModeSet {
        /// Its name.
        vm: String,
        /// How far at most.
        mode: Option<Mode>,
    },
    /// Nodes that are promised to VMs which do not run yet.
    Promises,
    /// Take back such a promise.
    PromiseDrop {
        /// Its number.
        id: u64,
    },
    /// Which nodes are to be empty, what is left there, and whether the agent is paused.
    Maintenance,
    /// Have nodes emptied of VMs, or no longer.
    Drain {
        /// Which; others stay as they are.
        nodes: NodeSet,
        /// Whether they are to be empty from now on.
        is_on: bool,
    },
    /// Change nothing for a while.
    Pause {
        /// How long from now on; zero ends a pause.
        span_ns: Ns,
    },
    /// What was used of what was booked.
    PermitBill {
        /// By this VM only.
        vm: Option<String>,
    },
}

impl Request {
    /// Whether nothing is another for being asked. A working set of one VM is measured for it.
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
            | Request::Promises
            | Request::Maintenance
            | Request::PermitBill { .. } => true,
            Request::Announce(_)
            | Request::Promise(_)
            | Request::PermitSet { .. }
            | Request::PolicySet { .. }
            | Request::FloorSet { .. }
            | Request::WorkingSets { vm: Some(_), .. }
            | Request::RecommendationApply { .. }
            | Request::RecommendationReject { .. }
            | Request::ModeSet { .. }
            | Request::PromiseDrop { .. }
            | Request::Drain { .. }
            | Request::Pause { .. } => false,
        }
    }

    /// Whether the agent's loop must carry something out before there is an answer.
    pub fn is_for_the_loop(&self) -> bool {
        matches!(
            self,
            Request::PermitSet { .. }
                | Request::PolicySet { .. }
                | Request::FloorSet { .. }
                | Request::ModeSet { .. }
        )
    }
}
