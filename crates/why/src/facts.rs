//! Converts samples to rows of figures, one row per step. The mean of several steps is the mean of each figure.

use std::collections::BTreeMap;

use homenode_host::{Rates, Sample, VmRates, VmSample};
use homenode_machine::Machine;
use homenode_units::{BytesPerSec, CpuSet, NodeMap, Ns, Pages, VmId};

use crate::Measure;

/// Share of a distance reported by firmware that is found in measured latencies, as in `policy::predict`.
const DISTANCE_REAL: f64 = 0.6;
/// Weight of the queue in the latency of a controller or a link: `1 + q u / (1 - u)`, as in `policy::predict`.
const QUEUE: f64 = 0.12;
/// Upper limit of the assumed utilization.
const BUSY_MAX: f64 = 0.97;
/// A step in which the VM wants less than this share of a CPU is ignored.
const WANTED_MIN: f64 = 0.02;

/// A figure of the VM in a step, per second unless stated otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Of {
    /// CPUs that the VM's vCPUs wanted: they ran on them, waited for them, or were denied them by a quota.
    Wanted,
    /// CPUs that the vCPUs ran on.
    Ran,
    /// CPUs that the vCPUs waited for.
    Waited,
    /// CPUs that a quota denied to the vCPUs.
    Throttled,
    /// Instructions.
    Instructions,
    /// Cycles.
    Cycles,
    /// LLC references.
    References,
    /// LLC misses.
    Misses,
    /// Latency of an average access on an idle host, relative to a local access.
    Latency,
    /// Additional latency from busy controllers.
    ControllerWait,
    /// Additional latency from busy links.
    LinkWait,
    /// Share of the VM's accesses that are local; if accesses are not counted, share of its pages.
    Local,
    /// Utilization of the sibling hyperthreads of the VM's vCPUs.
    Siblings,
    /// Guest faults that needed a disk.
    Faults,
    /// Pages that moved between nodes.
    Moved,
    /// Number of CPUs that the VM may run on.
    Allowed,
    /// Memory of the guest, in bytes.
    Memory,
    /// How many of the CPUs that the VM may run on were used by processes outside VMs.
    HostRan,
    /// CPUs used by processes outside VMs, of the sibling hyperthreads of the VM's vCPUs.
    HostBeside,
}

const SCALARS: usize = Of::HostBeside as usize + 1;

/// Layout of a row, given the numbers of nodes and links.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    pub nodes: usize,
    pub links: usize,
}

/// A figure of another VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OfOther {
    /// How many of the CPUs that this VM may run on were used by the other VM.
    Ran,
    /// CPUs that the other VM used, of the siblings of this VM's vCPUs.
    Beside,
    /// LLC references of the other VM in caches that this VM uses.
    References,
    /// LLC misses of the other VM in these caches.
    Misses,
}

const OTHER_SCALARS: usize = OfOther::Misses as usize + 1;

impl Layout {
    fn node_use(self) -> usize {
        SCALARS
    }
    fn accesses(self) -> usize {
        SCALARS + self.nodes
    }
    fn outside(self) -> usize {
        SCALARS + 2 * self.nodes
    }
    fn link_use(self) -> usize {
        SCALARS + 3 * self.nodes
    }
    fn own_traffic(self) -> usize {
        self.link_use() + self.links
    }
    fn others(self) -> usize {
        self.own_traffic() + self.nodes + self.links
    }
    fn other(self, at: usize) -> usize {
        self.others() + at * (OTHER_SCALARS + self.nodes + self.links)
    }
}

/// Averages over a span of time.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    /// End of the span.
    pub at: Ns,
    /// Length of the span.
    pub lasted: Ns,
    /// Whether the VM's instructions were counted.
    is_counted: bool,
    layout: Layout,
    row: Vec<f64>,
}

impl Step {
    /// Returns the start of the span.
    pub(crate) fn began(&self) -> Ns {
        self.at.saturating_sub(self.lasted)
    }

