use homenode_host::{Immovable, Mode};
use homenode_units::{Bytes, NodeId, Ns};

use super::*;
use crate::testing::{Scene, vm_id};

const ROUND: MemoryPolicy = Placing::Round4k.alone();

/// One VM with its home on nodes 0 to 2, and this many pages on each node.
fn scene(pages: [u64; 4], policy: MemoryPolicy) -> Scene {
    let mut scene = Scene::four_nodes(4);
    let vm = scene.add_vm(1, 6, Bytes::from_gib(8), 0);
    vm.homes("0-2").in_force(policy);
    for (node, pages) in pages.into_iter().enumerate() {
        vm.pages(node as u16, pages);
    }
    scene
}

fn decide(scene: &mut Scene, state: &mut State) -> Plan {
    decide_by(&Config::default(), scene, state)
}

fn decide_by(config: &Config, scene: &mut Scene, state: &mut State) -> Plan {
    let budgets = repatriate::Config::default();
    scene.with_view(|view| {
        let strays = repatriate::plan(view, &budgets, &mut repatriate::State::default());
        plan(view, config, &budgets, &[strays], state)
    })
}

/// Returns (from, to, pages) of each move.
fn moves(plan: &Plan) -> Vec<(String, String, u64)> {
    let moves = plan.decisions.iter().filter_map(|d| match &d.action.act {
        Act::MovePages {
            from, to, pages_max, ..
        } => Some((from.to_string(), to.to_string(), pages_max.0)),
        _ => None,
    });
    moves.collect()
}

#[test]
fn pages_are_evened_out_over_the_home_nodes() {
    let plan = decide(
        &mut scene([30_000, 6_000, 24_000, 0], ROUND),
        &mut State::default(),
    );
    let expected = [("0", "1", 10_000), ("2", "1", 4_000)].map(|(a, b, n)| (a.to_owned(), b.to_owned(), n));
    assert_eq!(moves(&plan), expected);
    // Within the tolerance nothing moves, nor does anything for a VM with one home node.
    let mut even = scene([20_500, 19_700, 19_800, 0], ROUND);
    assert!(decide(&mut even, &mut State::default()).decisions.is_empty());
    let strict = Config {
        spread_excess: 0.0,
        ..Config::default()
    };
    assert!(
        !decide_by(&strict, &mut even, &mut State::default())
            .decisions
            .is_empty()
    );
    let coarse = Config {
        spread_pages_min: Pages(600),
        ..strict
    };
    assert!(
        decide_by(&coarse, &mut even, &mut State::default())
            .decisions
            .is_empty()
    );
    let mut one = Scene::four_nodes(4);
    one.add_vm(1, 1, Bytes::from_gib(1), 0)
        .home(0)
        .pages(0, 9_000)
        .in_force(ROUND);
    assert!(decide(&mut one, &mut State::default()).decisions.is_empty());
}

#[test]
fn first_touch_leaves_pages_where_they_are() {
    let plan = decide(
        &mut scene([60_000, 0, 0, 0], Placing::FirstTouch.alone()),
        &mut State::default(),
    );
    assert!(plan.decisions.is_empty());
}

#[test]
fn what_repatriation_leaves_of_the_budgets_is_used() {
    let budgets = repatriate::Config {
        vm_pages_per_cycle: Pages(5_000),
        host_pages_per_cycle: Pages(8_000),
        ..repatriate::Config::default()
    };
    let mut scene = scene([30_000, 6_000, 24_000, 0], ROUND);
    // VM 2's strays take 5000 pages of the host's 8000.
    scene.add_vm(2, 1, Bytes::from_gib(4), 0).home(0).pages(3, 9_000);
    let plan = scene.with_view(|view| {
        let strays = repatriate::plan(view, &budgets, &mut repatriate::State::default());
        plan(
            view,
            &Config::default(),
            &budgets,
            &[strays],
            &mut State::default(),
        )
    });
    assert_eq!(moves(&plan), [("0".to_owned(), "1".to_owned(), 3_000)]);
}

