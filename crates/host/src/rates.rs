//! Rates between two samples. Only this module turns cumulative counters into figures per second, with a pure function.

use homenode_machine::Machine;
use homenode_units::{BytesPerSec, CpuId, CpuSet, NodeId, NodeMap, Ns, VmId};
use serde::Serialize;

use crate::sample::{Counters, Sample, VcpuSample, VmSample};

/// Activity between two samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Rates {
    /// Time between the samples.
    pub period_ns: Ns,
    /// For each CPU, ascending: the share of the period in which it was not idle, in [0, 1].
    pub cpus_busy: Vec<(CpuId, f64)>,
    /// Rates of each node.
    pub nodes: NodeMap<NodeRates>,
    /// Traffic in each direction between nodes, if counted.
    pub links: Vec<LinkRates>,
    /// VMs in both samples, ascending by id.
    pub vms: Vec<VmRates>,
}

/// One node over the period.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct NodeRates {
    /// Average number of the node's CPUs that were busy (3.5 = three and a half CPUs).
    pub cpus_busy: f64,
    /// Average number of vCPUs that waited on the node's run queues (Little's law: waiting time over time).
    pub vcpus_waiting: f64,
    /// Memory traffic of the node's controllers, if counted.
    pub bandwidth: Option<BytesPerSec>,
}

/// Traffic from one node to another over the period.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LinkRates {
    /// Source of the data.
    pub from: NodeId,
    /// Destination of the data.
    pub to: NodeId,
    /// Data rate.
    pub bandwidth: BytesPerSec,
}

/// One VM over the period.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmRates {
    /// The VM.
    pub id: VmId,
    /// vCPUs that are in both samples.
    pub vcpus: Vec<VcpuRates>,
    /// CPU time that the VM used, in CPUs (1.5 = one and a half CPUs).
    pub cpus_used: f64,
    /// LLC misses over references, in [0, 1] [TAVO, IV]; `None` if they are not counted, or there were no references.
    pub llc_miss_rate: Option<f64>,
    /// LLC misses per second; `None` if the PMU does not count at the LLC.
    pub llc_misses_per_s: Option<f64>,
    /// Share of the VM's memory accesses that were local, in [0, 1]; `None` if accesses are not counted, or there were none.
    pub local_access_ratio: Option<f64>,
    /// Memory accesses in the period, by the node that holds the page, if counted.
    pub accesses_on: Option<NodeMap<u64>>,
    /// Instructions per second over the period, summed over all its vCPUs; `None` without counters.
    pub instructions_per_s: Option<f64>,
    /// Unhalted cycles per second over the period, summed over all its vCPUs; `None` without counters.
    pub cycles_per_s: Option<f64>,
    /// LLC references per second over the period, summed over all its vCPUs; `None` if the PMU does not count at the LLC.
    pub llc_references_per_s: Option<f64>,
}

/// One vCPU over the period.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct VcpuRates {
    /// Position in the VM.
    pub index: u16,
    /// Node that the vCPU last ran on.
    pub node: Option<NodeId>,
    /// Share of the period in which the vCPU ran, in [0, 1].
    pub running: f64,
    /// Share of the period in which the vCPU waited for a CPU although it was allowed to run, in [0, 1]: run-queue delay less
    /// throttled time. `None` if the host does not know.
    pub waiting: Option<f64>,
    /// Share of the period in which a CPU quota throttled the vCPU, in [0, 1].
    pub throttled: f64,
    /// LLC misses over references, if counted.
    pub llc_miss_rate: Option<f64>,
}

/// A VM that wanted less of a CPU than this over a period ran too little for its speed to be known.
const SPEED_WANTED_MIN: f64 = 0.1;

/// Bytes of a cache line. One LLC miss moves one line on every machine that is modelled or supported so far.
pub const LINE_BYTES: f64 = 64.0;

/// Returns the imbalance of accesses by node: standard deviation over mean, as a ratio; `None` if there are no accesses
/// [Policies, section 3.5.2].
pub fn imbalance(accesses: &[f64]) -> Option<f64> {
    let count = accesses.len() as f64;
    let mean = accesses.iter().sum::<f64>() / count;
    let squares = accesses.iter().map(|own| (own - mean) * (own - mean));
    let variance = squares.sum::<f64>() / count;
    (mean > 0.0).then(|| variance.sqrt() / mean)
}

