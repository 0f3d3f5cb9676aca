//! Attributes LLC misses to VMs on a running host: now and then a VM with a permit has its last-level cache to itself.
//!
//! # Problem
//! A VM's counters include misses that its neighbours caused, and its permit is charged for them. [`sampler`] decides who should
//! have the cache alone, and what follows from it. Here the others are sent away and brought back, with acts that every host has.
//!
//! # Terms
//! - *Window*, *disturber*, *out*, *part*: see [`sampler`].
//! - *Away*: a VM that the agent keeps off a cache for a window. Only its vCPUs move, never its memory.
//! - *Rest*: the time for which a VM that was away is not sent away again, except for first windows while an hour's share lasts.
//!
//! # Algorithm
//! In each period:
//! 1. Note who is away: a vCPU still has the affinity of the window, or what offline CPUs left of it. A VM that is missing from a
//!    sample is still away.
//! 2. Let the sampler look at the VMs. A VM cannot be isolated (`obstacle`) while a disturber rests, may not be moved, or has no
//!    CPU outside the cache that it may use, or while the CPUs outside have too little idle time, less what is reserved there; or
//!    while acts of this policy are only reported or recommended.
//! 3. Pin vCPUs of VMs that are out, as far as they may run on the cache, to CPUs outside: those of the VM's home, if any, else
//!    all that it may use. A VM is out for a period before that, so that all other policies leave it alone
//!    ([`HandsOff::Isolating`]).
//! 4. Bring back VMs that are away and not out, in each period until it is done: a VM with a home gets its former affinity, one
//!    without gets what it had before the agent's first pin. Of a VM that the operator pinned meanwhile, only the vCPUs return
//!    that the operator left where the window put them. VMs that an earlier agent may have left away return likewise.
//! 5. If the CPUs that VMs may use change, or a VM that is out may not be moved any more, the window ends.
//!
//! A VM rests until [`Config::away_share`] of the time since repays what it was away, so that an hour has at most that share.
//! The cost needs no estimate: a VM that stood still while away would lose that share and no more. The paper's costs up to 12
//! percent [Kyoto, section 3.3.5], which is the highest value allowed.
//!
//! # Properties
//! - `neighbours_leave_and_come_back_to_where_they_were`
//! - `who_may_not_leave_leaves_the_plain_count_and_the_reason`
//! - `nobody_is_away_for_more_than_its_share`
//! - `a_change_of_cpus_ends_the_window`
//! - `what_an_earlier_agent_left_away_is_brought_back`
//! - `who_is_missing_from_a_sample_returns_all_the_same`
//! - `vcpus_that_the_operator_did_not_pin_return`
//! - `who_may_not_leave_when_it_joins_ends_the_window`
//! - `a_quota_stays_while_own_misses_are_awaited`
//! - in `control/tests/control/attribution.rs`: `a_victim_keeps_its_permits_full_cpu_and_without_attribution_is_throttled`,
//!   `a_thrasher_still_pays_for_its_own_misses`, `everybody_returns_whatever_happens`,
//!   `a_restarted_agent_brings_everybody_back`, `a_dry_run_and_a_pause_send_nobody_away`
//!
//! # Not done
//! - A VM that behaves only while it is alone is charged too little.
//! - resctrl's occupancy and bandwidth by VM are no evidence here: they do not tell who evicted whom.
//! - A kernel that balances may move some pages of a VM to where it runs for a window.

mod obstacle;
pub mod sampler;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use homenode_host::{Act, HandsOff, Lever, Mode, Plan, Sample, VcpuSample, View, VmView};
use homenode_units::{Any, CpuId, CpuSet, Ns, VmId};
use serde::{Deserialize, Serialize};

use crate::bounds::SPAN;
use crate::placement::Ledger;
pub use obstacle::Obstacle;
use sampler::{Basis, Charge, Counts, Sampler, Seen, Turn};

/// Name of this policy in plans.
pub const POLICY: &str = "attribution";

