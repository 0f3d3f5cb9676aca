//! `cargo xtask`: what a developer and CI run, the same for both.
//!
//! `cargo xtask check` is the whole of it: formatting, clippy, house rules, tests and documentation. It goes on after a
//! failure, so that one run shows all there is to repair, and ends with a line `N passed, N failed`. Each step is also a
//! command of its own.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what this program is for"
)]

mod cargo;
mod rules;
mod steps;
mod tally;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};

use crate::steps::Step;
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
    /// Run all of the following except the testbed and validation
    Check {
        /// Run the testbed too (15 to 20 minutes on 2 cores)
        #[arg(long)]
        testbed: bool,
    },
    /// Check that the code is formatted ('cargo fmt' repairs it)
    Fmt,
    /// Run clippy over all crates, tests and benches, warnings denied
    Clippy,
    /// Check the house rules, which clippy cannot see
    Rules,
    /// Run the tests of all crates
    Test,
    /// Build the documentation, warnings denied
    Doc,
    /// Write the schemas of scenario and workload files anew
    Schema,
    /// Compare the twin with the access-level reference, and write docs/VALIDATION.md (about 2 minutes on an idle core)
    Validate,
    /// Check that docs/REPRODUCTION.md is what the twin gives
    Reproduction,
    /// Build and run the testbed: real guests on an emulated 4-node host
    Testbed {
        /// Cases or groups; all without any
        #[arg(value_name = "GROUP|CASE")]
        names: Vec<String>,
    },
}

fn main() -> ExitCode {
    let steps = match Cli::parse().command {
        Command::Check { testbed: false } => Step::CHECK.to_vec(),
        Command::Check { testbed: true } => [&Step::CHECK[..], &[Step::Testbed(Vec::new())]].concat(),
        Command::Fmt => vec![Step::Fmt],
        Command::Clippy => vec![Step::Clippy],
        Command::Rules => vec![Step::Rules],
        Command::Test => vec![Step::Test],
        Command::Doc => vec![Step::Doc],
        Command::Schema => vec![Step::Schema],
        Command::Validate => vec![Step::Validate],
        Command::Reproduction => vec![Step::Reproduction],
        Command::Testbed { names } => vec![Step::Testbed(names)],
    };
    let total = run(&steps);
    println!("{total}");
    if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Runs the steps one after the other and prints what came of each.
fn run(steps: &[Step]) -> Tally {
    let outcomes: Vec<(Tally, Duration)> = steps.iter().map(run_one).collect();
    println!();
    for (step, (tally, time)) in steps.iter().zip(&outcomes) {
        println!("{:<12} {tally} in {} s", step.name(), time.as_secs());
    }
    outcomes.iter().map(|(tally, _)| *tally).sum()
}

/// A step that cannot even start is one failure.
fn run_one(step: &Step) -> (Tally, Duration) {
    println!("\n== {}: {}", step.name(), step.about());
    let begin = Instant::now();
    let tally = step.run().unwrap_or_else(|error| {
        eprintln!("{}: {error:#}", step.name());
        Tally::FAILED
    });
    (tally, begin.elapsed())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
