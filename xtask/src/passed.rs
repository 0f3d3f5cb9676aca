//! The record of which long cases passed with which files: `data/passed.toml`, which is committed.
//!
//! The cases of the testbed, Xen and reproduction together take longer than CI allows. When a case passes, the record gets a
//! digest of the files that it tests ([`TESTED`]). CI runs the cases whose files have changed since, and [`ALWAYS`]; `make
//! all` runs every case. CI starts a case only if, by its last duration, it will end in time, and lists the cases that it
//! skipped: run them by name, and commit the record. The record holds digests of content, so it survives rebases, and a
//! reverted change needs no second run.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

use crate::cargo::root;

const RECORD: &str = "data/passed.toml";
const HEAD: &str = "\
# The long cases that passed, and a digest of the files that each tests (xtask/src/passed.rs says which files those are).
# Written by `cargo xtask testbed`, `xen` and `reproduction`; CI runs the cases whose files have changed since.
";

/// Cases that CI always runs. They show that each emulated host boots, and that the agent fulfils its contract on the KVM
/// host.
pub(crate) const ALWAYS: [&str; 5] = ["boot", "libvirt", "conformance", "bring-home", "xen-boots"];

/// Sources that make up an agent on a live host.
const AGENT: [&str; 23] = [
    "crates/agent",
    "crates/api",
    "crates/cli/src",
    "crates/control",
    "crates/formats",
    "crates/host",
    "crates/kernel",
    "crates/kvm",
    "crates/machine",
    "crates/machine-files",
    "crates/policy",
    "crates/recorder",
    "crates/screens",
    "crates/topology-page",
    "crates/trace",
    "crates/undo",
    "crates/units",
    "crates/vm-settings",
    "crates/why",
    "testbed",
    "scripts/testbed-setup.sh",
    "Cargo.toml",
    "Cargo.lock",
];
/// Sources of the emulator's plugin, which counts memory accesses.
const PLUGIN: [&str; 5] = [
    "crates/formats",
    "crates/meter",
    "crates/tracking",
    "crates/units",
    "qemu-plugin",
];
/// Sources on which the numbers of the claims depend.
const TWIN: [&str; 14] = [
    "crates/control",
    "crates/formats",
    "crates/host",
    "crates/machine",
    "crates/machine-files",
    "crates/policy",
    "crates/reproduce",
    "crates/tracking",
    "crates/twin",
    "crates/units",
    "data",
    "docs/REPRODUCTION.md",
    "docs/REPRODUCTION-DETAILS.md",
    "Cargo.lock",
];
/// Files that are left out of the digests, as no long case tests them.
const LEFT_OUT: [&str; 6] = [
    ":(exclude,glob)crates/*/tests/**",
    ":(exclude,glob)crates/*/benches/**",
    ":(exclude,glob)**/tests.rs",
    ":(exclude)testbed/README.md",
    ":(exclude)data/decisions",
    ":(exclude)data/passed.toml",
];

/// The files that the cases of each group test, with the group's name.
const TESTED: [(&str, &[&[&str]]); 15] = [
    ("agent", &[&AGENT]),
    ("bounds", &[&AGENT]),
    ("counted", &[&AGENT, &PLUGIN]),
    ("arrange", &[&AGENT, &PLUGIN]),
    ("caches", &[&AGENT, &PLUGIN]),
    ("damon", &[&AGENT]),
    ("record", &[&AGENT]),
    (
        "pages",
        &[
            &PLUGIN,
            &[
                "crates/policy",
                "crates/kernel",
                "crates/undo",
                "crates/vm-settings",
                "crates/kvm",
                "testbed",
            ],
        ],
    ),
    (
        "module",
        &[&[
            "guest",
            "crates/topology-page",
            "crates/kernel",
            "crates/undo",
            "crates/kvm",
            "testbed",
        ]],
    ),
    ("xen", &[&AGENT, XEN]),
    ("xen-long", &[&AGENT, XEN]),
    ("xen-record", &[&AGENT, XEN]),
    ("xen-service", &[&AGENT, XEN, &["deploy/systemd"]]),
    ("xen-counted", &[&AGENT, XEN, &PLUGIN]),
    ("reproduction", &[&TWIN]),
];
const XEN: &[&str] = &["crates/xen", "scripts/xen-setup.sh"];

