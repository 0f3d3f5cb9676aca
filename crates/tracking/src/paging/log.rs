//! Page-modification logging (PML) and page reference logging (PRL): a vCPU's buffer of guest frames.
//!
//! # PML (SDM 3C, 28.2.5)
//!
//! The index counts down from the last entry. While it is in range, a dirty flag that goes from 0 to 1 is logged. While it is out
//! of range, a reference that has to set an accessed *or* dirty flag exits instead, without setting the flag or making the
//! access.
//!
//! # PRL in its mode PAML [PRL, section 4.1]
//!
//! Each frame that a walk results in is handled as follows, whatever its flags are:
//!
//! 1. index 0: the buffer is full. The index becomes negative, an interrupt goes to a CPU of the privileged VM, the frame is
//!    not logged, and the vCPU continues;
//! 2. index negative: the handler has not emptied the buffer yet. The frame is lost;
//! 3. otherwise, the frame is logged and the index decreases.
//!
//! The handler resets the index in memory. The processor updates its own copy on request ([`Buffer::refresh`]).
//!
//! # What the paper leaves open
//!
//! | option | default | |
//! |---|---|---|
//! | [`Options::start`] | [`Start::Last`] | as PML's: the last entry. Index 0 is the full case, entry 0 never written |
//! | [`Options::buffers`] | [`Buffers::One`] | with two, a vCPU continues in the second while the first is emptied |
//! | [`Options::tables`] | [`TablePages::Silent`] | one frame per walk: the requested one |
//! | [`Options::next`] | [`NextPage::Left`] | no prefetch of the next page's translation |
//!
//! In PML's mode, start and buffers follow the manual.

/// The events that a processor logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// No events.
    Off,
    /// Dirty flags that go from 0 to 1; PRL in PML mode does the same.
    Pml,
    /// Every walk (PRL in PAML mode).
    Paml,
}

/// Where PRL's index begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// The index begins at the last entry: a buffer of 512 logs 511 frames.
    Last,
    /// The index begins one past the last entry: a buffer of 512 logs 512 frames.
    PastLast,
}

/// Number of buffers that a vCPU has for PRL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffers {
    /// The vCPU has one buffer: frames that arrive while the handler empties it are lost.
    One,
    /// The vCPU has two buffers, and fills one while the handler empties the other.
    Two,
}

/// Whether PRL logs the guest's page tables that a walk reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TablePages {
    /// PRL does not log them.
    Silent,
    /// PRL logs a table if the walker had to walk nested tables to locate it.
    Walked,
    /// PRL logs a table whenever it is read, even if its location was cached.
    Each,
}

/// Whether the walker also fetches the translation of the next page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextPage {
    /// The walker does not fetch it.
    Left,
    /// The walker fetches it into the second-level TLB, which PRL logs like any walk.
    Walked,
}

/// The points that the paper leaves open for PRL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Where the index starts.
    pub start: Start,
    /// Number of buffers of a vCPU.
    pub buffers: Buffers,
    /// Whether the guest's page tables are logged.
    pub tables: TablePages,
    /// Whether the next page's translation is prefetched.
    pub next: NextPage,
}

impl Options {
    /// The behaviour in the paper's text; for the points it leaves open, PML's behaviour.
    pub const PUBLISHED: Options = Options {
        start: Start::Last,
        buffers: Buffers::One,
        tables: TablePages::Silent,
        next: NextPage::Left,
    };
}

/// Result of logging a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logged {
    /// The frame is in the buffer, or the mode does not log it.
    Done,
    /// The frame is lost.
    Lost,
    /// The frame is lost because the buffer has just become full; an interrupt goes out.
    Full,
    /// The first buffer is full, so the frame is logged in the second; an interrupt goes out.
    Swapped,
}

