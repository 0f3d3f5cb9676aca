//! Properties that the page keeps, whatever is written to it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use homenode_topology_page::{
    BYTES, Facts, Mapping, Publisher, ReadError, Reader, Topology, TopologyError, VirtualNode, WORDS,
};
use homenode_units::NodeId;
use proptest::prelude::*;

fn words() -> Vec<AtomicU64> {
    (0..WORDS).map(|_| AtomicU64::new(0)).collect()
}

/// All vCPUs are on one host node, the memory of virtual node n is on host node n, and host nodes form a line.
fn line_of_nodes(vcpus: usize, node: u16, nodes: u16) -> Topology {
    let distance = |from: u16, to: u16| 10 + from.abs_diff(to) as u8;
    Topology::new(Facts {
        vcpu_pnode: vec![Some(NodeId(node)); vcpus],
        vnode_pnode: (0..nodes).map(NodeId).map(Some).collect(),
        distances: (0..nodes)
            .map(|from| (0..nodes).map(|to| distance(from, to)).collect())
            .collect(),
    })
    .expect("within bounds")
}

#[test]
fn what_is_published_is_read() {
    let words = words();
    let mut publisher = Publisher::new(&words, 7);
    for node in 0..4 {
        let topology = line_of_nodes(1024, node, 64);
        let sequence = publisher.publish(&topology);
        assert_eq!(Reader::new(&words).read(), Ok((sequence, topology)));
        assert_eq!(Reader::new(&words).sequence(), sequence);
    }
}

#[test]
fn a_file_that_two_map_is_one_page() {
    let file = tempfile::tempfile().expect("a file");
    let (host, guest) = (
        Mapping::new(&file).expect("mapped"),
        Mapping::new(&file).expect("mapped"),
    );
    let sequence = Publisher::new(host.words(), 0).publish(&line_of_nodes(2, 1, 4));
    assert_eq!(Reader::new(guest.words()).sequence(), sequence);
    assert_eq!(host.words().len() * 8, BYTES);
}

#[test]
fn a_page_that_nobody_wrote_is_none() {
    assert_eq!(Reader::new(&words()).read(), Err(ReadError::Magic(0)));
}

#[test]
fn a_writer_that_died_while_writing_is_noticed() {
    let words = words();
    let sequence = Publisher::new(&words, 0).publish(&line_of_nodes(2, 1, 4));
    words[2].store(sequence + 1, Ordering::Relaxed);
    assert_eq!(Reader::new(&words).read(), Err(ReadError::Torn));
}

#[test]
fn versions_wrap() {
    let words = words();
    let mut publisher = Publisher::new(&words, u64::MAX - 2);
    let topology = line_of_nodes(2, 1, 4);
    let sequences: Vec<u64> = (0..3).map(|_| publisher.publish(&topology)).collect();
    assert_eq!(sequences, [u64::MAX - 1, 0, 2]);
    assert_eq!(Reader::new(&words).read(), Ok((2, topology)));
}

#[test]
fn a_guest_that_scribbles_does_not_change_what_is_published_next() {
    let words = words();
    let mut publisher = Publisher::new(&words, 0);
    let topology = line_of_nodes(3, 2, 4);
    let first = publisher.publish(&topology);
    words
        .iter()
        .for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    assert_eq!(publisher.publish(&topology), first + 2);
    assert_eq!(Reader::new(&words).read(), Ok((first + 2, topology)));
}

#[test]
fn more_than_there_is_room_for_is_refused_by_name() {
    let facts = |vcpus: usize, vnodes: usize, nodes: usize| Facts {
        vcpu_pnode: vec![None; vcpus],
        vnode_pnode: vec![Some(NodeId(0)); vnodes],
        distances: vec![vec![10; nodes]; nodes],
    };
    let refused = |facts| Topology::new(facts).expect_err("out of bounds");
    assert_eq!(refused(facts(1025, 1, 1)), TopologyError::Vcpus { count: 1025 });
    assert_eq!(
        refused(facts(1, 65, 1)),
        TopologyError::VirtualNodes { count: 65 }
    );
    assert_eq!(refused(facts(1, 1, 65)), TopologyError::HostNodes { count: 65 });
    assert_eq!(refused(facts(0, 1, 1)), TopologyError::Vcpus { count: 0 });
    let mut wide = facts(1, 1, 2);
    wide.distances[1].push(20);
    let (from, to) = (1, 2);
    assert_eq!(
        refused(wide),
        TopologyError::Distance {
            from,
            to,
            found: None
        }
    );
}

#[test]
fn a_vcpu_belongs_to_the_nearest_memory_and_stays_among_equals() {
    let mut facts = line_of_nodes(1, 3, 4).facts().clone();
    // Virtual node 3 has no memory; 1 and 2 are both on host node 2.
    facts.vnode_pnode = vec![Some(NodeId(0)), Some(NodeId(2)), Some(NodeId(2)), None];
    let topology = Topology::new(facts.clone()).expect("within bounds");
    let node = |present| topology.node(0, VirtualNode(present)).0;
    assert_eq!([node(0), node(1), node(2), node(3)], [1, 1, 2, 1]);
    facts.vcpu_pnode[0] = None;
    let unknown = Topology::new(facts).expect("within bounds");
    assert_eq!(unknown.node(0, VirtualNode(3)), VirtualNode(3));
    assert_eq!(unknown.node(77, VirtualNode(2)), VirtualNode(2));
}

