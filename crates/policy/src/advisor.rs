//! Advises a memory policy for a VM, the question that \[Policies\] leaves open (section 6).
//!
//! # Problem
//! No memory policy is best for all VMs: the wrong one slows a VM down several times [Policies, figure 2]. Operators do not
//! know which programs run in a guest, and the programs change.
//!
//! # Terms
//! *Imbalance*: standard deviation over mean of a VM's accesses to the memory of its home nodes, in percent. *Class* of a VM:
//! low if its imbalance is at most [`Config::imbalance_low`], moderate if at most [`Config::imbalance_moderate`], else high
//! (section 3.5.2, under first-touch). *Speed*: instructions per second of CPU time that a VM wants. A VM is *busy* with memory
//! if the controllers of the node that answers most of its accesses use more than [`Config::controller_busy`] of their
//! bandwidth, or if it keeps a link busier than [`Config::link_busy`]. If the use of controllers is unknown, a VM above class
//! low counts as busy.
//!
//! # Algorithm
//! A VM with several home nodes and movable memory is *watched* for [`Config::watch`], and at least five cycles. Then one change
//! is tried:
//! 1. Under first-touch, spreading *should pay* if idle controllers make up for longer ways by more than [`Config::gain_min`],
//!    by the machine's distances and the latency that [`crate::predict`] expects of busy controllers. Nothing is tried if the
//!    VM is not busy, nor if accesses are spread evenly (imbalance up to 35 percent) and spreading should not pay: then it has
//!    nothing to gain from other nodes. Otherwise round-4K, if that should pay or takes accesses at most [`Config::gain_min`]
//!    farther from their users. Otherwise Carrefour, which leaves pages of one user there; without memory sampling round-4K.
//! 2. Under first-touch with Carrefour, round-4K with Carrefour, if the VM is still busy.
//! 3. Under round-4K without Carrefour: Carrefour is tried if the VM keeps a link busy and the share of its accesses that are
//!    local is below [`Config::local_max`]. This is Carrefour's own condition, and remote accesses are the traffic that it
//!    can save.
//!
//! In a trial, pages have [`Config::settle`] to move. Then the VM's speed is compared with the speed before: after one watch
//! and, while the result is undecided, after twice the time, four times, and so on.
//! 1. The change stays if the speed has risen by [`Config::gain_min`] and surely has risen. The next change may follow.
//! 2. The earlier policy is restored if the speed surely has not risen by that much, and at the latest [`Config::hold`] after
//!    the pages had time to move (two watches, if that is longer), or when the VM gets another home: a policy that is not known
//!    to help is not kept, and a trial takes no longer than the pause after it. While a new layout is still being made, the
//!    trial goes on unless the VM surely is slower, for at most [`Config::hold_max`].
//! 3. After a trial that did not help, the VM is left alone for [`Config::hold`], and each time for twice as long, up to
//!    [`Config::hold_max`].
//! 4. Adopted policies are judged by each later watch. They are dropped, as after a trial that did not help, if the VM surely is
//!    slower than before the first of them, or if half of the memory of that time has been released: another program runs.
//!
//! A speed is *sure* to be above or below another if the difference of the means exceeds its 95 percent confidence interval by
//! the cycles' scatter (Student's t with the degrees of freedom of the shorter measurement). What a VM does by itself must not
//! pass for an effect:
//! - A measurement begins again if more than [`Config::gain_min`] of the VM's pages came, went or moved in a cycle. A program
//!   that sets up its memory runs at another speed than later. Fewer pages cannot hide or feign the least gain.
//! - Cycles of a trial count only if the VM refers to its LLC as many times per instruction as before, within twice the
//!   scatter or [`Config::gain_min`]: the time of an instruction changes by at most the share by which its accesses change.
//!
//! If the host's kernel balances NUMA memory, only a VM that works all the time and has the host to itself gets a trial: it
//! rests for less than a tenth of its vCPUs' time, and other VMs use less than a tenth of its CPU time. The speed of any other
//! VM depends on what its load and its neighbours leave of caches and memory, so sooner or later any policy seems to help.
//! Besides, the kernel no longer brings spread pages to the CPUs that use them.
//!
//! # Properties
//! - `a_class_gets_its_policy`
//! - `where_the_kernel_balances_nothing_is_tried_with_a_vm_that_rests_or_has_company`
//! - `what_does_not_help_is_given_up_and_tried_ever_more_rarely`
//! - `nothing_is_tried_where_nothing_is_known`
//! - `nothing_is_tried_for_traffic_of_other_vms`
//! - `what_a_program_does_while_it_sets_up_its_memory_does_not_count`
//! - `a_policy_stays_only_if_the_gain_exceeds_the_scatter`
//! - `phases_that_differ_are_not_compared`
//! - `a_vm_that_gets_more_work_is_no_faster`
//! - `a_trial_ends_with_the_home`
//! - `few_cycles_are_not_judged`
//! - `a_policy_goes_with_the_program_for_which_it_was_adopted`
//! - `a_guest_that_alternates_gets_few_changes`: the number of changes grows with the logarithm of time
//!
//! # Departures
//! - The paper's rule keeps first-touch for class low, and spreads the other classes with Carrefour. Here the class is only
//!   shown. A VM of class high that hardly waits for memory gains nothing and loses its local pages, and programs of class low
//!   with one saturated controller gain.
//! - The paper's rule changes placing and migration together. Two changes could not be told apart.
//! - A VM without a home is advised too if it has more vCPUs than a node has cores, and one node with a busy memory
//!   controller ([`Config::controller_busy`]) answers more than [`Config::crowded_min`] times an even share of its accesses.
//!   No home of one node suits such a VM, so its memory is spread over all nodes.
//! - The paper classifies a program once, from a separate run; here the imbalance is that of the last watch.
//! - Speed counts spinning as work and leaves sleep out: a guest whose threads spin while they wait looks fast, and a trial that
//!   only shortens the waiting is dropped.
//! - Restoring a policy does not move pages back: first-touch applies only to pages touched from then on. So two policies
//!   cannot be compared by turns, only the time before with the time after.

