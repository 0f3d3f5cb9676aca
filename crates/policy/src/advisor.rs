//! Advises a memory policy for a VM, the question that \[Policies\] leaves open (section 6).
//!
//! # Problem
//! No memory policy is best for all VMs: the wrong one slows a VM down several times [Policies, figure 2]. Operators do not
//! know which programs run in a guest, and the programs change.
//!
//! # Terms
//! *Imbalance*: standard deviation over mean of a VM's accesses to the memory of its home nodes, in percent. *Class* of a VM:
//! low if its imbalance is at most [`Config::imbalance_low`], moderate if at most [`Config::imbalance_moderate`], else high
//! (section 3.5.2, under first-touch). *Speed*: instructions per second of all of a VM's vCPUs.
//!
//! # Algorithm
//! A VM with several home nodes and movable memory is *watched* for [`Config::watch`]. Then:
//! 1. Under first-touch: a VM of class low keeps its policy if no link is used by more than [`Config::link_busy`]. Otherwise
//!    round-4K is tried, with Carrefour if the host reports which CPUs use a page (section 3.5.2: within 2 percent of the
//!    best on average).
//! 2. Under round-4K without Carrefour: Carrefour is tried if a link is that busy and the share of the VM's accesses that are
//!    local is below [`Config::local_max`]. This is Carrefour's own condition, and remote accesses are the traffic that it
//!    can save.
//! 3. In a trial, pages have [`Config::settle`] to move; then a watch measures the VM's speed. Unless the speed has risen by
//!    [`Config::gain_min`], the earlier policy is restored.
//! 4. After a trial that helped, the VM is left alone for [`Config::hold`]. After each trial that did not, this time doubles,
//!    up to [`Config::hold_max`]. If a later watch under an adopted policy finds a lower speed than before the trial, the
//!    program has changed, and the policy is dropped as well.
//!
//! If the host's kernel balances NUMA memory, only a VM that works all the time and has the host to itself gets a trial: it
//! rests for less than a tenth of its vCPUs' time, and other VMs use less than a tenth of its CPU time. The speed of any
//! other VM depends on its load and its neighbours, so sooner or later any policy seems to help. Besides, the kernel no
//! longer brings spread pages to the CPUs that use them.
//!
//! # Properties
//! - `a_class_gets_its_policy`
//! - `where_the_kernel_balances_nothing_is_tried_with_a_vm_that_rests_or_has_company`
//! - `what_does_not_help_is_given_up_and_tried_ever_more_rarely`
//! - `nothing_is_tried_where_nothing_is_known`
//! - `a_guest_that_alternates_gets_few_changes`: the number of changes grows with the logarithm of time
//!
//! # Departures
//! - The paper's rule keeps first-touch for class low, however busy the links are. On the twin of 2026-11-22, ft.C and lu.C were
//!   in that class, loaded a link by a quarter, and were a third to two thirds slower under first-touch. Later profiles do not
//!   have this; a trial that does not help is undone.
//! - A VM without a home is advised too if it has more vCPUs than a node has cores, and one node with a busy memory
//!   controller ([`Config::controller_busy`]) answers more than [`Config::crowded_min`] times an even share of its accesses.
//!   No home of one node suits such a VM, so its memory is spread over all nodes.
//! - The paper classifies a program once, from a separate run; here the class is that of the last watch.
//! - Speed counts spinning as work: a guest whose threads spin while they wait looks fast, and a trial that only shortens the
//!   waiting is dropped.
//! - Restoring a policy does not move pages back: first-touch applies only to pages touched from then on.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use homenode_host::{VcpuRates, View, VmRates, VmView};
use homenode_units::{Any, BadSetting, MemoryPolicy, Migration, NodeId, NodeSet, Ns, Placing, VmId};

