//! Each test states the scene, and derives by hand what must come out.

use good_lp::{Expression, Solution, SolverModel, constraint, microlp, variable, variables};
use homenode_host::{Act, Action, View};
use homenode_units::{Bytes, BytesPerSec, NodeId, NodeSet, Ns};
use proptest::prelude::*;

use super::*;
use crate::demand::BandwidthFrom;
use crate::testing::{Scene, vm_id};

const GIB: Bytes = Bytes::from_gib(1);

fn demand(cpus: f64, gib: u64, gb_per_s: f64) -> Demand {
    Demand {
        cpus,
        memory_bytes: Bytes::from_gib(gib),
        bandwidth: Some(BytesPerSec((gb_per_s * 1e9) as u64)),
        bandwidth_from: BandwidthFrom::Declared,
        device_nodes: NodeSet::new(),
        huge_pages: Vec::new(),
    }
}

/// What one look at the host tells.
fn seen(view: &View<'_>) -> History {
    let mut history = History::default();
    history.observe(view, &Default::default());
    history
}

fn supply_of(view: &View<'_>, config: &Config) -> Supply {
    Supply::new(view, &seen(view), &Ledger::default(), config, &[])
}

fn placed(scene: &mut Scene, demand: &Demand) -> Result<(String, Match), Unplaceable> {
    let config = Config::default();
    scene
        .with_view(|view| place(&supply_of(view, &config), demand, None, &config))
        .map(|p| (p.nodes.to_string(), p.matched))
}

fn set(list: &str) -> NodeSet {
    list.parse().unwrap()
}

#[test]
fn single_node_bins_come_before_hybrid_bins() {
    // Nodes of 8 CPUs, 16 GiB, 16 GB/s: anything that one node can take goes on one node.
    let mut scene = Scene::four_nodes(8);
    assert_eq!(
        placed(&mut scene, &demand(8.0, 16, 16.0)),
        Ok(("0".into(), Match::Order))
    );
    // Nine CPUs need two nodes, and the lowest two of the equal pairs are taken; 33 GiB need three.
    assert_eq!(placed(&mut scene, &demand(9.0, 16, 1.0)).unwrap().0, "0-1");
    assert_eq!(placed(&mut scene, &demand(9.0, 33, 1.0)).unwrap().0, "0-2");
}

#[test]
fn what_is_left_of_each_node_is_what_can_be_given() {
    // Nodes of 8 CPUs, 16 GiB, 16 GB/s; node 1 has 3 CPUs busy with something else, 4 GiB in use and 6 GB/s of traffic.
    let mut scene = Scene::four_nodes(8);
    scene.host_busy = (0..32)
        .map(|c| if (8..11).contains(&c) { 1.0 } else { 0.0 })
        .collect();
    scene.traffic = [(NodeId(1), 6_000_000_000)].into_iter().collect();
    scene.add_vm(1, 0, Bytes::from_gib(4), 0).pages(1, 4 << 18);
    let left = scene.with_view(|view| supply_of(view, &Config::default()).left().collect::<Vec<_>>());
    let of = |node, cpus, gib, gb: u64| NodeLeft {
        node: NodeId(node),
        cpus,
        memory: Bytes::from_gib(gib),
        bandwidth: Some(BytesPerSec(gb * 1_000_000_000)),
    };
    let all = |node| of(node, 8.0, 16, 16);
    assert_eq!(left, [all(0), of(1, 5.0, 12, 10), all(2), all(3)]);
}

#[test]
fn the_relative_order_decides_between_bins_with_room() {
    // Of the host's 32 CPUs, 64 GiB, 64 GB/s, node 0 has left 4 CPUs (.125), 14 GiB (.219), 12 GB/s (.188): the largest sum
    // but memory first. Node 1 has 6 CPUs (.188), 8 GiB (.125), 4 GB/s (.063). Nodes 2 and 3 are full.
    let mut scene = Scene::four_nodes(8);
    scene.host_busy = [4, 6, 0, 0]
        .iter()
        .flat_map(|free| (0..8).map(move |c| if c < *free { 0.0 } else { 1.0 }))
        .collect();
    scene.traffic = [(NodeId(0), 4_000_000_000), (NodeId(1), 12_000_000_000)]
        .into_iter()
        .collect();
    scene.add_vm(1, 0, Bytes::from_gib(2), 0).pages(0, 2 << 18);
    scene.add_vm(2, 0, Bytes::from_gib(8), 0).pages(1, 8 << 18);
    // CPU (4/32 = .125) over memory (2/64 = .031) over bandwidth (1/64): node 1, though node 0 has more in sum.
    assert_eq!(
        placed(&mut scene, &demand(4.0, 2, 1.0)),
        Ok(("1".into(), Match::Order))
    );
    // Memory over bandwidth over CPU: node 0.
    assert_eq!(
        placed(&mut scene, &demand(0.5, 8, 2.0)),
        Ok(("0".into(), Match::Order))
    );
}