    pub(crate) fn get(&self, of: Of) -> f64 {
        self.row[of as usize]
    }

    /// Returns the CPU time wanted per instruction, in seconds. If instructions are not counted, returns the time wanted per
    /// time run.
    pub(crate) fn cost(&self) -> f64 {
        self.get(Of::Wanted) / self.done()
    }

    /// Returns the instructions per second of CPU time wanted. If they are not counted, returns the time run per time wanted.
    pub(crate) fn speed(&self) -> f64 {
        self.done() / self.get(Of::Wanted)
    }

    fn done(&self) -> f64 {
        let is_counted = self.measure() == Measure::InstructionsPerCpuS;
        self.get(if is_counted { Of::Instructions } else { Of::Ran })
    }

    /// Returns the measure of [`Step::speed`].
    pub(crate) fn measure(&self) -> Measure {
        match self.get(Of::Instructions) > 0.0 {
            true => Measure::InstructionsPerCpuS,
            false => Measure::ShareRan,
        }
    }

    /// Returns each node's utilization of its controllers' bandwidth.
    pub(crate) fn node_use(&self) -> &[f64] {
        &self.row[self.layout.node_use()..][..self.layout.nodes]
    }

    /// Returns the share of the VM's accesses that go to each node.
    pub(crate) fn accesses(&self) -> &[f64] {
        &self.row[self.layout.accesses()..][..self.layout.nodes]
    }

    /// Returns each node's traffic that no VM accounts for, in bytes per second.
    pub(crate) fn outside(&self) -> &[f64] {
        &self.row[self.layout.outside()..][..self.layout.nodes]
    }

    /// Returns each link's utilization.
    pub(crate) fn link_use(&self) -> &[f64] {
        &self.row[self.layout.link_use()..][..self.layout.links]
    }

    /// Returns the VM's traffic to each node, then over each link, in bytes per second.
    pub(crate) fn own_traffic(&self) -> &[f64] {
        &self.row[self.layout.own_traffic()..][..self.layout.nodes + self.layout.links]
    }

    pub(crate) fn of_other(&self, other: usize, of: OfOther) -> f64 {
        self.row[self.layout.other(other) + of as usize]
    }

    /// Returns the share of another VM's LLC references that miss.
    pub(crate) fn miss_ratio_of(&self, other: usize) -> f64 {
        self.of_other(other, OfOther::Misses) / self.of_other(other, OfOther::References).max(1.0)
    }

    /// Returns another VM's traffic to each node, then over each link, in bytes per second.
    pub(crate) fn traffic_of(&self, other: usize) -> &[f64] {
        &self.row[self.layout.other(other) + OTHER_SCALARS..][..self.layout.nodes + self.layout.links]
    }

    /// Returns the mean of several steps, weighted by their lengths.
    pub(crate) fn mean(steps: &[Step]) -> Step {
        Step::mean_of(&steps.iter().collect::<Vec<_>>())
    }

    pub(crate) fn mean_of(steps: &[&Step]) -> Step {
        let last = steps[steps.len() - 1];
        let all: f64 = steps.iter().map(|step| step.lasted.as_f64()).sum();
        let mut row = vec![0.0; last.row.len()];
        for step in steps {
            let weight = step.lasted.as_f64() / all;
            for (mean, value) in row.iter_mut().zip(&step.row) {
                *mean += weight * value;
            }
        }
        Step {
            at: last.at,
            lasted: Ns(all as u64),
            is_counted: last.is_counted,
            layout: last.layout,
            row,
        }
    }
}

/// Everything that is known about one VM over time.
#[derive(Debug)]
pub(crate) struct Facts {
    pub vm: VmId,
    /// The VM's name; `None` if no sample has the VM.
    pub name: Option<String>,
    /// All other VMs, in the order of their figures in a row.
    pub others: Vec<(VmId, String)>,
    pub steps: Vec<Step>,
    /// When the VM's allowed CPUs, its quota, the place of its memory or its memory size changed, and which of these changed.
    pub changes: Vec<(Ns, Change)>,
    /// Whether the VM has booked a permit.
    pub has_permit: bool,
    has_counters: bool,
    has_traffic: bool,
}