use crate::bounds::{PAUSE, SHARE, SPAN};
use crate::placement;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// On a host whose kernel balances, a VM gets a trial only if it rested for at most this share of its vCPUs' time, and other
/// VMs used at most this share of the CPU time that it used.
const NOISE_MAX: f64 = 0.1;

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Whether the agent follows its own advice for VMs whose operator chose nothing.
    pub acts: bool,
    /// Highest imbalance of class low, in percent.
    pub imbalance_low: f64,
    /// Highest imbalance of class moderate, in percent.
    pub imbalance_moderate: f64,
    /// Carrefour is not tried if the share of local accesses is at least this, 0 to 1.
    pub local_max: f64,
    /// A link is busy if its traffic exceeds this share of its capacity, 0 to 1.
    pub link_busy: f64,
    /// A watch that counts fewer accesses than this does not show how evenly they are spread.
    pub accesses_min: u64,
    /// An unplaced VM crowds a node that answers more than this many times an even share of its accesses, 0 to 1000.
    pub crowded_min: f64,
    /// An unplaced VM's memory is spread if the node that it crowds uses more than this share of its memory bandwidth, 0 to 1.
    pub controller_busy: f64,
    /// Time for which a VM is watched before and after a change of policy.
    #[serde(with = "homenode_units::text")]
    pub watch: Ns,
    /// Time that pages have to move before a trial is measured.
    #[serde(with = "homenode_units::text")]
    pub settle: Ns,
    /// Least gain of speed that justifies a change, as a share of the earlier speed.
    pub gain_min: f64,
    /// Time after a change in which no other trial begins.
    #[serde(with = "homenode_units::text")]
    pub hold: Ns,
    /// Longest such time, after many changes that did not help.
    #[serde(with = "homenode_units::text")]
    pub hold_max: Ns,
}

impl Default for Config {
    /// The classes are the paper's, and so is Carrefour's condition (80 percent local). Programs that load no link by more
    /// than a fifth hardly wait for memory on the paper's machine (tables 1 and 4). A watch spans several scheduler and
    /// program phases. The agent follows its advice, because each change is a trial that is undone if it does not help.
    fn default() -> Self {
        Config {
            acts: true,
            imbalance_low: 85.0,
            imbalance_moderate: 130.0,
            local_max: 0.8,
            link_busy: 0.2,
            accesses_min: 100_000,
            crowded_min: 1.8,
            controller_busy: 0.6,
            watch: Ns::from_secs(5),
            settle: Ns::from_secs(5),
            gain_min: 0.03,
            hold: Ns::from_secs(60),
            hold_max: Ns::from_secs(3600),
        }
    }
}

homenode_units::settings! {
    Config {
        acts: Any,
        imbalance_low: IMBALANCE,
        imbalance_moderate: IMBALANCE,
        local_max: SHARE,
        link_busy: SHARE,
        accesses_min: 0..=1_000_000_000_000,
        crowded_min: 0.0..=1000.0,
        controller_busy: SHARE,
        watch: SPAN,
        settle: PAUSE,
        gain_min: SHARE,
        hold: PAUSE,
        hold_max: PAUSE,
    } ordered
}

/// In percent. If all accesses go to one of n nodes, the imbalance is 100 times the root of n - 1.
const IMBALANCE: RangeInclusive<f64> = 0.0..=10_000.0;

fn ordered(config: &Config) -> Result<(), BadSetting> {
    let low = ("imbalance_low", config.imbalance_low);
    BadSetting::unless_ordered(low, ("imbalance_moderate", config.imbalance_moderate))?;
    BadSetting::unless_ordered(("hold", config.hold), ("hold_max", config.hold_max))
}

/// How unevenly a VM's accesses fall on its home nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Class {
    /// Accesses are spread about evenly.
    Low,
    /// Between low and high.
    Moderate,
    /// Most accesses go to few of the nodes.
    High,
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Class::Low => "low",
            Class::Moderate => "moderate",
            Class::High => "high",
        })
    }
}

/// The advice for a VM.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Advice {
    /// The policy that the VM should have; `None` if unknown.
    pub policy: Option<MemoryPolicy>,
    /// Imbalance in the last watch, in percent.
    pub imbalance: Option<f64>,
    /// Class in the last watch.
    pub class: Option<Class>,
    /// The reason for the advice, in a sentence.
    pub why: String,
}

impl Advice {
    /// Returns advice that names no policy, with the reason.
    pub fn none(why: &str) -> Advice {
        Advice {
            policy: None,
            imbalance: None,
            class: None,
            why: why.to_owned(),
        }
    }
}

/// What was observed in a watch.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    since: Ns,
    cycles: u32,
    instructions_per_s: f64,
    local: f64,
    link_busy: f64,
    /// Share of its vCPUs' time in which the VM rested.
    rests: f64,
    /// CPUs that the VM used, and CPUs that other VMs used, each summed over cycles.
    used: f64,
    used_by_others: f64,
    /// Accesses to each home node, in the order of the nodes.
    on: Vec<u64>,
}

impl Seen {
    fn from(now: Ns) -> Seen {
        Seen {
            since: now,
            ..Seen::default()
        }
    }

