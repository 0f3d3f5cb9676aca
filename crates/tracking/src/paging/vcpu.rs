//! Models a vCPU's accesses: TLBs, then a nested walk with its caches, flags and log.
//!
//! # The walk
//!
//! The guest's tables are read, beginning at the lowest level that the walker's caches hold. Each table is in a guest frame,
//! whose location comes from the nested cache or from a walk of nested tables; reading a table counts as a write (SDM 3C,
//! 28.2.4). Then nested tables are walked to the page itself. With cold caches and small pages a walk makes 24 references to
//! memory: five for each of four tables, and four for the page.
//!
//! # Left out
//!
//! Flags in the guest's own tables, caches for nested entries above the leaf, several walks at a time.

use super::ept::{Denied, Reference};
use super::log::{Buffer, Logged, NextPage, Options, TablePages};
use super::tables::{Entry, LEVELS, Mapped, Node};
use super::{Ept, Flags, Tables};
use crate::tlb::{Access, Array, Core, Found, PageSize, Shape, Space, Tlb};

/// A guest's memory: its own page tables and the nested ones. All its vCPUs share it.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Maps pages to guest frames.
    pub tables: Tables,
    /// Maps guest frames to the host's, and has the flags that the hypervisor tracks.
    pub ept: Ept,
    /// If flags are kept, reading a guest table counts as a write.
    flags: Flags,
}

impl Guest {
    /// Creates a guest of this many frames. Its page tables are in the last ones; nested tables use pages of one size.
    pub fn new(frames: u64, table_frames: u64, size: PageSize, flags: Flags) -> Guest {
        Guest {
            tables: Tables::new(frames.saturating_sub(table_frames)..frames),
            ept: Ept::new(frames, size, flags),
            flags,
        }
    }
}

/// Why a vCPU left the guest. The access was not made, and must be repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// PML's buffer is full.
    LogFull,
    /// Nested tables do not allow the access.
    Violation {
        /// The guest frame.
        frame: u64,
        /// The reason.
        denied: Denied,
    },
    /// The guest's tables do not map the page, which is a fault for the guest's kernel.
    Unmapped,
}

/// Result of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The TLBs had the translation.
    Hit,
    /// The vCPU made a walk.
    Walked,
    /// The vCPU made a walk, and sends an interrupt to the log's handler.
    Raised,
    /// The vCPU exited; the access was not made.
    Exit(Exit),
}

/// Counts of a vCPU. Two counts of one vCPU can be subtracted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of walks, not counting prefetches.
    pub walks: u64,
    /// References to memory that walks made: reads of guest and nested tables.
    pub references: u64,
    /// Number of exits.
    pub exits: u64,
}

/// A cache of the table entries that lead to tables of one level.
#[derive(Clone, Debug)]
struct Known {
    array: Array,
    nodes: Vec<Node>,
    shift: u32,
    /// Key and table of the last use, unless an entry was dropped since. Using that entry again would change nothing.
    newest: Option<(u64, Node)>,
}

impl Known {
    fn new(shape: Shape, level: usize) -> Known {
        let array = Array::new(shape);
        Known {
            nodes: vec![Node(0); array.slots()],
            array,
            shift: 9 * (level as u32 + 1),
            newest: None,
        }
    }

    #[inline]
    fn key(&self, page: u64, space: Space) -> (u64, u64) {
        let number = page >> self.shift;
        (number, (number << 16 | u64::from(space.0)) << 1)
    }

    #[inline]
    fn find(&mut self, page: u64, space: Space) -> Option<Node> {
        let (number, key) = self.key(page, space);
        if let Some((newest, node)) = self.newest
            && newest == key
        {
            return Some(node);
        }
        let (slot, _) = self.array.find(number, key)?;
        self.newest = Some((key, self.nodes[slot]));
        Some(self.nodes[slot])
    }

    #[inline]
    fn put(&mut self, page: u64, space: Space, node: Node) {
        let (number, key) = self.key(page, space);
        let slot = self.array.fill(number, key);
        self.nodes[slot] = node;
        self.newest = Some((key, node));
    }

    /// Drops the entry that leads to the table of this page.
    fn drop_page(&mut self, page: u64, space: Space) {
        let (number, key) = self.key(page, space);
        self.array.drop_one(number, key);
        self.newest = None;
    }

