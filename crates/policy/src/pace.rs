//! Limits how fast a VM's pages move: more slowly if the VM suffers, and rarely if moves are in vain.
//!
//! # Problem
//! Budgets limit the worst cost of moving pages, for any VM. But a VM that suffers more than others from stopped vCPUs and
//! busy controllers should move fewer pages ([Policies, section 4.1] leaves this open), and pages that the host cannot move,
//! because they are pinned, should not be tried every second for ever.
//!
//! # Terms
//! - *Speed*: instructions per second of CPU time, so that an idle VM does not count as slow.
//! - *Usual speed*: average speed over cycles without moves in the VM's present home. Its speed in an earlier home does not
//!   count: a VM in a new home is slow because its memory is not there yet, and if less of it moved, the VM would stay slow.
//! - A VM's memory *grows* in a cycle if more than a thirtieth of its pages came or went: its program sets up memory, or gets or
//!   loses some. It then runs at another speed than later.
//!
//! # Algorithm
//! For each VM whose pages a plan moves:
//! 1. its *pace* is the share of the planned pages that may move. It halves after a cycle with moves in which the VM's speed
//!    was more than [`Config::slowdown_max`] below its usual speed, down to [`Config::pace_min`]. It doubles after a cycle
//!    with moves in which it was not, up to 1. Without a measured speed it stays 1. To learn the usual speed, nothing moves
//!    in the first cycle in which a VM is seen, nor in one cycle after every 16 with moves while its pace is below 1 or its usual
//!    speed was learnt while its memory grew. Such a speed is forgotten at the first cycle without moves in which the memory does
//!    not grow. Memory that can only move as a whole is not slowed down;
//! 2. a move that left more than [`Config::vain_min`] of its pages in place is *in vain*. After moves in vain, nothing is moved
//!    for 2, 4, 8 … cycles, up to [`Config::wait_max_cycles`], and this is reported once. A move that works ends the waiting.
//!
//! # Properties
//! - `a_vm_that_suffers_is_moved_ever_slower_and_recovers`
//! - `a_vm_that_is_slow_in_its_new_home_gets_its_memory_as_fast_as_any`
//! - `a_speed_from_while_memory_grew_does_not_count_afterwards`
//! - `what_moves_in_vain_is_tried_ever_more_rarely_and_said_once`
//! - `what_is_on_its_way_is_not_in_vain_and_what_moves_whole_is_not_slowed`
//! - `plans_without_moves_are_as_they_were`

use std::collections::BTreeMap;

use homenode_host::{Act, Decision, Immovable, Plan, View, VmView};
use homenode_units::{Ewma, NodeSet, Pages, VmId, Weight};
use serde::{Deserialize, Serialize};

use crate::bounds::{SHARE, SOME_SHARE};

/// Name of this policy in plans.
pub const POLICY: &str = "pace";

/// While a VM's pace is below 1, it gets one cycle without moves after this many cycles with moves.
const IN_A_ROW_MAX: u32 = 16;
/// Memory grows in a cycle in which more than this share of its pages came or went. It is not a setting.
const GROWTH_MIN: f64 = 0.03;

/// The operator's settings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// A VM suffers if it loses more than this share of its speed while its pages move.
    pub slowdown_max: f64,
    /// Most cycles without a move after moves in vain.
    #[serde(alias = "wait_max_epochs")]
    pub wait_max_cycles: u32,
    /// Lowest pace of a VM, as a share of the planned pages, in (0, 1].
    pub pace_min: f64,
    /// A move is in vain if it leaves more than this share of its pages in place, 0 to 1.
    pub vain_min: f64,
    /// Weight of the newest cycle in a VM's usual speed, in (0, 1].
    pub average_weight: f64,
}

impl Default for Config {
    /// A VM may lose a fifth of its speed. The longest wait is about a minute. The lowest pace is a 64th.
    fn default() -> Self {
        Config {
            slowdown_max: 0.2,
            wait_max_cycles: 64,
            pace_min: 1.0 / 64.0,
            vain_min: 0.9,
            average_weight: 0.2,
        }
    }
}

homenode_units::settings! {
    Config {
        slowdown_max: SHARE,
        wait_max_cycles: 0..=65_536,
        pace_min: SOME_SHARE,
        vain_min: SHARE,
        average_weight: SOME_SHARE,
    }
}

