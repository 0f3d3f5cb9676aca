//! Initial placement with traffic-aware hybrid bin packing, TAH [TAVO, section V.C].
//!
//! # Problem
//! A new VM needs a home: the node(s) on which its vCPUs run and which hold its memory. A single node keeps all accesses
//! local. But nodes have three resources, CPU, memory and memory bandwidth, and a node whose memory is used up while its
//! bandwidth is idle is wasted.
//!
//! # Terms
//! - *Bin*: one node, or a *hybrid bin* of several nodes. The nodes of a hybrid bin are connected by links whose use is below
//!   a threshold ([`Config::link_busy_max`]); a VM placed there has its memory interleaved over them.
//! - *Capacity* C and *requirement* R: vectors (CPU, memory, bandwidth), each value a share of the host's total, in [0, 1].
//!   Capacity is what is *left* after measured use and after reservations that are not used yet ([`Ledger`],
//!   [`crate::demand`]). Memory is ordinary memory or, for a VM in huge pages, what is free in the pools of their size
//!   (`pools`): each node of a bin must have room for an even share, in whole pages. CPU is counted in free physical cores
//!   (`crate::near`) or, if no bin has enough cores, in free hyperthreads.
//! - *Relative order* of a vector: which of its three values is largest, which second, which smallest.
//! - *Span* of a bin: the longest distance between two of its nodes; 0 for one node.
//!
//! # Algorithm
//! Search the bins of the smallest span first; these are single nodes. If none of them has room, search also those of the
//! next span, and so on, so a bin across sockets is taken only if none within a socket has room. For each span:
//! 1. Sort the bins: fewer nodes first, then smaller sum of distances, then larger sum of capacities, then lower node numbers.
//! 2. Take the first bin that (a) has room in every resource, and (b) has the same relative order as the VM: if a bin has
//!    most left of what the VM needs most, it stays balanced.
//! 3. If there is no such bin, relax (b) to: the VM's largest requirement is the bin's largest capacity.
//! 4. If there is still none, require only (a).
//!
//! 5. If no span has a bin, repeat with CPU counted in hyperthreads: each vCPU then has a hyperthread, and some vCPUs share a
//!    core.
//! 6. If there is still none, the VM is refused, and the refusal says what is short on which node; see [`crowded()`].
//!
//! # Properties (tests of the same name)
//! - `single_node_bins_come_before_hybrid_bins`
//! - `a_vm_with_a_device_gets_the_devices_node_where_that_alone_has_room`, under the baselines, too
//! - `the_relative_order_decides_between_bins_with_room`
//! - `the_order_is_relaxed_twice_then_refused`
//! - `of_sets_with_room_the_nearest_is_taken`, `no_set_across_sockets_where_one_within_has_room` (generated)
//! - `a_vm_in_huge_pages_goes_where_the_pool_has_room`, `huge_pages_and_ordinary_memory_do_not_stand_in_for_each_other`
//! - `a_vcpu_gets_a_core_where_one_is_free_and_a_hyperthread_where_none_is`
//! - `a_busy_link_splits_hybrid_bins`
//! - `what_is_reserved_is_not_given_twice`
//! - `a_vm_of_unknown_bandwidth_is_not_drawn_to_busy_controllers`
//! - `a_placement_always_fits` and `the_answer_does_not_depend_on_vm_order` (generated)
//! - `gap_to_the_optimum`: an exact solver that knows all VMs beforehand, and may leave out large ones, packs more than TAH,
//!   which places VMs one by one. On 60 random instances of 2 nodes and 8 VMs, TAH places 11.0 percent fewer VMs on single
//!   nodes. The test prints the figure and fails if it is above 20.
//!
//! # Departures from the source, and why
//! - Nearness comes before the relative order, and a single node with room before any hybrid bin. The paper's order may take
//!   a hybrid bin although a single node has room, and ignores distances. On the paper's hosts all nodes are equally far
//!   apart. On other hosts the distance slows every access, while the order only keeps resources in balance.
//! - A hyperthread is not a core; the paper does not say which of them it counts. On the twin, a VM of 12 vCPUs that compute
//!   took 43.9 s on one socket of 6 cores and 12 hyperthreads, and 27.3 s on two. The predictor's figures agree
//!   ([`crate::predict::Config`]: a core's second hyperthread adds a quarter of a core, a newcomer waits for memory for a
//!   third of its time): one vCPU in four without a core costs more (19 percent) than half of all accesses to a node at
//!   distance 21 (10 percent). The baselines count hyperthreads, as their sources do.
//! - Equal values have no relative order: a tie in either vector agrees with any order. The paper does not cover ties.
//! - An interleaved VM fills its nodes evenly, so (a) also requires room for an even share on each node. The paper adds up
//!   memory, and so would reserve pages that interleaving cannot place.
//! - If the bandwidth of the nodes (no preset, no HMAT) or of the VM is unknown, packing is in two dimensions. If a VM's unknown
//!   bandwidth counted as zero, it would be drawn to the node with the busiest controllers, which has least bandwidth left.
//! - A VM with an assigned device gets the device's node if that node has room, whatever the relative order: the VM's memory
//!   is pinned once it runs, so a home far from the device would stay far from it. If devices are on several nodes, bins of
//!   these nodes come first within a span. Among otherwise equal bins, those that include the devices' nodes come first.
//! - Load other than that of VMs with homes is rounded to whole CPUs: a daemon's two percent must not push a VM off an idle node.
//! - The paper compares only with measured use, so VMs started together would all get the same node. See [`Ledger`].
//!
//! Baselines for comparison: [`Algorithm::FirstFit`], which pins each vCPU to one CPU like the paper's FF-Pin, and
//! [`Algorithm::BestFit`].

