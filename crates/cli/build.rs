//! Puts the commit into the binary: seed and commit together identify a run.

use std::process::Command;

fn main() {
    let git = |args: &[&str]| {
        Command::new("git")
            .args(args)
            .output()
            .ok()
            .filter(|out| out.status.success())
    };
    // Builds without the repository, such as those of packages, pass the commit in this variable.
    let told = std::env::var("HOMENODE_COMMIT").ok();
    let found = || {
        let said = git(&["describe", "--always", "--dirty", "--abbrev=12"])?;
        let said = String::from_utf8(said.stdout).ok()?;
        Some(said.trim().to_owned())
    };
    let commit = told.or_else(found).unwrap_or_else(|| "unknown".to_owned());
    println!("cargo:rerun-if-env-changed=HOMENODE_COMMIT");
    println!("cargo:rustc-env=HOMENODE_COMMIT={commit}");
    // Asks git where these files are, since a worktree keeps them elsewhere, and cargo takes a missing file as changed.
    let directory = git(&["rev-parse", "--absolute-git-dir"]);
    let directory = directory.and_then(|said| String::from_utf8(said.stdout).ok());
    if let Some(directory) = directory.as_deref().map(str::trim) {
        println!("cargo:rerun-if-changed={directory}/HEAD");
        println!("cargo:rerun-if-changed={directory}/index");
    }
}
