//! Writes and reads the page.

use std::hint;
use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicU64, Ordering, fence};

use homenode_units::NodeId;

use crate::layout::{LAYOUT, MAGIC, NODES_MAX, NONE, RawPage, SEQUENCE_WORD, VCPUS_MAX, VNODES_MAX, WORDS};
use crate::topology::{Facts, Topology, TopologyError, VirtualNode};

/// How many times a reader finds the page being written before it gives up. A writer needs less than a microsecond.
pub const READ_TRIES: usize = 1000;

type Bytes = [u8; size_of::<RawPage>()];

/// The writer of a page. It never reads the page, because its own copy is authoritative.
#[derive(Debug)]
pub struct Publisher<'a> {
    words: &'a [AtomicU64],
    sequence: u64,
    bytes: Box<Bytes>,
}

impl<'a> Publisher<'a> {
    /// Creates a writer of these words. There should be no other writer.
    ///
    /// `sequence` must be new for this page, such as the time since boot in nanoseconds. If a new writer reused an old sequence,
    /// a reader of the old version would miss the change.
    ///
    /// # Panics
    /// If there are fewer words than a page has.
    pub fn new(words: &'a [AtomicU64], sequence: u64) -> Publisher<'a> {
        assert!(words.len() >= WORDS, "a topology page has {WORDS} words");
        Publisher {
            words: &words[..WORDS],
            sequence: sequence & !1,
            bytes: Box::new([0; size_of::<RawPage>()]),
        }
    }

    /// Publishes a topology, and returns its sequence.
    pub fn publish(&mut self, topology: &Topology) -> u64 {
        encode(topology, &mut self.bytes);
        let whole = self.sequence.wrapping_add(2);
        self.words[SEQUENCE_WORD].store(whole.wrapping_sub(1), Ordering::Relaxed);
        // A reader that sees any word of this version must also see the odd sequence.
        fence(Ordering::Release);
        for (at, (word, bytes)) in self.words.iter().zip(self.bytes.chunks_exact(8)).enumerate() {
            if at != SEQUENCE_WORD {
                let value = u64::from_le_bytes(bytes.try_into().unwrap_or_default());
                word.store(value, Ordering::Relaxed);
            }
        }
        self.words[SEQUENCE_WORD].store(whole, Ordering::Release);
        self.sequence = whole;
        whole
    }
}

fn put_list(bytes: &mut Bytes, at: usize, room: usize, nodes: impl ExactSizeIterator<Item = u8>) {
    let (used, free) = bytes[at..at + room].split_at_mut(nodes.len());
    used.iter_mut().zip(nodes).for_each(|(place, node)| *place = node);
    free.fill(NONE);
}

fn encode(topology: &Topology, bytes: &mut Bytes) {
    let facts = topology.facts();
    let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    put(offset_of!(RawPage, magic), &MAGIC.to_le_bytes());
    put(offset_of!(RawPage, layout), &LAYOUT.to_le_bytes());
    put(
        offset_of!(RawPage, size),
        &(size_of::<RawPage>() as u32).to_le_bytes(),
    );
    put(
        offset_of!(RawPage, vcpu_count),
        &(facts.vcpu_pnode.len() as u32).to_le_bytes(),
    );
    put(
        offset_of!(RawPage, vnode_count),
        &(facts.vnode_pnode.len() as u16).to_le_bytes(),
    );
    put(
        offset_of!(RawPage, pnode_count),
        &(facts.distances.len() as u16).to_le_bytes(),
    );
    let byte = |node: &Option<NodeId>| node.map_or(NONE, |node| node.0 as u8);
    let decided = |node: &Option<VirtualNode>| node.map_or(NONE, |node| node.0 as u8);
    let vcpu_pnode = facts.vcpu_pnode.iter().map(byte);
    put_list(bytes, offset_of!(RawPage, vcpu_pnode), VCPUS_MAX, vcpu_pnode);
    let vcpu_vnode = topology.all_decided().iter().map(decided);
    put_list(bytes, offset_of!(RawPage, vcpu_vnode), VCPUS_MAX, vcpu_vnode);
    let vnode_pnode = facts.vnode_pnode.iter().map(byte);
    put_list(bytes, offset_of!(RawPage, vnode_pnode), VNODES_MAX, vnode_pnode);
    for (from, row) in facts.distances.iter().enumerate() {
        let at = offset_of!(RawPage, distance) + from * NODES_MAX;
        bytes[at..at + row.len()].copy_from_slice(row);
    }
}

/// Why a page cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// No complete version was read in [`READ_TRIES`] tries.
    #[error(
        "the topology page changed during every try to read it, or the agent died while writing it: try again"
    )]
    Torn,
    /// The page does not begin with [`MAGIC`].
    #[error("not a topology page: it begins with {0:#018x}, not {MAGIC:#018x}")]
    Magic(u64),
    /// The page has another layout.
    #[error("the topology page has layout {0}, but this program reads {LAYOUT}")]
    Layout(u32),
    /// The page states another size.
    #[error("the topology page states {0} bytes, but its layout has {own}", own = size_of::<RawPage>())]
    Size(u32),
    /// A value in the page is out of bounds.
    #[error("the topology page is invalid: {0}")]
    Topology(#[from] TopologyError),
}

