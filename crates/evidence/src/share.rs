//! A report without what names its host, and the archive that holds it, to be attached to an issue.
//!
//! # What must hold
//! The archive does not depend on what is left out: two reports that differ only in that give the same bytes. That is stronger
//! than "no name occurs in it", which a VM called `agent` would break, and which a name in another spelling would pass.
//!
//! # Approach
//! - VMs are renamed to `vm-001` and so on, in the order of their figures and not of their names.
//! - What the system or a program said word for word is dropped. Sentences of ours hold no names; a word in them that looks like
//!   a path, an address or a UUID is replaced all the same.
//! - Of the kernel's release the numbers stay.
//!
//! An archive that is read is hostile: it is read in memory, up to a limit, and nothing is written to disk.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr};

use flate2::read::GzDecoder;
use flate2::{Compression, GzBuilder};

use crate::crossover::Block;
use crate::page::page;
use crate::read::{ReadError, read, written};
use crate::report::{HostFacts, Report, Trial};
use crate::section::{Figure, Outcome, Section};

/// The folder in an archive.
const FOLDER: &str = "homenode-evidence";
/// The report in it.
const REPORT: &str = "evidence.json";
/// Most bytes of an archive's content that are read.
const CONTENT_BYTES_MAX: u64 = 64 << 20;
/// Most files of an archive that are looked at.
const FILES_MAX: usize = 16;
/// What stands for a word that is left out.
const LEFT_OUT: &str = "[left out]";
/// Most letters of a CPU's model.
const MODEL_MAX: usize = 64;

/// Why an archive has no report.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// It is damaged, or not a compressed archive.
    #[error("the archive cannot be read: {0}")]
    Damaged(#[from] io::Error),
    /// There is no such file in it.
    #[error(
        "there is no {FOLDER}/{REPORT} in the archive; give to-share.tar.gz or evidence.json of `homenode evidence`"
    )]
    Absent,
    /// More content than a report has.
    #[error("the archive holds more than {} MiB or {FILES_MAX} files", CONTENT_BYTES_MAX >> 20)]
    TooLarge,
    /// The file in it is not a report.
    #[error(transparent)]
    Read(#[from] ReadError),
}

impl Report {
    /// Returns the report without what names its host, VMs or users, and with a list of what was left out.
    #[must_use]
    pub fn to_share(&self) -> Report {
        let named = renamed(self);
        let sections = self
            .sections
            .iter()
            .map(|section| shared_section(section, &named));
        let (host, sections) = (shared_host(&self.host), sections.collect());
        Report {
            version: self.version.clone(),
            commit: self.commit.clone(),
            host,
            crossover: self.crossover.as_ref().map(|trial| shared_trial(trial, &named)),
            sections,
            left_out: left_out(named.len()),
        }
    }
}

fn left_out(vms: usize) -> Vec<String> {
    let vms = match vms {
        0 => "names and UUIDs of VMs".to_owned(),
        1 => "the name and UUID of 1 VM, which is called vm-001".to_owned(),
        _ => format!(
            "names and UUIDs of {vms} VMs, which are called vm-001 to vm-{vms:03} in no order of their names"
        ),
    };
    let others = [
        "names of the host and its users",
        "addresses and serial numbers",
        "paths of files",
        "messages of the kernel and of programs, word for word",
        "the kernel's release after its version numbers",
    ];
    [vms].into_iter().chain(others.map(str::to_owned)).collect()
}

/// All that is known of a VM, which orders VMs without their names.
#[derive(Default, PartialEq, Eq, PartialOrd, Ord)]
struct Known {
    is_about: bool,
    /// Block and speed, as bits.
    speeds: Vec<(usize, u64)>,
    /// Section, place in it, and values, as bits.
    figures: Vec<(usize, usize, Vec<u64>)>,
}

