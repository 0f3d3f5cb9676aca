//! Fuzzes each target of `fuzz/` for a limited time. The targets are built with the pinned nightly and a pinned cargo-fuzz.
//!
//! The inputs that fuzzing finds stay in the target directory, and later runs start from them. The committed inputs in
//! `fuzz/corpus/TARGET` are only read. No sanitizer is used: the code has hardly any `unsafe`, and the memory limit should
//! apply to the parsers only.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, bail, ensure};

use crate::cargo::{cargo, metadata, root};
use crate::nightly;
use crate::tally::Tally;

/// Version of cargo-fuzz. Updated by hand, like the nightly.
const CARGO_FUZZ: &str = "0.13.2";
/// Memory limit of a target.
const MEMORY_MIB: u32 = 256;
/// Time limit for one input.
const INPUT_SECONDS: u32 = 1;
/// Maximum length of an input.
const INPUT_BYTES: u32 = 16 << 10;

/// Options of `fuzz`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct FuzzArgs {
    /// How long each target runs
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    seconds: u32,
    /// Give each target this number of inputs, however long that takes, instead of a time
    #[arg(long, conflicts_with = "seconds", value_parser = clap::value_parser!(u32).range(1..))]
    inputs: Option<u32>,
    /// Targets [default: all]
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
}

/// Runs the targets one after the other. Each target counts as one check.
pub(crate) fn run(args: &FuzzArgs) -> anyhow::Result<Tally> {
    let all = targets()?;
    if let Some(unknown) = args.targets.iter().find(|name| !all.contains(name)) {
        bail!("no target is named {unknown}; there are: {}", all.join(", "));
    }
    let chosen = if args.targets.is_empty() {
        &all
    } else {
        &args.targets
    };
    let place = metadata()?.target_directory.join("fuzz");
    nightly::install(&[])?;
    let tools = install(&place)?;
    for name in chosen {
        build(&place, &tools, name)?;
    }
    let mut tally = Tally::default();
    for name in chosen {
        let (limit, said) = match args.inputs {
            Some(inputs) => (format!("-runs={inputs}"), format!("{inputs} inputs")),
            None => (
                format!("-max_total_time={}", args.seconds),
                format!("{} s", args.seconds),
            ),
        };
        println!("\n-- {name}: {said}");
        tally = tally + fuzz(&place, name, &limit)?;
    }
    Ok(tally)
}

/// Returns the names of all targets.
fn targets() -> anyhow::Result<Vec<String>> {
    let folder = root().join("fuzz/fuzz_targets");
    let entries = fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let mut names = Vec::new();
    for entry in entries {
        let path = entry?.path();
        names.extend(path.file_stem().map(|stem| stem.to_string_lossy().into_owned()));
    }
    names.sort();
    Ok(names)
}

/// Installs cargo-fuzz if it is missing, and returns its path.
fn install(place: &Path) -> anyhow::Result<PathBuf> {
    let tools = place.join("tools");
    let program = tools.join("bin/cargo-fuzz");
    let version = Command::new(&program).args(["fuzz", "--version"]).output();
    let is_there = version.is_ok_and(|said| {
        let said = String::from_utf8_lossy(&said.stdout).into_owned();
        said.split_whitespace().any(|word| word == CARGO_FUZZ)
    });
    if !is_there {
        let status = cargo(&[
            "install",
            "--locked",
            "--force",
            "--version",
            CARGO_FUZZ,
            "--root",
        ])
        .arg(&tools)
        .arg("cargo-fuzz")
        .status()
        .context("cannot start cargo")?;
        ensure!(status.success(), "cargo-fuzz could not be installed: see above");
    }
    Ok(tools.join("bin"))
}

fn build(place: &Path, tools: &Path, name: &str) -> anyhow::Result<()> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths(std::iter::once(tools.to_owned()).chain(std::env::split_paths(&path)))?;
    let status = nightly::cargo(&["fuzz", "build", "--sanitizer", "none", "--target-dir"])
        .arg(place)
        .arg(name)
        .current_dir(root().join("fuzz"))
        .env("PATH", path)
        .status()
        .context("cannot start rustup")?;
    ensure!(status.success(), "target {name} does not build: see above");
    Ok(())
}

