//! Permits that the host itself enforces on its VMs [Kyoto, sections 3.2.2 and 3.3.4], with the ledger of
//! [`homenode_policy::permits`].
//!
//! # Algorithm
//!
//! Every tick of 10 ms, each running VM is metered and its account debited. The effect depends on the enforcer:
//!
//! - *KS4Xen*: below zero the VM is OVER, and none of its vCPUs runs. Every third tick (the end of a slice) it earns what it
//!   booked; at zero or above it is UNDER again ([`super::credit`]).
//! - *KS4Pisces*: as KS4Xen, on CPUs that the VM shares with no other VM: these CPUs stand still.
//! - *KS4Linux*: every 100 ms, the period of `cpu.max`, the VM gets the time that its account pays for in the next period
//!   ([`homenode_policy::permits::quota`]), at least 1 ms for each vCPU.
//!
//! # Left out
//!
//! The cost of metering (`kyoto.overhead` measures it).

use homenode_policy::permits::meter::Reading;
use homenode_policy::permits::{Account, Meter, Pollution, Standing, Terms, quota};
use homenode_units::{Ns, Permit, Resource};

use crate::index::{IxVec, VmIx};
use crate::scenario::Enforcer;

/// Interval at which VMs are metered: Xen's tick.
pub(crate) const TICK: Ns = Ns::from_millis(10);
const TICKS_PER_SLICE: u64 = 3;
/// KS4Linux's period, the kernel's default; and the time per period that each vCPU keeps at least, the kernel's minimum.
pub(crate) const PERIOD: Ns = Ns::from_millis(100);
const TICKS_PER_PERIOD: u64 = 10;
const LEAST: Ns = Ns::from_millis(1);

/// The measure to apply to a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Measure {
    /// No change.
    None,
    /// The VM runs or does not run.
    Standing(Standing),
    /// Each vCPU of the VM may run for this long in the coming period; without limit if `None`.
    Quota(Option<Ns>),
}

/// A VM with a permit.
#[derive(Clone, Debug)]
struct Booked {
    permit: Permit,
    account: Account,
    /// The counters of the VM's vCPUs at the last tick.
    readings: Vec<Reading>,
    /// The last measures applied to the VM.
    standing: Standing,
    limited: bool,
    per_running_ms: f64,
}

/// The host's ledger.
#[derive(Clone, Debug)]
pub(crate) struct Permits {
    enforcer: Enforcer,
    meter: Meter,
    terms: Terms,
    line_bytes: f64,
    ticks: u64,
    /// The permits of the VMs.
    booked: IxVec<VmIx, Option<Booked>>,
}

impl Permits {
    /// Opens the ledger for VMs with these permits. Returns `None` if no VM has a permit.
    pub(crate) fn new(
        enforcer: Enforcer,
        clock_khz: u64,
        line_bytes: f64,
        permits: Vec<Option<Permit>>,
    ) -> Option<Permits> {
        if permits.iter().all(Option::is_none) {
            return None;
        }
        let open = |permit: Permit| Booked {
            permit,
            account: Account::open(permit),
            readings: Vec::new(),
            standing: Standing::Under,
            limited: false,
            per_running_ms: 0.0,
        };
        Some(Permits {
            enforcer,
            meter: Meter::new(clock_khz),
            terms: Terms::default(),
            line_bytes,
            ticks: 0,
            booked: permits.into_iter().map(|permit| permit.map(open)).collect(),
        })
    }

    /// Returns the permit that a VM booked.
    pub(crate) fn permit(&self, vm: VmIx) -> Option<Permit> {
        self.booked[vm].as_ref().map(|booked| booked.permit)
    }

    /// Returns a VM's account.
    pub(crate) fn account(&self, vm: VmIx) -> Option<&Account> {
        self.booked[vm].as_ref().map(|booked| &booked.account)
    }

    /// Begins a tick.
    pub(crate) fn tick(&mut self) {
        self.ticks += 1;
    }

    /// Resets the account of a VM that has left the host, in case a VM comes back under its name. Returns the measure that lets
    /// the VM run again.
    pub(crate) fn forget(&mut self, vm: VmIx) -> Measure {
        let Some(booked) = &mut self.booked[vm] else {
            return Measure::None;
        };
        booked.readings.clear();
        booked.account = Account::open(booked.permit);
        booked.per_running_ms = 0.0;
        let standing = std::mem::replace(&mut booked.standing, Standing::Under);
        if std::mem::take(&mut booked.limited) {
            Measure::Quota(None)
        } else if standing == Standing::Over {
            Measure::Standing(Standing::Under)
        } else {
            Measure::None
        }
    }

    /// Debits a VM for its counters since the last tick, lets it earn, and returns the measure to apply.
    pub(crate) fn settle(&mut self, vm: VmIx, readings: Vec<Reading>) -> Measure {
        let Some(booked) = &mut self.booked[vm] else {
            return Measure::None;
        };
        let before = std::mem::replace(&mut booked.readings, readings);
        let now = booked.readings.iter().copied();
        let seen = self.meter.pollution(before.into_iter().zip(now));
        // The meter has no result in a VM's first tick, or if its counters cannot be trusted.
        let Pollution {
            units,
            per_running_ms,
        } = seen.unwrap_or_default();
        if per_running_ms > 0.0 {
            booked.per_running_ms = per_running_ms;
        }
        let per_unit = match booked.permit.resource() {
            Resource::Pollution => 1.0,
            Resource::Bandwidth => self.line_bytes,
        };
        booked
            .account
            .debit((units as f64 * per_unit) as u64, &self.terms);
        match self.enforcer {
            Enforcer::None => {
                booked.account.earn(TICK, &self.terms);
                Measure::None
            }
            Enforcer::Ks4xen | Enforcer::Ks4pisces => {
                if self.ticks.is_multiple_of(TICKS_PER_SLICE) {
                    booked.account.earn(Permit::SLICE, &self.terms);
                }
                let standing = booked.account.standing();
                if std::mem::replace(&mut booked.standing, standing) == standing {
                    return Measure::None;
                }
                Measure::Standing(standing)
            }
            Enforcer::Ks4linux => {
                booked.account.earn(TICK, &self.terms);
                if !self.ticks.is_multiple_of(TICKS_PER_PERIOD) {
                    return Measure::None;
                }
                let vcpus = booked.readings.len().max(1) as u16;
                let least = Ns(LEAST.0 * u64::from(vcpus));
                let per_running_ms = booked.per_running_ms * per_unit;
                let run = quota::run_ns(&booked.account, per_running_ms, vcpus, PERIOD, least);
                let limited_before = std::mem::replace(&mut booked.limited, run.is_some());
                if run.is_none() && !limited_before {
                    return Measure::None;
                }
                Measure::Quota(run.map(|run| Ns(run.0 / u64::from(vcpus))))
            }
        }
    }
}