/// Whether a long step repeats cases that have already passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rerun {
    /// All cases.
    All,
    /// Only cases that have not yet passed with the current files: see [`TESTED`]. A case that would not end in time is not
    /// started, because CI is killed after 90 minutes, without any output.
    Changed {
        /// The time by which all cases must have ended.
        until: Instant,
    },
}

/// The record's entry for a case that passed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Passed {
    /// Digest of the files that the case tests.
    files: String,
    date: String,
    seconds: u64,
}

/// The record, and the digests of the current files.
#[derive(Debug, Default)]
pub(crate) struct Record {
    passed: BTreeMap<String, Passed>,
    digests: BTreeMap<&'static str, String>,
}

impl Record {
    /// Reads the committed record.
    ///
    /// # Errors
    /// The record does not parse.
    pub(crate) fn read() -> anyhow::Result<Self> {
        let text = fs::read_to_string(root().join(RECORD)).unwrap_or_default();
        let passed = toml::from_str(&text).with_context(|| format!("{RECORD} cannot be read"))?;
        Ok(Self {
            passed,
            digests: BTreeMap::new(),
        })
    }

    /// Returns the date on which a case passed with the current files; `None` if it has not.
    ///
    /// # Errors
    /// git cannot list the files.
    pub(crate) fn passed(&mut self, group: &str, case: &str) -> anyhow::Result<Option<String>> {
        let Some(digest) = self.digest(group)? else {
            return Ok(None);
        };
        let known = self.passed.get(case).filter(|passed| passed.files == digest);
        Ok(known.map(|passed| passed.date.clone()))
    }

    /// Returns how long a case took when it last passed, or a default if it never did.
    pub(crate) fn expected(&self, case: &str) -> Duration {
        const UNKNOWN: Duration = Duration::from_secs(120);
        let known = self.passed.get(case);
        known.map_or(UNKNOWN, |passed| Duration::from_secs(passed.seconds))
    }

    /// Computes the digest of a group's files before the group's cases run, because the run does not test changes that are made
    /// meanwhile.
    ///
    /// # Errors
    /// git cannot list the files.
    pub(crate) fn begin(&mut self, group: &str) -> anyhow::Result<()> {
        self.digest(group).map(drop)
    }

    /// Adds a case that passed, with the digest of the files from before its run.
    ///
    /// # Errors
    /// git cannot list the files.
    pub(crate) fn add(&mut self, group: &str, case: &str, seconds: u64) -> anyhow::Result<()> {
        if let Some(files) = self.digest(group)? {
            let date = Command::new("date").arg("+%Y-%m-%d").output()?;
            let date = String::from_utf8_lossy(&date.stdout).trim().to_owned();
            let passed = Passed { files, date, seconds };
            self.passed.insert(case.to_owned(), passed);
        }
        Ok(())
    }

    /// Writes the record.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn write(&self) -> anyhow::Result<()> {
        fs::write(root().join(RECORD), text(&self.passed)).with_context(|| format!("cannot write {RECORD}"))
    }

    fn digest(&mut self, group: &str) -> anyhow::Result<Option<String>> {
        let Some((name, paths)) = TESTED.iter().find(|(name, _)| *name == group) else {
            return Ok(None);
        };
        if let Some(known) = self.digests.get(name) {
            return Ok(Some(known.clone()));
        }
        let digest = digest_of(&paths.concat())?;
        self.digests.insert(name, digest.clone());
        Ok(Some(digest))
    }
}

