//! Shared memory of a modelled PMU. It is a file that the emulator maps, and that the emulated machine sees as memory of a device
//! (ivshmem, BAR 2).
//!
//! ```text
//!   word 0   magic                     6   bytes of a line
//!        1   version                   7   byte at which counts begin
//!        2   total bytes               8   byte at which tags begin
//!        3   CPUs                      9   samples kept per CPU
//!        4   tags, including 0        10   byte at which samples begin
//!        5   frames of 4 KiB that     11   not 0 while counts are requested: otherwise nothing is modelled
//!            can be tagged            12   sample one of this many misses; 0 for none
//!
//!   counts    for each CPU: instructions, then references and misses of each tag, words
//!   samples   for each CPU: the number taken, then a ring of the latest, words: frame * 2, plus 1 if it wrote
//!   tags      for each frame: its owner, bytes; written by the reader of counts, 0 at first
//! ```
//!
//! All words are little-endian. Counts only grow, and wrap around at 2^64. They come from a model, never from hardware.
//!
//! # Samples
//!
//! As with a processor's IBS or PEBS, every n-th access that misses the LLC is recorded, with the CPU, the frame and whether it
//! wrote. Only the CPU itself writes to its ring, and it never waits for readers. Samples that were overwritten before they were
//! read are lost, and the reader learns how many.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// Kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// A read.
    Read,
    /// A write.
    Write,
}

/// Layout of the shared memory ("page") of counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// CPUs of the machine.
    pub cpus: u64,
    /// Tags, including 0 (no owner); at most [`TAGS_MAX`].
    pub tags: u64,
    /// Frames of 4 KiB from address 0 on.
    pub frames: u64,
    /// Size of a line, bytes.
    pub line_bytes: u64,
    /// Samples kept per CPU: a power of two, at most [`SAMPLES_MAX`].
    pub samples: u64,
}

/// Why memory cannot be used as a page of counters.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PageError {
    /// The memory begins with another magic.
    #[error("not a modelled PMU: it begins with {0:#018x}, not {MAGIC:#018x}")]
    Magic(u64),
    /// The layout has another version.
    #[error(
        "the modelled PMU has version {0}, but this program reads {VERSION}; use a plugin and an agent of the same build"
    )]
    Version(u64),
    /// A figure is out of range.
    #[error("the modelled PMU states {value} {what}; {expected}")]
    Figure {
        /// Name of the figure.
        what: &'static str,
        /// The figure's value.
        value: u64,
        /// The range that is valid.
        expected: String,
    },
}

/// `HNMODPMU`, read as a little-endian word.
pub const MAGIC: u64 = u64::from_le_bytes(*b"HNMODPMU");
/// Version of the layout.
pub const VERSION: u64 = 3;
/// Words before the counts.
pub const HEADER_WORDS: usize = 13;
/// The word in which readers request counts.
const WANTED_WORD: usize = 11;
/// The word with the sampling period in misses.
const PERIOD_WORD: usize = 12;
/// Maximum number of tags, including 0 (no owner).
pub const TAGS_MAX: u64 = 256;
/// Default number of samples kept per CPU: enough for a second at a million misses per second, with one in 61 sampled.
pub const SAMPLES: u64 = 1 << 14;
/// Maximum number of samples kept per CPU.
pub const SAMPLES_MAX: u64 = 1 << 20;

impl Layout {
    /// Maximum number of CPUs.
    const CPUS_MAX: u64 = 4096;
    /// Number of frames in 16 TiB.
    const FRAMES_MAX: u64 = 1 << 32;

    fn words_per_cpu(&self) -> u64 {
        1 + 2 * self.tags
    }

    /// Returns the byte offset of the samples.
    pub fn samples_at(&self) -> u64 {
        8 * (HEADER_WORDS as u64 + self.cpus * self.words_per_cpu())
    }

    /// Returns the byte offset of the tags.
    pub fn tags_at(&self) -> u64 {
        self.samples_at() + 8 * self.cpus * (1 + self.samples)
    }

    /// Returns the total size in bytes.
    pub fn bytes(&self) -> u64 {
        self.tags_at() + self.frames.next_multiple_of(8)
    }

    /// Returns the index of the word with a CPU's instructions.
    pub fn instructions_word(&self, cpu: u64) -> usize {
        HEADER_WORDS + (cpu * self.words_per_cpu()) as usize
    }

    /// Returns the index of the word with a CPU's references to memory with this tag. The next word has the misses.
    pub fn references_word(&self, cpu: u64, tag: u8) -> usize {
        self.instructions_word(cpu) + 1 + 2 * usize::from(tag)
    }

