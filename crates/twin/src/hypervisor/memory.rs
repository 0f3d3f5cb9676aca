//! Physical memory of the host: which node has how many free pages, and where a page goes at first touch.
//!
//! # Model (Linux's default policy, and `mbind`)
//!
//! Without a home, a page goes to the node of the CPU that touches it, or to the nearest node with a free page. With
//! a home, pages are dealt out evenly over the home nodes as far as they have room, then as without.
//!
//! # Left out
//!
//! Page cache, watermarks and reclaim, huge pages and fragmentation, the host's own memory (node sizes in presets are
//! what the machine has, not what a booted kernel leaves).

use crate::guest::VmMemory;
use crate::guest::memory::spread;
use crate::hardware::Topology;

/// Free pages by node.
#[derive(Clone, Debug)]
pub(crate) struct HostMemory {
    pub free: Vec<u64>,
    pub total: Vec<u64>,
}

impl HostMemory {
    pub fn new(total: Vec<u64>) -> HostMemory {
        HostMemory {
            free: total.clone(),
            total,
        }
    }

    /// Gives a VM `pages` pages of a region, touched first by a CPU of `node`. The scenario was checked to fit, so
    /// there is room somewhere.
    pub fn touch(&mut self, topology: &Topology, vm: &mut VmMemory, region: usize, node: usize, pages: u64) {
        let mut left = pages;
        if let Some(home) = vm.home.clone() {
            let mut next = vm.next_home;
            for (node, pages) in spread(left, &home, &mut next, &mut self.free) {
                vm.touch(region, node, pages);
                left -= pages;
            }
            vm.next_home = next;
        }
        for near in &topology.fallback[node] {
            let here = left.min(self.free[*near]);
            if here > 0 {
                self.free[*near] -= here;
                vm.touch(region, *near, here);
                left -= here;
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
