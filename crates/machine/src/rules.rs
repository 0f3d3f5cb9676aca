//! The rules that every machine obeys, whatever its source.

use std::collections::BTreeSet;

use homenode_units::{Bytes, BytesPerSec, CpuId, CpuSet, NodeId, NodeSet};

use crate::model::{Hardware, Link, LoadCurve, Machine, Prefetcher};

/// Far more than any node has: a larger figure has the wrong unit.
const NODE_MEMORY_BYTES_MAX: Bytes = Bytes::from_gib(1 << 20);
/// Far more than the memory of any node, or any link, sustains.
const BANDWIDTH_MAX: BytesPerSec = BytesPerSec(100_000_000_000_000);
/// The kernel stores a distance in a byte.
const DISTANCE_MAX: u32 = 255;

/// Why a machine is impossible. Every message names the object and a valid value.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum MachineError {
    #[error("machine {machine}: no NUMA node; at least one is needed")]
    NoNodes { machine: String },
    #[error("machine {machine}: no usable CPU; bring one online or widen the cpuset")]
    NoCpus { machine: String },
    #[error(
        "machine {machine}: CPU {cpu} names node {node}, which the machine does not have (nodes {nodes})"
    )]
    CpuOnUnknownNode {
        machine: String,
        cpu: CpuId,
        node: NodeId,
        nodes: NodeSet,
    },
    #[error("machine {machine}: CPU {cpu} is listed twice")]
    CpuTwice { machine: String, cpu: CpuId },
    #[error("machine {machine}: node {node} is listed twice")]
    NodeTwice { machine: String, node: NodeId },
    #[error(
        "machine {machine}: both [shape] and [[node]] are given; use [shape] if all nodes are alike, otherwise [[node]] for each node"
    )]
    TwoShapes { machine: String },
    #[error(
        "machine {machine}: node {node} and its CPUs disagree: the node lists CPUs {node_says}, but CPUs {cpus_say} name this node"
    )]
    NodeCpus {
        machine: String,
        node: NodeId,
        node_says: CpuSet,
        cpus_say: CpuSet,
    },
    #[error(
        "machine {machine}: CPU {cpu} names last-level cache {llc}, but the machine has {llcs}, counted from 0"
    )]
    CpuOnUnknownLlc {
        machine: String,
        cpu: CpuId,
        llc: u32,
        llcs: usize,
    },
    #[error("machine {machine}: {what} does not divide evenly: {why}")]
    Uneven {
        machine: String,
        what: String,
        why: String,
    },
    #[error(
        "machine {machine}: link {from} to {to} names a node that the machine does not have (nodes {nodes})"
    )]
    LinkToNowhere {
        machine: String,
        from: NodeId,
        to: NodeId,
        nodes: NodeSet,
    },
    #[error("machine {machine}: link from node {node} to itself; a link joins two nodes")]
    LinkToSelf { machine: String, node: NodeId },
    #[error("machine {machine}: link {from} to {to} is listed twice")]
    LinkTwice {
        machine: String,
        from: NodeId,
        to: NodeId,
    },
    #[error("machine {machine}: no route from node {from} to node {to}; add a link, or leave all links out")]
    NoRoute {
        machine: String,
        from: NodeId,
        to: NodeId,
    },
    #[error("machine {machine}: route {} names fewer than two nodes; name the first, the last and those between", along(.nodes))]
    RouteTooShort { machine: String, nodes: Vec<NodeId> },
    #[error(
        "machine {machine}: route {} takes a link from node {from} to node {to}, which the machine does not have",
        along(.nodes)
    )]
    RouteWithoutLink {
        machine: String,
        nodes: Vec<NodeId>,
        from: NodeId,
        to: NodeId,
    },
    #[error("machine {machine}: route {} comes to node {node} twice; leave the loop out", along(.nodes))]
    RouteLoops {
        machine: String,
        nodes: Vec<NodeId>,
        node: NodeId,
    },
    #[error("machine {machine}: two routes lead from node {from} to node {to}; state one of them")]
    RouteTwice {
        machine: String,
        from: NodeId,
        to: NodeId,
    },
    #[error(
        "machine {machine}: distance table has {rows} rows (row lengths {lengths:?}), but there are {nodes} nodes"
    )]
    DistanceShape {
        machine: String,
        rows: usize,
        lengths: Vec<usize>,
        nodes: usize,
    },
    #[error(
        "machine {machine}: distance from node {from} to node {to} is {distance}; it must be 10 for the node itself and 10 to 255 for others"
    )]
    Distance {
        machine: String,
        from: NodeId,
        to: NodeId,
        distance: u32,
    },
    #[error(
        "machine {machine}: device {address} names node {node}, which the machine does not have (nodes {nodes})"
    )]
    DeviceOnUnknownNode {
        machine: String,
        address: String,
        node: NodeId,
        nodes: NodeSet,
    },
    #[error("machine {machine}: {what} is {value}; {expected}")]
    Figure {
        machine: String,
        what: String,
        value: String,
        expected: &'static str,
    },
}

