//! Models `numad` 0.5 (version 20150602) for comparison. It is not meant for running a host.
//!
//! # Problem
//! A process whose threads and memory are on different nodes is slow. numad binds each large process to as few nodes as its
//! memory and CPU time need, and moves all of its memory there.
//!
//! # Terms
//! - *Process*: a VM, which is one process to the host. Its *CPU used* is the most seen in the last eight looks at the host,
//!   its *memory used* what it touched. Both are whole numbers, in hundredths of a CPU and in MiB.
//! - *Free* on a node: its memory that is free or droppable cache, and its CPUs' idle time since the last look. A core's
//!   second hyperthread counts as a fifth of a CPU.
//! - *Request* of a process: its CPU and memory used, each divided by a target utilisation of .85, but no more CPUs than it
//!   has vCPUs.
//! - *Magnitude* of a node for a request: (10 × memory needed + 4 × memory left over) × (6 × CPU needed + CPU left over).
//! - *Bound* process: numad assigned it to nodes before.
//!
//! # Algorithm
//! Every 15 s, or 5 s after something has moved:
//! 1. Candidates are processes that use more than 300 MiB and half a CPU. Those never bound come first, in descending order
//!    of CPU × memory. Then come the others, the larger first; but of two that are within a fifth of each other, the one that
//!    was bound longer ago comes first.
//! 2. Candidates are taken in this order. A candidate that was bound in the last 300 s is skipped, unless it fits one node,
//!    is on the node with the least free CPU or memory, and both CPU and memory would be more even if it moved from the node
//!    with least free to the one with most.
//! 3. [`nodes`] chooses nodes for the candidate's request. If it is already bound to these, and at most a tenth of its memory
//!    is elsewhere, nothing changes.
//! 4. Otherwise its vCPUs are bound to these nodes, and all of its memory moves there: again and again, all its memory on the
//!    other node that holds most of it goes to the chosen node that holds least of it. No other process is considered until
//!    the next look.
//!
//! # Properties (tests of the same names)
//! - `advice_is_that_of_the_real_numad`: 300 random hosts and requests, which Debian's numad answered on made-up `/sys` trees
//! - `an_impossible_request_gets_all_nodes`
//! - `advice_is_forgotten`
//! - `small_or_idle_vms_are_not_looked_at`
//! - `the_largest_cpu_times_memory_moves_first_and_one_at_a_time`
//! - `memory_moves_whole_and_at_once`
//! - `a_bound_vm_is_looked_at_again_after_300_s`
//! - `on_the_busiest_node_it_does_not_wait`
//! - `nine_tenths_in_place_are_enough`
//! - `between_looks_nothing_happens`
//! - `an_answer_is_some_of_the_nodes` (generated)
//!
//! # Sources
//! The manual page numad(8); the behaviour of Debian's numad 0.5+20150602-8+b1; its published source, read only for what it
//! computes.
//!
//! # Departures from the source, and why
//! - numad's 300 s run from the host's boot for processes never bound, so it does nothing on a fresh host. A twin's clock
//!   begins at 0, but its host is not meant to be fresh, so VMs never bound are considered at once.
//! - numad limits the request of a process named `qemu-kvm` to its vCPUs, but counts every thread of Debian's
//!   `qemu-system-x86` as a CPU. Here the limit applies to all VMs.
//! - numad overrides operators' pins if the kernel allows it. Here VMs with an operator's home, CPUs or pins are on numad's
//!   list of exclusions (`-x`).
//! - numad sets the CPUs of all threads of a VM and does not change the memory policy. [`Act::SetHome`] also sets the CPUs of
//!   the emulator's threads, but spreads memory that is touched later over the nodes instead of letting it follow the vCPU.
//! - numad's process table has no order; here VMs are in order of their ids before they are sorted. Nodes without memory are
//!   left out.
//! - numad's unthrottled `migrate_pages` is modelled as an [`Act::MovePages`] for all pages of a node at once.

