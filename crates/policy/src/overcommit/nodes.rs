//! Keeps account of each node's free memory and lack, so that no more memory is assigned than exists.

use homenode_host::{View, VmView};
use homenode_units::{Bytes, NodeId, NodeMap, NodeSet, Pages, divide_proportionally};

use super::{Config, part};

/// One node's account, in bytes.
#[derive(Clone, Copy, Debug)]
struct Account {
    /// Memory that may still be assigned.
    room: u64,
    /// Memory that the node needs free to reach its headroom.
    lack: u64,
    /// Free memory beyond twice the headroom.
    plenty: u64,
}

/// The nodes' accounts in one cycle.
#[derive(Clone, Debug)]
pub(super) struct Nodes {
    accounts: NodeMap<Account>,
    memory_nodes: NodeSet,
}

impl Nodes {
    /// Takes the accounts from the sample, and deducts what VMs under a limit were given and have not touched.
    pub(super) fn new(view: &View<'_>, config: &Config) -> Nodes {
        let accounts = view.sample.nodes.map(|_, node| {
            let (free, kept) = (
                node.memory_free_bytes,
                part(node.memory_total_bytes, config.headroom),
            );
            Account {
                room: (free - part(free, config.kept_free)).0,
                lack: kept.saturating_sub(free).0,
                plenty: free.saturating_sub(Bytes(kept.0.saturating_mul(2))).0,
            }
        });
        let memory_nodes = view.machine.memory_nodes();
        let mut nodes = Nodes {
            accounts,
            memory_nodes,
        };
        for vm in &view.vms {
            let Some(limit) = vm.sample.balloon.and_then(|balloon| balloon.limit) else {
                continue;
            };
            let touched = vm.sample.pages_touched().map_or(limit, Pages::to_bytes);
            // More than exists may have been promised, if the host was full to begin with.
            nodes.take(vm, limit.saturating_sub(touched), true);
        }
        nodes
    }

    /// Returns the nodes that supply a VM's memory: its home; without a home, the nodes with its pages; without pages, all nodes.
    fn homes(&self, vm: &VmView<'_>) -> NodeSet {
        if let Some(home) = vm.home {
            return home.intersection(&self.memory_nodes);
        }
        let pages = vm.sample.pages.iter().flat_map(NodeMap::iter);
        let on: NodeSet = pages
            .filter(|(_, pages)| pages.0 > 0)
            .map(|(node, _)| node)
            .collect();
        if on.is_empty() {
            self.memory_nodes.clone()
        } else {
            on
        }
    }

    /// Takes memory for a VM from its home nodes, and returns how much was available. If the wish is not urgent, only memory
    /// beyond twice the headroom is available.
    pub(super) fn take(&mut self, vm: &VmView<'_>, wanted: Bytes, urgent: bool) -> Bytes {
        let homes: Vec<NodeId> = self.homes(vm).iter().collect();
        let has = |node: &NodeId| {
            let account = self.accounts.get(*node);
            account.map_or(0, |a| if urgent { a.room } else { a.room.min(a.plenty) })
        };
        let rooms: Vec<u64> = homes.iter().map(has).collect();
        let granted = wanted
            .0
            .min(rooms.iter().fold(0, |sum: u64, room| sum.saturating_add(*room)));
        for (node, part) in homes.into_iter().zip(divide_proportionally(granted, &rooms)) {
            if let Some(account) = self.accounts.get_mut(node) {
                account.room = account.room.saturating_sub(part);
                account.plenty = account.plenty.saturating_sub(part);
            }
        }
        Bytes(granted)
    }

    /// Whether all of a VM's home nodes have more than twice the headroom free.
    pub(super) fn is_plentiful(&self, vm: &VmView<'_>) -> bool {
        let homes = self.homes(vm);
        homes
            .iter()
            .all(|node| self.accounts.get(node).is_some_and(|account| account.plenty > 0))
    }

    /// Returns, for each node, the VM's pages there and the node's lack.
    fn lacks(&self, vm: &VmView<'_>) -> Vec<(NodeId, u64, u64)> {
        let pages = vm.sample.pages.iter().flat_map(NodeMap::iter);
        pages
            .filter_map(|(node, pages)| Some((node, pages.0, self.accounts.get(node)?.lack)))
            .collect()
    }

    /// Returns the least amount to take from a VM so that no node with its pages lacks memory; it is taken evenly from all of
    /// its pages.
    pub(super) fn useful(&self, vm: &VmView<'_>) -> Bytes {
        let lacks = self.lacks(vm);
        let all: u128 = lacks.iter().map(|(_, pages, _)| u128::from(*pages)).sum();
        let needed = lacks.iter().filter(|(_, pages, _)| *pages > 0);
        let needed = needed.map(|(_, pages, lack)| u128::from(*lack) * all / u128::from(*pages));
        Bytes(
            needed
                .max()
                .map_or(0, |most| u64::try_from(most).unwrap_or(u64::MAX)),
        )
    }

    /// Credits nodes with memory taken from a VM, in proportion to its pages there. Returns in words which nodes lacked memory.
    pub(super) fn credit(&mut self, view: &View<'_>, vm: &VmView<'_>, cut: Bytes) -> String {
        let lacks = self.lacks(vm);
        let pages: Vec<u64> = lacks.iter().map(|(_, pages, _)| *pages).collect();
        let mut short = Vec::new();
        for ((node, _, lack), part) in lacks.into_iter().zip(divide_proportionally(cut.0, &pages)) {
            if let Some(account) = self.accounts.get_mut(node) {
                account.lack = account.lack.saturating_sub(part);
            }
            if lack > 0 && part > 0 {
                let free = view
                    .sample
                    .nodes
                    .get(node)
                    .map_or(Bytes::ZERO, |node| node.memory_free_bytes);
                short.push(format!("node {node} has {free} free"));
            }
        }
        match short.is_empty() {
            true => String::new(),
            false => format!(", as {}", short.join(", ")),
        }
    }
}
