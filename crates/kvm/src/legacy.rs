//! What an agent that is no more left behind: undone by its guard, by `homenode release`, and by an agent that stops.

use std::path::{Path, PathBuf};

use homenode_kernel::task;
use homenode_undo::Undone;
use homenode_undo::beat::Beat;
use homenode_undo::journal::{Entry, Journal};

use crate::connect::Vms;
use crate::manager::{CallError, Manager};
use crate::{levers, mark};

/// Undoes everything that the journal says, or the VMs' own marks. `must_look` is set, and stays so until libvirt has shown the
/// VMs, where the journal alone is not to be believed: it was not whole, or a VM that was touched still runs and may be marked.
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
            undone.failures.push(format!(
                "whether VMs carry marks of what was changed is unknown: {cause}"
            ));
        }
        Err(CallError::Lost(_)) => {}
    }
    undone
}

/// What an agent that is no more left behind, for its guard to undo.
pub struct Legacy {
    manager: Box<dyn Manager>,
    root: PathBuf,
    /// Whether the journal was not whole, and VMs' marks were not looked at yet.
    must_look: bool,
}

impl Legacy {
    /// That of an agent that asked there for its VMs; that is connected to when it is needed.
    pub fn new(vms: &Vms, root: &Path) -> Legacy {
        Legacy {
            manager: vms.unconnected(root, Beat::default()),
            root: root.to_owned(),
            must_look: false,
        }
    }

    /// Undoes all that journal or marks say is in force. What fails is worth another try.
    pub fn undo(&mut self, journal: &mut Journal) -> Undone {
        undo_all(self.manager.as_mut(), &self.root, journal, &mut self.must_look)
    }
}