/// A property of a VM that another program can change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// The CPUs that the VM's vCPUs may run on.
    Pins,
    /// The VM's CPU quota.
    Quota,
    /// The nodes of many of the VM's pages.
    Pages,
    /// The VM's memory size, which the balloon changes.
    Memory,
}

/// Properties of the host that are the same in all steps.
struct Host<'a> {
    machine: &'a Machine,
    layout: Layout,
    /// For each pair of nodes, the latency of an access from the first node to memory of the second, relative to a local access.
    ratio: Vec<f64>,
    /// For each pair of nodes, the links on the way from the second node to the first.
    routes: Vec<Vec<usize>>,
    bandwidth: Vec<f64>,
}

impl Host<'_> {
    fn of(machine: &Machine) -> Host<'_> {
        let ids: Vec<_> = machine.nodes.iter().map(|(id, _)| id).collect();
        let pairs = || ids.iter().flat_map(|to| ids.iter().map(move |from| (*to, *from)));
        let ratio = |(to, from)| {
            let distance = machine.distance(to, from).unwrap_or(10).max(10);
            1.0 + DISTANCE_REAL * (f64::from(distance) / 10.0 - 1.0)
        };
        let bandwidth = machine.nodes.values();
        Host {
            machine,
            layout: Layout {
                nodes: ids.len(),
                links: machine.links.len(),
            },
            ratio: pairs().map(ratio).collect(),
            routes: pairs()
                .map(|(to, from)| machine.route(from, to).unwrap_or_default())
                .collect(),
            bandwidth: bandwidth
                .map(|node| node.memory_bandwidth.map_or(0.0, BytesPerSec::as_f64))
                .collect(),
        }
    }
}

/// Where a VM's accesses go in a step.
struct Place {
    accesses: Vec<f64>,
    local: f64,
    /// Share of accesses for each pair of nodes, from vCPUs on the first node to memory on the second.
    remote: Vec<f64>,
}

impl Place {
    fn of(host: &Host<'_>, vm: &VmSample, rates: &VmRates) -> Place {
        let nodes = host.layout.nodes;
        let list = |shares: NodeMap<f64>| shares.values().copied().collect::<Vec<f64>>();
        let cpus = list(rates.cpu_shares(host.machine, vm));
        let accesses = list(rates.access_shares(host.machine, vm));
        let met: f64 = cpus.iter().zip(&accesses).map(|(a, b)| a * b).sum();
        let is_seen = cpus.iter().any(|share| *share > 0.0);
        let local = rates.local_access_ratio;
        let local = local.unwrap_or(if is_seen { met } else { 1.0 });
        let mut remote: Vec<f64> = (0..nodes * nodes)
            .map(|at| match at / nodes == at % nodes {
                true => 0.0,
                false => cpus[at / nodes] * accesses[at % nodes],
            })
            .collect();
        let all: f64 = remote.iter().sum();
        if all > 0.0 {
            remote.iter_mut().for_each(|share| *share *= (1.0 - local) / all);
        } else if nodes > 1 {
            // No memory is remote from where the vCPUs last ran, so attribute the counted remote accesses evenly to the other
            // nodes.
            let elsewhere = remote.iter_mut().enumerate();
            for (at, share) in elsewhere.filter(|(at, _)| at / nodes != at % nodes) {
                *share = accesses[at % nodes] * (1.0 - local) / (nodes - 1) as f64;
            }
        }
        Place {
            accesses,
            local,
            remote,
        }
    }

