//! Each test states a scene, and derives by hand what the policy must decide.

use homenode_host::{Act, Plan};
use homenode_units::{Bytes, CpuSet, NodeId};

use super::{Config, Settings, State, plan};
use crate::demand::History;
use crate::placement;
use crate::testing::{Scene, vm_id};

const GIB: Bytes = Bytes::from_gib(1);

/// Number of cycles that are remembered by default.
const REMEMBERED: u32 = 10;

fn run(scene: &mut Scene, state: &mut State) -> Plan {
    run_by(&Config::default(), scene, state)
}

fn run_by(balance: &Config, scene: &mut Scene, state: &mut State) -> Plan {
    let placement = &placement::Config::default();
    scene.with_view(|view| {
        let mut history = History::default();
        history.observe(view, &Default::default());
        let placed = &mut placement::State::default();
        plan(view, Settings { placement, balance }, &history, placed, state)
    })
}

/// Returns (VM number, vCPU, CPUs) of each pin.
fn pins(plan: &Plan) -> Vec<(u128, u16, String)> {
    plan.decisions
        .iter()
        .filter_map(|d| match &d.action.act {
            Act::PinVcpus { vcpus, cpus } => Some((d.action.vm.0, vcpus[0], cpus.to_string())),
            _ => None,
        })
        .collect()
}

/// Two VMs of two vCPUs on node 0, whose two CPUs they share: each vCPU runs half the time and waits the other half.
fn overloaded() -> Scene {
    let mut scene = Scene::four_nodes(2);
    let node0: CpuSet = "0-1".parse().unwrap();
    for n in [1, 2] {
        scene
            .add_vm(n, 2, GIB, 0)
            .home(0)
            .affinity(&node0)
            .vcpus_busy(0.5)
            .vcpus_waiting(0.5);
    }
    scene
}

