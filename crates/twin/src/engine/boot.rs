//! What a VM gets when it is created and when it boots: its memory, and the nodes that its guest is shown.

use homenode_units::Placing;

use super::Engine;
use crate::guest::View;
use crate::hypervisor::memory::Pieces;
use crate::hypervisor::turns::Turns;
use crate::index::{TaskIx, VmIx};
use crate::scenario::Allocation;

impl Engine {
    /// Gives a newly created VM the memory that its hypervisor allocates at creation.
    pub(super) fn create_memory(&mut self, vm: VmIx) {
        let vm = &mut self.vms[vm];
        let pages = vm.memory_bytes.to_pages().0;
        if vm.memory.owns_frames {
            self.memory.own(&self.topology, &mut vm.memory, pages);
            if let Some(size) = vm.pool_at_start() {
                vm.memory.size_pool(size, &mut self.chance);
            }
            return;
        }
        let pieces = match vm.memory_policy.placing {
            Placing::FirstTouch => return,
            // Linux allocates a process's pages when they are touched, not before.
            _ if vm.memory.view == View::Truth => return,
            Placing::Round4k => Pieces::Small,
            Placing::Round1g => Pieces::Gibs,
        };
        self.memory.create(&mut vm.memory, pages, pieces);
    }

    /// Shows a booting guest the nodes that its vCPUs are on.
    pub(super) fn show_nodes(&mut self, vm: VmIx) {
        let vm = &mut self.vms[vm];
        let home = vm.memory.home.clone().filter(|home| !home.is_empty());
        let with_memory = |task: TaskIx| {
            let node = self.topology.cpus[self.scheduler.queues.tasks[task].cpu].node;
            // If an operator has set the VM's nodes, it may use no other.
            let near = &self.topology.fallback[node];
            let may = |node: &&usize| home.as_ref().is_none_or(|home| home.contains(node));
            near.iter().find(may).copied().unwrap_or(node)
        };
        let on = vm
            .threads
            .places()
            .map(|thread| with_memory(vm.task(thread)))
            .collect();
        let nodes = self.topology.nodes();
        vm.memory.view.boot(on, nodes, vm.memory_bytes.to_pages().0);
        let interleaves =
            vm.allocation == Allocation::Interleave || vm.memory_policy.placing == Placing::Round4k;
        if vm.memory.turns.is_none() && vm.memory.view.chooses() && interleaves {
            let all = home.unwrap_or_else(|| self.memory.nodes());
            vm.memory.turns = Some(Turns::even(vm.memory.view.nodes(&all)));
        }
    }
}
