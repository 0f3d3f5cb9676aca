//! Builds a machine from a machine file, whose format is [`MachineFile`]; docs/FORMATS.md describes it.

use homenode_units::{CpuId, CpuSet, NodeId, NodeMap};

use crate::model::{
    Cpu, Device, Distances, Hardware, Ipi, Latency, Link, LinkTiming, Llc, LoadCurve, Machine, Node,
    PageWalk, Prefetcher, Wake,
};
use crate::rules::MachineError;

mod format;

pub use format::MachineFile;
use format::{
    CurveEntry, DeviceEntry, DistanceEntry, HardwareEntry, LatencyEntry, LinkGroup, LlcEntry, NodeEntry,
    RouteEntry, Shape, SharedBy, WakeEntry,
};

/// The kernel's own limits on x86. A larger count is a slip, and must not fill memory.
const CPU_COUNT_MAX: u64 = 8192;
const NODE_COUNT_MAX: u64 = 1024;

/// A node as the file describes it, with its CPUs.
struct Described {
    node: Node,
    cpus: Vec<Cpu>,
}

impl MachineFile {
    /// Returns the machine that the file describes.
    ///
    /// # Errors
    /// If the machine is impossible.
    pub fn machine(self) -> Result<Machine, MachineError> {
        let name = self.name;
        let described = match (&self.shape, self.node.as_slice()) {
            (Some(shape), []) => shape.nodes(&name)?,
            (None, nodes) => listed_nodes(&name, nodes)?,
            (Some(_), _) => return Err(MachineError::TwoShapes { machine: name }),
        };
        if described.is_empty() {
            return Err(MachineError::NoNodes { machine: name });
        }
        let mut cpus: Vec<Cpu> = described
            .values()
            .flat_map(|node| node.cpus.iter().copied())
            .collect();
        let llcs = match &self.llc {
            Some(entry) => entry.caches(&name, &mut cpus)?,
            None => Vec::new(),
        };
        let links = self.links.iter().flat_map(LinkGroup::links).collect();
        let nodes = described.map(|_, described| described.node.clone());
        let mut machine = Machine {
            name,
            memory_allowed: nodes.node_set(),
            isolated: CpuSet::new(),
            nodes,
            cpus,
            llcs,
            distances: Distances::default(),
            links,
            routes: self.routes.routes(),
            devices: self.devices.into_iter().map(DeviceEntry::device).collect(),
            notes: self.notes,
            hardware: None,
        };
        // Distances and routes are computed from links, so links are checked first.
        machine.check_links(&machine.node_set())?;
        machine.distances = self.distances.table(&machine)?;
        machine.hardware = self.hardware.map(|entry| entry.hardware(&machine)).transpose()?;
        machine.checked()
    }
}

impl Shape {
    fn nodes(&self, machine: &str) -> Result<NodeMap<Described>, MachineError> {
        let node_count = u64::from(self.sockets) * u64::from(self.nodes_per_socket);
        let core_count = node_count * u64::from(self.cores_per_node);
        let limits = [
            (
                "sockets times nodes_per_socket",
                node_count,
                NODE_COUNT_MAX,
                "a machine has at most 1024 nodes",
            ),
            (
                "number of CPUs",
                core_count * u64::from(self.threads_per_core),
                CPU_COUNT_MAX,
                "a machine has at most 8192",
            ),
        ];
        for (what, value, limit, expected) in limits {
            if value > limit {
                return Err(figure(machine, what, &value, expected));
            }
        }
        if self.threads_per_core == 0 {
            return Err(figure(machine, "threads_per_core", &0, "it must be 1 or more"));
        }
        let nodes = (0..node_count as u16).map(|id| {
            let socket = id / self.nodes_per_socket;
            let first_core = u32::from(id) * u32::from(self.cores_per_node);
            let threads = (0..u32::from(self.threads_per_core)).flat_map(|thread| {
                (0..u32::from(self.cores_per_node)).map(move |core| (thread, first_core + core))
            });
            let cpus: Vec<Cpu> = threads
                .map(|(thread, core)| Cpu {
                    id: CpuId(thread * core_count as u32 + core),
                    node: NodeId(id),
                    socket,
                    core,
                    llc: None,
                })
                .collect();
            let node = Node {
                cpus: cpus.iter().map(|cpu| cpu.id).collect(),
                memory_bytes: self.memory_per_node,
                memory_bandwidth: self.memory_bandwidth_per_node,
                memory_ns: None,
                socket: Some(socket),
            };
            (NodeId(id), Described { node, cpus })
        });
        Ok(nodes.collect())
    }
}

