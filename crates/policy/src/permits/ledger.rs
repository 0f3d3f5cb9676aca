//! The ledger: for each VM, what it earns from its permit, less its measured use.
//!
//! Units are those of the permit: LLC misses or bytes. [`Account`] belongs to one VM and has no clock of its own, so a
//! scheduler can keep one account per domain and update it on its tick. [`Ledger`] holds all accounts of a host and settles
//! them together, period by period, on the host's clock.

use homenode_units::{Ns, Permit, VmId};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A longer interval is not judged, as it was not observed throughout: the clock jumped, or the agent was stopped.
pub const PERIOD_MAX: Ns = Ns::from_secs(60);

/// Bounds of an account, in slices of the VM's permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Terms {
    /// Most slices that a VM can save up, and so pollute at once after being idle. If they fill a period of the agent, it
    /// cannot tell bursts within a period from saved slices, and does not limit them.
    pub burst_slices: u32,
    /// Most slices that a VM can owe. A debt beyond this is forgiven, so that no error of measurement stops a VM for long.
    pub debt_slices_max: u32,
}

impl Default for Terms {
    /// A VM can save up one slice, as with Xen's credits, and owe at most 1000 (30 s).
    fn default() -> Self {
        Terms {
            burst_slices: 1,
            debt_slices_max: 1_000,
        }
    }
}

homenode_units::settings! { Terms { burst_slices: 1..=1_000_000, debt_slices_max: 1..=1_000_000 } }

/// Whether a VM may run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "UPPERCASE")]
pub enum Standing {
    /// Its balance is zero or above.
    Under,
    /// Its balance is below zero: it polluted more than it booked, and gets less processor time.
    Over,
}

/// One VM's account.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Account {
    units_per_slice: u64,
    balance: i64,
    used_units: u64,
    earned_units: u64,
    /// The earned fraction of a unit, as units times nanoseconds; less than a slice's nanoseconds.
    #[serde(skip)]
    residual: u32,
    punished_count: u32,
}

impl Account {
    /// Opens an account whose balance is one slice.
    pub fn open(permit: Permit) -> Account {
        let units_per_slice = permit.units_per_slice();
        Account {
            units_per_slice,
            balance: signed(units_per_slice),
            used_units: 0,
            earned_units: 0,
            residual: 0,
            punished_count: 0,
        }
    }

    /// Changes the permit. The balance stays, but is limited to the new bounds.
    pub fn change(&mut self, permit: Permit, terms: &Terms) {
        self.units_per_slice = permit.units_per_slice();
        self.bound(terms);
    }

    /// Subtracts measured units.
    pub fn debit(&mut self, units: u64, terms: &Terms) {
        let before = self.standing();
        self.used_units = self.used_units.saturating_add(units);
        self.balance = self.balance.saturating_sub(signed(units));
        self.bound(terms);
        if before == Standing::Under && self.standing() == Standing::Over {
            self.punished_count = self.punished_count.saturating_add(1);
        }
    }

    /// Adds what the permit earns in this time. Within a period, debit first and then earn.
    pub fn earn(&mut self, time: Ns, terms: &Terms) {
        let (units, residual) = self.earned(time);
        self.residual = residual;
        self.earned_units = self.earned_units.saturating_add(units);
        self.balance = self.balance.saturating_add(signed(units));
        self.bound(terms);
    }

    /// Returns the whole units earned in this time, and the remainder.
    fn earned(&self, time: Ns) -> (u64, u32) {
        let slice = Permit::SLICE.0;
        let exact = self.units_per_slice.checked_mul(time.0);
        if let Some(exact) = exact.and_then(|exact| exact.checked_add(self.residual.into())) {
            return (exact / slice, (exact % slice) as u32);
        }
        // For a long period and a large permit 64 bits do not suffice. This is the same formula with 128, ten times slower.
        let exact = u128::from(self.units_per_slice) * u128::from(time.0) + u128::from(self.residual);
        let units = exact / u128::from(slice);
        let residual = exact % u128::from(slice);
        (u64::try_from(units).unwrap_or(u64::MAX), residual as u32)
    }