mod company;
mod crowded;
mod ledger;
mod pins;
mod pools;
mod shelter;
mod short;
mod supply;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Act, HugeMemory, Lever, Plan, View, VmView};
use homenode_machine::Machine;
use homenode_units::{Any, BadSetting, Bytes, CpuSet, NodeSet, Ns, Pages, VmId, Wrong};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use company::{allowed_nodes, has_company};
pub use crowded::{Crowded, crowded};
pub use ledger::{Announcement, Asked, Ledger, RESERVATION_LIFE, Reservation, Shape};
pub use pins::cpus_at_home;
use pins::{pin, pin_anew};
pub use short::{Shortage, Unplaceable};
use supply::{BANDWIDTH, Bin, CPU, MEMORY, Vector};
pub use supply::{NodeLeft, Supply};

use crate::bounds::{self, SOME_SHARE};
use crate::demand::{BandwidthFrom, Demand, History};

/// Name of this policy in plans.
pub const POLICY: &str = "placement";

/// Placement algorithm.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Algorithm {
    /// Traffic-aware hybrid bin packing.
    #[default]
    Tah,
    /// The first node with room for CPU and memory; each vCPU pinned to one CPU.
    FirstFit,
    /// The node that is left with least, among those with room for CPU and memory.
    BestFit,
}

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The placement algorithm.
    pub algorithm: Algorithm,
    /// A link used above this share of its bandwidth joins no hybrid bin, in (0, 1].
    pub link_busy_max: f64,
    /// CPUs that no VM may use.
    pub reserved_cpus: CpuSet,
    /// Memory of every node that no VM may use.
    #[serde(with = "homenode_units::text")]
    pub reserved_memory: Bytes,
    /// A VM that arrives with at least this share of its touched memory on one node gets that home, if there is room, 0 to 1.
    pub memory_there_min: f64,
    /// This requires that it has touched at least this share of the memory that it may use, 0 to 1.
    pub touched_min: f64,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            algorithm: Algorithm::Tah,
            link_busy_max: 0.5,
            reserved_cpus: CpuSet::new(),
            reserved_memory: Bytes::ZERO,
            memory_there_min: 0.8,
            touched_min: 0.25,
        }
    }
}

homenode_units::settings! {
    Config {
        algorithm: Any,
        link_busy_max: SOME_SHARE,
        reserved_cpus: Any,
        reserved_memory: bounds::MEMORY,
        memory_there_min: bounds::SHARE,
        touched_min: bounds::SHARE,
    }
}