mod evidence;

use std::collections::BTreeMap;
use std::fmt;
use std::ops::RangeInclusive;

use homenode_host::{View, VmView};
use homenode_units::{
    Any, BadSetting, MemoryPolicy, Migration, NodeId, NodeMap, NodeSet, Ns, Pages, Placing, VmId,
};

use self::evidence::{Change, Seen, Speed, Verdict};
use crate::bounds::{PAUSE, SHARE, SPAN};
use crate::placement;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A VM whose accesses are spread more evenly than this, in percent, has nothing to gain from spreading: Carrefour spreads pages
/// above it (Dashti et al., ASPLOS 2013).
const UNEVEN_MIN: f64 = 35.0;
/// While more than this share of a VM's pages moves per cycle, a new layout is being made. Slower moves take a quarter of an hour
/// for all pages, and are not waited for.
const MOVING_MIN: f64 = 0.001;

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
    /// A link is busy if a VM's traffic exceeds this share of its capacity, 0 to 1.
    pub link_busy: f64,
    /// A watch that counts fewer accesses than this does not show how evenly they are spread.
    pub accesses_min: u64,
    /// An unplaced VM crowds a node that answers more than this many times an even share of its accesses, 0 to 1000.
    pub crowded_min: f64,
    /// A VM's memory is spread only if the node that it crowds uses more than this share of its memory bandwidth, 0 to 1, or a
    /// link is busy; an unplaced VM's only in the first case.
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
    /// program phases, and has enough cycles to tell how they scatter. The agent follows its advice, because each change is a
    /// trial that is undone if it does not help.
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

