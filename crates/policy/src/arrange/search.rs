//! Search over arrangements: greedy homes, then moves and exchanges while they pay.
//!
//! Every candidate is one prediction ([`Room::speeds_beside`]). Their number is bounded by
//! [`candidates_max`](super::Config::candidates_max) and their work by [`work_max`](super::Config::work_max), so that a search
//! ends in time on any host. One on which not even a first home for each VM is found by then stays as it is.
//!
//! A VM with more vCPUs than a node has cores is weighed on one node, whose hyperthreads it shares, and on as many nodes as
//! have cores for it: the prediction knows what sharing a core costs, and what distance does. Of sets of several nodes only the
//! nearest with room are weighed (`near.rs`): a prediction that does not see the difference, of a VM that computes, must
//! not give a set across sockets where one within a socket has room.
//!
//! # Properties
//! - `of_homes_of_several_nodes_the_nearest_with_room_are_weighed`
//! - `a_search_ends_in_time_on_any_host`

use super::Settings;
use crate::near::positions;
use crate::predict::{AsFound, Character, Place, Room, Shape};

/// VMs of which it is cheaper to see whether they fit than to predict the speed of one. A measure of work, no setting.
const FIT_PER_WORK: usize = 32;

/// What a search may do with a VM.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Whether it may be given another place.
    pub movable: bool,
    /// Whether its place is one that we chose.
    pub ours: bool,
    /// Nodes that it may use, by position.
    pub allowed: u64,
    /// Its vCPUs.
    pub vcpus: f64,
    /// Bytes of its memory on each node.
    pub bytes: Vec<f64>,
}

impl Wish {
    /// Bytes of its memory that would come to each node of a home.
    pub fn coming(&self, home: u64) -> impl Iterator<Item = (usize, f64)> {
        let part = self.bytes.iter().sum::<f64>() / f64::from(home.count_ones());
        positions(home).map(move |node| (node, (part - self.bytes[node]).max(0.0)))
    }
}

/// A search from where VMs are now.
#[derive(Debug)]
pub struct Search<'a> {
    settings: Settings<'a>,
    shape: &'a Shape,
    vms: &'a [Character],
    wishes: &'a [Wish],
    free_bytes: &'a [f64],
    now: &'a [Place],
    room: &'a mut Room,
    /// Speed of each VM if no VM had a home.
    none: Vec<f64>,
    speeds: Vec<f64>,
    /// Speeds in the arrangement that a step begins from.
    base: Vec<f64>,
    /// Threads that VMs want over CPUs that there are, at least 1.
    excess: f64,
    /// Arrangements that were weighed, and the work so far.
    candidates: usize,
    work: usize,
    /// Whether homes may have one node more than their VM needs.
    wide: bool,
    /// vCPUs that a home may hold above its CPUs.
    above: f64,
}

impl<'a> Search<'a> {
    /// A search among these VMs, of which each is where `now` says.
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
        let free = vec![Place::Free; vms.len()];
        room.speeds(shape, vms, &free, AsFound::No, &mut none);
        let cpus: f64 = shape.nodes.iter().map(|node| node.cpus).sum();
        let wanted: f64 = vms.iter().map(|vm| vm.threads).sum();
        Search {
            settings,
            shape,
            vms,
            wishes,
            free_bytes,
            now,
            room,
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

    /// What was done so far, as in [`work_max`](super::Config::work_max).
    pub fn work(&self) -> usize {
        self.work
    }

    fn has_worked_enough(&self) -> bool {
        self.work >= self.settings.arrange.work_max as usize
    }

    /// Predicted slow-down of each VM under an arrangement.
    pub fn slow_downs(&mut self, places: &[Place]) -> Vec<f64> {
        self.room
            .speeds(self.shape, self.vms, places, AsFound::Yes, &mut self.speeds);
        self.none
            .iter()
            .zip(&self.speeds)
            .map(|(none, own)| none / own)
            .collect()
    }

    /// Sum over active VMs of slow-downs, harm and moves.
    fn cost(&mut self, places: &[Place]) -> f64 {
        self.room
            .speeds(self.shape, self.vms, places, AsFound::Yes, &mut self.speeds);
        self.weigh(places)
    }

    /// The same of the arrangement that a step begins from.
    fn cost_base(&mut self, places: &[Place]) -> f64 {
        self.room
            .speeds_base(self.shape, self.vms, places, &mut self.base);
        self.speeds.clone_from(&self.base);
        self.weigh(places)
    }

    /// The same of one that differs from it on these nodes.
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
        for (at, place) in places.iter().enumerate() {
            if self.vms[at].threads < predict.active_min || *place == Place::Unplaced {
                continue;
            }
            let slow = self.none[at] / self.speeds[at];
            sum += arrange.believed(slow) + arrange.harm_weight * (slow - 1.0).max(0.0);
            if *place != self.now[at] {
                sum += self.move_cost(at, *place);
            }
        }
        sum
    }

