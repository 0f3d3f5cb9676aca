//! The machine frames of a VM's pages, read from its process's `pagemap` in parts.
//!
//! A part has at most [`PART_PAGES`] pages, each part continues where the last one ended, and the intervals between parts keep
//! the cost within [`COST_SHARE`]. So a page that moved is known at its old frame until its part is read again.

use std::path::Path;

use homenode_units::{Ns, PAGE_BYTES};

use crate::now;
use crate::numa_maps::{Range, Sharing};
use crate::pagemap::{self, Place};
use crate::read::ReadError;
use crate::task::Process;

/// Number of a VM's pages to read in one go: 256 MiB.
pub const PART_PAGES: usize = 65_536;
/// Reading one VM's page map may take at most one part in this many of one CPU's time.
pub const COST_SHARE: u64 = 20;
/// Number of pages to read in one system call.
const READ_PAGES: usize = 4096;

/// The pages of one VM, each with its frame when it was last read.
#[derive(Debug)]
pub(crate) struct Frames {
    pub(super) process: Process,
    ranges: Vec<Range>,
    /// For each page, its frame, or 0 (a frame that belongs to no VM) if it had none of its own.
    frames: Vec<u32>,
    /// The page to continue from.
    next: usize,
    next_read: Ns,
    is_read: bool,
    is_beyond: bool,
}

impl Frames {
    /// Starts with no page read.
    pub(crate) fn new(process: Process, ranges: &[Range]) -> Frames {
        let pages: u64 = ranges.iter().map(|range| range.pages().0).sum();
        Frames {
            process,
            ranges: ranges.to_vec(),
            frames: vec![0; pages as usize],
            next: 0,
            next_read: Ns::ZERO,
            is_read: false,
            is_beyond: false,
        }
    }

    /// Returns true if these are the frames of this memory of this process.
    pub(crate) fn is_of(&self, process: Process, ranges: &[Range]) -> bool {
        (self.process, self.ranges.as_slice()) == (process, ranges)
    }

    /// Returns the frames by page, 0 for pages without one.
    pub(crate) fn by_page(&self) -> &[u32] {
        &self.frames
    }

    /// Returns true if each page was read at least once.
    pub(crate) fn is_read(&self) -> bool {
        self.is_read
    }

    /// Returns true if a page had a frame at or beyond the limit when it was last read.
    pub(crate) fn is_beyond(&self) -> bool {
        self.is_beyond
    }

    /// Reads the next part if it is due; returns `None` if the process is gone. Frames from `limit` on are not kept. For each
    /// run of pages, `changed` gets the frames before and after.
    ///
    /// # Errors
    /// If the frames cannot be read.
    pub(crate) fn follow(
        &mut self,
        root: &Path,
        at: Ns,
        limit: u64,
        changed: &mut dyn FnMut(&[u32], &[u32]),
    ) -> Result<Option<()>, ReadError> {
        if at < self.next_read {
            return Ok(Some(()));
        }
        let start = now();
        let found = self.read_part(root, limit, changed);
        let cost = now().saturating_sub(start);
        self.next_read = at + Ns(cost.0.saturating_mul(COST_SHARE));
        found
    }

    fn read_part(
        &mut self,
        root: &Path,
        limit: u64,
        changed: &mut dyn FnMut(&[u32], &[u32]),
    ) -> Result<Option<()>, ReadError> {
        if self.next == 0 {
            self.is_beyond = false;
        }
        let end = self.frames.len().min(self.next + PART_PAGES);
        while self.next < end {
            let (range, from) = self.range_of(self.next);
            let rest = range.pages().0 as usize - from;
            let count = rest.min(end - self.next).min(READ_PAGES);
            let start = range.start + from as u64 * PAGE_BYTES;
            let sharing = range.sharing;
            let Some(places) = pagemap::read(root, self.process.pid, start, count)? else {
                return Ok(None);
            };
            self.note(&places, sharing, limit, changed);
        }
        if self.next == self.frames.len() {
            self.next = 0;
            self.is_read = true;
        }
        Ok(Some(()))
    }

    /// Returns the range that a page is in, and the page's position in the range.
    fn range_of(&self, mut at: usize) -> (&Range, usize) {
        for range in &self.ranges {
            let pages = range.pages().0 as usize;
            if at < pages {
                return (range, at);
            }
            at -= pages;
        }
        unreachable!("there are as many frames as ranges have pages")
    }

    /// Notes where the next pages are. A frame that several processes map is kept only if the memory is meant to be shared.
    pub(super) fn note(
        &mut self,
        places: &[Place],
        sharing: Sharing,
        limit: u64,
        changed: &mut dyn FnMut(&[u32], &[u32]),
    ) {
        // Frame 0 never belongs to a process, and u32 holds the frames of 16 TiB.
        let limit = limit.min(1 << 32);
        let mut is_beyond = false;
        let now: Vec<u32> = places
            .iter()
            .map(|place| match *place {
                Place::Own(frame) if frame < limit => frame as u32,
                Place::Shared(frame) if frame < limit && sharing == Sharing::Shared => frame as u32,
                Place::Nowhere | Place::Shared(_) => 0,
                Place::Own(_) => {
                    is_beyond = true;
                    0
                }
            })
            .collect();
        self.is_beyond |= is_beyond;
        let part = self.next..self.next + now.len();
        changed(&self.frames[part.clone()], &now);
        self.frames[part.clone()].copy_from_slice(&now);
        self.next = part.end;
    }
}
