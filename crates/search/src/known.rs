//! Keeps the best known decisions in one file per case. A result is replaced only by a better one.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use homenode_machine_files::file::{FileError, read_toml};
use serde::{Deserialize, Serialize};

use crate::best::Best;
use crate::score::ratios;
use crate::search::Schedule;
use crate::search::schedule::ScheduleError;
use homenode_twin::Setup;

const HEAD: &str = "# The best that is known of this case: see crates/search/src/known.rs. Written by `decisions known`, which keeps what \
                    is better.\n";

/// The best known decisions of a case.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// Name of the case.
    pub case: String,
    /// The best known decisions of each seed.
    #[serde(default, rename = "seed")]
    pub seeds: Vec<OfSeed>,
}

/// The best known decisions of a case with a seed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OfSeed {
    /// The seed.
    pub seed: u64,
    /// Mean over VMs of the ratio to `default`, above 0.
    pub mean: f64,
    /// `search`, or the name of the policies that found a better result.
    pub found_by: String,
    /// Total evaluations of all searches so far.
    pub evaluations: usize,
    /// Commit of the simulator with which the result was found; empty if unknown.
    pub commit: String,
    /// Ratio of each VM, in the scenario's order; -1 if the VM has no ratio.
    pub vms: Vec<f64>,
    /// Decisions in the format of [`Schedule::lines`].
    pub decisions: Vec<String>,
}

/// Why the best known decisions cannot be read or stored.
#[derive(Debug, thiserror::Error)]
pub enum KnownError {
    /// The file cannot be read or has another format.
    #[error(transparent)]
    File(#[from] FileError),
    /// A line is not a decision.
    #[error("{path}: {error}")]
    Decision {
        /// The file.
        path: String,
        /// The reason.
        error: ScheduleError,
    },
    /// The file is about another case.
    #[error("{path} is about case {found}, not {wanted}; give each case a file of its own")]
    OtherCase {
        /// The file.
        path: String,
        /// The case that the file is about.
        found: String,
        /// The requested case.
        wanted: String,
    },
    /// A value out of range.
    #[error("{path}: {what} of seed {seed} is {value}; {expected}. Delete that seed's table to search again")]
    Value {
        /// The file.
        path: String,
        /// The seed.
        seed: u64,
        /// Name of the value.
        what: &'static str,
        /// The value.
        value: f64,
        /// The expected range.
        expected: String,
    },
    /// The file cannot be written.
    #[error("cannot write {path}: {error}")]
    Write {
        /// The file.
        path: String,
        /// The reason.
        error: std::io::Error,
    },
}

impl Known {
    /// Reads the file for a scenario. Returns an empty list of seeds if there is no such file.
    ///
    /// # Errors
    /// A file that cannot be read, that is about another case, or that has a value out of range.
    pub fn read(path: &Path, setup: &Setup) -> Result<Known, KnownError> {
        let wanted = setup.scenario.name.clone();
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Known {
                    case: wanted,
                    seeds: Vec::new(),
                });
            }
            Err(_) => homenode_machine_files::file::read_text_file(path)?,
        };
        let known: Known = read_toml(path, &text)?;
        let path = path.display().to_string();
        if known.case != wanted {
            let found = known.case;
            return Err(KnownError::OtherCase { path, found, wanted });
        }
        for of_seed in &known.seeds {
            let wrong = |what, value, expected: String| {
                let (path, seed) = (path.clone(), of_seed.seed);
                Err(KnownError::Value {
                    path,
                    seed,
                    what,
                    value,
                    expected,
                })
            };
            if !(of_seed.mean > 0.0 && of_seed.mean <= 1.0) {
                return wrong(
                    "mean",
                    of_seed.mean,
                    "it must be above 0 and at most 1".to_owned(),
                );
            }
            let vms = setup.scenario.vms.len();
            if of_seed.vms.len() != vms {
                let expected = format!("the case has {vms} VMs");
                return wrong("number of ratios", of_seed.vms.len() as f64, expected);
            }
            Schedule::read(&of_seed.decisions, &setup.scenario).map_err(|error| KnownError::Decision {
                path: path.clone(),
                error,
            })?;
        }
        Ok(known)
    }

    /// Returns the best known decisions of a seed.
    pub fn of_seed(&self, seed: u64) -> Option<&OfSeed> {
        self.seeds.iter().find(|of_seed| of_seed.seed == seed)
    }

    /// Returns the best schedule of the seed, then those of the other seeds, which may also be good for this seed.
    pub fn schedules(&self, setup: &Setup) -> Vec<Schedule> {
        let mut seeds: Vec<&OfSeed> = self.seeds.iter().collect();
        seeds.sort_by_key(|of_seed| of_seed.seed != setup.seed);
        let read = |of_seed: &&OfSeed| Schedule::read(&of_seed.decisions, &setup.scenario).ok();
        seeds.iter().filter_map(read).collect()
    }

    /// Stores a search result if it beats the known one, and returns whether it does. The evaluations are added in either
    /// case.
    pub fn add(&mut self, setup: &Setup, best: &Best, commit: &str) -> bool {
        let rounded = |value: f64| (value * 1e4).round() / 1e4;
        let new = OfSeed {
            seed: setup.seed,
            mean: rounded(best.mean()),
            found_by: best.found_by().to_owned(),
            evaluations: best.evaluations(),
            commit: commit.to_owned(),
            vms: ratios(&best.base, best.run())
                .map(|ratio| ratio.map_or(-1.0, rounded))
                .collect(),
            decisions: best.schedule().lines(&setup.scenario),
        };
        let Some(old) = self.seeds.iter_mut().find(|of_seed| of_seed.seed == setup.seed) else {
            self.seeds.push(new);
            self.seeds.sort_by_key(|of_seed| of_seed.seed);
            return true;
        };
        let evaluations = old.evaluations + new.evaluations;
        let is_better = new.mean < old.mean;
        if is_better {
            *old = new;
        }
        old.evaluations = evaluations;
        is_better
    }

    /// Returns where [`Known::write`] first writes what then replaces the file at this path.
    pub fn new_file(path: &Path) -> PathBuf {
        path.with_extension("toml.new")
    }

    /// Writes the file atomically.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), KnownError> {
        let failed = |error| KnownError::Write {
            path: path.display().to_string(),
            error,
        };
        let text = toml::to_string(self).map_err(|error| failed(std::io::Error::other(error)))?;
        let beside = Known::new_file(path);
        fs::write(&beside, format!("{HEAD}{text}")).map_err(failed)?;
        fs::rename(&beside, path).map_err(failed)
    }
}

