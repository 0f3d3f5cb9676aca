//! Each test states a scene, and derives by hand what placement must decide.

mod huge;
mod near;

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

/// Returns the history after one look at the host.
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
    // Nodes have 8 CPUs, 16 GiB and 16 GB/s. A VM that fits on one node gets one node.
    let mut scene = Scene::four_nodes(8);
    assert_eq!(
        placed(&mut scene, &demand(8.0, 16, 16.0)),
        Ok(("0".into(), Match::Order))
    );
    // Nine CPUs need two nodes; of the equal pairs, the one with the lowest numbers is taken. 33 GiB need three nodes.
    assert_eq!(placed(&mut scene, &demand(9.0, 16, 1.0)).unwrap().0, "0-1");
    assert_eq!(placed(&mut scene, &demand(9.0, 33, 1.0)).unwrap().0, "0-2");
}

#[test]
fn what_is_left_of_each_node_is_what_can_be_given() {
    // Nodes have 8 CPUs, 16 GiB and 16 GB/s. On node 1, 3 CPUs are busy with something else, 4 GiB are in use, and traffic is
    // 6 GB/s.
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
    // Of the host's 32 CPUs, 64 GiB and 64 GB/s, node 0 has left 4 CPUs (.125), 14 GiB (.219) and 12 GB/s (.188): the largest
    // sum, but memory comes first. Node 1 has 6 CPUs (.188), 8 GiB (.125) and 4 GB/s (.063). Nodes 2 and 3 are full.
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
    // The order is CPU (4/32 = .125), memory (2/64 = .031), bandwidth (1/64): node 1, though node 0 has the larger sum.
    assert_eq!(
        placed(&mut scene, &demand(4.0, 2, 1.0)),
        Ok(("1".into(), Match::Order))
    );
    // The order is memory, bandwidth, CPU: node 0.
    assert_eq!(
        placed(&mut scene, &demand(0.5, 8, 2.0)),
        Ok(("0".into(), Match::Order))
    );
}

#[test]
fn a_vm_of_unknown_bandwidth_is_not_drawn_to_busy_controllers() {
    // Node 0 has all of its 8 CPUs (.25 of the host's), 12 GiB (.188) and 1 GB/s (.016) left. The others have 7 CPUs (.219),
    // 12 GiB and 16 GB/s (.25). If a VM's unknown bandwidth counted as none, only node 0 would have its order.
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
    // A host of one node that has all 4 CPUs (1.0), 12 of 16 GiB (.75) and 8 of 16 GB/s (.5) left.
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
fn a_busy_link_splits_hybrid_bins() {
    // Twelve CPUs need two nodes of eight. Every link between node 0 and another carries 5 of 8 GB/s in one direction, more
    // than a half.
    let mut scene = Scene::four_nodes(8);
    scene.links = (1..4)
        .flat_map(|n| [(NodeId(0), NodeId(n), 5_000_000_000), (NodeId(n), NodeId(0), 0)])
        .collect();
    assert_eq!(placed(&mut scene, &demand(12.0, 4, 1.0)).unwrap().0, "1-2");
    // Twenty-five CPUs need all four nodes, but node 0 cannot join.
    let refused = placed(&mut scene, &demand(25.0, 4, 1.0)).unwrap_err();
    assert_eq!(
        refused.shortages.len(),
        4,
        "each node is short of CPU, all together are not: {refused}"
    );
}

#[test]
fn an_even_share_must_fit_on_every_node_of_a_hybrid_bin() {
    // Nodes have 16 GiB; node 0 has 2 GiB left. On nodes 0 and 1, 18 GiB would need 9 GiB on each.
    let mut scene = Scene::four_nodes(8);
    scene.add_vm(1, 0, Bytes::from_gib(14), 0).pages(0, 14 << 18);
    assert_eq!(placed(&mut scene, &demand(1.0, 18, 1.0)).unwrap().0, "1-2");
}

#[test]
fn what_is_reserved_is_not_given_twice() {
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
    // A reservation whose VM never comes is dropped.
    scene.at += RESERVATION_LIFE + Ns::from_secs(1);
    scene.with_view(|view| assert_eq!(ledger.pending(view).count(), 0));
}

#[test]
fn a_reservation_finds_its_vm_by_name_then_by_shape() {
    let mut ledger = Ledger::default();
    let shape = Shape {
        vcpus: 2,
        memory_mib: 1024,
    };
    let now = Ns::from_secs(5);
    let reservation = |vm, nodes| Reservation {
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
    ledger.reserve(reservation(None, "3"));
    ledger.reserve(reservation(Some(vm_id(1)), "2"));
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
fn a_reservation_of_the_future_is_one_of_before_a_reboot_and_does_not_hold() {
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
    // The record was made five days after boot, and is read a minute after a reboot.
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
    // Too little memory is touched to matter, so the VM gets the first of equal nodes.
    scene.vm(1).pages(2, 1 << 12).pages(0, 0);
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "0".into())]);
    // The operator may decide that little touched memory is enough, or that nearly all memory must be on the node.
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
    // The operator's choice has priority.
    scene.vm(1).settings().home = Some(set("3"));
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "3".into())]);
}