impl Rates {
    /// Returns the rates between two samples of one host; `None` if no time passed. A VM, vCPU or counter has no rates if only
    /// one sample has it, if it could not be read for one of them, or if it ran backwards (restarted VM).
    pub fn between(machine: &Machine, prev: &Sample, cur: &Sample) -> Option<Rates> {
        let period = cur.at.0.checked_sub(prev.at.0).filter(|ns| *ns > 0).map(Ns)?;
        let cpus_busy: Vec<(CpuId, f64)> = cur
            .cpus
            .iter()
            .filter_map(|cpu| {
                let before = prev.cpus.binary_search_by_key(&cpu.id, |c| c.id).ok()?;
                Some((cpu.id, share(prev.cpus[before].busy_ns, cpu.busy_ns, period)?))
            })
            .collect();
        let vms: Vec<VmRates> = cur
            .vms
            .iter()
            .filter_map(|vm| VmRates::between(machine, prev.vm(vm.id)?, vm, period))
            .collect();
        let nodes = node_rates(machine, prev, cur, period, &cpus_busy, &vms);
        let links = cur
            .links
            .iter()
            .filter_map(|link| {
                let before = prev
                    .links
                    .iter()
                    .find(|l| (l.from, l.to) == (link.from, link.to))?;
                let bytes = link.bytes.checked_sub(before.bytes)?;
                Some(LinkRates {
                    from: link.from,
                    to: link.to,
                    bandwidth: per_second(bytes, period),
                })
            })
            .collect();
        Some(Rates {
            period_ns: period,
            cpus_busy,
            nodes,
            links,
            vms,
        })
    }

    /// Returns the VM's rates, if it is in both samples.
    pub fn vm(&self, id: VmId) -> Option<&VmRates> {
        self.vms
            .binary_search_by_key(&id, |vm| vm.id)
            .ok()
            .map(|at| &self.vms[at])
    }

    /// Returns how many physical cores of each node are idle: each of a core's usable hyperthreads was busy for less than
    /// `busy_max` of the period. A core without a usable hyperthread does not count.
    pub fn cores_idle(&self, machine: &Machine, usable: &CpuSet, busy_max: f64) -> NodeMap<u32> {
        let mut idle: NodeMap<u32> = machine.nodes.map(|_, _| 0);
        // Core numbers are unique on the host, so sorting by them brings siblings together.
        let mut threads: Vec<(u32, NodeId, f64)> = Vec::with_capacity(self.cpus_busy.len());
        for (id, busy) in self.cpus_busy.iter().filter(|(id, _)| usable.contains(*id)) {
            threads.extend(machine.cpu(*id).map(|cpu| (cpu.core, cpu.node, *busy)));
        }
        threads.sort_by_key(|(core, ..)| *core);
        for core in threads.chunk_by(|a, b| a.0 == b.0) {
            if core.iter().all(|(.., busy)| *busy < busy_max) {
                idle[core[0].1] += 1;
            }
        }
        idle
    }

    /// Returns the share of a directed link's bandwidth that is in use; `None` if use or bandwidth is unknown.
    pub fn link_use(&self, machine: &Machine, from: NodeId, to: NodeId) -> Option<f64> {
        let link = machine
            .links
            .iter()
            .find(|link| (link.from, link.to) == (from, to))?;
        let max = link.bandwidth.filter(|max| max.0 > 0)?;
        let used = self
            .links
            .iter()
            .find(|link| (link.from, link.to) == (from, to))?;
        Some(used.bandwidth.as_f64() / max.as_f64())
    }

    /// Returns the data rate between two nodes in the busier direction; `None` if it is not counted.
    pub fn between_nodes(&self, a: NodeId, b: NodeId) -> Option<BytesPerSec> {
        self.links
            .iter()
            .filter(|l| (l.from, l.to) == (a, b) || (l.from, l.to) == (b, a))
            .map(|l| l.bandwidth)
            .max()
    }
}

impl VmRates {
    /// Returns the CPUs that the VM wanted: its vCPUs ran on them, waited for them, or were denied them by a CPU quota.
    pub fn cpus_wanted(&self) -> f64 {
        let wanted = |vcpu: &VcpuRates| vcpu.running + vcpu.waited() + vcpu.throttled;
        self.vcpus.iter().map(wanted).sum()
    }

    /// Returns the VM's speed: instructions per second of CPU time that it wanted. Instructions per second of the wall clock
    /// grow with the guest's work; this figure does not, but falls with everything that slows the VM down, waiting included.
    /// `None` without counters, or if the VM wanted less than a tenth of a CPU.
    pub fn speed(&self) -> Option<f64> {
        let wanted = self.cpus_wanted();
        Some(self.instructions_per_s? / wanted).filter(|_| wanted >= SPEED_WANTED_MIN)
    }

