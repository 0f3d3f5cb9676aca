//! One value per NUMA node, in ascending node order. Node numbers may have gaps.

use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

use crate::{NodeId, NodeSet};

/// One value per NUMA node. A host has few nodes, so a sorted vector beats a tree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeMap<T> {
    entries: Vec<(NodeId, T)>,
}

impl<T> Default for NodeMap<T> {
    fn default() -> Self {
        NodeMap { entries: Vec::new() }
    }
}

impl<T> NodeMap<T> {
    /// Returns the empty map.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the value of a node.
    pub fn insert(&mut self, node: NodeId, value: T) {
        match self.position(node) {
            Ok(at) => self.entries[at].1 = value,
            Err(at) => self.entries.insert(at, (node, value)),
        }
    }

    /// Returns the value of a node, if the map has one.
    pub fn get(&self, node: NodeId) -> Option<&T> {
        self.position(node).ok().map(|at| &self.entries[at].1)
    }

    /// Returns a mutable reference to the value of a node.
    pub fn get_mut(&mut self, node: NodeId) -> Option<&mut T> {
        self.position(node).ok().map(|at| &mut self.entries[at].1)
    }

    /// Returns nodes and values in ascending node order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (NodeId, &T)> + ExactSizeIterator {
        self.entries.iter().map(|(node, value)| (*node, value))
    }

    /// Returns nodes and mutable values in ascending node order.
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (NodeId, &mut T)> {
        self.entries.iter_mut().map(|(node, value)| (*node, value))
    }

    /// Returns the nodes that have a value.
    pub fn keys(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.entries.iter().map(|(node, _)| *node)
    }

    /// Returns the values in ascending node order.
    pub fn values(&self) -> impl Iterator<Item = &T> {
        self.entries.iter().map(|(_, value)| value)
    }

    /// Returns the nodes that have a value, as a set.
    pub fn node_set(&self) -> NodeSet {
        self.keys().collect()
    }

    /// Returns how many nodes have a value.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns true if no node has a value.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the position of a node in ascending order; if it is absent, the position at which it would be inserted.
    pub fn position(&self, node: NodeId) -> Result<usize, usize> {
        self.entries.binary_search_by_key(&node, |(n, _)| *n)
    }

    /// Returns a map of the same nodes with other values.
    pub fn map<U>(&self, mut f: impl FnMut(NodeId, &T) -> U) -> NodeMap<U> {
        NodeMap {
            entries: self
                .entries
                .iter()
                .map(|(node, value)| (*node, f(*node, value)))
                .collect(),
        }
    }
}

impl<T> FromIterator<(NodeId, T)> for NodeMap<T> {
    /// If a node occurs several times, its last value is kept.
    fn from_iter<I: IntoIterator<Item = (NodeId, T)>>(iter: I) -> Self {
        let mut map = NodeMap::new();
        for (node, value) in iter {
            map.insert(node, value);
        }
        map
    }
}

impl<T> Index<NodeId> for NodeMap<T> {
    type Output = T;
    fn index(&self, node: NodeId) -> &T {
        self.get(node)
            .unwrap_or_else(|| panic!("no value for node {node}"))
    }
}

impl<T> IndexMut<NodeId> for NodeMap<T> {
    fn index_mut(&mut self, node: NodeId) -> &mut T {
        self.get_mut(node)
            .unwrap_or_else(|| panic!("no value for node {node}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_with_gaps_stay_in_order() {
        let map: NodeMap<u32> = [(NodeId(252), 1), (NodeId(0), 2), (NodeId(8), 3), (NodeId(0), 4)]
            .into_iter()
            .collect();
        assert_eq!(
            map.keys().collect::<Vec<_>>(),
            [NodeId(0), NodeId(8), NodeId(252)]
        );
        assert_eq!(map[NodeId(0)], 4);
        assert_eq!(map.get(NodeId(1)), None);
        assert_eq!(map.node_set().to_string(), "0,8,252");
    }
}
