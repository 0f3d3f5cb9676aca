//! Builds a [`Machine`] from the contents of files that were already read.

use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeMap, NodeSet};

use super::SysfsError;
use super::reader::malformed;
use super::types::{Told, ToldCpu, ToldDevice, ToldNode};
use homenode_machine::{Cpu, Device, Distances, Llc, Machine, Node};

/// Cache line size if the kernel does not report it: that of every x86 server and nearly every ARM server.
const LINE_BYTES_DEFAULT: u32 = 64;
/// Linux's default for the distance to another node, if the firmware does not report it.
const REMOTE_DISTANCE: u32 = 20;

pub(super) fn machine(told: Told) -> Result<Machine, SysfsError> {
    let mut notes = Vec::new();
    let told_nodes = match &told.nodes {
        Some(nodes) => nodes.clone(),
        None => {
            notes.push("the kernel reports no NUMA nodes: the whole host is treated as node 0".to_owned());
            vec![whole_host(&told)]
        }
    };
    let node_of = node_of_cpus(&told, &told_nodes)?;
    let usable = match &told.cpus_allowed {
        Some(allowed) => told.cpus_online.intersection(allowed),
        None => told.cpus_online.clone(),
    };
    note_cpus(&told, &usable, &mut notes);

    let sockets = socket_numbers(&told.cpus);
    let cores = core_numbers(&told.cpus)?;
    let (llcs, llc_of) = caches(&told.cpus, &usable, &mut notes);
    let cpu = |(at, cpu): (usize, &ToldCpu)| Cpu {
        id: cpu.id,
        node: node_of[at],
        socket: sockets[at].unwrap_or(0),
        core: cores[at],
        llc: llc_of[at],
    };
    let cpus: Vec<Cpu> = told
        .cpus
        .iter()
        .enumerate()
        .filter(|(_, cpu)| usable.contains(cpu.id))
        .map(cpu)
        .collect();

    let node = |told_node: &ToldNode| {
        let mut packages = (0..told.cpus.len())
            .filter(|at| node_of[*at] == told_node.id)
            .map(|at| sockets[at]);
        let first = packages.next().flatten();
        let node = Node {
            cpus: told_node.cpus.intersection(&usable),
            memory_bytes: told_node.memory,
            memory_bandwidth: told_node.memory_bandwidth,
            memory_ns: told_node.memory_ns,
            socket: first.filter(|_| packages.all(|package| package == first)),
        };
        (told_node.id, node)
    };
    let nodes: NodeMap<Node> = told_nodes.iter().map(node).collect();
    let memory_allowed = memory_allowed(&told, &nodes, &mut notes);
    note_nodes(&told_nodes, &usable, &mut notes);
    let distances = distances(&told, &told_nodes, &mut notes)?;
    let devices = devices(told.devices, &nodes.node_set(), &mut notes);
    Ok(Machine {
        name: told.name,
        nodes,
        memory_allowed,
        isolated: told.cpus_isolated.intersection(&usable),
        cpus,
        llcs,
        distances,
        links: Vec::new(),
        routes: Vec::new(),
        devices,
        notes,
        hardware: None,
    })
}

/// Returns the whole host as one node, for a kernel without NUMA nodes.
fn whole_host(told: &Told) -> ToldNode {
    ToldNode {
        id: NodeId(0),
        path: told.nodes_path.clone(),
        cpus: told.cpus_online.clone(),
        memory: told.memory.unwrap_or(Bytes::ZERO),
        distances: Some(vec![10]),
        memory_bandwidth: None,
        memory_ns: None,
    }
}

/// Returns the node of each CPU, in the order of `told.cpus`.
fn node_of_cpus(told: &Told, nodes: &[ToldNode]) -> Result<Vec<NodeId>, SysfsError> {
    let of = |cpu: &ToldCpu| {
        let mut owners = nodes.iter().filter(|node| node.cpus.contains(cpu.id));
        match (owners.next(), owners.next()) {
            (Some(node), None) => Ok(node.id),
            (None, _) => Err(malformed(
                &told.nodes_path,
                &format!("no node lists CPU {}", cpu.id),
                "valid: each online CPU must be on one node",
            )),
            (Some(a), Some(b)) => {
                let found = format!("nodes {} and {} both list CPU {}", a.id, b.id, cpu.id);
                Err(malformed(
                    &b.path.join("cpulist"),
                    &found,
                    "valid: each CPU must be on only one node",
                ))
            }
        }
    };
    told.cpus.iter().map(of).collect()
}

