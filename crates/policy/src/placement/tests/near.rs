//! Tests with homes of several nodes that are near each other, and with cores that come before hyperthreads.

use super::*;

#[test]
fn of_sets_with_room_the_nearest_is_taken() {
    // Two sockets of four nodes of one CPU, with distance 12 within a socket and 32 across. Nodes 1 and 6 have most memory left.
    let mut scene = Scene::sockets(2, 4, 1, (12, 32));
    scene.machine.links.clear();
    for node in [0, 2, 3, 4, 5, 7] {
        scene
            .add_vm(u128::from(node) + 1, 0, GIB, node)
            .pages(node, 1 << 18);
    }
    let nodes = |scene: &mut Scene, cpus, gib| placed(scene, &demand(cpus, gib, 0.0)).map(|(nodes, _)| nodes);
    // A pair with node 1 or 6 is taken, because these have most memory, 16 GiB, and of such pairs the lowest. Nodes 1 and 6
    // together have more, but are on different sockets.
    assert_eq!(nodes(&mut scene, 2.0, 2), Ok("0-1".into()));
    assert_eq!(nodes(&mut scene, 4.0, 2), Ok("0-3".into()));
    // Four nodes of one socket have 61 GiB left, and each has room for an even share of 60 GiB, 15.
    assert_eq!(nodes(&mut scene, 1.0, 60), Ok("0-3".into()));
    // No socket has five CPUs. Of the sets of four nodes and one, the set that contains nodes 1 and 6 is taken.
    assert_eq!(nodes(&mut scene, 5.0, 2), Ok("0-3,6".into()));
    // The operator allows the VM one node of the first socket and two of the second.
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
    // Two sockets of three nodes of two CPUs. One CPU of each node of socket 0 is busy, and socket 1 has only the CPUs of
    // node 3 free. A VM of 3 CPUs has room on 0-2 (1 on each), or on 0 and 3 (1 + 2).
    let mut scene = Scene::sockets(2, 3, 2, (12, 32));
    scene.host_busy = vec![1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(placed(&mut scene, &demand(3.0, 2, 0.0)).unwrap().0, "0-2");
}

#[test]
fn a_single_node_with_room_comes_before_a_set_of_a_better_order() {
    // On nodes 0 and 1, and in their sets, the largest share left is memory (4 CPUs of 32: .125; 16 GiB of 64: .25). The VM
    // needs CPU most.
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
    // 8 CPUs are free only on nodes 2 and 3, but with 4 GiB each, too little for 5 GiB. Nodes 0 and 1 have 4 CPUs free.
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
    // 12 vCPUs need the cores of both sockets; 13 or 24 vCPUs share cores.
    assert_eq!(ask(12.0, &config), Ok(("0-1".into(), false)));
    assert_eq!(ask(13.0, &config), Ok(("0-1".into(), true)));
    assert_eq!(ask(24.0, &config), Ok(("0-1".into(), true)));
    assert_eq!(
        ask(25.0, &config).unwrap_err(),
        "fits nowhere: node 0 is short of CPU (12.0 CPUs left, 25.0 CPUs needed); node 1 is short of CPU (12.0 CPUs left, 25.0 \
         CPUs needed); a home of several nodes is short of CPU (24.0 CPUs left, 25.0 CPUs needed)"
    );
    // The baselines count hyperthreads, as their sources do.
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
    // Two sockets of 6 cores and 12 CPUs. A VM of 4 vCPUs lives on node 0, so 2 cores and 8 CPUs are left there.
    let mut scene = Scene::sockets(2, 1, 12, (12, 21));
    scene.hyperthreads(2);
    scene.add_vm(1, 4, GIB, 0).home(0);
    let mut nodes = |cpus| placed(&mut scene, &demand(cpus, 2, 0.0)).map(|(nodes, _)| nodes);
    assert_eq!(nodes(2.0), Ok("1".into()), "most left");
    assert_eq!(nodes(6.0), Ok("1".into()));
    assert_eq!(nodes(8.0), Ok("0-1".into()), "2 + 6 cores");
    // There are no 9 free cores, so hyperthreads count: node 0 has 8, and node 1 has 12, which is enough.
    assert_eq!(nodes(9.0), Ok("1".into()));
    // One hyperthread of each core is reserved for the host, but with the other one the core still counts.
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
