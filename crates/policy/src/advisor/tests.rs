use homenode_host::{HandsOff, Immovable, NumaBalancing};
use homenode_units::{Bytes, NodeId};
use proptest::prelude::*;

use super::*;
use crate::testing::{Scene, vm_id};

const FIRST_TOUCH: MemoryPolicy = Placing::FirstTouch.alone();
const SPREAD: MemoryPolicy = Placing::Round4k.alone();
const FOLLOW: MemoryPolicy = Placing::FirstTouch.with_carrefour();
const EVEN: [u64; 4] = [1_000_000; 4];
const CROWDED: [u64; 4] = [4_000_000, 0, 0, 0];

/// A VM whose home is all four nodes. It keeps the controllers of node 0 busy, and its vCPUs are spread evenly.
fn scene(on: [u64; 4]) -> Scene {
    let mut scene = Scene::four_nodes(4);
    scene.traffic.insert(NodeId(0), 12_000_000_000);
    let vm = scene.add_vm(1, 8, Bytes::from_gib(8), 0);
    vm.homes("0-3").accesses_on(&on).instructions_per_s(1_000_000_000);
    vm.vcpus_busy(1.0);
    scene
}

fn acting() -> Config {
    Config {
        acts: true,
        ..Config::default()
    }
}

fn advising() -> Config {
    Config {
        acts: false,
        ..Config::default()
    }
}

/// Runs this many seconds. The host carries out each choice at once; `speed` returns the VM's speed under a policy.
fn run(
    scene: &mut Scene,
    state: &mut State,
    config: &Config,
    seconds: u64,
    speed: impl Fn(u64, MemoryPolicy) -> u64,
) {
    for _ in 0..seconds {
        scene.at = Ns(scene.at.0 + 1_000_000_000);
        scene.with_view(|view| observe(view, config, state));
        let now = scene.at.0 / 1_000_000_000;
        let policy = state.choice(vm_id(1)).unwrap_or(FIRST_TOUCH);
        scene
            .vm(1)
            .in_force(policy)
            .instructions_per_s(speed(now, policy));
    }
}

#[test]
fn a_class_gets_its_policy() {
    for (on, class, policy) in [
        (EVEN, Class::Low, FIRST_TOUCH),
        ([3_000_000, 1_000_000, 100_000, 0], Class::Moderate, SPREAD),
        (CROWDED, Class::High, SPREAD),
    ] {
        let (mut scene, mut state) = (scene(on), State::default());
        run(&mut scene, &mut state, &advising(), 7, |_, _| 1_000_000_000);
        let advice = state.advice(vm_id(1)).unwrap();
        assert_eq!(
            (advice.class, advice.policy),
            (Some(class), Some(policy)),
            "{advice:?}"
        );
        assert_eq!(state.choice(vm_id(1)), None, "advice is given, not followed");
    }
}

/// Returns the policy that is advised after a watch.
fn advised(scene: &mut Scene) -> Option<MemoryPolicy> {
    let mut state = State::default();
    for _ in 0..7 {
        scene.at = Ns(scene.at.0 + 1_000_000_000);
        scene.with_view(|view| observe(view, &advising(), &mut state));
    }
    state.advice(vm_id(1)).unwrap().policy
}

