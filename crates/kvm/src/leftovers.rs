//! What an ended agent left behind: undone by its guard, by `homenode release`, and by an agent that stops.

use std::path::{Path, PathBuf};

use homenode_kernel::task;
use homenode_undo::Undone;
use homenode_undo::heartbeat::Heartbeat;
use homenode_undo::journal::{Entry, Journal};

use crate::connect::Vms;
use crate::manager::{CallError, Manager};
use crate::{levers, mark};

/// Undoes everything that the journal or the VMs' own marks list. Sets `must_look` if the journal alone cannot be trusted,
/// because it was damaged, or a touched VM still runs and may be marked. Clears it once the manager has shown all marks.
pub(crate) fn undo_all(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
    must_look: &mut bool,
) -> Undone {
    let may_be_marked = |entry: &Entry| task::is_alive(root, entry.process());
    *must_look |= !journal.is_whole() || journal.entries().values().any(may_be_marked);
    let looked = mark::take_in_all(manager, root, journal);
    manager.take_time();
    let mut undone = Undone::default();
    for vm in journal.in_force() {
        let name = journal
            .entry(vm)
            .map_or_else(|| vm.to_string(), |entry| entry.run.name.clone());
        match levers::undo(manager, root, journal, vm) {
            Ok(()) => undone.vms.push(vm),
            Err(cause) => undone
                .failures
                .push(format!("VM {name} could not be restored: {cause}")),
        }
    }
    match looked {
        Ok(()) => *must_look = false,
        Err(CallError::Refused(cause) | CallError::Unclear(cause)) => undone.failures.push(cause),
        Err(CallError::Lost(cause)) if *must_look => {
            undone
                .failures
                .push(format!("cannot tell whether VMs carry marks of changes: {cause}"));
        }
        Err(CallError::Lost(_)) => {}
    }
    undone
}

/// What an ended agent left behind, for its guard to undo.
pub struct Leftovers {
    manager: Box<dyn Manager>,
    root: PathBuf,
    /// Whether the journal alone cannot be trusted and the VMs' marks have not been read yet.
    must_look: bool,
}

impl Leftovers {
    /// Creates the leftovers of an agent with this manager; connects to the manager only when needed.
    pub fn new(vms: &Vms, root: &Path) -> Leftovers {
        Leftovers {
            manager: vms.unconnected(root, Heartbeat::default()),
            root: root.to_owned(),
            must_look: false,
        }
    }

    /// Undoes everything that the journal or the marks list as in force. After failures, it is worth trying again.
    pub fn undo(&mut self, journal: &mut Journal) -> Undone {
        undo_all(self.manager.as_mut(), &self.root, journal, &mut self.must_look)
    }
}
