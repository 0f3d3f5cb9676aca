//! Decides for every VM whether it gets a home, and on which nodes.
//!
//! # Problem
//! A home keeps a VM's accesses local and its neighbours few. But a home has only one cache and one set of controllers, while
//! the kernel gives an unplaced VM all of them. On a quiet host homes do harm. On a crowded host, where VMs share every node
//! anyway, they help. Which neighbours a VM gets matters more than which node.
//!
//! # Terms
//! - *Place*: the caches of one or more nodes on whose CPUs a VM runs; these nodes also hold its memory. Caches, nodes and
//!   sockets form a hierarchy: a move between two caches of a node moves no memory.
//! - *Unplaced*: without a home. The kernel places the VM, as it would without an agent.
//! - *Active* VM: it wants at least [`predict::Config::active_min`] of a CPU.
//! - *Crowded* host: its active VMs want at least [`Config::crowded_threads`] of its cores, and it has at least
//!   [`Config::crowded_vms`] active VMs per node or wanted threads per core.
//! - *Quiet* host: its VMs want less than [`Config::quiet_threads`] of its cores.
//! - *Slow-down* of a VM: its predicted speed if no VM had a home, over its predicted speed ([`crate::predict`]).
//! - *Cost* of an arrangement: mean slow-down of active VMs. Of each slow-down, the part above 1 counts
//!   [`Config::harm_weight`] times more, and only the [`Config::belief`] share of a predicted gain counts. Moves add the time
//!   lost while memory moves, relative to [`Config::horizon`]; the memory of all VMs that move passes through one queue.
//!
//! # The baseline without an agent
//! Every decision compares a speed with the speed on a host without an agent. That baseline has to be known, and learning it
//! must cost nothing. So VMs start unplaced, and what is measured until all are known is the baseline: while no VM has a
//! home, the ratio of measured to modelled speed is averaged for each VM that never had one ([`Character::when_unplaced`]).
//! The ratio captures what no model of a kernel can: that this VM's threads happen to stay on one node, or next to a
//! polluter. When a VM's neighbours change, the model predicts its speed without an agent next to the new ones, and the ratio
//! stays. The place affects only the time that a VM waits for memory: a VM that computes and was slower than modelled will be
//! so at home too. The same ratio is averaged at home ([`Character::at_home`]). So the agent can compare a first home with no
//! agent for as long as the home lasts, without an experiment.
//!
//! # Algorithm
//! Each cycle:
//! 1. A VM gets a home at once ([`crate::placement`]) if its operator chose a home or a memory policy, if nodes were reserved
//!    when it started, or if its guest is shown its NUMA location. All other VMs start unplaced.
//! 2. Once all active VMs are known ([`Profiles::is_known`]), and there are at least two, the agent searches for the cheapest
//!    arrangement with a home for every VM ([`search`]). It adopts this arrangement if it costs less than the current one,
//!    its mean slow-down is at most [`Config::mean_max`] ([`Config::mean_max_crowded`] on a crowded host), and no VM's
//!    slow-down is above [`Config::worst_max`].
//!
//!    On a host whose kernel balances (AutoNUMA, as on a stock host) locality is the kernel's job: it brings memory to
//!    threads and threads to memory, and spreads a VM over more caches than a home has. But it does not see which VM pollutes
//!    the cache of which other. If such a host is crowded for long (`crowd`), homes are searched for polluters only
//!    ([`Config::polluter_min`]). Each gets caches of its own, and they are spread evenly over the controllers. All other VMs
//!    stay unplaced, on the remaining caches. The agent places vCPUs; pages follow, moved by the agent or the kernel.
//!
//!    On a quiet host, as most hosts are, the kernel does not bring together a VM that is spread: the threads of a mostly
//!    idle VM stay on the nodes on which they woke, and its memory stays spread over these nodes. There, VMs that are far
//!    from their memory after a minute of work get whole nodes with room for all their vCPUs, a few VMs at a time. This
//!    requires that each of them and all VMs together gain ([`Config::together_min`]), that no other VM is predicted to be
//!    slower than without an agent, and that the host has a CPU for each vCPU. If a home makes its VM slower than without an
//!    agent by more than [`trial::Config::loss_max`], the VM loses it at the next look.
//! 3. While VMs live in homes and the kernel does not balance, a VM that arrives on a crowded host gets a home at once,
//!    before it touches memory. It is assumed to have the mean VM's character.
//! 4. Otherwise the agent makes the one move or exchange of homes that lowers the cost most, if it lowers the cost by at
//!    least [`Config::move_gain_min`] slow-downs of one VM. No VM moves twice within its hold. Such steps also offer a node
//!    that empties to other VMs, and widen homes to two nodes. If leaving all VMs unplaced costs less than the best step,
//!    homes are withdrawn.
//! 5. Every move is a trial ([`crate::trial`]): a move that does not pay is undone, and the VM's hold doubles.
//!
//! A *look* reviews the whole arrangement. A look is taken after news: VMs came, left, became known or may move again, or a
//! VM's speed has changed by [`Config::news_min`] since the last look. It is also taken after a few VMs were brought
//! together, once their memory has arrived, and without news every [`Config::rest_idle`]. Looks are at least [`Config::rest`]
//! apart, and there are at most [`Config::looks_per_hour`] an hour, which may all come in one burst.
//!
//! # Properties
//! - `a_vm_alone_on_the_host_is_left_unplaced`
//! - `where_homes_promise_little_all_stay_unplaced`
//! - `where_the_kernel_balances_only_polluters_get_homes_and_each_a_cache_of_its_own`
//! - `where_the_kernel_balances_a_crowd_that_is_there_for_a_moment_gets_no_homes`
//! - `where_the_kernel_balances_a_host_with_idle_cores_and_local_vms_is_left_alone`
//! - `where_the_kernel_balances_a_quiet_host_a_vm_is_brought_together_with_its_memory`
//! - `where_the_kernel_balances_a_quiet_host_more_vms_follow_once_the_first_are_there`
//! - `where_the_kernel_balances_a_home_that_has_become_crowded_is_taken_back`
//! - `who_is_brought_together_with_its_memory_has_a_cpu_for_each_vcpu`
//! - `where_the_kernel_balances_nobody_is_brought_together_on_a_host_with_fewer_cpus_than_vcpus`
//! - `a_vm_is_left_to_the_kernels_balancing_for_a_while`
//! - `a_vm_that_never_worked_counts_as_idle`
//! - `a_crowded_host_gets_homes_that_keep_polluters_apart`
//! - `a_node_that_empties_is_offered_to_those_that_suffer`
//! - `homes_never_hold_more_vcpus_than_cpus`
//! - `homes_that_do_not_pay_are_taken_back`
//! - `looks_are_at_most_so_many_an_hour`
//! - `without_news_there_is_hardly_a_look`
//! - `what_the_operator_chose_is_not_searched`
//! - `homes_keep_to_the_cpus_that_operators_allow`
//!
//! # Roads not taken
//! - Homes for only some VMs of a crowded host: the other VMs are pushed off the memory that they touched.
//! - Homes for all VMs at arrival, before any is known: this gains more on full hosts (.917 instead of .919 on average, in
//!   cases of 100 seconds), but it slows down twice as many VMs, one of them by half, and without a baseline the agent cannot
//!   tell which.
//! - The modelled speed without homes as the baseline: a host of ten VMs on eight nodes got no homes (1.00 instead of .94),
//!   and hosts with few VMs had to be excluded by a rule.
//! - Homes for all VMs on a host whose kernel balances: 32 VMs on the twin of two EPYC 7763 in NPS4 took 6 to 8 percent
//!   longer, because a VM had the caches of one node instead of four; homes for polluters only gained 2.4 percent. Switching
//!   the kernel's balancing off for the whole host, to favour homes: it also serves processes that the agent does not manage.
//! - Bringing VMs together also on quiet hosts with fewer CPUs than vCPUs: with two vCPUs per CPU of a twin, the mean
//!   slow-down rose from .992 to .995, and the worst from 1.045 to 1.109.
//! - Withdrawing the first home of a single VM: the VM is pushed off the memory that it touched.

