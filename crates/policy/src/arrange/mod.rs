//! Where every VM shall live: free, or at home on which nodes.
//!
//! # Problem
//! A home keeps a VM's accesses local and its neighbours few, but it has one cache and one set of controllers, while the kernel
//! gives a free VM all of them. On a quiet host homes harm; on a crowded one, where every node is shared anyway, they
//! gain. Which neighbours a VM gets matters more than which node.
//!
//! # Terms
//! - *Free*: without a home; the kernel puts the VM wherever it likes, as without an agent.
//! - *Active* VM: it wants at least [`ACTIVE_MIN`] of a CPU.
//! - *Crowded* host: its VMs want [`CROWDED_THREADS`] of its cores, and there are [`CROWDED_VMS`] times as many of them
//!   as nodes, or they want that many times its cores. Below [`QUIET_VMS`] of that it is quiet again.
//! - *Slow-down* of a VM: its predicted speed if nobody had a home, over its predicted speed ([`crate::predict`]).
//! - *Cost* of an arrangement: mean slow-down of active VMs; what exceeds 1 counts [`HARM_WEIGHT`] times more, and of a
//!   gain that a move promises [`BELIEF`] counts; moving a VM's memory costs its time on the way over [`HORIZON`].
//!
//! # Algorithm
//! Each epoch:
//! 1. A VM whose operator chose a home or a memory policy, that was promised nodes when it started, or whose guest is
//!    told where it is gets a home at once ([`crate::placement`]). All others start free: their first seconds show what
//!    no agent means.
//! 2. On a crowded host, once all active VMs are known for [`KNOWN_EPOCHS`], the arrangement of least cost is searched
//!    among homes for all ([`search`]). It is taken if its mean slow-down is at most [`MEAN_MAX`] and nobody's above
//!    [`WORST_MAX`]; else the question rests for [`REST`].
//! 3. While VMs live in homes a VM that arrives on the crowded host gets one at once, before it touches memory, by the
//!    character of the mean VM.
//! 4. A node that empties is offered: every [`REST`] the one move or exchange of homes that lowers the cost most, if it lowers
//!    the sum of slow-downs by [`MOVE_GAIN_MIN`]; no VM moves twice within its hold.
//! 5. Every change is a trial ([`crate::trial`]): what does not pay is undone, and the VM's hold doubles.
//!
//! # Properties
//! - `a_vm_alone_on_the_host_is_left_free`
//! - `a_quiet_host_is_left_alone`
//! - `a_crowded_host_gets_homes_that_keep_polluters_apart`
//! - `a_node_that_empties_is_offered_to_those_that_suffer`
//! - `homes_never_hold_more_vcpus_than_cpus`
//! - `what_the_operator_chose_is_not_searched`
//!
//! # Roads not taken
//! - Homes for some VMs of a crowded host: those without are pushed off the memory that they touched.
//! - Homes at arrival on a quiet host, and freedom later: memory at one node cannot be scattered again as its threads
//!   touched it.

pub mod search;
#[cfg(test)]
mod tests;
pub mod what_if;

use homenode_host::{Plan, View, VmView};
use homenode_units::{Ns, PAGE_BYTES, VmId};

use crate::demand::History;
use crate::placement;
use crate::predict::{Character, Place, Profiles, Room, Shape};
use crate::trial;
use search::{Search, Wish};
pub use what_if::what_if;

/// Name of this policy in plans.
pub const POLICY: &str = "arrange";

/// A VM that wants less of a CPU than this is not active.
pub const ACTIVE_MIN: f64 = 0.5;
/// Share of the host's cores that VMs of a crowded host want.
pub const CROWDED_THREADS: f64 = 0.8;
/// VMs per node, or threads per core, of a crowded host.
pub const CROWDED_VMS: f64 = 1.25;
/// Share of that below which a host is quiet again.
pub const QUIET_VMS: f64 = 0.8;
/// Epochs at work after which a VM is known.
pub const KNOWN_EPOCHS: u32 = 4;
/// Homes are given where they promise at most this mean slow-down,
pub const MEAN_MAX: f64 = 0.98;
/// and none above this.
pub const WORST_MAX: f64 = 1.05;
/// Least gain of a move or exchange, in slow-downs of one VM.
pub const MOVE_GAIN_MIN: f64 = 0.15;
/// How much more harm counts than gain.
pub const HARM_WEIGHT: f64 = 2.0;
/// Share of a promised gain that is believed: on drawn cases, homes gave six tenths of what was predicted.
pub const BELIEF: f64 = 0.6;
/// Time over which a move must pay.
pub const HORIZON: Ns = Ns::from_secs(60);
/// Time between two looks at the whole arrangement.
pub const REST: Ns = Ns::from_secs(5);

