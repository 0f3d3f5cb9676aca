//! Predicts the effect of an arrangement that an operator asks about. It decides nothing.
//!
//! # Problem
//! Before moving gigabytes, an operator wants to know what a home would do to a VM and its neighbours.
//!
//! # Terms
//! - *Slow-down* of a VM: the time that its work takes, over the time that it would take if no VM had a home, as everywhere
//!   in this policy. 1 is as fast as without an agent; less is faster.
//!
//! # Algorithm
//! 1. The host and its VMs are modelled as in [`super::plan`]. A VM that is not known yet counts as the mean of the known
//!    VMs, with its own number of threads; no slow-down is reported for it.
//! 2. Slow-downs are predicted for the current places, and again with the requested VMs in the requested places.
//! 3. Obstacles to a change are reported: the VM may not use a node, its vCPUs are left alone (pinned by hand, for example),
//!    its memory cannot move, or a node has no room for it.
//!
//! # Properties
//! - `what_if_of_where_all_are_changes_nothing`
//! - `a_vm_beside_a_polluter_is_predicted_slower`
//! - `a_vm_that_is_not_asked_about_stays`
//! - `a_vm_that_is_not_known_is_named`
//! - `asking_changes_no_later_answer`

use std::collections::BTreeMap;
use std::fmt;

use homenode_host::{HandsOff, View, VmView};
use homenode_units::{Bytes, NodeId, NodeSet, VmId};

use super::{Scene, Settings, State};
use crate::predict::{Place, Room, Shape};

/// The requested place of each VM: its home nodes, or `None` for unplaced.
pub type Wanted = BTreeMap<VmId, Option<NodeSet>>;

/// A prediction for all VMs of the host.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// Every VM, in the order of the view.
    pub vms: Vec<VmForecast>,
    /// Nodes without room for the memory that would move to them.
    pub short: Vec<Shortage>,
}

/// A prediction for one VM.
#[derive(Clone, Debug, PartialEq)]
pub struct VmForecast {
    /// The VM.
    pub vm: VmId,
    /// The VM's home now; `None` if it is unplaced.
    pub home: Option<NodeSet>,
    /// The requested home, or the present one if the request does not name the VM; `None` if unplaced.
    pub home_then: Option<NodeSet>,
    /// The VM's slow-downs, or why none is predicted.
    pub slow_down: Result<SlowDown, Unknown>,
    /// What stands in the way of the requested home, if anything.
    pub obstacle: Option<Obstacle>,
}

/// The time that a VM's work takes, over the time that it would take without an agent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowDown {
    /// In the current places.
    pub now: f64,
    /// In the requested places.
    pub then: f64,
}

/// Why no slow-down is predicted for a VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// The VM does not want a CPU.
    Idle,
    /// The VM has not worked for long enough.
    New {
        /// Number of periods in which the VM worked.
        cycles: u32,
        /// Number of periods required.
        needed: u32,
    },
    /// The VM's LLC misses are not counted.
    Uncounted,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unknown::Idle => write!(f, "idle, so there is no speed to predict"),
            Unknown::New { cycles, needed } => write!(
                f,
                "not known yet: it was at work in {cycles} of the {needed} periods needed"
            ),
            Unknown::Uncounted => write!(
                f,
                "not known: its instructions and LLC misses are not counted on this host"
            ),
        }
    }
}

/// What stands in the way of a home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Obstacle {
    /// The VM may not use these nodes.
    Forbidden(NodeSet),
    /// The agent leaves the VM's vCPUs alone.
    LeftAlone(HandsOff),
    /// The VM's memory cannot move.
    Fixed(String),
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Obstacle::Forbidden(nodes) => write!(f, "it may not use node {nodes}"),
            Obstacle::LeftAlone(why) => write!(f, "it is left alone: {why}"),
            Obstacle::Fixed(why) => write!(f, "its memory cannot move: {why}"),
        }
    }
}

/// A node without room for the memory that would move to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shortage {
    /// The node.
    pub node: NodeId,
    /// Memory that would move to the node.
    pub needed_bytes: Bytes,
    /// Memory that is free on the node.
    pub free_bytes: Bytes,
}

/// Why there is no forecast.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoForecast {
    /// A requested home has no nodes, or nodes that do not exist.
    #[error("node {nodes} cannot be a home on this host; these can: {usable}")]
    Nodes {
        /// The requested nodes that cannot be a home.
        nodes: NodeSet,
        /// The nodes that can.
        usable: NodeSet,
    },
    /// A VM in the request is not known well enough.
    #[error("VM {name} is {why}")]
    Unknown {
        /// The VM's name.
        name: String,
        /// The reason.
        why: Unknown,
    },
}

