//! Counts passed and failed checks, using the output of `cargo test` and other tests.

use std::fmt;
use std::io::{BufRead as _, BufReader};
use std::iter::Sum;
use std::ops::Add;
use std::process::Command;

use anyhow::Context as _;

/// Numbers of checks, by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Passed.
    pub passed: u64,
    /// Failed, or could not be run.
    pub failed: u64,
    /// Skipped, or not finished because the emulated host died each time, which is no fault of the tested code.
    pub skipped: u64,
}

impl Tally {
    /// One check, which passed.
    pub(crate) const PASSED: Self = Self {
        passed: 1,
        failed: 0,
        skipped: 0,
    };
    /// One check, which failed.
    pub(crate) const FAILED: Self = Self {
        passed: 0,
        failed: 1,
        skipped: 0,
    };

    /// One check, which did not finish.
    pub(crate) const SKIPPED: Self = Self {
        passed: 0,
        failed: 0,
        skipped: 1,
    };

    /// Parses the count that another program prints: `3 passed, 1 failed`.
    pub(crate) fn read(line: &str) -> Option<Self> {
        let (passed, failed) = line.strip_suffix(" failed")?.split_once(" passed, ")?;
        Some(Self {
            passed: passed.parse().ok()?,
            failed: failed.parse().ok()?,
            skipped: 0,
        })
    }

    /// Counts one check that passed or failed.
    pub(crate) fn of(passed: bool) -> Self {
        if passed { Self::PASSED } else { Self::FAILED }
    }
}

impl Add for Tally {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            passed: self.passed + other.passed,
            failed: self.failed + other.failed,
            skipped: self.skipped + other.skipped,
        }
    }
}

impl Sum for Tally {
    fn sum<I: Iterator<Item = Self>>(tallies: I) -> Self {
        tallies.fold(Self::default(), Add::add)
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        match self.skipped {
            0 => Ok(()),
            skipped => write!(f, ", {skipped} skipped"),
        }
    }
}

/// Parses the output of `cargo test`, line by line, with standard output and standard error combined.
///
/// Each test program ends with a line `test result: ok. 3 passed; 0 failed; …`. A program with its own `main` may print no
/// such line: it counts as one test, which failed if cargo says so.
#[derive(Debug, Default)]
pub(crate) struct TestOutput {
    counted: Tally,
    silent: u64,
    awaits_result: bool,
}

impl TestOutput {
    /// Takes the next line.
    pub(crate) fn line(&mut self, line: &str) {
        if let Some(tally) = test_result(line) {
            self.counted = self.counted + tally;
            self.awaits_result = false;
        } else if line.contains("error: ") && line.contains("failed, to rerun pass") {
            // cargo prints this line for every program that failed. Programs that printed a result are already counted.
            self.counted.failed += u64::from(self.awaits_result);
            self.awaits_result = false;
        } else if is_program_start(line) {
            self.end_program();
            self.awaits_result = true;
        }
    }

    /// Returns the total. If cargo failed but no test did (the code does not compile), that counts as one failure.
    pub(crate) fn end(mut self, cargo_succeeded: bool) -> Tally {
        if cargo_succeeded {
            self.end_program();
        }
        let tally = self.counted
            + Tally {
                passed: self.silent,
                failed: 0,
                ..Tally::default()
            };
        if !cargo_succeeded && tally.failed == 0 {
            tally + Tally::FAILED
        } else {
            tally
        }
    }

    fn end_program(&mut self) {
        self.silent += u64::from(self.awaits_result);
        self.awaits_result = false;
    }
}

/// Recognises the line before a test program's output: `     Running tests/x.rs (target/debug/deps/x-0123)` or `   Doc-tests
/// homenode_units`, with or without colours.
fn is_program_start(line: &str) -> bool {
    (line.contains("Running ") && line.contains("/deps/")) || line.contains("Doc-tests ")
}

/// Parses the counts in `test result: ok. 3 passed; 1 failed; 0 ignored; …`.
fn test_result(line: &str) -> Option<Tally> {
    let (_, counts) = line.split_once("test result: ")?;
    let count = |word: &str| counts.split_once(word)?.0.rsplit(' ').next()?.parse().ok();
    Some(Tally {
        passed: count(" passed;")?,
        failed: count(" failed;")?,
        ..Tally::default()
    })
}

/// Runs tests written in Python, which print their counts in the last line.
///
/// # Errors
/// The tests cannot be started.
pub(crate) fn counts(tests: &mut Command) -> anyhow::Result<Tally> {
    let mut child = tests
        // Keeps Python from writing compiled files next to the sources.
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .stdout(std::process::Stdio::piped())
        .spawn()
        .context("cannot start Python")?;
    let mut last = String::new();
    for line in child
        .stdout
        .take()
        .into_iter()
        .flat_map(|out| BufReader::new(out).lines())
    {
        last = line?;
        println!("{last}");
    }
    let counted = Tally::read(&last).unwrap_or(Tally::FAILED);
    let is_well = child.wait()?.success() || counted.failed > 0;
    Ok(if is_well { counted } else { counted + Tally::FAILED })
}

#[cfg(test)]
mod tests {
    use super::{Tally, TestOutput};

    fn tally(lines: &[&str], cargo_succeeded: bool) -> Tally {
        let mut output = TestOutput::default();
        lines.iter().for_each(|line| output.line(line));
        output.end(cargo_succeeded)
    }

    #[test]
    fn what_others_counted_is_read_as_it_is_written() {
        let counted = Tally::read("12 passed, 3 failed");
        assert_eq!(counted.map(|tally| (tally.passed, tally.failed)), Some((12, 3)));
        for line in [
            "",
            "12 passed",
            "all passed, 3 failed",
            "12 passed, 3 failed or so",
        ] {
            assert_eq!(Tally::read(line), None, "{line}");
        }
    }

    #[test]
    fn results_of_all_programs_add_up() {
        let lines = [
            "     Running unittests src/lib.rs (target/debug/deps/a-01)",
            "test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
            "     Running tests/b.rs (target/debug/deps/b-01)",
            "test result: \u{1b}[31mFAILED\u{1b}(B. 1 passed; 2 failed; 0 ignored; 0 measured; 0 filtered out",
            "error: test failed, to rerun pass `-p b --test b`",
        ];
        assert_eq!(
            tally(&lines, false),
            Tally {
                passed: 4,
                failed: 2,
                skipped: 0
            }
        );
    }

    #[test]
    fn a_program_without_a_result_is_one_test() {
        let lines = [
            "     Running tests/own_main.rs (target/debug/deps/own_main-01)",
            "guard ended: good",
            "     Running tests/own_main_2.rs (target/debug/deps/own_main_2-01)",
            "error: test failed, to rerun pass `-p a --test own_main_2`",
            "   Doc-tests a",
            "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s",
        ];
        assert_eq!(
            tally(&lines, false),
            Tally {
                passed: 1,
                failed: 1,
                skipped: 0
            }
        );
    }

    #[test]
    fn code_that_does_not_compile_is_one_failure() {
        let lines = [
            "error[E0425]: cannot find value `x` in this scope",
            "error: could not compile `a` (lib)",
        ];
        assert_eq!(tally(&lines, false), Tally::FAILED);
    }
}
