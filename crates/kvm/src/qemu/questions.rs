//! Questions that a monitor is asked regularly, and their answers.

use std::collections::BTreeMap;

use homenode_host::{GuestMemory, Immovable};
use homenode_units::{Bytes, Ns};
use serde_json::{Value, json};

use super::monitor::{Answer, Command, MonitorError};

/// Folders in which QEMU has the devices that were added to a machine.
pub(super) const FOLDERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// Last answers of a monitor, by subject.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Heard {
    /// When the monitor was asked.
    pub at: Ns,
    pub standstill: Option<Immovable>,
    pub balloon: Option<Bytes>,
    /// Path of the balloon among QEMU's objects, once it was found.
    pub balloon_path: Option<String>,
    /// The guest driver's report, and its own time stamp.
    pub guest: Option<(u64, GuestMemory)>,
    /// The vCPU that each thread runs, by QEMU's own thread numbers, and when the monitor was asked for this.
    pub vcpus: BTreeMap<i32, u16>,
    pub vcpus_at: Option<Ns>,
    /// What QEMU refused to answer last time.
    pub refusal: Option<MonitorError>,
}

/// Subject of a question.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Topic {
    Run,
    Migration,
    Balloon,
    Vcpus,
    Folder(&'static str),
    Guest,
}

/// What to ask a monitor besides whether its machine runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wants {
    pub balloon: bool,
    /// Whether to ask for the guest's memory statistics.
    pub guest: bool,
    /// Whether to ask which threads run vCPUs.
    pub vcpus: bool,
}

/// Questions to ask now.
pub(super) fn questions(wants: Wants, heard: &Heard) -> Vec<(Topic, Command)> {
    let mut all = vec![
        (Topic::Run, ("query-status", json!({}))),
        (Topic::Migration, ("query-migrate", json!({}))),
    ];
    if wants.balloon {
        all.push((Topic::Balloon, ("query-balloon", json!({}))));
    }
    if wants.vcpus {
        all.push((Topic::Vcpus, ("query-cpus-fast", json!({}))));
    }
    match &heard.balloon_path {
        Some(path) if wants.guest => {
            let statistics = json!({"path": path, "property": "guest-stats"});
            all.push((Topic::Guest, ("qom-get", statistics)));
        }
        None if wants.guest => {
            all.extend(FOLDERS.map(|folder| (Topic::Folder(folder), ("qom-list", json!({"path": folder})))));
        }
        _ => {}
    }
    all
}

impl Heard {
    /// Stores the answers to the questions about these subjects.
    pub(super) fn take_in(&mut self, at: Ns, topics: &[Topic], answers: Vec<Answer>) {
        (self.at, self.refusal) = (at, None);
        let (mut run, mut migration) = (None, None);
        for (topic, answer) in topics.iter().zip(answers) {
            let said = match answer {
                Ok(said) => Some(said),
                Err(error) => {
                    let is_asked_of_all = matches!(topic, Topic::Run | Topic::Migration | Topic::Balloon);
                    self.refusal = self.refusal.take().or(is_asked_of_all.then_some(error));
                    None
                }
            };
            let status = || Some(said.as_ref()?.get("status")?.as_str()?.to_owned());
            match topic {
                Topic::Run => run = status(),
                Topic::Migration => migration = status(),
                Topic::Balloon => {
                    let actual = said.as_ref().and_then(|said| said.get("actual")?.as_u64());
                    self.balloon = actual.map(Bytes);
                }
                Topic::Vcpus => {
                    self.vcpus = said.as_ref().map(vcpus).unwrap_or_default();
                    self.vcpus_at = Some(at);
                }
                Topic::Folder(folder) => {
                    let found = said.as_ref().and_then(|said| balloon_in(folder, said));
                    self.balloon_path = self.balloon_path.take().or(found);
                }
                Topic::Guest => self.guest = said.as_ref().and_then(guest_memory),
            }
        }
        self.standstill = standstill(run.as_deref(), migration.as_deref());
    }
}

/// Why memory should stay where it is, given the run state and the migration state that a monitor reports.
pub(super) fn standstill(run: Option<&str>, migration: Option<&str>) -> Option<Immovable> {
    let is_over = |status: &str| matches!(status, "none" | "completed" | "failed" | "cancelled");
    if migration.is_some_and(|status| !is_over(status)) {
        return Some(Immovable::Migrating);
    }
    match run? {
        "inmigrate" | "finish-migrate" | "postmigrate" => Some(Immovable::Migrating),
        "running" | "debug" | "watchdog" | "colo" => None,
        _ => Some(Immovable::Paused),
    }
}

/// The vCPU that each thread runs, from `query-cpus-fast`.
pub(super) fn vcpus(said: &Value) -> BTreeMap<i32, u16> {
    let all = said.as_array().map(Vec::as_slice).unwrap_or_default();
    let vcpus = all.iter().filter_map(|cpu| {
        let index = u16::try_from(cpu.get("cpu-index")?.as_u64()?).ok()?;
        Some((i32::try_from(cpu.get("thread-id")?.as_u64()?).ok()?, index))
    });
    vcpus.collect()
}

/// The balloon in a folder of QEMU's objects, from `qom-list`.
pub(super) fn balloon_in(folder: &str, said: &Value) -> Option<String> {
    let is_balloon = |entry: &&Value| {
        let kind = entry.get("type").and_then(Value::as_str);
        kind.is_some_and(|kind| kind.starts_with("child<virtio-balloon"))
    };
    let name = said.as_array()?.iter().find(is_balloon)?.get("name")?.as_str()?;
    Some(format!("{folder}/{name}"))
}

/// Returns the guest driver's last report and its time; `None` if there was no report.
fn guest_memory(said: &Value) -> Option<(u64, GuestMemory)> {
    let spoke = said.get("last-update")?.as_u64().filter(|seconds| *seconds > 0);
    // A value that was not reported is the largest number.
    let value = |name: &str| {
        said.get("stats")?
            .get(name)?
            .as_u64()
            .filter(|value| *value != u64::MAX)
    };
    let bytes = |name: &str| value(name).map(Bytes);
    let memory = GuestMemory {
        age: None,
        total: bytes("stat-total-memory"),
        usable: bytes("stat-available-memory"),
        unused: bytes("stat-free-memory"),
        swapped_in: bytes("stat-swap-in"),
        swapped_out: bytes("stat-swap-out"),
        major_faults: value("stat-major-faults"),
    };
    spoke.map(|stamp_s| (stamp_s, memory))
}
