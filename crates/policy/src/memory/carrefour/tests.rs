use homenode_host::{Decision, Immovable};
use homenode_units::{Bytes, Placing};
use proptest::prelude::*;

use super::*;
use crate::testing::{Scene, vm_id};

const NODES: u16 = 4;

/// Pages on a node. `samples` is the number of samples by node, and `writes` of them are writes.
fn used(frame: u64, pages: u64, on: u16, samples: &[(u16, u32)], writes: u32) -> PageUse {
    PageUse {
        frame,
        pages: Pages(pages),
        on: NodeId(on),
        samples: samples
            .iter()
            .map(|(node, count)| (NodeId(*node), *count))
            .collect(),
        writes,
    }
}

/// Four nodes with these accesses in millions per second, and VM 1 under Carrefour with this share of local accesses.
fn scene(accesses_m: [u64; 4], local: f64, uses: Vec<PageUse>) -> Scene {
    let mut scene = Scene::four_nodes(4);
    for (node, accesses) in (0..NODES).zip(accesses_m) {
        scene.traffic.insert(NodeId(node), accesses * 64_000_000);
    }
    scene
        .add_vm(1, 4, Bytes::from_gib(8), 0)
        .in_force(Placing::Round4k.with_carrefour())
        .local(local)
        .page_uses(uses);
    scene
}

fn moves(plan: &Plan) -> Vec<(VmId, FrameMove)> {
    let of = |decision: &Decision| match &decision.action.act {
        Act::MoveFrames { moves } => moves
            .iter()
            .map(|step| (decision.action.vm, *step))
            .collect::<Vec<_>>(),
        other => panic!("{other:?}"),
    };
    plan.decisions.iter().flat_map(of).collect()
}

fn decided(scene: &mut Scene, config: &Config) -> Vec<(VmId, FrameMove)> {
    scene.with_view(|view| moves(&plan(view, config, &mut State::default())))
}

fn judged(scene: &mut Scene) -> Judgement {
    scene.with_view(|view| {
        let mut state = State::default();
        plan(view, &Config::default(), &mut state);
        *state.judgement(vm_id(1)).expect("it was sampled")
    })
}

/// Pages that one other node uses, pages that two nodes use, and pages at home.
fn mixed() -> Vec<PageUse> {
    vec![
        used(7, 1, 0, &[(1, 2)], 1),
        used(100, 400, 0, &[(0, 1), (2, 1)], 1),
    ]
}

#[test]
fn nothing_happens_below_the_thresholds() {
    // There are 49 accesses per us, all on one node, and none of them is local.
    let mut quiet = scene([49, 0, 0, 0], 0.0, mixed());
    assert!(decided(&mut quiet, &Config::default()).is_empty());
    assert!(!judged(&mut quiet).interleaving && !judged(&mut quiet).migration);
    // At 50 per us both heuristics are on.
    let busy = judged(&mut scene([50, 0, 0, 0], 0.0, mixed()));
    assert!(busy.interleaving && busy.migration);
    // With balanced nodes and 81 percent local, both heuristics are off. At 79 percent, pages follow their users and do not
    // spread.
    let local = judged(&mut scene([50, 50, 50, 50], 0.81, mixed()));
    assert!(!local.interleaving && !local.migration);
    let remote = judged(&mut scene([50, 50, 50, 50], 0.79, mixed()));
    assert!(!remote.interleaving && remote.migration);
    // Standard deviation of 100, 100, 100 and 185: 42.5, over a mean of 121.25, is 35.05 percent. With 184 it is 34.7.
    assert!(judged(&mut scene([100, 100, 100, 185], 0.9, mixed())).interleaving);
    assert!(!judged(&mut scene([100, 100, 100, 184], 0.9, mixed())).interleaving);
    // All accesses are local, so balance has nothing to gain.
    assert!(!judged(&mut scene([200, 0, 0, 0], 1.0, mixed())).interleaving);
}

