//! Remembers how fast a VM pollutes while it runs, until it has shown for a while that it no longer does.
//!
//! # Problem
//! A period's sum hides bursts: a VM that pollutes for 450 ms of each second and rests looks like one that pollutes less all the
//! time, and one that rests for some seconds looks as if it had stopped. A limit that follows the sum is not in force when the
//! next burst comes.
//!
//! # Terms
//! - *Burst*: pollution per millisecond in which the VM runs, with all of its vCPUs that took part. It is the sum's intensity if
//!   the VM rests for the rest of the period.
//! - *Part*: how much a period shows of the VM, from 0 to 1. A VM at rest shows nothing.
//!
//! # Algorithm
//! 1. If the VM caused no more in the whole period than its permit allows in one slice (which it may have saved up) and the next,
//!    no slice of the period can have broken its permit, and there was no burst.
//! 2. A burst at least as fast as the remembered one replaces it at once.
//! 3. Otherwise add up the parts. Once they are worth `calm_cycles` periods, the fastest burst of that time replaces it, if any.
//!
//! # Properties (tests of the same name)
//! - `a_faster_burst_counts_at_once_and_a_slower_one_once_it_is_shown`
//! - `a_vm_at_rest_shows_nothing`
//! - `a_permit_of_another_kind_starts_afresh`

use homenode_host::{CpuQuota, VmView};
use homenode_units::Resource;

/// A VM shows all of itself in a period in which its busiest vCPU ran for this share of what its quota allows.
const SHOWN_SHARE: f64 = 0.5;

/// The fastest burst of a VM lately.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Burst {
    /// What its permit counts; `None` without a permit.
    resource: Option<Resource>,
    /// Units per millisecond.
    per_ms: Option<f64>,
    /// The fastest burst since the remembered one.
    since: Option<f64>,
    /// How much the periods since the remembered burst have shown of the VM, added up.
    shown: f64,
}

impl Burst {
    /// Returns the remembered burst in units per millisecond; `None` if there was none lately.
    pub(super) fn per_ms(&self) -> Option<f64> {
        self.per_ms
    }

    /// Notes a period: its burst, if any, and how much it shows of the VM. Forgets what another kind of permit counted.
    pub(super) fn note(
        &mut self,
        resource: Option<Resource>,
        per_ms: Option<f64>,
        part: f64,
        calm_cycles: u32,
    ) {
        if per_ms >= self.per_ms || resource != self.resource {
            *self = Burst {
                resource,
                per_ms,
                ..Burst::default()
            };
            return;
        }
        if per_ms > self.since {
            self.since = per_ms;
        }
        self.shown += part.clamp(0.0, 1.0);
        if self.shown >= f64::from(calm_cycles) {
            *self = Burst {
                resource,
                per_ms: self.since,
                ..Burst::default()
            };
        }
    }
}

/// Returns how many vCPUs run at once if all run in proportion to their demands, and the busiest one always.
pub(super) fn at_once(demands: &[f64]) -> f64 {
    let busiest = demands.iter().copied().fold(0.0, f64::max);
    if busiest > 0.0 {
        demands.iter().sum::<f64>() / busiest
    } else {
        1.0
    }
}

/// Returns how much the period shows of a VM, from 0 to 1.
pub(super) fn part_shown(vm: &VmView<'_>) -> f64 {
    let vcpus = vm.rates.iter().flat_map(|rates| &rates.vcpus);
    let busiest = vcpus.map(|vcpu| vcpu.running).fold(0.0, f64::max);
    let quota = vm.sample.vcpus.first().and_then(|vcpu| vcpu.quota);
    let allowed = quota.map_or(1.0, CpuQuota::share).min(1.0);
    (busiest / (SHOWN_SHARE * allowed)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(burst: &mut Burst, per_ms: Option<f64>, part: f64) {
        burst.note(Some(Resource::Pollution), per_ms, part, 3);
    }

    #[test]
    fn a_faster_burst_counts_at_once_and_a_slower_one_once_it_is_shown() {
        let mut burst = Burst::default();
        note(&mut burst, None, 1.0);
        assert_eq!(burst.per_ms(), None);
        note(&mut burst, Some(5.0), 1.0);
        note(&mut burst, Some(9.0), 1.0);
        assert_eq!(burst.per_ms(), Some(9.0));
        for slower in [3.0, 4.0] {
            note(&mut burst, Some(slower), 1.0);
            assert_eq!(burst.per_ms(), Some(9.0));
        }
        note(&mut burst, None, 1.0);
        assert_eq!(burst.per_ms(), Some(4.0));
        for _ in 0..3 {
            assert_eq!(burst.per_ms(), Some(4.0));
            note(&mut burst, None, 1.0);
        }
        assert_eq!(burst.per_ms(), None);
    }

    #[test]
    fn a_vm_at_rest_shows_nothing() {
        let mut burst = Burst::default();
        note(&mut burst, Some(9.0), 1.0);
        (0..1000).for_each(|_| note(&mut burst, None, 0.0));
        assert_eq!(burst.per_ms(), Some(9.0));
        // A VM that runs for a hundredth of the time that it may is believed after a hundred times as long.
        (0..299).for_each(|_| note(&mut burst, None, 0.01));
        assert_eq!(burst.per_ms(), Some(9.0));
        (0..2).for_each(|_| note(&mut burst, None, 0.01));
        assert_eq!(burst.per_ms(), None);
    }

    #[test]
    fn a_permit_of_another_kind_starts_afresh() {
        let mut burst = Burst::default();
        note(&mut burst, Some(9.0), 1.0);
        burst.note(Some(Resource::Bandwidth), Some(5.0), 1.0, 3);
        assert_eq!(burst.per_ms(), Some(5.0));
        burst.note(None, None, 0.0, 3);
        assert_eq!(burst, Burst::default());
    }
}