impl Config {
    /// Checks the settings against this machine.
    ///
    /// # Errors
    /// Fails if the machine does not have the reserved CPUs.
    pub fn check_on(&self, machine: &Machine) -> Result<(), BadSetting> {
        let there = machine.cpu_set();
        let missing = self.reserved_cpus.difference(&there);
        if missing.is_empty() {
            return Ok(());
        }
        Err(BadSetting {
            key: "reserved_cpus".to_owned(),
            value: self.reserved_cpus.to_string(),
            wrong: Wrong::NoSuchCpus {
                missing: missing.to_string(),
                there: [machine.name.as_str().into(), there.to_string().into()],
            },
        })
    }
}

/// A VM's home, and the reasons for it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Placement {
    /// Home nodes.
    pub nodes: NodeSet,
    /// How the bin was found.
    pub matched: Match,
    /// What the VM needs, as shares of the host (CPU, memory, bandwidth).
    pub requirement: [f64; 3],
    /// The bin's free resources, as shares of the host.
    pub capacity: [f64; 3],
    /// Share of the bin's free hyperthreads that remain free once the VM is there, 0 to 1.
    pub cpus_stay: f64,
    /// Source of the VM's bandwidth.
    pub bandwidth_from: BandwidthFrom,
    /// Whether vCPUs share cores: no bin has a free core for each vCPU, so hyperthreads were counted.
    pub shares_cores: bool,
}

/// How a bin was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Match {
    /// The bin has room and the same relative order (step 2).
    Order,
    /// The bin has room, and the largest requirement is its largest capacity (step 3).
    Largest,
    /// The bin has room (step 4, and the baselines).
    Room,
}

impl Placement {
    /// Returns the reasons as short sentences for the operator.
    pub fn reasons(&self) -> Vec<String> {
        let bin = if self.nodes.len() == 1 {
            "one node keeps all accesses local".to_owned()
        } else {
            format!(
                "no single node was chosen; memory is interleaved over {} nodes whose links carry little traffic",
                self.nodes.len()
            )
        };
        let matched = match self.matched {
            Match::Order => {
                "room in every resource, and the most left of what the VM needs most (same relative order)"
            }
            Match::Largest => "room in every resource, and the most left of the VM's largest requirement",
            Match::Room => "room in every resource",
        };
        let percent = |v: [f64; 3]| v.map(|v| format!("{:.1}", v * 100.0)).join("/");
        let mut reasons = vec![bin, matched.to_owned()];
        if self.shares_cores {
            reasons.push("no home has a free core for each vCPU, so hyperthreads count as CPUs".to_owned());
        }
        reasons.extend([
            format!(
                "needs {} percent of the host's CPU/memory/bandwidth, and {} is left here",
                percent(self.requirement),
                percent(self.capacity)
            ),
            format!("its memory bandwidth is {}", self.bandwidth_from),
        ]);
        reasons
    }
}

/// Finds the home of a VM among the nodes that the operator allows it.
///
/// # Errors
/// Fails with the shortages if no bin has room.
pub fn place(
    supply: &Supply,
    demand: &Demand,
    allowed: Option<&NodeSet>,
    config: &Config,
) -> Result<Placement, Unplaceable> {
    let supply = supply.counting(demand);
    let threads = supply.has_threads().then(|| supply.by_threads());
    // Both baselines give a vCPU a hyperthread, as their sources do.
    let by_cores = (config.algorithm == Algorithm::Tah || threads.is_none()).then_some(&*supply);
    let mut supplies = by_cores.into_iter().chain(&threads);
    supplies
        .find_map(|supply| find(supply, demand, allowed, config))
        .ok_or_else(|| short::shortages(threads.as_ref().unwrap_or(&supply), demand, allowed))
}

/// Finds a home with the supply's way to count CPUs; `None` if no bin has room.
fn find(supply: &Supply, demand: &Demand, allowed: Option<&NodeSet>, config: &Config) -> Option<Placement> {
    let need = supply.normalise(demand);
    let may = |bin: &Bin| allowed.is_none_or(|allowed| supply.nodes_of(bin.mask).is_subset(allowed));
    let (bin, matched) = search(supply, demand, &need, config, may)?;
    Some(Placement {
        nodes: supply.nodes_of(bin.mask),
        matched,
        requirement: need,
        capacity: bin.left,
        cpus_stay: supply.cpus_stay(bin.mask, demand.cpus),
        bandwidth_from: demand.bandwidth_from,
        shares_cores: supply.counts_threads && demand.cpus > 0.0,
    })
}

