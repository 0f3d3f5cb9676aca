//! Models of logs of pages of \[PRL\]: accesses made one by one (`homenode_tracking::paging`), and the estimators of
//! `homenode_policy::working_set`.

pub mod array;
mod guest;
pub mod hpl;
pub mod limits;
pub mod losses;
pub mod restore;
pub mod shared_cache;

/// Megabytes, as the paper counts: of pages of 4 KiB, 256 to the megabyte.
fn mb(pages: u64) -> f64 {
    pages as f64 / 256.0
}
