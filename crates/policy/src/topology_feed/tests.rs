use super::*;
use crate::testing::{Scene, SeenNode, vm_id};
use homenode_host::Published;
use homenode_units::{Bytes, CpuSet, NodeSet};
use proptest::prelude::*;

/// A VM with two virtual nodes of one vCPU each, at home on nodes 0 and 1 of a host of four nodes with four CPUs each.
fn scene() -> Scene {
    let mut scene = Scene::four_nodes(4);
    let vm = scene.add_vm(1, 2, Bytes::from_gib(2), 0);
    vm.homes("0-1")
        .follows(&[(&[0], &[(0, 1000)]), (&[1], &[(1, 1000)])]);
    on(&mut scene, &[0, 1]);
    scene
}

/// Confines each vCPU to one node.
fn on(scene: &mut Scene, nodes: &[u16]) {
    let machine = scene.machine.clone();
    for (at, node) in nodes.iter().enumerate() {
        let cpus = machine.nodes[NodeId(*node)].cpus.clone();
        let vcpu = scene.vm(1).vcpu(at);
        vcpu.cpu = cpus.first().expect("a node has CPUs").0;
        vcpu.affinity = cpus;
    }
}

fn update(layouts: &mut Layouts, scene: &mut Scene) {
    scene.with_view(|view| {
        let homes = view
            .vms
            .iter()
            .filter_map(|vm| Some((vm.sample.id, vm.home?.clone())));
        layouts.update(view.sample, &homes.collect());
    });
}

fn topology(vcpus: &[u16], memory: &[u16]) -> GuestTopology {
    let nodes = |nodes: &[u16]| nodes.iter().map(|node| Some(NodeId(*node))).collect();
    GuestTopology {
        vcpus: nodes(vcpus),
        memory: nodes(memory),
    }
}

/// A scene whose guests get every published version, in cycles of a second.
struct Run {
    scene: Scene,
    state: State,
    layouts: Layouts,
    versions: Vec<(u64, GuestTopology)>,
}

impl Run {
    fn new(scene: Scene) -> Run {
        Run {
            scene,
            state: State::default(),
            layouts: Layouts::default(),
            versions: Vec::new(),
        }
    }

    /// Runs one cycle; returns the plan.
    fn cycle(&mut self) -> Plan {
        self.scene.at += Ns::from_secs(1);
        update(&mut self.layouts, &mut self.scene);
        let layout = self.layouts.of(vm_id(1));
        self.scene.vm(1).layout(layout);
        let state = &mut self.state;
        let (plan, at) = self
            .scene
            .with_view(|view| (plan(view, &Config::default(), state), view.at));
        for decision in &plan.decisions {
            let Act::PublishTopology { topology, .. } = &decision.action.act else {
                panic!("{decision:?}");
            };
            let sequence = 2 * self.versions.len() as u64;
            self.versions.push((at.0 / 1_000_000_000, topology.clone()));
            let topology = topology.clone();
            self.scene.vm(1).published(Some(Published {
                topology,
                at,
                sequence,
            }));
        }
        plan
    }

    fn cycles(&mut self, count: usize) {
        (0..count).for_each(|_| drop(self.cycle()));
    }

    fn published(&self) -> &GuestTopology {
        &self.versions.last().expect("something was told").1
    }
}

#[test]
fn what_is_told_is_what_is_so_once_it_has_settled() {
    let mut run = Run::new(scene());
    run.cycle();
    assert_eq!(
        *run.published(),
        topology(&[0, 1], &[0, 1]),
        "at once, as nothing was told before"
    );
    run.cycles(10);
    assert_eq!(run.versions.len(), 1, "nothing is new");
    on(&mut run.scene, &[2, 1]);
    run.cycles(2);
    assert_eq!(run.versions.len(), 1, "it is so for a second only");
    let plan = run.cycle();
    assert_eq!(*run.published(), topology(&[2, 1], &[0, 1]));
    assert_eq!(plan.decisions[0].reason, "vCPU 0 is on node 2, not node 0");
    // Half of the memory's pages have moved, so its published node stays.
    let vm = run.scene.vm(1);
    vm.follows(&[(&[0], &[(0, 500), (3, 500)]), (&[1], &[(1, 1000)])]);
    run.cycles(10);
    assert_eq!(run.versions.len(), 2);
    let vm = run.scene.vm(1);
    vm.follows(&[(&[0], &[(0, 499), (3, 501)]), (&[1], &[(1, 1000)])]);
    run.cycles(10);
    assert_eq!(*run.published(), topology(&[2, 1], &[3, 1]));
    assert_eq!(run.versions.len(), 3);
}

#[test]
fn a_fact_that_flickers_is_not_told_and_keeps_no_other_back() {
    let mut run = Run::new(scene());
    run.cycle();
    for cycle in 0..30 {
        on(&mut run.scene, &[cycle % 2, if cycle < 10 { 1 } else { 3 }]);
        run.cycle();
    }
    assert_eq!(run.versions.len(), 2, "{:?}", run.versions);
    assert_eq!(*run.published(), topology(&[0, 3], &[0, 1]));
}

