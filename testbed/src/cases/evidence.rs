//! `homenode evidence` on an emulated host: every section is measured or says why not, and whatever kills the command, nothing
//! of it stays. The figures mean nothing there.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::inside::Inside;
use crate::inside::wait::{Look, wait_until};

/// All sections.
const SECTIONS: [&str; 10] = [
    "machine",
    "counters",
    "contention",
    "kyoto",
    "placement",
    "moving",
    "working-set",
    "balancing",
    "numad",
    "requests",
];
/// Seconds after which the command is killed, one time after the other: in any section, and while guests boot.
const KILLED_AFTER_S: [u64; 10] = [1, 3, 7, 12, 18, 25, 33, 45, 60, 90];
/// How long what died may need until it is gone.
const GONE_WITHIN: Duration = Duration::from_secs(20);
/// How long the whole may take; everything is emulated.
const WHOLE: Duration = Duration::from_secs(1500);
/// The agent's files about VMs without libvirt.
const SETTINGS: &str = "/etc/homenode/vms";
/// Names of files in the run's directory.
const FILES: [&str; 4] = [
    "evidence.html",
    "evidence.json",
    "to-share.tar.gz",
    "machine.toml",
];

/// Killed at ten moments, the command leaves no process and no file outside of its directory; then it finishes all sections.
pub(super) fn whole(inside: &mut Inside) -> anyhow::Result<()> {
    let dir = inside.dir().join("evidence");
    let only = SECTIONS.join(",");
    let directory = dir.display().to_string();
    let arguments = [
        "evidence",
        "--minutes",
        "10",
        "--only",
        &only,
        "-o",
        &directory,
        "--json",
    ];
    let mut command = Command::new(inside.homenode()?);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let before = settings();
    for after in KILLED_AFTER_S {
        let mut child = command.spawn().context("cannot start homenode evidence")?;
        std::thread::sleep(Duration::from_secs(after));
        child.kill()?;
        child.wait()?;
        wait_until(
            "the command's programs and guests to be gone",
            GONE_WITHIN,
            || {
                Ok(match ours()?.as_slice() {
                    [] => Look::Done(()),
                    left => Look::NotYet(format!("{left:?}")),
                })
            },
        )?;
        ensure!(settings() == before, "a VM's settings stayed: {:?}", settings());
    }
    inside.note(format!("killed after {KILLED_AFTER_S:?} seconds, nothing stayed"));
    let mut whole = inside.start_homenode(&arguments)?;
    let report = whole.wait_json("the report", WHOLE, |value| value["sections"].is_array())?;
    let sections = report["sections"].as_array().cloned().unwrap_or_default();
    for topic in SECTIONS {
        let section = sections.iter().find(|section| section["topic"] == topic);
        let section = section.with_context(|| format!("the report has no section {topic}: {report}"))?;
        inside.note(said(topic, section)?);
    }
    let measured = sections
        .iter()
        .filter(|section| section["outcome"] == "measured")
        .count();
    ensure!(measured >= 7, "only {measured} sections were measured: {report}");
    let left = ours()?;
    ensure!(left.is_empty(), "the command has ended, but not {left:?}");
    keep(inside, &dir)
}

/// Says what came out of a section.
fn said(topic: &str, section: &Value) -> anyhow::Result<String> {
    if section["outcome"] == "measured" {
        let figures = section["figures"].as_array().map_or(0, Vec::len);
        ensure!(figures > 0, "section {topic} has no figures: {section}");
        return Ok(format!(
            "{topic}: {figures} figures, {}: {}",
            section["with"], section["means"]
        ));
    }
    let why = section["why"].as_str().unwrap_or_default();
    ensure!(
        !why.is_empty(),
        "section {topic} does not say why it was not possible: {section}"
    );
    Ok(format!("{topic}: not possible: {why} {}", section["detail"]))
}

/// Returns the command lines of the command, its workers and its guests.
fn ours() -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").context("cannot list /proc")?.flatten() {
        let Ok(line) = fs::read(entry.path().join("cmdline")) else {
            continue;
        };
        let line = String::from_utf8_lossy(&line).replace('\0', " ");
        let is_ours = ["calibrate-kernel", "homenode-evidence-", "homenode.load="];
        if is_ours.iter().any(|part| line.contains(part)) {
            found.push(line);
        }
    }
    Ok(found)
}

fn settings() -> Vec<String> {
    let entries = fs::read_dir(SETTINGS).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    names.sort();
    names
}

/// Keeps the report of an emulated host.
fn keep(inside: &Inside, dir: &Path) -> anyhow::Result<()> {
    let kept = inside.dir().join(crate::outside::KEPT);
    fs::create_dir_all(&kept)?;
    for name in FILES {
        let path = dir.join(name);
        ensure!(path.is_file(), "{} is missing", path.display());
        fs::copy(&path, kept.join(format!("evidence-emulated-{name}")))?;
    }
    Ok(())
}
