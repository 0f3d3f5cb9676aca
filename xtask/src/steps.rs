//! The steps of a check: each runs one thing and counts what passed.

use std::fs;
use std::io::{BufRead as _, BufReader, IsTerminal as _, stdout};
use std::process::Command;

use anyhow::{Context as _, ensure};
use serde::Deserialize;

use crate::cargo::{Build, build, cargo, metadata, succeeds};
use crate::fuzz::{self, FuzzArgs};
use crate::nightly;
use crate::python;
use crate::reproduction::{self, ReproductionArgs};
use crate::rules;
use crate::tally::{Tally, TestOutput, counts};

/// Options of `decisions`.
#[derive(Debug, Clone, clap::Args)]
pub struct DecisionsArgs {
    /// How many seeds of each case, from 1 on
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// One machine's sweep and no lone VMs: to look at, not to commit
    #[arg(long)]
    quick: bool,
    /// Run held-out cases first, drawn by the last commit that touched the policies, and add what comes of them to the list
    #[arg(long)]
    held_out: bool,
}

/// One thing to run.
#[derive(Debug, Clone)]
pub enum Step {
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
    /// The schemas in `data/schema`, written anew.
    Schema,
    /// The twin against the access-level reference.
    Validate,
    /// The documents of published claims.
    Reproduction(ReproductionArgs),
    /// The scoreboard of decisions.
    Decisions(DecisionsArgs),
    /// What reads what others wrote, with whatever can be thought of.
    Fuzz(FuzzArgs),
    /// The Python package.
    Python,
    /// The Python package as it is published.
    Wheel,
    /// HTTP, asked by the programs of others.
    Http,
    /// The page, in a browser.
    Page,
    /// Schedulers of fleets, which ask agents.
    Integrations,
    /// Sweeps, on the engines of others.
    Sweeps,
    /// The notebooks, the documentation as a site, and what it says to type.
    Site,
    /// The testbed, with the cases or groups to run; all without any.
    Testbed(Vec<String>),
}

impl Step {
    /// What `cargo xtask check` runs: what is fast and often wrong before the rest.
    pub const CHECK: [Self; 7] = [
        Self::Fmt,
        Self::Rules,
        Self::Clippy,
        Self::Test,
        Self::Python,
        Self::Doc,
        Self::Miri,
    ];

    /// Its name on the command line.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Clippy => "clippy",
            Self::Rules => "rules",
            Self::Test => "test",
            Self::Doc => "doc",
            Self::Miri => "miri",
            Self::Schema => "schema",
            Self::Validate => "validate",
            Self::Reproduction(_) => "reproduction",
            Self::Decisions(_) => "decisions",
            Self::Fuzz(_) => "fuzz",
            Self::Python => "python",
            Self::Wheel => "wheel",
            Self::Http => "http",
            Self::Integrations => "integrations",
            Self::Page => "page",
            Self::Sweeps => "sweeps",
            Self::Site => "site",
            Self::Testbed(_) => "testbed",
        }
    }

    /// What it does, in a few words.
    pub fn about(&self) -> &'static str {
        match self {
            Self::Fmt => "is everything formatted? ('cargo fmt' repairs it)",
            Self::Clippy => "clippy over all crates, tests, benches and fuzz targets, warnings denied",
            Self::Rules => "house rules, which clippy cannot see",
            Self::Test => "unit, property, integration and documentation tests of all crates",
            Self::Doc => "documentation of all crates, warnings denied",
            Self::Miri => "memory shared with guests and emulators, under other orders of threads and memory",
            Self::Schema => "schemas of the files that people write, written anew",
            Self::Validate => "the twin against the access-level reference, into docs/VALIDATION.md",
            Self::Reproduction(_) => {
                "is docs/REPRODUCTION.md what `homenode reproduce` writes? (10 minutes on 2 cores)"
            }
            Self::Decisions(_) => "all policies and the best known, into docs/DECISIONS.md",
            Self::Fuzz(_) => "everything that reads what others wrote, fuzzed (a minute for each target)",
            Self::Python => {
                "the Python package: tables, types, threads, and the command's numbers and sentences"
            }
            Self::Wheel => "the Python package built as a wheel, installed and tested (6 minutes on 2 cores)",
            Self::Http => {
                "what Prometheus and schemathesis make of an agent's HTTP, and Perfetto of traces (a minute)"
            }
            Self::Integrations => "what schedulers of fleets make of agents' answers (two minutes)",
            Self::Page => "the page of an agent, as an operator uses it in Chromium (two minutes)",
            Self::Sweeps => "the same bytes of a sweep by Slurm as by threads (two minutes)",
            Self::Site => {
                "the notebooks, the documentation as a site, and the commands that it shows (two minutes)"
            }
            Self::Testbed(_) => {
                "real guests on an emulated 4-node host (all cases: some 25 minutes on 2 cores)"
            }
        }
    }

    /// Runs it.
    pub fn run(&self) -> anyhow::Result<Tally> {
        match self {
            Self::Fmt => fmt(),
            Self::Clippy => clippy(),
            Self::Rules => rules::run(),
            Self::Test => test(&["--workspace"]),
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
            Self::Reproduction(args) => reproduction::run(args),
            Self::Decisions(args) => decisions(args),
            Self::Fuzz(args) => fuzz::run(args),
            Self::Python => python::package(),
            Self::Wheel => python::wheel(),
            Self::Http => test(&[
                "--package",
                "homenode-cli",
                "--test",
                "http_peers",
                "--test",
                "perfetto",
            ]),
            Self::Integrations => integrations(),
            Self::Page => test(&["--package", "homenode-cli", "--test", "page"]),
            Self::Sweeps => test(&["--package", "homenode-cli", "--test", "sweeps"]),
            Self::Site => site(),
            Self::Testbed(names) => testbed(names),
        }
    }
}

