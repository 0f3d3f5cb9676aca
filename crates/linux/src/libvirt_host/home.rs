//! A VM's home: how it was before, going there, and leaving it again.

use homenode_host::{ActionError, Outcome};
use homenode_units::{CpuSet, NodeSet, Pages};

use super::LibvirtHost;
use super::act::host_error;
use super::connection::CallError;
use super::vm::Vm;
use crate::journal::{self, Before, Helper, JournalError, MemoryNodes};
use crate::pages::WINDOW_PAGES;
use crate::task::{self, Role};

pub(super) const HOME: &str = "setting the home";
pub(super) const LEAVE: &str = "lifting the home";
const MEMORY_NODES: &str = "setting the memory nodes";

impl Vm {
    /// How it is now, for whoever is to restore it.
    fn before(&self) -> Before {
        let affinity = |role: &Role| {
            let thread = self.threads.iter().find(|t| t.role == *role);
            thread.map(|t| t.affinity.clone())
        };
        let vcpus = self.threads.iter().filter_map(|t| match t.role {
            Role::Vcpu(index) => Some((index, t.affinity.clone())),
            _ => None,
        });
        let iothreads = self
            .domain
            .iothreads
            .iter()
            .filter_map(|id| Some((*id, affinity(&Role::IoThread(format!("iothread{id}")))?)));
        Before {
            vcpus: vcpus.collect(),
            operator_pins: self.operator_pins.iter().copied().collect(),
            emulator: affinity(&Role::Emulator).unwrap_or_default(),
            iothreads: iothreads.collect(),
            operator_helpers: self.operator_helpers.iter().copied().collect(),
            nodes: self.restrictive_nodes().cloned(),
        }
    }
}

impl LibvirtHost {
    /// Writes down how a VM is before it is touched: for the first time, or again where nothing of the agent's is in force and
    /// somebody changed it since.
    pub(super) fn journal_first(&mut self, vm: &Vm) -> Result<(), JournalError> {
        let Some(acts) = &mut self.acts else { return Ok(()) };
        let entry = acts.journal.entry(vm.run.vm).filter(|entry| entry.run == vm.run);
        if entry.is_some_and(journal::Entry::is_placed) {
            return Ok(());
        }
        let before = vm.before();
        if entry.is_some_and(|entry| entry.before == before) {
            return Ok(());
        }
        let run = vm.run.clone();
        acts.journal.begin(run, before)
    }

    pub(super) fn set_home(&mut self, vm: &mut Vm, nodes: &NodeSet) -> Result<Outcome, ActionError> {
        self.journal_set(vm, HOME, &journal::Home(nodes.clone()))?;
        let mut cpus = self.machine.cpus_of(nodes);
        if let Some(allowed) = &vm.cpus_allowed {
            cpus = cpus.intersection(allowed);
        }
        // A home of memory-only nodes, or outside what the operator allows, leaves these threads where they are.
        if !cpus.is_empty() {
            self.pin_helpers(vm, &cpus)?;
        }
        if let Some(set) = vm.restrictive_nodes().cloned() {
            self.set_memory_nodes(vm, &set.union(nodes))?;
        }
        vm.home = Some(nodes.clone());
        self.narrow_if_little_is_left(vm)?;
        Ok(Outcome::Done)
    }

    /// Lets the VM run and allocate as it did before the agent's first pin; its pages stay where they are. What the agent set is
    /// journalled until all of it is undone: whoever follows an agent that dies in between undoes it again.
    pub(super) fn leave_home(&mut self, vm: &mut Vm) -> Result<Outcome, ActionError> {
        let entry = self.acts.as_ref().and_then(|acts| acts.journal.entry(vm.run.vm));
        let Some(entry) = entry.filter(|entry| entry.is_placed()).cloned() else {
            return Ok(Outcome::Done);
        };
        let undo = entry.undo();
        vm.restored.clone_from(&entry.before.vcpus);
        // vCPUs that somebody else pinned meanwhile are not the agent's any more.
        for index in vm.ours.keys().copied().collect::<Vec<_>>() {
            let anywhere = || vm.cpus_allowed.clone().unwrap_or_else(|| self.machine.cpu_set());
            let cpus = vm.restored.entry(index).or_insert_with(anywhere).clone();
            if vm.vcpu_thread(index).is_some() {
                self.pin_vcpu(vm, index, &cpus)?;
            }
            vm.ours.remove(&index);
        }
        if let Some(cpus) = undo.emulator.filter(|cpus| !cpus.is_empty()) {
            self.pin_helper(vm, Helper::Emulator, &cpus)?;
        }
        for (&id, cpus) in undo.iothreads.iter().filter(|(_, cpus)| !cpus.is_empty()) {
            self.pin_helper(vm, Helper::IoThread(id), cpus)?;
        }
        if let (Some(all), Some(before)) = (undo.nodes, entry.before.nodes) {
            self.set_memory_nodes(vm, &all)?;
            self.narrow_to(vm, &before)?;
        }
        // What is set next in this plan is journalled from these.
        vm.threads =
            task::threads(&self.root, vm.run.pid).map_err(|e| host_error(vm, LEAVE, &e.to_string()))?;
        self.journal(vm, LEAVE, |journal| journal.clear_placement(vm.run.vm))?;
        vm.home = None;
        self.carried.remove(&vm.run.vm);
        Ok(Outcome::Done)
    }