/// Ends after a number of versions, not after a time. Each version puts all vCPUs on one node, so a mix of two versions is
/// visible. Miri also runs this test, with other orders of threads and memory accesses.
#[test]
fn nobody_reads_parts_of_two_versions() {
    let (vcpus, last) = if cfg!(miri) { (20, 30) } else { (1024, 60_000usize) };
    let (words, done) = (words(), AtomicBool::new(false));
    let versions: Vec<Topology> = (0..4).map(|node| line_of_nodes(vcpus, node, 4)).collect();
    Publisher::new(&words, 0).publish(&versions[1]);
    let seen = thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let (mut whole, mut last) = (0u32, 0);
            while !done.load(Ordering::Relaxed) || whole == 0 {
                match Reader::new(&words).read() {
                    Ok((sequence, topology)) => {
                        let node = topology.facts().vcpu_pnode[0];
                        assert!(topology.facts().vcpu_pnode.iter().all(|other| *other == node));
                        assert_eq!(node, Some(NodeId((sequence / 2 % 4) as u16)));
                        assert!(sequence >= last, "went back from {last} to {sequence}");
                        last = sequence;
                        whole += 1;
                    }
                    // The writer may have been preempted while it wrote.
                    Err(error) => assert_eq!(error, ReadError::Torn),
                }
            }
            whole
        });
        let mut publisher = Publisher::new(&words, 2);
        for version in 2..last {
            publisher.publish(&versions[version % 4]);
        }
        done.store(true, Ordering::Relaxed);
        reader.join().expect("no torn read")
    });
    assert!(seen > 0);
}

proptest! {
    #[test]
    fn random_bytes_never_panic_nor_give_a_node_out_of_range(
        noise in prop::collection::vec(any::<u8>(), WORDS * 8),
        repaired in any::<bool>(),
        counts in (0u32..1100, 0u16..70, 0u16..70),
    ) {
        let mut bytes = noise;
        if repaired {
            // Writes a valid header, so that the rest is checked too.
            bytes[..16].copy_from_slice(&[b"HNTOPOLO".as_slice(), &[1, 0, 0, 0], &6272u32.to_le_bytes()].concat());
            bytes[16] &= !1;
            bytes[24..28].copy_from_slice(&counts.0.to_le_bytes());
            bytes[28..30].copy_from_slice(&counts.1.to_le_bytes());
            bytes[30..32].copy_from_slice(&counts.2.to_le_bytes());
            let nodes = counts.2.clamp(1, 64) as u8;
            for byte in &mut bytes[64..2176] {
                *byte = if *byte < 20 { 0xff } else { *byte % nodes };
            }
            for (at, byte) in bytes[2176..].iter_mut().enumerate() {
                *byte = if at / 64 == at % 64 { 10 } else { (*byte).max(10) };
            }
        }
        let words: Vec<AtomicU64> = bytes
            .chunks_exact(8)
            .map(|word| AtomicU64::new(u64::from_le_bytes(word.try_into().expect("eight bytes"))))
            .collect();
        if let Ok((_, topology)) = Reader::new(&words).read() {
            let vnodes = topology.facts().vnode_pnode.len();
            for vcpu in 0..1100 {
                prop_assert!(usize::from(topology.node(vcpu, VirtualNode(0)).0) < vnodes);
            }
        }
    }

    #[test]
    fn the_node_is_the_nearest_with_memory(
        at in 0u16..4, memory in prop::collection::vec(prop::option::of(0u16..4), 1..9),
        distances in prop::collection::vec(10u8..30, 16), present in 0u16..9,
    ) {
        prop_assume!(memory.iter().any(Option::is_some) && usize::from(present) < memory.len());
        let distance = |from: usize, to: usize| if from == to { 10 } else { distances[from * 4 + to] };
        let topology = Topology::new(Facts {
            vcpu_pnode: vec![Some(NodeId(at))],
            vnode_pnode: memory.iter().map(|node| node.map(NodeId)).collect(),
            distances: (0..4).map(|from| (0..4).map(|to| distance(from, to)).collect()).collect(),
        }).expect("within bounds");
        let away = |vnode: u16| memory[usize::from(vnode)].map(|node| distance(usize::from(at), usize::from(node)));
        let chosen = topology.node(0, VirtualNode(present));
        let least = (0..memory.len() as u16).filter_map(away).min();
        prop_assert_eq!(away(chosen.0), least);
        prop_assert!(away(present) != least || chosen.0 == present);
        // A second call with the chosen node as `present` must return it again.
        prop_assert_eq!(topology.node(0, chosen), chosen);
    }
}