/// Predicts the slow-downs of all VMs with the requested homes; VMs that are not in the request stay in place.
///
/// # Errors
/// Fails if a requested home does not exist on this host, or if a VM in the request is not known yet.
pub fn what_if(
    view: &View<'_>,
    settings: Settings<'_>,
    state: &State,
    wanted: &Wanted,
) -> Result<Forecast, NoForecast> {
    let shape = state
        .shape(view, settings)
        .unwrap_or_else(|| settings.shape_of(view));
    check_nodes(&shape, wanted)?;
    let scene = Scene::of(view, settings, shape, state);
    let unknown: Vec<Option<Unknown>> = scene
        .vms
        .iter()
        .zip(&scene.characters)
        .map(|(vm, character)| scene.why_unknown(vm, character.threads, state))
        .collect();
    for (vm, unknown) in scene.vms.iter().zip(&unknown) {
        if let Some(why) = unknown.filter(|why| *why != Unknown::Idle && wanted.contains_key(&vm.sample.id)) {
            let name = vm.sample.name.clone();
            return Err(NoForecast::Unknown { name, why });
        }
    }
    let places = scene.places_of(wanted);
    let mut room = Room::default();
    let mut search = scene.search(&mut room);
    let (now, then) = (search.slow_downs(&scene.places), search.slow_downs(&places));
    let vms = scene
        .vms
        .iter()
        .zip(unknown)
        .enumerate()
        .map(|(at, (vm, unknown))| {
            let home_then = wanted.get(&vm.sample.id);
            let (now, then) = (now[at], then[at]);
            VmForecast {
                vm: vm.sample.id,
                home: vm.home.cloned(),
                home_then: home_then.cloned().unwrap_or_else(|| vm.home.cloned()),
                slow_down: unknown.map_or(Ok(SlowDown { now, then }), Err),
                obstacle: scene.obstacle(at, places[at]),
            }
        });
    Ok(Forecast {
        vms: vms.collect(),
        short: scene.shortages(&places),
    })
}

fn check_nodes(shape: &Shape, wanted: &Wanted) -> Result<(), NoForecast> {
    let usable = shape.nodes_of(shape.all());
    let of_none = |home: &&NodeSet| home.is_empty() || !home.is_subset(&usable);
    match wanted.values().flatten().find(of_none) {
        Some(home) => Err(NoForecast::Nodes {
            nodes: home.difference(&usable),
            usable,
        }),
        None => Ok(()),
    }
}

