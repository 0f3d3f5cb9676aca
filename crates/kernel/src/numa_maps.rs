//! `/proc/PID/maps` and `/proc/PID/numa_maps`: the mappings that are guest RAM, and the nodes of their pages.
//!
//! QEMU maps more than guest RAM: its own files, the kernel image it loads, firmware, video memory, and a translation buffer
//! under TCG. Guest RAM is recognised by its size. libvirt reports the size of each memory object (one per guest NUMA cell or
//! DIMM, else one for all). QEMU maps each object as one range of exactly that size, which is readable, writable, not executable,
//! and over anonymous memory, a memfd, hugetlbfs or its own file. The kernel may split a range where `madvise(2)` or `mbind(2)`
//! treated parts differently, so neighbours over the same object are joined first. If a memory object has no mapping of its size,
//! the result is `None` rather than a guess.
//!
//! # Trust
//! A hostile QEMU may have as many mappings as the kernel allows, cut in any way. Files are read up to `LIMIT_BYTES` and
//! `MAPPINGS_MAX`, in time linear in their length for each memory object, and mappings must ascend. A mapping with more pages
//! than fit in it is refused, and so is a mapping that appears twice: the mappings changed while they were read, so the counts
//! would be wrong.
//!
//! Reading `numa_maps` makes the kernel walk every page table entry while it holds the process's `mmap_lock`, which takes
//! milliseconds per GiB. Read it rarely.

use std::cmp::Reverse;
use std::path::Path;

use homenode_units::{Bytes, NodeId, NodeMap, PAGE_BYTES, Pages};

use crate::binding::Binding;
use crate::read::{self, ReadError};

/// Most bytes to read. `vm.max_map_count` is 65530 by default, and lines are short except for file names.
const LIMIT_BYTES: u64 = 64 << 20;
/// Most mappings to read: more than any host sets `vm.max_map_count` to.
const MAPPINGS_MAX: usize = 1 << 20;
/// A mapping may exceed the size in libvirt's XML by this much, since libvirt rounds memory up to whole MiB, and QEMU to its huge
/// page.
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
    /// Size of its pages: larger than a base page only on hugetlbfs.
    pub page_bytes: Bytes,
}

/// Whether several processes can map the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Only one process can map the memory.
    Private,
    /// Several processes may map the memory.
    Shared,
}

impl Range {
    /// Returns the number of base pages in the range.
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
    /// Returns true if the mapping could be guest RAM.
    fn may_be_ram(&self) -> bool {
        self.perms.starts_with("rw-") && !matches!(self.path, "[heap]" | "[stack]")
    }

    /// Returns true if `next` continues this mapping over the same object.
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

/// Returns the mappings that could be guest RAM, ascending.
fn mappings<'a>(path: &Path, text: &'a str) -> Result<Vec<Mapping<'a>>, ReadError> {
    let mut mappings: Vec<Mapping<'_>> = Vec::new();
    let mut end = 0;
    for line in bounded_lines(path, text) {
        let line = line?;
        let mapping = parse_mapping(line).ok_or_else(|| {
            ReadError::malformed(path, "a line `start-end perms offset device inode name`", line)
        })?;
        if mapping.start < end {
            return Err(ReadError::malformed(
                path,
                "mappings in ascending order, without overlap",
                line,
            ));
        }
        end = mapping.end;
        if mapping.may_be_ram() {
            mappings.push(mapping);
        }
    }
    Ok(mappings)
}

/// Returns the lines of a file that has one line per mapping.
fn bounded_lines<'a>(path: &Path, text: &'a str) -> impl Iterator<Item = Result<&'a str, ReadError>> {
    text.lines().enumerate().map(move |(at, line)| match at {
        MAPPINGS_MAX.. => Err(ReadError::malformed(path, "at most 1048576 mappings", line)),
        _ => Ok(line),
    })
}

/// Returns the ranges that are guest RAM, ascending; `None` if the process is gone, or if there is no mapping for a memory object
/// of one of these sizes.
///
/// # Errors
/// If `maps` or `numa_maps` is malformed or may not be read (another user's process).
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

/// Returns each memory object's position in the ranges. `sizes` has the objects' sizes in the order in which QEMU creates them.
/// An object is recognised by its size. Among objects of equal size, the one created first has the highest address, because the
/// kernel assigns addresses from the top down (except with an unlimited stack, which libvirt does not set).
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

