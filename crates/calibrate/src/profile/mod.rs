//! A program's profile: the emulator that runs it with the plugin is found, the program is looked at, and the plugin's log is
//! made into a workload for the twin.

pub mod emulator;
mod program;
mod write;

pub use emulator::Emulator;
pub use program::Program;
pub use write::{Begin, CurveAs, FIRST_WORDS, Facts, fit, profile, summary};
pub(crate) use write::{noted, size};