/// Returns the best bin among those that `may` accepts, and how well it matches.
fn search(
    supply: &Supply,
    demand: &Demand,
    need: &Vector,
    config: &Config,
    may: impl Fn(&Bin) -> bool,
) -> Option<(Bin, Match)> {
    let is_beside = |bin: &Bin| may(bin) && supply.nodes_of(bin.mask).is_subset(&demand.device_nodes);
    let singles = |may: &dyn Fn(&Bin) -> bool| {
        let mut bins = supply.single_bins();
        bins.retain(may);
        bins
    };
    let (beside, all) = (singles(&is_beside), singles(&may));
    // Both baselines look at CPU and memory only.
    let is_roomy = |bin: &Bin| roomy(bin, need, &[CPU, MEMORY]);
    let first = |bins: &[Bin]| bins.iter().copied().find(is_roomy);
    let fullest = |bins: &[Bin]| {
        let left = |bin: &Bin| bin.left[CPU] + bin.left[MEMORY];
        let roomy = bins.iter().copied().filter(is_roomy);
        roomy.min_by(|a, b| left(a).total_cmp(&left(b)))
    };
    let of_room = match config.algorithm {
        Algorithm::Tah => {
            let of_span = |span| {
                search_tah(supply, demand, need, beside.clone(), span, is_beside)
                    .or_else(|| search_tah(supply, demand, need, all.clone(), span, &may))
            };
            return supply.near.spans().into_iter().find_map(of_span);
        }
        Algorithm::FirstFit => first(&beside).or_else(|| first(&all)),
        Algorithm::BestFit => fullest(&beside).or_else(|| fullest(&all)),
    };
    of_room.map(|bin| (bin, Match::Room))
}

/// Runs steps 1 to 4 among bins of at most this span. Bins are built size by size as the search reaches them; steps 3 and 4
/// go over all of them again.
fn search_tah(
    supply: &Supply,
    demand: &Demand,
    need: &Vector,
    mut bins: Vec<Bin>,
    span: u32,
    may: impl Fn(&Bin) -> bool,
) -> Option<(Bin, Match)> {
    let dimensions: &[usize] = if supply.bandwidth_known && demand.bandwidth.is_some() {
        &[CPU, MEMORY, BANDWIDTH]
    } else {
        &[CPU, MEMORY]
    };
    // If all of these nodes together have too little, no bin can have room.
    let together = supply.bin(bins.iter().fold(0, |all, bin| all | bin.mask));
    if !has(&together, need, dimensions) {
        return None;
    }
    let mut sorted: Vec<Bin> = Vec::with_capacity(bins.len());
    while !bins.is_empty() {
        sort_bins(supply, demand, &mut bins);
        if let Some(bin) = bins
            .iter()
            .find(|bin| roomy(bin, need, dimensions) && same_order(need, &bin.left, dimensions))
        {
            return Some((*bin, Match::Order));
        }
        let larger = supply.grow(&bins, span);
        sorted.append(&mut bins);
        bins = larger.into_iter().filter(&may).collect();
    }
    sorted.retain(|bin| roomy(bin, need, dimensions));
    if let Some(bin) = sorted
        .iter()
        .find(|bin| same_largest(need, &bin.left, dimensions))
    {
        return Some((*bin, Match::Largest));
    }
    sorted.first().map(|bin| (*bin, Match::Room))
}

/// Step 1, for bins of one size.
fn sort_bins(supply: &Supply, demand: &Demand, bins: &mut [Bin]) {
    let with_device = |bin: &Bin| {
        !demand.device_nodes.is_empty() && demand.device_nodes.is_subset(&supply.nodes_of(bin.mask))
    };
    let sum = |bin: &Bin| bin.left.iter().sum::<f64>();
    bins.sort_by(|a, b| {
        (a.distance.cmp(&b.distance))
            .then(with_device(b).cmp(&with_device(a)))
            .then(sum(b).total_cmp(&sum(a)))
            .then(b.mask.reverse_bits().cmp(&a.mask.reverse_bits()))
    });
}

/// Sums of floating-point shares are compared with a tolerance of a billionth of the host.
const ROUNDING: f64 = 1e-9;

/// Condition (a): whether a bin has room in every resource.
fn roomy(bin: &Bin, need: &Vector, dimensions: &[usize]) -> bool {
    has(bin, need, dimensions) && bin.has_rest && bin.memory_if_interleaved + ROUNDING >= need[MEMORY]
}

