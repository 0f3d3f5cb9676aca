//! `cargo xtask`: the checks for developers and CI.
//!
//! `cargo xtask check` is what `make test` runs: formatting, clippy, house rules, tests, documentation and Miri. It continues
//! after a failure, so that one run shows all failures, and ends with a line `N passed, N failed`. Each step is also a
//! separate command. `cargo xtask ci` runs all steps, each within its time budget, but skips the long cases whose files have
//! not changed since they passed. `cargo xtask ci --all` skips none.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "printing is what this program is for"
)]

mod cargo;
mod faults;
mod fuzz;
mod nightly;
mod passed;
mod python;
mod reproduction;
mod rules;
mod steps;
mod tally;
mod testbed;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, Subcommand};

use crate::faults::FaultsArgs;
use crate::fuzz::FuzzArgs;
use crate::passed::Rerun;
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
    /// Run the seven steps that follow in this list, which takes minutes
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
    /// Test the Python package, in an environment made by scripts/python-setup.sh
    Python,
    /// Build the documentation, warnings denied
    Doc,
    /// Run tests of shared memory under Miri, with a pinned nightly that is installed if missing
    Miri,
    /// Regenerate the schemas of scenario and workload files
    Schema,
    /// Compare the simulator with a reference model of single memory accesses, and write docs/VALIDATION.md (about 2 minutes on
    /// an idle core)
    Validate,
    /// Check that docs/REPRODUCTION.md matches the simulated results
    Reproduction(ReproductionArgs),
    /// Score the decisions of all policies, and write docs/DECISIONS.md (about half an hour on two idle cores)
    Decisions(DecisionsArgs),
    /// Fuzz all parsers of untrusted input, with a pinned nightly and cargo-fuzz that are installed if missing
    Fuzz(FuzzArgs),
    /// Run the agent against a model of a host that lies and fails, by seed; or plant defects and see how soon they are found
    Faults(FaultsArgs),
    /// Build the Python package as a wheel, install it in a new environment and test it
    Wheel,
    /// Query an agent on a simulated host with Prometheus and schemathesis; scripts/http-setup.sh fetches both
    Http,
    /// Query agents on simulated hosts with Nova, Kubernetes' client of scheduler extenders and Incus' interpreter;
    /// scripts/integrations-setup.sh fetches them
    Integrations,
    /// Open the page of an agent on a simulated host in Chromium, and click through it; scripts/page-setup.sh installs it
    Page,
    /// Run a sweep on a private Slurm, with a part cancelled in the middle; scripts/sweeps-setup.sh installs it
    Sweeps,
    /// Run the notebooks, build the documentation's site, and run the tutorial's commands; scripts/site-setup.sh installs mkdocs
    Site,
    /// Build and run the testbed: real guests on an emulated 4-node host
    Testbed {
        /// Cases or groups [default: all but those run by name only]
        #[arg(value_name = "GROUP|CASE")]
        names: Vec<String>,
    },
    /// Run the testbed's short cases on an emulated Xen host
    Xen,
    /// Run everything that CI runs: the check and all suites; of the testbed, Xen and reproduction only the cases whose files
    /// changed
    Ci {
        /// Also run the long cases that already passed with the current files
        #[arg(long)]
        all: bool,
    },
}

/// Time limit of CI: a long case that would end later is not started.
const CI_TIME: Duration = Duration::from_secs(45 * 60);

fn main() -> ExitCode {
    let step = match Cli::parse().command {
        Command::Check => return end(&Step::CHECK.iter().map(run).collect::<Vec<_>>()),
        Command::Ci { all } => {
            let until = Instant::now() + CI_TIME;
            let rerun = if all { Rerun::All } else { Rerun::Changed { until } };
            return end(&Step::ci(rerun).iter().map(run).collect::<Vec<_>>());
        }
        Command::Fmt => Step::Fmt,
        Command::Clippy => Step::Clippy,
        Command::Rules => Step::Rules,
        Command::Test => Step::Test,
        Command::Doc => Step::Doc,
        Command::Miri => Step::Miri,
        Command::Schema => Step::Schema,
        Command::Validate => Step::Validate,
        Command::Reproduction(args) => Step::Reproduction(args, Rerun::All),
        Command::Decisions(args) => Step::Decisions(args),
        Command::Fuzz(args) => Step::Fuzz(args),
        Command::Faults(args) => Step::Faults(args),
        Command::Python => Step::Python,
        Command::Wheel => Step::Wheel,
        Command::Http => Step::Http,
        Command::Integrations => Step::Integrations,
        Command::Page => Step::Page,
        Command::Sweeps => Step::Sweeps,
        Command::Site => Step::Site,
        Command::Xen => Step::Xen(Rerun::All),
        Command::Testbed { names } => Step::Testbed(names, Rerun::All),
    };
    end(&[run(&step)])
}

