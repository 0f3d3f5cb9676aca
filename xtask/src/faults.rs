//! Runs the agent against a model of a host that lies and fails (`crates/faults`), by seed, and shows how soon planted defects
//! are found.
//!
//! A planted defect is a patch of the product in `data/faults/mutants`. It is applied to a copy of the sources in the target
//! directory, so that no build of the product can contain it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context as _, bail, ensure};

use crate::cargo::{cargo, metadata, root};
use crate::tally::Tally;

/// Options of `faults`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FaultsArgs {
    /// The seeds to run
    #[arg(long, value_name = "FIRST..LAST", default_value = "0..10000")]
    seeds: String,
    /// Plant the defects of data/faults/mutants one by one, and count the seeds until each is found
    #[arg(long)]
    mutants: bool,
    /// Defects to plant [default: all]
    #[arg(value_name = "DEFECT", requires = "mutants")]
    names: Vec<String>,
}

const MUTANTS: &str = "data/faults/mutants";

/// Runs the seeds, or plants the defects.
pub(crate) fn run(args: &FaultsArgs) -> anyhow::Result<Tally> {
    if args.mutants {
        return plant(args);
    }
    let mut command = test(root());
    let status = command
        .args(["--seeds", &args.seeds])
        .status()
        .context("cannot run cargo")?;
    Ok(Tally::of(status.success()))
}

/// Runs the test program of `crates/faults` in a source tree.
fn test(sources: &Path) -> Command {
    let mut command = cargo(&[
        "test",
        "--quiet",
        "--package",
        "homenode-faults",
        "--test",
        "faults",
        "--",
    ]);
    command.current_dir(sources);
    command
}

/// Plants each defect, and prints how many seeds ran until it was found.
fn plant(args: &FaultsArgs) -> anyhow::Result<Tally> {
    let chosen = chosen(&args.names)?;
    let place = metadata()?.target_directory.join("faults-mutants");
    let sources = place.join("sources");
    copy(&sources)?;
    let mut tally = Tally::default();
    for (name, patch) in chosen {
        apply(&sources, &patch, &[])?;
        let begun = Instant::now();
        let mut command = test(&sources);
        command.env("CARGO_TARGET_DIR", place.join("target"));
        let output = command
            .args(["--seeds", &args.seeds, "--first"])
            .output()
            .context("cannot run cargo")?;
        apply(&sources, &patch, &["--reverse"])?;
        let text = String::from_utf8_lossy(&output.stdout);
        let found = text.lines().find(|line| line.contains("the first is"));
        let is_built = text.lines().any(|line| line.contains("seeds from"));
        ensure!(
            is_built,
            "{name} does not build:\n{}",
            String::from_utf8_lossy(&output.stderr)
        );
        let minutes = begun.elapsed().as_secs_f64() / 60.0;
        println!("{name:<44} {} ({minutes:.1} min)", found.unwrap_or("NOT FOUND"));
        tally = tally + Tally::of(found.is_some());
    }
    Ok(tally)
}

/// Returns the patches with these names, or all.
fn chosen(names: &[String]) -> anyhow::Result<Vec<(String, PathBuf)>> {
    let folder = root().join(MUTANTS);
    let mut all = Vec::new();
    for entry in fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))? {
        let path = entry?.path();
        if let Some(name) = path
            .file_stem()
            .filter(|_| path.extension().is_some_and(|end| end == "patch"))
        {
            all.push((name.to_string_lossy().into_owned(), path.clone()));
        }
    }
    all.sort();
    if let Some(unknown) = names
        .iter()
        .find(|name| all.iter().all(|(known, _)| known != *name))
    {
        bail!("{MUTANTS} has no {unknown}.patch");
    }
    all.retain(|(name, _)| names.is_empty() || names.contains(name));
    Ok(all)
}

/// Copies the files that git knows, as they are now. A file that is alike keeps its time, so that it is not built again.
fn copy(sources: &Path) -> anyhow::Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    let listed = listed.context("cannot run git")?;
    for name in String::from_utf8_lossy(&listed.stdout).lines() {
        let (from, to) = (root().join(name), sources.join(name));
        let Ok(new) = fs::read(&from) else { continue };
        if fs::read(&to).is_ok_and(|old| old == new) {
            continue;
        }
        fs::create_dir_all(to.parent().context("a file in a folder")?)?;
        fs::write(&to, new).with_context(|| format!("cannot write {}", to.display()))?;
    }
    Ok(())
}

fn apply(sources: &Path, patch: &Path, flags: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new("patch");
    command
        .args(["--strip=1", "--batch", "--forward", "--input"])
        .arg(patch)
        .args(flags);
    let output = command
        .current_dir(sources)
        .output()
        .context("cannot run patch")?;
    let said = String::from_utf8_lossy(&output.stdout);
    ensure!(
        output.status.success(),
        "{} does not apply any more: {said}",
        patch.display()
    );
    Ok(())
}
