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
//!   as nodes, or they want that many times its cores.
//! - *Slow-down* of a VM: its predicted speed if no VM had a home, over its predicted speed ([`crate::predict`]).
//! - *Cost* of an arrangement: mean slow-down of active VMs; what exceeds 1 counts [`HARM_WEIGHT`] times more, and of a
//!   gain that a move promises [`BELIEF`] counts; moving a VM's memory costs its time on the way over [`HORIZON`].
//!
//! # The baseline of no agent
//! All that is decided is a ratio to no agent, so no agent has to be known, and it must cost nothing to learn. VMs start
//! free, and what is seen until all are known is the baseline: as long as no VM has a home, measured speed over modelled
//! speed is averaged for each VM that never had one ([`Character::at_free`]). It holds what no model of a kernel can: that
//! this VM's threads happen to stay on one node, or beside a polluter. Once company changes the model says what no agent
//! would be by now, and the ratio stays. Only waiting for memory may differ from the model by its place: a VM that
//! computes, and was slower than modelled, is so at home too. The same ratio is averaged at home
//! ([`Character::at_home`]). So a first home is challenged for as long as it lasts, against no agent, with no experiment.
//!
//! # Algorithm
//! Each epoch:
//! 1. A VM whose operator chose a home or a memory policy, that was promised nodes when it started, or whose guest is
//!    told where it is gets a home at once ([`crate::placement`]). All others start free.
//! 2. Once all active VMs are known ([`Profiles::is_known`]), and there are two or more, the arrangement of least cost is
//!    searched among homes for all ([`search`]). It is taken if its mean slow-down is at most [`MEAN_MAX`], on a crowded
//!    host [`MEAN_MAX_CROWDED`], and no VM's is above [`WORST_MAX`].
//! 3. While VMs live in homes, a VM that arrives on a crowded host gets one at once, before it touches memory, by the
//!    character of the mean VM.
//! 4. Else the one move or exchange of homes that lowers the cost most is made, if it lowers the sum of slow-downs by
//!    [`MOVE_GAIN_MIN`]; no VM moves twice within its hold. A node that empties is thus offered, and a home widened to two
//!    nodes. Where freedom for all costs less than the best of these, homes are taken back.
//! 5. Every move is a trial ([`crate::trial`]): what does not pay is undone, and the VM's hold doubles.
//!
//! The whole arrangement is looked at after news: VMs came, went, are known by now or may move again, or one is faster or
//! slower than at the last look by [`NEWS_MIN`]; without news every [`REST_IDLE`]. Between two looks lies [`REST`]; there are
//! no more than [`LOOKS`] an hour, after as many at once.
//!
//! # Properties
//! - `a_vm_alone_on_the_host_is_left_free`
//! - `where_homes_promise_little_all_stay_free`
//! - `a_vm_that_never_worked_counts_as_idle`
//! - `a_crowded_host_gets_homes_that_keep_polluters_apart`
//! - `a_node_that_empties_is_offered_to_those_that_suffer`
//! - `homes_never_hold_more_vcpus_than_cpus`
//! - `homes_that_do_not_pay_are_taken_back`
//! - `looks_are_at_most_so_many_an_hour`
//! - `without_news_there_is_hardly_a_look`
//! - `what_the_operator_chose_is_not_searched`
//!
//! # Roads not taken
//! - Homes for some VMs of a crowded host: those without are pushed off the memory that they touched.
//! - Homes for all at arrival, before anybody is known: more is gained on full hosts (cases of 100 seconds: .917 for .919 on
//!   average), but twice as many VMs are hurt, one by half, and which ones cannot be told: there is no baseline.
//! - The modelled speed without homes as the baseline: a host of ten VMs on eight nodes was left alone (1.00 for .94), and
//!   hosts of few VMs had to be left alone by rule.
//! - Taking back the first home of one VM alone: it is pushed off the memory that it touched.

mod rest;
pub mod search;
#[cfg(test)]
mod tests;
pub mod what_if;