/// The workspace, and the fuzz targets, which are one of their own.
fn fmt() -> anyhow::Result<Tally> {
    let workspace = succeeds(&mut cargo(&["fmt", "--all", "--", "--check"]))?;
    let targets = ["fmt", "--manifest-path", "fuzz/Cargo.toml", "--", "--check"];
    Ok(workspace + succeeds(&mut cargo(&targets))?)
}

/// The same: targets that nobody builds are found broken when somebody wants to fuzz.
fn clippy() -> anyhow::Result<Tally> {
    let denied = ["--", "--deny", "warnings"];
    let workspace = succeeds(cargo(&["clippy", "--workspace", "--all-targets"]).args(denied))?;
    let target = metadata()?.target_directory;
    let mut targets = cargo(&["clippy", "--manifest-path", "fuzz/Cargo.toml", "--bins"]);
    Ok(workspace + succeeds(targets.args(denied).env("CARGO_TARGET_DIR", target))?)
}

/// Shows what `cargo test` prints while it runs, and counts the tests in it.
fn test(which: &[&str]) -> anyhow::Result<Tally> {
    // One pipe for both: cargo names the test program on standard error before its result comes on standard output.
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

/// What Miri runs: package, tests, and the part of their names that says which. They share memory between threads.
const SHARED_MEMORY: [(&str, &[&str], &str); 2] = [
    (
        "homenode-formats",
        &["--lib"],
        "what_is_taken_while_it_is_written",
    ),
    (
        "homenode-topology-page",
        &["--test", "page"],
        "nobody_reads_parts_of_two_versions",
    ),
];

/// Runs tests on Miri, each in several orders of its threads, with the pinned nightly, which is installed if it is missing.
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

/// Has the scoreboard's own program, which is built for speed, do it all.
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

/// What the testbed writes with `--json`, as far as it is read here.
#[derive(Debug, Deserialize)]
struct TestbedReport {
    cases: Vec<TestbedCase>,
}

#[derive(Debug, Deserialize)]
struct TestbedCase {
    verdict: String,
}

impl TestbedReport {
    /// A case of which the emulated host died every time says nothing of Homenode: it counts as skipped, never as passed. Where
    /// that happens to more than a third of the cases the testbed itself is broken, and has failed.
    fn tally(&self) -> Tally {
        let verdict = |case: &TestbedCase| match case.verdict.as_str() {
            "pass" => Tally::PASSED,
            "infrastructure" => Tally::SKIPPED,
            _ => Tally::FAILED,
        };
        let tally: Tally = self.cases.iter().map(verdict).sum();
        if 3 * tally.skipped > self.cases.len() as u64 {
            tally + Tally::FAILED
        } else {
            tally
        }
    }
}

/// Builds the agent and the testbed, runs the latter, and counts its cases.
fn testbed(names: &[String]) -> anyhow::Result<Tally> {
    // These are what CI runs after the tests.
    let is_of_ci = names.is_empty() || names == ["xen"];
    build(if is_of_ci {
        Build::BesideTests
    } else {
        Build::Programs
    })?;
    let target = metadata()?.target_directory;
    let report = target.join("testbed-report.json");
    if report.exists() {
        fs::remove_file(&report).with_context(|| format!("cannot remove {}", report.display()))?;
    }
    let program = target.join("debug/homenode-testbed");
    let run = succeeds(Command::new(program).arg("--json").arg(&report).args(names))?;
    let text = fs::read(&report).context("the testbed left no report: see above")?;
    let cases = serde_json::from_slice::<TestbedReport>(&text)
        .context("cannot read the testbed's report")?
        .tally();
    let fails_without_case = run.failed > 0 && cases.failed + cases.skipped == 0;
    Ok(if fails_without_case {
        cases + Tally::FAILED
    } else {
        cases
    })
}

/// Runs what is in `deploy/shims/tests`, which counts by itself.
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

/// Runs the notebooks, builds the site, every link of which must lead somewhere, and runs what its tutorial says.
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
            // Its theme tells of its successor at each build.
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
    use super::TestbedReport;
    use crate::tally::Tally;

    fn tally(verdicts: &[&str]) -> Tally {
        let cases: Vec<String> = verdicts
            .iter()
            .map(|verdict| format!(r#"{{"verdict": "{verdict}"}}"#))
            .collect();
        let text = format!(r#"{{"cases": [{}]}}"#, cases.join(","));
        serde_json::from_str::<TestbedReport>(&text)
            .expect("a report")
            .tally()
    }

    #[test]
    fn what_came_to_no_end_is_neither_passed_nor_failed() {
        let some = tally(&["pass", "pass", "fail", "infrastructure"]);
        assert_eq!((some.passed, some.failed, some.skipped), (2, 1, 1));
        assert_eq!(some.to_string(), "2 passed, 1 failed, 1 skipped");
    }

    #[test]
    fn a_testbed_that_mostly_dies_has_failed() {
        assert_eq!(tally(&["pass", "infrastructure"]).failed, 1);
    }
}
