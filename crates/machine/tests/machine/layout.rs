//! Valid and invalid machine files, and the resulting machines.

use homenode_machine::{Machine, MachineError, Replacement};
use homenode_machine_files::LoadError;
use homenode_machine_files::file::Problem;
use homenode_units::{Bytes, CpuId, NodeId};
use proptest::prelude::*;

const UNIFORM: &str = r#"
name = "uniform"
[shape]
sockets = 2
nodes_per_socket = 2
cores_per_node = 2
threads_per_core = 2
memory_per_node = "4GiB"
memory_bandwidth_per_node = "10GB/s"
[llc]
size = "8MiB"
ways = 16
line_bytes = 64
shared_by = "socket"
[[links]]
bandwidth = "5GB/s"
between = [[0, 1], [1, 2], [2, 3]]
directed = [[3, 0]]
[distances]
by_hops = [10, 14, 18, 22]
[hardware]
clock = "2GHz"
llc_inclusive = true
misses_in_flight_max = 10
smt_throughput = 1.25
tlb_entries_4k = 64
tlb_entries_2m = 32
l2 = "256KiB"
walk = { native_refs = 1.0, nested_refs = 4.0 }
ipi = { native_ns = 900, virtual_ns = 10900 }
[hardware.latency]
l1_cycles = 4
l2_cycles = 12
llc_cycles = 40
memory_ns = 80
[hardware.memory_curve]
alpha = 0.3
beta = 0.02
[hardware.link]
hop_ns = 50
curve.alpha = 1.3
curve.beta = 0.08
"#;

const LISTED: &str = r#"
name = "listed"
[[node]]
id = 0
socket = 0
cpus = "0-1,8-9"
threads_per_core = 2
memory = "4GiB"
[[node]]
id = 8
cpus = "2"
memory = "0B"
[[node]]
id = 252
cpus = ""
memory = "16GiB"
[distances]
rows = [[10, 40, 80], [40, 10, 80], [80, 80, 10]]
[[devices]]
address = "0000:3b:00.0"
class = "0x020000"
node = 8
"#;

fn read(text: &str) -> Result<Machine, LoadError> {
    homenode_machine_files::from_toml("m.toml", text)
}

fn refused(text: &str) -> MachineError {
    match read(text).expect_err("must be refused") {
        LoadError::Machine { error, .. } => error,
        other => panic!("{other}"),
    }
}

fn said(from: &str, to: &str) -> String {
    assert!(UNIFORM.contains(from), "{from}");
    read(&UNIFORM.replacen(from, to, 1))
        .expect_err("must be refused")
        .to_string()
}

#[test]
fn a_link_may_have_a_latency_of_its_own_and_keeps_it() {
    let with = |hop: &str| {
        let group = format!("[[links]]\nhop_ns = {hop}\ndirected = [[3, 0]]");
        UNIFORM.replacen("directed = [[3, 0]]", &group, 1)
    };
    let machine = read(&with("12.5")).unwrap();
    let (last, others) = machine.links.split_last().unwrap();
    assert_eq!(last.hop_ns, Some(12.5));
    assert!(others.iter().all(|link| link.hop_ns.is_none()), "{others:?}");
    let written = homenode_machine_files::to_toml(&machine, &homenode_machine_files::Comments::default());
    assert_eq!(read(&written).unwrap().links, machine.links, "{written}");
    let json = serde_json::to_string(&machine).unwrap();
    assert_eq!(
        serde_json::from_str::<Machine>(&json).unwrap().links,
        machine.links
    );
    for bad in ["0", "-1", "100001", "nan"] {
        let said = read(&with(bad)).expect_err(bad).to_string();
        assert!(said.contains("hop_ns of the link from node"), "{said}");
    }
}

/// Returns [`UNIFORM`] with a table of routes.
fn with_routes(routes: &str) -> String {
    UNIFORM.replacen("[distances]", &format!("[routes]\n{routes}\n[distances]"), 1)
}

