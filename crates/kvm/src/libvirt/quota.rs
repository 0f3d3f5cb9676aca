//! The order in which a quota's two numbers are set.

use homenode_host::CpuQuota;
use homenode_kernel::cgroup::CpuGroup;

/// Which of a quota's two numbers libvirt sets first: it sets the time and the period in separate calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum First {
    Time,
    Period,
}

impl First {
    /// Returns the order in which the domain, between the two calls, has no larger share of CPU time than both before and after
    /// them: the quota before may be the operator's, and a cgroup above may not allow more.
    pub(super) fn of(now: Option<CpuQuota>, next: CpuQuota) -> First {
        match now {
            Some(now) if next.run_ns > now.run_ns && next.period_ns > now.period_ns => First::Period,
            _ => First::Time,
        }
    }
}

/// Returns the quota that all of these cgroups have; `None` if they have none or cannot be read.
pub(super) fn in_force(groups: &[CpuGroup]) -> Option<CpuQuota> {
    groups.first()?.max().ok()??.quota()
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_units::Ns;
    use proptest::prelude::*;

    fn share(quota: CpuQuota) -> f64 {
        quota.run_ns.0 as f64 / quota.period_ns.0 as f64
    }

    fn quota(run_ms: u64, period_ms: u64) -> CpuQuota {
        CpuQuota {
            run_ns: Ns::from_millis(run_ms),
            period_ns: Ns::from_millis(period_ms),
        }
    }

    proptest! {
        #[test]
        fn between_the_two_calls_a_domain_has_no_larger_share_than_both_quotas_allow(
            now in (1u64..1000, 1u64..1000),
            next in (1u64..1000, 1u64..1000),
        ) {
            let (now, next) = (quota(now.0, now.1), quota(next.0, next.1));
            let between = match First::of(Some(now), next) {
                First::Time => CpuQuota { run_ns: next.run_ns, ..now },
                First::Period => CpuQuota { period_ns: next.period_ns, ..now },
            };
            prop_assert!(share(between) <= share(now).max(share(next)) + 1e-12, "{between:?}");
        }
    }

    #[test]
    fn an_operators_short_period_is_lengthened_first() {
        // 2 of 10 ms, then 3 of 30 ms: 3 of 10 ms in between would be more than the operator allows.
        assert_eq!(First::of(Some(quota(2, 10)), quota(3, 30)), First::Period);
        // And back.
        assert_eq!(First::of(Some(quota(3, 30)), quota(2, 10)), First::Time);
        assert_eq!(First::of(None, quota(3, 30)), First::Time);
    }
}
