//! Models what a hypervisor can learn about a vCPU's accesses: nested page tables, their flags, and the page logs of \[PRL\].
//!
//! ```text
//!   Vcpu::access ──▶ tlb ──hit──▶ invisible
//!                     │ miss, or first write
//!                     ▼
//!                    walk: guest tables (tables) through nested ones (ept), with the walker's caches
//!                     │ flags 0 -> 1                     │ every walk
//!                     ▼                                  ▼
//!                    PML: exit when full               PRL: interrupt to the privileged VM when full ──▶ handler
//! ```
//!
//! The caller does what software does: it handles exits, clears flags, flushes TLBs, and accounts for the cost of these.
//!
//! # Properties (tests of the same names)
//!
//! - `a_cold_walk_makes_24_references_and_a_warm_one_5`
//! - `pml_logs_what_was_written_and_the_tables_that_were_walked`
//! - `an_accessed_flag_alone_can_exit_with_a_full_log`
//! - `flags_cleared_without_a_flush_are_not_set_again`
//! - `paml_logs_reads_and_repeats_and_no_tlb_hits`
//! - `what_the_tlb_holds_is_not_logged_until_it_is_flushed`
//! - `a_large_page_is_logged_once_at_the_frame_that_was_used`
//! - `each_option_changes_what_it_says`
//! - `one_run_of_the_handler_drains_all_full_buffers`
//! - `a_vcpu_does_what_one_of_plain_lists_does`

mod ept;
mod handler;
mod log;
mod tables;
mod vcpu;

pub use ept::{Denied, Ept, Flags, Reference};
pub use handler::{Costs, Handler};
pub use log::{Buffer, Buffers, Logged, Mode, NextPage, Options, Start, TablePages};
pub use tables::{LEVELS, Mapped, Tables, Unmappable};
pub use vcpu::{Counts, Exit, Guest, Step, Vcpu};

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
