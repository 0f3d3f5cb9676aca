//! A model of a vCPU written for clarity: sets are lists, and nothing is cached for speed. [`Vcpu`] must behave the same.

use super::tables::{Entry, LEVELS, Node};
use super::*;
use crate::tlb::{Access, Core, Hash, PageSize, Shape, Space, core};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::LazyLock;

/// The entries of each set, the newest first.
struct Lists<T> {
    sets: Vec<Vec<(u64, u16, T)>>,
    shape: Shape,
}

impl<T: Copy> Lists<T> {
    fn new(shape: Shape) -> Lists<T> {
        let sets = (0..shape.entries / shape.ways).map(|_| Vec::new()).collect();
        Lists { sets, shape }
    }

    fn set(&mut self, number: u64) -> &mut Vec<(u64, u16, T)> {
        let sets = self.sets.len() as u64;
        let above = if self.shape.hash == Hash::Fold {
            number / sets
        } else {
            0
        };
        &mut self.sets[((number ^ above) % sets) as usize]
    }

    /// Finds an entry, which counts as a use of it.
    fn find(&mut self, number: u64, space: u16) -> Option<&mut T> {
        let set = self.set(number);
        let at = set
            .iter()
            .position(|entry| (entry.0, entry.1) == (number, space))?;
        set[..=at].rotate_right(1);
        Some(&mut set[0].2)
    }

    fn fill(&mut self, number: u64, space: u16, with: T) {
        let ways = self.shape.ways;
        let set = self.set(number);
        set.insert(0, (number, space, with));
        set.truncate(ways);
    }

    /// Finds an entry; does not count as a use.
    fn entry(&mut self, number: u64, space: u16) -> Option<&mut T> {
        let set = self.set(number).iter_mut();
        set.filter(|entry| (entry.0, entry.1) == (number, space))
            .map(|entry| &mut entry.2)
            .next()
    }

    fn drop_where(&mut self, doomed: impl Fn(u64, u16) -> bool) {
        self.sets
            .iter_mut()
            .for_each(|set| set.retain(|entry| !doomed(entry.0, entry.1)));
    }
}

/// A vCPU of a guest that has only small pages. A TLB entry says whether it may be used for writing.
struct Plain {
    first: Lists<bool>,
    second: Lists<bool>,
    known: [Lists<Node>; LEVELS - 1],
    nested: Lists<()>,
    log: Buffer,
    space: Space,
    owed: bool,
    /// Accessed and dirty flags of frames.
    flags: BTreeMap<u64, (bool, bool)>,
    counts: Counts,
}

impl Plain {
    fn new(core: &Core, log: Buffer) -> Plain {
        Plain {
            first: Lists::new(core.first[0].0),
            second: Lists::new(core.second[0].0),
            known: core.walk.map(Lists::new),
            nested: Lists::new(core.nested),
            log,
            space: Space(0),
            owed: false,
            flags: BTreeMap::new(),
            counts: Counts::default(),
        }
    }

    fn access(&mut self, tables: &Tables, page: u64, access: Access) -> Step {
        let (space, write) = (self.space.0, access == Access::Write);
        let mut found = self.first.find(page, space).map(|entry| *entry);
        if found.is_none() {
            found = self.second.find(page, space).map(|entry| *entry);
            if let Some(writable) = found {
                self.first.fill(page, space, writable);
            }
        }
        if found.is_some_and(|writable| writable || !write) {
            return Step::Hit;
        }
        let mut raised = std::mem::take(&mut self.owed);
        match self.walk(tables, page, write, &mut raised) {
            Ok(writable) if found.is_none() => {
                self.first.fill(page, space, writable);
                self.second.fill(page, space, writable);
            }
            Ok(writable) => {
                for level in [&mut self.first, &mut self.second] {
                    level
                        .entry(page, space)
                        .into_iter()
                        .for_each(|entry| *entry |= writable);
                }
            }
            Err(exit) => {
                self.owed = raised;
                self.counts.exits += 1;
                return Step::Exit(exit);
            }
        }
        self.counts.walks += 1;
        if raised { Step::Raised } else { Step::Walked }
    }

    fn walk(&mut self, tables: &Tables, page: u64, write: bool, raised: &mut bool) -> Result<bool, Exit> {
        let prefix = |level: usize| page >> (9 * (level + 1));
        let known = (0..LEVELS - 1).find_map(|level| {
            let node = self.known[level].find(prefix(level), self.space.0)?;
            Some((level, *node))
        });
        let (mut level, mut node) = known.unwrap_or((LEVELS - 1, tables.root(self.space)));
        let mapped = loop {
            self.counts.references += 1;
            let frame = tables.frame_of(node);
            let which = self.log.options().tables;
            let mut logged = which == TablePages::Each;
            if self.nested.find(frame, 0).is_none() {
                self.reach(frame, true)?;
                self.nested.fill(frame, 0, ());
                logged = which != TablePages::Silent;
            }
            *raised |= logged && matches!(self.log.walked(frame), Logged::Full | Logged::Swapped);
            match tables.entry(node, level, page) {
                Entry::Nothing => return Err(Exit::Unmapped),
                Entry::Page(mapped) => break mapped,
                Entry::Table(next) => {
                    (level, node) = (level - 1, next);
                    self.known[level].fill(prefix(level), self.space.0, node);
                }
            }
        };
        let writable = self.reach(mapped.frame, write)?;
        *raised |= matches!(self.log.walked(mapped.frame), Logged::Full | Logged::Swapped);
        Ok(writable)
    }

