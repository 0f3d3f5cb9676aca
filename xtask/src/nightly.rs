//! The pinned nightly toolchain, for what stable has not: Miri. Nothing that ships is built with it.

use std::process::Command;

use anyhow::{Context as _, ensure};

/// Which one. A newer one is taken by hand, and the checks that use it are run then.
const TOOLCHAIN: &str = "nightly-2026-10-15";

/// Installs it with these components, unless it is there.
pub fn install(components: &[&str]) -> anyhow::Result<()> {
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

/// Its cargo.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", TOOLCHAIN, "cargo"]).args(arguments);
    // What the outer cargo says of itself is not for this one.
    for variable in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "RUSTFLAGS"] {
        command.env_remove(variable);
    }
    command
}
