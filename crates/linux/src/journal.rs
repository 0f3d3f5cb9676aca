//! What the agent has changed and how it was before, on disk before anything is changed.
//!
//! One line per key, `{vm, lever, entry}` behind a checksum, written and synced before the agent acts. The last line of a key
//! wins: `entry` is what is in force there and how it was, `null` once nothing is. The journal knows no lever; each brings
//! the type of its entry ([`Written`]). Opening puts the lines into a map and writes that anew (new file, sync, rename), so
//! the file stays small. A torn last line is what a crash leaves and is dropped in silence; any other line that does not
//! check is kept aside in `journal.damaged` and reported, and the rest still counts: a VM is never lost because a
//! neighbour's line is broken.
//!
//! The key `run` of a VM says which process it is and how it was when it was first touched; lines of a VM without it tell
//! nothing. A restored VM keeps it until it ends, and so does one whose home was lifted: restoring leaves pins in
//! libvirt's XML that are nobody's wish, and only this tells them from an operator's. Where nothing is pinned any more and
//! the VM was changed by others, it is written again before the VM is touched again.

mod former;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use homenode_units::{CpuSet, NodeSet, VmId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

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

/// What is written down of one lever of a VM, before it is pulled and for as long as something of the agent's is in force there.
pub trait Written: Serialize + DeserializeOwned {
    /// The lever's name in the file.
    const KEY: &'static str;
}

/// The key of [`Start`].
const RUN: &str = "run";

/// Which run of a VM was touched, and how it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Start {
    run: Run,
    before: Before,
}

/// What is in force for one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Which run of it.
    pub run: Run,
    /// How it was before.
    pub before: Before,
    /// By lever.
    levers: BTreeMap<String, Value>,
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

    /// Writes down how a VM is before it is touched; of another run of it nothing is in force.
    ///
    /// # Errors
    /// When it could not be written, here and below; then the agent must not act.
    pub fn begin(&mut self, run: Run, before: Before) -> Result<(), JournalError> {
        let vm = run.vm;
        let former = self.entry(vm).filter(|entry| entry.run != run);
        // In this order: a crash in between leaves a run that is over, of which nothing is known to be in force.
        let mut lines: Vec<Line> = former.map(|entry| entry.none(|_| true)).unwrap_or_default();
        lines.push(Line::new(vm, RUN, &Start { run, before }));
        self.write(lines)
    }

    /// Writes down what will be in force on a lever of a VM.
    pub fn set<T: Written>(&mut self, vm: VmId, entry: &T) -> Result<(), JournalError> {
        self.write(vec![Line::new(vm, T::KEY, entry)])
    }

    /// Under these keys nothing is in force for a VM any more.
    pub fn clear(&mut self, vm: VmId, keys: &[&str]) -> Result<(), JournalError> {
        let entry = self.entry(vm);
        self.write(
            entry
                .map(|entry| entry.none(|key| keys.contains(&key)))
                .unwrap_or_default(),
        )
    }

    /// Everything of a VM was restored.
    pub fn clear_all(&mut self, vm: VmId) -> Result<(), JournalError> {
        self.write(
            self.entry(vm)
                .map(|entry| entry.none(|_| true))
                .unwrap_or_default(),
        )
    }

    /// The VM ended.
    pub fn forget(&mut self, vm: VmId) -> Result<(), JournalError> {
        self.write(vec![Line::none(vm, RUN)])
    }

    /// Returns once the lines are on disk.
    fn write(&mut self, lines: Vec<Line>) -> Result<(), JournalError> {
        let length = self
            .file
            .metadata()
            .map_err(|e| failed("write", &self.path, &e))?
            .len();
        let text: String = lines.iter().map(Line::encode).collect();
        let written = self
            .file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.sync_data());
        if let Err(e) = written {
            // Half a line would spoil the next one.
            let _ = self.file.set_len(length);
            return Err(failed("write", &self.path, &e));
        }
        for line in lines {
            line.apply(&mut self.entries);
        }
        Ok(())
    }
}