    /// Drops the entries of all matching address spaces.
    fn drop_where(&mut self, doomed: impl Fn(Space) -> bool) {
        self.array.drop_where(|key| doomed(Space((key >> 1) as u16)));
        self.newest = None;
    }
}

/// A vCPU, on a core of its own.
#[derive(Clone, Debug)]
pub struct Vcpu {
    tlb: Tlb,
    /// Caches of tables by level; level 0 has the tables that map small pages.
    known: [Known; LEVELS - 1],
    /// Cache of nested translations of guest tables' frames. An entry is marked if the frame may be written.
    nested: Array,
    /// The vCPU's log.
    pub log: Buffer,
    options: Options,
    space: Space,
    /// The table of small pages that was read last, and the pages that it maps. It is the newest entry in its caches, so reading
    /// it again changes nothing there.
    last: Option<(u64, Node)>,
    /// Whether a walk that exited has filled the log. The interrupt then goes out with the next walk that does not exit.
    owed: bool,
    counts: Counts,
}

impl Vcpu {
    /// Creates a vCPU with empty caches, in address space 0.
    pub fn new(core: &Core, log: Buffer) -> Vcpu {
        Vcpu {
            tlb: Tlb::new(core),
            known: [0, 1, 2].map(|level| Known::new(core.walk[level], level)),
            nested: Array::new(core.nested),
            options: log.options(),
            log,
            space: Space::default(),
            last: None,
            owed: false,
            counts: Counts::default(),
        }
    }

    /// Returns the vCPU's counts so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Returns the vCPU's TLBs.
    pub fn tlb(&self) -> &Tlb {
        &self.tlb
    }

    /// Switches to another address space. Cached entries are tagged with their space, so nothing is dropped.
    #[inline]
    pub fn switch(&mut self, space: Space) {
        if self.space != space {
            self.space = space;
            self.last = None;
        }
    }

    /// Drops everything that is cached for the current address space, as a processor without tags does on a switch.
    pub fn drop_space(&mut self) {
        let space = self.space;
        self.last = None;
        self.tlb.drop_space(space);
        for known in &mut self.known {
            known.drop_where(|of| of == space);
        }
    }

    /// Drops a page's translation, and the cached table entries that lead to it.
    pub fn drop_page(&mut self, page: u64) {
        self.last = None;
        self.tlb.drop_page(page, self.space);
        for known in &mut self.known {
            known.drop_page(page, self.space);
        }
    }

    /// Drops everything cached, including nested translations (`INVEPT`).
    pub fn flush(&mut self) {
        self.last = None;
        self.tlb.drop_all();
        self.nested.drop_where(|_| true);
        for known in &mut self.known {
            known.drop_where(|_| true);
        }
    }

    /// Accesses a page.
    #[inline]
    pub fn access(&mut self, guest: &mut Guest, page: u64, access: Access) -> Step {
        match self.look_up(page, access) {
            Found::First | Found::Second => Step::Hit,
            missing => self.walk(guest, page, access, missing),
        }
    }

    /// Looks a page up in the TLBs only, which needs no guest. This is the first step of an access, and mostly the last.
    #[inline]
    pub fn look_up(&mut self, page: u64, access: Access) -> Found {
        self.tlb.look_up(page, self.space, access)
    }

    /// Walks to a page. `found` is the result of the preceding [`Vcpu::look_up`], and neither `First` nor `Second`.
    pub fn walk(&mut self, guest: &mut Guest, page: u64, access: Access, found: Found) -> Step {
        let mut raised = std::mem::take(&mut self.owed);
        match self.walk_through(guest, page, access, found, &mut raised) {
            Ok(()) => {
                self.counts.walks += 1;
                if raised { Step::Raised } else { Step::Walked }
            }
            Err(exit) => {
                self.owed = raised;
                self.counts.exits += 1;
                Step::Exit(exit)
            }
        }
    }

