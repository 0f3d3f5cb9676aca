//! What a guest's kernel knows of nodes, and on which of them it wants a page.
//!
//! # Model
//!
//! - *Blind*: a VM without virtual nodes sees one node. Where its pages lie is the hypervisor's business alone.
//! - *Truth*: the kernel of the bare machine knows the node of each CPU now.
//! - *Virtual*: at boot each vCPU belongs to a virtual node, the host node that it is on then (the nearest with memory),
//!   and each virtual node gets memory in proportion to its vCPUs, which lies on that host node. A *static* guest's kernel
//!   believes this for ever, also when a vCPU has moved: it then places pages beside where the vCPU was. One that is told
//!   *live* (XPV, [XPV, section 4.3.2]) knows where each vCPU is now, at once and for nothing: the paper's interrupt handler
//!   takes 368 cycles. A virtual node that is full sends pages to the nearest that is not.
//!
//! # Left out
//!
//! What a static guest believes of pages that the host moved later: its AutoNUMA sees them where they are, as a live one's does,
//! but for those that a balloon brought back (`engine/balloon.rs`).
//! Virtual distances that differ from the host's. A live guest that is told late or rarely.

use homenode_units::divide_proportionally;

use crate::index::ThreadIx;
use crate::scenario::{Hypervisor, VmSpec, Vnuma};

/// Whose kernel it is.
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
        /// Whether it is told when a vCPU is on another node.
        told: Told,
        /// Virtual node of each vCPU at boot, as a node of the host; empty before.
        of_vcpu: Vec<usize>,
        /// Pages that each virtual node has left.
        room: Vec<u64>,
    },
}

/// When a guest is told where its vCPUs are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    AtBoot,
    Always,
}

impl View {
    /// What the guest of this VM knows before it has booted.
    pub fn of(spec: &VmSpec, hypervisor: Hypervisor) -> View {
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

    /// The guest boots: its vCPUs are on these nodes (with memory), of `nodes`, and it has `pages`.
    pub fn boot(&mut self, on: Vec<usize>, nodes: usize, pages: u64) {
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
    pub fn chooses(&self) -> bool {
        *self != View::Blind
    }

    /// Node on which a vCPU's CPU is, as far as the guest knows; `real` is where it is.
    pub fn node_of(&self, vcpu: ThreadIx, real: usize) -> usize {
        match self {
            View::Virtual {
                told: Told::AtBoot,
                of_vcpu,
                ..
            } => of_vcpu.get(vcpu.0).copied().unwrap_or(real),
            View::Blind | View::Truth | View::Virtual { .. } => real,
        }
    }

    /// Nodes that the guest knows, ascending; `all` are those of the host with memory.
    pub fn nodes(&self, all: &[usize]) -> Vec<usize> {
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

    /// Pages that the guest has left on a node, as far as it limits them.
    pub fn room(&self, node: usize) -> u64 {
        match self {
            View::Blind | View::Truth => u64::MAX,
            View::Virtual { room, .. } => room[node],
        }
    }

    /// The guest has moved pages from one of its nodes to another that had room.
    pub fn moved(&mut self, from: usize, to: usize, pages: u64) {
        if let View::Virtual { room, .. } = self {
            room[from] += pages;
            room[to] -= pages;
        }
    }

    /// Pages of a node are free again.
    pub fn give_back(&mut self, node: usize, pages: u64) {
        if let View::Virtual { room, .. } = self {
            room[node] += pages;
        }
    }

    /// Takes pages of virtual nodes; what does not fit on the node that is wanted goes to the nearest with room.
    /// `wanted` is by node, `near` the nodes nearest to each first.
    pub fn take(&mut self, wanted: &mut [u64], near: &[Vec<usize>]) {
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
            // More than the VM has: regions are rounded up to pages. It stays where it was wanted.
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
        // vCPU 1 has moved to node 1 since: the guest does not know.
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