#[test]
fn a_vm_of_unknown_bandwidth_is_not_drawn_to_busy_controllers() {
    // Node 0 has all of its 8 CPUs (.25 of the host's), 12 GiB (.188) and 1 GB/s (.016) left; the others 7 CPUs (.219), 12 GiB
    // and 16 GB/s (.25). Of a VM without bandwidth only node 0 has the order.
    let mut scene = Scene::four_nodes(8);
    scene.host_busy = (0..32)
        .map(|cpu| f64::from(u8::from(cpu % 8 == 0 && cpu > 0)))
        .collect();
    scene.traffic = [(NodeId(0), 15_000_000_000)].into_iter().collect();
    for node in 0..4 {
        scene
            .add_vm(u128::from(node) + 1, 0, Bytes::from_gib(4), node)
            .pages(node, 4 << 18);
    }
    assert_eq!(placed(&mut scene, &demand(4.0, 2, 0.0)).unwrap().0, "0");
    let unknown = Demand {
        bandwidth: None,
        bandwidth_from: BandwidthFrom::Unknown,
        ..demand(4.0, 2, 0.0)
    };
    assert_eq!(placed(&mut scene, &unknown), Ok(("1".into(), Match::Order)));
}

#[test]
fn the_order_is_relaxed_twice_then_refused() {
    // A host of one node: 4 CPUs all left (1.0), 16 GiB of which 12 left (.75), 16 GB/s of which 8 left (.5).
    let mut scene = Scene::nodes(1, 4);
    scene.traffic = [(NodeId(0), 8_000_000_000)].into_iter().collect();
    scene.add_vm(1, 0, Bytes::from_gib(4), 0).pages(0, 4 << 18);
    let matched = |scene: &mut Scene, demand| placed(scene, &demand).map(|(_, matched)| matched);
    assert_eq!(matched(&mut scene, demand(2.0, 4, 1.6)), Ok(Match::Order)); // .5 .25 .1
    assert_eq!(matched(&mut scene, demand(2.0, 2, 3.2)), Ok(Match::Largest)); // .5 .125 .2
    assert_eq!(matched(&mut scene, demand(0.4, 2, 6.4)), Ok(Match::Room)); // .1 .125 .4
    let refused = matched(&mut scene, demand(5.0, 13, 6.4)).unwrap_err();
    let message = refused.to_string();
    assert!(
        message.contains("node 0 is short of CPU (4.0 CPUs left, 5.0 CPUs needed)"),
        "{message}"
    );
    assert!(
        message.contains("node 0 is short of memory (12GiB left, 13GiB needed)"),
        "{message}"
    );
    assert!(!message.contains("bandwidth"), "{message}");
}

#[test]
fn of_sets_with_room_the_nearest_is_taken() {
    // Two sockets of four nodes of one CPU, 12 within and 32 across. Nodes 1 and 6 have most memory left.
    let mut scene = Scene::sockets(2, 4, 1, (12, 32));
    scene.machine.links.clear();
    for node in [0, 2, 3, 4, 5, 7] {
        scene
            .add_vm(u128::from(node) + 1, 0, GIB, node)
            .pages(node, 1 << 18);
    }
    let nodes = |scene: &mut Scene, cpus, gib| placed(scene, &demand(cpus, gib, 0.0)).map(|(nodes, _)| nodes);
    // A pair with node 1 or 6, whose 16 GiB are the most, and the lowest of these; across sockets 1,6 had more.
    assert_eq!(nodes(&mut scene, 2.0, 2), Ok("0-1".into()));
    assert_eq!(nodes(&mut scene, 4.0, 2), Ok("0-3".into()));
    // 60 GiB: four nodes of one socket have 61 left, but an even part of the 60 is on each of them: 15.
    assert_eq!(nodes(&mut scene, 1.0, 60), Ok("0-3".into()));
    // Five CPUs are on no socket: of the sets of four and one the one with nodes 1 and 6.
    assert_eq!(nodes(&mut scene, 5.0, 2), Ok("0-3,6".into()));
    // The operator leaves it one node of the first socket and two of the second.
    let config = Config::default();
    let allowed = set("1,5,7");
    let chosen = scene.with_view(|view| {
        place(
            &supply_of(view, &config),
            &demand(2.0, 2, 0.0),
            Some(&allowed),
            &config,
        )
        .map(|found| found.nodes)
    });
    assert_eq!(chosen, Ok(set("5,7")));
}