    fn bound(&mut self, terms: &Terms) {
        let slices = |count: u32| signed(self.units_per_slice.saturating_mul(u64::from(count)));
        let burst = slices(terms.burst_slices.max(1));
        self.balance = self.balance.clamp(-slices(terms.debt_slices_max.max(1)), burst);
    }

    /// Returns OVER if the balance is below zero, else UNDER.
    pub fn standing(&self) -> Standing {
        if self.balance < 0 {
            Standing::Over
        } else {
            Standing::Under
        }
    }

    /// Returns the VM's balance in units; below zero it is a debt.
    pub fn balance_units(&self) -> i64 {
        self.balance
    }

    /// Returns the units that the permit allows per slice.
    pub fn units_per_slice(&self) -> u64 {
        self.units_per_slice
    }

    /// Returns the most units that a VM may cause at once: what it may save up, and what a slice earns. A VM that caused no more
    /// in a longer time broke its permit in no slice of it.
    pub fn unbroken_units(&self, terms: &Terms) -> u64 {
        let slices = u64::from(terms.burst_slices.max(1)) + 1;
        self.units_per_slice.saturating_mul(slices)
    }

    /// Returns all units debited since the account was opened.
    pub fn used_units(&self) -> u64 {
        self.used_units
    }

    /// Returns all units earned since the account was opened, even those that could not be saved: the booked amount.
    pub fn earned_units(&self) -> u64 {
        self.earned_units
    }

    /// Returns how many times the VM went from UNDER to OVER.
    pub fn punished_count(&self) -> u32 {
        self.punished_count
    }

    /// Returns how long the VM will exceed its permit if it causes no more units; zero if it does not.
    pub fn over_ns(&self) -> Ns {
        let owed = u128::from(self.balance.min(0).unsigned_abs()) * u128::from(Permit::SLICE.0);
        let missing = owed.saturating_sub(u128::from(self.residual));
        Ns(u64::try_from(missing.div_ceil(u128::from(self.units_per_slice))).unwrap_or(u64::MAX))
    }
}

fn signed(units: u64) -> i64 {
    i64::try_from(units).unwrap_or(i64::MAX)
}

/// The accounts of a host.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    terms: Terms,
    /// In ascending order of VMs.
    accounts: Vec<(VmId, Account)>,
    settled_at: Option<Ns>,
}

impl Ledger {
    /// Returns a ledger without accounts.
    pub fn new(terms: Terms) -> Ledger {
        Ledger {
            terms,
            ..Ledger::default()
        }
    }

    /// Opens an account, or changes the permit of one.
    pub fn book(&mut self, vm: VmId, permit: Permit) {
        match self.position(vm) {
            Ok(at) => self.accounts[at].1.change(permit, &self.terms),
            Err(at) => self.accounts.insert(at, (vm, Account::open(permit))),
        }
    }

    /// Closes all accounts except those of VMs to `keep`. The other VMs left, or have no permit any more.
    pub fn retain(&mut self, mut keep: impl FnMut(VmId) -> bool) {
        self.accounts.retain(|(vm, _)| keep(*vm));
    }

    /// Returns the account of a VM, if it has a permit.
    pub fn account(&self, vm: VmId) -> Option<&Account> {
        self.position(vm).ok().map(|at| &self.accounts[at].1)
    }

    /// Returns all accounts, in ascending order of VMs.
    pub fn accounts(&self) -> impl Iterator<Item = (VmId, &Account)> {
        self.accounts.iter().map(|(vm, account)| (*vm, account))
    }

