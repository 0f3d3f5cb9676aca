//! How good decisions are.
pub mod run;
