//! Reads machines from `/sys`, files and presets, and writes them as text and as files.
//!
//! A [`Machine`](homenode_machine::Machine) comes from a preset ([`preset`]), from a file ([`from_toml`]) or from a Linux
//! `/sys` tree ([`sysfs::read`]). [`mod@file`] reads every TOML file of the project, [`render_text`] shows a machine, and
//! [`to_toml`] writes one as a file.

pub mod file;
mod load;
mod render;
pub mod sysfs;
mod write;

pub use load::{LoadError, PresetNames, from_toml, from_toml_file, preset, preset_file, preset_names};
pub use render::{render_summary, render_text};
pub use write::{Comments, to_toml};
