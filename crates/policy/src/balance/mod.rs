//! NUMA-aware vCPU scheduling between nodes [TAVO, section V.D]. Within a node, the kernel's scheduler decides.
//!
//! # Problem
//! A VM's vCPUs are confined to its home, so they wait if the home is overloaded, even while CPUs elsewhere are idle. Running
//! on a remote node is slower than at home, but better than waiting.
//!
//! # Terms
//! - *Waiting* vCPUs of a node: the run-queue delay of VMs' threads there per unit of time (Little's law), without the time
//!   for which a quota throttled them, rounded to a whole number. It is measured, not guessed.
//! - *Idle cores* of a node: physical cores that VMs may use and that have no busy hyperthread.
//! - *Away* vCPU: its affinity holds no CPU of its VM's home. The affinity in force is the only record, so a restarted agent
//!   knows it too.
//! - *Cycle*: one call of [`plan`].
//!
//! # Algorithm
//! 0. Return: an away vCPU goes home once a core idles there, or if home is the least loaded node. If a guest is shown its NUMA
//!    location, each of its vCPUs runs on one home node at a time, at first the one with its virtual node's memory
//!    ([`VmView::seat`]): otherwise the kernel would move the vCPU between home nodes at will, faster than any guest can follow.
//! 1. Balance: there is an imbalance only if one node has waiting vCPUs while another has idle cores.
//! 2. The source is the node with most waiting vCPUs, the destination the one with most idle cores. Of several such pairs,
//!    the one whose link carries least traffic is taken.
//! 3. The number of vCPUs that move is the lesser of waiting vCPUs and idle cores.
//! 4. vCPUs whose home is the destination move first, then those with the lowest LLC miss rate. Their affinity becomes the
//!    destination node.
//! 5. Re-home: a VM with vCPUs away in more than 8 of the last 10 cycles ([`Config::cycles`]) is placed again
//!    ([`crate::placement`]); its memory follows in budgets ([`crate::repatriate`]).
//! 6. Relieve: if VMs together fill a node's memory controllers ([`Config::full`]) in more than 8 of the last 10 cycles, the
//!    one with least memory is placed again. Only nodes are considered where it would meet less traffic of other VMs, by at
//!    least a quarter of the bandwidth ([`Config::gain_min`]).
//!
//! # Properties (tests of the same name)
//! - `no_waiting_or_no_idle_core_means_no_move`
//! - `moves_the_lesser_of_waiting_and_idle`
//! - `a_tie_between_pairs_goes_to_the_quietest_link`
//! - `vcpus_that_go_home_come_first_then_least_miss_rate`
//! - `throttled_time_is_not_waiting`
//! - `a_vcpu_returns_when_home_has_an_idle_core`
//! - `a_vcpu_of_a_guest_that_follows_sits_on_one_home_node_and_moves_between_them`
//! - `nine_cycles_of_ten_away_re_home_eight_do_not`
//! - `a_home_chosen_by_the_operator_never_changes`
//! - `of_two_vms_that_fill_a_node_one_leaves_for_an_empty_one`
//! - `nobody_leaves_a_full_node_for_nothing`
//!
//! # Departures from the source, and why
//! - Returning comes first, and an idle core that a returning vCPU takes is not lent again in the same cycle.
//! - A node is not a source if the only VMs that wait there may not be moved.
//! - Without LLC counters, the vCPU that waits most moves first.
//! - Step 6 is our addition. A VM's bandwidth is unknown when it is placed, so two VMs that need much may share a node
//!   without ever waiting for a CPU, and the paper re-homes only VMs that wait.
//! - The paper moves active vCPUs. Here a vCPU is active if it used or wanted at least [`Config::active_min`] of the period.

mod crowd;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Act, Plan, Rates, View, VmView};
use homenode_units::{BadSetting, CpuSet, NodeId, NodeMap, NodeSet, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::{SHARE, SOME_SHARE};
use crate::demand::History;
use crate::placement::{self, Home, Supply};

/// Name of this policy in plans.
pub const POLICY: &str = "balance";

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Share of the period that a vCPU must have run or waited to count as active, in (0, 1].
    pub active_min: f64,
    /// A core is idle, and may be lent, if its busiest hyperthread was busy for less than this share of the period; in (0, 1].
    pub core_idle_max: f64,
    /// Number of cycles remembered for each VM, 1 to 16.
    #[serde(alias = "epochs")]
    pub cycles: u32,
    /// A VM is re-homed if it was away, or crowded, in more than this number of the remembered cycles; at most
    /// [`Config::cycles`].
    #[serde(alias = "away_epochs_max")]
    pub away_cycles_max: u32,
    /// Controllers of a node count as full if at least this share of its bandwidth is in use, 0 to 1.
    pub full: f64,
    /// To be worth moving, a VM must use at least this share of a node's bandwidth, and must meet less traffic after the move
    /// by as much, 0 to 1.
    pub gain_min: f64,
}

