//! Writes what a host did as a trace for Perfetto's viewer.
//!
//! # Lanes
//!
//! | lane | content |
//! |---|---|
//! | VM / decisions | a mark for each decision about the VM, with policy, reason and outcome; other events |
//! | VM / home, memory policy, CPU quota, memory limit | the value in force, for as long as it is in force |
//! | VM / pages | moves of pages, from the decision to the next sample |
//! | VM / vCPU | CPU and node on which the vCPU was last seen, as long as there are samples |
//! | VM / CPUs used, LLC miss rate, local accesses | values |
//! | node / CPUs busy, vCPUs waiting, memory traffic, memory free | values |
//! | links / 0 → 1 | traffic |
//! | agent | events that are not about a running VM |
//!
//! An arrow goes from a decision to its effect: to the home, policy, quota or limit that is then in force, to the pages that
//! moved, or to the vCPUs that then ran on other CPUs. A decision without a visible effect has no arrow.
//!
//! # Bounds
//!
//! Memory grows with running VMs and vCPUs, not with time, since packets that are written are not kept. Since the host is
//! sampled, a vCPU that moved and came back between two samples seems not to have moved.

mod lanes;
pub mod proto;
mod vm;
mod writer;

pub use lanes::Lanes;

use homenode_control::{Decided, Event, Status};
use homenode_host::{Outcome, Sample};
use homenode_units::{Ns, VmId};
use serde::Deserialize;
use serde_json::Value;

/// A period of a host.
#[derive(Clone, Copy, Debug)]
pub struct Period<'a> {
    /// Time of the period, on a monotonic clock.
    pub at: Ns,
    /// The host's status.
    pub status: &'a Status,
    /// The host's sample, if there is one: only samples show where vCPUs are.
    pub sample: Option<&'a Sample>,
    /// Events of the period, in order.
    pub happened: &'a [Happened],
}

/// An event.
#[derive(Clone, Debug, PartialEq)]
pub enum Happened {
    /// A decision and its outcome.
    Decided(Decided, Outcome),
    /// An event other than a decision.
    Other {
        /// The event's kind: `appeared`, `found`, `changed-by-other` and so on.
        kind: String,
        /// The VM, if the event is about one.
        vm: Option<VmId>,
        /// A sentence for people.
        text: String,
    },
}

impl Happened {
    /// Parses an event's JSON. `text` is the event's sentence for people.
    pub fn read(detail: &Value, text: &str) -> Happened {
        let decided = Decided::deserialize(detail).and_then(|decided| {
            let outcome = Outcome::deserialize(&detail["result"])?;
            Ok(Happened::Decided(decided, outcome))
        });
        decided.unwrap_or_else(|_| Happened::Other {
            kind: detail["event"].as_str().unwrap_or("event").to_owned(),
            vm: VmId::deserialize(&detail["vm"]).ok(),
            text: text.to_owned(),
        })
    }
}

impl From<&Event> for Happened {
    fn from(event: &Event) -> Happened {
        match event {
            Event::Decided { decision, result, .. } => Happened::Decided(decision.into(), result.clone()),
            other => Happened::read(&serde_json::json!(other), &other.to_string()),
        }
    }
}
