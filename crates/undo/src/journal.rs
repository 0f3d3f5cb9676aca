//! The journal: what the agent changed and what it was before, on disk before anything is changed.
//!
//! One line per key, `{vm, lever, entry}` behind a checksum, written and synced before the agent acts. The last line of a key
//! counts: its `entry` says what is in force under the key and what it was before, and is `null` if nothing is in force. The
//! journal knows no levers: each lever defines the type of its entry ([`Written`]). Each line is numbered and is in two files, so
//! a flipped bit or a lost line in one file does no harm. A crash leaves a torn last line, which is dropped silently. Any other
//! line with a bad checksum is kept in `journal.damaged` and reported.
//!
//! Reading needs neither free space nor permission to write, so the guard can undo the listed changes on a full disk. Only a
//! change must be on disk before it is made. What is no longer in force is struck out when there is room. Undoing it twice does
//! no harm, since a setting is undone only if it still has the agent's value. The files are rewritten once they are several times
//! as long as what is in force; a spare file is removed to make room for the rewrite.
//!
//! The key `run` of a VM identifies its process and says what the VM was like when it was first touched. Other lines of a VM mean
//! nothing without it. A VM that was restored, or whose home was lifted, keeps this line until it ends: restoring leaves pins in
//! libvirt's XML, and only this line tells them from an operator's. If nothing is pinned any more and another program changed the
//! VM, the line is written again before the VM is touched again.

mod line;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

#[cfg(any(test, feature = "testing"))]
use homenode_kernel::fault::{self, Point};
use homenode_kernel::task::Process;
use homenode_units::{CpuSet, NodeSet, VmId};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::state_dir::{StateDir, StateError};
use line::{Line, Replay, replay};

const COPIES: [&str; 2] = ["journal", "journal.copy"];
const DAMAGED: &str = "journal.damaged";
/// File that reserves room for a rewrite on a full disk.
const SPARE: &str = "journal.spare";
const SPARE_BYTES: usize = 16 << 10;
/// The files are rewritten once they reach this length, or four times the length of what is in force if that is more.
const REWRITE_BYTES: u64 = 256 << 10;
/// Enough for 10,000 VMs of 256 vCPUs.
const LIMIT_BYTES: u64 = 256 << 20;

/// Why the journal could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; without a journal the agent changes nothing")]
pub struct JournalError(#[from] pub StateError);

/// The journal's entry under this key cannot be read by any lever.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the journal entry under {0} cannot be read: another version of homenode wrote it, or it is damaged")]
pub struct Unreadable(pub String);

/// One run of one VM: a VM that was restarted has another start time and nothing to restore.
#[derive(Clone, Debug, Eq, Serialize, Deserialize)]
pub struct Run {
    /// The VM.
    pub vm: VmId,
    /// The VM's name, for people.
    pub name: String,
    /// libvirt's number of this run.
    pub runtime_id: u32,
    /// The VM's QEMU process.
    pub pid: i32,
    /// When that process started, in clock ticks since boot.
    pub start_ticks: u64,
}

/// Compares everything but the name, which may change during a run.
impl PartialEq for Run {
    fn eq(&self, other: &Run) -> bool {
        let id = |run: &Run| (run.vm, run.runtime_id, run.pid, run.start_ticks);
        id(self) == id(other)
    }
}

/// A thread of QEMU's that can be pinned and runs no vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Helper {
    /// The emulator: all threads that have no other role.
    Emulator,
    /// The I/O thread of this number.
    IoThread(u32),
}

impl std::fmt::Display for Helper {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Helper::Emulator => f.write_str("the emulator"),
            Helper::IoThread(id) => write!(f, "I/O thread {id}"),
        }
    }
}

/// A thread that runs a vCPU. Its number may be reused, but not its number together with its start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuThread {
    /// Kernel's thread id.
    pub tid: i32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