#[test]
fn three_near_nodes_come_before_two_far_ones() {
    // Two sockets of three nodes of two CPUs; one CPU of each node of socket 0 is busy, and all but those of nodes 3 and 0 are
    // short: a VM of 3 CPUs has room on 0-2 (1 each), or on 0 and 3 (1 + 2).
    let mut scene = Scene::sockets(2, 3, 2, (12, 32));
    scene.host_busy = vec![1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(placed(&mut scene, &demand(3.0, 2, 0.0)).unwrap().0, "0-2");
}

#[test]
fn a_single_node_with_room_comes_before_a_set_of_a_better_order() {
    // Nodes 0 and 1 have memory first (4 CPUs of 32: .125; 16 GiB of 64: .25), and so have all their sets. The VM wants CPU first.
    let mut scene = Scene::four_nodes(8);
    scene.host_busy = (0..32)
        .map(|cpu| f64::from(u8::from(cpu < 16 && cpu % 2 == 0)))
        .collect();
    scene
        .add_vm(1, 0, Bytes::from_gib(32), 2)
        .pages(2, 12 << 18)
        .pages(3, 12 << 18);
    scene.traffic = [(NodeId(2), 14_000_000_000), (NodeId(3), 14_000_000_000)]
        .into_iter()
        .collect();
    // 8 CPUs are free on nodes 2 and 3 alone, with 4 GiB each: 5 GiB are not. Nodes 0 and 1 have 4 CPUs.
    let (nodes, _) = placed(&mut scene, &demand(4.0, 5, 1.0)).unwrap();
    assert_eq!(nodes, "0");
}

#[test]
fn a_vcpu_gets_a_core_where_one_is_free_and_a_hyperthread_where_none_is() {
    // Two sockets of 6 cores and 12 CPUs.
    let mut scene = Scene::sockets(2, 1, 12, (12, 21));
    scene.hyperthreads(2);
    let config = Config::default();
    let mut ask = |cpus, config: &Config| {
        scene.with_view(|view| {
            place(&supply_of(view, config), &demand(cpus, 2, 0.0), None, config)
                .map(|found| (found.nodes.to_string(), found.shares_cores))
                .map_err(|refused| refused.to_string())
        })
    };
    assert_eq!(ask(6.0, &config), Ok(("0".into(), false)));
    // 12 cores are on both; 13 vCPUs share cores, and so do 24.
    assert_eq!(ask(12.0, &config), Ok(("0-1".into(), false)));
    assert_eq!(ask(13.0, &config), Ok(("0-1".into(), true)));
    assert_eq!(ask(24.0, &config), Ok(("0-1".into(), true)));
    assert_eq!(
        ask(25.0, &config).unwrap_err(),
        "fits nowhere: node 0 is short of CPU (12.0 CPUs left, 25.0 CPUs needed); node 1 is short of CPU (12.0 CPUs left, 25.0 \
         CPUs needed); a home of several nodes is short of CPU (24.0 CPUs left, 25.0 CPUs needed)"
    );
    // The baselines give a vCPU a hyperthread, as their sources do.
    for algorithm in [Algorithm::FirstFit, Algorithm::BestFit] {
        let config = Config {
            algorithm,
            ..Config::default()
        };
        assert_eq!(ask(12.0, &config), Ok(("0".into(), true)));
    }
}

#[test]
fn cores_that_are_taken_are_not_given_again_while_others_are_free() {
    // Two sockets of 6 cores and 12 CPUs. A VM of 4 vCPUs lives on node 0: 2 cores are left there, and 8 CPUs.
    let mut scene = Scene::sockets(2, 1, 12, (12, 21));
    scene.hyperthreads(2);
    scene.add_vm(1, 4, GIB, 0).home(0);
    let mut nodes = |cpus| placed(&mut scene, &demand(cpus, 2, 0.0)).map(|(nodes, _)| nodes);
    assert_eq!(nodes(2.0), Ok("1".into()), "most left");
    assert_eq!(nodes(6.0), Ok("1".into()));
    assert_eq!(nodes(8.0), Ok("0-1".into()), "2 + 6 cores");
    // 9 cores are not left: of 8 and 12 hyperthreads node 1 has enough.
    assert_eq!(nodes(9.0), Ok("1".into()));
    // Of a core one hyperthread is the host's: the other is still a core.
    scene.reserved_cpus = "12,14,16,18,20,22".parse().unwrap();
    let mut nodes = |cpus| placed(&mut scene, &demand(cpus, 2, 0.0)).map(|(nodes, _)| nodes);
    assert_eq!(nodes(6.0), Ok("1".into()));
    assert_eq!(nodes(7.0), Ok("0-1".into()));
}

#[test]
fn of_devices_on_two_sockets_one_is_near() {
    let mut scene = Scene::sockets(2, 2, 4, (12, 32));
    let with = |cpus, devices: &str| Demand {
        device_nodes: set(devices),
        ..demand(cpus, 1, 0.0)
    };
    let mut nodes = |demand: &Demand| placed(&mut scene, demand).unwrap().0;
    assert_eq!(
        nodes(&with(4.0, "1,2")),
        "1",
        "not both: all its memory would cross sockets"
    );
    assert_eq!(
        nodes(&with(8.0, "1,2")),
        "0-1",
        "no set of device nodes is within a socket"
    );
    assert_eq!(nodes(&with(8.0, "2,3")), "2-3");
    assert_eq!(nodes(&with(8.0, "3")), "2-3");
    assert_eq!(nodes(&with(12.0, "1,2")), "0-2", "three nodes with both devices");
}

const SMALL_HUGE: Bytes = Bytes::from_mib(2);

/// A VM of one vCPU that asks for so much memory in all, and for so much of it in huge pages of these sizes.
fn huge(mib: u64, parts: &[(Bytes, u64)]) -> Demand {
    let part = |(page_bytes, mib): &(Bytes, u64)| HugeMemory {
        page_bytes: *page_bytes,
        memory_bytes: Bytes::from_mib(*mib),
    };
    Demand {
        memory_bytes: Bytes::from_mib(mib),
        huge_pages: parts.iter().map(part).collect(),
        ..demand(1.0, 0, 0.0)
    }
}

/// Where it goes, or why it goes nowhere, in words.
fn placed_or_short(scene: &mut Scene, demand: &Demand) -> Result<String, String> {
    placed(scene, demand)
        .map(|(nodes, _)| nodes)
        .map_err(|refused| refused.to_string())
}

#[test]
fn a_vm_in_huge_pages_goes_where_the_pool_has_room() {
    // Node 1 has 350 huge pages of 2 MiB, 10 of them in use, and only 1 of its 16 GiB of ordinary memory left; node 0 none.
    let mut scene = Scene::nodes(2, 2);
    scene.add_vm(9, 0, Bytes::from_gib(15), 1).pages(1, 15 << 18);
    scene.pool(1, SMALL_HUGE, (350, 340));
    // 600 MiB are 300 pages, 680 MiB 340.
    assert_eq!(placed_or_short(&mut scene, &huge(600, &[])), Ok("0".into()));
    assert_eq!(
        placed_or_short(&mut scene, &huge(600, &[(SMALL_HUGE, 600)])),
        Ok("1".into())
    );
    assert_eq!(
        placed_or_short(&mut scene, &huge(680, &[(SMALL_HUGE, 680)])),
        Ok("1".into())
    );
    // 681 MiB are 341 pages: the last is not full.
    assert_eq!(
        placed_or_short(&mut scene, &huge(681, &[(SMALL_HUGE, 681)])).unwrap_err(),
        "fits nowhere: node 0 is short of huge pages of 2MiB (0 of a pool of 0 left, 341 needed); node 1 is short of huge pages \
         of 2MiB (340 of a pool of 350 left, 341 needed); a home of several nodes is short of huge pages of 2MiB (340 of a pool \
         of 350 left, 341 needed)"
    );
    // Pages of another size do not help.
    let gib = huge(1024, &[(GIB, 1024)]);
    assert!(
        placed_or_short(&mut scene, &gib)
            .unwrap_err()
            .contains("huge pages of 1GiB (0 of a pool of 0 left, 1 needed)")
    );
    scene.pool(0, GIB, (2, 1));
    assert_eq!(placed_or_short(&mut scene, &gib), Ok("0".into()));
    // On several nodes each has an even part: 340 pages on node 1 and 20 on node 0 have no room for 360, and 180 on each have.
    scene.pool(0, SMALL_HUGE, (20, 20));
    assert!(placed_or_short(&mut scene, &huge(720, &[(SMALL_HUGE, 720)])).is_err());
    scene.huge_pages[NodeId(0)].pop();
    scene.pool(0, SMALL_HUGE, (180, 180));
    assert_eq!(
        placed_or_short(&mut scene, &huge(720, &[(SMALL_HUGE, 720)])),
        Ok("0-1".into())
    );
    assert!(
        placed_or_short(&mut scene, &huge(722, &[(SMALL_HUGE, 722)])).is_err(),
        "181 on each"
    );
}

#[test]
fn huge_pages_and_ordinary_memory_do_not_stand_in_for_each_other() {
    // Node 0 has 100 huge pages and all of its ordinary memory, node 1 has 350 and 1 GiB.
    let mut scene = Scene::nodes(2, 8);
    scene.add_vm(9, 0, Bytes::from_gib(15), 1).pages(1, 15 << 18);
    scene.pool(0, SMALL_HUGE, (100, 100));
    scene.pool(1, SMALL_HUGE, (350, 350));
    // 400 MiB in 200 huge pages beside 800 MiB or 1,600 MiB of ordinary memory: of these node 1 has 1,024.
    let both = |ordinary: u64| huge(400 + ordinary, &[(SMALL_HUGE, 400)]);
    assert_eq!(placed_or_short(&mut scene, &both(800)), Ok("1".into()));
    // On both, 100 pages and 800 MiB on each.
    assert_eq!(placed_or_short(&mut scene, &both(1600)), Ok("0-1".into()));
    let refused = placed_or_short(&mut scene, &huge(600 + 1600, &[(SMALL_HUGE, 600)])).unwrap_err();
    assert!(
        refused.contains("node 0 is short of huge pages of 2MiB (100 of a pool of 100 left, 300 needed)")
            && refused.contains("node 1 is short of memory (1GiB left, 1.563GiB needed)"),
        "{refused}"
    );
    // A VM that runs in huge pages on node 0 takes nothing of its 16 GiB, and one in ordinary memory nothing of its pool.
    scene
        .add_vm(1, 1, GIB, 0)
        .in_huge_pages(SMALL_HUGE)
        .home(0)
        .pages(0, 1 << 18);
    scene.add_vm(2, 1, GIB, 0).home(0);
    let left = scene.with_view(|view| supply_of(view, &Config::default()).left().next().unwrap().memory);
    assert_eq!(left, Bytes::from_gib(15));
    assert_eq!(
        placed_or_short(&mut scene, &huge(200, &[(SMALL_HUGE, 200)])).unwrap(),
        "1",
        "most left"
    );
    scene.huge_pages[NodeId(1)].clear();
    assert_eq!(
        placed_or_short(&mut scene, &huge(200, &[(SMALL_HUGE, 200)])).unwrap(),
        "0"
    );
}

#[test]
fn huge_pages_that_are_promised_are_not_given_twice() {
    // Two nodes of 100 pages. VM 1 lives on node 0 and has touched 40 MiB of 120: 80 MiB are promised to it, 40 pages.
    let mut scene = Scene::nodes(2, 8);
    scene.pool(0, SMALL_HUGE, (120, 100));
    scene.pool(1, SMALL_HUGE, (100, 100));
    scene
        .add_vm(1, 1, Bytes::from_mib(120), 0)
        .in_huge_pages(SMALL_HUGE)
        .home(0)
        .pages(0, 40 << 8);
    let config = Config::default();
    let mut ledger = Ledger::default();
    let mut answers = Vec::new();
    // 60 pages each: node 0 has 60 left, node 1 100; then node 0 60, node 1 40; then none.
    for _ in 0..3 {
        scene.with_view(|view| {
            let supply = Supply::new(view, &seen(view), &ledger, &config, &[]);
            let demand = huge(120, &[(SMALL_HUGE, 120)]);
            let found = place(&supply, &demand, None, &config);
            answers.push(found.as_ref().map(|found| found.nodes.to_string()).ok());
            let Ok(found) = found else { return };
            ledger.reserve(Reservation {
                id: 0,
                name: None,
                vm: None,
                shape: Shape::new(1, demand.memory_bytes),
                demand,
                nodes: found.nodes,
                made_at: view.at,
            });
        });
    }
    assert_eq!(answers, [Some("1".into()), Some("0".into()), None]);
    // A VM that moves elsewhere gives back what it holds there.
    scene.with_view(|view| {
        let without = [vm_id(1)];
        let supply = Supply::new(view, &seen(view), &Ledger::default(), &config, &without);
        let found = place(
            &supply,
            &huge(240, &[(SMALL_HUGE, 240)]),
            Some(&set("0")),
            &config,
        );
        assert_eq!(
            found.map(|found| found.nodes),
            Ok(set("0")),
            "100 free and 20 of its own"
        );
    });
}

#[test]
fn a_busy_link_splits_hybrid_bins() {
    // Twelve CPUs need two nodes of eight. Every link to or from node 0 carries 5 of 8 GB/s: above one half.
    let mut scene = Scene::four_nodes(8);
    scene.links = (1..4)
        .flat_map(|n| [(NodeId(0), NodeId(n), 5_000_000_000), (NodeId(n), NodeId(0), 0)])
        .collect();
    assert_eq!(placed(&mut scene, &demand(12.0, 4, 1.0)).unwrap().0, "1-2");
    // Twenty-five CPUs need all four nodes, and node 0 cannot join.
    let refused = placed(&mut scene, &demand(25.0, 4, 1.0)).unwrap_err();
    assert_eq!(
        refused.shortages.len(),
        4,
        "each node is short of CPU, all together are not: {refused}"
    );
}

#[test]
fn an_even_share_must_fit_on_every_node_of_a_hybrid_bin() {
    // 16 GiB nodes; node 0 has 2 GiB left. 18 GiB in nodes 0 and 1 would need 9 GiB on each.
    let mut scene = Scene::four_nodes(8);
    scene.add_vm(1, 0, Bytes::from_gib(14), 0).pages(0, 14 << 18);
    assert_eq!(placed(&mut scene, &demand(1.0, 18, 1.0)).unwrap().0, "1-2");
}

#[test]
fn what_is_promised_is_not_given_twice() {
    let mut scene = Scene::four_nodes(4);
    let mut ledger = Ledger::default();
    let config = Config::default();
    let mut answers = Vec::new();
    for _ in 0..5 {
        scene.with_view(|view| {
            let supply = Supply::new(view, &seen(view), &ledger, &config, &[]);
            let demand = demand(4.0, 4, 1.0);
            answers.push(
                place(&supply, &demand, None, &config)
                    .map(|p| p.nodes.to_string())
                    .ok(),
            );
            if let Ok(found) = place(&supply, &demand, None, &config) {
                let shape = Shape::new(4, demand.memory_bytes);
                ledger.reserve(Reservation {
                    id: 0,
                    name: None,
                    vm: None,
                    shape,
                    demand,
                    nodes: found.nodes,
                    made_at: view.at,
                });
            }
        });
    }
    let node = |n: &str| Some(n.to_owned());
    assert_eq!(answers, [node("0"), node("1"), node("2"), node("3"), None]);
    // A promise whose VM never comes is dropped.
    scene.at += RESERVATION_LIFE + Ns::from_secs(1);
    scene.with_view(|view| assert_eq!(ledger.pending(view).count(), 0));
}

#[test]
fn a_promise_finds_its_vm_by_name_then_by_shape() {
    let mut ledger = Ledger::default();
    let shape = Shape {
        vcpus: 2,
        memory_mib: 1024,
    };
    let now = Ns::from_secs(5);
    let promise = |vm, nodes| Reservation {
        id: 0,
        name: None,
        vm,
        shape,
        demand: demand(2.0, 1, 0.0),
        nodes: set(nodes),
        made_at: now,
    };
    let announcement = |n| Announcement {
        vm: vm_id(n),
        name: format!("vm{n}"),
        shape,
        bandwidth: None,
        home: None,
        device_nodes: NodeSet::new(),
        huge_pages: Vec::new(),
    };
    ledger.announce(announcement(9), now);
    assert_eq!(ledger.announced(shape, now).map(|a| a.vm), Some(vm_id(9)));
    assert_eq!(ledger.announced(shape, now), None);
    ledger.reserve(promise(None, "3"));
    ledger.reserve(promise(Some(vm_id(1)), "2"));
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 2, GIB, 0);
    scene.add_vm(2, 2, GIB, 0);
    scene.with_view(|view| {
        assert_eq!(ledger.redeem(&view.sample.vms[0], now), Some(set("2")));
        assert_eq!(ledger.redeem(&view.sample.vms[1], now), Some(set("3")));
        assert_eq!(ledger.redeem(&view.sample.vms[1], now), None);
    });
}

