//! What is made of the memory accesses of a program or a machine that is being emulated.
//!
//! QEMU's plugin (`qemu-plugin/`) sees every load and store and calls what is here; nothing here knows QEMU, so that it is
//! tested, and measured, by feeding it accesses.
//!
//! ```text
//!   vCPU ──▶ filter (private caches) ──┬─▶ profile  stack distances from a sample of lines ──▶ log ──▶ `homenode profile`
//!                                      └─▶ pmu      the LLC of each node, counts by CPU and frame ──▶ page ──▶ software inside
//!   vCPU ──▶ pages  TLBs, walks, PML and PRL; what was used ──▶ page_log ──▶ `homenode wss --log`
//! ```
//!
//! # Speed
//!
//! `cargo bench -p homenode-meter`: see `docs/SPEED.md`.
//!
//! # Properties (tests of the same names)
//!
//! - A log reads as it was written; whatever else a file holds is refused with what is wrong.
//! - The curve of a small program is the exact one.
//! - A page reads as it was written; what is no page is refused with what is wrong. Misses are counted where they belong.
//! - Vcpus are told apart by their private caches and counted together.
//! - What is in front of the model of pages changes nothing; each frame used in a window is marked in it and no other.
//! - A log of pages that is cut off gives all whole records and says what is missing; with one changed byte it is refused.

pub mod log;
pub mod page;
pub mod page_log;
pub mod pages;
pub mod pmu;
pub mod profile;
