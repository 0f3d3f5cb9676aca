//! The machine with dense numbers: the numbers of nodes, CPUs, caches and links become positions in vectors. Routes and siblings
//! are computed once.

use homenode_machine::{Hardware, Link, Machine, Node};
use homenode_units::{NodeId, NodeSet};

use crate::index::{CpuIx, IxVec, first};
use crate::scenario::TwinError;

/// One CPU, in dense numbers.
#[derive(Clone, Debug)]
pub(crate) struct CpuPlace {
    pub node: usize,
    pub llc: usize,
    pub core: usize,
    /// The other CPUs of the CPU's core.
    pub siblings: Vec<CpuIx>,
}

/// The machine in dense numbers.
#[derive(Clone, Debug)]
pub(crate) struct Topology {
    pub cpus: IxVec<CpuIx, CpuPlace>,
    /// CPUs of each node.
    pub node_cpus: Vec<Vec<CpuIx>>,
    /// CPUs of each physical core; cores are renumbered from 0.
    pub core_cpus: Vec<Vec<CpuIx>>,
    /// CPUs of each last-level cache.
    pub llc_cpus: Vec<Vec<CpuIx>>,
    /// Bytes per nanosecond of each node's controllers; 0 for a node without memory.
    pub controller_caps: Vec<f64>,
    /// Unloaded latency of each node's memory, in nanoseconds.
    pub memory_ns: Vec<f64>,
    /// Directed links: the machine's own, or links between all pairs of nodes if the machine states none.
    pub links: Vec<Link>,
    /// Bytes per nanosecond of each link; infinite if unknown.
    pub link_caps: Vec<f64>,
    /// Links on the route from one node to another.
    pub routes: Vec<Vec<Vec<usize>>>,
    /// For each node, the nodes with memory, nearest first: the order in which the kernel looks for free memory.
    pub fallback: Vec<Vec<usize>>,
}

impl Topology {
    pub(crate) fn new(machine: &Machine) -> Result<(Topology, Hardware), TwinError> {
        let missing = |what: String| TwinError::MissingFigure {
            machine: machine.name.clone(),
            what,
        };
        let hardware = machine.hardware.clone().ok_or_else(|| TwinError::NoHardware {
            machine: machine.name.clone(),
        })?;
        let position = |node| {
            machine
                .nodes
                .position(node)
                .expect("a checked machine has the node of each CPU")
        };
        let mut cores: Vec<u32> = machine.cpus.iter().map(|cpu| cpu.core).collect();
        cores.sort_unstable();
        cores.dedup();
        let mut cpus = IxVec::new();
        let mut node_cpus = vec![Vec::new(); machine.nodes.len()];
        let mut core_cpus = vec![Vec::new(); cores.len()];
        let mut llc_cpus = vec![Vec::new(); machine.llcs.len()];
        for (at, cpu) in first(machine.cpus.len()).zip(&machine.cpus) {
            let llc = cpu
                .llc
                .ok_or_else(|| missing(format!("the last-level cache of CPU {}", cpu.id)))?;
            let core = cores.binary_search(&cpu.core).expect("collected above");
            node_cpus[position(cpu.node)].push(at);
            core_cpus[core].push(at);
            llc_cpus[llc as usize].push(at);
            cpus.push(CpuPlace {
                node: position(cpu.node),
                llc: llc as usize,
                core,
                siblings: Vec::new(),
            });
        }
        for (at, place) in first::<CpuIx>(cpus.len()).zip(&mut cpus) {
            place.siblings = core_cpus[place.core]
                .iter()
                .copied()
                .filter(|other| *other != at)
                .collect();
        }
        let cap = |(id, node): (NodeId, &Node)| match node.memory_bandwidth {
            Some(rate) if rate.0 > 0 => Ok(rate.as_f64() / 1e9),
            _ if node.memory_bytes.0 == 0 => Ok(0.0),
            _ => Err(missing(format!("the memory bandwidth of node {id}"))),
        };
        let controller_caps = machine.nodes.iter().map(cap).collect::<Result<_, _>>()?;
        let of_node = |node: &Node| node.memory_ns.unwrap_or(hardware.latency.memory_ns);
        let memory_ns = machine.nodes.values().map(of_node).collect();
        let machine = with_links(machine);
        let link_caps = machine
            .links
            .iter()
            .map(|l| l.bandwidth.map_or(f64::INFINITY, |b| b.as_f64() / 1e9));
        let routes = |from| {
            machine
                .nodes
                .keys()
                .map(|to| machine.route(from, to).unwrap_or_default())
                .collect()
        };
        Ok((
            Topology {
                cpus,
                node_cpus,
                llc_cpus,
                core_cpus,
                controller_caps,
                memory_ns,
                link_caps: link_caps.collect(),
                routes: machine.nodes.keys().map(routes).collect(),
                fallback: fallback(&machine),
                links: machine.links,
            },
            hardware,
        ))
    }

    /// Returns the last-level caches of these CPUs, ascending.
    pub(crate) fn llcs_of(&self, cpus: &[CpuIx]) -> Vec<usize> {
        let mut llcs: Vec<usize> = cpus.iter().map(|cpu| self.cpus[*cpu].llc).collect();
        llcs.sort_unstable();
        llcs.dedup();
        llcs
    }

    pub(crate) fn nodes(&self) -> usize {
        self.node_cpus.len()
    }
}

/// Returns the machine with all pairs of nodes linked if it states no link, which is what the contract says of an empty list.
fn with_links(machine: &Machine) -> Machine {
    let mut machine = machine.clone();
    if machine.links.is_empty() {
        let nodes: NodeSet = machine.node_set();
        let pairs = nodes
            .iter()
            .flat_map(|from| nodes.iter().map(move |to| (from, to)));
        machine.links = pairs
            .filter(|(from, to)| from != to)
            .map(|(from, to)| Link {
                from,
                to,
                bandwidth: None,
                hop_ns: None,
            })
            .collect();
    }
    machine
}

fn fallback(machine: &Machine) -> Vec<Vec<usize>> {
    let rows = machine.distances.rows.iter();
    rows.map(|row| {
        let has_memory = machine.nodes.values().map(|node| node.memory_bytes.0 > 0);
        let mut order: Vec<usize> = has_memory
            .enumerate()
            .filter(|(_, has)| *has)
            .map(|(at, _)| at)
            .collect();
        order.sort_by_key(|node| row[*node]); // stable: of equal distances the lower number
        order
    })
    .collect()
}