/// Returns what to call each VM.
fn renamed(report: &Report) -> BTreeMap<String, String> {
    let mut known: BTreeMap<&str, Known> = BTreeMap::new();
    if let Some(trial) = &report.crossover {
        for vm in &trial.about {
            known.entry(vm).or_default().is_about = true;
        }
        for (at, block) in trial.blocks.iter().enumerate() {
            for (vm, speed) in &block.speeds {
                known.entry(vm).or_default().speeds.push((at, speed.to_bits()));
            }
        }
    }
    for (number, section) in report.sections.iter().enumerate() {
        let Outcome::Measured { figures, .. } = &section.outcome else {
            continue;
        };
        for (at, figure) in figures.iter().enumerate() {
            let Some(vm) = &figure.vm else { continue };
            let values = figure.values.iter().map(|value| value.to_bits()).collect();
            known.entry(vm).or_default().figures.push((number, at, values));
        }
    }
    let mut ordered: Vec<(Known, &str)> = known.into_iter().map(|(name, known)| (known, name)).collect();
    ordered.sort();
    let numbered = ordered.into_iter().enumerate();
    numbered
        .map(|(at, (_, name))| (name.to_owned(), format!("vm-{:03}", at + 1)))
        .collect()
}

fn shared_host(host: &HostFacts) -> HostFacts {
    let numbers = host
        .kernel
        .split(|letter: char| !letter.is_ascii_digit() && letter != '.');
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || " ()-@.+/".contains(letter);
    HostFacts {
        kernel: numbers.into_iter().next().unwrap_or_default().to_owned(),
        cpu_model: host
            .cpu_model
            .as_ref()
            .filter(|model| model.len() <= MODEL_MAX && model.chars().all(is_plain))
            .map(|model| without_names(model)),
        ..host.clone()
    }
}

fn shared_trial(trial: &Trial, named: &BTreeMap<String, String>) -> Trial {
    let blocks = trial.blocks.iter().map(|block| Block {
        speeds: block
            .speeds
            .iter()
            .map(|(vm, speed)| (named[vm].clone(), *speed))
            .collect(),
        ..block.clone()
    });
    let about: BTreeSet<String> = trial.about.iter().map(|vm| named[vm].clone()).collect();
    Trial::begun(about, trial.plan.clone()).with_blocks(blocks.collect())
}

fn shared_section(section: &Section, named: &BTreeMap<String, String>) -> Section {
    let outcome = match &section.outcome {
        Outcome::Measured {
            with,
            means,
            bearing,
            figures,
        } => Outcome::Measured {
            with: *with,
            means: without_names(means),
            bearing: *bearing,
            figures: figures
                .iter()
                .map(|figure| shared_figure(figure, named))
                .collect(),
        },
        Outcome::NotPossible { why, .. } => Outcome::NotPossible {
            why: without_names(why),
            detail: None,
        },
    };
    Section {
        topic: section.topic,
        method: without_names(&section.method),
        outcome,
    }
}

fn shared_figure(figure: &Figure, named: &BTreeMap<String, String>) -> Figure {
    let mut shared = figure.clone();
    shared.what = without_names(&figure.what);
    shared.unit = without_names(&figure.unit);
    shared.vm = figure.vm.as_ref().map(|vm| named[vm].clone());
    if let Some(predicted) = &mut shared.predicted {
        predicted.by = without_names(&predicted.by);
    }
    shared
}

/// Replaces words that look like a path, an address or a UUID.
fn without_names(text: &str) -> String {
    let replaced = text.split_inclusive(char::is_whitespace).map(|word| {
        let core =
            word.trim_matches(|letter: char| letter.is_whitespace() || "\"'`.,;()[]<>".contains(letter));
        match names_something(core) {
            true => word.replacen(core, LEFT_OUT, 1),
            false => word.to_owned(),
        }
    });
    replaced.collect()
}

/// Returns true for a path, an address, a UUID and the like.
fn names_something(word: &str) -> bool {
    is_private_path(word) || is_address(word) || is_identifier(word)
}