/// Whether a bin's sums suffice, which is a necessary part of (a).
fn has(bin: &Bin, need: &Vector, dimensions: &[usize]) -> bool {
    dimensions.iter().all(|&d| bin.left[d] + ROUNDING >= need[d])
}

/// Condition (b): no pair of resources is ordered one way in the VM and the other way in the bin.
fn same_order(need: &Vector, left: &Vector, dimensions: &[usize]) -> bool {
    dimensions.iter().all(|&i| {
        dimensions
            .iter()
            .all(|&j| !(need[i] > need[j] && left[i] < left[j]))
    })
}

/// Condition (b), relaxed: the largest requirement is the largest capacity.
fn same_largest(need: &Vector, left: &Vector, dimensions: &[usize]) -> bool {
    let largest = |v: &Vector| dimensions.iter().map(|&d| v[d]).fold(0.0, f64::max);
    let (most_needed, most_left) = (largest(need), largest(left));
    dimensions
        .iter()
        .any(|&d| need[d] >= most_needed && left[d] >= most_left)
}

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Reservations for VMs that have not appeared yet.
    pub ledger: Ledger,
    /// VMs whose refusal was reported. It is reported again only if they get a home and lose it.
    refused: BTreeSet<VmId>,
    /// VMs that have a home only because a node is drained.
    sheltered: BTreeSet<VmId>,
    /// CPUs that VMs could use in the last cycle, and when this last changed.
    cpus: Option<(CpuSet, Option<Ns>)>,
    /// CPUs that each VM was allowed in the last cycle.
    allowed: BTreeMap<VmId, Option<CpuSet>>,
}

/// Assigns a home to every managed VM that has none, or that may not keep its own. The home is the operator's choice, else
/// what was reserved when the VM started, else where most of its memory is (if there is room), else what [`place`] finds.
pub fn plan(view: &View<'_>, config: &Config, history: &History, state: &mut State) -> Plan {
    plan_for(view, config, history, state, |_| true)
}

/// Assigns homes to the VMs that seek one. The others stay unplaced, except while a node is drained, which would otherwise
/// not become empty.
pub fn plan_for(
    view: &View<'_>,
    config: &Config,
    history: &History,
    state: &mut State,
    seeks: impl Fn(&VmView<'_>) -> bool,
) -> Plan {
    let mut plan = Plan::new(view.version);
    state.refused.retain(|id| view.sample.vm(*id).is_some());
    state.ledger.forget_homed(view);
    pin_anew(view, config, state, &mut plan);
    let is_drained = !view.drained.is_empty();
    let is_unplaced = |vm: &VmView<'_>| vm.home.is_none() && !seeks(vm);
    let seeks = |vm: &VmView<'_>| match vm.home {
        None => is_drained || seeks(vm),
        Some(home) => company::must_leave(view, vm, home),
    };
    let seeking = || {
        view.vms
            .iter()
            .filter(|vm| vm.managed() && vm.hands_off.is_none() && seeks(vm))
    };
    // A VM that was refused before still counts where it runs.
    let without: Vec<VmId> = seeking()
        .map(|vm| vm.sample.id)
        .filter(|id| !state.refused.contains(id))
        .collect();
    for vm in seeking() {
        match home_of(view, config, history, state, &without, vm) {
            Ok((nodes, reason)) => {
                state.refused.remove(&vm.sample.id);
                // The reservation keeps two VMs of one cycle apart until the next view shows this home.
                state.ledger.reserve(reservation(view, history, vm, &nodes));
                if is_unplaced(vm) {
                    state.sheltered.insert(vm.sample.id);
                }
                let reason = state.with_drain(view, vm, reason);
                let home = Home::whole(view, &nodes);
                settle(view, config, vm, &home, &reason, POLICY, &mut plan);
            }
            Err(unplaceable) => {
                let bound = vm.sample.bound_to.as_ref();
                if let Some(home) = vm.home.filter(|_| bound.is_some()) {
                    let why = format!("its memory is bound, and part of it is outside its home, node {home}");
                    plan.decide(POLICY, Act::Lift { lever: Lever::Home }.on(vm.sample.id), why);
                }
                if state.refused.insert(vm.sample.id) {
                    let until = match vm.home {
                        Some(home) => format!("it stays on node {home}"),
                        None => "it runs wherever the kernel puts it".to_owned(),
                    };
                    let among = match has_company(&vm.sample.settings) {
                        true => ", counting only nodes that `anti_affinity` and `affinity` allow",
                        false => "",
                    };
                    let name = &vm.sample.name;
                    let message = match bound {
                        Some(bound) => format!(
                            "VM {name} has no home: its memory is bound to node {bound}, but not all of these nodes may be its home, or they \
                             are short of CPUs; it runs wherever the kernel puts it"
                        ),
                        None => format!("VM {name} {unplaceable}{among}; {until} until there is room"),
                    };
                    plan.find(POLICY, Some(vm.sample.id), message);
                }
            }
        }
    }
    plan
}

