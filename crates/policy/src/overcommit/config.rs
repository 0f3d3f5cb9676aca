//! Settings for taking memory from VMs and returning it.

use homenode_units::{Any, Bytes, Ns, PAGE_BYTES};
use serde::{Deserialize, Serialize};

use crate::bounds::{MEMORY, PAUSE, SHARE, SOME_SHARE, SPAN};

/// When memory is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// While a node with the VM's memory lacks memory; it is returned once the node has plenty.
    #[default]
    Scarce,
    /// Always.
    Always,
}

/// The operator's settings. A VM takes part if it has a floor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// When memory is taken.
    pub when: When,
    /// Share of each node's memory that should stay free (the headroom), in [0, 1).
    pub headroom: f64,
    /// What a VM keeps beyond its working set, as a share of the working set; twice as much if the estimate has no guarantee.
    pub reserve: f64,
    /// The least reserve.
    #[serde(with = "homenode_units::text")]
    pub reserve_min: Bytes,
    /// Share of its given memory that one step takes from a VM, in (0, 1).
    pub step: f64,
    /// Time between two steps.
    #[serde(with = "homenode_units::text")]
    pub step_wait: Ns,
    /// Time for which a VM is not shrunk after its first spell of pressure.
    #[serde(with = "homenode_units::text")]
    pub backoff: Ns,
    /// Longest such time, after many spells of pressure; at least [`Config::backoff`].
    #[serde(with = "homenode_units::text")]
    pub backoff_max: Ns,
    /// A guest that read this much from swap between two reports is short of memory.
    #[serde(with = "homenode_units::text")]
    pub swap_min: Bytes,
    /// A guest with this many faults from disk per second is short of memory; at least 1.
    pub faults_per_s_min: f64,
    /// A guest with less than this share of its memory usable is short of memory, 0 to 1.
    pub usable_min: f64,
    /// Share of a node's free memory that is kept from VMs that grow, 0 to 1.
    pub kept_free: f64,
    /// Differences below this share of the given memory are ignored, 0 to 1.
    pub band: f64,
    /// Growth of a VM under pressure, as a share of its given memory, 0.01 to 10.
    pub growth: f64,
    /// Memory returned at a time while it is plentiful, as a share of the given memory, 0.001 to 1.
    pub give_back: f64,
    /// Least size of a step, of a guest's usable memory, and of a difference that counts.
    #[serde(with = "homenode_units::text")]
    pub step_min: Bytes,
    /// Reports of a guest that are older than this are ignored.
    #[serde(with = "homenode_units::text")]
    pub report_age_max: Ns,
    /// Longest time to wait for a guest's first report.
    #[serde(with = "homenode_units::text")]
    pub first_report_max: Ns,
    /// A balloon is stuck if it has not moved a quarter of its way within this time.
    #[serde(with = "homenode_units::text")]
    pub follow_max: Ns,
    /// Time for which a VM is left alone if its balloon is of no use.
    #[serde(with = "homenode_units::text")]
    pub left_alone: Ns,
    /// Time for which a limit lasts unless it is renewed.
    #[serde(with = "homenode_units::text")]
    pub lease: Ns,
}

impl Default for Config {
    /// A tenth of each node stays free. A VM keeps a tenth, and at least 64 MiB, in reserve. A step takes a twentieth, every
    /// 10 s. Backoff begins at a minute. A guest is polled every two seconds, and a report counts only once another follows,
    /// so 10 s are enough for the first.
    fn default() -> Self {
        Config {
            when: When::Scarce,
            headroom: 0.1,
            reserve: 0.1,
            reserve_min: Bytes(64 << 20),
            step: 0.05,
            step_wait: Ns::from_secs(10),
            backoff: Ns::from_secs(60),
            backoff_max: Ns::from_secs(1800),
            swap_min: Bytes(256 << 10),
            faults_per_s_min: 100.0,
            usable_min: 0.05,
            kept_free: 0.02,
            band: 0.02,
            growth: 0.5,
            give_back: 0.1,
            step_min: Bytes(8 << 20),
            report_age_max: Ns::from_secs(60),
            first_report_max: Ns::from_secs(10),
            follow_max: Ns::from_secs(60),
            left_alone: Ns::from_secs(600),
            lease: Ns::from_secs(30),
        }
    }
}

homenode_units::settings! {
    Config {
        when: Any,
        headroom: 0.0..=0.9,
        reserve: 0.0..=10.0,
        reserve_min: MEMORY,
        step: 0.001..=0.9,
        step_wait: PAUSE,
        backoff: PAUSE,
        backoff_max: PAUSE,
        swap_min: Bytes(PAGE_BYTES)..=*MEMORY.end(),
        faults_per_s_min: 1.0..=1e9,
        usable_min: SHARE,
        kept_free: SHARE,
        band: SHARE,
        growth: 0.01..=10.0,
        give_back: SOME_SHARE,
        // At least a page: less is no step.
        step_min: Bytes(PAGE_BYTES)..=*MEMORY.end(),
        report_age_max: PAUSE,
        first_report_max: PAUSE,
        follow_max: SPAN,
        left_alone: PAUSE,
        lease: SPAN,
    }
}
