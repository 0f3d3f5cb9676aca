//! The results of a run of the testbed, for people and as JSON.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::cases::Case;

/// How a case ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// The case passed.
    Pass,
    /// The case failed.
    Fail,
    /// The emulated host or a guest died each time, or the host never came up. The case shows nothing.
    Infrastructure,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pass => "pass",
            Self::Fail => "fail",
            Self::Infrastructure => "infrastructure",
        })
    }
}

/// The result of one case.
#[derive(Debug, Clone, Serialize)]
pub struct CaseReport {
    /// The case's name.
    pub name: String,
    /// The case's group.
    pub group: String,
    /// How the case ended.
    pub verdict: Verdict,
    /// Wall time of the run whose verdict counts.
    pub seconds: f64,
    /// The expected state and the state that was seen, if the case failed.
    pub error: Option<String>,
    /// Deaths of the emulated host or a guest during the case. They are reported even if a later run of the case passed.
    pub infrastructure: Vec<String>,
    /// Measurements and observations.
    pub notes: Vec<String>,
    /// The directory of the case's files, if they were kept.
    pub log: Option<PathBuf>,
}

impl CaseReport {
    /// Creates a report to be filled in.
    #[must_use]
    pub fn of(case: &Case) -> Self {
        Self {
            name: case.name.to_owned(),
            group: case.group.name().to_owned(),
            verdict: Verdict::Infrastructure,
            seconds: 0.0,
            error: None,
            infrastructure: Vec::new(),
            notes: Vec::new(),
            log: None,
        }
    }

    /// Creates the report of a case that showed nothing.
    #[must_use]
    pub fn lost(case: &Case, reasons: Vec<String>, log: &Path) -> Self {
        Self {
            error: Some("no run of this case came to its end".to_owned()),
            infrastructure: reasons,
            log: Some(log.to_owned()),
            ..Self::of(case)
        }
    }
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<5} {:<28} {:>6.1} s", self.verdict, self.name, self.seconds)?;
        if !self.infrastructure.is_empty() {
            write!(
                f,
                "  (after {} infrastructure failures)",
                self.infrastructure.len()
            )?;
        }
        if let Some(error) = &self.error {
            for line in error.lines() {
                write!(f, "\n      {line}")?;
            }
        }
        if let Some(log) = &self.log {
            write!(f, "\n      log: {}", log.display())?;
        }
        Ok(())
    }
}

/// A boot that became ready.
#[derive(Debug, Clone, Default, Serialize)]
pub struct BootReport {
    /// The group for which the host was booted.
    pub group: String,
    /// The host's kernel.
    pub kernel: String,
    /// Seconds until the testbed's program ran in the host.
    pub up_s: f64,
    /// Seconds from then until libvirt answered.
    pub libvirt_s: f64,
}

/// The results of a whole run.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Cases in the order in which they ended.
    pub cases: Vec<CaseReport>,
    /// Boots in order.
    pub boots: Vec<BootReport>,
    /// How many times an emulated host died or did not come up, or a guest vanished.
    pub infrastructure_failures: u32,
}

impl Report {
    /// Whether every case passed, and at least one case was run.
    #[must_use]
    pub fn all_passed(&self) -> bool {
        !self.cases.is_empty() && self.failed() == 0
    }

    /// Returns the number of cases that passed.
    #[must_use]
    pub fn passed(&self) -> usize {
        self.cases
            .iter()
            .filter(|case| case.verdict == Verdict::Pass)
            .count()
    }

    /// Returns the number of cases that did not pass, for whatever reason.
    #[must_use]
    pub fn failed(&self) -> usize {
        self.cases.len() - self.passed()
    }
}