    /// Pins emulator and I/O threads, but those that the operator pinned.
    fn pin_helpers(&mut self, vm: &Vm, cpus: &CpuSet) -> Result<(), ActionError> {
        let iothreads = vm.domain.iothreads.iter().map(|id| Helper::IoThread(*id));
        for helper in std::iter::once(Helper::Emulator).chain(iothreads) {
            if !vm.operator_helpers.contains(&helper) {
                self.pin_helper(vm, helper, cpus)?;
            }
        }
        Ok(())
    }

    fn pin_helper(&mut self, vm: &Vm, helper: Helper, cpus: &CpuSet) -> Result<(), ActionError> {
        let (what, tid, pinned) = match helper {
            Helper::Emulator => {
                let pinned = self.libvirt.pin_emulator(&vm.handle, cpus);
                ("pinning the emulator".to_owned(), Some(vm.run.pid), pinned)
            }
            Helper::IoThread(id) => {
                let role = Role::IoThread(format!("iothread{id}"));
                let thread = vm.threads.iter().find(|t| t.role == role);
                let pinned = self.libvirt.pin_iothread(&vm.handle, id, cpus);
                (format!("pinning I/O thread {id}"), thread.map(|t| t.tid), pinned)
            }
        };
        pinned.map_err(|e| host_error(vm, &what, e.cause()))?;
        tid.map_or(Ok(()), |tid| self.read_back(vm, tid, cpus, &what))
    }

    /// Sets the memory nodes of a `restrictive` VM. The kernel moves at once, unthrottled, whatever lies on a
    /// node that is taken away; adding nodes moves nothing.
    pub(super) fn set_memory_nodes(&mut self, vm: &mut Vm, nodes: &NodeSet) -> Result<(), ActionError> {
        if vm.restrictive_nodes() == Some(nodes) {
            return Ok(());
        }
        self.journal_set(vm, MEMORY_NODES, &MemoryNodes(nodes.clone()))?;
        let said = |e: CallError| host_error(vm, MEMORY_NODES, e.cause());
        self.libvirt.set_memory_nodes(&vm.handle, nodes).map_err(said)?;
        if let Some(tune) = &mut vm.domain.numatune {
            tune.nodes = Some(nodes.clone());
        }
        Ok(())
    }

    /// Narrows a `restrictive` VM's memory nodes to its home once little of its memory lies outside. Until then nodes are only
    /// ever added.
    pub(super) fn narrow_if_little_is_left(&mut self, vm: &mut Vm) -> Result<(), ActionError> {
        let home = vm.home.clone();
        home.map_or(Ok(()), |home| self.narrow_to(vm, &home))
    }

    /// Narrows a `restrictive` VM's memory nodes if at most a hundredth of its memory, or one window, lies outside.
    fn narrow_to(&mut self, vm: &mut Vm, nodes: &NodeSet) -> Result<(), ActionError> {
        let Some(pages) = vm.memory.pages() else {
            return Ok(());
        };
        if vm.restrictive_nodes().is_none_or(|set| set == nodes) {
            return Ok(());
        }
        let total: Pages = pages.values().copied().sum();
        let outside: Pages = pages
            .iter()
            .filter(|(node, _)| !nodes.contains(*node))
            .map(|(_, p)| *p)
            .sum();
        if outside.0 <= (total.0 / 100).max(WINDOW_PAGES) {
            self.set_memory_nodes(vm, nodes)?;
        }
        Ok(())
    }
}
