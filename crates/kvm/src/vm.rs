//! One VM as the host watches it: its threads, its operator's settings, where its memory is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use homenode_host::{ActionError, Failure, Immovable, VirtualNode};
use homenode_kernel::binding::Binding;
use homenode_kernel::cgroup::{CpuGroup, CpuMax};
use homenode_kernel::numa_maps::{Range, Seen};
use homenode_kernel::pages::Mover;
use homenode_kernel::read::ReadError;
use homenode_kernel::task::{Role, Tasks, Thread};
use homenode_kernel::{now, numa_maps};
use homenode_undo::journal::{Before, Entry, Helper, Run, Written};
use homenode_units::{Bytes, CpuSet, NodeMap, NodeSet, Ns, PAGE_BYTES, Pages};

use crate::context::HostContext;
use crate::domain::{Cell, Domain};
use crate::levers::Home;
use crate::levers::vcpus::before_of;
use crate::reach::{Left, Reach};

mod bound;
mod lever_state;

pub(crate) use lever_state::{After, Kvm, Levers, Step, UndoError};

/// After a read of `numa_maps`, the next waits at least this many times as long as it took: reading blocks the VM's page faults.
const PAGES_COST_SHARE: u64 = 20;
/// How often to look again for memory that was not found.
const RAM_RETRY: Ns = Ns::from_secs(10);

/// One run of one VM.
pub(crate) struct Vm {
    pub run: Run,
    /// The manager's description as of the last reading.
    pub described: Arc<Domain>,
    /// That description, updated with what the agent set since.
    pub domain: Domain,
    /// What the operator's bounds leave the VM, except affinities.
    pub reach: Reach,
    /// Helpers that were pinned when the VM was first seen; later, the live XML shows the agent's own pins.
    pub operator_helpers: BTreeSet<Helper>,
    pub pins: Pinned,
    pub threads: Vec<Thread>,
    pub tasks: Tasks,
    /// When to read the vCPUs' affinities again, and when to read everything about all threads again.
    pub next_looks: (Ns, Ns),
    pub groups: BTreeMap<i32, Option<CpuGroup>>,
    pub memory: Memory,
    pub home: Option<Home>,
    pub levers: Levers,
    /// Why the VM's memory cannot move, as of the last sample.
    pub immovable: Option<Immovable>,
    /// Why the VM's memory should stay where it is for now.
    pub standstill: Option<Immovable>,
}

/// Pins of a VM's vCPUs, by origin.
pub(crate) struct Pinned {
    /// vCPUs that were pinned by hand.
    pub operator: BTreeSet<u16>,
    /// Each vCPU's CPUs before an agent first touched the VM; restoring leaves them as pins in the XML.
    pub restored: BTreeMap<u16, CpuSet>,
    /// The agent's pins, the newest first. Only the newest is left once it was read back.
    pub ours: BTreeMap<u16, Vec<CpuSet>>,
}

/// Where a VM's memory is.
#[derive(Default)]
pub(crate) struct Memory {
    sizes: Vec<Bytes>,
    /// All of the memory, once found.
    whole: Option<Part>,
    /// The memory of each node that the guest sees; `None` if the node has no memory of its own.
    virtual_nodes: Vec<Option<Part>>,
    next_read: Ns,
}

/// Memory that is moved as a unit.
pub(crate) struct Part {
    pub mover: Mover,
    pub pages: Option<NodeMap<Pages>>,
    /// The nodes to which memory policies bind it, according to the kernel.
    pub binding: Option<Binding>,
}

/// Result of a search for a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Found {
    Memory,
    None,
    /// No search was due.
    NotLooked,
}

/// A part of a VM's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Which {
    Whole,
    VirtualNode(u16),
}

impl Memory {
    /// Returns the memory that was found in these ranges.
    fn found(pid: i32, sizes: Vec<Bytes>, ranges: Vec<Range>, cells: &[Cell]) -> Memory {
        let part = |ranges| Part {
            mover: Mover::new(pid, ranges),
            pages: None,
            binding: None,
        };
        // Memory objects are in the order of the cells that have memory, unless all cells share one object (`-numa node,mem=`);
        // then no part of it belongs to a single cell.
        let mut objects = numa_maps::objects(&ranges, &sizes).into_iter().zip(sizes.clone());
        let of_cell = |cell: &Cell| {
            let (object, size) = (cell.memory_bytes > Bytes::ZERO).then(|| objects.next())??;
            (size == cell.memory_bytes).then_some(())?;
            Some(part(vec![ranges.get(object)?.clone()]))
        };
        Memory {
            virtual_nodes: cells.iter().map(of_cell).collect(),
            sizes,
            whole: Some(part(ranges)),
            next_read: Ns::ZERO,
        }
    }

