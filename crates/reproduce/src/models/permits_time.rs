//! Measures the cost of enforcing permits, as CPU time of this program on the current machine ([Kyoto, figure 3.11]).
//!
//! Reading the counters is left out, because it needs a host whose PMU may be used. On Xen it takes a few `rdpmc` per
//! switch.

use anyhow::Result;
use homenode_host::Counters;
use homenode_policy::permits::meter::Reading;
use homenode_policy::permits::{Account, Ledger, Meter, Permit, Terms};
use homenode_units::{Ns, VmId};

use crate::design::array::{Array, Cell, Named};
use crate::models::{Values, cpu_s, named};

/// Clock of e5_1603v3, kHz.
const CLOCK_KHZ: u64 = 2_800_000;
/// Number of settlements from which each figure is measured.
const SETTLED: usize = 400_000;
const TRIALS: usize = 5;

/// Returns `period_ns`, the time of a period with as many one-vCPU VMs as axis `vms` says, and `state_bytes`, the state per
/// VM.
pub(super) fn permits(value: Values<'_>) -> Result<Named> {
    let periods = value("vms")?.map_numbers(|count| Ok(period_ns(count as usize)))?;
    let bytes = Array::one(Cell::Number(size_of::<(VmId, Account)>() as f64));
    Ok(named([("period_ns", periods), ("state_bytes", bytes)]))
}

/// Returns the nanoseconds of a period with this number of VMs, in which each VM is metered and all are settled. The result is
/// the minimum of several trials.
fn period_ns(vms: usize) -> f64 {
    let permit = Permit::pollution(250_000).expect("the paper's permit");
    let mut ledger = Ledger::new(Terms::default());
    (0..vms).for_each(|vm| ledger.book(VmId(vm as u128), permit));
    let meter = Meter::new(CLOCK_KHZ);
    let reading = |vm: usize, period: u64| Reading {
        counters: Some(Counters {
            instructions: period * 20_000_000,
            cycles: period * 28_000_000,
            llc_references: Some(period * 900_000),
            llc_misses: Some(period * (vm as u64 % 700) * 1_000),
        }),
        running_ns: Ns::from_millis(10 * period),
        counted_ns: Ns::from_millis(10 * period),
    };
    let read: Vec<(Reading, Reading)> = (0..vms).map(|vm| (reading(vm, 1), reading(vm, 2))).collect();
    let periods = (SETTLED / vms).max(2);
    let mut least = f64::INFINITY;
    let mut now = Ns::ZERO;
    for _ in 0..TRIALS {
        let begin = cpu_s();
        for _ in 0..periods {
            now += Permit::SLICE;
            ledger.settle(now, |vm| {
                let metered = meter.pollution([read[vm.0 as usize]]);
                metered.ok().map(|pollution| pollution.units)
            });
        }
        least = least.min(1e9 * (cpu_s() - begin) / periods as f64);
    }
    // Checks that the counts were charged to the accounts.
    assert!(ledger.accounts().any(|(_, account)| account.used_units() > 0));
    least
}