/// A vCPU that ran for less than this share of a period touched no cache worth mentioning. It is not a setting.
const RAN_MIN: f64 = 0.001;
/// Part of [`Config::away_share`] by which the time that a VM was away is paid off. The rest is credit for first windows, so an
/// hour has at most that share. It is not a setting.
const REPAID: f64 = 5.0 / 6.0;
const HOUR: Ns = Ns::from_secs(3600);
/// Number of periods in which the agent orders the return of a VM that an earlier agent left away. After this number of periods,
/// other policies no longer wait for a VM that cannot be brought back. It is not a setting.
const RETURNS_WAITED: u32 = 10;
/// A VM that is missing from samples for longer has ended, so its own misses are forgotten. Whether it was away is kept for an
/// hour. It is not a setting.
const ABSENT_MAX: Ns = Ns::from_secs(60);

/// For which cache misses a VM pays with its permit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Charged {
    /// The VM's own, measured while it has its cache to itself.
    #[default]
    Own,
    /// All that are counted, including those that its neighbours cause.
    Counted,
}

/// The operator's settings.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// For which cache misses a VM pays with its permit.
    pub charged: Charged,
    /// Largest share of an hour for which a VM is kept off its cache for others' measurements, 0.001 to 0.12.
    pub away_share: f64,
    /// Number of instructions that a VM retires between two windows, in each of which it has its cache to itself.
    pub instructions_between: u64,
    /// Number of unhalted cycles for which the VM is alone on its caches.
    pub window_cycles: u64,
    /// Misses count as few if there are fewer than this per unhalted millisecond.
    pub few_per_ms: f64,
    /// A window that is not full after this time is given up, because the VM hardly runs.
    #[serde(with = "homenode_units::text")]
    pub window_most: Ns,
}

impl Default for Config {
    /// The paper's 100 million instructions and billion cycles. The paper does not define "few"; here it is 1000 misses per
    /// unhalted millisecond, that is 64 MB/s.
    fn default() -> Self {
        Config {
            charged: Charged::Own,
            away_share: 0.02,
            instructions_between: 100_000_000,
            window_cycles: 1_000_000_000,
            few_per_ms: 1_000.0,
            window_most: Ns::from_secs(5),
        }
    }
}

homenode_units::settings! {
    Config {
        charged: Any,
        away_share: 0.001..=0.12,
        instructions_between: 0..=1_000_000_000_000_000,
        window_cycles: 1..=1_000_000_000_000,
        few_per_ms: 0.0..=1_000_000.0,
        window_most: SPAN,
    }
}

/// What else decides whether a window may begin.
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// What is reserved for VMs that do not run yet.
    pub ledger: &'a Ledger,
    /// Whether homes are on trial, which a window would disturb.
    pub has_trials: bool,
    /// Whether acts of this policy are carried out, neither only reported nor recommended.
    pub may_act: bool,
}

/// A VM that is kept off a cache while another VM has it alone.
#[derive(Clone, Debug)]
struct Away {
    /// CPUs on which the VM runs while it is away.
    cpus: CpuSet,
    /// The vCPUs that were moved, with their affinities before.
    before: Vec<(u16, CpuSet)>,
    since: Ns,
    /// Whether a sample has shown the VM away.
    was_seen: bool,
    /// Number of periods in which the VM's return was ordered.
    returns_count: u32,
}

impl Away {
    /// Returns the vCPUs that are still on the CPUs to which the window moved them.
    fn still(&self, view: &View<'_>, vm: &VmView<'_>) -> Vec<&(u16, CpuSet)> {
        // A vCPU that the operator pinned to some of these CPUs remains pinned.
        let is_by_hand = vm.hands_off == Some(HandsOff::PinnedByHand);
        let online = || {
            self.cpus
                .intersection(&view.sample.cpus.iter().map(|cpu| cpu.id).collect())
        };
        let least = if is_by_hand { online() } else { CpuSet::new() };
        let is_still = |(index, before): &&(u16, CpuSet)| {
            let pinned = &vm.sample.settings.pinned_vcpus;
            let vcpu = vm.sample.vcpu(*index).filter(|_| !pinned.contains(index));
            vcpu.map(|vcpu| &vcpu.affinity).is_some_and(|affinity| {
                let is_within = !affinity.is_empty() && affinity.is_subset(&self.cpus);
                is_within && least.is_subset(affinity) && affinity != before
            })
        };
        self.before.iter().filter(is_still).collect()
    }
}

/// How long a VM was away.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    total: Ns,
    last: Ns,
    /// Time away that was not repaid at `at`, in nanoseconds.
    debt_ns: f64,
    at: Ns,
}

