use super::*;
use crate::pmu::trees::tree;

/// Types and configurations of the events of each core type: cycles, instructions, LLC references, LLC misses.
fn on(name: &str) -> (Vec<Vec<(u32, u64)>>, Option<String>) {
    let selection = Selection::discover(tree(name).0.root()).unwrap();
    let of = |of: &CoreType| {
        let attrs = of.work.iter().chain(of.llc.iter().flatten());
        attrs.map(|attr| (attr.kind, attr.config)).collect()
    };
    (selection.types.iter().map(of).collect(), selection.note)
}

#[test]
fn intel_counts_at_the_llc_by_architectural_events() {
    for name in [
        "broadwell-ep",
        "skylake-sp",
        "sapphire-rapids-snc2",
        "granite-rapids-snc3",
    ] {
        let (types, note) = on(name);
        assert_eq!(types, [[(0, 0), (0, 1), (0, 2), (0, 3)]], "{name}");
        assert_eq!(note, None, "{name}");
    }
}

#[test]
fn each_core_type_has_events_of_its_own_pmu() {
    let (types, note) = on("alder-lake");
    let on_pmu = |pmu: u64| [0, 1, 2, 3].map(|event| (0, pmu << 32 | event)).to_vec();
    assert_eq!(types, [on_pmu(10), on_pmu(4)], "cpu_atom, cpu_core");
    assert_eq!(note, None);
}

#[test]
fn amd_counts_fills_from_beyond_the_l2_and_never_the_generic_events() {
    for (name, llc) in [
        ("epyc-naples", [0x5a43, 0x5843]),
        ("epyc-rome", [0x5a43, 0x5843]),
        ("epyc-milan", [0x5e44, 0x5c44]),
        ("epyc-genoa", [0xde44, 0xdc44]),
    ] {
        let (types, note) = on(name);
        assert_eq!(types, [[(0, 0), (0, 1), (4, llc[0]), (4, llc[1])]], "{name}");
        assert!(note.unwrap().contains("count at the L2 on AMD"), "{name}");
        assert_eq!(llc[1] & !llc[0], 0, "{name}: each miss is a reference");
        assert_eq!(llc[0] & 0x100, 0, "{name}: a hit in the own L2 is no reference");
    }
}

#[test]
fn arm_counts_at_the_llc_only_if_its_pmu_has_such_events() {
    let (types, note) = on("altra");
    assert_eq!(types, [[(8, 0x11), (8, 0x08), (8, 0x36), (8, 0x37)]]);
    assert_eq!(note, None);
    let (types, note) = on("cortex-a72");
    assert_eq!(
        types,
        [[(8, 0x11), (8, 0x08)]],
        "a refill of the L1 or L2 is no LLC miss"
    );
    assert!(
        note.unwrap()
            .contains("no event that is known to count LLC misses")
    );
}

#[test]
fn if_one_core_type_has_no_event_of_the_llc_none_is_used() {
    let (tree, _) = tree("altra");
    for (file, text) in [
        ("type", "9\n"),
        ("cpus", "160-163\n"),
        ("format/event", "config:0-15\n"),
    ] {
        tree.write(
            &format!("sys/bus/event_source/devices/armv8_cortex_a55/{file}"),
            text,
        );
    }
    let selection = Selection::discover(tree.root()).unwrap();
    assert_eq!(selection.types.len(), 2);
    assert!(selection.types.iter().all(|of| of.llc.is_none()), "{selection:?}");
}

#[test]
fn an_unknown_processor_has_cycles_and_instructions_only() {
    for cpuinfo in [
        "",
        "vendor_id\t: AuthenticAMD\ncpu family\t: 21\nmodel\t\t: 2\n",
        "vendor_id\t: HygonGenuine\ncpu family\t: 24\nmodel\t\t: 0\n",
        "cpu\t\t: POWER9\n",
    ] {
        let tree = crate::fake::Tree::new(&[("proc/cpuinfo", cpuinfo)]);
        let selection = Selection::discover(tree.root()).unwrap();
        assert_eq!(selection.types, Selection::default().types, "{cpuinfo}");
        assert!(selection.note.is_some(), "{cpuinfo}");
    }
}
