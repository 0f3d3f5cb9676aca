//! Where the libraries of `guest/runtime` are that were built with this crate. Its tests try them on this machine, without a
//! guest.

use std::path::{Path, PathBuf};

/// A library of `guest/runtime`, as `hotspot` for `libhomenode_hotspot.so`.
pub fn library(name: &str) -> PathBuf {
    Path::new(env!("HOMENODE_GUEST_RUNTIME")).join(format!("libhomenode_{name}.so"))
}