    /// Returns the traffic to each node, then over each link, if the VM transfers `bytes` per second.
    fn traffic(&self, host: &Host<'_>, bytes: f64) -> Vec<f64> {
        let mut traffic: Vec<f64> = self.accesses.iter().map(|share| share * bytes).collect();
        traffic.resize(host.layout.nodes + host.layout.links, 0.0);
        for (route, share) in host.routes.iter().zip(&self.remote) {
            for link in route {
                traffic[host.layout.nodes + link] += share * bytes;
            }
        }
        traffic
    }
}

/// Returns a VM's memory traffic in bytes per second.
fn bytes(rates: &VmRates) -> f64 {
    rates.bandwidth().map_or(0.0, BytesPerSec::as_f64)
}

fn queue(busy: f64) -> f64 {
    let busy = busy.clamp(0.0, BUSY_MAX);
    QUEUE * busy / (1.0 - busy)
}

impl Facts {
    /// Builds the VM's steps from `begin` on, each at least `apart` long.
    pub(crate) fn of(machine: &Machine, samples: &[Sample], vm: VmId, (begin, apart): (Ns, Ns)) -> Facts {
        let host = Host::of(machine);
        let mut others: BTreeMap<VmId, String> = BTreeMap::new();
        let mut facts = Facts {
            vm,
            name: None,
            others: Vec::new(),
            steps: Vec::new(),
            changes: Vec::new(),
            has_permit: false,
            has_counters: false,
            has_traffic: false,
        };
        for seen in samples.iter().flat_map(|sample| &sample.vms) {
            if seen.id == vm {
                facts.name.get_or_insert_with(|| seen.name.clone());
                facts.has_permit |= seen.settings.permit.is_some();
            } else {
                others.entry(seen.id).or_insert_with(|| seen.name.clone());
            }
        }
        facts.others = others.into_iter().collect();
        let mut before: Option<&Sample> = None;
        for sample in samples.iter().filter(|sample| sample.at >= begin) {
            let Some(last) = before else {
                before = Some(sample);
                continue;
            };
            if sample.at.saturating_sub(last.at) < apart {
                continue;
            }
            before = Some(sample);
            let (Some(was), Some(is)) = (last.vm(vm), sample.vm(vm)) else {
                continue;
            };
            facts.note_changes(sample.at, was, is);
            if let Some(rates) = Rates::between(machine, last, sample) {
                let step = facts.step(&host, (last, sample), &rates, (was, is));
                facts.steps.extend(step);
            }
        }
        // In a step in which a vCPU was added nothing was counted, so the step cannot be compared with others.
        if facts.has_counters {
            facts.steps.retain(|step| step.is_counted);
        }
        facts
    }

