//! What the agent has changed and how it was before, on disk before anything is changed.
//!
//! One line per record in `journal`, each with a checksum, written and synced before the agent acts. Opening replays
//! the lines into what is in force per VM, and writes that anew (new file, sync, rename), so the file stays
//! small. A torn last line is what a crash leaves and is dropped in silence; any other line that does not check
//! is kept aside in
//! `journal.damaged` and reported, and the rest still counts: a VM is never lost because a neighbour's line is
//! broken.
//!
//! ```text
//!   First ──▶ Pinned, Home, Nodes, Moving, Moved, Held, Lifted, Confined, Shrunk, Watched … ──▶ Restored ──▶ Forgotten
//!   (as it was)  (what is in force)          ▲     │ HomeLifted                       (nothing is)  (the VM ended)
//!                                            └─────┘ (no pin, no home; limits stay)
//! ```
//!
//! A restored VM keeps its entry until it ends, and so does one whose home was lifted: restoring leaves pins in libvirt's XML
//! that are nobody's wish, and only the entry tells them from an operator's. Where nothing is pinned any more and somebody has
//! changed the VM, another `First` says how it is before it is touched again.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use homenode_host::{CpuQuota, Limit};
use homenode_units::{Bytes, CpuSet, NodeSet, Ns, VmId};
use serde::{Deserialize, Serialize};

use crate::cgroup::PERIOD_DEFAULT;
use crate::read;

/// Where the journal lies unless the operator says otherwise: gone after a reboot, as the VMs are.
pub const STATE_DIR: &str = "/run/homenode";
const FILE: &str = "journal";
const DAMAGED: &str = "journal.damaged";
/// 10,000 VMs of 256 vCPUs fit.
const LIMIT_BYTES: u64 = 256 << 20;

/// Why the journal could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("cannot {what} {path}: {cause}; without a journal the agent changes nothing")]
pub struct JournalError {
    /// What was tried.
    pub what: &'static str,
    /// The file.
    pub path: String,
    /// What the system said.
    pub cause: String,
}

/// One run of one VM: a VM that was restarted has another start time and nothing to restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The VM.
    pub vm: VmId,
    /// Its name, for people.
    pub name: String,
    /// libvirt's number of this run.
    pub runtime_id: u32,
    /// Its QEMU process.
    pub pid: i32,
    /// When that process started, in clock ticks since boot.
    pub start_ticks: u64,
}

/// A thread of QEMU's that can be pinned and runs no vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Helper {
    /// The emulator, with all threads that are nothing else.
    Emulator,
    /// The I/O thread of this number.
    IoThread(u32),
}

/// How a VM was before the agent touched it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Before {
    /// CPUs of each vCPU.
    pub vcpus: BTreeMap<u16, CpuSet>,
    /// vCPUs that the operator had pinned by hand.
    pub operator_pins: Vec<u16>,
    /// CPUs of the emulator.
    pub emulator: CpuSet,
    /// CPUs of each I/O thread.
    pub iothreads: BTreeMap<u32, CpuSet>,
    /// Which of emulator and I/O threads the operator had pinned.
    pub operator_helpers: Vec<Helper>,
    /// Memory nodes, where libvirt can change them while the VM runs.
    pub nodes: Option<NodeSet>,
}

/// A CPU quota that the agent set in the place of the operator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// The agent's.
    pub ours: CpuQuota,
    /// The agent's last, which is in force until the new one is.
    #[serde(default)]
    pub previous: Option<CpuQuota>,
    /// The operator's, if there was one.
    pub before: Option<CpuQuota>,
}

impl Quotas {
    /// Whether a quota in force may be the agent's. libvirt sets time and period one after the other: an agent that dies in
    /// between leaves the time of one quota with the period of another.
    pub fn may_be_ours(&self, seen: CpuQuota) -> bool {
        let mut ours = std::iter::once(self.ours).chain(self.previous);
        let theirs = self.before.map_or(PERIOD_DEFAULT, |before| before.period_ns);
        let periods: Vec<Ns> = ours
            .clone()
            .map(|quota| quota.period_ns)
            .chain([theirs])
            .collect();
        ours.any(|quota| quota.run_ns == seen.run_ns) && periods.contains(&seen.period_ns)
    }
}

/// Memory that the agent gave a VM in the place of the operator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shrink {
    /// The agent's.
    pub ours: Bytes,
    /// What it had.
    pub before: Bytes,
}