/// Returns the first and last of the neighbouring mappings that together have the wanted size or a little more. Takes the
/// tightest fit, and the lowest of equally tight ones. RAM consists of several mappings if parts of it were bound to nodes, and
/// unrelated memory may be right next to it.
///
/// Both ends only ever move up: a run that begins later and is large enough cannot end earlier.
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

/// Returns the page size of each range. Only mappings of files can be on hugetlbfs, so the costly `numa_maps` is read only for
/// them.
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
    /// What the mapping's memory policy binds it to.
    binding: Option<Binding>,
    /// Number of pages of `page_bytes` on each node.
    counts: Vec<(NodeId, u64)>,
}

/// What `numa_maps` says about one range.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The range's pages by node, counted in base pages whatever the page size; nodes without pages are left out.
    pub pages: NodeMap<Pages>,
    /// The nodes that memory policies bind it to: its own policy (`mbind(2)`) or its process's (`numactl --membind`).
    pub binding: Option<Binding>,
}

impl Line {
    /// Returns the number of base pages on all nodes.
    fn pages(&self) -> u64 {
        let counts = self.counts.iter().map(|(_, count)| *count);
        let count = counts.fold(0, u64::saturating_add);
        count.saturating_mul(self.page_bytes / PAGE_BYTES)
    }
}

/// Reads on which nodes the pages of each of these ranges (ascending) are, and what the ranges are bound to. `None` if the
/// process is gone, or has no `numa_maps` (a kernel without NUMA).
///
/// # Errors
/// If `numa_maps` is malformed, may not be read, or has more pages than fit.
pub fn look(root: &Path, pid: i32, ranges: &[Range]) -> Result<Option<Vec<Seen>>, ReadError> {
    let bounds: Vec<(u64, u64)> = ranges.iter().map(|range| (range.start, range.end)).collect();
    let mut seen = vec![Seen::default(); ranges.len()];
    let found = for_each_line(root, pid, &bounds, |at, line| {
        let seen = &mut seen[at];
        for &(node, count) in &line.counts {
            // The sum was checked, so this stays within the range.
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

/// Like [`look`], but returns only the pages.
///
/// # Errors
/// If `maps` or `numa_maps` is malformed or may not be read (another user's process).
pub fn pages_per_node(
    root: &Path,
    pid: i32,
    ranges: &[Range],
) -> Result<Option<Vec<NodeMap<Pages>>>, ReadError> {
    let seen = look(root, pid, ranges)?;
    Ok(seen.map(|seen| seen.into_iter().map(|range| range.pages).collect()))
}

/// Returns the sum of the pages of several ranges.
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

/// Calls `take` for each line of `numa_maps` whose mapping begins in one of these ranges (start and end, ascending), with the
/// range's position. Lines and ranges both ascend, so one pass merges them. `None` if there is no such file.
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
    // A process that ends during the read leaves an empty or shortened file. Only whole lines count.
    let mut lines = bounded_lines(&path, &text);
    let malformed = |text| ReadError::malformed(&path, "a line `address policy key=value …`", text);
    // For most lines only the start address is needed.
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
        // The file does not say where a mapping ends. It ends before the next one at the latest.
        let until = next.map_or(u64::MAX, |(_, next)| next);
        if until <= start_of_line {
            return Err(ReadError::malformed(
                &path,
                "mappings in ascending order, without overlap",
                text,
            ));
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
            let expected = "no more pages than fit before the next mapping or the end of its range";
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

/// Start address of a line's mapping.
fn parse_start(line: &str) -> Option<u64> {
    u64::from_str_radix(line.split_once(' ')?.0, 16).ok()
}

/// Parses one line. The memory policy comes between the address and the known keys, and may contain spaces.
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

/// Parses a memory policy: `default`, `local`, `prefer:1`, `prefer (many):0-1`, `interleave:0-3`, `bind:0`,
/// `bind=static|balancing:0-1`. The outer `None` means an invalid policy, the inner one a policy that binds nothing.
fn parse_policy(policy: &str) -> Option<Option<Binding>> {
    let (mode, nodes) = policy.split_once(':').unwrap_or((policy, ""));
    let mode = mode.split_once('=').map_or(mode, |(mode, _flags)| mode);
    match mode {
        "default" | "local" | "prefer" => Some(None),
        mode => Some(Binding::of(mode, &nodes.parse().ok()?)),
    }
}

#[cfg(test)]
mod tests;
