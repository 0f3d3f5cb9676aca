//! Measures the host it runs on, writes the result as a machine file, and validates the twin against it. Also measures how
//! much memory a guest kernel takes ([`footprint`]), turns programs into workloads ([`profile`]), estimates working sets
//! from logs ([`page_log`]), and turns recorded runs into scenarios ([`recorded`]).
//!
//! ```text
//!   host ──▶ measure ──▶ Calibration ──▶ write ──▶ machine file ──▶ twin
//!              ▲              │                                       │ predicted
//!     sys, kernels, streams   └──────────────▶ validate ◀─────────────┘
//!                                two real processes that share the LLC, measured
//! ```
//!
//! # Approach
//!
//! Every figure is measured several times and kept as a [`Spread`]; the machine file has the median, and the rest in a
//! comment. One thread's figures are per second of its CPU time, so that other processes on the CPU disturb only through
//! caches and memory bandwidth. What cannot be measured from inside a process is marked `estimate:` with its source. Noise
//! is not avoided but reported: CPU time that other processes took or a hypervisor stole meanwhile, and each figure whose
//! quartiles lie more than a fifth apart.
//!
//! # Left out
//!
//! Page-table references of a walk, the cost of a virtual interrupt, latency under load across a link (estimates all); links
//! as the hardware wires them: each pair of nodes is measured as if it had its own.

mod fit;
pub mod footprint;
mod host;
pub mod kernels;
mod measure;
mod noise;
pub mod page_log;
pub mod profile;
pub mod recorded;
mod stats;
mod streams;
mod sys;
#[cfg(test)]
mod testing;
pub mod validate;
mod write;

pub use fit::FittedCurve;
pub use measure::{Bandwidth, CalibrateError, Calibration, LoadPoint, Options, Pair, SizePoint, calibrate};
pub use noise::Noise;
pub use stats::Spread;
pub use write::{MachineFile, machine_file};