    /// Settles the period that ends now: every account is debited by what `used` returns (called in ascending order of VMs),
    /// and then earns. If `used` returns `None`, the account only earns: unmeasured pollution is not punished, and a debt
    /// passes with time.
    ///
    /// Returns the length of the period. Returns `None`, and neither debits nor earns, if there is no period to judge: at the
    /// first call, or if the clock went back, or ahead by more than [`PERIOD_MAX`].
    pub fn settle(&mut self, now: Ns, mut used: impl FnMut(VmId) -> Option<u64>) -> Option<Ns> {
        let before = self.settled_at.replace(now)?;
        let period = now.0.checked_sub(before.0).map(Ns)?;
        if period > PERIOD_MAX {
            return None;
        }
        for (vm, account) in &mut self.accounts {
            account.debit(used(*vm).unwrap_or(0), &self.terms);
            account.earn(period, &self.terms);
        }
        Some(period)
    }

    fn position(&self, vm: VmId) -> Result<usize, usize> {
        self.accounts.binary_search_by_key(&vm, |(known, _)| *known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TERMS: Terms = Terms {
        burst_slices: 1,
        debt_slices_max: 1_000,
    };

    fn permit(misses: u64) -> Permit {
        Permit::pollution(misses).unwrap()
    }

    fn vm(n: u128) -> VmId {
        VmId(n)
    }

    #[test]
    fn over_below_zero_and_under_at_or_above() {
        let mut account = Account::open(permit(1_000));
        account.debit(1_000, &TERMS);
        assert_eq!(
            (account.balance_units(), account.standing()),
            (0, Standing::Under)
        );
        account.debit(1, &TERMS);
        assert_eq!(
            (account.balance_units(), account.standing()),
            (-1, Standing::Over)
        );
        // At 1000 units per slice, a unit takes 30 us.
        assert_eq!(account.over_ns(), Ns(30_000));
        account.earn(Ns(30_000), &TERMS);
        assert_eq!(account.standing(), Standing::Under);
        assert_eq!(account.punished_count(), 1);
    }

    #[test]
    fn what_is_saved_and_what_is_owed_are_bounded() {
        let mut account = Account::open(permit(1_000));
        account.earn(Ns::from_secs(3_600), &TERMS);
        assert_eq!(account.balance_units(), 1_000, "one slice's worth");
        account.debit(u64::MAX, &TERMS);
        assert_eq!(account.over_ns(), Ns::from_secs(30), "1000 slices");
        account.change(permit(2_000), &TERMS);
        assert_eq!(
            account.over_ns(),
            Ns::from_secs(15),
            "a debt stays, and is paid from the new permit"
        );
    }

    #[test]
    fn a_clock_that_jumps_is_not_judged() {
        let mut ledger = Ledger::new(TERMS);
        ledger.book(vm(1), permit(1_000));
        let settle = |ledger: &mut Ledger, now: u64, used: u64| ledger.settle(Ns(now), |_| Some(used));
        assert_eq!(settle(&mut ledger, 1_000_000_000, 50_000), None, "no period yet");
        assert_eq!(settle(&mut ledger, 400_000_000, 50_000), None, "back");
        assert_eq!(settle(&mut ledger, 500_000_000_000, 50_000), None, "ahead");
        assert_eq!(ledger.account(vm(1)).unwrap().used_units(), 0);
        assert_eq!(
            settle(&mut ledger, 500_030_000_000, 1_500),
            Some(Permit::SLICE),
            "and goes on from there"
        );
        assert_eq!(ledger.account(vm(1)).unwrap().balance_units(), 500);
    }

    #[test]
    fn what_is_not_measured_is_not_punished_and_a_debt_passes() {
        let mut ledger = Ledger::new(TERMS);
        ledger.book(vm(1), permit(1_000));
        ledger.settle(Ns::ZERO, |_| None);
        ledger.settle(Permit::SLICE, |_| Some(4_500));
        assert_eq!(ledger.account(vm(1)).unwrap().balance_units(), -2_500);
        for slice in 2..=4 {
            assert_eq!(ledger.account(vm(1)).unwrap().standing(), Standing::Over);
            ledger.settle(Ns(slice * Permit::SLICE.0), |_| None);
        }
        assert_eq!(ledger.account(vm(1)).unwrap().standing(), Standing::Under);
    }

    #[test]
    fn a_vm_that_vanishes_while_over_leaves_nothing() {
        let mut ledger = Ledger::new(TERMS);
        ledger.book(vm(2), permit(1_000));
        ledger.book(vm(1), permit(1_000));
        ledger.settle(Ns::ZERO, |_| None);
        ledger.settle(Permit::SLICE, |_| Some(9_000));
        ledger.retain(|id| id == vm(1));
        assert_eq!(ledger.accounts().count(), 1);
        // A VM that returns under the same id starts with a new account.
        ledger.book(vm(2), permit(1_000));
        assert_eq!(ledger.account(vm(2)).unwrap().standing(), Standing::Under);
    }

    #[test]
    fn the_ledger_counts_units_of_anything() {
        let bandwidth: Permit = "500MB/s".parse().unwrap();
        let mut ledger = Ledger::new(TERMS);
        ledger.book(vm(1), bandwidth);
        ledger.settle(Ns::ZERO, |_| None);
        // A VM that uses 400 MB/s for a second stays within 500 MB/s, but cannot save all of the surplus. A VM that uses 600 MB/s
        // exceeds the permit by 100 MB.
        ledger.settle(Ns::from_secs(1), |_| Some(400_000_000));
        assert_eq!(ledger.account(vm(1)).unwrap().balance_units(), 15_000_000);
        ledger.settle(Ns::from_secs(2), |_| Some(600_000_000));
        assert_eq!(
            ledger.account(vm(1)).unwrap().balance_units(),
            15_000_000 - 100_000_000
        );
    }

    #[test]
    fn the_state_of_a_vm_is_less_than_the_sources_72_bytes() {
        assert_eq!(size_of::<Account>(), 40);
        assert_eq!(size_of::<(VmId, Account)>(), 64);
    }

    proptest! {
        /// An enforcer stops a VM within a tick once it exceeds its permit. So the VM never causes more than its earnings, its
        /// initial balance, and the one debit that took it below zero.
        #[test]
        fn a_vm_that_stops_when_over_stays_within_its_permit(
            misses in 1_000u64..1_000_000,
            debits in prop::collection::vec(0u64..2_000_000, 1..400),
        ) {
            let mut account = Account::open(permit(misses));
            let tick = Ns::from_millis(10);
            let most = *debits.iter().max().unwrap();
            for debit in debits {
                if account.standing() == Standing::Under {
                    account.debit(debit, &TERMS);
                }
                account.earn(tick, &TERMS);
                prop_assert!(account.used_units() <= account.earned_units() + misses + most);
            }
        }

        /// However a time is split into periods, it earns the same.
        #[test]
        fn earnings_do_not_depend_on_the_period(
            misses in 1_000u64..10_000_000,
            pieces in prop::collection::vec(0u64..40_000_000, 1..50),
        ) {
            let mut cut = Account::open(permit(misses));
            let mut whole = cut;
            for piece in &pieces {
                cut.earn(Ns(*piece), &TERMS);
            }
            whole.earn(Ns(pieces.iter().sum()), &TERMS);
            prop_assert_eq!(cut.earned_units(), whole.earned_units());
        }

        /// `over_ns` is the least time after which the VM is UNDER again.
        #[test]
        fn a_debt_is_paid_exactly_when_promised(
            misses in 1_000u64..10_000_000,
            debit in 0u64..100_000_000,
            head in 0u64..99_999,
        ) {
            let mut account = Account::open(permit(misses));
            account.earn(Ns(head), &TERMS);
            account.debit(debit, &TERMS);
            let wait = account.over_ns();
            if let Some(sooner) = wait.0.checked_sub(1) {
                let mut early = account;
                early.earn(Ns(sooner), &TERMS);
                prop_assert_eq!(early.standing(), Standing::Over);
            }
            account.earn(wait, &TERMS);
            prop_assert_eq!(account.standing(), Standing::Under);
        }
    }
}
