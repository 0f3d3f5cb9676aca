//! `/sys/devices/system/node/nodeN/meminfo`: memory of one node.
//!
//! Free is `MemFree + Active(file) + Inactive(file)`: what is free, and the file cache, which the kernel drops when
//! a VM asks for memory (dirty pages are written out first). Nothing is taken off for cache that is in use, because
//! the kernel does not say how much that is; reclaimable slab is left out for the same reason. Tmpfs and other shared
//! memory is not in the `(file)` lists and so not counted.

use std::path::Path;

use homenode_units::{Bytes, NodeId};

use crate::read::{self, ReadError};

/// Memory of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeMemory {
    /// What the kernel manages there (`MemTotal`).
    pub total_bytes: Bytes,
    /// What could be given to a VM now; the module says how it is counted.
    pub free_bytes: Bytes,
}

/// Huge pages of one size on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HugePages {
    /// Size of one.
    pub page_bytes: Bytes,
    /// Reserved and unused.
    pub free_count: u64,
}

/// Memory of a node; `None` where the node is not there (offline).
///
/// # Errors
/// When the file cannot be read, or lacks a line that every kernel writes.
pub fn read(root: &Path, node: NodeId) -> Result<Option<NodeMemory>, ReadError> {
    let path = root.join(format!("sys/devices/system/node/node{node}/meminfo"));
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let value = |key: &str, expected| {
        text.lines()
            .find_map(|line| parse_line(line, node, key))
            .ok_or_else(|| ReadError::malformed(&path, expected, &text))
    };
    let total = value("MemTotal:", "a line `Node N MemTotal: … kB`")?;
    let free = value("MemFree:", "a line `Node N MemFree: … kB`")?;
    let active = value("Active(file):", "a line `Node N Active(file): … kB`")?;
    let inactive = value("Inactive(file):", "a line `Node N Inactive(file): … kB`")?;
    // The kernel reads these counters one after the other, so their sum may exceed the total a little.
    let free = free.saturating_add(active).saturating_add(inactive).min(total);
    Ok(Some(NodeMemory {
        total_bytes: Bytes(total),
        free_bytes: Bytes(free),
    }))
}

fn parse_line(line: &str, node: NodeId, key: &str) -> Option<u64> {
    let mut words = line.split_ascii_whitespace();
    let expected = [Some("Node"), None, Some(key)];
    for want in expected {
        let word = words.next()?;
        match want {
            Some(want) if want != word => return None,
            None if word.parse() != Ok(node.0) => return None,
            _ => {}
        }
    }
    let kib: u64 = words.next()?.parse().ok()?;
    if words.next() != Some("kB") {
        return None;
    }
    kib.checked_mul(1024)
}

/// Free huge pages of a node, by size ascending; empty where the kernel has none.
///
/// # Errors
/// When a count is not a number.
pub fn huge_pages(root: &Path, node: NodeId) -> Result<Vec<HugePages>, ReadError> {
    let dir = root.join(format!("sys/devices/system/node/node{node}/hugepages"));
    let mut sizes = Vec::new();
    for name in read::names(&dir, 64)? {
        let kib = name.strip_prefix("hugepages-").and_then(|n| n.strip_suffix("kB"));
        let Some(page_bytes) = kib.and_then(|n| n.parse::<u64>().ok()?.checked_mul(1024)) else {
            continue;
        };
        let free = read::value_if_there(&dir.join(&name).join("free_hugepages"), "a count of huge pages")?;
        sizes.push(HugePages {
            page_bytes: Bytes(page_bytes),
            free_count: free.unwrap_or(0),
        });
    }
    sizes.sort_by_key(|size| size.page_bytes);
    Ok(sizes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;

    const MEMINFO: &str = "Node 3 MemTotal:         985460 kB\nNode 3 MemFree:          900000 kB\nNode 3 Active(anon): 12 kB\n\
        Node 3 Active(file):        1000 kB\nNode 3 Inactive(file):      2000 kB\n";

    fn tree(meminfo: &str) -> Tree {
        Tree::new(&[("sys/devices/system/node/node3/meminfo", meminfo)])
    }

    #[test]
    fn free_counts_the_file_cache() {
        let memory = read(tree(MEMINFO).root(), NodeId(3)).unwrap().unwrap();
        assert_eq!(
            memory,
            NodeMemory {
                total_bytes: Bytes(985_460 << 10),
                free_bytes: Bytes(903_000 << 10)
            }
        );
    }

    #[test]
    fn an_absent_node_is_none_and_a_truncated_file_an_error() {
        assert_eq!(read(tree(MEMINFO).root(), NodeId(2)), Ok(None));
        for bad in [
            "",
            &MEMINFO[..60],
            &MEMINFO.replace("Node 3", "Node 4"),
            &MEMINFO.replace("900000 kB", "900000"),
            &MEMINFO.replace("900000", "99999999999999999999"),
        ] {
            let error = read(tree(bad).root(), NodeId(3)).unwrap_err();
            assert!(error.to_string().contains("node3/meminfo"), "{error}");
        }
    }

    #[test]
    fn huge_pages_are_listed_by_size() {
        let dir = "sys/devices/system/node/node0/hugepages";
        let tree = Tree::new(&[
            (&format!("{dir}/hugepages-1048576kB/free_hugepages"), "1\n"),
            (&format!("{dir}/hugepages-2048kB/free_hugepages"), "37\n"),
            (&format!("{dir}/other/free_hugepages"), "37\n"),
        ]);
        let pages = huge_pages(tree.root(), NodeId(0)).unwrap();
        let seen: Vec<_> = pages.iter().map(|p| (p.page_bytes.0, p.free_count)).collect();
        assert_eq!(seen, [(2 << 20, 37), (1 << 30, 1)]);
        assert_eq!(huge_pages(tree.root(), NodeId(1)), Ok(vec![]));
        tree.write(&format!("{dir}/hugepages-2048kB/free_hugepages"), "many");
        assert!(huge_pages(tree.root(), NodeId(0)).is_err());
    }
}
