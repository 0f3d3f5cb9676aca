//! Memory taken from a guest and returned. The guest's balloon follows at once, and what no longer fits goes to swap.
//!
//! # Pages that return [XPV, sections 4.1.2 and 4.3.1]
//!
//! Under KVM a page that a balloon gave up belongs to the host until the guest uses it again, which is then a first touch. Xen
//! gives a guest pages as soon as the balloon deflates. They may come from any node: here in turn from all nodes that have free
//! pages, the home nodes first. From then on the VM's frames are its own (`owns_frames`), and its guest takes pages from its own
//! free list. A guest with live virtual nodes finds each page on the list of the page's real node, and takes the nearest. Any
//! other guest treats the pages as the ones that it gave up, wherever they are.

use homenode_units::{Bytes, Ns, PAGE_BYTES, Pages};

use super::Engine;
use crate::guest::memory::Needs;
use crate::guest::{MemoryLease, Stage, Vm};
use crate::hypervisor::memory::Toucher;
use crate::index::{CpuIx, ThreadIx, VmIx};
use crate::scenario::Hypervisor;

/// Time that a fault waits for a page in swap: a random read from a fast disk, plus the kernel's part. Not measured.
const FAULT_NS: f64 = 100e3;

impl Vm {
    /// Returns the use that the VM's guest has for memory at its present stage.
    pub(crate) fn needs(&self) -> Needs {
        match self.stage {
            Stage::Booting | Stage::Program => Needs::Program,
            Stage::Absent | Stage::Ended | Stage::Gone => Needs::Kernel,
        }
    }

    /// Returns how many more pages the VM may take.
    fn room(&self) -> u64 {
        let has: u64 = self.memory.pages().iter().sum();
        self.memory_bytes.to_pages().0.saturating_sub(has)
    }
}

impl Engine {
    /// Limits a VM to this much memory until its lease is over; returns whether the limit changed.
    pub(crate) fn set_memory(&mut self, vm: VmIx, memory: Bytes, until: Ns) -> bool {
        let owner = &mut self.vms[vm];
        let before = owner
            .limits
            .memory
            .map_or(owner.memory_bytes, |limit| limit.before);
        let is_new = owner.limits.memory.is_none_or(|limit| limit.memory != memory);
        owner.limits.memory = Some(MemoryLease {
            memory,
            before,
            until,
        });
        if is_new {
            self.resize(vm, memory);
            self.version += 1;
            self.hold_to_memory(vm);
        }
        is_new
    }

    /// Lifts a VM's memory limit. Its pages return as they are used.
    pub(crate) fn give_back_memory(&mut self, vm: VmIx) {
        if let Some(limit) = self.vms[vm].limits.memory.take() {
            self.resize(vm, limit.before);
            self.version += 1;
        }
    }

    /// Sets a VM's balloon so that it leaves the guest this much memory.
    pub(super) fn resize(&mut self, vm: VmIx, memory: Bytes) {
        let owner = &mut self.vms[vm];
        let more = memory
            .to_pages()
            .0
            .saturating_sub(owner.memory_bytes.to_pages().0);
        owner.memory_bytes = memory;
        let more = more.min(owner.room());
        if more > 0 && self.hypervisor == Hypervisor::Xen {
            self.memory.give(&mut owner.memory, more);
        }
    }

    /// Takes the pages that a VM has beyond its limit: first those that its programs do not need, then those that its guest
    /// writes to swap.
    pub(super) fn hold_to_memory(&mut self, vm: VmIx) {
        let owner = &mut self.vms[vm];
        if owner.limits.memory.is_none() {
            return;
        }
        let over = |owner: &Vm| {
            let has: u64 = owner.memory.pages().iter().sum();
            has.saturating_sub(owner.memory_bytes.to_pages().0)
        };
        let needs = owner.needs();
        let spared = owner.memory.give_back_all(over(owner), needs, &mut self.chance);
        self.memory.release(&spared);
        let swapped = owner.memory.swap_out(over(owner), &mut self.chance);
        owner.swap.written += swapped.iter().sum::<u64>();
        self.memory.release(&swapped);
    }

    /// Returns the time that waiting for swap adds to an instruction of a thread.
    pub(super) fn swap_ns(&self, vm: VmIx, thread: ThreadIx, accesses: f64) -> f64 {
        accesses * self.vms[vm].memory.fault_share(thread) * FAULT_NS
    }

    /// Brings pages back from swap as a thread makes `accesses` accesses, as far as the VM has room.
    pub(super) fn fault(&mut self, vm: VmIx, vcpu: ThreadIx, cpu: CpuIx, accesses: f64) {
        let owner = &mut self.vms[vm];
        let faults = accesses * owner.memory.fault_share(vcpu);
        if faults == 0.0 {
            return;
        }
        owner.swap.faults += faults;
        owner.swap.carried += faults;
        let back = (owner.swap.carried as u64).min(owner.room());
        owner.swap.carried -= (owner.swap.carried as u64) as f64;
        let by = Toucher {
            vcpu,
            node: self.topology.cpus[cpu].node,
        };
        self.placed.fill(0);
        for (region, class, pages) in owner.memory.swap_in(vcpu, back) {
            let placed = &mut self.placed;
            self.memory.touch_class(
                &self.topology,
                &mut owner.memory,
                (region, class),
                by,
                pages,
                placed,
            );
        }
        for (at, pages) in self.placed.iter().enumerate().filter(|(_, pages)| **pages > 0) {
            self.totals.write(by.node, at, (pages * PAGE_BYTES) as f64);
        }
    }

    /// Returns what a VM's guest would report about its memory.
    pub(crate) fn guest_memory(&self, vm: &Vm) -> homenode_host::GuestMemory {
        let of = |needs| Pages(vm.memory.resident(needs)).to_bytes();
        let usable = vm.memory_bytes.saturating_sub(of(vm.needs()));
        homenode_host::GuestMemory {
            age: Some(Ns::ZERO),
            total: Some(vm.memory_bytes),
            usable: Some(usable),
            unused: Some(vm.memory_bytes.saturating_sub(of(Needs::Program))),
            swapped_in: Some(Pages(vm.swap.faults as u64).to_bytes()),
            swapped_out: Some(Pages(vm.swap.written).to_bytes()),
            major_faults: Some(vm.swap.faults as u64),
        }
    }
}