pub mod nodes;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Act, Plan, View, VmView};
use homenode_machine::Machine;
use homenode_units::{Bytes, CpuId, NodeId, NodeMap, NodeSet, Ns, Pages, VmId};

use crate::placement::Supply;
use nodes::{Node, Request, Running, whole};

/// Name of this policy in plans.
pub const POLICY: &str = "numad";
// The following are constants of numad, not settings: with other values it would not be numad.
/// Time between looks while something moves.
pub const INTERVAL_MIN: Ns = Ns::from_secs(5);
/// Time between looks while nothing moves.
pub const INTERVAL_MAX: Ns = Ns::from_secs(15);
/// Time before the first look that can act.
const INTERVAL_FIRST: Ns = Ns::from_secs(2);
/// Time for which a bound process is usually left alone.
pub const BOUND_MIN: Ns = Ns::from_secs(300);
/// A candidate uses more CPU than this, in hundredths of a CPU.
pub const CPU_MIN: i64 = 50;
/// A candidate uses more memory than this, in MiB.
pub const MEMORY_MIN_MIB: i64 = 300;
/// Target utilisation of assigned resources, in percent.
const UTILISATION_PERCENT: i64 = 85;
/// Highest share of a bound process's memory that may be elsewhere, in percent.
const ELSEWHERE_MAX_PERCENT: i64 = 10;
/// What a core's second hyperthread is worth, in percent of a CPU.
const THREAD_PERCENT: i64 = 20;
/// Number of recent looks of which the highest CPU use counts.
const LOOKS: usize = 8;

/// What numad remembers: none of its advice, and VMs only while they run.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Time of the last look, and each CPU's busy time then.
    look: Option<(Ns, BTreeMap<CpuId, Ns>)>,
    /// Time of the next look.
    next: Next,
    vms: BTreeMap<VmId, Process>,
    told: BTreeSet<VmId>,
}

/// When numad looks again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Next {
    /// numad was just started.
    #[default]
    Started,
    /// Something is moving, and the interval begins when the move is over.
    AfterMove,
    /// At this time.
    At(Ns),
}

/// numad's record of a VM.
#[derive(Clone, Debug, Default)]
struct Process {
    /// When the VM was last seen with enough memory, and its CPU time then.
    seen: Option<(Ns, Ns)>,
    looks: [i64; LOOKS],
    looked: usize,
    cpus_used: i64,
    /// The nodes that the VM was bound to, and when.
    bound: Option<(NodeSet, Ns)>,
}

/// A process that may be bound in this look.
struct Candidate<'a> {
    vm: &'a VmView<'a>,
    request: Request,
    running: Running,
    bound_at: Option<Ns>,
}

/// Looks at the host if it is time to, and binds at most one VM.
pub fn plan(view: &View<'_>, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    state.vms.retain(|id, _| view.sample.vm(*id).is_some());
    state.told.retain(|id| view.sample.vm(*id).is_some());
    match state.next {
        Next::At(at) if view.at < at => return plan,
        Next::AfterMove => {
            look(view, state);
            state.next = Next::At(view.at + INTERVAL_MIN);
            return plan;
        }
        _ => {}
    }
    let is_first = state.next == Next::Started;
    let nodes = look(view, state);
    let candidates = candidates(view, state, &nodes);
    state.next = match is_first {
        true => Next::At(view.at + INTERVAL_FIRST),
        false => Next::At(view.at + INTERVAL_MAX),
    };
    if is_first || nodes.len() < 2 {
        return plan;
    }
    for candidate in &candidates {
        let id = candidate.vm.sample.id;
        let is_early = candidate.bound_at.is_some_and(|at| view.at < at + BOUND_MIN);
        if is_early && !gains_by_leaving(&nodes, candidate) {
            continue;
        }
        let target = nodes::pick(&nodes, candidate.request, Some(&candidate.running));
        let process = state.vms.get_mut(&id).expect("candidates are known");
        let is_there = candidate.bound_at.is_some()
            && target == candidate.running.nodes
            && candidate.elsewhere_percent(&nodes, &target) <= ELSEWHERE_MAX_PERCENT;
        process.bound = Some((target.clone(), view.at));
        if !is_there {
            bind(view, &nodes, candidate, &target, &mut state.told, &mut plan);
            state.next = Next::AfterMove;
            break;
        }
    }
    plan
}

