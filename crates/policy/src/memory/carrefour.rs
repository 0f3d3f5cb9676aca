//! Carrefour: if controllers and links are busy, pages move to their users or are spread ([Policies, section 3.4]; Dashti et
//! al., ASPLOS 2013; the constants are those of its public code, which are the paper's according to its README).
//!
//! # Problem
//! The first touch of a page says little about its later users. Pages that one node uses belong on that node; pages that all
//! nodes use belong wherever controllers are idle. Moving pages pays only while memory is busy.
//!
//! # Terms
//! - *Accesses* of a node: what its controllers moved, in cache lines. *Share* of a node: its accesses over those of all
//!   *targets*, which are the VM's home nodes, or all nodes if it has no home.
//! - *Imbalance*: sample standard deviation over mean of the accesses of the targets.
//! - *Local*: share of the VM's accesses that stay on their node, from counters or, without counters, from its samples.
//! - *Sampled page*: a page that memory sampling hit since the last cycle ([`homenode_host::PageUse`]).
//!
//! # Algorithm
//! Each cycle, for each VM whose memory policy includes `+carrefour`:
//! 1. If all nodes together have fewer accesses than [`Config::accesses_per_us_min`], nothing is done.
//! 2. *Interleaving* is on if the imbalance exceeds [`Config::imbalance_max`] and not all accesses are local. *Migration* is
//!    on if the local share is below [`Config::local_max`]. *Replication* is on if most of the host's memory is free and
//!    nearly all samples are reads.
//! 3. Sampled pages are taken in turn, those with most samples first, until the budget is used up:
//!    - A page that several nodes use moves if interleaving is on, with a probability equal to its node's share. It moves to
//!      another target, drawn with weight 1 minus that target's share.
//!    - A page that one other node uses moves to that node, if it is a target and either migration is on and the page has two
//!      samples, or interleaving is on.
//!
//! # Properties (tests of the same name)
//! - `nothing_happens_below_the_thresholds`
//! - `budgets_hold_whatever_guests_do`
//! - `a_page_of_one_node_moves_there_and_nowhere_else`
//! - `shared_pages_leave_their_node_by_its_share_for_those_with_least`
//! - `pages_stay_on_home_nodes_and_out_of_full_ones`
//! - `a_seed_repeats`
//!
//! # Departures from the source, and why
//! - Replication is decided and counted ([`Judgement::replicable`]), but pages are then treated as if it were off: the paper
//!   omitted it, since the hypervisor would have to keep copies in step.
//! - There are budgets, and no VM can use another's. The source trusts its workloads, but here a guest may alternate its
//!   access pattern to fill its neighbours' links with copies.
//! - Decisions are made for each VM and its home nodes. The source has one process on the whole machine.
//! - A full target gets nothing. The source notices only when a move fails.
//! - The host decides how often to sample.

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Act, FrameMove, HandsOff, PageUse, Plan, Rates, View, VmView};
use homenode_units::{BadSetting, Migration, NodeId, NodeMap, NodeSet, PAGE_BYTES, Pages, SplitMix, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::{PAGES, SHARE};

/// Name of this policy in plans.
pub const POLICY: &str = "carrefour";

/// Bytes that one access to memory transfers.
const LINE_BYTES: f64 = 64.0;

/// The operator's settings. Shares are in [0, 1]; pages are base pages of 4 KiB.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Nothing is done if all nodes together have fewer accesses to memory than this, per microsecond.
    pub accesses_per_us_min: f64,
    /// Shared pages are spread if the imbalance is above this (may exceed 1).
    pub imbalance_max: f64,
    /// Pages move to their users if the share of local accesses is below this.
    pub local_max: f64,
    /// Replication is on only if at most this share of the host's memory is in use.
    pub replication_memory_max: f64,
    /// Replication is on only if also at least this share of the VM's samples are reads.
    pub replication_reads_min: f64,
    /// Most pages of one VM that move per cycle.
    #[serde(alias = "vm_pages_per_epoch")]
    pub vm_pages_per_cycle: Pages,
    /// Most pages of the host that move per cycle. They are divided evenly over the VMs under Carrefour.
    #[serde(alias = "host_pages_per_epoch")]
    pub host_pages_per_cycle: Pages,
}

