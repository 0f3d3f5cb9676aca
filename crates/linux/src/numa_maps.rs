//! `/proc/PID/maps` and `/proc/PID/numa_maps`: the mappings that are guest RAM, and on which nodes their pages lie.
//!
//! QEMU maps more than guest RAM: its own files, the kernel image it loads, firmware, video memory, a translation
//! buffer under TCG. Guest RAM is known by its size: libvirt says how much each memory object has (one per guest NUMA
//! cell or DIMM, else one for all), and QEMU maps each as one range of exactly that size, readable, writable and not
//! executable, over anonymous memory, a memfd, hugetlbfs or a file of its own. The kernel may split a range where
//! `madvise(2)` or `mbind(2)` treated parts differently, so neighbours over the same object are joined first. Where a
//! memory object has no mapping of its size, nothing is guessed: there is no answer.
//!
//! # Trust
//! A hostile QEMU has as many mappings as the kernel lets it, cut as it likes. Files are read up to `LIMIT_BYTES` and
//! `MAPPINGS_MAX`, in time linear in their length for each memory object, and must ascend. A mapping that would hold more
//! pages than fit in it is refused, and so is one that comes twice: mappings changed while they were read, and what is counted
//! twice is nowhere.
//!
//! `numa_maps` walks every page table entry and holds the process's `mmap_lock` while it does: milliseconds per GiB.
//! Read it rarely.

use std::cmp::Reverse;
use std::path::Path;

use homenode_units::{Bytes, NodeId, NodeMap, PAGE_BYTES, Pages};

use crate::binding::Binding;
use crate::read::{self, ReadError};

/// `vm.max_map_count` is 65530 by default; lines are short but for file names.
const LIMIT_BYTES: u64 = 64 << 20;
/// More than `vm.max_map_count` is set to anywhere.
const MAPPINGS_MAX: usize = 1 << 20;
/// libvirt rounds memory up to whole MiB (and QEMU to its huge page), so a mapping may exceed what the XML says
/// by this.
const ROUNDING_BYTES: u64 = 2 << 20;

/// A range of a process's addresses that is guest RAM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Range {
    /// First byte.
    pub start: u64,
    /// First byte after it.
    pub end: u64,
    /// Whether other processes may map the same memory (memfd, file, vhost-user).
    pub sharing: Sharing,
    /// Size of the pages that it is made of: larger than a base page on hugetlbfs only.
    pub page_bytes: Bytes,
}

/// Whether memory can be mapped by several processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// One process only.
    Private,
    /// Possibly several.
    Shared,
}

impl Range {
    /// Base pages in it.
    pub fn pages(&self) -> Pages {
        Pages((self.end - self.start) / PAGE_BYTES)
    }
}

/// A line of `maps`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mapping<'a> {
    start: u64,
    end: u64,
    perms: &'a str,
    offset: u64,
    device: &'a str,
    inode: u64,
    path: &'a str,
}

impl Mapping<'_> {
    /// Whether guest RAM could look like this.
    fn may_be_ram(&self) -> bool {
        self.perms.starts_with("rw-") && !matches!(self.path, "[heap]" | "[stack]")
    }

    /// Whether `next` goes on where this one ends, over the same object.
    fn continues(&self, next: &Mapping<'_>) -> bool {
        let bytes = self.end - self.start;
        self.end == next.start
            && self.perms == next.perms
            && (self.device, self.inode) == (next.device, next.inode)
            && (self.inode == 0 || self.offset.checked_add(bytes) == Some(next.offset))
    }
}

fn parse_mapping(line: &str) -> Option<Mapping<'_>> {
    let mut words = line.splitn(6, ' ');
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (
        u64::from_str_radix(start, 16).ok()?,
        u64::from_str_radix(end, 16).ok()?,
    );
    let perms = words.next().filter(|p| p.len() == 4)?;
    let offset = u64::from_str_radix(words.next()?, 16).ok()?;
    let device = words.next()?;
    let inode = words.next()?.parse().ok()?;
    let path = words.next().unwrap_or("").trim();
    let is_whole = start < end && start.is_multiple_of(PAGE_BYTES) && end.is_multiple_of(PAGE_BYTES);
    is_whole.then_some(Mapping {
        start,
        end,
        perms,
        offset,
        device,
        inode,
        path,
    })
}