#[test]
fn a_page_of_one_node_moves_there_and_nowhere_else() {
    let uses = vec![
        used(1, 3, 0, &[(2, 2)], 2),  // two samples from node 2
        used(9, 5, 0, &[(2, 1)], 0),  // one is too few while only migration is on
        used(20, 1, 3, &[(3, 9)], 0), // at home
        used(30, 1, 3, &[(3, 9), (1, 1)], 0),
    ];
    let step = |frame, pages| {
        let (pages, from, to) = (Pages(pages), NodeId(0), NodeId(2));
        (
            vm_id(1),
            FrameMove {
                frame,
                pages,
                from,
                to,
            },
        )
    };
    let mut balanced = scene([50, 50, 50, 50], 0.5, uses.clone());
    assert_eq!(decided(&mut balanced, &Config::default()), [step(1, 3)]);
    // With interleaving one sample is enough. The shared page stays, because its node has no accesses.
    let mut uneven = scene([500, 0, 0, 0], 0.9, uses);
    assert_eq!(decided(&mut uneven, &Config::default()), [step(1, 3), step(9, 5)]);
}

#[test]
fn shared_pages_leave_their_node_by_its_share_for_those_with_least() {
    // Shares are 60, 30, 10 and 0 percent: of 10 000 pages on node 0, 6000 leave, with weights 70, 90 and 100 of 260.
    let uses = vec![used(0, 10_000, 0, &[(0, 1), (1, 1)], 1)];
    let mut scene = scene([60, 30, 10, 0], 0.3, uses);
    let mut to = [0; 4];
    for (_, step) in decided(&mut scene, &Config::default()) {
        assert_eq!(step.from, NodeId(0));
        to[usize::from(step.to.0)] += step.pages.0;
    }
    let expected = [
        0.0,
        6000.0 * 70.0 / 260.0,
        6000.0 * 90.0 / 260.0,
        6000.0 * 100.0 / 260.0,
    ];
    for (got, expected) in to.iter().zip(expected) {
        // Binomial: within four standard deviations.
        assert!(
            (*got as f64 - expected).abs() <= 4.0 * f64::sqrt(expected),
            "{to:?}"
        );
    }
}

#[test]
fn pages_stay_on_home_nodes_and_out_of_full_ones() {
    let uses = || {
        vec![
            used(1, 10, 0, &[(3, 2)], 0),
            used(50, 500, 0, &[(0, 1), (3, 1)], 1),
        ]
    };
    let mut confined = scene([300, 1, 1, 1], 0.1, uses());
    confined.vm(1).homes("0,1");
    let steps = decided(&mut confined, &Config::default());
    assert!(!steps.is_empty());
    for (_, step) in steps {
        assert_eq!((step.frame, step.to), (50, NodeId(1)), "node 3 is not home");
    }
    // Nodes 1 to 3 have room for 20 pages each; another VM holds the rest.
    let mut full = scene([300, 1, 1, 1], 0.1, uses());
    let node = Bytes::from_gib(16).to_pages().0;
    full.add_vm(2, 1, Bytes::from_gib(1), 1)
        .pages(1, node - 20)
        .pages(2, node - 20)
        .pages(3, node - 20);
    let mut to = [0; 4];
    for (_, step) in decided(&mut full, &Config::default()) {
        to[usize::from(step.to.0)] += step.pages.0;
    }
    assert_eq!(to, [0, 20, 20, 20]);
}

#[test]
fn replication_is_counted_and_not_carried_out() {
    // Half of 64 GiB is free: replication is off. All is free and all samples are reads: pages with several readers count.
    let read = || vec![used(1, 8, 0, &[(1, 1), (2, 1)], 0), used(9, 4, 0, &[(1, 5)], 0)];
    let mut empty = scene([50, 50, 50, 50], 0.9, read());
    let judgement = judged(&mut empty);
    assert!(judgement.replication && judgement.replicable == Pages(8));
    assert!(decided(&mut empty, &Config::default()).is_empty());
    let mut half = scene([50, 50, 50, 50], 0.9, read());
    let node = Bytes::from_gib(16).to_pages().0;
    half.vm(1).pages(0, node).pages(1, node);
    assert!(!judged(&mut half).replication);
    let mut written = scene([50, 50, 50, 50], 0.9, mixed());
    assert!(!judged(&mut written).replication);
    // Pages with several readers are spread, as if there were no replication.
    assert!(!decided(&mut scene([500, 0, 0, 0], 0.1, read()), &Config::default()).is_empty());
}