impl Scene<'_> {
    fn why_unknown(&self, vm: &VmView<'_>, threads: f64, state: &State) -> Option<Unknown> {
        let (cycles, needed) = (
            state.profiles.cycles(vm.sample.id),
            self.settings.predict.known_cycles,
        );
        match vm.rates {
            Some(_) if threads < self.settings.predict.active_min => Some(Unknown::Idle),
            Some(rates) if rates.instructions_per_s.is_none() || rates.llc_references_per_s.is_none() => {
                Some(Unknown::Uncounted)
            }
            Some(_) if self.is_known(&state.profiles, vm.sample.id) => None,
            _ => Some(Unknown::New { cycles, needed }),
        }
    }

    /// Returns the place of each VM: the requested one or, without a request, the current one.
    fn places_of(&self, wanted: &Wanted) -> Vec<Place> {
        let place = |vm: &VmView<'_>, now: Place| match wanted.get(&vm.sample.id) {
            None => now,
            Some(home) => home
                .as_ref()
                .and_then(|home| self.shape.mask(home))
                .map_or(Place::Unplaced, Place::Home),
        };
        let vms = self.vms.iter().zip(&self.places);
        vms.map(|(vm, now)| place(vm, *now)).collect()
    }

    fn obstacle(&self, at: usize, then: Place) -> Option<Obstacle> {
        let Place::Home(mask) = then else { return None };
        if then == self.places[at] {
            return None;
        }
        let forbidden = mask & !self.wishes[at].allowed;
        if forbidden != 0 {
            return Some(Obstacle::Forbidden(self.shape.nodes_of(forbidden)));
        }
        if let Some(why) = self.vms[at].hands_off {
            return Some(Obstacle::LeftAlone(why));
        }
        let why = self.vms[at].memory_fixed()?;
        Some(Obstacle::Fixed(why.to_string()))
    }

    /// Returns nodes without enough free memory for what would move to them. Memory that leaves a node is not counted as
    /// free: it may leave too late.
    fn shortages(&self, places: &[Place]) -> Vec<Shortage> {
        let mut needed = vec![0.0; self.shape.nodes.len()];
        for (at, place) in places.iter().enumerate() {
            let Place::Home(mask) = *place else { continue };
            if *place == self.places[at] {
                continue;
            }
            self.wishes[at]
                .coming(self.shape.node_mask(mask))
                .for_each(|(node, bytes)| needed[node] += bytes);
        }
        let nodes = self.shape.nodes.iter().zip(needed).zip(&self.free_bytes);
        nodes
            .filter(|((_, needed), free)| needed > *free)
            .map(|((node, needed), free)| Shortage {
                node: node.id,
                needed_bytes: Bytes(needed as u64),
                free_bytes: Bytes(*free as u64),
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrange::search::LOST_MAX;
    use crate::arrange::tests::{run, watched};
    use crate::testing::{OfHomes, Scene as Host, vm_id};
    use homenode_host::{Immovable, NumaBalancing};
    use proptest::prelude::*;

    const GIB: Bytes = Bytes::from_gib(1);

    /// Four nodes of four CPUs. VM 1 reads memory, at home on node 0. VM 2 uses all of node 1's bandwidth, at home there. VM
    /// 3 computes wherever the kernel puts it.
    fn host() -> Host {
        let mut host = Host::four_nodes(4);
        let reader = host.add_vm(1, 2, GIB, 0).vcpus_busy(1.0).home(0).pages(0, 1000);
        reader
            .instructions_per_s(700_000_000)
            .misses_per_s(10_000_000)
            .local(1.0);
        let polluter = host.add_vm(2, 2, GIB, 1).vcpus_busy(1.0).home(1).pages(1, 1000);
        polluter
            .instructions_per_s(700_000_000)
            .misses_per_s(80_000_000)
            .local(1.0);
        let computes = host.add_vm(3, 2, GIB, 2).vcpus_busy(1.0);
        computes
            .instructions_per_s(3_000_000_000)
            .misses_per_s(10_000)
            .local(0.9);
        for (node, traffic) in [(0, 2_000_000_000), (1, 14_000_000_000), (2, 2_000_000)] {
            host.traffic.insert(NodeId(node), traffic);
        }
        host
    }

    fn ask(host: &mut Host, state: &State, wanted: &[(u128, &str)]) -> Result<Forecast, NoForecast> {
        let nodes = |text: &str| (text != "unplaced").then(|| text.parse().expect("a node list"));
        let wanted = wanted
            .iter()
            .map(|(vm, home)| (vm_id(*vm), nodes(home)))
            .collect();
        host.with_view(|view| what_if(view, OfHomes::default().settings(), state, &wanted))
    }

    fn slow_down(forecast: &Forecast, vm: u128) -> SlowDown {
        let of = forecast.vms.iter().find(|of| of.vm == vm_id(vm));
        of.expect("a VM of the scene").slow_down.expect("it is known")
    }

    #[test]
    fn what_if_of_where_all_are_changes_nothing() {
        let mut host = host();
        let state = watched(&mut host, 8);
        for wanted in [&[][..], &[(1, "0"), (2, "1"), (3, "unplaced")]] {
            let forecast = ask(&mut host, &state, wanted).unwrap();
            for vm in &forecast.vms {
                let SlowDown { now, then } = vm.slow_down.unwrap();
                assert!(now == then && now > 0.0, "{vm:?}");
                assert_eq!((&vm.home, &vm.obstacle), (&vm.home_then, &None));
            }
            assert_eq!(forecast.short, []);
        }
    }

    #[test]
    fn a_vm_beside_a_polluter_is_predicted_slower() {
        let mut host = host();
        let state = watched(&mut host, 8);
        let forecast = ask(&mut host, &state, &[(1, "1")]).unwrap();
        let beside = slow_down(&forecast, 1);
        assert!(beside.then > 1.02 * beside.now, "{beside:?}");
        let polluter = slow_down(&forecast, 2);
        assert!(polluter.then > polluter.now, "it loses bandwidth: {polluter:?}");
        let alone = slow_down(&ask(&mut host, &state, &[(1, "3")]).unwrap(), 1);
        assert!(alone.then < beside.then, "{alone:?}");
    }

    #[test]
    fn a_vm_that_is_not_asked_about_stays() {
        let mut host = host();
        let state = watched(&mut host, 8);
        let forecast = ask(&mut host, &state, &[(1, "2,3"), (2, "unplaced")]).unwrap();
        let homes = |home: fn(&VmForecast) -> &Option<NodeSet>| {
            let text = |vm| {
                home(vm)
                    .as_ref()
                    .map_or("unplaced".to_owned(), ToString::to_string)
            };
            forecast.vms.iter().map(text).collect::<Vec<_>>()
        };
        assert_eq!(homes(|vm| &vm.home), ["0", "1", "unplaced"]);
        assert_eq!(homes(|vm| &vm.home_then), ["2-3", "unplaced", "unplaced"]);
    }

    #[test]
    fn a_vm_that_is_not_known_is_named() {
        let mut host = host();
        let state = watched(&mut host, 6);
        let refused = ask(&mut host, &state, &[(2, "0")]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "VM vm2 is not known yet: it was at work in 6 of the 7 periods needed"
        );
        let unknown = ask(&mut host, &state, &[]).unwrap();
        assert!(unknown.vms.iter().all(|vm| vm.slow_down.is_err()), "{unknown:?}");
        // Without counters a VM stays unknown however long it works.
        let mut host = Host::four_nodes(4);
        host.add_vm(1, 4, GIB, 0).vcpus_busy(1.0);
        let state = watched(&mut host, 10);
        let uncounted = ask(&mut host, &state, &[(1, "0")]).unwrap_err();
        assert!(uncounted.to_string().contains("not counted"), "{uncounted}");
        // A VM that sleeps neither gains from a home nor takes anything from others.
        let mut host = self::host();
        host.add_vm(4, 4, GIB, 3).instructions_per_s(0);
        let state = watched(&mut host, 8);
        let asked = ask(&mut host, &state, &[(4, "0")]).unwrap();
        assert_eq!(asked.vms[3].slow_down, Err(Unknown::Idle));
        let beside = slow_down(&asked, 1);
        assert!((beside.then / beside.now - 1.0).abs() < 0.01, "{beside:?}");
    }

    #[test]
    fn asking_changes_no_later_answer() {
        let mut host = host();
        let state = watched(&mut host, 8);
        let first = ask(&mut host, &state, &[(1, "1")]).unwrap();
        ask(&mut host, &state, &[(1, "2"), (2, "unplaced"), (3, "0-3")]).unwrap();
        assert_eq!(ask(&mut host, &state, &[(1, "1")]).unwrap(), first);
    }

    #[test]
    fn nodes_that_are_none_are_refused_with_those_that_are() {
        let mut host = host();
        let state = watched(&mut host, 8);
        let refused = ask(&mut host, &state, &[(1, "3-5")]).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "node 4-5 cannot be a home on this host; these can: 0-3"
        );
    }

    #[test]
    fn what_stands_in_the_way_is_said() {
        let mut host = host();
        host.vm(1).immovable(Immovable::Vfio);
        host.vm(2).allowed("0-7");
        host.vm(2).pages(1, Bytes::from_gib(12).to_pages().0);
        host.vm(3).pages(0, Bytes::from_gib(15).to_pages().0);
        host.add_vm(4, 2, GIB, 3)
            .vcpus_busy(1.0)
            .hands_off(HandsOff::PinnedByHand)
            .instructions_per_s(1_000_000_000);
        let state = watched(&mut host, 8);
        let forecast = ask(&mut host, &state, &[(1, "3"), (2, "2"), (3, "1"), (4, "3")]).unwrap();
        assert!(
            matches!(&forecast.vms[0].obstacle, Some(Obstacle::Fixed(_))),
            "{forecast:?}"
        );
        assert_eq!(
            forecast.vms[1].obstacle,
            Some(Obstacle::Forbidden("2".parse().unwrap()))
        );
        assert_eq!(
            forecast.vms[3].obstacle,
            Some(Obstacle::LeftAlone(HandsOff::PinnedByHand))
        );
        // Node 1 has 16 GiB, of which VM 2 holds 12: 4 GiB are free, and 15 would move there.
        let [short] = forecast.short.as_slice() else {
            panic!("{forecast:?}")
        };
        assert_eq!(
            (short.node, short.needed_bytes, short.free_bytes),
            (NodeId(1), Bytes::from_gib(15), Bytes::from_gib(4))
        );
    }

    proptest! {
        #[test]
        fn homes_given_one_after_the_other_slow_no_vm_down_by_more_than_one_may(
            vms in prop::collection::vec((0u16..4, 0u16..4, 2u32..=10, 1u64..=12), 6..=14),
        ) {
            let mut host = Host::four_nodes(16);
            host.kernel.numa_balancing = NumaBalancing::of(1);
            for (at, (node, memory, busy, misses)) in vms.iter().enumerate() {
                let vm = host.add_vm(at as u128 + 1, 4, GIB, *node).vcpus_busy(f64::from(*busy) / 10.0);
                vm.pages(*memory, 100_000).local(if node == memory { 1.0 } else { 0.1 });
                vm.instructions_per_s(140_000_000 * u64::from(*busy)).misses_per_s(300_000 * misses * u64::from(*busy));
            }
            let mut state = State::default();
            run(&mut host, &mut state, 300);
            for of in ask(&mut host, &state, &[]).unwrap().vms {
                if let (None, Ok(slow)) = (of.home, of.slow_down) {
                    prop_assert!(slow.now <= 1.0 + LOST_MAX, "{}: {}", of.vm, slow.now);
                }
            }
        }
    }
}