fn homes(scene: &mut Scene, config: &Config) -> Vec<(u128, String)> {
    let plan = scene.with_view(|view| plan(view, config, &seen(view), &mut State::default()));
    let home = |action: &Action| match &action.act {
        Act::SetHome { nodes } => Some((action.vm.0, nodes.to_string())),
        _ => None,
    };
    plan.decisions.iter().filter_map(|d| home(&d.action)).collect()
}

#[test]
fn a_promise_of_the_future_is_one_of_before_a_reboot_and_does_not_hold() {
    let shape = Shape::new(2, GIB);
    let announcement = Announcement {
        vm: vm_id(9),
        name: "nine".into(),
        shape,
        bandwidth: None,
        home: None,
        device_nodes: NodeSet::new(),
        huge_pages: Vec::new(),
    };
    let mut ledger = Ledger::default();
    // Made after five days, read a minute after a reboot.
    ledger.announce(announcement, Ns::from_secs(432_000));
    let made_at = Ns::from_secs(432_000);
    let (vm, demand, nodes) = (Some(vm_id(1)), demand(1.0, 1, 1.0), set("2"));
    ledger.reserve(Reservation {
        id: 0,
        name: None,
        vm,
        shape,
        demand,
        nodes,
        made_at,
    });
    let mut scene = Scene::four_nodes(8);
    scene.with_view(|view| assert!(view.at < made_at && ledger.pending(view).next().is_none()));
    assert_eq!(ledger.announced(shape, Ns::from_secs(60)), None);
}