    /// Returns the page mover for all of the memory, once found.
    pub(crate) fn mover(&self) -> Option<&Mover> {
        self.whole.as_ref().map(|whole| &whole.mover)
    }

    /// Returns the size of the VM's huge pages, the largest of several; `None` if it has none, or its memory is not found yet.
    pub(crate) fn huge_page_bytes(&self) -> Option<Bytes> {
        let ranges = self.mover().into_iter().flat_map(Mover::ranges);
        let largest = ranges.map(|range| range.page_bytes).max();
        largest.filter(|bytes| bytes.0 > PAGE_BYTES)
    }

    /// Returns the pages of all the memory on each node, if known.
    pub(crate) fn pages(&self) -> Option<&NodeMap<Pages>> {
        self.whole.as_ref()?.pages.as_ref()
    }

    /// Returns a part of the memory, if found.
    pub(crate) fn part(&mut self, which: Which) -> Option<&mut Part> {
        match which {
            Which::Whole => self.whole.as_mut(),
            Which::VirtualNode(at) => self.virtual_nodes.get_mut(usize::from(at))?.as_mut(),
        }
    }

    pub(crate) fn parts(&mut self) -> impl Iterator<Item = &mut Part> {
        self.whole
            .iter_mut()
            .chain(self.virtual_nodes.iter_mut().flatten())
    }
}

impl Vm {
    /// Returns the VM's current state, which an agent or the guard restores later.
    pub(crate) fn before(&self) -> Before {
        let affinity = |role: &Role| {
            let thread = self.threads.iter().find(|t| t.role == *role);
            thread.map(|t| t.affinity.clone())
        };
        let iothreads = self
            .domain
            .iothreads
            .iter()
            .filter_map(|id| Some((*id, affinity(&Role::IoThread(*id))?)));
        Before {
            vcpus: affinities(&self.threads).collect(),
            operator_pins: self.pins.operator.iter().copied().collect(),
            emulator: affinity(&Role::Emulator).unwrap_or_default(),
            iothreads: iothreads.collect(),
            operator_helpers: self.operator_helpers.iter().copied().collect(),
            nodes: self.restrictive_nodes().cloned(),
            threads: BTreeMap::new(),
        }
    }

    /// Returns what is left to the VM when all bounds are applied: those that were read, and the affinities of its vCPUs before
    /// the agent pinned them. Affinities that libvirt set on a tool's advice (`placement='auto'`) are not bounds, but that tool's
    /// placement.
    pub(crate) fn left(&self, context: &HostContext) -> Left {
        let before = context.entry(self).map(|entry| &entry.before);
        let affinity = |thread: &Thread| {
            let index = vcpu_index(&thread.role)?;
            if self.pins.operator.contains(&index) {
                return None;
            }
            if !self.pins.ours.contains_key(&index) {
                return Some(thread.affinity.clone());
            }
            let journalled = before.and_then(|before| before_of(before, index));
            journalled.or_else(|| self.pins.restored.get(&index)).cloned()
        };
        let is_placed = self.domain.placed_by_advice;
        let threads = self.threads.iter().filter(|_| !is_placed);
        let affinities: Vec<CpuSet> = threads.filter_map(affinity).collect();
        let mut reach = self.reach.clone();
        reach.offline.clone_from(&context.offline);
        reach
            .left(&context.machine, &affinities)
            .but_for(&context.reserved_cpus)
    }

    /// Whether a pin of the agent's, or a home that the operator did not choose, is outside what is left to the VM.
    pub(crate) fn is_out_of_reach(&self, context: &HostContext, left: &Left) -> bool {
        let mut pins = self.pins.ours.values().filter_map(|sets| sets.first());
        let chosen = self
            .domain
            .settings
            .as_ref()
            .ok()
            .and_then(|said| said.home.as_ref());
        let is_lost = |home: &NodeSet| {
            let mut nodes = home
                .iter()
                .map(NodeSet::one)
                .map(|node| context.machine.cpus_of(&node));
            chosen.is_none() && nodes.any(|cpus| !cpus.is_empty() && cpus.intersection(&left.cpus).is_empty())
        };
        pins.any(|cpus| !cpus.is_subset(&left.cpus)) || self.home_nodes().is_some_and(is_lost)
    }

    /// Returns the nodes of the home that is in force.
    pub(crate) fn home_nodes(&self) -> Option<&NodeSet> {
        self.home.as_ref()?.nodes()
    }

    /// Whether the VM is between two hosts: libvirt then refuses every change, and only after a long wait.
    pub(crate) fn is_migrating(&self) -> bool {
        self.standstill == Some(Immovable::Migrating)
    }

