//! Adds up the samples of each VM over a stretch of time.

use std::collections::BTreeMap;

use homenode_host::{Rates, Sample, VmRates, VmSample};
use homenode_machine::Machine;
use homenode_units::{Bytes, BytesPerSec, NodeId, NodeMap, NodeSet, Ns, Pages, VmId};

/// Maximum number of pieces of a stretch. If there would be more, pairs are merged.
const PIECES_MAX: usize = 256;
/// Initial length of a piece.
const PIECE: Ns = Ns::from_secs(5);
/// A VM whose runtime in its first sample is less than this had just been started.
const JUST_STARTED: Ns = Ns::from_secs(2);
/// A node with less than this share of a VM's pages counts as having none.
const PAGES_SHARE_MIN: f64 = 0.05;

/// Consecutive samples of one host.
#[derive(Clone, Debug)]
pub struct Seen {
    machine: Machine,
    last: Option<Sample>,
    /// When the first sample was taken.
    pub begun: Ns,
    /// Every life of every VM; a VM that leaves and returns has two lives.
    pub lives: Vec<Life>,
    /// Bytes that memory controllers moved, and LLC misses of all VMs in the same time; `None` if either is not counted.
    pub traffic: Option<(f64, f64)>,
}

/// A VM, from its first to its last sample.
#[derive(Clone, Debug)]
pub struct Life {
    /// The VM's id.
    pub id: VmId,
    /// The VM's last sample.
    pub last: VmSample,
    /// Largest number of online vCPUs.
    pub vcpus: u16,
    /// Largest memory size.
    pub memory: Bytes,
    /// Time of the VM's first sample.
    pub from: Ns,
    /// Time of the VM's last sample.
    pub to: Ns,
    /// Whether the VM had already run for a while when the stretch began.
    pub was_there: bool,
    /// The nodes of the VM's pages in its first sample; `None` if unknown, or if the pages were on every node.
    pub lay_on: Option<NodeSet>,
    /// Most memory that the guest had touched, if known.
    pub touched: Option<Bytes>,
    /// CPU time of each vCPU, in seconds.
    pub by_vcpu: BTreeMap<u16, f64>,
    /// Counts of each piece, in order.
    pub pieces: Vec<Counted>,
    piece: Ns,
}

/// Counts of a VM over some time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Counted {
    /// Duration in seconds.
    pub seconds: f64,
    /// CPU time in seconds.
    pub ran: f64,
    /// Seconds for which the VM's vCPUs were runnable but did not run, because of other VMs or a quota.
    pub waited: f64,
    /// CPU time of the samples in which instructions were counted.
    pub counted_ran: f64,
    /// Instructions.
    pub instructions: f64,
    /// LLC references.
    pub references: f64,
    /// LLC misses.
    pub misses: f64,
    /// Memory accesses whose node is known.
    pub accesses: f64,
    /// Local accesses among the accesses whose node is known.
    pub local: f64,
    /// Number of the accesses whose node is known that would be local if each vCPU used all of the VM's pages equally.
    pub met: f64,
    /// Bytes of an LLC that one thread held, weighted by LLC references.
    pub held: f64,
}

impl Counted {
    pub(super) fn add(&mut self, other: &Counted) {
        self.seconds += other.seconds;
        self.ran += other.ran;
        self.waited += other.waited;
        self.counted_ran += other.counted_ran;
        self.instructions += other.instructions;
        self.references += other.references;
        self.misses += other.misses;
        self.accesses += other.accesses;
        self.local += other.local;
        self.met += other.met;
        self.held += other.held;
    }
}

impl Life {
    /// Returns the sum of all pieces.
    pub fn whole(&self) -> Counted {
        let mut whole = Counted::default();
        self.pieces.iter().for_each(|piece| whole.add(piece));
        whole
    }

    /// Returns true if the VM was still present when the stretch ended.
    pub fn stayed(&self, seen: &Seen) -> bool {
        seen.last.as_ref().is_some_and(|sample| sample.at == self.to)
    }

