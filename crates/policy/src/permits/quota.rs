//! Computes for how long a VM may run in a coming period if it is to be within its permit at the end of it.
//!
//! This is for a scheduler that cannot stop a VM the moment that it exceeds its permit, and so takes processor time from it in
//! advance. The VM may run for what its account holds plus what it earns until the end of the period, divided by its units per
//! time run.

use homenode_units::{Ns, Permit};

use super::Account;

/// Returns how long a VM's vCPUs together may run in the coming period; `None` if the whole period stays within its permit.
///
/// `per_running_ms` is the VM's units per millisecond of time run, from when it was last seen running; `vcpus` is the number
/// of vCPUs that can run at once. No VM gets less than `least`: one that never runs can be neither measured nor shut down.
pub fn run_ns(account: &Account, per_running_ms: f64, vcpus: u16, period: Ns, least: Ns) -> Option<Ns> {
    let whole = period.as_f64() * f64::from(vcpus);
    let slices = period.as_f64() / Permit::SLICE.as_f64();
    let allowed = account.balance_units() as f64 + account.units_per_slice() as f64 * slices;
    let run_ns = 1e6 * allowed.max(0.0) / per_running_ms;
    // The comparison is such that zero and NaN lead to no limit.
    (run_ns < whole).then(|| Ns(run_ns as u64).max(least))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permits::Terms;

    const PERIOD: Ns = Ns::from_millis(100);
    const LEAST: Ns = Ns::from_millis(1);

    /// An account of 30000 units per slice, which is 1000 per millisecond, with this balance.
    fn account(balance: i64) -> Account {
        let mut account = Account::open(Permit::pollution(30_000).unwrap());
        let less = account.balance_units() - balance;
        account.debit(less.cast_unsigned(), &Terms::default());
        assert_eq!(account.balance_units(), balance);
        account
    }

    #[test]
    fn a_vm_may_run_as_long_as_its_account_pays_for() {
        // The period earns 100000 units. At 5000 per running millisecond they pay for 20 ms.
        assert_eq!(
            run_ns(&account(0), 5_000.0, 1, PERIOD, LEAST),
            Some(Ns::from_millis(20))
        );
        // A surplus pays for more time, a debt for less.
        assert_eq!(
            run_ns(&account(20_000), 5_000.0, 1, PERIOD, LEAST),
            Some(Ns::from_millis(24))
        );
        assert_eq!(
            run_ns(&account(-50_000), 5_000.0, 1, PERIOD, LEAST),
            Some(Ns::from_millis(10))
        );
    }

    #[test]
    fn nobody_is_given_less_than_the_least() {
        assert_eq!(
            run_ns(&account(-1_000_000), 5_000.0, 1, PERIOD, LEAST),
            Some(LEAST)
        );
    }

    #[test]
    fn what_stays_within_its_permit_is_not_limited() {
        assert_eq!(run_ns(&account(0), 900.0, 1, PERIOD, LEAST), None);
        assert_eq!(run_ns(&account(0), 0.0, 1, PERIOD, LEAST), None);
        // Two vCPUs cause 1800 per millisecond together.
        assert!(run_ns(&account(0), 900.0, 2, PERIOD, LEAST).is_some());
    }
}