/// The state of a VM before the agent touched it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Before {
    /// CPUs of each vCPU.
    pub vcpus: BTreeMap<u16, CpuSet>,
    /// vCPUs that the operator had pinned.
    pub operator_pins: Vec<u16>,
    /// CPUs of the emulator.
    pub emulator: CpuSet,
    /// CPUs of each I/O thread.
    pub iothreads: BTreeMap<u32, CpuSet>,
    /// Emulator and I/O threads that the operator had pinned.
    pub operator_helpers: Vec<Helper>,
    /// Memory nodes, if libvirt can change them while the VM runs.
    pub nodes: Option<NodeSet>,
    /// Threads of vCPUs, if only QEMU's monitor knows them: restoring must not have to ask it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub threads: BTreeMap<u16, VcpuThread>,
}

/// A lever's journal entry for a VM, from before the lever is used until none of its changes is in force.
pub trait Written: Serialize + DeserializeOwned {
    /// The lever's key in the file.
    const KEY: &'static str;
}

/// Key of the nodes to which a VM's pages were moving: the next agent resumes the move, and nothing is undone.
pub const MOVING: &str = "pages";

/// Key of settings that are no longer in force, kept in case a VM comes back with them.
pub const PAST: &str = "past";

/// Whether the entry under this key is undone after the agent's end.
pub fn is_undone(key: &str) -> bool {
    key != MOVING && key != PAST
}

/// The key of [`Start`].
const RUN: &str = "run";

/// Which run of a VM was touched, and its state before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Start {
    run: Run,
    before: Before,
}

/// What is in force for one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The run that this entry belongs to.
    pub run: Run,
    /// The VM's state before.
    pub before: Before,
    /// The entries by lever.
    levers: BTreeMap<String, Value>,
}

/// The journal of one agent. Only the holder of the agent's lock may write to it.
#[derive(Debug)]
pub struct Journal {
    dir: StateDir,
    /// Open to append; `None` if the file must be rewritten first.
    copies: [Option<File>; 2],
    entries: BTreeMap<VmId, Entry>,
    /// The number of the next line.
    next: u64,
    /// Lines to write before any others, because they could not be written when they were due.
    owed: Vec<Line>,
    /// File size in bytes at which both files are rewritten.
    rewrite_at: u64,
    /// Whether the files existed, complete and undamaged; if not, the marks on the VMs may know more.
    is_whole: bool,
    /// Whether the files existed.
    was_there: bool,
    /// What was wrong with the files, for the operator.
    pub warnings: Vec<String>,
}

impl Journal {
    /// Opens the journal in this state directory, and creates what is missing. If the files cannot be written, still loads their
    /// contents, with a warning.
    ///
    /// # Errors
    /// When the directory cannot be used, or a file is too large.
    pub fn open(state: &Path) -> Result<Journal, JournalError> {
        Journal::open_in(StateDir::open(state)?)
    }

    /// As [`Journal::open`], in a directory that is already open, even if it was moved since.
    ///
    /// # Errors
    /// When a file is too large.
    pub(crate) fn open_in(dir: StateDir) -> Result<Journal, JournalError> {
        let (replay, is_there, mut warnings) = read(&dir)?;
        let Replay {
            entries,
            damaged,
            lost,
            next,
        } = replay;
        let is_whole = is_there && lost == 0 && damaged.is_empty();
        if !damaged.is_empty() {
            let aside = dir.open_to_append(DAMAGED).and_then(|mut file| {
                let all: Vec<u8> = damaged
                    .iter()
                    .flat_map(|line| [line, &b"\n"[..]].concat())
                    .collect();
                file.write_all(&all)
                    .map_err(|e| StateError::new("write", &dir.path_of(DAMAGED), e))
            });
            let what_of_it = match lost {
                0 => "the other copy has them".to_owned(),
                _ => format!("{lost} of them in both copies; the changes that they recorded are not undone"),
            };
            let where_to = match aside {
                Ok(()) => format!("set aside in {}", dir.path_of(DAMAGED).display()),
                Err(error) => error.to_string(),
            };
            warnings.push(format!(
                "{}: {} damaged lines, {what_of_it}; {where_to}",
                dir.path_of(COPIES[0]).display(),
                damaged.len()
            ));
        }
        let mut journal = Journal {
            dir,
            copies: [None, None],
            entries,
            next,
            owed: Vec::new(),
            rewrite_at: 0,
            is_whole,
            was_there: is_there,
            warnings,
        };
        if let Err(error) = journal.rewrite() {
            journal.warnings.push(error.to_string());
        }
        Ok(journal)
    }

