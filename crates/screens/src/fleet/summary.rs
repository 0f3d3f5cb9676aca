//! Summarises a host in one line, from its picture alone.

use homenode_control::{Headroom, NodeStatus, Status, VmStatus};
use homenode_units::{Bytes, Ns};
use schemars::JsonSchema;
use serde::Serialize;

use crate::limits::{self, CONTROLLER, LINK, Level, NODE_WAITING};
use crate::pictures::Picture;
use crate::top::{Choice, load};

/// Only findings up to this age are counted.
const FINDINGS_AGE_MAX: Ns = Ns::from_secs(600);

/// A host's summary.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Summary {
    /// Number of VMs that run.
    pub vms_count: usize,
    /// Number of usable CPUs.
    pub cpus: usize,
    /// Number of CPUs that were busy during the last period.
    pub cpus_busy: Option<f64>,
    /// Memory of the host.
    pub memory_bytes: Bytes,
    /// The VM that is past the most limits; `None` if no VM is past any.
    pub worst_vm: Option<WorstVm>,
    /// The fullest resource.
    pub pressure: Option<Pressure>,
    /// Headroom for a VM, on the node with the most memory left.
    pub headroom_of_a_node: Option<Headroom>,
    /// Headroom for VMs on all nodes together.
    pub headroom: Option<Headroom>,
    /// Number of findings in the last ten minutes.
    pub findings_count: usize,
    /// The latest finding.
    pub finding: Option<String>,
    /// Sum of the levels of the worst VM's figures and of the host's resources.
    #[serde(skip)]
    pub trouble: usize,
}

/// The VM that is past the most limits.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct WorstVm {
    /// The VM's name.
    pub name: String,
    /// Number of vCPUs that waited during the last period.
    pub vcpus_waiting: Option<f64>,
    /// Share of the VM's memory accesses that were local.
    pub local_access_ratio: Option<f64>,
    /// Sum of the levels of the VM's figures.
    #[serde(skip)]
    pub trouble: usize,
}

/// The fullest resource of a host: the one with the worst level, and among equals the one with the highest load.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Pressure {
    /// Kind of the resource: `controller`, `link`, `cpus` or `memory`.
    pub what: &'static str,
    /// The resource's node, or the two nodes of a link.
    pub at: String,
    /// How full the resource is. For CPUs: waiting vCPUs divided by CPUs.
    pub load: f64,
    /// The level of the resource's load.
    #[serde(skip)]
    pub level: Level,
}

impl Summary {
    /// Summarises an agent's answer.
    pub fn of(picture: &Picture) -> Summary {
        let status = &picture.overview.status;
        let mut findings: Vec<&str> = Vec::new();
        for event in &picture.overview.events {
            if event.kind == "found" && event.age_ns <= FINDINGS_AGE_MAX {
                findings.push(&event.text);
            }
        }
        let rooms: Vec<Headroom> = status.nodes.iter().filter_map(|node| node.headroom).collect();
        let worst = Choice::default().of(status).first().map(|vm| worst(vm));
        let levels = pressures(status)
            .map(|pressure| pressure.level as usize)
            .sum::<usize>();
        let trouble = status.vms.iter().map(limits::trouble).max().unwrap_or(0) + levels;
        Summary {
            vms_count: status.vms.len(),
            cpus: status.nodes.iter().map(|node| node.cpus).sum(),
            cpus_busy: status.nodes.iter().map(|node| node.cpus_busy).sum(),
            memory_bytes: Bytes(status.nodes.iter().map(|node| node.memory_bytes.0).sum()),
            worst_vm: worst.filter(|worst| worst.trouble > 0),
            pressure: pressures(status).max_by(|a, b| a.level.cmp(&b.level).then(a.load.total_cmp(&b.load))),
            headroom_of_a_node: rooms.iter().copied().max_by_key(|room| room.memory_bytes),
            headroom: rooms.into_iter().reduce(together),
            findings_count: findings.len(),
            finding: findings.last().map(|text| (*text).to_owned()),
            trouble,
        }
    }
}

fn worst(vm: &VmStatus) -> WorstVm {
    WorstVm {
        name: vm.name.clone(),
        vcpus_waiting: vm.vcpus_waiting,
        local_access_ratio: vm.local_access_ratio,
        trouble: limits::trouble(vm),
    }
}

fn together(a: Headroom, b: Headroom) -> Headroom {
    let both = a.bandwidth_bytes_per_s.zip(b.bandwidth_bytes_per_s);
    Headroom {
        cpus: a.cpus + b.cpus,
        memory_bytes: a.memory_bytes + b.memory_bytes,
        bandwidth_bytes_per_s: both.map(|(a, b)| homenode_units::BytesPerSec(a.0 + b.0)),
    }
}

/// Returns the loads of controllers, links, CPUs and memory, as far as they are known.
fn pressures(status: &Status) -> impl Iterator<Item = Pressure> + '_ {
    let of_node = |node: &NodeStatus| {
        let at = node.node.to_string();
        let pressure = |what, load, level| Pressure {
            what,
            at: at.clone(),
            load,
            level,
        };
        let controller = load(node).map(|load| pressure("controller", load, CONTROLLER.level(load)));
        let waiting = node
            .vcpus_waiting
            .map(|waiting| waiting / node.cpus.max(1) as f64);
        let cpus = waiting.map(|share| pressure("cpus", share, NODE_WAITING.level(share)));
        let free = node.memory_free_bytes.as_f64() / node.memory_bytes.as_f64().max(1.0);
        let has_memory = node.memory_bytes.0 > 0;
        let memory = has_memory.then(|| pressure("memory", 1.0 - free, limits::free(node)));
        [controller, cpus, memory].into_iter().flatten()
    };
    let links = status.links.iter().filter_map(|link| {
        let load = link.busy?;
        Some(Pressure {
            what: "link",
            at: format!("{}-{}", link.from, link.to),
            load,
            level: LINK.level(load),
        })
    });
    status.nodes.iter().flat_map(of_node).chain(links)
}
