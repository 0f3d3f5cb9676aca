//! Claims on page modification logging and page reference logging of \[PRL\].
//!
//! What a log shows is decided on the access-level model (`homenode_tracking::paging`), accesses made one by one, and the
//! estimators of `homenode_policy::working_set`; what tracking costs, from the costs of exits, faults and walks.

pub mod accuracy;
pub mod costs;
pub mod hpl;
pub mod limits;
mod model;
pub mod overhead;
pub mod parsec;
pub mod uses;

/// Megabytes, as the paper counts: of pages of 4 KiB, 256 to the megabyte.
fn mb(pages: u64) -> f64 {
    pages as f64 / 256.0
}
