use homenode_units::{Bytes, NodeId};
use proptest::prelude::*;

use super::nodes::advise;
use super::*;
use crate::testing::{Scene, vm_id};

/// Number of pages in a MiB.
const MIB: u64 = 256;

/// Parses a host as the real numad saw it, its request and its answer.
fn recorded(line: &str) -> (Vec<Node>, Request, NodeSet) {
    let (asked, host) = line.split_once(" : ").expect("a host");
    let (request, answer) = asked.split_once(" = ").expect("an answer");
    let numbers = |text: &str| -> Vec<i64> {
        let words = text.split_whitespace();
        words.map(|word| word.parse().expect("a number")).collect()
    };
    let nodes = host
        .split(" ; ")
        .zip(0..)
        .map(|(node, id)| match numbers(node)[..] {
            [memory_mib, free_mib, cpus, cpus_free, ref distances @ ..] => Node {
                id: NodeId(id),
                memory_mib,
                free_mib,
                cpus,
                cpus_free,
                distances: distances.to_vec(),
            },
            _ => panic!("{node}"),
        });
    let request = numbers(request);
    let request = Request {
        cpus: request[0],
        memory_mib: request[1],
    };
    (nodes.collect(), request, answer.parse().expect("a node list"))
}

#[test]
fn advice_is_that_of_the_real_numad() {
    let lines = include_str!("advice.txt")
        .lines()
        .filter(|line| !line.starts_with('#'));
    let mut count = 0;
    for line in lines {
        let (nodes, request, answer) = recorded(line);
        assert_eq!(advise(&nodes, request), answer, "{line}");
        count += 1;
    }
    assert_eq!(count, 300);
}

/// Nodes of 4 CPUs and 8 GiB, with this much CPU and memory free.
fn host(free: &[(i64, i64)]) -> Vec<Node> {
    let node = |(at, &(cpus_free, free_mib)): (usize, &(i64, i64))| Node {
        id: NodeId(at as u16),
        memory_mib: 8192,
        free_mib,
        cpus: 400,
        cpus_free,
        distances: (0..free.len()).map(|to| if to == at { 10 } else { 20 }).collect(),
    };
    free.iter().enumerate().map(node).collect()
}

#[test]
fn an_impossible_request_gets_all_nodes() {
    let nodes = host(&[(400, 8000), (400, 8000)]);
    let all: NodeSet = "0-1".parse().expect("a node list");
    let too_large = [(100_000, 1024), (200, 999_999), (100_000, 999_999)];
    for (cpus, memory_mib) in too_large {
        assert_eq!(advise(&nodes, Request { cpus, memory_mib }), all);
    }
    // A request for nothing gets the first node.
    assert_eq!(
        advise(
            &nodes,
            Request {
                cpus: 0,
                memory_mib: 0
            }
        ),
        NodeSet::one(NodeId(0))
    );
}

#[test]
fn advice_is_forgotten() {
    let nodes = host(&[(400, 8000), (400, 7900)]);
    let request = Request {
        cpus: 300,
        memory_mib: 6000,
    };
    let answers: Vec<NodeSet> = (0..6).map(|_| advise(&nodes, request)).collect();
    assert_eq!(answers, vec![NodeSet::one(NodeId(0)); 6]);
}

/// A scene that is looked at every second. It records when numad acted.
struct Watched {
    scene: Scene,
    state: State,
    second: u64,
}

impl Watched {
    fn new(scene: Scene) -> Watched {
        Watched {
            scene,
            state: State::default(),
            second: 0,
        }
    }

    /// Returns the decisions of the next `count` seconds, each with its second.
    fn seconds(&mut self, count: u64) -> Vec<(u64, Plan)> {
        let mut plans = Vec::new();
        for _ in 0..count {
            self.second += 1;
            let now = self.second;
            let state = &mut self.state;
            let plan = self.scene.with_view_after(now, |view| plan(view, state));
            if !plan.decisions.is_empty() {
                plans.push((now, plan));
            }
        }
        plans
    }

    /// Returns which VMs were bound, when, and to which nodes.
    fn bound(&mut self, count: u64) -> Vec<(u64, VmId, String)> {
        let of = |(at, plan): (u64, Plan)| {
            let homes = plan
                .decisions
                .into_iter()
                .filter_map(|decision| match decision.action.act {
                    Act::SetHome { nodes } => Some((decision.action.vm, nodes.to_string())),
                    _ => None,
                });
            homes.map(move |(vm, nodes)| (at, vm, nodes)).collect::<Vec<_>>()
        };
        self.seconds(count).into_iter().flat_map(of).collect()
    }
}

/// Adds a VM with this much memory on each of its nodes. All of its vCPUs run on node 0's CPUs and are equally busy.
fn add(scene: &mut Scene, n: u128, vcpus: u32, busy: f64, node: u16, mib: &[(u16, u64)]) {
    let vm = scene.add_vm(n, vcpus, Bytes::from_gib(4), node);
    vm.vcpus_busy(busy);
    for (node, mib) in mib {
        vm.pages(*node, mib * MIB);
    }
}

#[test]
fn small_or_idle_vms_are_not_looked_at() {
    let mut scene = Scene::four_nodes(4);
    add(&mut scene, 1, 2, 1.0, 0, &[(1, 300)]);
    add(&mut scene, 2, 2, 0.25, 0, &[(1, 3000)]);
    assert_eq!(Watched::new(scene).bound(100), []);
}

