use homenode_host::{Act, Immovable};
use homenode_units::{Bytes, NodeId, NodeSet};
use proptest::prelude::*;

use crate::demand::{self, History};
use crate::placement::{Config, State, plan};
use crate::testing::{Scene, vm_id};

const GIB: Bytes = Bytes::from_gib(1);

fn set(list: &str) -> NodeSet {
    list.parse().unwrap()
}

/// Runs a cycle and puts its homes into force; returns these homes and the notices.
fn step(scene: &mut Scene, state: &mut State) -> (Vec<(u128, NodeSet)>, Vec<String>) {
    let plan = scene.with_view(|view| {
        let mut history = History::default();
        history.observe(view, &demand::Config::default());
        plan(view, &Config::default(), &history, state)
    });
    let given = plan
        .decisions
        .iter()
        .filter_map(|decision| match &decision.action.act {
            Act::SetHome { nodes } => Some((decision.action.vm.0, nodes.clone())),
            _ => None,
        });
    let given: Vec<(u128, NodeSet)> = given.collect();
    for (vm, nodes) in &given {
        scene.vm(*vm).homes(&nodes.to_string());
    }
    let said = plan.findings.into_iter().map(|finding| finding.message);
    (given, said.collect())
}

#[test]
fn vms_with_anti_affinity_share_no_node() {
    let mut scene = Scene::four_nodes(8);
    for n in 1..=5 {
        scene.add_vm(n, 2, GIB, 0).settings().anti_affinity = Some("db".into());
    }
    scene.add_vm(6, 2, GIB, 0).settings().anti_affinity = Some("web".into());
    let mut state = State::default();
    let (given, said) = step(&mut scene, &mut state);
    let mut nodes: Vec<String> = given[..4].iter().map(|(_, nodes)| nodes.to_string()).collect();
    nodes.sort();
    assert_eq!(nodes, ["0", "1", "2", "3"], "one each");
    assert_eq!(
        given.iter().map(|(vm, _)| *vm).collect::<Vec<_>>(),
        [1, 2, 3, 4, 6]
    );
    assert!(said.len() == 1 && said[0].contains("`anti_affinity`"), "{said:?}");
    // There is room once VM 1 has no anti-affinity.
    scene.vm(1).settings().anti_affinity = None;
    assert_eq!(
        step(&mut scene, &mut state)
            .0
            .iter()
            .map(|(vm, _)| *vm)
            .collect::<Vec<_>>(),
        [5]
    );
    assert_eq!(step(&mut scene, &mut state).0, []);
}

#[test]
fn a_vm_gets_a_home_only_on_nodes_where_its_bounds_leave_it_a_cpu() {
    let mut scene = Scene::four_nodes(2);
    scene.machine.isolated = "0-1,3,5".parse().unwrap();
    // Node 0 is the freest, but all its CPUs are isolated, and only the second VM's own mask names them.
    scene.add_vm(1, 1, GIB, 0);
    scene.add_vm(2, 1, GIB, 0).settings().cpus_allowed = Some("0-1".parse().unwrap());
    scene.add_vm(3, 1, GIB, 0).settings().cpus_allowed = Some("4,6".parse().unwrap());
    scene.add_vm(4, 1, GIB, 0).settings().cpus_allowed = Some("".parse().unwrap());
    let (given, _) = step(&mut scene, &mut State::default());
    let home = |vm: u128| {
        given
            .iter()
            .find(|(id, _)| *id == vm)
            .map(|(_, nodes)| nodes.to_string())
    };
    assert!(home(1).is_some_and(|home| home != "0"), "{given:?}");
    assert!(home(2).is_none_or(|home| home == "0"), "{given:?}");
    assert!(
        home(3).is_some_and(|home| ["2", "3"].contains(&home.as_str())),
        "{given:?}"
    );
    assert_eq!(home(4), None, "nowhere, and not anywhere");
}

#[test]
fn of_two_that_get_anti_affinity_the_later_one_goes() {
    let mut scene = Scene::four_nodes(8);
    for n in [1, 2] {
        scene.add_vm(n, 2, GIB, 3).home(3).settings().anti_affinity = Some("db".into());
    }
    let mut state = State::default();
    let (given, _) = step(&mut scene, &mut state);
    assert!(
        matches!(&given[..], [(2, nodes)] if *nodes != set("3")),
        "{given:?}"
    );
    assert_eq!(step(&mut scene, &mut state).0, []);
}

