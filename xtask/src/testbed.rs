//! Runs the testbed's program and counts its cases, on emulated KVM and Xen hosts.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use serde::Deserialize;

use crate::cargo::{Build, build, metadata, succeeds};
use crate::passed::{self, Record, Rerun};
use crate::tally::Tally;

/// The part of the testbed's `--json` output that is read here.
#[derive(Debug, Deserialize)]
struct Report {
    cases: Vec<Case>,
}

#[derive(Debug, Deserialize)]
struct Case {
    name: String,
    group: String,
    verdict: String,
    seconds: f64,
}

impl Report {
    /// Counts the cases. If the emulated host died in every attempt at a case, the case shows nothing about Homenode, and
    /// counts as skipped, never as passed. If that happens to more than a third of the cases, the testbed itself is broken and
    /// counts as failed.
    fn tally(&self) -> Tally {
        let verdict = |case: &Case| match case.verdict.as_str() {
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

/// Time in which a slow emulated host boots, before its first case.
const BOOT: Duration = Duration::from_secs(60);

/// Builds the agent and the testbed, runs and counts the cases with these names or groups, and records those that passed.
pub(crate) fn run(names: &[String], rerun: Rerun) -> anyhow::Result<Tally> {
    build(match rerun {
        Rerun::All => Build::Programs,
        Rerun::Changed { .. } => Build::BesideTests,
    })?;
    let target = metadata()?.target_directory;
    let program = target.join("debug/homenode-testbed");
    let mut record = Record::read()?;
    let mut skipped = Tally::default();
    let mut chosen = names.to_vec();
    let listed = Command::new(&program).arg("--list").args(names).output()?;
    let listed = String::from_utf8_lossy(&listed.stdout);
    for (group, _) in cases(&listed) {
        record.begin(group)?;
    }
    if let Rerun::Changed { until } = rerun {
        let left = until.saturating_duration_since(Instant::now());
        (chosen, skipped) = changed(&listed, &mut record, left)?;
    }
    let report = target.join("testbed-report.json");
    if report.exists() {
        fs::remove_file(&report).with_context(|| format!("cannot remove {}", report.display()))?;
    }
    let run = succeeds(Command::new(program).arg("--json").arg(&report).args(&chosen))?;
    let text = fs::read(&report).context("the testbed left no report: see above")?;
    let report = serde_json::from_slice::<Report>(&text).context("cannot read the testbed's report")?;
    for case in report.cases.iter().filter(|case| case.verdict == "pass") {
        record.add(&case.group, &case.name, case.seconds as u64)?;
    }
    record.write()?;
    let cases = report.tally();
    let fails_without_case = run.failed > 0 && cases.failed + cases.skipped == 0;
    let failure = if fails_without_case {
        Tally::FAILED
    } else {
        Tally::default()
    };
    Ok(cases + skipped + failure)
}

/// Returns the group and name of each case that the testbed lists.
fn cases(listed: &str) -> impl Iterator<Item = (&str, &str)> {
    listed.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        words.next().zip(words.next())
    })
}

/// Selects, from the listed cases, those to run in the time left. Counts the skipped cases, which have passed with the current
/// files or would not end in time. Prints the reason for each case.
fn changed(listed: &str, record: &mut Record, left: Duration) -> anyhow::Result<(Vec<String>, Tally)> {
    let (mut chosen, mut takes) = (Vec::new(), Duration::ZERO);
    let mut skipped = Tally::default();
    let mut groups: Vec<&str> = Vec::new();
    for (group, case) in cases(listed) {
        if !groups.contains(&group) {
            groups.push(group);
            takes += BOOT;
            println!("{group}: cases test {}", passed::paths_of(group));
        }
        let expected = record.expected(case);
        let passed = record.passed(group, case)?;
        let why = match passed {
            _ if passed::ALWAYS.contains(&case) => "always run",
            Some(date) => {
                println!("  {case:<24} not run: passed on {date} with the files as they are now");
                skipped = skipped + Tally::SKIPPED;
                continue;
            }
            None if takes + expected > left => {
                println!("  {case:<24} NOT RUN: no time is left; run it by name and commit the record");
                skipped = skipped + Tally::SKIPPED;
                continue;
            }
            None => "its files changed",
        };
        takes += expected;
        println!("  {case:<24} {why}");
        chosen.push(case.to_owned());
    }
    Ok((chosen, skipped))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tally(verdicts: &[&str]) -> Tally {
        let cases: Vec<String> = verdicts
            .iter()
            .map(|verdict| {
                format!(r#"{{"name": "a", "group": "agent", "verdict": "{verdict}", "seconds": 1.5}}"#)
            })
            .collect();
        let text = format!(r#"{{"cases": [{}]}}"#, cases.join(","));
        serde_json::from_str::<Report>(&text).expect("a report").tally()
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

    #[test]
    fn cases_whose_files_did_not_change_are_left_out_and_counted() {
        let listed = "agent     boot      4 nodes\nagent     drift     memory comes home\nagent     quota     a quota\n";
        let mut record = Record::default();
        for case in ["boot", "drift"] {
            record.add("agent", case, 1).expect("git is there");
        }
        let left = Duration::from_secs(3600);
        let (chosen, skipped) = changed(listed, &mut record, left).expect("lines");
        assert_eq!(chosen, ["boot", "quota"], "boot is always run");
        assert_eq!(skipped, Tally::SKIPPED);
        // The time suffices for a boot and a case of a second, but not for a case that may take two minutes.
        let (chosen, skipped) = changed(listed, &mut record, Duration::from_secs(180)).expect("lines");
        assert_eq!(chosen, ["boot"], "what would not end in time is not begun");
        assert_eq!(skipped, Tally::SKIPPED + Tally::SKIPPED);
    }
}