/// Formats the record, one line per case.
fn text(passed: &BTreeMap<String, Passed>) -> String {
    let mut text = HEAD.to_owned();
    for (case, Passed { files, date, seconds }) in passed {
        writeln!(
            text,
            "{case} = {{ files = \"{files}\", date = \"{date}\", seconds = {seconds} }}"
        )
        .expect("memory is there");
    }
    text
}

/// Returns the paths that a group's cases test, as text for messages.
pub(crate) fn paths_of(group: &str) -> String {
    let tested = TESTED.iter().find(|(name, _)| *name == group);
    tested.map_or_else(String::new, |(_, paths)| paths.concat().join(" "))
}

/// Returns a digest of the names and contents of the files below these paths that git tracks or would track.
fn digest_of(paths: &[&str]) -> anyhow::Result<String> {
    let listed = Command::new("git")
        .current_dir(root())
        .args(["ls-files", "--cached", "--others", "--exclude-standard", "--"])
        .args(paths)
        .args(LEFT_OUT)
        .output()
        .context("cannot start git")?;
    ensure!(
        listed.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&listed.stderr)
    );
    let listed = String::from_utf8(listed.stdout).context("git listed a path that is not UTF-8")?;
    let mut names: Vec<&str> = listed
        .lines()
        .filter(|name| root().join(name).is_file())
        .collect();
    names.sort_unstable();
    names.dedup();
    ensure!(!names.is_empty(), "no files below {paths:?}");
    let hashes = hash(&["--stdin-paths"], &names.join("\n"))?;
    let lines: Vec<String> = names
        .iter()
        .zip(hashes.lines())
        .map(|(name, hash)| format!("{hash} {name}"))
        .collect();
    let digest = hash(&["--stdin"], &lines.join("\n"))?;
    Ok(digest.trim().chars().take(16).collect())
}

fn hash(arguments: &[&str], input: &str) -> anyhow::Result<String> {
    let mut child = Command::new("git")
        .current_dir(root())
        .args(["hash-object", "--no-filters"])
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot start git")?;
    let mut into = child.stdin.take().context("git has no input pipe")?;
    let input = input.to_owned();
    // git writes its answers while it still reads, so a separate thread writes its input.
    let writer = std::thread::spawn(move || into.write_all(input.as_bytes()));
    let output = child.wait_with_output()?;
    writer
        .join()
        .ok()
        .context("the thread that writes to git panicked")??;
    ensure!(output.status.success(), "git hash-object failed");
    Ok(String::from_utf8(output.stdout)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_as_it_was_written() {
        let passed = Passed {
            files: "0123456789abcdef".to_owned(),
            date: "2026-11-26".to_owned(),
            seconds: 31,
        };
        let all: BTreeMap<_, _> = [("bring-home".to_owned(), passed)].into();
        assert_eq!(
            toml::from_str::<BTreeMap<String, Passed>>(&text(&all)).unwrap(),
            all
        );
    }

    #[test]
    fn a_case_counts_only_with_the_files_that_it_passed_with() {
        let mut record = Record::default();
        assert_eq!(record.passed("agent", "boot").unwrap(), None);
        record.add("agent", "boot", 3).unwrap();
        assert!(record.passed("agent", "boot").unwrap().is_some());
        assert_eq!(record.passed("agent", "libvirt").unwrap(), None);
        record.digests.insert("agent", "of other files".to_owned());
        assert_eq!(record.passed("agent", "boot").unwrap(), None);
    }

    #[test]
    fn every_path_that_is_tested_exists() {
        for (group, paths) in TESTED {
            for path in paths.concat() {
                assert!(root().join(path).exists(), "{group}: {path}");
            }
        }
    }

    #[test]
    fn a_changed_file_is_another_digest() {
        let before = digest_of(&["xtask/Cargo.toml"]).unwrap();
        assert_eq!(before, digest_of(&["xtask/Cargo.toml"]).unwrap());
        assert_ne!(
            before,
            digest_of(&["xtask/Cargo.toml", "xtask/src/main.rs"]).unwrap()
        );
    }
}
