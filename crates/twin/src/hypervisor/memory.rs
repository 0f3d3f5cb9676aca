//! Physical memory of the host: which node has how many free pages, and where a VM's pages lie.
//!
//! # Model
//!
//! - *First-touch* (Linux's default policy): a page goes to the node that its guest wants it on (a guest without
//!   virtual nodes: that of the CPU that touches it), or to the nearest with a free page.
//! - *Round-4K and round-1G* (seed 004, sections 3.2 and 3.3): when the VM is created all of its guest frames are dealt
//!   out to the nodes in turn, page by page or GiB by GiB, beginning with the node that has the most free memory; a node
//!   without a whole GiB left is passed over, and what no node has a whole GiB for is dealt page by page. Regions then
//!   take those pages as they are touched, each class of pages consecutive guest frames.
//! - *Interleave in the guest* deals in the same way over the nodes that the guest knows, when pages are touched.
//! - *A home* (`mbind`, an operator's nodes) wins over all of these: the guest's or the turn's node counts where it is a
//!   home node; other pages are dealt out evenly over home nodes as far as they have room, then as without. Pages that
//!   a VM has and has not touched are exchanged for pages of the home.
//!
//! # Left out
//!
//! Page cache, watermarks and reclaim, huge pages; fragmentation, which makes round-1G fall back to smaller pieces, also
//! in the first and last GiB of a VM; Xen's choice of home nodes for a VM; the time that creating a VM takes, and that a
//! first touch of a page that the VM has already is cheaper; the host's own memory (node sizes in presets are what the
//! machine has, not what a booted kernel leaves).

use crate::guest::VmMemory;
use crate::guest::memory::spread;
use crate::hardware::Topology;

/// Pages of a GiB.
pub(crate) const GIB_PAGES: u64 = 1 << 18;

/// A page's first touch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Toucher {
    /// vCPU, and the node that its CPU is on.
    pub vcpu: usize,
    pub node: usize,
}

/// Which node each guest frame is dealt to: stretch after stretch, in each the nodes in turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Turns(Vec<Stretch>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Stretch {
    pages: u64,
    /// Pages of one turn.
    turn: u64,
    nodes: Vec<usize>,
}

impl Turns {
    /// Page by page over these nodes, for ever.
    pub fn even(nodes: Vec<usize>) -> Turns {
        Turns(vec![Stretch {
            pages: u64::MAX,
            turn: 1,
            nodes,
        }])
    }

    /// Adds `pages` frames from `frame` on to counts by node. Frames beyond the end go to the last stretch's nodes.
    pub fn deal(&self, mut frame: u64, mut pages: u64, counts: &mut [u64]) {
        for (at, stretch) in self.0.iter().enumerate() {
            let last = at + 1 == self.0.len();
            if frame >= stretch.pages && !last {
                frame -= stretch.pages;
                continue;
            }
            let here = if last {
                pages
            } else {
                pages.min(stretch.pages - frame)
            };
            stretch.deal(frame, here, counts);
            pages -= here;
            if pages == 0 {
                return;
            }
            frame = 0;
        }
    }
}

impl Stretch {
    fn deal(&self, mut frame: u64, mut pages: u64, counts: &mut [u64]) {
        let rounds = pages / (self.turn * self.nodes.len() as u64);
        for node in &self.nodes {
            counts[*node] += rounds * self.turn;
        }
        pages -= rounds * self.turn * self.nodes.len() as u64;
        while pages > 0 {
            let part = pages.min(self.turn - frame % self.turn);
            counts[self.nodes[(frame / self.turn) as usize % self.nodes.len()]] += part;
            frame += part;
            pages -= part;
        }
    }
}

/// Free pages by node.
#[derive(Clone, Debug)]
pub(crate) struct HostMemory {
    pub free: Vec<u64>,
    pub total: Vec<u64>,
    /// Scratch: pages by the node that they are wanted on, and room by node.
    wanted: Vec<u64>,
    room: Vec<u64>,
}

impl HostMemory {
    pub fn new(total: Vec<u64>) -> HostMemory {
        HostMemory {
            free: total.clone(),
            wanted: vec![0; total.len()],
            room: vec![0; total.len()],
            total,
        }
    }

