//! Searches for a good arrangement: homes first, one VM at a time, then moves and exchanges while they pay.
//!
//! Each candidate arrangement costs one prediction ([`Room::speeds_beside`]). The number of candidates is bounded by
//! [`candidates_max`](super::Config::candidates_max) and their work by [`work_max`](super::Config::work_max), so a search
//! ends in time on any host. If these bounds are too low to find a first home for each VM, the host keeps its arrangement.
//!
//! A home is one or more whole nodes or, with [`by_cache`](super::Config::by_cache), a run of caches of one node. A VM whose
//! home is part of a node may not use the node's other CPUs. So a part is assigned only if each vCPU of its VMs has a CPU. On
//! a host with more threads than CPUs a home is whole nodes, and the kernel balances over all of their CPUs.
//!
//! A VM with more vCPUs than a node has cores is tried on one node, whose hyperthreads it shares, and on as many nodes as
//! have a core for each vCPU: the prediction knows the cost of sharing a core and of distance. Sets of several nodes are
//! tried only if they are as near as the nearest set with room (`near.rs`): for a VM that computes, the prediction sees no
//! difference between sets, and it must not choose one across sockets if one within a socket has room.
//!
//! # Properties
//! - `of_homes_of_several_nodes_the_nearest_with_room_are_weighed`
//! - `a_search_ends_in_time_on_any_host`

use std::collections::BTreeSet;

use homenode_units::Ns;

use super::Settings;
use crate::near::positions;
use crate::predict::{AsFound, CacheShape, Character, NodeShape, Place, Room, Shape};

/// Number of VMs whose fit can be checked in the time that predicting one speed takes. A measure of work, not a setting.
const FIT_PER_WORK: usize = 32;
/// Most VMs that are brought together with their memory in one look, as all their memory moves at once.
const TOGETHER_MAX: usize = 4;
/// Fewest CPUs of a node that can be a home on a quiet host. On nodes of four CPUs one VM of 90 took 1.11 to 1.17 of its
/// time, while all VMs together gained half a percent (`decisions operations --hosts small`). The cause was not traced.
/// Probably, to even out threads that are kept on a node, the kernel moves those of unplaced VMs, which then leave their
/// memory or share a cache.
const HOME_CPUS_MIN: f64 = 8.0;
/// A slow-down that is too small for any prediction to resolve. Other VMs may lose this much compared with no agent.
pub(super) const LOST_MAX: f64 = 0.005;

/// What a search may do with one VM, and what it needs to know of it.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Whether the VM is active and may be given another place.
    pub movable: bool,
    /// Whether the VM is known and may be given another place, active or not.
    pub movable_at_rest: bool,
    /// Whether this policy chooses the VM's place.
    pub ours: bool,
    /// Caches of the nodes that the VM may use, as a mask of positions.
    pub allowed: u64,
    /// Of the allowed caches, those all of whose CPUs the VM may use. A home on part of a node consists of such caches.
    pub whole: u64,
    /// Number of the VM's vCPUs.
    pub vcpus: f64,
    /// Bytes of the VM's memory on each node.
    pub bytes: Vec<f64>,
}

impl Wish {
    /// Returns the bytes of the VM's memory on these nodes.
    fn bytes_on(&self, nodes: u64) -> f64 {
        positions(nodes).map(|node| self.bytes[node]).sum()
    }

    /// Returns the bytes of the VM's memory that would move to each of these nodes if they were its home.
    pub fn coming(&self, nodes: u64) -> impl Iterator<Item = (usize, f64)> {
        let part = self.bytes.iter().sum::<f64>() / f64::from(nodes.count_ones());
        positions(nodes).map(move |node| (node, (part - self.bytes[node]).max(0.0)))
    }
}