#[test]
fn spreading_is_tried_with_a_vm_that_is_busy_with_uneven_memory() {
    let quiet = |on| {
        let mut scene = scene(on);
        scene.traffic = NodeMap::new();
        scene
    };
    assert_eq!(advised(&mut scene(CROWDED)), Some(SPREAD));
    assert_eq!(
        advised(&mut quiet(CROWDED)),
        Some(FIRST_TOUCH),
        "it waits for no controller"
    );
    // A link that is busy is as good a reason, but not if accesses are spread already.
    for (on, policy) in [(CROWDED, SPREAD), (EVEN, FIRST_TOUCH)] {
        let mut travelling = quiet(on);
        travelling.links = vec![(NodeId(0), NodeId(1), 4_000_000_000)];
        assert_eq!(advised(&mut travelling), Some(policy));
    }
    // Near saturation little unevenness is enough: accesses take 1.92 / 1.31 = 1.47 times as long as if they were spread.
    let mut full = scene([1_600_000, 1_000_000, 1_000_000, 1_000_000]);
    full.traffic = (0..4)
        .map(|node| {
            (
                NodeId(node),
                [16_000_000_000, 10_000_000_000][usize::from(node > 0)],
            )
        })
        .collect();
    assert_eq!(advised(&mut full), Some(SPREAD));
    // Spreading would take local pages from their users, so Carrefour is tried first, if pages' users are known.
    let mut near = scene(CROWDED);
    near.vm(1).local(0.8);
    assert_eq!(advised(&mut near), Some(FOLLOW));
    // Accesses get 1.75 / 1.6 = 1.09 times as far. On node 0 (75 percent busy) they wait 1.36 / 1.03 = 1.32 times as long.
    near.vm(1).local(0.4);
    assert_eq!(advised(&mut near), Some(SPREAD));
    near.vm(1).local(0.8);
    near.no_page_uses = Some("no sampling".into());
    assert_eq!(advised(&mut near), Some(SPREAD));
    // If the VM stays busy under Carrefour, its memory is spread as well.
    let mut still = scene([1_500_000, 1_000_000, 1_000_000, 1_000_000]);
    still.vm(1).in_force(FOLLOW);
    assert_eq!(advised(&mut still), Some(Placing::Round4k.with_carrefour()));
}

#[test]
fn nothing_is_tried_for_traffic_of_other_vms() {
    let mut scene = scene(CROWDED);
    scene.traffic = NodeMap::new();
    scene.links = vec![(NodeId(2), NodeId(3), 4_000_000_000)];
    scene.vm(1).local(0.9);
    let beside = scene.add_vm(2, 8, Bytes::from_gib(1), 0);
    beside
        .homes("0-3")
        .accesses_on(&CROWDED)
        .instructions_per_s(1_000_000_000);
    assert_eq!(advised(&mut scene), Some(FIRST_TOUCH));
}

#[test]
fn where_the_kernel_balances_nothing_is_tried_with_a_vm_that_rests_or_has_company() {
    let chosen = |is_balanced: bool, busy: f64, company: f64| {
        let (mut scene, mut state) = (scene(CROWDED), State::default());
        scene.add_vm(2, 1, Bytes::from_gib(1), 3).vcpus_busy(company);
        scene.kernel.numa_balancing = NumaBalancing::of(u32::from(is_balanced));
        scene.vm(1).vcpus_busy(busy);
        run(&mut scene, &mut state, &acting(), 7, |_, _| 1_000_000_000);
        (state.choice(vm_id(1)), state.advice(vm_id(1)).unwrap().clone())
    };
    assert_eq!(chosen(true, 1.0, 0.5).0, Some(SPREAD), "the host is its own");
    assert_eq!(
        chosen(false, 0.3, 1.0).0,
        Some(SPREAD),
        "the kernel does not move its pages"
    );
    for (busy, company, why) in [
        (0.3, 0.0, "rests 70 percent"),
        (1.0, 1.0, "0.1 times its CPU time"),
    ] {
        let (choice, advice) = chosen(true, busy, company);
        assert_eq!((choice, advice.policy), (None, Some(FIRST_TOUCH)));
        assert!(advice.why.contains(why), "{advice:?}");
    }
}

#[test]
fn a_vm_that_comes_to_rest_in_a_trial_gets_back_what_it_had() {
    let (mut scene, mut state) = (scene(CROWDED), State::default());
    scene.kernel.numa_balancing = NumaBalancing::of(1);
    scene.vm(1).vcpus_busy(1.0);
    run(&mut scene, &mut state, &acting(), 7, |_, _| 1_000_000_000);
    assert_eq!(state.choice(vm_id(1)), Some(SPREAD));
    scene.vm(1).vcpus_busy(0.1);
    run(&mut scene, &mut state, &acting(), 300, |_, _| 100_000_000);
    assert_eq!(
        (state.choice(vm_id(1)), state.changes(vm_id(1))),
        (Some(FIRST_TOUCH), 2)
    );
}