use std::sync::Arc;

use homenode_host::{Act, Lever, Mode, Plan, View, VmView};
use homenode_units::{CpuSet, NodeSet, Ns, PAGE_BYTES, VmId};

use crate::demand::History;
use crate::placement;
use crate::predict::{ACTIVE_MIN, AsFound, Character, Place, Profiles, Room, Shape};
use crate::trial;
pub use rest::{LOOKS, NEWS_MIN, REST, REST_IDLE};
use rest::{News, Rest};
use search::{Search, Wish};
pub use what_if::what_if;

pub use crate::trial::POLICY;

/// Share of the host's cores that VMs of a crowded host want.
pub const CROWDED_THREADS: f64 = 0.8;
/// VMs per node, or threads per core, of a crowded host.
pub const CROWDED_VMS: f64 = 1.25;
/// Homes are given where they promise at most this mean slow-down,
pub const MEAN_MAX: f64 = 0.95;
/// on a crowded host, where they also keep what is local local, at most this,
pub const MEAN_MAX_CROWDED: f64 = 0.98;
/// and none above this.
pub const WORST_MAX: f64 = 1.08;
/// Least gain of a move or exchange, in slow-downs of one VM.
pub const MOVE_GAIN_MIN: f64 = 0.15;
/// How much more harm counts than gain.
pub const HARM_WEIGHT: f64 = 6.0;
/// Share of a promised gain that is believed: on drawn cases, homes gave six tenths of what was predicted.
pub const BELIEF: f64 = 0.6;
/// Time over which a move must pay.
pub const HORIZON: Ns = Ns::from_secs(60);

/// What the policy remembers between epochs.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// What is known of each VM.
    pub profiles: Profiles,
    /// Changes that are not judged yet, and what came of the others.
    pub trials: trial::State,
    room: Room,
    /// With the CPUs that it is of.
    shape: Option<(CpuSet, Arc<Shape>)>,
    rest: Rest,
}

impl State {
    /// The host as it is now: CPUs may have gone offline.
    fn shape(&mut self, view: &View<'_>) -> Arc<Shape> {
        match &self.shape {
            Some((cpus, shape)) if *cpus == view.cpus => shape.clone(),
            _ => {
                let shape = Arc::new(Shape::of(view.machine, &view.cpus));
                self.shape = Some((view.cpus.clone(), shape.clone()));
                shape
            }
        }
    }

    /// A home that was only recommended before is given in this epoch: a trial like any other, from the VM's speed now, with the
    /// speed predicted to change by this factor.
    pub fn begin_trial(&mut self, view: &View<'_>, vm: &VmView<'_>, to: &NodeSet, predicted: f64) {
        self.trials.begin(view, vm, to, &self.profiles, predicted);
    }
}

