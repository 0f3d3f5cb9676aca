//! `homenode evidence` on an emulated host: every section is measured or says why not, and whatever kills the command, nothing
//! of it stays. The figures mean nothing there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;

use crate::inside::Inside;
use crate::inside::process::Ended;
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
const WHOLE: Duration = Duration::from_secs(3000);
/// How long the section with a permit may take, beside a model of counters.
const PERMIT: Duration = Duration::from_secs(1500);
const BALANCING: &str = "/proc/sys/kernel/numa_balancing";
const CGROUPS: &str = "/sys/fs/cgroup";
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
    // The kernel balances from now on, so that the section about that is measured.
    fs::write(BALANCING, "1").context(BALANCING)?;
    let mut whole = inside.start_homenode(&arguments)?;
    let ended = whole.wait_end(WHOLE)?;
    ensure!(
        matches!(ended, Ended::Status(0)),
        "the command ended with {ended:?}: {}",
        whole.stderr_tail()
    );
    let report = report(&dir)?;
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

/// The agent counts the misses of the command's own VM and throttles it in its own cgroup, and no cgroup and no permit stays.
pub(super) fn permit(inside: &mut Inside) -> anyhow::Result<()> {
    let enabled = Path::new(CGROUPS).join("cgroup.subtree_control");
    fs::write(&enabled, "+cpu").with_context(|| enabled.display().to_string())?;
    let _agent = super::agent::start_acting(inside, "qemu", &[])?;
    let groups = groups()?;
    let before = settings();
    let dir = inside.dir().join("evidence");
    let directory = dir.display().to_string();
    let arguments = [
        "evidence",
        "--minutes",
        "6",
        "--only",
        "kyoto",
        "-o",
        &directory,
        "--json",
    ];
    let mut command = inside.start_homenode(&arguments)?;
    let mut throttled = String::new();
    let ended = wait_until("the command to end", PERMIT, || {
        for group in groups_of_guests()? {
            let max = fs::read_to_string(group.join("cpu.max")).unwrap_or_default();
            if !max.is_empty() && !max.starts_with("max") {
                throttled = format!("{}: {}", group.display(), max.trim());
            }
        }
        Ok(match command.try_end()? {
            Some(ended) => Look::Done(ended),
            None => Look::NotYet(format!("throttled: {throttled:?}")),
        })
    })?;
    ensure!(
        matches!(ended, Ended::Status(0)),
        "the command ended with {ended:?}: {}",
        command.stderr_tail()
    );
    let report = report(&dir)?;
    let section = &report["sections"][0];
    inside.note(said("kyoto", section)?);
    inside.note(format!("seen: {throttled}"));
    let means = section["means"].as_str().unwrap_or_default();
    ensure!(
        means.contains("While the agent holds the thrasher to a permit"),
        "there was no permit: {section}"
    );
    ensure!(!throttled.is_empty(), "no cgroup of a guest had a quota");
    wait_until("the guests' cgroups to be gone", GONE_WITHIN, || {
        let now = self::groups()?;
        Ok(match now == groups {
            true => Look::Done(()),
            false => Look::NotYet(format!("{now:?}")),
        })
    })?;
    ensure!(settings() == before, "a VM's settings stayed: {:?}", settings());
    Ok(())
}

/// Reads the report in the command's directory.
fn report(dir: &Path) -> anyhow::Result<Value> {
    let path = dir.join("evidence.json");
    let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
    serde_json::from_str(&text).with_context(|| path.display().to_string())
}

/// Returns the host's topmost cgroups.
fn groups() -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(CGROUPS).context("cannot list the cgroups")?;
    let paths = entries.flatten().map(|entry| entry.path());
    let mut groups: Vec<PathBuf> = paths.filter(|path| path.is_dir()).collect();
    groups.sort();
    Ok(groups)
}

fn groups_of_guests() -> anyhow::Result<Vec<PathBuf>> {
    let is_guests = |path: &PathBuf| path.to_string_lossy().contains("homenode-evidence-");
    Ok(groups()?.into_iter().filter(is_guests).collect())
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