    /// Records a cycle. Returns whether all inputs were known.
    fn take(&mut self, view: &View<'_>, rates: &VmRates, home: &NodeSet) -> bool {
        let (Some(speed), Some(on)) = (rates.instructions_per_s, rates.accesses_on.as_ref()) else {
            return false;
        };
        self.cycles += 1;
        self.instructions_per_s += speed;
        self.local += rates.local_access_ratio.unwrap_or(1.0);
        self.link_busy = self.link_busy.max(busiest_link(view));
        let rests = |vcpu: &VcpuRates| 1.0 - vcpu.running - vcpu.waiting.unwrap_or(0.0) - vcpu.throttled;
        self.rests += rates.vcpus.iter().map(rests).sum::<f64>() / rates.vcpus.len().max(1) as f64;
        let of_all = view
            .vms
            .iter()
            .filter_map(|vm| vm.rates)
            .map(|rates| rates.cpus_used);
        self.used += rates.cpus_used;
        self.used_by_others += of_all.sum::<f64>() - rates.cpus_used;
        self.on.resize(home.len(), 0);
        for (sum, node) in self.on.iter_mut().zip(home.iter()) {
            *sum += on.get(node).copied().unwrap_or(0);
        }
        true
    }

    fn speed(&self) -> f64 {
        self.instructions_per_s / f64::from(self.cycles.max(1))
    }

    fn local(&self) -> f64 {
        self.local / f64::from(self.cycles.max(1))
    }

    /// Returns why a trial would show nothing; `None` if it would show something.
    fn noise(&self) -> Option<String> {
        let rests = self.rests / f64::from(self.cycles.max(1));
        let others = self.used_by_others / self.used;
        match () {
            () if rests > NOISE_MAX => Some(format!("it rests {:.0} percent of the time", 100.0 * rests)),
            () if others > NOISE_MAX => Some(format!("other VMs use {others:.1} times its CPU time")),
            () => None,
        }
    }

    /// Returns the imbalance in percent; `None` if there were too few accesses.
    fn imbalance(&self, config: &Config) -> Option<f64> {
        let sum: u64 = self.on.iter().sum();
        if sum < config.accesses_min {
            return None;
        }
        let on: Vec<f64> = self.on.iter().map(|on| *on as f64).collect();
        Some(100.0 * homenode_host::imbalance(&on)?)
    }
}

/// Returns the share of its capacity that the busiest link uses; 0 if unknown.
fn busiest_link(view: &View<'_>) -> f64 {
    let links = view.machine.links.iter();
    let used = links.filter_map(|link| view.rates?.link_use(view.machine, link.from, link.to));
    used.fold(0.0, f64::max)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// The VM is watched, and a trial may begin.
    Watching,
    /// A trial has begun, and its pages move until `until`.
    Settling {
        from: MemoryPolicy,
        before: f64,
        until: Ns,
    },
    /// A trial is being measured.
    Trying { from: MemoryPolicy, before: f64 },
    /// No trial begins before `until`.
    Holding { until: Ns },
}

#[derive(Clone, Debug)]
struct Case {
    stage: Stage,
    seen: Seen,
    home: NodeSet,
    /// The policy that the agent chose; `None` leaves the policy in force.
    choice: Option<MemoryPolicy>,
    /// The policy that was in force before the agent's choice was adopted, and the VM's speed under it.
    adopted: Option<(MemoryPolicy, f64)>,
    failures: u32,
    changes: u32,
    advice: Advice,
}

impl Case {
    fn new(now: Ns, home: &NodeSet) -> Case {
        Case {
            stage: Stage::Watching,
            seen: Seen::from(now),
            home: home.clone(),
            choice: None,
            adopted: None,
            failures: 0,
            changes: 0,
            advice: Advice::none("it is being watched; ask again in a moment"),
        }
    }

    fn choose(&mut self, policy: MemoryPolicy) {
        self.choice = Some(policy);
        self.changes += 1;
    }

    /// Returns to `policy`, and holds twice as long as after the last failure.
    fn give_up(&mut self, policy: MemoryPolicy, config: &Config, now: Ns) {
        let hold = config
            .hold
            .0
            .saturating_mul(1 << self.failures.min(20))
            .min(config.hold_max.0);
        self.failures += 1;
        self.choose(policy);
        self.adopted = None;
        self.stage = Stage::Holding {
            until: Ns(now.0.saturating_add(hold)),
        };
    }
}

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    cases: BTreeMap<VmId, Case>,
}

