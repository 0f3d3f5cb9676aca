//! Limits on a VM's resources. Every limit has a lease, and ends by itself unless the lease is renewed.

use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How long each vCPU of a VM may run per period (libvirt's `vcpu_quota` and `vcpu_period`, a cgroup's `cpu.max`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub struct CpuQuota {
    /// Time that a vCPU may run in each period.
    pub run_ns: Ns,
    /// Length of a period.
    pub period_ns: Ns,
}

/// A policy's limit on a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Limit {
    /// CPU time of each vCPU.
    CpuQuota(CpuQuota),
    /// A part of the ways of every last-level cache (resctrl's CAT): the VM evicts other VMs' lines only within that part.
    CacheWays(Percent),
    /// A part of the memory bandwidth of each core (resctrl's MBA).
    MemoryBandwidth(Percent),
    /// Memory of the VM's guest, set through its balloon.
    Memory(Bytes),
}

/// A part, from 1 to 100 percent. The host rounds it to a value that its hardware can set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(transparent)]
pub struct Percent(pub u8);

impl std::fmt::Display for Percent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl CpuQuota {
    /// The shortest run time and the shortest period that the kernel accepts (`min_cfs_quota_period`).
    pub const MIN: Ns = Ns::from_millis(1);
    /// The longest period that the kernel accepts (`max_cfs_quota_period`).
    pub const PERIOD_MAX: Ns = Ns::from_secs(1);

    /// Returns a quota that gives this share of every period. Its run time is rounded to a microsecond, and is at least
    /// [`CpuQuota::MIN`].
    pub fn of(share: f64, period: Ns) -> CpuQuota {
        let run_us = (share.max(0.0) * period.as_f64() / 1000.0).round() as u64;
        CpuQuota {
            run_ns: Ns(run_us.saturating_mul(1000)).max(CpuQuota::MIN),
            period_ns: period,
        }
    }

    /// Returns the share of one CPU that each vCPU may use. A share of 1 or more is no limit.
    pub fn share(self) -> f64 {
        self.run_ns.as_f64() / self.period_ns.as_f64()
    }

    /// Returns true if kernels accept the quota.
    pub fn is_possible(self) -> bool {
        self.run_ns >= CpuQuota::MIN && (CpuQuota::MIN..=CpuQuota::PERIOD_MAX).contains(&self.period_ns)
    }
}

impl std::fmt::Display for CpuQuota {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of every {}", self.run_ns, self.period_ns)
    }
}

impl std::fmt::Display for Limit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Limit::CpuQuota(quota) => write!(f, "{quota} per vCPU"),
            Limit::CacheWays(Percent(percent)) => write!(f, "{percent} percent of the cache's ways"),
            Limit::MemoryBandwidth(Percent(percent)) => write!(f, "{percent} percent of memory bandwidth"),
            Limit::Memory(bytes) => write!(f, "{bytes} of memory"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_rounded_and_never_below_the_floor() {
        let slice = Ns::from_millis(30);
        let quota = CpuQuota::of(0.25, slice);
        assert_eq!((quota.run_ns, quota.share()), (Ns(7_500_000), 0.25));
        assert_eq!(CpuQuota::of(0.333_333_3, slice).run_ns, Ns(10_000_000));
        for tiny in [0.001, 0.0, -1.0, f64::NAN] {
            assert_eq!(CpuQuota::of(tiny, slice).run_ns, CpuQuota::MIN);
        }
        assert!(quota.is_possible());
        let seconds = CpuQuota {
            period_ns: Ns::from_secs(2),
            ..quota
        };
        assert!(!seconds.is_possible());
        assert_eq!(quota.to_string(), "7500us of every 30ms");
    }
}