    /// Nodes that have memory.
    pub fn nodes(&self) -> Vec<usize> {
        (0..self.total.len())
            .filter(|node| self.total[*node] > 0)
            .collect()
    }

    /// Gives a VM that is created all of its pages, `turn` by `turn`. The scenario was checked to fit.
    pub fn create(&mut self, vm: &mut VmMemory, pages: u64, turn: u64) {
        let mut stretches = Vec::new();
        let mut left = pages;
        let all = self.nodes();
        let home = vm.home.clone().unwrap_or_default();
        for nodes in [home, all] {
            for turn in [turn, 1] {
                while left > 0 {
                    let mut open: Vec<usize> = nodes
                        .iter()
                        .copied()
                        .filter(|node| self.free[*node] >= turn)
                        .collect();
                    let Some(rounds) = open.iter().map(|node| self.free[*node] / turn).min() else {
                        break;
                    };
                    let roomiest =
                        (0..open.len()).max_by_key(|at| (self.free[open[*at]], std::cmp::Reverse(*at)));
                    open.rotate_left(roomiest.unwrap_or(0));
                    let stretch = Stretch {
                        pages: left.min(rounds * turn * open.len() as u64),
                        turn,
                        nodes: open,
                    };
                    self.wanted.fill(0);
                    stretch.deal(0, stretch.pages, &mut self.wanted);
                    for node in 0..self.wanted.len() {
                        self.free[node] -= self.wanted[node];
                        vm.free_list[node] += self.wanted[node];
                    }
                    left -= stretch.pages;
                    stretches.push(stretch);
                }
            }
        }
        assert!(
            left == 0,
            "the host ran out of memory though the scenario fits: {left} of {pages} pages have no room"
        );
        vm.turns = Some(Turns(stretches));
    }

