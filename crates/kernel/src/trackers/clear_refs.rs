//! `/proc/PID/clear_refs` and `/proc/PID/smaps`: pages of guest RAM that were used since their marks were cleared.
//!
//! Writing 1 clears the accessed bits of a process's page tables and the referenced flags of its pages; `Referenced` in smaps
//! counts those set since. For a guest that QEMU itself emulates, that is enough. A guest under KVM reaches its memory through
//! KVM's own page tables, whose accessed bits neither file reads, so a use shows only when KVM has to look a page up. Writing 4
//! forces that. It is meant to start the tracking of writes, and invalidates everything that KVM has mapped. So the next use of
//! each page faults, is looked up, and leaves its mark.
//!
//! A huge page is looked up and marked as a whole. Clearing also erases what the kernel's own reclaim knows about the VM's pages,
//! so for one window they look cold to it.

use std::io::Write;
use std::path::Path;

use homenode_units::{Bytes, PAGE_BYTES, Pages};

use super::TrackerError;
use crate::numa_maps::Range;
use crate::read::{self, ReadError};

/// Most bytes to read from smaps. A VMA has some 25 lines of 30 bytes; `vm.max_map_count` is 65530 by default.
const SMAPS_BYTES: u64 = 128 << 20;

/// What to clear for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Clear {
    /// Accessed bits and referenced flags (1).
    References,
    /// Marks of writes (4), which also drops every page that KVM has mapped.
    Mappings,
}

/// Clears these marks in all of a process's memory.
///
/// # Errors
/// If the process is gone, or the agent is not root.
pub fn clear(root: &Path, pid: i32, what: Clear) -> Result<(), TrackerError> {
    let path = root.join(format!("proc/{pid}/clear_refs"));
    let word = match what {
        Clear::References => "1",
        Clear::Mappings => "4",
    };
    let written = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(word.as_bytes()));
    written.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => TrackerError::Gone,
        _ if error.raw_os_error() == Some(libc::ESRCH) => TrackerError::Gone,
        _ => TrackerError::refused(&path, &error),
    })
}

/// Amount of memory referenced in some ranges.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Referenced {
    /// All memory that was referenced.
    pub used: Pages,
    /// Upper bound on the part in huge pages. Each huge page counts as a whole.
    pub coarse: Pages,
}

/// Reads how much was referenced in these ranges; `None` if the process is gone.
///
/// # Errors
/// If smaps is malformed or may not be read.
pub fn referenced(root: &Path, pid: i32, ranges: &[Range]) -> Result<Option<Referenced>, ReadError> {
    let path = root.join(format!("proc/{pid}/smaps"));
    let Some(text) = read::text_if_there(&path, SMAPS_BYTES)? else {
        return Ok(None);
    };
    parse(&path, &text, ranges).map(Some)
}

fn parse(path: &Path, text: &str, ranges: &[Range]) -> Result<Referenced, ReadError> {
    let mut sum = Referenced::default();
    let (mut is_ours, mut used, mut huge) = (false, 0_u64, 0_u64);
    let mut close = |is_ours: bool, used: u64, huge: u64| {
        if is_ours {
            let pages = |kib: u64| Pages(kib.saturating_mul(1024) / PAGE_BYTES);
            sum.used += pages(used);
            sum.coarse += pages(huge.min(used));
        }
    };
    for line in text.lines() {
        let mut words = line.split_ascii_whitespace();
        let Some(key) = words.next() else { continue };
        let Some(key) = key.strip_suffix(':') else {
            close(is_ours, used, huge);
            (used, huge) = (0, 0);
            let start = key
                .split_once('-')
                .and_then(|(start, _)| u64::from_str_radix(start, 16).ok());
            let start =
                start.ok_or_else(|| ReadError::malformed(path, "`start-end …` or `Key: value`", line))?;
            is_ours = ranges
                .iter()
                .any(|range| (range.start..range.end).contains(&start));
            continue;
        };
        let into = match key {
            "Referenced" => &mut used,
            "AnonHugePages" | "ShmemPmdMapped" | "FilePmdMapped" => &mut huge,
            _ => continue,
        };
        let kib = words.next().and_then(|word| word.parse::<u64>().ok());
        let kib = kib.ok_or_else(|| ReadError::malformed(path, "`Key: N kB`", line))?;
        *into = into.saturating_add(kib);
    }
    close(is_ours, used, huge);
    Ok(sum)
}