#[test]
fn vms_that_appear_together_get_different_nodes() {
    let mut scene = Scene::four_nodes(4);
    for n in 1..=4 {
        scene.add_vm(n, 4, GIB, 0);
    }
    let expected: Vec<_> = (1..=4).map(|n| (n, (n - 1).to_string())).collect();
    assert_eq!(homes(&mut scene, &Config::default()), expected);
}

#[test]
fn a_vm_stays_where_its_memory_is_if_there_is_room() {
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 4, GIB, 0).pages(2, 1 << 17).pages(0, 1 << 12);
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "2".into())]);
    // Too little touched to mean anything: the first of equal nodes.
    scene.vm(1).pages(2, 1 << 12).pages(0, 0);
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "0".into())]);
    // As its operator says that little is enough, or that nearly all of it must be there.
    let config = Config {
        touched_min: 0.001,
        ..Config::default()
    };
    assert_eq!(homes(&mut scene, &config), [(1, "2".into())]);
    let config = Config {
        memory_there_min: 0.99,
        ..Config::default()
    };
    scene.vm(1).pages(2, 1 << 17).pages(0, 1 << 12);
    assert_eq!(homes(&mut scene, &config), [(1, "0".into())]);
    // The operator's word counts before all.
    scene.vm(1).settings().home = Some(set("3"));
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "3".into())]);
}