    /// Returns what limits the answer.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if !self.has_counters {
            notes.push(
                "instructions or LLC misses are not counted: only waiting and throttling can be detected"
                    .to_owned(),
            );
        } else if !self.has_traffic {
            notes.push(
                "traffic of memory controllers is not counted: they are never named as the cause".to_owned(),
            );
        }
        notes
    }

    fn note_changes(&mut self, at: Ns, was: &VmSample, is: &VmSample) {
        let allowed = |vm: &VmSample| {
            vm.vcpus
                .iter()
                .map(|vcpu| vcpu.affinity.clone())
                .collect::<Vec<_>>()
        };
        let quota = |vm: &VmSample| vm.vcpus.iter().map(|vcpu| vcpu.quota).collect::<Vec<_>>();
        let mut note = |is_so: bool, change: Change| self.changes.extend(is_so.then_some((at, change)));
        note(allowed(was) != allowed(is), Change::Pins);
        note(quota(was) != quota(is), Change::Quota);
        note(was.memory_bytes != is.memory_bytes, Change::Memory);
        note(moved(was, is) * 100.0 > total(is), Change::Pages);
    }

    fn step(
        &mut self,
        host: &Host<'_>,
        (last, sample): (&Sample, &Sample),
        rates: &Rates,
        (was, is): (&VmSample, &VmSample),
    ) -> Option<Step> {
        let own = rates.vm(self.vm)?;
        let layout = host.layout;
        let mut row = vec![0.0; layout.other(self.others.len())];
        time_of(own, &mut row)?;
        self.has_counters |= is_counted(own);
        counts_of(own, &mut row);
        let place = Place::of(host, is, own);
        memory_of(host, &place, (was, is), rates, &mut row);

        let ground = Ground::of(host.machine, is, own);
        let busy_on = |cpus: &CpuSet| {
            let on = rates.cpus_busy.iter().filter(|(id, _)| cpus.contains(*id));
            on.map(|(_, busy)| *busy).sum::<f64>()
        };
        let beside_busy = busy_on(&ground.beside);
        row[Of::Allowed as usize] = ground.allowed.len() as f64;
        row[Of::Siblings as usize] = beside_busy / (ground.beside.len() as f64).max(1.0);
        let nodes = rates.nodes.values();
        let traffic: Vec<Option<f64>> = nodes
            .map(|node| node.bandwidth.map(BytesPerSec::as_f64))
            .collect();
        self.has_traffic |= traffic.iter().any(Option::is_some);
        let traffic: Vec<f64> = traffic.iter().map(|bytes| bytes.unwrap_or(0.0)).collect();
        let own_traffic = place.traffic(host, bytes(own));
        let mut rest = Rest {
            ran: busy_on(&ground.allowed) - ran_on(is, own, &ground.allowed),
            beside: beside_busy - ran_on(is, own, &ground.beside),
            traffic: traffic.clone(),
        };
        for (at, (id, _)) in self.others.iter().enumerate() {
            if let (Some(other), Some(theirs), Some(_)) = (sample.vm(*id), rates.vm(*id), last.vm(*id)) {
                let row = &mut row[layout.other(at)..];
                rest.take(host, &ground, (other, theirs), row);
            }
        }
        rest.take_traffic(&own_traffic);
        row[Of::HostRan as usize] = rest.ran.max(0.0);
        row[Of::HostBeside as usize] = rest.beside.max(0.0);

        waits(host, &place, &traffic, rates, &mut row);
        let mut put = |begin: usize, values: &[f64]| row[begin..][..values.len()].copy_from_slice(values);
        put(layout.accesses(), &place.accesses);
        put(layout.outside(), &rest.traffic);
        put(layout.own_traffic(), &own_traffic);
        Some(Step {
            at: sample.at,
            lasted: rates.period_ns,
            is_counted: is_counted(own),
            layout,
            row,
        })
    }
}

/// Writes how the VM's vCPUs spent their time. Returns `None` if they wanted too little time.
fn time_of(own: &VmRates, row: &mut [f64]) -> Option<()> {
    let sum = |of: fn(&homenode_host::VcpuRates) -> f64| own.vcpus.iter().map(of).sum::<f64>();
    let (ran, waited, throttled) = (
        sum(|v| v.running),
        sum(homenode_host::VcpuRates::waited),
        sum(|v| v.throttled),
    );
    if ran + waited + throttled < WANTED_MIN {
        return None;
    }
    row[Of::Wanted as usize] = ran + waited + throttled;
    row[Of::Ran as usize] = ran;
    row[Of::Waited as usize] = waited;
    row[Of::Throttled as usize] = throttled;
    Some(())
}

/// Returns whether hardware counters say how fast the VM was, and what it did to its caches. Without the latter, losses to them
/// would be blamed on something else.
fn is_counted(own: &VmRates) -> bool {
    own.instructions_per_s.is_some() && own.llc_references_per_s.is_some() && own.llc_misses_per_s.is_some()
}

/// Writes what hardware counters counted for the VM.
fn counts_of(own: &VmRates, row: &mut [f64]) {
    row[Of::Instructions as usize] = own.instructions_per_s.unwrap_or(0.0);
    row[Of::Cycles as usize] = own.cycles_per_s.unwrap_or(0.0);
    row[Of::References as usize] = own.llc_references_per_s.unwrap_or(0.0);
    row[Of::Misses as usize] = own.llc_misses_per_s.unwrap_or(0.0);
}