impl Default for Config {
    /// The thresholds are Carrefour's. The budgets are those of [`crate::repatriate`], since both move pages.
    fn default() -> Self {
        Config {
            accesses_per_us_min: 50.0,
            imbalance_max: 0.35,
            local_max: 0.8,
            replication_memory_max: 0.25,
            replication_reads_min: 0.95,
            vm_pages_per_cycle: Pages(65_536),
            host_pages_per_cycle: Pages(131_072),
        }
    }
}

homenode_units::settings! {
    Config {
        accesses_per_us_min: 0.0..=1_000_000.0,
        imbalance_max: 0.0..=100.0,
        local_max: SHARE,
        replication_memory_max: SHARE,
        replication_reads_min: SHARE,
        vm_pages_per_cycle: PAGES,
        host_pages_per_cycle: PAGES,
    } budgets
}

/// A VM's budget may not exceed the host's.
fn budgets(config: &Config) -> Result<(), BadSetting> {
    let vm = ("vm_pages_per_cycle", config.vm_pages_per_cycle);
    BadSetting::unless_ordered(vm, ("host_pages_per_cycle", config.host_pages_per_cycle))
}

/// State kept between cycles.
#[derive(Clone, Debug)]
pub struct State {
    chance: SplitMix,
    told: BTreeSet<VmId>,
    judgements: BTreeMap<VmId, Judgement>,
}

impl State {
    /// Returns a state whose random draws start from this seed.
    pub fn seeded(seed: u64) -> State {
        State {
            chance: SplitMix(seed),
            told: BTreeSet::new(),
            judgements: BTreeMap::new(),
        }
    }

    /// Returns the judgement of a VM in the last cycle; `None` if there was none.
    pub fn judgement(&self, vm: VmId) -> Option<&Judgement> {
        self.judgements.get(&vm)
    }
}

impl Default for State {
    fn default() -> Self {
        State::seeded(1)
    }
}

/// What was measured for a VM in a cycle, and what Carrefour concludes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Judgement {
    /// Accesses to memory per microsecond, of all nodes.
    pub accesses_per_us: f64,
    /// Imbalance of the VM's target nodes.
    pub imbalance: f64,
    /// Share of the VM's accesses that are local.
    pub local: f64,
    /// Whether pages that several nodes use are spread.
    pub interleaving: bool,
    /// Whether pages move to the only node that uses them.
    pub migration: bool,
    /// Whether pages that are only read would be copied to every reader.
    pub replication: bool,
    /// Number of the pages that would be copied.
    pub replicable: Pages,
}

/// Moves sampled pages of VMs under Carrefour, within the budgets.
pub fn plan(view: &View<'_>, config: &Config, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    state.judgements.clear();
    let wants = |vm: &&VmView<'_>| {
        // A VM that is kept off its cache for some seconds uses its pages from another place; that is no reason to move them.
        let is_home = vm.hands_off != Some(HandsOff::Isolating);
        vm.managed() && is_home && vm.sample.memory_policy.migration == Migration::Carrefour
    };
    let vms: Vec<&VmView<'_>> = view.vms.iter().filter(wants).collect();
    state.told.retain(|id| vms.iter().any(|vm| vm.sample.id == *id));
    let part = config.host_pages_per_cycle.0 / vms.len().max(1) as u64;
    let budget = part.min(config.vm_pages_per_cycle.0);
    let mut room: NodeMap<u64> = view
        .sample
        .nodes
        .map(|_, node| node.memory_free_bytes.0 / PAGE_BYTES);
    for vm in vms {
        let id = vm.sample.id;
        if let Some(obstacle) = obstacle(view, vm) {
            if state.told.insert(id) {
                let message = format!("Carrefour cannot move pages of VM {}: {obstacle}", vm.sample.name);
                plan.find(POLICY, Some(id), message);
            }
            continue;
        }
        let (Some(rates), Some(uses)) = (view.rates, &vm.sample.page_uses) else {
            continue;
        };
        let Some((judgement, targets)) = judge(view, vm, rates, uses, config) else {
            continue;
        };
        state.judgements.insert(id, judgement);
        let mut deal = Deal {
            targets: &targets,
            judgement,
            left: budget,
            room: &mut room,
            chance: &mut state.chance,
            moves: Vec::new(),
        };
        deal.all(uses);
        let moves = deal.moves;
        if !moves.is_empty() {
            let reason = reason(&judgement, &moves, uses);
            plan.decide(POLICY, Act::MoveFrames { moves }.on(id), reason);
        }
    }
    plan
}