#[test]
fn no_waiting_or_no_idle_core_means_no_move() {
    let mut calm = Scene::four_nodes(2);
    calm.add_vm(1, 2, GIB, 0).home(0).vcpus_busy(1.0);
    assert_eq!(pins(&run(&mut calm, &mut State::default())), []);

    let mut full = overloaded();
    full.host_busy = vec![0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(pins(&run(&mut full, &mut State::default())), []);
}

#[test]
fn moves_the_lesser_of_waiting_and_idle() {
    // Waiting: 4 x 0.5 = 2. Nodes 1 to 3 have 2 idle cores each. Link traffic is not counted, so the lowest node is taken:
    // two vCPUs move to node 1.
    let plan = run(&mut overloaded(), &mut State::default());
    assert_eq!(pins(&plan), [(1, 0, "2-3".into()), (1, 1, "2-3".into())]);
    assert!(
        plan.decisions[0].reason.contains("2 waiting"),
        "{}",
        plan.decisions[0].reason
    );

    // The host has one idle core: one vCPU moves there.
    let mut scene = overloaded();
    scene.host_busy = vec![0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0, 1.0];
    assert_eq!(
        pins(&run(&mut scene, &mut State::default())),
        [(1, 0, "4-5".into())]
    );
}

#[test]
fn a_tie_between_pairs_goes_to_the_quietest_link() {
    let mut scene = overloaded();
    let link = |to, rate| (NodeId(0), NodeId(to), rate);
    scene.links = vec![link(1, 5_000), link(2, 1_000), link(3, 9_000)];
    assert_eq!(pins(&run(&mut scene, &mut State::default()))[0].2, "4-5");
}

#[test]
fn vcpus_that_go_home_come_first_then_least_miss_rate() {
    let mut scene = overloaded();
    // One vCPU waits in total, so one moves at a time. VM 2 misses less than VM 1.
    scene.vm(1).vcpus_waiting(0.25).miss_rate(0.9);
    scene.vm(2).vcpus_waiting(0.25).miss_rate(0.2);
    assert_eq!(
        pins(&run(&mut scene, &mut State::default())),
        [(2, 0, "2-3".into())]
    );
    // A vCPU whose home is node 1, but which may also run on node 0, goes first, whatever its miss rate.
    let both: CpuSet = "0-3".parse().unwrap();
    scene
        .add_vm(3, 1, GIB, 0)
        .home(1)
        .affinity(&both)
        .vcpus_busy(0.5)
        .miss_rate(1.0);
    assert_eq!(
        pins(&run(&mut scene, &mut State::default())),
        [(3, 0, "2-3".into())]
    );
}

#[test]
fn throttled_time_is_not_waiting() {
    let mut scene = overloaded();
    for n in [1, 2] {
        let vm = scene.vm(n).vcpus_waiting(0.0);
        (0..2).for_each(|i| vm.vcpu(i).throttled = 0.5);
    }
    assert_eq!(pins(&run(&mut scene, &mut State::default())), []);
}

#[test]
fn a_vcpu_of_a_guest_that_follows_sits_on_one_home_node_and_moves_between_them() {
    let mut scene = Scene::four_nodes(2);
    let everywhere = scene.machine.cpu_set();
    let vm = scene.add_vm(1, 2, GIB, 0).homes("0-1").vcpus_busy(0.5);
    vm.follows(&[(&[0], &[]), (&[1], &[])]);
    vm.layout(Some(&[NodeId(1), NodeId(0)])).affinity(&everywhere);
    assert_eq!(
        pins(&run(&mut scene, &mut State::default())),
        [(1, 0, "2-3".into()), (1, 1, "0-1".into())],
        "each where the memory of its virtual node is"
    );
    // Both vCPUs wait on node 0, and the other home node has idle cores. They do not get "all of home", which would change
    // nothing.
    let node0: CpuSet = "0-1".parse().unwrap();
    scene.host_busy = vec![0.5, 0.5, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0];
    scene.vm(1).affinity(&node0).vcpus_waiting(0.5);
    let plan = run(&mut scene, &mut State::default());
    assert_eq!(pins(&plan), [(1, 0, "2-3".into())]);
    // A vCPU is away while both home nodes are idle: it returns to one of them, not to both.
    let node2: CpuSet = "4-5".parse().unwrap();
    scene.host_busy = vec![0.0; 8];
    let vm = scene.vm(1).affinity(&node2).vcpus_waiting(0.0);
    (0..2).for_each(|i| vm.vcpu(i).cpu = 4);
    let plan = run(&mut scene, &mut State::default());
    assert_eq!(pins(&plan), [(1, 0, "0-1".into()), (1, 1, "0-1".into())]);
}

#[test]
fn a_vcpu_returns_when_home_has_an_idle_core() {
    let node1: CpuSet = "2-3".parse().unwrap();
    // VM 1 lives on node 0, and its only vCPU is away on node 1. Node 0 is idle.
    let mut scene = Scene::four_nodes(2);
    scene
        .add_vm(1, 1, GIB, 1)
        .home(0)
        .affinity(&node1)
        .vcpus_busy(1.0);
    assert_eq!(
        pins(&run(&mut scene, &mut State::default())),
        [(1, 0, "0-1".into())]
    );
    // Node 0 is full and not the least loaded, so the vCPU stays away.
    scene.host_busy = vec![1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(pins(&run(&mut scene, &mut State::default())), []);
    // No core is idle anywhere, but node 0 is the least loaded.
    scene.host_busy = vec![0.5, 0.5, 0.0, 0.9, 0.9, 0.9, 0.9, 0.9];
    assert_eq!(
        pins(&run(&mut scene, &mut State::default())),
        [(1, 0, "0-1".into())]
    );
}

/// A VM with its home on node 0. Its vCPU runs on node 1, because other programs keep node 0 full.
fn away() -> Scene {
    let mut scene = Scene::four_nodes(2);
    scene
        .add_vm(1, 1, GIB, 1)
        .home(0)
        .affinity(&"2-3".parse().unwrap())
        .vcpus_busy(1.0);
    scene.host_busy = vec![1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0];
    scene
}

#[test]
fn nine_cycles_of_ten_away_re_home_eight_do_not() {
    let mut state = State::default();
    for cycle in 1..=8 {
        let plan = run(&mut away(), &mut state);
        assert_eq!(plan.decisions, [], "cycle {cycle}");
    }
    let plan = run(&mut away(), &mut state);
    let Act::SetHome { nodes } = &plan.decisions[0].action.act else {
        panic!("{:?}", plan.decisions)
    };
    let vm = plan.decisions[0].action.vm;
    assert_eq!((vm, nodes.to_string().as_str()), (vm_id(1), "1"));
    assert!(
        plan.decisions[0].reason.contains("9 of 10"),
        "{}",
        plan.decisions[0].reason
    );
    // The count starts again, so the VM is not re-homed in the next cycle.
    assert_eq!(run(&mut away(), &mut state).decisions, []);

    // A VM that is away for eight cycles and at home for two, again and again, is never re-homed.
    let mut state = State::default();
    for cycle in 0..4 * REMEMBERED {
        let mut scene = away();
        if cycle % REMEMBERED >= 8 {
            scene.vm(1).affinity(&"0-1".parse().unwrap());
        }
        let plan = run(&mut scene, &mut state);
        assert!(
            !plan
                .decisions
                .iter()
                .any(|d| matches!(d.action.act, Act::SetHome { .. })),
            "cycle {cycle}"
        );
    }
}

#[test]
fn a_home_chosen_by_the_operator_never_changes() {
    let mut state = State::default();
    for _ in 0..3 * REMEMBERED {
        let mut scene = away();
        scene.vm(1).settings().home = Some("0".parse().unwrap());
        assert_eq!(run(&mut scene, &mut state).decisions, []);
    }
}

#[test]
fn a_reserved_cpu_is_no_idle_core() {
    // The only idle CPUs are those of node 1, and all of them are reserved: no vCPU moves.
    let mut scene = overloaded();
    scene.reserved_cpus = "2-7".parse().unwrap();
    let plan = scene.with_view(|view| {
        plan(
            view,
            Settings {
                placement: &placement::Config::default(),
                balance: &Config::default(),
            },
            &History::default(),
            &mut placement::State::default(),
            &mut State::default(),
        )
    });
    assert_eq!(pins(&plan), []);
}

#[test]
fn vms_re_homed_together_get_different_nodes() {
    let mut state = State::default();
    let scene = || {
        let mut scene = Scene::four_nodes(2);
        for n in [1, 2] {
            scene
                .add_vm(n, 2, GIB, 1)
                .home(0)
                .affinity(&"2-3".parse().unwrap())
                .vcpus_busy(0.5);
        }
        scene.host_busy = vec![1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0];
        scene
    };
    let mut homes = Vec::new();
    for _ in 0..9 {
        let plan = run(&mut scene(), &mut state);
        homes.extend(plan.decisions.iter().filter_map(|d| match &d.action.act {
            Act::SetHome { nodes, .. } => Some(nodes.to_string()),
            _ => None,
        }));
    }
    assert_eq!(homes.len(), 2);
    assert_ne!(homes[0], homes[1]);
}

#[test]
fn a_new_home_lies_within_what_the_operator_allows() {
    let mut state = State::default();
    for _ in 0..9 {
        let mut scene = away();
        scene.vm(1).allowed("0-3");
        let plan = run(&mut scene, &mut state);
        for decision in &plan.decisions {
            if let Act::SetHome { nodes, .. } = &decision.action.act {
                assert_eq!(nodes.to_string(), "1");
            }
        }
    }
}

#[test]
fn a_node_that_cannot_be_helped_is_no_source() {
    // Node 0 has most waiting vCPUs, but only of VMs that the operator pinned by hand, so node 1 is the one to help.
    let mut scene = overloaded();
    for n in [1, 2] {
        scene
            .vm(n)
            .vcpus_waiting(0.9)
            .hands_off(homenode_host::HandsOff::PinnedByHand);
    }
    let node1: CpuSet = "2-3".parse().unwrap();
    scene
        .add_vm(3, 4, GIB, 1)
        .home(1)
        .affinity(&node1)
        .vcpus_busy(0.5)
        .vcpus_waiting(0.25);
    assert_eq!(
        pins(&run(&mut scene, &mut State::default())),
        [(3, 0, "4-5".into())]
    );
}

/// Two VMs of one vCPU each on node 0. They read 8 GB/s each, which is all of the node's bandwidth.
fn crowded() -> Scene {
    let mut scene = Scene::four_nodes(2);
    for n in [1, 2] {
        scene
            .add_vm(n, 1, Bytes::from_gib(n as u64), 0)
            .home(0)
            .vcpus_busy(1.0)
            .misses_per_s(8_000_000_000 / 64);
    }
    scene.traffic.insert(NodeId(0), 16_000_000_000);
    scene
}

/// Returns the homes that are assigned in ten cycles.
fn homes_given(scene: &mut Scene) -> Vec<(u128, String)> {
    homes_given_by(&Config::default(), scene)
}

fn homes_given_by(config: &Config, scene: &mut Scene) -> Vec<(u128, String)> {
    let mut state = State::default();
    let plans = (0..REMEMBERED).map(|_| run_by(config, scene, &mut state));
    let homes = |plan: Plan| {
        plan.decisions.into_iter().filter_map(|d| match d.action.act {
            Act::SetHome { nodes } => Some((d.action.vm.0, nodes.to_string())),
            _ => None,
        })
    };
    plans.flat_map(homes).collect()
}

#[test]
fn of_two_vms_that_fill_a_node_one_leaves_for_an_empty_one() {
    // VM 1 has less memory to move. Nodes 1 to 3 are empty and alike, so it gets the first.
    assert_eq!(homes_given(&mut crowded()), [(1, "1".into())]);
    // Node 1 carries 5 GB/s, 3 less than the traffic of others that VM 1 meets at home; a quarter would be 4.
    let mut scene = crowded();
    scene.traffic.insert(NodeId(1), 5_000_000_000);
    assert_eq!(homes_given(&mut scene), [(1, "2".into())]);
}

#[test]
fn nobody_leaves_a_full_node_for_nothing() {
    let mut alone = crowded();
    alone.vm(1).misses_per_s(16_000_000_000 / 64);
    alone.vm(2).misses_per_s(0);
    assert_eq!(homes_given(&mut alone), [], "elsewhere it would have no more");
    let mut busy = crowded();
    for node in 1..4 {
        busy.traffic.insert(NodeId(node), 8_000_000_000);
    }
    assert_eq!(homes_given(&mut busy), [], "nowhere is less traffic");
    let mut below = crowded();
    below.traffic.insert(NodeId(0), 12_000_000_000);
    assert_eq!(homes_given(&mut below), [], "three quarters are not full");
}

#[test]
fn when_a_home_changes_is_the_operators_to_say() {
    let with = |set: fn(&mut Config)| {
        let mut config = Config::default();
        set(&mut config);
        config
    };
    let given = |set| homes_given_by(&with(set), &mut crowded());
    assert_eq!(
        given(|config| config.full = 1.0),
        [(1, "1".into())],
        "it is full to the brim"
    );
    assert_eq!(given(|config| config.gain_min = 0.6), [], "it uses half");
    assert_eq!(
        given(|config| (config.cycles, config.away_cycles_max) = (12, 11)),
        [],
        "not in ten cycles"
    );
    let mut below = crowded();
    below.traffic.insert(NodeId(0), 12_000_000_000);
    assert_eq!(
        homes_given_by(&with(|config| config.full = 0.7), &mut below),
        [(1, "1".into())]
    );
    // A VM that is away in all cycles is re-homed in the cycle after `most` of them.
    for (most, re_homed_in) in [(8, 9), (3, 4), (15, 16)] {
        let config = with(|config| config.cycles = 16);
        let config = Config {
            away_cycles_max: most,
            ..config
        };
        let mut state = State::default();
        let first = (1..20).find(|_| {
            let plan = run_by(&config, &mut away(), &mut state);
            let is_home = |act: &Act| matches!(act, Act::SetHome { .. });
            plan.decisions.iter().any(|d| is_home(&d.action.act))
        });
        assert_eq!(first, Some(re_homed_in), "{most}");
    }
}

#[test]
fn who_waits_noticeably_is_the_operators_to_say() {
    let config = Config {
        active_min: 1.0,
        ..Config::default()
    };
    let mut scene = overloaded();
    // Each vCPU runs half of the time, so four vCPUs have two waiting on average.
    assert_ne!(pins(&run_by(&config, &mut scene, &mut State::default())), []);
    for n in [1, 2] {
        scene.vm(n).vcpus_busy(0.4).vcpus_waiting(0.5);
    }
    assert_eq!(
        pins(&run_by(&config, &mut scene, &mut State::default())),
        [],
        "none was busy or waited all the time"
    );
}
