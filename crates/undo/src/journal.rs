//! What the agent has changed and how it was before, on disk before anything is changed.
//!
//! One line per key, `{vm, lever, entry}` behind a checksum, written and synced before the agent acts. The last line of a key
//! wins: `entry` is what is in force there and how it was, `null` once nothing is. The journal knows no lever; each brings
//! the type of its entry ([`Written`]). Each line is numbered and stands in two files: one that a bit has turned in, or that is
//! lost, takes nothing with it. A torn last line is what a crash leaves and is dropped in silence; any other line that does
//! not check is kept aside in `journal.damaged` and reported.
//!
//! Reading needs no room and no right to write: the guard undoes what a full disk lists. Only what is to be set must be on
//! disk before it is done. What is no longer in force is struck out when there is room: undoing it twice does no harm, since
//! only what still reads as the agent's is undone. The files are rewritten once they are several times what they say, with a
//! spare file that is given up for it.
//!
//! The key `run` of a VM says which process it is and how it was when it was first touched; lines of a VM without it tell
//! nothing. A restored VM keeps it until it ends, and so does one whose home was lifted: restoring leaves pins in
//! libvirt's XML that are nobody's wish, and only this tells them from an operator's. Where nothing is pinned any more and
//! the VM was changed by others, it is written again before the VM is touched again.

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
/// Room for a rewriting where the disk is full.
const SPARE: &str = "journal.spare";
const SPARE_BYTES: usize = 16 << 10;
/// Files are let grow to this, or to several times what they say.
const REWRITE_BYTES: u64 = 256 << 10;
/// 10,000 VMs of 256 vCPUs fit.
const LIMIT_BYTES: u64 = 256 << 20;

/// Why the journal could not be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}; without a journal the agent changes nothing")]
pub struct JournalError(#[from] pub StateError);

/// One run of one VM: a VM that was restarted has another start time and nothing to restore.
#[derive(Clone, Debug, Eq, Serialize, Deserialize)]
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

/// The same run, whatever it is called by now.
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
    /// The emulator, with all threads that are nothing else.
    Emulator,
    /// The I/O thread of this number.
    IoThread(u32),
}

/// A thread that runs a vCPU: its number may be used again, its number and start time together may not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct VcpuThread {
    /// Kernel's thread id.
    pub tid: i32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
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
    /// Threads of vCPUs that QEMU's monitor alone can tell: restoring must not have to ask it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub threads: BTreeMap<u16, VcpuThread>,
}

/// What is written down of one lever of a VM, before it is pulled and for as long as something of the agent's is in force there.
pub trait Written: Serialize + DeserializeOwned {
    /// The lever's name in the file.
    const KEY: &'static str;
}

/// The key of where a VM's pages were moving to: the next agent goes on from there, and nothing is undone.
pub const MOVING: &str = "pages";

/// The key of what is in force no more, and is remembered in case that a VM comes back with it.
pub const PAST: &str = "past";

/// Whether what stands under a key is undone after the agent.
pub fn is_undone(key: &str) -> bool {
    key != MOVING && key != PAST
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
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Which run of it.
    pub run: Run,
    /// How it was before.
    pub before: Before,
    /// By lever.
    levers: BTreeMap<String, Value>,
}

/// The journal of one agent. Only the holder of the agent's lock may write to it.
#[derive(Debug)]
pub struct Journal {
    dir: StateDir,
    /// Open to add to; `None` where it is to be written anew first.
    copies: [Option<File>; 2],
    entries: BTreeMap<VmId, Entry>,
    /// The number of the next line.
    next: u64,
    /// Lines that are to be written before any other: what is so and could not be said yet.
    owed: Vec<Line>,
    /// Bytes in a file at which both are rewritten.
    rewrite_at: u64,
    /// Whether the files had all that was written to them; else VMs' own marks may know more.
    is_whole: bool,
    /// Whether there were files.
    was_there: bool,
    /// What was wrong with the files, for the operator.
    pub warnings: Vec<String>,
}

impl Journal {
    /// Opens the journal in this state directory, and makes what is missing. Where the files cannot be written what they say is
    /// there all the same, with a warning.
    ///
    /// # Errors
    /// When the directory cannot be used, or a file is too large.
    pub fn open(state: &Path) -> Result<Journal, JournalError> {
        Journal::open_in(StateDir::open(state)?)
    }

    /// The same in a directory that is open, wherever it was moved since.
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
                _ => format!("{lost} of them in both copies; what they said is not undone"),
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

    /// Whether its files were there with all that had been written to them.
    pub fn is_whole(&self) -> bool {
        self.is_whole
    }

    /// Whether there was a journal before it was opened.
    pub fn was_there(&self) -> bool {
        self.was_there
    }