impl Default for Config {
    /// Numbers of cycles are those of \[TAVO, V.D\]. Memory behind controllers that count as full has one and a half times
    /// the latency.
    fn default() -> Config {
        Config {
            active_min: 0.1,
            core_idle_max: 0.1,
            cycles: 10,
            away_cycles_max: 8,
            full: 0.8,
            gain_min: 0.25,
        }
    }
}

homenode_units::settings! {
    Config {
        active_min: SOME_SHARE,
        core_idle_max: SOME_SHARE,
        cycles: 1..=u16::BITS,
        away_cycles_max: 0..=u16::BITS,
        full: SHARE,
        gain_min: SHARE,
    } ordered
}

fn ordered(config: &Config) -> Result<(), BadSetting> {
    let most = ("away_cycles_max", config.away_cycles_max);
    BadSetting::unless_ordered(most, ("cycles", config.cycles))
}

/// All settings for lending vCPUs and changing homes.
#[derive(Clone, Copy, Debug)]
pub struct Settings<'a> {
    /// Settings for choosing nodes and CPUs.
    pub placement: &'a placement::Config,
    /// Settings for balancing.
    pub balance: &'a Config,
}

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    vms: BTreeMap<VmId, Cycles>,
    told: BTreeSet<VmId>,
}

/// The last cycles of a VM, one bit each, the newest lowest. `away`: a vCPU was away; `crowded`: the VM should have left a
/// crowded home.
#[derive(Clone, Copy, Debug, Default)]
struct Cycles {
    away: u16,
    crowded: u16,
}

/// Adds a cycle to those remembered, and returns how many of them are set.
fn note(cycles: &mut u16, remembered: u32, now: bool) -> u32 {
    *cycles = (*cycles << 1 | u16::from(now)) & (u16::MAX >> (u16::BITS - remembered));
    cycles.count_ones()
}

/// Supply and demand of nodes in this cycle.
struct Loads {
    waiting: NodeMap<u32>,
    idle: NodeMap<u32>,
    /// Busy CPUs and waiting vCPUs per usable CPU of a node.
    load: NodeMap<f64>,
}

/// Lends CPUs of idle nodes to vCPUs of overloaded ones, returns vCPUs home, and re-homes VMs that stay away.
pub fn plan(
    view: &View<'_>,
    settings: Settings<'_>,
    history: &History,
    placement: &mut placement::State,
    state: &mut State,
) -> Plan {
    let mut plan = Plan::new(view.version);
    let Some(rates) = view.rates else { return plan };
    let re_homed = re_home(view, rates, settings, history, placement, state, &mut plan);
    schedule(view, rates, settings, &re_homed, &mut plan);
    plan
}

/// Runs only steps 0 to 4: vCPUs go to other nodes and return, and no home changes.
pub fn plan_vcpus(view: &View<'_>, settings: Settings<'_>) -> Plan {
    let mut plan = Plan::new(view.version);
    if let Some(rates) = view.rates {
        schedule(view, rates, settings, &BTreeSet::new(), &mut plan);
    }
    plan
}

fn schedule(
    view: &View<'_>,
    rates: &Rates,
    settings: Settings<'_>,
    re_homed: &BTreeSet<VmId>,
    plan: &mut Plan,
) {
    let usable = &view.cpus;
    let mut loads = Loads {
        waiting: waiting(view, rates, settings.balance, re_homed),
        idle: rates.cores_idle(view.machine, usable, settings.balance.core_idle_max),
        load: rates.nodes.map(|id, n| {
            let cpus = view
                .machine
                .nodes
                .get(id)
                .map_or(0, |node| node.cpus.intersection(usable).len());
            if cpus == 0 {
                f64::INFINITY
            } else {
                (n.cpus_busy + n.vcpus_waiting) / cpus as f64
            }
        }),
    };
    let mut moved: BTreeSet<(VmId, u16)> = BTreeSet::new();
    take_seats(view, re_homed, &mut moved, plan);
    return_home(view, re_homed, &mut loads, &mut moved, plan);
    lend(view, settings, re_homed, &mut loads, &moved, plan);
}