/// A search that starts from the current places.
#[derive(Debug)]
pub struct Search<'a> {
    settings: Settings<'a>,
    shape: &'a Shape,
    vms: &'a [Character],
    wishes: &'a [Wish],
    free_bytes: &'a [f64],
    now: &'a [Place],
    room: &'a mut Room,
    /// Time within which a move must pay.
    horizon: Ns,
    /// Speed of each VM if none had a home.
    none: Vec<f64>,
    speeds: Vec<f64>,
    /// Speeds in the arrangement from which a step starts.
    base: Vec<f64>,
    /// Threads that VMs want per CPU of the host, at least 1.
    excess: f64,
    /// Number of arrangements weighed, and the work so far.
    candidates: usize,
    work: usize,
    /// Whether homes may have one node more than their VM needs.
    wide: bool,
    /// Number of vCPUs that a node may hold beyond its share.
    above: f64,
}

impl<'a> Search<'a> {
    /// Prepares a search among these VMs. `now` holds their current places.
    pub fn new(
        settings: Settings<'a>,
        shape: &'a Shape,
        vms: &'a [Character],
        wishes: &'a [Wish],
        free_bytes: &'a [f64],
        now: &'a [Place],
        room: &'a mut Room,
    ) -> Self {
        let mut none = Vec::new();
        let unplaced = vec![Place::Unplaced; vms.len()];
        room.speeds(shape, vms, &unplaced, AsFound::No, &mut none);
        let cpus = shape.cpus();
        let wanted: f64 = vms.iter().map(|vm| vm.threads).sum();
        Search {
            settings,
            shape,
            vms,
            wishes,
            free_bytes,
            now,
            room,
            horizon: settings.arrange.horizon,
            none,
            speeds: Vec::new(),
            base: Vec::new(),
            excess: (wanted / cpus).max(1.0),
            candidates: 0,
            work: 0,
            above: 0.0,
            wide: false,
        }
    }

    /// Sets the time within which a move must pay.
    #[must_use]
    pub fn within(self, horizon: Ns) -> Self {
        Search { horizon, ..self }
    }

    /// Returns the work done so far, in the unit of [`work_max`](super::Config::work_max).
    pub fn work(&self) -> usize {
        self.work
    }

    fn has_worked_enough(&self) -> bool {
        self.work >= self.settings.arrange.work_max as usize
    }

    fn is_over(&self) -> bool {
        self.candidates >= self.settings.arrange.candidates_max as usize || self.has_worked_enough()
    }

    /// Returns the predicted slow-down of each VM under an arrangement.
    pub fn slow_downs(&mut self, places: &[Place]) -> Vec<f64> {
        self.room
            .speeds(self.shape, self.vms, places, AsFound::Yes, &mut self.speeds);
        self.none
            .iter()
            .zip(&self.speeds)
            .map(|(none, own)| none / own)
            .collect()
    }

    /// Returns the cost of an arrangement: the sum over active VMs of slow-downs and harm, and the cost of moves.
    pub fn cost(&mut self, places: &[Place]) -> f64 {
        self.room
            .speeds(self.shape, self.vms, places, AsFound::Yes, &mut self.speeds);
        self.weigh(places)
    }

    /// Returns the cost of the arrangement from which a step starts.
    fn cost_base(&mut self, places: &[Place]) -> f64 {
        self.room
            .speeds_base(self.shape, self.vms, places, &mut self.base);
        self.speeds.clone_from(&self.base);
        self.weigh(places)
    }

    /// Returns the cost of an arrangement that differs from the one given to [`Search::cost_base`] on these nodes.
    fn cost_beside(&mut self, places: &[Place], changed: u64) -> f64 {
        self.speeds.clone_from(&self.base);
        self.room
            .speeds_beside(self.shape, self.vms, places, changed, &mut self.speeds);
        self.weigh(places)
    }

    fn weigh(&mut self, places: &[Place]) -> f64 {
        let Settings { predict, arrange, .. } = self.settings;
        self.candidates += 1;
        self.work += self.room.cells_count();
        let mut sum = 0.0;
        let (mut movers, mut bytes) = (0.0, 0.0);
        for (at, place) in places.iter().enumerate() {
            if self.vms[at].threads < predict.active_min || *place == Place::Absent {
                continue;
            }
            let slow = self.none[at] / self.speeds[at];
            sum += arrange.believed(slow) + arrange.harm_weight * (slow - 1.0).max(0.0);
            let away = self.away(at, *place);
            if away > 0.0 {
                movers += 1.0;
                bytes += away;
            }
        }
        // The memory of all VMs that move shares the host's transfer rate. On average a VM waits for half of all that memory,
        // and then for its own.
        let own_s = bytes / arrange.moved_per_s.as_f64();
        let queue_s = movers * bytes / (2.0 * arrange.host_moved_per_s.as_f64());
        sum + (own_s + queue_s) * arrange.moving_loss / self.horizon.as_secs_f64()
    }

