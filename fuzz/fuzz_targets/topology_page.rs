//! Fuzzes topology pages, which any program may have written to: an accepted page is within bounds, and can be published and read
//! again unchanged.

#![no_main]

use std::sync::atomic::{AtomicU64, Ordering};

use homenode_topology_page::{
    LAYOUT, MAGIC, NODES_MAX, Publisher, Reader, Topology, VCPUS_MAX, VNODES_MAX, VirtualNode, WORDS,
};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let words: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
    for (word, bytes) in words.iter().zip(bytes.chunks(8)) {
        let mut whole = [0; 8];
        whole[..bytes.len()].copy_from_slice(bytes);
        word.store(u64::from_le_bytes(whole), Ordering::Relaxed);
    }
    let reader = Reader::new(&words);
    let _ = reader.read();
    // Sets the right magic, layout and size, which the fuzzer would take long to find.
    words[0].store(MAGIC, Ordering::Relaxed);
    words[1].store(u64::from(LAYOUT) | ((WORDS * 8) as u64) << 32, Ordering::Relaxed);
    let Ok((sequence, topology)) = reader.read() else {
        return;
    };
    assert_eq!(sequence % 2, 0, "a version that is being written");
    let facts = topology.facts();
    assert!(
        facts.vcpu_pnode.len() <= VCPUS_MAX
            && facts.vnode_pnode.len() <= VNODES_MAX
            && facts.distances.len() <= NODES_MAX
    );
    let nodes = facts.distances.len();
    let known = facts.vcpu_pnode.iter().chain(&facts.vnode_pnode).flatten();
    assert!(known.into_iter().all(|node| usize::from(node.0) < nodes));
    for vcpu in 0..facts.vcpu_pnode.len() {
        let node = topology.node(vcpu, VirtualNode(0));
        assert!(usize::from(node.0) < facts.vnode_pnode.len());
    }
    let published = Topology::new(facts.clone()).expect("it was read");
    let sequence = Publisher::new(&words, sequence).publish(&published);
    assert_eq!(reader.read(), Ok((sequence, published)));
});