    /// Whether the journal's files existed, complete and undamaged.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether a journal existed before it was opened.
    pub fn was_there(&self) -> bool {
        self.was_there
    }

    /// What is in force, per VM.
    pub fn entries(&self) -> &BTreeMap<VmId, Entry> {
        &self.entries
    }

    /// VMs with something to undo.
    pub fn in_force(&self) -> Vec<VmId> {
        let entries = self.entries.iter().filter(|(_, entry)| entry.is_in_force());
        entries.map(|(vm, _)| *vm).collect()
    }

    /// What is in force for this VM.
    pub fn entry(&self, vm: VmId) -> Option<&Entry> {
        self.entries.get(&vm)
    }

    /// Writes down the state of a VM before it is touched. What was in force on another run of the VM no longer is.
    ///
    /// # Errors
    /// If it could not be written, here and in the methods below; the agent must then not act.
    pub fn begin(&mut self, run: Run, before: Before) -> Result<(), JournalError> {
        self.write(self.start(run, before))
    }

    /// Returns the lines that make this run the touched run of its VM.
    fn start(&self, run: Run, before: Before) -> Vec<Line> {
        let former = self.entry(run.vm).filter(|entry| entry.run != run);
        // The former levers are cleared first: after a crash in between, the journal has an ended run with nothing in force.
        let mut lines: Vec<Line> = former.map(|entry| entry.none(|_| true)).unwrap_or_default();
        lines.push(Line::new(run.vm, RUN, &Start { run, before }));
        lines
    }

    /// Adds what another witness reports to be in force on a run of a VM. Existing entries take precedence. What is added has to
    /// be undone, so it counts as in force even if it cannot be written down.
    pub fn take_in(&mut self, seen: &Entry) {
        let vm = seen.run.vm;
        let known = self.entry(vm).filter(|known| known.run == seen.run);
        let new = seen
            .levers
            .iter()
            .filter(|(lever, _)| !known.is_some_and(|known| known.has(&[lever])));
        let new: Vec<Line> = new.map(|(lever, entry)| Line::new(vm, lever, entry)).collect();
        if new.is_empty() {
            return;
        }
        let start = match known {
            Some(_) => Vec::new(),
            None => self.start(seen.run.clone(), seen.before.clone()),
        };
        self.note(start.into_iter().chain(new).collect());
    }

    /// Writes down what a lever of a VM is about to put in force.
    ///
    /// # Errors
    /// If it could not be written; the agent must then not act.
    pub fn set<T: Written>(&mut self, vm: VmId, entry: &T) -> Result<(), JournalError> {
        self.write(vec![Line::new(vm, T::KEY, entry)])
    }

    /// Strikes out these keys of a VM: nothing is in force there any more.
    pub fn clear(&mut self, vm: VmId, keys: &[&str]) {
        let lines = self.entry(vm).map(|entry| entry.none(|key| keys.contains(&key)));
        self.note(lines.unwrap_or_default());
    }

    /// Strikes out all keys of a VM: everything was restored.
    pub fn clear_all(&mut self, vm: VmId) {
        let lines = self.entry(vm).map(|entry| entry.none(|_| true));
        self.note(lines.unwrap_or_default());
    }

    /// Strikes out a VM that ended.
    pub fn forget(&mut self, vm: VmId) {
        self.note(vec![Line::none(vm, RUN)]);
    }

    /// Writes down facts: at once, or with the next line that can be written.
    fn note(&mut self, lines: Vec<Line>) {
        for line in &lines {
            line.clone().apply(&mut self.entries);
        }
        self.owed.extend(lines);
        let _ = self.write(Vec::new());
    }

