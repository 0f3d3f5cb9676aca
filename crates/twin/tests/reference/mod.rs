//! Compares the epoch model with the access-level reference, both driven by the same generated streams.

#![allow(dead_code)] // the test and the document each use their part

pub mod sharing;
pub mod traffic;
