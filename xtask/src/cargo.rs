//! Runs cargo as a child process, and reads the workspace's metadata from it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::tally::Tally;

/// Returns the workspace that this program was built from.
pub(crate) fn root() -> &'static Path {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir)
}

/// Returns a command that runs, in the workspace, the cargo that started this program.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
    // Cargo's variables for this program must not reach the cargo that it starts. Build scripts that depend on them, such as
    // ring's, would run again, and their dependents would be rebuilt.
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

/// The part of `cargo metadata`'s output that is read here.
#[derive(Debug, Deserialize)]
pub(crate) struct Metadata {
    /// The members of the workspace.
    pub packages: Vec<Package>,
    /// The target directory.
    pub target_directory: PathBuf,
    /// The workspace.
    pub workspace_root: PathBuf,
}

/// A member of the workspace.
#[derive(Debug, Deserialize)]
pub(crate) struct Package {
    /// The name in `[package]`.
    pub name: String,
    /// Path of the package's Cargo.toml.
    pub manifest_path: PathBuf,
    /// Dependencies of all kinds.
    pub dependencies: Vec<Dependency>,
    /// The package's own features, and the features that each of them enables.
    #[serde(default)]
    pub features: BTreeMap<String, Vec<String>>,
}

/// A dependency of a package.
#[derive(Debug, Deserialize)]
pub(crate) struct Dependency {
    /// The name of the package, regardless of renaming.
    pub name: String,
    /// The kind of the dependency; `None` for a normal one.
    pub kind: Option<DependencyKind>,
    /// The features that the package requests of this dependency.
    #[serde(default)]
    pub features: Vec<String>,
}

/// The kinds of dependency that do not become part of the shipped code.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DependencyKind {
    /// Tests and benches only.
    Dev,
    /// The build script only.
    Build,
}

/// Asks cargo about the workspace.
pub(crate) fn metadata() -> anyhow::Result<Metadata> {
    told(&mut cargo(&["metadata", "--format-version=1", "--no-deps"]))
}

/// Runs `cargo metadata` and parses its output.
fn told<T: serde::de::DeserializeOwned>(command: &mut Command) -> anyhow::Result<T> {
    let output = command.output().context("cannot start cargo")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    serde_json::from_slice(&output.stdout).context("cannot parse the output of cargo metadata")
}

/// A package that the workspace is built with, and its licence.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Licensed {
    /// The package's name.
    pub name: String,
    /// The package's licence, as an SPDX expression; `None` if its manifest states none.
    pub license: Option<String>,
    /// Where the package comes from; `None` for a member of the workspace.
    pub source: Option<String>,
}

/// Returns all packages from outside the workspace with which the workspace is built on Linux.
pub(crate) fn packages() -> anyhow::Result<Vec<Licensed>> {
    #[derive(Deserialize)]
    struct Found {
        packages: Vec<Licensed>,
    }
    let platform = "--filter-platform=x86_64-unknown-linux-gnu";
    let found: Found = told(&mut cargo(&["metadata", "--format-version=1", platform]))?;
    let is_foreign = |package: &Licensed| package.source.is_some();
    Ok(found.packages.into_iter().filter(is_foreign).collect())
}

/// Runs a command, and counts it as one check: passed if the command succeeds.
pub(crate) fn succeeds(command: &mut Command) -> anyhow::Result<Tally> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    Ok(Tally::of(status.success()))
}

/// Which programs to build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Build {
    /// The programs with their shipped features. This builds the whole workspace, because a package built alone gets other
    /// features, and its dependencies would be rebuilt.
    Programs,
    /// The programs with the features that the tests request. Reuses an earlier build of the tests, which saves two minutes.
    BesideTests,
}

/// Builds the programs.
///
/// # Errors
/// A program does not build.
pub(crate) fn build(what: Build) -> anyhow::Result<()> {
    let mut command = cargo(&["build", "--workspace"]);
    if what == Build::BesideTests {
        command.args(["--lib", "--bins", "--tests", "--test", "peers"]);
    }
    let all = succeeds(&mut command)?;
    ensure!(all.failed == 0, "the programs do not build: see above");
    Ok(())
}
