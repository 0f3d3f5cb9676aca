//! Decides which home node holds which virtual node's memory.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use homenode_host::{Sample, VirtualNode};
use homenode_units::{NodeId, NodeSet, VmId};

/// The layout of each VM that has a home and whose guest follows: for each virtual node, the home node where its memory is or
/// belongs.
#[derive(Clone, Debug, Default)]
pub struct Layouts {
    vms: BTreeMap<VmId, Layout>,
}

#[derive(Clone, Debug)]
struct Layout {
    home: NodeSet,
    nodes: Vec<NodeId>,
}

impl Layouts {
    /// Lays out VMs that are new or have another home. Drops VMs that left or no longer follow.
    pub fn update(&mut self, sample: &Sample, homes: &BTreeMap<VmId, NodeSet>) {
        let mut before = std::mem::take(&mut self.vms);
        for vm in sample.vms.iter().filter(|vm| super::why_not(vm).is_none()) {
            let Some(home) = homes.get(&vm.id).filter(|home| !home.is_empty()) else {
                continue;
            };
            let count = vm.virtual_nodes.len();
            let kept = before
                .remove(&vm.id)
                .filter(|known| known.home == *home && known.nodes.len() == count);
            let layout = kept.unwrap_or_else(|| Layout {
                home: home.clone(),
                nodes: match vm.bound_to {
                    Some(_) => as_it_lies(&vm.virtual_nodes, home),
                    None => lay_out(&vm.virtual_nodes, home),
                },
            });
            self.vms.insert(vm.id, layout);
        }
    }

    /// Returns the node of each virtual node's memory; `None` if the VM's guest does not follow, or the VM has no home.
    pub fn of(&self, vm: VmId) -> Option<&[NodeId]> {
        self.vms.get(&vm).map(|layout| layout.nodes.as_slice())
    }
}

/// Returns the layout of memory that is bound: each virtual node is on the home node with most of its pages.
fn as_it_lies(virtual_nodes: &[VirtualNode], home: &NodeSet) -> Vec<NodeId> {
    let most = |virtual_node: &VirtualNode| {
        let pages = |node: &NodeId| {
            virtual_node
                .pages
                .as_ref()
                .and_then(|pages| pages.get(*node).copied())
        };
        home.iter().max_by_key(|node| (pages(node), Reverse(*node)))
    };
    virtual_nodes.iter().filter_map(most).collect()
}

/// Deals virtual nodes out evenly: numbers on home nodes differ by at most one. To move little memory, pairs of a virtual
/// node and a node are taken in descending order of the pages that are already there.
fn lay_out(virtual_nodes: &[VirtualNode], home: &NodeSet) -> Vec<NodeId> {
    let mut pairs: Vec<(u64, usize, NodeId)> = Vec::new();
    for (at, virtual_node) in virtual_nodes.iter().enumerate() {
        for node in home.iter() {
            let there = virtual_node.pages.as_ref().and_then(|pages| pages.get(node));
            pairs.push((there.map_or(0, |pages| pages.0), at, node));
        }
    }
    pairs.sort_by_key(|&(pages, at, node)| (Reverse(pages), at, node));
    let each = virtual_nodes.len() / home.len();
    let mut one_more = virtual_nodes.len() % home.len();
    let mut taken: BTreeMap<NodeId, usize> = BTreeMap::new();
    let mut nodes = vec![None; virtual_nodes.len()];
    for (_, at, node) in pairs {
        let count = taken.entry(node).or_default();
        let is_more = *count == each;
        if nodes[at].is_some() || *count > each || is_more && one_more == 0 {
            continue;
        }
        *count += 1;
        one_more -= usize::from(is_more);
        nodes[at] = Some(node);
    }
    let placed = nodes
        .into_iter()
        .map(|node| node.expect("there are as many places as virtual nodes"));
    placed.collect()
}