#[test]
fn reserved_cpus_and_memory_are_nobodys_and_devices_attract() {
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 4, GIB, 0).device_on(2);
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "2".into())]);
    // A CPU of node 2 is reserved, so the VM's four vCPUs no longer fit there.
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
    // Node 2 has least left, and not in the relative order of the VM.
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
    // If the device's node has no CPU that the VM is allowed, it gets any other.
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
fn a_node_has_no_more_for_a_vm_than_its_operator_leaves_it_there() {
    // Nodes have four CPUs. The VM of two vCPUs may use CPU 3 of node 0 and all CPUs of node 1.
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 2, GIB, 0).allowed("3-7");
    assert_eq!(homes(&mut scene, &Config::default()), [(1, "1".into())]);
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
            // This applies the rule directly, node by node and set by set.
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
        // The VMs keep their shape but get other ids, and so come in another order.
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

/// Returns the most VMs that fit on this number of nodes, each on one node. The answer is exact, by mixed-integer programming.
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

/// Returns how many VMs get a single node if they are placed one by one.
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

#[test]
fn a_vm_that_fits_nowhere_gets_the_least_crowded_home_with_room_for_its_memory() {
    // Nodes have 8 CPUs and 16 GiB. 1, 3, 2 and 2 CPUs are free, and node 1 has 1 GiB left. A VM of 10 CPUs and 4 GiB does not
    // fit. Alone, node 1 is short of memory; node 0 lacks 9 of 10 CPUs, nodes 2 and 3 lack 8. Three nodes with node 1 would
    // take 4/3 GiB there, four take 1 GiB.
    let mut scene = Scene::four_nodes(8);
    scene.host_busy = [1, 3, 2, 2]
        .iter()
        .flat_map(|free| (0..8).map(move |c| if c < *free { 0.0 } else { 1.0 }))
        .collect();
    scene.add_vm(1, 0, Bytes::from_gib(15), 0).pages(1, 15 << 18);
    let demand = demand(10.0, 4, 0.0);
    assert!(placed(&mut scene, &demand).is_err());
    let homes = scene.with_view(|view| crowded(&supply_of(view, &Config::default()), &demand, None));
    let lacks: Vec<(String, f64)> = homes
        .iter()
        .map(|home| (home.nodes.to_string(), home.lack))
        .collect();
    let expected = [("2", 0.8), ("2-3", 0.6), ("0,2-3", 0.5), ("0-3", 0.2)];
    assert_eq!(lacks.len(), expected.len(), "{lacks:?}");
    for ((nodes, lack), (expected_nodes, expected_lack)) in lacks.iter().zip(expected) {
        assert!(
            nodes == expected_nodes && (lack - expected_lack).abs() < 1e-9,
            "{lacks:?}"
        );
    }
    let shortages = &homes[0].shortages;
    assert_eq!(shortages.len(), 1, "{shortages:?}");
    assert_eq!(
        shortages[0].to_string(),
        "node 2 is short of CPU (2.0 CPUs left, 10.0 CPUs needed)"
    );
}

#[test]
fn a_vm_whose_memory_fits_nowhere_has_no_crowded_home() {
    let mut scene = Scene::four_nodes(8);
    let mut homes = |cpus, gib| {
        let demand = demand(cpus, gib, 0.0);
        scene.with_view(|view| crowded(&supply_of(view, &Config::default()), &demand, None).len())
    };
    // The host has 64 GiB.
    assert_eq!([homes(99.0, 16), homes(99.0, 64), homes(1.0, 65)], [4, 1, 0]);
}