mod config;
mod crowd;
mod newcomer;
mod rest;
pub mod search;
#[cfg(test)]
mod tests;
pub mod what_if;

use std::collections::BTreeSet;
use std::sync::Arc;

use homenode_host::{Act, Decision, Lever, Mode, Plan, View, VmView};
use homenode_units::{CpuSet, NodeId, PAGE_BYTES, VmId};

use crate::demand::History;
use crate::near::positions;
use crate::placement;
use crate::predict::{self, AsFound, Character, NodeShape, Place, Profiles, Room, Shape};
use crate::trial;
pub use config::{Config, Settings};
use crowd::Crowd;
pub use newcomer::{Beside, Slowed, beside, each_beside};
use rest::{News, Rest};
use search::{Search, Wish};
pub use what_if::what_if;

pub use crate::trial::POLICY;

/// Number of cycles at work for which a VM's threads and memory are left to the kernel's balancing. The kernel scans a
/// thread's memory once a minute at the least (`numa_balancing_scan_period_max_ms`).
const LEFT_TO_KERNEL: u32 = 60;

/// State kept between cycles.
#[derive(Clone, Debug, Default)]
pub struct State {
    /// Profiles of all VMs.
    pub profiles: Profiles,
    /// Changes that are not judged yet, and the outcomes of judged ones.
    pub trials: trial::State,
    room: Room,
    shape: Option<KnownShape>,
    rest: Rest,
    crowd: Crowd,
}