    /// Returns the index of the word with the number of samples that a CPU has taken. Its ring follows.
    fn taken_word(&self, cpu: u64) -> usize {
        (self.samples_at() / 8 + cpu * (1 + self.samples)) as usize
    }

    /// Returns the index of the word with a CPU's sample of this number.
    fn sample_word(&self, cpu: u64, number: u64) -> usize {
        self.taken_word(cpu) + 1 + (number & (self.samples - 1)) as usize
    }

    /// Returns the header: the first words of a page with this layout.
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
            self.samples,
            self.samples_at(),
            0,
            0,
        ]
    }

    /// Parses the header of memory of this many bytes. Nothing is trusted, because any process with access to the memory could
    /// have written anything.
    ///
    /// # Errors
    /// [`PageError`], which names the invalid value.
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
            samples,
            samples_at,
            _,
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
        within("samples", samples, 1, SAMPLES_MAX)?;
        let whole = samples.next_power_of_two();
        within("samples, which must be a power of two", samples, whole, whole)?;
        let layout = Layout {
            cpus,
            tags,
            frames,
            line_bytes,
            samples,
        };
        for (what, value, place) in [
            ("as the offset of its counts", counts_at, 8 * HEADER_WORDS as u64),
            ("as the offset of its samples", samples_at, layout.samples_at()),
            ("as the offset of its tags", tags_at, layout.tags_at()),
        ] {
            within(what, value, place, place)?;
        }
        within("bytes", bytes, layout.bytes(), mapped_bytes.max(layout.bytes()))?;
        within("bytes, more than are mapped", bytes, 0, mapped_bytes)?;
        Ok(layout)
    }
}

/// A page of counters in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Page<'a> {
    layout: Layout,
    words: &'a [AtomicU64],
    tags: &'a [AtomicU8],
}

/// Counts of a CPU for memory with one tag. Two readings can be subtracted (wrapping).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Lines requested from the LLC.
    pub references: u64,
    /// Requested lines that missed.
    pub misses: u64,
}

/// An access that missed the LLC and was sampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sampled {
    /// Frame of 4 KiB; below the page's [`Layout::frames`].
    pub frame: u64,
    /// Kind of the access.
    pub wanted: Use,
}

/// Samples of a CPU since the last reading.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// The samples, oldest first.
    pub samples: Vec<Sampled>,
    /// Number of samples that were overwritten before they were read, or whose frame is outside of the page.
    pub lost: u64,
}