#[test]
fn reserved_cpus_and_memory_are_nobodys_and_devices_attract() {
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 4, GIB, 0).device_on(2);
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "2".into())]);
    // With a CPU of node 2 reserved its four vCPUs no longer fit there.
    scene.reserved_cpus = "8".parse().unwrap();
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "0".into())]);
    let config = Config {
        reserved_memory: Bytes::from_gib(16),
        ..Config::default()
    };
    assert_eq!(homes(&mut scene, &config), []);
}

#[test]
fn a_vm_with_a_device_gets_the_devices_node_where_that_alone_has_room() {
    let mut scene = Scene::four_nodes(4);
    // Node 2 has least left, and of another order than the VM wants.
    scene.add_vm(9, 2, Bytes::from_gib(3), 0).home(2);
    scene.add_vm(1, 2, GIB, 0).device_on(2);
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "2".into())]);
    for algorithm in [Algorithm::FirstFit, Algorithm::BestFit] {
        let config = Config {
            algorithm,
            ..Config::default()
        };
        assert_eq!(homes(&mut scene, &config), [(1, "2".into())]);
    }
    // Where it has none, any other.
    scene.vm(1).allowed("0-7");
    assert_ne!(homes(&mut scene, &Config::default()), [(1, "2".into())]);
}

#[test]
fn the_operators_cpus_bound_the_home() {
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 2, GIB, 0).allowed("13-15");
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "3".into())]);
    let plan = scene.with_view(|view| plan(view, &Config::default(), &seen(view), &mut State::default()));
    let Act::PinVcpus { cpus, .. } = &plan.decisions[1].action.act else {
        panic!("{:?}", plan.decisions)
    };
    assert_eq!(cpus.to_string(), "13-15");
}