#[test]
fn what_helps_is_kept_until_the_program_is_another() {
    let (mut scene, mut state) = (scene(CROWDED), State::default());
    let faster = |_, policy| {
        if policy == SPREAD {
            2_000_000_000
        } else {
            1_000_000_000
        }
    };
    run(&mut scene, &mut state, &acting(), 300, faster);
    assert_eq!(
        (state.choice(vm_id(1)), state.changes(vm_id(1))),
        (Some(SPREAD), 1)
    );
    // Now a phase begins in which spreading does not help.
    scene.vm(1).accesses_on(&EVEN);
    let slower = |_, policy| {
        if policy == SPREAD {
            700_000_000
        } else {
            1_000_000_000
        }
    };
    run(&mut scene, &mut state, &acting(), 80, slower);
    assert_eq!(
        (state.choice(vm_id(1)), state.changes(vm_id(1))),
        (Some(FIRST_TOUCH), 2)
    );
    run(&mut scene, &mut state, &acting(), 300, slower);
    assert_eq!(
        state.changes(vm_id(1)),
        2,
        "its accesses are even now: nothing suggests another"
    );
}

#[test]
fn what_does_not_help_is_given_up_and_tried_ever_more_rarely() {
    let (mut scene, mut state) = (scene(CROWDED), State::default());
    let mut changes = Vec::new();
    for _ in 0..4 {
        run(&mut scene, &mut state, &acting(), 600, |_, _| 1_000_000_000);
        changes.push(state.changes(vm_id(1)));
    }
    // Each trial makes two changes, and comes after a watch. Holds of 60, 120, 240 … s follow, so trials begin at about 5,
    // 80, 215, 470, 965 and 1940 s.
    assert_eq!(changes, [8, 10, 10, 12]);
    assert_eq!(state.choice(vm_id(1)), Some(FIRST_TOUCH));
}

#[test]
fn what_a_program_does_while_it_sets_up_its_memory_does_not_count() {
    let (mut scene, mut state) = (scene(CROWDED), State::default());
    let half = |_, policy| {
        if policy == SPREAD {
            1_000_000_000
        } else {
            500_000_000
        }
    };
    // The program is fast while its other threads find little memory to use.
    for second in 1..=20 {
        scene
            .vm(1)
            .pages(0, second * 100_000)
            .instructions_per_s(2_000_000_000);
        run(&mut scene, &mut state, &acting(), 1, |_, _| 2_000_000_000);
        assert_eq!(state.choice(vm_id(1)), None, "in second {second}");
    }
    scene.vm(1).instructions_per_s(500_000_000);
    run(&mut scene, &mut state, &acting(), 60, half);
    assert_eq!(
        (state.choice(vm_id(1)), state.changes(vm_id(1))),
        (Some(SPREAD), 1)
    );
}

#[test]
fn a_policy_stays_only_if_the_gain_exceeds_the_scatter() {
    // Speeds scatter by a fifth.
    let scattered = |mean: f64| {
        move |second: u64, policy| {
            let gain = if policy == SPREAD { mean } else { 1.0 };
            (gain * [1.2, 0.8, 1.0, 1.25, 0.75][second as usize % 5] * 1e9) as u64
        }
    };
    for (gain, kept) in [(1.0, FIRST_TOUCH), (1.05, FIRST_TOUCH), (2.0, SPREAD)] {
        let (mut scene, mut state) = (scene(CROWDED), State::default());
        run(&mut scene, &mut state, &acting(), 100, scattered(gain));
        assert_eq!(state.choice(vm_id(1)), Some(kept), "gain {gain}");
    }
}

