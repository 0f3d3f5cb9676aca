//! The steps of a check: each runs one tool or suite, and counts the checks that passed.

use std::io::{BufRead as _, BufReader, IsTerminal as _, stdout};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use crate::cargo::{Build, build, cargo, metadata, root, succeeds};
use crate::faults::{self, FaultsArgs};
use crate::fuzz::{self, FuzzArgs};
use crate::nightly;
use crate::passed::Rerun;
use crate::python;
use crate::reproduction::{self, ReproductionArgs};
use crate::rules;
use crate::tally::{Tally, TestOutput, counts};
use crate::testbed;

/// Options of `decisions`.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct DecisionsArgs {
    /// Number of seeds of each case, counted from 1
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Sweep one machine only, without VMs that run alone: for a quick look, not to commit
    #[arg(long)]
    quick: bool,
    /// Run held-out cases first, which follow from the id of the last commit that changed the policies, and add the result to the
    /// list
    #[arg(long)]
    held_out: bool,
}

/// A step to run.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// Formatting.
    Fmt,
    /// Clippy.
    Clippy,
    /// House rules.
    Rules,
    /// Tests.
    Test,
    /// Documentation.
    Doc,
    /// Shared memory under Miri.
    Miri,
    /// The regenerated schemas in `data/schema`.
    Schema,
    /// Comparison of the simulator with the access-level reference.
    Validate,
    /// The documents of published claims.
    Reproduction(ReproductionArgs, Rerun),
    /// The scoreboard of decisions.
    Decisions(DecisionsArgs),
    /// Fuzzing of all parsers of untrusted input.
    Fuzz(FuzzArgs),
    /// The agent against a model of a host, by seed.
    Faults(FaultsArgs),
    /// The Python package.
    Python,
    /// The Python package, built as it is published.
    Wheel,
    /// The HTTP interface, queried by external programs.
    Http,
    /// The agent's page, in a browser.
    Page,
    /// Fleet schedulers that query agents.
    Integrations,
    /// Sweeps, on external engines.
    Sweeps,
    /// The notebooks, the documentation's site, and the commands in it.
    Site,
    /// The testbed's cases or groups with these names; without names the default ones.
    Testbed(Vec<String>, Rerun),
    /// The testbed's cases on an emulated Xen host.
    Xen(Rerun),
}

/// Scripts that install the requirements of an emulated host, and in addition those of a Xen host.
const XEN_SETUP: [&str; 2] = ["scripts/testbed-setup.sh", "scripts/xen-setup.sh"];

impl Step {
    /// The steps of `cargo xtask check`. Those that are fast or often fail come first.
    pub(crate) const CHECK: [Self; 7] = [
        Self::Fmt,
        Self::Rules,
        Self::Clippy,
        Self::Test,
        Self::Python,
        Self::Doc,
        Self::Miri,
    ];

    /// Returns the steps of CI: the check, then the suites that need external programs.
    pub(crate) fn ci(rerun: Rerun) -> Vec<Self> {
        let mut steps = Self::CHECK.to_vec();
        steps.extend([
            Self::Http,
            Self::Integrations,
            Self::Page,
            Self::Sweeps,
            Self::Site,
            Self::Testbed(Vec::new(), rerun),
            Self::Xen(rerun),
            Self::Reproduction(ReproductionArgs::default(), rerun),
        ]);
        steps
    }