    /// Returns the unhalted cycles per instruction; `None` without counters, or if the VM ran no instruction.
    pub fn cycles_per_instruction(&self) -> Option<f64> {
        let instructions = self.instructions_per_s.filter(|rate| *rate > 0.0)?;
        Some(self.cycles_per_s? / instructions)
    }

    fn between(machine: &Machine, prev: &VmSample, cur: &VmSample, period: Ns) -> Option<VmRates> {
        // Counters that were read at another time say nothing about this period.
        if prev.is_unread || cur.is_unread {
            return None;
        }
        let vcpus: Vec<VcpuRates> = cur
            .vcpus
            .iter()
            .filter_map(|vcpu| VcpuRates::between(machine, prev.vcpu(vcpu.index)?, vcpu, period))
            .collect();
        let counted = || {
            cur.vcpus
                .iter()
                .filter_map(|vcpu| counter_deltas(prev.vcpu(vcpu.index)?, vcpu))
        };
        let (references, misses) = counted().fold((0u64, 0u64), |(r, m), (dr, dm)| {
            (r.saturating_add(dr), m.saturating_add(dm))
        });
        let has_llc = counted().next().is_some();
        let accesses = prev.accesses.as_ref().zip(cur.accesses.as_ref());
        let ratio_of = accesses.and_then(|(a, b)| {
            let (local, remote) = (b.local.checked_sub(a.local)?, b.remote.checked_sub(a.remote)?);
            ratio(local, local.saturating_add(remote))
        });
        let accesses_on = accesses.and_then(|(a, b)| {
            let since = |(node, now): (NodeId, &u64)| Some((node, now.checked_sub(*a.on.get(node)?)?));
            b.on.iter().map(since).collect::<Option<NodeMap<u64>>>()
        });
        let sum_of = |count: fn(&Counters) -> Option<u64>| -> Option<f64> {
            let since = |vcpu: &VcpuSample| {
                let before = count(&prev.vcpu(vcpu.index)?.counters?)?;
                count(&vcpu.counters?)?.checked_sub(before)
            };
            let mut all = cur.vcpus.iter().map(since);
            let all = all.try_fold(0u64, |sum, of| Some(sum.saturating_add(of?)));
            all.map(|count| count as f64 / period.as_secs_f64())
        };
        Some(VmRates {
            id: cur.id,
            cpus_used: vcpus.iter().map(|v| v.running).sum(),
            llc_miss_rate: ratio(misses, references),
            llc_misses_per_s: has_llc.then(|| misses as f64 / period.as_secs_f64()),
            local_access_ratio: ratio_of,
            accesses_on,
            instructions_per_s: sum_of(|counters| Some(counters.instructions)),
            cycles_per_s: sum_of(|counters| Some(counters.cycles)),
            llc_references_per_s: sum_of(|counters| counters.llc_references).filter(|_| has_llc),
            vcpus,
        })
    }

    /// Returns the memory bandwidth estimated from the VM's LLC misses, since no PMU counts bandwidth per VM [TAVO, V.B]. It
    /// covers reads only.
    pub fn bandwidth(&self) -> Option<BytesPerSec> {
        self.llc_misses_per_s
            .map(|misses| BytesPerSec((misses * LINE_BYTES) as u64))
    }

    /// Returns the share of a VM's CPU time on each node. A vCPU's time counts for its node in the sample at the period's end. If
    /// no vCPU ran, all vCPUs count alike. Zero everywhere if no vCPU's node is known.
    pub fn cpu_shares(&self, machine: &Machine, vm: &VmSample) -> NodeMap<f64> {
        let mut cpus: NodeMap<f64> = machine.nodes.map(|_, _| 0.0);
        for vcpu in &vm.vcpus {
            let ran = self.vcpus.iter().find(|own| own.index == vcpu.index);
            if let Some(node) = vcpu.cpu.and_then(|cpu| machine.node_of(cpu)) {
                cpus[node] += ran.map_or(0.0, |own| own.running) + 1e-6;
            }
        }
        shares(machine, &cpus)
    }