/// The host's shape, with the inputs that it was made from: CPUs may go offline, and settings may be reloaded.
#[derive(Clone, Debug)]
struct KnownShape {
    shape: Arc<Shape>,
    cpus: CpuSet,
    predict: predict::Config,
}

impl State {
    /// Begins a trial of a home that was only recommended until now. The VM's present speed is the reference; `predicted` is
    /// the factor by which it should change.
    pub fn begin_trial(
        &mut self,
        view: &View<'_>,
        settings: Settings<'_>,
        vm: &VmView<'_>,
        to: placement::Home,
        predicted: f64,
    ) {
        self.trials
            .begin(view, settings.of_trials(), vm, to, &self.profiles, predicted);
    }

    /// Returns the host's cached shape if the settings and the online CPUs have not changed since it was made.
    fn shape(&self, view: &View<'_>, settings: Settings<'_>) -> Option<Arc<Shape>> {
        let known = self.shape.as_ref()?;
        let is_same = known.predict == *settings.predict && known.cpus == view.cpus;
        is_same.then(|| known.shape.clone())
    }
}

/// The host and its VMs in one cycle.
struct Scene<'a> {
    settings: Settings<'a>,
    shape: Arc<Shape>,
    vms: Vec<&'a VmView<'a>>,
    characters: Vec<Character>,
    places: Vec<Place>,
    wishes: Vec<Wish>,
    free_bytes: Vec<f64>,
    /// Whether the host's kernel moves pages and threads towards each other by itself.
    is_balanced: bool,
}

/// Assigns homes, exchanges them and withdraws them.
pub fn plan(
    view: &View<'_>,
    settings: Settings<'_>,
    history: &History,
    placed: &mut placement::State,
    state: &mut State,
) -> Plan {
    let shape = state.shape(view, settings).unwrap_or_else(|| {
        let shape = settings.shape_of(view);
        state.shape = Some(KnownShape {
            shape: shape.clone(),
            cpus: view.cpus.clone(),
            predict: settings.predict.clone(),
        });
        shape
    });
    state.profiles.observe(view, &shape, settings.predict);
    let mut plan = plan_places(view, settings.placement, history, placed);
    if shape.nodes.len() < 2 && !(settings.arrange.by_cache && shape.caches.len() > 1) {
        return plan;
    }
    // A change that did not pay is undone even if other decisions await approval.
    let undone = trial::judge(view, settings.of_trials(), &state.profiles, &mut state.trials);
    let placed_now: BTreeSet<VmId> = plan.vms();
    let undone = undone.decisions.into_iter();
    plan.decisions
        .extend(undone.filter(|decision| !placed_now.contains(&decision.action.vm)));
    // A decision that a VM's own mode holds back is repeated in every cycle, so it must not block other decisions.
    let is_kept = |decision: &Decision| {
        let vm = view.sample.vm(decision.action.vm);
        vm.is_some_and(|vm| vm.settings.mode.is_some_and(|mode| mode != Mode::Act))
    };
    if view.drained.is_empty() && plan.decisions.iter().all(is_kept) {
        let arranged = arrange(view, settings, shape, state);
        plan.decisions.extend(arranged.decisions);
        plan.findings.extend(arranged.findings);
    }
    plan
}