/// The mappings that could be guest RAM, ascending.
fn mappings<'a>(path: &Path, text: &'a str) -> Result<Vec<Mapping<'a>>, ReadError> {
    let mut mappings: Vec<Mapping<'_>> = Vec::new();
    let mut end = 0;
    for line in bounded_lines(path, text) {
        let line = line?;
        let mapping = parse_mapping(line).ok_or_else(|| {
            ReadError::malformed(path, "a line `start-end perms offset device inode name`", line)
        })?;
        if mapping.start < end {
            return Err(ReadError::malformed(path, "mappings one after the other", line));
        }
        end = mapping.end;
        if mapping.may_be_ram() {
            mappings.push(mapping);
        }
    }
    Ok(mappings)
}

/// The lines of a file that has one for each mapping.
fn bounded_lines<'a>(path: &Path, text: &'a str) -> impl Iterator<Item = Result<&'a str, ReadError>> {
    text.lines().enumerate().map(move |(at, line)| match at {
        MAPPINGS_MAX.. => Err(ReadError::malformed(path, "at most 1048576 mappings", line)),
        _ => Ok(line),
    })
}

/// The ranges that are guest RAM, ascending; `None` where the process is gone, or a memory object of one of these
/// sizes has no mapping.
///
/// # Errors
/// When `maps` or `numa_maps` is malformed or may not be read (another user's process).
pub fn guest_ram(root: &Path, pid: i32, sizes: &[Bytes]) -> Result<Option<Vec<Range>>, ReadError> {
    let path = root.join(format!("proc/{pid}/maps"));
    let Some(text) = read::text_if_there(&path, LIMIT_BYTES)? else {
        return Ok(None);
    };
    let mut mappings = mappings(&path, &text)?;
    let mut ranges = Vec::with_capacity(sizes.len());
    let mut sizes: Vec<u64> = sizes.iter().map(|bytes| bytes.0).collect();
    sizes.sort_unstable();
    for want in sizes.into_iter().rev() {
        let Some((from, to)) = tightest_run(&mappings, want) else {
            return Ok(None);
        };
        let end = mappings[to].end;
        let mut ram = mappings[from];
        mappings.drain(from..=to);
        ram.end = end;
        ranges.push(ram);
    }
    ranges.sort_by_key(|mapping| mapping.start);
    let page_bytes = page_sizes(root, pid, &ranges)?;
    let ranges = ranges.iter().zip(page_bytes).map(|(m, page_bytes)| Range {
        start: m.start,
        end: m.end,
        sharing: if m.perms.ends_with('s') {
            Sharing::Shared
        } else {
            Sharing::Private
        },
        page_bytes,
    });
    Ok(Some(ranges.collect()))
}

/// Which of the ranges is which memory object, by the objects' sizes in the order in which QEMU makes them. Each is known by its
/// size; of several as large the first made lies highest, as the kernel gives out addresses from the top down (not where the
/// stack is unlimited, which libvirt does not make it).
pub fn objects(ranges: &[Range], sizes: &[Bytes]) -> Vec<usize> {
    let mut by_range: Vec<usize> = (0..ranges.len()).collect();
    by_range.sort_by_key(|&at| Reverse((ranges[at].pages(), ranges[at].start)));
    let mut by_object: Vec<usize> = (0..sizes.len()).collect();
    by_object.sort_by_key(|&at| (Reverse(sizes[at]), at));
    let mut of_object = vec![0; sizes.len()];
    for (object, range) in by_object.into_iter().zip(by_range) {
        of_object[object] = range;
    }
    of_object
}