/// Reads a page that any process may have written to.
#[derive(Debug, Clone, Copy)]
pub struct Reader<'a> {
    words: &'a [AtomicU64],
}

impl<'a> Reader<'a> {
    /// Creates a reader of these words.
    ///
    /// # Panics
    /// If there are fewer words than a page has.
    pub fn new(words: &'a [AtomicU64]) -> Reader<'a> {
        assert!(words.len() >= WORDS, "a topology page has {WORDS} words");
        Reader {
            words: &words[..WORDS],
        }
    }

    /// Returns the page's version with a single load. If it differs from an earlier one, something has changed.
    #[inline]
    pub fn sequence(&self) -> u64 {
        self.words[SEQUENCE_WORD].load(Ordering::Acquire)
    }

    /// Returns the page's sequence and its content.
    ///
    /// # Errors
    /// A [`ReadError`] that names the problem.
    pub fn read(&self) -> Result<(u64, Topology), ReadError> {
        let mut bytes: Bytes = [0; size_of::<RawPage>()];
        for _ in 0..READ_TRIES {
            let before = self.sequence();
            if before & 1 == 1 {
                hint::spin_loop();
                continue;
            }
            for (word, bytes) in self.words.iter().zip(bytes.chunks_exact_mut(8)) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
            // Keeps the loads of all words before the second load of the sequence.
            fence(Ordering::Acquire);
            if self.words[SEQUENCE_WORD].load(Ordering::Relaxed) == before {
                return Ok((before, decode(&bytes)?));
            }
        }
        Err(ReadError::Torn)
    }
}

fn decode(bytes: &Bytes) -> Result<Topology, ReadError> {
    fn get<const N: usize>(bytes: &Bytes, at: usize) -> [u8; N] {
        std::array::from_fn(|offset| bytes[at + offset])
    }
    let magic = u64::from_le_bytes(get(bytes, offset_of!(RawPage, magic)));
    if magic != MAGIC {
        return Err(ReadError::Magic(magic));
    }
    let layout = u32::from_le_bytes(get(bytes, offset_of!(RawPage, layout)));
    if layout != LAYOUT {
        return Err(ReadError::Layout(layout));
    }
    let size = u32::from_le_bytes(get(bytes, offset_of!(RawPage, size)));
    if size as usize != size_of::<RawPage>() {
        return Err(ReadError::Size(size));
    }
    let vcpus = u32::from_le_bytes(get(bytes, offset_of!(RawPage, vcpu_count))) as usize;
    let vnodes = usize::from(u16::from_le_bytes(get(bytes, offset_of!(RawPage, vnode_count))));
    let nodes = usize::from(u16::from_le_bytes(get(bytes, offset_of!(RawPage, pnode_count))));
    // Checks these counts before they are used.
    for (count, most, error) in [
        (vcpus, VCPUS_MAX, TopologyError::Vcpus { count: vcpus }),
        (vnodes, VNODES_MAX, TopologyError::VirtualNodes { count: vnodes }),
        (nodes, NODES_MAX, TopologyError::HostNodes { count: nodes }),
    ] {
        if count == 0 || count > most {
            return Err(error.into());
        }
    }
    let list = |at: usize, count: usize| {
        let known = |byte: &u8| (*byte != NONE).then_some(u16::from(*byte));
        bytes[at..at + count].iter().map(known)
    };
    let facts = Facts {
        vcpu_pnode: list(offset_of!(RawPage, vcpu_pnode), vcpus)
            .map(|node| node.map(NodeId))
            .collect(),
        vnode_pnode: list(offset_of!(RawPage, vnode_pnode), vnodes)
            .map(|node| node.map(NodeId))
            .collect(),
        distances: (0..nodes)
            .map(|from| offset_of!(RawPage, distance) + from * NODES_MAX)
            .map(|at| bytes[at..at + nodes].to_vec())
            .collect(),
    };
    let decided = list(offset_of!(RawPage, vcpu_vnode), vcpus).map(|node| node.map(VirtualNode));
    Ok(Topology::with_nodes(facts, decided.collect())?)
}
