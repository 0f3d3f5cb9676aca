//! Settings of predictions: what is assumed on hosts without counters, and how fast the agent learns from counters.
//!
//! The laws of the model, and its uncertainty before anything is counted, are not settings but constants (of [`super`] and
//! its profiles): they depend on each other, and counters correct them within seconds.

use homenode_units::{BytesPerSec, Weight};
use serde::{Deserialize, Serialize};

use crate::bounds::{SHARE, SOME_SHARE};

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// A VM that wants fewer CPUs than this is not active; at least 0.01.
    pub active_min: f64,
    /// Number of cycles at work after which a VM is known, at least 1.
    #[serde(alias = "known_epochs")]
    pub known_cycles: u32,
    /// Nothing is learnt from a VM in a cycle in which it used less of a CPU than this, in (0, 1].
    pub ran_min: f64,
    /// Weight of the newest cycle in averages, in (0, 1].
    pub average_weight: f64,
    /// Share of older evidence that is kept from cycle to cycle, 0 to 1.
    pub evidence_kept: f64,
    /// How many times as long a core's own work takes if its other hyperthread is busy, 1 to 4.
    pub smt_stretch: f64,
    /// Share of the firmware's extra distance that is believed, 0 to 4.
    pub distance_real: f64,
    /// Bandwidth per core that is assumed for a node of unknown bandwidth, 1 MB/s to 1 TB/s.
    #[serde(with = "homenode_units::text")]
    pub bandwidth_per_core: BytesPerSec,
    /// Bytes that a miss is assumed to move if traffic is not counted, 1 to 4096.
    pub bytes_per_miss: f64,
    /// Share of an unplaced VM's accesses that are assumed to be local if they are not counted, 0 to 1.
    pub local_unknown: f64,
}

impl Default for Config {
    /// Two hyperthreads have 1.25 times the throughput of one, as published for most workloads. Firmware states a distance of
    /// 21 if remote accesses take 1.5 to 1.7 times as long. Bandwidth per core is the usual balance of servers over many
    /// years (STREAM tables). A miss moves one line, and a third of a line is written back.
    fn default() -> Config {
        Config {
            active_min: 0.5,
            known_cycles: 7,
            ran_min: 0.1,
            average_weight: 0.25,
            evidence_kept: 0.92,
            smt_stretch: 1.6,
            distance_real: 0.6,
            bandwidth_per_core: BytesPerSec(3_500_000_000),
            bytes_per_miss: 64.0 * 4.0 / 3.0,
            local_unknown: 0.85,
        }
    }
}

impl Config {
    /// Returns the weight of the newest cycle in averages.
    pub(super) fn weight(&self) -> Weight {
        Weight(self.average_weight)
    }
}

homenode_units::settings! {
    Config {
        active_min: 0.01..=4096.0,
        known_cycles: 1..=65_536,
        ran_min: SOME_SHARE,
        average_weight: SOME_SHARE,
        evidence_kept: SHARE,
        smt_stretch: 1.0..=4.0,
        distance_real: 0.0..=4.0,
        bandwidth_per_core: BytesPerSec(1_000_000)..=BytesPerSec(1_000_000_000_000),
        bytes_per_miss: 1.0..=4096.0,
        local_unknown: SHARE,
    }
}
