//! LLC pollution permits: polluters pay ([Kyoto, chapter 3], "Kyoto").
//!
//! # Problem
//! VMs that share a last-level cache evict each other's lines, and no host accounts for it. Here a VM books how much it may
//! pollute, as it books processors and memory. A VM that pollutes more loses processor time until it is back within its
//! permit. This needs no cache-partitioning hardware.
//!
//! # Units
//! - *Pollution* (equation 3.1): LLC misses × frequency in kHz / unhalted cycles, that is misses per unhalted millisecond. It
//!   hardly changes if the VM gets less processor time.
//! - *Permit*: booked pollution in misses per wall-clock slice of 30 ms; `250k` is 250,000 ([`Permit`]).
//! - *Debit*: equation 3.1 × time run. It is compared with what the permit earns in the same wall-clock time, and does fall
//!   if the VM gets less processor time.
//!
//! # Terms
//! - *Account* ([`Account`]): what a VM earns from its permit, less its debits; the paper's `pollution_quota`.
//! - *OVER*: the account is below zero. *UNDER*: it is at zero or above ([`Standing`]).
//! - *Savings*: what an account above zero holds. *Debt*: what it owes. Both are bounded ([`Terms`]).
//!
//! # Algorithm
//! 1. Meter ([`meter`]): read the LLC misses and unhalted cycles since the last reading, of one representative vCPU of each
//!    VM, or of all its vCPUs.
//! 2. Debit the account accordingly. Below zero the VM is OVER, and its enforcer takes processor time from it.
//! 3. In each slice, or other period of the enforcer, the account earns the permit's share for that time, up to its bound. At
//!    zero or above the VM is UNDER and runs again.
//!
//! Steps 2 and 3 are [`Account::debit`] and [`Account::earn`]; [`Ledger::settle`] does both for all VMs of a host.
//!
//! # Properties (tests of the same name)
//! - `over_below_zero_and_under_at_or_above`
//! - `a_vm_that_stops_when_over_stays_within_its_permit`
//! - `what_is_saved_and_what_is_owed_are_bounded`
//! - `earnings_do_not_depend_on_the_period`
//! - `a_debt_is_paid_exactly_when_promised`
//! - `what_is_not_measured_is_not_punished_and_a_debt_passes`
//! - `a_clock_that_jumps_is_not_judged`
//! - `the_ledger_counts_units_of_anything`
//! - `the_state_of_a_vm_is_less_than_the_sources_72_bytes`
//! - `bad_counters_give_a_reason_and_no_figure`
//!
//! Settling a period takes time linear in the number of VMs: it merges two lists that are both sorted.
//!
//! # Departures from the source, and why
//! - The paper compares equation 3.1, a rate, with a permit per slice. Here the rate is multiplied by the time run. Otherwise
//!   a VM would be debited the same whether it ran for a whole slice or for a tenth of one.
//! - The representative vCPU is the one that ran longest, because one that slept says nothing about the others.
//! - A debt is bounded, and unmeasured pollution is not debited, while the paper trusts its counters.
//! - Of the misses counted, only a VM's own are debited, as far as they can be told apart ([`attribution`]).
//! - The same account can hold bytes, for a permit for memory bandwidth (which the paper's section 5.2 asks for).

pub mod attribution;
mod burst;
pub mod ledger;
pub mod meter;
pub mod plan;
pub mod quota;
pub mod suggest;

pub use homenode_units::{Permit, PermitError, Resource};
pub use ledger::{Account, Ledger, PERIOD_MAX, Standing, Terms};
pub use meter::{Indicator, Meter, Pollution, Unmetered, Watched};
pub use plan::{Config, Enforcer, State, Usage, plan};

/// Name of this policy in plans.
pub const POLICY: &str = "permits";