/// Returns the VMs that the policy may act on.
fn movable<'v>(view: &'v View<'_>, re_homed: &BTreeSet<VmId>) -> impl Iterator<Item = &'v VmView<'v>> {
    let free = |vm: &&VmView<'_>| vm.managed() && vm.home.is_some() && vm.hands_off.is_none();
    view.vms
        .iter()
        .filter(free)
        .filter(|vm| !re_homed.contains(&vm.sample.id))
}

/// Returns the number of waiting vCPUs per node. A node counts as 0 if no VM that the policy may move waits noticeably there:
/// otherwise a node that cannot be helped would remain the source for ever.
fn waiting(view: &View<'_>, rates: &Rates, config: &Config, re_homed: &BTreeSet<VmId>) -> NodeMap<u32> {
    let mut movable_waiting: NodeMap<f64> = view.machine.nodes.map(|_, _| 0.0);
    for vcpu in movable(view, re_homed).flat_map(|vm| vm.rates.iter().flat_map(|rates| &rates.vcpus)) {
        if let Some(sum) = vcpu.node.and_then(|node| movable_waiting.get_mut(node)) {
            *sum += vcpu.waited();
        }
    }
    movable_waiting.map(|node, movable| match rates.nodes.get(node) {
        Some(all) if *movable >= config.active_min => all.vcpus_waiting.round() as u32,
        _ => 0,
    })
}

/// Step 0 of the algorithm, for vCPUs of guests that are shown their location: a vCPU that may run on several nodes is confined
/// to one.
fn take_seats(
    view: &View<'_>,
    re_homed: &BTreeSet<VmId>,
    moved: &mut BTreeSet<(VmId, u16)>,
    plan: &mut Plan,
) {
    for vm in movable(view, re_homed).filter(|vm| vm.layout.is_some()) {
        for vcpu in &vm.sample.vcpus {
            let mut nodes = vcpu.affinity.iter().filter_map(|cpu| view.machine.node_of(cpu));
            let first = nodes.next();
            if nodes.all(|node| Some(node) == first) {
                continue;
            }
            let Some(seat) = vm.seat(vcpu.index) else { continue };
            let cpus = target_cpus(view, vm, seat);
            if cpus.is_empty() {
                continue;
            }
            moved.insert((vm.sample.id, vcpu.index));
            let action = Act::PinVcpus {
                vcpus: vec![vcpu.index],
                cpus,
            }
            .on(vm.sample.id);
            let reason = format!(
                "its guest is told its NUMA topology, so vCPU {} stays on node {seat} with the memory of its virtual node",
                vcpu.index
            );
            plan.decide(POLICY, action, reason);
        }
    }
}

/// Step 0 of the algorithm: away vCPUs return home.
fn return_home(
    view: &View<'_>,
    re_homed: &BTreeSet<VmId>,
    loads: &mut Loads,
    moved: &mut BTreeSet<(VmId, u16)>,
    plan: &mut Plan,
) {
    let least_loaded = loads
        .load
        .iter()
        .min_by(|a, b| a.1.total_cmp(b.1))
        .map(|(node, _)| node);
    for vm in movable(view, re_homed) {
        let home = vm.home.expect("movable VMs have a home");
        for vcpu in &vm.sample.vcpus {
            let Some(away) = vm.away_node(view.machine, vcpu.index) else {
                continue;
            };
            let cpus_at = |node: &NodeId| target_cpus(view, vm, *node);
            let is_idle = |node: &NodeId| loads.idle.get(*node).is_some_and(|idle| *idle > 0);
            let mut usable = home.iter().filter(|node| !cpus_at(node).is_empty());
            let (node, why) = match (usable.find(is_idle), least_loaded) {
                (Some(node), _) => {
                    loads.idle[node] -= 1;
                    (node, format!("home node {node} has an idle core"))
                }
                (None, Some(node)) if home.contains(node) && !cpus_at(&node).is_empty() => {
                    (node, format!("home node {node} is the least loaded of all"))
                }
                _ => continue,
            };
            let cpus = cpus_at(&node);
            moved.insert((vm.sample.id, vcpu.index));
            let action = Act::PinVcpus {
                vcpus: vec![vcpu.index],
                cpus,
            }
            .on(vm.sample.id);
            plan.decide(
                POLICY,
                action,
                format!("vCPU {} returns from node {away}: {why}", vcpu.index),
            );
        }
    }
}