/// Lets [`placement`] plan the homes that this policy may not choose.
fn plan_places(
    view: &View<'_>,
    config: &placement::Config,
    history: &History,
    placed: &mut placement::State,
) -> Plan {
    let released = placed.released(view);
    let with_reservation: Vec<VmId> = view
        .vms
        .iter()
        .filter(|vm| vm.home.is_none() && placed.ledger.has_reservation(vm.sample, view.at))
        .map(|vm| vm.sample.id)
        .collect();
    let mut plan = placement::plan_for(view, config, history, placed, |vm| {
        has_a_place(vm) || with_reservation.contains(&vm.sample.id)
    });
    let released = |vm: &&VmView<'_>| released.contains(&vm.sample.id) && !has_a_place(vm);
    for vm in view.vms.iter().filter(released) {
        let why = "undone: it had a home only while a node was drained".to_owned();
        plan.decide(POLICY, Act::Lift { lever: Lever::Home }.on(vm.sample.id), why);
    }
    plan
}

/// Plans the homes that this policy may choose.
fn arrange(view: &View<'_>, settings: Settings<'_>, shape: Arc<Shape>, state: &mut State) -> Plan {
    let nothing = Plan::new(view.version);
    let mut scene = Scene::of(view, settings, shape, state);
    scene.learn(view, state);
    state.crowd.note(scene.is_crowded());
    if let Some(mean) = state.trials.first_homes_failed(settings.trial) {
        let unplaced = scene.search(&mut state.room).all_unplaced();
        let why =
            format!("undone: with these first homes, VMs take {mean:.2} times as long as before, on average");
        return scene.carry_out(view, &unplaced, Some(&why), state);
    }
    let lives_in_homes = scene.lives_in_homes();
    let arrivals =
        lives_in_homes && !scene.is_balanced && scene.is_crowded() && scene.only_arrivals_seek(state);
    let is_alone = scene.active().count() < 2;
    let may_seek = match scene.is_balanced && scene.is_quiet() {
        true => scene.vms.len() > 1,
        false => arrivals || (!is_alone && scene.all_known(state)),
    };
    let news = || scene.news(&state.profiles);
    let arrived = state.trials.all_arrived();
    if !(may_seek || lives_in_homes)
        || !(arrivals || state.rest.is_over(view.at, settings.arrange, arrived, news))
    {
        return nothing;
    }
    let wanted = match scene.is_balanced {
        true if may_seek => scene.homes_where_balanced(state),
        true => None,
        false => {
            let homes = may_seek.then(|| scene.homes_for_all(&mut state.room)).flatten();
            match homes {
                Some(wanted) if arrivals || scene.pays(&wanted, &mut state.room) => Some(wanted),
                None if lives_in_homes => scene.search(&mut state.room).one_better(),
                _ => None,
            }
        }
    };
    if !arrivals {
        let news = scene.news(&state.profiles);
        state.rest.begin(view.at, settings.arrange, news);
    }
    if wanted.is_some() && scene.is_balanced && scene.is_quiet() {
        state.rest.expect_more();
    }
    match wanted {
        Some(wanted) => scene.carry_out(view, &wanted, None, state),
        None => nothing,
    }
}

/// Whether something other than this policy decides on a VM's home.
fn has_a_place(vm: &VmView<'_>) -> bool {
    let settings = &vm.sample.settings;
    settings.home.is_some()
        || placement::has_company(settings)
        || settings.memory_policy.is_some()
        || (vm.sample.no_topology_device.is_none() && !vm.sample.virtual_nodes.is_empty())
}

/// Returns the caches of a VM's home; `None` if it has no home.
fn place_of(view: &View<'_>, vm: &VmView<'_>, shape: &Shape) -> Option<u64> {
    let home = vm.home?;
    let all = shape.mask(home)?;
    let kept = shape.caches_of(all, &placement::cpus_at_home(view, vm, home));
    Some(if kept == 0 { all } else { kept })
}

/// Returns the caches of nodes that a VM may use, and of these the caches all of whose CPUs it may use.
fn allowed(view: &View<'_>, vm: &VmView<'_>, shape: &Shape) -> (u64, u64) {
    let nodes = placement::allowed_nodes(view, vm);
    let may = |id: NodeId| nodes.as_ref().is_none_or(|nodes| nodes.contains(id));
    let of_nodes = shape.nodes.iter().filter(|node| may(node.id));
    let all = of_nodes.fold(0, |mask, node| mask | node.caches);
    let cpus = vm.sample.settings.cpus_allowed.as_ref();
    let is_whole = |at: &usize| cpus.is_none_or(|cpus| shape.caches[*at].cpu_set.is_subset(cpus));
    let whole = positions(all).filter(is_whole);
    (all, whole.fold(0, |mask, at| mask | 1 << at))
}