    fn add(&mut self, at: Ns, counted: &Counted) {
        let place = usize::try_from(at.saturating_sub(self.from).0 / self.piece.0).unwrap_or(usize::MAX);
        if place >= PIECES_MAX {
            let halves = self.pieces.chunks(2).map(|two| {
                let mut one = Counted::default();
                two.iter().for_each(|piece| one.add(piece));
                one
            });
            self.pieces = halves.collect();
            self.piece = Ns(self.piece.0 * 2);
            return self.add(at, counted);
        }
        if self.pieces.len() <= place {
            self.pieces.resize(place + 1, Counted::default());
        }
        self.pieces[place].add(counted);
    }
}

impl Seen {
    /// Returns true if the host's kernel balanced NUMA memory in the last sample; false if unknown.
    pub fn is_balanced(&self) -> bool {
        let last = self.last.as_ref();
        last.is_some_and(|sample| sample.kernel.balances())
    }

    /// Creates an empty record for this machine.
    pub fn new(machine: &Machine) -> Seen {
        Seen {
            machine: machine.clone(),
            last: None,
            begun: Ns::ZERO,
            lives: Vec::new(),
            traffic: Some((0.0, 0.0)),
        }
    }

    /// Returns the duration of the stretch.
    pub fn lasted(&self) -> Ns {
        let end = self.last.as_ref().map_or(self.begun, |sample| sample.at);
        end.saturating_sub(self.begun)
    }

    /// Adds the next sample.
    pub fn take(&mut self, sample: Sample) {
        let rates = self
            .last
            .as_ref()
            .and_then(|last| Rates::between(&self.machine, last, &sample));
        if self.last.is_none() {
            self.begun = sample.at;
        }
        let is_first = self.last.is_none();
        let before = self.last.as_ref().map(|last| last.at);
        for vm in &sample.vms {
            let known = self
                .lives
                .iter()
                .rposition(|life| life.id == vm.id && Some(life.to) == before);
            let at = known.unwrap_or_else(|| {
                self.lives.push(Life::new(&self.machine, vm, sample.at, is_first));
                self.lives.len() - 1
            });
            let life = &mut self.lives[at];
            life.to = sample.at;
            life.last = vm.clone();
            life.vcpus = life
                .vcpus
                .max(vm.vcpus.iter().map(|vcpu| vcpu.index + 1).max().unwrap_or(0));
            life.memory = life.memory.max(vm.memory_bytes);
            life.touched = life.touched.max(vm.pages_touched().map(Pages::to_bytes));
        }
        if let Some(rates) = &rates {
            self.count(&sample, rates);
        }
        self.last = Some(sample);
    }

    fn count(&mut self, sample: &Sample, rates: &Rates) {
        let seconds = rates.period_ns.as_secs_f64();
        let misses: Option<f64> = rates.vms.iter().map(|vm| vm.llc_misses_per_s).sum();
        let bytes: Option<f64> = rates
            .nodes
            .values()
            .map(|node| node.bandwidth.map(BytesPerSec::as_f64))
            .sum();
        self.traffic = match (self.traffic, bytes, misses) {
            (Some((all, of)), Some(bytes), Some(misses)) => {
                Some((all + bytes * seconds, of + misses * seconds))
            }
            _ => None,
        };
        let fills = fills(&self.machine, sample, rates);
        for vm in &sample.vms {
            let Some(own) = rates.vm(vm.id) else { continue };
            let Some(life) = self
                .lives
                .iter_mut()
                .rfind(|life| life.id == vm.id && life.to == sample.at)
            else {
                continue;
            };
            for vcpu in &own.vcpus {
                *life.by_vcpu.entry(vcpu.index).or_default() += vcpu.running * seconds;
            }
            let held = held(&self.machine, vm, own, &fills);
            life.add(sample.at, &counted(&self.machine, vm, own, seconds, held));
        }
    }
}

impl Life {
    fn new(machine: &Machine, vm: &VmSample, at: Ns, is_first: bool) -> Life {
        let ran: Ns = vm.vcpus.iter().map(|vcpu| vcpu.running_ns).sum();
        let was_there = is_first && ran > JUST_STARTED;
        Life {
            id: vm.id,
            last: vm.clone(),
            vcpus: 0,
            memory: Bytes::ZERO,
            from: at,
            to: at,
            was_there,
            lay_on: vm
                .pages
                .as_ref()
                .filter(|_| was_there)
                .and_then(|pages| narrow(machine, pages)),
            touched: None,
            by_vcpu: BTreeMap::new(),
            pieces: Vec::new(),
            piece: PIECE,
        }
    }
}

