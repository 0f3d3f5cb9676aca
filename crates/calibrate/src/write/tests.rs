use super::*;
use crate::fit::FittedCurve;
use crate::host::CacheSizes;
use crate::measure::{Bandwidth, LoadPoint};
use crate::noise::Noise;

fn spread(median: f64) -> Spread {
    Spread::of(&[median * 0.97, median, median * 1.05]).unwrap()
}

fn pairs_home(machine: &Machine) -> NodeId {
    machine
        .nodes
        .keys()
        .find(|id| !machine.nodes[*id].cpus.is_empty())
        .unwrap()
}

/// A plausible calibration of this machine.
fn calibration(machine: Machine) -> Calibration {
    let pair = |cpu_node: NodeId, memory_node: NodeId| {
        let far = if cpu_node == memory_node { 1.0 } else { 1.6 };
        Pair {
            cpu_node,
            memory_node,
            latency_ns: spread(90.0 * far),
            huge_share: Some(1.0),
            read: vec![
                Bandwidth {
                    cpus: 1,
                    bytes_per_s: spread(8e9),
                },
                Bandwidth {
                    cpus: 4,
                    bytes_per_s: spread(2.2e10 / far),
                },
            ],
            mixed_bytes_per_s: Some(spread(2e10 / far)),
        }
    };
    let with_cpus: Vec<NodeId> = machine
        .nodes
        .iter()
        .filter(|(_, node)| !node.cpus.is_empty())
        .map(|(id, _)| id)
        .collect();
    let memory: Vec<NodeId> = machine.memory_nodes().iter().collect();
    let pairs = with_cpus
        .iter()
        .flat_map(|cpus| memory.iter().map(|memory| pair(*cpus, *memory)))
        .collect();
    let load = |load: f64| LoadPoint {
        bytes_per_s: spread(2.2e10 * load),
        load,
        latency_ns: spread(90.0 + 40.0 * load),
    };
    let (home, cpu) = (pairs_home(&machine), machine.cpus[0].id);
    Calibration {
        home,
        cpu,
        machine,
        date: "2026-01-02 03:04".to_owned(),
        seconds: 61.5,
        quick: false,
        under_hypervisor: true,
        noise: Some(Noise {
            steal_share: 0.01,
            others_share: 0.2,
        }),
        caches: CacheSizes {
            l1_bytes: Some(32 << 10),
            l2_bytes: Some(1 << 20),
            llc_bytes: Some(32 << 20),
        },
        llc_inclusive: Some(false),
        clock_hz: spread(2.987_654e9),
        time_stamp_hz: Some(spread(2.1e9)),
        l1_ns: spread(1.7),
        l2_ns: spread(5.1),
        llc_ns: spread(23.4),
        curve: Vec::new(),
        llc_effective_bytes: Some(spread(2.5e7)),
        pairs,
        latency_base_pages_ns: spread(110.0),
        misses_in_flight: spread(11.6),
        stream_in_flight: spread(14.2),
        tlb_entries_base: Some(spread(1530.2)),
        tlb_entries_huge: None,
        tlb_huge_tried: 512,
        smt_throughput: Some(spread(1.31)),
        two_cores_throughput: Some(spread(1.99)),
        interrupt_ns: Some(spread(1800.0)),
        loaded: vec![load(0.0), load(0.4), load(0.9)],
        load_curve: Some(FittedCurve {
            curve: LoadCurve {
                alpha: 0.412_345_678,
                beta: 0.012_3,
            },
            beta_fitted: true,
            load_max: 0.9,
            error_mean: 0.03,
        }),
        warnings: vec!["something\nodd".to_owned()],
    }
}

