//! Runs cargo as a child process, and reads its metadata of the workspace.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::tally::Tally;

/// Returns the workspace that this program was built from.
pub fn root() -> &'static Path {
    let crate_dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_dir.parent().unwrap_or(crate_dir)
}

/// Returns a command of the cargo that runs us, to run in the workspace.
pub fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).args(arguments);
    // Cargo's variables for this program must not reach the cargo it starts: build scripts that depend on them, such as
    // ring's, would run again, and everything that needs them would be rebuilt.
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

/// The output of `cargo metadata`.
#[derive(Debug, Deserialize)]
pub struct Metadata {
    /// The members of the workspace.
    pub packages: Vec<Package>,
    /// The target directory.
    pub target_directory: PathBuf,
    /// The workspace.
    pub workspace_root: PathBuf,
}

/// A member of the workspace.
#[derive(Debug, Deserialize)]
pub struct Package {
    /// The name in `[package]`.
    pub name: String,
    /// Its Cargo.toml.
    pub manifest_path: PathBuf,
    /// Dependencies of all kinds.
    pub dependencies: Vec<Dependency>,
    /// Its own features, and those that each enables.
    #[serde(default)]
    pub features: BTreeMap<String, Vec<String>>,
}

/// A dependency of a package.
#[derive(Debug, Deserialize)]
pub struct Dependency {
    /// The name of the package, regardless of renaming.
    pub name: String,
    /// The kind; `None` for a normal dependency.
    pub kind: Option<DependencyKind>,
    /// The features that are asked of it.
    #[serde(default)]
    pub features: Vec<String>,
}

/// Kinds of dependencies outside of the code that ships.
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
    told(&mut cargo(&["metadata", "--format-version=1", "--no-deps"]))
}

/// Runs `cargo metadata` and reads what it prints.
fn told<T: serde::de::DeserializeOwned>(command: &mut Command) -> anyhow::Result<T> {
    let output = command.output().context("cannot start cargo")?;
    ensure!(
        output.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&output.stderr).trim_end()
    );
    serde_json::from_slice(&output.stdout).context("cannot read what cargo metadata says")
}

/// A package that the workspace is built with.
#[derive(Debug, Clone, Deserialize)]
pub struct Licensed {
    /// Its name.
    pub name: String,
    /// Its licence, in SPDX's terms; `None` if it says none.
    pub license: Option<String>,
    /// Where it comes from; `None` for a member of the workspace.
    pub source: Option<String>,
}

/// Asks cargo about all packages from elsewhere that the workspace is built with on Linux.
pub fn packages() -> anyhow::Result<Vec<Licensed>> {
    #[derive(Deserialize)]
    struct Found {
        packages: Vec<Licensed>,
    }
    let platform = "--filter-platform=x86_64-unknown-linux-gnu";
    let found: Found = told(&mut cargo(&["metadata", "--format-version=1", platform]))?;
    let is_foreign = |package: &Licensed| package.source.is_some();
    Ok(found.packages.into_iter().filter(is_foreign).collect())
}

/// Runs a command; its success counts as one check.
pub fn succeeds(command: &mut Command) -> anyhow::Result<Tally> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    Ok(Tally::of(status.success()))
}

/// Which programs to build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Build {
    /// As shipped. Builds the whole workspace: a single package has other features, and would be rebuilt with everything it
    /// needs.
    Programs,
    /// With the features that tests request, to reuse an earlier build of the tests: two minutes.
    BesideTests,
}

/// Builds the programs.
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