impl Spent {
    fn debt_ns(&self, now: Ns, config: &Config) -> f64 {
        let repaid = now.saturating_sub(self.at).as_f64() * config.away_share * REPAID;
        (self.debt_ns - repaid).max(0.0)
    }

    fn add(&mut self, span: Ns, now: Ns, config: &Config) {
        let debt_ns = self.debt_ns(now, config) + span.as_f64();
        *self = Spent {
            total: Ns(self.total.0.saturating_add(span.0)),
            last: span,
            debt_ns,
            at: now,
        };
    }

    /// Whether the VM was away so recently that it may not be sent away for another VM's window.
    fn rests(&self, turn: Turn, now: Ns, config: &Config) -> bool {
        let debt_ns = self.debt_ns(now, config);
        let credit_ns = HOUR.as_f64() * config.away_share * (1.0 - REPAID);
        let is_beyond = debt_ns + self.last.as_f64() > credit_ns;
        debt_ns > 0.0 && (turn != Turn::First || is_beyond)
    }
}

/// State kept between periods.
#[derive(Clone, Debug, Default)]
pub struct State {
    sampler: Sampler,
    away: BTreeMap<VmId, Away>,
    /// VMs that were away.
    spent: BTreeMap<VmId, Spent>,
    /// VMs that may have been left away, each with the number of periods in which its return was ordered.
    leftovers: BTreeMap<VmId, u32>,
    /// Since when VMs are missing from samples.
    absent: BTreeMap<VmId, Ns>,
    /// CPUs that VMs may use.
    cpus: CpuSet,
    /// Obstacles that were reported.
    told: BTreeMap<VmId, Obstacle>,
}

impl State {
    /// Returns true while a VM has its caches to itself, or others are away. Speeds and places of VMs mean nothing meanwhile.
    pub fn is_open(&self) -> bool {
        let is_waited_for =
            |(vm, away): (&VmId, &Away)| away.returns_count < RETURNS_WAITED && !self.absent.contains_key(vm);
        self.sampler.isolates().is_some() || self.away.iter().any(is_waited_for)
    }

    /// Returns true if a VM has its caches to itself, is away, or is about to leave. Then no other policy may move it.
    pub fn involves(&self, vm: VmId) -> bool {
        let is_isolated = self
            .sampler
            .isolates()
            .is_some_and(|(isolated, _)| isolated == vm);
        is_isolated || self.away.contains_key(&vm) || self.sampler.is_out(vm)
    }

    /// Returns true if a decision about a VM brings it back.
    pub fn gives_back(&self, vm: VmId) -> bool {
        !self.sampler.is_out(vm)
    }

    /// Returns what a VM is charged for; `None` if that is all that is counted, since it has no permit.
    pub fn charge(&self, vm: VmId) -> Option<Charge> {
        self.sampler.charge(vm)
    }

    /// Returns the part of a VM's counted misses that its permit is charged for; `None` while it is unknown.
    pub fn part(&self, vm: VmId) -> Option<f64> {
        self.charge(vm).map_or(Some(1.0), |charge| charge.part)
    }

    /// Returns in words which of a VM's misses its permit is charged for; `None` if that is not decided for it.
    pub fn in_words(&self, vm: VmId, sample: &Sample) -> Option<String> {
        let Charge { part, basis } = self.charge(vm)?;
        let name = |vm| sample.vm(vm).map(|vm| vm.name.as_str());
        Some(match basis {
            Basis::Isolated => "all misses: it has its cache to itself now".to_owned(),
            Basis::FewMisses => "all misses: they are few".to_owned(),
            Basis::QuietNeighbours => "all misses: no VM beside it misses much".to_owned(),
            Basis::Window { at } => format!(
                "{:.0} percent of its misses: those are its own, as counted {:.0} s ago while it had its cache to itself",
                part.unwrap_or(1.0) * 100.0,
                sample.at.saturating_sub(at).as_secs_f64()
            ),
            Basis::Awaited => "nothing yet: its own misses are about to be counted".to_owned(),
            Basis::Counted(why) => format!(
                "all misses, its neighbours' doing included: {}",
                why.in_words(name)
            ),
        })
    }

    /// Returns the time for which a VM was away so far.
    pub fn away(&self, vm: VmId) -> Ns {
        self.spent.get(&vm).map_or(Ns::ZERO, |spent| spent.total)
    }