    /// Returns the bytes of a VM's memory that would have to move if it went to this place.
    fn away(&self, at: usize, to: Place) -> f64 {
        let Place::Home(mask) = to else { return 0.0 };
        if to == self.now[at] {
            return 0.0;
        }
        let nodes = self.shape.node_mask(mask);
        let bytes = self.wishes[at].bytes.iter().enumerate();
        let elsewhere = bytes.filter(|(node, _)| nodes >> node & 1 == 0);
        elsewhere.map(|(_, bytes)| bytes).sum()
    }

    /// Whether each home has CPUs for its VMs, as far as the host has, and free memory for what moves there.
    fn fits(&mut self, places: &[Place]) -> bool {
        self.work += places.len().div_ceil(FIT_PER_WORK);
        let shape = self.shape;
        let mut held = [0.0; crate::predict::NODES_MAX];
        let mut moved = [0.0; crate::predict::NODES_MAX];
        // Number of vCPUs of VMs that are confined to part of a node, by cache.
        let mut kept = [0.0; crate::predict::NODES_MAX];
        for (at, place) in places.iter().enumerate() {
            let Place::Home(mask) = *place else { continue };
            let nodes = shape.node_mask(mask);
            let wish = &self.wishes[at];
            let active = self.vms[at].threads >= self.settings.predict.active_min;
            for node in positions(nodes) {
                held[node] += if active {
                    wish.vcpus / f64::from(nodes.count_ones())
                } else {
                    0.0
                };
            }
            if shape.caches_on(nodes) != mask {
                // An idle VM counts too: it may be at work in a second.
                positions(mask).for_each(|cache| kept[cache] += wish.vcpus / f64::from(mask.count_ones()));
            }
            if *place != self.now[at] {
                wish.coming(nodes).for_each(|(node, bytes)| moved[node] += bytes);
            }
        }
        // On an overcommitted host a node may exceed its share by four vCPUs, because VMs cannot be divided.
        let above = if self.excess > 1.0 { 4.0 } else { self.above };
        let in_node = |(node, of): (usize, &NodeShape)| {
            held[node] <= of.cpus * self.excess + above + 0.01 && moved[node] <= self.free_bytes[node]
        };
        let in_cache = |(cache, of): (usize, &CacheShape)| kept[cache] <= of.cpus + 0.01;
        shape.nodes.iter().enumerate().all(in_node) && shape.caches.iter().enumerate().all(in_cache)
    }

    /// Returns the homes that a VM may have: parts of a node that have room for it, then sets of nodes. If distances between
    /// nodes differ, sets of smaller span come first.
    fn homes(&self, at: usize) -> Vec<u64> {
        let shape = self.shape;
        let wish = &self.wishes[at];
        let mut sets = self.node_sets(wish.vcpus);
        if !shape.near.is_even() {
            sets.sort_by_key(|nodes| shape.near.span(*nodes));
        }
        let parts = shape.nodes.iter().flat_map(|node| self.parts(node, wish.vcpus));
        let whole = sets.into_iter().map(|nodes| shape.caches_on(nodes));
        parts
            .chain(whole)
            .filter(|mask| self.may_live(at, *mask))
            .collect()
    }

    fn may_live(&self, at: usize, mask: u64) -> bool {
        let wish = &self.wishes[at];
        let is_part = self.shape.caches_on(self.shape.node_mask(mask)) != mask;
        mask & !(if is_part { wish.whole } else { wish.allowed }) == 0
    }

