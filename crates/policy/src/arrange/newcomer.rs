//! Predicts the speed of a VM that does not run yet, and of its neighbours. It decides nothing.
//!
//! # Problem
//! A fleet scheduler asks hosts how well a VM would run on them. The free room of a host does not tell whether neighbours
//! fill a memory controller, or whether the newcomer would slow a neighbour down.
//!
//! # Algorithm
//! 1. The program is not known before it runs. It is assumed to have as many threads as the VM has vCPUs, and to draw the
//!    requested bandwidth or, if none is requested, to wait for memory for a third of its time ([`Character::newcomer`]).
//!    What VMs of its size do on this host is ignored: on another host they do something else, and the answers of hosts must
//!    be comparable.
//! 2. The newcomer's speed next to the present VMs is predicted, and the speed of each of them with and without it.
//! 3. The newcomer's speed is divided by its speed alone. How much its neighbours cost it is told by its speed alone in the same
//!    place ([`Beside`]). Places are compared by one speed alone, where the kernel puts it on an idle host ([`each_beside`]):
//!    in a place that is too small it is slow even alone, so a speed alone there would make the place look good.
//!
//! # Properties
//! - `on_an_idle_host_a_newcomer_is_as_fast_as_alone`
//! - `a_newcomer_beside_a_polluter_is_predicted_slower_than_beside_nobody`
//! - `what_a_newcomer_costs_its_neighbours_is_told`
//! - `a_home_that_is_too_small_is_no_bargain`

use std::fmt;

use homenode_host::View;
use homenode_units::{BytesPerSec, NodeSet};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Scene, Settings, State};
use crate::predict::{AsFound, Character, Place, Room};

/// Relative speeds, each above 0 and at most about 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Beside {
    /// The newcomer's speed next to the running VMs, over its speed alone in the same place.
    pub own: f64,
    /// Speed of the VM that loses most, with the newcomer over without it. 1 if no VM is at work.
    pub worst_neighbour: f64,
}

impl fmt::Display for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| (share * 100.0).round();
        write!(
            f,
            "predicted to run at {} percent of its speed alone there, and every other VM at {} percent of its present \
             speed or more",
            percent(self.own),
            percent(self.worst_neighbour)
        )
    }
}

/// The predicted speed of a VM with a newcomer, over its speed without it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Slowed {
    /// The VM's name.
    pub vm: String,
    /// Its speed with the newcomer over without it, above 0; 0.8 is a fifth slower.
    pub speed: f64,
}

/// Predicts the speed of a VM of `vcpus` vCPUs that draws this bandwidth, and of its neighbours. The VM's vCPUs and memory
/// are on `home`, or where the kernel puts them.
pub fn beside(
    view: &View<'_>,
    settings: Settings<'_>,
    state: &State,
    needs: (u32, Option<BytesPerSec>),
    home: Option<&NodeSet>,
) -> Beside {
    let (own, neighbours) = predict(view, settings, state, (needs, home), home);
    Beside {
        own,
        worst_neighbour: neighbours.iter().map(|slowed| slowed.speed).fold(1.0, f64::min),
    }
}

/// Predicts the price of a home, to compare it with others: the newcomer's speed there over its speed alone on this host, where
/// the kernel puts it; and the speed of every VM at work.
pub fn each_beside(
    view: &View<'_>,
    settings: Settings<'_>,
    state: &State,
    needs: (u32, Option<BytesPerSec>),
    home: Option<&NodeSet>,
) -> (f64, Vec<Slowed>) {
    predict(view, settings, state, (needs, home), None)
}

/// Predicts the speed of a newcomer on `home` next to the running VMs over its speed without them on `alone`, and the speed of
/// each VM at work. `None` for nodes is where the kernel puts the newcomer.
fn predict(
    view: &View<'_>,
    settings: Settings<'_>,
    state: &State,
    ((vcpus, bandwidth), home): ((u32, Option<BytesPerSec>), Option<&NodeSet>),
    alone: Option<&NodeSet>,
) -> (f64, Vec<Slowed>) {
    let shape = state
        .shape(view, settings)
        .unwrap_or_else(|| settings.shape_of(view));
    let place_on = |nodes: Option<&NodeSet>| {
        let mask = nodes.and_then(|nodes| shape.mask(nodes));
        mask.map_or(Place::Unplaced, Place::Home)
    };
    let (place, place_alone) = (place_on(home), place_on(alone));
    let newcomer = Character::newcomer(f64::from(vcpus), bandwidth, settings.predict);
    let scene = Scene::of(view, settings, shape, state);
    let mut room = Room::default();
    let mut speeds = |vms: &[Character], places: &[Place]| {
        let mut speeds = Vec::new();
        room.speeds(&scene.shape, vms, places, AsFound::Yes, &mut speeds);
        speeds
    };
    let together = [&scene.characters[..], std::slice::from_ref(&newcomer)].concat();
    let then = speeds(&together, &[&scene.places[..], &[place]].concat());
    let now = speeds(&scene.characters, &scene.places);
    let alone = speeds(std::slice::from_ref(&newcomer), &[place_alone]);
    let neighbours = scene.active().map(|at| Slowed {
        vm: scene.vms[at].sample.name.clone(),
        speed: ratio(then.get(at).copied(), now.get(at).copied()),
    });
    let own = ratio(then.last().copied(), alone.first().copied());
    (own, neighbours.collect())
}