    /// Returns the step's name on the command line, and a short description.
    fn words(&self) -> (&'static str, &'static str) {
        match self {
            Self::Fmt => ("fmt", "is everything formatted? ('cargo fmt' repairs it)"),
            Self::Clippy => (
                "clippy",
                "clippy over all crates, tests, benches and fuzz targets, warnings denied",
            ),
            Self::Rules => ("rules", "house rules, which clippy cannot see"),
            Self::Test => (
                "test",
                "unit, property, integration and documentation tests of all crates",
            ),
            Self::Doc => ("doc", "documentation of all crates, warnings denied"),
            Self::Miri => (
                "miri",
                "memory shared with guests and emulators, under other orders of threads and memory",
            ),
            Self::Schema => ("schema", "schemas of the files that people write, written again"),
            Self::Validate => (
                "validate",
                "the twin against the access-level reference, into docs/VALIDATION.md",
            ),
            Self::Reproduction(..) => (
                "reproduction",
                "is docs/REPRODUCTION.md what `homenode reproduce` writes?",
            ),
            Self::Decisions(..) => (
                "decisions",
                "all policies and the best known, into docs/DECISIONS.md",
            ),
            Self::Fuzz(..) => (
                "fuzz",
                "everything that reads what others wrote, fuzzed (a minute for each target)",
            ),
            Self::Faults(..) => ("faults", "the agent on a host that lies and fails, by seed"),
            Self::Python => (
                "python",
                "the Python package: tables, types, threads, and the command's numbers and sentences",
            ),
            Self::Wheel => (
                "wheel",
                "the Python package built as a wheel, installed and tested",
            ),
            Self::Http => (
                "http",
                "what Prometheus and schemathesis make of an agent's HTTP, and Perfetto of traces",
            ),
            Self::Integrations => (
                "integrations",
                "what schedulers of fleets make of agents' answers",
            ),
            Self::Page => ("page", "the page of an agent, as an operator uses it in Chromium"),
            Self::Sweeps => ("sweeps", "the same bytes of a sweep by Slurm as by threads"),
            Self::Site => (
                "site",
                "the notebooks, the documentation as a site, and the commands that it shows",
            ),
            Self::Testbed(..) => ("testbed", "real guests on an emulated 4-node host"),
            Self::Xen(..) => ("xen", "domains of a real Xen on an emulated 4-node host"),
        }
    }

    /// Returns the step's name on the command line.
    pub(crate) fn name(&self) -> &'static str {
        self.words().0
    }

    /// Returns a short description.
    pub(crate) fn about(&self) -> &'static str {
        self.words().1
    }

    /// Returns the step's time budget on two cores, including its share of building. A step that takes more than twice its
    /// budget fails. `None` if the user chooses how long it takes.
    pub(crate) fn budget(&self) -> Option<Duration> {
        let minutes = match self {
            Self::Schema | Self::Validate | Self::Decisions(_) | Self::Fuzz(_) | Self::Faults(_) => {
                return None;
            }
            Self::Fmt | Self::Rules | Self::Doc => 1,
            Self::Http | Self::Integrations | Self::Page | Self::Python | Self::Sweeps | Self::Site => 2,
            Self::Miri => 3,
            Self::Clippy => 4,
            Self::Wheel => 8,
            Self::Reproduction(..) => 11,
            Self::Xen(_) => 12,
            Self::Test => 22,
            Self::Testbed(..) => 45,
        };
        Some(Duration::from_secs(60 * minutes))
    }

    /// Returns the scripts that install the step's requirements.
    fn setup(&self) -> &'static [&'static str] {
        match self {
            Self::Python | Self::Wheel => &["scripts/python-setup.sh"],
            Self::Http => &["scripts/http-setup.sh"],
            Self::Integrations => &["scripts/integrations-setup.sh"],
            Self::Page => &["scripts/page-setup.sh"],
            Self::Sweeps => &["scripts/sweeps-setup.sh"],
            Self::Site => &["scripts/python-setup.sh", "scripts/site-setup.sh"],
            Self::Testbed(names, _) if names.iter().any(|name| name.starts_with("xen")) => &XEN_SETUP,
            Self::Testbed(..) => &XEN_SETUP[..1],
            Self::Xen(_) => &XEN_SETUP,
            _ => &[],
        }
    }

    /// Installs missing requirements, which does not count as the step's time.
    ///
    /// # Errors
    /// An installation failed; the script has printed why.
    pub(crate) fn set_up(&self) -> anyhow::Result<()> {
        for script in self.setup() {
            let done = succeeds(&mut Command::new(root().join(script)))?;
            ensure!(
                done.failed == 0,
                "{script} failed to install the packages of this step: see above"
            );
        }
        Ok(())
    }

    /// Runs the step.
    pub(crate) fn run(&self) -> anyhow::Result<Tally> {
        match self {
            Self::Fmt => fmt(),
            Self::Clippy => clippy(),
            Self::Rules => rules::run(),
            Self::Test => {
                // This step also builds what later steps require, so that it is built only once.
                build(Build::BesideTests)?;
                test(&["--workspace"])
            }
            Self::Doc => {
                succeeds(cargo(&["doc", "--workspace", "--no-deps"]).env("RUSTDOCFLAGS", "--deny warnings"))
            }
            Self::Miri => miri(),
            Self::Schema => succeeds(&mut cargo(&[
                "run",
                "--quiet",
                "--package",
                "homenode-twin",
                "--example",
                "schema",
            ])),
            Self::Validate => succeeds(&mut cargo(&[
                "run",
                "--package",
                "homenode-twin",
                "--example",
                "validation",
            ])),
            Self::Reproduction(args, rerun) => reproduction::run(args, *rerun),
            Self::Decisions(args) => decisions(args),
            Self::Fuzz(args) => fuzz::run(args),
            Self::Faults(args) => faults::run(args),
            Self::Python => python::package(),
            Self::Wheel => python::wheel(),
            Self::Http => peers(&["http_peers::", "perfetto::"]),
            Self::Integrations => integrations(),
            Self::Page => peers(&["page::"]),
            Self::Sweeps => peers(&["sweeps::"]),
            Self::Site => site(),
            Self::Testbed(names, rerun) => testbed::run(names, *rerun),
            Self::Xen(rerun) => testbed::run(&["xen".to_owned()], *rerun),
        }
    }
}

