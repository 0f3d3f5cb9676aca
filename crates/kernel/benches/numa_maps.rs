//! Measures what the agent's loop spends on a QEMU process that has split its memory into nearly as many mappings as the kernel
//! allows. The agent has to find the guest's RAM among them, and count which nodes it is on.

use std::fs;
use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homenode_kernel::numa_maps::{guest_ram, pages_per_node};
use homenode_units::{Bytes, PAGE_BYTES};

/// A little less than the kernel's `vm.max_map_count`.
const MAPPINGS: u64 = 65_000;
const PID: i32 = 7;

fn numa_maps(c: &mut Criterion) {
    let start = |at: u64| 0x7f00_0000_0000 + at * PAGE_BYTES;
    let maps = |at| format!("{:x}-{:x} rw-p 00000000 00:00 0 \n", start(at), start(at + 1));
    let numa = |at| {
        format!(
            "{:x} default anon=1 N{}=1 kernelpagesize_kB=4\n",
            start(at),
            at % 4
        )
    };
    let tree = tempfile::tempdir().expect("a folder");
    let dir = tree.path().join(format!("proc/{PID}"));
    fs::create_dir_all(&dir).expect("a folder");
    fs::write(dir.join("maps"), (0..MAPPINGS).map(maps).collect::<String>()).expect("a file");
    fs::write(dir.join("numa_maps"), (0..MAPPINGS).map(numa).collect::<String>()).expect("a file");
    let sizes = [Bytes(MAPPINGS * PAGE_BYTES)];
    let ranges = guest_ram(tree.path(), PID, &sizes)
        .expect("well formed")
        .expect("RAM");

    let mut group = c.benchmark_group("numa_maps");
    group.sample_size(10).throughput(Throughput::Elements(MAPPINGS));
    group.bench_function("guest_ram", |b| {
        b.iter(|| black_box(guest_ram(tree.path(), PID, &sizes).is_ok()));
    });
    group.bench_function("pages_per_node", |b| {
        b.iter(|| black_box(pages_per_node(tree.path(), PID, &ranges).is_ok()));
    });
    group.finish();
}

criterion_group!(benches, numa_maps);
criterion_main!(benches);