#[test]
fn strays_go_home_before_pages_are_evened_out() {
    let plan = decide(
        &mut scene([30_000, 6_000, 24_000, 9_000], ROUND),
        &mut State::default(),
    );
    assert!(plan.decisions.is_empty(), "{plan:?}");
}

#[test]
fn a_policy_that_cannot_be_is_said_once_with_the_reason() {
    let first_touch = Placing::FirstTouch.alone();
    let mut refused = scene([9_000, 0, 0, 0], ROUND);
    refused.vms[0].chosen(first_touch).immovable(Immovable::Vfio);
    let mut state = State::default();
    let plan = decide(&mut refused, &mut state);
    assert!(plan.decisions.is_empty());
    assert!(plan.findings[0].message.contains("VFIO"), "{:?}", plan.findings);
    assert!(decide(&mut refused, &mut state).findings.is_empty());

    let mut set = scene([9_000, 0, 0, 0], ROUND);
    set.vms[0].chosen(first_touch);
    let plan = decide(&mut set, &mut State::default());
    let expected = Act::SetMemoryPolicy { policy: first_touch }.on(vm_id(1));
    assert_eq!(plan.decisions[0].action, expected);

    for (wanted, part) in [
        (Placing::Round1g.alone(), "round-4k"),
        (ROUND, "pinned"),
        (Placing::FirstTouch.with_carrefour(), "no sampling"),
    ] {
        let mut scene = scene([9_000, 0, 0, 0], first_touch);
        scene.no_page_uses = Some("no sampling here".into());
        if part == "pinned" {
            scene.vms[0].hands_off(HandsOff::PinnedByHand);
        }
        let said = scene.with_view(|view| {
            let vm = &view.vms[0];
            objection(view.sample, vm.sample, vm.hands_off, wanted)
        });
        assert!(said.as_ref().is_some_and(|said| said.contains(part)), "{said:?}");
    }
    assert_eq!(set.machine.nodes.keys().next(), Some(NodeId(0)));
}

#[test]
fn a_vm_that_is_paused_or_migrating_keeps_pages_and_policy_until_that_is_over() {
    for (why, part) in [
        (Immovable::Paused, "paused"),
        (Immovable::Migrating, "migrated between hosts"),
    ] {
        let mut state = State::default();
        let mut spread = scene([30_000, 0, 0, 0], ROUND);
        spread.vms[0].immovable(why.clone());
        assert!(decide(&mut spread, &mut state).decisions.is_empty());
        let mut chosen = scene([30_000, 0, 0, 0], ROUND);
        chosen.vms[0].chosen(Placing::FirstTouch.alone()).immovable(why);
        let plan = decide(&mut chosen, &mut state);
        assert!(
            plan.decisions.is_empty() && plan.findings[0].message.contains(part),
            "{plan:?}"
        );

        assert!(!moves(&decide(&mut scene([30_000, 0, 0, 0], ROUND), &mut state)).is_empty());
        let mut chosen = scene([30_000, 0, 0, 0], ROUND);
        chosen.vms[0].chosen(Placing::FirstTouch.alone());
        let plan = decide(&mut chosen, &mut state);
        assert!(
            matches!(plan.decisions[0].action.act, Act::SetMemoryPolicy { .. }),
            "{plan:?}"
        );
    }
}

#[test]
fn first_touch_without_releases_is_cautioned_against() {
    let mut scene = scene([9_000, 0, 0, 0], ROUND);
    scene.vms[0].no_releases("no reports");
    let said = |scene: &mut Scene, policy| scene.with_view(|view| caution(view.vms[0].sample, policy));
    let text = said(&mut scene, Placing::FirstTouch.with_carrefour()).expect("said");
    assert!(text.contains("once") && text.contains("no reports"), "{text}");
    assert_eq!(said(&mut scene, ROUND), None);
}

const FIRST_TOUCH: MemoryPolicy = Placing::FirstTouch.alone();