/// Checks the formatting of the workspace, and of the fuzz targets, which form a workspace of their own.
fn fmt() -> anyhow::Result<Tally> {
    let workspace = succeeds(&mut cargo(&["fmt", "--all", "--", "--check"]))?;
    let targets = ["fmt", "--manifest-path", "fuzz/Cargo.toml", "--", "--check"];
    Ok(workspace + succeeds(&mut cargo(&targets))?)
}

/// Runs clippy on the workspace and on the fuzz targets: a broken target would otherwise be noticed only by fuzzing.
fn clippy() -> anyhow::Result<Tally> {
    let denied = ["--", "--deny", "warnings"];
    let workspace = succeeds(cargo(&["clippy", "--workspace", "--all-targets"]).args(denied))?;
    let target = metadata()?.target_directory;
    let mut targets = cargo(&["clippy", "--manifest-path", "fuzz/Cargo.toml", "--bins"]);
    Ok(workspace + succeeds(targets.args(denied).env("CARGO_TARGET_DIR", target))?)
}

/// Runs `cargo test`, shows its output while it runs, and counts the tests in it.
fn test(which: &[&str]) -> anyhow::Result<Tally> {
    // Both outputs share a pipe, because cargo names a test program on standard error, and then the program prints its result to
    // standard output.
    let (reader, writer) = std::io::pipe().context("cannot make a pipe")?;
    let mut command = cargo(&["test", "--no-fail-fast"]);
    command.args(which);
    command.stderr(writer.try_clone()?).stdout(writer);
    if stdout().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    let mut child = command.spawn().context("cannot start cargo")?;
    drop(command); // and with it our copy of the writing end, so that reading ends when cargo does

    let mut output = TestOutput::default();
    for line in BufReader::new(reader).split(b'\n') {
        let line = line?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        output.line(&line);
    }
    Ok(output.end(child.wait()?.success()))
}

/// Runs the tests of these modules, which need external programs. It names the whole workspace, because a package built alone
/// gets other features, and its dependencies would be rebuilt.
fn peers(modules: &[&str]) -> anyhow::Result<Tally> {
    test(&[&["--workspace", "--test", "peers", "--"], modules].concat())
}

/// The tests for Miri, all of which share memory between threads: package, cargo's options, and a part of the tests' names.
const SHARED_MEMORY: [(&str, &[&str], &str); 2] = [
    (
        "homenode-formats",
        &["--lib"],
        "what_is_taken_while_it_is_written",
    ),
    (
        "homenode-topology-page",
        &["--test", "topology_page"],
        "nobody_reads_parts_of_two_versions",
    ),
];