/// State kept for one VM.
#[derive(Clone, Debug)]
struct Pace {
    share: f64,
    /// Usual speed: in cycles without moves, in the present home.
    usual: Ewma,
    home: Option<NodeSet>,
    /// Pages that the VM had touched in the last cycle, if known.
    touched: Option<Pages>,
    /// Whether the usual speed was learnt while the VM's memory grew.
    is_of_growth: bool,
    /// Number of cycles with moves since the last one without.
    in_a_row: u32,
    /// The largest move of the last cycle: source, pages requested, and pages at the source before.
    asked: Option<(NodeSet, Pages, Pages)>,
    /// Whether the last cycle moved anything.
    moved: bool,
    vain: u32,
    wait: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Pace {
            share: 1.0,
            usual: Ewma::default(),
            home: None,
            touched: None,
            is_of_growth: false,
            in_a_row: 0,
            asked: None,
            moved: false,
            vain: 0,
            wait: 0,
        }
    }
}

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    paces: BTreeMap<VmId, Pace>,
}

fn speed(vm: &VmView<'_>) -> Option<f64> {
    let rates = vm.rates?;
    (rates.cpus_used > 0.05).then_some(rates.instructions_per_s? / rates.cpus_used)
}

fn pages_on(vm: &VmView<'_>, nodes: &NodeSet) -> Option<Pages> {
    let pages = vm.sample.pages.as_ref()?;
    let there = pages.iter().filter(|(node, _)| nodes.contains(*node));
    Some(there.map(|(_, pages)| *pages).sum())
}

impl Pace {
    /// Records the effect of the last cycle's moves. Returns true if they are the first moves without an effect.
    fn learn(&mut self, vm: &VmView<'_>, config: &Config) -> bool {
        if self.home.as_ref() != vm.home {
            self.home = vm.home.cloned();
            self.usual = Ewma::default();
        }
        let grows = self.grows(vm);
        if let Some(speed) = speed(vm) {
            match (self.moved, self.usual.value()) {
                (true, Some(usual)) if speed < usual * (1.0 - config.slowdown_max) => {
                    self.share = (self.share / 2.0).max(config.pace_min);
                }
                (true, _) => self.share = (self.share * 2.0).min(1.0),
                (false, _) => {
                    // The speed from before these moves, or from while memory grew, no longer applies.
                    if self.in_a_row > 0 || (self.is_of_growth && !grows) {
                        self.usual = Ewma::default();
                    }
                    self.usual.update(speed, Weight(config.average_weight));
                    self.is_of_growth = grows;
                }
            }
            self.in_a_row = if self.moved { self.in_a_row + 1 } else { 0 };
        }
        if vm.sample.immovable == Some(Immovable::Migrating) {
            // The memory is still moving.
            return false;
        }
        self.moved = false;
        self.wait = self.wait.saturating_sub(1);
        let Some((from, asked, before)) = self.asked.take() else {
            return false;
        };
        let left = pages_on(vm, &from).unwrap_or_default();
        let is_vain = left.as_f64() > before.as_f64() - (1.0 - config.vain_min) * asked.as_f64();
        if !is_vain {
            self.vain = 0;
            return false;
        }
        self.vain += 1;
        self.wait = (1_u32 << self.vain.min(16)).min(config.wait_max_cycles);
        self.vain == 1
    }

    /// Records how many pages the VM has touched. Returns whether its memory grew in the last cycle.
    fn grows(&mut self, vm: &VmView<'_>) -> bool {
        let touched = vm.sample.pages_touched();
        let before = std::mem::replace(&mut self.touched, touched);
        before.zip(touched).is_some_and(|(before, now)| {
            let changed = before.0.abs_diff(now.0) as f64;
            changed > GROWTH_MIN * before.max(now).as_f64()
        })
    }