impl<'a> Scene<'a> {
    fn of(view: &'a View<'a>, settings: Settings<'a>, shape: Arc<Shape>, state: &State) -> Scene<'a> {
        let vms: Vec<&VmView<'_>> = view.vms.iter().collect();
        let mut characters: Vec<Character> = vms
            .iter()
            .map(|vm| state.profiles.character(vm, &shape, settings.predict))
            .collect();
        let is_known = |vm: &VmView<'_>| state.profiles.is_known(vm.sample.id, settings.predict);
        let is_balanced = view.sample.kernel.balances();
        if is_balanced {
            // The VM's memory is already next to its threads, so a VM that is slower than modelled would be so at home, too.
            for (vm, character) in vms.iter().zip(&mut characters) {
                if !state.profiles.was_moved(vm.sample.id) {
                    character.at_home = character.at_home.min(character.when_unplaced);
                }
            }
        }
        let (known, new): (Vec<usize>, Vec<usize>) = (0..vms.len()).partition(|at| is_known(vms[*at]));
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
            .map(|vm| place_of(view, vm, &shape).map_or(Place::Unplaced, Place::Home))
            .collect();
        let wishes = vms
            .iter()
            .zip(&characters)
            .map(|(vm, character)| {
                // A VM in observe mode is a fixed obstacle: other VMs must not move to suit a move that is not made.
                let is_observed = vm.sample.settings.mode == Some(Mode::Observe);
                let ours = vm.managed()
                    && !is_observed
                    && vm.hands_off.is_none()
                    && vm.memory_fixed().is_none()
                    && !has_a_place(vm);
                let (allowed, whole) = allowed(view, vm, &shape);
                let is_ready = ours && !state.trials.holds(vm.sample.id, view.at);
                Wish {
                    ours,
                    movable: is_ready && character.threads >= settings.predict.active_min,
                    movable_at_rest: is_ready && is_known(vm),
                    allowed,
                    whole,
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
        let free_bytes = |node: &NodeShape| {
            let node = view.sample.nodes.get(node.id);
            node.map_or(0.0, |node| node.memory_free_bytes.as_f64())
        };
        let free_bytes = shape.nodes.iter().map(free_bytes).collect();
        Scene {
            settings,
            shape,
            vms,
            characters,
            places,
            wishes,
            free_bytes,
            is_balanced,
        }
        .with_threads_where_they_stay()
    }

    /// Forgets on which CPUs threads were found if the host is crowded: there the kernel keeps swapping waiting threads
    /// between cores.
    fn with_threads_where_they_stay(mut self) -> Self {
        if self.is_crowded() {
            self.characters.iter_mut().for_each(|vm| vm.found = None);
        }
        self
    }

    /// Returns the positions of VMs at work.
    fn active(&self) -> impl Iterator<Item = usize> + '_ {
        let least = self.settings.predict.active_min;
        (0..self.vms.len()).filter(move |at| self.characters[*at].threads >= least)
    }

    fn is_crowded(&self) -> bool {
        let threads: f64 = self.active().map(|at| self.characters[at].threads).sum();
        let cores = self.shape.cores();
        let (vms, nodes) = (self.active().count() as f64, self.shape.nodes.len() as f64);
        let config = self.settings.arrange;
        let is_dense = vms >= config.crowded_vms * nodes || threads >= config.crowded_vms * cores;
        threads >= config.crowded_threads * cores && is_dense
    }

    /// Whether enough cores idle for a VM to be confined to a few of them.
    fn is_quiet(&self) -> bool {
        let threads: f64 = self.characters.iter().map(|vm| vm.threads).sum();
        threads < self.settings.arrange.quiet_threads * self.shape.cores()
    }

    /// Whether the host has a CPU for each vCPU. If not, unplaced VMs are sooner or later pushed off their memory by VMs
    /// whose homes are next to it.
    fn has_cpus_for_all(&self) -> bool {
        let vcpus: f64 = self.wishes.iter().map(|wish| wish.vcpus).sum();
        vcpus <= self.shape.cpus()
    }

    fn lives_in_homes(&self) -> bool {
        self.places.iter().any(|place| *place != Place::Unplaced)
    }

    fn seekers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.vms.len()).filter(|at| self.places[*at] == Place::Unplaced && self.wishes[*at].movable)
    }

    /// Records the ratio of measured to modelled speed for each VM in its place: at home once its memory has arrived;
    /// unplaced only while no VM has a home, which equals a host without an agent.
    fn learn(&mut self, view: &View<'_>, state: &mut State) {
        let config = self.settings.predict;
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
            let character = &mut self.characters[at];
            // For a VM that rests now and then, this is the speed while it works.
            let speed = match profiles.rests(vm) {
                true => profiles.pace(id).map(|pace| pace * character.threads),
                false => profiles.speed(id),
            };
            let Some(speed) = speed.filter(|_| profiles.is_known(id, config)) else {
                continue;
            };
            let seen = speed / predicted[at];
            match vm.home {
                None if !lives_in_homes && !profiles.was_moved(id) => {
                    let waits = character.waiting_share();
                    let ratio =
                        (seen * character.when_unplaced).clamp(1.0 / (1.0 + waits), 1.0 / (1.0 - waits));
                    character.when_unplaced = profiles.learn_when_unplaced(id, ratio, config);
                }
                Some(home)
                    if vm
                        .sample
                        .pages_on(&view.away_from(home))
                        .is_none_or(|away| away <= self.settings.trial.away_pages_max) =>
                {
                    character.at_home = profiles.learn_at_home(id, seen * character.at_home, config);
                }
                _ => {}
            }
        }
    }

