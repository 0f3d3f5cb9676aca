//! The pinned nightly toolchain, for tools that stable lacks, such as Miri. No shipped program is built with it.

use std::process::Command;

use anyhow::{Context as _, ensure};

/// The version of the toolchain. Update it by hand, and run the checks that use it.
const TOOLCHAIN: &str = "nightly-2026-10-15";

/// Installs the toolchain with these components if it is missing.
pub(crate) fn install(components: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new("rustup");
    command.args([
        "toolchain",
        "install",
        TOOLCHAIN,
        "--profile",
        "minimal",
        "--no-self-update",
    ]);
    components.iter().for_each(|component| {
        command.args(["--component", component]);
    });
    let status = command
        .status()
        .context("cannot start rustup, which installs the pinned nightly: see https://rustup.rs")?;
    ensure!(
        status.success(),
        "rustup could not install {TOOLCHAIN}: see above"
    );
    Ok(())
}

/// Returns a command that runs the toolchain's cargo.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", TOOLCHAIN, "cargo"]).args(arguments);
    // The variables of the cargo that runs this program do not apply to the toolchain's cargo.
    for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"] {
        command.env_remove(variable);
    }
    command
}
