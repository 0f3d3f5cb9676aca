//! What each lever writes down.

use std::collections::BTreeMap;

use homenode_host::{CpuQuota, Limit};
use homenode_units::{Bytes, CpuSet, NodeSet, Ns};
use serde::{Deserialize, Serialize};

use super::Written;
use crate::cgroup::PERIOD_DEFAULT;

/// CPUs that vCPUs are pinned to.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pins(pub BTreeMap<u16, CpuSet>);

impl Written for Pins {
    const KEY: &'static str = "vcpus";
}

/// The home that emulator, I/O threads and memory nodes follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Home(pub NodeSet);

impl Written for Home {
    const KEY: &'static str = "home";
}

/// Memory nodes that are set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryNodes(pub NodeSet);

impl Written for MemoryNodes {
    const KEY: &'static str = "memory-nodes";
}

/// Where pages are moving to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moving(pub NodeSet);

impl Written for Moving {
    const KEY: &'static str = "pages";
}

/// A CPU quota that the agent set in the place of the operator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// The agent's.
    pub ours: CpuQuota,
    /// The agent's last, which is in force until the new one is.
    #[serde(default)]
    pub previous: Option<CpuQuota>,
    /// The operator's, if there was one.
    pub before: Option<CpuQuota>,
}

impl Written for Quotas {
    const KEY: &'static str = "cpu-quota";
}

impl Quotas {
    /// Whether a quota in force may be the agent's. libvirt sets time and period one after the other: an agent that dies in
    /// between leaves the time of one quota with the period of another.
    pub fn may_be_ours(&self, seen: CpuQuota) -> bool {
        let mut ours = std::iter::once(self.ours).chain(self.previous);
        let theirs = self.before.map_or(PERIOD_DEFAULT, |before| before.period_ns);
        let periods: Vec<Ns> = ours
            .clone()
            .map(|quota| quota.period_ns)
            .chain([theirs])
            .collect();
        ours.any(|quota| quota.run_ns == seen.run_ns) && periods.contains(&seen.period_ns)
    }
}

/// Part of caches or memory bandwidth that the VM has a resctrl group for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confined(pub Limit);

impl Written for Confined {
    const KEY: &'static str = "resctrl";
}

/// DAMON watches the VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watched {}

impl Written for Watched {
    const KEY: &'static str = "watching";
}

/// Memory that the agent gave a VM in the place of the operator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shrink {
    /// The agent's.
    pub ours: Bytes,
    /// What it had.
    pub before: Bytes,
}

impl Written for Shrink {
    const KEY: &'static str = "memory";
}

/// The guest is asked for memory statistics, and was before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StatsPeriod {
    /// How often it was asked before, in seconds; 0 for never.
    pub before_s: u32,
}

impl Written for StatsPeriod {
    const KEY: &'static str = "stats-period";
}