#[test]
fn phases_that_differ_are_not_compared() {
    let (mut scene, mut state) = (scene(CROWDED), State::default());
    scene.vm(1).misses_per_s(1_000_000);
    run(&mut scene, &mut state, &acting(), 7, |_, _| 1_000_000_000);
    assert_eq!(state.choice(vm_id(1)), Some(SPREAD));
    // The VM hardly uses memory any more, and is faster because of that.
    scene.vm(1).misses_per_s(20_000);
    run(&mut scene, &mut state, &acting(), 100, |_, _| 2_000_000_000);
    assert_eq!(
        (state.choice(vm_id(1)), state.changes(vm_id(1))),
        (Some(FIRST_TOUCH), 2)
    );
}

#[test]
fn a_vm_that_gets_more_work_is_no_faster() {
    let (mut scene, mut state) = (scene(CROWDED), State::default());
    scene.kernel.numa_balancing = NumaBalancing::of(0);
    scene.vm(1).vcpus_busy(0.4).instructions_per_s(400_000_000);
    run(&mut scene, &mut state, &acting(), 7, |_, _| 400_000_000);
    assert_eq!(state.choice(vm_id(1)), Some(SPREAD));
    scene.vm(1).vcpus_busy(0.8);
    run(&mut scene, &mut state, &acting(), 60, |_, _| 800_000_000);
    assert_eq!(
        (state.choice(vm_id(1)), state.changes(vm_id(1))),
        (Some(FIRST_TOUCH), 2)
    );
}

#[test]
fn a_trial_ends_with_the_home() {
    for home in ["0-2", "2"] {
        let (mut scene, mut state) = (scene(CROWDED), State::default());
        run(&mut scene, &mut state, &acting(), 7, |_, _| 1_000_000_000);
        assert_eq!(state.choice(vm_id(1)), Some(SPREAD));
        scene.vm(1).homes(home);
        run(&mut scene, &mut state, &acting(), 1, |_, _| 1_000_000_000);
        assert_eq!(state.choice(vm_id(1)), Some(FIRST_TOUCH), "home {home}");
        assert!(state.gives_back(vm_id(1)));
    }
}

/// A cycle takes as long as a watch and a pause.
#[test]
fn few_cycles_are_not_judged() {
    let second = Ns::from_secs(1);
    let config = Config {
        watch: second,
        settle: second,
        hold: second,
        ..Config::default()
    };
    for (gain, kept) in [(1, FIRST_TOUCH), (2, SPREAD)] {
        let (mut scene, mut state) = (scene(CROWDED), State::default());
        let speed = |_, policy| {
            if policy == SPREAD {
                gain * 1_000_000_000
            } else {
                1_000_000_000
            }
        };
        run(&mut scene, &mut state, &config, 4, speed);
        assert_eq!(state.choice(vm_id(1)), None, "four cycles are too few");
        run(&mut scene, &mut state, &config, 6, speed);
        assert_eq!(state.choice(vm_id(1)), Some(SPREAD), "the trial has not had five");
        run(&mut scene, &mut state, &config, 2, speed);
        assert_eq!(state.choice(vm_id(1)), Some(kept), "gain {gain}");
    }
}

#[test]
fn a_policy_goes_with_the_program_for_which_it_was_adopted() {
    let (mut scene, mut state) = (scene(CROWDED), State::default());
    let faster = |_, policy| {
        if policy == SPREAD {
            2_000_000_000
        } else {
            1_000_000_000
        }
    };
    scene.vm(1).pages(0, 1_000_000);
    run(&mut scene, &mut state, &acting(), 60, faster);
    assert_eq!(state.choice(vm_id(1)), Some(SPREAD));
    scene.vm(1).pages(0, 700_000);
    run(&mut scene, &mut state, &acting(), 60, faster);
    assert_eq!(
        state.choice(vm_id(1)),
        Some(SPREAD),
        "most of its memory is there"
    );
    scene.vm(1).pages(0, 400_000);
    run(&mut scene, &mut state, &acting(), 2, faster);
    assert_eq!(
        (state.choice(vm_id(1)), state.changes(vm_id(1))),
        (Some(FIRST_TOUCH), 2)
    );
}

