use std::collections::BTreeMap;

use super::*;
use crate::fake::{Tree, machine};
use crate::pmu::trees::tree;

const DEVICES: &str = "sys/bus/event_source/devices";

fn pmu(tree: &Tree, name: &str, cpus: &str, files: &[(&str, &str)]) {
    tree.write(&format!("{DEVICES}/{name}/type"), "14\n");
    tree.write(&format!("{DEVICES}/{name}/cpumask"), cpus);
    tree.write(&format!("{DEVICES}/{name}/format/event"), "config:0-7\n");
    tree.write(&format!("{DEVICES}/{name}/format/umask"), "config:8-15,32-55\n");
    for (file, text) in files {
        tree.write(&format!("{DEVICES}/{name}/{file}"), text);
    }
}

fn cas(tree: &Tree, name: &str, events: &[&str]) {
    pmu(tree, name, "0-1\n", &[]);
    for event in events {
        tree.write(
            &format!("{DEVICES}/{name}/events/{event}"),
            "event=0x04,umask=0x03\n",
        );
        tree.write(
            &format!("{DEVICES}/{name}/events/{event}.scale"),
            "6.103515625e-5\n",
        );
        tree.write(&format!("{DEVICES}/{name}/events/{event}.unit"), "MiB\n");
    }
}

#[test]
fn memory_channels_by_their_old_names() {
    let tree = Tree::new(&[]);
    cas(
        &tree,
        "uncore_imc_0",
        &["cas_count_read", "cas_count_write", "clockticks"],
    );
    cas(&tree, "uncore_imc_1", &["cas_count_read", "cas_count_write"]);
    let layout = discover(tree.root(), &machine(&[0, 1])).unwrap();
    assert_eq!(layout.events.len(), 8, "two channels, two events, two sockets");
    let first = &layout.events[0];
    assert_eq!(
        (first.pmu.as_str(), first.name.as_str(), first.cpu),
        ("uncore_imc_0", "cas_count_read", CpuId(0))
    );
    assert_eq!(first.bytes_per_count, 64.0);
    assert_eq!((first.attr.kind, first.attr.config), (14, 0x304));
    assert_eq!(layout.events[2].purpose, Purpose::Memory(NodeId(1)));
    assert_eq!(layout.notes, Vec::<String>::new());
}

#[test]
fn memory_channels_by_their_new_names_are_preferred() {
    let tree = Tree::new(&[]);
    let names = [
        "cas_count_read",
        "cas_count_write",
        "cas_count_read_sch0",
        "cas_count_read_sch1",
        "cas_count_write_sch0",
        "cas_count_write_sch1",
    ];
    cas(&tree, "uncore_imc_0", &names);
    let layout = discover(tree.root(), &machine(&[0, 1])).unwrap();
    assert_eq!(layout.events.len(), 8);
    assert!(layout.events.iter().all(|e| e.name.contains("_sch")));
}

#[test]
fn free_running_channels_only_where_there_is_nothing_else() {
    let tree = Tree::new(&[]);
    cas(&tree, "uncore_imc_free_running_0", &["data_read", "data_write"]);
    assert_eq!(discover(tree.root(), &machine(&[0, 1])).unwrap().events.len(), 4);
    cas(&tree, "uncore_imc_0", &["cas_count_read", "cas_count_write"]);
    assert!(
        discover(tree.root(), &machine(&[0, 1]))
            .unwrap()
            .events
            .iter()
            .all(|e| e.pmu == "uncore_imc_0")
    );
}

#[test]
fn amd_channels_and_the_data_fabric() {
    let tree = Tree::new(&[]);
    pmu(&tree, "amd_df", "0\n", &[]);
    let layout = discover(tree.root(), &machine(&[0, 1])).unwrap();
    assert!(
        layout.events.is_empty() && layout.notes[0].contains("amd_df: no public table"),
        "an unknown processor: {layout:?}"
    );
    pmu(&tree, "amd_umc_0", "0\n", &[("format/rdwrmask", "config:8-9\n")]);
    pmu(&tree, "amd_umc_1", "1\n", &[("format/rdwrmask", "config:8-9\n")]);
    let layout = discover(tree.root(), &machine(&[0, 1])).unwrap();
    let seen: Vec<_> = layout
        .events
        .iter()
        .map(|e| (e.purpose, e.attr.config, e.bytes_per_count))
        .collect();
    assert_eq!(
        seen,
        [
            (Purpose::Memory(NodeId(0)), 0x0a, 64.0),
            (Purpose::Memory(NodeId(1)), 0x0a, 64.0)
        ]
    );
}

