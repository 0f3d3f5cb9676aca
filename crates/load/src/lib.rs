//! Programs that load caches and memory in a known way. They run as processes on this host ([`worker`]), or as the only program
//! of a guest (`src/main.rs`), and answer the same orders.
//!
//! | module | what it is |
//! |---|---|
//! | [`kernels`] | the loops |
//! | [`kernel`] | names and sizes of what a worker runs |
//! | [`requests`] | a server of requests, whose times are measured |
//! | [`worker`] | the protocol, and both of its sides |
//! | [`sys`] | memory of a page size on a node, pinned threads, time stamps |

pub mod kernel;
pub mod kernels;
pub mod requests;
pub mod sys;
pub mod worker;

pub use kernel::Kernel;
