//! Fuzzes `maps`, `numa_maps` and `pagemap` of a QEMU process: ranges are sorted, disjoint and as large as the guest's memory,
//! and no page is counted twice.

#![no_main]

use homenode_fuzz::Tree;
use homenode_kernel::{numa_maps, pagemap};
use homenode_units::{Bytes, Pages};
use libfuzzer_sys::fuzz_target;

const PID: i32 = 7;

fuzz_target!(|text: &str| {
    let tree = Tree::unpack(text);
    let mib = |word: &str| word.parse::<u32>().ok().map(|mib| Bytes::from_mib(mib.into()));
    let sizes: Vec<Bytes> = tree
        .text("sizes")
        .split_whitespace()
        .filter_map(mib)
        .take(8)
        .collect();
    if let Ok(Some(ranges)) = numa_maps::guest_ram(tree.root(), PID, &sizes) {
        assert_eq!(ranges.len(), sizes.len());
        assert!(ranges.iter().all(|range| range.start < range.end));
        assert!(
            ranges.windows(2).all(|pair| pair[0].end <= pair[1].start),
            "{ranges:?}"
        );
        let mut objects = numa_maps::objects(&ranges, &sizes);
        for (object, size) in objects.iter().zip(&sizes) {
            let bytes = ranges[*object].end - ranges[*object].start;
            assert!(
                (size.0..=size.0 + (2 << 20)).contains(&bytes),
                "{size} in {bytes} bytes"
            );
        }
        objects.sort_unstable();
        assert!(objects.iter().copied().eq(0..sizes.len()), "{objects:?}");
        if let Ok(Some(pages)) = numa_maps::pages_per_node(tree.root(), PID, &ranges) {
            for (range, pages) in ranges.iter().zip(&pages) {
                let all: Pages = pages.values().copied().sum();
                assert!(all <= range.pages(), "{all} in {range:?}");
            }
        }
    }
    for pages in [1, 16] {
        if let Ok(Some(places)) = pagemap::read(tree.root(), PID, 0, pages) {
            assert_eq!(places.len(), pages);
        }
    }
});
