//! Analyses the memory accesses of an emulated program or machine.
//!
//! QEMU's plugin (`qemu-plugin/`) sees every load and store, and calls this crate. The crate does not depend on QEMU, so it can
//! be tested and benchmarked with synthetic accesses.
//!
//! ```text
//!   vCPU ──▶ filter (private caches) ─┬─▶ profile  distances, overlap, heat of pages ──▶ profile_log ──▶ `homenode profile`
//!                                     └─▶ pmu  the LLC of each node, counts by CPU and frame ──▶ pmu_region ──▶ agent inside
//!   vCPU ──▶ page_model  TLBs, walks, PML and PRL; used pages ──▶ page_log ──▶ `homenode wss --log`
//! ```
//!
//! # Speed
//!
//! `cargo bench -p homenode-meter`: see `docs/SPEED.md`.
//!
//! # Properties (tests of the same names)
//!
//! - The curve of a small program is the exact one.
//! - Misses are counted where they belong.
//! - Vcpus are told apart by their private caches and counted together.
//! - A pointer chase has one miss in flight by the rule; independent misses fill the window.
//! - What is in front of the model of pages changes nothing; each frame used in a window is marked in it and no other.

pub mod heat;
pub mod overlap;
pub mod page_model;
pub mod pmu;
pub mod profile;