    fn move_cost(&self, at: usize, to: Place) -> f64 {
        let Place::Home(mask) = to else { return 0.0 };
        let bytes = self.wishes[at].bytes.iter().enumerate();
        let away: f64 = bytes
            .filter(|(node, _)| mask >> node & 1 == 0)
            .map(|(_, bytes)| bytes)
            .sum();
        let config = self.settings.arrange;
        away / config.moved_per_s.as_f64() * config.moving_loss / config.horizon.as_secs_f64()
    }

    /// Whether all homes have CPUs for their VMs, as far as the host has, and memory for what moves.
    fn fits(&mut self, places: &[Place]) -> bool {
        self.work += places.len().div_ceil(FIT_PER_WORK);
        let mut held = [0.0; crate::predict::NODES_MAX];
        let mut moved = [0.0; crate::predict::NODES_MAX];
        for (at, place) in places.iter().enumerate() {
            let Place::Home(mask) = place else { continue };
            let count = f64::from(mask.count_ones());
            let wish = &self.wishes[at];
            let active = self.vms[at].threads >= self.settings.predict.active_min;
            for node in positions(*mask) {
                held[node] += if active { wish.vcpus / count } else { 0.0 };
            }
            if *place != self.now[at] {
                wish.coming(*mask).for_each(|(node, bytes)| moved[node] += bytes);
            }
        }
        let nodes = self.shape.nodes.iter().enumerate();
        nodes.into_iter().all(|(node, shape)| {
            // What a VM is wider than its share of an overcommitted host rounds up to whole VMs.
            let above = if self.excess > 1.0 { 4.0 } else { self.above };
            let room = shape.cpus * self.excess + above;
            held[node] <= room + 0.01 && moved[node] <= self.free_bytes[node]
        })
    }

    /// Homes that a VM may have: sets of as few nodes as hold it, of as many as have a core for each vCPU, and of one more where
    /// they may be wide. Where nodes are not equally far from each other those of less span come first.
    fn homes(&self, at: usize) -> Vec<u64> {
        let n = self.shape.nodes.len();
        let wish = &self.wishes[at];
        let nodes = || self.shape.nodes.iter();
        let enough = |most: f64| (wish.vcpus / most).ceil().max(1.0) as u32;
        let fewest = enough(nodes().map(|node| node.cpus).fold(0.0, f64::max));
        let most = enough(nodes().map(|node| node.cores).fold(0.0, f64::max)) + u32::from(self.wide);
        // All nodes are no home.
        let all = self.shape.all();
        let sizes = fewest..=most;
        let may =
            |mask: &u64| mask & !wish.allowed == 0 && *mask != all && sizes.contains(&mask.count_ones());
        let mut homes: Vec<u64> = match most <= 2 {
            true => (0..n)
                .flat_map(|a| (a..n).map(move |b| 1 << a | 1 << b))
                .filter(may)
                .collect(),
            false => (1u64..1 << n.min(10)).filter(may).collect(),
        };
        if !self.shape.near.is_even() {
            homes.sort_by_key(|mask| self.shape.near.span(*mask));
        }
        homes
    }

