//! The nodes that a VM's memory is bound to, whether its operator or its manager bound it.
//!
//! # Problem
//! Memory that is bound to nodes must stay on them, because an operator counts on the room that is left elsewhere. A VM's memory
//! is often bound object by object (a cell of the guest, a DIMM), each to its own nodes, and several sources report bindings.
//!
//! # Terms
//! - *Object*: a piece of memory with its own policy: a guest's cell, a DIMM, a mapping.
//! - *Nodes* of a binding: every node that at least one object is bound to.
//! - *Common* nodes: the nodes to which all bound objects may go.
//!
//! # Algorithm
//! `strict` and `bind` bind an object to the nodes that they name. `interleave` binds each page to the node that it is on, since
//! gathering pages on one node would undo the operator's choice; so no node is common. `preferred` only names nodes to try first,
//! and binds nothing. `restrictive` binds nothing either: libvirt then leaves the place to cgroups. An unknown mode binds. When
//! bindings are joined, their nodes are united and their common nodes are intersected. For example, a cell bound to node 0 and a
//! cell bound to node 1 together have both nodes, but no common node: neither cell may leave its node.
//!
//! # Properties
//! - `cells_that_are_bound_to_different_nodes_have_no_node_in_common`
//! - `what_is_bound_to_all_nodes_of_the_host_is_free_and_what_is_interleaved_is_not`

use homenode_host::Immovable;
use homenode_units::NodeSet;

/// The nodes that a VM's memory is bound to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Nodes that some of the memory is bound to.
    pub nodes: NodeSet,
    /// Nodes that all of the memory may be on. Empty if its objects' bindings share no node, or if it is interleaved.
    pub common: NodeSet,
}

impl Binding {
    /// Returns the binding that a mode makes to these nodes; `None` if it binds nothing. The mode is named as in libvirt, QEMU or
    /// the kernel.
    pub fn of(mode: &str, nodes: &NodeSet) -> Option<Binding> {
        let common = match mode {
            "default" | "local" | "preferred" | "prefer" | "restrictive" => return None,
            "interleave" => NodeSet::new(),
            _ => nodes.clone(),
        };
        let nodes = nodes.clone();
        Some(Binding { nodes, common })
    }

    /// Joins the bindings of two objects or two sources.
    pub fn join(one: Option<Binding>, other: Option<&Binding>) -> Option<Binding> {
        match (one, other) {
            (Some(one), Some(other)) => Some(Binding {
                nodes: one.nodes.union(&other.nodes),
                common: one.common.intersection(&other.common),
            }),
            (one, other) => one.or_else(|| other.cloned()),
        }
    }

    /// Returns what the binding means on a host with these memory nodes; `None` if all memory may be on each of them.
    pub fn on(self, memory_nodes: &NodeSet) -> Option<Binding> {
        let common = self.common.intersection(memory_nodes);
        let nodes = self.nodes.intersection(memory_nodes);
        (common != *memory_nodes).then_some(Binding { nodes, common })
    }

    /// Returns why memory with this binding stays in place.
    pub fn reason(&self) -> Immovable {
        let nodes = self.nodes.clone();
        match self.common == self.nodes {
            true => Immovable::BoundAtStart { nodes },
            false => Immovable::BoundInParts { nodes },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(list: &str) -> NodeSet {
        list.parse().unwrap()
    }

    fn join(all: &[(&str, &str)]) -> Option<Binding> {
        let each = all.iter().map(|(mode, list)| Binding::of(mode, &nodes(list)));
        each.fold(None, |all, each| Binding::join(all, each.as_ref()))
    }

    #[test]
    fn cells_that_are_bound_to_different_nodes_have_no_node_in_common() {
        let cells = join(&[("bind", "0"), ("bind", "1")]).unwrap();
        assert_eq!(
            (cells.nodes.clone(), cells.common.clone()),
            (nodes("0-1"), nodes(""))
        );
        let bound = cells.on(&nodes("0-1")).unwrap();
        assert_eq!(bound.reason(), Immovable::BoundInParts { nodes: nodes("0-1") });
        // Overlapping cells have the overlap in common.
        let overlap = join(&[("strict", "0-1"), ("strict", "1-2"), ("preferred", "3")]).unwrap();
        assert_eq!((overlap.nodes, overlap.common), (nodes("0-2"), nodes("1")));
    }

    #[test]
    fn what_is_bound_to_all_nodes_of_the_host_is_free_and_what_is_interleaved_is_not() {
        let all = nodes("0-1");
        assert_eq!(join(&[("strict", "0-1")]).unwrap().on(&all), None);
        assert_eq!(join(&[("strict", "0-3")]).unwrap().on(&all), None);
        let one = join(&[("bind", "1")]).unwrap().on(&all).unwrap();
        assert_eq!(one.reason(), Immovable::BoundAtStart { nodes: nodes("1") });
        let interleaved = join(&[("interleave", "0-1")]).unwrap().on(&all).unwrap();
        assert_eq!(interleaved.common, nodes(""));
        assert_eq!(interleaved.reason(), Immovable::BoundInParts { nodes: all });
        for free in ["preferred", "prefer", "restrictive", "default", "local"] {
            assert_eq!(Binding::of(free, &nodes("1")), None, "{free}");
        }
        assert!(Binding::of("of a later kernel", &nodes("1")).is_some());
    }
}