/// Returns why a VM's pages cannot follow their users; `None` if they can.
fn obstacle(view: &View<'_>, vm: &VmView<'_>) -> Option<String> {
    if let Some(why) = vm.memory_fixed() {
        return Some(why.to_string());
    }
    if let Some(why) = &view.sample.no_page_uses {
        return Some(why.clone());
    }
    let uncounted = view
        .sample
        .nodes
        .values()
        .any(|node| node.memory_traffic_bytes.is_none());
    uncounted.then(|| "the host does not count the traffic of its memory controllers".to_owned())
}

/// Judges a VM by the last cycle's figures. Returns the judgement, and its targets with their shares of accesses; `None` if
/// nothing was counted or sampled.
fn judge(
    view: &View<'_>,
    vm: &VmView<'_>,
    rates: &Rates,
    uses: &[PageUse],
    config: &Config,
) -> Option<(Judgement, NodeMap<f64>)> {
    let rate = |node: NodeId| {
        rates
            .nodes
            .get(node)?
            .bandwidth
            .map(|rate| rate.as_f64() / LINE_BYTES)
    };
    let memory = view.machine.home_nodes();
    let of_all: f64 = memory.iter().map(rate).sum::<Option<f64>>()?;
    let home = vm.home.map(|home| home.intersection(&memory));
    let nodes = home.filter(|home| !home.is_empty()).unwrap_or(memory);
    let accesses: NodeMap<f64> = nodes
        .iter()
        .map(|node| Some((node, rate(node)?)))
        .collect::<Option<_>>()?;
    let (samples, local, writes) = uses
        .iter()
        .fold((0.0, 0.0, 0.0), |(samples, local, writes), used| {
            let pages = used.pages.0 as f64;
            let here = used
                .samples
                .get(used.on)
                .map_or(0.0, |samples| f64::from(*samples));
            (
                samples + pages * f64::from(count(used)),
                local + pages * here,
                writes + pages * f64::from(used.writes),
            )
        });
    if samples == 0.0 {
        return None;
    }
    let counted = vm.rates.and_then(|rates| rates.local_access_ratio);
    let local = counted.unwrap_or(local / samples);
    let total: f64 = accesses.values().sum();
    let imbalance = imbalance(&accesses);
    let accesses_per_us = of_all / 1e6;
    let enabled = accesses_per_us >= config.accesses_per_us_min;
    let free: u64 = view
        .sample
        .nodes
        .values()
        .map(|node| node.memory_free_bytes.0)
        .sum();
    let whole: u64 = view
        .sample
        .nodes
        .values()
        .map(|node| node.memory_total_bytes.0)
        .sum();
    let used = 1.0 - free as f64 / whole.max(1) as f64;
    let reads = 1.0 - writes / samples;
    let replication =
        enabled && used <= config.replication_memory_max && reads >= config.replication_reads_min;
    let only_read = |used: &&PageUse| used.samples.len() > 1 && used.writes == 0;
    let replicable = if replication {
        uses.iter().filter(only_read).map(|used| used.pages).sum()
    } else {
        Pages::ZERO
    };
    let judgement = Judgement {
        accesses_per_us,
        imbalance,
        local,
        interleaving: enabled && imbalance > config.imbalance_max && local < 1.0,
        migration: enabled && local < config.local_max,
        replication,
        replicable,
    };
    let shares = accesses.map(|_, accesses| if total > 0.0 { accesses / total } else { 0.0 });
    Some((judgement, shares))
}

fn imbalance(accesses: &NodeMap<f64>) -> f64 {
    let count = accesses.len() as f64;
    let mean = accesses.values().sum::<f64>() / count;
    if count < 2.0 || mean <= 0.0 {
        return 0.0;
    }
    let squares: f64 = accesses.values().map(|a| (a - mean) * (a - mean)).sum();
    (squares / (count - 1.0)).sqrt() / mean
}

/// Returns the number of samples that each of these pages got.
fn count(used: &PageUse) -> u32 {
    used.samples
        .values()
        .fold(0, |sum, samples| sum.saturating_add(*samples))
}