#[test]
fn what_keeps_pages_where_they_are_is_said_once() {
    let mut scene = scene([300, 0, 0, 0], 0.1, mixed());
    scene.vm(1).immovable(Immovable::Vfio);
    let mut state = State::default();
    let mut told = || scene.with_view(|view| plan(view, &Config::default(), &mut state));
    let first = told();
    assert_eq!(first.findings.len(), 1);
    assert!(first.findings[0].message.contains("VFIO"), "{first:?}");
    let second = told();
    assert!(second.findings.is_empty() && second.decisions.is_empty());
}

#[test]
fn a_vm_without_the_policy_is_left_alone() {
    let mut scene = scene([300, 0, 0, 0], 0.1, mixed());
    scene.vm(1).in_force(Placing::Round4k.alone());
    assert!(decided(&mut scene, &Config::default()).is_empty());
}

/// Any samples of a VM's pages, from those of a quiet guest to those of one that alternates its access pattern.
fn any_uses() -> impl Strategy<Value = Vec<PageUse>> {
    let samples = prop::collection::vec((0..NODES, 1u32..5), 1..4);
    let one = (0u64..1000, 1u64..3000, 0..NODES, samples, 0u32..4);
    prop::collection::vec(one, 0..12).prop_map(|pages| {
        let mut frame = 0;
        let named = |(skip, pages, on, samples, writes): (u64, u64, u16, Vec<(u16, u32)>, u32)| {
            frame += skip;
            let used = used(frame, pages, on, &samples, writes);
            frame += pages;
            used
        };
        pages.into_iter().map(named).collect()
    })
}

proptest! {
    #[test]
    fn budgets_hold_whatever_guests_do(
        cycles in prop::collection::vec((any_uses(), any_uses(), prop::array::uniform4(0u64..400), 0.0f64..1.0), 1..5),
        vm_budget in 0u64..5000, host_budget in 0u64..8000, seed: u64,
    ) {
        let config = Config {
            vm_pages_per_cycle: Pages(vm_budget),
            host_pages_per_cycle: Pages(host_budget),
            ..Config::default()
        };
        let mut state = State::seeded(seed);
        for (one, two, accesses, local) in cycles {
            let mut scene = scene(accesses, local, one.clone());
            let policy = Placing::FirstTouch.with_carrefour();
            scene.add_vm(2, 2, Bytes::from_gib(4), 1).in_force(policy).local(local).page_uses(two.clone());
            let moves = scene.with_view(|view| moves(&plan(view, &config, &mut state)));
            let mut all = 0;
            for (id, uses) in [(1, one), (2, two)] {
                let mine: Vec<&FrameMove> =
                    moves.iter().filter(|(vm, _)| *vm == vm_id(id)).map(|(_, step)| step).collect();
                let pages: u64 = mine.iter().map(|step| step.pages.0).sum();
                // The VM's moves do not use the other VM's part of the budget.
                prop_assert!(pages <= vm_budget.min(host_budget / 2));
                all += pages;
                for used in &uses {
                    let steps = mine.iter().filter(|step| step.frame == used.frame);
                    let moved: u64 = steps.clone().map(|step| step.pages.0).sum();
                    prop_assert!(moved <= used.pages.0);
                    for step in steps {
                        prop_assert!(step.from == used.on && step.to != used.on);
                        if used.samples.len() == 1 {
                            prop_assert!(used.samples.get(step.to).is_some());
                        }
                    }
                }
            }
            prop_assert!(all <= host_budget);
            if accesses.iter().sum::<u64>() < 50 {
                prop_assert_eq!(all, 0);
            }
        }
    }

    #[test]
    fn a_seed_repeats(uses in any_uses(), accesses in prop::array::uniform4(0u64..400), seed: u64) {
        let mut scene = scene(accesses, 0.2, uses);
        let mut go = || scene.with_view(|view| plan(view, &Config::default(), &mut State::seeded(seed)));
        prop_assert_eq!(go(), go());
    }
}
