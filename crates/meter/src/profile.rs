//! A profile in the making: what a program's accesses do beyond its cores' private caches.
//!
//! # Approach
//!
//! Each vCPU has a private cache ([`Filter`]) through which all its accesses go; what misses there is an access to the LLC,
//! counted exactly. Stack distances of these come from a sample of lines ([`Shards`]): all lines of a program that uses few,
//! a fixed share of one that uses many.
//!
//! vCPUs run in threads of their own. A vCPU touches only what is its own, but for every 256th miss: then it hands them to
//! the sample, under a lock. Misses of different vCPUs are in order up to as many.
//!
//! # Left out
//!
//! Instruction fetches and prefetches, lines that one core takes from another, memory that is freed and used again at the same
//! address as something else.

use std::sync::{Mutex, PoisonError};

use homenode_tracking::filter::{Filter, Passed, Use};
use homenode_tracking::mrc::Shards;

use homenode_formats::profile_log::{Log, Point};

/// Misses that a vCPU keeps before it hands them on.
const BATCH: usize = 256;

/// Lines that are followed before the sample gets thinner than all.
const LINES_ALL: usize = 16_384;

/// What is modelled.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Config {
    /// Size of a core's private cache, bytes.
    pub private_bytes: u64,
    /// Ways of its sets.
    pub private_ways: usize,
    /// Size of a line, bytes; a power of two.
    pub line_bytes: u64,
    /// Share of lines that is followed at least, in (0, 1].
    pub rate_min: f64,
}

impl Config {
    /// Largest capacity of which the curve tells, bytes.
    pub const CAPACITY_MAX: u64 = 1 << 28;
}

/// What the vCPUs of a program share.
#[derive(Debug)]
pub struct Profile {
    config: Config,
    shards: Mutex<Shards>,
}

/// A vCPU's own part.
#[derive(Debug)]
pub struct Vcpu {
    filter: Filter,
    line_bits: u32,
    batch: Vec<u64>,
    counts: Counts,
}

/// What a vCPU did. Counts add up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions begun.
    pub instructions: u64,
    /// Loads.
    pub reads: u64,
    /// Stores.
    pub writes: u64,
    /// Lines that the private cache asked the LLC for.
    pub llc_accesses: u64,
    /// Written lines that it gave up.
    pub written_back: u64,
}

impl Profile {
    /// Nothing seen yet.
    ///
    /// # Panics
    /// If the configuration is not what its fields say it is.
    pub fn new(config: Config) -> Profile {
        assert!(
            config.line_bytes.is_power_of_two(),
            "a line's size is a power of two"
        );
        let lines_max = (Config::CAPACITY_MAX / config.line_bytes) as usize;
        Profile {
            config,
            shards: Mutex::new(Shards::with_size_or_rate(LINES_ALL, config.rate_min, lines_max)),
        }
    }

    /// One more vCPU, its cache empty.
    pub fn vcpu(&self) -> Vcpu {
        Vcpu {
            filter: Filter::new(
                (self.config.private_bytes / self.config.line_bytes) as usize,
                self.config.private_ways,
            ),
            line_bits: self.config.line_bytes.trailing_zeros(),
            batch: Vec::with_capacity(BATCH),
            counts: Counts::default(),
        }
    }

    /// Takes in what a vCPU has kept.
    #[cold]
    pub fn hand_on(&self, vcpu: &mut Vcpu) {
        // A thread that died holding the lock leaves a sample that misses a few accesses.
        let mut shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        vcpu.batch.drain(..).for_each(|line| shards.access(line));
    }

    /// What all vCPUs did, and the curve; each must have handed on what it kept.
    pub fn log(&self, vcpus: &[Counts]) -> Log {
        let sum = |count: fn(&Counts) -> u64| vcpus.iter().map(count).sum();
        let shards = self.shards.lock().unwrap_or_else(PoisonError::into_inner);
        let (curve, line_bytes) = (shards.curve(), self.config.line_bytes);
        let point = |bytes: u64| Point {
            bytes,
            // Six digits are more than a sample knows, and read back as they were written.
            miss_ratio: (curve.at(bytes as f64 / line_bytes as f64) * 1e6).round() / 1e6,
        };
        Log {
            version: Log::VERSION,
            private_bytes: self.config.private_bytes,
            line_bytes,
            rate: shards.rate(),
            vcpus: vcpus.iter().filter(|counts| counts.instructions > 0).count() as u64,
            instructions: sum(|counts| counts.instructions),
            reads: sum(|counts| counts.reads),
            writes: sum(|counts| counts.writes),
            llc_accesses: sum(|counts| counts.llc_accesses),
            written_back: sum(|counts| counts.written_back),
            footprint_bytes: shards.lines() as u64 * line_bytes,
            forks: 0,
            execs: 0,
            curve: Log::capacities().map(point).collect(),
        }
    }
}

impl Vcpu {
    /// What it did so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// So many instructions begin.
    #[inline]
    pub fn instructions(&mut self, count: u64) {
        self.counts.instructions += count;
    }

    /// Uses memory at an address.
    #[inline]
    pub fn access(&mut self, shared: &Profile, address: u64, wanted: Use) {
        match wanted {
            Use::Read => self.counts.reads += 1,
            Use::Write => self.counts.writes += 1,
        }
        self.touch(shared, address, wanted);
    }

    /// Uses a line, by any address in it, as a further part of an access that was counted.
    #[inline]
    pub fn touch(&mut self, shared: &Profile, address: u64, wanted: Use) {
        let line = address >> self.line_bits;
        if let Passed::Missed { written_back } = self.filter.access(line, wanted) {
            self.counts.written_back += u64::from(written_back.is_some());
            self.counts.llc_accesses += 1;
            self.batch.push(line);
            if self.batch.len() == BATCH {
                shared.hand_on(self);
            }
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
    };

    fn run(profile: &Profile, vcpu: &mut Vcpu, stream: &mut Stream, accesses: usize) {
        for at in 0..accesses {
            let wanted = if at % 4 == 0 { Use::Write } else { Use::Read };
            vcpu.access(profile, stream.next_line() * 64 + 8, wanted);
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
        let log = profile.log(&[vcpu.counts()]);

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
            // The curve has a point every 256 lines; between them it is straight.
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
        // Two vCPUs use the same 256 lines, which fit each one's cache: each misses them once.
        let profile = Profile::new(CONFIG);
        let mut vcpus = [profile.vcpu(), profile.vcpu()];
        for vcpu in &mut vcpus {
            for round in 0..10_u64 {
                for line in 0..256 {
                    vcpu.access(&profile, line * 64 + round, Use::Write);
                }
            }
            vcpu.instructions(1);
            profile.hand_on(vcpu);
        }
        let log = profile.log(&vcpus.map(|vcpu| vcpu.counts()));
        assert_eq!((log.vcpus, log.llc_accesses, log.writes), (2, 512, 5120));
        assert_eq!(log.footprint_bytes, 256 * 64);
        // The second vCPU finds in the LLC what the first brought there.
        let last = log.curve.last().expect("a curve has points");
        assert!((last.miss_ratio - 0.5).abs() < 1e-9, "{last:?}");
    }
}