/// Decides which pages of one VM move where.
struct Deal<'a> {
    /// Nodes that the VM's pages may move to, with each node's share of accesses.
    targets: &'a NodeMap<f64>,
    judgement: Judgement,
    /// Pages that may still move.
    left: u64,
    /// Number of free pages on each node of the host.
    room: &'a mut NodeMap<u64>,
    chance: &'a mut SplitMix,
    moves: Vec<FrameMove>,
}

impl Deal<'_> {
    fn all(&mut self, uses: &[PageUse]) {
        let mut hottest: Vec<&PageUse> = uses.iter().collect();
        hottest.sort_by_key(|used| (std::cmp::Reverse(count(used)), used.frame, used.on));
        for used in hottest {
            if self.left == 0 {
                return;
            }
            if used.samples.len() > 1 {
                self.spread(used);
            } else {
                self.follow(used);
            }
        }
    }

    /// Moves pages that several nodes use off their node, each with a probability equal to the node's share.
    fn spread(&mut self, used: &PageUse) {
        let Some(share) = self
            .targets
            .get(used.on)
            .copied()
            .filter(|_| self.judgement.interleaving)
        else {
            return;
        };
        let mut to: BTreeMap<NodeId, u64> = BTreeMap::new();
        for _ in 0..used.pages.0 {
            if self.left == 0 {
                break;
            }
            if self.chance.unit() >= share {
                continue;
            }
            if let Some(node) = self.draw(used.on) {
                *to.entry(node).or_default() += self.take(node, 1);
            }
        }
        for (node, pages) in to {
            self.note(used, node, pages);
        }
    }

    /// Draws a target with room other than `from`, with weight 1 minus its share.
    fn draw(&mut self, from: NodeId) -> Option<NodeId> {
        let open = |(node, share): (NodeId, &f64)| {
            let room = self.room.get(node).copied().unwrap_or(0);
            (node != from && room > 0).then_some((node, 1.0 - share))
        };
        let open: Vec<(NodeId, f64)> = self.targets.iter().filter_map(open).collect();
        let sum: f64 = open.iter().map(|(_, weight)| weight).sum();
        let mut at = self.chance.unit() * sum;
        for (node, weight) in &open {
            if at < *weight {
                return Some(*node);
            }
            at -= weight;
        }
        // Reached because of rounding, or if all weights are 0.
        open.last().map(|(node, _)| *node)
    }

    /// Moves pages that one node uses to that node.
    fn follow(&mut self, used: &PageUse) {
        let Some((user, samples)) = used.samples.iter().next() else {
            return;
        };
        let Judgement {
            migration,
            interleaving,
            ..
        } = self.judgement;
        let worth = migration && *samples >= 2 || interleaving && *samples >= 1;
        if user == used.on || !worth || self.targets.get(user).is_none() {
            return;
        }
        let pages = self.take(user, used.pages.0);
        self.note(used, user, pages);
    }

    /// Deducts pages from the target's room and from the budget; returns for how many of them both sufficed.
    fn take(&mut self, to: NodeId, pages: u64) -> u64 {
        let room = self.room.get(to).copied().unwrap_or(0);
        let pages = pages.min(self.left).min(room);
        self.left -= pages;
        if let Some(room) = self.room.get_mut(to) {
            *room -= pages;
        }
        pages
    }

    fn note(&mut self, used: &PageUse, to: NodeId, pages: u64) {
        if pages > 0 {
            self.moves.push(FrameMove {
                frame: used.frame,
                pages: Pages(pages),
                from: used.on,
                to,
            });
        }
    }
}

fn reason(judgement: &Judgement, moves: &[FrameMove], uses: &[PageUse]) -> String {
    let what = match (judgement.interleaving, judgement.migration) {
        (true, true) => "spread shared pages and move others to the nodes that use them",
        (true, false) => "spread shared pages",
        (false, _) => "move pages to the nodes that use them",
    };
    let targets: NodeSet = moves.iter().map(|step| step.to).collect();
    let pages: Pages = moves.iter().map(|step| step.pages).sum();
    let seen: Pages = uses.iter().map(|used| used.pages).sum();
    format!(
        "{what}: {pages} of {seen} sampled, to node {targets}; {:.0} memory accesses per us, imbalance {:.0} percent, {:.0} \
         percent local",
        judgement.accesses_per_us,
        judgement.imbalance * 100.0,
        judgement.local * 100.0
    )
}

#[cfg(test)]
#[path = "carrefour/tests.rs"]
mod tests;