#[test]
fn first_fit_fills_nodes_in_order_and_pins_one_vcpu_to_one_cpu() {
    let config = Config {
        algorithm: Algorithm::FirstFit,
        ..Config::default()
    };
    let mut scene = Scene::four_nodes(4);
    for n in 1..=3 {
        scene.add_vm(n, 2, GIB, 0);
    }
    assert_eq!(
        homes(&mut scene, &config),
        [(1, "0".into()), (2, "0".into()), (3, "1".into())]
    );
    let plan = scene.with_view(|view| plan(view, &config, &seen(view), &mut State::default()));
    let cpus: Vec<String> = plan
        .decisions
        .iter()
        .filter_map(|d| match &d.action.act {
            Act::PinVcpus { cpus, .. } => Some(cpus.to_string()),
            _ => None,
        })
        .collect();
    assert_eq!(cpus, ["0", "1", "2", "3", "4", "5"]);
}

#[test]
fn best_fit_takes_the_fullest_node_with_room() {
    let mut scene = Scene::four_nodes(4);
    scene.host_busy = vec![0., 0., 0., 0., 0., 0., 1., 1., 0., 1., 1., 1., 0., 0., 0., 0.];
    scene.add_vm(1, 2, GIB, 0);
    let config = Config {
        algorithm: Algorithm::BestFit,
        ..Config::default()
    };
    assert_eq!(homes(&mut scene, &config), [(1, "1".into())]);
}

#[test]
fn a_vm_that_fits_nowhere_is_said_once() {
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 2, Bytes::from_gib(65), 0);
    let mut state = State::default();
    let mut tell = || {
        scene
            .with_view(|view| plan(view, &Config::default(), &seen(view), &mut state))
            .findings
    };
    let first = tell();
    assert!(
        first[0].message.contains("VM vm1 fits nowhere"),
        "{}",
        first[0].message
    );
    assert!(
        first[0].message.contains("short of memory"),
        "{}",
        first[0].message
    );
    assert_eq!(tell(), []);
}

fn any_demand() -> impl Strategy<Value = Demand> {
    (1u32..6, 1u64..12, 0u32..12).prop_map(|(cpus, gib, gb)| demand(f64::from(cpus), gib, f64::from(gb)))
}

proptest! {
    #[test]
    fn a_placement_always_fits(
        demands in prop::collection::vec(any_demand(), 1..20),
        busy in prop::collection::vec(0.0f64..1.0, 16),
    ) {
        let mut scene = Scene::four_nodes(4);
        scene.host_busy = busy;
        let mut ledger = Ledger::default();
        let config = Config::default();
        scene.with_view(|view| {
            for demand in &demands {
                let supply = Supply::new(view, &seen(view), &ledger, &config, &[]);
                let left = |nodes: &NodeSet, d: usize| -> f64 {
                    supply.nodes.iter().filter(|n| nodes.contains(n.node)).map(|n| n.left[d]).sum()
                };
                let needed = [demand.cpus, demand.memory_bytes.as_f64(), demand.bandwidth.unwrap().as_f64()];
                if let Ok(found) = place(&supply, demand, None, &config) {
                    for (d, needed) in needed.iter().enumerate() {
                        prop_assert!(left(&found.nodes, d) * (1.0 + 1e-6) + 1.0 >= *needed);
                    }
                    let shape = Shape::new(demand.cpus as u32, demand.memory_bytes);
                    let (demand, nodes, made_at) = (demand.clone(), found.nodes, view.at);
                    ledger.reserve(Reservation { id: 0, name: None, vm: None, shape, demand, nodes, made_at });
                }
            }
            Ok(())
        })?;
    }

    #[test]
    fn no_set_across_sockets_where_one_within_has_room(
        sockets in 1u16..4,
        nodes in 1u16..5,
        within in 11u32..20,
        farther in 1u32..20,
        per_core in 1u32..3,
        busy in prop::collection::vec(0u8..2, 48),
        used in prop::collection::vec(0u64..16, 12),
        demand in any_demand(),
    ) {
        let mut scene = Scene::sockets(sockets, nodes, 4, (within, within + farther));
        scene.hyperthreads(per_core);
        scene.host_busy = busy[..scene.machine.cpus.len()].iter().map(|busy| f64::from(*busy)).collect();
        for (node, gib) in (0..sockets * nodes).zip(&used) {
            scene.add_vm(u128::from(node) + 1, 0, GIB, node).pages(node, gib << 18);
        }
        let config = Config::default();
        scene.with_view(|view| {
            let supply = supply_of(view, &config);
            let Ok(found) = place(&supply, &demand, None, &config) else { return Ok(()) };
            let socket = |node: NodeId| node.0 / nodes;
            let is_within = |set: &NodeSet| set.iter().all(|node| Some(socket(node)) == set.first().map(socket));
            // By the rule itself, node by node and set by set.
            let has_room = |set: &NodeSet| {
                let of = || supply.nodes.iter().filter(|of| set.contains(of.node));
                let cpus: f64 = of().map(|of| if found.shares_cores { of.threads } else { of.left[CPU] }).sum();
                let bandwidth: f64 = of().map(|of| of.left[BANDWIDTH]).sum();
                let part = demand.memory_bytes.as_f64() / set.len() as f64;
                cpus >= demand.cpus
                    && bandwidth >= demand.bandwidth.unwrap().as_f64()
                    && of().all(|of| of.left[MEMORY] >= part)
            };
            prop_assert!(has_room(&found.nodes));
            for mask in 1u64..1 << (sockets * nodes) {
                let set = supply.nodes_of(mask);
                prop_assert!(is_within(&found.nodes) || !is_within(&set) || !has_room(&set), "{} {set}", found.nodes);
                prop_assert!(found.nodes.len() == 1 || set.len() > 1 || !has_room(&set), "{} {set}", found.nodes);
            }
            Ok(())
        })?;
    }

    #[test]
    fn the_answer_does_not_depend_on_vm_order(nodes in prop::collection::vec(0u16..4, 2..8)) {
        // The same VMs under other ids, so in another order.
        let ask = |order: &dyn Fn(usize) -> u128| {
            let mut scene = Scene::four_nodes(8);
            for (i, node) in nodes.iter().enumerate() {
                scene.add_vm(order(i), 1, GIB, *node).home(*node).vcpus_busy(0.5).pages(*node, 1 << 16);
            }
            placed(&mut scene, &demand(2.0, 4, 1.0))
        };
        prop_assert_eq!(ask(&|i| 100 + i as u128), ask(&|i| 200 - i as u128));
    }
}