    /// Whether at least one VM seeks a home, and all VMs that do have just arrived.
    fn only_arrivals_seek(&self, state: &State) -> bool {
        let is_new = |at: usize| state.profiles.cycles(self.vms[at].sample.id) == 0;
        self.seekers().next().is_some() && self.seekers().all(is_new)
    }

    fn all_known(&self, state: &State) -> bool {
        self.seekers()
            .all(|at| self.is_known(&state.profiles, self.vms[at].sample.id))
    }

    fn is_known(&self, profiles: &Profiles, vm: VmId) -> bool {
        profiles.is_known(vm, self.settings.predict)
    }

    fn news(&self, profiles: &Profiles) -> News {
        let id = |at: usize| self.vms[at].sample.id;
        // If resting VMs may get homes, how much work a resting VM does now is no reason for another review.
        let progress =
            |at: usize| profiles.progress(id(at), self.is_balanced && profiles.rests(self.vms[at]));
        News {
            speeds: self
                .active()
                .filter_map(|at| Some((id(at), progress(at)?)))
                .collect(),
            movable: self.movable(profiles).map(id).collect(),
        }
    }

    /// Returns the positions of VMs that may be moved and are known well enough. On a quiet host whose kernel balances, a VM
    /// need not be at work, but must have been left to the kernel for a while.
    fn movable<'s>(&'s self, profiles: &'s Profiles) -> impl Iterator<Item = usize> + 's {
        let is_left_to_kernel = self.is_balanced && self.is_quiet();
        (0..self.vms.len()).filter(move |at| {
            let (vm, wish) = (self.vms[*at].sample.id, &self.wishes[*at]);
            match is_left_to_kernel {
                true => wish.movable_at_rest && profiles.cycles(vm) >= LEFT_TO_KERNEL,
                false => wish.movable && self.is_known(profiles, vm),
            }
        })
    }

    fn search<'s>(&'s self, room: &'s mut Room) -> Search<'s> {
        let search = Search::new(
            self.settings,
            &self.shape,
            &self.characters,
            &self.wishes,
            &self.free_bytes,
            &self.places,
            room,
        );
        match self.is_balanced {
            true => search.within(self.settings.arrange.horizon_balanced),
            false => search,
        }
    }

    /// Finds homes for all VMs that seek one. Returns `None` if no VM seeks one, or if one of them cannot be placed.
    fn homes_for_all(&self, room: &mut Room) -> Option<Vec<Place>> {
        let seekers: Vec<usize> = self.seekers().collect();
        if seekers.is_empty() {
            return None;
        }
        self.search(room).homes_for(&seekers)
    }

