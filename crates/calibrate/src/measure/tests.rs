use super::*;

fn preset(name: &str) -> Machine {
    homenode_machine_files::preset(name).unwrap()
}

#[test]
fn every_cpu_node_meets_every_memory_node_and_home_comes_first() {
    let cast = Cast::of(&preset("r910"), None).unwrap();
    assert_eq!((cast.pairs.len(), cast.pairs[0]), (16, (NodeId(0), NodeId(0))));
    assert_eq!(
        Cast::of(&preset("r910"), Some(NodeId(2))).unwrap().pairs,
        [(NodeId(2), NodeId(2))]
    );
}

#[test]
fn nodes_without_cpus_or_memory_are_measured_from_and_to_others_only() {
    let odd = homenode_machine_files::from_toml("odd.toml", crate::testing::ODD).unwrap();
    let cast = Cast::of(&odd, None).unwrap();
    let expected = [(1, 1), (1, 2), (0, 1), (0, 2)].map(|(cpus, memory)| (NodeId(cpus), NodeId(memory)));
    assert_eq!(
        (cast.home, cast.cpu, cast.pairs),
        (NodeId(1), CpuId(2), expected.to_vec())
    );
    for node in [0, 2, 7] {
        assert!(
            matches!(
                Cast::of(&odd, Some(NodeId(node))),
                Err(CalibrateError::Node { .. })
            ),
            "{node}"
        );
    }
    let mut bound = odd;
    bound.memory_allowed = NodeSet::one(NodeId(2));
    assert_eq!(
        Cast::of(&bound, None).unwrap().pairs,
        [(NodeId(0), NodeId(2)), (NodeId(1), NodeId(2))]
    );
}

#[test]
fn a_stream_reads_on_where_it_stopped() {
    let mut next = 0;
    assert!(stream_rate(&[0; 1 << 18], &mut next, Duration::from_millis(1)) > 0.0);
    assert!((1..=2).contains(&next), "two blocks: {next}");
    assert!(
        stream_rate(&[0; 64], &mut next, Duration::from_millis(1)) > 0.0,
        "less than a block is one block"
    );
}