    /// Notes that an earlier agent changed something on a VM, perhaps for a window that it did not end.
    pub fn adopted(&mut self, vm: VmId) {
        self.leftovers.insert(vm, 0);
    }
}

/// Sends VMs away for windows and brings them back.
pub fn plan(view: &View<'_>, config: &Config, situation: Situation<'_>, state: &mut State) -> Plan {
    let mut plan = Plan::new(view.version);
    state.look(view, config);
    let usable = view.cpus.union(&view.isolated);
    let has_changed = std::mem::replace(&mut state.cpus, usable) != state.cpus;
    let has_permit = |vm: &VmView<'_>| vm.managed() && vm.sample.settings.permit.is_some();
    let is_missing = |vm| state.absent.contains_key(&vm);
    let has_permits = view.vms.iter().any(has_permit) || state.sampler.known().any(is_missing);
    if config.charged == Charged::Counted || !has_permits {
        state.sampler = Sampler::default();
    } else {
        let may_stay_out = |vm: &VmView<'_>| !state.sampler.is_out(vm.sample.id) || forbidden(vm).is_none();
        if has_changed || !situation.may_act || !view.vms.iter().all(may_stay_out) {
            state.sampler.give_up();
        }
        let clock_hz = view.machine.hardware.as_ref().map(|hardware| hardware.clock_hz);
        // If the frequency of the CPU is unknown, the time that a vCPU ran stands for its cycles.
        state
            .sampler
            .set(*config, clock_hz.map_or(1_000_000, |hz| hz / 1000));
        let host: Vec<Seen> = view
            .vms
            .iter()
            .map(|vm| seen(view, vm, has_permit(vm), clock_hz.is_some()))
            .collect();
        let is_there = |vm: &VmId| !state.absent.contains_key(vm);
        let is_unsettled = has_changed || situation.has_trials || state.away.keys().any(is_there);
        let (spent, leftovers) = (&state.spent, &state.leftovers);
        state.sampler.step(view.at, &host, |seen, out, turn| {
            let rests = |vm: &VmId| {
                spent
                    .get(vm)
                    .is_some_and(|spent| spent.rests(turn, view.at, config))
            };
            if let Some(lasting) = lasting(view, situation.ledger, seen, out) {
                return Some(lasting);
            }
            // If a VM were left away, it would return to the wrong CPUs.
            let is_left = |vm: &VmId| leftovers.contains_key(vm);
            let is_unsettled = is_unsettled && turn != Turn::Joining;
            match is_unsettled || is_left(&seen.vm) || out.iter().any(is_left) {
                _ if !situation.may_act => Some(Obstacle::NotActing),
                true => Some(Obstacle::Unsettled),
                false => out.iter().any(rests).then_some(Obstacle::Resting),
            }
        });
    }
    state.tell(view, &mut plan);
    state.bring_back(view, &mut plan);
    state.send_away(view, &mut plan);
    plan
}

/// Returns a VM as the sampler sees it.
fn seen(view: &View<'_>, vm: &VmView<'_>, has_permit: bool, has_clock: bool) -> Seen {
    let add = |sum: Counts, vcpu: &VcpuSample| {
        let counters = vcpu.counters?;
        let cycles = if has_clock {
            counters.cycles
        } else {
            vcpu.running_ns.0
        };
        Some(Counts {
            instructions: sum.instructions.saturating_add(counters.instructions),
            cycles: sum.cycles.saturating_add(cycles),
            llc_misses: sum.llc_misses.saturating_add(counters.llc_misses?),
        })
    };
    let mut caches = CpuSet::new();
    for vcpu in &vm.sample.vcpus {
        let rates = vm
            .rates
            .and_then(|rates| rates.vcpus.iter().find(|of| of.index == vcpu.index));
        let has_run = rates.is_some_and(|rates| rates.running >= RAN_MIN);
        if let Some(cpus) = vcpu.cpu.filter(|_| has_run).and_then(|cpu| cache_of(view, cpu)) {
            caches = caches.union(cpus);
        }
    }
    Seen {
        vm: vm.sample.id,
        counts: vm.sample.vcpus.iter().try_fold(Counts::default(), add),
        has_permit,
        caches,
    }
}

