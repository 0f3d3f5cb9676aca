//! Physical memory of the host: the free pages of each node, and on which nodes a VM's pages are.
//!
//! # Model
//!
//! - *First-touch* (Linux's default policy): a page goes to the node on which its guest wants it, or to the nearest node with a
//!   free page. A guest without virtual nodes gets the node of the CPU that touches the page. A hypervisor's own first-touch
//!   (Xen's, or set while the VM runs) deals such pages out in turn if the node is full [Policies, section 3.1].
//! - *Round-4K and round-1G* [Policies, sections 3.2 and 3.3]: when the VM is created, all of its guest frames are dealt out to
//!   the home nodes in turn, page by page or GiB by GiB, beginning with the node that has the most free memory; then to other
//!   nodes. A node without a whole free GiB is passed over. If no node has a whole GiB, the frames are dealt by 2 MiB; if none
//!   has 2 MiB, page by page. The first and the last GiB of a VM's frames hold the BIOS and devices and are never whole: they are
//!   dealt by 2 MiB. Regions then take those pages as they are touched; each class of pages takes consecutive guest frames.
//! - *Interleave in the guest* deals in the same way over the nodes that the guest knows, when pages are touched.
//! - *With a driver domain*: a VM, and the driver domain itself, gets all of its pages when it is created, on its home while
//!   that has room; from then on they are its own ([`crate::guest::VmMemory::touch_own`]).
//! - *After a balloon under Xen* the same holds: the pages that it returned are the VM's own (`engine/balloon.rs`).
//! - *A home* (`mbind`, an operator's nodes) takes precedence over all of these. The node that the guest, the turn or the
//!   hypervisor chooses counts only if it is a home node. Other pages are dealt out evenly over home nodes as far as they have
//!   room, and then placed as if there were no home. Pages that a VM has but has not touched are exchanged for pages of the home.
//!
//! # Left out
//!
//! Page cache, watermarks and reclaim, huge pages; fragmentation of the host's own memory (the free memory of a node is in one
//! piece); Xen's choice of home nodes for a VM; the time that creating a VM takes; that a first touch of a page that the VM
//! already has is cheaper; the host's own memory (node sizes in presets are what the machine has, not what a booted kernel
//! leaves).

use super::turns::{Stretch, Turns, WhenFull};
use crate::guest::VmMemory;
use crate::guest::memory::spread;
use crate::hardware::Topology;
use crate::index::ThreadIx;

/// Pages of a GiB, and of 2 MiB.
const GIB_PAGES: u64 = 1 << 18;
const LARGE_PAGES: u64 = 1 << 9;

/// Pieces in which a VM's memory is dealt out at creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pieces {
    Small,
    /// Whole GiBs, if frames and nodes have them.
    Gibs,
}

impl Pieces {
    /// Returns stretches of a VM's frames, each with the piece sizes to try, largest first.
    fn stretches(self, pages: u64) -> Vec<(u64, &'static [u64])> {
        if self == Pieces::Small {
            return vec![(pages, &[1])];
        }
        let first = pages.min(GIB_PAGES);
        let rest = pages - first;
        // The last GiB may be smaller than a GiB.
        let last = if rest > 0 { (rest - 1) % GIB_PAGES + 1 } else { 0 };
        let large = |pages: u64| {
            let odd = pages % LARGE_PAGES;
            [(pages - odd, &[LARGE_PAGES, 1][..]), (odd, &[1][..])]
        };
        let [first, first_odd] = large(first);
        let [last, last_odd] = large(last);
        let whole = (rest - last.0 - last_odd.0, &[GIB_PAGES, LARGE_PAGES, 1][..]);
        vec![first, first_odd, whole, last, last_odd]
    }
}

/// A page's first touch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Toucher {
    /// vCPU, and the node that its CPU is on.
    pub vcpu: ThreadIx,
    pub node: usize,
}

/// Number of free pages on each node.
#[derive(Clone, Debug)]
pub(crate) struct HostMemory {
    pub free: Vec<u64>,
    pub total: Vec<u64>,
    /// Scratch: number of pages wanted on each node, and room of each node.
    wanted: Vec<u64>,
    room: Vec<u64>,
}

