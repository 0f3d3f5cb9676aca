//! Compares the epoch model with the access-level reference model. The same generated streams drive both.

#![allow(dead_code)] // the test and the document each use their part

pub(crate) mod sharing;
pub(crate) mod traffic;