#[test]
fn the_largest_cpu_times_memory_moves_first_and_one_at_a_time() {
    let mut scene = Scene::four_nodes(4);
    add(&mut scene, 1, 1, 1.0, 0, &[(0, 1000), (1, 1000)]);
    add(&mut scene, 2, 2, 1.0, 1, &[(1, 1000), (2, 1000)]);
    add(&mut scene, 3, 1, 0.9, 2, &[(2, 1000), (3, 1000)]);
    let order: Vec<(u64, VmId)> = Watched::new(scene)
        .bound(20)
        .into_iter()
        .map(|(at, vm, _)| (at, vm))
        .collect();
    // numad starts in second 1, and its first look that acts is 2 s later. It looks again when the move is over, here at
    // once, and then 5 s later.
    assert_eq!(order, [(3, vm_id(2)), (9, vm_id(1)), (15, vm_id(3))]);
}

#[test]
fn memory_moves_whole_and_at_once() {
    let mut scene = Scene::four_nodes(4);
    add(&mut scene, 1, 2, 1.0, 0, &[(0, 1500), (1, 200), (2, 900)]);
    // 1.15 of the VM's 2 CPUs are added back to node 0, which then has 3.15 of 4 free. Of the other nodes, all of whose CPUs
    // are free, node 1 comes first, because the VM's memory there counts as free once more.
    let (_, plan) = Watched::new(scene).seconds(5).remove(0);
    let moves: Vec<(NodeSet, NodeSet, u64)> = plan
        .decisions
        .iter()
        .filter_map(|decision| match &decision.action.act {
            Act::MovePages {
                from, to, pages_max, ..
            } => Some((from.clone(), to.clone(), pages_max.0 / MIB)),
            _ => None,
        })
        .collect();
    let node = |id| NodeSet::one(NodeId(id));
    assert_eq!(moves, [(node(0), node(1), 1500), (node(2), node(1), 900)]);
}

/// A scene in which all nodes except the first are busy.
fn all_busy_but_the_first() -> Scene {
    let mut scene = Scene::four_nodes(4);
    scene.host_busy[4..].fill(1.0);
    scene
}

#[test]
fn a_bound_vm_is_looked_at_again_after_300_s() {
    let mut scene = all_busy_but_the_first();
    add(&mut scene, 1, 2, 1.0, 0, &[(0, 1000), (1, 900)]);
    let mut watched = Watched::new(scene);
    assert_eq!(watched.bound(10), [(3, vm_id(1), "0".to_owned())]);
    // Nothing moved, as if the kernel had refused. numad waits for the full time before it tries again.
    let again = watched.bound(400);
    assert_eq!(again.len(), 1, "{again:?}");
    assert!((303..=318).contains(&again[0].0), "{again:?}");
}

#[test]
fn on_the_busiest_node_it_does_not_wait() {
    let mut scene = all_busy_but_the_first();
    add(&mut scene, 1, 2, 1.0, 0, &[(0, 2000)]);
    // VM 2 is idle, but because of its memory node 0 is the fullest.
    add(&mut scene, 2, 1, 0.0, 0, &[(0, 3000)]);
    let mut watched = Watched::new(scene);
    assert_eq!(watched.bound(60), [(3, vm_id(1), "0".to_owned())]);
    // Now all 4 CPUs of node 0 are busy, 2 of them with the VM, and the other nodes are idle. Moving half of the load would
    // be more even.
    watched.scene.host_busy.fill(0.0);
    watched.scene.host_busy[..4].fill(1.0);
    // In this scene CPU times keep counting up; numad uses only the difference between two looks.
    let bound = watched.bound(60);
    assert!(bound.len() == 1 && bound[0].2 != "0", "{bound:?}");
}

#[test]
fn nine_tenths_in_place_are_enough() {
    for (elsewhere, times) in [(100, 1), (150, 2)] {
        let mut scene = all_busy_but_the_first();
        add(&mut scene, 1, 2, 1.0, 0, &[(0, 1000), (1, elsewhere)]);
        let mut watched = Watched::new(scene);
        assert_eq!(watched.bound(320).len(), times, "{elsewhere} MiB elsewhere");
    }
}

#[test]
fn between_looks_nothing_happens() {
    let mut scene = Scene::four_nodes(4);
    add(&mut scene, 1, 2, 1.0, 0, &[(0, 200)]);
    let mut watched = Watched::new(scene);
    assert_eq!(watched.bound(4), []);
    // The VM grows right after the look of second 3. The next look is in second 18, and its CPU time is known only after one
    // more.
    watched.scene.vm(1).pages(1, 2000 * MIB);
    let bound = watched.bound(40);
    assert_eq!(bound.iter().map(|(at, ..)| *at).collect::<Vec<_>>(), [33]);
}

proptest! {
    #[test]
    fn an_answer_is_some_of_the_nodes(
        free in prop::collection::vec((0i64..=400, 0i64..=8192), 1..8),
        cpus in 0i64..5000,
        memory_mib in 0i64..100_000,
        used in 1i64..400,
        spread in prop::collection::vec(0i64..4096, 8),
        bound in 0usize..8,
        has_enough_cpus: bool,
    ) {
        let nodes = host(&free);
        let all: NodeSet = nodes.iter().map(|node| node.id).collect();
        let request = Request { cpus, memory_mib };
        let advice = advise(&nodes, request);
        prop_assert!(!advice.is_empty() && advice.is_subset(&all));
        let memory_mib: Vec<i64> = spread[..nodes.len()].to_vec();
        let running = Running {
            nodes: if bound < nodes.len() { NodeSet::one(nodes[bound].id) } else { all.clone() },
            used_mib: memory_mib.iter().sum::<i64>().max(1),
            memory_mib,
            cpus_used: used,
            has_enough_cpus,
        };
        let chosen = nodes::pick(&nodes, Request { memory_mib: request.memory_mib.max(1), ..request }, Some(&running));
        prop_assert!(!chosen.is_empty() && chosen.is_subset(&all));
    }
}