/// One record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Record {
    /// The agent is about to touch this VM for the first time, or again with no pin and no home of its own in force.
    First {
        /// Which run.
        run: Run,
        /// How it was.
        before: Before,
    },
    /// vCPUs are about to be pinned.
    Pinned {
        /// Whose.
        vm: VmId,
        /// Which.
        vcpus: Vec<u16>,
        /// Where.
        cpus: CpuSet,
    },
    /// Emulator, I/O threads and memory nodes are about to follow a new home.
    Home {
        /// Whose.
        vm: VmId,
        /// Where.
        nodes: NodeSet,
    },
    /// Memory nodes are about to be set to these.
    Nodes {
        /// Whose.
        vm: VmId,
        /// Which.
        nodes: NodeSet,
    },
    /// Pages are about to move.
    Moving {
        /// Whose.
        vm: VmId,
        /// Where to.
        to: NodeSet,
    },
    /// The move ended: nothing is left to move.
    Moved {
        /// Whose.
        vm: VmId,
    },
    /// vCPUs are about to be held to a quota.
    Held {
        /// Whose.
        vm: VmId,
        /// To which, and what was there before.
        quotas: Quotas,
    },
    /// The operator's quota is in force again, or somebody else's.
    Lifted {
        /// Whose.
        vm: VmId,
    },
    /// The VM is about to get a resctrl group of its own.
    Confined {
        /// Whose.
        vm: VmId,
        /// With this part.
        limit: Limit,
    },
    /// Its resctrl group is gone.
    Freed {
        /// Whose.
        vm: VmId,
    },
    /// DAMON is about to watch the VM's memory.
    Watched {
        /// Whose.
        vm: VmId,
    },
    /// It does not any more.
    Unwatched {
        /// Whose.
        vm: VmId,
    },
    /// The VM is about to have less memory.
    Shrunk {
        /// Whose.
        vm: VmId,
        /// How much, and what it had.
        shrink: Shrink,
    },
    /// It was given back, or somebody else changed it.
    GivenBack {
        /// Whose.
        vm: VmId,
    },
    /// Its guest is about to be asked for memory statistics.
    Asked {
        /// Whose.
        vm: VmId,
        /// How often it was asked before, in seconds; 0 for never.
        before: u32,
    },
    /// It is asked as before.
    NotAsked {
        /// Whose.
        vm: VmId,
    },
    /// It has neither pins nor home nor memory nodes of the agent's any more.
    HomeLifted {
        /// Whose.
        vm: VmId,
    },
    /// Everything was restored.
    Restored {
        /// Whose.
        vm: VmId,
    },
    /// The VM ended.
    Forgotten {
        /// Which.
        vm: VmId,
    },
}

/// What is in force for one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which run of it.
    pub run: Run,
    /// How it was before.
    pub before: Before,
    /// CPUs that vCPUs were pinned to.
    pub pinned: BTreeMap<u16, CpuSet>,
    /// Home that was set.
    pub home: Option<NodeSet>,
    /// Memory nodes that were set.
    pub nodes: Option<NodeSet>,
    /// Where pages were moving to.
    pub moving: Option<NodeSet>,
    /// CPU quota that was set.
    pub held: Option<Quotas>,
    /// Part of caches or memory bandwidth that it was confined to.
    pub confined: Option<Limit>,
    /// Whether DAMON watches it.
    pub watched: bool,
    /// Memory that was set.
    pub shrunk: Option<Shrink>,
    /// How often its guest was asked for memory statistics before, in seconds, where the agent changed that.
    pub asked_before: Option<u32>,
}

/// One step that restores a VM; see [`Journal::undo`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Undo {
    /// Which run: if that run is over there is nothing to restore.
    pub run: Run,
    /// CPUs to give back to each vCPU that was pinned.
    pub vcpus: BTreeMap<u16, CpuSet>,
    /// CPUs to give back to the emulator, if it was moved.
    pub emulator: Option<CpuSet>,
    /// CPUs to give back to each I/O thread that was moved.
    pub iothreads: BTreeMap<u32, CpuSet>,
    /// Memory nodes to allow again, if they were changed: those from before and those set, as taking nodes away would
    /// move the VM's pages all at once.
    pub nodes: Option<NodeSet>,
    /// CPU quota to lift, if the agent's is still in force.
    pub quotas: Option<Quotas>,
    /// What it is confined to, if it has a resctrl group to remove.
    pub confined: Option<Limit>,
    /// Whether DAMON is to be taken down, if it still watches this VM.
    pub watched: bool,
    /// Memory to give back, if some was taken.
    pub shrunk: Option<Shrink>,
    /// How often to ask its guest for memory statistics, if that was changed.
    pub asked_before: Option<u32>,
}