/// Prints each step's result, and its time next to its budget.
fn end(all: &[Done]) -> ExitCode {
    println!();
    for done in all {
        println!("{done}");
    }
    let time: Duration = all.iter().map(|done| done.time).sum();
    println!("{:<12} {} min", "all", minutes(time));
    let total: Tally = all.iter().map(Done::counted).sum();
    println!("{total}");
    if total.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Formats minutes to a tenth.
fn minutes(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() / 60.0)
}

/// A finished step, with its counts and its duration.
struct Done {
    name: &'static str,
    tally: Tally,
    time: Duration,
    budget: Option<Duration>,
}

impl Done {
    /// Whether the step took more than twice its budget. Such a step has failed, whatever its counts are.
    fn is_over(&self) -> bool {
        self.budget.is_some_and(|budget| self.time > 2 * budget)
    }

    fn counted(&self) -> Tally {
        self.tally
            + if self.is_over() {
                Tally::FAILED
            } else {
                Tally::default()
            }
    }
}

impl std::fmt::Display for Done {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:<12} {} in {}", self.name, self.tally, minutes(self.time))?;
        match self.budget {
            Some(budget) => write!(f, " of {} min", budget.as_secs() / 60)?,
            None => f.write_str(" min")?,
        }
        if self.is_over() {
            write!(f, ": FAILED, it took more than twice its budget")?;
        }
        Ok(())
    }
}

/// Runs a step, and counts one failure if it cannot start. The step's requirements are installed before its time is measured.
fn run(step: &Step) -> Done {
    println!("\n== {}: {}", step.name(), step.about());
    let mut begin = Instant::now();
    let tally = step.set_up().and_then(|()| {
        begin = Instant::now();
        step.run()
    });
    let tally = tally.unwrap_or_else(|error| {
        eprintln!("{}: {error:#}", step.name());
        Tally::FAILED
    });
    Done {
        name: step.name(),
        tally,
        time: begin.elapsed(),
        budget: step.budget(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use clap::CommandFactory as _;

    use super::{Cli, Done, Rerun, Step};
    use crate::tally::Tally;

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

    fn done(seconds: u64, budget_s: Option<u64>) -> Done {
        Done {
            name: "http",
            tally: Tally::PASSED,
            time: Duration::from_secs(seconds),
            budget: budget_s.map(Duration::from_secs),
        }
    }

    #[test]
    fn a_step_over_twice_its_budget_has_failed_by_name() {
        let slow = done(241, Some(120));
        assert_eq!((slow.counted().passed, slow.counted().failed), (1, 1));
        assert!(slow.to_string().starts_with("http") && slow.to_string().contains("twice its budget"));
        for fine in [done(240, Some(120)), done(9999, None)] {
            assert_eq!(fine.counted().failed, 0, "{fine}");
        }
    }

    #[test]
    fn ci_runs_the_check_and_every_suite_within_its_45_minutes() {
        let steps = Step::ci(Rerun::All);
        let names: Vec<&str> = steps.iter().map(Step::name).collect();
        assert!(Step::CHECK.iter().all(|step| names.contains(&step.name())));
        let long = ["testbed", "xen", "reproduction"];
        let budgets = steps.iter().filter(|step| !long.contains(&step.name()));
        let sum: Duration = budgets.map(|step| step.budget().expect("a budget")).sum();
        assert!(sum <= Duration::from_secs(45 * 60), "{} s", sum.as_secs());
    }

    #[test]
    fn ci_is_one_command_that_developers_have_too() {
        let ci = include_str!("../../.ci/run");
        assert!(ci.contains("make ci"), "{ci}");
    }
}