/// Returns the nodes on the way from one node to another.
fn way(machine: &Machine, from: u16, to: u16) -> Vec<u16> {
    let links = machine.route(NodeId(from), NodeId(to)).expect("there is one");
    let mut nodes = vec![from];
    for link in links.iter().map(|at| &machine.links[*at]) {
        assert_eq!(nodes.last(), Some(&link.from.0), "links join");
        nodes.push(link.to.0);
    }
    assert_eq!(nodes.last(), Some(&to), "the route arrives");
    nodes
}

#[test]
fn data_takes_the_route_that_the_file_states() {
    // Both ways from node 2 to node 0 have two links. The links over node 1 are listed first.
    assert_eq!(way(&read(UNIFORM).unwrap(), 2, 0), [2, 1, 0]);
    let machine = read(&with_routes(
        "directed = [[2, 3, 0], [1, 2, 3, 0]]\nbetween = [[1, 2, 3]]",
    ))
    .unwrap();
    assert_eq!(way(&machine, 2, 0), [2, 3, 0]);
    assert_eq!(way(&machine, 0, 2), [0, 1, 2]); // the other direction goes another way
    assert_eq!(
        (way(&machine, 1, 3), way(&machine, 3, 1)),
        (vec![1, 2, 3], vec![3, 2, 1])
    );
    // A stated route may be longer than the shortest, and distances follow it.
    assert_eq!(way(&machine, 1, 0), [1, 2, 3, 0]);
    assert_eq!(machine.distance(NodeId(1), NodeId(0)), Some(22));
    let written = homenode_machine_files::to_toml(&machine, &homenode_machine_files::Comments::default());
    assert_eq!(read(&written).unwrap().routes, machine.routes, "{written}");
    let json = serde_json::to_string(&machine).unwrap();
    assert_eq!(serde_json::from_str::<Machine>(&json).unwrap(), machine);
    assert!(
        !serde_json::to_string(&read(UNIFORM).unwrap())
            .unwrap()
            .contains("routes")
    );
}

#[test]
fn an_impossible_route_is_refused_by_its_nodes() {
    let wrong = [
        (
            "directed = [[2, 0]]",
            "route [2, 0] takes a link from node 2 to node 0, which the machine does not have",
        ),
        (
            "directed = [[2, 3, 9]]",
            "route [2, 3, 9] takes a link from node 3 to node 9",
        ),
        // The file has a link from node 3 to node 0, but none back.
        (
            "between = [[3, 0]]",
            "route [0, 3] takes a link from node 0 to node 3",
        ),
        (
            "directed = [[2]]",
            "route [2] names fewer than two nodes; name the first, the last and those between",
        ),
        ("directed = [[]]", "route [] names fewer than two nodes"),
        (
            "directed = [[2, 1, 2, 3]]",
            "route [2, 1, 2, 3] comes to node 2 twice; leave the loop out",
        ),
        ("directed = [[0, 1, 0]]", "route [0, 1, 0] comes to node 0 twice"),
        (
            "directed = [[2, 3, 0], [2, 1, 0]]",
            "two routes lead from node 2 to node 0; state one of them",
        ),
        ("via = [[2, 3, 0]]", "unknown key `via`"),
        (
            "directed = [2, 3, 0]",
            "m.toml:20:13: a list is expected, not the number 2",
        ),
        (
            "directed = [[2, -3]]",
            "a whole number from 0 to 65535 is expected, not the number -3",
        ),
    ];
    for (routes, message) in wrong {
        let said = read(&with_routes(routes)).expect_err(routes).to_string();
        assert!(said.contains(message), "{routes}: {said}");
    }
    // Without a list of links, a route has nothing to follow.
    let (begin, rest) = UNIFORM.split_once("[[links]]").unwrap();
    let (_, end) = rest.split_once("[distances]").unwrap();
    let bare = format!("{begin}[routes]\ndirected = [[0, 1]]\n[distances]{end}");
    assert!(matches!(refused(&bare), MachineError::RouteWithoutLink { .. }));
    let long: Vec<String> = (0..60_000).map(|node| node.to_string()).collect();
    let said = read(&with_routes(&format!("directed = [[{}]]", long.join(","))))
        .unwrap_err()
        .to_string();
    assert!(said.len() < 300 && said.contains("14, 15, …]"), "{said}");
}