/// Steps 1 to 4 of the algorithm: vCPUs of overloaded nodes get idle CPUs of another node.
fn lend(
    view: &View<'_>,
    settings: Settings<'_>,
    re_homed: &BTreeSet<VmId>,
    loads: &mut Loads,
    moved: &BTreeSet<(VmId, u16)>,
    plan: &mut Plan,
) {
    let Some((source, destination)) = source_and_destination(view, loads) else {
        return;
    };
    let (waiting, idle) = (loads.waiting[source], loads.idle[destination]);
    let mut candidates: Vec<Candidate<'_>> = movable(view, re_homed)
        .flat_map(|vm| {
            vm.rates
                .iter()
                .flat_map(|rates| &rates.vcpus)
                .map(move |rates| (vm, rates))
        })
        .filter(|(vm, vcpu)| {
            let to = target_cpus(view, vm, destination);
            // A vCPU that may already run on the destination gains nothing.
            let moves = !to.is_empty() && vm.sample.vcpu(vcpu.index).is_some_and(|seen| seen.affinity != to);
            let active = vcpu.running + vcpu.waited() >= settings.balance.active_min;
            vcpu.node == Some(source) && active && moves && !moved.contains(&(vm.sample.id, vcpu.index))
        })
        .map(|(vm, vcpu)| Candidate {
            vm,
            index: vcpu.index,
            goes_home: vm.home.is_some_and(|home| home.contains(destination)),
            miss_rate: vcpu.llc_miss_rate,
            waiting: vcpu.waited(),
        })
        .collect();
    candidates.sort_by(Candidate::order);
    for candidate in candidates.iter().take(waiting.min(idle) as usize) {
        let Candidate {
            vm,
            index,
            goes_home,
            miss_rate,
            ..
        } = candidate;
        let cpus = target_cpus(view, vm, destination);
        let chosen = match (goes_home, miss_rate) {
            (true, _) => "its home is there".to_owned(),
            (false, Some(rate)) => format!(
                "it has the lowest LLC miss rate of the vCPUs there, {:.1} percent",
                rate * 100.0
            ),
            (false, None) => "LLC misses are not counted here, and it waits the longest".to_owned(),
        };
        let reason = format!(
            "vCPU {index} moves from node {source} ({waiting} waiting) to node {destination} ({idle} cores idle): {chosen}"
        );
        plan.decide(
            POLICY,
            Act::PinVcpus {
                vcpus: vec![*index],
                cpus,
            }
            .on(vm.sample.id),
            reason,
        );
    }
}

/// Returns where a vCPU may run after it moves to a node. If the node is part of its home, that is all of the home, unless
/// its guest is shown its location.
fn target_cpus(view: &View<'_>, vm: &VmView<'_>, node: NodeId) -> CpuSet {
    match vm.home.filter(|home| vm.layout.is_none() && home.contains(node)) {
        Some(home) => placement::cpus_at_home(view, vm, home),
        None => Supply::cpus_for(
            view,
            &NodeSet::one(node),
            vm.sample.settings.cpus_allowed.as_ref(),
        ),
    }
}

/// A vCPU that could move in step 4.
struct Candidate<'a> {
    vm: &'a VmView<'a>,
    index: u16,
    goes_home: bool,
    miss_rate: Option<f64>,
    waiting: f64,
}

impl Candidate<'_> {
    fn order(&self, other: &Self) -> std::cmp::Ordering {
        let rate = |c: &Self| c.miss_rate.unwrap_or(f64::INFINITY);
        (other.goes_home.cmp(&self.goes_home))
            .then(rate(self).total_cmp(&rate(other)))
            .then(other.waiting.total_cmp(&self.waiting))
            .then(self.vm.sample.id.cmp(&other.vm.sample.id))
            .then(self.index.cmp(&other.index))
    }
}

/// Steps 1 and 2 of the algorithm: returns the node with most waiting vCPUs, and the node with most idle cores.
fn source_and_destination(view: &View<'_>, loads: &Loads) -> Option<(NodeId, NodeId)> {
    let most_waiting = loads.waiting.values().copied().max().filter(|most| *most > 0)?;
    let sources = loads
        .waiting
        .iter()
        .filter(|(_, waiting)| **waiting == most_waiting)
        .map(|(node, _)| node);
    let pairs = sources.flat_map(|source| {
        let others = loads
            .idle
            .iter()
            .filter(move |(node, idle)| *node != source && **idle > 0);
        others.map(move |(node, idle)| (*idle, source, node))
    });
    let pairs: Vec<(u32, NodeId, NodeId)> = pairs.collect();
    let most_idle = pairs.iter().map(|(idle, ..)| *idle).max()?;
    let traffic = |a: NodeId, b: NodeId| {
        view.rates
            .and_then(|rates| rates.between_nodes(a, b))
            .unwrap_or_default()
    };
    pairs
        .into_iter()
        .filter(|(idle, ..)| *idle == most_idle)
        .map(|(_, source, destination)| (source, destination))
        .min_by_key(|(source, destination)| (traffic(*source, *destination), *source, *destination))
}