impl Entry {
    /// What is in force on a lever.
    pub fn get<T: Written>(&self) -> Option<T> {
        T::deserialize(self.levers.get(T::KEY)?).ok()
    }

    /// Whether something stands under any of these keys.
    pub fn has(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.levers.contains_key(*key))
    }

    /// Lines after which nothing is in force on these of its levers.
    fn none(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Line> {
        let keys = self.levers.keys().filter(|key| is_meant(key));
        keys.map(|key| Line::none(self.run.vm, key)).collect()
    }
}

fn failed(what: &'static str, path: &Path, cause: &std::io::Error) -> JournalError {
    JournalError {
        what,
        path: path.display().to_string(),
        cause: cause.to_string(),
    }
}

/// One line of the file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    vm: VmId,
    lever: String,
    entry: Option<Value>,
}

impl Line {
    fn new(vm: VmId, lever: &str, entry: &impl Serialize) -> Line {
        let entry = serde_json::to_value(entry).expect("entries hold nothing that JSON cannot");
        Line {
            vm,
            lever: lever.to_owned(),
            entry: Some(entry),
        }
    }

    fn none(vm: VmId, lever: &str) -> Line {
        Line {
            vm,
            lever: lever.to_owned(),
            entry: None,
        }
    }

    fn encode(&self) -> String {
        let json = serde_json::to_string(self).expect("lines hold nothing that JSON cannot");
        format!("{:08x} {json}\n", crc32fast::hash(json.as_bytes()))
    }

    fn decode(line: &[u8]) -> Option<Line> {
        let line = std::str::from_utf8(line).ok()?;
        let (sum, json) = line.split_once(' ')?;
        let is_whole =
            sum.len() == 8 && u32::from_str_radix(sum, 16).ok()? == crc32fast::hash(json.as_bytes());
        let line: Line = serde_json::from_str(json).ok().filter(|_| is_whole)?;
        // A run that cannot be read would make a VM of which it is the start disappear in silence.
        let starts = |entry: &Value| line.lever != RUN || Start::deserialize(entry).is_ok();
        line.entry.as_ref().is_none_or(starts).then_some(line)
    }

    fn apply(self, entries: &mut BTreeMap<VmId, Entry>) {
        match (self.lever.as_str(), self.entry) {
            (RUN, None) => {
                entries.remove(&self.vm);
            }
            (RUN, Some(start)) => {
                let Ok(Start { run, before }) = Start::deserialize(start) else {
                    return;
                };
                let levers = entries
                    .remove(&self.vm)
                    .map(|entry| entry.levers)
                    .unwrap_or_default();
                entries.insert(self.vm, Entry { run, before, levers });
            }
            (_, entry) => {
                let Some(of) = entries.get_mut(&self.vm) else {
                    return;
                };
                match entry {
                    Some(entry) => of.levers.insert(self.lever, entry),
                    None => of.levers.remove(&self.lever),
                };
            }
        }
    }
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
        if let Some(line) = Line::decode(line) {
            line.apply(&mut replay.entries);
        } else if let Some(lines) = former::lines(line, &replay.entries) {
            lines.into_iter().for_each(|line| line.apply(&mut replay.entries));
        } else if !is_torn {
            replay.damaged.push(line.to_vec());
        }
    }
    replay
}

/// Writes what is in force as a new file and puts it in the place of the old one.
fn compact(dir: &Path, path: &Path, entries: &BTreeMap<VmId, Entry>) -> Result<File, JournalError> {
    let new = dir.join("journal.new");
    let mut text = String::new();
    for (&vm, entry) in entries {
        let (run, before) = (entry.run.clone(), entry.before.clone());
        text.push_str(&Line::new(vm, RUN, &Start { run, before }).encode());
        for (lever, entry) in &entry.levers {
            text.push_str(&Line::new(vm, lever, entry).encode());
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