/// Returns the free resources of each node with memory, and records the time and CPU times of this look.
fn look(view: &View<'_>, state: &mut State) -> Vec<Node> {
    let busy: BTreeMap<CpuId, Ns> = view.sample.cpus.iter().map(|cpu| (cpu.id, cpu.busy_ns)).collect();
    let before = state.look.replace((view.at, busy));
    let (_, busy) = state.look.as_ref().expect("just noted");
    let elapsed_ns = before
        .as_ref()
        .map_or(0, |(at, _)| view.at.0.saturating_sub(at.0));
    let idle_ns = |id: CpuId| -> u64 {
        let known = before
            .as_ref()
            .and_then(|(_, before)| busy.get(&id).zip(before.get(&id)));
        known.map_or(0, |(now, then)| {
            elapsed_ns.saturating_sub(now.0.saturating_sub(then.0))
        })
    };
    let threads = threads_per_core(view.machine);
    let distance = |a, b| view.machine.distance(a, b).map_or(10, i64::from);
    let ids: Vec<NodeId> = view
        .machine
        .memory_nodes()
        .difference(&view.drained)
        .iter()
        .collect();
    ids.iter()
        .map(|&id| {
            let cpus = view.cpus_of(id);
            let count = whole(cpus.len());
            let cores = count / threads;
            let seconds = count - cores;
            let total = cores * 100 + cores * (threads - 1) * THREAD_PERCENT;
            let idle: u64 = cpus.iter().map(idle_ns).sum();
            let idle = whole(idle.saturating_mul(100) / elapsed_ns.max(1));
            let free = idle - seconds * (100 - THREAD_PERCENT);
            let sample = view.sample.nodes.get(id).cloned().unwrap_or_default();
            Node {
                id,
                memory_mib: mib(sample.memory_total_bytes),
                free_mib: mib(sample.memory_free_bytes),
                cpus: total,
                cpus_free: free.clamp(0, total),
                distances: ids.iter().map(|to| distance(id, *to)).collect(),
            }
        })
        .collect()
}

fn mib(bytes: Bytes) -> i64 {
    whole(bytes.0 >> 20)
}

/// Returns the number of hyperthreads of the first core, as numad does.
fn threads_per_core(machine: &Machine) -> i64 {
    let Some(first) = machine.cpus.first() else {
        return 1;
    };
    let siblings = machine.cpus.iter().filter(|cpu| cpu.core == first.core);
    whole(siblings.count())
}

/// Step 1: records what each VM uses, and returns those that use enough, sorted.
fn candidates<'v>(view: &'v View<'v>, state: &mut State, nodes: &[Node]) -> Vec<Candidate<'v>> {
    let all: NodeSet = nodes.iter().map(|node| node.id).collect();
    let mut large = Vec::new();
    for vm in &view.vms {
        let process = state.vms.entry(vm.sample.id).or_default();
        let touched = vm.sample.pages_touched().map_or(0, |pages| mib(pages.to_bytes()));
        let settings = &vm.sample.settings;
        let is_excluded = !vm.managed() || vm.hands_off.is_some() || settings.home.is_some();
        // numad would move this VM away from the nodes that the operator bound it to.
        let is_bound = vm.sample.bound_to.is_some() || settings.cpus_allowed.is_some();
        if touched <= MEMORY_MIN_MIB || is_excluded || is_bound {
            process.seen = None;
            process.cpus_used = 0;
            continue;
        }
        process.see(
            view.at,
            vm.sample.vcpus.iter().map(|vcpu| vcpu.running_ns.0).sum(),
        );
        if process.cpus_used <= CPU_MIN {
            continue;
        }
        let pages = vm.sample.pages.as_ref().expect("some are touched");
        let lies = |node: &Node| mib(pages.get(node.id).copied().unwrap_or_default().to_bytes());
        let bound = process.bound.as_ref();
        let running = Running {
            nodes: bound.map_or_else(|| all.clone(), |(nodes, _)| nodes.clone()),
            memory_mib: nodes.iter().map(lies).collect(),
            used_mib: touched,
            cpus_used: process.cpus_used,
            has_enough_cpus: false,
        };
        large.push(Candidate {
            vm,
            request: request(vm, touched, process.cpus_used, nodes),
            bound_at: bound.map(|(_, at)| *at),
            running,
        });
    }
    let used: i64 = large.iter().map(|candidate| candidate.running.cpus_used).sum();
    let has_enough_cpus = used <= nodes.iter().map(|node| node.cpus).sum();
    for candidate in &mut large {
        candidate.running.has_enough_cpus = has_enough_cpus;
    }
    sorted(large)
}

