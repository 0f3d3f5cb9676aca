//! Locates the libraries of `guest/runtime`, which are built with this crate. The crate's tests run the libraries on this
//! machine, without a guest.

use std::path::{Path, PathBuf};

/// Returns the path of a library of `guest/runtime`, such as `hotspot` for `libhomenode_hotspot.so`.
pub fn library(name: &str) -> PathBuf {
    Path::new(env!("HOMENODE_GUEST_RUNTIME")).join(format!("libhomenode_{name}.so"))
}