    /// Makes the next look read all threads, since they may have been changed.
    pub(crate) fn look_soon(&mut self) {
        self.next_looks = (Ns::ZERO, Ns::ZERO);
    }

    /// Threads that run vCPUs.
    pub(crate) fn vcpu_tids(&self) -> impl Iterator<Item = i32> + '_ {
        self.threads
            .iter()
            .filter(|t| matches!(t.role, Role::Vcpu(_)))
            .map(|t| t.tid)
    }

    /// Returns the online vCPUs.
    pub(crate) fn vcpu_indices(&self) -> Vec<u16> {
        self.threads.iter().filter_map(|t| vcpu_index(&t.role)).collect()
    }

    /// The thread that runs this vCPU.
    pub(crate) fn vcpu_thread(&self, index: u16) -> Option<&Thread> {
        self.threads.iter().find(|t| t.role == Role::Vcpu(index))
    }

    /// The cgroup that limits a thread's CPU time, if known.
    pub(crate) fn group(&self, tid: i32) -> Option<&CpuGroup> {
        self.groups.get(&tid)?.as_ref()
    }

    /// Returns how many vCPUs of the VM share this one's cgroup: one if each has its own, as libvirt sets them up.
    pub(crate) fn sharing(&self, tid: i32) -> usize {
        let group = self.group(tid);
        let same = self.vcpu_tids().filter(|other| self.group(*other) == group);
        same.count().max(1)
    }

    /// CPU time that a vCPU may use: its share of its cgroup's.
    pub(crate) fn max_of(&self, tid: i32) -> Result<Option<CpuMax>, ReadError> {
        let max = self.group(tid).map_or(Ok(None), CpuGroup::max)?;
        let sharing = self.sharing(tid) as u64;
        Ok(max.map(|max| max.divided(sharing)))
    }

    /// Reads on which nodes the VM's pages are, if that is due: `every` after the last read, or once the agent moved pages.
    pub(crate) fn refresh_pages(&mut self, root: &Path, at: Ns, every: Ns) -> Result<Found, ReadError> {
        if self.memory.sizes != self.domain.ram_sizes {
            self.memory = Memory {
                sizes: self.domain.ram_sizes.clone(),
                ..Memory::default()
            }; // a DIMM came or went
        }
        if at < self.memory.next_read {
            return Ok(Found::NotLooked);
        }
        let start = now();
        let read = self.read_pages(root);
        // A failed read costs as much, so it must not be repeated sooner.
        let cost = now().saturating_sub(start);
        let patience = match read {
            Ok(Found::None) => RAM_RETRY,
            Ok(_) | Err(_) => every,
        };
        self.memory.next_read = at + patience.max(Ns(cost.0.saturating_mul(PAGES_COST_SHARE)));
        read
    }

    /// Reads on which nodes the VM's pages are.
    fn read_pages(&mut self, root: &Path) -> Result<Found, ReadError> {
        let pid = self.run.pid;
        if self.memory.whole.is_none()
            && let Some(ranges) = numa_maps::guest_ram(root, pid, &self.memory.sizes)?
        {
            let sizes = std::mem::take(&mut self.memory.sizes);
            self.memory = Memory::found(pid, sizes, ranges, &self.domain.cells);
        }
        let Some(mover) = self.memory.mover() else {
            return Ok(Found::None);
        };
        let ranges = mover.ranges().to_vec();
        let seen = numa_maps::look(root, pid, &ranges)?;
        for part in self.memory.parts() {
            let is_own = |(range, _): &(&Range, &Seen)| part.mover.ranges().contains(range);
            let own = |seen| ranges.iter().zip(seen).filter(is_own).map(|(_, seen)| seen);
            let seen = seen.as_deref();
            part.pages = seen.map(|seen| numa_maps::sum(own(seen).map(|seen| &seen.pages)));
            if let Some(seen) = seen {
                let all = |all, seen: &Seen| Binding::join(all, seen.binding.as_ref());
                part.binding = own(seen).fold(None, all);
            }
        }
        Ok(Found::Memory)
    }

    /// Returns the nodes that the guest sees, if there are several.
    pub(crate) fn virtual_nodes(&self) -> Vec<VirtualNode> {
        let cells = &self.domain.cells;
        let node = |(at, cell): (usize, &Cell)| VirtualNode {
            vcpus: cell.vcpus.clone(),
            memory_bytes: cell.memory_bytes,
            pages: self
                .memory
                .virtual_nodes
                .get(at)
                .and_then(|part| part.as_ref()?.pages.clone()),
        };
        let several = cells.iter().enumerate().filter(|_| cells.len() > 1);
        several.map(node).collect()
    }

    /// Makes the next look at the pages read them from the kernel.
    pub(crate) fn forget_pages(&mut self) {
        self.memory.next_read = Ns::ZERO;
    }
}