fn note_cpus(told: &Told, usable: &CpuSet, notes: &mut Vec<String>) {
    let offline = told
        .cpus_present
        .as_ref()
        .map(|present| present.difference(&told.cpus_online))
        .unwrap_or_default();
    if !offline.is_empty() {
        notes.push(format!("{} offline and left out", cpus_are(&offline)));
    }
    let forbidden = told.cpus_online.difference(usable);
    if !forbidden.is_empty() {
        notes.push(format!(
            "{} online, but not in the cpuset of this process; left out",
            cpus_are(&forbidden)
        ));
    }
    let isolated = told.cpus_isolated.intersection(usable);
    if !isolated.is_empty() {
        notes.push(format!(
            "{} isolated (isolcpus=): a VM runs there only if its own cpuset or affinity includes them",
            cpus_are(&isolated)
        ));
    }
}

fn cpus_are(cpus: &CpuSet) -> String {
    if cpus.len() == 1 {
        format!("CPU {cpus} is")
    } else {
        format!("CPUs {cpus} are")
    }
}

fn nodes_have(nodes: &NodeSet) -> String {
    if nodes.len() == 1 {
        format!("node {nodes} has")
    } else {
        format!("nodes {nodes} have")
    }
}

fn note_nodes(nodes: &[ToldNode], usable: &CpuSet, notes: &mut Vec<String>) {
    let which = |odd: fn(&ToldNode) -> bool| {
        nodes
            .iter()
            .filter(|node| odd(node))
            .map(|node| node.id)
            .collect::<NodeSet>()
    };
    let empty = which(|node| node.memory == Bytes::ZERO && node.cpus.is_empty());
    if !empty.is_empty() {
        notes.push(format!("{} neither CPUs nor memory", nodes_have(&empty)));
    }
    let memoryless = which(|node| node.memory == Bytes::ZERO && !node.cpus.is_empty());
    if !memoryless.is_empty() {
        let theirs = nodes.iter().filter(|node| memoryless.contains(node.id));
        let cpus: CpuSet = theirs
            .flat_map(|node| node.cpus.iter())
            .filter(|cpu| usable.contains(*cpu))
            .collect();
        let unused = match cpus.is_empty() {
            true => String::new(),
            false => format!(": homes need memory, so VMs with a home do not run on CPUs {cpus}"),
        };
        notes.push(format!("{} no memory{unused}", nodes_have(&memoryless)));
    }
    let cpuless = which(|node| node.cpus.is_empty() && node.memory > Bytes::ZERO);
    if !cpuless.is_empty() {
        notes.push(format!("{} memory but no CPU", nodes_have(&cpuless)));
    }
}

fn memory_allowed(told: &Told, nodes: &NodeMap<Node>, notes: &mut Vec<String>) -> NodeSet {
    let of_devices = nodes.node_set().intersection(&told.nodes_of_devices);
    if !of_devices.is_empty() {
        notes.push(format!(
            "{} a device's memory, which is not for VMs",
            nodes_have(&of_devices)
        ));
    }
    let all = nodes.node_set().difference(&of_devices);
    let Some(allowed) = &told.nodes_allowed else {
        return all;
    };
    let has_memory = |(id, node): &(NodeId, &Node)| node.memory_bytes > Bytes::ZERO && !allowed.contains(*id);
    let forbidden: NodeSet = nodes.iter().filter(has_memory).map(|(id, _)| id).collect();
    if !forbidden.is_empty() {
        notes.push(format!(
            "{} memory that the cpuset of this process excludes",
            nodes_have(&forbidden)
        ));
    }
    all.intersection(allowed)
}

/// Returns package numbers. The kernel does not use them as indices, and they can be large (offsets into a firmware table on some
/// ARM hosts). If one does not fit, all are renumbered in ascending order.
fn socket_numbers(cpus: &[ToldCpu]) -> Vec<Option<u16>> {
    let mut known: Vec<u32> = cpus.iter().filter_map(|cpu| cpu.package).collect();
    known.sort_unstable();
    known.dedup();
    let fits = known.last().is_none_or(|last| u16::try_from(*last).is_ok());
    let number = |package: u32| match fits {
        true => package as u16,
        false => known.binary_search(&package).unwrap_or(0) as u16,
    };
    cpus.iter().map(|cpu| cpu.package.map(number)).collect()
}

/// Numbers cores over the whole host, in the order of their first online CPUs.
fn core_numbers(cpus: &[ToldCpu]) -> Result<Vec<u32>, SysfsError> {
    let mut firsts: Vec<CpuId> = Vec::new();
    let mut cores = Vec::new();
    for cpu in cpus {
        let first = match &cpu.siblings {
            Some(siblings) if siblings.contains(cpu.id) => siblings.first().unwrap_or(cpu.id),
            Some(siblings) => {
                let expected = format!("a list of the core's CPUs that includes CPU {}", cpu.id);
                return Err(malformed(
                    &cpu.path.join("topology"),
                    &siblings.to_string(),
                    &expected,
                ));
            }
            None => cpu.id,
        };
        let core = firsts
            .iter()
            .position(|known| *known == first)
            .unwrap_or_else(|| {
                firsts.push(first);
                firsts.len() - 1
            });
        cores.push(core as u32);
    }
    Ok(cores)
}

