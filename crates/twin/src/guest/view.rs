//! What a guest's kernel knows of nodes, and the node on which it wants a page.
//!
//! # Model
//!
//! - *Blind*: a VM without virtual nodes sees one node. Only the hypervisor decides where its pages are.
//! - *Truth*: the kernel of the bare machine knows the present node of each CPU.
//! - *Virtual*: at boot each vCPU belongs to a virtual node, which stands for the host node that the vCPU is on at that time (the
//!   nearest with memory). Each virtual node gets memory on that host node in proportion to its vCPUs. A *static* guest's kernel
//!   believes this for ever, even after a vCPU has moved: it then places pages near where the vCPU was. A *live* guest (XPV,
//!   [XPV, section 4.3.2]) is notified and knows where each vCPU is now, at once and at no cost: the paper's interrupt handler
//!   takes 368 cycles. A virtual node that is full sends pages to the nearest that is not.
//!
//! # Left out
//!
//! What a static guest believes of pages that the host moved later: its AutoNUMA sees them where they are, as a live guest's
//! does, except for those that a balloon brought back (`engine/balloon.rs`). Virtual distances that differ from the host's.
//! A live guest that is notified late or rarely.

use homenode_units::divide_proportionally;

use crate::index::ThreadIx;
use crate::scenario::{Hypervisor, VmSpec, Vnuma};

/// Whether a kernel is that of a guest or of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum By {
    Guest,
    Host,
}

/// What a guest's kernel knows of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum View {
    Blind,
    Truth,
    Virtual {
        /// Whether the guest is notified when a vCPU is on another node.
        told: Told,
        /// Virtual node of each vCPU at boot, as a node of the host; empty before boot.
        of_vcpu: Vec<usize>,
        /// Number of pages that each virtual node has left.
        room: Vec<u64>,
    },
}

/// When a guest is notified of the nodes of its vCPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    AtBoot,
    Always,
}

impl View {
    /// Returns what the guest of a VM knows before it has booted.
    pub(crate) fn of(spec: &VmSpec, hypervisor: Hypervisor) -> View {
        let told = match (hypervisor, spec.vnuma) {
            (Hypervisor::Native, _) => return View::Truth,
            (_, Vnuma::None) => return View::Blind,
            (_, Vnuma::Static) => Told::AtBoot,
            (_, Vnuma::Live) => Told::Always,
        };
        View::Virtual {
            told,
            of_vcpu: Vec::new(),
            room: Vec::new(),
        }
    }

    /// Boots a guest with `pages` pages on a host of `nodes` nodes. Its vCPUs are on the nodes `on`, which have memory.
    pub(crate) fn boot(&mut self, on: Vec<usize>, nodes: usize, pages: u64) {
        if let View::Virtual { of_vcpu, room, .. } = self {
            let mut vcpus = vec![0; nodes];
            for node in &on {
                vcpus[*node] += 1;
            }
            *room = divide_proportionally(pages, &vcpus);
            *of_vcpu = on;
        }
    }

    /// Whether the guest chooses nodes at all.
    pub(crate) fn chooses(&self) -> bool {
        *self != View::Blind
    }

    /// Returns the node that the guest believes a vCPU's CPU is on; `real` is the true one.
    pub(crate) fn node_of(&self, vcpu: ThreadIx, real: usize) -> usize {
        match self {
            View::Virtual {
                told: Told::AtBoot,
                of_vcpu,
                ..
            } => of_vcpu.get(vcpu.0).copied().unwrap_or(real),
            View::Blind | View::Truth | View::Virtual { .. } => real,
        }
    }

    /// Returns the nodes that the guest knows, ascending; `all` is the host's nodes with memory.
    pub(crate) fn nodes(&self, all: &[usize]) -> Vec<usize> {
        match self {
            View::Blind | View::Truth => all.to_vec(),
            View::Virtual { of_vcpu, .. } => {
                let mut nodes = of_vcpu.clone();
                nodes.sort_unstable();
                nodes.dedup();
                nodes
            }
        }
    }

    /// Returns how many pages the guest has left on a node; unlimited if it does not count them.
    pub(crate) fn room(&self, node: usize) -> u64 {
        match self {
            View::Blind | View::Truth => u64::MAX,
            View::Virtual { room, .. } => room[node],
        }
    }

    /// Notes that the guest moved pages from one of its nodes to another that had room.
    pub(crate) fn moved(&mut self, from: usize, to: usize, pages: u64) {
        if let View::Virtual { room, .. } = self {
            room[from] += pages;
            room[to] -= pages;
        }
    }

    /// Returns pages to the guest's room on a node.
    pub(crate) fn give_back(&mut self, node: usize, pages: u64) {
        if let View::Virtual { room, .. } = self {
            room[node] += pages;
        }
    }

    /// Takes pages from virtual nodes. Pages that do not fit on the wanted node go to the nearest node with room. `wanted` is
    /// indexed by node; `near` lists for each node the others, nearest first.
    pub(crate) fn take(&mut self, wanted: &mut [u64], near: &[Vec<usize>]) {
        let View::Virtual { room, .. } = self else { return };
        let mut over = vec![0; wanted.len()];
        for ((wanted, room), over) in wanted.iter_mut().zip(room.iter_mut()).zip(&mut over) {
            *over = wanted.saturating_sub(*room);
            *wanted -= *over;
            *room -= *wanted;
        }
        for (node, mut over) in over.into_iter().enumerate().filter(|(_, over)| *over > 0) {
            for other in &near[node] {
                let part = over.min(room[*other]);
                room[*other] -= part;
                wanted[*other] += part;
                over -= part;
            }
            // The guest wants more pages than the VM has, because regions are rounded up to pages. The rest stays where it was
            // wanted.
            wanted[node] += over;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virtual_nodes_have_memory_by_their_vcpus_and_overflow_to_the_nearest() {
        let mut view = View::Virtual {
            told: Told::AtBoot,
            of_vcpu: Vec::new(),
            room: Vec::new(),
        };
        view.boot(vec![2, 0, 2, 2], 3, 400);
        assert_eq!(view.nodes(&[0, 1, 2]), [0, 2]);
        assert!(matches!(&view, View::Virtual { room, .. } if *room == [100, 0, 300]));
        // vCPU 1 has moved to node 1 since boot, but the guest does not know.
        assert_eq!(view.node_of(ThreadIx(1), 1), 0);
        let mut live = view.clone();
        if let View::Virtual { told, .. } = &mut live {
            *told = Told::Always;
        }
        assert_eq!(live.node_of(ThreadIx(1), 1), 1, "a guest that is told knows");
        let near = [vec![0, 1, 2], vec![1, 0, 2], vec![2, 1, 0]];
        let mut wanted = [150, 0, 10];
        view.take(&mut wanted, &near);
        assert_eq!(wanted, [100, 0, 60]);
        assert!(matches!(&view, View::Virtual { room, .. } if *room == [0, 0, 240]));
    }
}