#[test]
fn how_many_accesses_say_something_is_the_operators_to_say() {
    for (least, is_known) in [(1_000_000, true), (1_000_000_000, false)] {
        let (mut scene, mut state) = (scene(CROWDED), State::default());
        let config = Config {
            accesses_min: least,
            ..Config::default()
        };
        run(&mut scene, &mut state, &config, 7, |_, _| 1_000_000_000);
        let advice = state.advice(vm_id(1)).unwrap();
        assert_eq!(advice.class.is_some(), is_known, "{advice:?}");
    }
}

/// The VM is as wide as two nodes and unplaced, and all of its memory is on one node.
#[test]
fn when_an_unplaced_vm_is_spread_is_the_operators_to_say() {
    let is_advised = |set: fn(&mut Config)| {
        let (mut scene, mut state, mut config) = (Scene::four_nodes(4), State::default(), Config::default());
        set(&mut config);
        let vm = scene.add_vm(1, 8, Bytes::from_gib(8), 0);
        vm.accesses_on(&CROWDED).instructions_per_s(1_000_000_000);
        scene.traffic.insert(NodeId(0), 12_000_000_000);
        run(&mut scene, &mut state, &config, 7, |_, _| 1_000_000_000);
        state.advice(vm_id(1)).unwrap().policy.is_some()
    };
    assert!(is_advised(|_| {}));
    assert!(!is_advised(|config| config.crowded_min = 5.0));
    assert!(!is_advised(|config| config.controller_busy = 1.0));
}

#[test]
fn nothing_is_tried_where_nothing_is_known() {
    let mut cases = [
        scene(CROWDED),
        scene(CROWDED),
        scene([10; 4]),
        scene(CROWDED),
        scene(CROWDED),
    ];
    cases[0].vm(1).immovable(Immovable::Vfio);
    cases[1].vm(1).homes("2");
    cases[3].vm(1).chosen(FIRST_TOUCH);
    cases[4].vm(1).hands_off(HandsOff::PinnedByHand);
    let mut unknown = Scene::four_nodes(4);
    unknown.add_vm(1, 8, Bytes::from_gib(8), 0).homes("0-3");
    let parts = [
        "VFIO",
        "one home node",
        "hardly uses",
        "crowd",
        "pinned",
        "not counted",
    ];
    for (mut scene, part) in cases.into_iter().chain([unknown]).zip(parts) {
        let mut state = State::default();
        for _ in 0..30 {
            scene.at = Ns(scene.at.0 + 1_000_000_000);
            scene.with_view(|view| observe(view, &acting(), &mut state));
        }
        assert_eq!(state.changes(vm_id(1)), 0);
        let advice = state.advice(vm_id(1)).unwrap();
        assert!(advice.why.contains(part), "{advice:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// However a guest's accesses and speed change, the agent makes few changes: a trial that fails doubles the wait, and one
    /// that helps is followed by a wait of a minute.
    #[test]
    fn a_guest_that_alternates_gets_few_changes(period in 1u64..200, deep in 1u64..1000) {
        let (mut scene, mut state) = (scene(CROWDED), State::default());
        for step in 0..20 {
            let on = if step % 2 == 0 { CROWDED } else { EVEN };
            scene.vm(1).accesses_on(&on);
            let speed = |now: u64, policy: MemoryPolicy| {
                let likes = (now / period).is_multiple_of(2);
                if likes == (policy == SPREAD) { 1_000_000_000 } else { deep * 1_000_000 }
            };
            run(&mut scene, &mut state, &acting(), 180, speed);
        }
        // In an hour, dropped trials are followed by waits of 1, 2, 4, 8, 16 and 32 minutes.
        prop_assert!(state.changes(vm_id(1)) <= 14, "{}", state.changes(vm_id(1)));
    }
}
