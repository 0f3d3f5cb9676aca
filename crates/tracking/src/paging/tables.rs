//! Guest page tables: radix trees of four levels in guest memory, one for each address space.
//!
//! Each table has a guest frame, because a walk has to find the table through nested tables.

use crate::tlb::{PageSize, Space};

/// The entries of a table. An entry is 0 if it maps nothing; otherwise a frame or the index of a table, and whether it is a leaf.
type Table = [u32; 512];
const LEAF: u32 = 1 << 31;

/// Number of levels of a tree. The root is at the highest.
pub const LEVELS: usize = 4;

/// Where a page is mapped to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// Guest frame of the requested base page.
    pub frame: u64,
    /// Size of the guest's page that contains it.
    pub size: PageSize,
}

/// Index of a table. This is what a walker's caches hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Node(pub u32);

/// Content of a table's entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Nothing,
    Table(Node),
    Page(Mapped),
}

/// Why a page could not be mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmappable {
    /// No guest frame is left for a new table.
    NoFrame,
    /// Part of the page is already mapped with another page size, or the page is not aligned to its size.
    Occupied,
}

impl std::fmt::Display for Unmappable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Unmappable::NoFrame => "no guest frame is left for a page table",
            Unmappable::Occupied => {
                "a page of another size is already mapped there, or this page is not aligned to its size"
            }
        })
    }
}

impl std::error::Error for Unmappable {}

/// All page tables of a guest.
#[derive(Clone, Debug)]
pub struct Tables {
    tables: Vec<Table>,
    /// Guest frames for tables; table 0 has the first.
    frames: std::ops::Range<u64>,
    /// Root of each address space, by its number.
    roots: Vec<Node>,
}

impl Tables {
    /// Creates tables without an address space. Tables will take these guest frames, in order.
    pub fn new(frames: std::ops::Range<u64>) -> Tables {
        Tables {
            tables: Vec::new(),
            frames,
            roots: Vec::new(),
        }
    }

    /// Creates an address space.
    ///
    /// # Errors
    /// [`Unmappable::NoFrame`].
    pub fn space(&mut self) -> Result<Space, Unmappable> {
        let root = self.table()?;
        self.roots.push(root);
        Ok(Space((self.roots.len() - 1) as u16))
    }

    fn table(&mut self) -> Result<Node, Unmappable> {
        if self.tables.len() as u64 >= self.frames.end - self.frames.start {
            return Err(Unmappable::NoFrame);
        }
        self.tables.push([0; 512]);
        Ok(Node(self.tables.len() as u32 - 1))
    }

    /// Maps a page of this size to the frames from `frame` on. `page` and `frame` count base pages, and are below 2^36 and 2^31.
    ///
    /// # Errors
    /// [`Unmappable`]. The mapping is unchanged then, apart from tables that were created on the way.
    ///
    /// # Panics
    /// If there is no such space.
    pub fn map(&mut self, space: Space, page: u64, frame: u64, size: PageSize) -> Result<(), Unmappable> {
        if !(page | frame).is_multiple_of(size.pages()) || page >= 1 << 36 || frame >= u64::from(LEAF) {
            return Err(Unmappable::Occupied);
        }
        let mut node = self.roots[usize::from(space.0)];
        for level in (size as usize + 1..LEVELS).rev() {
            node = match self.entry(node, level, page) {
                Entry::Table(next) => next,
                Entry::Page(_) => return Err(Unmappable::Occupied),
                Entry::Nothing => {
                    let next = self.table()?;
                    self.tables[node.0 as usize][index(page, level)] = next.0 + 1;
                    next
                }
            };
        }
        let entry = &mut self.tables[node.0 as usize][index(page, size as usize)];
        if *entry != 0 && *entry & LEAF == 0 {
            return Err(Unmappable::Occupied);
        }
        *entry = frame as u32 | LEAF;
        Ok(())
    }

    /// Returns the root of a space.
    #[inline]
    pub(super) fn root(&self, space: Space) -> Node {
        self.roots[usize::from(space.0)]
    }

    /// Returns the guest frame of a table.
    #[inline]
    pub(super) fn frame_of(&self, node: Node) -> u64 {
        self.frames.start + u64::from(node.0)
    }

    /// Returns a page's entry in a table of this level (0: the level that maps small pages).
    #[inline]
    pub(super) fn entry(&self, node: Node, level: usize, page: u64) -> Entry {
        let entry = self.tables[node.0 as usize][index(page, level)];
        if entry & LEAF != 0 {
            let size = PageSize::ALL[level.min(2)];
            let frame = u64::from(entry & !LEAF) + (page & (size.pages() - 1));
            Entry::Page(Mapped { frame, size })
        } else if entry == 0 {
            Entry::Nothing
        } else {
            Entry::Table(Node(entry - 1))
        }
    }

    /// Returns where a page is mapped to, according to the tables alone.
    pub fn look_up(&self, space: Space, page: u64) -> Option<Mapped> {
        let mut node = self.root(space);
        for level in (0..LEVELS).rev() {
            match self.entry(node, level, page) {
                Entry::Nothing => return None,
                Entry::Table(next) => node = next,
                Entry::Page(mapped) => return Some(mapped),
            }
        }
        None
    }

    /// Returns the frames that tables occupy.
    pub fn table_frames(&self) -> std::ops::Range<u64> {
        self.frames.start..self.frames.start + self.tables.len() as u64
    }
}

#[inline]
fn index(page: u64, level: usize) -> usize {
    (page >> (9 * level)) as usize & 511
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    proptest! {
        #[test]
        fn a_page_lies_where_it_was_mapped_last(
            maps in prop::collection::vec((0_u64..4096, 0_u64..1 << 20, 0_usize..2, 0_u16..2), 1..60),
        ) {
            let mut tables = Tables::new(1 << 20..(1 << 20) + 100);
            let spaces = [tables.space().unwrap(), tables.space().unwrap()];
            let mut known = BTreeMap::new();
            for (page, frame, size, space) in maps {
                let size = PageSize::ALL[size];
                let (page, frame) = (page & !(size.pages() - 1), frame & !(size.pages() - 1));
                if tables.map(spaces[usize::from(space)], page, frame, size).is_ok() {
                    for at in 0..size.pages() {
                        known.insert((space, page + at), Mapped { frame: frame + at, size });
                    }
                }
            }
            for space in 0..2 {
                for page in 0..4608 {
                    prop_assert_eq!(tables.look_up(spaces[usize::from(space)], page), known.get(&(space, page)).copied());
                }
            }
        }
    }

    #[test]
    fn a_guest_without_frames_for_tables_gets_an_error() {
        let mut tables = Tables::new(0..4);
        let space = tables.space().unwrap();
        assert_eq!(tables.map(space, 0, 100, PageSize::Small), Ok(())); // three tables below the root
        assert_eq!(tables.map(space, 511, 101, PageSize::Small), Ok(()));
        assert_eq!(
            tables.map(space, 512, 102, PageSize::Small),
            Err(Unmappable::NoFrame)
        );
        assert_eq!(
            tables.map(space, 1, 3, PageSize::Medium),
            Err(Unmappable::Occupied)
        );
        assert_eq!(tables.space(), Err(Unmappable::NoFrame));
    }
}