    /// What is in force, per VM.
    pub fn entries(&self) -> &BTreeMap<VmId, Entry> {
        &self.entries
    }

    /// VMs on which something is to be undone.
    pub fn in_force(&self) -> Vec<VmId> {
        let entries = self.entries.iter().filter(|(_, entry)| entry.is_in_force());
        entries.map(|(vm, _)| *vm).collect()
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
        self.write(self.start(run, before))
    }

    /// Lines after which this run of a VM is the one that was touched.
    fn start(&self, run: Run, before: Before) -> Vec<Line> {
        let former = self.entry(run.vm).filter(|entry| entry.run != run);
        // In this order: a crash in between leaves a run that is over, of which nothing is known to be in force.
        let mut lines: Vec<Line> = former.map(|entry| entry.none(|_| true)).unwrap_or_default();
        lines.push(Line::new(run.vm, RUN, &Start { run, before }));
        lines
    }

    /// Takes in what another witness says is in force on a run of a VM. What is written here of a lever is believed before that.
    /// It is in force whether it can be written down or not, and has to be undone.
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

    /// Writes down what will be in force on a lever of a VM.
    ///
    /// # Errors
    /// When it could not be written; then the agent must not act.
    pub fn set<T: Written>(&mut self, vm: VmId, entry: &T) -> Result<(), JournalError> {
        self.write(vec![Line::new(vm, T::KEY, entry)])
    }

    /// Under these keys nothing is in force for a VM any more.
    pub fn clear(&mut self, vm: VmId, keys: &[&str]) {
        let lines = self.entry(vm).map(|entry| entry.none(|key| keys.contains(&key)));
        self.note(lines.unwrap_or_default());
    }

    /// Everything of a VM was restored.
    pub fn clear_all(&mut self, vm: VmId) {
        let lines = self.entry(vm).map(|entry| entry.none(|_| true));
        self.note(lines.unwrap_or_default());
    }

    /// The VM ended.
    pub fn forget(&mut self, vm: VmId) {
        self.note(vec![Line::none(vm, RUN)]);
    }

    /// Writes down what is so already: at once, or with the next line that can be written.
    fn note(&mut self, lines: Vec<Line>) {
        for line in &lines {
            line.clone().apply(&mut self.entries);
        }
        self.owed.extend(lines);
        let _ = self.write(Vec::new());
    }

    /// Returns once the lines are on disk, and all that were owed.
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
            // There may be room once the spare file is gone.
            let _ = self.dir.remove(SPARE);
            written = self.append(0, &text);
        }
        let length = written?;
        // The second is there for when the first is damaged: the agent may act without it.
        if self.append(1, &text).is_err() {
            self.copies[1] = None;
        }
        self.next += (self.owed.len() + lines.len()) as u64;
        self.owed.clear();
        for line in lines {
            line.apply(&mut self.entries);
        }
        if length >= self.rewrite_at && self.rewrite().is_err() {
            // Tried again when it has doubled.
            self.rewrite_at = length * 2;
        }
        Ok(())
    }

    /// Adds text to a copy; how long that is then.
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
            // Half a line would spoil the next one.
            let _ = file.set_len(length);
            return Err(failed(e));
        }
        Ok(length + text.len() as u64)
    }

    /// Writes what is in force as new files and puts them in the place of the old ones. The spare file makes room for it.
    fn rewrite(&mut self) -> Result<(), JournalError> {
        let mut lines = vec![Line::reset()];
        lines.extend(self.entries.values().flat_map(|entry| entry.lines(|_| true)));
        let count = lines.len() as u64;
        let text: String = (self.next..)
            .zip(lines)
            .map(|(n, line)| line.numbered(n).encode())
            .collect();
        self.dir.remove(SPARE)?;
        // Whatever comes of it: no number is given twice, and nothing is added to a file that may have been replaced.
        self.next += count;
        self.copies[0] = None;
        // One after the other: of each line there is always one that is whole.
        self.copies[0] = Some(self.dir.replace(COPIES[0], text.as_bytes())?);
        self.owed.clear();
        self.copies[1] = self.dir.replace(COPIES[1], text.as_bytes()).ok();
        let length = text.len() as u64;
        self.rewrite_at = REWRITE_BYTES.max(4 * length);
        // Without it a full disk is noticed a little earlier.
        let _ = self.dir.replace(SPARE, &vec![b' '; 2 * text.len() + SPARE_BYTES]);
        Ok(())
    }
}