/// What the policy remembers between epochs.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// What is known of each VM.
    pub profiles: Profiles,
    /// Changes that are not judged yet, and what came of the others.
    pub trials: trial::State,
    room: Room,
    shape: Option<Shape>,
    rest_until: Ns,
}

/// The host and its VMs in one epoch.
struct Scene<'a> {
    shape: Shape,
    vms: Vec<&'a VmView<'a>>,
    characters: Vec<Character>,
    places: Vec<Place>,
    wishes: Vec<Wish>,
    free_bytes: Vec<f64>,
}

/// Gives homes, exchanges them and takes them back.
pub fn plan(
    view: &View<'_>,
    config: &placement::Config,
    history: &History,
    placed: &mut placement::State,
    state: &mut State,
) -> Plan {
    let shape = state
        .shape
        .get_or_insert_with(|| Shape::of(view.machine, &config.reserved_cpus))
        .clone();
    state.profiles.observe(view, &shape);
    let promised: Vec<VmId> = view
        .vms
        .iter()
        .filter(|vm| vm.home.is_none() && placed.ledger.clone().redeem(vm.sample, view.at).is_some())
        .map(|vm| vm.sample.id)
        .collect();
    let plan = placement::plan_for(view, config, history, placed, |vm| {
        has_a_place(vm) || promised.contains(&vm.sample.id)
    });
    if !plan.decisions.is_empty() || shape.nodes.len() < 2 {
        return plan;
    }
    let mut scene = Scene::of(view, shape, state);
    let undone = trial::judge(view, config, &mut state.profiles, &mut state.trials);
    if !undone.decisions.is_empty() {
        return undone;
    }
    let lives_in_homes = scene.places.iter().any(|place| *place != Place::Free);
    if !scene.is_crowded(if lives_in_homes { QUIET_VMS } else { 1.0 }) {
        return plan;
    }
    let arrivals = lives_in_homes && scene.only_arrivals_seek(state);
    if !arrivals && view.at < state.rest_until {
        return plan;
    }
    let wanted = if arrivals || scene.all_known(state) {
        scene.homes_for_all(&mut state.room)
    } else {
        None
    };
    let wanted = match wanted {
        Some(wanted) if arrivals || scene.pays(&wanted, &mut state.room) => Some(wanted),
        Some(_) => {
            state.rest_until = view.at + REST;
            None
        }
        None if lives_in_homes => {
            state.rest_until = view.at + REST;
            scene.one_better(&mut state.room)
        }
        None => None,
    };
    match wanted {
        Some(wanted) => scene.carry_out(view, config, &wanted, state),
        None => plan,
    }
}

/// Whether a VM's home is not ours to weigh.
fn has_a_place(vm: &VmView<'_>) -> bool {
    let settings = &vm.sample.settings;
    settings.home.is_some()
        || settings.memory_policy.is_some()
        || (vm.sample.no_feed.is_none() && !vm.sample.virtual_nodes.is_empty())
}

