//! Cargo as a child process, and what it says about the workspace.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

/// The workspace, where this program was built from.
pub fn root() -> &'static Path {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir)
}

/// The cargo that runs us, to run in the workspace.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
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
