//! Measures how long one simulated second takes (the reciprocal of a result is simulated seconds per second), and the queues that
//! guests use to release pages. The target for the queues is 100 million entries per second.

mod cases;

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homenode_host::Host;
use homenode_twin::page_queue::{Entry, Op, Scratch, reconcile};
use homenode_units::Ns;

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("twin");
    group.sample_size(10);
    for case in cases::all() {
        let mut twin = case.twin();
        twin.wait(Ns::from_secs(10));
        group.bench_function(format!("{}: one simulated second", case.name), |b| {
            b.iter(|| twin.wait(Ns::from_secs(1)));
        });
    }
    let flipping = cases::flipping();
    let twin = flipping.twin();
    group.bench_function(flipping.name, |b| {
        b.iter(|| twin.clone().run_to_end(cases::FLIPPING_LASTS));
    });
    group.finish();
}

/// Measures a guest's queues for one page of memory: half of the entries release a page, half reallocate an earlier one.
fn page_queue(c: &mut Criterion) {
    let mut group = c.benchmark_group("page queue");
    for entries in [32, 512] {
        let entry = |at: u64| {
            // Knuth's multiplier spreads frames over a VM of 64 GiB.
            let frame = at.wrapping_mul(2_654_435_761) % (1 << 22) * 4;
            Entry::new(
                if at.is_multiple_of(2) {
                    Op::Release
                } else {
                    Op::Allocation
                },
                frame,
            )
        };
        let queue: Vec<Entry> = (0..entries).map(|at| entry(at / 4 * 3)).collect();
        let mut scratch = Scratch::new(queue.len(), 0x9e37_79b9_7f4a_7c15);
        group.throughput(Throughput::Elements(entries));
        group.bench_function(format!("{entries} entries"), |b| {
            b.iter(|| {
                let mut freed = 0;
                let outcome = reconcile(black_box(&queue), 0, 1 << 24, &mut scratch, |frame| {
                    freed ^= frame;
                });
                black_box((freed, outcome))
            });
        });
    }
    group.finish();
}

criterion_group!(twin, benches, page_queue);
criterion_main!(twin);
