//! The memory through which a modelled PMU is read: a file that the emulator maps and, as a device's memory (ivshmem, BAR 2), the
//! machine inside.
//!
//! ```text
//!   word 0   magic                     5   frames of 4 KiB that can be tagged
//!        1   version                   6   bytes of a line
//!        2   bytes in all              7   byte at which counts begin
//!        3   CPUs                      8   byte at which tags begin
//!        4   tags, 0 included             9   not 0 once somebody reads the counts: nothing is modelled before
//!
//!   counts   for each CPU: instructions, then references and misses of each tag, words
//!   tags     for each frame: whose it is, bytes; who reads the counts writes them, 0 at first
//! ```
//!
//! All words are little-endian. Counts only grow, and wrap after 2^64. They are of a model, never of hardware.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// What a page covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// CPUs of the machine.
    pub cpus: u64,
    /// Tags, 0 (nobody's) included; at most [`TAGS_MAX`].
    pub tags: u64,
    /// Frames of 4 KiB from address 0 on.
    pub frames: u64,
    /// Size of a line, bytes.
    pub line_bytes: u64,
}

/// Why memory is no page of counters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// It begins with something else.
    #[error("not a modelled PMU: it begins with {0:#018x}, not {MAGIC:#018x}")]
    Magic(u64),
    /// Another version's.
    #[error(
        "a modelled PMU of version {0}; this program reads {VERSION}: take plugin and agent of one build"
    )]
    Version(u64),
    /// A figure that cannot be.
    #[error("a modelled PMU that states {value} {what}; {expected}")]
    Figure {
        /// Of what.
        what: &'static str,
        /// How many.
        value: u64,
        /// What would be possible.
        expected: String,
    },
}

/// `HNMODPMU`, read as a little-endian word.
pub const MAGIC: u64 = u64::from_le_bytes(*b"HNMODPMU");
/// Version of the layout.
pub const VERSION: u64 = 2;
/// Words before the counts.
pub const HEADER_WORDS: usize = 10;
/// The word in which somebody asks for counts.
const WANTED_WORD: usize = 9;
/// Most tags that a page can have, 0 (nobody's) included.
pub const TAGS_MAX: u64 = 256;

impl Layout {
    /// More CPUs than a page has room for.
    const CPUS_MAX: u64 = 4096;
    /// Frames of 16 TiB.
    const FRAMES_MAX: u64 = 1 << 32;

    fn words_per_cpu(&self) -> u64 {
        1 + 2 * self.tags
    }

    /// Where tags begin, bytes.
    pub fn tags_at(&self) -> u64 {
        8 * (HEADER_WORDS as u64 + self.cpus * self.words_per_cpu())
    }

    /// Size in all, bytes.
    pub fn bytes(&self) -> u64 {
        self.tags_at() + self.frames.next_multiple_of(8)
    }

    /// Which word has a CPU's instructions.
    pub fn instructions_word(&self, cpu: u64) -> usize {
        HEADER_WORDS + (cpu * self.words_per_cpu()) as usize
    }

    /// Which word has the references of a CPU to memory with this tag; its misses are in the next.
    pub fn references_word(&self, cpu: u64, tag: u8) -> usize {
        self.instructions_word(cpu) + 1 + 2 * usize::from(tag)
    }

    /// The first words of such a page.
    pub fn header(&self) -> [u64; HEADER_WORDS] {
        let counts_at = 8 * HEADER_WORDS as u64;
        [
            MAGIC,
            VERSION,
            self.bytes(),
            self.cpus,
            self.tags,
            self.frames,
            self.line_bytes,
            counts_at,
            self.tags_at(),
            0,
        ]
    }

