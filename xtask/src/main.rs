//! `cargo xtask`: what a developer and CI run, the same for both.
//!
//! `cargo xtask check` is what `make test` runs: formatting, clippy, house rules, tests, documentation and Miri. It goes on
//! after a failure, so that one run shows all there is to repair, and ends with a line `N passed, N failed`. Each step is also
//! a command of its own; the long ones, which are no part of the check, CI runs beside it (`.ci/run`).

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what this program is for"
)]

mod cargo;
mod fuzz;
mod nightly;
mod python;
mod reproduction;
mod rules;
mod steps;
mod tally;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};

use crate::fuzz::FuzzArgs;
use crate::reproduction::ReproductionArgs;
use crate::steps::{DecisionsArgs, Step};
use crate::tally::Tally;

/// Checks of the Homenode workspace.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the next seven, whose answers come within minutes
    Check,
    /// Check that the code is formatted ('cargo fmt' repairs it)
    Fmt,
    /// Run clippy over all crates, tests and benches, warnings denied
    Clippy,
    /// Check the house rules, which clippy cannot see
    #[command(after_help = rules::help())]
    Rules,
    /// Run the tests of all crates
    Test,
    /// Test the Python package, in an environment that scripts/python-setup.sh makes
    Python,
    /// Build the documentation, warnings denied
    Doc,
    /// Run tests of shared memory under Miri, with a pinned nightly that is installed if it is missing
    Miri,
    /// Write the schemas of scenario and workload files anew
    Schema,
    /// Compare the twin with the access-level reference, and write docs/VALIDATION.md (about 2 minutes on an idle core)
    Validate,
    /// Check that docs/REPRODUCTION.md is what the twin gives
    Reproduction(ReproductionArgs),
    /// Score the decisions of all policies, and write docs/DECISIONS.md (about half an hour on two idle cores)
    Decisions(DecisionsArgs),
    /// Fuzz everything that reads what others wrote, with a pinned nightly and cargo-fuzz that are installed if they are missing
    Fuzz(FuzzArgs),
    /// Build the Python package as a wheel, install it in an environment of its own and test that
    Wheel,
    /// Have Prometheus and schemathesis ask an agent on the twin; scripts/http-setup.sh fetches both
    Http,
    /// Have Nova, Kubernetes' client of scheduler extenders and Incus' interpreter ask agents on twins;
    /// scripts/integrations-setup.sh fetches them
    Integrations,
    /// Open the page of an agent on the twin in Chromium, and click in it; scripts/page-setup.sh installs it
    Page,
    /// Have a Slurm of its own make a sweep, with a part cancelled in the middle; scripts/sweeps-setup.sh installs it
    Sweeps,
    /// Run the notebooks, build the documentation's site, and run the tutorial's commands; scripts/site-setup.sh installs mkdocs
    Site,
    /// Build and run the testbed: real guests on an emulated 4-node host
    Testbed {
        /// Cases or groups; all without any
        #[arg(value_name = "GROUP|CASE")]
        names: Vec<String>,
    },
}

fn main() -> ExitCode {
    let step = match Cli::parse().command {
        Command::Check => return end(&Step::CHECK.iter().map(run).collect::<Vec<_>>()),
        Command::Fmt => Step::Fmt,
        Command::Clippy => Step::Clippy,
        Command::Rules => Step::Rules,
        Command::Test => Step::Test,
        Command::Doc => Step::Doc,
        Command::Miri => Step::Miri,
        Command::Schema => Step::Schema,
        Command::Validate => Step::Validate,
        Command::Reproduction(args) => Step::Reproduction(args),
        Command::Decisions(args) => Step::Decisions(args),
        Command::Fuzz(args) => Step::Fuzz(args),
        Command::Python => Step::Python,
        Command::Wheel => Step::Wheel,
        Command::Http => Step::Http,
        Command::Integrations => Step::Integrations,
        Command::Page => Step::Page,
        Command::Sweeps => Step::Sweeps,
        Command::Site => Step::Site,
        Command::Testbed { names } => Step::Testbed(names),
    };
    end(&[run(&step)])
}