/// Returns the CPUs that share a last-level cache with this one. If the host does not report caches, its node's.
fn cache_of<'a>(view: &View<'a>, cpu: CpuId) -> Option<&'a CpuSet> {
    let cpu = view.machine.cpu(cpu)?;
    let cache = cpu.llc.and_then(|at| view.machine.llcs.get(at as usize));
    let of_node = || view.machine.nodes.get(cpu.node).map(|node| &node.cpus);
    cache.map(|cache| &cache.cpus).or_else(of_node)
}

/// Returns where a VM may run outside these caches: on CPUs of its home, if there are any, else on all that it may use.
fn elsewhere(view: &View<'_>, vm: &VmView<'_>, caches: &CpuSet) -> CpuSet {
    let all = view
        .cpus_for(vm.sample.settings.cpus_allowed.as_ref())
        .difference(caches);
    let home = vm.home.map(|home| all.intersection(&view.machine.cpus_of(home)));
    home.filter(|home| !home.is_empty()).unwrap_or(all)
}

/// Returns the vCPUs of a VM that may run on these caches.
fn on<'a>(vm: &'a VmView<'_>, caches: &'a CpuSet) -> impl Iterator<Item = &'a VcpuSample> {
    let vcpus = vm.sample.vcpus.iter();
    vcpus.filter(move |vcpu| vcpu.affinity.count_common(caches) > 0)
}

/// Returns why a VM may not be sent away at all.
fn forbidden(vm: &VmView<'_>) -> Option<Obstacle> {
    let id = vm.sample.id;
    let hands_off = vm.hands_off.filter(|why| *why != HandsOff::Isolating);
    let ignored = (!vm.managed()).then_some(HandsOff::Ignored);
    let mode = vm.sample.settings.mode.filter(|mode| *mode != Mode::Act);
    hands_off
        .or(ignored)
        .map(|why| Obstacle::HandsOff(id, why))
        .or_else(|| mode.map(|mode| Obstacle::Mode(id, mode)))
}

/// Returns an obstacle that does not pass by itself.
fn lasting(view: &View<'_>, ledger: &Ledger, seen: &Seen, out: &BTreeSet<VmId>) -> Option<Obstacle> {
    if view
        .cpus
        .union(&view.isolated)
        .difference(&seen.caches)
        .is_empty()
    {
        return Some(Obstacle::NoOtherCache);
    }
    let (mut targets, mut needed) = (CpuSet::new(), 0.0);
    for vm in view.vms.iter().filter(|vm| out.contains(&vm.sample.id)) {
        let id = vm.sample.id;
        if let Some(why) = forbidden(vm) {
            return Some(why);
        }
        let cpus = elsewhere(view, vm, &seen.caches);
        if cpus.is_empty() {
            return Some(Obstacle::NoCpu(id));
        }
        let rates = vm.rates.iter().flat_map(|rates| &rates.vcpus);
        let moved = rates.filter(|of| on(vm, &seen.caches).any(|vcpu| vcpu.index == of.index));
        let need = moved.map(|of| of.running + of.waited()).sum::<f64>();
        if idle(view, ledger, &cpus) < need {
            return Some(Obstacle::NoRoom);
        }
        needed += need;
        targets = targets.union(&cpus);
    }
    (idle(view, ledger, &targets) < needed).then_some(Obstacle::NoRoom)
}

/// Returns the idle time of these CPUs, in CPUs, less what is reserved on their nodes for VMs that do not run yet.
fn idle(view: &View<'_>, ledger: &Ledger, cpus: &CpuSet) -> f64 {
    let Some(rates) = view.rates else { return 0.0 };
    let of = rates.cpus_busy.iter().filter(|(cpu, _)| cpus.contains(*cpu));
    let idle: f64 = of.map(|(_, busy)| 1.0 - busy).sum();
    let touches = |nodes: &homenode_units::NodeSet| view.machine.cpus_of(nodes).count_common(cpus) > 0;
    let reserved = ledger.pending(view).filter(|reserved| touches(&reserved.nodes));
    idle - reserved.map(|reserved| reserved.demand.cpus).sum::<f64>()
}