impl<'a> Scene<'a> {
    fn of(view: &'a View<'a>, shape: Shape, state: &State) -> Scene<'a> {
        let vms: Vec<&VmView<'_>> = view.vms.iter().collect();
        let mut characters: Vec<Character> = vms
            .iter()
            .map(|vm| state.profiles.character(vm, &shape))
            .collect();
        let known: Vec<usize> = (0..vms.len())
            .filter(|at| state.profiles.epochs(vms[*at].sample.id) >= KNOWN_EPOCHS)
            .collect();
        if let Some(mean) = Character::mean(&known.iter().map(|at| &characters[*at]).collect::<Vec<_>>()) {
            for at in (0..vms.len()).filter(|at| !known.contains(at)) {
                let threads = vms[at].sample.vcpus.len() as f64;
                characters[at] = Character {
                    threads,
                    ..mean.clone()
                };
            }
        }
        let places = vms
            .iter()
            .map(|vm| {
                let mask = vm.home.and_then(|home| shape.mask(home));
                mask.map_or(Place::Free, Place::Home)
            })
            .collect();
        let wishes = vms
            .iter()
            .zip(&characters)
            .map(|(vm, character)| Wish {
                movable: character.threads >= ACTIVE_MIN
                    && vm.managed()
                    && vm.hands_off.is_none()
                    && vm.memory_fixed().is_none()
                    && !has_a_place(vm)
                    && !state.trials.holds(vm.sample.id, view.at),
                allowed: match placement::allowed_nodes(view, vm) {
                    Some(allowed) => shape.nodes.iter().enumerate().fold(0, |mask, (at, node)| {
                        mask | u64::from(allowed.contains(node.id)) << at
                    }),
                    None => shape.all(),
                },
                vcpus: vm.sample.vcpus.len() as f64,
                bytes: shape
                    .nodes
                    .iter()
                    .map(|node| {
                        let pages = vm.sample.pages.as_ref().and_then(|pages| pages.get(node.id));
                        pages.map_or(0.0, |pages| pages.as_f64() * PAGE_BYTES as f64)
                    })
                    .collect(),
            })
            .collect();
        let free_bytes = shape
            .nodes
            .iter()
            .map(|node| {
                let node = view.sample.nodes.get(node.id);
                node.map_or(0.0, |node| node.memory_free_bytes.as_f64())
            })
            .collect();
        Scene {
            shape,
            vms,
            characters,
            places,
            wishes,
            free_bytes,
        }
    }

    fn is_crowded(&self, share: f64) -> bool {
        let active = || self.characters.iter().filter(|vm| vm.threads >= ACTIVE_MIN);
        let threads: f64 = active().map(|vm| vm.threads).sum();
        let cores: f64 = self.shape.nodes.iter().map(|node| node.cores).sum();
        let (vms, nodes) = (active().count() as f64, self.shape.nodes.len() as f64);
        let factor = CROWDED_VMS * share;
        threads >= CROWDED_THREADS * share * cores && (vms >= factor * nodes || threads >= factor * cores)
    }

    fn seekers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.vms.len()).filter(|at| self.places[*at] == Place::Free && self.wishes[*at].movable)
    }

    /// Whether somebody seeks a home, and all who do have just come.
    fn only_arrivals_seek(&self, state: &State) -> bool {
        let is_new = |at: usize| state.profiles.epochs(self.vms[at].sample.id) == 0;
        self.seekers().next().is_some() && self.seekers().all(is_new)
    }

    fn all_known(&self, state: &State) -> bool {
        self.seekers()
            .all(|at| state.profiles.epochs(self.vms[at].sample.id) >= KNOWN_EPOCHS)
    }

    fn search<'s>(&'s self, room: &'s mut Room) -> Search<'s> {
        Search::new(
            &self.shape,
            &self.characters,
            &self.wishes,
            &self.free_bytes,
            &self.places,
            room,
        )
    }

    /// Homes for all that seek one; `None` where nobody does, or one finds none.
    fn homes_for_all(&self, room: &mut Room) -> Option<Vec<Place>> {
        let seekers: Vec<usize> = self.seekers().collect();
        if seekers.is_empty() {
            return None;
        }
        self.search(room).homes_for(&seekers)
    }

    fn pays(&self, wanted: &[Place], room: &mut Room) -> bool {
        let slow = self.search(room).slow_downs(wanted);
        let active = || (0..slow.len()).filter(|at| self.characters[*at].threads >= ACTIVE_MIN);
        let believed = |at: usize| {
            if slow[at] < 1.0 {
                1.0 - BELIEF * (1.0 - slow[at])
            } else {
                slow[at]
            }
        };
        let mean = active().map(believed).sum::<f64>() / active().count().max(1) as f64;
        mean <= MEAN_MAX && active().all(|at| slow[at] <= WORST_MAX)
    }

    fn one_better(&self, room: &mut Room) -> Option<Vec<Place>> {
        self.search(room).one_better(MOVE_GAIN_MIN)
    }

    fn carry_out(
        &mut self,
        view: &View<'_>,
        config: &placement::Config,
        wanted: &[Place],
        state: &mut State,
    ) -> Plan {
        let mut plan = Plan::new(view.version);
        let mut search = self.search(&mut state.room);
        let (now, then) = (search.slow_downs(&self.places), search.slow_downs(wanted));
        state.rest_until = view.at + REST;
        for (at, vm) in self.vms.iter().enumerate() {
            let Place::Home(mask) = wanted[at] else { continue };
            if wanted[at] == self.places[at] {
                continue;
            }
            let nodes = self.shape.nodes_of(mask);
            let why = format!(
                "a trial: predicted to take {:.2} of its time without an agent, {:.2} where it is",
                then[at], now[at]
            );
            placement::settle(view, config, vm, &nodes, &why, POLICY, &mut plan);
            state.trials.begin(view, vm, &state.profiles, now[at] / then[at]);
        }
        plan
    }
}