    /// Returns the part of a decision that may be carried out now; `None` if nothing may.
    fn hold(&mut self, vm: &VmView<'_>, mut decision: Decision) -> Option<Decision> {
        let is_to_be_learnt = (self.share < 1.0 || self.is_of_growth) && self.in_a_row >= IN_A_ROW_MAX;
        let is_unknown = self.usual.value().is_none() || is_to_be_learnt;
        if self.wait > 0 || (is_unknown && speed(vm).is_some() && !vm.sample.moves_whole) {
            return None;
        }
        let share = if vm.sample.moves_whole { 1.0 } else { self.share };
        let part = |pages: Pages| Pages(((pages.as_f64() * share) as u64).max(1));
        match &mut decision.action.act {
            Act::MovePages { .. } | Act::MoveVirtualNode { .. } => {
                let (from, pages_max) = leaves(&mut decision.action.act, vm)?;
                *pages_max = part(*pages_max);
                let there = pages_on(vm, &from)?;
                // If a cycle has several moves, the largest is checked.
                if self
                    .asked
                    .as_ref()
                    .is_none_or(|(_, asked, _)| *asked < *pages_max)
                {
                    self.asked = Some((from, *pages_max, there));
                }
            }
            Act::MoveFrames { moves } => {
                let count = (moves.len() as f64 * share).ceil() as usize;
                moves.truncate(count);
            }
            _ => return Some(decision),
        }
        self.moved = true;
        Some(decision)
    }
}

/// Returns the nodes from which this action moves pages, and the most pages that it moves.
fn leaves<'a>(act: &'a mut Act, vm: &VmView<'_>) -> Option<(NodeSet, &'a mut Pages)> {
    match act {
        Act::MovePages { from, pages_max, .. } => Some((from.clone(), pages_max)),
        Act::MoveVirtualNode { to, pages_max, .. } => {
            let mut others = vm.sample.pages.as_ref()?.node_set();
            others.remove(*to);
            Some((others, pages_max))
        }
        _ => None,
    }
}