#[test]
fn a_socket_of_several_nodes_has_no_answer_and_a_note() {
    let tree = Tree::new(&[]);
    cas(&tree, "uncore_imc_0", &["cas_count_read", "cas_count_write"]);
    tree.write(&format!("{DEVICES}/uncore_imc_0/cpumask"), "0\n");
    let layout = discover(tree.root(), &machine(&[0, 0])).unwrap();
    assert!(layout.events.is_empty());
    assert!(
        layout.notes[0].contains("socket 0 has 2 nodes"),
        "{:?}",
        layout.notes
    );
}

#[test]
fn links_lead_where_the_kernel_says() {
    let tree = Tree::new(&[]);
    pmu(
        &tree,
        "uncore_upi_0",
        "0-1\n",
        &[("die0", "upi_1,die_1\n"), ("die1", "upi_0,die_0\n")],
    );
    let layout = discover(tree.root(), &machine(&[0, 1])).unwrap();
    let seen: Vec<_> = layout.events.iter().map(|e| (e.purpose, e.attr.config)).collect();
    assert_eq!(
        seen,
        [
            (Purpose::Link(NodeId(0), NodeId(1)), 0xf02),
            (Purpose::Link(NodeId(1), NodeId(0)), 0xf02)
        ]
    );
    tree.write(&format!("{DEVICES}/uncore_upi_0/die1"), "somewhere\n");
    assert!(
        discover(tree.root(), &machine(&[0, 1]))
            .unwrap_err()
            .to_string()
            .contains("die1")
    );
    std::fs::remove_file(tree.root().join(DEVICES).join("uncore_upi_0/die1")).unwrap();
    std::fs::remove_file(tree.root().join(DEVICES).join("uncore_upi_0/die0")).unwrap();
    let without = discover(tree.root(), &machine(&[0, 1])).unwrap();
    assert_eq!(
        without.events, layout.events,
        "of two sockets, a link leads to the other"
    );
    let without = discover(tree.root(), &machine(&[0, 1, 2])).unwrap();
    assert!(without.events.is_empty() && without.notes[0].contains("5.18"));
}

#[test]
fn a_host_without_pmus_counts_nothing() {
    let layout = discover(Tree::new(&[]).root(), &machine(&[0])).unwrap();
    assert_eq!(layout, Layout::default());
    let (nodes, links) = Uncore::open(layout).read();
    assert!(nodes.is_empty() && links.is_empty());
}

#[test]
fn malformed_files_are_errors_with_the_path() {
    for (file, bad) in [
        ("format/umask", "config:9-3\n"),
        ("format/umask", "bits\n"),
        ("cpumask", "x\n"),
        ("type", "\n"),
        ("events/cas_count_read.scale", "many\n"),
    ] {
        let tree = Tree::new(&[]);
        cas(&tree, "uncore_imc_0", &["cas_count_read", "cas_count_write"]);
        tree.write(&format!("{DEVICES}/uncore_imc_0/{file}"), bad);
        let error = discover(tree.root(), &machine(&[0, 1])).unwrap_err();
        assert!(error.to_string().contains(file), "{error}");
    }
}

#[test]
fn what_cannot_be_opened_is_noted_and_has_no_answer() {
    let tree = Tree::new(&[]);
    cas(&tree, "uncore_imc_0", &["cas_count_read", "cas_count_write"]);
    let mut layout = discover(tree.root(), &machine(&[0, 1])).unwrap();
    for event in &mut layout.events {
        event.attr.kind = 0x7fff_fff0; // no PMU has this type
    }
    let mut uncore = Uncore::open(layout);
    assert!(uncore.read().0.is_empty());
    assert_eq!(uncore.notes.len(), 2, "{:?}", uncore.notes);
}