    /// A home for each of these, found one by one, widest first, and then improved; `None` where one finds none in time. Homes
    /// hold more vCPUs than CPUs only where there is no other way; for those CPUs of other nodes are lent.
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
        seekers.iter().for_each(|at| places[*at] = Place::Unplaced);
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
                places[at] = Place::Unplaced;
            }
            places[at] = best?.0;
        }
        let mut may_move = vec![false; places.len()];
        seekers.iter().for_each(|at| may_move[*at] = true);
        loop {
            let most = self.cost_base(&places) - self.settings.arrange.step_min;
            match self.step(&places, &may_move, most) {
                Some((better, _)) => places = better,
                None => return Some(places),
            }
        }
    }

    /// The one move or exchange of homes that lowers the cost most, by [`move_gain_min`](super::Config::move_gain_min) at least,
    /// or freedom for all.
    pub fn one_better(&mut self) -> Option<Vec<Place>> {
        let now = self.now;
        let may_move: Vec<bool> = (0..now.len())
            .map(|at| self.wishes[at].movable && now[at] != Place::Free)
            .collect();
        self.wide = true;
        let most = self.cost_base(now) - self.settings.arrange.move_gain_min;
        let better = self.step(now, &may_move, most);
        let most = better.as_ref().map_or(most, |(_, cost)| *cost);
        let free = self.all_free();
        if free != now && self.cost(&free) < most {
            return Some(free);
        }
        better.map(|(places, _)| places)
    }

    /// Freedom for all whose homes we chose.
    pub fn all_free(&self) -> Vec<Place> {
        let places = self.now.iter().zip(self.wishes);
        places
            .map(|(place, wish)| if wish.ours { Place::Free } else { *place })
            .collect()
    }

    /// The move or exchange of least cost below `most`, beside the arrangement that [`Search::cost_base`] weighed last.
    fn step(&mut self, from: &[Place], may_move: &[bool], most: f64) -> Option<(Vec<Place>, f64)> {
        let mut best: Option<(Vec<Place>, f64)> = None;
        let mut candidate = from.to_vec();
        for at in (0..from.len()).filter(|at| may_move[*at]) {
            let homes = self.homes(at);
            let mut reach = Reach::new(self.shape, self.wishes[at].vcpus, &homes);
            let moves = homes.into_iter().map(|mask| (at, Place::Home(mask)));
            let exchanges = (at + 1..from.len())
                .filter(|other| may_move[*other])
                .map(|other| (other, from[at]));
            for (other, place) in moves.chain(exchanges) {
                if self.candidates >= self.settings.arrange.candidates_max as usize
                    || self.has_worked_enough()
                {
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
                // Who exchanges homes may have other CPUs than the other.
                let may = [at, other]
                    .iter()
                    .all(|vm| candidate[*vm].mask() & !self.wishes[*vm].allowed == 0);
                if may && self.fits(&candidate) {
                    if is_move {
                        reach.note(self.shape, place.mask());
                    }
                    let changed = from[at].mask() | from[other].mask() | place.mask();
                    let cost = self.cost_beside(&candidate, changed);
                    if cost < best.as_ref().map_or(most, |(_, least)| *least) {
                        best = Some((candidate.clone(), cost));
                    }
                }
                (candidate[at], candidate[other]) = (from[at], from[other]);
            }
        }
        best
    }
}

/// How far apart the nodes of a VM's home may be: no farther than those of the nearest set of several nodes with room, which are
/// as many as have a core for each vCPU, or, where none of the sets has, a hyperthread.
#[derive(Clone, Copy, Debug)]
struct Reach {
    most: Option<u32>,
    vcpus: f64,
    by_cores: bool,
}

impl Reach {
    /// Of a VM that may have one of these homes.
    fn new(shape: &Shape, vcpus: f64, homes: &[u64]) -> Reach {
        let mut reach = Reach {
            most: None,
            vcpus,
            by_cores: true,
        };
        reach.by_cores = homes.iter().any(|mask| reach.is_enough(shape, *mask));
        reach
    }

    fn is_enough(&self, shape: &Shape, mask: u64) -> bool {
        let nodes = positions(mask).map(|at| &shape.nodes[at]);
        let there: f64 = nodes
            .map(|node| if self.by_cores { node.cores } else { node.cpus })
            .sum();
        there >= self.vcpus
    }

    /// Takes in a set with room. Sets come by span.
    fn note(&mut self, shape: &Shape, mask: u64) {
        if mask.count_ones() > 1 && self.is_enough(shape, mask) {
            self.most.get_or_insert(shape.near.span(mask));
        }
    }

    fn is_beyond(&self, shape: &Shape, mask: u64) -> bool {
        self.most.is_some_and(|most| shape.near.span(mask) > most)
    }
}