    /// Returns runs of a node's caches as possible homes, but never all of its caches. The shortest have a CPU for each vCPU,
    /// the longest a core for each vCPU, or one cache more if homes may be wide.
    fn parts(&self, node: &NodeShape, vcpus: f64) -> Vec<u64> {
        let count = node.caches.count_ones();
        if count < 2 || self.excess > 1.0 || !self.settings.arrange.by_cache {
            return Vec::new();
        }
        let enough = |of_node: f64| (vcpus / (of_node / f64::from(count))).ceil().max(1.0) as u32;
        let sizes = enough(node.cpus)..=(enough(node.cores) + u32::from(self.wide)).min(count - 1);
        let first = node.caches.trailing_zeros();
        let runs = |size: u32| (first..=first + count - size).map(move |at| ((1 << size) - 1) << at);
        sizes.flat_map(runs).collect()
    }

    /// Returns sets of nodes as possible homes. The smallest have a CPU for each vCPU, the largest a core for each vCPU, or
    /// one node more if homes may be wide. The set of all nodes is not a home.
    fn node_sets(&self, vcpus: f64) -> Vec<u64> {
        let n = self.shape.nodes.len();
        let nodes = || self.shape.nodes.iter();
        let enough = |most: f64| (vcpus / most).ceil().max(1.0) as u32;
        let fewest = enough(nodes().map(|node| node.cpus).fold(0.0, f64::max));
        let most = enough(nodes().map(|node| node.cores).fold(0.0, f64::max)) + u32::from(self.wide);
        let sizes = fewest..=most;
        let may = |mask: &u64| mask.count_ones() < n as u32 && sizes.contains(&mask.count_ones());
        match most <= 2 {
            true => (0..n)
                .flat_map(|a| (a..n).map(move |b| 1 << a | 1 << b))
                .filter(may)
                .collect(),
            false => (1u64..1 << n.min(10)).filter(may).collect(),
        }
    }

    /// Finds a home for each seeker one by one, widest VM first, then improves them. Returns `None` if a seeker finds no home in
    /// time. Homes hold more vCPUs than CPUs only if there is no other way: then [`crate::balance`] lends CPUs of other nodes.
    pub fn homes_for(&mut self, seekers: &[usize]) -> Option<Vec<Place>> {
        self.homes_within(0.0, seekers).or_else(|| {
            let vcpus = seekers.iter().map(|at| self.wishes[*at].vcpus);
            self.homes_within(vcpus.fold(0.0, f64::max), seekers)
        })
    }

    fn homes_within(&mut self, above: f64, seekers: &[usize]) -> Option<Vec<Place>> {
        self.above = above;
        let mut order = seekers.to_vec();
        order.sort_by(|a, b| {
            self.wishes[*b]
                .vcpus
                .total_cmp(&self.wishes[*a].vcpus)
                .then(a.cmp(b))
        });
        let mut places = self.now.to_vec();
        seekers.iter().for_each(|at| places[*at] = Place::Absent);
        for at in order {
            let mut best: Option<(Place, f64)> = None;
            let homes = self.homes(at);
            let mut reach = Reach::new(self.shape, self.wishes[at].vcpus, &homes);
            self.cost_base(&places);
            for mask in homes {
                if self.has_worked_enough() {
                    return None;
                }
                if reach.is_beyond(self.shape, mask) {
                    break;
                }
                places[at] = Place::Home(mask);
                if self.fits(&places) {
                    reach.note(self.shape, mask);
                    let cost = self.cost_beside(&places, mask);
                    if best.is_none_or(|(_, least)| cost < least) {
                        best = Some((places[at], cost));
                    }
                }
                places[at] = Place::Absent;
            }
            places[at] = best?.0;
        }
        let mut may_move = vec![false; places.len()];
        seekers.iter().for_each(|at| may_move[*at] = true);
        self.improve(&mut places, &may_move);
        Some(places)
    }

