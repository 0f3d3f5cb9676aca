//! Records a profile: what a program accesses beyond its cores' private caches.
//!
//! # Approach
//!
//! All accesses of a vCPU go through its private cache ([`Filter`]). The misses are accesses to the LLC, and are counted exactly.
//! Their stack distances come from a sample of lines ([`Shards`]): all lines if the program uses few, a fixed share if it uses
//! many.
//!
//! Each vCPU has its own thread, which touches only the vCPU's state. At every 256th event it hands its batch to the sample,
//! under a lock. The order of different vCPUs' misses is therefore exact only to a batch.
//!
//! [`Overlap`] computes how misses overlap, and [`Heat`] counts accesses by page. The curve for address translation comes from a
//! TLB of 64 pages and the stack distances of its misses.
//!
//! # Left out
//!
//! Instruction fetches and prefetches, lines that one core takes from another, memory that is freed and reused at the same
//! address.

use std::sync::{Mutex, MutexGuard, PoisonError};

use homenode_tracking::filter::{Filter, Passed, Use};
use homenode_tracking::mrc::Shards;

use homenode_formats::profile_log::{Flights, Log, Point};

use crate::heat::{Heat, PAGE_BITS, Tlb};
use crate::overlap::{Overlap, Prefetcher, Read};

/// Number of events that a vCPU collects before it hands them over.
const BATCH: usize = 256;

/// Up to this number of lines, all are sampled.
const LINES_ALL: usize = 16_384;

/// The settings of a profile.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Size of a core's private cache, bytes.
    pub private_bytes: u64,
    /// Ways of that cache's sets.
    pub private_ways: usize,
    /// Size of a line, bytes; a power of two.
    pub line_bytes: u64,
    /// Smallest share of lines that is sampled, in (0, 1].
    pub rate_min: f64,
    /// Number of instructions in the reorder buffer ([`Overlap`]).
    pub window: u64,
    /// Size of the LLC that separates hits from misses for the overlap, bytes.
    pub llc_bytes: u64,
    /// The prefetcher that the overlap supposes.
    pub prefetcher: Prefetcher,
    /// Reads the program's memory, to find pointers.
    pub read: Read,
}

impl Config {
    /// Largest capacity of the curve, bytes.
    pub const CAPACITY_MAX: u64 = 1 << 28;
    /// Largest TLB reach of the curve, bytes.
    pub const REACH_MAX: u64 = 1 << 30;
}

/// The profile of a program, shared by its vCPUs.
#[derive(Debug)]
pub struct Profile {
    config: Config,
    shared: Mutex<Shared>,
}

/// Data about all vCPUs together.
#[derive(Debug)]
struct Shared {
    lines: Shards,
    pages: Shards,
    heat: Heat,
    vcpus: usize,
}

/// The state of a vCPU.
#[derive(Debug)]
pub struct Vcpu {
    number: usize,
    filter: Filter,
    line_bits: u32,
    overlap: Overlap,
    tlb: Tlb,
    batch: Vec<Event>,
    counts: Counts,
    /// Number of instructions before the counts were reset.
    before: u64,
}

/// An event that a vCPU hands over.
#[derive(Clone, Copy, Debug)]
enum Event {
    /// The vCPU requested a line from the LLC.
    Line(u64, Use),
    /// The vCPU's cache evicted a written line.
    Back(u64),
    /// The vCPU used a page that its first-level TLB lacked.
    Page(u64),
}

/// Counts of a vCPU. Counts of several vCPUs can be added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of instructions begun.
    pub instructions: u64,
    /// Loads.
    pub reads: u64,
    /// Stores.
    pub writes: u64,
    /// Lines that the private cache requested from the LLC.
    pub llc_accesses: u64,
    /// Written lines that the private cache evicted.
    pub written_back: u64,
    /// Uses of pages that the first-level TLB lacked.
    pub translations: u64,
}