/// First and last of the neighbouring mappings that together have the wanted size, or a little more: the tightest fit, the
/// lowest of those as tight. RAM is several mappings where parts of it were bound to nodes, and unrelated memory may lie right
/// beside it.
///
/// Both ends only ever go up: a run that begins later and is large enough does not end earlier.
fn tightest_run(mappings: &[Mapping<'_>], want: u64) -> Option<(usize, usize)> {
    let mut best: Option<(u64, usize, usize)> = None;
    let mut to = 0;
    for from in 0..mappings.len() {
        to = to.max(from);
        let bytes = |to: usize| mappings[to].end - mappings[from].start;
        while bytes(to) < want
            && mappings
                .get(to + 1)
                .is_some_and(|next| mappings[to].continues(next))
        {
            to += 1;
        }
        let bytes = bytes(to);
        let fits = want <= bytes && bytes <= want.saturating_add(ROUNDING_BYTES);
        if fits && best.is_none_or(|(least, ..)| bytes < least) {
            best = Some((bytes, from, to));
        }
    }
    best.map(|(_, from, to)| (from, to))
}

/// Page size of each range. Only file mappings can be of hugetlbfs, and only then is the costly file read.
fn page_sizes(root: &Path, pid: i32, ranges: &[Mapping<'_>]) -> Result<Vec<Bytes>, ReadError> {
    let mut sizes = vec![Bytes(PAGE_BYTES); ranges.len()];
    if ranges.iter().all(|m| m.inode == 0) {
        return Ok(sizes);
    }
    let bounds: Vec<(u64, u64)> = ranges.iter().map(|m| (m.start, m.end)).collect();
    for_each_line(root, pid, &bounds, |at, line| {
        if line.is_huge {
            sizes[at] = Bytes(line.page_bytes);
        }
    })?;
    Ok(sizes)
}

/// A line of `numa_maps`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Line {
    start: u64,
    is_huge: bool,
    page_bytes: u64,
    /// The nodes that its memory policy binds it to.
    binding: Option<Binding>,
    /// Pages of `page_bytes` per node.
    counts: Vec<(NodeId, u64)>,
}

/// What `numa_maps` says of one range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Its pages by node, in base pages whatever the mapping's page size; nodes without a page are left out.
    pub pages: NodeMap<Pages>,
    /// The nodes that memory policies bind it to, its own (`mbind(2)`) or its process's (`numactl --membind`).
    pub binding: Option<Binding>,
}

impl Line {
    /// Base pages on all nodes.
    fn pages(&self) -> u64 {
        let counts = self.counts.iter().map(|(_, count)| *count);
        let count = counts.fold(0, u64::saturating_add);
        count.saturating_mul(self.page_bytes / PAGE_BYTES)
    }
}

/// Where the pages of each of these ranges (ascending) lie, and what binds them there. `None` where the process is gone, or has no
/// `numa_maps` (kernel without NUMA).
///
/// # Errors
/// When `numa_maps` is malformed, may not be read, or has more pages than fit.
pub fn look(root: &Path, pid: i32, ranges: &[Range]) -> Result<Option<Vec<Seen>>, ReadError> {
    let bounds: Vec<(u64, u64)> = ranges.iter().map(|range| (range.start, range.end)).collect();
    let mut seen = vec![Seen::default(); ranges.len()];
    let found = for_each_line(root, pid, &bounds, |at, line| {
        let seen = &mut seen[at];
        for &(node, count) in &line.counts {
            // Within the range, as the sum was checked.
            add(
                &mut seen.pages,
                node,
                Pages(count * (line.page_bytes / PAGE_BYTES)),
            );
        }
        seen.binding = Binding::join(seen.binding.take(), line.binding.as_ref());
    })?;
    Ok(found.map(|()| seen))
}

/// The pages alone.
///
/// # Errors
/// As [`look`].
pub fn pages_per_node(
    root: &Path,
    pid: i32,
    ranges: &[Range],
) -> Result<Option<Vec<NodeMap<Pages>>>, ReadError> {
    let seen = look(root, pid, ranges)?;
    Ok(seen.map(|seen| seen.into_iter().map(|range| range.pages).collect()))
}