    /// Writes these lines and all that are owed. Returns once they are on disk.
    fn write(&mut self, lines: Vec<Line>) -> Result<(), JournalError> {
        if self.copies[0].is_none() {
            self.rewrite()?;
        }
        let all = self.owed.iter().chain(&lines);
        let text: String = (self.next..)
            .zip(all)
            .map(|(n, line)| line.clone().numbered(n).encode())
            .collect();
        if text.is_empty() {
            return Ok(());
        }
        let mut written = self.append(0, &text);
        if written.is_err() {
            // Removing the spare file may make room.
            let _ = self.dir.remove(SPARE);
            written = self.append(0, &text);
        }
        let length = written?;
        // The second copy only helps if the first is damaged: the agent may act without it.
        if self.append(1, &text).is_err() {
            self.copies[1] = None;
        }
        self.next += (self.owed.len() + lines.len()) as u64;
        self.owed.clear();
        for line in lines {
            line.apply(&mut self.entries);
        }
        if length >= self.rewrite_at && self.rewrite().is_err() {
            // Tried again once the file has doubled in length.
            self.rewrite_at = length * 2;
        }
        Ok(())
    }

    /// Appends text to a copy. Returns the new length.
    fn append(&mut self, copy: usize, text: &str) -> Result<u64, JournalError> {
        let path = self.dir.path_of(COPIES[copy]);
        let failed = |e: std::io::Error| JournalError::from(StateError::new("write", &path, e));
        let Some(file) = &mut self.copies[copy] else {
            return Err(failed(std::io::ErrorKind::NotFound.into()));
        };
        let stat = file.metadata().map_err(failed)?;
        if stat.nlink() == 0 {
            self.copies[copy] = None;
            return Err(failed(std::io::Error::other("another process removed it")));
        }
        let length = stat.len();
        #[cfg(any(test, feature = "testing"))]
        fault::of_file(Point::Write).map_err(failed)?;
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_data());
        #[cfg(any(test, feature = "testing"))]
        let written = written.and_then(|()| fault::of_file(Point::Written));
        if let Err(e) = written {
            // A partial line would corrupt the next one.
            let _ = file.set_len(length);
            return Err(failed(e));
        }
        Ok(length + text.len() as u64)
    }

    /// Replaces both files with new ones that list only what is in force. Removes the spare file to make room.
    fn rewrite(&mut self) -> Result<(), JournalError> {
        let mut lines = vec![Line::reset()];
        lines.extend(self.entries.values().flat_map(|entry| entry.lines(|_| true)));
        let count = lines.len() as u64;
        let text: String = (self.next..)
            .zip(lines)
            .map(|(n, line)| line.numbered(n).encode())
            .collect();
        self.dir.remove(SPARE)?;
        // Even if the rewrite fails, no number is used twice, and no line is appended to a file that may have been replaced.
        self.next += count;
        self.copies[0] = None;
        // One after the other, so that one whole copy of each line always exists.
        self.copies[0] = Some(self.dir.replace(COPIES[0], text.as_bytes())?);
        self.owed.clear();
        self.copies[1] = self.dir.replace(COPIES[1], text.as_bytes()).ok();
        let length = text.len() as u64;
        self.rewrite_at = REWRITE_BYTES.max(4 * length);
        // Without the spare file, rewriting fails a little earlier on a full disk.
        let _ = self.dir.replace(SPARE, &vec![b' '; 2 * text.len() + SPARE_BYTES]);
        Ok(())
    }
}

/// Reads both files. Returns their lines, whether any file exists, and the errors of a file that the other one makes up for.
fn read(dir: &StateDir) -> Result<(Replay, bool, Vec<String>), JournalError> {
    let [first, second] = COPIES.map(|name| dir.read(name, LIMIT_BYTES));
    match (first, second) {
        (Err(error), Ok(None)) | (Err(error), Err(_)) => Err(error.into()),
        (first, second) => {
            let warnings = [&first, &second]
                .into_iter()
                .filter_map(|read| read.as_ref().err());
            let warnings = warnings
                .map(|error| format!("{error}; the other copy is used"))
                .collect();
            let copies = [first, second].map(|read| read.ok().flatten());
            let is_there = copies.iter().any(Option::is_some);
            let bytes = copies.map(Option::unwrap_or_default);
            Ok((replay(&[&bytes[0], &bytes[1]]), is_there, warnings))
        }
    }
}