    /// Finds homes for polluters, while all other VMs stay in place; `None` if no home lowers the cost. The VMs that fetch
    /// most cache lines go first, each to the home that costs least. A home that does not lower the cost is kept for now, as
    /// more homes may spread polluters more evenly; the search ends after more such homes in a row than there are caches.
    pub fn homes_for_polluters(&mut self, seekers: &[usize]) -> Option<Vec<Place>> {
        let lines = |at: usize| {
            let vm = &self.vms[at];
            self.none[at] / vm.threads * vm.references * vm.miss_ratio
        };
        let active: Vec<usize> = (0..self.vms.len())
            .filter(|at| self.vms[*at].threads >= self.settings.predict.active_min)
            .collect();
        let mean = active.iter().map(|at| lines(*at)).sum::<f64>() / active.len().max(1) as f64;
        let least = self.settings.arrange.polluter_min * mean;
        let mut order: Vec<(usize, f64)> = seekers.iter().map(|at| (*at, lines(*at))).collect();
        order.retain(|(_, lines)| *lines >= least);
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut places = self.now.to_vec();
        let mut least = self.cost(&places);
        let (mut best, mut in_vain) = (None, 0);
        for (at, _) in order {
            let mut found: Option<(Place, f64)> = None;
            for mask in self.unlike(at, &places) {
                if self.is_over() {
                    return best;
                }
                let place = Place::Home(mask);
                let before = std::mem::replace(&mut places[at], place);
                if self.fits(&places) {
                    let cost = self.cost(&places);
                    if found.is_none_or(|(_, least)| cost < least) {
                        found = Some((place, cost));
                    }
                }
                places[at] = before;
            }
            let Some((place, cost)) = found else { continue };
            places[at] = place;
            if cost < least - self.settings.arrange.step_min {
                (least, in_vain) = (cost, 0);
                best = Some(places.clone());
            } else {
                in_vain += 1;
                if in_vain > self.shape.caches.len() {
                    break;
                }
            }
        }
        best
    }

    /// Finds homes on whole nodes for unplaced VMs that use much memory on nodes where their threads are not; all other VMs
    /// stay in place. The VMs that wait most for remote memory go first, at most `TOGETHER_MAX` in one look. Each VM must
    /// gain at least [`together_min`](super::Config::together_min), and so must all VMs together. No other VM may become
    /// slower than without an agent by more than `LOST_MAX` in total; a VM that already is may not become slower still. A
    /// home node has a CPU for each vCPU of the VMs that live there, whether they work or not.
    pub fn homes_together(&mut self, seekers: &[usize]) -> Option<Vec<Place>> {
        let least = self.settings.arrange.together_min;
        let mut order: Vec<(usize, f64)> = seekers
            .iter()
            .map(|at| {
                (
                    *at,
                    (1.0 - self.vms[*at].local_free) * self.vms[*at].waiting_share(),
                )
            })
            .filter(|(_, waits_for_others)| *waits_for_others >= least)
            .collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let mut places = self.now.to_vec();
        let mut slow = self.slow_downs(&places);
        let mut given = 0;
        for (at, _) in order {
            let (own_most, most) = (slow[at] * (1.0 - least), slow.iter().sum::<f64>() - least);
            let mut best: Option<(u64, f64, Vec<f64>)> = None;
            for mask in self.roomy(at, &places) {
                if self.is_over() {
                    break;
                }
                let before = std::mem::replace(&mut places[at], Place::Home(mask));
                let then = self.slow_downs(&places);
                (self.candidates, self.work) = (self.candidates + 1, self.work + self.room.cells_count());
                places[at] = before;
                let mut others = (0..then.len()).filter(|other| *other != at);
                let harms = others.any(|other| then[other] > slow[other].max(1.0 + LOST_MAX));
                let sum: f64 = then.iter().sum();
                let most = best.as_ref().map_or(most, |(_, sum, _)| *sum - LOST_MAX);
                if then[at] <= own_most && sum < most && !harms {
                    best = Some((mask, sum, then));
                }
            }
            let Some((mask, _, then)) = best else { continue };
            (places[at], slow) = (Place::Home(mask), then);
            given += 1;
            if given == TOGETHER_MAX {
                break;
            }
        }
        (given > 0).then_some(places)
    }