    /// Reads the first words of memory of this many bytes. Nothing is taken on trust: whoever can write the memory could
    /// have written anything.
    ///
    /// # Errors
    /// [`PageError`], naming what is wrong.
    pub fn parse(header: [u64; HEADER_WORDS], mapped_bytes: u64) -> Result<Layout, PageError> {
        let [
            magic,
            version,
            bytes,
            cpus,
            tags,
            frames,
            line_bytes,
            counts_at,
            tags_at,
            _,
        ] = header;
        if magic != MAGIC {
            return Err(PageError::Magic(magic));
        }
        if version != VERSION {
            return Err(PageError::Version(version));
        }
        let within = |what, value: u64, least: u64, most: u64| {
            if (least..=most).contains(&value) {
                return Ok(());
            }
            let expected = format!("it must be {least} to {most}");
            Err(PageError::Figure {
                what,
                value,
                expected,
            })
        };
        within("CPUs", cpus, 1, Layout::CPUS_MAX)?;
        within("tags", tags, 1, TAGS_MAX)?;
        within("frames", frames, 1, Layout::FRAMES_MAX)?;
        within("bytes of a line", line_bytes, 16, 4096)?;
        let layout = Layout {
            cpus,
            tags,
            frames,
            line_bytes,
        };
        within(
            "as the place of its counts",
            counts_at,
            8 * HEADER_WORDS as u64,
            8 * HEADER_WORDS as u64,
        )?;
        within(
            "as the place of its tags",
            tags_at,
            layout.tags_at(),
            layout.tags_at(),
        )?;
        within("bytes", bytes, layout.bytes(), mapped_bytes.max(layout.bytes()))?;
        within("bytes, more than are mapped", bytes, 0, mapped_bytes)?;
        Ok(layout)
    }
}

/// A page in memory that others use too.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    layout: Layout,
    words: &'a [AtomicU64],
    tags: &'a [AtomicU8],
}

/// What a CPU did to memory of a tag. Two readings subtract, wrapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lines asked of the LLC.
    pub references: u64,
    /// Those that it did not have.
    pub misses: u64,
}

