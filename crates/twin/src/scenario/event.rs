//! Events that happen to VMs during a run.

use homenode_units::{Bytes, CpuSet, NodeSet, Ns};
use schemars::JsonSchema;
use serde::Deserialize;

use super::Scenario;
use crate::notation;

/// Something that happens to a VM at a time, whatever the policy does. The report has the outcome: an event for a VM that is
/// not there is left out, and reported as such.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventSpec {
    /// When. Events of one time happen in the order of the file, after arrivals.
    #[serde(with = "homenode_units::text")]
    #[schemars(with = "notation::Time")]
    pub at: Ns,
    /// Name of the VM.
    pub vm: String,
    /// Kind of event.
    pub action: EventAction,
}

/// Kinds of events.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum EventAction {
    /// It is started: for the first time, if no earlier event names it, or again after it has left. It boots, and its
    /// program runs from the beginning.
    Start,
    /// It is stopped at once, and leaves the host.
    Stop,
    /// Its balloon is set so that the guest has this much memory. See `guest/memory.rs` for the pages that it releases, and
    /// `engine/balloon.rs` for those that it gets: under Xen they are on any node.
    Balloon {
        /// Memory of the guest from now on.
        #[serde(with = "homenode_units::text")]
        #[schemars(with = "notation::Size")]
        memory: Bytes,
    },
    /// Its pages are moved onto nodes, one after the other, as `move_pages` does.
    Migrate {
        /// Nodes, in list format.
        #[serde(deserialize_with = "super::some_list")]
        #[schemars(with = "notation::List")]
        nodes: NodeSet,
        /// Most to move; everything if absent.
        #[serde(default, with = "homenode_units::text::option")]
        #[schemars(with = "Option<notation::Size>")]
        memory_max: Option<Bytes>,
    },
    /// Its vCPUs run on these CPUs only from now on.
    Pin {
        /// CPUs, in list format.
        #[serde(deserialize_with = "super::some_list")]
        #[schemars(with = "notation::List")]
        cpus: CpuSet,
    },
    /// All of its program's threads use from now on what was one thread's own memory, and no longer their own: only the
    /// targets of their accesses change.
    Gather {
        /// Owner of that memory: the number of the thread, which is that of its vCPU, from 0.
        thread: u16,
    },
    /// Its program behaves differently from now on. Factors are against the profile and its phases, not against an
    /// earlier event.
    Phase {
        /// Multiplies `llc_accesses_per_kilo_instruction`.
        #[serde(default = "super::whole")]
        llc_access_factor: f64,
        /// Multiplies `cpi_core`.
        #[serde(default = "super::whole")]
        cpi_factor: f64,
        /// Multiplies the mean rest, if threads rest: how busy a server is.
        #[serde(default = "super::whole")]
        rest_factor: f64,
    },
}

impl EventAction {
    /// Name in files and reports.
    pub fn name(&self) -> &'static str {
        match self {
            EventAction::Start => "start",
            EventAction::Stop => "stop",
            EventAction::Balloon { .. } => "balloon",
            EventAction::Migrate { .. } => "migrate",
            EventAction::Pin { .. } => "pin",
            EventAction::Gather { .. } => "gather",
            EventAction::Phase { .. } => "phase",
        }
    }
}

impl Scenario {
    /// Whether the first thing that happens to a VM is a start by an event: it does not arrive by itself then.
    pub(crate) fn started_by_event(&self, vm: &str) -> bool {
        let comings = self
            .events
            .iter()
            .filter(|event| event.vm == vm && matches!(event.action, EventAction::Start | EventAction::Stop));
        comings
            .min_by_key(|event| event.at)
            .is_some_and(|event| event.action == EventAction::Start)
    }
}