    /// Finds homes on a host whose kernel balances. On a crowded host these are for polluters, if they pay; on a quiet host,
    /// for VMs far from their memory.
    fn homes_where_balanced(&self, state: &mut State) -> Option<Vec<Place>> {
        if let Some(without) = self.without_lost(&mut state.room) {
            return Some(without);
        }
        if self.is_crowded() {
            if !state.crowd.lasts() {
                return None;
            }
            let seekers: Vec<usize> = self.seekers().collect();
            let homes = self.search(&mut state.room).homes_for_polluters(&seekers);
            return homes.filter(|homes| self.pays(homes, &mut state.room));
        }
        if !self.is_quiet() || !self.has_cpus_for_all() {
            return None;
        }
        let is_unplaced = |at: &usize| self.places[*at] == Place::Unplaced;
        let seekers: Vec<usize> = self.movable(&state.profiles).filter(is_unplaced).collect();
        self.search(&mut state.room).homes_together(&seekers)
    }

    /// Returns the current places, but without the homes that make their VM slower than it would be without an agent; `None`
    /// if there are no such homes.
    fn without_lost(&self, room: &mut Room) -> Option<Vec<Place>> {
        let most = 1.0 + self.settings.trial.loss_max;
        let slow = self.search(room).slow_downs(&self.places);
        let is_lost = |at: &usize| {
            let has_home = matches!(self.places[*at], Place::Home(_));
            has_home && self.wishes[*at].movable_at_rest && slow[*at] > most
        };
        let mut places = self.places.clone();
        (0..places.len())
            .filter(is_lost)
            .for_each(|at| places[at] = Place::Unplaced);
        (places != self.places).then_some(places)
    }

    fn pays(&self, wanted: &[Place], room: &mut Room) -> bool {
        let mut search = self.search(room);
        // The total cost of the moves must be recovered within the horizon.
        if search.cost(wanted) >= search.cost(&self.places) {
            return false;
        }
        let slow = search.slow_downs(wanted);
        let config = self.settings.arrange;
        let sum: f64 = self.active().map(|at| config.believed(slow[at])).sum();
        let mean = sum / self.active().count().max(1) as f64;
        let most = if self.is_balanced {
            config.mean_max_balanced
        } else if self.is_crowded() {
            config.mean_max_crowded
        } else {
            config.mean_max
        };
        mean <= most && self.active().all(|at| slow[at] <= config.worst_max)
    }

    /// Returns the plan that leads to the wanted arrangement. `lifted` is the reason why homes are withdrawn; `None` if the
    /// prediction is the reason.
    fn carry_out(
        &mut self,
        view: &View<'_>,
        wanted: &[Place],
        lifted: Option<&str>,
        state: &mut State,
    ) -> Plan {
        let settings = self.settings;
        let mut plan = Plan::new(view.version);
        let mut search = self.search(&mut state.room);
        let (now, then) = (search.slow_downs(&self.places), search.slow_downs(wanted));
        let percent = |share: f64| format!("{:.0}%", share * 100.0);
        for (at, vm) in self.vms.iter().enumerate() {
            if wanted[at] == self.places[at] {
                continue;
            }
            let Place::Home(mask) = wanted[at] else {
                let by_prediction = || {
                    let mean = |of: &[f64]| {
                        let active = || self.active().map(|at| of[at]);
                        active().sum::<f64>() / active().count().max(1) as f64
                    };
                    format!(
                        "undone: predicted runtime, on average: {} of unmanaged without homes, {} with them ({} and {} for \
                         this VM)",
                        percent(mean(&then)),
                        percent(mean(&now)),
                        percent(then[at]),
                        percent(now[at])
                    )
                };
                let why = lifted.map_or_else(by_prediction, str::to_owned);
                let (vm, lever) = (vm.sample.id, Lever::Home);
                plan.decide(POLICY, Act::Lift { lever }.on(vm), why);
                state.trials.take_back(vm, view.at, settings.trial);
                continue;
            };
            let home = placement::Home {
                nodes: self.shape.nodes_of(mask),
                cpus: self.shape.cpus_of(mask),
            };
            let why = format!(
                "a trial: predicted runtime: {} of unmanaged ({} if it stays)",
                percent(then[at]),
                percent(now[at])
            );
            placement::settle(view, settings.placement, vm, &home, &why, POLICY, &mut plan);
            let predicted = now[at] / then[at];
            state
                .trials
                .begin(view, settings.of_trials(), vm, home, &state.profiles, predicted);
        }
        plan
    }
}