impl State {
    /// Step 1 of the algorithm: notes which VMs are away and which are back.
    fn look(&mut self, view: &View<'_>, config: &Config) {
        let vm_of = |vm: &VmId| view.vms.binary_search_by_key(vm, |of| of.sample.id).ok();
        let is_there = |vm: &VmId| vm_of(vm).is_some();
        let (spent, leftovers, absent) = (&mut self.spent, &mut self.leftovers, &mut self.absent);
        self.away.retain(|id, away| {
            // The threads of a VM that is missing from the sample may keep their affinities.
            let Some(vm) = vm_of(id).map(|at| &view.vms[at]) else {
                return true;
            };
            // The host restores VMs that operators opt out.
            let is_away = !away.still(view, vm).is_empty();
            away.was_seen |= is_away;
            if !is_away && away.was_seen {
                let until = absent.get(id).copied().unwrap_or(view.at);
                let span = until.saturating_sub(away.since);
                spent.entry(*id).or_default().add(span, view.at, config);
            }
            let is_elsewhere = |(index, before): &(u16, CpuSet)| {
                let vcpu = vm.sample.vcpu(*index);
                vcpu.is_some_and(|vcpu| vcpu.affinity != *before)
            };
            if !is_away && away.before.iter().any(is_elsewhere) {
                leftovers.insert(*id, 0);
            }
            is_away
        });
        absent.retain(|vm, _| !is_there(vm));
        let known = self.sampler.known();
        for vm in known.chain(
            self.away
                .keys()
                .chain(spent.keys())
                .chain(leftovers.keys())
                .copied(),
        ) {
            if !is_there(&vm) {
                absent.entry(vm).or_insert(view.at);
            }
        }
        let is_missing_for = |vm: &VmId, most: Ns| {
            let since = absent.get(vm);
            since.is_some_and(|since| view.at.saturating_sub(*since) > most)
        };
        self.sampler.forget(|vm| is_missing_for(&vm, ABSENT_MAX));
        self.away.retain(|vm, _| !is_missing_for(vm, HOUR));
        spent.retain(|vm, _| !is_missing_for(vm, HOUR));
        leftovers.retain(|vm, _| !is_missing_for(vm, HOUR));
        absent.retain(|_, since| view.at.saturating_sub(*since) <= HOUR);
    }

    /// Step 3 of the algorithm: moves VMs off the cache.
    fn send_away(&mut self, view: &View<'_>, plan: &mut Plan) {
        let Some((isolated, caches)) = self.sampler.isolates() else {
            return;
        };
        let name = view.sample.vm(isolated).map_or("?", |vm| vm.name.as_str());
        for vm in view.vms.iter().filter(|vm| self.sampler.is_out(vm.sample.id)) {
            let id = vm.sample.id;
            // Other policies must first know that the VM is about to leave.
            if vm.hands_off != Some(HandsOff::Isolating) || self.away.contains_key(&id) {
                continue;
            }
            let before: Vec<(u16, CpuSet)> = on(vm, caches)
                .map(|vcpu| (vcpu.index, vcpu.affinity.clone()))
                .collect();
            let cpus = elsewhere(view, vm, caches);
            if before.is_empty() || cpus.is_empty() {
                continue;
            }
            let vcpus = before.iter().map(|(index, _)| *index).collect();
            let act = Act::PinVcpus {
                vcpus,
                cpus: cpus.clone(),
            };
            let why = format!(
                "for seconds, VM {name} has its cache to itself, to count the misses that are its own"
            );
            plan.decide(POLICY, act.on(id), why);
            let away = Away {
                cpus,
                before,
                since: view.at,
                was_seen: false,
                returns_count: 0,
            };
            self.away.insert(id, away);
        }
    }

    /// Step 4 of the algorithm: brings VMs back.
    fn bring_back(&mut self, view: &View<'_>, plan: &mut Plan) {
        let vm_of = |id| view.vms.binary_search_by_key(&id, |vm| vm.sample.id).ok();
        for (id, away) in &mut self.away {
            let Some(at) = vm_of(*id).filter(|_| !self.sampler.is_out(*id)) else {
                continue;
            };
            away.returns_count = away.returns_count.saturating_add(1);
            if view.vms[at].managed() {
                return_vm(view, &view.vms[at], &away.still(view, &view.vms[at]), plan);
            }
        }
        let away = &self.away;
        self.leftovers.retain(|id, tries_count| {
            let Some(vm) = vm_of(*id).map(|at| &view.vms[at]) else {
                return true;
            };
            if !vm.managed() || vm.hands_off.is_some() || away.contains_key(id) {
                return true;
            }
            let Some(act) = return_of_leftover(view, vm) else {
                return false;
            };
            if *tries_count >= RETURNS_WAITED {
                let name = &vm.sample.name;
                let message = format!("VM {name} did not return to its cache in {RETURNS_WAITED} attempts");
                plan.find(POLICY, Some(*id), message);
                return false;
            }
            *tries_count += 1;
            let why = "it was left away from its cache, perhaps by an earlier agent".to_owned();
            plan.decide(POLICY, act.on(*id), why);
            true
        });
    }

