//! `/sys/devices/system/node/nodeN/memoryM`: which node a machine frame is on.
//!
//! The kernel handles memory in blocks of one size (128 MiB on most machines), and lists a node's blocks below the node. A block
//! that several nodes share is listed below each of them. The node of its frames is then unknown.

use std::collections::BTreeMap;
use std::path::Path;

use homenode_units::{NodeId, NodeSet, PAGE_BYTES};

use crate::read::{self, ReadError};

/// More blocks than any node has: 128 TiB in the smallest blocks.
const BLOCKS_MAX: usize = 1 << 20;

/// The blocks of a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryBlocks {
    block_frames: u64,
    /// Node of each block; `None` if several nodes share it.
    nodes: BTreeMap<u64, Option<NodeId>>,
}

/// Reads the blocks of these nodes; `None` if the kernel lists none.
///
/// # Errors
/// If they cannot be read, or their size is invalid.
pub fn read(root: &Path, nodes: &NodeSet) -> Result<Option<MemoryBlocks>, ReadError> {
    let path = read::below(root, "sys/devices/system/memory/block_size_bytes");
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let bytes = u64::from_str_radix(text.trim(), 16)
        .ok()
        .filter(|bytes| bytes.is_power_of_two() && *bytes >= PAGE_BYTES)
        .ok_or_else(|| ReadError::malformed(&path, "a power of two in hexadecimal", &text))?;
    let mut blocks = BTreeMap::new();
    for node in nodes.iter() {
        let dir = read::below(root, &format!("sys/devices/system/node/node{node}"));
        let names = read::names(&dir, BLOCKS_MAX)?;
        for block in names
            .iter()
            .filter_map(|name| name.strip_prefix("memory")?.parse().ok())
        {
            blocks
                .entry(block)
                .and_modify(|other| *other = None)
                .or_insert(Some(node));
        }
    }
    Ok((!blocks.is_empty()).then_some(MemoryBlocks {
        block_frames: bytes / PAGE_BYTES,
        nodes: blocks,
    }))
}

impl MemoryBlocks {
    /// Returns the node of a frame of 4 KiB; `None` if the frame is on no node, or its node is unknown.
    pub fn node_of(&self, frame: u64) -> Option<NodeId> {
        self.nodes.get(&(frame / self.block_frames)).copied().flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    #[test]
    fn frames_lie_on_the_node_of_their_block() {
        let tree = Tree::new(&[
            ("sys/devices/system/memory/block_size_bytes", "8000000\n"),
            ("sys/devices/system/node/node0/memory0/online", "1"),
            ("sys/devices/system/node/node0/memory1/online", "1"),
            ("sys/devices/system/node/node1/memory1/online", "1"),
            ("sys/devices/system/node/node1/memory32/online", "1"),
            ("sys/devices/system/node/node1/memory_failure/total", "0"),
        ]);
        let nodes = "0-1".parse().unwrap();
        let blocks = read(tree.root(), &nodes).unwrap().unwrap();
        let frames = [0, 32_767, 32_768, 65_536, 32 * 32_768, u64::MAX];
        let seen = frames.map(|frame| blocks.node_of(frame).map(|node| node.0));
        assert_eq!(seen, [Some(0), Some(0), None, None, Some(1), None]);
    }

    #[test]
    fn kernels_without_blocks_have_none_and_a_size_that_is_none_is_refused() {
        let nodes = "0".parse().unwrap();
        assert_eq!(read(Tree::new(&[]).root(), &nodes), Ok(None));
        for size in ["0", "3000", "much", ""] {
            let tree = Tree::new(&[("sys/devices/system/memory/block_size_bytes", size)]);
            let complaint = read(tree.root(), &nodes).unwrap_err().to_string();
            assert!(complaint.contains("block_size_bytes"), "{complaint}");
        }
    }

    #[test]
    fn the_kernels_own_blocks_read() {
        let nodes = NodeSet::one(NodeId(0));
        if let Some(blocks) = read(Path::new("/"), &nodes).unwrap() {
            let known = (0..64).any(|block| blocks.node_of(block * blocks.block_frames) == Some(NodeId(0)));
            assert!(known, "{blocks:?}");
        }
    }
}