impl State {
    /// Returns the policy that the agent chose for a VM; `None` if it chose none.
    pub fn choice(&self, vm: VmId) -> Option<MemoryPolicy> {
        self.cases.get(&vm)?.choice
    }

    /// Returns the advice for a VM.
    pub fn advice(&self, vm: VmId) -> Option<&Advice> {
        Some(&self.cases.get(&vm)?.advice)
    }

    /// Postpones a choice that was not carried out. It is made again after the next watch if it still seems right.
    pub fn postpone(&mut self, vm: VmId) {
        if let Some(case) = self.cases.get_mut(&vm)
            && matches!(case.stage, Stage::Settling { .. })
        {
            case.stage = Stage::Watching;
            case.choice = None;
            case.changes = case.changes.saturating_sub(1);
        }
    }

    /// Whether the agent's last choice restored the policy from before a trial.
    pub fn gives_back(&self, vm: VmId) -> bool {
        let gave_up = |case: &Case| matches!(case.stage, Stage::Holding { .. }) && case.adopted.is_none();
        self.cases.get(&vm).is_some_and(gave_up)
    }

    /// Returns how many times the agent changed a VM's memory policy by its own advice.
    pub fn changes(&self, vm: VmId) -> u32 {
        self.cases.get(&vm).map_or(0, |case| case.changes)
    }
}

/// Records a cycle, and updates [`State::advice`] and [`State::choice`] for each VM.
pub fn observe(view: &View<'_>, config: &Config, state: &mut State) {
    state.cases.retain(|id, _| view.sample.vm(*id).is_some());
    for vm in &view.vms {
        let id = vm.sample.id;
        // An unplaced VM lives on all nodes that it may use.
        let home = &lives_on(view, vm);
        let case = state.cases.entry(id).or_insert_with(|| Case::new(view.at, home));
        if case.home != *home {
            *case = Case::new(view.at, home);
        }
        if let Some(why) = not_advised(view, config, vm, home) {
            case.advice = Advice::none(&why);
            continue;
        }
        let Some(rates) = vm.rates else { continue };
        if !case.seen.take(view, rates, home) {
            case.advice =
                Advice::none("instructions and memory accesses by node are not counted on this host");
            continue;
        }
        let acts = config.acts && vm.sample.settings.memory_policy.is_none();
        advance(view, vm, config, acts, case);
    }
}

/// Returns why a VM gets no advice; `None` if it can be advised.
fn not_advised(view: &View<'_>, config: &Config, vm: &VmView<'_>, home: &NodeSet) -> Option<String> {
    if home.len() < 2 {
        return Some("it has only one home node: its memory belongs there under any policy".into());
    }
    if let Some(why) = vm.memory_fixed() {
        return Some(format!("its pages cannot move: {why}"));
    }
    if vm.home.is_none() && !(is_wide(view, vm) && meets_a_hot_controller(view, config, vm)) {
        return Some("it has no home, and either fits on one node or keeps no memory controller busy".into());
    }
    vm.hands_off.map(|why| format!("it is left alone: {why}"))
}

/// Returns the nodes that may hold a VM's memory: its home or, without a home, the nodes that its operator allows.
pub(crate) fn lives_on(view: &View<'_>, vm: &VmView<'_>) -> NodeSet {
    let memory = view.machine.home_nodes();
    vm.home
        .cloned()
        .unwrap_or_else(|| match placement::allowed_nodes(view, vm) {
            Some(allowed) => memory.intersection(&allowed),
            None => memory,
        })
}

/// Whether a VM has more vCPUs than any node has cores, so that no home of one node suits it.
fn is_wide(view: &View<'_>, vm: &VmView<'_>) -> bool {
    let nodes = view.machine.nodes.keys();
    let cores = nodes.map(|node| view.machine.core_count(node)).max().unwrap_or(0);
    vm.sample.vcpus.len() > cores
}

/// Whether one node with a busy controller answers far more than an even share of a VM's accesses.
fn meets_a_hot_controller(view: &View<'_>, config: &Config, vm: &VmView<'_>) -> bool {
    let Some(on) = vm.rates.and_then(|rates| rates.accesses_on.as_ref()) else {
        return false;
    };
    let all: u64 = on.values().sum();
    let even = all as f64 / on.len().max(1) as f64;
    let is_hot = |(node, count): (NodeId, &u64)| {
        let used = view.rates.and_then(|rates| rates.nodes.get(node)?.bandwidth);
        let most = view
            .machine
            .nodes
            .get(node)
            .and_then(|node| node.memory_bandwidth);
        let busy = used.zip(most).map(|(used, most)| used.as_f64() / most.as_f64());
        *count as f64 > config.crowded_min * even && busy.is_none_or(|busy| busy > config.controller_busy)
    };
    all > config.accesses_min && on.iter().any(is_hot)
}

