//! Explains why a VM fits nowhere, by naming the resources that are short on each node.

use std::borrow::Cow;

use homenode_units::{Bytes, BytesPerSec, NodeId, NodeSet};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::supply::{BANDWIDTH, CPU, MEMORY, Supply};
use crate::demand::Demand;

/// One resource that is short.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Shortage {
    /// The node; `None` for the shortage of all nodes together.
    pub node: Option<NodeId>,
    /// `CPU`, `memory`, `huge pages of` a size or `memory bandwidth`.
    pub resource: Cow<'static, str>,
    /// Amount left: CPUs, bytes, or bytes per second.
    pub left_amount: f64,
    /// Amount needed, in the same unit.
    pub needed_amount: f64,
    /// Amount left, in words with unit.
    pub left: String,
    /// Amount needed, in words with unit.
    pub needed: String,
}

/// The refusal of a VM because no bin has room.
#[derive(Clone, Debug, PartialEq, Serialize, thiserror::Error, JsonSchema)]
#[error("fits nowhere: {}", shortages.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
pub struct Unplaceable {
    /// The shortages on each node, and on all nodes together.
    pub shortages: Vec<Shortage>,
}

impl std::fmt::Display for Shortage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.node {
            Some(node) => write!(f, "node {node}")?,
            None => write!(f, "a home of several nodes")?,
        }
        write!(
            f,
            " is short of {} ({} left, {} needed)",
            self.resource, self.left, self.needed
        )
    }
}

/// A resource that nodes may be short of, in its own unit.
struct Resource {
    name: Cow<'static, str>,
    needed: f64,
    /// Amount left on each node and, for a pool of huge pages, its total.
    nodes: Vec<(f64, Option<f64>)>,
    /// Size of the huge pages, if the resource is huge pages.
    page_bytes: Option<Bytes>,
    words: fn(f64) -> String,
}

impl Resource {
    fn shortage(&self, node: Option<NodeId>, left: f64, total: Option<f64>) -> Option<Shortage> {
        if left >= self.needed {
            return None;
        }
        let (left_words, needed_words) = match (self.page_bytes, total) {
            (Some(page), Some(total)) => {
                let count = |bytes: f64| (bytes / page.as_f64()).floor();
                (
                    format!("{} of a pool of {}", count(left), count(total)),
                    count(self.needed).to_string(),
                )
            }
            _ => ((self.words)(left), (self.words)(self.needed)),
        };
        Some(Shortage {
            node,
            resource: self.name.clone(),
            left_amount: left,
            needed_amount: self.needed,
            left: left_words,
            needed: needed_words,
        })
    }
}

/// Returns what a VM needs of each resource, and what the nodes have left of it.
fn resources(supply: &Supply, demand: &Demand) -> Vec<Resource> {
    let memory = |page_bytes: Option<Bytes>, needed: f64, left: Vec<f64>| {
        let total = |at: usize| page_bytes.map(|page| supply.pool_of(page, at).total);
        Resource {
            name: match page_bytes {
                Some(page) => format!("huge pages of {page}").into(),
                None => "memory".into(),
            },
            needed,
            nodes: left
                .into_iter()
                .enumerate()
                .map(|(at, left)| (left, total(at)))
                .collect(),
            page_bytes,
            words: |amount| Bytes(amount as u64).to_string(),
        }
    };
    let left = |dimension: usize| -> Vec<f64> { supply.nodes.iter().map(|of| of.left[dimension]).collect() };
    let plain = |name: &'static str, dimension: usize, needed: f64, words: fn(f64) -> String| Resource {
        name: name.into(),
        needed,
        nodes: left(dimension).into_iter().map(|left| (left, None)).collect(),
        page_bytes: None,
        words,
    };
    let mut all = vec![
        plain("CPU", CPU, demand.cpus, |amount| format!("{amount:.1} CPUs")),
        memory(supply.memory_of(), supply.memory_needed(demand), left(MEMORY)),
    ];
    let rest = supply.rest.iter();
    all.extend(rest.map(|rest| memory(rest.page_bytes, rest.needed, rest.left.clone())));
    if supply.bandwidth_known {
        let needed = demand.bandwidth.unwrap_or_default().as_f64();
        all.push(plain("memory bandwidth", BANDWIDTH, needed, |amount| {
            BytesPerSec(amount as u64).to_string()
        }));
    }
    all
}

/// Returns what a home is short of, as one node or as several together.
pub(super) fn of_home(supply: &Supply, demand: &Demand, nodes: &NodeSet) -> Vec<Shortage> {
    let single = nodes.iter().next().filter(|_| nodes.len() == 1);
    let at: Vec<usize> = (0..supply.nodes.len())
        .filter(|at| nodes.contains(supply.nodes[*at].node))
        .collect();
    let of = |of: &Resource| {
        let total = of
            .page_bytes
            .map(|_| at.iter().filter_map(|at| of.nodes[*at].1).sum());
        of.shortage(single, at.iter().map(|at| of.nodes[*at].0).sum(), total)
    };
    resources(supply, demand).iter().filter_map(of).collect()
}

/// Returns the shortages on each node that the VM may have, and on all these nodes together.
pub(super) fn shortages(supply: &Supply, demand: &Demand, allowed: Option<&NodeSet>) -> Unplaceable {
    let resources = resources(supply, demand);
    let may = |at: &usize| allowed.is_none_or(|allowed| allowed.contains(supply.nodes[*at].node));
    let candidates: Vec<usize> = (0..supply.nodes.len()).filter(may).collect();
    let on_node = candidates.iter().flat_map(|at| {
        let node = Some(supply.nodes[*at].node);
        resources.iter().filter_map(move |of| {
            let (left, total) = of.nodes[*at];
            of.shortage(node, left, total)
        })
    });
    let mut shortages: Vec<Shortage> = on_node.collect();
    shortages.extend(resources.iter().filter_map(|of| {
        let nodes = || candidates.iter().map(|at| of.nodes[*at]);
        let total = of
            .page_bytes
            .map(|_| nodes().filter_map(|(_, total)| total).sum());
        of.shortage(None, nodes().map(|(left, _)| left).sum(), total)
    }));
    Unplaceable { shortages }
}