    /// Returns homes on whole nodes, as few as possible. Each node has at least `HOME_CPUS_MIN` CPUs, and a CPU for each vCPU
    /// of the VM and of the VMs that live there. The home that holds most of the VM's memory comes first.
    fn roomy(&self, at: usize, places: &[Place]) -> Vec<u64> {
        let shape = self.shape;
        let mut booked = [0.0; crate::predict::NODES_MAX];
        for (place, wish) in places.iter().zip(self.wishes) {
            let nodes = shape.node_mask(place.mask());
            positions(nodes).for_each(|node| booked[node] += wish.vcpus / f64::from(nodes.count_ones()));
        }
        let wish = &self.wishes[at];
        let fits = |nodes: &u64| {
            let share = wish.vcpus / f64::from(nodes.count_ones());
            let has_cpus = positions(*nodes).all(|node| {
                let cpus = shape.nodes[node].cpus;
                cpus >= HOME_CPUS_MIN && booked[node] + share <= cpus
            });
            let has_memory = wish
                .coming(*nodes)
                .all(|(node, bytes)| bytes <= self.free_bytes[node]);
            has_cpus && has_memory && self.may_live(at, shape.caches_on(*nodes))
        };
        let mut sets = self.node_sets(wish.vcpus);
        sets.retain(fits);
        let fewest = sets.iter().map(|nodes| nodes.count_ones()).min();
        sets.retain(|nodes| Some(nodes.count_ones()) == fewest);
        sets.sort_by(|a, b| wish.bytes_on(*b).total_cmp(&wish.bytes_on(*a)));
        sets.into_iter().map(|nodes| shape.caches_on(nodes)).collect()
    }

    /// Returns homes on caches that are no VM's home yet. Of homes that are alike, only the one with most of the VM's memory is
    /// returned. Homes are alike if they have equally many caches, of the same node or of nodes of one kind that hold no home.
    fn unlike(&self, at: usize, places: &[Place]) -> Vec<u64> {
        let shape = self.shape;
        let held = places.iter().fold(0, |held, place| held | place.mask());
        let held_nodes = shape.node_mask(held);
        let bytes = |mask: &u64| self.wishes[at].bytes_on(shape.node_mask(*mask));
        let mut homes = self.homes(at);
        homes.sort_by(|a, b| bytes(b).total_cmp(&bytes(a)));
        let kind_of = |node: usize| {
            let of = &shape.nodes[node];
            let known = (held_nodes >> node & 1 == 1).then_some(node);
            (known, of.cpus.to_bits(), of.bandwidth.to_bits())
        };
        let mut seen = BTreeSet::new();
        homes.retain(|mask| {
            let nodes: Vec<_> = positions(shape.node_mask(*mask)).map(kind_of).collect();
            mask & held == 0 && seen.insert((mask.count_ones(), nodes))
        });
        homes
    }

    /// Moves one VM after the other, or exchanges its home with another's, whichever lowers the cost most, until no such step
    /// does.
    fn improve(&mut self, places: &mut Vec<Place>, may_move: &[bool]) {
        let movers: Vec<usize> = (0..places.len()).filter(|at| may_move[*at]).collect();
        // Number of VMs in a row for which no better place was found.
        let mut content = 0;
        for at in movers.iter().cycle() {
            if content == movers.len() || self.is_over() {
                return;
            }
            let most = self.cost_base(places) - self.settings.arrange.step_min;
            content = match self.step_of(*at, places, may_move, most) {
                Some((better, _)) => {
                    *places = better;
                    0
                }
                None => content + 1,
            };
        }
    }

    /// Returns the arrangement after the one move or exchange of homes that lowers the cost most, by at least
    /// [`move_gain_min`](super::Config::move_gain_min). If having no homes costs less still, returns that arrangement.
    pub fn one_better(&mut self) -> Option<Vec<Place>> {
        let now = self.now;
        let may_move: Vec<bool> = (0..now.len())
            .map(|at| self.wishes[at].movable && now[at] != Place::Unplaced)
            .collect();
        self.wide = true;
        let most = self.cost_base(now) - self.settings.arrange.move_gain_min;
        let better = self.step(now, &may_move, most);
        let most = better.as_ref().map_or(most, |(_, cost)| *cost);
        let unplaced = self.all_unplaced();
        if unplaced != now && self.cost(&unplaced) < most {
            return Some(unplaced);
        }
        better.map(|(places, _)| places)
    }

