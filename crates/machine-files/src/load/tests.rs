use super::*;
use crate::file::Problem;
use homenode_machine::Link;
use homenode_units::{Bytes, BytesPerSec, CpuId, NodeId};

#[test]
fn every_preset_is_a_possible_machine_of_its_own_name_with_timing() {
    assert_eq!(preset_names().count(), 15);
    for name in preset_names() {
        let machine = preset(name).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(machine.name, name);
        assert!(machine.hardware.is_some(), "{name} has no timing");
        assert!(
            machine.cpus.iter().all(|cpu| cpu.llc.is_some()),
            "{name}: a CPU has no LLC"
        );
        assert!(
            machine.nodes.values().all(|node| node.memory_bandwidth.is_some()),
            "{name}"
        );
        assert!(
            machine
                .links
                .iter()
                .all(|link| link.bandwidth.is_some() || link.hop_ns.is_some()),
            "{name}: of a link neither what it carries nor what it takes is known"
        );
    }
}

#[test]
fn an_unknown_preset_names_the_nearest_and_lists_all() {
    let error = preset("r901").unwrap_err();
    let LoadError::UnknownPreset { valid, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(
        (valid.0.names[0].as_str(), valid.0.near, valid.0.names.len()),
        ("r910", true, 15)
    );
    let text = error.to_string();
    assert!(
        text.starts_with("no machine preset `r901`; did you mean `r910`?"),
        "{text}"
    );
    assert!(preset_names().all(|name| text.contains(name)), "{text}");
    let text = preset("zen5-turin").unwrap_err().to_string();
    assert!(
        text.starts_with("no machine preset `zen5-turin`; there are `"),
        "{text}"
    );
    assert!(
        !text.contains("did you mean") && preset_names().all(|name| text.contains(name)),
        "{text}"
    );
}

/// Returns true if a line of a machine file has a figure: digits outside of texts, a quantity, or a true or false.
fn holds_a_figure(line: &str) -> bool {
    let code = line.split('#').next().unwrap_or_default().trim();
    if code.is_empty()
        || code.starts_with("name =")
        || (code.starts_with('[')
            && code
                .trim_end_matches(']')
                .ends_with(|c: char| c.is_alphabetic() || c == '_'))
    {
        return false;
    }
    let value = code.split_once('=').map_or(code, |(_, value)| value);
    value.contains(|c: char| c.is_ascii_digit())
        || value.contains("true")
        || value.contains("false")
        || code.starts_with("shared_by")
}

#[test]
fn every_figure_of_every_preset_names_its_source() {
    for (name, _, text) in PRESETS {
        let mut figures = 0;
        let mut in_notes = false;
        for (at, line) in text.lines().enumerate() {
            // Notes are sentences for people, and may run over several lines.
            in_notes = (in_notes || line.starts_with("notes =")) && !line.trim_end().ends_with(']');
            if in_notes || line.starts_with("notes =") || !holds_a_figure(line) {
                continue;
            }
            figures += 1;
            let comment = line
                .split_once(" # ")
                .map(|(_, comment)| comment)
                .unwrap_or_default();
            let named = [
                "[Kyoto, ",
                "[XPV, ",
                "[Flip, ",
                "[TAVO, ",
                "[PRL, ",
                "[Policies, ",
                "facts 3.3 ",
                "facts 5.4",
                // For current hosts: section 4 of the facts on stock hosts, and public sources beyond it.
                "facts 4.",
                "computed from ",
                "AMD 19h optimization guide",
                "AnandTech",
                "Arm's optimization guide",
                "GitHub",
                "KU Leuven",
                "LUMI user guide",
                "Linux kernel test robot",
                "SagePTE",
                "a log on GitHub",
                "allinfo.space",
                "bytedance/eurosys24-artifacts",
                "cheap5v.com",
                "chipsandcheese",
                "computerbase.de",
                "dstackai/dstack",
                "hpctech.co.jp",
                "meterpreter.org",
                "model name that the kernel prints",
                "public SST model",
                "stevescargall.com",
                "two EPYC 9375F",
            ];
            let sourced = named.iter().any(|source| comment.starts_with(source));
            let reasoned = comment
                .strip_prefix("estimate: ")
                .is_some_and(|reason| reason.len() >= 8);
            assert!(
                sourced || reasoned,
                "{name}.toml line {}: no source for a figure: {line}",
                at + 1
            );
        }
        assert!(
            figures >= 20,
            "{name}: only {figures} figures found; does the test still see them?"
        );
    }
}

#[test]
fn a_figure_without_a_source_would_be_noticed() {
    for line in [
        "sockets = 4",
        "    [0, 1], [2, 3],",
        "llc_inclusive = true",
        "size = \"5MiB\"",
        "by_hops = [10, 16]",
    ] {
        assert!(holds_a_figure(line), "{line}");
    }
    for line in [
        "[shape]",
        "[[links]]  # QPI",
        "# 4 sockets",
        "]",
        "between = [",
        "name = \"r910\"",
        "[hardware.memory_curve]",
    ] {
        assert!(!holds_a_figure(line), "{line}");
    }
}

#[test]
fn r910_has_hyperthread_siblings_after_all_first_threads_and_qpi_between_every_two_sockets() {
    let machine = preset("r910").unwrap();
    assert_eq!(
        (
            machine.nodes.len(),
            machine.cpus.len(),
            machine.core_count(NodeId(2))
        ),
        (4, 32, 4)
    );
    assert_eq!(machine.nodes[NodeId(1)].cpus.to_string(), "4-7,20-23");
    let core = |cpu: u32| machine.cpu(CpuId(cpu)).unwrap().core;
    assert_eq!((core(5), core(21), core(6)), (5, 5, 6));
    assert_eq!(machine.nodes[NodeId(0)].memory_bytes, Bytes::from_gib(16));
    assert_eq!((machine.links.len(), machine.llcs.len()), (12, 4));
    for from in machine.nodes.keys() {
        for to in machine.nodes.keys() {
            assert_eq!(machine.route(from, to).unwrap().len(), usize::from(from != to));
        }
    }
}

/// Distances that AMD's reference board for four packages prints, and the Dell C6145: dumps of both are in hwloc's tests.
const FOUR_OPTERONS: [[u32; 8]; 8] = [
    [10, 16, 16, 22, 16, 22, 16, 22],
    [16, 10, 22, 16, 16, 22, 22, 16],
    [16, 22, 10, 16, 16, 16, 16, 16],
    [22, 16, 16, 10, 16, 16, 22, 22],
    [16, 16, 16, 16, 10, 16, 16, 22],
    [22, 22, 16, 16, 16, 10, 22, 16],
    [16, 22, 16, 22, 16, 22, 10, 16],
    [22, 16, 16, 22, 22, 16, 16, 10],
];

#[test]
fn amd6344x8_has_the_links_and_routes_of_the_reference_board_of_its_socket() {
    let machine = preset("amd6344x8").unwrap();
    assert_eq!(machine.distances.rows, FOUR_OPTERONS);
    let back = |nodes: &Vec<NodeId>| nodes.iter().rev().copied().collect::<Vec<_>>();
    let one_way = |nodes: &&Vec<NodeId>| !machine.routes.contains(&back(nodes));
    assert_eq!(
        (
            machine.routes.len(),
            machine.routes.iter().filter(one_way).count()
        ),
        (20, 12)
    );
    let mut routes_by_link = vec![0; machine.links.len()];
    for from in machine.nodes.keys() {
        for to in machine.nodes.keys() {
            let route = machine.route(from, to).unwrap();
            assert_eq!(machine.distance(from, to), Some([10, 16, 22][route.len()]));
            route.iter().for_each(|link| routes_by_link[*link] += 1);
        }
    }
    // As in the firmware's table of routes.
    for (link, routes) in machine.links.iter().zip(routes_by_link) {
        let ends = (link.from.0.min(link.to.0), link.from.0.max(link.to.0));
        let wanted = match ends {
            (2, 3) | (4, 5) => 4,
            (0, 1) | (6, 7) => 3,
            (2 | 3, 4 | 5) => 1,
            _ => 2,
        };
        assert_eq!(routes, wanted, "{ends:?}");
    }
}

#[test]
fn links_of_amd6344x8_are_as_wide_as_their_bits() {
    let machine = preset("amd6344x8").unwrap();
    let package = |node: NodeId| node.0 / 2;
    let is_inside = |link: &&Link| package(link.from) == package(link.to);
    let (inside, between): (Vec<&Link>, Vec<&Link>) = machine.links.iter().partition(is_inside);
    assert_eq!((inside.len(), between.len()), (8, 28));
    let wide = |link: &&Link| link.bandwidth == Some(BytesPerSec(6 << 30));
    assert!(inside.iter().all(wide));
    // The expected bandwidth: 8 bits at 6.4 GT/s, of which a saturated link reaches 80 percent; 64 of 72 bytes are data.
    let narrow = 6.4e9 * 0.8 * 64.0 / 72.0;
    let close = |link: &&Link| (link.bandwidth.unwrap().as_f64() / narrow - 1.0).abs() < 0.001;
    assert!(between.iter().all(close));
    // A package has four ports of 16 bits for others, two links of 8 bits each, and two packages use one for a PCI bus.
    let mut links: Vec<usize> = (0..4)
        .map(|of| between.iter().filter(|link| package(link.from) == of).count())
        .collect();
    links.sort_unstable();
    assert_eq!(links, [6, 6, 8, 8]);
}

#[test]
fn amd48_is_at_most_two_hops_wide_and_its_distances_say_how_many() {
    let machine = preset("amd48").unwrap();
    assert_eq!(
        (machine.nodes.len(), machine.cpus.len(), machine.llcs.len()),
        (8, 48, 8)
    );
    let mut hops_total = 0;
    for from in machine.nodes.keys() {
        let mut at_hops = [0; 3];
        for to in machine.nodes.keys() {
            let hops = machine.route(from, to).unwrap().len();
            assert_eq!(machine.distance(from, to), Some([10, 16, 22][hops]));
            at_hops[hops] += 1;
            hops_total += hops;
        }
        assert_eq!(at_hops, [1, 4, 3]);
    }
    assert_eq!(hops_total as f64 / 64.0, 1.25); // as the header of amd48.toml says
    // The stated routes are those with the fewest links that are listed first, so stating them changed no figure.
    let unstated = Machine {
        routes: Vec::new(),
        ..machine.clone()
    };
    for (from, to) in machine
        .nodes
        .keys()
        .flat_map(|from| machine.nodes.keys().map(move |to| (from, to)))
    {
        assert_eq!(
            machine.route(from, to),
            unstated.route(from, to),
            "{from} to {to}"
        );
    }
    assert_eq!(machine.routes.len(), 24);
    // The paper says "a maximum bandwidth of 6 GiB/s". A node's traffic to the other nodes is spread over its four links.
    let most = machine.links.iter().map(|link| link.bandwidth.unwrap()).max();
    assert_eq!(most, Some(BytesPerSec(6 << 30)));
    for from in machine.nodes.keys() {
        let mut by_link = std::collections::BTreeMap::new();
        for to in machine.nodes.keys().filter(|to| *to != from) {
            *by_link.entry(machine.route(from, to).unwrap()[0]).or_insert(0) += 1;
        }
        let mut counts: Vec<u32> = by_link.into_values().collect();
        counts.sort_unstable();
        assert_eq!(counts, [1, 2, 2, 2], "node {from}");
    }
    let at = |node| machine.devices.iter().any(|device| device.node == NodeId(node));
    assert!(at(0) && at(6));
}

#[test]
fn amd48_latencies_are_those_of_table_3_within_three_percent() {
    let machine = preset("amd48").unwrap();
    let hardware = machine.hardware.unwrap();
    let cycles = |hops: f64| {
        (hardware.latency.memory_ns + hops * hardware.link.hop_ns) * hardware.clock_hz as f64 / 1e9
    };
    for (hops, published) in [(0.0, 156.0), (1.0, 276.0), (2.0, 383.0)] {
        assert!(
            (cycles(hops) / published - 1.0).abs() < 0.03,
            "{hops} hops: {} cycles",
            cycles(hops)
        );
    }
}

#[test]
fn amd48_sustains_as_many_scattered_lines_as_table_3_has_served() {
    // Little's law: each of 48 threads receives one line per latency, at 2.2 GHz; 6 threads are 0 hops away, 24 one, 18 two.
    let served = 64.0 * 2.2e9 * (6.0 / 697.0 + 24.0 / 740.0 + 18.0 / 863.0);
    let machine = preset("amd48").unwrap();
    let streams = machine.nodes[NodeId(0)].memory_bandwidth.unwrap().as_f64();
    let share = machine.hardware.unwrap().scattered_throughput.unwrap();
    assert!((share * streams / served - 1.0).abs() < 1e-3, "{share}");
}

#[test]
fn the_shapes_that_the_seeds_print() {
    let shape = |name: &str| {
        let machine = preset(name).unwrap();
        let memory: Bytes = machine.nodes.values().map(|node| node.memory_bytes).sum();
        (machine.nodes.len(), machine.cpus.len(), memory)
    };
    assert_eq!(shape("e5_1603v3"), (1, 4, Bytes::from_mib(8096)));
    assert_eq!(shape("amd6344x8"), (8, 48, Bytes::from_gib(64)));
    assert_eq!(shape("xeon26x2"), (2, 52, Bytes::from_gib(128)));
    assert_eq!(shape("i7_pml"), (1, 8, Bytes::from_gib(16)));
    assert_eq!(shape("r420").0, 2);
}

#[test]
fn hosts_of_today_have_caches_in_nodes_nodes_in_sockets_and_nodes_without_cpus() {
    let shape = |name: &str| {
        let machine = preset(name).unwrap();
        let sockets: std::collections::BTreeSet<u16> = machine.cpus.iter().map(|cpu| cpu.socket).collect();
        let homes = machine.home_nodes().len();
        (
            sockets.len(),
            machine.nodes.len(),
            homes,
            machine.llcs.len(),
            machine.cpus.len(),
        )
    };
    assert_eq!(shape("epyc7763-nps1"), (2, 2, 2, 16, 256));
    assert_eq!(shape("epyc7763-nps4"), (2, 8, 8, 16, 256));
    assert_eq!(shape("epyc9654-nps4"), (2, 8, 8, 24, 384));
    assert_eq!(shape("xeon8380"), (2, 2, 2, 2, 160));
    assert_eq!(shape("xeon8480"), (2, 2, 2, 2, 224));
    assert_eq!(shape("xeon8480-snc4"), (2, 8, 8, 2, 224));
    assert_eq!(shape("altra-q80"), (2, 2, 2, 2, 160));
    assert_eq!(shape("xeon-cxl"), (2, 4, 2, 2, 208));
}

#[test]
fn a_file_is_named_in_every_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("mine.toml");
    let text = PRESETS.iter().find(|(name, ..)| *name == "r420").unwrap().2;
    std::fs::write(&path, text).unwrap();
    assert_eq!(from_toml_file(&path).unwrap().name, "r420");
    let error = from_toml_file(dir.path().join("none.toml")).unwrap_err();
    assert!(error.to_string().contains("none.toml"), "{error}");
    let error = from_toml(&path, &text.replace("sockets = 2", "sockets = 0")).unwrap_err();
    let LoadError::Machine {
        path: named,
        error: MachineError::NoNodes { .. },
    } = &error
    else {
        panic!("{error}")
    };
    assert_eq!(named, &path);
    let error = from_toml(&path, &text.replace("sockets", "socket")).unwrap_err();
    let LoadError::File(file) = &error else {
        panic!("{error}")
    };
    assert!(matches!(*file.problem, Problem::UnknownKey { .. }), "{error}");
    assert!(error.to_string().contains("did you mean `sockets`?"), "{error}");
}