#[test]
fn vms_with_affinity_have_one_home_with_room_for_all() {
    let mut scene = Scene::four_nodes(8);
    // Node 0 has room for only one of the VMs.
    scene.add_vm(9, 5, GIB, 0).vcpus_busy(1.0).home(0);
    for n in 1..=3 {
        scene.add_vm(n, 2, GIB, 0).settings().affinity = Some("app".into());
    }
    let mut state = State::default();
    let (given, said) = step(&mut scene, &mut state);
    assert_eq!(said, [] as [String; 0]);
    assert_eq!(given.len(), 3);
    assert!(
        given
            .iter()
            .all(|(_, nodes)| *nodes == given[0].1 && *nodes != set("0")),
        "{given:?}"
    );
    // A VM that arrives later joins the others; a VM that drops the setting may stay.
    scene.add_vm(4, 2, GIB, 0).settings().affinity = Some("app".into());
    assert_eq!(step(&mut scene, &mut state).0, [(4, given[0].1.clone())]);
    // If the first VM moves, the others follow.
    scene.drained = given[0].1.clone();
    let (first, _) = step(&mut scene, &mut state);
    let to = first[0].1.clone();
    assert_eq!(first[0].0, 1);
    step(&mut scene, &mut state);
    step(&mut scene, &mut state);
    scene.with_view(|view| {
        let homes = view
            .vms
            .iter()
            .filter(|vm| vm.sample.id != vm_id(9))
            .map(|vm| vm.home.unwrap().clone());
        assert!(
            homes.clone().all(|home| home == to),
            "{:?}",
            homes.collect::<Vec<_>>()
        );
    });
}

#[test]
fn a_vm_leaves_a_node_that_is_drained_and_no_other_comes() {
    let mut scene = Scene::four_nodes(4);
    for n in 1..=4 {
        scene.add_vm(n, 2, GIB, n as u16 - 1).home(n as u16 - 1);
    }
    let mut state = State::default();
    assert_eq!(step(&mut scene, &mut state).0, []);
    scene.drained = set("1-2");
    let (given, said) = step(&mut scene, &mut state);
    assert_eq!(said, [] as [String; 0]);
    assert_eq!(given.iter().map(|(vm, _)| *vm).collect::<Vec<_>>(), [2, 3]);
    for n in 10..14 {
        scene.add_vm(n, 2, GIB, 1);
    }
    let (more, _) = step(&mut scene, &mut state);
    let elsewhere = more.iter().all(|(_, nodes)| nodes.is_subset(&set("0,3")));
    assert!(more.len() == 4 && elsewhere, "{more:?}");
}

#[test]
fn where_a_node_is_drained_vms_share_cpus_and_memory_needs_room() {
    let mut scene = Scene::nodes(2, 4);
    scene.add_vm(1, 4, GIB, 0).home(0);
    scene.add_vm(2, 4, Bytes::from_gib(12), 1).home(1);
    let mut state = State::default();
    assert_eq!(step(&mut scene, &mut state).0, []);
    scene.drained = set("0");
    assert_eq!(step(&mut scene, &mut state).0, [(1, set("1"))]);
    scene.drained = set("1");
    let (given, said) = step(&mut scene, &mut state);
    assert_eq!(given.len(), 2, "{said:?}");
    // 16 GiB cannot hold two VMs of 12.
    scene.add_vm(3, 1, Bytes::from_gib(12), 1).home(1);
    let (given, said) = step(&mut scene, &mut state);
    assert!(
        given.is_empty() && said.len() == 1 && said[0].contains("short of memory"),
        "{given:?} {said:?}"
    );
}

#[test]
fn whose_memory_cannot_move_stays_and_so_does_whose_home_the_operator_chose() {
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(1, 2, GIB, 1).home(1).immovable(Immovable::Paused);
    scene.add_vm(2, 2, GIB, 1).home(1).settings().home = Some(set("1"));
    scene.add_vm(3, 2, GIB, 1).home(1);
    scene.drained = set("1");
    let (given, _) = step(&mut scene, &mut State::default());
    assert_eq!(given.iter().map(|(vm, _)| *vm).collect::<Vec<_>>(), [3]);
}