fn home_of(
    view: &View<'_>,
    config: &Config,
    history: &History,
    state: &mut State,
    without: &[VmId],
    vm: &VmView<'_>,
) -> Result<(NodeSet, String), Unplaceable> {
    if let Some(nodes) = &vm.sample.settings.home {
        return Ok((nodes.clone(), "the operator chose this home".into()));
    }
    // A VM that only changes its home has no reservation, and one of its shape may be for another VM.
    let redeemed = match vm.home {
        None => state.ledger.redeem(vm.sample, view.at),
        Some(_) => None,
    };
    let reserved = |mate: VmId| state.ledger.reserved(mate);
    let allowed = company::allowed(view, vm, company::Asked::New, reserved);
    let may = |nodes: &NodeSet| allowed.as_ref().is_none_or(|allowed| nodes.is_subset(allowed));
    let bound = company::bound_home(view, vm);
    if let Some(nodes) = redeemed.filter(|nodes| bound.is_none() && may(nodes)) {
        let since = match state.sheltered.contains(&vm.sample.id) {
            true => "reserved for it since the drain began",
            false => "reserved when it started",
        };
        return Ok((nodes, since.into()));
    }
    let own = [vm.sample.id];
    let is_among = without.contains(&vm.sample.id);
    let without = if is_among { without } else { &own };
    let allowed_cpus = vm.sample.settings.cpus_allowed.as_ref();
    let supply = Supply::new(view, history, &state.ledger, config, without).within(view, allowed_cpus);
    let demand = company::demand_of(view, vm, history, reserved);
    if let Some(nodes) = bound {
        let is_allowed = allowed.as_ref() == Some(&nodes) || allowed.is_none() && nodes == view.homes();
        // The VM's memory is on that node and has its room, whatever the measured figures say. Hyperthreads suffice if cores are
        // short.
        let there = supply.nodes.iter().filter(|node| nodes.contains(node.node));
        let cpus_left: f64 = there.map(|node| node.threads).sum();
        return match is_allowed && !nodes.is_empty() && cpus_left >= demand.cpus {
            true => Ok((nodes, "its memory is bound there and cannot move".into())),
            false => {
                let supply = supply.counting(&demand).by_threads();
                Err(short::shortages(&supply, &demand, allowed.as_ref()))
            }
        };
    }
    let whole = allowed
        .as_ref()
        .filter(|_| company::led_to(view, vm, reserved).is_some());
    let fits = |nodes: &NodeSet| whole.map_or_else(|| may(nodes), |whole| whole == nodes);
    if let Some(nodes) = where_memory_is(view, config, vm).filter(fits)
        && place(&supply, &demand, Some(&nodes), config).is_ok()
    {
        return Ok((
            nodes,
            "most of its memory is there already, and there is room".into(),
        ));
    }
    let placement = match place(&supply, &demand, allowed.as_ref(), config) {
        Err(short) if company::is_put_out(view, vm) => {
            let memory_alone = Demand {
                cpus: 0.0,
                bandwidth: None,
                ..demand
            };
            let placement = place(&supply, &memory_alone, allowed.as_ref(), config).map_err(|_| short)?;
            let why =
                "it must leave its old home, and no other node has enough free CPUs: VMs share CPUs there";
            return Ok((whole.unwrap_or(&placement.nodes).clone(), why.to_owned()));
        }
        placed => placed?,
    };
    let nodes = whole.unwrap_or(&placement.nodes).clone();
    Ok((nodes, placement.reasons().join("; ")))
}