/// Returns the CPUs on which each vCPU among these threads may run.
pub(crate) fn affinities(threads: &[Thread]) -> impl Iterator<Item = (u16, CpuSet)> + '_ {
    let of_vcpu = |thread: &Thread| Some((vcpu_index(&thread.role)?, thread.affinity.clone()));
    threads.iter().filter_map(of_vcpu)
}

pub(crate) fn vcpu_index(role: &Role) -> Option<u16> {
    match role {
        Role::Vcpu(index) => Some(*index),
        _ => None,
    }
}

/// Access to a VM's lines in the journal.
impl HostContext {
    /// A VM's journal entry, written by this agent or an earlier one.
    pub(crate) fn entry(&self, vm: &Vm) -> Option<&Entry> {
        self.journal.as_ref()?.entry(vm.run.vm)
    }

    /// A VM's journal entry for a lever.
    pub(crate) fn journalled<T: Written>(&self, vm: &Vm) -> Option<T> {
        self.entry(vm)?.get()
    }

    /// Journals what a lever is about to put in force.
    pub(crate) fn set<T: Written>(&mut self, vm: &Vm, what: &str, entry: &T) -> Result<(), ActionError> {
        let written = self.journal.as_mut().map(|journal| journal.set(vm.run.vm, entry));
        written
            .unwrap_or(Ok(()))
            .map_err(|e| failed(vm, what, &e.to_string()))?;
        self.mark(vm);
        Ok(())
    }

    /// Journals that a lever no longer has anything in force.
    pub(crate) fn clear<T: Written>(&mut self, vm: &Vm) {
        self.clear_keys(vm, &[T::KEY]);
    }

    /// As [`HostContext::clear`], for several levers.
    pub(crate) fn clear_keys(&mut self, vm: &Vm, keys: &[&str]) {
        if let Some(journal) = &mut self.journal {
            journal.clear(vm.run.vm, keys);
        }
        self.mark(vm);
    }

    /// Updates the mark if it may differ from the journal.
    pub(crate) fn keep_marked(&mut self, vm: &Vm) {
        if self.marks.is_to_be_compared(vm.run.vm) {
            self.mark(vm);
        }
    }

    /// Updates the VM's own mark from the journal. If that fails, the journal is the only record.
    pub(crate) fn mark(&mut self, vm: &Vm) {
        let Some(journal) = &self.journal else { return };
        let (id, entry) = (vm.run.vm, journal.entry(vm.run.vm));
        if let Err(error) = self.marks.write(self.manager.as_mut(), id, entry) {
            let (name, cause) = (&vm.run.name, error.cause());
            self.notice(format!(
                "cannot mark VM {name} with the agent's changes: {cause}; retrying"
            ));
        }
    }
}

/// The error for an act that the host did not carry out.
pub(crate) fn failed(vm: &Vm, what: &str, cause: &str) -> ActionError {
    let (what, cause) = (what.to_owned(), cause.to_owned());
    Failure::Host { what, cause }.on(&vm.run.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_kernel::numa_maps::Sharing;

    #[test]
    fn a_cell_has_memory_of_its_own_only_where_an_object_is_its_own() {
        let range = |start: u64, mib: u64| Range {
            start,
            end: start + (mib << 20),
            sharing: Sharing::Private,
            page_bytes: Bytes(PAGE_BYTES),
        };
        let cell = |mib: u64| Cell {
            vcpus: Vec::new(),
            memory_bytes: Bytes(mib << 20),
        };
        let own = |sizes: &[u64], cells: &[u64]| {
            let sizes: Vec<Bytes> = sizes.iter().map(|mib| Bytes(mib << 20)).collect();
            let ranges = (0u64..).zip(&sizes);
            let ranges = ranges.map(|(at, size)| range((1 << 40) - (at << 32), size.0 >> 20));
            let cells: Vec<Cell> = cells.iter().map(|mib| cell(*mib)).collect();
            let memory = Memory::found(1, sizes.clone(), ranges.collect(), &cells);
            let parts = memory.virtual_nodes.iter();
            parts.map(Option::is_some).collect::<Vec<_>>()
        };
        assert_eq!(own(&[64, 32], &[64, 32]), [true, true]);
        assert_eq!(
            own(&[64, 32, 16], &[64, 0, 32]),
            [true, false, true],
            "and a DIMM"
        );
        assert_eq!(own(&[96], &[64, 32]), [false, false]);
        assert_eq!(own(&[96, 16], &[64, 32]), [false, false], "and a DIMM");
    }
}