/// Returns the last-level caches of the usable CPUs, and each CPU's index of its cache.
fn caches(cpus: &[ToldCpu], usable: &CpuSet, notes: &mut Vec<String>) -> (Vec<Llc>, Vec<Option<u32>>) {
    let mut known: Vec<(u32, CpuSet)> = Vec::new();
    let mut llcs: Vec<Llc> = Vec::new();
    let (mut unsized_caches, mut is_private) = (false, false);
    let of = |cpu: &ToldCpu| {
        let cache = cpu.llc.as_ref().filter(|_| usable.contains(cpu.id))?;
        let Some(size_bytes) = cache.size.filter(|size| *size > Bytes::ZERO) else {
            unsized_caches = true;
            return None;
        };
        is_private |= cache.shared.is_none();
        let shared = cache.shared.clone().unwrap_or_else(|| CpuSet::one(cpu.id));
        let key = (cache.level, shared);
        let at = known.iter().position(|other| *other == key).unwrap_or_else(|| {
            let line_bytes = cache
                .line_bytes
                .filter(|bytes| *bytes > 0)
                .unwrap_or(LINE_BYTES_DEFAULT);
            llcs.push(Llc {
                cpus: CpuSet::new(),
                size_bytes,
                ways: cache.ways,
                line_bytes,
                replacement: None,
            });
            known.push(key);
            known.len() - 1
        });
        llcs[at].cpus.insert(cpu.id);
        Some(at as u32)
    };
    let llc_of = cpus.iter().map(of).collect();
    if unsized_caches {
        notes.push(
            "the kernel does not report the size of some last-level caches; they are left out".to_owned(),
        );
    }
    if is_private {
        notes.push(
            "the kernel does not report which CPUs share some last-level caches; each CPU is assumed to have its own"
                .to_owned(),
        );
    }
    (llcs, llc_of)
}

fn distances(told: &Told, nodes: &[ToldNode], notes: &mut Vec<String>) -> Result<Distances, SysfsError> {
    let ids: Vec<NodeId> = nodes.iter().map(|node| node.id).collect();
    let mut untold = false;
    let mut row = |node: &ToldNode| {
        let Some(row) = &node.distances else {
            untold = true;
            return Ok(ids
                .iter()
                .map(|to| if *to == node.id { 10 } else { REMOTE_DISTANCE })
                .collect());
        };
        // A row has one value per online node. Some kernels print more: one per possible node.
        let possible = told
            .nodes_possible
            .as_ref()
            .filter(|possible| possible.len() == row.len());
        match (row.len() == ids.len(), possible) {
            (true, _) => Ok(row.clone()),
            (false, Some(possible)) => Ok(possible
                .iter()
                .zip(row)
                .filter(|(id, _)| ids.contains(id))
                .map(|(_, distance)| *distance)
                .collect()),
            (false, None) => {
                let printed: Vec<String> = row.iter().map(u32::to_string).collect();
                let expected = format!("a row of {} distances, one for each online node", ids.len());
                Err(malformed(
                    &node.path.join("distance"),
                    &printed.join(" "),
                    &expected,
                ))
            }
        }
    };
    let rows = nodes.iter().map(&mut row).collect::<Result<Vec<Vec<u32>>, _>>()?;
    if untold {
        notes.push(
            "the kernel does not report distances; all other nodes are assumed to be equally far".to_owned(),
        );
    }
    Ok(Distances { rows })
}

fn devices(told: Vec<ToldDevice>, nodes: &NodeSet, notes: &mut Vec<String>) -> Vec<Device> {
    let mut lost = Vec::new();
    let mut devices = Vec::new();
    for ToldDevice { address, class, node } in told {
        let node = NodeId(node as u16);
        match nodes.contains(node) {
            true => devices.push(Device {
                address,
                class,
                node,
                bandwidth: None,
                latency_ns: None,
                latency_passthrough_ns: None,
                latency_virtual_ns: None,
            }),
            false => lost.push(format!("{address} (node {node})")),
        }
    }
    if !lost.is_empty() {
        let shown = lost.iter().take(5).cloned().collect::<Vec<_>>().join(", ");
        let more = if lost.len() > 5 { ", …" } else { "" };
        notes.push(format!(
            "devices left out because their node is not online: {shown}{more}"
        ));
    }
    devices
}
