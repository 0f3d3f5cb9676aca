//! Measures how good decisions are: runs a scenario under sets of policies, scores them, draws cases from a seed, and
//! sweeps.

pub mod best;
pub mod board;
pub mod contender;
pub mod generate;
pub mod grid;
pub mod held_out;
pub mod known;
pub mod operations;
pub mod outcome;
pub mod program;
pub mod score;
pub mod search;
pub mod settings;
pub mod sweep;
pub mod trial;
pub mod whatif;