proptest! {
    #[test]
    fn every_route_arrives_or_is_refused(routes in prop::collection::vec(prop::collection::vec(0u16..5, 0..6), 0..4)) {
        match read(&with_routes(&format!("directed = {routes:?}"))) {
            Ok(machine) => {
                for (from, to) in (0..4).flat_map(|from| (0..4).map(move |to| (from, to))) {
                    let way = way(&machine, from, to);
                    let stated = routes.iter().find(|nodes| (nodes[0], nodes[nodes.len() - 1]) == (from, to));
                    prop_assert!(stated.is_none_or(|nodes| *nodes == way), "{way:?}");
                }
            }
            Err(error) => prop_assert!(error.to_string().contains("route"), "{error}"),
        }
    }
}

#[test]
fn counts_become_nodes_cpus_caches_and_links() {
    let machine = read(UNIFORM).unwrap();
    assert_eq!(machine.nodes[NodeId(1)].cpus.to_string(), "2-3,10-11");
    assert_eq!(machine.nodes[NodeId(3)].socket, Some(1));
    assert_eq!(
        machine
            .llcs
            .iter()
            .map(|llc| llc.cpus.to_string())
            .collect::<Vec<_>>(),
        ["0-3,8-11", "4-7,12-15"]
    );
    assert_eq!(machine.links.len(), 7);
    // From node 3 to node 0 the route has one link fewer than in the other direction.
    assert_eq!(
        (
            machine.distance(NodeId(0), NodeId(3)),
            machine.distance(NodeId(3), NodeId(0))
        ),
        (Some(22), Some(14))
    );
    assert_eq!(machine.hardware.unwrap().clock_hz, 2_000_000_000);
}

#[test]
fn several_caches_per_node_share_its_cores_evenly() {
    let text = UNIFORM.replace("shared_by = \"socket\"", "per_node = 2");
    let machine = read(&text).unwrap();
    assert_eq!(machine.llcs.len(), 8);
    assert_eq!(machine.llcs[1].cpus.to_string(), "1,9");
    assert_eq!(machine.llcs_of(NodeId(1)), [2, 3]);
}

#[test]
fn nodes_can_be_listed_with_gaps_and_without_cpus_or_memory() {
    let machine = read(LISTED).unwrap();
    assert_eq!(machine.node_set().to_string(), "0,8,252");
    assert_eq!(machine.memory_nodes().to_string(), "0,252");
    let core = |cpu: u32| machine.cpu(CpuId(cpu)).unwrap().core;
    assert_eq!([core(0), core(1), core(8), core(9), core(2)], [0, 1, 0, 1, 2]);
    assert_eq!(machine.nodes[NodeId(8)].socket, None);
    assert_eq!(machine.nodes[NodeId(252)].memory_bytes, Bytes::from_gib(16));
    assert!(machine.hardware.is_none() && machine.llcs.is_empty());
}

#[test]
fn without_links_and_distances_all_nodes_are_equally_far() {
    let text = LISTED.replace("rows = [[10, 40, 80], [40, 10, 80], [80, 80, 10]]", "");
    let machine = read(&text).unwrap();
    assert_eq!(machine.distances.rows, [[10, 20, 20], [20, 10, 20], [20, 20, 10]]);
}