/// Writes where the VM's memory is, and what happened to it between two samples.
fn memory_of(
    host: &Host<'_>,
    place: &Place,
    (was, is): (&VmSample, &VmSample),
    rates: &Rates,
    row: &mut [f64],
) {
    let seconds = rates.period_ns.as_secs_f64();
    let far = host.ratio.iter().zip(&place.remote);
    row[Of::Local as usize] = place.local;
    row[Of::Latency as usize] = place.local + far.map(|(ratio, share)| ratio * share).sum::<f64>();
    row[Of::Faults as usize] = faults(was, is) / seconds;
    row[Of::Moved as usize] = moved(was, is) / seconds;
    row[Of::Memory as usize] = is.memory_bytes.as_f64();
}

/// Writes how busy controllers and links are, and how long the VM's accesses wait for them.
fn waits(host: &Host<'_>, place: &Place, traffic: &[f64], rates: &Rates, row: &mut [f64]) {
    let node_use: Vec<f64> = traffic
        .iter()
        .zip(&host.bandwidth)
        .map(|(bytes, max)| bytes / max.max(1.0) * f64::from(u8::from(*max > 0.0)))
        .collect();
    let link_use = |link: &homenode_machine::Link| {
        let busy = rates.link_use(host.machine, link.from, link.to);
        busy.unwrap_or(0.0)
    };
    let link_use: Vec<f64> = host.machine.links.iter().map(link_use).collect();
    let wait = place.accesses.iter().zip(&node_use);
    row[Of::ControllerWait as usize] = wait.map(|(share, busy)| share * queue(*busy)).sum();
    row[Of::LinkWait as usize] = host
        .routes
        .iter()
        .zip(&place.remote)
        .map(|(route, share)| share * route.iter().map(|link| queue(link_use[*link])).sum::<f64>())
        .sum();
    row[host.layout.node_use()..][..node_use.len()].copy_from_slice(&node_use);
    row[host.layout.link_use()..][..link_use.len()].copy_from_slice(&link_use);
}

/// The CPUs and caches that a VM uses, and that other VMs may use as well.
struct Ground {
    /// CPUs that the VM may run on.
    allowed: CpuSet,
    /// Sibling hyperthreads of the CPUs that the VM ran on.
    beside: CpuSet,
    /// The share of the VM's time in each LLC.
    llcs: Vec<f64>,
}

impl Ground {
    fn of(machine: &Machine, vm: &VmSample, rates: &VmRates) -> Ground {
        let mut allowed = CpuSet::new();
        vm.vcpus
            .iter()
            .for_each(|vcpu| allowed = allowed.union(&vcpu.affinity));
        Ground {
            allowed,
            beside: siblings(machine, vm),
            llcs: llc_shares(machine, vm, rates),
        }
    }
}

/// The host's use of resources that no VM accounts for.
struct Rest {
    /// How many of the CPUs that the VM may run on were used.
    ran: f64,
    /// CPUs used, of the siblings of the VM's vCPUs.
    beside: f64,
    /// Traffic of each node.
    traffic: Vec<f64>,
}

impl Rest {
    /// Writes another VM's use into its figures, and subtracts it from the rest.
    fn take(
        &mut self,
        host: &Host<'_>,
        ground: &Ground,
        (vm, rates): (&VmSample, &VmRates),
        row: &mut [f64],
    ) {
        let (here, next) = (
            ran_on(vm, rates, &ground.allowed),
            ran_on(vm, rates, &ground.beside),
        );
        self.ran -= here;
        self.beside -= next;
        let shared: f64 = llc_shares(host.machine, vm, rates)
            .iter()
            .zip(&ground.llcs)
            .map(|(a, b)| a * b)
            .sum();
        row[OfOther::Ran as usize] = here;
        row[OfOther::Beside as usize] = next;
        row[OfOther::References as usize] = shared * rates.llc_references_per_s.unwrap_or(0.0);
        row[OfOther::Misses as usize] = shared * rates.llc_misses_per_s.unwrap_or(0.0);
        let traffic = Place::of(host, vm, rates).traffic(host, bytes(rates));
        self.take_traffic(&traffic);
        row[OTHER_SCALARS..][..traffic.len()].copy_from_slice(&traffic);
    }