impl<'a> Page<'a> {
    /// Creates a page from the words of its header, counts and samples, and the bytes of its tags.
    ///
    /// # Panics
    /// If there are fewer words or bytes than the layout needs.
    pub fn new(layout: Layout, words: &'a [AtomicU64], tags: &'a [AtomicU8]) -> Page<'a> {
        assert!(words.len() as u64 * 8 >= layout.tags_at() && tags.len() as u64 >= layout.frames);
        Page { layout, words, tags }
    }

    /// Returns the page's layout.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Writes the header, after which readers accept the page.
    pub fn begin(&self) {
        // The magic, which comes first, is written last.
        for (word, value) in self.words.iter().zip(self.layout.header()).rev() {
            word.store(value, Ordering::Release);
        }
    }

    /// Requests counts, which starts the model.
    pub fn want(&self) {
        self.words[WANTED_WORD].store(1, Ordering::Release);
    }

    /// Stops requesting counts, after which the model costs nothing.
    pub fn rest(&self) {
        self.words[WANTED_WORD].store(0, Ordering::Release);
    }

    /// Sets the sampling period: one of this many misses is sampled, or none if it is 0. For accesses at a constant stride,
    /// choose a period coprime to the stride, so that all accesses are sampled equally.
    pub fn sample_every(&self, misses: u64) {
        self.words[PERIOD_WORD].store(misses, Ordering::Release);
    }

    /// Returns the sampling period in misses; 0 for none.
    #[inline]
    pub fn sample_period(&self) -> u64 {
        self.words[PERIOD_WORD].load(Ordering::Relaxed)
    }

    /// Returns true if counts are requested.
    pub fn is_wanted(&self) -> bool {
        self.words[WANTED_WORD].load(Ordering::Acquire) != 0
    }

    /// Returns the tag of a frame's owner; 0 if the page does not have the frame.
    #[inline]
    pub fn tag(&self, frame: u64) -> u8 {
        let tag = self
            .tags
            .get(frame as usize)
            .map_or(0, |tag| tag.load(Ordering::Relaxed));
        // The emulated machine writes tags. A tag beyond the layout's counts is treated as no owner.
        if u64::from(tag) < self.layout.tags { tag } else { 0 }
    }

    /// Sets the tag of a frame's owner; ignores a frame that the page does not have.
    pub fn set_tag(&self, frame: u64, tag: u8) {
        if let Some(place) = self.tags.get(frame as usize) {
            place.store(tag, Ordering::Relaxed);
        }
    }

    /// Clears the owner of all frames.
    pub fn clear_tags(&self) {
        self.tags.iter().for_each(|tag| tag.store(0, Ordering::Relaxed));
    }

    /// Adds to a word that only one thread writes.
    #[inline]
    fn add(&self, word: usize, count: u64) {
        let word = &self.words[word];
        word.store(
            word.load(Ordering::Relaxed).wrapping_add(count),
            Ordering::Release,
        );
    }

    /// Counts instructions that a CPU has begun. Only the CPU's own thread may call this.
    #[inline]
    pub fn instructions(&self, cpu: u64, count: u64) {
        self.add(self.layout.instructions_word(cpu), count);
    }

    /// Counts a line that a CPU requested from the LLC, for the tag of the line's frame. Only the CPU's own thread may call this.
    #[inline]
    pub fn referenced(&self, cpu: u64, tag: u8, missed: bool) {
        let word = self.layout.references_word(cpu, tag);
        self.add(word, 1);
        if missed {
            self.add(word + 1, 1);
        }
    }

    /// Records a sampled access of a CPU. Only the CPU's own thread may call this.
    #[inline]
    pub fn sampled(&self, cpu: u64, sample: Sampled) {
        let taken = &self.words[self.layout.taken_word(cpu)];
        let number = taken.load(Ordering::Relaxed);
        let word = sample.frame << 1 | u64::from(sample.wanted == Use::Write);
        // A reader that sees this sample also sees the count of samples before it, and so knows which one it overwrote.
        self.words[self.layout.sample_word(cpu, number)].store(word, Ordering::Release);
        taken.store(number.wrapping_add(1), Ordering::Release);
    }

    /// Returns the number of samples a CPU has taken so far; 0 if there is no such CPU.
    pub fn samples_taken(&self, cpu: u64) -> u64 {
        if cpu >= self.layout.cpus {
            return 0;
        }
        self.words[self.layout.taken_word(cpu)].load(Ordering::Acquire)
    }

    /// Returns a CPU's samples from number `since` on, and updates `since`. Returns no samples if the number went backwards.
    pub fn take_samples(&self, cpu: u64, since: &mut u64) -> Taken {
        let (before, now) = (*since, self.samples_taken(cpu));
        *since = now;
        let grown = now.wrapping_sub(before);
        if cpu >= self.layout.cpus || grown > u64::MAX / 2 {
            return Taken::default();
        }
        let kept = grown.min(self.layout.samples);
        let words: Vec<u64> = (0..kept)
            .map(|at| {
                let number = now.wrapping_sub(kept - at);
                self.words[self.layout.sample_word(cpu, number)].load(Ordering::Acquire)
            })
            .collect();
        // The CPU has continued meanwhile: this many of the oldest samples were overwritten, and one may be just being written.
        let late = self.samples_taken(cpu).wrapping_sub(now).saturating_add(1);
        let over = (kept.saturating_add(late))
            .saturating_sub(self.layout.samples)
            .min(kept);
        let samples: Vec<Sampled> = words[over as usize..]
            .iter()
            .map(|word| Sampled {
                frame: word >> 1,
                wanted: if word & 1 == 0 { Use::Read } else { Use::Write },
            })
            .filter(|sample| sample.frame < self.layout.frames)
            .collect();
        Taken {
            lost: grown - samples.len() as u64,
            samples,
        }
    }

    /// Returns the instructions of a CPU so far; `None` if there is no such CPU.
    pub fn instructions_of(&self, cpu: u64) -> Option<u64> {
        (cpu < self.layout.cpus)
            .then(|| self.words[self.layout.instructions_word(cpu)].load(Ordering::Relaxed))
    }

    /// Returns a CPU's counts for memory of a tag so far; `None` if there is no such CPU or tag.
    pub fn counts(&self, cpu: u64, tag: u8) -> Option<Counts> {
        let there = cpu < self.layout.cpus && u64::from(tag) < self.layout.tags;
        there.then(|| {
            let word = self.layout.references_word(cpu, tag);
            // The CPU continues meanwhile. References are read last, so there are never fewer than misses.
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
        samples: 8,
    };

    /// Returns words and tags of a zeroed page.
    fn memory() -> (Vec<AtomicU64>, Vec<AtomicU8>) {
        let words = (0..LAYOUT.tags_at() / 8).map(|_| AtomicU64::new(0));
        (words.collect(), (0..1000).map(|_| AtomicU8::new(0)).collect())
    }

    #[test]
    fn a_page_reads_as_it_was_written() {
        // The expected size: 13 words of header, 4 times 1 + 2 * 3 words of counts, 4 times 1 + 8 words of samples, and 1000
        // bytes of tags, rounded up to words.
        assert_eq!((LAYOUT.tags_at(), LAYOUT.bytes()), (8 * 77, 8 * 77 + 1000));
        let (words, tags) = memory();
        let page = Page::new(LAYOUT, &words, &tags);
        page.begin();
        let header = std::array::from_fn(|at| words[at].load(Ordering::Relaxed));
        assert_eq!(Layout::parse(header, LAYOUT.bytes()), Ok(LAYOUT));
        assert!(!page.is_wanted());
        page.want();
        assert!(page.is_wanted());
        page.rest();
        assert!(!page.is_wanted());
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

    fn read_of(frame: u64) -> Sampled {
        Sampled {
            frame,
            wanted: Use::Read,
        }
    }

    #[test]
    fn samples_come_once_in_order_and_those_written_over_are_counted() {
        let (words, tags) = memory();
        let page = Page::new(LAYOUT, &words, &tags);
        let mut since = 0;
        let write = Sampled {
            frame: 999,
            wanted: Use::Write,
        };
        page.sampled(2, read_of(5));
        page.sampled(2, write);
        page.sampled(3, read_of(7));
        let taken = page.take_samples(2, &mut since);
        assert_eq!((taken.samples, taken.lost), (vec![read_of(5), write], 0));
        assert_eq!(page.take_samples(2, &mut since), Taken::default());
        (0..20).for_each(|frame| page.sampled(2, read_of(frame)));
        // The ring keeps 8; the CPU may be overwriting the oldest right now.
        let taken = page.take_samples(2, &mut since);
        let last: Vec<Sampled> = (13..20).map(read_of).collect();
        assert_eq!((taken.samples, taken.lost), (last, 13));
    }

    /// Miri also runs this test, with other orders of threads and memory accesses.
    #[test]
    fn what_is_taken_while_it_is_written_is_true_and_comes_once() {
        const ALL: u64 = if cfg!(miri) { 30 } else { 1000 };
        let (words, tags) = memory();
        let page = Page::new(LAYOUT, &words, &tags);
        let (mut since, mut last, mut count) = (0, None, 0);
        std::thread::scope(|scope| {
            scope.spawn(|| (0..ALL).for_each(|frame| page.sampled(0, read_of(frame))));
            while count < ALL {
                let taken = page.take_samples(0, &mut since);
                for sample in &taken.samples {
                    assert!(last < Some(sample.frame), "{last:?} then {sample:?}");
                    last = Some(sample.frame);
                }
                count += taken.samples.len() as u64 + taken.lost;
                // All lost samples are older than the returned ones.
                assert!(taken.samples.is_empty() || last == Some(count - 1));
                std::hint::spin_loop();
            }
        });
        assert_eq!(count, ALL);
    }

    #[test]
    fn samples_that_cannot_be_are_left_out() {
        let (words, tags) = memory();
        let page = Page::new(LAYOUT, &words, &tags);
        let mut since = 0;
        page.sampled(0, read_of(1000));
        page.sampled(0, read_of(1));
        let taken = page.take_samples(0, &mut since);
        assert_eq!((taken.samples, taken.lost), (vec![read_of(1)], 1));
        since = 7;
        assert_eq!(page.take_samples(0, &mut since), Taken::default(), "backwards");
        assert_eq!(since, 2);
        assert_eq!(page.take_samples(4, &mut since), Taken::default(), "no such CPU");
        let taken = &words[LAYOUT.taken_word(1)];
        taken.store(u64::MAX / 2, Ordering::Relaxed);
        assert_eq!(page.take_samples(1, &mut 0).lost, u64::MAX / 2 - 7);
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
        assert!(with(1, 1).contains("has version 1, but this program reads 3"));
        assert!(with(2, 1 << 40).contains("bytes"));
        assert!(with(3, u64::MAX).contains("CPUs; it must be 1 to 4096"));
        assert!(with(4, 257).contains("257 tags"));
        assert!(with(5, u64::MAX).contains("frames"));
        assert!(with(8, 8).contains("8 as the offset of its tags"));
        assert!(with(9, 12).contains("12 samples"));
        assert!(with(10, 8).contains("8 as the offset of its samples"));
        let cut = Layout::parse(LAYOUT.header(), LAYOUT.bytes() - 1).expect_err("cut off");
        assert!(cut.to_string().contains("more than are mapped"), "{cut}");
    }

    proptest! {
        #[test]
        fn any_header_is_read_within_what_is_mapped_or_refused(
            header in prop::array::uniform13(any::<u64>()),
            small in prop::array::uniform13(0u64..3000),
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
