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
//! 2. Three predictions are made: of the newcomer alone, of the present VMs in their current places, and of all together.
//!
//! # Properties
//! - `on_an_idle_host_a_newcomer_is_as_fast_as_alone`
//! - `a_newcomer_beside_a_polluter_is_predicted_slower_than_beside_nobody`
//! - `what_a_newcomer_costs_its_neighbours_is_told`

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
    /// The newcomer's speed next to the running VMs, over its speed alone on this host.
    pub own: f64,
    /// Speed of the VM that loses most, with the newcomer over without it. 1 if no VM is at work.
    pub worst_neighbour: f64,
}

impl fmt::Display for Beside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |share: f64| (share * 100.0).round();
        write!(
            f,
            "predicted to run at {} percent of its speed alone on this host, and every other VM at {} percent of its \
             present speed or more",
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
    let (own, neighbours) = each_beside(view, settings, state, needs, home);
    Beside {
        own,
        worst_neighbour: neighbours.iter().map(|slowed| slowed.speed).fold(1.0, f64::min),
    }
}

/// Predicts what [`beside`] predicts, for each VM at work: the newcomer's own speed, and every neighbour's.
pub fn each_beside(
    view: &View<'_>,
    settings: Settings<'_>,
    state: &State,
    (vcpus, bandwidth): (u32, Option<BytesPerSec>),
    home: Option<&NodeSet>,
) -> (f64, Vec<Slowed>) {
    let shape = state
        .shape(view, settings)
        .unwrap_or_else(|| settings.shape_of(view));
    let place = home
        .and_then(|home| shape.mask(home))
        .map_or(Place::Unplaced, Place::Home);
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
    let alone = speeds(&[newcomer], &[place]);
    let ratio = |then: Option<&f64>, now: Option<&f64>| match (then, now) {
        (Some(then), Some(now)) if *then > 0.0 && *now > 0.0 => then / now,
        _ => 1.0,
    };
    let neighbours = scene.active().map(|at| Slowed {
        vm: scene.vms[at].sample.name.clone(),
        speed: ratio(then.get(at), now.get(at)),
    });
    (ratio(then.last(), alone.first()), neighbours.collect())
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
        // The kernel sometimes puts the newcomer there.
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
}