#[test]
fn links_that_lead_nowhere_are_refused() {
    let error = refused(&UNIFORM.replace("[2, 3]]", "[2, 7]]"));
    assert!(
        matches!(
            error,
            MachineError::LinkToNowhere {
                from: NodeId(2),
                to: NodeId(7),
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(
        error.to_string(),
        "machine uniform: link 2 to 7 names a node that the machine does not have (nodes 0-3)"
    );
    let error = refused(
        &UNIFORM
            .replace("directed = [[3, 0]]", "")
            .replace(", [2, 3]]", "]"),
    );
    assert!(
        matches!(
            error,
            MachineError::NoRoute {
                from: NodeId(0),
                to: NodeId(3),
                ..
            }
        ),
        "{error}"
    );
    let error = refused(&UNIFORM.replace("[[3, 0]]", "[[3, 3]]"));
    assert!(
        matches!(error, MachineError::LinkToSelf { node: NodeId(3), .. }),
        "{error}"
    );
    let error = refused(&UNIFORM.replace("[[3, 0]]", "[[1, 0]]"));
    assert!(
        matches!(
            error,
            MachineError::LinkTwice {
                from: NodeId(1),
                to: NodeId(0),
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn distances_are_a_square_table_of_10_to_255() {
    let rows = |rows: &str| refused(&LISTED.replace("[[10, 40, 80], [40, 10, 80], [80, 80, 10]]", rows));
    assert!(matches!(
        rows("[[10, 40], [40, 10]]"),
        MachineError::DistanceShape {
            rows: 2,
            nodes: 3,
            ..
        }
    ));
    let error = rows("[[10, 9, 80], [40, 10, 80], [80, 80, 10]]");
    assert!(
        matches!(
            error,
            MachineError::Distance {
                from: NodeId(0),
                to: NodeId(8),
                distance: 9,
                ..
            }
        ),
        "{error}"
    );
    let error = rows("[[10, 256, 80], [40, 10, 80], [80, 80, 10]]");
    assert!(
        matches!(error, MachineError::Distance { distance: 256, .. }),
        "{error}"
    );
    let error = rows("[[11, 40, 80], [40, 10, 80], [80, 80, 10]]");
    assert!(
        matches!(error, MachineError::Distance { distance: 11, .. }),
        "{error}"
    );
    let error = refused(&UNIFORM.replace(", 18, 22]", "]"));
    assert!(
        error.to_string().contains("2 hops from node 0 to node 2"),
        "{error}"
    );
    let error = refused(&UNIFORM.replace("by_hops", "rows = [[10]]\nby_hops"));
    assert!(error.to_string().contains("not both"), "{error}");
}

#[test]
fn a_negative_distance_is_refused_with_its_place() {
    let error = read(&LISTED.replace("[40, 10, 80]", "[-40, 10, 80]")).unwrap_err();
    assert_eq!(
        error.to_string(),
        "m.toml:18:24: a whole number from 0 to 4294967295 is expected, not the number -40 (key `distances.rows`)"
    );
}

#[test]
fn a_machine_without_nodes_or_cpus_is_refused() {
    assert!(matches!(
        refused("name = \"empty\""),
        MachineError::NoNodes { .. }
    ));
    assert!(matches!(
        refused(&UNIFORM.replace("sockets = 2", "sockets = 0")),
        MachineError::NoNodes { .. }
    ));
    assert!(matches!(
        refused(&UNIFORM.replace("cores_per_node = 2", "cores_per_node = 0")),
        MachineError::NoCpus { .. }
    ));
    let text = LISTED
        .replace("0-1,8-9", "")
        .replace("cpus = \"2\"", "cpus = \"\"");
    assert!(matches!(refused(&text), MachineError::NoCpus { .. }));
}

#[test]
fn twice_the_same_cpu_or_node_is_refused() {
    let error = refused(&LISTED.replace("cpus = \"2\"", "cpus = \"9\""));
    assert!(
        matches!(error, MachineError::CpuTwice { cpu: CpuId(9), .. }),
        "{error}"
    );
    let error = refused(&LISTED.replace("id = 252", "id = 8"));
    assert!(
        matches!(error, MachineError::NodeTwice { node: NodeId(8), .. }),
        "{error}"
    );
}

#[test]
fn counts_and_nodes_together_are_refused() {
    let error = refused(&format!(
        "{UNIFORM}\n[[node]]\nid = 9\ncpus = \"99\"\nmemory = \"1GiB\"\n"
    ));
    assert!(matches!(error, MachineError::TwoShapes { .. }), "{error}");
}

#[test]
fn uneven_shapes_are_refused() {
    let error = refused(&LISTED.replace("0-1,8-9", "0-1,8"));
    assert!(matches!(error, MachineError::Uneven { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "machine listed: node 0 does not divide evenly: 3 CPUs, 2 threads per core"
    );
    let error = refused(&UNIFORM.replace("shared_by = \"socket\"", "per_node = 3"));
    assert!(matches!(error, MachineError::Uneven { .. }), "{error}");
}

#[test]
fn figures_that_no_hardware_has_are_refused() {
    for (from, to, what) in [
        (
            "smt_throughput = 1.25",
            "smt_throughput = 2.5",
            "smt_throughput is 2.5; it must be 1 to 2, the work of two threads over that of one",
        ),
        (
            "smt_throughput = 1.25",
            "smt_throughput = 0.9",
            "smt_throughput is 0.9",
        ),
        (
            "smt_throughput = 1.25",
            "smt_throughput = 1.25\nscattered_throughput = 1.5",
            "scattered_throughput is 1.5; it must be above 0 and at most 1, as a share of the bandwidth of streams",
        ),
        (
            "smt_throughput = 1.25",
            "smt_throughput = 1.25\nscattered_throughput = 0.0",
            "scattered_throughput is 0",
        ),
        (
            "ipi = {",
            "prefetcher = { steps = 0, step_lines = 1, nearest = 1, farthest = 20 }\nipi = {",
            "prefetcher.steps is 0; it must be 1 to 63",
        ),
        (
            "ipi = {",
            "prefetcher = { steps = 1, step_lines = 1, nearest = 3, farthest = 2 }\nipi = {",
            "prefetcher.farthest is 2; it must be 63 at most, and not less than prefetcher.nearest",
        ),
        (
            "ipi = {",
            "wake = { exit_ns = -1 }\nipi = {",
            "wake.exit_ns is -1; it must be 0 to 1000000",
        ),
        (
            "smt_throughput = 1.25",
            "smt_throughput = nan",
            "smt_throughput is NaN",
        ),
        (
            "\"10GB/s\"",
            "\"0B/s\"",
            "memory bandwidth of node 0 is 0B/s; it must be above 0",
        ),
        ("\"5GB/s\"", "\"0B/s\"", "bandwidth of link 0 to 1 is 0B/s"),
        (
            "\"5GB/s\"",
            "\"5000TB/s\"",
            "bandwidth of link 0 to 1 is 5000TB/s",
        ),
        ("\"4GiB\"", "\"4000000TiB\"", "memory of node 0 is"),
        ("\"8MiB\"", "\"0B\"", "size of last-level cache 0 is 0B"),
        (
            "line_bytes = 64",
            "line_bytes = 60",
            "line size of last-level cache 0 is 60; it must be a power of two",
        ),
        ("ways = 16", "ways = 0", "ways of last-level cache 0 is 0"),
        ("clock = \"2GHz\"", "clock = \"2MHz\"", "clock in Hz is 2000000"),
        ("memory_ns = 80", "memory_ns = -80", "latency memory_ns is -80"),
        ("hop_ns = 50", "hop_ns = 0", "hop_ns of a link is 0"),
        ("curve.beta = 0.08", "curve.beta = -1", "beta of link curve is -1"),
        ("alpha = 0.3", "alpha = inf", "alpha of memory_curve is inf"),
        (
            "misses_in_flight_max = 10",
            "misses_in_flight_max = 0",
            "misses_in_flight_max is 0",
        ),
        ("tlb_entries_4k = 64", "tlb_entries_4k = 0", "TLB entries_4k is 0"),
        (
            "threads_per_core = 2",
            "threads_per_core = 0",
            "threads_per_core is 0",
        ),
        (
            "cores_per_node = 2",
            "cores_per_node = 65535",
            "number of CPUs is 524280; a machine has at most 8192",
        ),
        (
            "sockets = 2",
            "sockets = 65535",
            "sockets times nodes_per_socket is 131070",
        ),
    ] {
        let text = said(from, to);
        assert!(
            text.starts_with("m.toml: machine uniform: ") && text.contains(what),
            "{to}: {text}"
        );
    }
}

#[test]
fn quantities_that_cannot_be_read_are_refused_with_their_place() {
    for (from, to, what) in [
        ("\"4GiB\"", "\"-4GiB\"", "m.toml:8:19: `-4GiB` is not a size"),
        (
            "\"2GHz\"",
            "\"2\"",
            "`2` is not a clock such as `1.87GHz` (key `hardware.clock`)",
        ),
        ("\"2GHz\"", "\"1e9GHz\"", "is not a clock"),
        (
            "\"socket\"",
            "\"sokcet\"",
            "unknown value `sokcet`; did you mean `socket`?",
        ),
        (
            "cores_per_node",
            "cores_per_nod",
            "unknown key `cores_per_nod`; did you mean `cores_per_node`? (in `shape`)",
        ),
        (
            "alpha = 0.3",
            "alhpa = 0.3",
            "unknown key `alhpa`; did you mean `alpha`? (in `hardware.memory_curve`)",
        ),
        ("clock = \"2GHz\"\n", "", "key `clock` is missing (in `hardware`)"),
    ] {
        let text = said(from, to);
        assert!(text.contains(what), "{to}: {text}");
    }
    let error = read(&LISTED.replace("0-1,8-9", "0-x")).unwrap_err().to_string();
    assert!(
        error.contains("`0-x` is not a list such as `0-3,8` (key `node.cpus`)"),
        "{error}"
    );
}

#[test]
fn several_nodes_need_the_timing_of_links() {
    let cut = UNIFORM.find("[hardware.link]").unwrap();
    let error = refused(&UNIFORM[..cut]);
    assert!(
        error.to_string().contains("table hardware.link is missing"),
        "{error}"
    );
}

#[test]
fn a_device_on_no_node_is_refused() {
    let error = refused(&LISTED.replace("class = \"0x020000\"\nnode = 8", "class = \"0x020000\"\nnode = 1"));
    assert!(
        matches!(error, MachineError::DeviceOnUnknownNode { node: NodeId(1), .. }),
        "{error}"
    );
}

proptest! {
    #[test]
    fn a_truncated_file_gives_a_machine_or_an_error_with_the_path(length in 0usize..UNIFORM.len(), listed in any::<bool>()) {
        let text = if listed { LISTED } else { UNIFORM };
        if let Err(error) = read(&text[..length.min(text.len())]) {
            prop_assert!(error.to_string().starts_with("m.toml"), "{error}");
            if let LoadError::File(file) = &error {
                prop_assert!(!matches!(*file.problem, Problem::Unreadable(_)));
            }
        }
    }

    #[test]
    fn any_number_anywhere_gives_a_machine_or_an_error(at in 0usize..60, number in prop_oneof![
        any::<i64>().prop_map(|n| n.to_string()), any::<f64>().prop_map(|n| format!("{n:?}")), Just("255".to_owned())
    ]) {
        // Replaces one number of the file, the one with index `at`.
        let starts: Vec<usize> = UNIFORM
            .char_indices()
            .filter(|(i, c)| {
                let in_word = |p: char| p.is_ascii_alphanumeric() || p == '.' || p == '_';
                c.is_ascii_digit() && !UNIFORM[..*i].ends_with(in_word)
            })
            .map(|(i, _)| i)
            .collect();
        let start = starts[at % starts.len()];
        let end = start + UNIFORM[start..].find(|c: char| !c.is_ascii_digit() && c != '.').unwrap();
        if let Err(error) = read(&format!("{}{number}{}", &UNIFORM[..start], &UNIFORM[end..])) {
            prop_assert!(error.to_string().starts_with("m.toml"), "{error}");
        }
    }
}

#[test]
fn a_replacement_policy_is_read_by_the_name_that_it_is_written_with() {
    for policy in Replacement::ALL {
        let named = format!("ways = 16\nreplacement = \"{}\"\n", policy.name());
        let text = UNIFORM.replace("ways = 16\n", &named);
        let machine = homenode_machine_files::from_toml("m.toml", &text).unwrap();
        assert_eq!(machine.llcs[0].replacement, Some(policy));
    }
}
