//! Measures the host it runs on, writes the result as a machine file, and validates the simulator against it. Also measures how
//! much memory a guest kernel takes ([`footprint`]) and how large a pool of pages for I/O must be ([`pool`]), profiles programs
//! as workloads ([`profile`]), estimates working sets from logs ([`page_log`]), and turns recorded runs into scenarios
//! ([`recorded`]).
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
//! Every figure is measured several times and kept as a [`Spread`]. The machine file has the median as the value and the
//! rest in a comment. Figures of one thread are per second of its CPU time, so other processes on the CPU disturb them only
//! through caches and memory bandwidth. What cannot be measured from inside a process is marked `estimate:` with its source.
//! Noise is not avoided but reported: the CPU time that other processes took or a hypervisor stole during the measurement,
//! and each figure whose quartiles are more than a fifth apart.
//!
//! # Left out
//!
//! Not measured but estimated: page-table references of a walk, the cost of a virtual interrupt, and latency under load
//! across a link. Also left out is the wiring of links: each pair of nodes is measured as if it had a link of its own.

mod fit;
pub mod footprint;
mod host;
mod measure;
mod noise;
pub mod page_log;
pub mod pool;
pub mod profile;
pub mod recorded;
mod stats;
mod streams;
#[cfg(test)]
mod testing;
pub mod validate;
mod write;

use homenode_load::{kernels, sys};

pub use fit::FittedCurve;
pub use measure::{Bandwidth, CalibrateError, Calibration, LoadPoint, Options, Pair, SizePoint, calibrate};
pub use noise::{Noise, Watch};
pub use stats::Spread;
pub use write::{MachineFile, machine_file};