/// Returns, for each purpose, the PMUs and configurations of its events, in order.
fn chosen(layout: &Layout) -> BTreeMap<Purpose, Vec<(String, u64)>> {
    let mut chosen: BTreeMap<Purpose, Vec<(String, u64)>> = BTreeMap::new();
    for event in &layout.events {
        let of = chosen.entry(event.purpose).or_default();
        of.push((event.pmu.clone(), event.attr.config));
    }
    chosen
}

/// Returns what is chosen on a recorded tree.
fn on(name: &str) -> Layout {
    let (tree, machine) = tree(name);
    discover(tree.root(), &machine).unwrap()
}

fn memory(node: u16) -> Purpose {
    Purpose::Memory(NodeId(node))
}

fn link(from: u16, to: u16) -> Purpose {
    Purpose::Link(NodeId(from), NodeId(to))
}

fn configs(chosen: &[(String, u64)]) -> Vec<u64> {
    chosen.iter().map(|(_, config)| *config).collect()
}

/// Numbers of the PMUs that a purpose has, each once.
fn numbers(chosen: &[(String, u64)], prefix: &str) -> Vec<usize> {
    let mut numbers: Vec<usize> = chosen
        .iter()
        .map(|(pmu, _)| crate::pmu::number(pmu, prefix).unwrap())
        .collect();
    numbers.sort_unstable();
    numbers.dedup();
    numbers
}

#[test]
fn qpi_of_two_sockets_leads_to_the_other_one() {
    let layout = on("broadwell-ep");
    assert_eq!(layout.notes, Vec::<String>::new());
    let chosen = chosen(&layout);
    assert_eq!(
        chosen.keys().copied().collect::<Vec<_>>(),
        [memory(0), memory(1), link(0, 1), link(1, 0)]
    );
    assert_eq!(
        numbers(&chosen[&memory(1)], "uncore_imc_"),
        (0..8).collect::<Vec<_>>()
    );
    assert_eq!(
        configs(&chosen[&link(0, 1)]),
        [0x200; 3],
        "data flits of three links"
    );
    let bytes = |event: &&Event| event.pmu.starts_with("uncore_qpi");
    assert!(
        layout
            .events
            .iter()
            .filter(bytes)
            .all(|event| event.bytes_per_count == 8.0)
    );
}

#[test]
fn qpi_of_more_sockets_has_no_answer_and_a_note() {
    let layout = on("broadwell-ex");
    assert_eq!(
        chosen(&layout).keys().copied().collect::<Vec<_>>(),
        [0, 1, 2, 3].map(memory)
    );
    assert_eq!(layout.notes.len(), 1, "{:?}", layout.notes);
    assert!(layout.notes[0].contains("uncore_qpi") && layout.notes[0].contains("more than two sockets"));
}

#[test]
fn upi_of_whole_sockets_is_known_and_of_clusters_is_not() {
    let whole = on("skylake-sp");
    assert_eq!(whole.notes, Vec::<String>::new());
    let of_whole = chosen(&whole);
    assert_eq!(configs(&of_whole[&link(1, 0)]), [0xf02; 3]);
    assert_eq!(
        numbers(&of_whole[&memory(0)], "uncore_imc_"),
        (0..6).collect::<Vec<_>>()
    );
    let clusters = on("skylake-sp-snc");
    assert_eq!(clusters.events, [], "channels and links of two nodes");
    assert!(
        clusters
            .notes
            .iter()
            .any(|note| note.contains("uncore_imc belong to which")),
        "{:?}",
        clusters.notes
    );
    assert!(
        clusters.notes.iter().any(|note| note.contains("share its links")),
        "{:?}",
        clusters.notes
    );
}

#[test]
fn channels_go_to_clusters_where_public_text_says_so() {
    let two = chosen(&on("sapphire-rapids-snc2"));
    for (node, channels) in [
        (0, [0, 1, 4, 5]),
        (1, [2, 3, 6, 7]),
        (2, [0, 1, 4, 5]),
        (3, [2, 3, 6, 7]),
    ] {
        assert_eq!(
            numbers(&two[&memory(node)], "uncore_imc_"),
            channels,
            "node {node}"
        );
    }
    let three = chosen(&on("granite-rapids-snc3"));
    for (node, channels) in [
        (0, [2, 3, 8, 9]),
        (1, [0, 1, 6, 7]),
        (2, [4, 5, 10, 11]),
        (3, [2, 3, 8, 9]),
    ] {
        assert_eq!(
            numbers(&three[&memory(node)], "uncore_imc_"),
            channels,
            "node {node}"
        );
    }
    assert_eq!(three[&memory(0)].len(), 16, "two sub-channels, reads and writes");
}

