//! What levers of VMs are pulled with.

use std::collections::BTreeSet;
use std::path::PathBuf;

use homenode_host::{ActionError, Bell};
use homenode_machine::Machine;

use crate::journal::{Entry, Journal, JournalError, Written};
use crate::levers::failed;
use crate::levers::topology::Pages as TopologyPages;
use crate::libvirt::Libvirt;
use crate::task::{self, Process};
use crate::vm::Vm;

/// Notices that are remembered in order to be said once.
const SAID_MAX: usize = 4096;

/// What a lever needs of its host: all but the VMs, of which it is given its own.
pub(crate) struct Hands {
    pub libvirt: Libvirt,
    /// Absent in a dry run.
    pub journal: Option<Journal>,
    /// Root of `/proc`, `/sys` and `/run`.
    pub root: PathBuf,
    pub machine: Machine,
    /// Ends moving early.
    pub bell: Bell,
    /// Where guests are told where they are.
    pub topology: TopologyPages,
    /// Why nobody is known to use a page, as of the last sample.
    pub no_page_uses: Option<String>,
    said: BTreeSet<String>,
    notices: Vec<String>,
}

impl Hands {
    pub fn new(
        libvirt: Libvirt,
        journal: Option<Journal>,
        root: PathBuf,
        machine: Machine,
        bell: Bell,
        topology: TopologyPages,
    ) -> Hands {
        Hands {
            libvirt,
            journal,
            root,
            machine,
            bell,
            topology,
            no_page_uses: None,
            said: BTreeSet::new(),
            notices: Vec::new(),
        }
    }

    /// Tells the operator something, once.
    pub fn notice(&mut self, text: String) {
        if self.said.len() < SAID_MAX && self.said.insert(text.clone()) {
            self.notices.push(text);
        }
    }

    /// What is to be told and was not yet.
    pub fn take_notices(&mut self) -> Vec<String> {
        std::mem::take(&mut self.notices)
    }

    /// Whether work on a VM is still worth going on with.
    pub fn goes_on(&self, process: Process) -> bool {
        !self.bell.is_stopping() && task::is_alive(&self.root, process)
    }

    /// Writes down how a VM is before it is touched: for the first time, or again where nothing of the agent's is in force and
    /// somebody changed it since.
    pub fn begin(&mut self, vm: &Vm) -> Result<(), JournalError> {
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        let entry = journal.entry(vm.run.vm).filter(|entry| entry.run == vm.run);
        if entry.is_some_and(crate::levers::is_placed) {
            return Ok(());
        }
        let before = vm.before();
        if entry.is_some_and(|entry| entry.before == before) {
            return Ok(());
        }
        journal.begin(vm.run.clone(), before)
    }

    /// What the journal says of a VM, whoever wrote it.
    pub fn entry(&self, vm: &Vm) -> Option<&Entry> {
        self.journal.as_ref()?.entry(vm.run.vm)
    }

    /// What it says of a lever of a VM.
    pub fn journalled<T: Written>(&self, vm: &Vm) -> Option<T> {
        self.entry(vm)?.get()
    }

    /// Writes down what will be in force on a lever.
    pub fn set<T: Written>(&mut self, vm: &Vm, what: &str, entry: &T) -> Result<(), ActionError> {
        self.write(vm, what, |journal| journal.set(vm.run.vm, entry))
    }

    /// Writes down that nothing is in force on a lever any more.
    pub fn clear<T: Written>(&mut self, vm: &Vm, what: &str) -> Result<(), ActionError> {
        self.write(vm, what, |journal| journal.clear(vm.run.vm, &[T::KEY]))
    }

    /// Writes to the journal, if there is one.
    pub fn write(
        &mut self,
        vm: &Vm,
        what: &str,
        write: impl FnOnce(&mut Journal) -> Result<(), JournalError>,
    ) -> Result<(), ActionError> {
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        write(journal).map_err(|e| failed(vm, what, &e.to_string()))
    }
}
