//! Measures the models. The printed result is the time of one pass; divide the accesses of a pass by it to get accesses per
//! second.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homenode_machine::Replacement;
use homenode_tracking::cache::{Cache, Outcome, Shape};
use homenode_tracking::mrc::{Mattson, Shards};
use homenode_tracking::stream::{Pattern, Stream};

const ACCESSES: usize = 100_000;

/// Lines of a Zipf stream, drawn in advance so that the cache is measured, not the generator.
fn lines() -> Vec<u64> {
    let pattern = Pattern::Zipf {
        lines: 1 << 20,
        exponent: 0.8,
    };
    let mut stream = Stream::new(&pattern, 0, 1);
    (0..ACCESSES).map(|_| stream.next_line()).collect()
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("tracking");
    group
        .throughput(Throughput::Elements(ACCESSES as u64))
        .sample_size(20);
    let lines = lines();
    for replacement in Replacement::ALL {
        let shape = Shape::of_lines(1 << 17, 16, replacement);
        let mut cache = Cache::new(shape, 1, 1);
        group.bench_function(format!("8 MiB cache, 16 ways, {replacement:?}"), |b| {
            b.iter(|| {
                lines
                    .iter()
                    .filter(|line| cache.access(0, **line) == Outcome::Hit)
                    .count()
            });
        });
    }
    let mut mattson = Mattson::new(1 << 17);
    group.bench_function("Mattson", |b| {
        b.iter(|| {
            lines
                .iter()
                .filter(|line| mattson.access(**line).is_some())
                .count()
        });
    });
    let mut shards = Shards::with_rate(0.01, 1 << 17);
    group.bench_function("SHARDS, 1 percent", |b| {
        b.iter(|| lines.iter().for_each(|line| shards.access(*line)));
    });
    group.finish();
}

criterion_group!(accesses, benches);
criterion_main!(accesses);
