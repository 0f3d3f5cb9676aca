//! Models of the page logs of \[PRL\]. They use single accesses (`homenode_tracking::paging`) and the estimators of
//! `homenode_policy::working_set`.

pub(super) mod array;
mod guest;
pub(super) mod hpl;
pub(super) mod limits;
pub(super) mod losses;
pub(super) mod parsec;
pub(super) mod restore;
pub(super) mod shared_cache;

/// Converts pages into megabytes as the paper counts them: 256 pages of 4 KiB each.
fn mb(pages: u64) -> f64 {
    pages as f64 / 256.0
}