/// Builds the nodes that the file lists one by one. CPUs are numbered as Linux does: with two threads per core, the lower half of
/// a node's CPU numbers are the first threads of its cores.
fn listed_nodes(machine: &str, entries: &[NodeEntry]) -> Result<NodeMap<Described>, MachineError> {
    let mut nodes = NodeMap::new();
    let mut core_count = 0;
    for entry in entries {
        let id = NodeId(entry.id);
        if nodes.get(id).is_some() {
            return Err(MachineError::NodeTwice {
                machine: machine.to_owned(),
                node: id,
            });
        }
        let threads = usize::from(entry.threads_per_core);
        if threads == 0 {
            return Err(figure(
                machine,
                &format!("threads_per_core of node {id}"),
                &0,
                "it must be 1 or more",
            ));
        }
        if !entry.cpus.len().is_multiple_of(threads) {
            let why = format!("{} CPUs, {threads} threads per core", entry.cpus.len());
            return Err(uneven(machine, format!("node {id}"), why));
        }
        let cores = (entry.cpus.len() / threads) as u32;
        // A node without a package in the file is a package of its own.
        let socket = entry.socket.unwrap_or(entry.id);
        let at = |(index, cpu): (usize, CpuId)| Cpu {
            id: cpu,
            node: id,
            socket,
            core: core_count + index as u32 % cores,
            llc: None,
        };
        let cpus = entry.cpus.iter().enumerate().map(at).collect();
        let node = Node {
            cpus: entry.cpus.clone(),
            memory_bytes: entry.memory,
            memory_bandwidth: entry.memory_bandwidth,
            memory_ns: entry.memory_ns,
            socket: entry.socket,
        };
        nodes.insert(id, Described { node, cpus });
        core_count += cores;
    }
    Ok(nodes)
}

impl LlcEntry {
    /// Returns the caches, and sets each CPU's index of its cache.
    fn caches(&self, machine: &str, cpus: &mut [Cpu]) -> Result<Vec<Llc>, MachineError> {
        let per_node = u32::from(self.per_node);
        if per_node == 0 || (self.shared_by == SharedBy::Socket && per_node != 1) {
            return Err(figure(
                machine,
                "per_node of llc",
                &per_node,
                "it must be 1 or more, and exactly 1 if a socket shares the cache",
            ));
        }
        let place = |cpu: &Cpu| match self.shared_by {
            SharedBy::Node => cpu.node.0,
            SharedBy::Socket => cpu.socket,
        };
        let mut places: Vec<u16> = cpus.iter().map(place).collect();
        places.sort_unstable();
        places.dedup();
        let mut llcs = Vec::new();
        for shared in places {
            let mut cores: Vec<u32> = cpus
                .iter()
                .filter(|cpu| place(cpu) == shared)
                .map(|cpu| cpu.core)
                .collect();
            cores.sort_unstable();
            cores.dedup();
            if !cores.len().is_multiple_of(per_node as usize) {
                let why = format!("{} cores, {per_node} last-level caches", cores.len());
                return Err(uneven(machine, format!("node {shared}"), why));
            }
            for cores in cores.chunks(cores.len() / per_node as usize) {
                let llc = llcs.len() as u32;
                let mut sharers = CpuSet::new();
                for cpu in cpus.iter_mut().filter(|cpu| cores.contains(&cpu.core)) {
                    cpu.llc = Some(llc);
                    sharers.insert(cpu.id);
                }
                let (size_bytes, ways, line_bytes) = (self.size, self.ways, self.line_bytes);
                llcs.push(Llc {
                    cpus: sharers,
                    size_bytes,
                    ways,
                    line_bytes,
                    replacement: Some(self.replacement),
                });
            }
        }
        Ok(llcs)
    }
}

impl LinkGroup {
    fn links(&self) -> impl Iterator<Item = Link> + '_ {
        let both = self.between.iter().flat_map(|&(a, b)| [(a, b), (b, a)]);
        both.chain(self.directed.iter().copied()).map(|(from, to)| Link {
            from,
            to,
            bandwidth: self.bandwidth,
            hop_ns: self.hop_ns,
        })
    }
}

impl RouteEntry {
    fn routes(self) -> Vec<Vec<NodeId>> {
        let both = self.between.into_iter().flat_map(|there| {
            let back = there.iter().rev().copied().collect();
            [there, back]
        });
        both.chain(self.directed).collect()
    }
}

