//! Describes a host: its nodes, CPUs, caches, memory controllers, links and devices, but not what runs on it.
//!
//! `homenode-machine-files` builds a [`Machine`] from a preset, a file or a Linux `/sys` tree; this crate reads no files. Presets
//! also carry [`Hardware`], the timing figures that only the simulator needs. [`MachineFile`] is the format of a file. A
//! serialized machine is the JSON for programs.

mod json;
mod layout;
mod model;
pub mod notation;
mod rules;

pub use layout::MachineFile;
pub use model::{
    Cpu, Device, Distances, Hardware, Ipi, Latency, Link, LinkTiming, Llc, LoadCurve, Machine, Node,
    PageWalk, Prefetcher, Replacement, Wake,
};
pub use rules::MachineError;