    /// Walks to a page. Sets `raised` if an interrupt goes out.
    #[inline]
    fn walk_through(
        &mut self,
        guest: &mut Guest,
        page: u64,
        access: Access,
        found: Found,
        raised: &mut bool,
    ) -> Result<(), Exit> {
        let (level, node, mapped) = match self.last {
            Some((pages, node)) if pages == page >> 9 => {
                self.counts.references += 1;
                if self.options.tables == TablePages::Each {
                    *raised |= is_raised(self.log.walked(guest.tables.frame_of(node)));
                }
                match guest.tables.entry(node, 0, page) {
                    Entry::Page(mapped) => (0, node, mapped),
                    Entry::Nothing | Entry::Table(_) => return Err(Exit::Unmapped),
                }
            }
            _ => self.read_tables(guest, page, raised)?,
        };
        let reference = self.reach(&mut guest.ept, mapped.frame, access)?;
        let size = mapped.size.min(reference.size);
        let writable = if reference.writable {
            Access::Write
        } else {
            Access::Read
        };
        self.tlb.enter(page, size, self.space, writable, found);
        *raised |= is_raised(self.log.walked(mapped.frame));
        if self.options.next == NextPage::Walked && level == 0 && page & 511 != 511 {
            *raised |= self.prefetch(guest, node, page + 1);
        }
        Ok(())
    }

    /// Reads the guest's tables down to a page's entry. Returns the table's level, the table, and where the page is mapped to.
    #[inline(never)]
    fn read_tables(
        &mut self,
        guest: &mut Guest,
        page: u64,
        raised: &mut bool,
    ) -> Result<(usize, Node, Mapped), Exit> {
        self.last = None;
        let (mut level, mut node) = self.deepest(guest, page);
        loop {
            let frame = guest.tables.frame_of(node);
            *raised |= self.read_table(guest, frame)?;
            match guest.tables.entry(node, level, page) {
                Entry::Page(mapped) => {
                    self.last = (level == 0).then_some((page >> 9, node));
                    return Ok((level, node, mapped));
                }
                Entry::Nothing => return Err(Exit::Unmapped),
                Entry::Table(next) => {
                    level -= 1;
                    node = next;
                    self.known[level].put(page, self.space, node);
                }
            }
        }
    }

    /// Returns the lowest cached table on the way to a page, and its level.
    #[inline]
    fn deepest(&mut self, guest: &Guest, page: u64) -> (usize, Node) {
        for (level, known) in self.known.iter_mut().enumerate() {
            if let Some(node) = known.find(page, self.space) {
                return (level, node);
            }
        }
        (LEVELS - 1, guest.tables.root(self.space))
    }

    /// Reads a guest table. Returns true if an interrupt goes out.
    #[inline]
    fn read_table(&mut self, guest: &mut Guest, frame: u64) -> Result<bool, Exit> {
        self.counts.references += 1;
        let (key, access) = match guest.flags {
            Flags::Kept => (frame << 1 | 1, Access::Write),
            Flags::Ignored => (frame << 1, Access::Read),
        };
        let known = self.nested.find(frame, frame << 1);
        let logged = if known.is_some() {
            self.options.tables == TablePages::Each
        } else {
            self.reach(&mut guest.ept, frame, access)?;
            self.nested.fill(frame, key);
            self.options.tables != TablePages::Silent
        };
        Ok(logged && is_raised(self.log.walked(frame)))
    }

    /// Walks nested tables to a frame, sets the frame's flags, and logs that.
    #[inline(always)]
    fn reach(&mut self, ept: &mut Ept, frame: u64, access: Access) -> Result<Reference, Exit> {
        let considered = ept.consider(frame, access);
        let reference = considered.map_err(|denied| Exit::Violation { frame, denied })?;
        self.counts.references += (LEVELS - reference.size as usize) as u64;
        if reference.updates {
            if self.log.must_exit() {
                return Err(Exit::LogFull);
            }
            ept.update(frame, reference);
            if reference.dirties {
                self.log.dirtied(frame);
            }
        }
        Ok(reference)
    }

    /// Prefetches the next page's translation, as a read, unless that would exit. Returns true if an interrupt goes out.
    fn prefetch(&mut self, guest: &mut Guest, node: Node, page: u64) -> bool {
        if self.tlb.knows(page, self.space) {
            return false;
        }
        let Entry::Page(mapped) = guest.tables.entry(node, 0, page) else {
            return false;
        };
        let Ok(reference) = guest.ept.consider(mapped.frame, Access::Read) else {
            return false;
        };
        if reference.updates {
            if self.log.must_exit() {
                return false;
            }
            guest.ept.update(mapped.frame, reference);
        }
        let writable = if reference.writable {
            Access::Write
        } else {
            Access::Read
        };
        let size = mapped.size.min(reference.size);
        self.tlb.enter_second(page, size, self.space, writable);
        is_raised(self.log.walked(mapped.frame))
    }
}

fn is_raised(logged: Logged) -> bool {
    matches!(logged, Logged::Full | Logged::Swapped)
}