/// The host and its VMs in one epoch.
struct Scene<'a> {
    shape: Arc<Shape>,
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
    let shape = state.shape(view);
    state.profiles.observe(view, &shape);
    let promised: Vec<VmId> = view
        .vms
        .iter()
        .filter(|vm| vm.home.is_none() && placed.ledger.is_promised(vm.sample, view.at))
        .map(|vm| vm.sample.id)
        .collect();
    let mut plan = placement::plan_for(view, config, history, placed, |vm| {
        has_a_place(view, vm) || promised.contains(&vm.sample.id)
    });
    for vm in placed.released(view) {
        let why = "undone: it had a home only while a node was drained".to_owned();
        plan.decide(POLICY, Act::Lift { lever: Lever::Home }.on(vm), why);
    }
    for decision in &plan.decisions {
        state.trials.forget(decision.action.vm);
    }
    if !plan.decisions.is_empty() || shape.nodes.len() < 2 {
        return plan;
    }
    let mut scene = Scene::of(view, shape, state);
    let undone = trial::judge(view, config, &state.profiles, &mut state.trials);
    if !undone.decisions.is_empty() {
        return undone;
    }
    scene.learn(state);
    if state.trials.first_homes_failed() {
        let free = scene.search(&mut state.room).all_free();
        return scene.carry_out(view, config, &free, state);
    }
    let lives_in_homes = scene.lives_in_homes();
    let arrivals = lives_in_homes && scene.is_crowded() && scene.only_arrivals_seek(state);
    let is_alone = scene.active().count() < 2;
    let may_seek = arrivals || (!is_alone && scene.all_known(state));
    if !(may_seek || lives_in_homes)
        || !(arrivals || state.rest.is_over(view.at, || scene.news(&state.profiles)))
    {
        return plan;
    }
    let homes_for_all = if may_seek {
        scene.homes_for_all(&mut state.room)
    } else {
        None
    };
    let wanted = match homes_for_all {
        Some(wanted) if arrivals || scene.pays(&wanted, &mut state.room) => Some(wanted),
        None if lives_in_homes => scene.search(&mut state.room).one_better(MOVE_GAIN_MIN),
        _ => None,
    };
    if !arrivals {
        state.rest.begin(view.at, scene.news(&state.profiles));
    }
    match wanted {
        Some(wanted) => scene.carry_out(view, config, &wanted, state),
        None => plan,
    }
}

/// Whether a VM's home is not ours to weigh. While a node is drained everybody's is for who empties it.
fn has_a_place(view: &View<'_>, vm: &VmView<'_>) -> bool {
    let settings = &vm.sample.settings;
    !view.drained.is_empty()
        || settings.home.is_some()
        || placement::has_company(settings)
        || settings.memory_policy.is_some()
        || (vm.sample.no_topology_device.is_none() && !vm.sample.virtual_nodes.is_empty())
}

