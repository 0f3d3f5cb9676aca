//! What an operator may set of predictions: what is assumed where a host tells nothing, and how fast what it tells is learnt.
//!
//! No settings are the laws of the model, and how unsure it is before anything is counted (constants of [`super`] and of its
//! profiles): they hold together, and counters overrule them within seconds.

use homenode_units::{BytesPerSec, Weight};
use serde::{Deserialize, Serialize};

use crate::bounds::{SHARE, SOME_SHARE};

/// What the operator may set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// A VM that wants less than this is not active, in CPUs, from 0.01.
    pub active_min: f64,
    /// Epochs at work after which a VM is known, from 1.
    pub known_epochs: u32,
    /// Of a VM that ran for less of a CPU than this nothing is learnt, in (0, 1].
    pub ran_min: f64,
    /// Weight of the newest epoch in averages, in (0, 1].
    pub average_weight: f64,
    /// What is kept of older evidence from epoch to epoch, 0 to 1.
    pub evidence_kept: f64,
    /// How much longer a core's own work takes beside a busy hyperthread, 1 to 4.
    pub smt_stretch: f64,
    /// Share of what firmware says of a distance that is believed, 0 to 4.
    pub distance_real: f64,
    /// Bandwidth that comes with a core where a node's is not known, 1 MB/s to 1 TB/s.
    #[serde(with = "homenode_units::text")]
    pub bandwidth_per_core: BytesPerSec,
    /// Bytes that a miss moves where traffic is not counted, 1 to 4096.
    pub bytes_per_miss: f64,
    /// Share of its accesses that a free VM finds local, where not counted, 0 to 1.
    pub local_unknown: f64,
}

impl Default for Config {
    /// Throughput of two hyperthreads is 1.25 of one, as published for most workloads. Firmware prints 21 where remote accesses
    /// take 1.5 to 1.7 times as long. Bandwidth per core is the balance of servers of many years (STREAM tables); a miss
    /// moves a line, and a third of a line written back.
    fn default() -> Config {
        Config {
            active_min: 0.5,
            known_epochs: 7,
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
    /// Of the newest epoch in averages.
    pub(super) fn weight(&self) -> Weight {
        Weight(self.average_weight)
    }
}

homenode_units::settings! {
    Config {
        active_min: 0.01..=4096.0,
        known_epochs: 1..=65_536,
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