    /// Gives a VM `pages` pages of a region that are touched for the first time, and adds them to `placed` by the node
    /// that they came to lie on. The scenario was checked to fit, so there is room somewhere.
    pub fn touch(
        &mut self,
        topology: &Topology,
        vm: &mut VmMemory,
        region: usize,
        by: Toucher,
        pages: u64,
        placed: &mut [u64],
    ) {
        for (class, pages) in vm.by_class(region, pages).into_iter().enumerate() {
            if pages == 0 {
                continue;
            }
            let mut wanted = std::mem::take(&mut self.wanted);
            wanted.fill(0);
            match &vm.turns {
                Some(turns) => turns.deal(vm.next_frame(region, class), pages, &mut wanted),
                None => wanted[vm.view.node_of(by.vcpu, by.node)] = pages,
            }
            vm.view.take(&mut wanted, &topology.fallback);
            let mut lay = |vm: &mut VmMemory, node: usize, pages: u64| {
                vm.touch(region, class, node, pages);
                placed[node] += pages;
            };
            for (node, wanted) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted > 0) {
                let left = self.place_at_home(vm, node, *wanted, &mut lay);
                self.place_near(&topology.fallback[node], vm, left, &mut lay);
            }
            self.wanted = wanted;
        }
    }

    /// Places what it can on home nodes, if there are any; gives what is left.
    fn place_at_home(
        &mut self,
        vm: &mut VmMemory,
        node: usize,
        pages: u64,
        lay: &mut impl FnMut(&mut VmMemory, usize, u64),
    ) -> u64 {
        let Some(home) = vm.home.take() else { return pages };
        let mut left = pages;
        if home.contains(&node) && (vm.turns.is_some() || vm.view.chooses()) {
            let here = left.min(self.free[node] + vm.free_list[node]);
            self.exchange(vm, node, here);
            lay(vm, node, here);
            left -= here;
        }
        for (at, room) in self.room.iter_mut().enumerate() {
            *room = self.free[at] + vm.free_list[at];
        }
        let mut next = vm.next_home;
        for (node, here) in spread(left, &home, &mut next, &mut self.room) {
            self.exchange(vm, node, here);
            lay(vm, node, here);
            left -= here;
        }
        vm.next_home = next;
        vm.home = Some(home);
        left
    }

    /// Takes pages of a node for a VM: those that it has there, and the host's, for which it gives back others that it
    /// has elsewhere.
    fn exchange(&mut self, vm: &mut VmMemory, node: usize, pages: u64) {
        let own = pages.min(vm.free_list[node]);
        vm.free_list[node] -= own;
        let mut from_host = pages - own;
        self.free[node] -= from_host;
        for (free, own) in self.free.iter_mut().zip(&mut vm.free_list) {
            let back = from_host.min(*own);
            *own -= back;
            *free += back;
            from_host -= back;
        }
    }

    /// Places pages on the nearest nodes: those that the VM has already, then the host's.
    fn place_near(
        &mut self,
        near: &[usize],
        vm: &mut VmMemory,
        pages: u64,
        lay: &mut impl FnMut(&mut VmMemory, usize, u64),
    ) {
        let mut left = pages;
        for node in near {
            let here = left.min(vm.free_list[*node]);
            vm.free_list[*node] -= here;
            left -= here;
            if here > 0 {
                lay(vm, *node, here);
            }
        }
        for node in near {
            let here = left.min(self.free[*node]);
            self.free[*node] -= here;
            left -= here;
            if here > 0 {
                lay(vm, *node, here);
            }
        }
        assert!(
            left == 0,
            "the host ran out of memory though the scenario fits: {left} of {pages} pages have no room"
        );
    }

    /// Takes back the pages of a VM that leaves.
    pub fn release(&mut self, pages: &[u64]) {
        for (free, pages) in self.free.iter_mut().zip(pages) {
            *free += pages;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::View;
    use homenode_units::Bytes;
    use proptest::prelude::*;

    fn created(free: &[u64], pages: u64, turn: u64, home: Option<Vec<usize>>) -> (HostMemory, VmMemory) {
        let mut host = HostMemory::new(free.to_vec());
        let (mut vm, ..) = VmMemory::new(free.len(), 1, Bytes(4096), None, View::Blind);
        vm.home = home;
        host.create(&mut vm, pages, turn);
        (host, vm)
    }

    #[test]
    fn turns_go_on_where_the_last_page_was() {
        // Stretch 1: 5 pages in turns of 2 over nodes 0 and 1 (0 0 1 1 0), stretch 2: single pages over 2 and 0.
        let stretch = |pages, turn, nodes: &[usize]| Stretch {
            pages,
            turn,
            nodes: nodes.to_vec(),
        };
        let turns = Turns(vec![stretch(5, 2, &[0, 1]), stretch(4, 1, &[2, 0])]);
        let mut counts = [0; 3];
        turns.deal(1, 6, &mut counts); // frames 1 to 6: 0 1 1 0 | 2 0
        assert_eq!(counts, [3, 2, 1]);
    }

    #[test]
    fn a_gib_that_no_node_has_is_dealt_page_by_page() {
        // 2.5 GiB over nodes of 2, 1 and 0.5 GiB (and a bit): a GiB to node 0, to node 1 and to node 0; then pages.
        let half = GIB_PAGES / 2;
        let (host, vm) = created(&[4 * half, 2 * half + 10, half], 6 * half + 20, GIB_PAGES, None);
        assert_eq!(vm.free_list, [4 * half, 2 * half + 10, 10]);
        assert_eq!(host.free, [0, 0, half - 10]);
    }

    #[test]
    fn a_home_gets_the_pages_until_it_is_full() {
        let (_, vm) = created(&[100, 100, 100], 150, 1, Some(vec![1]));
        assert_eq!(vm.free_list, [25, 100, 25]);
    }

    proptest! {
        #[test]
        fn what_is_dealt_in_parts_is_what_is_dealt_at_once(
            turn in 1u64..5, parts in prop::collection::vec(0u64..40, 1..8), free in prop::collection::vec(40u64..200, 4..5),
        ) {
            let pages: u64 = parts.iter().sum();
            prop_assume!(pages <= free.iter().sum::<u64>());
            let (host, vm) = created(&free, pages, turn, None);
            let mut counts = vec![0; 4];
            let mut frame = 0;
            for part in parts {
                if let (Some(turns), true) = (&vm.turns, part > 0) {
                    turns.deal(frame, part, &mut counts);
                }
                frame += part;
            }
            prop_assert_eq!(&counts, &vm.free_list);
            for ((free, left), own) in free.iter().zip(&host.free).zip(&vm.free_list) {
                prop_assert_eq!(*free, left + own);
            }
        }
    }
}
