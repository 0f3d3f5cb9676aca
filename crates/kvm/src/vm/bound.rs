//! What keeps a VM's memory where it is, and which nodes it is bound to.
//!
//! # Problem
//! Moving pages helps only if nothing needs them where they are. Devices and encryption pin pages. Operators bind memory to
//! nodes, and schedulers count on the huge pages that are left on each node.
//!
//! # Algorithm
//! Memory policies come from two sources: the manager's description of the VM ([`Domain::binding`](crate::domain::Domain)), and
//! `numa_maps` for each mapping that is guest RAM. `numa_maps` shows what the kernel obeys, whichever program bound the memory:
//! libvirt, another manager, `numactl`. Both sources are joined ([`Binding::join`]). If any part of a VM's memory is bound,
//! policies move none of its memory.
//!
//! Huge pages belong to a pool of each node. A scheduler (Nova, KubeVirt) counts on the pages that are free there, so a VM's huge
//! pages stay unless its operator sets `hugepages="move"`. Even then they are not moved if they are bound.
//!
//! If the operator's settings keep a VM's memory in place, its vCPUs run near that memory, or anywhere: see
//! [`VmSample::bound_to`](homenode_host::VmSample).
//!
//! # Properties
//! - `cells_bound_to_a_node_each_stay_whoever_bound_them`
//! - `huge_pages_of_a_pool_stay_unless_the_operator_says_move`

use std::path::Path;

use homenode_host::Immovable;
use homenode_kernel::binding::Binding;
use homenode_kernel::meminfo;
use homenode_kernel::pages::Mover;
use homenode_kernel::read::ReadError;
use homenode_units::{Bytes, NodeMap, NodeSet, PAGE_BYTES, Pages};
use homenode_vm_settings::PoolPages;

use super::Vm;

/// A node counts only if it has more than this share of a VM's memory.
const LIES_THERE_PERCENT: u64 = 1;

impl Vm {
    /// Returns the nodes to which memory policies bind the VM's memory; `None` if all of it may be on each of `memory_nodes`.
    pub(crate) fn binding(&self, memory_nodes: &NodeSet) -> Option<Binding> {
        let seen = self.memory.whole.as_ref().and_then(|part| part.binding.as_ref());
        Binding::join(self.domain.binding.clone(), seen)?.on(memory_nodes)
    }

    /// Returns the memory nodes if libvirt can change them while the VM runs. `None` for a VM with bound memory, because the
    /// kernel would then bind it to other nodes.
    pub(crate) fn restrictive_nodes(&self) -> Option<&NodeSet> {
        let tune = self.domain.numatune.as_ref();
        let tune = tune.filter(|tune| tune.mode == "restrictive")?;
        let seen = self.memory.whole.as_ref().and_then(|part| part.binding.as_ref());
        let is_free = self.domain.binding.is_none() && seen.is_none();
        tune.nodes.as_ref().filter(|_| is_free)
    }

    /// Returns the nodes that the VM's memory stays on, because its operator bound it or it is in a pool's huge pages: the nodes
    /// that it is bound to, and those that hold the rest. `None` if the memory may follow its vCPUs.
    pub(crate) fn bound_to(&self, memory_nodes: &NodeSet) -> Option<NodeSet> {
        let binding = self.binding(memory_nodes);
        if binding.is_none() && self.pool_that_stays().is_none() {
            return None;
        }
        let mut nodes = binding.map_or_else(NodeSet::new, |binding| binding.nodes);
        let pages = || self.memory.pages().into_iter().flat_map(NodeMap::iter);
        let total: Pages = pages().map(|(_, pages)| *pages).sum();
        for (node, pages) in pages() {
            if pages.0.saturating_mul(100) > total.0.saturating_mul(LIES_THERE_PERCENT) {
                nodes.insert(node);
            }
        }
        (!nodes.is_empty()).then_some(nodes)
    }

    /// Why the VM's memory cannot move; `None` if it can.
    pub(crate) fn why_immovable(
        &self,
        root: &Path,
        memory_nodes: &NodeSet,
    ) -> Result<Option<Immovable>, ReadError> {
        if !self.domain.assigned_devices.is_empty() {
            return Ok(Some(Immovable::Vfio));
        }
        if self.standstill.is_some() {
            return Ok(self.standstill.clone());
        }
        if self.domain.locked.is_some() {
            return Ok(Some(Immovable::Locked));
        }
        if let Some(kind) = &self.domain.encrypted {
            return Ok(Some(Immovable::Encrypted { kind: kind.clone() }));
        }
        if let Some(bound) = self.bounds(memory_nodes) {
            return Ok(Some(bound.reason()));
        }
        if let Some(page_bytes) = self.pool_that_stays() {
            return Ok(Some(Immovable::HugePagePool { page_bytes }));
        }
        match self.huge_page_bytes() {
            Some(page_bytes) if !self.huge_pages_fit_elsewhere(root, memory_nodes, page_bytes)? => {
                Ok(Some(Immovable::HugePages { page_bytes }))
            }
            _ => Ok(None),
        }
    }

    /// Returns the VM's binding, joined with its cgroup's memory nodes if libvirt cannot change these.
    fn bounds(&self, memory_nodes: &NodeSet) -> Option<Binding> {
        let thread = self
            .threads
            .first()
            .filter(|_| self.restrictive_nodes().is_none());
        let cpuset = thread.map(|thread| Binding {
            nodes: thread.memory_nodes.clone(),
            common: thread.memory_nodes.clone(),
        });
        let cpuset = cpuset.and_then(|cpuset| cpuset.on(memory_nodes));
        Binding::join(self.binding(memory_nodes), cpuset.as_ref())
    }

    /// Returns the size of the VM's huge pages; `None` if it has none from a pool.
    fn huge_page_bytes(&self) -> Option<Bytes> {
        let ranges = self.memory.mover().into_iter().flat_map(Mover::ranges);
        let largest = ranges.map(|range| range.page_bytes).max();
        largest.filter(|bytes| bytes.0 > PAGE_BYTES)
    }

    /// Returns the size of the VM's huge pages if they must stay in their node's pool.
    fn pool_that_stays(&self) -> Option<Bytes> {
        let settings = self.domain.settings.as_ref().ok();
        let may_move = settings.is_some_and(|said| said.pool_pages == PoolPages::Move);
        self.huge_page_bytes().filter(|_| !may_move)
    }

    /// Whether any node has enough free huge pages for the part of the VM that is elsewhere.
    fn huge_pages_fit_elsewhere(
        &self,
        root: &Path,
        nodes: &NodeSet,
        page_bytes: Bytes,
    ) -> Result<bool, ReadError> {
        let Some(pages) = self.memory.pages() else {
            return Ok(false);
        };
        let total: Pages = pages.values().copied().sum();
        for node in nodes.iter() {
            let rest = total.saturating_sub(pages.get(node).copied().unwrap_or_default());
            let sizes = meminfo::huge_pages(root, node)?;
            let free = sizes
                .iter()
                .find(|size| size.page_bytes == page_bytes)
                .map_or(0, |size| size.free_count);
            if rest > Pages::ZERO && free.saturating_mul(page_bytes.0 / PAGE_BYTES) >= rest.0 {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