/// What several ranges hold together.
pub fn sum<'a>(pages: impl IntoIterator<Item = &'a NodeMap<Pages>>) -> NodeMap<Pages> {
    let mut all = NodeMap::new();
    for (node, pages) in pages.into_iter().flat_map(NodeMap::iter) {
        add(&mut all, node, *pages);
    }
    all
}

fn add(pages: &mut NodeMap<Pages>, node: NodeId, more: Pages) {
    let before = pages.get(node).copied().unwrap_or_default();
    pages.insert(node, Pages(before.0.saturating_add(more.0)));
}

/// Calls this for each line of `numa_maps` whose mapping begins in one of these ranges (start and end, ascending), with the
/// range's position: a merge of two ascending sequences. `None` where there is no such file.
fn for_each_line(
    root: &Path,
    pid: i32,
    ranges: &[(u64, u64)],
    mut take: impl FnMut(usize, &Line),
) -> Result<Option<()>, ReadError> {
    let path = root.join(format!("proc/{pid}/numa_maps"));
    let Some(text) = read::text_if_there(&path, LIMIT_BYTES)? else {
        return Ok(None);
    };
    // A process that ends while being read leaves an empty or shortened file; only whole lines count.
    let mut lines = bounded_lines(&path, &text);
    let malformed = |text| ReadError::malformed(&path, "a line `address policy key=value …`", text);
    // Of most lines where they begin is all that is of interest.
    let mut read = || {
        let Some(text) = lines.next().transpose()? else {
            return Ok(None);
        };
        Ok(Some((text, parse_start(text).ok_or_else(|| malformed(text))?)))
    };
    let mut next = read()?;
    let mut at = 0;
    while let Some((text, start_of_line)) = next {
        next = read()?;
        // The file does not say where a mapping ends: before the next at the latest.
        let until = next.map_or(u64::MAX, |(_, next)| next);
        if until <= start_of_line {
            return Err(ReadError::malformed(&path, "mappings one after the other", text));
        }
        while ranges.get(at).is_some_and(|(_, end)| *end <= start_of_line) {
            at += 1;
        }
        let Some(&(start, end)) = ranges.get(at).filter(|(start, _)| *start <= start_of_line) else {
            continue;
        };
        let line = parse_line(text).ok_or_else(|| malformed(text))?;
        let room = (end.min(until) - line.start) / PAGE_BYTES;
        if line.pages() > room {
            let expected = "no more pages than lie between a mapping and the next, or its range's end";
            return Err(ReadError::malformed(&path, expected, text));
        }
        if line.is_huge && line.page_bytes > end - start {
            return Err(ReadError::malformed(
                &path,
                "huge pages that fit in their range",
                text,
            ));
        }
        take(at, &line);
    }
    Ok(Some(()))
}

/// Where the mapping of a line begins.
fn parse_start(line: &str) -> Option<u64> {
    u64::from_str_radix(line.split_once(' ')?.0, 16).ok()
}

/// Reads one line. Between address and the known keys stands the memory policy, which may hold spaces.
fn parse_line(line: &str) -> Option<Line> {
    let start = parse_start(line)?;
    let mut words = line.split(' ').skip(1);
    let policy = match words.next()? {
        // `weighted interleave:0-1`
        "weighted" => words.next()?,
        policy => policy,
    };
    let mut parsed = Line {
        start,
        is_huge: false,
        page_bytes: PAGE_BYTES,
        binding: parse_policy(policy)?,
        counts: Vec::new(),
    };
    for word in words {
        if word == "huge" {
            parsed.is_huge = true;
        } else if let Some(kib) = word.strip_prefix("kernelpagesize_kB=") {
            parsed.page_bytes = kib.parse::<u64>().ok()?.checked_mul(1024)?;
        } else if let Some((node, count)) = word.strip_prefix('N').and_then(|rest| rest.split_once('='))
            && let Ok(node) = node.parse()
        {
            parsed.counts.push((NodeId(node), count.parse().ok()?));
        }
    }
    (parsed.page_bytes >= PAGE_BYTES && parsed.page_bytes.is_power_of_two()).then_some(parsed)
}