impl HostMemory {
    pub(crate) fn new(total: Vec<u64>) -> HostMemory {
        HostMemory {
            free: total.clone(),
            wanted: vec![0; total.len()],
            room: vec![0; total.len()],
            total,
        }
    }

    /// Returns the nodes with memory.
    pub(crate) fn nodes(&self) -> Vec<usize> {
        (0..self.total.len())
            .filter(|node| self.total[*node] > 0)
            .collect()
    }

    /// Deals out all pages of a newly created VM in pieces of this kind. An earlier check has made sure that they fit.
    pub(crate) fn create(&mut self, vm: &mut VmMemory, pages: u64, pieces: Pieces) {
        let mut stretches = Vec::new();
        for (pages, turns) in pieces.stretches(pages) {
            self.deal_out(vm, pages, turns, &mut stretches);
        }
        vm.turns = Some(Turns(stretches));
    }

    /// Gives a VM up to `pages` pages as its own, as far as there are free pages. They come in turn from all nodes that have
    /// some, the VM's home nodes first.
    pub(crate) fn give(&mut self, vm: &mut VmMemory, pages: u64) {
        let pages = pages.min(self.free.iter().sum());
        self.deal_out(vm, pages, &[1], &mut Vec::new());
        vm.owns_frames |= pages > 0;
    }