/// Returns true for a path; files of the kernel near its roots, such as `/dev/kvm`, are the same on all hosts.
fn is_private_path(word: &str) -> bool {
    let is_kernels = |path: &str| {
        let mut parts = path.split('/');
        matches!(parts.next(), Some("dev" | "proc" | "sys")) && parts.count() <= 1
    };
    match word.strip_prefix('/') {
        Some(path) => !path.is_empty() && !is_kernels(path),
        None => word.contains("://") || word.starts_with("~/") || word.starts_with("./"),
    }
}

fn is_address(word: &str) -> bool {
    let (host, _) = word.split_once('/').unwrap_or((word, ""));
    let (before_port, _) = host.split_once(':').unwrap_or((host, ""));
    let is_name_at_host = word
        .split_once('@')
        .is_some_and(|(name, host)| !name.is_empty() && !host.is_empty());
    host.parse::<IpAddr>().is_ok() || before_port.parse::<Ipv4Addr>().is_ok() || is_name_at_host
}

/// Returns true for a UUID, a machine's ID and a hardware address.
fn is_identifier(word: &str) -> bool {
    let is_hex = |part: &str| part.bytes().all(|byte| byte.is_ascii_hexdigit());
    let lengths = |separator| -> Vec<usize> {
        let parts = word.split(separator);
        parts
            .map(|part| if is_hex(part) { part.len() } else { 0 })
            .collect()
    };
    let dashes = lengths('-');
    dashes == [8, 4, 4, 4, 12] || dashes == [32] || dashes == [2; 6] || lengths(':') == [2; 6]
}

/// Writes an archive of the report without names: page, JSON, and a text that says what was left out.
///
/// # Errors
/// None are expected, as it is written to memory.
pub fn archive(report: &Report) -> io::Result<Vec<u8>> {
    let shared = report.to_share();
    let files = [
        ("README.txt", notice(&shared)),
        ("evidence.html", page(&shared)),
        (REPORT, written(&shared)),
    ];
    // No time and no owner: the archive says nothing about who packed it.
    let packed = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    let mut archive = tar::Builder::new(packed);
    for (name, text) in files {
        let mut header = tar::Header::new_ustar();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        archive.append_data(&mut header, format!("{FOLDER}/{name}"), text.as_bytes())?;
    }
    let mut packed = archive.into_inner()?.finish()?;
    packed.flush()?;
    Ok(packed)
}

fn notice(shared: &Report) -> String {
    let left_out: String = shared.left_out.iter().map(|what| format!("- {what}\n")).collect();
    format!(
        "A report of `homenode evidence`, to be attached to an issue at {}/issues.\n\n\
         evidence.html is a page for any browser. `homenode evidence show` reads evidence.json, and this archive as it is.\n\n\
         Left out:\n{left_out}\n\
         Kept: the CPU's model, numbers of nodes, CPUs and VMs, the size of memory, the kernel's version numbers, and all figures.\n",
        env!("CARGO_PKG_REPOSITORY")
    )
}

/// Returns true if bytes begin as a compressed archive does.
pub fn is_archive(bytes: &[u8]) -> bool {
    bytes.starts_with(&[0x1f, 0x8b])
}

/// Reads the report in an archive.
///
/// # Errors
/// [`UnpackError`].
pub fn unpacked(bytes: &[u8]) -> Result<Report, UnpackError> {
    let content = GzDecoder::new(bytes).take(CONTENT_BYTES_MAX);
    let mut archive = tar::Archive::new(content);
    for (count, entry) in archive.entries()?.enumerate() {
        let entry = entry?;
        if count >= FILES_MAX || entry.size() > CONTENT_BYTES_MAX {
            return Err(UnpackError::TooLarge);
        }
        if entry.path_bytes() != format!("{FOLDER}/{REPORT}").as_bytes() {
            continue;
        }
        let mut text = String::new();
        // The size in a header is a claim; a sparse file's is as large as it likes.
        entry.take(CONTENT_BYTES_MAX).read_to_string(&mut text)?;
        return Ok(read(&text)?);
    }
    Err(UnpackError::Absent)
}

#[cfg(test)]
mod tests;
