//! Bandwidth control of the fair scheduler: how much CPU time a group (a VM or one of its vCPUs) may use per period.
//!
//! # Algorithm (`sched-bwc`, `kernel/sched/fair.c`)
//!
//! A group has a pool that is filled with its quota every period, 100 ms unless set otherwise. A CPU that runs a vCPU of the
//! group takes 5 ms from the pool at a time. When a CPU's part is used up and the pool is empty, the group's vCPUs there are
//! throttled until the next period has paid what the CPU owes. A CPU that the group leaves returns all but 1 ms to the pool. Time
//! that is returned while others are throttled is dealt out to them after 5 ms. Periods end with one in which nothing was used,
//! and start again with the next use.
//!
//! A CPU's part does not expire with the period, as in Linux since commit de53fd7aedb1 (5.4). Before, it did, and a VM of many
//! vCPUs got less than its quota.

use homenode_units::Ns;

use super::discipline::NEVER;
use crate::index::{CpuIx, IxVec};

/// Period of a limit that does not set its own (`default_cfs_period`).
pub(super) const PERIOD: Ns = Ns::from_millis(100);
const SLICE_NS: i64 = 5_000_000;
/// Time that a CPU keeps when the group leaves it (`min_cfs_rq_runtime`), in nanoseconds.
const KEPT_NS: i64 = 1_000_000;

/// The CPU time that a group has in each period.
#[derive(Clone, Debug)]
pub(super) struct Bandwidth {
    quota_ns: i64,
    period: Ns,
    pool_ns: i64,
    /// Whether any time was taken from the pool in this period.
    used: bool,
    period_end: Ns,
    /// Time at which the returned time is dealt out.
    deal_at: Ns,
    /// Each CPU's part; a debt if negative.
    parts: IxVec<CpuIx, i64>,
    throttled: IxVec<CpuIx, bool>,
}

impl Bandwidth {
    pub(super) fn new(quota: Ns, period: Ns, cpus: usize) -> Bandwidth {
        Bandwidth {
            quota_ns: quota.0.cast_signed(),
            period,
            pool_ns: 0,
            used: false,
            period_end: NEVER,
            deal_at: NEVER,
            parts: IxVec::filled(0, cpus),
            throttled: IxVec::filled(false, cpus),
        }
    }

    /// Charges the group for time that it ran on a CPU.
    pub(super) fn charge(&mut self, cpu: CpuIx, ns: u64) {
        self.parts[cpu] -= ns.cast_signed();
    }

    /// Whether the group may not run on a CPU before the next period.
    pub(super) fn throttled(&self, cpu: CpuIx) -> bool {
        self.throttled[cpu]
    }

    /// Returns how long the group may run on a CPU from now, after taking time from the pool if needed. 0 means that it is
    /// throttled there.
    pub(super) fn grant(&mut self, cpu: CpuIx, now: Ns) -> u64 {
        if self.parts[cpu] <= 0 {
            if self.period_end == NEVER {
                self.pool_ns = self.quota_ns;
                self.period_end = Ns(now.0 + self.period.0);
            }
            self.used = true;
            let taken = (SLICE_NS - self.parts[cpu]).min(self.pool_ns);
            self.pool_ns -= taken;
            self.parts[cpu] += taken;
            self.throttled[cpu] = self.parts[cpu] <= 0;
        }
        self.parts[cpu].max(0).cast_unsigned()
    }

    /// Notes that the group no longer has a runnable vCPU on a CPU.
    pub(super) fn leave(&mut self, cpu: CpuIx, now: Ns) {
        let rest = self.parts[cpu] - KEPT_NS;
        if rest <= 0 {
            return;
        }
        self.parts[cpu] = KEPT_NS;
        self.pool_ns += rest;
        if self.deal_at == NEVER && self.pool_ns > SLICE_NS && self.throttled.contains(&true) {
            self.deal_at = Ns(now.0 + SLICE_NS.cast_unsigned());
        }
    }

    pub(super) fn next_event(&self) -> Ns {
        self.period_end.min(self.deal_at)
    }

    /// Begins a period, or deals out the returned time, if either is due.
    pub(super) fn handle_event(&mut self, now: Ns) {
        if self.period_end <= now {
            if !self.used && !self.throttled.contains(&true) {
                self.period_end = NEVER;
                return;
            }
            self.period_end = Ns(now.0 + self.period.0);
            self.pool_ns = self.quota_ns;
            self.used = false;
        }
        self.deal_at = NEVER;
        for (part, throttled) in self.parts.iter_mut().zip(&mut self.throttled) {
            if *throttled {
                let paid = (1 - *part).min(self.pool_ns);
                self.pool_ns -= paid;
                *part += paid;
                self.used = true;
                *throttled = *part <= 0;
            }
        }
    }
}
