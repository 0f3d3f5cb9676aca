//! What a host *is*: nodes, CPUs, caches, memory controllers, links and devices; nothing of what it is doing.
//!
//! A [`Machine`] comes from a preset ([`preset`]), from a file ([`Machine::from_toml`]) or from a Linux `/sys`
//! tree ([`sysfs::read`]). Presets also carry [`Hardware`], the timing figures that only the twin needs.
//! [`mod@file`] reads every TOML file of the project, [`render_text`] shows a machine to people, and serializing one gives
//! the JSON for programs.

pub mod file;
mod json;
mod layout;
mod load;
mod model;
mod render;
mod rules;
pub mod sysfs;

pub use load::{LoadError, PresetNames, preset, preset_names};
pub use model::{
    Cpu, Device, Distances, Hardware, Ipi, Latency, Link, LinkTiming, Llc, LoadCurve, Machine, Node,
    PageWalk, Replacement,
};
pub use render::render_text;
pub use rules::MachineError;
