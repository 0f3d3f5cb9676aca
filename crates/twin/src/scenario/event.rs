//! Events that happen to VMs during a run.

use homenode_machine::notation;
use homenode_units::{Bytes, CpuSet, NodeSet, Ns};
use schemars::JsonSchema;
use serde::Deserialize;

use super::Scenario;

/// Something that happens to a VM at a given time, whatever the policy does. An event for a VM that is not on the host is left
/// out. The report has each event's outcome.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EventSpec {
    /// When it happens. Events at the same time happen in the order of the file, after arrivals.
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
    /// The VM is started: for the first time, if no earlier event names it, or again after it has left. It boots, and its program
    /// runs from the beginning.
    Start,
    /// The VM is stopped at once, and leaves the host.
    Stop,
    /// The VM's balloon is set so that the guest has this much memory. See `guest/memory.rs` for the pages that the guest
    /// releases, and `engine/balloon.rs` for those that it gets: under Xen they may be on any node.
    Balloon {
        /// Memory of the guest from then on.
        #[serde(with = "homenode_units::text")]
        #[schemars(with = "notation::Size")]
        memory: Bytes,
    },
    /// The VM's pages are moved to nodes, one after the other, as `move_pages` does.
    Migrate {
        /// Target nodes, in list format.
        #[serde(deserialize_with = "super::some_list")]
        #[schemars(with = "notation::List")]
        nodes: NodeSet,
        /// Most memory to move; all of it if absent.
        #[serde(default, with = "homenode_units::text::option")]
        #[schemars(with = "Option<notation::Size>")]
        memory_max: Option<Bytes>,
    },
    /// The VM's vCPUs run only on these CPUs from then on.
    Pin {
        /// CPUs, in list format.
        #[serde(deserialize_with = "super::some_list")]
        #[schemars(with = "notation::List")]
        cpus: CpuSet,
    },
    /// From then on, all threads of the VM's program use what was one thread's own memory, and no longer their own. Only the
    /// targets of their accesses change.
    Gather {
        /// Owner of that memory: the number of the thread, which is the number of its vCPU, from 0.
        thread: u16,
    },
    /// The VM's program behaves differently from then on. Factors apply to the profile and its phases, not to an earlier event.
    Phase {
        /// Multiplies `llc_accesses_per_kilo_instruction`.
        #[serde(default = "super::whole")]
        llc_access_factor: f64,
        /// Multiplies `cpi_core`.
        #[serde(default = "super::whole")]
        cpi_factor: f64,
        /// Multiplies the mean rest, if threads rest. It sets how busy a server is.
        #[serde(default = "super::whole")]
        rest_factor: f64,
    },
}

impl EventAction {
    /// Returns the kind's name in files and reports.
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
    /// Whether the first event of a VM starts it. If so, the VM does not arrive by itself.
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