/// Returns why smaps has no accessed bits for the memory in these ranges; `None` if it has them.
pub fn unfit(ranges: &[Range]) -> Option<String> {
    let huge = ranges.iter().find(|range| range.page_bytes > Bytes(PAGE_BYTES))?;
    Some(format!(
        "its memory is in hugetlbfs ({} pages), and the kernel does not report which of those are used",
        huge.page_bytes
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;
    use crate::numa_maps::Sharing;

    const SMAPS: &str = "\
55d0c8a00000-55d0c8b00000 r-xp 00000000 fe:01 1234                       /usr/bin/qemu-system-x86_64
Size:               1024 kB
Referenced:         1000 kB
AnonHugePages:         0 kB
VmFlags: rd ex mr mw me 
7f0000000000-7f0004000000 rw-p 00000000 00:00 0 
Size:              65536 kB
KernelPageSize:        4 kB
Rss:               30000 kB
Referenced:        10000 kB
Anonymous:         30000 kB
AnonHugePages:      4096 kB
ShmemPmdMapped:        0 kB
FilePmdMapped:         0 kB
VmFlags: rd wr mr mw me ac sd hg 
7f0004000000-7f0008000000 rw-p 00000000 00:00 0 
Referenced:         2048 kB
AnonHugePages:     20480 kB
VmFlags: rd wr
";

    fn range() -> Range {
        Range {
            start: 0x7f00_0000_0000,
            end: 0x7f00_0800_0000,
            sharing: Sharing::Private,
            page_bytes: Bytes(PAGE_BYTES),
        }
    }

    #[test]
    fn what_is_referenced_of_guest_ram_is_counted_and_nothing_else() {
        let tree = Tree::new(&[("proc/7/smaps", SMAPS)]);
        let seen = referenced(tree.root(), 7, &[range()]).unwrap().unwrap();
        // The expected totals are 10000 and 2048 KiB. For the second range, the bound on huge pages is all of its used memory.
        assert_eq!((seen.used, seen.coarse), (Pages(3012), Pages(1536)));
        assert_eq!(referenced(tree.root(), 8, &[range()]), Ok(None));
    }

    #[test]
    fn malformed_smaps_are_named() {
        for bad in [
            "nonsense\n",
            "7f0000000000-7f0004000000 rw-p\nReferenced: lots kB\n",
        ] {
            let tree = Tree::new(&[("proc/7/smaps", bad)]);
            let error = referenced(tree.root(), 7, &[range()]).unwrap_err().to_string();
            assert!(error.contains("proc/7/smaps"), "{error}");
        }
    }

    #[test]
    fn hugetlbfs_is_told_apart() {
        let huge = Range {
            page_bytes: Bytes(2 << 20),
            ..range()
        };
        assert_eq!(unfit(&[range()]), None);
        assert!(unfit(&[range(), huge]).is_some_and(|why| why.contains("2MiB pages")));
    }

    /// On this machine's kernel, with this process: memory touched after clearing counts as referenced, other memory does not.
    #[test]
    fn the_kernel_tells_what_was_touched_since() {
        const PAGES: usize = 24_576;
        if !rustix::process::geteuid().is_root() || !Path::new("/proc/self/clear_refs").exists() {
            return; // nothing to test
        }
        let step = PAGE_BYTES as usize;
        let mut memory = vec![1_u8; PAGES * step];
        let all = Range {
            start: 0,
            end: u64::MAX,
            sharing: Sharing::Private,
            page_bytes: Bytes(PAGE_BYTES),
        };
        let (root, pid) = (Path::new("/"), std::process::id().cast_signed());
        clear(root, pid, Clear::References).unwrap();
        memory.iter_mut().step_by(3 * step).for_each(|byte| *byte += 1);
        let seen = referenced(root, pid, &[all]).unwrap().unwrap();
        assert!(memory[3 * step] == 2);
        // Allow for what a TLB still held, and for what the test's other threads used.
        let touched = PAGES as u64 / 3;
        assert!(seen.used.0 + 2048 >= touched, "{seen:?}, {touched} touched");
        assert!(
            (seen.used - seen.coarse).0 <= touched + PAGES as u64 / 3,
            "{seen:?}, {touched} of {PAGES} touched"
        );
    }
}