    /// Returns the arrangement without the homes that this policy chose.
    pub fn all_unplaced(&self) -> Vec<Place> {
        let places = self.now.iter().zip(self.wishes);
        places
            .map(|(place, wish)| if wish.ours { Place::Unplaced } else { *place })
            .collect()
    }

    /// Returns the cheapest move or exchange whose cost is below `most`, and its cost. `from` is the arrangement that
    /// [`Search::cost_base`] weighed last.
    fn step(&mut self, from: &[Place], may_move: &[bool], most: f64) -> Option<(Vec<Place>, f64)> {
        let mut best: Option<(Vec<Place>, f64)> = None;
        for at in (0..from.len()).filter(|at| may_move[*at]) {
            let most = best.as_ref().map_or(most, |(_, least)| *least);
            best = self.step_of(at, from, may_move, most).or(best);
        }
        best
    }

    /// Returns the best move of this VM, or exchange with a VM after it.
    fn step_of(
        &mut self,
        at: usize,
        from: &[Place],
        may_move: &[bool],
        mut most: f64,
    ) -> Option<(Vec<Place>, f64)> {
        let mut best = None;
        let mut candidate = from.to_vec();
        let homes = self.homes(at);
        let mut reach = Reach::new(self.shape, self.wishes[at].vcpus, &homes);
        let moves = homes.into_iter().map(|mask| (at, Place::Home(mask)));
        let exchanges = (at + 1..from.len())
            .filter(|other| may_move[*other])
            .map(|other| (other, from[at]));
        for (other, place) in moves.chain(exchanges) {
            if self.is_over() {
                return best;
            }
            let is_move = other == at;
            if is_move && reach.is_beyond(self.shape, place.mask()) {
                continue;
            }
            if place == from[other] {
                reach.note(self.shape, place.mask());
                continue;
            }
            candidate[at] = from[other];
            candidate[other] = place;
            // VMs that exchange homes may be allowed different CPUs.
            let may = [at, other]
                .iter()
                .all(|vm| self.may_live(*vm, candidate[*vm].mask()));
            if may && self.fits(&candidate) {
                if is_move {
                    reach.note(self.shape, place.mask());
                }
                let changed = from[at].mask() | from[other].mask() | place.mask();
                let cost = self.cost_beside(&candidate, changed);
                if cost < most {
                    most = cost;
                    best = Some((candidate.clone(), cost));
                }
            }
            (candidate[at], candidate[other]) = (from[at], from[other]);
        }
        best
    }
}

/// How far apart the nodes of a VM's home may be: no farther than in the nearest set of several nodes that has room and a
/// core for each vCPU. If no set has enough cores, hyperthreads count instead.
#[derive(Clone, Copy, Debug)]
struct Reach {
    most: Option<u32>,
    vcpus: f64,
    by_cores: bool,
}

impl Reach {
    /// Prepares the reach of a VM that may have any of these homes.
    fn new(shape: &Shape, vcpus: f64, homes: &[u64]) -> Reach {
        let mut reach = Reach {
            most: None,
            vcpus,
            by_cores: true,
        };
        reach.by_cores = homes
            .iter()
            .any(|mask| reach.is_enough(shape, shape.node_mask(*mask)));
        reach
    }

    fn is_enough(&self, shape: &Shape, nodes: u64) -> bool {
        let of_nodes = positions(nodes).map(|at| &shape.nodes[at]);
        let there: f64 = of_nodes
            .map(|node| if self.by_cores { node.cores } else { node.cpus })
            .sum();
        there >= self.vcpus
    }

    /// Records a set that has room. Sets must be recorded in order of span.
    fn note(&mut self, shape: &Shape, mask: u64) {
        let nodes = shape.node_mask(mask);
        if nodes.count_ones() > 1 && self.is_enough(shape, nodes) {
            self.most.get_or_insert(shape.near.span(nodes));
        }
    }

    fn is_beyond(&self, shape: &Shape, mask: u64) -> bool {
        let span = || shape.near.span(shape.node_mask(mask));
        self.most.is_some_and(|most| span() > most)
    }
}