/// Steps 5 and 6 of the algorithm: VMs get another home. Returns these VMs.
fn re_home(
    view: &View<'_>,
    rates: &Rates,
    settings: Settings<'_>,
    history: &History,
    placement: &mut placement::State,
    state: &mut State,
    plan: &mut Plan,
) -> BTreeSet<VmId> {
    let of = settings.balance;
    let running = |id: &VmId| view.sample.vm(*id).is_some();
    state.vms.retain(|id, _| running(id));
    state.told.retain(running);
    let crowded = crowd::crowded(view, rates, of);
    let mut re_homed = BTreeSet::new();
    for vm in view
        .vms
        .iter()
        .filter(|vm| vm.managed() && vm.home.is_some() && vm.hands_off.is_none())
    {
        let id = vm.sample.id;
        let away_now = vm
            .sample
            .vcpus
            .iter()
            .any(|vcpu| vm.away_node(view.machine, vcpu.index).is_some());
        let leaves = crowded.as_ref().filter(|(leaves, _)| *leaves == id);
        let cycles = state.vms.entry(id).or_default();
        let away = note(&mut cycles.away, of.cycles, away_now);
        let full = note(&mut cycles.crowded, of.cycles, leaves.is_some());
        let (why, within) = match leaves {
            _ if vm.sample.settings.home.is_some() => continue,
            // The other VMs of the VM's affinity group would have to follow. Placement moves them together.
            _ if vm.sample.settings.affinity.is_some() => continue,
            _ if away > of.away_cycles_max => (
                format!("its vCPUs were away in {away} of {} cycles", of.cycles),
                placement::allowed_nodes(view, vm),
            ),
            Some((_, nodes)) if full > of.away_cycles_max => (
                format!(
                    "it shared full memory controllers in {full} of {} cycles",
                    of.cycles
                ),
                Some(nodes.clone()),
            ),
            _ => continue,
        };
        // Whatever the outcome, the next try comes only after this number of cycles again, because frequent page moves are
        // prohibited.
        *cycles = Cycles::default();
        if let Some(fixed) = vm.memory_fixed() {
            if state.told.insert(id) {
                let message = format!("VM {} keeps its home although {why}: {fixed}", vm.sample.name);
                plan.find(POLICY, Some(id), message);
            }
            continue;
        }
        if find_home(
            view,
            settings.placement,
            history,
            placement,
            (vm, &why, within),
            plan,
        ) {
            re_homed.insert(id);
        }
    }
    re_homed
}

/// Moves a VM to the best home within these nodes, or reports that it stays. Returns whether its home changes.
fn find_home(
    view: &View<'_>,
    config: &placement::Config,
    history: &History,
    placement: &mut placement::State,
    (vm, why, within): (&VmView<'_>, &str, Option<NodeSet>),
    plan: &mut Plan,
) -> bool {
    let id = vm.sample.id;
    let supply = Supply::new(
        view,
        history,
        &placement.ledger,
        config,
        std::slice::from_ref(&id),
    );
    let demand = placement::demand_of(vm, history);
    let stays = match placement::place(&supply, &demand, within.as_ref(), config) {
        Ok(found) if Some(&found.nodes) != vm.home => {
            let reason = format!("{why}; {}", found.reasons().join("; "));
            // VMs that were away together are re-homed together, so each must see where the others go.
            placement
                .ledger
                .reserve(placement::reservation(view, history, vm, &found.nodes));
            let home = Home::whole(view, &found.nodes);
            placement::settle(view, config, vm, &home, &reason, POLICY, plan);
            return true;
        }
        Ok(_) => "has no better one".to_owned(),
        Err(unplaceable) => unplaceable.to_string(),
    };
    let message = format!("VM {} keeps its home although {why}: it {stays}", vm.sample.name);
    plan.find(POLICY, Some(id), message);
    false
}