    /// Reports why a VM is charged for all of its misses, but not again until the reason has changed.
    fn tell(&mut self, view: &View<'_>, plan: &mut Plan) {
        self.told.retain(|vm, _| view.sample.vm(*vm).is_some());
        for vm in &view.vms {
            let id = vm.sample.id;
            let Some(Basis::Counted(why)) = self.charge(id).map(|charge| charge.basis) else {
                continue;
            };
            if self.told.insert(id, why) != Some(why) {
                let why = why.in_words(|vm| view.sample.vm(vm).map(|vm| vm.name.as_str()));
                let message = format!(
                    "VM {} is charged for all misses counted, including those that its neighbours cause: {why}",
                    vm.sample.name
                );
                plan.find(POLICY, Some(id), message);
            }
        }
    }
}

/// Lets a VM run where it did before the window.
fn return_vm(view: &View<'_>, vm: &VmView<'_>, before: &[&(u16, CpuSet)], plan: &mut Plan) {
    let why = || "it returns to its cache: the count of a neighbour's own misses is over".to_owned();
    // Lifting all pins would also undo what the operator pinned.
    if vm.home.is_none() && vm.hands_off != Some(HandsOff::PinnedByHand) {
        let lever = Lever::Home;
        plan.decide(POLICY, Act::Lift { lever }.on(vm.sample.id), why());
        return;
    }
    let usable = view.cpus_for(vm.sample.settings.cpus_allowed.as_ref());
    let mut left = before.to_vec();
    while let Some((_, cpus)) = left.first().copied() {
        let (alike, others): (Vec<_>, Vec<_>) = left.into_iter().partition(|(_, of)| of == cpus);
        left = others;
        // The CPUs that the VM may use may have changed meanwhile.
        let there = cpus.intersection(&usable);
        let act = Act::PinVcpus {
            vcpus: alike.iter().map(|(index, _)| *index).collect(),
            cpus: if there.is_empty() { usable.clone() } else { there },
        };
        plan.decide(POLICY, act.on(vm.sample.id), why());
    }
}

/// Returns the act that brings back a VM that was left away; `None` if it is not.
///
/// A VM without a home has no pins of the agent, so any are of a window. With one, a vCPU that may run only on some of its home's
/// caches is taken to be away, unless the host tells that the home is on these caches. Other parts of a home are another
/// program's.
fn return_of_leftover(view: &View<'_>, vm: &VmView<'_>) -> Option<Act> {
    let usable = view.cpus_for(vm.sample.settings.cpus_allowed.as_ref());
    let Some(home) = vm.home else {
        let is_narrow = |vcpu: &VcpuSample| !usable.is_subset(&vcpu.affinity);
        let lever = Lever::Home;
        return vm
            .sample
            .vcpus
            .iter()
            .any(is_narrow)
            .then_some(Act::Lift { lever });
    };
    let whole = usable.intersection(&view.machine.cpus_of(home));
    let kept_on = vm.sample.home.part().map(|part| part.intersection(&whole));
    let cpus = kept_on
        .filter(|part| !part.is_empty())
        .unwrap_or_else(|| whole.clone());
    let is_on_some_caches = |affinity: &CpuSet| {
        let is_whole = |cpu: CpuId| {
            let cache = cache_of(view, cpu).map(|cache| cache.intersection(&whole));
            cache.is_some_and(|cache| cache.is_subset(affinity))
        };
        let is_part = affinity.is_subset(&whole) && *affinity != whole && *affinity != cpus;
        vm.layout.is_none() && is_part && affinity.iter().all(is_whole)
    };
    let is_away = |vcpu: &&VcpuSample| {
        vm.away_node(view.machine, vcpu.index).is_some() || is_on_some_caches(&vcpu.affinity)
    };
    let away = vm.sample.vcpus.iter().filter(is_away);
    let vcpus: Vec<u16> = away.map(|vcpu| vcpu.index).collect();
    (!vcpus.is_empty() && !cpus.is_empty()).then_some(Act::PinVcpus { vcpus, cpus })
}