/// Returns the node that holds nearly all of a VM's memory. Returns `None` if the VM has touched too little for that to
/// matter, unless its memory cannot move anyway.
fn where_memory_is(view: &View<'_>, config: &Config, vm: &VmView<'_>) -> Option<NodeSet> {
    let pages = vm.sample.pages.as_ref()?;
    let touched = vm.sample.pages_touched()?;
    let (node, most) = pages
        .iter()
        .max_by_key(|(node, pages)| (**pages, std::cmp::Reverse(*node)))?;
    let fixed = vm.memory_fixed().is_some() && touched > Pages::ZERO;
    let meaningful = touched.to_bytes().as_f64() >= config.touched_min * vm.sample.memory_bytes.as_f64();
    let concentrated = most.as_f64() >= config.memory_there_min * touched.as_f64();
    ((fixed || meaningful) && concentrated && view.homes().contains(node)).then(|| NodeSet::one(node))
}

/// Returns what a running VM needs.
pub fn demand_of(vm: &VmView<'_>, history: &History) -> Demand {
    let vcpus = vm.sample.vcpus.len();
    let (bandwidth, bandwidth_from) =
        history.bandwidth(Some(vm.sample.id), vcpus, vm.sample.settings.bandwidth);
    Demand {
        cpus: history.cpus(vm.sample.id, vcpus),
        memory_bytes: vm.sample.memory_bytes,
        bandwidth,
        bandwidth_from,
        device_nodes: vm.sample.device_nodes.clone(),
        huge_pages: vm
            .sample
            .huge_page_bytes
            .map(|page_bytes| HugeMemory {
                page_bytes,
                memory_bytes: vm.sample.memory_bytes,
            })
            .into_iter()
            .collect(),
    }
}

pub(crate) fn reservation(
    view: &View<'_>,
    history: &History,
    vm: &VmView<'_>,
    nodes: &NodeSet,
) -> Reservation {
    Reservation {
        id: 0,
        vm: Some(vm.sample.id),
        name: Some(vm.sample.name.clone()),
        shape: Shape::new(vm.sample.vcpus.len() as u32, vm.sample.memory_bytes),
        demand: demand_of(vm, history),
        nodes: nodes.clone(),
        made_at: view.at,
    }
}

/// A home: nodes, and those of their CPUs on which the VM's vCPUs run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Home {
    /// Nodes for its memory.
    pub nodes: NodeSet,
    /// CPUs for its vCPUs: all CPUs of the nodes, or of some of the nodes' caches. [`settle`] drops CPUs that the VM may not use.
    pub cpus: CpuSet,
}

impl Home {
    /// Returns a home on all CPUs of these nodes.
    pub fn whole(view: &View<'_>, nodes: &NodeSet) -> Home {
        Home {
            nodes: nodes.clone(),
            cpus: view.machine.cpus_of(nodes),
        }
    }

    /// Returns a name for the home. `may` holds the CPUs of its nodes that the VM may use.
    fn name(&self, may: &CpuSet) -> String {
        match self.cpus == *may {
            true => format!("node {}", self.nodes),
            false => format!("CPUs {} of node {}", self.cpus, self.nodes),
        }
    }

    /// Returns a VM's current home.
    pub fn of(view: &View<'_>, vm: &VmView<'_>) -> Option<Home> {
        Some(Home {
            nodes: vm.home?.clone(),
            cpus: cpus_at_home(view, vm, vm.home?),
        })
    }
}

/// Adds the decisions that settle a VM in a home: one sets the home, others pin its vCPUs there.
pub fn settle(
    view: &View<'_>,
    config: &Config,
    vm: &VmView<'_>,
    home: &Home,
    reason: &str,
    policy: &'static str,
    plan: &mut Plan,
) {
    let nodes = &home.nodes;
    let may = Supply::cpus_for(view, nodes, vm.sample.settings.cpus_allowed.as_ref());
    let home = Home {
        nodes: nodes.clone(),
        cpus: may.intersection(&home.cpus),
    };
    plan.decide(
        policy,
        Act::SetHome { nodes: nodes.clone() }.on(vm.sample.id),
        format!("home is {}: {reason}", home.name(&may)),
    );
    pin(view, config, vm, &home, policy, plan);
}
