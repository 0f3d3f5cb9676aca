//! Formats that Homenode's programs exchange: layouts of shared memory and formats of files. This crate is separate so that
//! readers need not depend on models of caches or page walks.
//!
//! | module | written by | read by |
//! |---|---|---|
//! | [`pmu_region`] | the emulator's plugin, into shared memory | the agent on an emulated host |
//! | [`profile_log`] | the emulator's plugin | `homenode profile` |
//! | [`page_log`] | the emulator's plugin, guests | `homenode wss --log` |
//! | [`cpio`] | footprints of kernels, the testbed | kernels, when they boot |
//! | [`measured`] | the testbed | `homenode reproduce` |
//!
//! # Properties (tests of the same names)
//!
//! - A log reads as it was written; any other content of a file is refused with a reason.
//! - A region reads as it was written; any other content is refused with a reason.
//! - A log of pages that is cut off gives all whole records and says what is missing; with one changed byte it is refused.

pub mod cpio;
pub mod measured;
pub mod page_log;
pub mod pmu_region;
pub mod profile_log;
