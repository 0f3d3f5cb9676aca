//! Measures how fast the plugin processes accesses, compared with the design of QEMU's own cache plugin. Accesses per second are
//! the accesses of a pass divided by the result.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use homenode_formats::pmu_region::{Layout, Page, SAMPLES};
use homenode_meter::overlap::Prefetcher;
use homenode_meter::pmu::Pmu;
use homenode_meter::profile::{Config, Profile};
use homenode_tracking::cache::{Replacement, Shape};
use homenode_tracking::filter::Use;
use homenode_tracking::stream::{Pattern, Stream};

const ACCESSES: usize = 1_000_000;
const PRIVATE_LINES: usize = 4096;
const LLC_LINES: usize = 1 << 17;

/// Accesses of a guest: its stack and hot data, consecutive words of an array, and lines of a large table.
fn guest() -> Vec<(u64, Use)> {
    let zipf = |lines, exponent| Pattern::Zipf { lines, exponent };
    let mut hot = Stream::new(&zipf(4_000, 0.9), 0, 1);
    let mut table = Stream::new(&zipf(1 << 20, 0.8), 1 << 30, 2);
    let mut array = 0u64;
    (0..ACCESSES)
        .map(|at| {
            let address = match at % 20 {
                0..12 => hot.next_line() * 64 + (at as u64 % 8) * 8,
                12..19 => {
                    array += 8;
                    (1 << 40) + array % (64 << 20)
                }
                _ => table.next_line() * 64,
            };
            (address, if at % 4 == 0 { Use::Write } else { Use::Read })
        })
        .collect()
}

/// The worst case: every access misses both levels.
fn thrasher() -> Vec<(u64, Use)> {
    let mut lines = Stream::new(&Pattern::Uniform { lines: 1 << 24 }, 0, 3);
    (0..ACCESSES)
        .map(|_| (lines.next_line() * 64, Use::Read))
        .collect()
}

/// A cache like that of QEMU's `contrib/plugins/cache.c`. The blocks of a set have a tag and a valid flag, and are searched one
/// after the other. A use sets a block's age from the set's counter; the block with the smallest age is evicted.
struct ByAge {
    sets: Vec<Set>,
}

#[derive(Clone)]
struct Set {
    blocks: Vec<(u64, bool)>,
    ages: Vec<u64>,
    now: u64,
}

impl ByAge {
    fn new(lines: usize, ways: usize) -> ByAge {
        let set = Set {
            blocks: vec![(0, false); ways],
            ages: vec![0; ways],
            now: 0,
        };
        ByAge {
            sets: vec![set; lines / ways],
        }
    }

    fn access(&mut self, address: u64) -> bool {
        let at = (address / 64) as usize % self.sets.len();
        let tag = address / 64 / self.sets.len() as u64;
        let Set { blocks, ages, now } = &mut self.sets[at];
        *now += 1;
        if let Some(way) = blocks.iter().position(|(known, valid)| *known == tag && *valid) {
            ages[way] = *now;
            return true;
        }
        let empty = blocks.iter().position(|(_, valid)| !valid);
        let oldest = || (0..ages.len()).min_by_key(|way| ages[*way]).unwrap_or(0);
        let way = empty.unwrap_or_else(oldest);
        blocks[way] = (tag, true);
        ages[way] = *now;
        false
    }
}

/// The design of that plugin's callback: one lock per level, and counts of accesses and misses, in total and per instruction.
struct Contrib {
    first: Mutex<(ByAge, u64, u64)>,
    second: Mutex<(ByAge, u64, u64)>,
    of_instruction: [AtomicU64; 2],
}

impl Contrib {
    fn access(&self, address: u64) {
        let mut first = self.first.lock().expect("no thread died");
        let hit = first.0.access(address);
        first.1 += 1;
        if !hit {
            self.of_instruction[0].fetch_add(1, Ordering::SeqCst);
            first.2 += 1;
        }
        drop(first);
        if hit {
            return;
        }
        let mut second = self.second.lock().expect("no thread died");
        let hit = second.0.access(address);
        second.1 += 1;
        if !hit {
            self.of_instruction[1].fetch_add(1, Ordering::SeqCst);
            second.2 += 1;
        }
    }
}

fn benches(c: &mut Criterion) {
    let mut group = c.benchmark_group("plugin");
    group
        .throughput(Throughput::Elements(ACCESSES as u64))
        .sample_size(20);
    let layout = Layout {
        cpus: 1,
        tags: 4,
        frames: 1 << 20,
        line_bytes: 64,
        samples: SAMPLES,
    };
    let words: Vec<AtomicU64> = (0..layout.tags_at() / 8).map(|_| AtomicU64::new(0)).collect();
    let tags: Vec<AtomicU8> = (0..layout.frames).map(|_| AtomicU8::new(0)).collect();
    for (name, accesses) in [("guest", guest()), ("thrasher", thrasher())] {
        let config = Config {
            private_bytes: PRIVATE_LINES as u64 * 64,
            private_ways: 8,
            line_bytes: 64,
            rate_min: 0.01,
            window: 128,
            llc_bytes: 4 << 20,
            prefetcher: Prefetcher::L2_STREAMER,
            read: |_| None,
        };
        let profile = Profile::new(config);
        let mut vcpu = profile.vcpu();
        group.bench_function(format!("{name}: profile"), |b| {
            b.iter(|| {
                accesses
                    .iter()
                    .for_each(|(at, wanted)| vcpu.access(&profile, *at, *wanted, 0));
            });
        });
        let shape = Shape::of_lines(LLC_LINES, 16, Replacement::PseudoLru);
        let pmu = Pmu::new(1, shape, Page::new(layout, &words, &tags));
        let mut cpu = pmu.cpu(0, 0, PRIVATE_LINES, 8);
        group.bench_function(format!("{name}: PMU with an LLC of 8 MiB"), |b| {
            b.iter(|| {
                accesses
                    .iter()
                    .for_each(|(at, wanted)| pmu.access(&mut cpu, *at, *wanted));
            });
        });
        let contrib = Contrib {
            first: Mutex::new((ByAge::new(PRIVATE_LINES, 8), 0, 0)),
            second: Mutex::new((ByAge::new(LLC_LINES, 16), 0, 0)),
            of_instruction: [AtomicU64::new(0), AtomicU64::new(0)],
        };
        group.bench_function(
            format!("{name}: the same caches by age and lock, as QEMU's cache plugin"),
            |b| {
                b.iter(|| accesses.iter().for_each(|(at, _)| contrib.access(*at)));
            },
        );
    }
    group.finish();
}

criterion_group!(plugin, benches);
criterion_main!(plugin);