/// Returns the nodes of a route as a machine file lists them; of a long route only the first.
fn along(nodes: &[NodeId]) -> String {
    const SHOWN_MAX: usize = 16;
    let shown: Vec<String> = nodes.iter().take(SHOWN_MAX).map(ToString::to_string).collect();
    let more = if nodes.len() > SHOWN_MAX { ", …" } else { "" };
    format!("[{}{more}]", shown.join(", "))
}

impl Machine {
    /// Returns the machine, with its CPUs in ascending order, if it obeys the rules. Nodes, CPUs and caches must exist and refer
    /// to each other. Distances must be a square table with 10 on its diagonal. Links must join existing nodes and, if there are
    /// any, reach every node. Figures must be within the limits of hardware.
    pub fn checked(mut self) -> Result<Machine, MachineError> {
        self.cpus.sort_by_key(|cpu| cpu.id);
        let nodes = self.node_set();
        if nodes.is_empty() {
            return Err(MachineError::NoNodes { machine: self.name });
        }
        if self.cpus.is_empty() {
            return Err(MachineError::NoCpus { machine: self.name });
        }
        self.check_cpus(&nodes)?;
        self.check_distances()?;
        self.check_links(&nodes)?;
        if let Some(device) = self.devices.iter().find(|device| !nodes.contains(device.node)) {
            let (address, node) = (device.address.clone(), device.node);
            return Err(MachineError::DeviceOnUnknownNode {
                machine: self.name.clone(),
                address,
                node,
                nodes,
            });
        }
        self.check_figures()?;
        if let Some(hardware) = &self.hardware {
            self.check_hardware(hardware)?;
        }
        Ok(self)
    }

    fn check_cpus(&self, nodes: &NodeSet) -> Result<(), MachineError> {
        let machine = || self.name.clone();
        for (at, cpu) in self.cpus.iter().enumerate() {
            if !nodes.contains(cpu.node) {
                let nodes = nodes.clone();
                return Err(MachineError::CpuOnUnknownNode {
                    machine: machine(),
                    cpu: cpu.id,
                    node: cpu.node,
                    nodes,
                });
            }
            if at > 0 && self.cpus[at - 1].id == cpu.id {
                return Err(MachineError::CpuTwice {
                    machine: machine(),
                    cpu: cpu.id,
                });
            }
            if let Some(llc) = cpu.llc.filter(|llc| *llc as usize >= self.llcs.len()) {
                let llcs = self.llcs.len();
                return Err(MachineError::CpuOnUnknownLlc {
                    machine: machine(),
                    cpu: cpu.id,
                    llc,
                    llcs,
                });
            }
        }
        for (node, described) in self.nodes.iter() {
            let cpus_say = self.cpus_of(&NodeSet::one(node));
            if cpus_say != described.cpus {
                let node_says = described.cpus.clone();
                return Err(MachineError::NodeCpus {
                    machine: machine(),
                    node,
                    node_says,
                    cpus_say,
                });
            }
        }
        Ok(())
    }