#[test]
fn a_vm_whose_memory_is_bound_has_all_nodes_of_the_binding_for_its_home_or_none() {
    let mut scene = Scene::four_nodes(4);
    // VM 1 is bound to nodes 0 and 1, with most memory on node 0; VM 2 to node 3; VM 3 to a node that is drained, and
    // another; VM 4 to node 3, of which its operator allows it no CPU.
    scene
        .add_vm(1, 2, GIB, 0)
        .vcpus_busy(0.2)
        .pages(0, 240_000)
        .pages(1, 20_000)
        .bound_to("0-1");
    scene.add_vm(2, 2, GIB, 0).pages(3, 200_000).bound_to("3");
    scene.add_vm(3, 2, GIB, 0).pages(2, 100_000).bound_to("0,2");
    scene
        .add_vm(4, 1, GIB, 0)
        .pages(3, 100_000)
        .bound_to("3")
        .allowed("0-3");
    scene.drained = set("2");
    let mut state = State::default();
    let (given, said) = step(&mut scene, &mut state);
    assert_eq!(given, [(1, set("0-1")), (2, set("3"))]);
    assert_eq!(said.len(), 2, "{said:?}");
    assert!(said.iter().all(|said| said.contains("bound to node")), "{said:?}");
    // A VM that is bound later leaves a home that differs, as after a DIMM was plugged in.
    scene.drained = set("");
    scene.vms.truncate(2);
    scene.vm(1).bound_to("1");
    assert_eq!(step(&mut scene, &mut state).0, [(1, set("1"))]);
    assert_eq!(step(&mut scene, &mut state).0, []);
    // A home that the operator chose has priority.
    scene.vm(1).settings().home = Some(set("2"));
    assert_eq!(step(&mut scene, &mut state).0, []);
}

#[test]
fn a_vm_whose_memory_is_bound_takes_no_home_short_of_cpus_and_gives_back_one_that_is_remote() {
    let mut scene = Scene::four_nodes(4);
    scene.add_vm(9, 4, GIB, 0).vcpus_busy(1.0).home(0);
    scene.add_vm(1, 4, GIB, 1).vcpus_busy(1.0).home(1).bound_to("0");
    let (given, said) = step(&mut scene, &mut State::default());
    assert_eq!(given, []);
    assert!(
        matches!(&said[..], [one] if one.contains("short of CPUs")),
        "{said:?}"
    );
    let plan = scene.with_view(|view| {
        let mut history = History::default();
        history.observe(view, &demand::Config::default());
        plan(view, &Config::default(), &history, &mut State::default())
    });
    let acts: Vec<&Act> = plan
        .decisions
        .iter()
        .map(|decision| &decision.action.act)
        .collect();
    assert_eq!(
        acts,
        [&Act::Lift {
            lever: homenode_host::Lever::Home
        }]
    );
}

#[test]
fn mates_who_need_two_nodes_together_all_have_both() {
    let mut scene = Scene::four_nodes(4);
    for n in 1..=5 {
        scene.add_vm(n, 1, GIB, 0).settings().affinity = Some("app".into());
    }
    let mut state = State::default();
    for drained in ["", "0"] {
        scene.drained = drained.parse().unwrap_or_default();
        for _ in 0..7 {
            step(&mut scene, &mut state);
        }
        let homes: Vec<NodeSet> =
            scene.with_view(|view| view.vms.iter().filter_map(|vm| vm.home.cloned()).collect());
        assert_eq!(homes, vec![homes[0].clone(); 5]);
        assert_eq!(
            (homes[0].len(), homes[0].contains(NodeId(0))),
            (2, drained.is_empty())
        );
    }
}

#[test]
fn a_mate_that_cannot_move_holds_no_other() {
    let mut scene = Scene::four_nodes(8);
    for n in 1..=3 {
        scene.add_vm(n, 2, GIB, 1).home(1).settings().affinity = Some("app".into());
    }
    scene.vm(1).immovable(Immovable::Paused);
    scene.drained = set("1");
    let mut state = State::default();
    let mut homes = Vec::new();
    for _ in 0..3 {
        homes.extend(step(&mut scene, &mut state).0);
    }
    assert!(
        matches!(&homes[..], [(2, one), (3, other)] if one == other && *one != set("1")),
        "{homes:?}"
    );
}