/// Runs a second, and carries out the memory policy that is decided. Returns the plan.
fn second(scene: &mut Scene, state: &mut State, config: &Config) -> Plan {
    scene.at = Ns(scene.at.0 + 1_000_000_000);
    let plan = decide_by(config, scene, state);
    for decision in &plan.decisions {
        if let Act::SetMemoryPolicy { policy } = &decision.action.act {
            scene.vms[0].in_force(*policy);
        }
    }
    plan
}

fn now(scene: &mut Scene) -> MemoryPolicy {
    scene.with_view(|view| view.sample.vms[0].memory_policy)
}

/// A VM that crowds the controllers of node 0, two seconds after the advisor began to try another policy on it.
fn on_trial() -> (Scene, State) {
    let mut scene = Scene::four_nodes(4);
    scene.traffic.insert(NodeId(0), 12_000_000_000);
    let vm = scene.add_vm(1, 8, Bytes::from_gib(8), 0);
    vm.homes("0-3")
        .accesses_on(&[4_000_000, 0, 0, 0])
        .instructions_per_s(1_000_000_000)
        .vcpus_busy(1.0)
        .in_force(FIRST_TOUCH);
    let mut state = State::default();
    let waited = (0..20).find(|_| {
        second(&mut scene, &mut state, &Config::default());
        now(&mut scene) != FIRST_TOUCH
    });
    assert!(waited.is_some(), "nothing is tried");
    second(&mut scene, &mut state, &Config::default());
    assert_eq!(now(&mut scene), ROUND);
    (scene, state)
}

#[test]
fn a_policy_on_trial_is_restored_once_the_advisor_may_not_be_followed() {
    let mut advising = Config::default();
    advising.advisor.acts = false;
    type Change = fn(&mut Scene, &mut State);
    let changes: [(&str, Change, &Config); 4] = [
        ("no longer follows", |_, _| {}, &advising),
        (
            "mode observe",
            |scene, _| scene.vm(1).settings().mode = Some(Mode::Observe),
            &Config::default(),
        ),
        (
            "mode observe",
            |_, state| state.observe_only(true),
            &Config::default(),
        ),
        (
            "missing",
            |scene, state| {
                let vm = scene.vms.pop().expect("a VM");
                second(scene, state, &Config::default());
                scene.vms.push(vm);
            },
            &Config::default(),
        ),
    ];
    for (why, change, config) in changes {
        let (mut scene, mut state) = on_trial();
        change(&mut scene, &mut state);
        let plan = second(&mut scene, &mut state, config);
        assert_eq!(now(&mut scene), FIRST_TOUCH, "{why}");
        assert!(plan.decisions[0].reason.contains(why), "{plan:?}");
        assert!(state.was_before(vm_id(1), FIRST_TOUCH));
        // That ends the trial: nothing is set again before another watch.
        for _ in 0..3 {
            assert_eq!(second(&mut scene, &mut state, config).decisions, [], "{why}");
        }
        assert!(
            !state.was_before(vm_id(1), FIRST_TOUCH),
            "nothing is left to restore"
        );
    }
}

#[test]
fn a_policy_on_trial_that_cannot_be_restored_at_once_is_restored_later() {
    let (mut scene, mut state) = on_trial();
    scene.vm(1).settings().mode = Some(Mode::Observe);
    scene.vm(1).immovable(Immovable::Paused);
    let mut said = 0;
    for _ in 0..200 {
        let plan = second(&mut scene, &mut state, &Config::default());
        said += plan.findings.len();
        assert_eq!(now(&mut scene), ROUND);
    }
    assert_eq!(said, 1, "why it is not restored is said once");
    scene.vms[0].movable();
    second(&mut scene, &mut state, &Config::default());
    assert_eq!(now(&mut scene), FIRST_TOUCH);
}

#[test]
fn a_policy_that_the_operator_chose_is_never_restored() {
    let (mut scene, mut state) = on_trial();
    scene.vm(1).chosen(ROUND);
    scene.vm(1).settings().mode = Some(Mode::Observe);
    for _ in 0..20 {
        second(&mut scene, &mut state, &Config::default());
        assert_eq!(now(&mut scene), ROUND);
    }
}