    fn take_traffic(&mut self, traffic: &[f64]) {
        for (left, bytes) in self.traffic.iter_mut().zip(traffic) {
            *left -= bytes;
        }
    }
}

/// Returns how many CPUs' worth of time a VM ran on these CPUs, assuming that each vCPU stayed on its last CPU.
fn ran_on(vm: &VmSample, rates: &VmRates, cpus: &CpuSet) -> f64 {
    let on = |own: &&homenode_host::VcpuRates| {
        let vcpu = vm.vcpu(own.index);
        vcpu.is_some_and(|vcpu| match vcpu.cpu {
            Some(cpu) => cpus.contains(cpu),
            None => vcpu.affinity.is_subset(cpus),
        })
    };
    rates.vcpus.iter().filter(on).map(|own| own.running).sum()
}

/// Returns the sibling hyperthreads of the CPUs that the VM's vCPUs last ran on.
fn siblings(machine: &Machine, vm: &VmSample) -> CpuSet {
    let own: Vec<_> = vm
        .vcpus
        .iter()
        .filter_map(|vcpu| machine.cpu(vcpu.cpu?))
        .collect();
    let beside = |cpu: &&homenode_machine::Cpu| {
        own.iter().any(|mine| mine.core == cpu.core && mine.id != cpu.id)
            && own.iter().all(|mine| mine.id != cpu.id)
    };
    machine.cpus.iter().filter(beside).map(|cpu| cpu.id).collect()
}

/// Returns the share of a VM's time in each LLC.
fn llc_shares(machine: &Machine, vm: &VmSample, rates: &VmRates) -> Vec<f64> {
    let mut shares = vec![0.0; machine.llcs.len()];
    for own in &rates.vcpus {
        let cpu = vm.vcpu(own.index).and_then(|vcpu| machine.cpu(vcpu.cpu?));
        if let Some(llc) = cpu.and_then(|cpu| cpu.llc) {
            shares[llc as usize] += own.running;
        }
    }
    let all: f64 = shares.iter().sum();
    shares.iter_mut().for_each(|share| *share /= all.max(1e-9));
    shares
}

fn faults(was: &VmSample, is: &VmSample) -> f64 {
    let guest = |vm: &VmSample| vm.balloon.and_then(|balloon| balloon.guest);
    let (Some(was), Some(is)) = (guest(was), guest(is)) else {
        return 0.0;
    };
    let since = |a: Option<u64>, b: Option<u64>| Some(b?.saturating_sub(a?) as f64);
    let pages = |bytes: Option<homenode_units::Bytes>| bytes.map(|bytes| bytes.to_pages().0);
    since(was.major_faults, is.major_faults)
        .or_else(|| since(pages(was.swapped_in), pages(is.swapped_in)))
        .unwrap_or(0.0)
}

/// Returns how many pages moved between nodes: those that nodes gained, or those that nodes lost, whichever are fewer.
fn moved(was: &VmSample, is: &VmSample) -> f64 {
    let (Some(was), Some(is)) = (&was.pages, &is.pages) else {
        return 0.0;
    };
    let (mut came, mut left) = (0.0, 0.0);
    for (node, now) in is.iter() {
        let before = was.get(node).copied().unwrap_or(Pages(0));
        came += now.0.saturating_sub(before.0) as f64;
        left += before.0.saturating_sub(now.0) as f64;
    }
    f64::min(came, left)
}

fn total(vm: &VmSample) -> f64 {
    let pages = vm.pages.as_ref();
    pages.map_or(0.0, |pages| pages.values().map(|on| on.0 as f64).sum())
}