/// A vCPU's log buffer.
#[derive(Clone, Debug)]
pub struct Buffer {
    mode: Mode,
    options: Options,
    entries: Vec<u64>,
    /// Index of an empty buffer.
    first_index: i32,
    /// The index in the processor.
    index: i32,
    /// The index in memory.
    index_in_memory: i32,
    /// With two buffers, the one that is full.
    full: Option<Vec<u64>>,
    /// With two buffers, an empty one to continue in.
    spare: Option<Vec<u64>>,
    lost: u64,
    logged: u64,
    filled: u64,
}

impl Buffer {
    /// Creates an empty buffer of this many entries, at least 2 and below 2^15.
    ///
    /// # Panics
    /// If the number of entries is out of range.
    pub fn new(mode: Mode, entries: u16, options: Options) -> Buffer {
        assert!(
            (2..1 << 15).contains(&entries),
            "a log of {entries} entries has no 16-bit index that can be negative"
        );
        let last = i32::from(entries) - 1;
        let first_index = match (mode, options.start) {
            (Mode::Paml, Start::PastLast) => last + 1,
            _ => last,
        };
        let entries = usize::from(entries);
        let spare = mode == Mode::Paml && options.buffers == Buffers::Two;
        Buffer {
            mode,
            options,
            entries: vec![0; entries],
            first_index,
            index: first_index,
            index_in_memory: first_index,
            full: None,
            spare: spare.then(|| vec![0; entries]),
            lost: 0,
            logged: 0,
            filled: 0,
        }
    }

    /// Returns the mode, which decides what is logged.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// Returns the buffer's options.
    pub fn options(&self) -> Options {
        self.options
    }

    /// Returns the processor's index.
    pub fn index(&self) -> i32 {
        self.index
    }