impl Profile {
    /// Creates an empty profile.
    ///
    /// # Panics
    /// If a field of the configuration is out of its documented range.
    pub fn new(config: Config) -> Profile {
        assert!(
            config.line_bytes.is_power_of_two(),
            "a line's size is a power of two"
        );
        let lines_max = (Config::CAPACITY_MAX / config.line_bytes) as usize;
        let pages_max = (Config::REACH_MAX >> PAGE_BITS) as usize;
        Profile {
            config,
            shared: Mutex::new(Shared {
                lines: Shards::with_size_or_rate(LINES_ALL, config.rate_min, lines_max),
                pages: Shards::with_size_or_rate(LINES_ALL, config.rate_min, pages_max),
                heat: Heat::default(),
                vcpus: 0,
            }),
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        // If a thread panicked while it held the lock, the sample only lacks a few accesses.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a vCPU with an empty cache.
    pub fn vcpu(&self) -> Vcpu {
        let mut shared = self.shared();
        shared.vcpus += 1;
        let config = &self.config;
        Vcpu {
            number: shared.vcpus,
            filter: Filter::new(
                (config.private_bytes / config.line_bytes) as usize,
                config.private_ways,
            ),
            line_bits: config.line_bytes.trailing_zeros(),
            overlap: Overlap::new(
                config.window,
                config.llc_bytes,
                config.line_bytes,
                config.prefetcher,
                config.read,
            ),
            tlb: Tlb::new(),
            batch: Vec::with_capacity(BATCH),
            counts: Counts::default(),
            before: 0,
        }
    }

    /// Moves the events that a vCPU has collected into the shared data.
    #[cold]
    pub fn hand_on(&self, vcpu: &mut Vcpu) {
        let mut shared = self.shared();
        let Shared {
            lines, pages, heat, ..
        } = &mut *shared;
        let page_of = |line: u64| line << vcpu.line_bits >> PAGE_BITS;
        for event in vcpu.batch.drain(..) {
            match event {
                Event::Line(line, wanted) => {
                    lines.access(line);
                    heat.access(vcpu.number, page_of(line), wanted == Use::Write);
                }
                Event::Back(line) => heat.written(page_of(line)),
                Event::Page(page) => pages.access(page),
            }
        }
    }

    /// Resets the counts, but keeps caches and samples: accesses so far were warm-up. Other vCPUs keep their counts, so a program
    /// calls this while it has a single thread.
    pub fn restart(&self, vcpu: &mut Vcpu) {
        self.hand_on(vcpu);
        vcpu.before += vcpu.counts.instructions;
        vcpu.counts = Counts::default();
        vcpu.overlap.restart();
        let mut shared = self.shared();
        shared.lines.restart();
        shared.pages.restart();
        shared.heat.restart();
    }

    /// Returns the counts of these vCPUs, and the curves. Each vCPU must have handed over its events.
    pub fn log<'a>(&self, vcpus: impl IntoIterator<Item = &'a Vcpu>) -> Log {
        let (mut sum, mut threads) = (Counts::default(), 0);
        let (mut hits, mut misses) = (Flights::default(), Flights::default());
        for vcpu in vcpus {
            sum.add(&vcpu.counts);
            threads += u64::from(vcpu.counts.instructions > 0);
            (hits, misses) = (hits.and(&vcpu.overlap.hits()), misses.and(&vcpu.overlap.misses()));
        }
        let (shared, line_bytes) = (self.shared(), self.config.line_bytes);
        let (lines, pages) = (shared.lines.curve(), shared.pages.curve());
        let past_first = sum.translations as f64 / (sum.reads + sum.writes).max(1) as f64;
        Log {
            version: Log::VERSION,
            private_bytes: self.config.private_bytes,
            line_bytes,
            rate: shared.lines.rate(),
            vcpus: threads,
            instructions: sum.instructions,
            reads: sum.reads,
            writes: sum.writes,
            llc_accesses: sum.llc_accesses,
            written_back: sum.written_back,
            footprint_bytes: shared.lines.lines() as u64 * line_bytes,
            forks: 0,
            execs: 0,
            window: self.config.window,
            llc_bytes: self.config.llc_bytes,
            hits,
            misses,
            pages: shared.heat.pages(),
            curve: Log::capacities()
                .map(|bytes| point(bytes, lines.at(bytes as f64 / line_bytes as f64), 1e6))
                .collect(),
            // Most accesses hit a TLB, so small miss ratios need more digits.
            translation: Log::reaches()
                .map(|bytes| point(bytes, past_first * pages.at((bytes >> PAGE_BITS) as f64), 1e9))
                .collect(),
        }
    }
}

/// Returns a point of a curve, rounded to the digits that a sample supports.
fn point(bytes: u64, ratio: f64, digits: f64) -> Point {
    let miss_ratio = (ratio * digits).round() / digits;
    Point { bytes, miss_ratio }
}

impl Counts {
    fn add(&mut self, other: &Counts) {
        self.instructions += other.instructions;
        self.reads += other.reads;
        self.writes += other.writes;
        self.llc_accesses += other.llc_accesses;
        self.written_back += other.written_back;
        self.translations += other.translations;
    }
}

impl Vcpu {
    /// Counts instructions that the vCPU begins.
    #[inline]
    pub fn instructions(&mut self, count: u64) {
        self.counts.instructions += count;
    }

    /// Records an access to an address. `left` of the instructions already counted come after this one.
    #[inline]
    pub fn access(&mut self, shared: &Profile, address: u64, wanted: Use, left: u64) {
        match wanted {
            Use::Read => self.counts.reads += 1,
            Use::Write => self.counts.writes += 1,
        }
        let page = address >> PAGE_BITS;
        if self.tlb.misses(page) {
            self.counts.translations += 1;
            self.keep(shared, Event::Page(page));
        }
        self.touch(shared, address, wanted, left);
    }

    /// Records that an access, which is already counted, uses another line.
    #[inline]
    pub fn touch(&mut self, shared: &Profile, address: u64, wanted: Use, left: u64) {
        let line = address >> self.line_bits;
        if let Passed::Missed { written_back } = self.filter.access(line, wanted) {
            self.counts.llc_accesses += 1;
            let instruction = (self.before + self.counts.instructions).saturating_sub(left);
            self.overlap.access(instruction, address, wanted);
            if let Some(line) = written_back {
                self.counts.written_back += 1;
                self.keep(shared, Event::Back(line));
            }
            self.keep(shared, Event::Line(line, wanted));
        }
    }

