//! Access-level models of a machine's memory: what the twin's epoch model is validated against.
//!
//! The twin counts populations: lines held, misses per second. Here every access is made, one by one, by streams that are
//! generated from a seed: four orders of magnitude slower, and with none of the twin's assumptions.
//!
//! ```text
//!   stream ──▶ paging     TLBs, nested walks, and the logs that a hypervisor has of them
//!      │
//!      ├─────▶ mrc          stack distances, exact and sampled
//!      │
//!      └─────▶ hierarchy ──▶ cache ──▶ placement ──▶ controllers and links
//!              └────────────── simulator ──────────────────────────────┘
//! ```
//!
//! # Speed
//!
//! `cargo bench -p homenode-tracking`, one of two busy cores of a Xeon at 2.5 GHz: 12 to 15 million accesses a second to an
//! 8 MiB cache of 16 ways under any policy, 3 million exact stack distances, 190 million accesses looked at by SHARDS
//! at 1 percent. Translation (`tlb`, `paging`): 190 to 220 million accesses a second that hit a first-level TLB, 33 million the
//! second, 21 to 25 million that walk page after page and are logged (the target is 40), 8 to 11 million that walk to pages at
//! random and miss the walker's caches too; fully associative arrays are slower.
//!
//! # Properties (tests of the same names)
//!
//! - Each policy evicts whom it should; lines held add up. Each set of a filter's L2 is a list in order of use.
//! - Mattson is an LRU list of every size; samples tell the curve within two points.
//! - A stack-distance stream has the curve that was prescribed.
//! - In a full system Little's law holds.
//! - Same seed, same accesses, on any machine.

pub mod cache;
mod chance;
pub mod filter;
pub mod hierarchy;
pub mod mrc;
pub mod paging;
pub mod placement;
mod recency;
mod replacement;
pub mod simulator;
pub mod stream;
mod table;
pub mod tlb;