impl Run {
    /// The run's QEMU process.
    pub fn process(&self) -> Process {
        Process {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }
}

impl Entry {
    /// The QEMU process of the entry's run.
    pub fn process(&self) -> Process {
        self.run.process()
    }

    /// Keys that have something to undo, even if no lever can read the entry.
    pub fn to_undo(&self) -> impl Iterator<Item = &str> {
        self.keys().filter(|key| is_undone(key))
    }

    /// Whether there is anything to undo.
    pub fn is_in_force(&self) -> bool {
        self.to_undo().next().is_some()
    }

    /// Returns what is in force on a lever; `None` if it cannot be read as that type, though [`Entry::keys`] still lists it.
    pub fn get<T: Written>(&self) -> Option<T> {
        T::deserialize(self.levers.get(T::KEY)?).ok()
    }

    /// Keys that have an entry.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.levers.keys().map(String::as_str)
    }

    /// Keeps only the keys for which `is_meant` returns true.
    #[must_use]
    pub fn only(mut self, is_meant: impl Fn(&str) -> bool) -> Entry {
        self.levers.retain(|key, _| is_meant(key));
        self
    }

    /// Returns the selected keys as lines of a file, without numbers.
    pub fn written(&self, is_meant: impl Fn(&str) -> bool) -> String {
        self.lines(is_meant).iter().map(Line::encode).collect()
    }

    /// Parses the lines of [`Entry::written`]. One bad line discards all of them: a VM that is half known must not be undone.
    pub fn from_written(text: &str) -> Option<Entry> {
        let mut entries = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            Line::decode(line.as_bytes())?.apply(&mut entries);
        }
        let (_, entry) = entries.pop_first()?;
        entries.is_empty().then_some(entry)
    }

    /// Whether any of these keys has an entry.
    pub fn has(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.levers.contains_key(*key))
    }

    /// Lines that state the run and the selected levers.
    fn lines(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Line> {
        let (vm, run, before) = (self.run.vm, self.run.clone(), self.before.clone());
        let levers = self.levers.iter().filter(|(lever, _)| is_meant(lever));
        let levers = levers.map(|(lever, entry)| Line::new(vm, lever, entry));
        std::iter::once(Line::new(vm, RUN, &Start { run, before }))
            .chain(levers)
            .collect()
    }

    /// Lines that strike out the selected levers.
    fn none(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Line> {
        let keys = self.levers.keys().filter(|key| is_meant(key));
        keys.map(|key| Line::none(self.run.vm, key)).collect()
    }
}

/// Whether a journal exists, or may exist but cannot be read.
pub(crate) fn is_there(state: &Path) -> bool {
    let found = StateDir::open_existing(state).map(|dir| dir.map(|dir| read(&dir)));
    !matches!(found, Ok(None | Some(Ok((_, false, _)))))
}

/// The notice for a journal that existed and is gone.
pub(crate) fn lost_at(state: &Path) -> String {
    let state = state.display();
    format!(
        "the journal of the agent that acted last is no longer in {state}/private: what that agent changed is known only for \
         VMs that carry its mark. If the directory was moved, put it back and run `homenode release --state {state}`; if it was \
         removed, compare pins, quotas and memory nodes of each VM with what they should be (`virsh vcpupin`, `virsh schedinfo`, `virsh \
         numatune`)"
    )
}

/// Reads a journal without touching it; empty if it is missing or unreadable.
pub fn peek(state: &Path) -> BTreeMap<VmId, Entry> {
    try_peek(state).unwrap_or_default()
}

/// Like [`peek`]; `None` if the journal exists but cannot be read.
pub(crate) fn try_peek(state: &Path) -> Option<BTreeMap<VmId, Entry>> {
    let Some(dir) = StateDir::open_existing(state).ok()? else {
        return Some(BTreeMap::new());
    };
    read(&dir).ok().map(|(replay, ..)| replay.entries)
}

#[cfg(test)]
pub(crate) mod tests;