/// How many VMs at most fit on so many nodes, one node each: exact, by mixed-integer programming.
fn optimum(demands: &[Demand], nodes: usize) -> usize {
    let mut vars = variables!();
    let on: Vec<Vec<_>> = demands
        .iter()
        .map(|_| (0..nodes).map(|_| vars.add(variable().binary())).collect())
        .collect();
    let all: Expression = on.iter().flatten().copied().sum();
    let mut model = vars.maximise(all).using(microlp);
    for vm in &on {
        model = model.with(constraint!(vm.iter().copied().sum::<Expression>() <= 1));
    }
    for node in 0..nodes {
        let load = |of: &dyn Fn(&Demand) -> f64| -> Expression {
            demands.iter().zip(&on).map(|(d, vm)| of(d) * vm[node]).sum()
        };
        model = model.with(constraint!(load(&|d| d.cpus) <= 8.0));
        model = model.with(constraint!(
            load(&|d| d.memory_bytes.as_f64() / GIB.as_f64()) <= 16.0
        ));
        model = model.with(constraint!(
            load(&|d| d.bandwidth.unwrap().as_f64() / 1e9) <= 16.0
        ));
    }
    let solution = model.solve().expect("an empty packing is always possible");
    on.iter().flatten().filter(|v| solution.value(**v) > 0.5).count()
}

/// How many one by one get a single node each.
fn packed(demands: &[Demand], nodes: u16, algorithm: Algorithm) -> usize {
    let config = Config {
        algorithm,
        ..Config::default()
    };
    let mut scene = Scene::nodes(nodes, 8);
    let mut ledger = Ledger::default();
    scene.with_view(|view| {
        let mut count = 0;
        for demand in demands {
            let supply = Supply::new(view, &seen(view), &ledger, &config, &[]);
            let Ok(found) = place(&supply, demand, None, &config) else {
                continue;
            };
            if found.nodes.len() == 1 {
                count += 1;
                let shape = Shape::new(demand.cpus as u32, demand.memory_bytes);
                ledger.reserve(Reservation {
                    id: 0,
                    name: None,
                    vm: None,
                    shape,
                    demand: demand.clone(),
                    nodes: found.nodes,
                    made_at: view.at,
                });
            }
        }
        count
    })
}

#[test]
#[allow(clippy::print_stderr)] // the figure that the module's text quotes
fn gap_to_the_optimum() {
    use proptest::strategy::ValueTree;
    const NODES: u16 = 2;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let strategy = prop::collection::vec(any_demand(), 8);
    let (mut best, mut tah, mut first_fit) = (0, 0, 0);
    for _ in 0..60 {
        let demands = strategy.new_tree(&mut runner).unwrap().current();
        best += optimum(&demands, usize::from(NODES));
        tah += packed(&demands, NODES, Algorithm::Tah);
        first_fit += packed(&demands, NODES, Algorithm::FirstFit);
    }
    let gap = |n: usize| 100.0 * (best - n) as f64 / best as f64;
    eprintln!(
        "of {best} VMs, TAH places {:.1} percent fewer; first fit {first_fit}, bandwidth ignored",
        gap(tah)
    );
    assert!(
        (0.0..=20.0).contains(&gap(tah)),
        "TAH packs {:.1} percent fewer VMs than the optimum",
        gap(tah)
    );
}
