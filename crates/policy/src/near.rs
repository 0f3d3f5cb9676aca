//! Computes distances within a set of nodes, and cores of a set of CPUs, for all policies that assign several nodes
//! ([`crate::placement`], [`crate::arrange`], [`crate::advisor`]).
//!
//! # Problem
//! A VM on several nodes has its memory interleaved over them, so each access crosses the distance between any two of them
//! with equal probability. Two nodes of one socket are 11 to 12 apart, two sockets 20 to 32. If a set within one socket has
//! as much room, a set across sockets makes the VM slower for nothing.
//!
//! # Terms
//! - *Distance* of two nodes: the firmware's value (SLIT, 10 = local); if it differs by direction, the larger.
//! - *Span* of a set of nodes: the longest distance between two of its nodes; 0 for one node.
//!
//! # Algorithm
//! A caller tries sets of one span after another, in the order of [`Near::spans`], and stops at the first span with a set
//! that has room. So a set across sockets is used only if no set within a socket has room. Among sets of equal span, those
//! with the smaller [`Near::sum`] come first.

use homenode_machine::Machine;
use homenode_units::{CpuSet, NodeId};

/// Distance if the firmware states none. In a SLIT this value marks a route that cannot be used.
const UNKNOWN: u32 = 255;

/// Distances between nodes, by the nodes' positions. There are at most 64 nodes, so a set of them is a mask.
#[derive(Clone, Debug, Default)]
pub(crate) struct Near {
    count: usize,
    /// Distances row by row; 0 from a node to itself.
    between: Vec<u32>,
    /// Whether all nodes are equally far from each other.
    is_even: bool,
}

impl Near {
    /// Distances row by row; 0 from a node to itself.
    pub(crate) fn of(machine: &Machine, nodes: &[NodeId]) -> Near {
        let one_way = |a: NodeId, b: NodeId| machine.distance(a, b).unwrap_or(UNKNOWN);
        let longer = |a: usize, b: usize| one_way(nodes[a], nodes[b]).max(one_way(nodes[b], nodes[a]));
        Near::by(nodes.len(), longer)
    }

    /// Builds the distances between `count` nodes.
    pub(crate) fn by(count: usize, distance: impl Fn(usize, usize) -> u32) -> Near {
        let distance = |a: usize, b: usize| if a == b { 0 } else { distance(a, b) };
        let row = |a: usize| (0..count).map(move |b| (a, b));
        let between: Vec<u32> = (0..count).flat_map(row).map(|(a, b)| distance(a, b)).collect();
        let mut near = Near {
            count,
            between,
            is_even: false,
        };
        near.is_even = near.spans().len() <= 2;
        near
    }

    /// Whether all nodes are equally far from each other, so that sets of several nodes differ only in their number.
    pub(crate) fn is_even(&self) -> bool {
        self.is_even
    }

    fn between(&self, a: usize, b: usize) -> u32 {
        self.between[a * self.count + b]
    }

    /// Returns all spans that sets of these nodes can have, ascending; the first is 0, for one node.
    pub(crate) fn spans(&self) -> Vec<u32> {
        let mut spans = self.between.clone();
        spans.push(0);
        spans.sort_unstable();
        spans.dedup();
        spans
    }

    /// Returns the longest distance between two nodes of a set; 0 for one node.
    pub(crate) fn span(&self, mask: u64) -> u32 {
        self.pairs(mask).max().unwrap_or(0)
    }

    /// Returns the sum of distances between the nodes of a set. The sum and the number of nodes yield the mean distance of an
    /// access.
    pub(crate) fn sum(&self, mask: u64) -> u32 {
        self.pairs(mask).sum()
    }

    fn pairs(&self, mask: u64) -> impl Iterator<Item = u32> + '_ {
        positions(mask).flat_map(move |a| positions(mask & ((1 << a) - 1)).map(move |b| self.between(a, b)))
    }

    /// Returns the nodes that are at most `most` from every node of a set.
    pub(crate) fn within(&self, mask: u64, most: u32) -> u64 {
        (0..self.count)
            .filter(|to| positions(mask).all(|from| self.between(from, *to) <= most))
            .fold(0, |all, at| all | 1 << at)
    }
}

/// Returns the positions of set bits, ascending.
pub(crate) fn positions(mask: u64) -> impl Iterator<Item = usize> {
    std::iter::successors((mask != 0).then_some(mask), |rest| {
        let rest = rest & (rest - 1);
        (rest != 0).then_some(rest)
    })
    .map(|rest| rest.trailing_zeros() as usize)
}

/// Returns how many physical cores these CPUs belong to. A core counts if at least one of its hyperthreads is among them.
pub(crate) fn cores(machine: &Machine, cpus: &CpuSet) -> usize {
    let mut cores: Vec<u32> = cpus
        .iter()
        .filter_map(|cpu| machine.cpu(cpu))
        .map(|cpu| cpu.core)
        .collect();
    cores.sort_unstable();
    cores.dedup();
    cores.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Scene;

    #[test]
    fn a_span_is_the_longest_distance_of_a_set_and_the_longer_direction_counts() {
        // Two sockets of two nodes, with distance 12 within a socket and 32 across. From node 1 to node 0 the firmware
        // reports 14.
        let mut scene = Scene::sockets(2, 2, 4, (12, 32));
        scene.machine.distances.rows[1][0] = 14;
        let ids: Vec<NodeId> = (0..4).map(NodeId).collect();
        let near = Near::of(&scene.machine, &ids);
        assert_eq!(near.spans(), [0, 12, 14, 32]);
        assert_eq!(
            [0b1, 0b11, 0b1100, 0b0110, 0b1111].map(|mask| near.span(mask)),
            [0, 14, 12, 32, 32]
        );
        // The expected sum is 14 + 12 + 4 x 32.
        assert_eq!(near.sum(0b1111), 154);
        assert_eq!(near.within(0b0100, 12), 0b1100);
        assert_eq!(near.within(0b0110, 12), 0);
        assert_eq!(near.within(0b1, 0), 0b1);
    }

    #[test]
    fn a_core_counts_once_however_many_of_its_threads_are_usable() {
        let mut scene = Scene::nodes(2, 4);
        scene.hyperthreads(2);
        let count = |cpus: &str| cores(&scene.machine, &cpus.parse().unwrap());
        // CPUs 0-1 and 2-3 of node 0 are cores, 4-5 and 6-7 of node 1.
        assert_eq!(
            [count("0-7"), count("0,2"), count("0-2"), count("1"), count("")],
            [4, 2, 2, 1, 0]
        );
    }
}
