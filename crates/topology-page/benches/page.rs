//! Measures the cost of publishing a version (also while a reader checks for torn versions), of reading one, and of checking for
//! a new one. For comparison, measures asking the kernel for the current CPU (vDSO getcpu).

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homenode_topology_page::{Facts, Mapping, Publisher, ReadError, Reader, Topology};
use homenode_units::NodeId;

/// Returns a topology with all 1024 vCPUs on one of four nodes.
fn topology(node: u16) -> Topology {
    Topology::new(Facts {
        vcpu_pnode: vec![Some(NodeId(node)); 1024],
        vnode_pnode: (0..4).map(|node| Some(NodeId(node))).collect(),
        distances: (0..4)
            .map(|from| (0..4).map(|to| if from == to { 10 } else { 20 }).collect())
            .collect(),
    })
    .expect("within bounds")
}

fn page(c: &mut Criterion) {
    let file = tempfile::tempfile().expect("a file");
    let (host, guest) = (
        Mapping::new(&file).expect("mapped"),
        Mapping::new(&file).expect("mapped"),
    );
    let versions: Vec<Topology> = (0..4).map(topology).collect();
    let mut publisher = Publisher::new(host.words(), 0);
    publisher.publish(&versions[1]);
    let reader = Reader::new(guest.words());

    let mut group = c.benchmark_group("page");
    group.throughput(Throughput::Elements(1));
    group.bench_function("version", |b| b.iter(|| black_box(reader.sequence())));
    group.bench_function("vdso_getcpu", |b| {
        b.iter(|| black_box(rustix::thread::sched_getcpu()));
    });
    group.bench_function("read", |b| b.iter(|| black_box(reader.read().is_ok())));

    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                match reader.read() {
                    Ok((_, read)) => assert!(versions.contains(&read), "parts of two versions"),
                    Err(error) => assert_eq!(error, ReadError::Torn),
                }
            }
        });
        group.bench_function("publish_while_read", |b| {
            let mut next = versions.iter().cycle();
            b.iter(|| next.next().map(|version| publisher.publish(version)));
        });
        done.store(true, Ordering::Relaxed);
    });
    group.finish();
}

criterion_group!(benches, page);
criterion_main!(benches);