/// What the files say, whether there are any, and what is wrong with one that the other makes up for.
fn read(dir: &StateDir) -> Result<(Replay, bool, Vec<String>), JournalError> {
    let [first, second] = COPIES.map(|name| dir.read(name, LIMIT_BYTES));
    match (first, second) {
        (Err(error), Ok(None)) | (Err(error), Err(_)) => Err(error.into()),
        (first, second) => {
            let warnings = [&first, &second]
                .into_iter()
                .filter_map(|read| read.as_ref().err());
            let warnings = warnings
                .map(|error| format!("{error}; the other copy is read"))
                .collect();
            let copies = [first, second].map(|read| read.ok().flatten());
            let is_there = copies.iter().any(Option::is_some);
            let bytes = copies.map(Option::unwrap_or_default);
            Ok((replay(&[&bytes[0], &bytes[1]]), is_there, warnings))
        }
    }
}

impl Run {
    /// Its QEMU process.
    pub fn process(&self) -> Process {
        Process {
            pid: self.pid,
            start_ticks: self.start_ticks,
        }
    }
}

impl Entry {
    /// Its QEMU process.
    pub fn process(&self) -> Process {
        self.run.process()
    }

    /// The keys under which something is to be undone, whether a lever can read it or not.
    pub fn to_undo(&self) -> impl Iterator<Item = &str> {
        self.keys().filter(|key| is_undone(key))
    }

    /// Whether anything is to be undone.
    pub fn is_in_force(&self) -> bool {
        self.to_undo().next().is_some()
    }

    /// What is in force on a lever. What cannot be read as such is none, and [`Entry::keys`] still has it.
    pub fn get<T: Written>(&self) -> Option<T> {
        T::deserialize(self.levers.get(T::KEY)?).ok()
    }

    /// The keys under which something stands.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.levers.keys().map(String::as_str)
    }

    /// The same without what stands under other keys.
    #[must_use]
    pub fn only(mut self, is_meant: impl Fn(&str) -> bool) -> Entry {
        self.levers.retain(|key, _| is_meant(key));
        self
    }

    /// Its lines as they stand in a file, without numbers and what stands under other keys.
    pub fn written(&self, is_meant: impl Fn(&str) -> bool) -> String {
        self.lines(is_meant).iter().map(Line::encode).collect()
    }

    /// What such lines say. One that does not check takes the others with it: what is half known is not undone.
    pub fn from_written(text: &str) -> Option<Entry> {
        let mut entries = BTreeMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            Line::decode(line.as_bytes())?.apply(&mut entries);
        }
        let (_, entry) = entries.pop_first()?;
        entries.is_empty().then_some(entry)
    }

    /// Whether something stands under any of these keys.
    pub fn has(&self, keys: &[&str]) -> bool {
        keys.iter().any(|key| self.levers.contains_key(*key))
    }

    /// Lines that say it, of these of its levers.
    fn lines(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Line> {
        let (vm, run, before) = (self.run.vm, self.run.clone(), self.before.clone());
        let levers = self.levers.iter().filter(|(lever, _)| is_meant(lever));
        let levers = levers.map(|(lever, entry)| Line::new(vm, lever, entry));
        std::iter::once(Line::new(vm, RUN, &Start { run, before }))
            .chain(levers)
            .collect()
    }

    /// Lines after which nothing is in force on these of its levers.
    fn none(&self, is_meant: impl Fn(&str) -> bool) -> Vec<Line> {
        let keys = self.levers.keys().filter(|key| is_meant(key));
        keys.map(|key| Line::none(self.run.vm, key)).collect()
    }
}

/// Whether there is a journal, or there may be one that cannot be looked at.
pub(crate) fn is_there(state: &Path) -> bool {
    let found = StateDir::open_existing(state).map(|dir| dir.map(|dir| read(&dir)));
    !matches!(found, Ok(None | Some(Ok((_, false, _)))))
}

/// What there is to say of a journal that was there and is not.
pub(crate) fn lost_at(state: &Path) -> String {
    let state = state.display();
    format!(
        "the journal of the agent that acted last is not in {state}/private any more: what that agent changed is known only where VMs \
         carry its mark. If the directory was moved, put it back and run `homenode release --state {state}`; if it was removed, \
         compare pins, quotas and memory nodes of each VM with what they should be (`virsh vcpupin`, `virsh schedinfo`, `virsh \
         numatune`)"
    )
}

/// What a journal holds, without touching it; nothing where it is absent or unreadable.
pub fn peek(state: &Path) -> BTreeMap<VmId, Entry> {
    try_peek(state).unwrap_or_default()
}

/// The same; `None` where it is there and cannot be read.
pub(crate) fn try_peek(state: &Path) -> Option<BTreeMap<VmId, Entry>> {
    let Some(dir) = StateDir::open_existing(state).ok()? else {
        return Some(BTreeMap::new());
    };
    read(&dir).ok().map(|(replay, ..)| replay.entries)
}

#[cfg(test)]
pub(crate) mod tests;
