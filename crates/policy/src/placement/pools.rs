//! Free huge pages of nodes, by page size.
//!
//! A pool is memory that the kernel has set apart, so it is not part of a node's free memory. A VM in huge pages takes
//! nothing from free memory, and no other VM takes anything from the pool.

use homenode_host::{HugeMemory, HugePages, VmSample};
use homenode_units::{Bytes, PAGE_BYTES, Pages};

/// Pools of one page size on all nodes, by position of the node.
#[derive(Clone, Debug)]
pub(super) struct Pool {
    pub page_bytes: Bytes,
    pub nodes: Vec<PoolOfNode>,
}

/// One node's pool, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PoolOfNode {
    /// Bytes that may be assigned; below 0 while more is reserved than the pool holds.
    pub left: f64,
    pub total: f64,
}

/// Pools of all page sizes, in ascending order.
#[derive(Clone, Debug, Default)]
pub(super) struct Pools(Vec<Pool>);

impl Pools {
    /// Collects the pools that nodes report; each comes with its node's position, below `count`.
    pub(super) fn new<'a>(count: usize, said: impl Iterator<Item = (usize, &'a HugePages)>) -> Pools {
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

    /// Returns the pools of a page size; `None` if no node has one.
    pub(super) fn get(&self, page_bytes: Bytes) -> Option<&Pool> {
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

    /// Subtracts memory from the pools at these positions, split evenly and in whole pages.
    pub(super) fn charge(&mut self, part: HugeMemory, at: &[usize]) {
        let even = whole(part).div_ceil(at.len().max(1) as u64) as f64 * part.page_bytes.as_f64();
        let Some(pool) = self.0.iter_mut().find(|pool| pool.page_bytes == part.page_bytes) else {
            return;
        };
        at.iter().for_each(|at| pool.nodes[*at].left -= even);
    }

    /// Releases a VM's share of a node's pool.
    pub(super) fn give_back(&mut self, page_bytes: Bytes, at: usize, pages: Pages) {
        if let Some(pool) = self.0.iter_mut().find(|pool| pool.page_bytes == page_bytes) {
            pool.nodes[at].left += pages.as_f64() * PAGE_BYTES as f64;
        }
    }
}

/// Returns the number of pages that it takes to hold this memory.
pub(super) fn whole(part: HugeMemory) -> u64 {
    part.memory_bytes.0.div_ceil(part.page_bytes.0.max(1))
}

/// Returns a running VM's huge-page memory that is not among its `on_home` pages at home: room for it is reserved there.
pub(super) fn untouched(vm: &VmSample, page_bytes: Bytes, on_home: f64) -> HugeMemory {
    let rest = vm.memory_bytes.as_f64() - on_home * PAGE_BYTES as f64;
    HugeMemory {
        page_bytes,
        memory_bytes: Bytes(rest.max(0.0) as u64),
    }
}