/// How many times a target is run if it fails only because the machine is busy.
const TRIES: u32 = 3;

/// Runs one target. The inputs that it finds stay in the target directory.
fn fuzz(place: &Path, name: &str, limit: &str) -> anyhow::Result<Tally> {
    let found = place.join("corpus").join(name);
    let broken = place.join("artifacts").join(name);
    for folder in [&found, &broken] {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    }
    let program = program(place, name)?;
    for _ in 0..TRIES {
        let before = files(&broken)?;
        let mut command = limited(&program);
        let status = command
            .args([&found, &root().join("fuzz/corpus").join(name)])
            .arg(format!("-artifact_prefix={}/", broken.display()))
            .arg(limit)
            .arg(format!("-max_len={INPUT_BYTES}"))
            .args(["-print_final_stats=1", "-verbosity=0"])
            .status()
            .with_context(|| format!("cannot start {}", program.display()))?;
        if status.success() {
            return Ok(Tally::PASSED);
        }
        let new: Vec<PathBuf> = files(&broken)?
            .into_iter()
            .filter(|file| !before.contains(file))
            .collect();
        if new.is_empty() || !new.iter().all(|input| is_fast_alone(&program, input)) {
            break;
        }
        println!("{name}: an input took long once and does not alone: the machine was busy, once more");
    }
    println!("{name} failed; what broke it lies in {}", broken.display());
    println!("again: {} FILE", program.display());
    Ok(Tally::FAILED)
}

/// Returns a command that runs a target with the limits on memory and time.
fn limited(program: &Path) -> Command {
    let mut command = Command::new(program);
    command
        .arg(format!("-rss_limit_mb={MEMORY_MIB}"))
        .arg(format!("-timeout={INPUT_SECONDS}"));
    command
}

/// Whether an input that timed out ends in time when it runs alone. The limit is wall time, so a busy machine can exceed it.
fn is_fast_alone(program: &Path, input: &Path) -> bool {
    let is_of_time = input
        .file_name()
        .is_some_and(|name| name.to_string_lossy().starts_with("timeout-"));
    is_of_time
        && limited(program)
            .arg(input)
            .status()
            .is_ok_and(|status| status.success())
}

fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    entries.map(|entry| Ok(entry?.path())).collect()
}

/// Returns the path of a target's program. cargo-fuzz puts it into a folder named after the host's triple.
fn program(place: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let mut folders = fs::read_dir(place).with_context(|| format!("cannot list {}", place.display()))?;
    let program = folders.find_map(|folder| {
        let program = folder.ok()?.path().join("release").join(name);
        program.is_file().then_some(program)
    });
    program.with_context(|| format!("cargo-fuzz left no program {name} in {}", place.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_target_has_seeds_and_is_in_the_manifest() {
        let manifest = fs::read_to_string(root().join("fuzz/Cargo.toml")).expect("a manifest");
        let names = targets().expect("targets");
        assert!(!names.is_empty());
        for name in &names {
            assert!(
                manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")),
                "{name}"
            );
            let seeds = fs::read_dir(root().join("fuzz/corpus").join(name));
            assert!(
                seeds.is_ok_and(|mut seeds| seeds.next().is_some()),
                "{name} has no seeds"
            );
        }
        let bins = manifest.matches("[[bin]]").count();
        assert_eq!(bins, names.len(), "a target without a file");
    }

    #[test]
    fn lints_and_toolchain_are_the_workspaces() {
        let read = |path: &str| fs::read_to_string(root().join(path)).expect("a manifest");
        let (main, own) = (read("Cargo.toml"), read("fuzz/Cargo.toml"));
        let part = |text: &str, begin: &str, end: &str| {
            let (_, rest) = text.split_once(begin).expect(begin);
            rest.split_once(end)
                .expect(end)
                .0
                .replace("workspace.", "")
                .trim()
                .to_owned()
        };
        assert_eq!(
            part(&own, "[lints.rust]", "[profile"),
            part(&main, "[workspace.lints.rust]", "[profile")
        );
        for line in ["edition", "rust-version", "license"] {
            let of = |text: &str| {
                text.lines()
                    .find(|each| each.starts_with(line))
                    .map(str::to_owned)
            };
            assert_eq!(of(&own), of(&main), "{line}");
        }
    }
}