fn advance(view: &View<'_>, vm: &VmView<'_>, config: &Config, acts: bool, case: &mut Case) {
    let (now, in_force) = (view.at, vm.sample.memory_policy);
    if let Stage::Settling { from, before, until } = case.stage {
        if now >= until {
            case.stage = Stage::Trying { from, before };
            case.seen = Seen::from(now);
        }
        return;
    }
    if now.0 - case.seen.since.0 < config.watch.0 {
        return;
    }
    let seen = std::mem::replace(&mut case.seen, Seen::from(now));
    case.advice = advise(view, in_force, &seen, config);
    if !acts {
        case.choice = None;
        case.stage = Stage::Watching;
        return;
    }
    match case.stage {
        Stage::Settling { .. } => {}
        Stage::Trying { from, before } if seen.speed() < before * (1.0 + config.gain_min) => {
            case.give_up(from, config, now);
        }
        Stage::Trying { from, before } => {
            case.adopted = Some((from, before));
            case.stage = Stage::Holding {
                until: Ns(now.0.saturating_add(config.hold.0)),
            };
        }
        Stage::Holding { until } if now < until => {}
        Stage::Holding { .. } | Stage::Watching => {
            case.stage = Stage::Watching;
            if let Some((from, _)) = case.adopted.filter(|(_, before)| seen.speed() < *before) {
                case.give_up(from, config, now);
            } else if let Some(wanted) = case.advice.policy.filter(|wanted| *wanted != in_force) {
                case.choose(wanted);
                case.stage = Stage::Settling {
                    from: in_force,
                    before: seen.speed(),
                    until: Ns(now.0.saturating_add(config.settle.0)),
                };
            }
        }
    }
}

/// Returns the advice that follows from a watch.
fn advise(view: &View<'_>, in_force: MemoryPolicy, seen: &Seen, config: &Config) -> Advice {
    let Some(imbalance) = seen.imbalance(config) else {
        return Advice::none("it hardly uses memory");
    };
    let class = match imbalance {
        i if i <= config.imbalance_low => Class::Low,
        i if i <= config.imbalance_moderate => Class::Moderate,
        _ => Class::High,
    };
    if let Some(noise) = seen.noise().filter(|_| view.sample.kernel.balances()) {
        return Advice {
            policy: Some(in_force),
            imbalance: Some(imbalance),
            class: Some(class),
            why: format!("the kernel balances NUMA memory, so a trial would be inconclusive: {noise}"),
        };
    }
    let may_sample = view.sample.no_page_uses.is_none();
    let spread = match may_sample {
        true => Placing::Round4k.with_carrefour(),
        false => Placing::Round4k.alone(),
    };
    let is_busy = seen.link_busy > config.link_busy;
    let traffic = format!(
        "{:.0} percent of its accesses are local, and the busiest link is {:.0} percent busy",
        100.0 * seen.local(),
        100.0 * seen.link_busy
    );
    let (policy, why) = match (in_force.placing, in_force.migration, class) {
        (Placing::FirstTouch, _, Class::Low) if !is_busy => {
            let why = format!(
                "its accesses are spread about evenly over its nodes ({imbalance:.0} percent, class {class})"
            );
            (in_force, why)
        }
        (Placing::FirstTouch, _, Class::Low) => (spread, traffic),
        (Placing::FirstTouch, _, _) => {
            let why =
                format!("its accesses crowd on a few of its nodes ({imbalance:.0} percent, class {class})");
            (spread, why)
        }
        (_, Migration::None, _) if may_sample && is_busy && seen.local() < config.local_max => {
            let carrefour = MemoryPolicy {
                migration: Migration::Carrefour,
                ..in_force
            };
            (carrefour, traffic)
        }
        _ => (
            in_force,
            "nothing suggests that another policy would be better".to_owned(),
        ),
    };
    Advice {
        policy: Some(policy),
        imbalance: Some(imbalance),
        class: Some(class),
        why,
    }
}

#[cfg(test)]
mod tests;