/// Returns the nodes that hold the pages; `None` if these are all nodes with memory.
fn narrow(machine: &Machine, pages: &NodeMap<Pages>) -> Option<NodeSet> {
    let all: Pages = pages.values().copied().sum();
    let has = |(_, on): &(NodeId, &Pages)| on.0 as f64 > PAGES_SHARE_MIN * all.0 as f64;
    let on: NodeSet = pages.iter().filter(has).map(|(node, _)| node).collect();
    (!on.is_empty() && on != machine.memory_nodes()).then_some(on)
}

fn counted(machine: &Machine, vm: &VmSample, own: &VmRates, seconds: f64, held: f64) -> Counted {
    let of = |rate: Option<f64>| rate.unwrap_or(0.0) * seconds;
    let ran = own.cpus_used * seconds;
    let accesses = own
        .accesses_on
        .as_ref()
        .map_or(0.0, |on| on.values().map(|count| *count as f64).sum());
    // Unknown references are not zero references: without them, nothing counts as counted.
    let llc = own.llc_references_per_s.zip(own.llc_misses_per_s);
    let instructions = own.instructions_per_s.filter(|_| llc.is_some());
    let references = of(llc.map(|(references, _)| references));
    Counted {
        seconds,
        ran,
        waited: own
            .vcpus
            .iter()
            .map(|vcpu| vcpu.waited() + vcpu.throttled)
            .sum::<f64>()
            * seconds,
        counted_ran: instructions.map_or(0.0, |_| ran),
        instructions: of(instructions),
        references,
        misses: of(llc.map(|(_, misses)| misses)),
        accesses,
        local: own.local_access_ratio.unwrap_or(0.0) * accesses,
        met: met(machine, vm, own).unwrap_or(0.0) * accesses,
        held: held * references,
    }
}

/// Returns the share of accesses that would be local if each vCPU used all of the VM's pages equally.
fn met(machine: &Machine, vm: &VmSample, own: &VmRates) -> Option<f64> {
    let pages = vm.pages.as_ref()?;
    let all: Pages = pages.values().copied().sum();
    let mut ran = 0.0;
    let mut met = 0.0;
    for vcpu in &own.vcpus {
        let node = vm.vcpu(vcpu.index).and_then(|vcpu| machine.node_of(vcpu.cpu?));
        let here = node
            .and_then(|node| pages.get(node))
            .map_or(0.0, |pages| pages.0 as f64);
        ran += vcpu.running;
        met += vcpu.running * here / all.0.max(1) as f64;
    }
    (ran > 0.0).then(|| met / ran)
}

/// Returns, for each LLC, the misses per second of all VMs on it, which fill the LLC.
fn fills(machine: &Machine, sample: &Sample, rates: &Rates) -> Vec<f64> {
    let mut fills = vec![0.0; machine.llcs.len()];
    for own in &rates.vms {
        let Some(vm) = sample.vm(own.id) else { continue };
        let each = own.llc_misses_per_s.unwrap_or(0.0) / own.cpus_used.max(1e-9);
        for vcpu in &own.vcpus {
            if let Some(llc) = llc_of(machine, vm, vcpu.index) {
                fills[llc] += each * vcpu.running;
            }
        }
    }
    fills
}

fn llc_of(machine: &Machine, vm: &VmSample, vcpu: u16) -> Option<usize> {
    let cpu = machine.cpu(vm.vcpu(vcpu)?.cpu?)?;
    cpu.llc.map(|llc| llc as usize)
}

/// Returns the bytes of an LLC that one thread of a VM holds, if incoming lines evict all lines equally.
fn held(machine: &Machine, vm: &VmSample, own: &VmRates, fills: &[f64]) -> f64 {
    let each = own.llc_misses_per_s.unwrap_or(0.0) / own.cpus_used.max(1e-9);
    let (mut ran, mut held) = (0.0, 0.0);
    for vcpu in &own.vcpus {
        let Some(llc) = llc_of(machine, vm, vcpu.index) else {
            continue;
        };
        let share = if fills[llc] > 0.0 {
            (each / fills[llc]).min(1.0)
        } else {
            1.0
        };
        ran += vcpu.running;
        held += vcpu.running * share * machine.llcs[llc].size_bytes.as_f64();
    }
    held / f64::max(ran, 1e-9)
}