/// Reads a memory policy: `default`, `local`, `prefer:1`, `prefer (many):0-1`, `interleave:0-3`, `bind:0`, `bind=static|balancing:0-1`. The
/// outer `None` is a policy that cannot be read, the inner one a policy that binds nothing.
fn parse_policy(policy: &str) -> Option<Option<Binding>> {
    let (mode, nodes) = policy.split_once(':').unwrap_or((policy, ""));
    let mode = mode.split_once('=').map_or(mode, |(mode, _flags)| mode);
    match mode {
        "default" | "local" | "prefer" => Some(None),
        mode => Some(Binding::of(mode, &nodes.parse().ok()?)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::Tree;
    use proptest::prelude::*;

    const MIB: u64 = 1 << 20;

    /// 128 MiB of anonymous guest RAM in two pieces, a guard page, a kernel image and a translation buffer.
    const MAPS: &str = "55d000000000-55d000400000 rw-p 00000000 00:00 0                          [heap]\n\
        7f0000000000-7f0002000000 rw-p 00000000 00:00 0 \n\
        7f0002000000-7f0008000000 rw-p 00000000 00:00 0 \n\
        7f0008000000-7f0008001000 ---p 00000000 00:00 0 \n\
        7f1000000000-7f1008000000 rwxp 00000000 00:00 0 \n\
        7f2000000000-7f2003c00000 rw-p 00000000 fe:01 1234 /boot/vmlinux with space\n\
        ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]\n";
    const NUMA_MAPS: &str = "55d000000000 default heap anon=3 dirty=3 N0=3 kernelpagesize_kB=4\n\
        7f0000000000 default anon=100 dirty=100 active=0 N0=60 N3=40 kernelpagesize_kB=4\n\
        7f0002000000 prefer (many):0-1 anon=512 dirty=512 N1=512 kernelpagesize_kB=4\n\
        7f2000000000 default file=/boot/vmlinux\\040with\\040space mapped=15360 N0=15360 kernelpagesize_kB=4\n";

    fn tree(maps: &str, numa_maps: &str) -> Tree {
        Tree::new(&[("proc/7/maps", maps), ("proc/7/numa_maps", numa_maps)])
    }

    fn counts(pages: &[NodeMap<Pages>]) -> Vec<(u16, u64)> {
        sum(pages).iter().map(|(node, pages)| (node.0, pages.0)).collect()
    }

    #[test]
    fn anonymous_ram_is_found_by_size_and_nothing_else_is_counted() {
        let tree = tree(MAPS, NUMA_MAPS);
        let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
        assert_eq!(ram.len(), 1);
        assert_eq!((ram[0].start, ram[0].end), (0x7f00_0000_0000, 0x7f00_0800_0000));
        assert_eq!(
            (ram[0].sharing, ram[0].page_bytes, ram[0].pages()),
            (Sharing::Private, Bytes(4096), Pages(32_768))
        );
        let pages = pages_per_node(tree.root(), 7, &ram).unwrap().unwrap();
        assert_eq!(counts(&pages), [(0, 60), (1, 512), (3, 40)]);
    }

    #[test]
    fn of_objects_as_large_the_first_made_lies_highest() {
        let range = |start: u64, mib: u64| Range {
            start,
            end: start + mib * MIB,
            sharing: Sharing::Private,
            page_bytes: Bytes(4096),
        };
        // A little more than the XML says, as QEMU rounds up.
        let ranges = [
            range(0x1000_0000, 64),
            range(0x2000_0000, 129),
            range(0x3000_0000, 64),
        ];
        let mib = |sizes: &[u64]| sizes.iter().map(|mib| Bytes(mib * MIB)).collect::<Vec<_>>();
        assert_eq!(objects(&ranges, &mib(&[64, 128, 64])), [2, 1, 0]);
        assert_eq!(objects(&ranges, &mib(&[128, 64, 64])), [1, 2, 0]);
        assert!(objects(&[], &[]).is_empty());
    }

    #[test]
    fn memfd_hugetlbfs_and_files_are_ram_too_and_huge_pages_count_as_base_pages() {
        let maps = "7f0000000000-7f0040000000 rw-s 00000000 00:0f 88 /dev/hugepages/libvirt/qemu/1-a/ram-node0 (deleted)\n\
            7f1000000000-7f1020000000 rw-s 00000000 00:01 99 /memfd:ram-node1 (deleted)\n\
            7f2000000000-7f2010000000 rw-s 00000000 fe:01 12 /var/lib/libvirt/qemu/ram/1-a/dimm0\n";
        let numa = "7f0000000000 bind:0 file=/dev/hugepages/x\\040(deleted) huge dirty=512 N0=500 N1=12 kernelpagesize_kB=2048\n\
            7f1000000000 bind=static:0-1 file=/memfd:ram-node1\\040(deleted) dirty=9 N1=9 kernelpagesize_kB=4\n\
            7f2000000000 weighted interleave:0-1 file=/N7=5 dirty=9 N0=9 kernelpagesize_kB=4\n";
        let tree = tree(maps, numa);
        let sizes = [Bytes(256 * MIB), Bytes(1024 * MIB), Bytes(512 * MIB)];
        let ram = guest_ram(tree.root(), 7, &sizes).unwrap().unwrap();
        let seen: Vec<_> = ram
            .iter()
            .map(|r| (r.pages().0, r.page_bytes.0, r.sharing))
            .collect();
        assert_eq!(
            seen,
            [
                (262_144, 2 * MIB, Sharing::Shared),
                (131_072, 4096, Sharing::Shared),
                (65_536, 4096, Sharing::Shared)
            ]
        );
        let pages = pages_per_node(tree.root(), 7, &ram).unwrap().unwrap();
        assert_eq!(counts(&pages), [(0, 500 * 512 + 9), (1, 12 * 512 + 9)]);
        assert_eq!(counts(&pages[1..2]), [(1, 9)]);
        assert_eq!(objects(&ram, &sizes), [2, 0, 1]);
    }

    #[test]
    fn what_binds_a_mapping_is_read_whichever_way_the_kernel_writes_it() {
        let nodes = |list: &str| list.parse().unwrap();
        for (policy, binds) in [
            ("default", None),
            ("local", None),
            ("prefer:1", None),
            ("prefer=static:1", None),
            ("prefer (many):0-1", None),
            ("bind:1", Some(("bind", "1"))),
            ("bind=static:0,2", Some(("bind", "0,2"))),
            ("bind=static|balancing:0-1", Some(("bind", "0-1"))),
            ("bind=relative:3", Some(("bind", "3"))),
            ("interleave:0-3", Some(("interleave", "0-3"))),
            ("weighted interleave:0-1", Some(("interleave", "0-1"))),
        ] {
            let line = parse_line(&format!("7f0000000000 {policy} anon=9 N0=9 kernelpagesize_kB=4")).unwrap();
            let expected = binds.and_then(|(mode, list)| Binding::of(mode, &nodes(list)));
            assert_eq!((line.pages(), line.binding), (9, expected), "{policy}");
        }
        assert_eq!(parse_line("7f0000000000 bind:x anon=9 N0=9"), None);
        // RAM of several mappings is bound by each that is bound.
        let numa = "7f0000000000 bind:0 anon=9 N0=9 kernelpagesize_kB=4\n7f0002000000 bind:1 anon=5 N1=5 kernelpagesize_kB=4\n";
        let tree = tree(MAPS, numa);
        let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
        let seen = look(tree.root(), 7, &ram).unwrap().unwrap();
        let binding = seen[0].binding.clone().unwrap();
        assert_eq!((binding.nodes, binding.common), (nodes("0-1"), nodes("")));
    }

    #[test]
    fn memory_right_beside_ram_is_not_ram() {
        let maps = "7effff000000-7f0000000000 rw-p 00000000 00:00 0 \n\
            7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n\
            7f0008000000-7f0008800000 rw-p 00000000 00:00 0 \n";
        let tree = tree(maps, "");
        let found = guest_ram(tree.root(), 7, &[Bytes::from_mib(128)])
            .unwrap()
            .unwrap();
        let found: Vec<(u64, u64)> = found.iter().map(|range| (range.start, range.end)).collect();
        assert_eq!(found, [(0x7f00_0000_0000, 0x7f00_0800_0000)]);
    }

    #[test]
    fn ram_that_cannot_be_told_is_none() {
        let tree = tree(MAPS, NUMA_MAPS);
        assert_eq!(guest_ram(tree.root(), 7, &[Bytes(64 * MIB)]), Ok(None));
        assert_eq!(
            guest_ram(tree.root(), 7, &[Bytes(128 * MIB), Bytes(128 * MIB)]),
            Ok(None),
            "one mapping, two objects"
        );
        assert!(
            guest_ram(tree.root(), 7, &[Bytes(127 * MIB)]).unwrap().is_some(),
            "rounded up by libvirt"
        );
        assert_eq!(
            guest_ram(tree.root(), 8, &[Bytes(MIB)]),
            Ok(None),
            "no such process"
        );
        assert_eq!(pages_per_node(tree.root(), 8, &[]), Ok(None));
    }

    #[test]
    fn malformed_and_truncated_files_are_errors_with_the_path() {
        for bad in [
            "7f00-",
            "7f0000000000-7f0000001000 rw-p",
            "zz-yy rw-p 0 00:00 0",
            "2000-1000 rw-p 0 00:00 0",
        ] {
            let error = guest_ram(tree(bad, "").root(), 7, &[Bytes(1)]).unwrap_err();
            assert!(error.to_string().contains("proc/7/maps"), "{error}");
        }
        for bad in [
            "xyz default N0=1",
            "7f0000000000",
            "7f00 default N0=x",
            "7f00 default N0=1 kernelpagesize_kB=0",
            "7f00 default kernelpagesize_kB=99999999999999999999",
        ] {
            let all = [Range {
                start: 0,
                end: 1 << 47,
                sharing: Sharing::Private,
                page_bytes: Bytes(PAGE_BYTES),
            }];
            let error = pages_per_node(tree("", bad).root(), 7, &all).unwrap_err();
            assert!(error.to_string().contains("proc/7/numa_maps"), "{error}");
        }
    }

    #[test]
    fn of_what_is_not_ram_nothing_but_its_place_is_read() {
        let maps = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n";
        let line = "7f0000000000 default anon=9 N0=5 N1=4 kernelpagesize_kB=4\n";
        let tree_with = |other: &str| tree(maps, &format!("{line}{other}\n"));
        let pages = |other: &str| {
            let tree = tree_with(other);
            let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
            pages_per_node(tree.root(), 7, &ram)
        };
        let read = pages("7f1000000000 default file=/a\\040b N0=many")
            .unwrap()
            .unwrap();
        assert_eq!(counts(&read), [(0, 5), (1, 4)]);
        for bad in ["7f1000000000", "where default N0=1", "7e0000000000 default N0=1"] {
            assert!(pages(bad).is_err(), "{bad}");
        }
    }

    /// RAM of one page to a mapping, all joined, and `numa_maps` that agrees.
    fn shredded(mappings: u64) -> (String, String) {
        let start = |at: u64| 0x7f00_0000_0000 + at * PAGE_BYTES;
        let maps = |at| format!("{:x}-{:x} rw-p 00000000 00:00 0 \n", start(at), start(at + 1));
        let numa = |at| {
            format!(
                "{:x} default anon=1 N{}=1 kernelpagesize_kB=4\n",
                start(at),
                at % 2
            )
        };
        (
            (0..mappings).map(maps).collect(),
            (0..mappings).map(numa).collect(),
        )
    }

    /// Time that this thread had a processor: what else the machine does tells nothing.
    fn spent() -> homenode_units::Ns {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        homenode_units::Ns(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }

    #[test]
    fn time_grows_no_faster_than_mappings() {
        let time_of = |mappings: u64| {
            let (maps, numa) = shredded(mappings);
            let tree = tree(&maps, &numa);
            let size = Bytes(mappings * PAGE_BYTES);
            let look = || {
                let begun = spent();
                let ram = guest_ram(tree.root(), 7, &[size]).unwrap().unwrap();
                let pages = pages_per_node(tree.root(), 7, &ram).unwrap().unwrap();
                assert_eq!(counts(&pages), [(0, mappings / 2), (1, mappings / 2)]);
                spent() - begun
            };
            (0..3).map(|_| look()).min().unwrap()
        };
        let (few, many) = (time_of(4000), time_of(64_000));
        // 256 times where it grows with the square.
        assert!(many.0 < 96 * few.0, "16 times the mappings took {few} and {many}");
    }

    #[test]
    fn a_range_never_has_more_pages_than_lie_in_it() {
        let maps = "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n";
        for bad in [
            // More than the range, on one node or on several.
            "7f0000000000 default anon=32769 N0=32769 kernelpagesize_kB=4\n",
            "7f0000000000 default anon=9 N0=20000 N1=20000 kernelpagesize_kB=4\n",
            "7f0000000000 default anon=9 N0=18446744073709551615 N1=1 kernelpagesize_kB=4\n",
            "7f0000000000 default huge N0=65 kernelpagesize_kB=2048\n",
            // More than lie before the next mapping.
            "7f0000000000 default anon=2 N0=2 kernelpagesize_kB=4\n7f0000001000 default N0=1 kernelpagesize_kB=4\n",
            // One mapping twice, as when mappings change while they are read.
            "7f0000000000 default anon=1 N0=1 kernelpagesize_kB=4\n7f0000000000 default N0=1 kernelpagesize_kB=4\n",
            "7f0000001000 default anon=1 N0=1 kernelpagesize_kB=4\n7f0000000000 default N0=1 kernelpagesize_kB=4\n",
        ] {
            let tree = tree(maps, bad);
            let ram = guest_ram(tree.root(), 7, &[Bytes(128 * MIB)]).unwrap().unwrap();
            let error = pages_per_node(tree.root(), 7, &ram).expect_err(bad);
            assert!(error.to_string().contains("proc/7/numa_maps"), "{error}");
        }
    }

    #[test]
    fn mappings_that_overlap_or_split_pages_are_refused() {
        for bad in [
            "7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n7f0004000000-7f000c000000 rw-p 00000000 00:00 0 \n",
            "7f0010000000-7f0018000000 rw-p 00000000 00:00 0 \n7f0000000000-7f0008000000 rw-p 00000000 00:00 0 \n",
            "7f0000000001-7f0008000001 rw-p 00000000 00:00 0 \n",
        ] {
            let error = guest_ram(tree(bad, "").root(), 7, &[Bytes(128 * MIB)]).expect_err(bad);
            assert!(error.to_string().contains("proc/7/maps"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn any_line_is_read_or_refused(line in "[0-9a-fN= :-]{0,40}|\\PC{0,30}") {
            let _ = (parse_line(&line), parse_mapping(&line));
        }
    }

    #[test]
    fn this_process_reads() {
        let pid = i32::try_from(std::process::id()).unwrap();
        assert_eq!(guest_ram(Path::new("/"), pid, &[Bytes(1 << 50)]), Ok(None));
        pages_per_node(Path::new("/"), pid, &[]).unwrap();
    }
}