    /// Returns the numbers of frames logged, frames lost, and buffers filled so far.
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.logged, self.lost, self.filled)
    }

    /// Returns true if a reference that sets flags must exit first (PML only).
    #[inline]
    pub fn must_exit(&self) -> bool {
        self.mode == Mode::Pml && self.index < 0
    }

    /// Logs that a frame's dirty flag went from 0 to 1. Check [`Buffer::must_exit`] first.
    #[inline]
    pub fn dirtied(&mut self, frame: u64) {
        if self.mode == Mode::Pml {
            self.entries[self.index as usize] = frame;
            self.index -= 1;
            self.logged += 1;
            self.filled += u64::from(self.index < 0);
        }
    }

    /// Logs the frame that a walk resulted in.
    #[inline]
    pub fn walked(&mut self, frame: u64) -> Logged {
        if self.mode != Mode::Paml {
            return Logged::Done;
        }
        if self.index > 0 {
            let at = match self.options.start {
                Start::Last => self.index,
                Start::PastLast => self.index - 1,
            };
            self.entries[at as usize] = frame;
            self.index -= 1;
            self.logged += 1;
            return Logged::Done;
        }
        self.walked_full(frame)
    }

    fn walked_full(&mut self, frame: u64) -> Logged {
        if self.index < 0 {
            self.lost += 1;
            return Logged::Lost;
        }
        self.filled += 1;
        if let Some(spare) = self.spare.take() {
            self.full = Some(std::mem::replace(&mut self.entries, spare));
            self.index = self.first_index;
            self.walked(frame);
            return Logged::Swapped;
        }
        self.index = -1;
        self.lost += 1;
        Logged::Full
    }

    /// Returns true if a full buffer waits for the handler.
    pub fn is_full(&self) -> bool {
        self.full.is_some() || self.index < 0
    }

    /// Returns the frames in the full buffer, oldest first. The handler copies them before it calls [`Buffer::reset`].
    pub fn contents(&self) -> impl Iterator<Item = u64> {
        let (entries, index) = match &self.full {
            Some(full) => (full, -1),
            None => (&self.entries, self.index),
        };
        // Entries above the index are filled; with `PastLast`, the entry at the index as well.
        let first = match (self.mode, self.options.start) {
            (Mode::Paml, Start::Last) => index.max(0) + 1,
            (Mode::Paml, Start::PastLast) => index.max(0),
            _ => index + 1,
        };
        entries[first as usize..].iter().rev().copied()
    }

    /// Resets the index in memory, after the handler has copied the contents. With two buffers, the copied one becomes free. If
    /// the other has filled meanwhile, the vCPU continues in the free one, and the handler has another buffer to copy.
    pub fn reset(&mut self) {
        self.index_in_memory = self.first_index;
        if let Some(copied) = self.full.take() {
            if self.index < 0 {
                self.full = Some(std::mem::replace(&mut self.entries, copied));
            } else {
                self.spare = Some(copied);
                self.index_in_memory = self.index;
            }
        }
    }

    /// Loads the processor's index from memory (the paper's new instruction; for PML, a VM entry).
    pub fn refresh(&mut self) {
        self.index = self.index_in_memory;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paml(entries: u16, options: Options) -> Buffer {
        Buffer::new(Mode::Paml, entries, options)
    }

    fn copied(buffer: &Buffer) -> Vec<u64> {
        buffer.contents().collect()
    }

    #[test]
    fn prl_logs_down_to_index_1_finds_itself_full_at_0_and_loses_below() {
        let mut buffer = paml(4, Options::PUBLISHED);
        let became: Vec<Logged> = (10..16).map(|frame| buffer.walked(frame)).collect();
        use Logged::{Done, Full, Lost};
        assert_eq!(became, [Done, Done, Done, Full, Lost, Lost]);
        assert_eq!((buffer.index(), buffer.counts()), (-1, (3, 3, 1)));
        assert_eq!(copied(&buffer), [10, 11, 12]);
    }

    #[test]
    fn logging_resumes_after_reset_and_refresh_and_not_after_reset_alone() {
        let mut buffer = paml(4, Options::PUBLISHED);
        (0..4).for_each(|frame| assert_ne!(buffer.walked(frame), Logged::Lost));
        buffer.reset();
        assert_eq!(buffer.walked(9), Logged::Lost);
        buffer.refresh();
        assert_eq!(buffer.walked(9), Logged::Done);
        assert_eq!(copied(&buffer), [9]);
    }

    #[test]
    fn an_index_that_begins_past_the_last_entry_uses_them_all() {
        let start = Start::PastLast;
        let mut buffer = paml(
            4,
            Options {
                start,
                ..Options::PUBLISHED
            },
        );
        let became: Vec<Logged> = (0..5).map(|frame| buffer.walked(frame)).collect();
        assert_eq!(became[3..], [Logged::Done, Logged::Full]);
        assert_eq!(copied(&buffer), [0, 1, 2, 3]);
    }

    #[test]
    fn with_two_buffers_a_vcpu_runs_on_in_the_second() {
        let buffers = Buffers::Two;
        let mut buffer = paml(
            4,
            Options {
                buffers,
                ..Options::PUBLISHED
            },
        );
        let became: Vec<Logged> = (0..8).map(|frame| buffer.walked(frame)).collect();
        use Logged::{Done, Full, Lost, Swapped};
        assert_eq!(became, [Done, Done, Done, Swapped, Done, Done, Full, Lost]);
        assert_eq!(copied(&buffer), [0, 1, 2]);
        buffer.reset();
        buffer.refresh();
        assert!(buffer.is_full());
        assert_eq!((buffer.walked(8), copied(&buffer)), (Done, vec![3, 4, 5]));
        buffer.reset();
        buffer.refresh();
        assert_eq!((buffer.is_full(), copied(&buffer)), (false, vec![8]));
    }

    #[test]
    fn pml_takes_512_and_exits_at_the_next() {
        let mut buffer = Buffer::new(Mode::Pml, 512, Options::PUBLISHED);
        for frame in 0..512 {
            assert!(!buffer.must_exit());
            buffer.dirtied(frame);
        }
        assert!(buffer.must_exit() && copied(&buffer).into_iter().eq(0..512));
        buffer.reset();
        buffer.refresh();
        assert_eq!(
            (buffer.must_exit(), buffer.index(), copied(&buffer).len()),
            (false, 511, 0)
        );
    }
}
