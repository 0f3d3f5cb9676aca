//! Profiles a program: finds the emulator and the plugin, checks the program, and turns the plugin's log into a workload for the
//! simulator.

pub mod emulator;
mod ended;
mod program;
mod write;

pub use emulator::Emulator;
pub use ended::{exit_status, notes};
pub use program::Program;
pub use write::{Begin, CurveAs, FIRST_WORDS, Facts, fit, profile, summary};
pub(crate) use write::{noted, size};
