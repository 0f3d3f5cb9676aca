//! Models a machine's memory access by access, to validate the epoch model of `homenode-twin`.
//!
//! `homenode-twin` counts populations, such as lines held and misses per second. Here, streams generated from a seed make every
//! single access. This is four orders of magnitude slower, but does not need its assumptions.
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
//! Measured with `cargo bench -p homenode-tracking`, on one of two busy cores of a Xeon at 2.5 GHz, per second: 12 to 15 million
//! accesses to an 8 MiB cache of 16 ways under any policy, 3 million exact stack distances, 190 million accesses through SHARDS
//! at 1 percent. Translation (`tlb`, `paging`), best of 100 runs: per second, 210 to 235 million accesses that hit a first-level
//! TLB (the target is 150), and 38 to 55 million that hit the second; logged walks reach 42 to 48 million for consecutive pages
//! (target: 40; 30 to 36 on Zen's fully associative first level) and 14 to 18 million for random pages. Random pages also miss
//! the walker's caches, which takes 860 instructions instead of 370, and three misses of the host's first-level cache instead of
//! one. In slow phases of the machine, all figures halve.
//!
//! # Properties (tests of the same names)
//!
//! - Each policy evicts whom it should; lines held add up. Each set of a filter's L2 is a list in order of use.
//! - Mattson is an LRU list of every size; samples tell the curve within two points.
//! - A stack-distance stream has the curve that was prescribed.
//! - In a full system Little's law holds.
//! - Same seed, same accesses, on any machine.

pub mod cache;
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