    fn deal_out(&mut self, vm: &mut VmMemory, pages: u64, turns: &[u64], stretches: &mut Vec<Stretch>) {
        let mut left = pages;
        let all = self.nodes();
        let home = vm.home.clone().unwrap_or_default();
        for nodes in [home, all] {
            for turn in turns.iter().copied() {
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
    }

    /// Places all pages of a newly created VM on its home, and those that do not fit on the nearest nodes. An earlier check has
    /// made sure that they fit.
    pub(crate) fn own(&mut self, topology: &Topology, vm: &mut VmMemory, pages: u64) {
        let home = vm.home.clone().unwrap_or_default();
        let mut left = pages;
        let mut next = vm.next_home;
        for (node, here) in spread(pages, &home, &mut next, &mut self.free) {
            vm.free_list[node] += here;
            left -= here;
        }
        vm.next_home = next;
        for node in home
            .first()
            .into_iter()
            .flat_map(|first| &topology.fallback[*first])
        {
            let here = left.min(self.free[*node]);
            self.free[*node] -= here;
            vm.free_list[*node] += here;
            left -= here;
        }
        assert!(
            left == 0,
            "the host ran out of memory though the scenario fits: {left} of {pages} pages have no room"
        );
    }

    /// Places `pages` pages of a region that a VM touches for the first time, and adds them to `placed` by node. An earlier check
    /// of the scenario has made sure that there is room.
    pub(crate) fn touch(
        &mut self,
        topology: &Topology,
        vm: &mut VmMemory,
        region: usize,
        by: Toucher,
        pages: u64,
        placed: &mut [u64],
    ) {
        for (class, pages) in vm.by_class(region, pages).into_iter().enumerate() {
            self.touch_class(topology, vm, (region, class), by, pages, placed);
        }
    }

    /// Places pages of one class, given by its region and number.
    pub(crate) fn touch_class(
        &mut self,
        topology: &Topology,
        vm: &mut VmMemory,
        (region, class): (usize, usize),
        by: Toucher,
        pages: u64,
        placed: &mut [u64],
    ) {
        if pages > 0 {
            let mut wanted = std::mem::take(&mut self.wanted);
            wanted.fill(0);
            match &vm.turns {
                Some(turns) => turns.deal(vm.next_frame(region, class), pages, &mut wanted),
                None => {
                    // The kernel's pages (region 0) are touched at boot, so none of them was touched before.
                    let before = match region {
                        0 => 0,
                        _ => vm.scattered.deal(pages, || self.nodes(), &mut wanted),
                    };
                    wanted[vm.view.node_of(by.vcpu, by.node)] += pages - before;
                }
            }
            if !vm.owns_frames {
                vm.view.take(&mut wanted, &topology.fallback);
            }
            let mut lay = |vm: &mut VmMemory, node: usize, pages: u64| {
                vm.touch(region, class, node, pages);
                placed[node] += pages;
            };
            for (node, wanted) in wanted.iter().enumerate().filter(|(_, wanted)| **wanted > 0) {
                let near = &topology.fallback[node];
                let left = match vm.owns_frames {
                    true => place_own(near, vm, *wanted, &mut lay),
                    false => *wanted,
                };
                let left = self.place_at_home(vm, node, left, &mut lay);
                self.place_near(near, vm, left, &mut lay);
            }
            self.wanted = wanted;
        }
    }

    /// Places as many pages as fit on home nodes, if there are any. Returns how many are left.
    fn place_at_home(
        &mut self,
        vm: &mut VmMemory,
        node: usize,
        pages: u64,
        lay: &mut impl FnMut(&mut VmMemory, usize, u64),
    ) -> u64 {
        let Some(home) = vm.home.take() else { return pages };
        let mut left = pages;
        let local = vm.turns.is_some() || vm.view.chooses() || vm.when_full == WhenFull::InTurn;
        if home.contains(&node) && local {
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

    /// Takes pages of a node for a VM: first free pages that the VM has there, then the host's, in exchange for pages that the VM
    /// has on other nodes.
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

    /// Places a VM's pages, nearest node first: in free memory that the VM already holds, then in the host's.
    fn place_near(
        &mut self,
        near: &[usize],
        vm: &mut VmMemory,
        pages: u64,
        lay: &mut impl FnMut(&mut VmMemory, usize, u64),
    ) {
        let mut left = pages;
        if vm.when_full == WhenFull::InTurn
            && let Some((own, others)) = near.split_first()
        {
            let here = left.min(self.free[*own] + vm.free_list[*own]);
            if here > 0 {
                self.exchange(vm, *own, here);
                lay(vm, *own, here);
                left -= here;
            }
            for (at, room) in self.room.iter_mut().enumerate() {
                *room = self.free[at] + vm.free_list[at];
            }
            let mut others = others.to_vec();
            others.sort_unstable();
            let mut next = vm.next_home;
            for (node, here) in spread(left, &others, &mut next, &mut self.room) {
                self.exchange(vm, node, here);
                lay(vm, node, here);
                left -= here;
            }
            vm.next_home = next;
        }
        left = place_own(near, vm, left, lay);
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
    pub(crate) fn release(&mut self, pages: &[u64]) {
        for (free, pages) in self.free.iter_mut().zip(pages) {
            *free += pages;
        }
    }
}

/// Uses free pages that the VM already has, the nearest first. Returns how many pages are left to place.
fn place_own(
    near: &[usize],
    vm: &mut VmMemory,
    pages: u64,
    lay: &mut impl FnMut(&mut VmMemory, usize, u64),
) -> u64 {
    let mut left = pages;
    for node in near {
        let here = left.min(vm.free_list[*node]);
        vm.free_list[*node] -= here;
        left -= here;
        if here > 0 {
            lay(vm, *node, here);
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::View;
    use homenode_units::Bytes;
    use proptest::prelude::*;

    fn created(free: &[u64], pages: u64, pieces: Pieces, home: Option<Vec<usize>>) -> (HostMemory, VmMemory) {
        let mut host = HostMemory::new(free.to_vec());
        let (mut vm, ..) = VmMemory::new(free.len(), 1, Bytes(4096), None, View::Blind);
        vm.home = home;
        host.create(&mut vm, pages, pieces);
        (host, vm)
    }

    #[test]
    fn turns_go_on_where_the_last_page_was() {
        // Stretch 1: 5 pages in turns of 2 over nodes 0 and 1 (0 0 1 1 0). Stretch 2: single pages over nodes 2 and 0.
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
    fn the_first_and_the_last_gib_are_dealt_by_2_mib_and_what_is_less_by_pages() {
        let gib = GIB_PAGES;
        // Frames of 2.5 GiB and 3 pages: a GiB dealt by 2 MiB, a whole GiB, half a GiB dealt by 2 MiB, and 3 pages.
        let stretches = Pieces::Gibs.stretches(5 * gib / 2 + 3);
        let sizes: Vec<(u64, u64)> = stretches
            .iter()
            .map(|(pages, turns)| (*pages, turns[0]))
            .collect();
        assert_eq!(sizes, [(gib, 512), (0, 1), (gib, gib), (gib / 2, 512), (3, 1)]);
        // Three whole GiBs in total, and the last of them is whole.
        let of_3: Vec<u64> = Pieces::Gibs
            .stretches(3 * gib)
            .iter()
            .map(|(pages, _)| *pages)
            .collect();
        assert_eq!(of_3, [gib, 0, gib, gib, 0]);
        let (_, vm) = created(&[4 * gib, 4 * gib], 3 * gib, Pieces::Gibs, None);
        assert_eq!(vm.free_list, [2 * gib, gib]);
        let turns = vm.turns.as_ref().expect("it was created with all");
        let mut counts = [0; 2];
        turns.deal(gib, gib, &mut counts);
        assert_eq!(counts, [gib, 0], "the second GiB is whole");
        let mut counts = [0; 2];
        turns.deal(512, 512, &mut counts);
        assert_eq!(counts, [0, 512], "the second 2 MiB are on the second node");
    }

    #[test]
    fn a_gib_that_no_node_has_is_dealt_by_2_mib_and_then_by_pages() {
        let gib = GIB_PAGES;
        // The first GiB takes half a GiB of each node. The second finds no node with a whole GiB. The third takes what 2 MiB
        // pieces there are, then pages.
        let free = [3 * gib / 2 - 1, 3 * gib / 2 + 1];
        let (host, vm) = created(&free, 3 * gib, Pieces::Gibs, None);
        assert_eq!(vm.free_list, free);
        assert_eq!(host.free, [0, 0]);
        let mut counts = [0; 2];
        vm.turns
            .expect("it was created with all")
            .deal(gib, 512, &mut counts);
        assert!(
            counts == [512, 0] || counts == [0, 512],
            "2 MiB are on one node: {counts:?}"
        );
    }

    #[test]
    fn first_touch_in_a_hypervisor_deals_in_turn_what_its_node_has_no_room_for() {
        let machine = homenode_machine_files::preset("amd48").expect("a preset");
        let (topology, _) = Topology::new(&machine).expect("it has timing figures");
        let touched = |when_full| {
            let mut host = HostMemory::new(vec![100; 8]);
            let (mut vm, ..) = VmMemory::new(8, 1, Bytes(450 * 4096), None, View::Blind);
            vm.when_full = when_full;
            let mut placed = vec![0; 8];
            host.touch(
                &topology,
                &mut vm,
                0,
                Toucher {
                    vcpu: ThreadIx(0),
                    node: 3,
                },
                450,
                &mut placed,
            );
            placed
        };
        assert_eq!(touched(WhenFull::InTurn), [50, 50, 50, 100, 50, 50, 50, 50]);
        assert_eq!(
            touched(WhenFull::Nearest)
                .iter()
                .filter(|pages| **pages == 100)
                .count(),
            4
        );
    }

    #[test]
    fn a_home_gets_the_pages_until_it_is_full() {
        let (_, vm) = created(&[100, 100, 100], 150, Pieces::Small, Some(vec![1]));
        assert_eq!(vm.free_list, [25, 100, 25]);
    }

    proptest! {
        #[test]
        fn what_is_dealt_in_parts_is_what_is_dealt_at_once(
            parts in prop::collection::vec(0u64..40, 1..8), free in prop::collection::vec(40u64..200, 4..5),
        ) {
            let pages: u64 = parts.iter().sum();
            prop_assume!(pages <= free.iter().sum::<u64>());
            let (host, vm) = created(&free, pages, Pieces::Small, None);
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
