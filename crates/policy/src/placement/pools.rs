//! Huge pages of nodes, by size: what is left of their pools.
//!
//! A pool is memory that the kernel set apart: it is no part of a node's free memory, a VM in huge pages takes nothing of what is
//! free otherwise, and no other VM takes anything of the pool.

use homenode_host::{HugeMemory, HugePages, VmSample};
use homenode_units::{Bytes, PAGE_BYTES, Pages};

/// Pools of all nodes of one page size, by position.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    pub page_bytes: Bytes,
    pub nodes: Vec<PoolOfNode>,
}

/// One node's pool, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PoolOfNode {
    /// What may be given; below 0 while more is promised than there is.
    pub left: f64,
    pub total: f64,
}

/// Pools of all sizes, ascending.
#[derive(Clone, Debug, Default)]
pub(super) struct Pools(Vec<Pool>);

impl Pools {
    /// What each of `count` nodes says, by position.
    pub fn new<'a>(count: usize, said: impl Iterator<Item = (usize, &'a HugePages)>) -> Pools {
        let mut pools = Pools::default();
        for (at, pages) in said {
            let bytes = |count: u64| count as f64 * pages.page_bytes.as_f64();
            let pool = pools.of_size(pages.page_bytes, count);
            pool.nodes[at] = PoolOfNode {
                left: bytes(pages.free_count),
                total: bytes(pages.total_count),
            };
        }
        pools
    }

    /// The pools of a size; `None` where no node has one.
    pub fn get(&self, page_bytes: Bytes) -> Option<&Pool> {
        self.0.iter().find(|pool| pool.page_bytes == page_bytes)
    }

    fn of_size(&mut self, page_bytes: Bytes, count: usize) -> &mut Pool {
        let at = match self.0.binary_search_by_key(&page_bytes, |pool| pool.page_bytes) {
            Ok(at) => at,
            Err(at) => {
                let nodes = vec![PoolOfNode::default(); count];
                self.0.insert(at, Pool { page_bytes, nodes });
                at
            }
        };
        &mut self.0[at]
    }

    /// Takes memory off, in equal parts of these positions, each of whole pages.
    pub fn charge(&mut self, part: HugeMemory, at: &[usize]) {
        let even = whole(part).div_ceil(at.len().max(1) as u64) as f64 * part.page_bytes.as_f64();
        let Some(pool) = self.0.iter_mut().find(|pool| pool.page_bytes == part.page_bytes) else {
            return;
        };
        at.iter().for_each(|at| pool.nodes[*at].left -= even);
    }

    /// Gives back what a VM holds of a node's pool.
    pub fn give_back(&mut self, page_bytes: Bytes, at: usize, pages: Pages) {
        if let Some(pool) = self.0.iter_mut().find(|pool| pool.page_bytes == page_bytes) {
            pool.nodes[at].left += pages.as_f64() * PAGE_BYTES as f64;
        }
    }
}

/// Pages that some memory takes.
pub(super) fn whole(part: HugeMemory) -> u64 {
    part.memory_bytes.0.div_ceil(part.page_bytes.0.max(1))
}

/// What of a running VM's huge pages is on none of the nodes that hold `on_home` of its pages: it is promised there.
pub(super) fn untouched(vm: &VmSample, page_bytes: Bytes, on_home: f64) -> HugeMemory {
    let rest = vm.memory_bytes.as_f64() - on_home * PAGE_BYTES as f64;
    HugeMemory {
        page_bytes,
        memory_bytes: Bytes(rest.max(0.0) as u64),
    }
}
