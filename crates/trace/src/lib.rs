//! What a host did, as a trace that Perfetto's viewer opens.
//!
//! # Lanes
//!
//! | lane | what is in it |
//! |---|---|
//! | VM / decisions | a mark for each decision about it, with policy, reason and outcome; other events |
//! | VM / home, memory policy, CPU quota, memory limit | what is in force, for as long as it is |
//! | VM / pages | moves of pages, from the decision to the next sample |
//! | VM / vCPU | CPU and node on which it was last seen, as far as samples are there |
//! | VM / CPUs used, LLC miss rate, local accesses | values |
//! | node / CPUs busy, vCPUs waiting, memory traffic, memory free | values |
//! | links / 0 → 1 | traffic |
//! | agent | what is about no VM that runs |
//!
//! An arrow goes from a decision to what it led to: the home, policy, quota or limit that is in force after it, the pages that
//! moved, the vCPUs that are seen on other CPUs. A decision that led to nothing that can be seen has none.
//!
//! # Bounds
//!
//! What is written is forgotten: what is kept grows with VMs and vCPUs that run, not with time. A host is sampled, so a vCPU that
//! went elsewhere and came back between two samples was never away.

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
    /// When, on a clock that only goes forward.
    pub at: Ns,
    /// What is known of the host.
    pub status: &'a Status,
    /// What it said, where that is there: only it says where vCPUs are.
    pub sample: Option<&'a Sample>,
    /// What happened then, in order.
    pub happened: &'a [Happened],
}

/// Something that happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Happened {
    /// A decision, and what became of it.
    Decided(Decided, Outcome),
    /// Anything else.
    Other {
        /// What kind of thing: `appeared`, `found`, `changed-by-other` and so on.
        kind: String,
        /// The VM that it is about, if it is about one.
        vm: Option<VmId>,
        /// For people.
        text: String,
    },
}

impl Happened {
    /// What an event's JSON says, and its text for people.
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