#[test]
fn the_file_of_a_calibration_reads_back_and_holds_what_was_measured() {
    for name in ["e5_1603v3", "r910", "amd48"] {
        let mut machine = homenode_machine_files::preset(name).unwrap();
        machine.hardware = None;
        let calibration = calibration(machine);
        let file = machine_file(&calibration).unwrap();
        assert_eq!(
            homenode_machine_files::from_toml("file.toml", &file.text).unwrap(),
            file.machine
        );
        let hardware = file.machine.hardware.as_ref().unwrap();
        assert_eq!(
            (hardware.clock_hz, hardware.latency.memory_ns),
            (2_988_000_000, 90.0)
        );
        assert_eq!(
            (
                hardware.misses_in_flight_max,
                hardware.tlb_entries_4k,
                hardware.tlb_entries_2m
            ),
            (14, 1530, 1530)
        );
        assert_eq!(
            file.machine.nodes[NodeId(0)].memory_bandwidth,
            Some(BytesPerSec(22_000_000_000))
        );
        let several = file.machine.nodes.len() > 1;
        assert_eq!(hardware.link.hop_ns, if several { 54.0 } else { 0.0 });
        assert_eq!(file.machine.links.is_empty(), !several);
        homenode_twin::Twin::new(
            file.machine.clone(),
            &homenode_twin::Scenario::mixed_for(&file.machine, 1),
            1,
        )
        .expect("the twin takes it");
    }
}

#[test]
fn every_figure_says_whether_it_was_measured_stated_or_estimated() {
    let mut machine = homenode_machine_files::preset("r910").unwrap();
    machine.hardware = None;
    let text = machine_file(&calibration(machine)).unwrap().text;
    let hardware = &text[text.find("[hardware]").unwrap()..];
    let figures = hardware.lines().filter(|line| line.contains(" = "));
    for line in figures {
        assert!(
            ["# measured: ", "# estimate: ", "# as the "]
                .iter()
                .any(|s| line.contains(s))
                || line.contains(" percent"),
            "{line}"
        );
    }
    assert!(
        text.contains("# Warning: something odd\n") && text.contains("2026-01-02 03:04"),
        "{text}"
    );
    assert!(text.contains("measured: median of 3, 87.3 to 94.5 ns"), "{text}");
}

#[test]
fn a_node_without_memory_and_one_without_cpus_are_described() {
    let text = format!("{}[llc]\nsize = \"8MiB\"\nline_bytes = 64\n", crate::testing::ODD);
    let machine = homenode_machine_files::from_toml("odd.toml", &text).unwrap();
    let file = machine_file(&calibration(machine)).unwrap();
    let bandwidth = |node| file.machine.nodes[NodeId(node)].memory_bandwidth;
    assert!(
        bandwidth(0).is_none() && bandwidth(1).is_some() && bandwidth(2).is_some(),
        "{}",
        file.text
    );
}

#[test]
fn where_caches_are_unknown_or_shared_oddly_the_file_still_reads() {
    let mut machine = homenode_machine_files::preset("r910").unwrap();
    machine.hardware = None;
    let mut unknown = machine.clone();
    unknown.llcs.clear();
    unknown.cpus.iter_mut().for_each(|cpu| cpu.llc = None);
    let file = machine_file(&calibration(unknown)).unwrap();
    assert!(
        file.machine.cpus.iter().all(|cpu| cpu.llc.is_some()),
        "{}",
        file.text
    );
    // Adjacent CPUs are siblings, which the format cannot express.
    machine
        .cpus
        .iter_mut()
        .for_each(|cpu| cpu.core = cpu.id.0 / 4 * 2 + cpu.id.0 % 2);
    let cores: std::collections::BTreeSet<u32> = machine.cpus.iter().map(|cpu| cpu.core).collect();
    assert!(cores.len() < machine.cpus.len());
    let file = machine_file(&calibration(machine)).unwrap();
    assert!(
        file.machine
            .notes
            .iter()
            .any(|note| note.contains("cannot express")),
        "{:?}",
        file.machine.notes
    );
}

#[test]
fn a_host_that_gave_no_clock_is_an_error_and_no_file() {
    let mut machine = homenode_machine_files::preset("e5_1603v3").unwrap();
    machine.hardware = None;
    let mut stopped = calibration(machine);
    stopped.clock_hz = spread(0.0);
    assert!(machine_file(&stopped).is_err());
}
