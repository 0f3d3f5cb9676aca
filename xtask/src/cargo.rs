//! Cargo as a child process, and what it says about the workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::tally::Tally;

/// The workspace, where this program was built from.
pub fn root() -> &'static Path {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir)
}

/// The cargo that runs us, to run in the workspace.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
    // What cargo tells this program of itself is not for the cargo that it starts: build scripts that look at it, as ring's,
    // would run again, and all that needs them would be built again.
    let of_this = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_CRATE_", "CARGO_BIN_"];
    for (name, _) in std::env::vars_os() {
        if of_this
            .iter()
            .any(|prefix| name.to_string_lossy().starts_with(prefix))
        {
            command.env_remove(name);
        }
    }
    command
}

/// What `cargo metadata` says.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    /// The members of the workspace.
    pub packages: Vec<Package>,
    /// Where everything is built.
    pub target_directory: PathBuf,
    /// The workspace.
    pub workspace_root: PathBuf,
}

/// A member of the workspace.
#[derive(Debug, Deserialize)]
pub struct Package {
    /// As in `[package]`.
    pub name: String,
    /// Its Cargo.toml.
    pub manifest_path: PathBuf,
    /// Of all kinds.
    pub dependencies: Vec<Dependency>,
}

/// What a package depends on.
#[derive(Debug, Deserialize)]
pub struct Dependency {
    /// The name of the package, whatever it is renamed to.
    pub name: String,
    /// `None` is a normal one.
    pub kind: Option<DependencyKind>,
}

/// When a dependency is not for the code that ships.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DependencyKind {
    /// Tests and benches only.
    Dev,
    /// The build script only.
    Build,
}

/// Asks cargo about the workspace.
pub fn metadata() -> anyhow::Result<Metadata> {
    let output = cargo(&["metadata", "--format-version=1", "--no-deps"])
        .output()
        .context("cannot start cargo")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    serde_json::from_slice(&output.stdout).context("cannot read what cargo metadata says")
}

/// Whether a command succeeds, as one check.
///
/// # Errors
/// It cannot be started.
pub fn succeeds(command: &mut Command) -> anyhow::Result<Tally> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    Ok(Tally::of(status.success()))
}

/// Which programs to build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// As they are used. The whole workspace: a package alone has other features, and would be built anew with all that it needs.
    Programs,
    /// With the features that tests ask for, so that nothing is built twice where the tests were built before: two minutes.
    BesideTests,
}

/// Builds them.
///
/// # Errors
/// They do not build.
pub fn build(what: Build) -> anyhow::Result<()> {
    let mut command = cargo(&["build", "--workspace"]);
    if what == Build::BesideTests {
        command.args(["--lib", "--bins", "--tests", "--test", "peers"]);
    }
    let all = succeeds(&mut command)?;
    ensure!(all.failed == 0, "the programs do not build: see above");
    Ok(())
}