    #[inline]
    fn keep(&mut self, shared: &Profile, event: Event) {
        self.batch.push(event);
        if self.batch.len() >= BATCH {
            shared.hand_on(self);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homenode_tracking::mrc::Mattson;
    use homenode_tracking::stream::{Pattern, Stream};

    const CONFIG: Config = Config {
        private_bytes: 32 << 10,
        private_ways: 8,
        line_bytes: 64,
        rate_min: 0.01,
        window: 128,
        llc_bytes: 1 << 20,
        prefetcher: Prefetcher::L2_STREAMER,
        read: |_| None,
    };

    fn run(profile: &Profile, vcpu: &mut Vcpu, stream: &mut Stream, accesses: usize) {
        for at in 0..accesses {
            let wanted = if at % 4 == 0 { Use::Write } else { Use::Read };
            vcpu.access(profile, stream.next_line() * 64 + 8, wanted, 0);
            vcpu.instructions(3);
        }
        profile.hand_on(vcpu);
    }

    #[test]
    fn the_curve_of_a_small_program_is_the_exact_one() {
        let pattern = Pattern::Zipf {
            lines: 8_000,
            exponent: 0.7,
        };
        let profile = Profile::new(CONFIG);
        let mut vcpu = profile.vcpu();
        run(&profile, &mut vcpu, &mut Stream::new(&pattern, 0, 1), 200_000);
        let log = profile.log([&vcpu]);

        let (mut stream, mut filter) = (Stream::new(&pattern, 0, 1), Filter::new(512, 8));
        let mut exact = Mattson::new(1 << 14);
        for _ in 0..200_000 {
            let line = stream.next_line();
            if filter.access(line, Use::Read) != Passed::Held {
                exact.access(line);
            }
        }
        let exact = exact.curve();
        for point in &log.curve {
            // The curve has a point every 256 lines, and is interpolated linearly between them.
            let (ours, theirs) = (point.miss_ratio, exact.at((point.bytes / 64) as f64));
            assert!(
                (ours - theirs).abs() < 0.01,
                "{} bytes: {ours}, {theirs}",
                point.bytes
            );
        }
        assert_eq!(
            (log.reads, log.writes, log.instructions),
            (150_000, 50_000, 600_000)
        );
        assert_eq!(log.rate, 1.0);
    }

    #[test]
    fn vcpus_are_told_apart_by_their_private_caches_and_counted_together() {
        // Two vCPUs use the same 256 lines, which fit into each one's cache, so each vCPU misses every line once.
        let profile = Profile::new(CONFIG);
        let mut vcpus = [profile.vcpu(), profile.vcpu()];
        for vcpu in &mut vcpus {
            for round in 0..10_u64 {
                for line in 0..256 {
                    vcpu.access(&profile, line * 64 + round, Use::Write, 0);
                }
            }
            vcpu.instructions(1);
            profile.hand_on(vcpu);
        }
        let log = profile.log(&vcpus);
        assert_eq!((log.vcpus, log.llc_accesses, log.writes), (2, 512, 5120));
        assert_eq!(log.footprint_bytes, 256 * 64);
        // The second vCPU finds the lines in the LLC, because the first one brought them in.
        let last = log.curve.last().expect("a curve has points");
        assert!((last.miss_ratio - 0.5).abs() < 1e-9, "{last:?}");
        assert_eq!((log.pages.used, log.pages.shared), (4, 1.0));
    }

    #[test]
    fn what_came_before_a_restart_is_not_counted_and_stays_in_the_caches() {
        let profile = Profile::new(CONFIG);
        let mut vcpu = profile.vcpu();
        let sweep = |vcpu: &mut Vcpu| {
            for line in 0..8192_u64 {
                vcpu.instructions(10);
                vcpu.access(&profile, line * 64, Use::Read, 9);
            }
        };
        sweep(&mut vcpu);
        profile.restart(&mut vcpu);
        sweep(&mut vcpu);
        profile.hand_on(&mut vcpu);
        let log = profile.log([&vcpu]);
        assert_eq!(
            (log.instructions, log.reads, log.llc_accesses),
            (81_920, 8192, 8192)
        );
        // The first sweep brought all lines into an LLC of 1 MiB, where the second sweep finds them.
        let at = |bytes| {
            log.curve
                .iter()
                .find(|point| point.bytes == bytes)
                .expect("a point")
                .miss_ratio
        };
        assert!(at(256 << 10) > 0.99 && at(1 << 20) < 0.01, "{:?}", log.curve);
        assert_eq!((log.hits.accesses, log.misses.accesses), (8192, 0));
        // The program uses a new page every 64 accesses, and all 128 pages lie within 512 KiB.
        assert!(
            (log.translation[0].miss_ratio - 1.0 / 64.0).abs() < 1e-6,
            "{:?}",
            log.translation
        );
        assert!(log.translation[2].miss_ratio < 1e-6);
        assert_eq!((log.pages.used, log.pages.only_read), (128, 1.0));
    }
}