#[test]
fn at_most_one_version_in_an_interval() {
    let mut run = Run::new(scene());
    for cycle in 0..60_u16 {
        // Facts hold for long enough to settle, but change more often than the interval allows.
        on(&mut run.scene, &[cycle / 3 % 4, (cycle / 4 + 1) % 4]);
        run.cycle();
    }
    assert!(run.versions.len() > 5, "{:?}", run.versions);
    for pair in run.versions.windows(2) {
        assert!(pair[1].0 - pair[0].0 >= 5, "{pair:?}");
    }
}

#[test]
fn a_vcpu_that_may_run_anywhere_is_where_it_ran() {
    let mut scene = scene();
    let all: CpuSet = scene.machine.cpu_set();
    scene.vm(1).affinity(&all).vcpu(1).cpu = 9;
    let mut run = Run::new(scene);
    run.cycle();
    assert_eq!(*run.published(), topology(&[0, 2], &[0, 1]));
}

#[test]
fn a_vm_whose_pages_follow_their_users_does_not_follow_and_that_is_said_once() {
    let mut scene = scene();
    scene
        .vm(1)
        .chosen("round-4k+carrefour".parse().expect("a policy"));
    let mut run = Run::new(scene);
    let first = run.cycle();
    assert!(first.decisions.is_empty());
    assert!(
        first.findings[0].message.contains("choose first-touch"),
        "{:?}",
        first.findings
    );
    assert!(run.cycle().findings.is_empty());
    assert_eq!(run.layouts.of(vm_id(1)), None);
}

#[test]
fn virtual_nodes_whose_memory_is_bound_are_laid_out_where_it_lies() {
    let mut scene = Scene::four_nodes(4);
    // If virtual nodes were dealt out evenly, one of the three on node 0 would go to node 1.
    scene
        .add_vm(1, 4, Bytes::from_gib(4), 0)
        .homes("0-1")
        .bound_to("0-1")
        .follows(&[
            (&[0], &[(0, 1000)]),
            (&[1], &[(1, 1000)]),
            (&[2], &[(0, 900), (1, 10)]),
            (&[3], &[(0, 1000)]),
        ]);
    let mut layouts = Layouts::default();
    update(&mut layouts, &mut scene);
    assert_eq!(layouts.of(vm_id(1)), Some(&[0, 1, 0, 0].map(NodeId)[..]));
}

#[test]
fn a_layout_holds_until_the_home_changes() {
    let mut run = Run::new(scene());
    run.cycle();
    let nodes = |run: &Run| run.layouts.of(vm_id(1)).map(<[NodeId]>::to_vec);
    assert_eq!(nodes(&run), Some(vec![NodeId(0), NodeId(1)]));
    // According to the present pages, the layout would be the other way round.
    run.scene
        .vm(1)
        .follows(&[(&[0], &[(1, 1000)]), (&[1], &[(0, 1000)])]);
    run.cycle();
    assert_eq!(nodes(&run), Some(vec![NodeId(0), NodeId(1)]));
    run.scene.vm(1).homes("1-2");
    run.cycle();
    assert_eq!(nodes(&run), Some(vec![NodeId(1), NodeId(2)]));
}

proptest! {
    #[test]
    fn virtual_nodes_are_dealt_out_evenly_and_stay_where_they_lie(
        home in prop::collection::btree_set(0_u16..4, 1..=4),
        pages in prop::collection::vec(prop::collection::vec(0_u64..1000, 4), 1..9),
    ) {
        let home_set: NodeSet = home.iter().map(|node| NodeId(*node)).collect();
        let lying: Vec<Vec<(u16, u64)>> = pages
            .iter()
            .map(|on| (0..4).zip(on.iter().copied()).collect())
            .collect();
        let virtual_nodes: Vec<SeenNode<'_>> = lying.iter().map(|on| (&[][..], on.as_slice())).collect();
        let mut scene = Scene::four_nodes(4);
        let list: Vec<String> = home.iter().map(u16::to_string).collect();
        scene.add_vm(1, 1, Bytes::from_gib(1), 0).homes(&list.join(",")).follows(&virtual_nodes);
        let mut layouts = Layouts::default();
        update(&mut layouts, &mut scene);
        let nodes = layouts.of(vm_id(1)).expect("it follows and has a home").to_vec();
        let on = |node: NodeId| nodes.iter().filter(|at| **at == node).count();
        let counts: Vec<usize> = home_set.iter().map(on).collect();
        prop_assert_eq!(counts.iter().sum::<usize>(), pages.len());
        prop_assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{:?}", nodes);
        // If memory is where its layout has it, nothing has to move.
        let settled: Vec<Vec<(u16, u64)>> = nodes.iter().map(|node| vec![(node.0, 1)]).collect();
        let settled: Vec<SeenNode<'_>> = settled.iter().map(|on| (&[][..], on.as_slice())).collect();
        scene.vm(1).follows(&settled);
        let mut again = Layouts::default();
        update(&mut again, &mut scene);
        prop_assert_eq!(again.of(vm_id(1)), Some(nodes.as_slice()));
    }
}
