//! `/sys/devices/system/node/nodeN/meminfo`: memory of one node.
//!
//! Free memory is `MemFree + Active(file) + Inactive(file)`: unused memory, plus the file cache, which the kernel drops when a VM
//! asks for memory (after writing out dirty pages). Cache in use is not subtracted, because the kernel does not report how much
//! that is. Reclaimable slab is left out for the same reason. Tmpfs and other shared memory is not in the `(file)` lists, and so
//! is not counted.

use std::path::Path;

use homenode_host::HugePages;
use homenode_units::{Bytes, NodeId};

use crate::read::{self, ReadError};

/// Memory of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeMemory {
    /// Memory that the kernel manages on the node (`MemTotal`).
    pub total_bytes: Bytes,
    /// Memory that a VM could get now, counted as the module's documentation says.
    pub free_bytes: Bytes,
}

/// Reads the memory of a node; `None` if the node is not there (offline).
///
/// # Errors
/// If the file cannot be read, or lacks a line that every kernel writes.
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

/// Reads a node's huge pages, by size ascending; empty if the kernel has none.
///
/// Surplus pages are not counted, neither existing ones (`surplus_hugepages`) nor possible ones: the kernel takes them from
/// ordinary memory on demand (`nr_overcommit_hugepages`), and returns them as soon as they are free.
///
/// # Errors
/// If a count is not a number.
pub fn huge_pages(root: &Path, node: NodeId) -> Result<Vec<HugePages>, ReadError> {
    let dir = root.join(format!("sys/devices/system/node/node{node}/hugepages"));
    let mut sizes = Vec::new();
    for name in read::names(&dir, 64)? {
        let kib = name.strip_prefix("hugepages-").and_then(|n| n.strip_suffix("kB"));
        let page_bytes = kib.and_then(|n| n.parse::<u64>().ok()?.checked_mul(1024));
        let Some(page_bytes) = page_bytes.filter(|bytes| *bytes > 0) else {
            continue;
        };
        let count = |file: &str| -> Result<u64, ReadError> {
            let count = read::value_if_there(&dir.join(&name).join(file), "a count of huge pages")?;
            Ok(count.unwrap_or(0))
        };
        let surplus = count("surplus_hugepages")?;
        sizes.push(HugePages {
            page_bytes: Bytes(page_bytes),
            total_count: count("nr_hugepages")?.saturating_sub(surplus),
            free_count: count("free_hugepages")?.saturating_sub(surplus),
        });
    }
    sizes.sort_by_key(|size| size.page_bytes);
    Ok(sizes)
}

/// Returns the size of the huge pages that a program gets by default (`Hugepagesize` in `/proc/meminfo`); `None` if the kernel
/// has no huge pages.
///
/// # Errors
/// If the file cannot be read, or its line is not a size.
pub fn default_huge_page(root: &Path) -> Result<Option<Bytes>, ReadError> {
    let path = root.join("proc/meminfo");
    let Some(text) = read::text_if_there(&path, read::SMALL_BYTES)? else {
        return Ok(None);
    };
    let Some(line) = text.lines().find_map(|line| line.strip_prefix("Hugepagesize:")) else {
        return Ok(None);
    };
    let kib = line.trim().strip_suffix("kB").map(str::trim);
    let bytes = kib.and_then(|kib| kib.parse::<u64>().ok()?.checked_mul(1024));
    match bytes {
        Some(bytes) => Ok(Some(Bytes(bytes))),
        None => Err(ReadError::malformed(&path, "a line `Hugepagesize: … kB`", &text)),
    }
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
            (&format!("{dir}/hugepages-1048576kB/nr_hugepages"), "2\n"),
            (&format!("{dir}/hugepages-1048576kB/free_hugepages"), "1\n"),
            (&format!("{dir}/hugepages-2048kB/nr_hugepages"), "40\n"),
            (&format!("{dir}/hugepages-2048kB/free_hugepages"), "37\n"),
            (&format!("{dir}/hugepages-0kB/free_hugepages"), "37\n"),
            (
                &format!("{dir}/hugepages-99999999999999999999kB/free_hugepages"),
                "37\n",
            ),
            (&format!("{dir}/other/free_hugepages"), "37\n"),
        ]);
        let pages = huge_pages(tree.root(), NodeId(0)).unwrap();
        let seen: Vec<_> = pages
            .iter()
            .map(|p| (p.page_bytes.0, p.total_count, p.free_count))
            .collect();
        assert_eq!(seen, [(2 << 20, 40, 37), (1 << 30, 2, 1)]);
        assert_eq!(huge_pages(tree.root(), NodeId(1)), Ok(vec![]));
        for bad in ["many", "-1", "", "99999999999999999999"] {
            tree.write(&format!("{dir}/hugepages-2048kB/free_hugepages"), bad);
            let error = huge_pages(tree.root(), NodeId(0)).unwrap_err().to_string();
            assert!(error.contains("hugepages-2048kB/free_hugepages"), "{error}");
        }
    }

    #[test]
    fn surplus_huge_pages_are_not_counted_on() {
        let dir = "sys/devices/system/node/node0/hugepages/hugepages-2048kB";
        let tree = Tree::new(&[
            (&format!("{dir}/nr_hugepages"), "12\n"),
            (&format!("{dir}/free_hugepages"), "5\n"),
            (&format!("{dir}/surplus_hugepages"), "4\n"),
        ]);
        let free = |tree: &Tree| {
            let pages = huge_pages(tree.root(), NodeId(0)).unwrap();
            (pages[0].total_count, pages[0].free_count)
        };
        assert_eq!(free(&tree), (8, 1));
        tree.write(&format!("{dir}/surplus_hugepages"), "12\n");
        assert_eq!(free(&tree), (0, 0));
        // A pool that may grow has no more pages because of that.
        tree.write(&format!("{dir}/surplus_hugepages"), "0\n");
        tree.write(&format!("{dir}/nr_overcommit_hugepages"), "1000\n");
        assert_eq!(free(&tree), (12, 5));
    }

    #[test]
    fn the_default_huge_page_is_what_meminfo_says() {
        let read = |text: &str| default_huge_page(Tree::new(&[("proc/meminfo", text)]).root());
        assert_eq!(
            read("MemTotal: 10 kB\nHugepagesize:       2048 kB\n"),
            Ok(Some(Bytes(2 << 20)))
        );
        assert_eq!(read("Hugepagesize:    1048576 kB\n"), Ok(Some(Bytes(1 << 30))));
        assert_eq!(read("MemTotal: 10 kB\n"), Ok(None));
        assert_eq!(default_huge_page(Tree::new(&[]).root()), Ok(None));
        for bad in ["Hugepagesize: 2048\n", "Hugepagesize: x kB\n", "Hugepagesize:\n"] {
            assert!(
                read(bad).unwrap_err().to_string().contains("proc/meminfo"),
                "{bad}"
            );
        }
    }
}