impl<'a> Scene<'a> {
    fn of(view: &'a View<'a>, shape: Arc<Shape>, state: &State) -> Scene<'a> {
        let vms: Vec<&VmView<'_>> = view.vms.iter().collect();
        let mut characters: Vec<Character> = vms
            .iter()
            .map(|vm| state.profiles.character(vm, &shape))
            .collect();
        let is_known = |at: &usize| state.profiles.is_known(vms[*at].sample.id);
        let (known, new): (Vec<usize>, Vec<usize>) = (0..vms.len()).partition(is_known);
        if let Some(mean) = Character::mean(&known.iter().map(|at| &characters[*at]).collect::<Vec<_>>()) {
            for at in new {
                let threads = characters[at].threads;
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
            .map(|(vm, character)| {
                // What is only observed is planned around: others must not be moved for the sake of a move that is not made.
                let is_observed = vm.sample.settings.mode == Some(Mode::Observe);
                let ours = vm.managed()
                    && !is_observed
                    && vm.hands_off.is_none()
                    && vm.memory_fixed().is_none()
                    && !has_a_place(view, vm);
                Wish {
                    ours,
                    movable: ours
                        && character.threads >= ACTIVE_MIN
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
                }
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

    /// Positions of VMs at work.
    fn active(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.vms.len()).filter(|at| self.characters[*at].threads >= ACTIVE_MIN)
    }

    fn is_crowded(&self) -> bool {
        let threads: f64 = self.active().map(|at| self.characters[at].threads).sum();
        let cores: f64 = self.shape.nodes.iter().map(|node| node.cores).sum();
        let (vms, nodes) = (self.active().count() as f64, self.shape.nodes.len() as f64);
        threads >= CROWDED_THREADS * cores && (vms >= CROWDED_VMS * nodes || threads >= CROWDED_VMS * cores)
    }

    fn lives_in_homes(&self) -> bool {
        self.places.iter().any(|place| *place != Place::Free)
    }

    fn seekers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.vms.len()).filter(|at| self.places[*at] == Place::Free && self.wishes[*at].movable)
    }

    /// Takes in how fast VMs are where they are, beside how fast they are modelled to be: at home once their memory is
    /// there, and free as long as no VM has a home, which is no agent.
    fn learn(&mut self, state: &mut State) {
        let lives_in_homes = self.lives_in_homes();
        let as_found = if lives_in_homes { AsFound::Yes } else { AsFound::No };
        let State { profiles, room, .. } = state;
        let mut predicted = Vec::new();
        room.speeds(
            &self.shape,
            &self.characters,
            &self.places,
            as_found,
            &mut predicted,
        );
        for (at, vm) in self.vms.iter().enumerate() {
            let id = vm.sample.id;
            let Some(speed) = profiles.speed(id).filter(|_| profiles.is_known(id)) else {
                continue;
            };
            let character = &mut self.characters[at];
            let seen = speed / predicted[at];
            match vm.home {
                None if !lives_in_homes && !profiles.was_moved(id) => {
                    let waits = character.waiting_share();
                    let ratio = (seen * character.at_free).clamp(1.0 / (1.0 + waits), 1.0 / (1.0 - waits));
                    character.at_free = profiles.learn_at_free(id, ratio);
                }
                Some(home)
                    if vm
                        .sample
                        .pages_outside(home)
                        .is_none_or(|away| away.0 <= trial::AWAY_PAGES) =>
                {
                    character.at_home = profiles.learn_at_home(id, seen * character.at_home);
                }
                _ => {}
            }
        }
    }

    /// Whether a VM seeks a home, and all that do have just come.
    fn only_arrivals_seek(&self, state: &State) -> bool {
        let is_new = |at: usize| state.profiles.epochs(self.vms[at].sample.id) == 0;
        self.seekers().next().is_some() && self.seekers().all(is_new)
    }

    fn all_known(&self, state: &State) -> bool {
        self.seekers()
            .all(|at| state.profiles.is_known(self.vms[at].sample.id))
    }

    fn news(&self, profiles: &Profiles) -> News {
        let id = |at: usize| self.vms[at].sample.id;
        News {
            speeds: self
                .active()
                .filter_map(|at| Some((id(at), profiles.speed(id(at))?)))
                .collect(),
            movable: (0..self.vms.len())
                .filter(|at| self.wishes[*at].movable)
                .map(id)
                .filter(|id| profiles.is_known(*id))
                .collect(),
        }
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

    /// Homes for all that seek one; `None` where none does, or one finds none.
    fn homes_for_all(&self, room: &mut Room) -> Option<Vec<Place>> {
        let seekers: Vec<usize> = self.seekers().collect();
        if seekers.is_empty() {
            return None;
        }
        self.search(room).homes_for(&seekers)
    }

    fn pays(&self, wanted: &[Place], room: &mut Room) -> bool {
        let slow = self.search(room).slow_downs(wanted);
        let sum: f64 = self.active().map(|at| search::believed(slow[at])).sum();
        let mean = sum / self.active().count().max(1) as f64;
        let most = if self.is_crowded() {
            MEAN_MAX_CROWDED
        } else {
            MEAN_MAX
        };
        mean <= most && self.active().all(|at| slow[at] <= WORST_MAX)
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
        for (at, vm) in self.vms.iter().enumerate() {
            if wanted[at] == self.places[at] {
                continue;
            }
            let Place::Home(mask) = wanted[at] else {
                let why = format!(
                    "undone: predicted to take {:.2} of its time without an agent if all homes went, {:.2} where it is",
                    then[at], now[at]
                );
                let (vm, lever) = (vm.sample.id, Lever::Home);
                plan.decide(POLICY, Act::Lift { lever }.on(vm), why);
                state.trials.take_back(vm, view.at);
                continue;
            };
            let nodes = self.shape.nodes_of(mask);
            let why = format!(
                "a trial: predicted to take {:.2} of its time without an agent, {:.2} where it is",
                then[at], now[at]
            );
            placement::settle(view, config, vm, &nodes, &why, POLICY, &mut plan);
            state
                .trials
                .begin(view, vm, &nodes, &state.profiles, now[at] / then[at]);
        }
        plan
    }
}