    /// Makes the four references of a nested walk and sets the frame's flags. Returns true if the frame is dirty now.
    fn reach(&mut self, frame: u64, write: bool) -> Result<bool, Exit> {
        self.counts.references += 4;
        let (accessed, dirty) = self.flags.get(&frame).copied().unwrap_or_default();
        if !accessed || write && !dirty {
            if self.log.must_exit() {
                return Err(Exit::LogFull);
            }
            self.flags.insert(frame, (true, dirty || write));
            if write && !dirty {
                self.log.dirtied(frame);
            }
        }
        Ok(dirty || write)
    }

    fn drop_where(&mut self, page: impl Fn(u64, u16) -> bool, table: impl Fn(usize, u64, u16) -> bool) {
        self.first.drop_where(&page);
        self.second.drop_where(&page);
        for (level, known) in self.known.iter_mut().enumerate() {
            known.drop_where(|number, space| table(level, number, space));
        }
    }
}

/// An event of a vCPU.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// Accesses this many consecutive pages.
    Access(u64, u64, Access),
    Switch(Space),
    DropPage(u64),
    DropSpace,
    Flush,
    ClearFlags,
}

/// First pages of the mapped stretches: at 0, 1 GiB and 512 GiB.
const STRETCHES: [u64; 3] = [0, 1 << 18, 1 << 27];

/// Draws a page in or slightly beyond a mapped stretch.
fn page() -> impl Strategy<Value = u64> {
    (prop::sample::select(STRETCHES.to_vec()), 0_u64..4100).prop_map(|(base, page)| base + page)
}

fn act() -> impl Strategy<Value = Act> {
    let access = prop::sample::select(vec![Access::Read, Access::Write]);
    prop_oneof![
        80 => (page(), prop::sample::select(vec![1_u64, 2, 40, 700]), access)
            .prop_map(|(page, run, access)| Act::Access(page, run, access)),
        4 => (0_u16..2).prop_map(|space| Act::Switch(Space(space))),
        4 => page().prop_map(Act::DropPage),
        1 => Just(Act::DropSpace),
        1 => Just(Act::Flush),
        1 => Just(Act::ClearFlags),
    ]
}

/// A guest with two address spaces of three stretches each, both mapped to the same frames.
static GUEST: LazyLock<Guest> = LazyLock::new(|| {
    let mut guest = Guest::new(1 << 15, 256, PageSize::Small, Flags::Kept);
    for space in 0..2 {
        let of = guest.tables.space().unwrap();
        for (at, base) in STRETCHES.into_iter().enumerate() {
            for page in 0..4096 {
                let frame = (page * 40_503 + 4096 * at as u64 + space) % (1 << 14);
                guest.tables.map(of, base + page, frame, PageSize::Small).unwrap();
            }
        }
    }
    guest
});

proptest! {
    #[test]
    fn a_vcpu_does_what_one_of_plain_lists_does(
        acts in prop::collection::vec(act(), 1..300), name in prop::sample::select(vec!["cascade-lake", "zen2"]),
        mode in prop::sample::select(vec![Mode::Pml, Mode::Paml]),
        tables in prop::sample::select(vec![TablePages::Silent, TablePages::Walked, TablePages::Each]),
    ) {
        let mut guest = GUEST.clone();
        let core = core(name).unwrap();
        let log = || Buffer::new(mode, 64, Options { tables, ..Options::PUBLISHED });
        let (mut vcpu, mut plain) = (Vcpu::new(core, log()), Plain::new(core, log()));
        for act in acts {
            match act {
                Act::Access(from, run, access) => for page in from..from + run {
                    let step = vcpu.access(&mut guest, page, access);
                    prop_assert_eq!(step, plain.access(&guest.tables, page, access));
                    if matches!(step, Step::Raised | Step::Exit(Exit::LogFull)) {
                        prop_assert!(vcpu.log.contents().eq(plain.log.contents()));
                        for log in [&mut vcpu.log, &mut plain.log] {
                            log.reset();
                            log.refresh();
                        }
                    }
                },
                Act::Switch(space) => {
                    vcpu.switch(space);
                    plain.space = space;
                }
                Act::DropPage(page) => {
                    vcpu.drop_page(page);
                    let here = plain.space.0;
                    plain.drop_where(
                        |number, space| (number, space) == (page, here),
                        |level, number, space| (number, space) == (page >> (9 * (level + 1)), here),
                    );
                }
                Act::DropSpace => {
                    vcpu.drop_space();
                    let here = plain.space.0;
                    plain.drop_where(|_, space| space == here, |_, _, space| space == here);
                }
                Act::Flush => {
                    vcpu.flush();
                    plain.drop_where(|_, _| true, |_, _, _| true);
                    plain.nested.drop_where(|_, _| true);
                }
                Act::ClearFlags => {
                    guest.ept.clear_accessed();
                    guest.ept.clear_dirty();
                    plain.flags.clear();
                }
            }
            prop_assert_eq!(vcpu.counts(), plain.counts);
        }
        prop_assert!(vcpu.log.contents().eq(plain.log.contents()));
        for frame in 0..1 << 15 {
            prop_assert_eq!(guest.ept.flags(frame), plain.flags.get(&frame).copied().unwrap_or_default());
        }
    }
}