/// A change that is tried.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Trial {
    /// The policy before.
    from: MemoryPolicy,
    /// The VM's speed before.
    before: Speed,
    /// The VM's pages before; `None` if unknown.
    pages: Option<Pages>,
    /// When the trial ends if it stays undecided.
    ends: Ns,
    /// When it ends even if its pages still move.
    latest: Ns,
    /// How many times it was judged and undecided.
    undecided: u32,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Stage {
    /// The VM is watched, and a trial may begin.
    Watching,
    /// A trial has begun, and its pages move until `until`.
    Settling { until: Ns },
    /// A trial is being measured.
    Trying,
    /// No trial begins before `until`.
    Holding { until: Ns },
}

#[derive(Clone, Debug)]
struct Case {
    stage: Stage,
    seen: Seen,
    home: NodeSet,
    /// The VM's pages by node in the last cycle.
    pages: Option<NodeMap<Pages>>,
    /// The policy that the agent chose; `None` leaves the policy in force.
    choice: Option<MemoryPolicy>,
    /// The change that is tried.
    trial: Option<Trial>,
    /// The first of the changes that were adopted, with the VM's speed before the agent changed anything.
    adopted: Option<Trial>,
    failures: u32,
    changes: u32,
    advice: Advice,
}

impl Case {
    fn new(home: &NodeSet) -> Case {
        Case {
            stage: Stage::Watching,
            seen: Seen::default(),
            home: home.clone(),
            pages: None,
            choice: None,
            trial: None,
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

    /// Begins the trial of `policy`.
    fn begin(&mut self, policy: MemoryPolicy, from: MemoryPolicy, seen: &Seen, config: &Config, now: Ns) {
        self.choose(policy);
        let until = Ns(now.0.saturating_add(config.settle.0));
        self.trial = Some(Trial {
            from,
            before: seen.speed,
            pages: self.pages.as_ref().map(|pages| pages.values().copied().sum()),
            ends: Ns(until.0.saturating_add(config.hold.0.max(2 * seen.time.0))),
            latest: Ns(until.0.saturating_add(config.hold_max.0)),
            undecided: 0,
        });
        self.stage = Stage::Settling { until };
    }

    /// Returns to the policy before a trial, and holds twice as long as after the last failure.
    fn give_up(&mut self, trial: Trial, config: &Config, now: Ns) {
        let hold = config
            .hold
            .0
            .saturating_mul(1 << self.failures.min(20))
            .min(config.hold_max.0);
        self.failures += 1;
        self.choose(trial.from);
        self.trial = None;
        self.seen = Seen::default();
        self.stage = Stage::Holding {
            until: Ns(now.0.saturating_add(hold)),
        };
    }

    /// Records where the VM's pages are. Returns what changed since the last cycle.
    fn note_pages(&mut self, vm: &VmView<'_>) -> Change {
        let Some(pages) = &vm.sample.pages else {
            return Change::default();
        };
        let change = self.pages.as_ref().map(|before| Change::between(before, pages));
        self.pages = Some(pages.clone());
        change.unwrap_or_default()
    }

    /// Whether most of the memory with which a change was tried has been released since, as when a program ends.
    fn is_another_program(&self, trial: &Trial) -> bool {
        let now: Option<Pages> = self.pages.as_ref().map(|pages| pages.values().copied().sum());
        let before = trial.pages;
        before.zip(now).is_some_and(|(before, now)| now.0 < before.0 / 2)
    }

    /// Drops all changes, of which `first` was the first.
    fn drop_all(&mut self, first: Trial, config: &Config, now: Ns) {
        self.adopted = None;
        self.give_up(first, config, now);
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
            case.trial = None;
            case.choice = None;
            case.changes = case.changes.saturating_sub(1);
        }
    }

    /// Whether the agent's last choice restored the policy from before a trial.
    pub fn gives_back(&self, vm: VmId) -> bool {
        let gave_up = |case: &Case| matches!(case.stage, Stage::Holding { .. });
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
        let case = state.cases.entry(id).or_insert_with(|| Case::new(home));
        if case.home != *home {
            let trial = case.trial;
            *case = Case::new(home);
            if let Some(trial) = trial {
                case.give_up(trial, config, view.at);
            }
        }
        let change = case.note_pages(vm);
        let is_changed = case.trial.or(case.adopted).is_some();
        if let Some(why) = not_advised(view, config, vm, home, is_changed) {
            case.advice = Advice::none(&why);
            continue;
        }
        let Some(rates) = vm.rates else { continue };
        let like = case.trial.as_ref();
        let like = like.map(|trial| (&trial.before, config.gain_min));
        if !case.seen.take(view, rates, home, like) {
            case.advice =
                Advice::none("instructions and memory accesses by node are not counted on this host");
            continue;
        }
        let in_force = vm.sample.memory_policy;
        let is_laid_out = in_force != Placing::Round4k.alone() || change.moved <= MOVING_MIN;
        if change.changed > config.gain_min || (case.stage == Stage::Watching && !is_laid_out) {
            case.seen = Seen::default();
        }
        let acts = config.acts && vm.sample.settings.memory_policy.is_none();
        advance(view, vm, config, acts, change, case);
    }
}

/// Returns why a VM gets no advice; `None` if it can be advised. An unplaced VM whose policy was changed (`is_changed`) must
/// still be judged.
fn not_advised(
    view: &View<'_>,
    config: &Config,
    vm: &VmView<'_>,
    home: &NodeSet,
    is_changed: bool,
) -> Option<String> {
    if home.len() < 2 {
        return Some("it has only one home node: its memory belongs there under any policy".into());
    }
    if let Some(why) = vm.memory_fixed() {
        return Some(format!("its pages cannot move: {why}"));
    }
    if vm.home.is_none() && !is_changed && !(is_wide(view, vm) && meets_a_hot_controller(view, config, vm)) {
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
        let busy = evidence::controller_use(view, node);
        *count as f64 > config.crowded_min * even && busy.is_none_or(|busy| busy > config.controller_busy)
    };
    all > config.accesses_min && on.iter().any(is_hot)
}

fn advance(view: &View<'_>, vm: &VmView<'_>, config: &Config, acts: bool, change: Change, case: &mut Case) {
    let (now, in_force) = (view.at, vm.sample.memory_policy);
    if !acts && case.trial.take().is_some() {
        case.choice = None;
        case.stage = Stage::Watching;
    }
    let first = case.adopted.or(case.trial);
    if let Some(first) = first.filter(|first| case.is_another_program(first)) {
        case.drop_all(first, config, now);
    }
    if let Stage::Settling { until } = case.stage {
        if now >= until {
            case.stage = Stage::Trying;
        }
        case.seen = Seen::default();
        return;
    }
    if case.stage == Stage::Trying {
        return judge(view, in_force, config, change, case);
    }
    if !case.seen.is_enough(config.watch) {
        return;
    }
    let seen = std::mem::take(&mut case.seen);
    case.advice = advise(view, &case.home, in_force, &seen, config);
    if !acts {
        case.choice = None;
        case.adopted = None;
        case.stage = Stage::Watching;
        return;
    }
    let slower = |first: &Trial| first.before.verdict(&seen.speed, config.gain_min) == Verdict::Slower;
    if let Some(first) = case.adopted.filter(slower) {
        return case.drop_all(first, config, now);
    }
    if matches!(case.stage, Stage::Holding { until } if now < until) {
        return;
    }
    case.stage = Stage::Watching;
    if let Some(wanted) = case.advice.policy.filter(|wanted| *wanted != in_force) {
        case.begin(wanted, in_force, &seen, config, now);
    }
}

/// Judges a trial.
fn judge(view: &View<'_>, in_force: MemoryPolicy, config: &Config, change: Change, case: &mut Case) {
    let (now, Some(mut trial)) = (view.at, case.trial) else {
        return;
    };
    let is_moving = in_force.placing != trial.from.placing && change.moved > MOVING_MIN && now < trial.latest;
    if is_moving {
        trial.ends = Ns(trial.ends.0 + view.rates.map_or(0, |rates| rates.period_ns.0));
        case.trial = Some(trial);
    }
    let due = Ns(config.watch.0.saturating_mul(1 << trial.undecided.min(20)));
    let is_due = case.seen.is_enough(due);
    let verdict = match is_due {
        true => trial.before.verdict(&case.seen.speed, config.gain_min),
        false => Verdict::Undecided,
    };
    match verdict {
        Verdict::Faster => {
            case.adopted = case.adopted.or(case.trial.take());
            case.seen = Seen::default();
            case.stage = Stage::Watching;
        }
        Verdict::NoFaster if is_moving => case.seen = Seen::default(),
        Verdict::Slower | Verdict::NoFaster => case.give_up(trial, config, now),
        Verdict::Undecided if now >= trial.ends => case.give_up(trial, config, now),
        Verdict::Undecided if is_due && is_moving => case.seen = Seen::default(),
        Verdict::Undecided if is_due => {
            trial.undecided += 1;
            case.trial = Some(trial);
        }
        Verdict::Undecided => {}
    }
}

/// Returns the advice that follows from a watch.
fn advise(view: &View<'_>, home: &NodeSet, in_force: MemoryPolicy, seen: &Seen, config: &Config) -> Advice {
    let Some(imbalance) = seen.imbalance(config) else {
        return Advice::none("it hardly uses memory");
    };
    let class = match imbalance {
        i if i <= config.imbalance_low => Class::Low,
        i if i <= config.imbalance_moderate => Class::Moderate,
        _ => Class::High,
    };
    let (policy, why) = match seen.noise().filter(|_| view.sample.kernel.balances()) {
        Some(noise) => (
            in_force,
            format!("the kernel balances NUMA memory, so a trial would be inconclusive: {noise}"),
        ),
        None => policy_for(view, home, in_force, seen, (imbalance, class), config),
    };
    Advice {
        policy: Some(policy),
        imbalance: Some(imbalance),
        class: Some(class),
        why,
    }
}

/// Returns the policy that suits a VM, and why.
fn policy_for(
    view: &View<'_>,
    home: &NodeSet,
    in_force: MemoryPolicy,
    seen: &Seen,
    (imbalance, class): (f64, Class),
    config: &Config,
) -> (MemoryPolicy, String) {
    let may_sample = view.sample.no_page_uses.is_none();
    let spread = format!("({imbalance:.0} percent, class {class})");
    let traffic = format!(
        "{:.0} percent of its accesses are local, and it keeps a link {:.0} percent busy",
        100.0 * seen.local(),
        100.0 * seen.link_busy()
    );
    let link_is_busy = seen.link_busy() > config.link_busy;
    let is_busy = link_is_busy
        || match seen.controller_busy() {
            Some(busy) => busy > config.controller_busy,
            None => class != Class::Low,
        };
    let is_first_touch = in_force.placing == Placing::FirstTouch;
    let least = 1.0 + config.gain_min;
    let farther = evidence::farther_if_spread(view, home, seen.local());
    let should_pay = evidence::relief_if_spread(seen) >= farther * least;
    let crowds = || format!("its accesses crowd on a few of its nodes {spread}, and {traffic}");
    match in_force.migration {
        Migration::None if is_first_touch && imbalance <= UNEVEN_MIN && !should_pay => (
            in_force,
            format!("its accesses are spread about evenly over its nodes {spread}"),
        ),
        Migration::None | Migration::Carrefour if is_first_touch && !is_busy => (
            in_force,
            format!(
                "its accesses crowd on a few of its nodes {spread}, but keep neither controllers nor links busy"
            ),
        ),
        Migration::None if is_first_touch => match may_sample && farther > least && !should_pay {
            true => (Placing::FirstTouch.with_carrefour(), crowds()),
            false => (Placing::Round4k.alone(), crowds()),
        },
        Migration::Carrefour if is_first_touch => (Placing::Round4k.with_carrefour(), crowds()),
        Migration::None if may_sample && link_is_busy && seen.local() < config.local_max => {
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
    }
}

#[cfg(test)]
mod tests;
