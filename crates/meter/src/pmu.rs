//! A modelled PMU: the last-level caches of a machine, with misses counted by owner of the memory.
//!
//! Each CPU has private caches ([`Filter`]). Their misses go to an LLC with the machine's shape and policy, under a lock that
//! only CPUs of that LLC share. References and misses are counted by CPU and by the frame's tag
//! ([`homenode_formats::pmu_region`]): software in the machine tags the frames of each VM, and reads the counts for each VM's
//! memory. On request of that software, one of every n misses of a CPU is sampled.
//!
//! # Left out
//!
//! Everything that [`Filter`] omits; lines that private caches write back to the LLC; page walks, which are not visible here.

use std::sync::{Mutex, PoisonError};

use homenode_tracking::cache::{Cache, Outcome, Shape};
use homenode_tracking::filter::{Filter, Passed, Use};

use homenode_formats::pmu_region::{Page, Sampled};

/// The last-level caches, and the shared memory that receives the counts.
#[derive(Debug)]
pub struct Pmu<'a> {
    llcs: Vec<Mutex<Cache>>,
    page: Page<'a>,
    line_bits: u32,
}

/// The state of a CPU.
#[derive(Debug)]
pub struct Cpu {
    number: u64,
    llc: usize,
    filter: Filter,
    /// Number of misses since the last sample.
    unsampled: u64,
}

/// A frame has 2^12 bytes.
const FRAME_BITS: u32 = 12;

impl<'a> Pmu<'a> {
    /// Creates this many empty LLCs.
    pub fn new(llcs: usize, shape: Shape, page: Page<'a>) -> Pmu<'a> {
        Pmu {
            llcs: (0..llcs)
                .map(|llc| Mutex::new(Cache::new(shape, 1, llc as u64)))
                .collect(),
            line_bits: page.layout().line_bytes.trailing_zeros(),
            page,
        }
    }

    /// Creates a CPU at an LLC, with an empty private L2 of this many lines.
    ///
    /// # Panics
    /// If the page has no such CPU, or there is no such LLC.
    pub fn cpu(&self, number: u64, llc: usize, private_lines: usize, private_ways: usize) -> Cpu {
        assert!(number < self.page.layout().cpus && llc < self.llcs.len());
        Cpu {
            number,
            llc,
            filter: Filter::new(private_lines, private_ways),
            unsampled: 0,
        }
    }

    /// Counts instructions that a CPU has begun.
    #[inline]
    pub fn instructions(&self, cpu: &Cpu, count: u64) {
        self.page.instructions(cpu.number, count);
    }

    /// Records that a CPU accesses the machine's memory at an address.
    #[inline]
    pub fn access(&self, cpu: &mut Cpu, address: u64, wanted: Use) {
        let line = address >> self.line_bits;
        if cpu.filter.access(line, wanted) != Passed::Held {
            self.reference(cpu, line, address >> FRAME_BITS, wanted);
        }
    }

    fn reference(&self, cpu: &mut Cpu, line: u64, frame: u64, wanted: Use) {
        let mut llc = self.llcs[cpu.llc].lock().unwrap_or_else(PoisonError::into_inner);
        let missed = llc.access(0, line) != Outcome::Hit;
        drop(llc);
        self.page.referenced(cpu.number, self.page.tag(frame), missed);
        if missed {
            self.missed(cpu, Sampled { frame, wanted });
        }
    }

    /// Counts a miss, and samples it if it is the last of n.
    fn missed(&self, cpu: &mut Cpu, sample: Sampled) {
        let period = self.page.sample_period();
        cpu.unsampled += 1;
        if period > 0 && cpu.unsampled >= period {
            cpu.unsampled = 0;
            self.page.sampled(cpu.number, sample);
        }
    }
}

/// Corrects an address that QEMU 7.2 reported, in a machine whose nodes each have `node_bytes`. QEMU adds twice the start of the
/// node's memory to the offset in it.
pub fn undoubled(said: u64, node_bytes: u64) -> u64 {
    said - said / (2 * node_bytes) * node_bytes
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU8, AtomicU64};

    use super::*;
    use homenode_formats::pmu_region::{Counts, Layout};
    use homenode_tracking::cache::Replacement;

    #[test]
    fn addresses_of_each_node_are_where_its_memory_is() {
        const NODE: u64 = 1 << 30;
        for node in 0..4 {
            for place in [0, 4096, NODE - 1] {
                assert_eq!(undoubled(2 * node * NODE + place, NODE), node * NODE + place);
            }
        }
    }

    #[test]
    fn misses_are_counted_where_they_belong() {
        let layout = Layout {
            cpus: 2,
            tags: 3,
            frames: 4096,
            line_bytes: 64,
            samples: 1024,
        };
        let words: Vec<AtomicU64> = (0..layout.tags_at() / 8).map(|_| AtomicU64::new(0)).collect();
        let tags: Vec<AtomicU8> = (0..layout.frames).map(|_| AtomicU8::new(0)).collect();
        let page = Page::new(layout, &words, &tags);
        // Frames 0 to 255 belong to VM 1, frames 256 to 511 to VM 2: 1 MiB each. An LLC holds 8 MiB, private caches 64 KiB.
        (0..256).for_each(|frame| page.set_tag(frame, 1));
        (256..512).for_each(|frame| page.set_tag(frame, 2));
        let llc = Shape {
            sets: 8192,
            ways: 16,
            replacement: Replacement::Lru,
        };
        let pmu = Pmu::new(2, llc, page);
        let mut cpus = [0, 1].map(|cpu| pmu.cpu(cpu, cpu as usize, 1024, 8));
        page.sample_every(61);
        for _ in 0..3 {
            for line in 0..16_384 {
                pmu.access(&mut cpus[0], line * 64, Use::Read);
            }
            for line in 16_384..32_768 {
                pmu.access(&mut cpus[1], line * 64, Use::Write);
            }
        }
        let none = Counts::default();
        // Private caches are too small, so each pass reaches the LLC. Only the first pass misses there.
        let all = Counts {
            references: 3 * 16_384,
            misses: 16_384,
        };
        assert_eq!(
            [0, 1, 2].map(|tag| page.counts(0, tag)),
            [Some(none), Some(all), Some(none)]
        );
        assert_eq!(
            [0, 1, 2].map(|tag| page.counts(1, tag)),
            [Some(none), Some(none), Some(all)]
        );
        // One in 61 misses is sampled, so each page of 64 lines has one or two samples.
        for (cpu, frames, wanted) in [(0, 0..256, Use::Read), (1, 256..512, Use::Write)] {
            let taken = page.take_samples(cpu, &mut 0);
            assert_eq!((taken.samples.len(), taken.lost), (16_384 / 61, 0));
            assert!(
                taken
                    .samples
                    .iter()
                    .all(|sample| frames.contains(&sample.frame) && sample.wanted == wanted)
            );
        }
        page.sample_every(0);
        let before = page.samples_taken(0);
        (512..1024).for_each(|frame| pmu.access(&mut cpus[0], frame << 12, Use::Read));
        assert_eq!(page.samples_taken(0), before);
    }
}
