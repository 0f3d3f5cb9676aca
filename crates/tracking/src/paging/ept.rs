//! Nested page tables (EPT): the rights in each entry, and its accessed and dirty flags.
//!
//! Flags follow the manual (SDM 3C, 28.2.4). If they are enabled, every entry used in a translation gets its accessed flag, and
//! on a write the leaf gets its dirty flag. Flags stay until software clears them, which does not affect translations cached in a
//! TLB.
//!
//! An entry is a byte. Entries of higher levels, each for 512 GiB or more, are not modelled, and count as accessed.

use crate::tlb::{Access, PageSize};

const PRESENT: u8 = 1;
const WRITABLE: u8 = 2;
const ACCESSED: u8 = 4;
const DIRTY: u8 = 8;
/// The entry maps a page of its level, rather than leading to a table.
const LEAF: u8 = 16;

/// Whether the processor keeps accessed and dirty flags (bit 6 of the EPT pointer).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flags {
    /// The processor keeps the flags.
    Kept,
    /// The processor keeps no flags: none is set, and nothing is logged.
    Ignored,
}

/// Why an access is denied, which causes an EPT violation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The page is not mapped.
    NotPresent,
    /// The page must not be written.
    NotWritable,
}

/// The effects that a reference to a page has on its entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reference {
    /// Size of the page.
    pub size: PageSize,
    /// Whether an accessed or dirty flag has to be set.
    pub updates: bool,
    /// Whether a dirty flag goes from 0 to 1.
    pub dirties: bool,
    /// Whether a TLB may use the translation for later writes without another walk.
    pub writable: bool,
}

/// The nested page tables of a VM.
#[derive(Clone, Debug)]
pub struct Ept {
    /// Entries of each level: 4 KiB, 2 MiB, 1 GiB.
    levels: [Vec<u8>; 3],
    flags: Flags,
    frames: u64,
}

impl Ept {
    /// Creates tables that map this many guest frames, using writable pages of one size.
    pub fn new(frames: u64, size: PageSize, flags: Flags) -> Ept {
        let level = |level: PageSize| {
            let leaf = if level == size { LEAF } else { 0 };
            vec![PRESENT | WRITABLE | leaf; frames.div_ceil(level.pages()) as usize]
        };
        Ept {
            levels: PageSize::ALL.map(level),
            flags,
            frames,
        }
    }

    /// Returns the number of guest frames.
    pub fn frames(&self) -> u64 {
        self.frames
    }

    /// Returns the size of the page that maps a frame.
    #[inline]
    pub fn size_of(&self, frame: u64) -> PageSize {
        self.leaf(frame).0
    }

    /// Returns size and entry of the page that maps a frame: the lowest entry that is a leaf. Tables below a large page are
    /// present here, but have no leaves.
    #[inline(always)]
    fn leaf(&self, frame: u64) -> (PageSize, u8) {
        let small = self.levels[0][frame as usize];
        if small & LEAF != 0 {
            return (PageSize::Small, small);
        }
        let medium = self.levels[1][(frame >> 9) as usize];
        if medium & LEAF != 0 {
            return (PageSize::Medium, medium);
        }
        (PageSize::Large, self.levels[2][(frame >> 18) as usize])
    }

    #[inline]
    fn entry(&mut self, frame: u64, level: PageSize) -> &mut u8 {
        &mut self.levels[level as usize][(frame >> level.order()) as usize]
    }

    /// Returns the effects of a reference to a frame, but does not apply them. Frames from [`Ept::frames`] on are not mapped.
    ///
    /// # Errors
    /// [`Denied`]: the processor exits with an EPT violation, without setting a flag.
    #[inline(always)]
    pub fn consider(&self, frame: u64, access: Access) -> Result<Reference, Denied> {
        if frame >= self.frames {
            return Err(Denied::NotPresent);
        }
        let (size, leaf) = self.leaf(frame);
        if leaf & PRESENT == 0 {
            return Err(Denied::NotPresent);
        }
        let write = access == Access::Write;
        if write && leaf & WRITABLE == 0 {
            return Err(Denied::NotWritable);
        }
        if self.flags == Flags::Ignored {
            return Ok(Reference {
                size,
                updates: false,
                dirties: false,
                writable: leaf & WRITABLE != 0,
            });
        }
        let dirties = write && leaf & DIRTY == 0;
        Ok(Reference {
            size,
            // If a page's flag is set, so are those of the entries that lead to it: all are set and cleared together.
            updates: dirties || leaf & ACCESSED == 0,
            dirties,
            writable: leaf & WRITABLE != 0 && (write || leaf & DIRTY != 0),
        })
    }

    /// Sets the flags that this reference has to set.
    #[inline]
    pub fn update(&mut self, frame: u64, reference: Reference) {
        for level in &PageSize::ALL[reference.size as usize..] {
            *self.entry(frame, *level) |= ACCESSED;
        }
        if reference.dirties {
            *self.entry(frame, reference.size) |= DIRTY;
        }
    }

    /// Returns whether the page that maps a frame was accessed, and whether it was written.
    pub fn flags(&self, frame: u64) -> (bool, bool) {
        let (_, leaf) = self.leaf(frame);
        (leaf & ACCESSED != 0, leaf & DIRTY != 0)
    }

    /// Clears the dirty flags of all pages. To see the next write, the caller must also flush TLBs.
    pub fn clear_dirty(&mut self) {
        self.each(|entry| entry & !DIRTY);
    }

    /// Clears the dirty flag of the page that maps a frame.
    pub fn clear_dirty_of(&mut self, frame: u64) {
        let size = self.size_of(frame);
        *self.entry(frame, size) &= !DIRTY;
    }

    /// Clears accessed flags of all pages.
    pub fn clear_accessed(&mut self) {
        self.each(|entry| entry & !ACCESSED);
    }

    /// Unmaps all pages (present-bit invalidation). The tables above them stay.
    pub fn invalidate_all(&mut self) {
        self.take_from_pages(PRESENT);
    }

    /// Unmaps the page that maps a frame.
    pub fn invalidate(&mut self, frame: u64) {
        let size = self.size_of(frame);
        *self.entry(frame, size) &= !PRESENT;
    }

    /// Forbids writing to all pages.
    pub fn protect_all(&mut self) {
        self.take_from_pages(WRITABLE);
    }

    /// Removes a right from all leaf entries.
    fn take_from_pages(&mut self, right: u8) {
        self.each(|entry| if entry & LEAF != 0 { entry & !right } else { entry });
    }

    /// Maps the page of a frame again, with all rights.
    pub fn restore(&mut self, frame: u64) {
        let size = self.size_of(frame);
        *self.entry(frame, size) |= PRESENT | WRITABLE;
    }

    /// Splits the 2 MiB page that maps a frame into small pages, which inherit its flags. Pages of other sizes stay.
    pub fn split(&mut self, frame: u64) {
        if self.size_of(frame) != PageSize::Medium {
            return;
        }
        let entry = *self.entry(frame, PageSize::Medium);
        let first = (frame >> 9 << 9) as usize;
        let end = (first + 512).min(self.frames as usize);
        self.levels[0][first..end].fill(entry);
        *self.entry(frame, PageSize::Medium) = PRESENT | WRITABLE | (entry & ACCESSED);
    }

    fn each(&mut self, change: impl Fn(u8) -> u8) {
        for level in &mut self.levels {
            level.iter_mut().for_each(|entry| *entry = change(*entry));
        }
    }
}