#[cfg(test)]
mod tests {
    use homenode_control::Config;
    use homenode_machine_files::preset;
    use homenode_reproduce::jobs::Progress;
    use homenode_twin::{Scenario, VmSpec};
    use homenode_units::Bytes;

    use super::*;
    use crate::best::best;
    use crate::search::Effort;

    fn setup() -> Setup {
        let vm = |name: &str| VmSpec::new(name, 4, Bytes::from_gib(3), "sp.B").doing(0.05);
        let scenario = Scenario::of("two", vec![vm("a"), vm("b c")]);
        Setup::new(preset("r420").unwrap(), scenario, 4)
    }

    fn found(setup: &Setup) -> Best {
        let effort = Effort {
            evaluations: 16,
            jobs: 2,
            seed: 1,
        };
        best(
            setup,
            &Config::default(),
            (&[], &[]),
            &effort,
            &Progress::silent(),
        )
        .unwrap()
    }

    #[test]
    fn a_worse_result_replaces_nothing_and_a_better_one_does() {
        let (setup, folder) = (setup(), tempfile::tempdir().unwrap());
        let path = folder.path().join("two.toml");
        let best = found(&setup);
        let mut known = Known::read(&path, &setup).unwrap();
        assert!(known.add(&setup, &best, "one"));
        known.write(&path).unwrap();
        assert_eq!(Known::read(&path, &setup).unwrap(), known);
        let evaluations = known.seeds[0].evaluations;
        assert_eq!(evaluations, best.evaluations());
        // An equal result does not replace the known one.
        assert!(!known.add(&setup, &best, "two"));
        assert_eq!(
            (known.seeds[0].commit.as_str(), known.seeds[0].evaluations),
            ("one", 2 * evaluations)
        );
        known.seeds[0].mean = best.mean() / 2.0;
        let better = known.seeds[0].clone();
        assert!(!known.add(&setup, &best, "three"));
        assert_eq!(
            (known.seeds[0].mean, &known.seeds[0].decisions),
            (better.mean, &better.decisions)
        );
        known.seeds[0].mean = 1.0;
        assert!(known.add(&setup, &best, "four"));
        assert_eq!(
            (known.seeds[0].commit.as_str(), known.seeds[0].evaluations),
            ("four", 4 * evaluations)
        );
        // Another seed gets its own table.
        let other = Setup {
            seed: 2,
            ..setup.clone()
        };
        assert!(known.add(&other, &best, "five"));
        assert_eq!(
            known.seeds.iter().map(|seed| seed.seed).collect::<Vec<_>>(),
            [2, 4]
        );
        assert_eq!(known.schedules(&setup).len(), 2);
        assert_eq!(known.schedules(&setup)[0], best.schedule());
    }

    #[test]
    fn a_bad_file_says_what_is_wrong_where() {
        let (setup, folder) = (setup(), tempfile::tempdir().unwrap());
        let path = folder.path().join("two.toml");
        let seed = |mean: &str, vms: &str, decisions: &str| {
            format!(
                "case = \"two\"\n[[seed]]\nseed = 3\nmean = {mean}\nfound_by = \"search\"\nevaluations = 1\ncommit = \"\"\n\
                 vms = {vms}\ndecisions = {decisions}\n"
            )
        };
        for (text, wrong) in [
            ("case = 3".to_owned(), "two.toml:1"),
            ("case = \"three\"".to_owned(), "is about case three, not two"),
            (seed("0.0", "[1.0, 1.0]", "[]"), "mean of seed 3 is 0"),
            (seed("nan", "[1.0, 1.0]", "[]"), "mean of seed 3 is NaN"),
            (seed("0.9", "[1.0]", "[]"), "the case has 2 VMs"),
            (
                seed("0.9", "[1.0, 1.0]", "[\"0s c: free\"]"),
                "there is no VM `c`",
            ),
        ] {
            fs::write(&path, &text).unwrap();
            let error = Known::read(&path, &setup).unwrap_err().to_string();
            assert!(error.contains(wrong), "{text}: {error}");
        }
        fs::write(&path, seed("0.9", "[1.0, 1.0]", "[\"3s b c: home 0\"]")).unwrap();
        assert_eq!(Known::read(&path, &setup).unwrap().seeds[0].seed, 3);
    }
}