impl<'a> Page<'a> {
    /// A page over the words of its header and counts and the bytes of its tags.
    ///
    /// # Panics
    /// If there are fewer than the layout needs.
    pub fn new(layout: Layout, words: &'a [AtomicU64], tags: &'a [AtomicU8]) -> Page<'a> {
        assert!(words.len() as u64 * 8 >= layout.tags_at() && tags.len() as u64 >= layout.frames);
        Page { layout, words, tags }
    }

    /// What it covers.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Writes the header: from now on it can be read.
    pub fn begin(&self) {
        // The magic comes last.
        for (word, value) in self.words.iter().zip(self.layout.header()).rev() {
            word.store(value, Ordering::Release);
        }
    }

    /// Asks for counts: whoever models begins now.
    pub fn want(&self) {
        self.words[WANTED_WORD].store(1, Ordering::Release);
    }

    /// Whether somebody has asked for counts.
    pub fn is_wanted(&self) -> bool {
        self.words[WANTED_WORD].load(Ordering::Acquire) != 0
    }

    /// Whose a frame is; 0 for those beyond the page.
    #[inline]
    pub fn tag(&self, frame: u64) -> u8 {
        let tag = self
            .tags
            .get(frame as usize)
            .map_or(0, |tag| tag.load(Ordering::Relaxed));
        // A tag that the layout has no counts for is nobody's: the machine inside writes them.
        if u64::from(tag) < self.layout.tags { tag } else { 0 }
    }

    /// Says whose a frame is; nothing for those beyond the page.
    pub fn set_tag(&self, frame: u64, tag: u8) {
        if let Some(place) = self.tags.get(frame as usize) {
            place.store(tag, Ordering::Relaxed);
        }
    }

    /// Says of all frames that they are nobody's.
    pub fn clear_tags(&self) {
        self.tags.iter().for_each(|tag| tag.store(0, Ordering::Relaxed));
    }

    /// Adds to a word that one thread alone writes.
    #[inline]
    fn add(&self, word: usize, count: u64) {
        let word = &self.words[word];
        word.store(
            word.load(Ordering::Relaxed).wrapping_add(count),
            Ordering::Release,
        );
    }

    /// A CPU has begun so many instructions. Only its own thread may say so.
    #[inline]
    pub fn instructions(&self, cpu: u64, count: u64) {
        self.add(self.layout.instructions_word(cpu), count);
    }

    /// A CPU has asked the LLC for a line of memory with a tag. Only its own thread may say so.
    #[inline]
    pub fn referenced(&self, cpu: u64, tag: u8, missed: bool) {
        let word = self.layout.references_word(cpu, tag);
        self.add(word, 1);
        if missed {
            self.add(word + 1, 1);
        }
    }

    /// Instructions of a CPU so far; `None` if there is no such CPU.
    pub fn instructions_of(&self, cpu: u64) -> Option<u64> {
        (cpu < self.layout.cpus)
            .then(|| self.words[self.layout.instructions_word(cpu)].load(Ordering::Relaxed))
    }

    /// What a CPU did to memory of a tag so far; `None` if there is no such CPU or tag.
    pub fn counts(&self, cpu: u64, tag: u8) -> Option<Counts> {
        let there = cpu < self.layout.cpus && u64::from(tag) < self.layout.tags;
        there.then(|| {
            let word = self.layout.references_word(cpu, tag);
            // Its CPU goes on meanwhile: what is read second is never less than what belongs to the first.
            let misses = self.words[word + 1].load(Ordering::Acquire);
            let references = self.words[word].load(Ordering::Relaxed);
            Counts { references, misses }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const LAYOUT: Layout = Layout {
        cpus: 4,
        tags: 3,
        frames: 1000,
        line_bytes: 64,
    };

    #[test]
    fn a_page_reads_as_it_was_written() {
        // 10 words of header and 4 times 1 + 2 * 3 of counts; 1000 frames are whole words.
        assert_eq!((LAYOUT.tags_at(), LAYOUT.bytes()), (8 * 38, 8 * 38 + 1000));
        let words: Vec<AtomicU64> = (0..38).map(|_| AtomicU64::new(0)).collect();
        let tags: Vec<AtomicU8> = (0..1000).map(|_| AtomicU8::new(0)).collect();
        let page = Page::new(LAYOUT, &words, &tags);
        page.begin();
        let header = std::array::from_fn(|at| words[at].load(Ordering::Relaxed));
        assert_eq!(Layout::parse(header, LAYOUT.bytes()), Ok(LAYOUT));
        assert!(!page.is_wanted());
        page.want();
        assert!(page.is_wanted());
        page.instructions(3, 7);
        page.referenced(3, 2, true);
        page.referenced(3, 2, false);
        assert_eq!(page.instructions_of(3), Some(7));
        let expected = Counts {
            references: 2,
            misses: 1,
        };
        assert_eq!(page.counts(3, 2), Some(expected));
        assert_eq!(
            (page.counts(4, 0), page.counts(0, 3), page.instructions_of(4)),
            (None, None, None)
        );
        page.set_tag(10, 2);
        page.set_tag(11, 200);
        page.set_tag(1 << 40, 1);
        assert_eq!([10, 11, 12, 1 << 40].map(|frame| page.tag(frame)), [2, 0, 0, 0]);
    }

    #[test]
    fn what_is_no_page_is_refused_with_what_is_wrong() {
        let with = |at: usize, value: u64| {
            let mut header = LAYOUT.header();
            header[at] = value;
            Layout::parse(header, LAYOUT.bytes())
                .expect_err("it must not read")
                .to_string()
        };
        assert!(with(0, 0).starts_with("not a modelled PMU: it begins with 0x0000000000000000"));
        assert!(with(1, 1).contains("of version 1; this program reads 2"));
        assert!(with(2, 1 << 40).contains("bytes"));
        assert!(with(3, u64::MAX).contains("CPUs; it must be 1 to 4096"));
        assert!(with(4, 257).contains("257 tags"));
        assert!(with(5, u64::MAX).contains("frames"));
        assert!(with(8, 8).contains("8 as the place of its tags"));
        let cut = Layout::parse(LAYOUT.header(), LAYOUT.bytes() - 1).expect_err("cut off");
        assert!(cut.to_string().contains("more than are mapped"), "{cut}");
    }

    proptest! {
        #[test]
        fn any_header_is_read_within_what_is_mapped_or_refused(
            header in prop::array::uniform10(any::<u64>()),
            small in prop::array::uniform10(0u64..3000),
            mapped in 0u64..10_000,
        ) {
            for mut header in [header, small] {
                header[0] = MAGIC;
                header[1] = VERSION;
                if let Ok(layout) = Layout::parse(header, mapped) {
                    prop_assert!(layout.bytes() <= mapped);
                }
            }
        }
    }
}
