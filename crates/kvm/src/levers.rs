//! What the agent can change of a VM: a file per lever, which holds how it is set, renewed, lifted with its lease, and undone
//! when the agent is no more.
//!
//! ```text
//!              journal, set            lease over, or Lift
//!   operator's ────────────▶ ours … ────────────────────────▶ operator's
//!                              │ somebody else changed it
//!                              └────────────────────────────▶ theirs, left alone
//! ```
//!
//! A lever of one VM is a [`Grip`]. It is made from what the journal says, by the agent that first sees the VM and by the
//! guard that undoes: what an agent has in force and what is to be undone after it are the same thing. A new lever is its
//! file and a line of [`all`]; docs/ARCHITECTURE.md has an example.

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
use homenode_undo::journal::{Entry, Journal, Written};
use homenode_units::VmId;

use crate::manager::{CallError, Manager};
use crate::mark;
use crate::vm::{After, Grip, Levers, failed};

pub use home::{Home, MemoryNodes, NO_HOME};
pub use memory::{Shrink, StatsPeriod};
pub use memory_policy::is_possible as memory_policy_is_possible;
pub use pages::Moving;
pub use quota::Quotas;
pub use vcpus::Pins;

/// Every lever, in the order in which they are undone: first what outlives the VM.
fn all(entry: Option<&Entry>) -> Vec<Box<dyn Grip>> {
    vec![
        watching::grip(entry),
        resctrl::grip(entry),
        vcpus::grip(entry),
        home::grip(entry),
        quota::grip(entry),
        memory::grip(entry),
        pages::grip(entry),
        memory_policy::grip(entry),
        topology::grip(entry),
    ]
}

/// Keys of pins, a home and memory nodes.
const PLACING: [&str; 3] = [Pins::KEY, Home::KEY, MemoryNodes::KEY];

/// The levers of a VM of which an earlier agent wrote this down. Who only watches ends nothing of that.
pub(crate) fn of_vm(entry: Option<&Entry>, acts: bool) -> Levers {
    Levers::new(all(entry), &PLACING, acts)
}

/// Whether pins, a home or memory nodes are to be restored.
pub(crate) fn is_placed(entry: &Entry) -> bool {
    entry.has(&PLACING)
}

/// Whether what stands under a key is part of libvirt's definition of a running VM, which goes with the VM to a file or another
/// host.
pub(crate) fn is_carried_by_libvirt(key: &str) -> bool {
    PLACING.contains(&key) || [Quotas::KEY, Shrink::KEY, StatsPeriod::KEY].contains(&key)
}

/// Undoes what the journal says is in force on a VM, lever by lever: one that fails keeps no other from being undone, and stays
/// journalled. `Ok` also when that run of the VM is over.
pub(crate) fn undo(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
    vm: VmId,
) -> Result<(), String> {
    undo_some(manager, root, journal, vm, |_| true)
}

/// The same for the limits alone, which must not outlast an agent that leaves homes and pins as they are.
pub(crate) fn undo_limits(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
    vm: VmId,
) -> Result<(), String> {
    undo_some(manager, root, journal, vm, Lever::is_leased)
}

fn undo_some(
    manager: &mut dyn Manager,
    root: &Path,
    journal: &mut Journal,
    vm: VmId,
    is_meant: impl Fn(Lever) -> bool,
) -> Result<(), String> {
    let Some(entry) = journal.entry(vm).cloned() else {
        return Ok(());
    };
    let mut after = After::new(manager, root, &entry.run, &entry.before);
    let (mut read, mut undone, mut failures) = (Vec::new(), Vec::new(), Vec::<String>::new());
    for grip in all(Some(&entry)) {
        let keys = grip.journalled();
        if keys.is_empty() {
            continue;
        }
        read.extend(&keys);
        if !is_meant(grip.lever()) {
            continue;
        }
        let result = match grip.undo(&mut after) {
            // It may have ended meanwhile.
            Err(_) if after.is_over() => grip.undo(&mut after),
            result => result,
        };
        match result {
            Ok(()) => undone.extend(keys),
            Err(cause) if failures.contains(&cause) => {}
            Err(cause) => failures.push(cause),
        }
    }
    let unread = entry.to_undo().filter(|key| !read.contains(key));
    failures.extend(unread.map(|key| {
        format!("what the journal has under {key} cannot be read: another version of homenode wrote it, or it is damaged")
    }));
    if let Ok(Some(_)) = after.vm() {
        let left = entry.clone().only(|key| !undone.contains(&key));
        if let Err(cause) = mark::leave(after.manager, root, vm, Some(&left)) {
            failures.push(format!("its mark: {cause}"));
            // A mark that is left would have it undone again, whatever the operator has set by then.
            undone.clear();
        }
    }
    journal.clear(vm, &undone);
    if journal.entry(vm).is_some_and(|entry| !entry.is_in_force()) {
        journal.clear_all(vm); // where pages were moving to
    }
    match failures.is_empty() {
        true => Ok(()),
        false => Err(failures.join("; ")),
    }
}

/// Collects what failed of an undo that has several steps.
#[derive(Default)]
struct Steps(Vec<String>);

impl Steps {
    fn note(&mut self, what: &str, result: Result<(), CallError>) {
        self.0
            .extend(result.err().map(|e| format!("{what}: {}", e.cause())));
    }

    /// What is in force cannot be told: it may be the agent's or the operator's, and is looked at again.
    fn unknown(&mut self, what: &str, cause: &str) {
        self.0.push(format!("{what} cannot be read: {cause}"));
    }

    fn done(self) -> Result<(), String> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(self.0.join("; ")),
        }
    }
}
