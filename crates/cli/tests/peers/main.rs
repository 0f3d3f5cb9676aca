//! Homenode with other programs: Prometheus, schemathesis, Perfetto, Slurm, Chromium.
//!
//! Not part of `cargo test`: scripts install those programs, and `make http`, `make page` and `make sweeps` run these tests.

#[path = "../common/mod.rs"]
mod common;
mod http_peers;
mod page;
mod perfetto;
mod sweeps;