    fn check_distances(&self) -> Result<(), MachineError> {
        let rows = &self.distances.rows;
        if rows.len() != self.nodes.len() || rows.iter().any(|row| row.len() != self.nodes.len()) {
            return Err(MachineError::DistanceShape {
                machine: self.name.clone(),
                rows: rows.len(),
                lengths: rows.iter().map(Vec::len).collect(),
                nodes: self.nodes.len(),
            });
        }
        for (i, from) in self.nodes.keys().enumerate() {
            for (j, to) in self.nodes.keys().enumerate() {
                let distance = rows[i][j];
                if (i == j && distance != 10) || !(10..=DISTANCE_MAX).contains(&distance) {
                    return Err(MachineError::Distance {
                        machine: self.name.clone(),
                        from,
                        to,
                        distance,
                    });
                }
            }
        }
        Ok(())
    }

    /// Checks that links join existing nodes, none is listed twice, and links, if any, lead from every node to every other.
    pub(crate) fn check_links(&self, nodes: &NodeSet) -> Result<(), MachineError> {
        let machine = || self.name.clone();
        for (at, link) in self.links.iter().enumerate() {
            let Link { from, to, .. } = *link;
            if let Some(hop) = link.hop_ns {
                self.require(
                    hop > 0.0 && hop <= 100_000.0,
                    || format!("hop_ns of the link from node {from} to node {to}"),
                    hop,
                    "it must be above 0 and at most 100000",
                )?;
            }
            if !nodes.contains(from) || !nodes.contains(to) {
                return Err(MachineError::LinkToNowhere {
                    machine: machine(),
                    from,
                    to,
                    nodes: nodes.clone(),
                });
            }
            if from == to {
                return Err(MachineError::LinkToSelf {
                    machine: machine(),
                    node: from,
                });
            }
            if self.links[..at]
                .iter()
                .any(|other| (other.from, other.to) == (from, to))
            {
                return Err(MachineError::LinkTwice {
                    machine: machine(),
                    from,
                    to,
                });
            }
        }
        self.check_routes()?;
        if self.links.is_empty() {
            return Ok(());
        }
        for from in nodes.iter() {
            for to in nodes.iter() {
                if from != to && self.route(from, to).is_none() {
                    return Err(MachineError::NoRoute {
                        machine: machine(),
                        from,
                        to,
                    });
                }
            }
        }
        Ok(())
    }

    /// Checks that the known routes follow links, come to no node twice, and that no two lead from one node to the same other.
    fn check_routes(&self) -> Result<(), MachineError> {
        let machine = || self.name.clone();
        let links: BTreeSet<(NodeId, NodeId)> = self.links.iter().map(|link| (link.from, link.to)).collect();
        let mut known = BTreeSet::new();
        for nodes in &self.routes {
            let (Some(first), Some(last), true) = (nodes.first(), nodes.last(), nodes.len() > 1) else {
                return Err(MachineError::RouteTooShort {
                    machine: machine(),
                    nodes: nodes.clone(),
                });
            };
            let mut seen = NodeSet::new();
            for node in nodes.iter().copied() {
                if seen.contains(node) {
                    return Err(MachineError::RouteLoops {
                        machine: machine(),
                        nodes: nodes.clone(),
                        node,
                    });
                }
                seen.insert(node);
            }
            let mut hops = nodes.windows(2).map(|hop| (hop[0], hop[1]));
            if let Some((from, to)) = hops.find(|hop| !links.contains(hop)) {
                return Err(MachineError::RouteWithoutLink {
                    machine: machine(),
                    nodes: nodes.clone(),
                    from,
                    to,
                });
            }
            if !known.insert((*first, *last)) {
                return Err(MachineError::RouteTwice {
                    machine: machine(),
                    from: *first,
                    to: *last,
                });
            }
        }
        Ok(())
    }