/// The journal of one agent. Only the holder of the agent's lock may open it.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
    entries: BTreeMap<VmId, Entry>,
    /// What was wrong with the file, for the operator.
    pub warnings: Vec<String>,
}

impl Journal {
    /// Opens the journal in this directory, creating both where they are not there.
    ///
    /// # Errors
    /// When directory or file cannot be created, read or written.
    pub fn open(dir: &Path) -> Result<Journal, JournalError> {
        let path = dir.join(FILE);
        std::fs::create_dir_all(dir).map_err(|e| failed("create", dir, &e))?;
        let bytes = match std::fs::metadata(&path) {
            Ok(meta) if meta.len() > LIMIT_BYTES => {
                let cause = std::io::Error::other(format!("larger than {LIMIT_BYTES} bytes"));
                return Err(failed("read", &path, &cause));
            }
            Ok(_) => std::fs::read(&path).map_err(|e| failed("read", &path, &e))?,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(e) => return Err(failed("read", &path, &e)),
        };
        let Replay { entries, damaged } = replay(&bytes);
        let mut warnings = Vec::new();
        if !damaged.is_empty() {
            let aside = dir.join(DAMAGED);
            let mut file = File::options()
                .append(true)
                .create(true)
                .open(&aside)
                .map_err(|e| failed("open", &aside, &e))?;
            for line in &damaged {
                file.write_all(line)
                    .and_then(|()| file.write_all(b"\n"))
                    .map_err(|e| failed("write", &aside, &e))?;
            }
            let count = damaged.len();
            warnings.push(format!(
                "{}: {count} damaged lines set aside in {}",
                path.display(),
                aside.display()
            ));
        }
        let file = compact(dir, &path, &entries)?;
        Ok(Journal {
            path,
            file,
            entries,
            warnings,
        })
    }

    /// What is in force, per VM.
    pub fn entries(&self) -> &BTreeMap<VmId, Entry> {
        &self.entries
    }

    /// What is in force for this VM.
    pub fn entry(&self, vm: VmId) -> Option<&Entry> {
        self.entries.get(&vm)
    }

    /// Writes a record, and returns once it is on disk.
    ///
    /// # Errors
    /// When it could not be written; then the agent must not act.
    pub fn write(&mut self, record: Record) -> Result<(), JournalError> {
        let line = encode(&record);
        let length = self
            .file
            .metadata()
            .map_err(|e| failed("write", &self.path, &e))?
            .len();
        let written = self
            .file
            .write_all(line.as_bytes())
            .and_then(|()| self.file.sync_data());
        if let Err(e) = written {
            // Half a line would spoil the next one.
            let _ = self.file.set_len(length);
            return Err(failed("write", &self.path, &e));
        }
        apply(&mut self.entries, record);
        Ok(())
    }

    /// What restores every VM of which something is in force.
    pub fn undo(&self) -> Vec<Undo> {
        self.entries
            .values()
            .filter(|entry| entry.is_in_force())
            .map(Entry::undo)
            .collect()
    }
}

impl Entry {
    /// Whether pins, a home or memory nodes are to be restored.
    pub fn is_placed(&self) -> bool {
        !self.pinned.is_empty() || self.home.is_some() || self.nodes.is_some()
    }

    /// Whether anything is to be restored.
    pub fn is_in_force(&self) -> bool {
        let is_limited = self.held.is_some() || self.confined.is_some() || self.shrunk.is_some();
        self.is_placed() || is_limited || self.asked_before.is_some() || self.watched
    }

    /// Takes note that nothing of it is placed by the agent.
    fn leave_home(&mut self) {
        self.pinned.clear();
        (self.home, self.nodes, self.moving) = (None, None, None);
    }