/// Limits the moves in a cycle's plans to what each VM tolerates. Returns a plan that only reports moves in vain.
pub fn hold(view: &View<'_>, config: &Config, state: &mut State, plans: &mut [Plan]) -> Plan {
    state.paces.retain(|id, _| view.sample.vm(*id).is_some());
    let mut said = Plan::new(view.version);
    for vm in &view.vms {
        let id = vm.sample.id;
        let Some(pace) = state.paces.get_mut(&id) else {
            continue;
        };
        if pace.learn(vm, config) {
            let message = format!(
                "pages of VM {} do not move: they are pinned, or a node is full; they are retried less and less often",
                vm.sample.name
            );
            said.find(POLICY, Some(id), message);
        }
    }
    for plan in plans {
        let decisions = std::mem::take(&mut plan.decisions).into_iter();
        let decisions = decisions.filter_map(|decision| {
            if decision.action.act.pages_max() == Pages::ZERO {
                return Some(decision);
            }
            let id = decision.action.vm;
            let vm = view.vms.iter().find(|vm| vm.sample.id == id)?;
            state.paces.entry(id).or_default().hold(vm, decision)
        });
        plan.decisions = decisions.collect();
    }
    // VMs without moves are observed too, to learn their usual speed.
    for vm in &view.vms {
        state.paces.entry(vm.sample.id).or_default();
    }
    said
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::repatriate;
    use crate::testing::{Scene, vm_id};
    use homenode_units::{Bytes, Ns};

    fn scene() -> Scene {
        let mut scene = Scene::four_nodes(4);
        let vm = scene.add_vm(1, 1, Bytes::from_gib(8), 0);
        vm.home(0)
            .pages(1, 1_000_000)
            .vcpus_busy(1.0)
            .instructions_per_s(1_000_000_000);
        scene
    }

    /// Runs one cycle. Returns the number of pages of repatriation's plan that may move, and the number of reports.
    fn cycle(scene: &mut Scene, state: &mut State) -> (u64, usize) {
        cycle_by(&Config::default(), scene, state)
    }

    fn cycle_by(config: &Config, scene: &mut Scene, state: &mut State) -> (u64, usize) {
        scene.at = Ns(scene.at.0 + 1_000_000_000);
        scene.with_view(|view| {
            let mut planned = repatriate::plan(
                view,
                &repatriate::Config::default(),
                &mut repatriate::State::default(),
            );
            let held = std::slice::from_mut(&mut planned);
            let said = hold(view, config, state, held).findings.len() + planned.findings.len();
            let moved = planned.decisions.iter().map(|d| d.action.act.pages_max().0);
            (moved.sum(), said)
        })
    }

    #[test]
    fn a_vm_that_suffers_is_moved_ever_slower_and_recovers() {
        let (mut scene, mut state) = (scene(), State::default());
        scene.vm(1).pages(1, 0);
        cycle(&mut scene, &mut state);
        cycle(&mut scene, &mut state);
        let mut left = 1_000_000;
        scene.vm(1).pages(1, left);
        let mut paces = Vec::new();
        for at in 0..12 {
            let (moved, _) = cycle(&mut scene, &mut state);
            left -= moved;
            let speed = if at < 5 { 500_000_000 } else { 950_000_000 };
            scene.vm(1).pages(1, left).instructions_per_s(speed);
            paces.push(moved);
        }
        let full = repatriate::Config::default().vm_pages_per_cycle.0;
        assert_eq!(paces[..6], [1, 2, 4, 8, 16, 32].map(|part| full / part));
        assert_eq!(paces[6..11], [16, 8, 4, 2, 1].map(|part| full / part));
    }

    #[test]
    fn a_vm_that_is_slow_in_its_new_home_gets_its_memory_as_fast_as_any() {
        let (mut scene, mut state) = (scene(), State::default());
        let mut left = 1_000_000;
        scene.vm(1).pages(1, 0).pages(0, left);
        for _ in 0..3 {
            cycle(&mut scene, &mut state);
        }
        // In the new home all memory is remote, and work takes three times as long.
        scene.vm(1).home(1).instructions_per_s(333_000_000);
        let full = repatriate::Config::default().vm_pages_per_cycle.0;
        let mut moved = Vec::new();
        for _ in 0..6 {
            let (pages, _) = cycle(&mut scene, &mut state);
            left -= pages;
            scene.vm(1).pages(0, left).pages(1, 1_000_000 - left);
            moved.push(pages);
        }
        assert_eq!(moved, [full; 6]);
    }

    /// Returns the pages that move in each of these cycles, in which the VM runs at `speed`.
    fn moved(scene: &mut Scene, state: &mut State, cycles: usize, speed: u64) -> Vec<u64> {
        scene.vm(1).instructions_per_s(speed);
        (0..cycles).map(|_| cycle(scene, state).0).collect()
    }

    #[test]
    fn a_speed_from_while_memory_grew_does_not_count_afterwards() {
        let full = repatriate::Config::default().vm_pages_per_cycle.0;
        // Setting up memory is faster or slower than the work that follows, which then meets moves that slow it down, or not.
        for (grew_at, works_at, moves_at, suffers) in [
            (2_000_000_000, 1_000_000_000, 950_000_000, false),
            (500_000_000, 1_000_000_000, 600_000_000, true),
        ] {
            let (mut scene, mut state) = (scene(), State::default());
            for pages in 1..8 {
                scene.vm(1).pages(0, pages * 1_000_000).pages(1, 0);
                moved(&mut scene, &mut state, 1, grew_at);
            }
            moved(&mut scene, &mut state, 1, works_at);
            // All of its memory is elsewhere now, as after a migration by the kernel.
            scene.vm(1).pages(0, 0).pages(1, 7_000_000);
            let mut left = 7_000_000;
            let mut pages = Vec::new();
            for _ in 0..5 {
                let now = moved(&mut scene, &mut state, 1, moves_at)[0];
                left -= now;
                scene.vm(1).pages(0, 7_000_000 - left).pages(1, left);
                pages.push(now);
            }
            let expected = if suffers { [1, 2, 4, 8, 16] } else { [1; 5] };
            assert_eq!(
                pages[1..],
                expected[1..].iter().map(|part| full / part).collect::<Vec<_>>(),
                "{grew_at}"
            );
        }
    }

    #[test]
    fn who_moves_while_its_memory_grows_is_looked_at_now_and_then() {
        let (mut scene, mut state) = (scene(), State::default());
        let (mut at_home, mut left) = (0, 20_000_000);
        let mut idle = Vec::new();
        for at in 0..60 {
            let (pages, _) = cycle(&mut scene, &mut state);
            if pages == 0 {
                idle.push(at);
            }
            // A twentieth of its memory is new, all of it at home.
            at_home += pages + (at_home + left) / 20;
            left -= pages;
            scene.vm(1).pages(0, at_home).pages(1, left);
        }
        assert_eq!(idle.first(), Some(&0), "the first cycle learns: {idle:?}");
        assert!(
            idle.windows(2)
                .all(|pair| pair[1] - pair[0] > IN_A_ROW_MAX as usize)
                && idle.len() <= 4,
            "{idle:?}"
        );
    }

    #[test]
    fn what_moves_in_vain_is_tried_ever_more_rarely_and_said_once() {
        let (mut scene, mut state) = (scene(), State::default());
        let cycles: Vec<(u64, usize)> = (0..40).map(|_| cycle(&mut scene, &mut state)).collect();
        let tried: Vec<usize> = (0..40).filter(|at| cycles[*at].0 > 0).collect();
        assert_eq!(tried, [1, 4, 9, 18, 35]);
        assert_eq!(cycles.iter().map(|(_, said)| said).sum::<usize>(), 1);
        // From now on moves work, and nothing is held back: once the current wait is over, 65,536 pages move per cycle.
        let mut left = 1_000_000;
        let moving = (0..40).filter(|_| {
            let (moved, _) = cycle(&mut scene, &mut state);
            left -= moved;
            scene.vm(1).pages(1, left);
            moved > 0
        });
        let moving: Vec<usize> = moving.collect();
        let first = moving[0];
        assert!(
            first <= 32 && moving.iter().enumerate().all(|(at, cycle)| *cycle == first + at),
            "{moving:?}"
        );
        assert!(moving.len() > 5);
    }

    #[test]
    fn what_is_on_its_way_is_not_in_vain_and_what_moves_whole_is_not_slowed() {
        let (mut scene, mut state) = (scene(), State::default());
        scene.vm(1).moves_whole();
        assert_eq!(cycle(&mut scene, &mut state), (1_000_000, 0));
        scene
            .vm(1)
            .immovable(Immovable::Migrating)
            .instructions_per_s(1_000);
        for _ in 0..3 {
            // Repatriation itself reports in each cycle why it does not move, because its state is new each time.
            assert_eq!(cycle(&mut scene, &mut state), (0, 1));
        }
        let pace = &state.paces[&vm_id(1)];
        assert_eq!((pace.vain, pace.wait, pace.share), (0, 0, 1.0));
    }

    #[test]
    fn how_slowly_pages_move_and_what_is_in_vain_are_the_operators_to_say() {
        let config = Config {
            pace_min: 0.25,
            ..Config::default()
        };
        let (mut scene, mut state) = (scene(), State::default());
        scene.vm(1).pages(1, 0);
        cycle_by(&config, &mut scene, &mut state);
        let mut left = 1_000_000;
        scene.vm(1).pages(1, left);
        let mut least = u64::MAX;
        for _ in 0..6 {
            let (moved, _) = cycle_by(&config, &mut scene, &mut state);
            left -= moved;
            scene.vm(1).pages(1, left).instructions_per_s(500_000_000);
            least = least.min(moved);
        }
        assert_eq!(least, repatriate::Config::default().vm_pages_per_cycle.0 / 4);
        // A tenth of each move works; the setting decides whether that is in vain.
        for (vain_min, waits) in [(0.5, true), (0.95, false)] {
            let config = Config {
                vain_min,
                ..Config::default()
            };
            let (mut scene, mut state, mut left) = (self::scene(), State::default(), 1_000_000);
            // The first cycle learns the usual speed.
            cycle_by(&config, &mut scene, &mut state);
            let idle = (0..8).filter(|_| {
                let (moved, _) = cycle_by(&config, &mut scene, &mut state);
                left -= moved / 10;
                scene.vm(1).pages(1, left);
                moved == 0
            });
            assert_eq!(idle.count() > 0, waits, "{vain_min}");
        }
    }

    #[test]
    fn plans_without_moves_are_as_they_were() {
        let mut scene = scene();
        let mut state = State::default();
        scene.with_view(|view| {
            let mut plan = Plan::new(view.version);
            let home = Act::SetHome {
                nodes: NodeSet::one(homenode_units::NodeId(2)),
            }
            .on(vm_id(1));
            plan.decide("placement", home, "a test".into());
            let mut held = [plan.clone()];
            hold(view, &Config::default(), &mut state, &mut held);
            assert_eq!(held, [plan]);
        });
    }
}