/// Returns one speed over another; 1 if one of them is unknown or zero.
fn ratio(then: Option<f64>, now: Option<f64>) -> f64 {
    match (then, now) {
        (Some(then), Some(now)) if then > 0.0 && now > 0.0 => then / now,
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arrange::tests::watched;
    use crate::testing::{OfHomes, Scene as Host};
    use homenode_units::Bytes;

    const GIB: Bytes = Bytes::from_gib(1);

    /// Four nodes of four CPUs. If there is a polluter, it is VM 1, and uses all of node 1's bandwidth.
    fn host(with_polluter: bool) -> (Host, State) {
        let mut host = Host::four_nodes(4);
        if with_polluter {
            let polluter = host.add_vm(1, 4, GIB, 1).vcpus_busy(1.0).home(1).pages(1, 1000);
            polluter
                .instructions_per_s(700_000_000)
                .misses_per_s(60_000_000)
                .local(1.0);
        }
        let state = watched(&mut host, 8);
        (host, state)
    }

    fn ask((host, state): &mut (Host, State), home: Option<&str>) -> Beside {
        let home: Option<NodeSet> = home.map(|home| home.parse().unwrap());
        host.with_view(|view| {
            beside(
                view,
                OfHomes::default().settings(),
                state,
                (2, None),
                home.as_ref(),
            )
        })
    }

    #[test]
    fn on_an_idle_host_a_newcomer_is_as_fast_as_alone() {
        let idle = &mut host(false);
        for home in [Some("0"), Some("0-1"), None] {
            let Beside { own, worst_neighbour } = ask(idle, home);
            assert!(
                (own - 1.0).abs() < 1e-9 && worst_neighbour == 1.0,
                "{home:?}: {own} {worst_neighbour}"
            );
        }
    }

    #[test]
    fn a_newcomer_beside_a_polluter_is_predicted_slower_than_beside_nobody() {
        let polluted = &mut host(true);
        let (beside_it, elsewhere) = (ask(polluted, Some("1")), ask(polluted, Some("3")));
        assert!(
            beside_it.own < 0.95 * elsewhere.own,
            "{beside_it:?} {elsewhere:?}"
        );
        assert!((elsewhere.own - 1.0).abs() < 0.02, "{elsewhere:?}");
        // The kernel sometimes puts the newcomer next to the polluter.
        let anywhere = ask(polluted, None);
        assert!(
            anywhere.own <= elsewhere.own && anywhere.own >= beside_it.own,
            "{anywhere:?}"
        );
    }

    #[test]
    fn what_a_newcomer_costs_its_neighbours_is_told() {
        let polluted = &mut host(true);
        let (beside_it, elsewhere) = (ask(polluted, Some("1")), ask(polluted, Some("3")));
        assert!(beside_it.worst_neighbour < 0.99, "{beside_it:?}");
        assert!(elsewhere.worst_neighbour > 0.99, "{elsewhere:?}");
    }

    /// Two of four CPUs are busy on each node but node 3. The newcomer has three times as many vCPUs as a node has CPUs, and
    /// wants twice a node's bandwidth. So on node 3 it has half of its speed alone. On all four nodes, 18 threads share 16 CPUs,
    /// and three of four accesses are remote.
    #[test]
    fn a_home_that_is_too_small_is_no_bargain() {
        let mut host = Host::four_nodes(4);
        for node in 0..3_u16 {
            let vm = host.add_vm(u128::from(node) + 1, 2, GIB, node).vcpus_busy(1.0);
            vm.home(node).pages(node, 1000).instructions_per_s(1_000_000_000);
        }
        let state = watched(&mut host, 8);
        let needs = (12, Some(BytesPerSec(30_000_000_000)));
        let mut price = |home: &str| {
            let home: NodeSet = home.parse().unwrap();
            host.with_view(|view| {
                let of = OfHomes::default();
                let (own, neighbours) = each_beside(view, of.settings(), &state, needs, Some(&home));
                assert_eq!(neighbours.len(), 3);
                (own, neighbours.iter().map(|one| one.speed).fold(1.0, f64::min))
            })
        };
        let (one, all) = (price("3"), price("0-3"));
        assert!(one.0 < 0.6 && all.0 > 0.65, "{one:?} {all:?}");
        assert!(one.0 * one.1 < all.0 * all.1, "{one:?} {all:?}");
    }
}
