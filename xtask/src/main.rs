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
use std::thread;
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
        /// Run the testbed too (some 20 minutes on 2 cores), beside the published claims
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
    /// Score the decisions of all policies, and write docs/DECISIONS.md (about half an hour on two idle cores)
    Decisions(DecisionsArgs),
    /// Build and run the testbed: real guests on an emulated 4-node host
    Testbed {
        /// Cases or groups; all without any
        #[arg(value_name = "GROUP|CASE")]
        names: Vec<String>,
    },
}

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

fn main() -> ExitCode {
    let step = match Cli::parse().command {
        Command::Check { testbed } => return end(&check(testbed)),
        Command::Fmt => Step::Fmt,
        Command::Clippy => Step::Clippy,
        Command::Rules => Step::Rules,
        Command::Test => Step::Test,
        Command::Doc => Step::Doc,
        Command::Schema => Step::Schema,
        Command::Validate => Step::Validate,
        Command::Reproduction => Step::Reproduction,
        Command::Decisions(args) => Step::Decisions(args),
        Command::Testbed { names } => Step::Testbed(names),
    };
    end(&[run(&step)])
}

/// All steps, one after the other; but the testbed, whose guests mostly wait, and the published claims, which run at the lowest
/// priority, at the same time.
fn check(testbed: bool) -> Vec<Done> {
    let mut all: Vec<Done> = Step::CHECK.iter().map(run).collect();
    let claims = || run(&Step::Reproduction);
    if testbed {
        thread::scope(|scope| {
            let beside = scope.spawn(claims);
            all.push(run(&Step::Testbed(Vec::new())));
            all.push(beside.join().expect("a step does not panic"));
        });
    } else {
        all.push(claims());
    }
    all
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
    use clap::CommandFactory as _;

    use super::Cli;

    #[test]
    fn arguments_are_consistent() {
        Cli::command().debug_assert();
    }
}