    /// What restores this VM.
    pub fn undo(&self) -> Undo {
        let before = &self.before;
        let vcpus = before
            .vcpus
            .iter()
            .filter(|(index, _)| self.pinned.contains_key(index));
        let was_homed = |helper: Helper| self.home.is_some() && !before.operator_helpers.contains(&helper);
        let iothreads = before
            .iothreads
            .iter()
            .filter(|(id, _)| was_homed(Helper::IoThread(**id)));
        Undo {
            run: self.run.clone(),
            vcpus: vcpus.map(|(index, cpus)| (*index, cpus.clone())).collect(),
            emulator: was_homed(Helper::Emulator).then(|| before.emulator.clone()),
            iothreads: iothreads.map(|(id, cpus)| (*id, cpus.clone())).collect(),
            nodes: before
                .nodes
                .as_ref()
                .zip(self.nodes.as_ref())
                .map(|(before, set)| before.union(set)),
            quotas: self.held,
            confined: self.confined,
            watched: self.watched,
            shrunk: self.shrunk,
            asked_before: self.asked_before,
        }
    }
}

fn failed(what: &'static str, path: &Path, cause: &std::io::Error) -> JournalError {
    JournalError {
        what,
        path: path.display().to_string(),
        cause: cause.to_string(),
    }
}

/// FNV-1a, 64 bits: finds torn and damaged lines; it is no protection against forgery, which file permissions are.
fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn encode(record: &Record) -> String {
    let json = serde_json::to_string(record).expect("records hold nothing that JSON cannot");
    format!("{:016x} {json}\n", checksum(json.as_bytes()))
}

fn decode(line: &[u8]) -> Option<Record> {
    let line = std::str::from_utf8(line).ok()?;
    let (sum, json) = line.split_at_checked(16)?;
    let json = json.strip_prefix(' ')?;
    let sum = u64::from_str_radix(sum, 16).ok()?;
    if sum != checksum(json.as_bytes()) {
        return None;
    }
    serde_json::from_str(json).ok()
}

struct Replay {
    entries: BTreeMap<VmId, Entry>,
    damaged: Vec<Vec<u8>>,
}

fn replay(bytes: &[u8]) -> Replay {
    let mut replay = Replay {
        entries: BTreeMap::new(),
        damaged: Vec::new(),
    };
    let mut lines = bytes.split_inclusive(|byte| *byte == b'\n').peekable();
    while let Some(line) = lines.next() {
        let is_torn = lines.peek().is_none() && !line.ends_with(b"\n");
        let line = line.strip_suffix(b"\n").unwrap_or(line);
        match decode(line) {
            Some(record) => apply(&mut replay.entries, record),
            None if is_torn => {}
            None => replay.damaged.push(line.to_vec()),
        }
    }
    replay
}

/// Takes a record into what is in force. Records of a VM without a `First` (its line was damaged) tell nothing.
fn apply(entries: &mut BTreeMap<VmId, Entry>, record: Record) {
    match record {
        Record::First { run, before } => {
            if let Some(entry) = entries.get_mut(&run.vm).filter(|entry| entry.run == run) {
                entry.before = before;
                return;
            }
            let entry = Entry {
                run,
                before,
                pinned: BTreeMap::new(),
                home: None,
                nodes: None,
                moving: None,
                held: None,
                confined: None,
                watched: false,
                shrunk: None,
                asked_before: None,
            };
            entries.insert(entry.run.vm, entry);
        }
        Record::Pinned { vm, vcpus, cpus } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry
                    .pinned
                    .extend(vcpus.into_iter().map(|index| (index, cpus.clone())));
            }
        }
        Record::Home { vm, nodes } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.home = Some(nodes);
            }
        }
        Record::Nodes { vm, nodes } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.nodes = Some(nodes);
            }
        }
        Record::Moving { vm, to } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.moving = Some(to);
            }
        }
        Record::Moved { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.moving = None;
            }
        }
        Record::Held { vm, quotas } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.held = Some(quotas);
            }
        }
        Record::Lifted { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.held = None;
            }
        }
        Record::Confined { vm, limit } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.confined = Some(limit);
            }
        }
        Record::Freed { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.confined = None;
            }
        }
        Record::Watched { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.watched = true;
            }
        }
        Record::Unwatched { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.watched = false;
            }
        }
        Record::Shrunk { vm, shrink } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.shrunk = Some(shrink);
            }
        }
        Record::GivenBack { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.shrunk = None;
            }
        }
        Record::Asked { vm, before } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.asked_before = Some(before);
            }
        }
        Record::NotAsked { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.asked_before = None;
            }
        }
        Record::HomeLifted { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.leave_home();
            }
        }
        Record::Restored { vm } => {
            if let Some(entry) = entries.get_mut(&vm) {
                entry.leave_home();
                (entry.held, entry.confined, entry.watched) = (None, None, false);
                (entry.shrunk, entry.asked_before) = (None, None);
            }
        }
        Record::Forgotten { vm } => {
            entries.remove(&vm);
        }
    }
}

