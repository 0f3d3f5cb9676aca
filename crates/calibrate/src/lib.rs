//! Measures the very host that it runs on, writes what it found as a machine file, and holds the twin against it; measures how
//! much memory a guest kernel takes ([`footprint`]), makes programs into workloads ([`profile`]), and estimates working sets
//! from logs ([`page_log`]), and recorded runs into scenarios ([`recorded`]).
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
//! Every figure is measured several times and kept as a [`Spread`]; the machine file has the median, and says the rest beside
//! it. One thread's figures are per second of its CPU time, so that others who have the CPU disturb only by what they leave in
//! caches and ask of memory. What cannot be measured from inside a process is marked `estimate:` with its source. Noise is not
//! fought but told: CPU time that others took or a hypervisor stole meanwhile, and each figure whose quartiles lie more than a
//! fifth apart.
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