    fn check_figures(&self) -> Result<(), MachineError> {
        for (node, described) in self.nodes.iter() {
            let memory = described.memory_bytes;
            let expected = "a node has at most 1048576GiB";
            self.require(
                memory <= NODE_MEMORY_BYTES_MAX,
                || format!("memory of node {node}"),
                memory,
                expected,
            )?;
            if let Some(rate) = described.memory_bandwidth {
                self.check_bandwidth(&format!("memory bandwidth of node {node}"), rate)?;
            }
            if let Some(ns) = described.memory_ns {
                self.require(
                    ns > 0.0 && ns <= 100_000.0,
                    || format!("memory_ns of node {node}"),
                    ns,
                    "it must be above 0 and at most 100000",
                )?;
            }
        }
        for link in &self.links {
            if let Some(rate) = link.bandwidth {
                self.check_bandwidth(&format!("bandwidth of link {} to {}", link.from, link.to), rate)?;
            }
        }
        for device in &self.devices {
            if let Some(rate) = device.bandwidth {
                self.check_bandwidth(&format!("bandwidth of device {}", device.address), rate)?;
            }
        }
        for (at, llc) in self.llcs.iter().enumerate() {
            let size = llc.size_bytes;
            let size_ok = size > Bytes::ZERO && size <= Bytes::from_gib(64);
            self.require(
                size_ok,
                || format!("size of last-level cache {at}"),
                size,
                "it must be above 0 and at most 64GiB",
            )?;
            let line_ok = llc.line_bytes.is_power_of_two() && (8..=4096).contains(&llc.line_bytes);
            let line = || format!("line size of last-level cache {at}");
            self.require(
                line_ok,
                line,
                llc.line_bytes,
                "it must be a power of two from 8 to 4096 bytes",
            )?;
            let ways = llc.ways.unwrap_or(1);
            let ways_ok = (1..=65_536).contains(&ways);
            self.require(
                ways_ok,
                || format!("ways of last-level cache {at}"),
                ways,
                "it must be 1 to 65536",
            )?;
        }
        Ok(())
    }

    fn check_hardware(&self, hardware: &Hardware) -> Result<(), MachineError> {
        let clock_ok = (100_000_000..=20_000_000_000).contains(&hardware.clock_hz);
        self.require(
            clock_ok,
            || "clock in Hz".to_owned(),
            hardware.clock_hz,
            "it must be 100 MHz to 20 GHz",
        )?;
        let latency = hardware.latency;
        let latencies = [
            ("l1_cycles", latency.l1_cycles),
            ("l2_cycles", latency.l2_cycles),
            ("llc_cycles", latency.llc_cycles),
            ("memory_ns", latency.memory_ns),
        ];
        for (name, value) in latencies {
            let ok = value > 0.0 && value <= 100_000.0;
            self.require(
                ok,
                || format!("latency {name}"),
                value,
                "it must be above 0 and at most 100000",
            )?;
        }
        let hop = hardware.link.hop_ns;
        let hop_ok = (0.0..=100_000.0).contains(&hop) && (hop > 0.0 || self.nodes.len() == 1);
        self.require(
            hop_ok,
            || "hop_ns of a link".to_owned(),
            hop,
            "it must be above 0 and at most 100000",
        )?;
        self.check_curves(hardware)?;
        self.check_core(hardware)?;
        self.check_costs(hardware)
    }

    fn check_curves(&self, hardware: &Hardware) -> Result<(), MachineError> {
        for (name, curve) in [
            ("memory_curve", hardware.memory_curve),
            ("link curve", hardware.link.curve),
        ] {
            let LoadCurve { alpha, beta } = curve;
            let expected = "alpha and beta of a curve must be 0 to 100";
            self.require(
                (0.0..=100.0).contains(&alpha),
                || format!("alpha of {name}"),
                alpha,
                expected,
            )?;
            self.require(
                (0.0..=100.0).contains(&beta),
                || format!("beta of {name}"),
                beta,
                expected,
            )?;
        }
        Ok(())
    }