/// Prints what came of each step.
fn end(all: &[Done]) -> ExitCode {
    println!();
    for Done { name, tally, time } in all {
        println!("{name:<12} {tally} in {} s", time.as_secs());
    }
    let total: Tally = all.iter().map(|done| done.tally).sum();
    println!("{total}");
    if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// A step that was run.
struct Done {
    name: &'static str,
    tally: Tally,
    time: Duration,
}

/// A step that cannot even start is one failure.
fn run(step: &Step) -> Done {
    println!("\n== {}: {}", step.name(), step.about());
    let begin = Instant::now();
    let tally = step.run().unwrap_or_else(|error| {
        eprintln!("{}: {error:#}", step.name());
        Tally::FAILED
    });
    Done {
        name: step.name(),
        tally,
        time: begin.elapsed(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::process::Command;

    use clap::CommandFactory as _;

    use super::{Cli, Step};

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_check_is_the_first_seven_commands() {
        let cli = Cli::command();
        let mut names = cli.get_subcommands().map(clap::Command::get_name);
        assert_eq!(names.next(), Some("check"));
        let mut check: Vec<&str> = Step::CHECK.iter().map(Step::name).collect();
        let mut first: Vec<&str> = names.take(check.len()).collect();
        check.sort_unstable();
        first.sort_unstable();
        assert_eq!(first, check);
    }

    /// What `.ci/run` prints last, and whether it succeeds, where `make SUITE` ends with these lines.
    fn ci(test: &str, testbed: &str, reproduction: &str) -> (String, bool) {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
        let folder = tempfile::tempdir().expect("a folder");
        let text = format!(
            "#!/bin/sh\n\
             case $1 in test) echo '{test}';; testbed) echo '{testbed}';; reproduction) echo '{reproduction}';; *) echo '0 passed, 0 failed';; esac\n\
             case $1,'{test}' in test,*' 0 failed') exit 0;; test,*) echo 'make: Error 1'; exit 2;; esac\n"
        );
        let make = folder.path().join("make");
        fs::write(&make, text).expect("a program");
        fs::set_permissions(&make, fs::Permissions::from_mode(0o755)).expect("a program");
        let path = format!(
            "{}:{}",
            folder.path().display(),
            std::env::var("PATH").expect("a path")
        );
        let run = Command::new(format!("{root}/.ci/run"))
            .env("PATH", path)
            .output()
            .expect("a shell");
        let text = String::from_utf8(run.stdout).expect("text");
        (
            text.lines().last().unwrap_or_default().to_owned(),
            run.status.success(),
        )
    }

    #[test]
    fn ci_counts_all_suites() {
        let good = ci(
            "10 passed, 0 failed",
            "5 passed, 0 failed, 2 skipped",
            "1 passed, 0 failed",
        );
        assert_eq!(good, ("16 passed, 0 failed, 2 skipped".to_owned(), true));
        let bad = ci("9 passed, 1 failed", "7 passed, 0 failed", "0 passed, 1 failed");
        assert_eq!(bad, ("16 passed, 2 failed".to_owned(), false));
    }

    #[test]
    fn a_suite_that_ends_badly_has_failed_whatever_it_counted() {
        let broken = ci(
            "8 passed, 0 failed, 0 skipped",
            "2 passed, 0 failed",
            "1 passed, 0 failed",
        );
        assert_eq!(broken, ("11 passed, 1 failed".to_owned(), false));
    }

    #[test]
    fn a_suite_without_an_end_has_failed() {
        let broken = ci("8 passed, 0 failed", "make: Error 2", "1 passed, 0 failed");
        assert!(!broken.1, "{}", broken.0);
        assert!(broken.0.ends_with("1 failed"), "{}", broken.0);
    }
}
