//! Runs the case of the kernel module with any kernel: image, its headers, a directory for what is built.
#![allow(clippy::print_stdout, reason = "printing is what this program is for")]

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use homenode_testbed::cases::topology;
use homenode_testbed::outside::topology_guest::TestKernel;

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1).map(PathBuf::from);
    let mut next = || arguments.next().context("usage: topology IMAGE HEADERS DIR");
    let kernel = TestKernel {
        image: next()?,
        headers: next()?,
    };
    let dir = next()?;
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("a workspace")?;
    topology::module(workspace, &kernel, &dir, |_| Ok(()), |text| println!("{text}"))
}
