//! Measures TLBs, nested walks and PRL's log, in accesses per second. Targets: 150 million if all hit the TLB, 40 million if none
//! does.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homenode_tracking::paging::{Buffer, Costs, Flags, Guest, Handler, Mode, Options, Step, Vcpu};
use homenode_tracking::stream::{Pattern, Stream};
use homenode_tracking::tlb::{Access, PageSize, core};

const ACCESSES: usize = 200_000;
/// The guest has 1 GiB of memory, of which 400 MiB are used.
const PAGES: u64 = 102_400;
const FRAMES: u64 = 1 << 18;

fn guest() -> Guest {
    let mut guest = Guest::new(FRAMES, 1024, PageSize::Small, Flags::Kept);
    let space = guest.tables.space().expect("frames for tables");
    for page in 0..PAGES {
        // Frames are scattered, as in a real guest.
        let frame = page.wrapping_mul(40_503) % (1 << 17);
        guest
            .tables
            .map(space, page, frame, PageSize::Small)
            .expect("frames for tables");
    }
    guest
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("translation");
    group
        .throughput(Throughput::Elements(ACCESSES as u64))
        .sample_size(20);
    let uniform = |lines| Pattern::Uniform { lines };
    let patterns = [
        ("hits: 40 pages at random", uniform(40)),
        ("hits: 40 pages in order", Pattern::Cyclic { lines: 40 }),
        ("second-level hits: 1000 pages at random", uniform(1000)),
        ("misses: 400 MiB in order", Pattern::Cyclic { lines: PAGES }),
        ("misses: 400 MiB at random", uniform(PAGES)),
    ];
    for (name, pattern) in patterns {
        let mut stream = Stream::new(&pattern, 0, 1);
        let pages: Vec<u64> = (0..ACCESSES).map(|_| stream.next_line()).collect();
        for core_name in ["cascade-lake", "zen2"] {
            let mut guest = guest();
            let log = Buffer::new(Mode::Paml, 512, Options::PUBLISHED);
            let mut vcpus = [Vcpu::new(core(core_name).expect("a core of the list"), log)];
            let costs = Costs {
                begin_ns: 0.0,
                entry_ns: 0.0,
                refresh_ns: 0.0,
            };
            let (mut handler, mut frames, mut now_ns) = (Handler::new(costs), Vec::new(), 0.0);
            group.bench_function(format!("{name}, {core_name}"), |b| {
                b.iter(|| {
                    frames.clear();
                    for page in black_box(&pages) {
                        if vcpus[0].access(&mut guest, *page, Access::Write) == Step::Raised {
                            now_ns += 1.0;
                            handler.raise(now_ns);
                            handler.advance(now_ns, &mut vcpus, &mut frames);
                        }
                    }
                    black_box(frames.len())
                });
            });
        }
    }
    group.finish();
}

criterion_group!(translation, benches);
criterion_main!(translation);