#[test]
fn the_data_fabric_counts_channels_and_links_of_known_processors() {
    for name in ["epyc-rome", "epyc-milan"] {
        let layout = on(name);
        assert_eq!(layout.notes, Vec::<String>::new(), "{name}");
        let chosen = chosen(&layout);
        let channels = [
            0x3807,
            0x3847,
            0x3887,
            0x38c7,
            0x1_0000_3807,
            0x1_0000_3847,
            0x1_0000_3887,
            0x1_0000_38c7,
        ];
        assert_eq!(configs(&chosen[&memory(1)]), channels, "{name}");
        let links = [0x7_0000_02c7, 0x8_0000_0207, 0x8_0000_0247, 0x8_0000_0287];
        assert_eq!(configs(&chosen[&link(0, 1)]), links, "{name}");
        assert!(
            layout.events.iter().all(|event| event.pmu == "amd_df"),
            "{name}: no event of amd_l3"
        );
        let of = |purpose| {
            layout
                .events
                .iter()
                .find(|event| event.purpose == purpose)
                .unwrap()
                .bytes_per_count
        };
        assert_eq!((of(memory(0)), of(link(1, 0))), (64.0, 32.0), "{name}");
    }
}

#[test]
fn a_fabric_per_node_counts_for_its_node_and_a_shared_one_for_none() {
    let naples = on("epyc-naples");
    assert_eq!(naples.notes, Vec::<String>::new());
    assert_eq!(
        chosen(&naples).keys().copied().collect::<Vec<_>>(),
        [0, 1, 2, 3].map(memory)
    );
    let nps4 = on("epyc-rome-nps4");
    assert_eq!(nps4.events, []);
    assert!(
        nps4.notes
            .iter()
            .any(|note| note.contains("4 nodes") && note.contains("amd_df")),
        "{:?}",
        nps4.notes
    );
}

#[test]
fn channels_of_zen_4_have_pmus_of_their_own() {
    let layout = on("epyc-genoa");
    assert_eq!(layout.notes, Vec::<String>::new());
    let chosen = chosen(&layout);
    assert_eq!(
        numbers(&chosen[&memory(0)], "amd_umc_"),
        (0..12).collect::<Vec<_>>()
    );
    assert_eq!(
        numbers(&chosen[&memory(1)], "amd_umc_"),
        (12..24).collect::<Vec<_>>()
    );
    assert_eq!(configs(&chosen[&memory(1)]), [0x0a; 12]);
    let first = chosen[&link(0, 1)][0].1;
    assert_eq!(
        (chosen[&link(0, 1)].len(), first),
        (8, 0xb_0f00_3e5f),
        "event 0xb5f, mask 0xf3e"
    );
}

#[test]
fn a_mesh_counts_for_the_socket_that_it_is_on() {
    let (tree, machine) = tree("altra");
    let layout = discover(tree.root(), &machine).unwrap();
    assert_eq!(layout.notes, Vec::<String>::new());
    let chosen = chosen(&layout);
    assert_eq!(
        chosen[&memory(0)],
        [("arm_cmn_0".to_owned(), 0xd_0005)],
        "type 5, event 13"
    );
    assert_eq!(chosen[&memory(1)], [("arm_cmn_1".to_owned(), 0xd_0005)]);
    tree.write(&format!("{DEVICES}/arm_cmn_1/cpumask"), "0\n");
    let nowhere = discover(tree.root(), &machine).unwrap();
    assert_eq!(nowhere.events, []);
    assert!(
        nowhere.notes[0].contains("2 sockets and 2 meshes"),
        "{:?}",
        nowhere.notes
    );
}

#[test]
fn clients_and_boards_without_such_counters_have_no_links() {
    let client = on("alder-lake");
    assert_eq!(chosen(&client).keys().copied().collect::<Vec<_>>(), [memory(0)]);
    assert_eq!(client.events.len(), 4, "two controllers, reads and writes");
    assert_eq!(on("cortex-a72"), Layout::default());
}
