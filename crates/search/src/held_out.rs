//! Records held-out runs on unseen cases of [`crate::generate`] or [`crate::operations`]. The seeds of the cases follow from
//! the last commit that touched the policies, and every run is recorded. So runs cannot be repeated until the figures
//! please.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use homenode_machine_files::file::{FileError, read_text_file, read_toml};
use serde::{Deserialize, Serialize};

use crate::score::Total;

const HEAD: &str = "# Every run of held-out cases, oldest first: see crates/search/src/held_out.rs. Written by `decisions held-out`; no line is \
                    ever taken out.\n\n";

/// All held-out runs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldOut {
    /// Oldest first.
    #[serde(default, rename = "run")]
    pub runs: Vec<HeldOutRun>,
}

/// A held-out run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldOutRun {
    /// Day, in the format 2026-01-31.
    pub date: String,
    /// Last commit that touched the policies; the cases are drawn from its id.
    pub commit: String,
    /// Number of cases.
    pub cases: usize,
    /// Number of seeds of each case.
    pub seeds: usize,
    /// How the cases are drawn.
    #[serde(default)]
    pub drawn_as: DrawnAs,
    /// Results, one for each set of policies and class.
    #[serde(rename = "policy")]
    pub policies: Vec<HeldOutPolicy>,
}

/// How the cases of a run are drawn.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DrawnAs {
    /// Drawn by [`crate::generate`]: programs that compute without pause, on kernels that do not balance.
    #[default]
    Benchmarks,
    /// Drawn by [`crate::operations`]: VMs like those of an operator, on stock kernels.
    Operations,
    /// Like `Operations`, but as drawn until 2026-11-28: VMs were left out if they did not fit into the memory of the
    /// preset's example host. So most hosts had a quarter of a vCPU per CPU, whatever their class.
    OperationsUnderfilled,
}

/// Result of a set of policies in a held-out run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HeldOutPolicy {
    /// Name of the policies.
    pub name: String,
    /// Class of the cases; absent for the total of all classes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub class: Option<String>,
    /// Mean ratio over VMs, seeds and cases; `None` if no VM did anything.
    pub mean: Option<f64>,
    /// Ratio of the worst VM, as its mean over seeds.
    pub worst_vm: Option<f64>,
    /// 99th percentile of request times relative to the base run; `None` if no VM serves requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub p99: Option<f64>,
    /// Number of VMs that are slowed.
    #[serde(alias = "hurt")]
    pub slowed: usize,
    /// Total VMs.
    pub vms: usize,
    /// Number of runs of VMs that are much worse than the base run.
    pub much_worse: usize,
    /// Total runs of VMs.
    pub runs: usize,
}

impl HeldOutPolicy {
    /// Converts a total into a record, and rounds its figures.
    pub fn of(name: &str, total: &Total) -> HeldOutPolicy {
        let rounded = |value: Option<f64>| value.map(|value| (value * 1e4).round() / 1e4);
        HeldOutPolicy {
            name: name.to_owned(),
            class: None,
            p99: rounded(total.p99),
            mean: rounded(total.mean),
            worst_vm: rounded(total.worst_vm),
            slowed: total.slowed.0,
            vms: total.slowed.1,
            much_worse: total.much_worse.0,
            runs: total.much_worse.1,
        }
    }
}

impl HeldOut {
    /// Returns the runs whose cases were drawn in this way, oldest first.
    pub fn drawn_as(&self, drawn_as: DrawnAs) -> impl Iterator<Item = &HeldOutRun> {
        self.runs.iter().filter(move |run| run.drawn_as == drawn_as)
    }

    /// Reads the list from a file; returns an empty one if there is no such file.
    ///
    /// # Errors
    /// A file that cannot be read, or has another format.
    pub fn read(path: &Path) -> Result<HeldOut, FileError> {
        match fs::metadata(path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(HeldOut::default()),
            _ => read_toml(path, &read_text_file(path)?),
        }
    }

    /// Writes the list atomically.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let text = toml::to_string(self).map_err(std::io::Error::other)?;
        let beside = path.with_extension("toml.new");
        fs::write(&beside, format!("{HEAD}{text}"))?;
        fs::rename(&beside, path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_added_and_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("held-out.toml");
        let mut list = HeldOut::read(&path).unwrap();
        assert_eq!(list, HeldOut::default());
        for day in ["2026-01-01", "2026-01-02"] {
            list.runs.push(HeldOutRun {
                date: day.to_owned(),
                commit: "abc".to_owned(),
                cases: 2,
                seeds: 1,
                drawn_as: DrawnAs::Operations,
                policies: vec![HeldOutPolicy::of("homenode", &Total::of(&[]))],
            });
            list.write(&path).unwrap();
        }
        assert_eq!(HeldOut::read(&path).unwrap(), list);
        assert_eq!(list.runs.len(), 2);
        // The key had this name up to 0.2.0.
        let before = fs::read_to_string(&path).unwrap().replace("slowed", "hurt");
        fs::write(&path, before).unwrap();
        assert_eq!(HeldOut::read(&path).unwrap(), list);
        fs::write(&path, "[[run]]\ndate = 1").unwrap();
        let error = HeldOut::read(&path).unwrap_err().to_string();
        assert!(error.contains("held-out.toml"), "{error}");
    }
}
