//! Which nodes use which frames: samples of one reading, from any source, and the sampler of a modelled PMU.

use std::collections::BTreeMap;

use homenode_formats::pmu_region::{Page, Use};
use homenode_host::{Accesses, PageUse};
use homenode_machine::Machine;
use homenode_units::{CpuId, NodeId, NodeMap, Pages};

use super::frames::Frames;
use crate::memory_blocks::MemoryBlocks;

/// One in this many misses is sampled. The number is prime, so that every line of a page that is read line by line gets its turn.
const PERIOD: u64 = 61;
/// Number of bits that say which frames may have samples: 128 KiB, which a core's cache holds.
const MARKS: u64 = 1 << 20;

/// Samples between two readings, by frame.
///
/// A VM has millions of pages and a reading has thousands of samples. So each page is first looked up in a bitmap, and only then
/// among the samples.
#[derive(Debug)]
pub(crate) struct Samples {
    blocks: MemoryBlocks,
    /// Sorted by frame and node once all are noted.
    all: Vec<OneSample>,
    /// A bit for the lowest bits of each sampled frame's number.
    marks: Vec<u64>,
}

/// A CPU of a node used a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct OneSample {
    frame: u64,
    node: NodeId,
    is_write: bool,
}

impl Samples {
    /// Starts without samples.
    pub(crate) fn new(blocks: MemoryBlocks) -> Samples {
        Samples {
            blocks,
            all: Vec::new(),
            marks: vec![0; (MARKS / 64) as usize],
        }
    }

    /// Makes room for this many samples, so noting them allocates nothing; 0 releases all room.
    pub(crate) fn make_room(&mut self, samples: usize) {
        self.clear();
        self.all = Vec::with_capacity(samples);
    }

    /// Forgets all samples.
    pub(crate) fn clear(&mut self) {
        for sample in &self.all {
            self.marks[mark(sample.frame).0] = 0;
        }
        self.all.clear();
    }

    /// Notes that a CPU of `node` used a frame.
    pub(crate) fn note(&mut self, frame: u64, node: NodeId, is_write: bool) {
        let (word, bit) = mark(frame);
        self.marks[word] |= bit;
        self.all.push(OneSample {
            frame,
            node,
            is_write,
        });
    }

    /// Call this once all samples of a reading are noted.
    pub(crate) fn settle(&mut self) {
        self.all.sort_unstable();
    }

    /// Returns the node of a frame.
    fn node_of(&self, frame: u64) -> Option<NodeId> {
        self.blocks.node_of(frame)
    }

    /// Returns the samples of a frame, in order of nodes.
    fn of(&self, frame: u64) -> &[OneSample] {
        let (word, bit) = mark(frame);
        if self.marks[word] & bit == 0 {
            return &[];
        }
        let begin = self.all.partition_point(|sample| sample.frame < frame);
        let rest = &self.all[begin..];
        &rest[..rest.partition_point(|sample| sample.frame == frame)]
    }

    /// Returns how the pages of a VM were used, without those that have no samples or whose node is unknown.
    pub(crate) fn uses(&self, frames: &Frames) -> Vec<PageUse> {
        let pages = (0..).zip(frames.by_page()).filter(|(_, frame)| **frame != 0);
        let used = pages.filter_map(|(page, frame)| {
            let samples = self.of((*frame).into());
            if samples.is_empty() {
                return None;
            }
            let of_node = samples.chunk_by(|a, b| a.node == b.node);
            Some(PageUse {
                frame: page,
                pages: Pages(1),
                on: self.node_of((*frame).into())?,
                samples: of_node.map(|of| (of[0].node, of.len() as u32)).collect(),
                writes: samples.iter().filter(|sample| sample.is_write).count() as u32,
            })
        });
        used.collect()
    }
}

/// Returns the place of a frame's mark: a word, and a bit in it.
fn mark(frame: u64) -> (usize, u64) {
    let mark = frame % MARKS;
    ((mark / 64) as usize, 1 << (mark % 64))
}