impl Process {
    fn see(&mut self, at: Ns, cpu_ns: u64) {
        if let Some((before, then)) = self.seen.filter(|(before, _)| *before < at) {
            self.looked = (self.looked + 1) % LOOKS;
            let used = cpu_ns.saturating_sub(then.0);
            self.looks[self.looked] = whole(used.saturating_mul(100) / (at.0 - before.0));
            self.cpus_used = self.looks.iter().copied().max().unwrap_or(0);
        }
        self.seen = Some((at, Ns(cpu_ns)));
    }
}

/// Returns a VM's request. If the VM fills most of a node and may grow beyond it, its request is for the most memory that it
/// may have.
fn request(vm: &VmView<'_>, touched: i64, cpus_used: i64, nodes: &[Node]) -> Request {
    let size = vm
        .sample
        .balloon
        .map_or(vm.sample.memory_bytes, |balloon| balloon.maximum);
    let node_mib = nodes.first().map_or(0, |node| node.memory_mib);
    let memory = match mib(size) > node_mib && touched * 5 / 4 > node_mib {
        true => mib(size),
        false => touched,
    };
    let vcpus = whole(vm.sample.vcpus.len());
    Request {
        cpus: (cpus_used * 100 / UTILISATION_PERCENT).min(vcpus * 100),
        memory_mib: memory * 100 / UTILISATION_PERCENT,
    }
}

impl Candidate<'_> {
    fn magnitude(&self) -> i64 {
        self.running.cpus_used * self.running.used_mib
    }

    /// Whether this bound candidate is considered before the other.
    fn is_before(&self, other: &Self) -> bool {
        let (own, its) = (self.magnitude(), other.magnitude());
        own > its || (own >= 5 * (its - own) && self.bound_at <= other.bound_at)
    }

    /// Returns the share of the VM's memory that is on none of the target nodes, in percent.
    fn elsewhere_percent(&self, nodes: &[Node], target: &NodeSet) -> i64 {
        let lies = nodes.iter().zip(&self.running.memory_mib);
        let elsewhere: i64 = lies
            .filter(|(node, _)| !target.contains(node.id))
            .map(|(_, mib)| mib)
            .sum();
        100 * elsewhere / self.running.used_mib
    }
}

