//! Undoes what an ended agent left on domains. Its guard, the next agent or `homenode release` does this.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use homenode_undo::Undone;
use homenode_undo::journal::{Entry, Journal, Unreadable, Written};
use homenode_units::VmId;

use crate::changed::{Past, alive, settle};
use crate::error::XenError;
use crate::hypervisor::Hypervisor;
use crate::{levers, trace};

/// Undoes everything in the journal.
pub(crate) fn undo_all(hypervisor: &Hypervisor, journal: &mut Journal) -> Undone {
    let mut undone = Undone::default();
    let all: Vec<(VmId, Entry)> = journal
        .entries()
        .iter()
        .map(|(vm, entry)| (*vm, entry.clone()))
        .collect();
    for (vm, entry) in all {
        let was_in_force = entry.is_in_force();
        if !was_in_force && !entry.has(&[Past::KEY]) {
            continue;
        }
        let run_is_over = matches!(alive(hypervisor, &entry.run), Ok(None));
        let done = match run_is_over {
            true => settle(hypervisor, journal, vm),
            false => levers::undo(hypervisor, journal, vm, |_| true).and_then(|()| {
                let key = journal
                    .entry(vm)
                    .and_then(|left| left.keys().find(|key| *key != Past::KEY));
                key.map_or(Ok(()), |key| Err(Unreadable(key.to_owned()).into()))
            }),
        };
        match done {
            Ok(()) if was_in_force => undone.vms.push(vm),
            Ok(()) => {}
            Err(cause) => undone.failures.push(format!(
                "domain {} could not be restored: {cause}",
                entry.run.name
            )),
        }
    }
    undone
}

/// The state that an ended agent left, for its guard to undo.
#[derive(Debug)]
pub struct Leftovers {
    root: PathBuf,
    hypervisor: Option<Hypervisor>,
}

impl Leftovers {
    /// Returns what an agent of this host left. The hypervisor is opened only when needed.
    pub fn new(root: &Path) -> Leftovers {
        Leftovers {
            root: root.to_owned(),
            hypervisor: None,
        }
    }

    /// Undoes everything in the journal. After failures the caller should try again.
    pub fn undo(&mut self, journal: &mut Journal) -> Undone {
        let opened = match self.hypervisor.take() {
            Some(hypervisor) => Ok(hypervisor),
            None => Hypervisor::open(&self.root),
        };
        match opened {
            Ok(hypervisor) => {
                if let Some(said) = crate::moving::recover(&hypervisor) {
                    // A guard has nowhere else to report it.
                    let _ = writeln!(std::io::stderr(), "{said}");
                }
                let mut undone = undo_all(&hypervisor, journal);
                undone.failures.extend(
                    trace::stop_leftover(&hypervisor, &self.root)
                        .err()
                        .map(|error| error.to_string()),
                );
                self.hypervisor = Some(hypervisor);
                undone
            }
            // The host was rebooted without Xen, so no domain is left to restore.
            Err(XenError::NotDom0 { .. }) => Undone::default(),
            Err(error) => Undone {
                vms: Vec::new(),
                failures: vec![error.to_string()],
            },
        }
    }
}