    fn check_core(&self, hardware: &Hardware) -> Result<(), MachineError> {
        let smt = hardware.smt_throughput;
        let smt_ok = (1.0..=2.0).contains(&smt);
        self.require(
            smt_ok,
            || "smt_throughput".to_owned(),
            smt,
            "it must be 1 to 2, the work of two threads over that of one",
        )?;
        if let Some(scattered) = hardware.scattered_throughput {
            let ok = scattered > 0.0 && scattered <= 1.0;
            self.require(
                ok,
                || "scattered_throughput".to_owned(),
                scattered,
                "it must be above 0 and at most 1, as a share of the bandwidth of streams; leave it out if it is not known",
            )?;
        }
        let misses = hardware.misses_in_flight_max;
        let misses_ok = (1..=1024).contains(&misses);
        self.require(
            misses_ok,
            || "misses_in_flight_max".to_owned(),
            misses,
            "it must be 1 to 1024",
        )?;
        for (name, entries) in [
            ("entries_4k", hardware.tlb_entries_4k),
            ("entries_2m", hardware.tlb_entries_2m),
        ] {
            let ok = (1..=1 << 20).contains(&entries);
            self.require(ok, || format!("TLB {name}"), entries, "it must be 1 to 1048576")?;
        }
        let l2 = hardware.l2_bytes;
        let l2_ok = (1..=1 << 30).contains(&l2.0);
        self.require(
            l2_ok,
            || "l2".to_owned(),
            l2,
            "it must be above 0 and at most 1GiB",
        )?;
        hardware
            .prefetcher
            .map_or(Ok(()), |prefetcher| self.check_prefetcher(prefetcher))
    }

    /// Checks a stream prefetcher. It stays in a page of 4 KiB, which has 64 lines of 64 bytes.
    fn check_prefetcher(&self, prefetcher: Prefetcher) -> Result<(), MachineError> {
        let Prefetcher {
            steps,
            step_lines,
            nearest,
            farthest,
        } = prefetcher;
        for (name, lines) in [("steps", steps), ("step_lines", step_lines), ("nearest", nearest)] {
            let ok = (1..=63).contains(&lines);
            self.require(ok, || format!("prefetcher.{name}"), lines, "it must be 1 to 63")?;
        }
        self.require(
            (nearest..=63).contains(&farthest),
            || "prefetcher.farthest".to_owned(),
            farthest,
            "it must be 63 at most, and not less than prefetcher.nearest",
        )
    }

    /// Checks the costs of page walks and interrupts.
    fn check_costs(&self, hardware: &Hardware) -> Result<(), MachineError> {
        for (name, refs) in [
            ("native_refs", hardware.walk.native_refs),
            ("nested_refs", hardware.walk.nested_refs),
        ] {
            let ok = (0.0..=35.0).contains(&refs);
            self.require(ok, || format!("walk.{name}"), refs, "it must be 0 to 35")?;
        }
        let wake = hardware
            .wake
            .map_or((0.0, 0.0), |wake| (wake.exit_ns, wake.schedule_ns));
        for (name, ns) in [
            ("ipi.native_ns", hardware.ipi.native_ns),
            ("ipi.virtual_ns", hardware.ipi.virtual_ns),
            ("wake.exit_ns", wake.0),
            ("wake.schedule_ns", wake.1),
        ] {
            let ok = (0.0..=1e6).contains(&ns);
            self.require(ok, || name.to_owned(), ns, "it must be 0 to 1000000")?;
        }
        Ok(())
    }

    fn check_bandwidth(&self, what: &str, rate: BytesPerSec) -> Result<(), MachineError> {
        let ok = rate > BytesPerSec::ZERO && rate <= BANDWIDTH_MAX;
        self.require(
            ok,
            || what.to_owned(),
            rate,
            "it must be above 0 and at most 100TB/s; leave it out if it is not known",
        )
    }

    /// Returns an error about a figure unless `ok` is true. `ok` says what must hold, so a NaN is refused.
    fn require(
        &self,
        ok: bool,
        what: impl FnOnce() -> String,
        value: impl std::fmt::Display,
        expected: &'static str,
    ) -> Result<(), MachineError> {
        if ok {
            return Ok(());
        }
        Err(MachineError::Figure {
            machine: self.name.clone(),
            what: what(),
            value: value.to_string(),
            expected,
        })
    }
}
