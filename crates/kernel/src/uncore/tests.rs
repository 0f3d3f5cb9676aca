use super::*;
use crate::fake::{Tree, machine};

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
        layout.events.is_empty() && layout.notes[0].contains("amd_df"),
        "{layout:?}"
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
    let layout = discover(tree.root(), &machine(&[0, 0])).unwrap();
    assert!(layout.events.is_empty());
    assert!(layout.notes[0].contains("several nodes"), "{:?}", layout.notes);
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
    assert!(discover(tree.root(), &machine(&[0, 1])).unwrap().notes[0].contains("5.18"));
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

#[test]
fn values_are_laid_into_split_bits() {
    let format = parse_format("config1:0-3,8,60-63").unwrap();
    let mut words = [0; 3];
    format.encode(0x1ff, &mut words).unwrap();
    assert_eq!(words, [0, 0xf000_0000_0000_010f, 0]);
    assert_eq!(format.encode(0x200, &mut [0; 3]), None);
}
