//! Fuzzes the ring buffer of an event that samples IBS ops: whatever it contains, reading ends within it.

#![no_main]

use std::sync::atomic::AtomicU64;

use homenode_kernel::ibs::ring::drain;
use libfuzzer_sys::fuzz_target;

// The tail, the number of unread bytes, and the ring.
fuzz_target!(|input: &[u8]| {
    let mut words = input
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().expect("eight bytes")));
    let (tail, unread) = (words.next().unwrap_or(0), words.next().unwrap_or(0));
    let mut ring: Vec<AtomicU64> = words.map(AtomicU64::new).collect();
    ring.resize_with(ring.len().next_power_of_two(), AtomicU64::default);
    let words = ring.len() as u64;
    // A few more than the ring has, so that impossible positions are tried too.
    let head = tail.wrapping_add(unread % (8 * words + 16));
    let mut seen = 0;
    let drained = drain(&ring, tail, head, &mut |access| {
        assert!(access.frame < 1 << 40);
        seen += 1;
    });
    assert!(seen <= drained.samples && drained.samples + drained.malformed <= words + 1);
});
