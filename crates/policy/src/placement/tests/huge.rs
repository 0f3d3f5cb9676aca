//! Tests with VMs in huge pages, and pools with room for them.

use super::*;

const SMALL_HUGE: Bytes = Bytes::from_mib(2);

/// A VM of one vCPU with `mib` MiB of memory in total, of which these parts are in huge pages of these sizes.
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

/// Returns the VM's home, or the words of its refusal.
fn placed_or_short(scene: &mut Scene, demand: &Demand) -> String {
    placed(scene, demand).map_or_else(|refused| refused.to_string(), |(nodes, _)| nodes)
}

#[test]
fn a_vm_in_huge_pages_goes_where_the_pool_has_room() {
    // Node 1 has 350 huge pages of 2 MiB, 10 of them in use, but only 1 of its 16 GiB of ordinary memory left. Node 0 has no
    // huge pages.
    let mut scene = Scene::nodes(2, 2);
    scene.add_vm(9, 0, Bytes::from_gib(15), 1).pages(1, 15 << 18);
    scene.pool(1, SMALL_HUGE, (350, 340));
    // 600 MiB take 300 pages, and 680 MiB take 340.
    assert_eq!(placed_or_short(&mut scene, &huge(600, &[])), "0");
    assert_eq!(placed_or_short(&mut scene, &huge(600, &[(SMALL_HUGE, 600)])), "1");
    assert_eq!(placed_or_short(&mut scene, &huge(680, &[(SMALL_HUGE, 680)])), "1");
    // 681 MiB take 341 pages, as the last one is not full.
    assert_eq!(
        placed_or_short(&mut scene, &huge(681, &[(SMALL_HUGE, 681)])),
        "fits nowhere: node 0 is short of huge pages of 2MiB (0 of a pool of 0 left, 341 needed); node 1 is short of huge pages \
         of 2MiB (340 of a pool of 350 left, 341 needed); a home of several nodes is short of huge pages of 2MiB (340 of a pool \
         of 350 left, 341 needed)"
    );
    // Free pages of another size do not help.
    let gib = huge(1024, &[(GIB, 1024)]);
    assert!(
        placed_or_short(&mut scene, &gib).contains("huge pages of 1GiB (0 of a pool of 0 left, 1 needed)")
    );
    scene.pool(0, GIB, (2, 1));
    assert_eq!(placed_or_short(&mut scene, &gib), "0");
    // Each of several nodes needs room for an even share. For 360 pages, 340 on node 1 and 20 on node 0 do not suffice; 180
    // on each do.
    scene.pool(0, SMALL_HUGE, (20, 20));
    assert!(placed(&mut scene, &huge(720, &[(SMALL_HUGE, 720)])).is_err());
    scene.huge_pages[NodeId(0)].pop();
    scene.pool(0, SMALL_HUGE, (180, 180));
    assert_eq!(
        placed_or_short(&mut scene, &huge(720, &[(SMALL_HUGE, 720)])),
        "0-1"
    );
    assert!(
        placed(&mut scene, &huge(722, &[(SMALL_HUGE, 722)])).is_err(),
        "181 on each"
    );
}

#[test]
fn huge_pages_and_ordinary_memory_do_not_stand_in_for_each_other() {
    // Node 0 has 100 huge pages and all of its ordinary memory left; node 1 has 350 pages and 1 GiB.
    let mut scene = Scene::nodes(2, 8);
    scene.add_vm(9, 0, Bytes::from_gib(15), 1).pages(1, 15 << 18);
    scene.pool(0, SMALL_HUGE, (100, 100));
    scene.pool(1, SMALL_HUGE, (350, 350));
    // The VM has 400 MiB in 200 huge pages, and 800 or 1,600 MiB of ordinary memory, of which node 1 has 1,024 MiB.
    let both = |ordinary: u64| huge(400 + ordinary, &[(SMALL_HUGE, 400)]);
    assert_eq!(placed_or_short(&mut scene, &both(800)), "1");
    // The VM needs 100 pages and 800 MiB on each of both nodes.
    assert_eq!(placed_or_short(&mut scene, &both(1600)), "0-1");
    let refused = placed_or_short(&mut scene, &huge(600 + 1600, &[(SMALL_HUGE, 600)]));
    assert!(
        refused.contains("node 0 is short of huge pages of 2MiB (100 of a pool of 100 left, 300 needed)")
            && refused.contains("node 1 is short of memory (1GiB left, 1.56GiB needed)"),
        "{refused}"
    );
    // A VM in huge pages on node 0 takes nothing from the node's 16 GiB, and a VM in ordinary memory takes nothing from its pool.
    scene
        .add_vm(1, 1, GIB, 0)
        .in_huge_pages(SMALL_HUGE)
        .home(0)
        .pages(0, 1 << 18);
    scene.add_vm(2, 1, GIB, 0).home(0);
    let left = scene.with_view(|view| supply_of(view, &Config::default()).left().next().unwrap().memory);
    assert_eq!(left, Bytes::from_gib(15));
    assert_eq!(
        placed_or_short(&mut scene, &huge(200, &[(SMALL_HUGE, 200)])),
        "1",
        "most left"
    );
    scene.huge_pages[NodeId(1)].clear();
    assert_eq!(placed_or_short(&mut scene, &huge(200, &[(SMALL_HUGE, 200)])), "0");
}

#[test]
fn huge_pages_that_are_reserved_are_not_given_twice() {
    // Two nodes of 100 pages each. VM 1 lives on node 0 and has touched 40 of 120 MiB. The other 80 MiB, 40 pages, are
    // reserved for it.
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
    // Three VMs of 60 pages each. Before them, nodes 0 and 1 have 60 and 100 left; then 60 and 40; then 0 and 40.
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
    // A VM that moves elsewhere releases what it holds on this node.
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
