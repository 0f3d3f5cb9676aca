//! What a host *is*: nodes, CPUs, caches, memory controllers, links and devices; nothing of what it is doing.
//!
//! A [`Machine`] is built by `homenode-machine-files`, from a preset, a file or a Linux `/sys` tree; nothing in here reads
//! anything. Presets also carry [`Hardware`], the timing figures that only the twin needs. [`MachineFile`] is what a file may
//! say, and serializing a machine gives the JSON for programs.

mod json;
mod layout;
mod model;
mod rules;

pub use layout::MachineFile;
pub use model::{
    Cpu, Device, Distances, Hardware, Ipi, Latency, Link, LinkTiming, Llc, LoadCurve, Machine, Node,
    PageWalk, Replacement, Wake,
};
pub use rules::MachineError;
