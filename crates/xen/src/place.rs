//! The machine as Xen sees it. dom0's kernel sees only a few vCPUs and one node, but its cache sizes are those of the CPUs.

use std::collections::BTreeMap;
use std::path::Path;

use homenode_machine::{Cpu, Distances, Llc, Machine, Node};
use homenode_units::{Bytes, CpuId, CpuSet, NodeId, NodeMap};

use crate::error::XenError;
use crate::hypervisor::Hypervisor;
use crate::library::{CpuPlace, NodeMemory};

/// Bytes of a cache line, on every x86 CPU that Xen runs on.
const LINE_BYTES: u32 = 64;

/// Returns the machine that the hypervisor runs on.
///
/// # Errors
/// If the call fails, or its result does not make a machine.
pub(crate) fn machine(hypervisor: &Hypervisor, root: &Path) -> Result<Machine, XenError> {
    let nodes = hypervisor.nodes()?;
    let name = std::fs::read_to_string(root.join("proc/sys/kernel/hostname"));
    let name = name.map_or_else(|_| "xen".to_owned(), |name| name.trim().to_owned());
    built(
        name,
        &hypervisor.cpus()?,
        &nodes.memory,
        &nodes.distances,
        llc_bytes(root),
    )
}

fn built(
    name: String,
    cpus: &[Option<CpuPlace>],
    memory: &[Option<NodeMemory>],
    distances: &[Vec<u32>],
    llc: Option<Bytes>,
) -> Result<Machine, XenError> {
    let wrong = |cause: String| XenError::NoMachine { cause };
    // Cores are numbered from the start on each socket.
    let mut cores: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    let mut found = Vec::new();
    for (at, place) in cpus.iter().enumerate() {
        let Some(place) = place else { continue };
        let next = cores.len() as u32;
        let core = *cores.entry((place.socket, place.core)).or_insert(next);
        let node = u16::try_from(place.node)
            .map_err(|_| wrong(format!("CPU {at} is on node {}, above 65535", place.node)))?;
        found.push(Cpu {
            id: CpuId(at as u32),
            node: NodeId(node),
            socket: u16::try_from(place.socket).unwrap_or(u16::MAX),
            core,
            llc: None,
        });
    }
    let mut nodes = NodeMap::new();
    for (at, memory) in memory.iter().enumerate() {
        let id = NodeId(at as u16);
        let of_node: Vec<&Cpu> = found.iter().filter(|cpu| cpu.node == id).collect();
        if memory.is_none() && of_node.is_empty() {
            continue;
        }
        nodes.insert(
            id,
            Node {
                cpus: of_node.iter().map(|cpu| cpu.id).collect(),
                memory_bytes: memory.map_or(Bytes::ZERO, |memory| Bytes(memory.size)),
                memory_bandwidth: None,
                memory_ns: None,
                socket: of_node.first().map(|cpu| cpu.socket),
            },
        );
    }
    let rows = nodes.keys().map(|from| {
        let row = distances.get(usize::from(from.0));
        let to = nodes
            .keys()
            .map(|to| row.and_then(|row| row.get(usize::from(to.0))).copied());
        to.map(|distance| distance.unwrap_or(0)).collect()
    });
    let rows = rows.collect();
    let llcs = caches(&mut found, llc);
    let mut notes = vec!["as Xen's hypervisor sees it; dom0's kernel sees only a part of it".to_owned()];
    if !llcs.is_empty() {
        notes.push(
            "Xen does not report which CPUs share a cache; all CPUs of a node on one socket are assumed to"
                .to_owned(),
        );
    }
    Machine {
        name,
        memory_allowed: nodes.node_set(),
        isolated: CpuSet::new(),
        nodes,
        cpus: found,
        llcs,
        distances: Distances { rows },
        links: Vec::new(),
        routes: Vec::new(),
        devices: Vec::new(),
        notes,
        hardware: None,
    }
    .checked()
    .map_err(|error| wrong(error.to_string()))
}

/// Returns one last-level cache for each node and socket, if the size is known.
fn caches(cpus: &mut [Cpu], size: Option<Bytes>) -> Vec<Llc> {
    let Some(size_bytes) = size else { return Vec::new() };
    let mut groups: BTreeMap<(NodeId, u16), CpuSet> = BTreeMap::new();
    for cpu in cpus.iter() {
        groups.entry((cpu.node, cpu.socket)).or_default().insert(cpu.id);
    }
    let mut llcs = Vec::new();
    for (at, (key, of_group)) in groups.into_iter().enumerate() {
        let same = cpus.iter_mut().filter(|cpu| (cpu.node, cpu.socket) == key);
        same.for_each(|cpu| cpu.llc = Some(at as u32));
        llcs.push(Llc {
            cpus: of_group,
            size_bytes,
            ways: None,
            line_bytes: LINE_BYTES,
            replacement: None,
        });
    }
    llcs
}

/// Returns the size of the last-level cache, as reported for dom0's first CPU.
fn llc_bytes(root: &Path) -> Option<Bytes> {
    let caches = root.join("sys/devices/system/cpu/cpu0/cache");
    let of = |index: u32| {
        let text = std::fs::read_to_string(caches.join(format!("index{index}/size"))).ok()?;
        let kib: u64 = text.trim().strip_suffix('K')?.parse().ok()?;
        Some(Bytes(kib.checked_mul(1024)?)).filter(|bytes| *bytes != Bytes::ZERO)
    };
    // On every x86 server the third level is the last. Without a third level, no cache is shared.
    of(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(core: u32, socket: u32, node: u32) -> Option<CpuPlace> {
        Some(CpuPlace { core, socket, node })
    }

    fn memory(gib: u64) -> Option<NodeMemory> {
        Some(NodeMemory {
            size: gib << 30,
            free: gib << 29,
        })
    }

    #[test]
    fn sockets_cores_and_nodes_become_a_machine() {
        // Two sockets, each with two cores of two threads. CPU 7 is offline.
        let mut cpus: Vec<_> = (0..8).map(|cpu| place(cpu / 2 % 2, cpu / 4, cpu / 4)).collect();
        cpus[7] = None;
        let distances = vec![vec![10, 21], vec![21, 10]];
        let machine = built(
            "h".into(),
            &cpus,
            &[memory(4), memory(4)],
            &distances,
            Some(Bytes(1 << 20)),
        )
        .unwrap();
        assert_eq!(machine.cpu_set().to_string(), "0-6");
        assert_eq!(machine.cpus_of(&"1".parse().unwrap()).to_string(), "4-6");
        assert_eq!(
            (machine.core_count(NodeId(0)), machine.threads_per_core()),
            (2, 2)
        );
        assert_eq!(machine.distance(NodeId(0), NodeId(1)), Some(21));
        assert_eq!((machine.llcs.len(), machine.llcs_of(NodeId(1))), (2, vec![1]));
    }

    #[test]
    fn what_makes_no_machine_is_an_error() {
        let error = built(
            "h".into(),
            &[place(0, 0, 70_000)],
            &[memory(1)],
            &[vec![10]],
            None,
        )
        .unwrap_err();
        assert!(error.to_string().contains("70000"), "{error}");
        assert!(built("h".into(), &[], &[], &[], None).is_err());
    }
}
