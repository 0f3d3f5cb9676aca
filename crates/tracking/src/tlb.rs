//! A TLB: a set-associative cache of pages, for one page size.

use homenode_machine::Replacement;
use homenode_units::Bytes;

use crate::cache::{Cache, Counts, Outcome, Shape};

/// A TLB for pages of one size; shared by several streams, it tells them apart.
#[derive(Clone, Debug)]
pub struct Tlb {
    entries: Cache,
    lines_per_page: u64,
}

impl Tlb {
    /// An empty TLB with this many entries, for pages that hold this many bytes in lines of `line_bytes`.
    ///
    /// # Panics
    /// As [`Cache::new`], and if a page is smaller than a line.
    pub fn new(entries: usize, ways: usize, page: Bytes, line_bytes: u64, streams: usize) -> Tlb {
        assert!(page.0 >= line_bytes, "a page holds at least one line");
        Tlb {
            entries: Cache::new(Shape::of_lines(entries, ways, Replacement::Lru), streams, 0),
            lines_per_page: page.0 / line_bytes,
        }
    }

    /// A stream uses a line; says whether its page was there. It is afterwards.
    #[inline]
    pub fn access(&mut self, stream: usize, line: u64) -> bool {
        self.entries.access(stream, line / self.lines_per_page) == Outcome::Hit
    }

    /// What a stream did so far.
    pub fn counts(&self, stream: usize) -> Counts {
        self.entries.counts(stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stream::{Pattern, Stream};

    #[test]
    fn larger_pages_reach_further() {
        // Uniform over 64 MiB with 512 entries: 4 KiB pages reach 2 of the 64 MiB, 2 MiB pages reach all.
        let pattern = Pattern::Uniform { lines: 1 << 20 };
        let ratio = |page| {
            let (mut tlb, mut stream) = (Tlb::new(512, 8, page, 64, 1), Stream::new(&pattern, 0, 1));
            for _ in 0..100_000 {
                tlb.access(0, stream.next_line());
            }
            tlb.counts(0).miss_ratio()
        };
        let (small, large) = (ratio(Bytes(4096)), ratio(Bytes::from_mib(2)));
        assert!(
            (small - 62.0 / 64.0).abs() < 0.01 && large < 0.001,
            "{small} {large}"
        );
    }
}