/// Reads a modelled PMU's samples and sums them by frame, tag and node.
#[derive(Debug)]
pub struct Sampler {
    page: Page<'static>,
    cpus: Vec<Cpu>,
    line_bytes: u64,
    /// Bytes that each node's controllers moved since the start.
    traffic: NodeMap<u64>,
    /// Samples between the last two readings.
    samples: Samples,
    tags: BTreeMap<u8, Accesses>,
}

/// One of the CPUs that the page counts.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    node: Option<NodeId>,
    /// Number of samples read so far.
    taken: u64,
}

impl Sampler {
    /// Reads samples from now on. The page must number CPUs as the machine does.
    pub fn new(page: Page<'static>, machine: &Machine, blocks: MemoryBlocks) -> Sampler {
        let layout = page.layout();
        let cpu = |number: u64| Cpu {
            node: u32::try_from(number)
                .ok()
                .and_then(|number| machine.node_of(CpuId(number))),
            taken: page.samples_taken(number),
        };
        Sampler {
            page,
            cpus: (0..layout.cpus).map(cpu).collect(),
            line_bytes: layout.line_bytes,
            traffic: machine.memory_nodes().iter().map(|node| (node, 0)).collect(),
            samples: Samples::new(blocks),
            tags: BTreeMap::new(),
        }
    }

    /// Reads the samples that were taken since the last reading, and asks for more.
    pub(super) fn look(&mut self) {
        self.page.sample_every(PERIOD);
        self.samples.clear();
        self.tags.clear();
        for number in 0..self.cpus.len() {
            let taken = self
                .page
                .take_samples(number as u64, &mut self.cpus[number].taken);
            let node = self.cpus[number].node;
            // Lost samples are assumed to be distributed like the others.
            let each = |count: u64| {
                let all = u128::from(taken.samples.len() as u64) + u128::from(taken.lost);
                let misses = u128::from(count) * u128::from(PERIOD) * all;
                (misses / taken.samples.len().max(1) as u128) as u64
            };
            let mut on: BTreeMap<(NodeId, u8), u64> = BTreeMap::new();
            for sample in &taken.samples {
                if let Some(node) = node {
                    self.samples.note(sample.frame, node, sample.wanted == Use::Write);
                }
                if let Some(home) = self.samples.node_of(sample.frame) {
                    *on.entry((home, self.page.tag(sample.frame))).or_default() += 1;
                }
            }
            for ((home, tag), count) in on {
                let misses = each(count);
                if let Some(traffic) = self.traffic.get_mut(home) {
                    *traffic = traffic.wrapping_add(misses.wrapping_mul(self.line_bytes));
                }
                let (local, remote) = match node == Some(home) {
                    true => (misses, 0),
                    false => (0, misses),
                };
                let on = NodeMap::from_iter([(home, misses)]);
                let nothing = self.nothing();
                add(
                    self.tags.entry(tag).or_insert(nothing),
                    &Accesses { local, remote, on },
                );
            }
        }
        self.samples.settle();
    }

    /// Returns zero accesses for each node.
    pub(super) fn nothing(&self) -> Accesses {
        Accesses {
            local: 0,
            remote: 0,
            on: self.traffic.map(|_, _| 0),
        }
    }

    /// Returns the samples between the last two readings.
    pub(super) fn samples(&self) -> &Samples {
        &self.samples
    }

    /// Returns the accesses of all CPUs to frames with this tag between the last two readings.
    pub(super) fn tag(&self, tag: u8) -> Option<&Accesses> {
        self.tags.get(&tag)
    }

    /// Returns the bytes that each node's controllers have moved.
    pub(super) fn traffic(&self) -> &NodeMap<u64> {
        &self.traffic
    }
}

/// Adds accesses to a sum. Nodes that the sum does not have are left out.
pub(super) fn add(sum: &mut Accesses, since: &Accesses) {
    sum.local = sum.local.wrapping_add(since.local);
    sum.remote = sum.remote.wrapping_add(since.remote);
    for (node, count) in since.on.iter() {
        if let Some(on) = sum.on.get_mut(node) {
            *on = on.wrapping_add(*count);
        }
    }
}