/// Runs tests on Miri, each in several orders of its threads. Installs the pinned nightly if it is missing.
fn miri() -> anyhow::Result<Tally> {
    let target = metadata()?.target_directory.join("miri");
    nightly::install(&["miri", "rust-src"])?;
    let mut all = Tally::default();
    for (package, tests, name) in SHARED_MEMORY {
        let mut command = nightly::cargo(&["miri", "test", "--package", package]);
        command
            .args(tests)
            .arg("--")
            .arg(name)
            .env("CARGO_TARGET_DIR", &target)
            .env("MIRIFLAGS", "-Zmiri-many-seeds=0..8");
        all = all + succeeds(&mut command)?;
    }
    Ok(all)
}

/// Runs the scoreboard's program, in a release build.
fn decisions(args: &DecisionsArgs) -> anyhow::Result<Tally> {
    let built = succeeds(&mut cargo(&[
        "build",
        "--release",
        "--package",
        "homenode-search",
    ]))?;
    ensure!(built.failed == 0, "the scoreboard does not build: see above");
    let metadata = metadata()?;
    let program = || {
        let mut command = Command::new(metadata.target_directory.join("release/decisions"));
        command.current_dir(&metadata.workspace_root);
        command
    };
    let seeds = args.seeds.to_string();
    let mut tally = Tally::default();
    if args.held_out {
        tally = tally + succeeds(program().args(["held-out", "--seeds"]).arg(format!("1-{seeds}")))?;
    }
    let mut document = program();
    document.args(["document", "--seeds", &seeds]);
    if args.quick {
        document.arg("--quick");
    }
    Ok(tally + succeeds(&mut document)?)
}

/// Runs the tests in `deploy/shims/tests`, which print their own counts.
fn integrations() -> anyhow::Result<Tally> {
    build(Build::BesideTests)?;
    let metadata = metadata()?;
    let fetched = metadata.target_directory.join("integrations");
    let python = fetched.join("python/bin/python");
    ensure!(
        python.exists(),
        "{} is missing: run scripts/integrations-setup.sh",
        python.display()
    );
    let mut tests = Command::new(python);
    tests
        .arg(metadata.workspace_root.join("deploy/shims/tests/run.py"))
        .env("HOMENODE", metadata.target_directory.join("debug/homenode"))
        .env("GO_TESTS", fetched.join("shims.test"))
        .env("INCUS_ROOT", fetched.join("incus"));
    counts(&mut tests)
}

/// Runs the notebooks, builds the site and checks its links, and runs the tutorial on it.
fn site() -> anyhow::Result<Tally> {
    let python_with_package = python::with_package()?;
    let metadata = metadata()?;
    let python = metadata.target_directory.join("mkdocs/bin/python");
    ensure!(
        python.exists(),
        "{} is missing: run scripts/site-setup.sh",
        python.display()
    );
    let mut notebooks = python_with_package();
    notebooks
        .arg(metadata.workspace_root.join("scripts/notebooks.py"))
        .arg(metadata.target_directory.join("notebooks"));
    let notebooks = counts(&mut notebooks)?;
    let program = metadata.target_directory.join("debug/homenode");
    let pages = succeeds(
        Command::new(&python)
            .current_dir(&metadata.workspace_root)
            .args(["-m", "mkdocs", "build", "--strict", "--site-dir"])
            .arg(metadata.target_directory.join("site"))
            .env("HOMENODE", &program)
            .env("PYTHONDONTWRITEBYTECODE", "1")
            // The site's theme advertises its successor in each build.
            .env("NO_MKDOCS_2_WARNING", "1"),
    )?;
    let mut commands = python_with_package();
    commands
        .arg(metadata.workspace_root.join("scripts/site-commands.py"))
        .arg(program);
    Ok(notebooks + pages + counts(&mut commands)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tests_that_miri_runs_exist() {
        let packages = metadata().expect("cargo reads the workspace").packages;
        for (package, targets, test) in SHARED_MEMORY {
            let of_name = packages.iter().find(|found| found.name == package);
            let manifest = &of_name.expect("is a member").manifest_path;
            let source = match targets {
                ["--test", target] => format!("tests/{target}"),
                _ => "src".to_owned(),
            };
            let found = Command::new("grep")
                .args(["--recursive", "--quiet", "--include=*.rs"])
                .arg(format!("fn {test}"))
                .arg(manifest.with_file_name(&source))
                .status()
                .expect("grep starts");
            assert!(found.success(), "{package} has no test {test} in {source}");
        }
    }
}
