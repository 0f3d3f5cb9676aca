//! What an operator may set of how memory is taken and given back.

use homenode_units::{Any, Bytes, Ns, PAGE_BYTES};
use serde::{Deserialize, Serialize};

use crate::bounds::{MEMORY, PAUSE, SHARE, SOME_SHARE, SPAN};

/// When memory is taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// While a node with the VM's memory lacks some; given back once it has plenty.
    #[default]
    Scarce,
    /// Always.
    Always,
}

/// What the operator may set. VMs take part by their floor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// When memory is taken.
    pub when: When,
    /// Share of each node's memory that is to stay free, in [0, 1).
    pub headroom: f64,
    /// What a VM keeps beyond its working set, as a share of that; twice as much where the estimate promises nothing.
    pub reserve: f64,
    /// And at least.
    #[serde(with = "homenode_units::text")]
    pub reserve_min: Bytes,
    /// Part of what is given that is taken at a time, in (0, 1).
    pub step: f64,
    /// Time between two steps.
    #[serde(with = "homenode_units::text")]
    pub step_wait: Ns,
    /// Time without a step after pressure, for the first time.
    #[serde(with = "homenode_units::text")]
    pub backoff: Ns,
    /// The longest, after many spells of pressure; at least [`Config::backoff`].
    #[serde(with = "homenode_units::text")]
    pub backoff_max: Ns,
    /// What a guest that reads as much from swap between two of its reports is short of.
    #[serde(with = "homenode_units::text")]
    pub swap_min: Bytes,
    /// Faults per second from disk at which a guest is short of memory, from 1.
    pub faults_per_s_min: f64,
    /// Share of its memory that a guest is to have usable, 0 to 1.
    pub usable_min: f64,
    /// Share of a node's free memory that growth leaves, 0 to 1.
    pub kept_free: f64,
    /// By less than this share of what is given nothing changes, 0 to 1.
    pub band: f64,
    /// What growth adds under pressure, as a share of what is given, 0.01 to 10.
    pub growth: f64,
    /// What is given back at a time where memory is plentiful, as such a share, 0.001 to 1.
    pub give_back: f64,
    /// Steps are at least this, as are what a guest shall have usable and differences that count.
    #[serde(with = "homenode_units::text")]
    pub step_min: Bytes,
    /// A report of a guest that is older counts as none.
    #[serde(with = "homenode_units::text")]
    pub report_age_max: Ns,
    /// How long a guest may take for its first report.
    #[serde(with = "homenode_units::text")]
    pub first_report_max: Ns,
    /// A balloon that within this time has not come a quarter of its way does not follow.
    #[serde(with = "homenode_units::text")]
    pub follow_max: Ns,
    /// How long a VM is left alone whose balloon is of no use.
    #[serde(with = "homenode_units::text")]
    pub left_alone: Ns,
    /// How long a limit lasts unless it is renewed.
    #[serde(with = "homenode_units::text")]
    pub lease: Ns,
}

impl Default for Config {
    /// A tenth of each node free; a tenth and at least 64 MiB in reserve; a twentieth every 10 s; a minute. A guest is asked
    /// every two seconds, and the first report that is found counts only once another follows: 10 s are enough for that.
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
        // A page: less is no step.
        step_min: Bytes(PAGE_BYTES)..=*MEMORY.end(),
        report_age_max: PAUSE,
        first_report_max: PAUSE,
        follow_max: SPAN,
        left_alone: PAUSE,
        lease: SPAN,
    }
}