impl DistanceEntry {
    fn table(self, machine: &Machine) -> Result<Distances, MachineError> {
        let by_hops = match (self.by_hops, self.rows) {
            (None, Some(rows)) => return Ok(Distances { rows }),
            (Some(by_hops), None) => by_hops,
            // Linux's defaults if the firmware does not report distances: all other nodes are equally far.
            (None, None) => [10].into_iter().chain(vec![20; machine.nodes.len()]).collect(),
            (Some(_), Some(_)) => {
                let expected = "give `by_hops` or `rows`, not both";
                return Err(figure(
                    &machine.name,
                    "table of distances",
                    &"given twice",
                    expected,
                ));
            }
        };
        let distance = |from: NodeId, to: NodeId| {
            let hops = match machine.links.is_empty() {
                true => usize::from(from != to),
                false => machine.route(from, to).map_or(0, |route| route.len()),
            };
            by_hops.get(hops).copied().ok_or_else(|| {
                let what = format!("the entry of by_hops for the {hops} hops from node {from} to node {to}");
                figure(
                    &machine.name,
                    &what,
                    &"missing",
                    "by_hops must hold one distance for each number of hops, from 0",
                )
            })
        };
        let row = |from: NodeId| {
            machine
                .nodes
                .keys()
                .map(|to| distance(from, to))
                .collect::<Result<Vec<u32>, _>>()
        };
        Ok(Distances {
            rows: machine.nodes.keys().map(row).collect::<Result<_, _>>()?,
        })
    }
}

impl DeviceEntry {
    fn device(self) -> Device {
        Device {
            address: self.address,
            class: self.class,
            node: self.node,
            bandwidth: self.bandwidth,
            latency_ns: self.latency,
            latency_passthrough_ns: self.latency_passthrough,
            latency_virtual_ns: self.latency_virtual,
        }
    }
}

impl HardwareEntry {
    fn hardware(self, machine: &Machine) -> Result<Hardware, MachineError> {
        let curve = |entry: CurveEntry| LoadCurve {
            alpha: entry.alpha,
            beta: entry.beta,
        };
        let link = match self.link {
            Some(link) => LinkTiming {
                hop_ns: link.hop_ns,
                curve: curve(link.curve),
            },
            None if machine.nodes.len() == 1 => LinkTiming {
                hop_ns: 0.0,
                curve: LoadCurve {
                    alpha: 0.0,
                    beta: 0.0,
                },
            },
            None => {
                let expected = "a machine of several nodes needs hop_ns and curve";
                return Err(figure(&machine.name, "table hardware.link", &"missing", expected));
            }
        };
        let LatencyEntry {
            l1_cycles,
            l2_cycles,
            llc_cycles,
            memory_ns,
        } = self.latency;
        Ok(Hardware {
            clock_hz: self.clock,
            latency: Latency {
                l1_cycles,
                l2_cycles,
                llc_cycles,
                memory_ns,
            },
            llc_inclusive: self.llc_inclusive,
            misses_in_flight_max: self.misses_in_flight_max,
            memory_curve: curve(self.memory_curve),
            link,
            scattered_throughput: self.scattered_throughput,
            smt_throughput: self.smt_throughput,
            tlb_entries_4k: self.tlb_entries_4k,
            tlb_entries_2m: self.tlb_entries_2m,
            l2_bytes: self.l2,
            prefetcher: self.prefetcher.map(|entry| Prefetcher {
                steps: entry.steps,
                step_lines: entry.step_lines,
                nearest: entry.nearest,
                farthest: entry.farthest,
            }),
            walk: PageWalk {
                native_refs: self.walk.native_refs,
                nested_refs: self.walk.nested_refs,
            },
            ipi: Ipi {
                native_ns: self.ipi.native_ns,
                virtual_ns: self.ipi.virtual_ns,
            },
            wake: self
                .wake
                .map(|WakeEntry { exit_ns, schedule_ns }| Wake { exit_ns, schedule_ns }),
        })
    }
}

fn figure(machine: &str, what: &str, value: &dyn ToString, expected: &'static str) -> MachineError {
    MachineError::Figure {
        machine: machine.to_owned(),
        what: what.to_owned(),
        value: value.to_string(),
        expected,
    }
}

fn uneven(machine: &str, what: String, why: String) -> MachineError {
    MachineError::Uneven {
        machine: machine.to_owned(),
        what,
        why,
    }
}
