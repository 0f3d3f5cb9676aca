//! Which nodes use which frames, as a modelled PMU samples it.

use std::collections::BTreeMap;

use homenode_formats::pmu_region::{Page, Sampled, Use};
use homenode_host::Accesses;
use homenode_machine::Machine;
use homenode_units::{CpuId, NodeId, NodeMap};

use crate::memory_blocks::MemoryBlocks;

/// One in this many misses is sampled. The number is prime, so that every line of a page that is read line by line gets its turn.
const PERIOD: u64 = 61;

/// Reads the samples and sums them by frame, tag and node.
#[derive(Debug)]
pub struct Sampler {
    page: Page<'static>,
    blocks: MemoryBlocks,
    cpus: Vec<Cpu>,
    line_bytes: u64,
    /// Bytes that each node's controllers moved since the start.
    traffic: NodeMap<u64>,
    /// Samples between the last two looks, by frame.
    frames: BTreeMap<u64, FrameUse>,
    tags: BTreeMap<u8, Accesses>,
}

/// One of the CPUs that the page counts.
#[derive(Clone, Copy, Debug)]
struct Cpu {
    node: Option<NodeId>,
    /// Number of samples read so far.
    taken: u64,
}

/// Samples of a frame.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct FrameUse {
    /// Number of samples from the CPUs of each node.
    pub samples: NodeMap<u32>,
    pub writes: u32,
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
            blocks,
            cpus: (0..layout.cpus).map(cpu).collect(),
            line_bytes: layout.line_bytes,
            traffic: machine.memory_nodes().iter().map(|node| (node, 0)).collect(),
            frames: BTreeMap::new(),
            tags: BTreeMap::new(),
        }
    }

    /// Reads the samples that were taken since the last look, and asks for more.
    pub(super) fn look(&mut self) {
        self.page.sample_every(PERIOD);
        self.frames.clear();
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
                self.note(*sample, node);
                if let Some(home) = self.blocks.node_of(sample.frame) {
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
    }

    fn note(&mut self, sample: Sampled, node: Option<NodeId>) {
        let Some(node) = node else { return };
        let used = self.frames.entry(sample.frame).or_default();
        match used.samples.get_mut(node) {
            Some(count) => *count += 1,
            None => used.samples.insert(node, 1),
        }
        used.writes += u32::from(sample.wanted == Use::Write);
    }

    /// Returns zero accesses for each node.
    pub(super) fn nothing(&self) -> Accesses {
        Accesses {
            local: 0,
            remote: 0,
            on: self.traffic.map(|_, _| 0),
        }
    }

    /// Returns how all CPUs used a frame between the last two looks.
    pub(super) fn frame(&self, frame: u64) -> Option<&FrameUse> {
        self.frames.get(&frame)
    }

    /// Returns the node of a frame.
    pub(super) fn node_of(&self, frame: u64) -> Option<NodeId> {
        self.blocks.node_of(frame)
    }

    /// Returns the accesses of all CPUs to frames with this tag between the last two looks.
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