/// Writes what is in force as a new file and puts it in the place of the old one.
fn compact(dir: &Path, path: &Path, entries: &BTreeMap<VmId, Entry>) -> Result<File, JournalError> {
    let new = dir.join("journal.new");
    let mut text = String::new();
    for (&vm, entry) in entries {
        text.push_str(&encode(&Record::First {
            run: entry.run.clone(),
            before: entry.before.clone(),
        }));
        for (&index, cpus) in &entry.pinned {
            text.push_str(&encode(&Record::Pinned {
                vm,
                vcpus: vec![index],
                cpus: cpus.clone(),
            }));
        }
        for nodes in entry.home.iter().cloned() {
            text.push_str(&encode(&Record::Home { vm, nodes }));
        }
        for nodes in entry.nodes.iter().cloned() {
            text.push_str(&encode(&Record::Nodes { vm, nodes }));
        }
        for to in entry.moving.iter().cloned() {
            text.push_str(&encode(&Record::Moving { vm, to }));
        }
        for quotas in entry.held.iter().copied() {
            text.push_str(&encode(&Record::Held { vm, quotas }));
        }
        for limit in entry.confined.iter().copied() {
            text.push_str(&encode(&Record::Confined { vm, limit }));
        }
        if entry.watched {
            text.push_str(&encode(&Record::Watched { vm }));
        }
        for shrink in entry.shrunk.iter().copied() {
            text.push_str(&encode(&Record::Shrunk { vm, shrink }));
        }
        for before in entry.asked_before.iter().copied() {
            text.push_str(&encode(&Record::Asked { vm, before }));
        }
    }
    let mut file = File::options()
        .append(true)
        .create_new(true)
        .open(&new)
        .or_else(|_| {
            // Left over from a crash in just this place, or not ours to write through.
            std::fs::remove_file(&new)?;
            File::options().append(true).create_new(true).open(&new)
        })
        .map_err(|e| failed("create", &new, &e))?;
    let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    written.map_err(|e| failed("write", &new, &e))?;
    std::fs::rename(&new, path).map_err(|e| failed("replace", path, &e))?;
    let synced = File::open(dir).and_then(|dir| dir.sync_all());
    synced.map_err(|e| failed("sync", dir, &e))?;
    Ok(file)
}

/// The lock that one agent (or the guard that undoes for it) holds while it owns the journal.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock; `None` while somebody else holds it.
    ///
    /// # Errors
    /// When the lock file cannot be created.
    pub fn try_take(dir: &Path) -> Result<Option<Lock>, JournalError> {
        let path = dir.join("agent.lock");
        std::fs::create_dir_all(dir).map_err(|e| failed("create", dir, &e))?;
        let file = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path);
        let file = file.map_err(|e| failed("open", &path, &e))?;
        match rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(failed("lock", &path, &e.into())),
        }
    }

    /// Takes the lock, waiting for at most so long: a guard may be about to finish.
    ///
    /// # Errors
    /// When the lock file cannot be created, or another agent holds it all that time.
    pub fn take(dir: &Path, patience: std::time::Duration) -> Result<Lock, JournalError> {
        let step = std::time::Duration::from_millis(50);
        let mut waited = std::time::Duration::ZERO;
        loop {
            if let Some(lock) = Lock::try_take(dir)? {
                return Ok(lock);
            }
            if waited >= patience {
                let cause = std::io::Error::other("another agent holds it; stop that one first");
                return Err(failed("lock", &dir.join("agent.lock"), &cause));
            }
            std::thread::sleep(step);
            waited += step;
        }
    }
}

/// What a journal holds, without touching it; nothing where it is absent or unreadable.
pub fn peek(dir: &Path) -> BTreeMap<VmId, Entry> {
    let text = read::text_if_there(&dir.join(FILE), LIMIT_BYTES);
    text.ok()
        .flatten()
        .map(|text| replay(text.as_bytes()).entries)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests;