fn sorted(candidates: Vec<Candidate<'_>>) -> Vec<Candidate<'_>> {
    let (mut unbound, mut bound): (Vec<_>, Vec<_>) = candidates
        .into_iter()
        .partition(|candidate| candidate.bound_at.is_none());
    unbound.sort_by_key(|candidate| -candidate.magnitude());
    // "Within a fifth" is not an order relation, so which candidate comes first depends on the search.
    for at in 0..bound.len() {
        let first = (at + 1..bound.len()).fold(at, |first, other| {
            if bound[other].is_before(&bound[first]) {
                other
            } else {
                first
            }
        });
        bound.swap(at, first);
    }
    unbound.append(&mut bound);
    unbound
}

/// Step 2: whether a VM that fits one node would even the nodes out by leaving the fullest for the emptiest.
fn gains_by_leaving(nodes: &[Node], candidate: &Candidate<'_>) -> bool {
    let Running {
        nodes: on,
        used_mib,
        cpus_used,
        ..
    } = &candidate.running;
    let Request { cpus, memory_mib } = candidate.request;
    let evens_out = |free: fn(&Node) -> i64, used: i64, slack: i64| {
        let all = || nodes.iter().map(free);
        let mean = all().sum::<i64>() / whole(nodes.len());
        let (least, most) = (all().min().unwrap_or(0), all().max().unwrap_or(0));
        (least + used - mean).abs() + (most - used - mean).abs() < most - least - slack
    };
    let fullest = |free: fn(&Node) -> i64| nodes.iter().min_by_key(|node| free(node)).map(|node| node.id);
    let cpus_free = |node: &Node| node.cpus_free;
    let memory_free = |node: &Node| node.free_mib;
    let is_on = |node: Option<NodeId>| node.is_some_and(|node| on.contains(node));
    (is_on(fullest(cpus_free)) || is_on(fullest(memory_free)))
        && cpus < nodes[0].cpus
        && memory_mib < nodes[0].memory_mib
        && evens_out(cpus_free, *cpus_used, CPU_MIN)
        && evens_out(memory_free, *used_mib, 0)
}

/// Step 4: binds a VM to its nodes, and moves its memory there.
fn bind(
    view: &View<'_>,
    nodes: &[Node],
    candidate: &Candidate<'_>,
    target: &NodeSet,
    told: &mut BTreeSet<VmId>,
    plan: &mut Plan,
) {
    let vm = candidate.vm;
    let id = vm.sample.id;
    let Request { cpus, memory_mib } = candidate.request;
    let reason = format!(
        "it asks for {cpus} percent of a CPU and {memory_mib} MiB, and nodes {target} have the most of both free"
    );
    let home = Act::SetHome {
        nodes: target.clone(),
    }
    .on(id);
    plan.decide(POLICY, home, reason);
    let cpus = Supply::cpus_for(view, target, None);
    if !cpus.is_empty() {
        let vcpus = vm.sample.vcpus.iter().map(|vcpu| vcpu.index).collect();
        let pin = Act::PinVcpus { vcpus, cpus }.on(id);
        plan.decide(POLICY, pin, format!("its vCPUs are bound to nodes {target}"));
    }
    if let Some(why) = vm.memory_fixed() {
        if told.insert(id) {
            let message = format!("memory of VM {} stays where it is: {why}", vm.sample.name);
            plan.find(POLICY, Some(id), message);
        }
        return;
    }
    let pages = vm.sample.pages.clone().unwrap_or_default();
    for (from, to, pages_max) in steps(nodes, target, pages) {
        let action = Act::MovePages {
            from: NodeSet::one(from),
            to: NodeSet::one(to),
            pages_max,
        }
        .on(id);
        plan.decide(
            POLICY,
            action,
            format!("moving all {pages_max} on node {from} to node {to} at once"),
        );
    }
}

/// Returns moves that bring all pages onto the target, each from the other node with most pages to the target node with least.
fn steps(nodes: &[Node], target: &NodeSet, mut pages: NodeMap<Pages>) -> Vec<(NodeId, NodeId, Pages)> {
    for node in nodes {
        if pages.get(node.id).is_none() {
            pages.insert(node.id, Pages::ZERO);
        }
    }
    let mut steps = Vec::new();
    loop {
        let outside = pages.iter().filter(|(node, _)| !target.contains(*node));
        let most = outside.rev().max_by_key(|(_, pages)| **pages);
        let inside = pages.iter().filter(|(node, _)| target.contains(*node));
        // Of equal nodes the last is taken.
        let least = inside.rev().min_by_key(|(_, pages)| **pages);
        let Some(((from, &moved), (to, _))) = most.zip(least).filter(|((_, most), _)| most.0 > 0) else {
            return steps;
        };
        steps.push((from, to, moved));
        pages[to] += moved;
        pages[from] = Pages::ZERO;
    }
}
