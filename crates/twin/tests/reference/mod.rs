//! The epoch model beside the access-level reference, driven by the same generated streams.

#![allow(dead_code)] // the test and the document each use their part

pub mod sharing;
pub mod traffic;
