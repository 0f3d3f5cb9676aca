//! What the agent can change on a VM. Each lever has its own file, which says how it is set, renewed, lifted when its lease
//! expires, and undone after the agent's end. A new lever needs a file and a line in [`all`]; docs/ARCHITECTURE.md has an
//! example.

mod home;
pub(crate) mod memory;
mod memory_policy;
mod pages;
pub(crate) mod quota;
mod resctrl;
mod topology;
pub(crate) mod vcpus;
pub(crate) mod watching;

use std::path::Path;

use homenode_host::Lever;
use homenode_undo::journal::{Entry, Journal, Unreadable, Written};
use homenode_undo::levers::LeverState;
use homenode_units::VmId;

use crate::manager::{CallError, Manager};
use crate::mark;
use crate::vm::{After, Kvm, Levers, Step, UndoError, failed};

pub(crate) use home::{HelperPins, Home, MemoryNodes, NO_HOME};
pub(crate) use memory::{Shrink, StatsPeriod};
pub(crate) use memory_policy::is_possible as memory_policy_is_possible;
pub(crate) use pages::Moving;
pub use quota::Quotas;
pub use vcpus::Pins;

/// Returns all levers in the order in which they are undone: first those whose changes outlive the VM.
fn all(entry: Option<&Entry>) -> Vec<Box<dyn LeverState<Kvm>>> {
    vec![
        watching::state(entry),
        resctrl::state(entry),
        vcpus::state(entry),
        home::state(entry),
        quota::state(entry),
        memory::state(entry),
        pages::state(entry),
        memory_policy::state(entry),
        topology::state(entry),
    ]
}

/// Keys of the levers that place a VM: pins, home, helpers and memory nodes.
const PLACING: [&str; 4] = [Pins::KEY, Home::KEY, HelperPins::KEY, MemoryNodes::KEY];

/// The levers of a VM, from an earlier agent's journal entry. A dry run (`acts` is false) leaves them in force.
pub(crate) fn of_vm(entry: Option<&Entry>, acts: bool) -> Levers {
    Levers::new(all(entry), acts)
}

/// Whether the entry has pins, a home or memory nodes to restore.
pub(crate) fn is_placed(entry: &Entry) -> bool {
    entry.has(&PLACING)
}

/// Whether a key's setting is in libvirt's definition of the running VM, which moves with the VM to a file or another host.
pub(crate) fn is_carried_by_libvirt(key: &str) -> bool {
    PLACING.contains(&key) || [Quotas::KEY, Shrink::KEY, StatsPeriod::KEY].contains(&key)
}

/// Undoes what the journal lists as in force on a VM, lever by lever. A lever that fails stays journalled, and the others are
/// still undone. Also `Ok` if that run of the VM has ended.
pub(crate) fn undo(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
    vm: VmId,
) -> Result<(), UndoError> {
    undo_some(manager, root, journal, vm, |_| true)
}

/// Like [`undo`], for the limits only: they must not outlast an agent that leaves homes and pins in force.
pub(crate) fn undo_limits(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
    vm: VmId,
) -> Result<(), UndoError> {
    undo_some(manager, root, journal, vm, Lever::is_leased)
}

fn undo_some(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
    vm: VmId,
    is_meant: impl Fn(Lever) -> bool,
) -> Result<(), UndoError> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let mut after = After::new(manager, root, &entry.run, &entry.before);
    let (mut read, mut undone, mut failures) = (Vec::new(), Vec::new(), Vec::new());
    for state in all(Some(&entry)) {
        let keys = state.journalled();
        if keys.is_empty() {
            continue;
        }
        read.extend(&keys);
        if !is_meant(state.lever()) {
            continue;
        }
        let result = match state.undo(&mut after) {
            // The VM may have ended meanwhile.
            Err(_) if after.is_over() => state.undo(&mut after),
            result => result,
        };
        match result {
            Ok(()) => undone.extend(keys),
            Err(cause) if failures.contains(&cause) => {}
            Err(cause) => failures.push(cause),
        }
    }
    let unread = entry.to_undo().filter(|key| !read.contains(key));
    failures.extend(unread.map(|key| UndoError::from(Unreadable(key.to_owned()))));
    if let Ok(Some(_)) = after.vm() {
        let left = entry.clone().only(|key| !undone.contains(&key));
        if let Err(cause) = mark::leave(after.manager, root, vm, Some(&left)) {
            failures.push(UndoError::Mark(cause.to_string()));
            // If the VM's mark stays, these settings would be undone again later, even if the operator has changed them by then.
            undone.clear();
        }
    }
    journal.clear(vm, &undone);
    if journal.entry(vm).is_some_and(|entry| !entry.is_in_force()) {
        journal.clear_all(vm); // the destination of its pages
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(UndoError::Several(failures)),
    }
}

/// Collects the failures of an undo with several steps.
#[derive(Default)]
struct Steps(Vec<Step>);

impl Steps {
    fn note(&mut self, what: &str, result: Result<(), CallError>) {
        self.0.extend(result.err().map(|error| Step::Failed {
            what: what.to_owned(),
            cause: error.cause().to_owned(),
        }));
    }

    /// Records that a state cannot be read. It may be the agent's or the operator's, so it is read again later.
    fn unknown(&mut self, what: &'static str, cause: String) {
        self.0.push(Step::Unknown { what, cause });
    }

    fn done(self) -> Result<(), UndoError> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(UndoError::Steps(self.0)),
        }
    }
}