#[test]
fn where_cpus_go_offline_vms_use_the_others_and_all_again_later() {
    let mut scene = Scene::four_nodes(4);
    scene
        .add_vm(1, 2, GIB, 1)
        .home(1)
        .affinity(&"4-7".parse().unwrap());
    scene
        .add_vm(2, 2, GIB, 2)
        .home(2)
        .affinity(&"8-11".parse().unwrap());
    let mut state = State::default();
    let mut pins = |scene: &mut Scene, offline: &str| {
        scene.offline = offline.parse().unwrap();
        let plan = scene.with_view(|view| {
            let mut history = History::default();
            history.observe(view, &demand::Config::default());
            plan(view, &Config::default(), &history, &mut state)
        });
        let pins = plan
            .decisions
            .into_iter()
            .filter_map(|decision| match decision.action.act {
                Act::PinVcpus { cpus, .. } => Some((decision.action.vm.0, cpus.to_string())),
                _ => None,
            });
        pins.collect::<Vec<_>>()
    };
    assert_eq!(pins(&mut scene, ""), []);
    assert_eq!(pins(&mut scene, "5"), [(1, "4,6-7".to_owned())]);
    scene.vm(1).affinity(&"4,6-7".parse().unwrap());
    assert_eq!(pins(&mut scene, "5"), []);
    assert_eq!(pins(&mut scene, ""), [(1, "4-7".to_owned())]);
    // A node without CPUs cannot be a home.
    let gone = pins(&mut scene, "4-7");
    assert!(
        matches!(&gone[..], [(1, cpus)] if !cpus.starts_with('4')),
        "{gone:?}"
    );
}

#[test]
fn a_node_without_memory_or_cpus_is_no_home() {
    let mut scene = Scene::four_nodes(4);
    scene.reserved_cpus = "0-3".parse().unwrap();
    scene.machine.nodes.get_mut(NodeId(1)).unwrap().memory_bytes = Bytes::ZERO;
    for n in 1..=4 {
        scene.add_vm(n, 2, GIB, 0);
    }
    let (given, _) = step(&mut scene, &mut State::default());
    assert!(
        given.len() == 4 && given.iter().all(|(_, nodes)| nodes.is_subset(&set("2-3"))),
        "{given:?}"
    );
}

proptest! {
    /// Under any settings, VMs come to rest, and no VM has a home that it may not have.
    #[test]
    fn homes_come_to_rest_and_keep_to_what_was_said(
        words in prop::collection::vec((0..4u8, 0..2u8), 1..7),
        drained in 0..4u16,
    ) {
        let mut scene = Scene::four_nodes(4);
        for (n, (kind, word)) in words.iter().enumerate() {
            let settings = scene.add_vm(n as u128 + 1, 1, GIB, 0).settings();
            let word = Some(format!("w{word}"));
            match kind {
                0 => settings.anti_affinity = word,
                1 => settings.affinity = word,
                _ => {}
            }
        }
        let mut state = State::default();
        for _ in 0..3 {
            step(&mut scene, &mut state);
        }
        scene.drained = NodeSet::one(NodeId(drained));
        let mut said = Vec::new();
        for _ in 0..words.len() + 2 {
            said.extend(step(&mut scene, &mut state).1);
        }
        prop_assert_eq!(step(&mut scene, &mut state).0, []);
        let (homes, drained) = scene.with_view(|view| {
            let homes: Vec<_> = view.vms.iter().map(|vm| (vm.sample.settings.clone(), vm.home.cloned())).collect();
            (homes, view.drained.clone())
        });
        for (at, (settings, home)) in homes.iter().enumerate() {
            let Some(home) = home else { continue };
            let is_said = said.iter().any(|said| said.contains(&format!("VM vm{} ", at + 1)));
            prop_assert!(home.intersection(&drained).is_empty() || is_said, "{:?}", said);
            for (other, theirs) in homes[at + 1..].iter().filter_map(|(s, home)| Some((s, home.as_ref()?))) {
                if settings.anti_affinity.is_some() && settings.anti_affinity == other.anti_affinity {
                    prop_assert!(home.intersection(theirs).is_empty());
                }
                if settings.affinity.is_some() && settings.affinity == other.affinity {
                    prop_assert_eq!(home, theirs);
                }
            }
        }
    }
}
