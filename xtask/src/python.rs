//! Tests the Python package.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::cargo::{Build, build, metadata, root, succeeds};
use crate::tally::{Tally, counts};

/// Runs the package's tests with the library that the other tests have already built. `make wheel` builds the published wheel,
/// and runs the same tests on it.
pub(crate) fn package() -> anyhow::Result<Tally> {
    let (target, python) = environment()?;
    let site = installed(&target)?;
    pytest(&python, &target.join("debug/homenode"), Some(&site))
}

/// Returns a function that creates Python commands. They find the package and all requirements of tests and notebooks, and
/// have the programs in PATH.
///
/// # Errors
/// A build or an installation fails.
pub(crate) fn with_package() -> anyhow::Result<impl Fn() -> Command> {
    let (target, python) = environment()?;
    let site = installed(&target)?;
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let programs = [target.join("debug"), target.join("python/venv/bin")].into_iter();
    let path = std::env::join_paths(programs.chain(std::env::split_paths(&paths))).context("PATH")?;
    Ok(move || {
        let mut command = Command::new(&python);
        command.env("PYTHONPATH", &site).env("PATH", &path);
        command
    })
}

/// Installs the package with the unoptimised library, and returns the path.
fn installed(target: &Path) -> anyhow::Result<PathBuf> {
    let site = target.join("python/site");
    install(&target.join("debug/lib_native.so"), &site.join("homenode"))?;
    Ok(site)
}

/// Builds the programs; returns the target directory and the path of a Python that has all requirements of the tests.
fn environment() -> anyhow::Result<(PathBuf, PathBuf)> {
    build(Build::BesideTests)?;
    let target = metadata()?.target_directory;
    let made = succeeds(&mut Command::new(root().join("scripts/python-setup.sh")))?;
    ensure!(
        made.failed == 0,
        "the environment of the Python tests cannot be created: see above"
    );
    let python = target.join("python/venv/bin/python");
    Ok((target, python))
}

/// Copies the package's Python files and the library into the folder from which Python imports them.
fn install(library: &Path, package: &Path) -> anyhow::Result<()> {
    if package.exists() {
        fs::remove_dir_all(package).with_context(|| format!("cannot remove {}", package.display()))?;
    }
    fs::create_dir_all(package).with_context(|| format!("cannot create {}", package.display()))?;
    let copy = |from: &Path, name: &str| {
        fs::copy(from, package.join(name)).with_context(|| format!("cannot copy {}", from.display()))
    };
    for entry in fs::read_dir(root().join("python/homenode")).context("cannot read python/homenode")? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            copy(&entry.path(), &entry.file_name().to_string_lossy())?;
        }
    }
    copy(library, "_native.abi3.so").map(drop)
}

/// Runs the tests, and counts them using pytest's report.
fn pytest(python: &Path, command: &Path, site: Option<&Path>) -> anyhow::Result<Tally> {
    let report = std::env::temp_dir().join(format!("homenode-pytest-{}.xml", std::process::id()));
    let mut tests = Command::new(python);
    tests
        .args(["-m", "pytest", "--durations=5", "-p", "no:cacheprovider"])
        .arg(root().join("python/tests"))
        .arg(format!("--junitxml={}", report.display()))
        .env("HOMENODE", command)
        // Keeps Python from writing compiled files next to the sources.
        .env("PYTHONDONTWRITEBYTECODE", "1");
    if let Some(site) = site {
        tests.env("PYTHONPATH", site);
    }
    let run = succeeds(&mut tests)?;
    let written = fs::read_to_string(&report);
    fs::remove_file(&report).ok();
    let counted = written
        .ok()
        .and_then(|text| counted(&text))
        .unwrap_or(Tally::FAILED);
    Ok(if run.failed > 0 && counted.failed == 0 {
        counted + Tally::FAILED
    } else {
        counted
    })
}

/// Returns the first counts in a report, which are those of all tests.
fn counted(report: &str) -> Option<Tally> {
    let count = |name: &str| -> Option<u64> {
        let (_, rest) = report.split_once(&format!(" {name}=\""))?;
        rest.split_once('"')?.0.parse().ok()
    };
    let (all, skipped) = (count("tests")?, count("skipped")?);
    let failed = count("failures")? + count("errors")?;
    Some(Tally {
        passed: all.saturating_sub(failed + skipped),
        failed,
        skipped,
    })
}

/// Builds the wheel, and runs the same tests on it. Then runs the tutorial in a new environment, as a reader would.
pub(crate) fn wheel() -> anyhow::Result<Tally> {
    let (target, python) = environment()?;
    let wheels = target.join("wheels");
    let mut pip = Command::new(&python);
    pip.args(["-m", "pip", "wheel", "--no-deps", "--wheel-dir"])
        .arg(&wheels)
        .arg(root().join("python"));
    let built = succeeds(&mut pip)?;
    ensure!(built.failed == 0, "the wheel does not build: see above");
    let mut pip = Command::new(&python);
    pip.args([
        "-m",
        "pip",
        "install",
        "--no-index",
        "--force-reinstall",
        "--find-links",
    ])
    .arg(&wheels)
    .arg("homenode");
    let installed = succeeds(&mut pip)?;
    let tested = pytest(&python, &target.join("debug/homenode"), None);
    let mut pip = Command::new(&python);
    succeeds(pip.args(["-m", "pip", "uninstall", "--yes", "homenode"]))?;
    Ok(installed + tested? + tutorial(&target, &wheels)?)
}

/// Creates an environment with the tutorial's requirements, and runs the tutorial in it.
fn tutorial(target: &Path, wheels: &Path) -> anyhow::Result<Tally> {
    let new = target.join("python/new");
    if new.exists() {
        fs::remove_dir_all(&new).with_context(|| format!("cannot remove {}", new.display()))?;
    }
    let made = succeeds(Command::new("python3").args(["-m", "venv"]).arg(&new))?;
    ensure!(
        made.failed == 0,
        "python3 cannot create an environment: see above"
    );
    let python = new.join("bin/python");
    let pip = |args: &[&str]| {
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "install", "--quiet"]).args(args);
        pip
    };
    // `--no-index`, because the index may have another package of the same name.
    let own = succeeds(pip(&["--no-index", "homenode", "--find-links"]).arg(wheels))?;
    let others = succeeds(&mut pip(&["matplotlib"]))?;
    ensure!(
        own.failed + others.failed == 0,
        "the packages that the tutorial needs cannot be installed: see above"
    );
    let mut commands = Command::new(&python);
    commands
        .arg(root().join("scripts/site-commands.py"))
        .arg(target.join("debug/homenode"));
    Ok(own + others + counts(&mut commands)?)
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn tests_are_counted_by_the_report() {
        let report = r#"<testsuites name="pytest tests"><testsuite name="pytest" errors="1" failures="2" skipped="3" tests="10">"#;
        let tally = counted(report).expect("counts");
        assert_eq!((tally.passed, tally.failed, tally.skipped), (4, 3, 3));
        assert!(counted("<testsuites>").is_none());
    }
}