    /// Returns the share of the VM's memory accesses that each node serves: as counted, else according to its pages, else to CPU
    /// time.
    pub fn access_shares(&self, machine: &Machine, vm: &VmSample) -> NodeMap<f64> {
        let counted = self.accesses_on.as_ref();
        let counted = counted.filter(|on| on.values().any(|count| *count > 0));
        match (counted, &vm.pages) {
            (Some(on), _) => shares(machine, &on.map(|_, count| *count as f64)),
            (None, Some(pages)) => shares(machine, &pages.map(|_, pages| pages.0 as f64)),
            (None, None) => self.cpu_shares(machine, vm),
        }
    }

    /// Returns the estimated memory traffic that each node serves: [`VmRates::bandwidth`] split by [`VmRates::access_shares`].
    pub fn traffic_by_node(&self, machine: &Machine, vm: &VmSample) -> Option<NodeMap<BytesPerSec>> {
        let all = self.bandwidth()?.as_f64();
        let shares = self.access_shares(machine, vm);
        Some(shares.map(|_, share| BytesPerSec((all * share) as u64)))
    }
}

/// Returns each node's share of the sum; zeros if the sum is 0.
fn shares(machine: &Machine, of: &NodeMap<f64>) -> NodeMap<f64> {
    let all: f64 = of.values().sum();
    machine
        .nodes
        .map(|node, _| of.get(node).copied().unwrap_or(0.0) / all.max(1e-9))
}

impl VcpuRates {
    /// Returns the share of the period in which the vCPU waited; 0 if the host does not know.
    pub fn waited(&self) -> f64 {
        self.waiting.unwrap_or(0.0)
    }

    fn between(machine: &Machine, prev: &VcpuSample, cur: &VcpuSample, period: Ns) -> Option<VcpuRates> {
        let waited = match (prev.waiting_ns, cur.waiting_ns) {
            (Some(prev), Some(cur)) => Some(cur.0.checked_sub(prev.0)?),
            _ => None,
        };
        let throttled = cur.throttled_ns.0.checked_sub(prev.throttled_ns.0)?;
        Some(VcpuRates {
            index: cur.index,
            node: cur.cpu.and_then(|cpu| machine.node_of(cpu)),
            running: share(prev.running_ns, cur.running_ns, period)?,
            waiting: waited
                .map(|waited| (waited.saturating_sub(throttled) as f64 / period.as_f64()).min(1.0)),
            throttled: (throttled as f64 / period.as_f64()).min(1.0),
            llc_miss_rate: counter_deltas(prev, cur)
                .and_then(|(references, misses)| ratio(misses, references)),
        })
    }
}

fn node_rates(
    machine: &Machine,
    prev: &Sample,
    cur: &Sample,
    period: Ns,
    cpus_busy: &[(CpuId, f64)],
    vms: &[VmRates],
) -> NodeMap<NodeRates> {
    let mut nodes: NodeMap<NodeRates> = machine.nodes.map(|node, _| NodeRates {
        bandwidth: match (prev.nodes.get(node), cur.nodes.get(node)) {
            (Some(a), Some(b)) => a
                .memory_traffic_bytes
                .zip(b.memory_traffic_bytes)
                .and_then(|(a, b)| b.checked_sub(a))
                .map(|bytes| per_second(bytes, period)),
            _ => None,
        },
        ..NodeRates::default()
    });
    for (id, busy) in cpus_busy {
        if let Some(cpu) = machine.cpu(*id) {
            nodes[cpu.node].cpus_busy += busy;
        }
    }
    for vcpu in vms.iter().flat_map(|vm| &vm.vcpus) {
        if let Some(rates) = vcpu.node.and_then(|node| nodes.get_mut(node)) {
            rates.vcpus_waiting += vcpu.waited();
        }
    }
    nodes
}

fn counter_deltas(prev: &VcpuSample, cur: &VcpuSample) -> Option<(u64, u64)> {
    let (a, b) = (prev.counters?, cur.counters?);
    Some((
        b.llc_references?.checked_sub(a.llc_references?)?,
        b.llc_misses?.checked_sub(a.llc_misses?)?,
    ))
}

fn share(prev: Ns, cur: Ns, period: Ns) -> Option<f64> {
    Some((cur.0.checked_sub(prev.0)? as f64 / period.as_f64()).min(1.0))
}

/// Returns `part` / `whole`, at most 1: counters are read one after the other, so misses may exceed references.
fn ratio(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| (part as f64 / whole as f64).min(1.0))
}

fn per_second(bytes: u64, period: Ns) -> BytesPerSec {
    BytesPerSec((bytes as f64 / period.as_secs_f64()) as u64)
}

#[cfg(test)]
mod tests;
